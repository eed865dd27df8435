package broker_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// If a subscriber keeps a message for too long, the broker delivers the message again without a request, and not before
// its time.
func TestMessagesTimeOutUnasked(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		begin := time.Now()
		now := func() mono.Time { return mono.Time(time.Since(begin)) + 1 }
		b := testkit.Result(broker.New(broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true, Now: now})).Must(t)
		defer b.Close()
		top := testkit.Result(b.CreateTopic("t")).Must(t)
		const timeout = 20 * time.Millisecond
		wake := make(chan struct{}, 1)
		sub, err := top.Subscribe("c", broker.Subscriber{MsgTimeout: timeout}, func() {
			select {
			case wake <- struct{}{}:
			default:
			}
		})
		testkit.Must(t, err)
		defer sub.Close()
		testkit.Must(t, sub.Ready(1))
		p := broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: now(), Source: stamp.Read}}
		testkit.Must(t, top.Publish(now(), mono.Wall(now()), p))
		for attempt := 1; attempt <= 3; attempt++ {
			<-wake
			// Each timeout ends within the millisecond of its deadline.
			n := time.Duration(attempt - 1)
			if at, want := time.Since(begin), n*timeout; at < want || at >= want+n*time.Millisecond+1 {
				t.Errorf("delivery %d after %v, want %v or up to %d ms more", attempt, at, want, n)
			}
			var out broker.Outgoing
			if !sub.Take(&out, 1000) || out.Messages() != 1 {
				t.Fatalf("delivery %d: %d messages", attempt, out.Messages())
			}
			m, err := wire.ParseMessage(out.Frames[wire.FrameOverhead:])
			if err != nil || int(m.Attempts) != attempt {
				t.Errorf("delivery %d: attempt %d, %v", attempt, m.Attempts, err)
			}
		}
	})
}
