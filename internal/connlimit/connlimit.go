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

	"github.com/srtm-io/srtm/internal/list"
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
	// Set once.
	Most int // 0: no bound
	// Strangers: a peer is a stranger until Known. Where there is no slot left, a new connection
	// gets that of the stranger who connected first. So strangers who keep connecting take each
	// other's slots, and a peer that can show who it is has until they have connected Most
	// times. A share of the slots for each address lost to this: one stranger may have many
	// addresses, and many brokers one.
	Strangers bool

	open             atomic.Int64
	refused, evicted atomic.Uint64

	mu struct {
		sync.Mutex
		strangers list.List[*Conn] // the one that connected first in front
	}
}

// Open is how many connections there are.
func (s *Slots) Open() int64 { return s.open.Load() }

// Refused is how many connections found no slot.
func (s *Slots) Refused() uint64 { return s.refused.Load() }

// Evicted is how many connections of strangers were closed for new ones.
func (s *Slots) Evicted() uint64 { return s.evicted.Load() }

// take gives c a slot; false: there is none.
func (s *Slots) take(c *Conn) bool {
	full := s.open.Add(1) > int64(s.Most) && s.Most > 0
	if full && !s.evict() {
		s.open.Add(-1)
		s.refused.Add(1)
		return false
	}
	if s.Strangers {
		s.mu.Lock()
		s.mu.strangers.Push(&c.place, c)
		c.stranger = true
		s.mu.Unlock()
	}
	return true
}

// evict closes the connection of the stranger that connected first; false: there is no stranger.
func (s *Slots) evict() bool {
	s.mu.Lock()
	oldest := s.mu.strangers.Front()
	if oldest != nil {
		oldest.knownLocked()
	}
	s.mu.Unlock()
	if oldest == nil {
		return false
	}
	s.evicted.Add(1)
	_ = oldest.Close() // it is not ours
	return true
}

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
		conn := &Conn{Conn: c, of: l.Slots}
		if l.Slots.take(conn) {
			return conn, nil
		}
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

	// Guarded by of.mu.
	stranger bool // it is in of.mu.strangers, by place
	place    list.Element[*Conn]
	closed   bool
	then     func() // called after Close; may be nil
}

// Then has do called once the connection is closed, at once if it is. It may be called once.
func (c *Conn) Then(do func()) {
	c.of.mu.Lock()
	closed := c.closed
	c.then = do
	c.of.mu.Unlock()
	if closed {
		do()
	}
}

// address is that of a connection's peer, by which Known finds the connection.
type address struct {
	net.Addr
	conn *Conn
}

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return address{c.Conn.RemoteAddr(), c} }

// Known says that the peer at an address, as its connection has it, has shown who it is: its
// connection keeps its slot.
func Known(peer net.Addr) {
	if a, ours := peer.(address); ours {
		a.conn.known()
	}
}

func (c *Conn) known() {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	c.knownLocked()
}

func (c *Conn) knownLocked() {
	if c.stranger {
		c.stranger = false
		c.place.Remove()
	}
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
	c.once.Do(func() {
		c.of.open.Add(-1)
		c.of.mu.Lock()
		c.knownLocked() // as far as evict goes
		c.closed = true
		then := c.then
		c.of.mu.Unlock()
		if then != nil {
			then()
		}
	})
	return c.Conn.Close()
}
