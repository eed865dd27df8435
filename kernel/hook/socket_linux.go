package hook

import (
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/rawfd"
)

// ErrAgain reports that a Socket has nothing to read now. It is a temporary net.Error, so TLS
// continues after it.
var ErrAgain error = errRetry{}

type errRetry struct{}

func (errRetry) Error() string   { return "nothing to read now" }
func (errRetry) Timeout() bool   { return true }
func (errRetry) Temporary() bool { return true }

// MoveToSocket makes the underlying Conn read from a Socket. Then x has no net.Conn.
func (x *Records) MoveToSocket(to Socket) {
	x.Conn, x.c.conn = nil, &to
	if x.c.tr != nil {
		x.c.tr.move(&to, rawSocket{&to})
	}
}

// Socket is a nonblocking stream socket that an event loop watches instead of Go's poller. It does
// not own the descriptor.
type Socket struct{ FD int }

// TrackSocket is Track for a Socket. The Conn's Read never blocks; it returns ErrAgain instead.
func (s *Stamper) TrackSocket(x Socket) *Conn {
	return s.follow(&x, rawSocket{&x}, nil)
}

// Read reads the available bytes.
func (x *Socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	switch n, errno := rawfd.Read(x.FD, p); {
	case errno == unix.EAGAIN:
		return 0, ErrAgain
	case errno != 0:
		return 0, os.NewSyscallError("read", errno)
	case n == 0:
		return 0, io.EOF
	default:
		return n, nil
	}
}

// RemoteAddr returns the peer's address, for display, or nil if there is none.
func (x *Socket) RemoteAddr() net.Addr {
	sa, err := unix.Getpeername(x.FD)
	if err != nil {
		return nil
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return &net.TCPAddr{IP: sa.Addr[:], Port: sa.Port}
	case *unix.SockaddrInet6:
		return &net.TCPAddr{IP: sa.Addr[:], Port: sa.Port}
	}
	return nil
}

// rawSocket is a Socket as a syscall.RawConn that does not block either.
type rawSocket struct{ socket *Socket }

func (x rawSocket) Control(f func(fd uintptr)) error {
	f(uintptr(x.socket.FD))
	return nil
}

func (x rawSocket) Read(f func(fd uintptr) bool) error  { return x.attempt(f) }
func (x rawSocket) Write(f func(fd uintptr) bool) error { return x.attempt(f) }

func (x rawSocket) attempt(f func(fd uintptr) bool) error {
	if !f(uintptr(x.socket.FD)) {
		return ErrAgain
	}
	return nil
}

var _ syscall.RawConn = rawSocket{}
