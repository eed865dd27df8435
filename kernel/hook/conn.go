package hook

import (
	"net"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// Conn reads a connection and knows when its bytes arrived. It is used by the
// connection's one reader, never by two goroutines at once.
type Conn struct {
	// set once
	s     *Stamper
	shard uint32

	// owned by the reader
	conn  readable
	tr    tracker                // nil: the time after the read
	reads stamp.Reads[mono.Time] // when each returned
	last  stamp.Arrival          // answered
}

// Read reads from the connection like net.Conn.Read, and notes how far and
// when.
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

// Offset returns how many bytes Read has returned: the stream offset of the
// next byte it will return.
func (c *Conn) Offset() int64 { return c.reads.End() }

// Arrival returns when the message that occupies the stream offsets [start,
// end) was complete on this host and nothing ahead of it was missing: the time
// of the segment that carried its last byte, or of the one that filled the last
// hole before that if the network reordered them. A stream hands its bytes over
// in order, so a message has not arrived before those ahead of it: arrivals of
// one connection never decrease, also where the time of an earlier message is
// known less well, which then bounds that of the later one. An arrival is never
// later than the Read that returned the message's last byte, as long as it is
// asked for before four further Reads.
//
// Requires: start < end <= Offset(); start not below the start of the call
// before.
func (c *Conn) Arrival(start, end int64) stamp.Arrival {
	return c.answer(c.arrivalOf(start, end))
}

// answer keeps answers in order, and counts them.
func (c *Conn) answer(a stamp.Arrival) stamp.Arrival {
	if a.At.Before(c.last.At) {
		a.At, a.Source = c.last.At, max(a.Source, c.last.Source)
	}
	c.last = a
	c.s.arrivals[c.shard].by[a.Source].Add(1)
	return a
}

func (c *Conn) arrivalOf(start, end int64) stamp.Arrival {
	read, ok := c.reads.At(end - 1)
	if !ok {
		// Only a mistaken caller asks for bytes not read yet; now is the only
		// time known not to be too early for them.
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

// Move has the Conn go on reading from nc, which is another descriptor of the
// same socket: offsets and arrival times go on, too.
func (c *Conn) Move(nc net.Conn) {
	c.conn = nc
	if c.tr == nil {
		return
	}
	rc, err := rawConn(nc)
	if err != nil { // not a socket's, whatever the caller says
		c.Release()
		return
	}
	c.tr.move(nc, rc)
}

// Ignore says that no further stamps are wanted, as on a subscriber's
// connection: it spares every segment the work of being noted. Arrival then
// answers with the time after the read.
func (c *Conn) Ignore() {
	if c.tr == nil {
		return
	}
	if err := c.tr.ignore(); err != nil {
		// The connection is closing, or goes on being noted at some cost.
		c.s.log.Debug("arrival stamps: connection not ignored", "remote", c.conn.RemoteAddr(), "error", err)
	}
	c.tr.release()
	c.tr = nil
}

// Release gives back what the kernel side holds for the connection. It must
// be called before the connection is closed, by the reader or after it ended;
// Arrival and Read may not be called after it. A second call does nothing.
func (c *Conn) Release() {
	if c.tr != nil {
		c.tr.release()
		c.tr = nil
	}
}
