//go:build linux

package hook

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// These tests check stamps from inside the package, on the real kernel. The tests require no wall-clock bound. The
// bounds of a stamp are events: a message cannot come before its write began, and has come when the kernel acknowledged
// the message to the sender.

// needKernel skips the test if the kernel or the privileges do not meet the documented needs of the eBPF source. If they
// do, a source that does not open is a failure.
func needKernel(t testing.TB) {
	t.Helper()
	major, minor := kernelVersion(t)
	oldest := 12
	if runtime.GOARCH != "amd64" {
		oldest = 18
	}
	if major < 5 || major == 5 && minor < oldest {
		t.Skipf("needs Linux 5.%d for atomics that return a value; this is %d.%d", oldest, major, minor)
	}
	if caps := effective(t); caps&(1<<capSysAdmin) == 0 && caps&(1<<capBPF|1<<capPerfmon) != 1<<capBPF|1<<capPerfmon {
		t.Skip("needs CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN")
	}
}

func kernelVersion(t testing.TB) (major, minor int) {
	t.Helper()
	if _, err := fmt.Sscanf(kernelRelease(), "%d.%d", &major, &minor); err != nil {
		t.Fatalf("kernel %q: %v", kernelRelease(), err)
	}
	return major, minor
}

func effective(t testing.TB) (caps uint64) {
	t.Helper()
	status := testkit.Result(os.ReadFile("/proc/self/status")).Must(t)
	_, rest, _ := strings.Cut(string(status), "CapEff:")
	testkit.Result(fmt.Sscanf(strings.TrimSpace(rest), "%x", &caps)).Must(t)
	return caps
}

// stamper returns a Stamper with the given source, without the choice of Open.
func stamper(t testing.TB, src source, err error) *Stamper {
	t.Helper()
	testkit.Must(t, err)
	s := &Stamper{log: slog.New(slog.DiscardHandler), mode: Auto, src: src}
	t.Cleanup(func() {
		testkit.NoError(t, s.Close())
	})
	return s
}

// loaded returns a Stamper with the program, plain or not, and its source.
func loaded(t testing.TB, plain bool, cfg Config) (*Stamper, *filter) {
	t.Helper()
	needKernel(t)
	f, err := load(cfg.withDefaults(), chunkSlots, plain)
	s := stamper(t, f, err)
	testkit.Must(t, f.tryOut())
	return s, f
}

// programs runs a test with either program.
func programs(t *testing.T, cfg Config, test func(*testing.T, *Stamper, *filter)) {
	for _, plain := range []bool{false, true} {
		name := "base from the kernel"
		if plain {
			name = "base worked out"
		}
		t.Run(name, func(t *testing.T) {
			s, f := loaded(t, plain, cfg)
			test(t, s, f)
		})
	}
}

// listen returns a listener that s prepared.
func listen(t testing.TB, s *Stamper, network, address string) net.Listener {
	t.Helper()
	lc := net.ListenConfig{Control: s.Control}
	lc.SetMultipathTCP(false)
	ln := testkit.Result(lc.Listen(context.Background(), network, address)).Must(t)
	t.Cleanup(func() { ln.Close() })
	return ln
}

// sender is the other end of a connection.
type sender struct {
	t testing.TB
	*net.TCPConn
	raw syscall.RawConn
}

func dial(t testing.TB, ln net.Listener, d net.Dialer) *sender {
	t.Helper()
	d.SetMultipathTCP(false)
	c := testkit.Result(d.Dial("tcp", ln.Addr().String())).Must(t)
	t.Cleanup(func() { c.Close() })
	raw := testkit.Result(c.(*net.TCPConn).SyscallConn()).Must(t)
	return &sender{t, c.(*net.TCPConn), raw}
}

// span is the time in which a message must have come: at or after from, at or before to.
type span struct{ from, to mono.Time }

// send writes p, waits for the acknowledgement, and returns the span in which p came.
func (s *sender) send(p []byte) span {
	s.t.Helper()
	from := clock.Mono()
	testkit.Result(s.Write(p)).Must(s.t)
	return span{from, s.acked()}
}

