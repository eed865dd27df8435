package statsd

import (
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestPrefix(t *testing.T) {
	for _, c := range []struct{ format, host, want string }{
		{"nsq.%s", "127.0.0.1:4151", "nsq.127_0_0_1_4151."},
		{"nsq.%s.", "b.example:4151", "nsq.b_example_4151."},
		{"nsq", "h:1", "nsq."},
		{"", "h:1", ""},
		{"%s.%s", "[::1]:1", "[__1]_1.[__1]_1."},
	} {
		testkit.Equal(t, Prefix(c.format, c.host), c.want, "%q with %q", c.format, c.host)
	}
}

func TestPercentNames(t *testing.T) {
	for q, want := range map[float64]string{1: "100", 0.99: "99", 0.95: "95", 0.5: "50", 0.999: "99_9", 0.9999: "99_99", 0.07: "7", 0.001: "0_1", 0.29: "29", 0.57: "57"} {
		testkit.Equal(t, percent(q), want, "%v", q)
	}
}

func samples() []broker.Stats {
	return []broker.Stats{
		{
			Name: "t", Waiting: 4, Counters: queue.Counters{Accepted: 10, AcceptedBytes: 100},
			Channels: []broker.ChannelStats{
				{
					Name: "c", Ready: 1, InFlight: 2, Deferred: 3, Consumers: 5,
					Counters: queue.ChannelCounters{Messages: 20, Requeued: 6, TimedOut: 7},
				},
				{Name: "d#ephemeral"},
			},
		},
		{Name: "u#ephemeral", Channels: []broker.ChannelStats{{Name: "c"}}},
	}
}

func TestLines(t *testing.T) {
	f := formatter{prefix: "p.", percentiles: []float64{1, 0.999}}
	want := `p.topic.t.message_count:10|c
p.topic.t.message_bytes:100|c
p.topic.t.depth:4|g
p.topic.t.backend_depth:0|g
p.topic.t.e2e_processing_latency_100:0|g
p.topic.t.e2e_processing_latency_99_9:0|g
p.topic.t.channel.c.message_count:20|c
p.topic.t.channel.c.depth:1|g
p.topic.t.channel.c.backend_depth:0|g
p.topic.t.channel.c.in_flight_count:2|g
p.topic.t.channel.c.deferred_count:3|g
p.topic.t.channel.c.requeue_count:6|c
p.topic.t.channel.c.timeout_count:7|c
p.topic.t.channel.c.clients:5|g
p.topic.t.channel.c.e2e_processing_latency_100:0|g
p.topic.t.channel.c.e2e_processing_latency_99_9:0|g
p.mem.heap_objects:1|g
p.mem.heap_idle_bytes:2|g
p.mem.heap_in_use_bytes:3|g
p.mem.heap_released_bytes:4|g
p.mem.gc_pause_usec_100:5|g
p.mem.gc_pause_usec_99:6|g
p.mem.gc_pause_usec_95:7|g
p.mem.next_gc_bytes:8|g
p.mem.gc_runs:9|c
`
	mem := &stats.Memory{HeapObjects: 1, HeapIdleBytes: 2, HeapInUseBytes: 3, HeapReleasedBytes: 4, GCPauseUsec100: 5, GCPauseUsec99: 6, GCPauseUsec95: 7, NextGCBytes: 8, GCTotalRuns: 9}
	testkit.Equal(t, strings.Join(f.lines(samples(), mem), ""), want)
	f.ephemeral = true
	got := strings.Join(f.lines(samples(), nil), "")
	for _, part := range []string{"p.topic.t.channel.d#ephemeral.depth:0|g\n", "p.topic.u#ephemeral.message_count:0|c\n", "p.topic.u#ephemeral.channel.c.clients:0|g\n"} {
		if !strings.Contains(got, part) {
			t.Errorf("no %q in %s", part, got)
		}
	}
	if strings.Contains(got, ".mem.") {
		t.Error("memory, though not asked for")
	}
}

func TestCountersAreSentByWhatTheyGrew(t *testing.T) {
	var f formatter
	count := func(accepted uint64) string {
		var topics []broker.Stats
		if accepted > 0 {
			topics = []broker.Stats{{Name: "t", Counters: queue.Counters{Accepted: accepted}}}
		}
		for _, line := range f.lines(topics, nil) {
			if rest, ok := strings.CutPrefix(line, "topic.t.message_count:"); ok {
				return strings.TrimSpace(rest)
			}
		}
		return "none"
	}
	for i, c := range []struct {
		accepted uint64
		want     string
	}{
		{5, "5|c"}, {5, "0|c"}, {9, "4|c"},
		{2, "2|c"}, // deleted and created again
		{3, "1|c"},
		{0, "none"}, // deleted
		{3, "3|c"},
	} {
		testkit.Equal(t, count(c.accepted), c.want, "push %d", i)
	}
}

func TestPackets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.IntRange(1, 300), 0, 40).Draw(t, "sizes")
		most := rapid.IntRange(1, 508).Draw(t, "most")
		var all []string
		for i, n := range sizes {
			all = append(all, strings.Repeat(string(rune('a'+i%26)), n-1)+"\n")
		}
		out := packets(all, most)
		testkit.MustEqual(t, strings.Join(out, ""), strings.Join(all, ""), "something is lost or moved")
		for i, p := range out {
			if p == "" || len(p) > most && strings.Count(p, "\n") > 1 {
				t.Fatalf("packet %d has %d bytes in %d lines, at most %d", i, len(p), strings.Count(p, "\n"), most)
			}
			if i > 0 && len(out[i-1])+strings.IndexByte(p, '\n')+1 <= most {
				t.Fatalf("the first line of packet %d would have fitted into the one before", i)
			}
		}
	})
}

