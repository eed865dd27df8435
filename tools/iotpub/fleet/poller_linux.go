package fleet

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

func newPoller() (poller, error) { return newEpoll() }

// Slots of the two descriptors that are no connections.
const (
	slotWake  = -1
	slotTimer = -2
)

// epoll is the poller of Linux. A message costs it one write, and about one
// epoll_wait, one read and one timerfd_settime.
//
// The timer is a timerfd rather than the timeout of epoll_wait, which counts
// in milliseconds, or of epoll_pwait2, which is subject to the thread's timer
// slack of 50 us and has no wrapper without unsafe.
type epoll struct {
	// set once
	fd    int
	timer int
	// owned by the worker
	armed  mono.Time // when the timer will fire; 0: it has fired
	socks  []int     // by slot; -1: none
	raw    []unix.EpollEvent
	lookup map[string]unix.Sockaddr

	wakeMu struct {
		sync.Mutex
		fd int // -1 after shutdown
	}
}

func newEpoll() (*epoll, error) {
	p := &epoll{raw: make([]unix.EpollEvent, maxEvents), lookup: map[string]unix.Sockaddr{}}
	var err error
	if p.fd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	if p.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC); err != nil {
		_ = unix.Close(p.fd) // nothing was done with it
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	if p.wakeMu.fd, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		_ = unix.Close(p.fd)
		_ = unix.Close(p.timer)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	// Edges again: neither counter has to be read to be armed anew.
	for slot, fd := range map[int32]int{slotWake: p.wakeMu.fd, slotTimer: p.timer} {
		if err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: slot}); err != nil {
			p.shutdown()
			return nil, fmt.Errorf("epoll_ctl: %w", err)
		}
	}
	return p, nil
}

func (p *epoll) resolve(address string) (unix.Sockaddr, error) {
	if sa, ok := p.lookup[address]; ok {
		return sa, nil
	}
	a, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("resolve: %w", err)
	}
	var sa unix.Sockaddr
	if ip := a.IP.To4(); ip != nil {
		sa = &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(ip)}
	} else if len(a.IP) == net.IPv6len {
		six := &unix.SockaddrInet6{Port: a.Port, Addr: [16]byte(a.IP)}
		if a.Zone != "" {
			link, err := net.InterfaceByName(a.Zone)
			if err != nil {
				return nil, fmt.Errorf("resolve %s: %w", address, err)
			}
			six.ZoneId = uint32(link.Index)
		}
		sa = six
	} else {
		return nil, fmt.Errorf("resolve %s: no host", address)
	}
	p.lookup[address] = sa
	return sa, nil
}

func (p *epoll) dial(slot int32, address string) error {
	sa, err := p.resolve(address)
	if err != nil {
		return err
	}
	family := unix.AF_INET
	if _, six := sa.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	fail := func(what string, err error) error {
		_ = unix.Close(fd) // never connected
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fail("TCP_NODELAY", err)
	}
	if err := unix.Connect(fd, sa); err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		return fail("connect to "+address, err)
	}
	if err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{
		Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET, Fd: slot,
	}); err != nil {
		return fail("epoll_ctl", err)
	}
	for int(slot) >= len(p.socks) {
		p.socks = append(p.socks, -1)
	}
	p.socks[slot] = fd
	return nil
}

func (p *epoll) connected(slot int32) error {
	n, err := unix.GetsockoptInt(p.socks[slot], unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return fmt.Errorf("SO_ERROR: %w", err)
	}
	if n != 0 {
		return fmt.Errorf("connect: %w", unix.Errno(n))
	}
	return nil
}

func (p *epoll) read(slot int32, b []byte) (int, error) {
	for {
		n, err := unix.Read(p.socks[slot], b)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return 0, errAgain
		case err != nil:
			return 0, fmt.Errorf("read: %w", err)
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (p *epoll) write(slot int32, b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := unix.Write(p.socks[slot], b[done:])
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return done, errAgain
		case err != nil:
			return done, fmt.Errorf("write: %w", err)
		default:
			done += n
		}
	}
	return done, nil
}

func (p *epoll) close(slot int32) {
	_ = unix.Close(p.socks[slot]) // gone either way, and out of the epoll set
	p.socks[slot] = -1
}

func (p *epoll) wait(dst []event, until mono.Time) ([]event, error) {
	timeout := -1
	if !clock.Mono().Before(until) {
		timeout = 0
	} else if until != p.armed && until != mono.Never {
		spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(until))}
		if err := unix.TimerfdSettime(p.timer, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
			return dst, fmt.Errorf("timerfd_settime: %w", err)
		}
		p.armed = until
	}
	n, err := unix.EpollWait(p.fd, p.raw, timeout)
	if err == unix.EINTR {
		return dst, nil
	}
	if err != nil {
		return dst, fmt.Errorf("epoll_wait: %w", err)
	}
	for i := range n {
		e := &p.raw[i]
		switch e.Fd {
		case slotWake:
		case slotTimer:
			p.armed = 0
		default:
			dst = append(dst, event{
				slot:     e.Fd,
				readable: e.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0,
				writable: e.Events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0,
			})
		}
	}
	return dst, nil
}

func (p *epoll) wake() {
	p.wakeMu.Lock()
	defer p.wakeMu.Unlock()
	if p.wakeMu.fd >= 0 {
		// It fails only when the counter is full, and then wait returns anyway.
		_, _ = unix.Write(p.wakeMu.fd, binary.NativeEndian.AppendUint64(nil, 1))
	}
}

func (p *epoll) shutdown() {
	for slot, fd := range p.socks {
		if fd >= 0 {
			p.close(int32(slot))
		}
	}
	p.wakeMu.Lock()
	_ = unix.Close(p.wakeMu.fd)
	p.wakeMu.fd = -1
	p.wakeMu.Unlock()
	_ = unix.Close(p.timer)
	_ = unix.Close(p.fd)
}
