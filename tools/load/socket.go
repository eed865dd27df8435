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

// socket is a connection to a broker that bypasses Go's poller. The poller would wake for
// every reply, on the processors that the broker needs. The system calls bypass the
// scheduler, too, since the scheduler would take the processor of a sleeping thread and
// search for work. GOMAXPROCS leaves enough processors (see Procs). A call returns after
// its timeout, or when the runtime signals the thread: the kernel does not restart a read
// with a timeout after a signal.
//
// A socket implements net.Conn, but ignores deadlines.
type socket struct {
	fd      int
	retries bool // reads are retried after a signal
}

var _ net.Conn = (*socket)(nil)

// dial connects to a broker, with TLS if encrypt is set. Handshake operations that take
// longer than patience fail.
func dial(address string, encrypt bool, d Dialect) (net.Conn, *socket, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, nil, fmt.Errorf("socket: %w", err)
	}
	c := &socket{fd: fd, retries: true}
	fail := func(err error) (net.Conn, *socket, error) { return nil, nil, errors.Join(err, c.Close()) }
	if err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), c.timeout(patience)); err != nil {
		return fail(fmt.Errorf("socket: %w", err))
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})
	if errors.Is(err, unix.EINTR) { // the kernel continues to connect
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

// timeout sets the timeout of reads and writes.
func (c *socket) timeout(limit time.Duration) error {
	tv := unix.NsecToTimeval(int64(limit))
	return errors.Join(unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv), unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv))
}

// setBlocking ends the handshake. Later reads block for at most attention.
func (c *socket) setBlocking() error {
	c.retries = false
	return c.timeout(attention)
}

// setNonblocking ends the handshake. Later reads do not block.
func (c *socket) setNonblocking() error {
	c.retries = false
	return unix.SetNonblock(c.fd, true)
}

// attention bounds the time until a subscriber notices that it must stop.
const attention = 50 * time.Millisecond

// Read returns os.ErrDeadlineExceeded if no data arrived in time. The caller may retry.
func (c *socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(c.fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		switch {
		case errno == unix.EINTR && c.retries:
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
			// The broker does not read. Later messages are late, and their latency counts
			// the delay.
			if ok, err := await(c.fd, unix.POLLOUT, patience); err != nil {
				return written, err
			} else if !ok {
				return written, fmt.Errorf("the broker read nothing for %v", patience)
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

// await waits until a descriptor is readable, writable or closed.
func await(fd int, events int16, limit time.Duration) (ready bool, err error) {
	for deadline := time.Now().Add(limit); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(time.Until(deadline)/time.Millisecond))
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}
