package hook

import (
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/rawfd"
)

// ErrAgain says that a Socket has nothing to read now. It is a net.Error that passes,
// after which TLS goes on.
var ErrAgain error = again{}

type again struct{}

func (again) Error() string   { return "nothing to read now" }
func (again) Timeout() bool   { return true }
func (again) Temporary() bool { return true }

// MoveToSocket has the Conn underneath go on reading from a Socket. There is no
// net.Conn then.
func (x *Records) MoveToSocket(to Socket) {
	x.Conn, x.c.conn = nil, &to
	if x.c.tr != nil {
		x.c.tr.move(&to, rawSocket{&to})
	}
}

// Socket is a connected stream socket in non-blocking mode that is watched by
// its owner, an event loop, and not by Go's poller. It does not own the
// descriptor.
type Socket struct{ FD int }

// TrackSocket is Track for such a socket. Read of the Conn then never waits: it
// returns ErrAgain where it would have to.
func (s *Stamper) TrackSocket(x Socket) *Conn {
	return s.follow(&x, rawSocket{&x}, nil)
}

// Read reads what is there.
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

// RemoteAddr returns the peer's address, for display; nil if there is none.
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

// rawSocket is a Socket as a syscall.RawConn, of which nothing waits either.
type rawSocket struct{ *Socket }

func (x rawSocket) Control(f func(fd uintptr)) error {
	f(uintptr(x.FD))
	return nil
}

func (x rawSocket) Read(f func(fd uintptr) bool) error  { return x.try(f) }
func (x rawSocket) Write(f func(fd uintptr) bool) error { return x.try(f) }

func (x rawSocket) try(f func(fd uintptr) bool) error {
	if !f(uintptr(x.FD)) {
		return ErrAgain
	}
	return nil
}

var _ syscall.RawConn = rawSocket{}
