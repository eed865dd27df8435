// Package bounded limits what hostile peers can take. Listener bounds the connections of a
// process's listeners, so clients that only connect cannot exhaust its descriptors. Read
// and Decode (answer.go) bound the memory of an answer: a gigabyte of text, or a few bytes
// that decode to a hundred bytes each. The caller chooses the bounds, and bounds the time.
package bounded

import (
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/container"
)

// Descriptors returns the maximum number of open files of the process, which the Go
// runtime has raised to the hard limit. math.MaxInt64 means unknown.
func Descriptors() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return math.MaxInt64
	}
	return int64(min(uint64(limit.Cur), math.MaxInt64))
}

// mostSpare bounds Spare.
const mostSpare = 10_000

// Spare returns the number of descriptors reserved for files and other uses: a quarter,
// at most mostSpare.
func Spare(descriptors int64) int64 { return min(descriptors/4, mostSpare) }

// Part returns the maximum number of connections of a listener: the unreserved
// descriptors divided by parts, at least 1 and at most most.
func Part(descriptors, parts, limit int64) int {
	return int(max(1, min((descriptors-Spare(descriptors))/parts, limit)))
}

// Slots limits the connections of several listeners together. The zero value has no
// limit.
type Slots struct {
	// Set before use.
	Most int // 0: no bound
	// EvictUnauthenticated makes slots of unauthenticated peers available to new
	// connections. A peer is unauthenticated until Known. If no slot is free, a new
	// connection takes the slot of the oldest unauthenticated peer. So such peers only take
	// each other's slots. A legitimate peer must authenticate before Most newer connections
	// arrive. Slots per address were rejected: one attacker may have many addresses, and
	// many brokers may share one address.
	EvictUnauthenticated bool

	open             atomic.Int64
	refused, evicted atomic.Uint64

	mu struct {
		sync.Mutex
		unauthenticated container.List[*Conn] // the oldest first
	}
}

// Open returns the number of connections.
func (s *Slots) Open() int64 { return s.open.Load() }

// Refused returns the number of connections without a slot.
func (s *Slots) Refused() uint64 { return s.refused.Load() }

// Evicted returns the number of unauthenticated connections closed for new connections.
func (s *Slots) Evicted() uint64 { return s.evicted.Load() }

// take gives c a slot; false without a free slot.
func (s *Slots) take(c *Conn) bool {
	full := s.open.Add(1) > int64(s.Most) && s.Most > 0
	if full && !s.evict() {
		s.open.Add(-1)
		s.refused.Add(1)
		return false
	}
	if s.EvictUnauthenticated {
		s.mu.Lock()
		s.mu.unauthenticated.Push(&c.place, c)
		c.unauthenticated = true
		s.mu.Unlock()
	}
	return true
}

// evict closes the oldest unauthenticated connection; false without such a connection.
func (s *Slots) evict() bool {
	s.mu.Lock()
	oldest := s.mu.unauthenticated.Front()
	if oldest != nil {
		oldest.markAuthenticatedLocked()
	}
	s.mu.Unlock()
	if oldest == nil {
		return false
	}
	s.evicted.Add(1)
	_ = oldest.Close() // the evicted peer's error does not matter
	return true
}

// Listener is a listener whose connections take slots. A connection without a slot is
// closed.
type Listener struct {
	net.Listener
	Slots *Slots
	Plain bool // HTTP without TLS: a client without a slot receives an answer
}

const busyBody = `{"message":"TOO_MANY_CONNECTIONS"}`

var busyAnswer = fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s", len(busyBody), busyBody)

// Accept returns the next connection with a slot.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		conn := &Conn{Conn: c, slots: l.Slots}
		if l.Slots.take(conn) {
			return conn, nil
		}
		if l.Plain { // the answer fits into the socket's buffer, or is lost
			_ = c.SetWriteDeadline(time.Now().Add(time.Millisecond))
			_, _ = c.Write(busyAnswer)
		}
		_ = c.Close() // the client's error does not matter
	}
}

// Conn is a connection that returns its slot on Close.
type Conn struct {
	net.Conn
	slots *Slots
	once  sync.Once

	// Guarded by of.mu.
	unauthenticated bool // in of.mu.unauthenticated, at place
	place           container.Element[*Conn]
	closed          bool
	afterClose      func() // called after Close; may be nil
}

// Then sets a function to call after Close. If the connection is already closed, Then
// calls the function at once. Call Then at most once.
func (c *Conn) Then(afterClose func()) {
	c.slots.mu.Lock()
	closed := c.closed
	c.afterClose = afterClose
	c.slots.mu.Unlock()
	if closed {
		afterClose()
	}
}

// address is the address of a connection's peer; Known finds the connection through it.
type address struct {
	net.Addr
	conn *Conn
}

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return address{c.Conn.RemoteAddr(), c} }

// Known marks the peer at a connection's RemoteAddr as authenticated, so its connection
// keeps its slot.
func Known(peer net.Addr) {
	if a, ours := peer.(address); ours {
		a.conn.markAuthenticated()
	}
}

func (c *Conn) markAuthenticated() {
	c.slots.mu.Lock()
	defer c.slots.mu.Unlock()
	c.markAuthenticatedLocked()
}

func (c *Conn) markAuthenticatedLocked() {
	if c.unauthenticated {
		c.unauthenticated = false
		c.place.Remove()
	}
}

// CloseWrite is for net/http, which closes its side first if a client still sends. A
// reset would destroy the answer.
func (c *Conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.once.Do(func() {
		c.slots.open.Add(-1)
		c.slots.mu.Lock()
		c.markAuthenticatedLocked() // as far as evict is concerned
		c.closed = true
		afterClose := c.afterClose
		c.slots.mu.Unlock()
		if afterClose != nil {
			afterClose()
		}
	})
	return c.Conn.Close()
}
