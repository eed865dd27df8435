package rawfd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// Poller waits for many descriptors with epoll, for a time with a timerfd, and for other
// goroutines with an eventfd. One goroutine owns the Poller and calls its methods, except
// Wake.
//
// An idle Wait blocks its thread (see Blocking).
type Poller struct {
	// Set by New.
	fd    int
	event int
	timer int

	// Owned by the loop.
	blocking Blocking
	armed    mono.Time // expiry of the timer; Never: not armed
	events   [MaxEvents]Event
}

// Event is an event of a descriptor: Events as in epoll_wait, with the slot and
// generation of Watch in Fd and Pad.
type Event = unix.EpollEvent

// MaxEvents is the maximum number of events of one Wait.
const MaxEvents = 64

// Slots of the poller's own two descriptors.
const (
	eventSlot = -1
	timerSlot = -2
)

// NewPoller returns a poller without descriptors. Close frees it.
func NewPoller() (_ *Poller, err error) {
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
	// Edge-triggered, so no counter must be read to arm it again.
	err = errors.Join(
		p.Watch(p.event, eventSlot, 0, 0, unix.EPOLLIN|unix.EPOLLET),
		p.Watch(p.timer, timerSlot, 0, 0, unix.EPOLLIN|unix.EPOLLET))
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Wait returns the events of the descriptors. Without events Wait returns at once, or,
// with idle, waits for an event, for Wake or for the time of Alarm. The result is valid
// until the next call.
func (p *Poller) Wait(idle bool) []Event {
	if !idle {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), MaxEvents, 0, 0, 0)
		if errno != 0 {
			n = 0 // EINTR; other errors cannot happen, because all arguments are ours
		}
		return p.withoutOwn(int(n))
	}
	p.blocking.Blocks(clock.Mono())
	n, err := unix.EpollWait(p.fd, p.events[:], -1)
	if err != nil && err != unix.EINTR {
		panic("rawfd: epoll_wait: " + err.Error()) // closed while the loop runs
	}
	return p.withoutOwn(n)
}

// Blocks precedes a call of the owner, other than Wait, that may block its thread.
func (p *Poller) Blocks() { p.blocking.Blocks(clock.Mono()) }

// withoutOwn removes the events of the poller's own descriptors from the first n events.
func (p *Poller) withoutOwn(n int) []Event {
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

// Wake ends an idle Wait, or the next Wait. Any goroutine may call it until Close.
func (p *Poller) Wake() {
	increment := [8]byte{1}
	_, _ = Write(p.event, increment[:]) // a full counter also wakes
}

// Alarm ends an idle Wait at the given time or earlier.
func (p *Poller) Alarm(deadline mono.Time) {
	if deadline >= p.armed {
		return
	}
	p.armed = deadline
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(deadline, 1)))}
	if err := unix.TimerfdSettime(p.timer, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
		panic(fmt.Sprintf("rawfd: timerfd_settime(%d): %v", deadline, err))
	}
}

// Watch changes the watched events of a descriptor from was to want: EPOLLIN and so on,
// EPOLLET for edge-triggered; 0: none. Events of the descriptor carry slot, at least 0,
// and generation, which distinguishes successive descriptors of one slot.
func (p *Poller) Watch(fd int, slot int32, generation, watched, want uint32) error {
	op := unix.EPOLL_CTL_MOD
	switch {
	case watched == 0:
		op = unix.EPOLL_CTL_ADD
	case want == 0:
		op = unix.EPOLL_CTL_DEL
	}
	if err := unix.EpollCtl(p.fd, op, fd, &Event{Events: want, Fd: slot, Pad: int32(generation)}); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// Close frees the poller. Requires: no Wait or Wake is in progress.
func (p *Poller) Close() {
	for _, fd := range []int{p.fd, p.event, p.timer} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	p.blocking.End()
}

// Send writes as many bytes as the socket accepts, possibly none.
func Send(fd int, b []byte) (int, error) {
	n, errno := Write(fd, b)
	if errno != 0 && errno != unix.EAGAIN {
		return 0, os.NewSyscallError("write", errno)
	}
	return n, nil
}

// Receive reads the available bytes, possibly none; io.EOF at the end.
func Receive(fd int, b []byte) (int, error) {
	n, errno := Read(fd, b)
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
