package hook

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/bpf/lossy"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// network is two network namespaces joined by a pair of interfaces. One end loses and duplicates segments. The other end
// has a witness that records arriving segments, by the filter's clock and just before the filter.
type network struct {
	t        *testing.T
	from, to string // namespaces
	witness  *ringbuf.Reader
	counters *ebpf.Map
}

// Commands that set a feature of an interface.
const (
	ethtoolTSO = 0x1f
	ethtoolGSO = 0x24
	ethtoolGRO = 0x2c
)

func newNetwork(t *testing.T, lose, double uint32) *network {
	t.Helper()
	needRoot(t)
	if major, minor := kernelVersion(t); major < 6 || major == 6 && minor < 6 {
		t.Skipf("needs Linux 6.6 for programs on a virtual interface; this is %d.%d", major, minor)
	}
	ip, err := exec.LookPath("ip")
	if err != nil {
		t.Skipf("needs ip of iproute2: %v", err)
	}
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), ip, args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	n := &network{t: t, from: fmt.Sprintf("srtm-hook-%d-from", os.Getpid()), to: fmt.Sprintf("srtm-hook-%d-to", os.Getpid())}
	for i, ns := range []string{n.from, n.to} {
		run("netns", "add", ns)
		t.Cleanup(func() {
			if out, err := exec.Command(ip, "netns", "del", ns).CombinedOutput(); err != nil {
				t.Errorf("ip netns del %s: %v\n%s", ns, err, out)
			}
		})
		if i == 0 {
			continue
		}
		run("link", "add", "veth0", "netns", n.from, "type", "veth", "peer", "name", "veth0", "netns", n.to)
	}
	for i, ns := range []string{n.from, n.to} {
		run("-n", ns, "addr", "add", fmt.Sprintf("10.99.0.%d/24", i+1), "dev", "veth0")
		run("-n", ns, "addr", "add", fmt.Sprintf("fd99::%d/64", i+1), "dev", "veth0", "nodad")
		run("-n", ns, "link", "set", "veth0", "up")
		run("-n", ns, "link", "set", "lo", "up")
	}

	spec := testkit.Result(lossy.LoadLossy()).Must(t)
	testkit.Must(t, errors.Join(spec.Variables["lose_permille"].Set(lose), spec.Variables["double_permille"].Set(double)))
	coll := testkit.Result(ebpf.NewCollection(spec)).Must(t)
	t.Cleanup(coll.Close)
	n.counters = coll.Maps["counters"]
	n.attach(n.to, coll.Programs["bad"])
	n.attach(n.to, coll.Programs["watch"])
	n.witness = testkit.Result(ringbuf.NewReader(coll.Maps["witness"])).Must(t)
	t.Cleanup(func() { n.witness.Close() })
	return n
}

// in runs f in a namespace. Sockets created in f stay in the namespace.
func (n *network) in(ns string, f func()) {
	n.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here := testkit.Result(os.Open("/proc/thread-self/ns/net")).Must(n.t)
	defer here.Close()
	there, err := os.Open("/run/netns/" + ns)
	testkit.Must(n.t, err)
	defer there.Close()
	testkit.Must(n.t, unix.Setns(int(there.Fd()), unix.CLONE_NEWNET))
	defer func() {
		if err := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); err != nil {
			panic(err) // the thread cannot be used any more
		}
	}()
	f()
}

// attach adds a program after the others on the interface's ingress.
func (n *network) attach(ns string, prog *ebpf.Program) {
	n.t.Helper()
	n.in(ns, func() {
		dev := testkit.Result(net.InterfaceByName("veth0")).Must(n.t)
		l := testkit.Result(link.AttachTCX(link.TCXOptions{Interface: dev.Index, Program: prog, Attach: ebpf.AttachTCXIngress})).Must(n.t)
		n.t.Cleanup(func() { l.Close() })
	})
}

