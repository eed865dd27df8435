package proxy

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// hungUp reports whether the other end of a connection sends no more, also where not all
// that it has sent was read.
func hungUp(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil { // it is none of the system's
		return false
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
		gone = err == nil && n > 0
	})
	return gone || err != nil
}
