//go:build linux

package load

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/wire"
)

func TestMain(m *testing.M) { localtest.Main(m) }

func dialects() map[string]Dialect {
	return map[string]Dialect{"nsq": nsqDialect(""), "nats": natsDialect(), "redis": redisDialect(), "mqtt": mqttDialect(), "jetstream": jetstreamDialect()}
}

func TestFrames(t *testing.T) {
	for name, want := range map[string]string{
		"nsq":       "PUB bench\n\x00\x00\x00\x08........PUB bench\n\x00\x00\x00\x08........",
		"nats":      "PUB bench 8\r\n........\r\nPUB bench 8\r\n........\r\n",
		"redis":     strings.Repeat("*8\r\n$4\r\nXADD\r\n$5\r\nbench\r\n$6\r\nMAXLEN\r\n$1\r\n~\r\n$7\r\n2000000\r\n$1\r\n*\r\n$1\r\nd\r\n$8\r\n........\r\n", 2),
		"jetstream": "PUB bench _INBOX.p3 8\r\n........\r\nPUB bench _INBOX.p3 8\r\n........\r\n",
		"mqtt":      "\x32\x11\x00\x05bench\x00\x01........\x32\x11\x00\x05bench\x00\x02........",
	} {
		d := dialects()[name]
		frame, bodies := d.frame(target{Topic, "p3"}, 8, 2, false)
		if d.number != nil {
			d.number(frame, bodies, 0)
		}
		for _, at := range bodies {
			copy(frame[at:], "........")
		}
		if string(frame) != want {
			t.Errorf("%s:\n%q, want\n%q", name, frame, want)
		}
	}
	frame, bodies := nsqDialect("").frame(target{topic: Topic}, 8, 2, true)
	for _, at := range bodies {
		copy(frame[at:], "........")
	}
	if want := "MPUB bench\n\x00\x00\x00\x1c\x00\x00\x00\x02\x00\x00\x00\x08........\x00\x00\x00\x08........"; string(frame) != want {
		t.Errorf("MPUB:\n%q, want\n%q", frame, want)
	}
	large, at := mqttDialect().frame(target{topic: Topic}, 300, 1, false)
	if len(large) != 3+7+2+300 || at[0] != 12 || large[1] != 0xb5 || large[2] != 0x02 {
		t.Errorf("a long packet of MQTT begins %x", large[:12])
	}
}

func TestPacketNumbersAreNeverZero(t *testing.T) {
	d := mqttDialect()
	frame, bodies := d.frame(target{topic: Topic}, 8, 3, false)
	for seq := range 1 << 16 {
		d.number(frame, bodies, uint16(seq))
		for _, at := range bodies {
			if binary.BigEndian.Uint16(frame[at-2:]) == 0 {
				t.Fatalf("frame %d has a packet without a number", seq)
			}
		}
	}
}

var delivered = map[string]struct{ in, reply string }{
	"nsq": {
		string(wire.AppendMessage(wire.AppendResponse(wire.AppendMessage(nil, 1, 1, wire.MessageID{'i', 'd'}, []byte("first...")), "_heartbeat_"), 1, 1, wire.MessageID{'i', 'e'}, []byte("second.."))),
		string(wire.AppendFin(wire.AppendNop(wire.AppendFin(nil, wire.MessageID{'i', 'd'})), wire.MessageID{'i', 'e'})),
	},
	"nats": {"MSG bench 1 8\r\nfirst...\r\nPING\r\nMSG bench 1 8\r\nsecond..\r\n", "PONG\r\n"},
	"redis": {
		"*1\r\n*2\r\n$5\r\nbench\r\n*2\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nd\r\n$8\r\nfirst...\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nd\r\n$8\r\nsecond..\r\n:2\r\n",
		"*5\r\n$4\r\nXACK\r\n$5\r\nbench\r\n$2\r\nc0\r\n$3\r\n1-0\r\n$3\r\n1-1\r\n*11\r\n$10\r\nXREADGROUP\r\n$5\r\nGROUP\r\n$2\r\nc0\r\n$1\r\nc\r\n$5\r\nCOUNT\r\n$3\r\n500\r\n$5\r\nBLOCK\r\n$1\r\n0\r\n$7\r\nSTREAMS\r\n$5\r\nbench\r\n$1\r\n>\r\n",
	},
	"jetstream": {"MSG deliver.bench.c0 1 $JS.ACK.1 8\r\nfirst...\r\nPING\r\nMSG deliver.bench.c0 1 $JS.ACK.2 8\r\nsecond..\r\n", "PUB $JS.ACK.1 0\r\n\r\nPONG\r\nPUB $JS.ACK.2 0\r\n\r\n"},
	"mqtt":      {"\x32\x11\x00\x05bench\x00\x07first...\xd0\x00\x32\x11\x00\x05bench\x01\x02second..", "\x40\x02\x00\x07\x40\x02\x01\x02"},
}

