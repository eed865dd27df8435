package broker_test

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// watched is a batch of numbered messages of so many bytes that records the broker's held memory while the batch is
// read.
type watched struct {
	n, size int
	broker  *broker.Broker
	most    int64 // maximum of the held bytes
}

func (w *watched) Len() int   { return w.n }
func (w *watched) Bytes() int { return w.n * w.size }
func (w *watched) Each(f func([]byte)) {
	for i := range w.n {
		f(numbered(i, w.size))
		held, _ := w.broker.Memory()
		w.most = max(w.most, held)
	}
}

func numbered(i, size int) []byte {
	return append(fmt.Appendf(nil, "%08d", i), make([]byte, size-8)...)
}

var _ = Describe("the memory of messages", func() {
	batch := func(t *broker.Topic, b broker.Bodies, noWait bool) error {
		now := clock.Mono()
		return t.PublishBatch(now, clock.Wall(), broker.Published{Arrival: stamp.Arrival{At: now}, NoWait: noWait}, b)
	}
	held := func(b *broker.Broker) int64 {
		n, _ := b.Memory()
		return n
	}
	body := string(make([]byte, 1000))
	const each = 1000 + queue.Overhead

	It("is counted while a channel needs the message", func() {
		b := start(nil)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(t.CreateChannel("d")).To(Succeed())
		for range 5 {
			Expect(publish(t, body)).To(Succeed())
		}
		Expect(held(b)).To(BeEquivalentTo(5 * each))
		Expect(t.Stats().Memory).To(BeEquivalentTo(5 * each))
		Expect(t.DeleteChannel("c")).To(Succeed())
		Expect(held(b)).To(BeEquivalentTo(5*each), "the other channel has them")
		r := read(t, "d", 10, true)
		Eventually(r.count).Should(Equal(5))
		Eventually(func() int64 { return held(b) }).Should(BeZero())
		t.Pause()
		Expect(publish(t, body)).To(Succeed())
		t.Empty()
		Expect(held(b)).To(BeZero())
		Expect(publish(t, body)).To(Succeed())
		t.Unpause()
		Expect(t.CreateChannel("e")).To(Succeed())
		Expect(publish(t, body)).To(Succeed())
		Expect(t.DeleteChannel("e")).To(Succeed())
		Expect(b.DeleteTopic("t")).To(Succeed())
		Expect(held(b)).To(BeZero())
	})

	It("is bounded, and one topic leaves some to the others", func() {
		b := start(func(c *broker.Config) { c.Capacity, c.MaxMemory = 1000, 100*each })
		greedy, modest := topic(b, "greedy"), topic(b, "modest")
		n := 0
		for ; publish(greedy, body) == nil; n++ {
			Expect(n).To(BeNumerically("<", 100))
		}
		Expect(publish(greedy, body)).To(MatchError(queue.ErrFull))
		Expect(n).To(Equal(80))
		Expect(batch(greedy, alike(513), false)).To(MatchError(queue.ErrFull))
		for range 10 {
			Expect(publish(modest, body)).To(Succeed())
		}
		By("refusing a batch before it is read")
		Expect(batch(modest, &untouchableBytes{untouchable: 600, bytes: 50 * each}, false)).To(MatchError(queue.ErrFull))
		Expect(modest.Stats().Counters.Refused).To(BeEquivalentTo(600))
		By("a reader that makes room")
		read(greedy, "c", 10, true)
		Eventually(func() int64 { return greedy.Stats().Memory }).Should(BeZero())
		Expect(publish(greedy, body)).To(Succeed())
	})

	It("is bounded where there is a disk, which takes what is beyond, in order", func() {
		b := storedWith(GinkgoT().TempDir(), func(c *broker.Config) { c.Capacity, c.MaxMemory = 1000, 100*each })
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		most := int64(0)
		const messages = 500
		for i := range messages {
			Expect(publish(t, string(numbered(i, 1000)))).To(Succeed())
			most = max(most, held(b))
		}
		Expect(most).To(BeNumerically("<=", 85*each), "80, and few on their way")
		Expect(t.Stats().Beyond + t.Stats().Channels[0].Beyond).To(BeNumerically(">", messages-100))
		By("a topic beside it that is read")
		other := topic(b, "other")
		quick := read(other, "c", 10, true)
		for range 100 {
			Expect(publish(other, body)).To(Succeed())
		}
		Eventually(quick.count).Should(Equal(100))
		By("being read")
		r := read(t, "c", 10, true)
		Eventually(r.count).Should(Equal(messages))
		for i, d := range r.deliveries() {
			Expect(bytes.HasPrefix(d.Body, fmt.Appendf(nil, "%08d", i))).To(BeTrue(), "message %d is %s", i, d.Body[:8])
		}
		Eventually(func() int64 { return held(b) }).Should(BeZero())
	})

	It("is not needed twice to write it, now or at the end", func() {
		const size, messages = 400 << 10, 60
		disk, largest := commitlog.OS(), new(atomic.Int64)
		create := disk.Create
		disk.Create = func(path string) (commitlog.File, error) {
			f, err := create(path)
			return measuredFile{f, largest}, err
		}
		path := GinkgoT().TempDir()
		for _, capacity := range []int{messages, 1} {
			b, end := opened(path, func(c *broker.Config) { c.Capacity = capacity }, func(c *broker.StorageConfig) { c.Disk = &disk })
			Expect(b.Restore()).To(Succeed())
			t := topic(b, "t"+strconv.Itoa(capacity))
			for i := range messages {
				Expect(publish(t, string(numbered(i, size)))).To(Succeed())
			}
			end()
			Expect(largest.Load()).To(BeNumerically("<", 6<<20))
		}
		b, _ := opened(path, func(c *broker.Config) { c.Capacity = messages })
		Expect(b.Restore()).To(Succeed())
		for _, name := range []string{"t60", "t1"} {
			r := read(topic(b, name), "c", 10, true)
			Eventually(r.count).Should(Equal(messages))
			for i, d := range r.deliveries() {
				Expect(bytes.HasPrefix(d.Body, fmt.Appendf(nil, "%08d", i))).To(BeTrue(), "message %d is %s", i, d.Body[:8])
			}
		}
	})

	It("takes large batches by slices, where there is a disk", func() {
		b := storedWith(GinkgoT().TempDir(), func(c *broker.Config) { c.Capacity = 10 })
		t := topic(b, "t")
		w := &watched{n: 5000, size: 10, broker: b}
		Expect(batch(t, untouchable(5000), true)).To(MatchError(broker.ErrBusy))
		Expect(batch(t, w, false)).To(Succeed())
		// The backlog's 10 messages, at most 100 in transit or one slice, and a slice in hand.
		Expect(w.most).To(BeNumerically("<=", (10+2*256)*(10+queue.Overhead)))
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(w.n))
		var got []string
		for _, d := range r.deliveries() {
			got = append(got, string(d.Body[:8]))
		}
		slices.Sort(got)
		Expect(slices.Compact(got)).To(HaveLen(w.n))
		Eventually(func() int64 { return held(b) }).Should(BeZero())
	})
})

// measuredFile notes the largest write.
type measuredFile struct {
	commitlog.File
	largest *atomic.Int64
}

func (f measuredFile) WriteAt(b []byte, at int64) (int, error) {
	for n := int64(len(b)); ; {
		if was := f.largest.Load(); n <= was || f.largest.CompareAndSwap(was, n) {
			return f.File.WriteAt(b, at)
		}
	}
}

type untouchableBytes struct {
	untouchable
	bytes int
}

func (u *untouchableBytes) Bytes() int { return u.bytes }
