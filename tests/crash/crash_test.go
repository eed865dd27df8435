package crash

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// forever is the time to wait for messages that must come.
const forever = testkit.Hang

func TestMain(m *testing.M) { localtest.Main(m) }

// publisher sends its numbers, pipelined, until the connection ends.
type publisher struct {
	id       uint32
	accepted uint32 // numbers 0 .. accepted-1 were answered with OK
	sent     uint32
}

func dial(address string) (net.Conn, error) {
	nc, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	if err := nc.SetDeadline(time.Now().Add(testkit.Hang)); err != nil {
		return nil, err
	}
	_, err = nc.Write(wire.AppendMagic(nil))
	return nc, err
}

func body(publisher, number uint32) []byte {
	b := binary.BigEndian.AppendUint32(nil, publisher)
	return binary.BigEndian.AppendUint32(b, number)
}

// run publishes on one connection until it ends. window bounds the unanswered messages. answered is called
// after each OK.
func (p *publisher) run(address string, window int, answered func()) error {
	nc, err := dial(address)
	if err != nil {
		return err
	}
	defer nc.Close()
	r := bufio.NewReader(nc)
	for {
		var out []byte
		n := 0
		for ; n < window; n++ {
			out = wire.AppendPub(out, "t", body(p.id, p.sent))
			p.sent++
		}
		if _, err := nc.Write(out); err != nil {
			return nil // the broker has ended, as the test wants
		}
		for ; n > 0; n-- {
			answer, err := frame(r)
			if err != nil || strings.HasPrefix(answer, "E_PUB_FAILED") {
				return nil // the broker has ended, or is about to end and accepts nothing more
			}
			if answer != "OK" {
				return fmt.Errorf("publisher %d: answer %q", p.id, answer)
			}
			p.accepted++
			answered()
		}
	}
}

func frame(r io.Reader) (data string, err error) {
	_, b, err := frames.Read(r, maxFrame)
	return string(b), err
}

// maxFrame is more than a broker sends here.
const maxFrame = 16 << 20

// collect takes all messages of a channel until it has been silent for patience, and returns the
// deliveries in order.
func collect(t *testing.T, address, channel string, total int, patience time.Duration) (got [][2]uint32) {
	t.Helper()
	nc := testkit.Result(dial(address)).Must(t)
	defer nc.Close()
	_, err := nc.Write(wire.AppendRdy(wire.AppendSub(nil, "t", channel), 500))
	testkit.Must(t, err)
	r := bufio.NewReaderSize(nc, 64<<10)
	var buf []byte
	seen := map[[2]uint32]bool{}
	for {
		// Once every accepted message has arrived, only duplicates and messages stored without an
		// answer can follow: wait for them a moment.
		if len(seen) >= total {
			patience = 500 * time.Millisecond
		}
		testkit.Must(t, nc.SetReadDeadline(time.Now().Add(patience)))
		var head [4]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return got
			}
			t.Fatal(err)
		}
		buf = slices.Grow(buf[:0], int(binary.BigEndian.Uint32(head[:])))[:binary.BigEndian.Uint32(head[:])]
		testkit.Result(io.ReadFull(r, buf)).Must(t)
		if wire.FrameType(binary.BigEndian.Uint32(buf)) != wire.FrameMessage {
			continue // OK, or a heartbeat: the test is shorter than two heartbeat intervals
		}
		m := testkit.Result(wire.ParseMessage(buf[4:])).Must(t)
		k := [2]uint32{binary.BigEndian.Uint32(m.Body), binary.BigEndian.Uint32(m.Body[4:])}
		got = append(got, k)
		seen[k] = true
		testkit.Result(nc.Write(wire.AppendFin(nil, m.ID))).Must(t)
	}
}

// crash runs publishers against a broker, ends the broker a random time after the first OK, starts it again
// and returns the channel's deliveries.
func crash(t *testing.T, end func(*local.Process) error, patience time.Duration, flags ...string) (publishers []*publisher, got [][2]uint32) {
	t.Helper()
	rng := testkit.Rand(t)
	dir := t.TempDir()
	flags = append([]string{"--data-path=" + dir, "--mem-queue-size=100"}, flags...)
	d := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, flags...)).Must(t)
	sub, err := dial(d.TCP) // makes the channel, and takes nothing
	testkit.Must(t, err)
	testkit.Result(sub.Write(wire.AppendSub(nil, "t", "c"))).Must(t)
	testkit.Result(io.ReadFull(sub, make([]byte, 10))).Must(t)
	answered := make(chan struct{})
	first := sync.OnceFunc(func() { close(answered) })
	var wg sync.WaitGroup
	for i := range 8 {
		p := &publisher{id: uint32(i)}
		publishers = append(publishers, p)
		wg.Go(func() {
			testkit.NoError(t, p.run(d.TCP, 1+i*3, first))
		})
	}
	select {
	case <-answered:
	case <-time.After(testkit.Hang):
		t.Fatal("no publish was answered")
	}
	timer := time.NewTimer(300*time.Millisecond + time.Duration(rng.IntN(700))*time.Millisecond)
	<-timer.C
	testkit.Must(t, end(d))
	wg.Wait()
	sub.Close()

	again, err := local.NSQD(localtest.Program(t, "nsqd"), dir, flags...)
	testkit.Must(t, err)
	total := 0
	for _, p := range publishers {
		total += int(p.accepted)
	}
	got = collect(t, again.TCP, "c", total, patience)
	if err := again.Stop(); err != nil {
		t.Errorf("%v\n%s", err, again.Output())
	}
	return publishers, got
}

