package hook

import (
	"encoding/binary"
	"errors"
	"io"
	"net"

	"github.com/srtm-io/srtm/kernel/stamp"
)

// stamped is a stream whose bytes have arrival times. It has one reader.
type stamped interface {
	// Offset returns the offset of the next byte that the stream returns.
	Offset() int64
	// arrivalOf is Arrival without counting.
	arrivalOf(start, end int64) stamp.Arrival
	// raw returns the connection underneath.
	raw() *Conn
}

// Layer reads a stream that is decoded from another stream, such as plain text from TLS, or
// decompressed data. It knows when the encoded bytes arrived. A Layer has the methods of a Conn and
// is used like a Conn. Its offsets count decoded bytes from 0.
type Layer struct {
	// set once
	lower stamped
	r     io.Reader
	exact bool // r never reads bytes of lower before it decodes them

	// owned by the reader
	reads      stamp.Reads[int64] // decoded bytes, and under's offset at each read
	stampStart int64              // under's offset at the beginning of the last stamp
}

// Layer returns the stream that r decodes from c. The decoder may read ahead, so stamps are upper
// bounds. Use Records for TLS.
func (c *Conn) Layer(r io.Reader) *Layer { return &Layer{lower: c, r: r, stampStart: c.Offset()} }

// Layer returns the stream that r decodes from l.
func (l *Layer) Layer(r io.Reader) *Layer { return &Layer{lower: l, r: r, stampStart: l.Offset()} }

// Read reads decoded bytes.
func (l *Layer) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if n > 0 {
		l.reads.Note(l.reads.End()+int64(n), l.lower.Offset())
	}
	return n, err
}

// Offset returns how many decoded bytes Read has returned.
func (l *Layer) Offset() int64 { return l.reads.End() }

// Arrival returns when the message at the decoded offsets [start, end) was complete on this host,
// as Conn.Arrival does.
func (l *Layer) Arrival(start, end int64) stamp.Arrival {
	return l.raw().answer(l.arrivalOf(start, end))
}

func (l *Layer) arrivalOf(start, end int64) stamp.Arrival {
	to, ok := l.reads.At(end - 1)
	if !ok {
		to = l.lower.Offset()
	}
	// The read that returned the message's first byte decoded bytes of under that came after the
	// previous read.
	if from, ok := l.reads.Before(start); ok {
		l.stampStart = max(l.stampStart, from)
	}
	a := l.lower.arrivalOf(min(l.stampStart, to-1), to)
	if !l.exact && a.Source == stamp.Exact {
		a.Source = stamp.UpperBound
	}
	return a
}

func (l *Layer) raw() *Conn { return l.lower.raw() }

// Ignore does what Conn.Ignore does.
func (l *Layer) Ignore() { l.raw().Ignore() }

// Release does what Conn.Release does.
func (l *Layer) Release() { l.raw().Release() }

// recordHeader is the size of a TLS record's header: type, version (2), length of the rest (2).
const recordHeader = 5

// Records is the connection to pass to tls.Server. It returns a Conn's bytes without ever reading
// past the current TLS record. So when TLS has decoded plain text, its input ends with the record
// that carried the text, and stamps of Records.Layer are as accurate as the Conn's. Records only
// parses the framing of TLS, which is the same in all versions.
type Records struct {
	net.Conn // everything except reading

	// set once
	c *Conn

	// owned by the reader
	buf        []byte
	r, w       int   // buf[r:w] has not been returned yet
	recordLeft int   // bytes left in the current record
	handed     int64 // stream offset of buf[r]
	pendingErr error // error of the last read, returned once buf is empty
}

// recordBuffer is the size of one read, in bytes. It covers several small records with one system
// call.
const recordBuffer = 2048

// Records returns the connection for tls.Server. Afterwards the Conn must only be read through it.
// Requires: the Conn reads a net.Conn.
func (c *Conn) Records() *Records {
	return &Records{Conn: c.conn.(net.Conn), c: c, buf: make([]byte, recordBuffer), handed: c.Offset()}
}

// Layer returns the plain text that t, a tls.Conn over x, decodes.
func (x *Records) Layer(t io.Reader) *Layer {
	return &Layer{lower: x, r: t, exact: true, stampStart: x.handed}
}

// Read implements net.Conn.
func (x *Records) Read(p []byte) (int, error) {
	want := 1
	if x.recordLeft == 0 {
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
		x.pendingErr = nil // the deadline may be moved
		return 0, err
	}
	if x.recordLeft == 0 {
		x.recordLeft = len(have) // an incomplete header, without more input
		if len(have) >= recordHeader {
			x.recordLeft = recordHeader + int(binary.BigEndian.Uint16(have[3:]))
		}
	}
	n := copy(p[:min(len(p), x.recordLeft)], have)
	x.r += n
	x.recordLeft -= n
	x.handed += int64(n)
	return n, nil
}

// passes reports whether a read may be tried again.
func passes(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// Buffered returns the number of bytes that were read and not returned yet.
func (x *Records) Buffered() int { return x.w - x.r }

// Move does what Conn.Move does.
func (x *Records) Move(nc net.Conn) {
	x.c.Move(nc)
	x.Conn = nc
}

// Offset returns the stream offset of the next byte to return.
func (x *Records) Offset() int64 { return x.handed }

func (x *Records) arrivalOf(start, end int64) stamp.Arrival { return x.c.arrivalOf(start, end) }
func (x *Records) raw() *Conn                               { return x.c }
