package broker_test

import (
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// attributed encodes a delivery as a frame whose body begins with the attribute.
type attributed struct{}

func (attributed) AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte {
	return wire.AppendAttributed(dst, m, attribute)
}

// odd encodes the messages with an odd number, and leaves the others out.
type odd struct{ attributed }

func (o odd) AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte {
	if m.Body[len(m.Body)-1]%2 == 0 {
		return dst
	}
	return o.attributed.AppendMessage(dst, m, attribute)
}

// takeEncoded returns the ids and the "attribute=body" of what the subscriber can take.
func takeEncoded(sub *broker.Subscription, encoder broker.Encoder) (ids []wire.MessageID, all []string) {
	GinkgoHelper()
	out := broker.Outgoing{Encoder: encoder}
	Expect(sub.Take(&out, plenty)).To(BeTrue())
	sub.Wrote(&out)
	for _, m := range messages(&out) {
		attribute, body, ok := wire.CutAttribute(m.Body)
		Expect(ok).To(BeTrue())
		ids, all = append(ids, m.ID), append(all, fmt.Sprintf("%s=%s", attribute, body))
	}
	return ids, all
}

var _ = Describe("an attribute", func() {
	subscribe := func(t *broker.Topic) *broker.Subscription {
		GinkgoHelper()
		sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(sub.Close)
		Expect(sub.Ready(100)).To(Succeed())
		return sub
	}

	// With a capacity of 2 most messages go to disk and back.
	for _, through := range []bool{false, true} {
		It(fmt.Sprintf("comes back from disk, after a restart and in a replay, through the disk: %v", through), func() {
			path := GinkgoT().TempDir()
			small := func(c *broker.Config) { c.Capacity = 2 }
			kept := func(c *broker.StorageConfig) { c.WriteThrough, c.Retain = through, metadata.Retention{Bytes: 1 << 20} }
			b, end := opened(path, small, kept)
			Expect(b.Restore()).To(Succeed())
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			var want []string
			for i := range 10 {
				attribute := strings.Repeat("a", i*28)
				Expect(publishWith(t, fmt.Sprint(i), attribute)).To(Succeed())
				want = append(want, fmt.Sprintf("%s=%d", attribute, i))
			}
			sub := subscribe(t)
			var got []string
			gather := func() []string {
				ids, all := takeEncoded(sub, attributed{})
				for _, id := range ids {
					Expect(sub.Finish(id)).To(Succeed())
				}
				got = append(got, all...)
				return got
			}
			Eventually(gather).Should(Equal(want))
			end()

			b, _ = opened(path, small, kept)
			Expect(b.Restore()).To(Succeed())
			t, got = topic(b, "t"), nil
			sub = subscribe(t)
			_, err := t.Seek("c", broker.Place{Begin: true})
			Expect(err).NotTo(HaveOccurred())
			Eventually(gather).Should(Equal(want))
		})
	}

	It("counts as memory of its message", func() {
		b := start(nil)
		t := topic(b, "t")
		Expect(publishWith(t, "body", "")).To(Succeed())
		without, _ := b.Memory()
		Expect(publishWith(t, "body", "an attribute")).To(Succeed())
		with, _ := b.Memory()
		Expect(with).To(BeEquivalentTo(2*without + int64(len("an attribute"))))
	})

	It("lets an encoder leave messages out, which the subscriber holds", func() {
		t := topic(start(nil), "t")
		sub := subscribe(t)
		for i := range 4 {
			Expect(publishWith(t, fmt.Sprint(i), "a")).To(Succeed())
		}
		out := broker.Outgoing{Encoder: odd{}}
		Expect(sub.Take(&out, plenty)).To(BeTrue())
		Expect(out.Messages()).To(Equal(4))
		Expect(strings.Count(string(out.Frames), "\x01a")).To(Equal(2))
		_, inFlight := sub.Holds()
		Expect(inFlight).To(Equal(4))
	})
})