func config(address string) Config {
	return Config{
		Address: address, Prefix: "p.", Interval: 10 * time.Millisecond, PacketSize: 508, Memory: true,
		Topics: samples, Log: slog.New(slog.DiscardHandler),
	}
}

func run(t *testing.T, cfg Config) (stop func()) {
	t.Helper()
	p := testkit.Result(New(cfg)).Must(t)
	return testkit.Run(t, p.Run)
}

func TestPushesArrive(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	testkit.Must(t, err)
	defer conn.Close()
	defer run(t, config(conn.LocalAddr().String()))()
	testkit.Must(t, conn.SetReadDeadline(time.Now().Add(testkit.Hang)))
	var got []string
	buf := make([]byte, 65536)
	for pushes := 0; pushes < 3; {
		n, _, err := conn.ReadFrom(buf)
		if err != nil {
			t.Fatalf("%v after %q", err, got)
		}
		if n > 508 {
			t.Errorf("packet of %d bytes", n)
		}
		for line := range strings.Lines(string(buf[:n])) {
			got = append(got, strings.TrimSpace(line))
			if strings.HasPrefix(line, "p.mem.gc_runs:") {
				pushes++
			}
		}
	}
	if !slices.Contains(got, "p.topic.t.message_count:10|c") || !slices.Contains(got, "p.topic.t.message_count:0|c") {
		t.Errorf("%q", got)
	}
}

func TestADaemonThatIsAwayIsNoError(t *testing.T) {
	log := new(testkit.Buffer)
	cfg := config("no such host.invalid:8125")
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	pushes := make(chan struct{}, 100)
	cfg.Topics = func() []broker.Stats {
		pushes <- struct{}{}
		return samples()
	}
	stop := run(t, cfg)
	for range 5 {
		<-pushes
	}
	stop()
	if n := strings.Count(log.String(), "push to statsd failed"); n != 1 {
		t.Errorf("%d warnings: %s", n, log.String())
	}
}

func TestConfigFaults(t *testing.T) {
	_, err := New(Config{Address: "nowhere", Interval: -1, PacketSize: 70000})
	for _, want := range []string{`"nowhere"`, "interval -1ns", "70000 bytes", "topics"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
	for _, size := range []int{0, -1} {
		cfg := config("h:1")
		cfg.PacketSize = size
		testkit.ErrorHas(t, cfg.Validate(), fmt.Sprint(size), "%d", size)
	}
}
