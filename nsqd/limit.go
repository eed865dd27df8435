package main

import (
	"fmt"
	"io/fs"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Of the descriptors that a process may have, a quarter, but no more than
// mostSpare, is not for clients of the protocol: half of that is for HTTP, the
// rest for files of messages, timers of contracts, and what else is open.
const mostSpare = 10_000

// perConnection is what memory a connection is reckoned to take, in bytes: a plain
// one that is idle takes less, one with TLS and compression more.
const perConnection = 16 << 10

// fit sets the numbers of connections that are not given to what the process may
// have of descriptors and of memory, in bytes; math.MaxInt64: it is not limited.
func (o *options) fit(descriptors, memory int64) {
	spare := min(descriptors/4, mostSpare)
	if o.conn.MaxConnections == 0 {
		o.conn.MaxConnections = int(max(1, min(descriptors-spare, memory/perConnection, math.MaxInt32)))
	}
	if o.maxHTTPConnections == 0 {
		o.maxHTTPConnections = int(max(1, spare/2))
	}
}

// softLimit is the limit of memory to set, in bytes, of --memory-limit or by default;
// 0: none, since it is set already or it is unknown how much memory there is.
func softLimit(flag int64, env string, root fs.FS) int64 {
	switch {
	case env != "": // the runtime has read it
		return 0
	case flag > 0:
		return flag
	}
	return defaultLimit(root)
}

// descriptors is how many files the process may have open, which the Go runtime
// has raised as far as it may; math.MaxInt64: unknown.
func descriptors() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return math.MaxInt64
	}
	return int64(min(uint64(limit.Cur), math.MaxInt64))
}

// slots are the connections that listeners may have together. The zero value has
// no bound.
type slots struct {
	most int // set once; 0: no bound

	// Atomic.
	open    atomic.Int64
	refused atomic.Uint64
}

// bounded is a listener for HTTP whose connections take slots. One that finds none
// is told so, if that need not be encrypted, and closed.
type bounded struct {
	net.Listener
	*slots
	plain bool
}

const busyBody = `{"message":"TOO_MANY_CONNECTIONS"}`

var busyAnswer = fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s", len(busyBody), busyBody)

func (l *bounded) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.slots.open.Add(1) <= int64(l.most) || l.most == 0 {
			return &slot{Conn: c, of: l.slots}, nil
		}
		l.slots.open.Add(-1)
		l.refused.Add(1)
		if l.plain { // it fits into the socket's buffer; if not, so be it
			_ = c.SetWriteDeadline(time.Now().Add(time.Millisecond))
			_, _ = c.Write(busyAnswer)
		}
		_ = c.Close() // it is not ours
	}
}

// slot is a connection that gives its slot back.
type slot struct {
	net.Conn
	of   *slots
	once sync.Once
}

func (s *slot) Close() error {
	s.once.Do(func() { s.of.open.Add(-1) })
	return s.Conn.Close()
}