// set switches a feature of an interface.
func (n *network) set(ns string, feature, value uint32) {
	n.t.Helper()
	n.in(ns, func() {
		fd := testkit.Result(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)).Must(n.t)
		defer unix.Close(fd)
		var what runtime.Pinner
		defer what.Unpin()
		data := &[2]uint32{feature, value}
		what.Pin(data)
		var req struct {
			name [unix.IFNAMSIZ]byte
			data *[2]uint32
			_    [16]byte
		}
		copy(req.name[:], "veth0")
		req.data = data
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
			n.t.Fatalf("ethtool %#x: %v", feature, errno)
		}
	})
}

// connect returns both ends of a connection through the network.
func (n *network) connect(s *Stamper, address string) (client *sender, server net.Conn) {
	n.t.Helper()
	var ln net.Listener
	n.in(n.to, func() { ln = listen(n.t, s, "tcp", address) })
	n.in(n.from, func() { client = dial(n.t, ln, net.Dialer{Timeout: testkit.Hang}) })
	return client, accept(n.t, ln)
}

// seen is a segment that the witness recorded.
type seen struct {
	at   mono.Time
	seq  uint32
	size uint32
}

// report returns the segments that came for a port, in order.
func (n *network) report(port int) (all []seen) {
	n.t.Helper()
	n.witness.SetDeadline(time.Unix(1, 0)) // reads the available records without waiting
	for {
		rec, err := n.witness.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		testkit.Must(n.t, err)
		raw := rec.RawSample
		if int(binary.NativeEndian.Uint16(raw[16:])) != port {
			continue
		}
		all = append(all, seen{
			at:   mono.Time(binary.NativeEndian.Uint64(raw)),
			seq:  binary.NativeEndian.Uint32(raw[8:]),
			size: binary.NativeEndian.Uint32(raw[12:]),
		})
	}
	testkit.MustEqual(n.t, n.count(2), 0, "the witness missed segments")
	return all
}

func (n *network) count(which uint32) (c uint64) {
	n.t.Helper()
	testkit.Must(n.t, n.counters.Lookup(which, &c))
	return c
}

// firsts returns for every byte of a stream the index of the segment that brought the byte first, and whether another
// segment brought the byte, too.
func firsts(t *testing.T, all []seen, base uint32, length int) (first []int32, more []bool) {
	t.Helper()
	first, more = make([]int32, length), make([]bool, length)
	for i := range first {
		first[i] = -1
	}
	for i, s := range all {
		for off := int(int32(s.seq - base)); off < int(int32(s.seq-base))+int(s.size); off++ {
			if off >= 0 && off < length {
				more[off] = first[off] >= 0
				if first[off] < 0 {
					first[off] = int32(i)
				}
			}
		}
	}
	for off, i := range first {
		if i < 0 {
			t.Fatalf("byte %d was read and never seen", off)
		}
	}
	return first, more
}

// TestStampsSurviveABadNetwork sends messages through losses, duplicates and reordering. Each stamp must be of the segment that
// completed its message, unless another segment with some of the same bytes came before the message was read.
func TestStampsSurviveABadNetwork(t *testing.T) {
	for _, tc := range []struct {
		name         string
		lose, double uint32 // per mille; large enough that at least one loss is certain, even if a busy sender joins messages into few segments
		address      string
		size, count  int // at most as many segments as a ring has records, because the reader may be late
		plain        bool
		setup        func(*network)
	}{
		{"IPv4, a segment is a packet", 30, 30, "10.99.0.2:0", 5000, 220, false, func(n *network) {
			n.set(n.from, ethtoolTSO, 0)
			n.set(n.from, ethtoolGSO, 0)
		}},
		{"IPv6, small messages", 100, 150, "[fd99::2]:0", 300, 600, false, func(*network) {}},
		{"IPv4, base worked out", 100, 150, "10.99.0.2:0", 2000, 300, true, func(*network) {}},
		{"super-segments of the sender", 60, 60, "10.99.0.2:0", 20_000, 300, false, func(*network) {}},
		{"super-segments of the receiver", 60, 60, "10.99.0.2:0", 5000, 500, false, func(n *network) {
			n.set(n.from, ethtoolTSO, 0)
			n.set(n.from, ethtoolGSO, 0)
			n.set(n.to, ethtoolGRO, 1)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNetwork(t, tc.lose, tc.double)
			tc.setup(n)
			s, _ := loaded(t, tc.plain, Config{RingRecords: 1024})
			client, server := n.connect(s, tc.address)
			c := s.Track(server)
			testkit.Must(t, server.SetReadDeadline(time.Now().Add(testkit.Hang)))
			// The first message is sent alone, so that the ring exists for the others.
			sent := make(chan error, 1)
			read := make(chan struct{})
			go func() {
				for i := range tc.count {
					if _, err := client.Write(message(tc.size)); err != nil {
						sent <- err
						return
					}
					if i == 0 {
						<-read
					}
				}
				sent <- nil
			}()
			got := make([]stamp.Arrival, tc.count)
			buf := make([]byte, tc.size)
			for i := range got {
				start := c.Offset()
				testkit.Result(io.ReadFull(c, buf)).Must(t)
				if !bytes.Equal(buf, message(tc.size)) {
					t.Fatalf("message %d was damaged", i)
				}
				got[i] = c.Arrival(start, c.Offset())
				if i == 0 {
					close(read)
				}
			}
			testkit.Must(t, <-sent)
			base := c.tr.(*filterConn).claim.base
			c.Release()
			n.check(got, n.report(server.LocalAddr().(*net.TCPAddr).Port), base, tc.size, tc.plain)
		})
	}
}

