package bounded

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// HungUp reports whether the peer has closed its sending side, even if unread data
// remains. net/http does not detect this while a request's body is unread.
func (c *Conn) HungUp() bool {
	system, ok := c.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := system.SyscallConn()
	if err != nil {
		return true
	}
	hungUp := false
	err = raw.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
		hungUp = err == nil && n > 0
	})
	return hungUp || err != nil
}