// acked waits until the peer's kernel has acknowledged everything.
func (s *sender) acked() mono.Time {
	s.t.Helper()
	for give := time.Now().Add(testkit.Hang); ; runtime.Gosched() {
		var left int
		var inner error
		err := s.raw.Control(func(fd uintptr) { left, inner = unix.IoctlGetInt(int(fd), unix.TIOCOUTQ) })
		if err != nil || inner != nil {
			s.t.Fatal(err, inner)
		}
		if left == 0 {
			return clock.Mono()
		}
		if time.Now().After(give) {
			s.t.Fatalf("%d bytes are not acknowledged", left)
		}
	}
}

func accept(t testing.TB, ln net.Listener) net.Conn {
	t.Helper()
	c := testkit.Result(ln.Accept()).Must(t)
	t.Cleanup(func() { c.Close() })
	return c
}

// reader is the common interface of Conn and Layer.
type reader interface {
	io.Reader
	Offset() int64
	Arrival(start, end int64) stamp.Arrival
	Ignore()
	Release()
}

// take reads n bytes and returns their arrival.
func take(t testing.TB, c reader, n int) stamp.Arrival {
	t.Helper()
	start := c.Offset()
	testkit.Result(io.ReadFull(c, make([]byte, n))).Must(t)
	return c.Arrival(start, c.Offset())
}

// takeOwn is take for a message whose arrival must not be bound by the arrival of the message before.
func takeOwn(t testing.TB, c *Conn, n int) stamp.Arrival {
	t.Helper()
	c.last = stamp.Arrival{}
	return take(t, c, n)
}

// within requires a stamp from the given source within the span, up to the error of the clock's calibration.
func within(t testing.TB, what string, a stamp.Arrival, source stamp.Source, in span) {
	t.Helper()
	if a.Source != source || a.At.Before(in.from.Add(-clockSlack)) || in.to.Add(clockSlack).Before(a.At) {
		t.Errorf("%s: %v, %v after the write, %v before it was acknowledged; want %v, neither negative",
			what, a.Source, a.At.Sub(in.from), in.to.Sub(a.At), source)
	}
}

func message(n int) []byte { return bytes.Repeat([]byte{'m'}, n) }

func TestFilterStampsBothFamilies(t *testing.T) {
	programs(t, Config{}, func(t *testing.T, s *Stamper, f *filter) {
		for _, address := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
			ln := listen(t, s, "tcp", address)
			var senders []*sender
			var conns []*Conn
			for range 10 {
				senders = append(senders, dial(t, ln, net.Dialer{}))
				conns = append(conns, s.Track(accept(t, ln)))
			}
			for round := range 5 {
				var sent []span
				for _, c := range senders {
					sent = append(sent, c.send(message(100+round)))
				}
				// All messages have come before the first is read.
				for i, c := range conns {
					within(t, fmt.Sprintf("%s connection %d round %d", address, i, round), take(t, c, 100+round), stamp.Exact, sent[i])
				}
			}
			for _, c := range conns {
				c.Release()
			}
		}
		c := s.Info().Counters
		if c.Arrivals[stamp.Exact] != 150 || c.SegmentsForeign+c.RecordsLost+c.SegmentsEarlyLost+c.ConnsNoBase != 0 || c.Rings != 0 {
			t.Errorf("counters %+v", c)
		}
	})
}

func TestFilterMapsMessagesToSegments(t *testing.T) {
	programs(t, Config{}, func(t *testing.T, s *Stamper, f *filter) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		client := dial(t, ln, net.Dialer{})
		c := s.Track(accept(t, ln))
		defer c.Release()

		sent := client.send(message(30))
		var same []stamp.Arrival
		for range 3 {
			same = append(same, take(t, c, 10))
		}
		within(t, "three messages in a segment", same[0], stamp.Exact, sent)
		if same[0] != same[1] || same[1] != same[2] {
			t.Errorf("three messages in a segment came at %v", same)
		}

		// A message in two segments arrives with the second segment, and so does the next message in the second segment.
		client.send(message(10))
		second := client.send(message(20))
		within(t, "message over two segments", take(t, c, 15), stamp.Exact, second)
		within(t, "the rest of the second", take(t, c, 15), stamp.Exact, second)

		// A message larger than any segment is read while its segments come.
		const large = 1 << 20
		from := clock.Mono()
		done := make(chan error, 1)
		go func() {
			_, err := client.Write(message(large))
			done <- err
		}()
		start := c.Offset()
		testkit.Result(io.ReadFull(c, make([]byte, large-1))).Must(t)
		testkit.Must(t, <-done)
		acked := client.acked()
		testkit.Result(io.ReadFull(c, make([]byte, 1))).Must(t)
		a, source := c.Arrival(start, c.Offset()), stamp.Exact
		if a.Source == stamp.UpperBound {
			source = stamp.UpperBound // on a slow machine TCP sends some segments twice
		}
		within(t, "message over many segments", a, source, span{from, acked})
	})
}

