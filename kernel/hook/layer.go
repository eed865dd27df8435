package hook

import (
	"encoding/binary"
	"errors"
	"io"
	"net"

	"github.com/srtm-io/srtm/kernel/stamp"
)

// stamped is a stream whose bytes have arrival times. Used by one reader.
type stamped interface {
	// Offset returns the offset of the next byte the stream's user will get.
	Offset() int64
	// arrivalOf is Arrival without counting.
	arrivalOf(start, end int64) stamp.Arrival
	// raw returns the connection underneath.
	raw() *Conn
}

// Layer reads a stream that is decoded from another one, such as plain text
// from TLS or a decompressed stream, and knows when the bytes it was decoded
// from had arrived. It has the methods of a Conn and is used like one; its
// offsets count decoded bytes from 0.
type Layer struct {
	// set once
	under stamped
	r     io.Reader
	exact bool // under never runs ahead of what r has decoded

	// owned by the reader
	reads stamp.Reads[int64] // of decoded bytes, and the offset of under then
	from  int64              // the offset of under that the last stamp began at
}

// Layer returns the stream that r decodes from c, for a decoder that reads
// from c ahead of what it needs: stamps are upper bounds. TLS is better served
// by Records.
func (c *Conn) Layer(r io.Reader) *Layer { return &Layer{under: c, r: r, from: c.Offset()} }

// Layer returns the stream that r decodes from l.
func (l *Layer) Layer(r io.Reader) *Layer { return &Layer{under: l, r: r, from: l.Offset()} }

// Read reads decoded bytes.
func (l *Layer) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if n > 0 {
		l.reads.Note(l.reads.End()+int64(n), l.under.Offset())
	}
	return n, err
}

// Offset returns how many decoded bytes Read has returned.
func (l *Layer) Offset() int64 { return l.reads.End() }

// Arrival returns when the message that occupies the decoded offsets [start,
// end) was complete on this host, as Conn.Arrival does.
func (l *Layer) Arrival(start, end int64) stamp.Arrival {
	return l.raw().answer(l.arrivalOf(start, end))
}

func (l *Layer) arrivalOf(start, end int64) stamp.Arrival {
	to, ok := l.reads.At(end - 1)
	if !ok {
		to = l.under.Offset()
	}
	// The read that brought the message's first byte decoded what under gave
	// after the read before.
	if from, ok := l.reads.Before(start); ok {
		l.from = max(l.from, from)
	}
	a := l.under.arrivalOf(min(l.from, to-1), to)
	if !l.exact && a.Source == stamp.Exact {
		a.Source = stamp.UpperBound
	}
	return a
}

func (l *Layer) raw() *Conn { return l.under.raw() }

// Ignore does what Conn.Ignore does.
func (l *Layer) Ignore() { l.raw().Ignore() }

// Release does what Conn.Release does.
func (l *Layer) Release() { l.raw().Release() }

// recordHeader is the size of a TLS record's header: type, version (2), length
// of what follows (2).
const recordHeader = 5

// Records is the connection to give to tls.Server: it hands out a Conn's bytes
// without ever going past the TLS record under way. So when TLS has decoded
// some plain text, what it was fed ends with the record that carried it, and
// the stamps of Records.Layer are as good as the Conn's. Only the framing of
// TLS is looked at, which is the same in all versions.
type Records struct {
	net.Conn // everything but reading

	// set once
	c *Conn

	// owned by the reader
	buf        []byte
	r, w       int   // what of buf is not handed out yet
	left       int   // of the record under way
	handed     int64 // stream offset of buf[r]
	pendingErr error // of the last read, due when buf is empty
}

// recordBuffer is how much Records reads at once; it serves several small
// records with one system call.
const recordBuffer = 2048

// Records returns the connection for tls.Server. The Conn must not be read in
// any other way from then on. Requires: the Conn reads a net.Conn.
func (c *Conn) Records() *Records {
	return &Records{Conn: c.conn.(net.Conn), c: c, buf: make([]byte, recordBuffer), handed: c.Offset()}
}

// Layer returns the plain text that t, a tls.Conn over x, decodes.
func (x *Records) Layer(t io.Reader) *Layer {
	return &Layer{under: x, r: t, exact: true, from: x.handed}
}

// Read implements net.Conn.
func (x *Records) Read(p []byte) (int, error) {
	want := 1
	if x.left == 0 {
		want = recordHeader
	}
	for x.w-x.r < want && x.pendingErr == nil {
		x.w = copy(x.buf, x.buf[x.r:x.w])
		x.r = 0
		var n int
		n, x.pendingErr = x.c.Read(x.buf[x.w:])
		x.w += n
	}
	have := x.buf[x.r:x.w]
	if len(have) == 0 || len(have) < want && passes(x.pendingErr) {
		err := x.pendingErr
		x.pendingErr = nil // a deadline may be moved
		return 0, err
	}
	if x.left == 0 {
		x.left = len(have) // a piece of a header, and no more to come
		if len(have) >= recordHeader {
			x.left = recordHeader + int(binary.BigEndian.Uint16(have[3:]))
		}
	}
	n := copy(p[:min(len(p), x.left)], have)
	x.r += n
	x.left -= n
	x.handed += int64(n)
	return n, nil
}

// passes reports whether a read may be tried again.
func passes(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// Buffered returns how many bytes were read and not handed out.
func (x *Records) Buffered() int { return x.w - x.r }

// Move does what Conn.Move does.
func (x *Records) Move(nc net.Conn) {
	x.c.Move(nc)
	x.Conn = nc
}

// Offset returns the stream offset up to which bytes were handed out.
func (x *Records) Offset() int64 { return x.handed }

func (x *Records) arrivalOf(start, end int64) stamp.Arrival { return x.c.arrivalOf(start, end) }
func (x *Records) raw() *Conn                               { return x.c }
