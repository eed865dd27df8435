package hook

import (
	"net"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// Conn reads a connection and knows when its bytes arrived. Only the connection's reader uses it.
type Conn struct {
	// set once
	s     *Stamper
	shard uint32

	// owned by the reader
	conn  readable
	tr    tracker                // nil: the time after the read
	reads stamp.Reads[mono.Time] // the time of each read
	last  stamp.Arrival          // the last answer
}

// Read reads like net.Conn.Read, and records the offset and the time.
func (c *Conn) Read(p []byte) (n int, err error) {
	end := c.reads.End()
	if c.tr != nil {
		n, err = c.tr.read(p, end)
	} else {
		n, err = c.conn.Read(p)
	}
	if n > 0 {
		c.reads.Note(end+int64(n), clock.Mono())
	}
	return n, err
}

// Offset returns the number of bytes that Read has returned, which is the stream offset of the next
// byte.
func (c *Conn) Offset() int64 { return c.reads.End() }

// Arrival returns when the message at the stream offsets [start, end) was complete on this host,
// with no gap before it. This is the time of the segment that carried the last byte or, if the
// network reordered segments, of the segment that filled the last gap.
//
// Arrivals of a connection never decrease, because a stream delivers its bytes in order. So an
// earlier message with a less accurate time bounds the time of later messages. An arrival is never
// later than the Read that returned the message's last byte, if Arrival is called before four
// further Reads.
//
// Requires: start < end <= Offset(); start not below the previous call's start.
func (c *Conn) Arrival(start, end int64) stamp.Arrival {
	return c.answer(c.arrivalOf(start, end))
}

// answer keeps arrivals in order and counts them.
func (c *Conn) answer(a stamp.Arrival) stamp.Arrival {
	if a.At.Before(c.last.At) {
		a.At, a.Source = c.last.At, max(a.Source, c.last.Source)
	}
	c.last = a
	c.s.arrivals[c.shard].bySource[a.Source].Add(1)
	return a
}

func (c *Conn) arrivalOf(start, end int64) stamp.Arrival {
	read, ok := c.reads.At(end - 1)
	if !ok {
		// Only an incorrect caller requests unread bytes. The current time is the only time that is
		// not too early for them.
		read = clock.Mono()
	}
	a := stamp.Arrival{At: read, Source: stamp.Read}
	if c.tr != nil && ok {
		if k, found := c.tr.arrival(start, end, read); found {
			a = k
			if read.Before(a.At) {
				a.At = read
			}
		}
	}
	return a
}

func (c *Conn) raw() *Conn { return c }

// Move continues reading from nc, another descriptor of the same socket. Offsets and arrival times
// continue.
func (c *Conn) Move(nc net.Conn) {
	c.conn = nc
	if c.tr == nil {
		return
	}
	rc, err := rawConn(nc)
	if err != nil { // nc is not a socket, contrary to the contract
		c.Release()
		return
	}
	c.tr.move(nc, rc)
}

// Ignore stops stamping, as for a subscriber's connection, which saves work for each segment.
// Arrival then returns the time after the read.
func (c *Conn) Ignore() {
	if c.tr == nil {
		return
	}
	if err := c.tr.ignore(); err != nil {
		// The connection is closing, or its segments are still recorded at some cost.
		c.s.log.Debug("arrival stamps: connection not ignored", "remote", c.conn.RemoteAddr(), "error", err)
	}
	c.tr.release()
	c.tr = nil
}

// Release frees the connection's kernel resources. The reader calls Release before the connection
// is closed, or another goroutine calls Release after the reader has ended. Arrival and Read must
// not be called afterwards. A second call does nothing.
func (c *Conn) Release() {
	if c.tr != nil {
		c.tr.release()
		c.tr = nil
	}
}
