package broker_test

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// stuck is a subscriber whose writer takes nothing by itself.
func stuck(t *broker.Topic, channel string, timeout time.Duration, rdy int) *broker.Subscription {
	GinkgoHelper()
	sub, err := t.Subscribe(channel, broker.Subscriber{MsgTimeout: timeout}, func() {})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(sub.Close)
	Expect(sub.Ready(rdy)).To(Succeed())
	return sub
}

func take(sub *broker.Subscription, most int) []wire.Message {
	GinkgoHelper()
	var out broker.Outgoing
	Expect(sub.Take(&out, most)).To(BeTrue())
	return messages(&out)
}

// messages decodes the output for a subscriber.
func messages(out *broker.Outgoing) (all []wire.Message) {
	GinkgoHelper()
	for in := out.Frames; len(in) > 0; {
		kind, data, n, err := wire.ParseFrame(in, plenty)
		Expect(err).NotTo(HaveOccurred())
		Expect(kind).To(Equal(wire.FrameMessage))
		m, err := wire.ParseMessage(data)
		Expect(err).NotTo(HaveOccurred())
		all = append(all, m)
		in = in[n:]
	}
	Expect(all).To(HaveLen(out.Messages()))
	return all
}

const plenty = 1 << 20 // bytes

var _ = Describe("a subscriber that is stuck", func() {
	ready := func(t *broker.Topic) func() int {
		return func() int { return t.Stats().Channels[0].Ready }
	}

	It("gets nothing more while what it has not taken times out, and none of it counts as an attempt", func() {
		b := start(nil)
		t := topic(b, "t")
		a := stuck(t, "c", 5*time.Millisecond, 10)
		for range 10 {
			Expect(publish(t, "x")).To(Succeed())
		}
		Eventually(ready(t)).Should(Equal(10), "another subscriber may have them now")
		r := read(t, "c", 10, true)
		Eventually(r.count).Should(Equal(10))
		for _, d := range r.deliveries() {
			Expect(d.Attempts).To(BeEquivalentTo(1))
		}
		Expect(take(a, plenty)).To(BeEmpty(), "it has nothing of what timed out")

		Expect(r.sub.Ready(0)).To(Succeed())
		Expect(publish(t, "y")).To(Succeed())
		Eventually(func() []wire.Message { return take(a, plenty) }).Should(HaveLen(1), "it takes again")
	})

	It("does not get what an operator has emptied", func() {
		b := start(nil)
		t := topic(b, "t")
		a := stuck(t, "c", time.Minute, 10)
		for range 5 {
			Expect(publish(t, "x")).To(Succeed())
		}
		Expect(t.EmptyChannel("c")).To(Succeed())
		Expect(take(a, plenty)).To(BeEmpty())
		Expect(publish(t, "y")).To(Succeed())
		Expect(take(a, plenty)).To(HaveLen(1))
	})

	It("takes nothing from a channel that was deleted meanwhile", func() {
		b := start(nil)
		t := topic(b, "t")
		a := stuck(t, "c", 5*time.Millisecond, 2)
		for range 3 {
			Expect(publish(t, "x")).To(Succeed())
		}
		Eventually(ready(t)).Should(Equal(3), "both have timed out")
		Expect(t.DeleteChannel("c")).To(Succeed())
		var out broker.Outgoing
		Expect(a.Take(&out, plenty)).To(BeFalse())
		Expect(out.Frames).To(BeEmpty())
	})

	It("takes no more at once than it writes at once: the rest can still go to others", func() {
		b := start(nil)
		t := topic(b, "t")
		a := stuck(t, "c", time.Minute, 10)
		for range 5 {
			Expect(publish(t, string(make([]byte, 1000)))).To(Succeed())
		}
		Expect(take(a, 2000)).To(HaveLen(2), "what exceeds the size is the last")
		Expect(take(a, 1)).To(HaveLen(1), "one is always taken")
		r := read(t, "c", 10, true)
		a.Close()
		Eventually(r.count).Should(Equal(5))
		attempts := map[uint16]int{}
		for _, d := range r.deliveries() {
			attempts[d.Attempts]++
		}
		Expect(attempts).To(Equal(map[uint16]int{1: 2, 2: 3}))
	})
})
