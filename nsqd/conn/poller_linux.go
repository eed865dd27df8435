package conn

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// poller waits for many descriptors with epoll, for a time with a timerfd, and
// for other goroutines with an eventfd.
//
// Its own descriptor is with Go's poller, so that a wait parks the goroutine and
// a thread is not held: the alternative, a blocking epoll_wait, has the
// scheduler take the processor away from the thread each time and give it back.
type poller struct {
	// Set once.
	fd    int
	file  *os.File // owns fd
	conn  syscall.RawConn
	event int
	timer int
	try   func(fd uintptr) bool // wait's, made once since a closure is allocated

	// Owned by the loop.
	armed  mono.Time // when the timer goes off; Never: it does not
	events [eventsAtOnce]unix.EpollEvent
	n      int
}

// eventsAtOnce bounds what is read before anything is written.
const eventsAtOnce = 64

// What events have for a number that are no connection's.
const (
	eventNumber = -1
	timerNumber = -2
)

func newPoller() (_ *poller, err error) {
	p := &poller{fd: -1, event: -1, timer: -1, armed: mono.Never}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.fd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("epoll_create: %w", err)
	}
	if err = unix.SetNonblock(p.fd, true); err != nil { // so that os takes it for one to be polled
		return nil, fmt.Errorf("epoll descriptor: %w", err)
	}
	p.file = os.NewFile(uintptr(p.fd), "epoll")
	if p.conn, err = p.file.SyscallConn(); err != nil {
		return nil, fmt.Errorf("epoll descriptor: %w", err)
	}
	if p.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if p.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	if err = errors.Join(p.watch(p.event, eventNumber, 0, 0, unix.EPOLLIN), p.watch(p.timer, timerNumber, 0, 0, unix.EPOLLIN)); err != nil {
		return nil, err
	}
	p.try = func(uintptr) bool { return p.poll() }
	return p, nil
}

// poll gets the events that are there, and reports whether there are any.
func (p *poller) poll() bool {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), eventsAtOnce, 0, 0, 0)
	if errno != 0 {
		n = 0 // EINTR: the others are ours, and none of them can be
	}
	p.n = int(n)
	return n > 0
}

// wait returns events; with idle there is at least one. They hold until the
// next call.
func (p *poller) wait(idle bool) []unix.EpollEvent {
	if !p.poll() && idle {
		if err := p.conn.Read(p.try); err != nil {
			panic("conn: epoll: " + err.Error()) // closed under the loop
		}
	}
	return p.events[:p.n]
}

// served takes note of an event that is no connection's.
func (p *poller) served(e *unix.EpollEvent) {
	var b [8]byte
	fd := p.event
	if e.Fd == timerNumber {
		fd, p.armed = p.timer, mono.Never
	}
	_, _ = read(fd, b[:]) // only to have it unreadable again
}

// wake ends a wait. Any goroutine.
func (p *poller) wake() {
	one := [8]byte{1}
	_, _ = write(p.event, one[:]) // full is as good as written
}

// alarm ends a wait at that time, or before.
func (p *poller) alarm(at mono.Time) {
	if at >= p.armed {
		return
	}
	p.armed = at
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(at, 1)))}
	if err := unix.TimerfdSettime(p.timer, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
		panic(fmt.Sprintf("conn: timerfd_settime(%d): %v", at, err))
	}
}

// watch changes what a descriptor is watched for.
func (p *poller) watch(fd int, number int32, turn, was, want uint32) error {
	op := unix.EPOLL_CTL_MOD
	switch {
	case was == 0:
		op = unix.EPOLL_CTL_ADD
	case want == 0:
		op = unix.EPOLL_CTL_DEL
	}
	if err := unix.EpollCtl(p.fd, op, fd, &unix.EpollEvent{Events: want, Fd: number, Pad: int32(turn)}); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

func (p *poller) close() {
	for _, fd := range []int{p.event, p.timer} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if p.file != nil {
		p.file.Close()
	} else if p.fd >= 0 {
		unix.Close(p.fd)
	}
}

// write writes what the socket takes, which may be nothing.
func write(fd int, b []byte) (int, error) {
	n, errno := rawfd.Write(fd, b)
	if errno != 0 && errno != unix.EAGAIN {
		return 0, os.NewSyscallError("write", errno)
	}
	return n, nil
}

// read reads what is there, which may be nothing; io.EOF at the end.
func read(fd int, b []byte) (int, error) {
	n, errno := rawfd.Read(fd, b)
	switch {
	case errno == unix.EAGAIN:
		return 0, nil
	case errno != 0:
		return 0, os.NewSyscallError("read", errno)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