// The program keeps the last eight segments that a client sends before its connection is accepted and a stamp is
// requested.
func TestFilterKeepsEarlySegments(t *testing.T) {
	programs(t, Config{}, func(t *testing.T, s *Stamper, f *filter) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		for _, early := range []int{1, 4, 8, 12} {
			for try := 0; !keepsEarly(t, s, f, ln, early); try++ {
				if try == 50 {
					t.Fatalf("%d messages never came in as many segments", early)
				}
			}
		}
	})
}

// keepsEarly returns false if TCP sent some segments twice, as TCP does when acknowledgements are slow. Then the test
// does not know which segments are left.
func keepsEarly(t *testing.T, s *Stamper, f *filter, ln net.Listener, early int) bool {
	before := f.total()[countEarly]
	client := dial(t, ln, net.Dialer{})
	var sent []span
	for i := range early {
		sent = append(sent, client.send(message(10+i)))
	}
	c := s.Track(accept(t, ln))
	defer c.Release()
	if f.total()[countEarly] != before+uint64(early) {
		return false
	}
	for i, in := range sent {
		a := takeOwn(t, c, 10+i)
		what := fmt.Sprintf("message %d of %d before accept", i, early)
		if f.unbased && early > stamp.EarlyRecords {
			within(t, what, a, stamp.Read, span{in.from, mono.Never}) // records are missing, so the base is not certain
		} else if i >= early-stamp.EarlyRecords {
			within(t, what, a, stamp.Exact, in)
		} else if a.Source == stamp.Exact || a.At.Before(in.from.Add(-clockSlack)) {
			t.Errorf("%s: %+v, want none better than a bound, not before %d", what, a, in.from)
		}
	}
	next := client.send(message(5))
	if f.unbased && early > stamp.EarlyRecords {
		return true
	}
	within(t, fmt.Sprintf("message after %d before accept", early), takeOwn(t, c, 5), stamp.Exact, next)
	return true
}

// adopt tracks a connection whose listener was not prepared.
func adopt(t *testing.T, s *Stamper, c net.Conn) *Conn {
	t.Helper()
	rc, err := rawConn(c)
	if err == nil {
		err = s.src.control(rc)
	}
	testkit.Must(t, err)
	return s.Track(c)
}

// The connection was established before the program was attached to its socket.
func TestFilterAdoptsLate(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	ln := listen(t, stamper(t, nil, nil), "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	missed := client.send(message(10))
	c := adopt(t, s, accept(t, ln))
	defer c.Release()
	seen := client.send(message(10))
	if a := take(t, c, 10); a.Source == stamp.Exact || a.At.Before(missed.from.Add(-clockSlack)) {
		t.Errorf("before the program: %+v, not before %d", a, missed.from)
	}
	within(t, "after it", takeOwn(t, c, 10), stamp.Exact, seen)
}

// Without the kernel's help, the start of a stream that was joined late cannot be verified, and the source must not
// guess the start.
func TestFilterDoesNotGuessTheBase(t *testing.T) {
	s, _ := loaded(t, true, Config{})
	ln := listen(t, stamper(t, nil, nil), "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	client.send(message(10))
	c := adopt(t, s, accept(t, ln))
	defer c.Release()
	for i := range baseTries + 10 {
		testkit.Result(client.Write(message(10))).Must(t)
		if a := take(t, c, 10); a.Source != stamp.Read {
			t.Fatalf("message %d: %+v, want the time after the read", i, a)
		}
	}
	if c := s.Info().Counters; c.ConnsNoBase != 1 || c.Rings != 0 {
		t.Errorf("%d connections without a base, want 1; %d rings, want 0", c.ConnsNoBase, c.Rings)
	}
}

// startAt makes a connection's first sequence number.
func startAt(seq uint32) net.Dialer {
	return net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) {
			const sendQueue = 2
			for _, opt := range [][2]int{
				{unix.TCP_REPAIR, 1}, {unix.TCP_REPAIR_QUEUE, sendQueue}, {unix.TCP_QUEUE_SEQ, int(int32(seq))}, {unix.TCP_REPAIR, 0},
			} {
				if inner = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, opt[0], opt[1]); inner != nil {
					return
				}
			}
		})
		if err == nil {
			err = inner
		}
		return err
	}}
}