// check requires that each message's stamp is of the segment that brought the last missing byte up to the message's end.
// The stamp must not be before the witness saw the segment, and must be before the witness saw a further copy. If a byte
// of the message came more than once, the stamp may be later and must then be marked as a bound. The program runs a
// little after the witness, and the kernel may show several segments to the witness before the program gets the first.
// Such a case is rare.
func (n *network) check(got []stamp.Arrival, all []seen, base uint32, size int, plain bool) {
	n.t.Helper()
	first, more := firsts(n.t, all, base, size*len(got))
	overtaken, outOfOrder, copies, bounds := 0, 0, 0, 0
	high := int32(-1)
	for i, a := range got {
		for _, s := range first[i*size : (i+1)*size] {
			if s < high {
				outOfOrder++
			}
			high = max(high, s)
		}
		completing := high // of the message and of all messages before
		by := all[completing]
		if i > 0 && a.At.Before(got[i-1].At) {
			n.t.Errorf("message %d: %v before the one ahead of it", i, got[i-1].At.Sub(a.At))
		}
		if plain && a.Source == stamp.Read && (i < baseTries || a.At == got[i-1].At) {
			continue // segments were missing in each search for the base
		}
		if a.At.Before(by.at) {
			n.t.Errorf("message %d: %v before its last segment was seen", i, by.at.Sub(a.At))
		}
		if behind := i > 0 && a == got[i-1]; a.Source == stamp.UpperBound && (behind || slices.Contains(more[i*size:(i+1)*size], true)) {
			bounds++
			continue
		}
		testkit.Equal(n.t, a.Source, stamp.Exact, "message %d", i)
		for _, s := range all[completing+1:] {
			if s.seq-by.seq >= by.size && by.seq-s.seq >= s.size {
				continue // no byte in common
			}
			copies++
			if !a.At.Before(s.at) {
				n.t.Errorf("message %d: stamped %v after a further copy of its last segment was seen", i, a.At.Sub(s.at))
			}
			break
		}
		if int(completing)+1 < len(all) && !a.At.Before(all[completing+1].at) {
			overtaken++
		}
	}
	if overtaken*5 > len(got) {
		n.t.Errorf("%d of %d stamps are not before the next segment", overtaken, len(got))
	}
	lost, doubled := n.count(0), n.count(1)
	if lost == 0 || doubled == 0 || outOfOrder == 0 {
		n.t.Errorf("the network was not bad: %d lost, %d doubled, %d bytes out of order", lost, doubled, outOfOrder)
	}
	n.t.Logf("%d segments, %d lost, %d doubled; %d bytes out of order, %d bounds, %d exact with further copies, %d stamps after the next segment",
		len(all), lost, doubled, outOfOrder, bounds, copies, overtaken)
}
