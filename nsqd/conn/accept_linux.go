package conn

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/rawfd"
)

// acceptor accepts sockets for the loops without a net.Conn for each, which would be half of the
// cost of an idle connection.
type acceptor struct {
	// Set once.
	file *os.File // duplicate of the listener's socket
	conn syscall.RawConn
	try  func(fd uintptr) bool

	// Results of the last try.
	fd   int
	addr rawfd.Address
	err  error
}

// Keep-alives detect peers that vanished: after 15 s of silence, a probe every 15 s, 9 times, as in
// package net.
const (
	keepAliveSeconds = 15
	keepAliveProbes  = 9
)

// newAcceptor returns nil if the listener has no socket.
func newAcceptor(ln net.Listener) (_ *acceptor, err error) {
	a := &acceptor{}
	switch ln := ln.(type) {
	case *net.TCPListener:
		a.file, err = ln.File()
	case *net.UnixListener:
		a.file, err = ln.File()
	default:
		return nil, nil
	}
	if err == nil {
		a.conn, err = a.file.SyscallConn()
	}
	if err != nil {
		if a.file != nil {
			a.file.Close()
		}
		return nil, fmt.Errorf("listener %s: %w", ln.Addr(), err)
	}
	a.try = func(fd uintptr) bool {
		var errno unix.Errno
		if a.fd, errno = rawfd.Accept(int(fd), &a.addr); errno == 0 {
			a.err = nil
		} else {
			a.err = errno
		}
		return errno != unix.EAGAIN
	}
	return a, nil
}

// inherited sets socket options that accepted connections inherit. It sets them before the socket
// listens, because a connection may come before the acceptor exists.
func inherited(c syscall.RawConn) error {
	var inner error
	err := c.Control(func(fd uintptr) {
		for _, o := range []struct{ level, name, value int }{
			{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveSeconds},
			{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveSeconds},
			{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepAliveProbes},
		} {
			inner = errors.Join(inner, os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), o.level, o.name, o.value)))
		}
	})
	return errors.Join(err, inner)
}

func (a *acceptor) accept() (fd int, remote string, err error) {
	if err := a.conn.Read(a.try); err != nil {
		return -1, "", net.ErrClosed
	}
	if a.err != nil {
		return -1, "", os.NewSyscallError("accept", a.err)
	}
	return a.fd, formatAddress(&a.addr), nil
}

func (a *acceptor) close() { a.file.Close() }

// formatAddress formats an address as package net does. The name of a Unix socket is empty.
func formatAddress(a *rawfd.Address) string {
	addr := a.AddrPort()
	if !addr.IsValid() {
		return ""
	}
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()).String()
}