func TestFilterFollowsSequenceNumbersAround(t *testing.T) {
	programs(t, Config{}, func(t *testing.T, s *Stamper, f *filter) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		for _, left := range []uint32{1, 2, 45, 100, 101, 350} { // numbers before the wrap
			client := dial(t, ln, startAt(-left))
			c := s.Track(accept(t, ln))
			for i := range 10 {
				sent := client.send(message(50))
				within(t, fmt.Sprintf("message %d, wrap after %d", i, left), take(t, c, 50), stamp.Exact, sent)
			}
			if base := c.tr.(*filterConn).claim.base; base != -left+1 {
				t.Errorf("base %#x, want %#x: the sequence number was not set", base, -left+1)
			}
			c.Release()
		}
	})
}

// Urgent bytes count in the stream like all others.
func TestFilterCountsUrgentBytes(t *testing.T) {
	programs(t, Config{}, func(t *testing.T, s *Stamper, f *filter) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		client := dial(t, ln, net.Dialer{})
		c := s.Track(accept(t, ln))
		defer c.Release()
		for i := range 20 {
			from := clock.Mono()
			var inner error
			if err := client.raw.Write(func(fd uintptr) bool {
				inner = unix.Sendto(int(fd), []byte("urgent"), unix.MSG_OOB, nil)
				return inner != unix.EAGAIN
			}); err != nil || inner != nil {
				t.Fatal(err, inner)
			}
			sent := span{from, client.acked()}
			within(t, fmt.Sprintf("urgent message %d", i), take(t, c, 6), stamp.Exact, sent)
		}
	})
}

// The test reuses slots at once, while segments of the old owner may be in transit. Normally the quarantine prevents
// such a reuse.
func TestFilterReusesSlots(t *testing.T) {
	s, f := loaded(t, false, Config{MaxConns: 2})
	f.slots.quarantine = 0
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	for i := range 300 {
		client := dial(t, ln, net.Dialer{})
		c := s.Track(accept(t, ln))
		for range 3 {
			sent := client.send(message(20))
			within(t, fmt.Sprintf("connection %d", i), take(t, c, 20), stamp.Exact, sent)
		}
		if _, err := client.Write(message(30)); err != nil { // the test does not wait for the acknowledgement
			t.Fatal(err)
		}
		c.Release()
		client.SetLinger(0)
		client.Close()
	}
	if c := s.Info().Counters; c.Rings != 0 || c.RingsRefused != 0 {
		t.Errorf("counters %+v", c)
	}
}

func TestFilterRefusesRingsBeyondTheLimit(t *testing.T) {
	s, _ := loaded(t, false, Config{MaxConns: 1})
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	first, second := dial(t, ln, net.Dialer{}), dial(t, ln, net.Dialer{})
	c1, c2 := s.Track(accept(t, ln)), s.Track(accept(t, ln))
	within(t, "the first", withSend(t, first, c1), stamp.Exact, span{0, mono.Never})
	for range 3 {
		if a := withSend(t, second, c2); a.Source != stamp.Read {
			t.Errorf("the second: %+v, want the time after the read", a)
		}
	}
	if c := s.Info().Counters; c.Rings != 1 || c.RingsMost != 1 || c.RingsRefused != 1 {
		t.Errorf("counters %+v", c)
	}
	c1.Release()
	// A quarantined slot is not reused yet.
	c2.tr.(*filterConn).pause = 0
	if a := withSend(t, second, c2); a.Source != stamp.Read {
		t.Errorf("the second, slot at rest: %+v", a)
	}
	c2.Release()
}

func withSend(t testing.TB, client *sender, c reader) stamp.Arrival {
	t.Helper()
	client.send(message(10))
	return take(t, c, 10)
}

