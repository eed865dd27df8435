package broker_test

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/tokenbucket"
)

var _ = Describe("a topic that is deleted while a caller still has it", func() {
	It("does nothing when it is resumed", func() {
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
			Expect(take(sub, plenty)).To(HaveLen(1))
			sub.Close() // the channel has the message again
			runtime.AddCleanup(t.Held("c"), func(done chan struct{}) { close(done) }, gone)
		}()
		Expect(t.Stats().Channels[0].Ready).To(Equal(1))
		Expect(b.DeleteTopic("t")).To(Succeed())
		Eventually(func() chan struct{} {
			runtime.GC()
			return gone
		}).Should(BeClosed())
		Expect(publish(t, "from a publisher that has not noticed")).To(MatchError(broker.ErrGone))
	})
})

// slowly is a batch that blocks after it has returned so many messages.
type slowly struct {
	alike
	after       int
	there, goOn chan struct{}
}

func (s slowly) Each(f func([]byte)) {
	i := 0
	s.alike.Each(func(body []byte) {
		if i++; i == s.after {
			close(s.there)
			<-s.goOn
		}
		f(body)
	})
}

var _ = Describe("a large batch under way when the broker ends", func() {
	It("is kept as a whole, and answered so", func() {
		path := GinkgoT().TempDir()
		b, end := opened(path, func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		bodies := slowly{alike(1000), 300, make(chan struct{}), make(chan struct{})}
		answer, ended := make(chan error, 1), make(chan struct{})
		go func() {
			now := clock.Mono()
			answer <- t.PublishBatch(now, clock.Wall(), broker.Published{Arrival: stamp.Arrival{At: now}}, bodies)
		}()
		<-bodies.there // the first slice was accepted
		go func() {
			defer GinkgoRecover()
			defer close(ended)
			end()
		}()
		Eventually(func() error { return publish(t, "x") }).Should(MatchError(broker.ErrDraining))
		Consistently(ended, "50ms").ShouldNot(BeClosed())
		close(bodies.goOn)
		Eventually(answer).Should(Receive(BeNil()))
		Eventually(ended).Should(BeClosed())
		next := storedWith(path, func(*broker.Config) {})
		// Messages published before the topic was draining are stored, too.
		Expect(topic(next, "t").Stats().Waiting).To(BeNumerically(">=", 1000))
	})
})

var _ = Describe("a broker that has ended", func() {
	It("takes no order that the next process would not know of", func() {
		b, end := opened(GinkgoT().TempDir(), func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(publish(t, "x")).To(Succeed())
		end()
		for _, order := range []func(string) error{t.EmptyChannel, t.PauseChannel, t.UnpauseChannel, t.DeleteChannel} {
			Expect(order("c")).To(MatchError(broker.ErrDraining))
		}
		Expect(t.CreateChannel("d")).To(MatchError(broker.ErrDraining))
	})
})

var _ = Describe("an ephemeral topic", func() {
	It("stays while a connection subscribes, though others leave at that moment", func() {
		b := start(nil)
		var wg sync.WaitGroup
		var ended atomic.Int32
		for i := range 4 {
			wg.Go(func() {
				defer GinkgoRecover()
				channel := fmt.Sprintf("c%d#ephemeral", i)
				for range 3000 {
					t := topic(b, "t#ephemeral")
					sub, err := t.Subscribe(channel, broker.Subscriber{MsgTimeout: time.Minute}, func() {})
					if errors.Is(err, broker.ErrGone) {
						continue // deleted between the two calls: the connection tries again
					}
					Expect(err).NotTo(HaveOccurred())
					if !sub.Take(new(broker.Outgoing), plenty) {
						ended.Add(1)
					}
					sub.Close()
				}
			})
		}
		wg.Wait()
		Expect(ended.Load()).To(BeZero())
	})
})

var _ = Describe("an ephemeral topic under a contract", func() {
	It("stays without channels, since the adaptor that granted the contract counts on it", func() {
		b := start(nil)
		Expect(b.Node().Prepare("t#ephemeral", nil, 0, time.Second, 0.9, 0, nil)).Error().NotTo(HaveOccurred())
		r := read(topic(b, "t#ephemeral"), "c#ephemeral", 1, true)
		r.sub.Close()
		Expect(b.Node().Topics()).To(Equal([]string{"t#ephemeral"}))
		Expect(b.Node().Remove("t#ephemeral")).To(Succeed())
		Expect(b.Topics()).To(BeEmpty())
	})
})

var _ = Describe("a broker that is closed", func() {
	It("answers that it shuts down rather than that a topic is gone: another request would be in vain", func() {
		b := start(nil)
		t := topic(b, "t")
		b.Close()
		Expect(publish(t, "x")).To(MatchError(broker.ErrDraining))
		again, err := b.TopicForClient([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(publish(again, "x")).To(MatchError(broker.ErrDraining))
		_, err = again.Subscribe("c", broker.Subscriber{}, func() {})
		Expect(err).To(MatchError(broker.ErrDraining))
	})
})
