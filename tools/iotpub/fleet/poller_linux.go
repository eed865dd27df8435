package fleet

import (
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// poller moves bytes without blocking. Only the worker's thread calls the methods, except
// wake. A slot is the worker's number for a connection, and may be reused after close. A
// message costs one write, and about one epoll_wait, one read and one timerfd_settime.
//
// Events are edge-triggered. After a readable event, the next event comes only when more
// bytes arrive after a short read. A closed slot must not be dialled again while older
// events are unhandled.
type poller struct {
	poll *rawfd.Poller
	// owned by the worker
	socks  []int // by slot; -1: none
	lookup map[string]unix.Sockaddr

	mu struct {
		sync.Mutex
		closed bool
	}
}

func newPoller() (*poller, error) {
	p, err := rawfd.NewPoller()
	if err != nil {
		return nil, err
	}
	return &poller{poll: p, lookup: map[string]unix.Sockaddr{}}, nil
}

func (p *poller) resolve(address string) (unix.Sockaddr, error) {
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

// dial starts to connect. A writable event reports the end of dialling. After an error the
// slot remains free.
func (p *poller) dial(slot int32, address string) error {
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
	fail := func(call string, err error) error {
		_ = unix.Close(fd) // never connected
		return fmt.Errorf("%s: %w", call, err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fail("TCP_NODELAY", err)
	}
	if err := unix.Connect(fd, sa); err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		return fail("connect to "+address, err)
	}
	if err := p.poll.Watch(fd, slot, 0, 0, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET); err != nil {
		return fail("watch", err)
	}
	for int(slot) >= len(p.socks) {
		p.socks = append(p.socks, -1)
	}
	p.socks[slot] = fd
	return nil
}

// connected returns nil if the connection is established, or the error of the dial.
// Requires: a writable event came.
func (p *poller) connected(slot int32) error {
	n, err := unix.GetsockoptInt(p.socks[slot], unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return fmt.Errorf("SO_ERROR: %w", err)
	}
	if n != 0 {
		return fmt.Errorf("connect: %w", unix.Errno(n))
	}
	return nil
}

// read returns bytes, errAgain, or the error that ended the connection (io.EOF).
func (p *poller) read(slot int32, b []byte) (int, error) {
	n, err := rawfd.Receive(p.socks[slot], b)
	if n == 0 && err == nil {
		err = errAgain
	}
	return n, err
}

// write returns the number of bytes written. A short write returns errAgain, or the error
// that ended the connection.
func (p *poller) write(slot int32, b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := rawfd.Send(p.socks[slot], b[done:])
		if n == 0 && err == nil {
			err = errAgain
		}
		if done += n; err != nil {
			return done, err
		}
	}
	return done, nil
}

func (p *poller) close(slot int32) {
	_ = unix.Close(p.socks[slot]) // also removes the socket from the epoll set
	p.socks[slot] = -1
}

// wait appends events to dst. It returns when there is an event, after wake, or at the time
// until.
func (p *poller) wait(dst []event, deadline mono.Time) []event {
	if deadline != mono.Never {
		p.poll.Alarm(deadline)
	}
	for _, e := range p.poll.Wait(clock.Mono().Before(deadline)) {
		dst = append(dst, event{
			slot:     e.Fd,
			readable: e.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0,
			writable: e.Events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0,
		})
	}
	return dst
}

// wake makes wait return. Any goroutine may call wake, even after shutdown.
func (p *poller) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.mu.closed {
		p.poll.Wake()
	}
}

// shutdown closes all connections. Only wake may be called afterwards.
func (p *poller) shutdown() {
	for slot, fd := range p.socks {
		if fd >= 0 {
			p.close(int32(slot))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.closed = true
	p.poll.Close()
}
