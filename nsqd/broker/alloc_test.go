//go:build !race

package broker_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/wire"
	"github.com/srtm-io/srtm/tokenbucket"
)

// From PUB to FIN a message in steady traffic takes no heap allocation, limited
// or not, to one channel or to several. (Not under the race detector, where
// sync.Pool forgets things at random.)
func TestAMessageTakesNoAllocation(t *testing.T) {
	for _, c := range []struct {
		name     string
		limited  bool
		channels []string
		body     int
	}{
		{"to one channel", false, []string{"c"}, 100},
		{"limited", true, []string{"c"}, 100},
		{"to four channels", true, []string{"c1", "c2", "c3", "c4"}, 5000},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, err := broker.New(broker.Config{Capacity: 1000, MaxMsgTimeout: time.Minute, AutoCreate: true})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			top, err := b.CreateTopic("t")
			if err != nil {
				t.Fatal(err)
			}
			if c.limited {
				top.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(1e9), Burst: 1e6}, false)
			}
			var subs []*broker.Subscription
			for _, name := range c.channels {
				sub, err := top.Subscribe(name, broker.Subscriber{MsgTimeout: time.Minute}, func() {})
				if err != nil {
					t.Fatal(err)
				}
				if err := sub.Ready(100); err != nil {
					t.Fatal(err)
				}
				subs = append(subs, sub)
			}
			body := make([]byte, c.body)
			var out broker.Outgoing
			delivered := 0
			once := func() {
				for range 10 {
					now := clock.Mono()
					p := broker.Published{Body: body, Arrival: stamp.Arrival{At: now, Source: stamp.Exact}}
					if err := top.Publish(now, clock.Wall(), p); err != nil {
						t.Fatal(err)
					}
				}
				for _, sub := range subs {
					out.Reset()
					if !sub.Take(&out, 1<<20) {
						t.Fatal("the subscription has ended")
					}
					sub.Wrote(&out)
					for in := out.Frames; len(in) > 0; in = in[wire.MessageFrameSize(c.body):] {
						m, err := wire.ParseMessage(in[wire.FrameOverhead:wire.MessageFrameSize(c.body)])
						if err != nil {
							t.Fatal(err)
						}
						if err := sub.Finish(m.ID); err != nil {
							t.Fatal(err)
						}
						delivered++
					}
				}
			}
			for range 100 { // until everything has the size it needs
				once()
			}
			delivered = 0
			const runs = 1000
			if n := testing.AllocsPerRun(runs, once); n != 0 {
				t.Errorf("%v allocations for 10 messages", n)
			}
			if want := 10 * len(subs) * (runs + 1); delivered != want { // AllocsPerRun warms up once
				t.Errorf("%d deliveries, want %d", delivered, want)
			}
		})
	}
}
