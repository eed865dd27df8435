//go:build !race

package broker_test

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// In steady traffic a message takes no heap allocation from PUB to FIN: with and without a limit, to one channel and to
// several, with and without capture of arrivals. The test does not run under the race detector, where sync.Pool drops
// items at random.
func TestAMessageTakesNoAllocation(t *testing.T) {
	for _, c := range []struct {
		name     string
		limited  bool
		channels []string
		body     int
		captured bool
		pacing   broker.PaceMode
		encoder  broker.Encoder
	}{
		{"to one channel", false, []string{"c"}, 100, false, broker.PaceOff, nil},
		{"limited", true, []string{"c"}, 100, false, broker.PaceOff, nil},
		{"to four channels", true, []string{"c1", "c2", "c3", "c4"}, 5000, false, broker.PaceOff, nil},
		{"captured", true, []string{"c"}, 100, true, broker.PaceOff, nil},
		{"advised", true, []string{"c"}, 100, false, broker.PaceAdvise, nil},
		{"policed", true, []string{"c"}, 100, false, broker.PacePolice, nil},
		{"with an attribute, encoded", true, []string{"c"}, 100, false, broker.PaceOff, attributed{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, err := broker.New(broker.Config{Capacity: 1000, MaxMemory: 1 << 30, MaxMsgTimeout: time.Minute, AutoCreate: true, Pacing: c.pacing})
			testkit.Must(t, err)
			defer b.Close()
			top := testkit.Result(b.CreateTopic("t")).Must(t)
			if c.limited {
				top.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(1e9), Burst: 1e6}, false)
			}
			var subs []*broker.Subscription
			for _, name := range c.channels {
				sub := testkit.Result(top.Subscribe(name, broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(t)
				testkit.Must(t, sub.Ready(100))
				subs = append(subs, sub)
			}
			const runs = 1000
			body := make([]byte, c.body)
			publisher := top.AddPublisher("p", "", police.Identity{})
			publisher.Pace(1)
			out := broker.Outgoing{Encoder: c.encoder}
			var attribute []byte
			if c.encoder != nil {
				attribute = make([]byte, wire.MaxAttribute)
			}
			size := len(wire.AppendAttributed(nil, &wire.Message{Body: body}, attribute))
			if c.encoder == nil {
				size = wire.MessageFrameSize(len(body))
			}
			delivered := 0
			once := func() {
				for range 10 {
					now := clock.Mono()
					p := broker.Published{Body: body, Attribute: attribute, Arrival: stamp.Arrival{At: now, Source: stamp.Exact}, From: publisher}
					testkit.Must(t, top.Publish(now, clock.Wall(), p))
				}
				for _, sub := range subs {
					out.Reset()
					if !sub.Take(&out, 1<<20) {
						t.Fatal("the subscription has ended")
					}
					sub.Wrote(&out)
					for in := out.Frames; len(in) > 0; in = in[size:] {
						m := testkit.Result(wire.ParseMessage(in[wire.FrameOverhead:size])).Must(t)
						testkit.Must(t, sub.Finish(m.ID))
						delivered++
					}
				}
			}
			if c.captured {
				top.Capture(0, 0)
			}
			// Warm up until all buffers have their final size, including both records of the capture.
			for range 2 {
				for range runs + 1 {
					once()
				}
				top.Arrivals()
			}
			delivered = 0
			testkit.Equal(t, testing.AllocsPerRun(runs, once), 0, "allocations for 10 messages")
			if a := top.Arrivals(); c.captured && len(a.GetGapNs()) != 10*(runs+1) {
				t.Errorf("%d messages captured, want %d", len(a.GetGapNs()), 10*(runs+1))
			}
			if want := 10 * len(subs) * (runs + 1); delivered != want { // AllocsPerRun warms up once
				t.Errorf("%d deliveries, want %d", delivered, want)
			}
		})
	}
}

// A message that is stored before its acceptance takes no allocation beside its delivery.
func TestAStoredMessageTakesNoAllocation(t *testing.T) {
	dir := t.TempDir()
	st := testkit.Result(broker.OpenStorage(broker.StorageConfig{
		Path: filepath.Join(dir, "messages"), Metadata: filepath.Join(dir, "metadata.json"),
		MaxRecord: 1 << 20, Overflow: 100, WriteThrough: true, Log: slog.New(slog.DiscardHandler),
	})).Must(t)
	defer st.Close()
	b := testkit.Result(broker.New(broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st})).Must(t)
	defer b.Close()
	testkit.Must(t, b.Restore())
	top := testkit.Result(b.CreateTopic("t")).Must(t)
	body := make([]byte, 100)
	publish := func() {
		now := clock.Mono()
		testkit.Must(t, top.Publish(now, clock.Wall(), broker.Published{Body: body, Arrival: stamp.Arrival{At: now}}))
	}
	for range 100 {
		publish()
	}
	testkit.Equal(t, testing.AllocsPerRun(1000, publish), 0, "allocations for a message")
}

