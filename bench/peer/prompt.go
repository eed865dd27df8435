//go:build linux

package main

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// The load shares the processors with the broker that it measures. Its threads
// sleep nearly all the time, and what one of them waits for a processor would
// count as the broker's latency; so they go first, if the system lets them.
const urgency = -10

// prompt makes the goroutine's thread its own, with precise timers and, where
// that is permitted, priority. The thread ends with the goroutine.
func prompt() error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("timer slack: %w", err)
	}
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, urgency); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("priority: %w", err)
	}
	return nil
}

// spare is how many threads of this process may run at once: one that wakes
// must not wait for another to make room.
const spare = 8

// descriptor returns that of a connection on which bytes go as they are; -1
// under TLS. The connection must stay open.
func descriptor(c net.Conn) (int, error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return -1, nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	err = raw.Control(func(f uintptr) { fd = int(f) })
	return fd, err
}

// await waits until a descriptor can be read, or written, or has ended.
func await(fd int, events int16, longest time.Duration) (bool, error) {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(longest/time.Millisecond))
	if errors.Is(err, unix.EINTR) {
		return false, nil
	}
	return n > 0, err
}
