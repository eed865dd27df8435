package broker_test

import (
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

var _ = Describe("End-to-end latency", func() {
	var now atomic.Int64
	at := func(s float64) { now.Store(int64(s * float64(time.Second))) }

	begin := func(span time.Duration) *broker.Topic {
		GinkgoHelper()
		at(1000)
		b := start(func(c *broker.Config) {
			c.EndToEnd = span
			c.Now = func() mono.Time { return mono.Time(now.Load()) }
		})
		return topic(b, "t")
	}
	publishAt := func(t *broker.Topic, s float64) {
		GinkgoHelper()
		at(s)
		n := mono.Time(now.Load())
		Expect(t.Publish(n, 0, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: n}})).To(Succeed())
	}
	take := func(sub *broker.Subscription) wire.Message {
		GinkgoHelper()
		got := take(sub, 10)
		Expect(got).To(HaveLen(1))
		return got[0]
	}
	about := broker.Subscriber{MsgTimeout: time.Minute}

	It("runs from a message's arrival to its FIN, by channel, over the window", func() {
		t := begin(10 * time.Second)
		sub, err := t.Subscribe("c", about, func() {})
		Expect(err).NotTo(HaveOccurred())
		Expect(t.CreateChannel("idle")).To(Succeed())
		Expect(sub.Ready(1)).To(Succeed())
		publishAt(t, 1000)
		d := take(sub)
		at(1001)
		Expect(sub.Requeue(d.ID, 0)).To(Succeed())
		d = take(sub)
		at(1002)
		Expect(sub.Finish(d.ID)).To(Succeed())
		Expect(sub.Finish(d.ID)).NotTo(Succeed())
		stats := t.Stats()
		e := stats.Channels[0].EndToEnd
		Expect(e.Count()).To(BeEquivalentTo(1))
		Expect(e.Quantile(0.5).Seconds()).To(BeNumerically("~", 2, 0.02))
		Expect(stats.Channels[1].EndToEnd.Count()).To(BeZero())
		at(1020)
		Expect(t.Stats().Channels[0].EndToEnd.Count()).To(BeZero())
		Expect(t.DeleteChannel("c")).To(Succeed())
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(t.Stats().Channels[0].EndToEnd.Count()).To(BeZero())
	})

	It("is not kept without a request", func() {
		t := begin(0)
		sub, err := t.Subscribe("c", about, func() {})
		Expect(err).NotTo(HaveOccurred())
		Expect(sub.Ready(1)).To(Succeed())
		publishAt(t, 1000)
		Expect(sub.Finish(take(sub).ID)).To(Succeed())
		Expect(t.Stats().Channels[0].EndToEnd.Count()).To(BeZero())
	})
})
