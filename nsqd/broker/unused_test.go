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
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
)

var _ = Describe("removing a topic that is not used", func() {
	It("leaves one that anything is held of, or that is published to", func() {
		b := start(nil)
		node := b.Node()
		Expect(node.RemoveUnused("t", false)).To(Succeed(), "there is none")
		t := topic(b, "t")
		refused := func(why string) {
			GinkgoHelper()
			Expect(node.RemoveUnused("t", false)).To(MatchError(broker.ErrInUse), why)
			Expect(node.Topics()).To(Equal([]string{"t"}))
		}
		Expect(publish(t, "x")).To(Succeed())
		refused("a message without a channel")
		Expect(t.CreateChannel("c")).To(Succeed())
		refused("a message of a channel")
		r := read(t, "c", 1, false)
		Eventually(r.count).Should(Equal(1))
		refused("a message in flight")
		Expect(r.sub.Finish(r.deliveries()[0].ID)).To(Succeed())
		now := clock.Mono()
		Expect(t.Publish(now, clock.Wall(), broker.Published{Body: []byte("y"), Arrival: stamp.Arrival{At: now}, Defer: time.Hour})).To(Succeed())
		refused("a deferred message")
		Expect(t.EmptyChannel("c")).To(Succeed())
		p := t.AddPublisher("p", "", police.Identity{})
		refused("a publisher")
		p.Leave()
		Expect(node.RemoveUnused("t", false)).To(Succeed())
		Expect(node.Topics()).To(BeEmpty())
		Expect(publish(t, "z")).To(MatchError(broker.ErrGone))
		Eventually(r.done).Should(BeClosed())
	})

	for _, through := range []bool{false, true} {
		// The publisher sends one message at a time, so that the topic is empty at some moments. The remover tries at
		// all other moments as well.
		It(fmt.Sprintf("loses nothing that is accepted meanwhile, stored first: %v", through), func(ctx SpecContext) {
			const lives, messages = 10, 30
			b, _ := stored(GinkgoT().TempDir(), through)
			var accepted, read atomic.Int64
			over := make(chan struct{})
			var publishing sync.WaitGroup
			publishing.Go(func() {
				defer GinkgoRecover()
				for ; ; runtime.Gosched() {
					select {
					case <-over:
						return
					default:
					}
					if read.Load() < accepted.Load() {
						continue
					}
					t, err := b.Topic([]byte("t"))
					if err != nil {
						continue // between two lives of the topic
					}
					switch err := publish(t, "x"); {
					case err == nil:
						accepted.Add(1)
					case !errors.Is(err, broker.ErrGone) && !errors.Is(err, broker.ErrStorage): // the previous life's topic is still ending
						Fail(err.Error())
					}
				}
			})
			finish := sync.OnceFunc(func() { close(over); publishing.Wait() })
			DeferCleanup(finish)
			for life := range int64(lives) {
				stop := consume(topic(b, "t"), &read)
				for accepted.Load() < life*messages/lives { // a topic that is deleted at once accepts messages by luck only
					Expect(ctx.Err()).NotTo(HaveOccurred(), "nothing is published")
					runtime.Gosched()
				}
				for b.Node().RemoveUnused("t", false) != nil {
					Expect(ctx.Err()).NotTo(HaveOccurred(), "something is held for ever")
					runtime.Gosched()
				}
				stop()
				// The topic was empty: the consumer has read every accepted message.
				Expect(accepted.Load()).To(BeNumerically("<=", read.Load()))
			}
			finish()
			t := topic(b, "t")
			defer consume(t, &read)()
			Eventually(read.Load).Should(Equal(accepted.Load()))
		}, SpecTimeout(testkit.Hang)) // the spec takes less than a second
	}
})

// consume counts and finishes the messages of a channel until the returned function is called or the topic is deleted.
// The returned function waits for the end.
func consume(t *broker.Topic, count *atomic.Int64) (stop func()) {
	GinkgoHelper()
	wake, done := make(chan struct{}, 1), make(chan struct{})
	notify := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: 30 * time.Second}, notify)
	Expect(err).NotTo(HaveOccurred())
	Expect(sub.Ready(100)).To(Succeed())
	go func() {
		defer close(done)
		for range wake {
			for {
				var out broker.Outgoing
				if !sub.Take(&out, plenty) {
					return
				}
				if out.Messages() == 0 {
					break
				}
				sub.Wrote(&out)
				for _, m := range messages(&out) {
					if sub.Finish(m.ID) == nil {
						count.Add(1)
					}
				}
			}
		}
	}()
	return func() {
		sub.Close()
		notify()
		<-done
	}
}
