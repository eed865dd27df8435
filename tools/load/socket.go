//go:build linux

package load

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/rawfd"
)

// socket is a connection to a broker that Go's poller does not watch: the poller
// would wake for every answer that comes, on the processors that the broker needs.
// Nor do its system calls tell the scheduler, which would take the processor of a
// thread that sleeps and then look for work for it. There are enough of them (see
// Procs), and a call ends within the time it may take, or when the runtime signals
// that it wants the thread: a read with a timeout is not restarted after a signal.
//
// It is a net.Conn for what wants one; it keeps no deadlines.
type socket struct {
	fd      int
	patient bool // reads go on after a signal
}

var _ net.Conn = (*socket)(nil)

// dial opens a connection to a broker, under TLS if it is to be encrypted, for a
// handshake: what takes longer than patience fails.
func dial(address string, encrypt bool, d Dialect) (net.Conn, *socket, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, nil, fmt.Errorf("socket: %w", err)
	}
	c := &socket{fd: fd, patient: true}
	fail := func(err error) (net.Conn, *socket, error) { return nil, nil, errors.Join(err, c.Close()) }
	if err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), c.timeout(patience)); err != nil {
		return fail(fmt.Errorf("socket: %w", err))
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})
	if errors.Is(err, unix.EINTR) { // it goes on connecting
		_, err = await(fd, unix.POLLOUT, patience)
	}
	if err != nil {
		return fail(fmt.Errorf("connect to %s: %w", at, err))
	}
	if !encrypt {
		return c, c, nil
	}
	t, err := upgrade(c, d.identify)
	if err != nil {
		return fail(err)
	}
	return t, c, nil
}

// timeout says how long a read or a write may take.
func (c *socket) timeout(longest time.Duration) error {
	tv := unix.NsecToTimeval(int64(longest))
	return errors.Join(unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv), unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv))
}

// wait ends the handshake. From now on a read takes attention at most, or less.
func (c *socket) wait() error {
	c.patient = false
	return c.timeout(attention)
}

// dontWait ends the handshake. From now on a read does not wait.
func (c *socket) dontWait() error {
	c.patient = false
	return unix.SetNonblock(c.fd, true)
}

// attention is how soon a subscriber notices that it is to end.
const attention = 50 * time.Millisecond

// Read returns os.ErrDeadlineExceeded, after which one may read again, when
// nothing came.
func (c *socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(c.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		switch {
		case errno == unix.EINTR && c.patient:
			runtime.Gosched()
		case errno == unix.EAGAIN, errno == unix.EINTR:
			return 0, os.ErrDeadlineExceeded
		case errno != 0:
			return 0, errno
		case n == 0:
			return 0, io.EOF
		default:
			return int(n), nil
		}
	}
}

// Write writes all of p.
func (c *socket) Write(p []byte) (written int, err error) {
	for written < len(p) {
		n, errno := rawfd.Write(c.fd, p[written:])
		switch errno {
		case 0:
			written += n
		case unix.EAGAIN:
			// The broker does not read. Messages behind this one are late now, and count it.
			if ok, err := await(c.fd, unix.POLLOUT, patience); err != nil {
				return written, err
			} else if !ok {
				return written, errors.New("the broker reads nothing")
			}
		default:
			return written, errno
		}
	}
	return written, nil
}

func (c *socket) Close() error                     { return unix.Close(c.fd) }
func (c *socket) LocalAddr() net.Addr              { return nil }
func (c *socket) RemoteAddr() net.Addr             { return nil }
func (c *socket) SetDeadline(time.Time) error      { return nil }
func (c *socket) SetReadDeadline(time.Time) error  { return nil }
func (c *socket) SetWriteDeadline(time.Time) error { return nil }

// await waits until a descriptor can be read, or written, or has ended.
func await(fd int, events int16, longest time.Duration) (bool, error) {
	for give := time.Now().Add(longest); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(time.Until(give)/time.Millisecond))
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}
