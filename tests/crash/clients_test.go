package crash

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// size returns a number from the environment, or otherwise, which fits into a test run.
func size(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s is %q", name, text)
	}
	return n
}

// descriptors counts the open files of a process; -1 if the count is not available.
func descriptors(d *local.Process) int {
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.Pid()))
	if err != nil {
		return -1
	}
	return len(all)
}

// resident returns the memory of a process, now and at its peak, in KiB; zeros if not available.
func resident(d *local.Process) (now, most int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.Pid()))
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); len(fields) == 3 {
			n, _ := strconv.Atoi(fields[1])
			switch fields[0] {
			case "VmRSS:":
				now = n
			case "VmHWM:":
				most = n
			}
		}
	}
	return now, most
}

// state of the channel c of topic t.
type state struct {
	Depth    int
	InFlight int `json:"in_flight_count"`
	Deferred int `json:"deferred_count"`
	Clients  int `json:"client_count"`

	// unfinished counts the channel's messages and the messages that the topic has not released. A broker
	// that has just started releases the messages that it reads from the log.
	unfinished int
}

func channel(t *testing.T, d *local.Process) (s state) {
	t.Helper()
	_, body := ask(t, "http://"+d.HTTP+"/stats?format=json&topic=t&channel=c&include_clients=false", "")
	var all struct {
		Topics []struct {
			Depth    int
			Channels []state
		}
	}
	testkit.Must(t, json.Unmarshal([]byte(body), &all))
	if len(all.Topics) > 0 && len(all.Topics[0].Channels) > 0 {
		s = all.Topics[0].Channels[0]
		s.unfinished = all.Topics[0].Depth + s.Depth + s.InFlight + s.Deferred
	}
	return s
}

// subscribe opens a subscriber of t/c with this RDY.
func subscribe(t *testing.T, address string, rdy int) net.Conn {
	t.Helper()
	nc := testkit.Result(dial(address)).Must(t)
	testkit.Result(nc.Write(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), rdy))).Must(t)
	return nc
}

// consume calls pause before it finishes each message, until the connection ends, and records the
// messages' numbers.
func consume(nc net.Conn, pause func(), got func(number uint32)) {
	r := bufio.NewReaderSize(nc, 64<<10)
	for {
		m, err := nextMessage(nc, r)
		if err != nil {
			return
		}
		pause()
		if _, err := nc.Write(wire.AppendFin(nil, m.ID)); err != nil {
			return
		}
		got(number(m))
	}
}

// A channel has subscribers that read nothing, that vanish with their messages, and that are slow.
// Every message is finished by a subscriber, publishers are not delayed, and the subscriber that reads
// nothing is disconnected.
func TestBadSubscribers(t *testing.T) {
	const messages = 3000
	d := localtest.NSQD(t, "", "--msg-timeout=1s", "--write-timeout=1s", "--mem-queue-size=500")
	var finished [messages]atomic.Bool
	var left atomic.Int64
	left.Store(messages)
	note := func(n uint32) {
		if n < messages && !finished[n].Swap(true) {
			left.Add(-1)
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()

	stuck := subscribe(t, d.TCP, 2500)
	defer stuck.Close()
	testkit.Must(t, stuck.(*net.TCPConn).SetReadBuffer(4<<10))
	slow := subscribe(t, d.TCP, 10)
	defer slow.Close()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	wg.Go(func() { consume(slow, func() { <-tick.C }, note) })
	done := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			nc, err := dial(d.TCP) // takes something, and resets the connection
			if err != nil {
				return
			}
			_, err = nc.Write(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 100))
			if err == nil {
				err = nc.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // there may be nothing to take
			}
			if err == nil {
				_, _, _ = frames.Read(nc, maxFrame)
				_, _, _ = frames.Read(nc, maxFrame)
			}
			_ = nc.(*net.TCPConn).SetLinger(0)
			nc.Close()
		}
	})

	// Ten kilobytes each: unread messages fill sockets and queues.
	nc, err := dial(d.TCP)
	testkit.Must(t, err)
	defer nc.Close()
	r := bufio.NewReader(nc)
	b := make([]byte, 10_000)
	for n := range uint32(messages) {
		binary.BigEndian.PutUint32(b, n)
		testkit.Result(nc.Write(wire.AppendPub(nil, "t", b))).Must(t)
		testkit.Result(frame(r)).MustEqual(t, "OK", "message %d", n)
	}
	good := subscribe(t, d.TCP, 200)
	defer good.Close()
	wg.Go(func() { consume(good, func() {}, note) })
	testkit.WaitFor(t, "finished", func() bool { return left.Load() == 0 })
	close(done)
	testkit.WaitFor(t, "empty", func() bool { s := channel(t, d); return s.Depth == 0 && s.InFlight == 0 })
	testkit.WaitFor(t, "without the one that reads nothing", func() bool { return channel(t, d).Clients == 2 })
	slow.Close()
	good.Close()
}

