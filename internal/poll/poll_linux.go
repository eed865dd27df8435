package poll

import (
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// Poller waits for many descriptors with epoll, for a time with a timerfd, and
// for other goroutines with an eventfd. One goroutine owns it and calls its
// methods, but for Wake.
//
// A Wait that idles blocks its thread (see rawfd.Blocking).
type Poller struct {
	// Set once.
	fd    int
	event int
	timer int

	// Owned by the loop.
	blocking rawfd.Blocking
	armed    mono.Time // when the timer goes off; Never: it does not
	events   [MaxEvents]Event
}

// Event is what happened to a descriptor: Events as epoll_wait has them, in Fd
// and Pad the slot and the generation that Watch was given.
type Event = unix.EpollEvent

// MaxEvents bounds what one Wait returns.
const MaxEvents = 64

// Slots of the two descriptors that are the poller's own.
const (
	eventSlot = -1
	timerSlot = -2
)

// New returns a poller that watches nothing yet. Close frees it.
func New() (_ *Poller, err error) {
	p := &Poller{fd: -1, event: -1, timer: -1, armed: mono.Never}
	p.blocking.Begin()
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	if p.fd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("epoll_create: %w", err)
	}
	if p.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if p.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	// By edges: neither counter has to be read to be armed anew.
	err = errors.Join(
		p.Watch(p.event, eventSlot, 0, 0, unix.EPOLLIN|unix.EPOLLET),
		p.Watch(p.timer, timerSlot, 0, 0, unix.EPOLLIN|unix.EPOLLET))
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Wait returns what happened to the descriptors. If nothing did, it returns at
// once, or, with idle, waits until something does, Wake is called or the time of
// Alarm has come. What it returns holds until the next call.
func (p *Poller) Wait(idle bool) []Event {
	if !idle {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), MaxEvents, 0, 0, 0)
		if errno != 0 {
			n = 0 // EINTR: the others are ours, and none of them can be
		}
		return p.others(int(n))
	}
	p.blocking.Blocks(clock.Mono())
	n, err := unix.EpollWait(p.fd, p.events[:], -1)
	if err != nil && err != unix.EINTR {
		panic("poll: epoll_wait: " + err.Error()) // closed under the loop
	}
	return p.others(n)
}

// Blocks comes before a call of the owner's, other than Wait, that may block its thread.
func (p *Poller) Blocks() { p.blocking.Blocks(clock.Mono()) }

// others are the events, the first n, of descriptors that are not the poller's own.
func (p *Poller) others(n int) []Event {
	kept := 0
	for i := range max(0, n) {
		switch e := &p.events[i]; e.Fd {
		case eventSlot:
		case timerSlot:
			p.armed = mono.Never
		default:
			if kept != i {
				p.events[kept] = *e
			}
			kept++
		}
	}
	return p.events[:kept]
}

// Wake ends a Wait that idles, or the next one. Any goroutine may call it, until
// Close.
func (p *Poller) Wake() {
	one := [8]byte{1}
	_, _ = rawfd.Write(p.event, one[:]) // full is as good as written
}

// Alarm ends a Wait that idles at that time, or before.
func (p *Poller) Alarm(at mono.Time) {
	if at >= p.armed {
		return
	}
	p.armed = at
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(at, 1)))}
	if err := unix.TimerfdSettime(p.timer, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
		panic(fmt.Sprintf("poll: timerfd_settime(%d): %v", at, err))
	}
}

// Watch changes what a descriptor is watched for, from was to want: EPOLLIN and
// so on, EPOLLET for edges; 0: for nothing. Its events will bear slot, at least 0,
// and generation, which tells apart the descriptors that had one slot.
func (p *Poller) Watch(fd int, slot int32, generation, was, want uint32) error {
	op := unix.EPOLL_CTL_MOD
	switch {
	case was == 0:
		op = unix.EPOLL_CTL_ADD
	case want == 0:
		op = unix.EPOLL_CTL_DEL
	}
	if err := unix.EpollCtl(p.fd, op, fd, &Event{Events: want, Fd: slot, Pad: int32(generation)}); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// Close frees the poller. No Wait or Wake may be under way.
func (p *Poller) Close() {
	for _, fd := range []int{p.fd, p.event, p.timer} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	p.blocking.End()
}

// Write writes what a socket takes, which may be nothing.
func Write(fd int, b []byte) (int, error) {
	n, errno := rawfd.Write(fd, b)
	if errno != 0 && errno != unix.EAGAIN {
		return 0, os.NewSyscallError("write", errno)
	}
	return n, nil
}

// Read reads what is there, which may be nothing; io.EOF at the end.
func Read(fd int, b []byte) (int, error) {
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
