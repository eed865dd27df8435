//go:build !race

package broker_test

import (
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

// From PUB to FIN a message in steady traffic takes no heap allocation, limited
// or not, to one channel or to several, its arrival captured or not. (Not under the race detector, where
// sync.Pool forgets things at random.)
func TestAMessageTakesNoAllocation(t *testing.T) {
	for _, c := range []struct {
		name     string
		limited  bool
		channels []string
		body     int
		captured bool
		pacing   broker.PaceMode
	}{
		{"to one channel", false, []string{"c"}, 100, false, broker.PaceOff},
		{"limited", true, []string{"c"}, 100, false, broker.PaceOff},
		{"to four channels", true, []string{"c1", "c2", "c3", "c4"}, 5000, false, broker.PaceOff},
		{"captured", true, []string{"c"}, 100, true, broker.PaceOff},
		{"advised", true, []string{"c"}, 100, false, broker.PaceAdvise},
		{"policed", true, []string{"c"}, 100, false, broker.PacePolice},
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
			var out broker.Outgoing
			delivered := 0
			once := func() {
				for range 10 {
					now := clock.Mono()
					p := broker.Published{Body: body, Arrival: stamp.Arrival{At: now, Source: stamp.Exact}, From: publisher}
					testkit.Must(t, top.Publish(now, clock.Wall(), p))
				}
				for _, sub := range subs {
					out.Reset()
					if !sub.Take(&out, 1<<20) {
						t.Fatal("the subscription has ended")
					}
					sub.Wrote(&out)
					for in := out.Frames; len(in) > 0; in = in[wire.MessageFrameSize(c.body):] {
						m := testkit.Result(wire.ParseMessage(in[wire.FrameOverhead:wire.MessageFrameSize(c.body)])).Must(t)
						testkit.Must(t, sub.Finish(m.ID))
						delivered++
					}
				}
			}
			if c.captured {
				top.Capture(0, 0)
			}
			// Until everything has the size it needs: a record, which has a twin,
			// that of a piece.
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