// Publishers announce a megabyte each and send it byte by byte. They cost neither the announced memory
// nor other clients' time, and are disconnected when they are silent.
func TestSlowPublishers(t *testing.T) {
	const slow = 300
	d := localtest.NSQD(t, "", "--client-timeout=10s") // longer than a busy machine stands still
	before, _ := resident(d)
	var conns []net.Conn
	for range slow {
		nc, err := dial(d.TCP)
		testkit.Must(t, err)
		defer nc.Close()
		if _, err := nc.Write(append([]byte("PUB t\n"), 0, 0x10, 0, 0)); err != nil { // 1 MiB
			t.Fatal(err)
		}
		conns = append(conns, nc)
	}
	testkit.WaitFor(t, "connected", func() bool { return connections(t, d) == slow })
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	good, err := dial(d.TCP)
	testkit.Must(t, err)
	defer good.Close()
	r := bufio.NewReader(good)
	for range 100 { // a second, and a hundred bytes of each
		<-tick.C
		for _, nc := range conns {
			testkit.Result(nc.Write([]byte{'x'})).Must(t)
		}
		testkit.Result(good.Write(wire.AppendPub(nil, "t", []byte("x")))).Must(t)
		testkit.Result(reply(good, r)).MustEqual(t, "OK")
	}
	if now, _ := resident(d); now-before > 100<<10 {
		t.Errorf("from %d to %d KiB: that is what they announced, not what they sent", before, now)
	} else {
		t.Logf("%d publishers that announced 300 MiB: from %d to %d KiB", slow, before, now)
	}
	for _, nc := range conns {
		if _, err := io.Copy(io.Discard, nc); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("a silent publisher was not closed")
		}
	}
}