func TestDeliveriesInAnyPieces(t *testing.T) {
	for name, c := range delivered {
		d := dialects()[name]
		for step := 1; step <= len(c.in); step++ {
			var got, reply, rest []byte
			for at := 0; at < len(c.in); at += step {
				rest = append(rest, c.in[at:min(at+step, len(c.in))]...)
				used, out, err := d.deliveries(rest, reply, source{Topic, "c0"}, func(body []byte) { got = append(got, body...) })
				if err != nil {
					t.Fatalf("%s, %d bytes at a time: %v", name, step, err)
				}
				rest, reply = rest[used:], out
			}
			if string(got) != "first...second.." || string(reply) != c.reply || len(rest) > 0 {
				t.Fatalf("%s, %d bytes at a time: %q, reply %q, rest %q", name, step, got, reply, rest)
			}
		}
	}
}

func TestAnswers(t *testing.T) {
	ok := string(wire.AppendResponse(nil, "OK"))
	for _, c := range []struct {
		name, in       string
		perFrame       int
		accepted, used int
		refusal        string
	}{
		{"nsq", ok + ok + ok[:5], 200, 400, 2 * len(ok), ""},
		{"nsq", string(wire.AppendResponse(nil, "_heartbeat_")), 1, 0, 19, ""},
		{"nsq", string(wire.AppendError(nil, &wire.Error{Code: "E_BAD_TOPIC"})), 1, 0, 0, "E_BAD_TOPIC"},
		{"jetstream", "MSG _INBOX.p3 1 2\r\n{}\r\nPING\r\nMSG _INBOX.p3 1 2\r\n{", 1, 1, 29, ""},
		{"jetstream", "MSG _INBOX.p3 1 18\r\n{\"error\":\"no room\"}\r\n", 1, 0, 0, "no room"},
		{"redis", "$3\r\n1-0\r\n$3\r\n1-1\r\n$3\r\n1-", 1, 2, 18, ""},
		{"redis", "-ERR no\r\n", 1, 0, 0, "ERR no"},
		{"redis", "!x\r\n", 1, 0, 0, "!x"},
		{"mqtt", "\x40\x02\x00\x01\x40\x02\x00\x02\x40\x02", 1, 2, 8, ""},
		{"mqtt", "\x40\xff\xff\xff\xff\x01", 1, 0, 0, "length"},
	} {
		accepted, used, err := dialects()[c.name].answers([]byte(c.in), c.perFrame)
		if c.refusal != "" {
			if err == nil || !strings.Contains(err.Error(), c.refusal) {
				t.Errorf("%s, %q: %v, want an error about %q", c.name, c.in, err, c.refusal)
			}
			continue
		}
		if accepted != c.accepted || used != c.used || err != nil {
			t.Errorf("%s, %q: %d accepted, %d used, %v; want %d, %d", c.name, c.in, accepted, used, err, c.accepted, c.used)
		}
	}
}