// The memory of 100,000 topics that got a few messages and are then idle, after reports to a control plane, stays within
// bounds per topic. (The race detector takes a fifth more.)
func TestAllocationsOfIdleTopics(t *testing.T) {
	for _, c := range []struct {
		name    string
		through bool
		most    uint64 // bytes of heap
	}{{"in memory", false, 16 << 10}, {"stored first", true, 18 << 10}} {
		t.Run(c.name, func(t *testing.T) {
			const topics = 200
			dir := t.TempDir()
			st, err := broker.OpenStorage(broker.StorageConfig{
				Path: filepath.Join(dir, "messages"), Metadata: filepath.Join(dir, "metadata.json"),
				MaxRecord: 1 << 20, Overflow: 100, WriteThrough: c.through, Log: slog.New(slog.DiscardHandler),
			})
			testkit.Must(t, err)
			defer st.Close()
			b := testkit.Result(broker.New(broker.Config{Capacity: 1000, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st})).Must(t)
			defer b.Close()
			testkit.Must(t, b.Restore())
			before := heap()
			all := make([]*broker.Topic, topics)
			for i := range all {
				all[i] = testkit.Result(b.CreateTopic(fmt.Sprintf("topic-%d", i))).Must(t)
				use(t, b, all[i])
			}
			for range 3 {
				b.Report(true)
			}
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for _, top := range all {
				for top.Spilling() > 0 {
					<-tick.C
				}
			}
			each := (heap() - before) / topics
			t.Logf("%d bytes a topic", each)
			if each > c.most {
				t.Errorf("%d bytes a topic, want at most %d", each, c.most)
			}
			runtime.KeepAlive(all)
		})
	}
}

// use sends messages through a topic.
func use(t *testing.T, b *broker.Broker, top *broker.Topic) {
	t.Helper()
	wake := make(chan struct{}, 1)
	sub, err := top.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	testkit.Must(t, err)
	defer sub.Close()
	testkit.Must(t, sub.Ready(100))
	const messages = 10
	for range messages {
		testkit.Must(t, top.Publish(b.Now(), 0, broker.Published{Body: make([]byte, 100), Arrival: stamp.Arrival{At: b.Now()}}))
	}
	for finished := 0; finished < messages; {
		<-wake
		var out broker.Outgoing
		sub.Take(&out, plenty)
		sub.Wrote(&out)
		for in := out.Frames; len(in) > 0; {
			_, data, n, err := wire.ParseFrame(in, plenty)
			testkit.Must(t, err)
			m, err := wire.ParseMessage(data)
			if err == nil {
				err = sub.Finish(m.ID)
			}
			testkit.Must(t, err)
			finished++
			in = in[n:]
		}
	}
}

// heap returns the bytes of heap in use.
func heap() uint64 {
	for range 3 { // the second collection frees the pools' items
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkBacklog publishes messages of 100 bytes for a consumer that does not read. It reports
// the memory of a waiting message.
func BenchmarkBacklog(b *testing.B) {
	const messages = 300_000
	body := make([]byte, 100)
	for b.Loop() {
		b.StopTimer()
		dir := b.TempDir()
		st := testkit.Result(broker.OpenStorage(broker.StorageConfig{
			Path: filepath.Join(dir, "messages"), Metadata: filepath.Join(dir, "metadata.json"),
			MaxRecord: 1 << 20, Overflow: 1000, Log: slog.New(slog.DiscardHandler),
		})).Must(b)
		br := testkit.Result(broker.New(broker.Config{Capacity: 2 * messages, MaxMemory: 1 << 30, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st})).Must(b)
		testkit.Must(b, br.Restore())
		top := testkit.Result(br.CreateTopic("t")).Must(b)
		testkit.Result(top.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(b)
		before := heap()
		b.StartTimer()
		for range messages {
			now := clock.Mono()
			testkit.Must(b, top.Publish(now, 0, broker.Published{Body: body, Arrival: stamp.Arrival{At: now, Source: stamp.Exact}}))
		}
		b.StopTimer()
		b.ReportMetric(float64(heap()-before)/messages, "B/message")
		br.Close()
		st.Close()
		b.StartTimer()
	}
}