func TestFilterCountsLostRecords(t *testing.T) {
	const records, sent = 64, 500
	s, _ := loaded(t, false, Config{RingRecords: records})
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	defer c.Release()
	last := client.send(message(10))
	within(t, "before the overrun", take(t, c, 10), stamp.Exact, last)

	spans := make([]span, sent)
	for i := range spans {
		spans[i].from = clock.Mono()
		testkit.Result(client.Write(message(10))).Must(t)
		testkit.Result(io.ReadFull(c, make([]byte, 10))).Must(t)
		spans[i].to = clock.Mono()
	}
	var by [stamp.Sources]int
	for i, in := range spans {
		start := int64(10 + 10*i)
		a := c.Arrival(start, start+10)
		by[a.Source]++
		switch a.Source {
		case stamp.Exact:
			within(t, fmt.Sprintf("message %d", i), a, stamp.Exact, in)
		case stamp.Overwritten:
			within(t, fmt.Sprintf("message %d", i), a, a.Source, span{last.from, spans[sent-1].to})
		default:
			t.Errorf("message %d: %+v", i, a)
		}
	}
	// One record belonged to the first message, and is retired or overwritten.
	if by[stamp.Exact] != records || by[stamp.Overwritten] != sent-records {
		t.Errorf("by source %v, want %d exact, of the rest none left", by, records)
	}
	if lost := s.Info().Counters.RecordsLost; lost < sent-records || lost > sent-records+1 {
		t.Errorf("%d records lost, want %d", lost, sent-records)
	}
}

func TestFilterStampsNothingIgnored(t *testing.T) {
	s, f := loaded(t, false, Config{})
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	withSend(t, client, c)
	c.Ignore()
	before := f.total()
	for range 5 {
		if a := withSend(t, client, c); a.Source != stamp.Read {
			t.Errorf("%+v, want the time after the read", a)
		}
	}
	if after := f.total(); after != before {
		t.Errorf("the program still runs: counters %v, then %v", before, after)
	}
	testkit.Equal(t, s.Info().Counters.Rings, 0, "rings")
	c.Ignore()
	c.Release()
}

func TestFilterRefusesMultipath(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	var protocol int
	var refusal error
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if e := c.Control(func(fd uintptr) { protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL) }); e != nil {
			return e
		}
		if protocol == unix.IPPROTO_MPTCP {
			s.mode = EBPF
			refusal = s.Control("tcp", "", c)
			s.mode = Auto
			return s.Control("tcp", "", c)
		}
		return err
	}}
	lc.SetMultipathTCP(true)
	ln := testkit.Result(lc.Listen(context.Background(), "tcp", "127.0.0.1:0")).Must(t)
	defer ln.Close()
	if protocol != unix.IPPROTO_MPTCP {
		t.Skip("this kernel has no multipath TCP to refuse")
	}
	if refusal == nil || !strings.Contains(refusal.Error(), "operation not supported") {
		t.Errorf("a multipath listener: %v, want it refused", refusal)
	}
	// Plain connections of the listener can be adopted.
	client := dial(t, ln, net.Dialer{})
	c := adopt(t, s, accept(t, ln))
	defer c.Release()
	sent := client.send(message(10))
	within(t, "adopted", take(t, c, 10), stamp.Exact, sent)
}

// A first segment that completes the handshake arrives at the listener. The segment must not shift the later messages.
func TestFilterSurvivesDeferredAccept(t *testing.T) {
	programs(t, Config{}, func(t *testing.T, s *Stamper, f *filter) {
		lc := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
			var inner error
			if err := c.Control(func(fd uintptr) {
				inner = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 5)
			}); err != nil || inner != nil {
				return fmt.Errorf("%w %w", err, inner)
			}
			return s.Control(network, address, c)
		}}
		lc.SetMultipathTCP(false)
		ln := testkit.Result(lc.Listen(context.Background(), "tcp", "127.0.0.1:0")).Must(t)
		defer ln.Close()
		client := dial(t, ln, net.Dialer{})
		client.send(message(10))
		c := s.Track(accept(t, ln))
		defer c.Release()
		if f.unbased && os.Geteuid() == 0 {
			// The same number of bytes beyond the window, which TCP drops, does not hide the gap.
			forger := testkit.Forge(t, client.TCPConn)
			client.send(message(10))
			forger.Send(testkit.Forgery{Seq: forger.Next + 10, Size: 10, Old: true})
			if a := take(t, c, 20); a.Source != stamp.Read {
				t.Errorf("the listener's message: %+v, but the base cannot be known", a)
			}
		} else if a := take(t, c, 10); a.Source == stamp.Exact {
			t.Errorf("the listener's message: %+v", a)
		}
		for i := range 5 {
			sent := client.send(message(10))
			a := take(t, c, 10)
			if f.unbased {
				testkit.Equal(t, a.Source, stamp.Read, "message %d: %+v, but the base cannot be known", i, a)
				continue
			}
			source := stamp.Exact
			if i == 0 {
				source = stamp.UpperBound // a copy of the segment might have come to the listener
			}
			within(t, fmt.Sprintf("message %d", i), a, source, sent)
		}
		if n := s.Info().Counters.SegmentsListen; n == 0 {
			t.Error("no segment met the listener: accept was not deferred")
		}
	})
}