// account counts messages by id.
func account(t *testing.T, publishers []*publisher, got [][2]uint32) (accepted, lost, duplicated, reordered, unanswered int) {
	t.Helper()
	times := map[[2]uint32]int{}
	last := map[uint32]uint32{}
	for _, k := range got {
		times[k]++
		if times[k] > 1 {
			duplicated++
		} else if before, any := last[k[0]]; any && k[1] < before {
			reordered++
		} else {
			last[k[0]] = k[1]
		}
	}
	for _, p := range publishers {
		accepted += int(p.accepted)
		for n := range p.sent {
			switch there := times[[2]uint32{p.id, n}] > 0; {
			case n < p.accepted && !there:
				lost++
			case n >= p.accepted && there:
				unanswered++
			}
		}
	}
	t.Logf("%d accepted: %d lost, %d twice, %d out of order; %d delivered that were not answered", accepted, lost, duplicated, reordered, unanswered)
	return
}

// An OK guarantees storage under each of these flags.
func TestKillLosesNothingThatWasStored(t *testing.T) {
	for _, flag := range []string{"--durability=fsync", "--durability=fsync", "--mem-queue-size=0"} {
		t.Run(flag, func(t *testing.T) {
			publishers, got := crash(t, (*local.Process).Kill, forever, flag)
			accepted, lost, duplicated, reordered, _ := account(t, publishers, got)
			if accepted == 0 || lost > 0 || duplicated > 0 || reordered > 0 {
				t.Errorf("%d accepted, %d lost, %d twice, %d out of order", accepted, lost, duplicated, reordered)
			}
		})
	}
}

// A finished message may come again only if the finish was not recorded yet, which takes a fifth of a
// second.
func TestKillWhileMessagesAreFinished(t *testing.T) {
	const recorded = 3 * time.Second // generous: the machine may be busy
	for _, flag := range []string{"--durability=fsync", "--mem-queue-size=0", "--durability=memory"} {
		t.Run(flag, func(t *testing.T) {
			dir := t.TempDir()
			flags := []string{"--data-path=" + dir, "--mem-queue-size=100", flag}
			d := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, flags...)).Must(t)
			finished := map[uint32]time.Time{}
			sub := subscribe(t, d.TCP, 200)
			defer sub.Close()
			var wg sync.WaitGroup
			wg.Go(func() {
				_ = take(sub, func(m wire.Message) error { finished[number(m)] = time.Now(); return nil }) // until the kill
			})
			pub, err := dial(d.TCP)
			testkit.Must(t, err)
			defer pub.Close()
			var accepted uint32
			r := bufio.NewReader(pub)
			wg.Go(func() {
				// Two thousand messages a second, so that the consumer keeps up.
				_ = every(t.Context(), 5*time.Millisecond, func(i int) error {
					var bodies [][]byte
					for n := range uint32(10) {
						bodies = append(bodies, body(0, accepted+n)[4:])
					}
					if _, err := pub.Write(wire.AppendMpub(nil, "t", bodies)); err != nil {
						return err
					}
					if answer, err := reply(pub, r); err != nil || answer != "OK" {
						return fmt.Errorf("%q %w", answer, err)
					}
					accepted += 10
					return nil
				})
			})
			timer := time.NewTimer(recorded + time.Second)
			<-timer.C
			testkit.Must(t, d.Kill())
			killed := time.Now()
			wg.Wait()

			again := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, flags...)).Must(t)
			twice, late, last := 0, 0, map[uint32]bool{}
			count := func(m wire.Message) error {
				n := number(m)
				at, before := finished[n]
				if before || last[n] {
					twice++
				}
				if before && killed.Sub(at) > recorded {
					late++
				}
				last[n] = true
				return nil
			}
			rest := subscribe(t, again.TCP, 500)
			defer rest.Close()
			wg.Go(func() { _ = take(rest, count) })
			testkit.WaitFor(t, "all taken", func() bool {
				s := channel(t, again)
				return s.Clients == 1 && s.Depth == 0 && s.InFlight == 0
			})
			testkit.NoError(t, again.Stop())
			wg.Wait()
			lost := 0
			for n := range accepted {
				if _, before := finished[n]; !before && !last[n] {
					lost++
				}
			}
			t.Logf("%d accepted, %d finished before: %d lost, %d twice", accepted, len(finished), lost, twice)
			if accepted == 0 || len(finished) == 0 {
				t.Error("nothing happened")
			}
			if late > 0 {
				t.Errorf("%d that were finished %v before the kill came again", late, recorded)
			}
			if flag != "--durability=memory" && lost > 0 {
				t.Errorf("%d lost", lost)
			}
		})
	}
}

