package hook

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrAgain says that a Socket has nothing to read now.
var ErrAgain = errors.New("nothing to read now")

// Socket is a connected stream socket in non-blocking mode that is watched by
// its owner, an event loop, and not by Go's poller. It does not own the
// descriptor.
type Socket struct {
	FD     int
	Remote net.Addr // for display
}

// TrackSocket is Track for such a socket. Read of the Conn then never waits: it
// returns ErrAgain where it would have to.
func (s *Stamper) TrackSocket(x Socket) *Conn {
	return s.follow(&x, rawSocket{&x}, nil, false)
}

// Read reads what is there.
func (x *Socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		// Raw: the call cannot block, so the scheduler need not know of it.
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(x.FD), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
		switch {
		case errno == unix.EINTR:
		case errno == unix.EAGAIN:
			return 0, ErrAgain
		case errno != 0:
			return 0, os.NewSyscallError("read", errno)
		case n == 0:
			return 0, io.EOF
		default:
			return int(n), nil
		}
	}
}

// RemoteAddr returns the peer's address.
func (x *Socket) RemoteAddr() net.Addr { return x.Remote }

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
