package testkit

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TUN is the file that Network opens.
const TUN = "/dev/net/tun"

// Network joins namespaces by IPv4. This process is the router: it reads each packet from the
// sender's TUN device and writes the packet to the receiver's TUN device, unless the link
// between the two is cut. Neither end of a cut link sees an error: packets do not arrive.
type Network struct {
	// Set once.
	t    testing.TB
	self *os.File // the device of this process's namespace; nil: none yet

	state struct {
		sync.Mutex
		rng   *rand.Rand
		ports map[netip.Addr]*os.File
		links map[direction]*link
		base  Link // of directions that Set did not change
		ended bool
	}
	dropped  atomic.Int64 // packets that cut or lossy links dropped
	overflow atomic.Int64 // packets that full queues of links dropped
	running  sync.WaitGroup
}

// Link is the treatment of the packets of one direction.
type Link struct {
	Cut   bool          // no packet arrives
	Delay time.Duration // of each packet
	Loss  float64       // probability of the loss of a packet
}

type direction struct{ from, to netip.Addr }

// link carries the packets of one direction in order.
type link struct {
	Link
	queue chan delayed
}

type delayed struct {
	due    time.Time
	packet []byte
}

// linkQueue is the maximum number of packets in a link. A full link drops and counts packets.
const linkQueue = 8192

// NewNetwork makes a network without members. rng decides which packets a lossy link drops.
func NewNetwork(t testing.TB, rng *rand.Rand) *Network {
	n := &Network{t: t}
	n.state.rng, n.state.ports, n.state.links = rng, map[netip.Addr]*os.File{}, map[direction]*link{}
	t.Cleanup(n.close)
	return n
}

// Join adds a namespace, and returns its address.
func (n *Network) Join(ns Namespace) (at netip.Addr) {
	n.t.Helper()
	ns.Inside(func() {
		device := n.open()
		at = n.attach(device, ns.IP)
		n.running.Go(func() { n.read(device) })
	})
	return at
}

// JoinSelf adds the namespace of this process. Each further call gives this process another
// address with separate links. So the test can cut off a server that runs in the test's
// namespace, and stay connected itself.
func (n *Network) JoinSelf() netip.Addr {
	n.t.Helper()
	if n.self == nil {
		n.self = n.open()
		defer n.running.Go(func() { n.read(n.self) })
	}
	return n.attach(n.self, func(args ...string) { IP(n.t, args...) })
}

// open opens a device in the namespace of the calling thread.
func (n *Network) open() *os.File {
	n.t.Helper()
	fd, err := unix.Open(TUN, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		n.t.Skipf("no TUN device can be opened here: %v", err)
	}
	request := Result(unix.NewIfreq("tun0")).Must(n.t)
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		unix.Close(fd)
		n.t.Skipf("no TUN device can be made here: %v", err)
	}
	return os.NewFile(uintptr(fd), "tun0")
}

// attach gives a device the next address.
func (n *Network) attach(device *os.File, ip func(args ...string)) netip.Addr {
	n.t.Helper()
	n.state.Lock()
	address := netip.AddrFrom4([4]byte{10, 78, 0, byte(1 + len(n.state.ports))})
	n.state.ports[address] = device
	n.state.Unlock()
	ip("addr", "add", address.String()+"/24", "dev", "tun0")
	ip("link", "set", "tun0", "up")
	return address
}

// Set changes the direction from one member to another.
func (n *Network) Set(from, device netip.Addr, l Link) {
	n.state.Lock()
	defer n.state.Unlock()
	n.linkLocked(direction{from, device}).Link = l
}

// SetAll changes all directions.
func (n *Network) SetAll(l Link) {
	n.state.Lock()
	defer n.state.Unlock()
	n.state.base = l
	for _, existing := range n.state.links {
		existing.Link = l
	}
}

// Dropped returns the number of packets that links lost on purpose, and the number that full
// queues dropped.
func (n *Network) Dropped() (lost, overflow int64) { return n.dropped.Load(), n.overflow.Load() }

// linkLocked returns the link of a direction between members.
func (n *Network) linkLocked(d direction) *link {
	l := n.state.links[d]
	if l == nil {
		l = &link{Link: n.state.base, queue: make(chan delayed, linkQueue)}
		n.state.links[d] = l
		if port := n.state.ports[d.to]; port != nil && !n.state.ended {
			n.running.Go(func() { l.deliver(port) })
		}
	}
	return l
}

// read routes the packets of a member until its device is closed.
func (n *Network) read(device *os.File) {
	buffer := make([]byte, 1<<16)
	for {
		size, err := device.Read(buffer)
		if err != nil {
			return
		}
		const header = 20 // of IPv4
		if size < header || buffer[0]>>4 != 4 {
			continue // IPv6 looks for routers
		}
		d := direction{netip.AddrFrom4([4]byte(buffer[12:16])), netip.AddrFrom4([4]byte(buffer[16:20]))}
		n.forward(d, append([]byte(nil), buffer[:size]...))
	}
}

func (n *Network) forward(d direction, packet []byte) {
	n.state.Lock()
	defer n.state.Unlock()
	if n.state.ended || n.state.ports[d.to] == nil {
		return
	}
	l := n.linkLocked(d)
	if l.Cut || l.Loss > 0 && n.state.rng.Float64() < l.Loss {
		n.dropped.Add(1)
		return
	}
	select {
	case l.queue <- delayed{time.Now().Add(l.Delay), packet}:
	default:
		n.overflow.Add(1)
	}
}

// deliver hands packets to the receiver until the queue is closed.
func (l *link) deliver(device *os.File) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for l := range l.queue {
		if wait := time.Until(l.due); wait > 0 {
			timer.Reset(wait)
			<-timer.C
		}
		_, _ = device.Write(l.packet) // a namespace may end before its peers
	}
}

func (n *Network) close() {
	n.state.Lock()
	n.state.ended = true
	for _, l := range n.state.links {
		close(l.queue)
	}
	var errs []error
	for _, port := range n.state.ports {
		if err := port.Close(); !errors.Is(err, os.ErrClosed) { // one device may have several addresses
			errs = append(errs, err)
		}
	}
	n.state.Unlock()
	n.running.Wait()
	NoError(n.t, errors.Join(errs...))
}