func TestFilterAllocatesNothing(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	noAllocations(t, s)
}

func TestTimestampingAllocatesNothing(t *testing.T) {
	src, err := openTimestamping(Config{})
	noAllocations(t, stamper(t, src, err))
}

func noAllocations(t *testing.T, s *Stamper) {
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	defer c.Release()
	p, buf := message(100), make([]byte, 200)
	unstamped := 0 // a busy kernel delivers a stamp too late now and then
	n := testing.AllocsPerRun(500, func() {
		testkit.Result(client.Write(p)).Must(t)
		start := c.Offset()
		testkit.Result(c.Read(buf)).Must(t)
		if a := c.Arrival(start, c.Offset()); a.Source == stamp.Read {
			unstamped++
		}
	})
	if unstamped > 250 {
		t.Errorf("%d of 501 messages have no stamp of the kernel", unstamped)
	}
	testkit.Equal(t, n, 0, "allocations per message")
}

func TestTimestampingBounds(t *testing.T) {
	src, err := openTimestamping(Config{})
	s := stamper(t, src, err)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		ln := listen(t, s, "tcp", address)
		client := dial(t, ln, net.Dialer{})
		c := s.Track(accept(t, ln))
		for i := range 10 {
			// Alone in the queue, a segment keeps its time.
			sent := client.send(message(50))
			within(t, fmt.Sprintf("%s message %d", address, i), take(t, c, 50), stamp.UpperBound, sent)
		}
		// If two segments are read together, only the last segment's stamp is left.
		first := client.send(message(50))
		last := client.send(message(50))
		testkit.Result(io.ReadFull(c, make([]byte, 100))).Must(t)
		for i := range int64(2) {
			within(t, fmt.Sprintf("%s merged %d", address, i), c.Arrival(500+50*i, 550+50*i), stamp.UpperBound, span{first.from, last.to})
		}
		c.Ignore()
		if a := withSend(t, client, c); a.Source != stamp.Read {
			t.Errorf("ignored: %+v", a)
		}
		c.Release()
	}
}

// recvmsg must fail in the same ways as reading a net.Conn.
func TestTimestampingReadsLikeAConn(t *testing.T) {
	src, err := openTimestamping(Config{})
	s := stamper(t, src, err)
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	buf := make([]byte, 10)

	client := dial(t, ln, net.Dialer{})
	nc := accept(t, ln)
	c := s.Track(nc)
	testkit.Result(c.Read(nil)).Equal(t, 0, "into nothing")
	testkit.Must(t, nc.SetReadDeadline(time.Unix(1, 0)))
	if n, err := c.Read(buf); n != 0 || !os.IsTimeout(err) {
		t.Errorf("after the deadline: %d, %v", n, err)
	}
	testkit.Must(t, nc.SetReadDeadline(time.Time{}))
	client.send(message(4))
	testkit.Result(c.Read(buf)).Equal(t, 4, "four bytes")
	client.CloseWrite()
	if n, err := c.Read(buf); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d, %v", n, err)
	}
	nc.Close()
	if n, err := c.Read(buf); n != 0 || err == nil || err == io.EOF {
		t.Errorf("closed: %d, %v", n, err)
	}

	client = dial(t, ln, net.Dialer{})
	c = s.Track(accept(t, ln))
	client.SetLinger(0)
	client.Close()
	if n, err := c.Read(buf); n != 0 || !strings.Contains(fmt.Sprint(err), "connection reset") {
		t.Errorf("reset: %d, %v", n, err)
	}
}

// A stamp from before a change of the wall clock is not used.
func TestTimestampingNoticesClockSteps(t *testing.T) {
	src, err := openTimestamping(Config{})
	s := stamper(t, src, err)
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	withSend(t, client, c)
	c.tr.(*cmsgConn).clocks.offset += mono.Time(time.Second) // as if the wall clock had been set back since
	if a := withSend(t, client, c); a.Source != stamp.Read {
		t.Errorf("after a step: %+v", a)
	}
	if a := withSend(t, client, c); a.Source != stamp.UpperBound {
		t.Errorf("later: %+v", a)
	}
	testkit.Equal(t, s.Info().Counters.StampsMissing, 1, "stamps missing")
}