func TestSigtermLosesNothing(t *testing.T) {
	for _, durability := range []string{"memory", "fsync"} {
		t.Run(durability, func(t *testing.T) {
			publishers, got := crash(t, (*local.Process).Stop, forever, "--durability="+durability, "--drain-timeout=200ms")
			accepted, lost, duplicated, reordered, _ := account(t, publishers, got)
			if accepted == 0 || lost > 0 || duplicated > 0 || reordered > 0 {
				t.Errorf("%d accepted, %d lost, %d twice, %d out of order", accepted, lost, duplicated, reordered)
			}
		})
	}
}

// In memory mode a kill may lose messages in memory and on their way to disk. The broker must still
// start, and deliver nothing that was never sent.
func TestKillInMemoryModeLosesAtMostWhatMemoryHeld(t *testing.T) {
	publishers, got := crash(t, (*local.Process).Kill, 2*time.Second, "--durability=memory")
	sent := map[uint32]uint32{}
	for _, p := range publishers {
		sent[p.id] = p.sent
	}
	for _, k := range got {
		if k[1] >= sent[k[0]] {
			t.Fatalf("publisher %d never sent %d", k[0], k[1])
		}
	}
	account(t, publishers, got)
}

// If a page at the end of the log is lost, only the messages in the page are lost.
func TestATornEndCostsItsMessagesAlone(t *testing.T) {
	const record = 56 // bytes of a message of 8, at least
	for _, flag := range []string{"--durability=fsync", "--mem-queue-size=0"} {
		t.Run(flag, func(t *testing.T) {
			rng, dir := testkit.Rand(t), t.TempDir()
			flags := []string{"--data-path=" + dir, "--mem-queue-size=100", flag}
			d := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, flags...)).Must(t)
			sub, err := dial(d.TCP) // makes the channel, and takes nothing
			testkit.Must(t, err)
			defer sub.Close()
			testkit.Result(sub.Write(wire.AppendSub(nil, "t", "c"))).Must(t)
			testkit.Result(io.ReadFull(sub, make([]byte, 10))).Must(t)
			p := new(publisher)
			var wg sync.WaitGroup
			wg.Go(func() { testkit.NoError(t, p.run(d.TCP, 20, func() {})) })
			enough := 500 + rng.IntN(1000)
			testkit.WaitFor(t, "messages stored", func() bool { return channel(t, d).Depth > enough })
			testkit.Must(t, d.Kill())
			wg.Wait()

			files := testkit.Result(filepath.Glob(filepath.Join(dir, "messages", "t.log", "*.seg"))).Must(t)
			last := slices.Max(files)
			written := len(bytes.TrimRight(testkit.Result(os.ReadFile(last)).Must(t), "\x00")) // zeros are written ahead
			cut := 1 + rng.IntN(min(8<<10, written-1))
			testkit.Must(t, os.Truncate(last, int64(written-cut)))

			again := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), dir, flags...)).Must(t)
			var got []uint32
			rest := subscribe(t, again.TCP, 500)
			defer rest.Close()
			wg.Go(func() {
				_ = take(rest, func(m wire.Message) error { // until the end
					got = append(got, binary.BigEndian.Uint32(m.Body[4:]))
					return nil
				})
			})
			testkit.WaitFor(t, "all taken", func() bool {
				s := channel(t, again)
				return s.Clients == 1 && s.Depth == 0 && s.InFlight == 0
			})
			testkit.NoError(t, again.Stop())
			wg.Wait()
			for i, n := range got {
				if n != uint32(i) {
					t.Fatalf("message %d is number %d", i, n)
				}
			}
			if lost := int(p.accepted) - len(got); lost > cut/record+1 {
				t.Errorf("%d of %d are lost with %d bytes", lost, p.accepted, cut)
			}
		})
	}
}
