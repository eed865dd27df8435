package server

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// reusePort lets the loops' sockets share a port; the kernel gives each asker to one.
func reusePort(_, _ string, c syscall.RawConn) error {
	var set error
	if err := c.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}); err != nil {
		return err
	}
	return set
}
