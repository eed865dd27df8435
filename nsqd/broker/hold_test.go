package broker_test

import (
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/tokenbucket"
)

// The agent moves the hold ahead of the clock several times in a lease, and no step of an idle topic
// sees the moves. The next publish must not be held by a hold that was moved long ago.
var _ = Describe("a topic under a contract that was idle while the hold moved", func() {
	for kind, put := range map[string]func(*broker.Topic, mono.Time, broker.Published) error{
		"a publish": func(t *broker.Topic, now mono.Time, p broker.Published) error { return t.Publish(now, 1, p) },
		"one of several publishes": func(t *broker.Topic, now mono.Time, p broker.Published) error {
			return t.PublishEach(now, 1, []broker.Published{p}, nil)[0]
		},
	} {
		It("releases "+kind+" at once", func() {
			var now atomic.Int64
			now.Store(int64(time.Hour))
			b := start(func(c *broker.Config) { c.Now = func() mono.Time { return mono.Time(now.Load()) } })
			holds(b, &now, put)
		})
	}
	for kind, put := range map[string]func(*broker.Topic, mono.Time, broker.Published) error{
		"a stored publish": func(t *broker.Topic, now mono.Time, p broker.Published) error { return t.Publish(now, 1, p) },
		"one of several stored publishes": func(t *broker.Topic, _ mono.Time, p broker.Published) error {
			return t.StoreEach(1, []broker.Published{p}, nil)[0]
		},
	} {
		It("releases "+kind+" at once", func() {
			var now atomic.Int64
			now.Store(int64(time.Hour))
			b, _ := opened(GinkgoT().TempDir(), func(c *broker.Config) {
				c.Now = func() mono.Time { return mono.Time(now.Load()) }
			}, func(c *broker.StorageConfig) { c.WriteThrough = true })
			Expect(b.Restore()).To(Succeed())
			holds(b, &now, put)
		})
	}
})

func holds(b *broker.Broker, now *atomic.Int64, put func(*broker.Topic, mono.Time, broker.Published) error) {
	GinkgoHelper()
	const half = time.Second
	b.Node().HoldFrom(mono.Time(now.Load()).Add(half))
	t := topic(b, "t")
	t.Limit(broker.SLO{}, false)
	testkit.Result(grant(b.Node(), "t", tokenbucket.Share{Rate: 1000, Burst: 5}, 5*tokenbucket.Token)).Must(GinkgoTB())
	Expect(t.CreateChannel("c")).To(Succeed())
	publish := func() {
		GinkgoHelper()
		at := mono.Time(now.Load())
		Expect(put(t, at, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: at}})).To(Succeed())
	}
	for range 8 {
		now.Add(int64(half / 4))
		b.Node().HoldFrom(mono.Time(now.Load()).Add(half))
	}
	publish()
	Expect(t.Stats().Waiting).To(BeZero())
	now.Add(int64(half))
	publish()
	Expect(t.Stats().Waiting).To(Equal(1), "a hold that has passed holds")
	b.Node().HoldFrom(mono.Time(now.Load()).Add(half))
	Expect(t.Stats().Waiting).To(BeZero())
}
