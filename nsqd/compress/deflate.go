package compress

import (
	"bufio"
	"fmt"
	"io"

	"github.com/klauspost/compress/flate"
)

// Deflate packs as raw DEFLATE, with a sync flush at the end of each Append.
// Make it with NewDeflate.
//
// A DEFLATE compressor holds about a megabyte, whatever its level. A publisher
// is sent nothing but OK, so Deflate begins without one, packing each Append
// by itself, and becomes a real compressor with Remember. The peer sees one
// stream: blocks need not refer to those before them.
type Deflate struct {
	// set once
	level int

	w   *flate.Writer // nil until Remember
	out appender      // what w writes to
}

// appender is an io.Writer that cannot fail.
type appender struct{ b []byte }

func (a *appender) Write(p []byte) (int, error) {
	a.b = append(a.b, p...)
	return len(p), nil
}

// NewDeflate returns the start of a stream. Requires: level in [1, 9].
func NewDeflate(level int) *Deflate {
	if level < 1 || level > 9 {
		panic(fmt.Sprintf("pack: deflate level %d", level))
	}
	return &Deflate{level: level}
}

// Remember makes the following Appends use the level and what was packed by
// those before them.
func (d *Deflate) Remember() {
	if d.w != nil {
		return
	}
	w, err := flate.NewWriter(&d.out, d.level)
	if err != nil {
		panic(fmt.Sprintf("pack: deflate level %d: %v", d.level, err))
	}
	d.w = w
}

// Append implements Packer.
func (d *Deflate) Append(dst, src []byte) []byte {
	if len(src) == 0 {
		return dst
	}
	d.out.b = dst
	var err error
	if d.w == nil {
		err = flate.StatelessDeflate(&d.out, src, false, nil)
	} else {
		if _, err = d.w.Write(src); err == nil {
			err = d.w.Flush()
		}
	}
	if err != nil {
		panic(fmt.Sprintf("pack: deflate into memory: %v", err))
	}
	dst, d.out.b = d.out.b, nil
	return dst
}

// FromDeflate returns what r, in raw DEFLATE, decompresses to. Like FromSnappy
// it reads no further than it needs, and an error of r ends it.
func FromDeflate(r *bufio.Reader) io.Reader { return flate.NewReader(r) }
