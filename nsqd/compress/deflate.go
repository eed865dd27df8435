package compress

import (
	"bufio"
	"fmt"
	"io"

	"github.com/klauspost/compress/flate"
)

// Deflate packs as raw DEFLATE, with a sync flush at the end of each Append. Make it with
// NewDeflate.
//
// A DEFLATE compressor holds about a megabyte at any level. A publisher receives only OK, so
// Deflate begins without a compressor and packs each Append by itself. After Remember it uses a
// compressor. The peer sees one stream, because blocks need not refer to earlier blocks.
type Deflate struct {
	// Set once.
	level int

	w   *flate.Writer // nil until Remember
	out appender      // destination of w
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

// Remember makes later Appends use the level and refer to earlier Appends.
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

// FromDeflate decompresses r, raw DEFLATE. Like FromSnappy it reads no further than necessary,
// and an error of r ends it.
func FromDeflate(r *bufio.Reader) io.Reader { return flate.NewReader(r) }