func FuzzDialects(f *testing.F) {
	for name, c := range delivered {
		f.Add(name, []byte(c.in), 7)
	}
	f.Add("redis", []byte("*-1\r\n$-1\r\n*0\r\n"), 3)
	f.Add("nats", []byte("MSG bench 1 -5\r\n"), 3)
	f.Add("mqtt", []byte("\x30\x80\x80\x80\x80\x01"), 3)
	f.Fuzz(func(t *testing.T, name string, in []byte, cut int) {
		d, known := dialects()[name]
		if !known {
			t.Skip("no such protocol")
		}
		take := func(in []byte) (bodies []string, used int, failed bool) {
			used, _, err := d.deliveries(in, nil, source{Topic, "c0"}, func(b []byte) { bodies = append(bodies, string(b)) })
			if used < 0 || used > len(in) {
				t.Fatalf("%s: took %d of %d bytes", name, used, len(in))
			}
			return bodies, used, err != nil
		}
		whole, used, failed := take(in)
		if d.answers != nil {
			if n, used, _ := d.answers(in, 1); n < 0 || used < 0 || used > len(in) {
				t.Fatalf("%s: %d answers, took %d of %d bytes", name, n, used, len(in))
			}
		}
		if failed {
			return
		}
		cut = min(max(cut, 0), len(in))
		first, n, _ := take(in[:cut])
		second, m, _ := take(in[n:])
		if got := slices.Concat(first, second); !slices.Equal(got, whole) || n+m != used {
			t.Fatalf("%s: cut at %d, %q and %d bytes; whole, %q and %d bytes", name, cut, got, n+m, whole, used)
		}
	})
}

func TestHandshakesReadNoFurther(t *testing.T) {
	for name, c := range map[string]struct {
		d          Dialect
		says, left string
	}{
		"nsq":       {nsqDialect(Unbuffered), strings.Repeat(string(wire.AppendResponse(nil, "OK")), 2), "next"},
		"jetstream": {jetstreamDialect(), "INFO {}\r\nPONG\r\n", "MSG"},
		"nats":      {natsDialect(), "INFO {}\r\nPONG\r\n", "MSG"},
		"redis":     {redisDialect(), "+OK\r\n", "*1"},
		"mqtt":      {mqttDialect(), "\x20\x02\x00\x00\x90\x03\x00\x01\x01", "\x32"},
	} {
		client, server := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, server) }()
		go func() { _, _ = io.WriteString(server, c.says+c.left) }()
		if err := c.d.subscribe(client, source{Topic, "c0"}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		left := make([]byte, len(c.left))
		if _, err := io.ReadFull(client, left); err != nil || string(left) != c.left {
			t.Errorf("%s: %q is left, %v", name, left, err)
		}
		client.Close()
		server.Close()
	}
	for name, says := range map[string]string{
		"nsq":  string(wire.AppendError(nil, &wire.Error{Code: "E_INVALID"})),
		"nats": "-ERR 'no'\r\nPONG\r\n", "mqtt": "\x20\x02\x00\x05",
	} {
		client, server := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, server) }()
		go func() { _, _ = io.WriteString(server, says) }()
		if err := dialects()[name].subscribe(client, source{Topic, "c0"}); err == nil {
			t.Errorf("%s: a refusal is no error", name)
		}
		client.Close()
		server.Close()
	}
}

func TestWhatTheSystemSays(t *testing.T) {
	if u := (usage{broker: 3, load: 2, busy: 10, all: 20}); u.others() != 25 || u.since(u).others() != 0 {
		t.Errorf("others: %v, %v", u.others(), u.since(u).others())
	}
	h, ok, err := parseHeap(strings.NewReader("heap profile: 1: 2\n# runtime.MemStats\n# Mallocs = 42\n# Frees = 1\n# NumGC = 3\n"))
	if h != (heap{42, 3}) || !ok || err != nil {
		t.Errorf("heap: %+v, %v, %v", h, ok, err)
	}
	if _, ok, err := parseHeap(strings.NewReader("# Mallocs = 42\n")); ok || err != nil {
		t.Errorf("half a heap: %v, %v", ok, err)
	}
}

