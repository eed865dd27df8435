package broker_test

import (
	"runtime"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/tokenbucket"
)

var _ = Describe("a topic that is deleted while somebody still has it", func() {
	It("does nothing when it is told to go on", func() {
		b := start(nil)
		t := topic(b, "t")
		read(t, "c", 10, true)
		t.Pause()
		Expect(publish(t, "x")).To(Succeed())
		Expect(b.DeleteTopic("t")).To(Succeed())
		t.Unpause()
		t.SetShare(tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 1}, tokenbucket.Token)
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 1}, false)
		Expect(t.UnpauseChannel("c")).To(MatchError(broker.ErrUnknownChannel))
		Expect(t.CreateChannel("d")).To(MatchError(broker.ErrGone))
	})

	It("lets go of its messages", func() {
		b := start(nil)
		t := topic(b, "t")
		gone := make(chan struct{})
		func() {
			sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
			Expect(err).NotTo(HaveOccurred())
			Expect(sub.Ready(1)).To(Succeed())
			Expect(publish(t, "x")).To(Succeed())
			taken, _ := sub.Take(nil)
			Expect(taken).To(HaveLen(1))
			runtime.AddCleanup(taken[0].Message, func(done chan struct{}) { close(done) }, gone)
			sub.Close() // the channel has it again
		}()
		Expect(t.Stats().Channels[0].Ready).To(Equal(1))
		Expect(b.DeleteTopic("t")).To(Succeed())
		Eventually(func() chan struct{} {
			runtime.GC()
			return gone
		}).WithTimeout(5 * time.Second).Should(BeClosed())
		Expect(publish(t, "from a publisher that has not noticed")).To(MatchError(broker.ErrGone))
	})
})

var _ = Describe("a broker that is closed", func() {
	It("says that it shuts down rather than that a topic is gone: asking again would be in vain", func() {
		b := start(nil)
		t := topic(b, "t")
		b.Close()
		Expect(publish(t, "x")).To(MatchError(broker.ErrDraining))
		again, err := b.TopicForClient([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(publish(again, "x")).To(MatchError(broker.ErrDraining))
	})
})