func TestAutoTakesTheBest(t *testing.T) {
	needKernel(t)
	var log bytes.Buffer
	s := testkit.Result(Open(Auto, Config{}, slog.New(slog.NewTextHandler(&log, nil)))).Must(t)
	defer s.Close()
	in := s.Info()
	if in.Source != "ebpf" || in.Reason != "" || in.Pinned || in.Kernel == "unknown" {
		t.Errorf("%+v", in)
	}
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "source=ebpf") {
		t.Errorf("log %q, want one line with the source", text)
	}
}

func TestOnlyRequestedSourcesAreTried(t *testing.T) {
	s := testkit.Result(Open(Timestamping, Config{}, slog.New(slog.DiscardHandler))).Must(t)
	defer s.Close()
	if in := s.Info(); in.Source != "sotimestamp" || in.Reason != "" {
		t.Errorf("%+v", in)
	}
}

func TestCloseWithRingsInUseSaysSo(t *testing.T) {
	needKernel(t)
	f := testkit.Result(load(Config{}.withDefaults(), chunkSlots, false)).Must(t)
	s := &Stamper{log: slog.New(slog.DiscardHandler), mode: Auto, src: f}
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	c := s.Track(accept(t, ln))
	withSend(t, client, c)
	testkit.ErrorHas(t, s.Close(), "1 connections not released", "close")
	// The memory still exists, and the socket keeps the program.
	within(t, "after close", withSend(t, client, c), stamp.Exact, span{0, mono.Never})
}

func TestClockShift(t *testing.T) {
	for _, tc := range []struct {
		text string
		want mono.Time
		bad  bool
	}{
		{"monotonic           0         0\nboottime            0         0\n", 0, false},
		{"monotonic        1000        5\nboottime 0 0\n", 1000e9 + 5, false},
		{"boottime 7 7\nmonotonic -2 500000000\n", -15e8, false},
		{"", 0, false},
		{"monotonic x\n", 0, true},
	} {
		path := t.TempDir() + "/offsets"
		testkit.Must(t, os.WriteFile(path, []byte(tc.text), 0o600))
		if got, err := clockShift(path); got != tc.want || (err != nil) != tc.bad {
			t.Errorf("%q: %d, %v, want %d", tc.text, got, err, tc.want)
		}
	}
}

func TestSlotsGrowRestAndEnd(t *testing.T) {
	needKernel(t)
	f, err := load(Config{MaxConns: 2500, RingRecords: stamp.MinRing}.withDefaults(), chunkSlots, false)
	stamper(t, f, err)
	f.slots.quarantine = restTime
	var taken []uint32
	now := mono.Time(1)
	for len(taken) < 2500 {
		slot, mem, err := f.slots.acquire(now)
		if err == errSlotSoon {
			f.slots.growing.Wait()
			slot, mem, err = f.slots.acquire(now)
		}
		if err != nil {
			t.Fatalf("after %d: %v (%v)", len(taken), err, f.slots.mu.failure)
		}
		testkit.MustEqual(t, len(mem), slotSize(stamp.MinRing), "bytes")
		taken = append(taken, slot)
	}
	if _, _, err := f.slots.acquire(now); err != errNoSlot {
		t.Errorf("beyond the limit: %v", err)
	}
	testkit.Equal(t, len(f.slots.mu.chunks), 3, "chunks")
	different := slices.Clone(taken)
	slices.Sort(different)
	if different = slices.Compact(different); len(different) != 2500 || different[2499] != 2499 {
		t.Errorf("%d different slots up to %d", len(different), different[len(different)-1])
	}
	for i, slot := range taken {
		f.slots.release(slot, now+mono.Time(i))
	}
	if _, _, err := f.slots.acquire(now + restTime - 1); err != errNoSlot {
		t.Errorf("all at rest: %v", err)
	}
	if slot, _, err := f.slots.acquire(now + restTime); err != nil || slot != taken[0] {
		t.Errorf("slot %d, %v, want the one that rested longest, %d", slot, err, taken[0])
	}
	if _, _, err := f.slots.acquire(now + restTime); err != errNoSlot {
		t.Errorf("the rest at rest: %v", err)
	}
	f.slots.release(taken[0], now)
}