func pair(t *testing.T) (near, far *socket) {
	t.Helper()
	ends := testkit.Result(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)).Must(t)
	near, far = &socket{fd: ends[0], retries: true}, &socket{fd: ends[1], retries: true}
	testkit.Must(t, errors.Join(near.timeout(patience), far.timeout(patience)))
	t.Cleanup(func() { _ = near.Close() })
	return near, far
}

func TestSockets(t *testing.T) {
	c, far := pair(t)
	buf := make([]byte, 10)
	for name, ready := range map[string]func() error{"blocking": c.setBlocking, "nonblocking": c.setNonblocking} {
		testkit.Must(t, ready())
		if n, err := c.Read(buf); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %d bytes, %v of nothing", name, n, err)
		}
		_, err := far.Write([]byte("abc"))
		testkit.Must(t, err)
		if n, err := c.Read(buf); string(buf[:n]) != "abc" || err != nil {
			t.Errorf("%s: %q, %v", name, buf[:n], err)
		}
	}
	// A write writes all bytes, even more than the peer reads at once.
	want := bytes.Repeat([]byte("0123456789"), 1<<17)
	got := make(chan []byte)
	go func() {
		all, err := io.ReadAll(far)
		testkit.NoError(t, err)
		got <- all
	}()
	testkit.Result(c.Write(want)).Equal(t, len(want))
	testkit.Must(t, unix.Shutdown(c.fd, unix.SHUT_WR))
	testkit.EqualSlices(t, <-got, want, "what arrives is not what was sent")
	testkit.Must(t, far.Close())
	if _, err := c.Read(buf); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	_, err := c.Write(buf)
	testkit.ErrorIs(t, err, unix.EPIPE, "after the end")
}

func TestAnswersAreReadLate(t *testing.T) {
	c, far := pair(t)
	testkit.Must(t, c.setNonblocking())
	one := &publisher{c: c, raw: c, to: target{topic: Topic}}
	p := &Publishers{s: Scenario{Conns: 1, Rate: 100_000, Together: 1, Size: TimeSize}, d: nsqDialect(""), conns: []*publisher{one}, late: histogram.NewLatency()}
	done := make(chan int)
	go func() {
		defer close(done)
		// The peer answers every message, and sends the first byte of each answer with the answer before.
		in, ok := make([]byte, len(wire.AppendPub(nil, Topic, make([]byte, TimeSize)))), wire.AppendResponse(nil, "OK")
		said := 0
		for n := 0; ; n++ {
			if _, err := io.ReadFull(far, in); err != nil {
				if _, err := far.Write(ok[said:]); n > 0 && err != nil {
					t.Error(err)
				}
				done <- n
				return
			}
			if n > 0 {
				_, err := far.Write(append(slices.Clone(ok[said:]), ok[0]))
				testkit.NoError(t, err)
				said = 1
			}
		}
	}()
	sent, err := p.Send(t.Context(), clock.Mono(), 50*time.Millisecond, testkit.Seed(t))
	if err != nil || sent < 2 { // another process may use the processor most of the time
		t.Fatalf("%d sent, %v", sent, err)
	}
	testkit.Must(t, unix.Shutdown(c.fd, unix.SHUT_WR))
	if n := <-done; n != sent {
		t.Errorf("%d arrived of %d", n, sent)
	}
	if err := p.settle(t.Context(), sent); err != nil || int(p.accepted.Load()) != sent || one.answered != sent {
		t.Errorf("%d of %d were accepted, %v", p.accepted.Load(), sent, err)
	}
	testkit.Must(t, far.Close())
	one.sent++
	testkit.ErrorIs(t, p.settle(t.Context(), sent+1), io.EOF, "an answer that never comes")
}

