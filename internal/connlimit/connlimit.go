// Package connlimit bounds how many connections the listeners of a process may have, so
// that its descriptors do not run out: clients that do nothing but connect cost others
// nothing but this bound. How large it is, is the caller's business.
package connlimit

import (
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Descriptors is how many files the process may have open, which the Go runtime
// has raised as far as it may; math.MaxInt64: unknown.
func Descriptors() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return math.MaxInt64
	}
	return int64(min(uint64(limit.Cur), math.MaxInt64))
}

// mostSpare bounds Spare.
const mostSpare = 10_000

// Spare is how many of so many descriptors are not for clients, but for files and what
// else is open: a quarter, at most 10000.
func Spare(descriptors int64) int64 { return min(descriptors/4, mostSpare) }

// Part is how many connections a listener may have: one in so many parts of the descriptors
// that are not spare, at most most, at least 1.
func Part(descriptors, parts, most int64) int {
	return int(max(1, min((descriptors-Spare(descriptors))/parts, most)))
}

// Slots are the connections that listeners may have together. The zero value has
// no bound.
type Slots struct {
	Most int // set once; 0: no bound

	open    atomic.Int64
	refused atomic.Uint64
}

// Open is how many connections there are.
func (s *Slots) Open() int64 { return s.open.Load() }

// Refused is how many connections found no slot.
func (s *Slots) Refused() uint64 { return s.refused.Load() }

// Listener is a listener whose connections take slots. One that finds none is closed.
type Listener struct {
	net.Listener
	Slots *Slots
	Plain bool // it is for HTTP in clear: who finds no slot is told so
}

const busyBody = `{"message":"TOO_MANY_CONNECTIONS"}`

var busyAnswer = fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s", len(busyBody), busyBody)

// Accept returns the next connection that has a slot.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.Slots.open.Add(1) <= int64(l.Slots.Most) || l.Slots.Most == 0 {
			return &Conn{Conn: c, of: l.Slots}, nil
		}
		l.Slots.open.Add(-1)
		l.Slots.refused.Add(1)
		if l.Plain { // it fits into the socket's buffer; if not, so be it
			_ = c.SetWriteDeadline(time.Now().Add(time.Millisecond))
			_, _ = c.Write(busyAnswer)
		}
		_ = c.Close() // it is not ours
	}
}

// Conn is a connection that gives its slot back.
type Conn struct {
	net.Conn
	of   *Slots
	once sync.Once
}

// CloseWrite is for net/http, which ends its side first where a client still sends: a
// reset would take the answer along.
func (c *Conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.once.Do(func() { c.of.open.Add(-1) })
	return c.Conn.Close()
}