// All connections come at once, as after a restart. Each is served, and its resources are released at
// the end.
func TestManyConnectionsAtOnce(t *testing.T) {
	many := size(t, "SRTM_CRASH_CONNECTIONS", 1000)
	d := localtest.NSQD(t, "", "--mem-queue-size=20000")
	testkit.WaitFor(t, "up", func() bool { return connections(t, d) == 0 })
	idle := descriptors(d)
	start := time.Now()
	conns := make([]net.Conn, many)
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for i := range many {
		wg.Go(func() {
			nc, err := dial(d.TCP)
			if err == nil {
				conns[i] = nc
				_, err = nc.Write(wire.AppendPub(nil, "t", []byte("x")))
			}
			if err == nil {
				var answer string
				if answer, err = frame(nc); err == nil && answer != "OK" {
					err = errors.New(answer)
				}
			}
			if err != nil {
				failed.Store(&err)
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
	if n := connections(t, d); n != many {
		t.Errorf("%d connections, want %d", n, many)
	}
	now, _ := resident(d)
	t.Logf("%d connections, each with a message answered, after %v; %d KiB, %d descriptors", many, took, now, descriptors(d))
	for _, nc := range conns {
		nc.Close()
	}
	testkit.WaitFor(t, "left by all", func() bool { return connections(t, d) == 0 })
	// The rings for arrival stamps stay, for the next connections. They are in BPF maps of 1,024 rings
	// each. The hook makes another map before only half of a map, or of the rings in use, is left
	// (kernel/hook).
	maps := 2 + many*3/2/1024
	testkit.WaitFor(t, "without their descriptors", func() bool { return descriptors(d) <= idle+maps })
}

// Without free descriptors, a broker continues with its connections, and accepts more as soon as
// descriptors are free again.
func TestOutOfDescriptors(t *testing.T) {
	limited := filepath.Join(t.TempDir(), "limited")
	testkit.Must(t, os.WriteFile(limited, []byte("#!/bin/sh\nulimit -Sn 60 && ulimit -Hn 60 || exit 9\nexec "+localtest.Program(t, "nsqd")+" \"$@\"\n"), 0o700))
	d := localtest.NSQD(t, limited, "--mem-queue-size=10")
	good, err := dial(d.TCP)
	testkit.Must(t, err)
	defer good.Close()
	r := bufio.NewReader(good)
	var accepted []string
	publish := func() string {
		name := fmt.Sprintf("%08d", len(accepted))
		testkit.Result(good.Write(wire.AppendPub(nil, "t", []byte(name)))).Must(t)
		answer, err := frame(r)
		if err != nil {
			t.Fatalf("the connection did not live: %v", err)
		}
		if answer == "OK" {
			accepted = append(accepted, name)
		}
		return answer
	}
	testkit.MustEqual(t, publish(), "OK")
	testkit.WaitFor(t, "able to write", func() bool { // the metadata, for instance
		code, _ := ask(t, "http://"+d.HTTP+"/ping", "")
		return code == http.StatusOK
	})
	var conns []net.Conn
	for range 150 { // the kernel accepts connections that the process does not
		nc := testkit.Result(dial(d.TCP)).Must(t)
		conns = append(conns, nc)
	}
	testkit.WaitFor(t, "out of descriptors", func() bool { return strings.Contains(d.Output(), "too many open files") })
	// The broker has memory for some messages. A disk that it cannot open is no reason to exit.
	for range 200 {
		if got := publish(); got != "OK" && !strings.HasPrefix(got, "E_QUEUE_FULL") {
			t.Fatalf("without descriptors: %q", got)
		}
	}
	for _, nc := range conns {
		nc.Close()
	}
	testkit.WaitFor(t, "accepting again", func() bool {
		nc := testkit.Result(dial(d.TCP)).Must(t)
		defer nc.Close()
		testkit.Must(t, nc.SetDeadline(time.Now().Add(5*time.Second)))
		_, err := nc.Write([]byte("SUB t c\n"))
		if err != nil {
			return false
		}
		answer, err := frame(nc)
		return err == nil && answer == "OK"
	})
	testkit.WaitFor(t, "well", func() bool {
		code, _ := ask(t, "http://"+d.HTTP+"/ping", "")
		return code == http.StatusOK && publish() == "OK"
	})
	p := &filler{t: t, accepted: accepted}
	if got := p.collect(d.TCP, len(accepted)); missing(accepted, got) > 0 {
		t.Errorf("%d of %d accepted are lost", missing(accepted, got), len(accepted))
	}
}

// Waiting messages survive the broker's restart.
func TestRestartWithABacklog(t *testing.T) {
	messages := size(t, "SRTM_CRASH_BACKLOG", 20_000)
	for _, durability := range []string{"memory", "fsync"} {
		t.Run(durability, func(t *testing.T) {
			dir := t.TempDir()
			flags := []string{"--durability=" + durability}
			d := withChannel(t, dir, flags...)
			start := time.Now()
			fill(t, d, 0, messages)
			published := time.Since(start)
			start = time.Now()
			_, most := resident(d)
			testkit.Must(t, d.Stop())
			stopped := time.Since(start)
			start = time.Now()
			d = withChannel(t, dir, flags...)
			defer func() {
				testkit.NoError(t, d.Stop())
			}()
			started := time.Since(start)
			now, _ := resident(d)
			testkit.WaitFor(t, "all there", func() bool { return channel(t, d).Depth == messages })
			start = time.Now()
			sub := subscribe(t, d.TCP, 2500)
			defer sub.Close()
			next := uint32(0)
			done := errors.New("done")
			err := take(sub, func(m wire.Message) error {
				if n := number(m); n != next {
					return fmt.Errorf("got %d, want %d", n, next)
				}
				if next++; int(next) == messages {
					return done
				}
				return nil
			})
			if !errors.Is(err, done) {
				t.Fatal(err)
			}
			_, mostAfter := resident(d)
			t.Logf("%d messages of 200 bytes: published in %v (at most %d KiB), ended in %v, up again after %v with %d KiB, all taken in order after %v more (at most %d KiB)",
				messages, published, most, stopped, started, now, time.Since(start), mostAfter)
		})
	}
}

// reply returns the next frame that is not a heartbeat, and answers heartbeats.
func reply(nc net.Conn, r io.Reader) (string, error) {
	for {
		answer, err := frame(r)
		if err != nil || answer != "_heartbeat_" {
			return answer, err
		}
		if _, err := nc.Write([]byte("NOP\n")); err != nil {
			return "", err
		}
	}
}

// nextMessage returns the next message, and answers heartbeats before the message.
func nextMessage(nc net.Conn, r io.Reader) (wire.Message, error) {
	for {
		kind, data, err := frames.Read(r, maxFrame)
		if err == nil && kind == wire.FrameMessage {
			return wire.ParseMessage(data)
		}
		if err == nil && string(data) == "_heartbeat_" {
			_, err = nc.Write(wire.AppendNop(nil))
		}
		if err != nil {
			return wire.Message{}, err
		}
	}
}

// take finishes messages until got returns an error, and returns the error.
func take(nc net.Conn, got func(wire.Message) error) error {
	r := bufio.NewReaderSize(nc, 64<<10)
	var out []byte
	for {
		if err := nc.SetDeadline(time.Now().Add(forever)); err != nil {
			return err
		}
		m, err := nextMessage(nc, r)
		if err != nil {
			return err
		}
		out = wire.AppendFin(out, m.ID)
		if r.Buffered() == 0 || len(out) > 16<<10 {
			if _, err := nc.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		if err := got(m); err != nil {
			_, fin := nc.Write(out)
			return errors.Join(err, fin)
		}
	}
}

// number returns the number at the start of a body.
func number(m wire.Message) uint32 { return binary.BigEndian.Uint32(m.Body) }