func TestABrokerIsMeasured(t *testing.T) {
	for _, s := range []Scenario{
		{Name: "rate", Conns: 20, Rate: 2000, Size: 100, Channels: 2, Together: 2, Slow: true},
		{Name: "flood", Conns: 2, Size: 100, Channels: 1, Together: 10, Batch: true, Limit: 5000},
		{Name: "late", Conns: 2, Size: 100, Channels: 1, Together: 10, Batch: true, Limit: 5000, Late: true, Memory: 100},
		{Name: "tls", Conns: 3, Rate: 500, Size: 300, Channels: 1, Together: 1, TLS: true},
		{Name: "fsync", Conns: 3, Rate: 100, Size: 2000, Channels: 1, Together: 1, Fsync: true},
		{Name: "contract", Conns: 3, Rate: 500, Size: 200, Channels: 1, Together: 1, Burst: 50},
		{Name: "topics", Conns: 4, Size: 100, Topics: 2, Channels: 2, Together: 10},
		{Name: "topics at a rate", Conns: 4, Rate: 500, Size: 100, Topics: 2, Channels: 1, Together: 1},
		{Name: "closed", Conns: 3, Size: 100, Channels: 1, Together: 1, Closed: true},
		{Name: "window", Conns: 3, Size: 100, Channels: 1, Together: 5, Batch: true, Closed: true, Ahead: 50},
		{Name: "acknowledged", Conns: 3, Rate: 500, Size: 100, Channels: 1, Together: 2, Acked: true},
		{Name: "storm", Conns: 3, Rate: 500, Size: 100, Channels: 1, Together: 1, Storm: 200},
	} {
		r, err := Perform(t.Context(), Ours(localtest.Program(t, "nsqd"), "off"), s, 300*time.Millisecond, testkit.Seed(t))
		if err != nil {
			t.Errorf("%s: %v", s.Name, err)
			continue
		}
		if r.Sent == 0 || r.Accepted != r.Sent || r.Delivered != r.Sent*s.Channels || r.Missing != 0 || r.RSS <= 0 || r.InPerSecond <= 0 || r.OutPerSecond <= 0 {
			t.Errorf("%s: %+v", s.Name, r)
		}
		if r.P50 > r.P99 || r.P99 > r.Max || r.Max <= 0 || r.Mallocs == nil || r.Collections == nil {
			t.Errorf("%s: %+v", s.Name, r)
		}
		if s.Acked != (len(r.Acked) == 3 && 0 < r.Acked[0] && r.Acked[0] <= r.Acked[2]) {
			t.Errorf("%s: acknowledged after %v ms", s.Name, r.Acked)
		}
		if (s.Storm > 0) != (r.Storm > 0) {
			t.Errorf("%s: %v connections a second came and went", s.Name, r.Storm)
		}
		if (s.Burst > 0) != (r.Access != nil && r.Left != nil && r.Left.Max > 0) {
			t.Errorf("%s: access %+v, left %+v", s.Name, r.Access, r.Left)
		}
		if _, err := json.Marshal(r); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
}

// Brokers of MQTT that are not installed are skipped: bench peer shows what it has measured.
func TestMosquittoIsMeasured(t *testing.T) {
	path, err := exec.LookPath("mosquitto")
	if err != nil {
		t.Skip("mosquitto is not installed")
	}
	for _, s := range []Scenario{
		{Name: "rate", Conns: 20, Rate: 2000, Size: 100, Channels: 2, Together: 2},
		{Name: "flood", Conns: 2, Size: 100, Channels: 1, Together: 10, Limit: 5000},
	} {
		r, err := Perform(t.Context(), Mosquitto(path), s, 300*time.Millisecond, testkit.Seed(t))
		if err != nil || r.Sent == 0 || r.Accepted != r.Sent || r.Delivered != r.Sent*s.Channels {
			t.Errorf("%s: %v, %+v", s.Name, err, r)
		}
	}
}

// If publishers offer more than the subscriber takes, the difference waits at the broker.
func TestABrokerIsOverloaded(t *testing.T) {
	o := Overload{Rate: 500, Demand: make([]float64, 20), Size: 100, Warm: 200 * time.Millisecond, Steady: 500 * time.Millisecond}
	for i := range o.Demand {
		o.Demand[i] = 100
	}
	program, left := localtest.Program(t, "nsqd"), t.TempDir()
	t.Setenv("TMPDIR", left)
	got := testkit.Result(AnotherNSQ("nsqd", program, "").Overload(t.Context(), o)).Must(t)
	all := 0.0
	for i, rate := range got.Delivered {
		if all += rate; rate <= 0 || got.Latency[i] <= 0 {
			t.Errorf("publisher %d: %v msg/s, late %v", i, rate, got.Latency[i])
		}
	}
	// The subscriber makes up for a tenth of a second, and has the messages of one read.
	if most := o.Rate + (o.Rate/10+4096/float64(o.Size))/o.Steady.Seconds(); len(got.Delivered) != len(o.Demand) || all > most {
		t.Errorf("%d publishers, %v msg/s of them all, want at most %v", len(got.Delivered), all, most)
	}
	if got.Line <= 0 || got.LineP99 <= 0 {
		t.Errorf("%d messages wait, 99 %%: %d", got.Line, got.LineP99)
	}
	broken := AnotherNSQ("nsqd", program, "")
	broken.deliveries = func([]byte, []byte, source, func([]byte)) (int, []byte, error) {
		return 0, nil, errors.New("it says no")
	}
	_, err := broken.Overload(t.Context(), o)
	testkit.ErrorHas(t, err, "it says no", "a subscriber that fails")
	if files, err := os.ReadDir(left); err != nil || len(files) > 0 {
		t.Errorf("%v are left, %v", files, err)
	}
}

// The broker has the settings while it is measured, and they cost no message.
func TestABrokerWithTTLIsMeasured(t *testing.T) {
	b := Expiring(localtest.Program(t, "nsqd"))
	prepare := b.Prepare
	b.Prepare = func(ctx context.Context, at Place) error {
		err := prepare(ctx, at)
		stats, _, asking := localtest.Ask("GET", "http://"+at.Web+"/stats?format=json&topic="+Topic, "")
		if !strings.Contains(stats, `"expiry":{"ttl_seconds":3600,"max_attempts":5,"dead_letter":"`+Topic+`.dead"}`) {
			t.Errorf("%v: %s", asking, stats)
		}
		return err
	}
	r, err := Perform(t.Context(), b, Scenario{Name: "rate", Conns: 5, Rate: 500, Size: 100, Channels: 1, Together: 1}, 300*time.Millisecond, testkit.Seed(t))
	if err != nil || r.Sent == 0 || r.Delivered != r.Sent || r.Missing != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	b.Prepare = func(context.Context, Place) error { return errors.New("it refuses the settings") }
	_, err = Perform(t.Context(), b, Scenario{Conns: 1, Rate: 10, Together: 1, Size: TimeSize, Channels: 1}, time.Second, 1)
	testkit.ErrorHas(t, err, "it refuses the settings")
}

func TestABrokerThatFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker")
	testkit.Must(t, os.WriteFile(path, []byte("#!/bin/sh\necho I will not\nexit 3\n"), 0o700))
	if r, err := Perform(t.Context(), Ours(path, ""), Scenario{Conns: 1, Rate: 10, Together: 1, Size: TimeSize, Channels: 1}, time.Second, 1); err == nil || !strings.Contains(err.Error(), "I will not") {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestTheReleaseTraceIsRead(t *testing.T) {
	at := Place{Dir: t.TempDir()}
	read := func(lines string, sent int) (Result, error) {
		t.Helper()
		testkit.Must(t, os.WriteFile(filepath.Join(at.Dir, traceFile), []byte(lines), 0o600))
		r := Result{Sent: sent}
		return r, readReleaseTrace(at, Scenario{Burst: 1}, &r)
	}
	const warm = "bench,100,100,110\n"
	const lines = warm + "bench,1000001100,1000001100,1000001200\nbench,1000002100,1000002600,1000002700\n"
	r, err := read(lines, 3)
	if err != nil || *r.Access != (Quantiles{0.5, 0.5, 0.5}) || *r.Left != (Quantiles{0.6, 0.6, 0.6}) {
		t.Errorf("%+v, %+v, %v", r.Access, r.Left, err)
	}
	for _, bad := range []string{lines, "bench,1,2\n", "bench,1,x,3\n"} {
		if r, err := read(bad, 1); err == nil {
			t.Errorf("%q: %+v", bad, r)
		}
	}
}
