package broker

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
)

// sharpTimer is a timerfd in the runtime's netpoller. Go's timers end in epoll_wait, whose
// timeout is in whole milliseconds. A timerfd becomes readable when the kernel's
// high-resolution timer fires.
type sharpTimer struct {
	fd   int // valid until close
	file *os.File
	buf  [8]byte // owned by wait
}

func newSharpTimer() (timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	return &sharpTimer{fd: fd, file: os.NewFile(uintptr(fd), "timerfd")}, nil
}

func (s *sharpTimer) set(at, _ mono.Time) {
	// A zero value would disarm the timer; a past time fires at once.
	at = max(at, 1)
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(at))}
	if err := unix.TimerfdSettime(s.fd, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
		panic(fmt.Sprintf("timerfd_settime(%d): %v", at, err))
	}
}

func (s *sharpTimer) wait() bool {
	_, err := s.file.Read(s.buf[:])
	return err == nil
}

func (s *sharpTimer) close() { s.file.Close() }
