package broker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/gbytes"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

func start(change func(*broker.Config)) *broker.Broker {
	GinkgoHelper()
	cfg := broker.Config{Capacity: 100_000, MaxMsgTimeout: time.Minute, AutoCreate: true}
	if change != nil {
		change(&cfg)
	}
	b, err := broker.New(cfg)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() { Expect(b.Close()).To(Succeed()) })
	return b
}

// grant gives a topic a share without an end.
func grant(n *broker.Node, topic string, s tokenbucket.Share, tokens tokenbucket.Tokens) (tokenbucket.Tokens, error) {
	return n.Grant(topic, s, s, mono.Never, mono.Never, tokens)
}

func topic(b *broker.Broker, name string) *broker.Topic {
	GinkgoHelper()
	t, err := b.CreateTopic(name)
	Expect(err).NotTo(HaveOccurred())
	return t
}

func publish(t *broker.Topic, body string) error { return publishWith(t, body, "") }

func publishWith(t *broker.Topic, body, attribute string) error {
	now := clock.Mono()
	return t.Publish(now, clock.Wall(), broker.Published{
		Body: []byte(body), Attribute: []byte(attribute), Arrival: stamp.Arrival{At: now, Source: stamp.Read},
	})
}

// reported returns a report of all topics.
func reported(b *broker.Broker) []*srtmv1.TopicStats {
	stats, _ := b.Report(true)
	return stats
}

// reader takes deliveries as a connection's writer does.
type reader struct {
	sub  *broker.Subscription
	wake chan struct{}
	done chan struct{} // closed when the subscription has ended

	mu     sync.Mutex
	got    []wire.Message
	finish bool
}

func read(t *broker.Topic, channel string, rdy int, finish bool) *reader {
	GinkgoHelper()
	r := &reader{wake: make(chan struct{}, 1), done: make(chan struct{}), finish: finish}
	sub, err := t.Subscribe(channel, broker.Subscriber{MsgTimeout: 30 * time.Second}, func() {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	})
	Expect(err).NotTo(HaveOccurred())
	r.sub = sub
	go r.run()
	DeferCleanup(func() {
		sub.Close()
		r.notify()
		Eventually(r.done).Should(BeClosed())
	})
	Expect(sub.Ready(rdy)).To(Succeed())
	return r
}

func (r *reader) notify() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *reader) run() {
	defer GinkgoRecover()
	defer close(r.done)
	for range r.wake {
		for {
			var out broker.Outgoing
			if !r.sub.Take(&out, plenty) {
				return
			}
			if out.Messages() == 0 {
				break
			}
			r.sub.Wrote(&out)
			taken := messages(&out)
			r.mu.Lock()
			r.got = append(r.got, taken...)
			r.mu.Unlock()
			if r.finish {
				for _, m := range taken {
					if err := r.sub.Finish(m.ID); err != nil && !errors.Is(err, broker.ErrGone) {
						Fail(err.Error())
					}
				}
			}
		}
	}
}

func (r *reader) deliveries() []wire.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

func (r *reader) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.got)
}

// untouchable is a batch of so many messages that must not be read.
type untouchable int

func (u untouchable) Len() int   { return int(u) }
func (u untouchable) Bytes() int { return int(u) }
func (untouchable) Each(func([]byte)) {
	defer GinkgoRecover()
	Fail("the batch was read")
}

var _ = Describe("a broker", func() {
	It("releases a limited topic within its envelope, by eligible times and by those of release", func() {
		trace := gbytes.NewBuffer()
		const backdating = 20 * time.Millisecond
		b := start(func(c *broker.Config) {
			c.Trace, c.MaxBackdating = broker.NewTrace(trace, slog.New(slog.DiscardHandler)), backdating
		})
		t := topic(b, "t")
		const rate, burst, total = 2000, 5, 400
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: burst}, false)
		r := read(t, "c", total, true)
		for range total {
			Expect(publish(t, "x")).To(Succeed())
		}
		Eventually(r.count).Should(Equal(total))
		Eventually(func() int { return bytes.Count(trace.Contents(), []byte("\n")) }).Should(Equal(total)) // the trace is written after the deliveries
		var eligible, released []mono.Time
		for line := range strings.Lines(string(trace.Contents())) {
			var arrival, e, left mono.Time
			_, err := fmt.Sscanf(line, "t,%d,%d,%d", &arrival, &e, &left)
			Expect(err).NotTo(HaveOccurred())
			Expect(slices.IsSorted([]mono.Time{arrival, e, left, e.Add(backdating)})).To(BeTrue(), line)
			eligible, released = append(eligible, e), append(released, left)
		}
		_, err := testkit.Envelope(eligible, rate*1000, burst)
		Expect(err).NotTo(HaveOccurred())
		_, err = testkit.Envelope(released, rate*1000, burst+rate*backdating.Milliseconds()/1000)
		Expect(err).NotTo(HaveOccurred())
	})

	It("releases by the time at which it has the lock, not by that of the call", func() {
		var trace bytes.Buffer
		b := start(func(c *broker.Config) { c.Trace = broker.NewTrace(&trace, slog.New(slog.DiscardHandler)) })
		t := topic(b, "t")
		t.SetShare(tokenbucket.Share{Rate: tokenbucket.PerSecond(1e6), Burst: 10}, 10*tokenbucket.Token)
		Expect(t.CreateChannel("c")).To(Succeed())
		called := clock.Mono()
		p := broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: called, Source: stamp.Read}}
		waited := clock.Mono() // the call may wait until now, for example for a lock
		Expect(t.Publish(called, clock.Wall(), p)).To(Succeed())
		Expect(t.PublishEach(called, clock.Wall(), []broker.Published{p}, nil)).To(Equal([]error{nil}))
		Expect(strings.Count(trace.String(), "\n")).To(Equal(2))
		for line := range strings.Lines(trace.String()) {
			var arrival, e, left mono.Time
			_, err := fmt.Sscanf(line, "t,%d,%d,%d", &arrival, &e, &left)
			Expect(err).NotTo(HaveOccurred())
			Expect(left).To(BeNumerically(">=", waited))
			Expect(e).To(Equal(left), "nothing is backdated here")
		}
	})

	It("reports differences since the last report, and every topic each time", func() {
		b := start(nil)
		t := topic(b, "t")
		idle := topic(b, "idle")
		Expect(idle.CreateChannel("z")).To(Succeed())
		node := b.Node()
		Expect(node.Prepare("t", listed("c"), 1, time.Nanosecond, 0.99, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY, nil)).Error().NotTo(HaveOccurred())
		released, err := grant(node, "t", tokenbucket.Share{Rate: tokenbucket.PerSecond(1e6), Burst: 100}, 100*tokenbucket.Token)
		Expect(err).NotTo(HaveOccurred())
		Expect(released).To(BeZero())
		r := read(t, "c", 100, true)
		for range 10 {
			Expect(publish(t, "x")).To(Succeed())
		}
		Eventually(r.count).Should(Equal(10))
		Eventually(func() uint64 { return t.Stats().Delivered }).Should(BeEquivalentTo(10))
		reports, _ := node.Report(true)
		Expect(reports).To(HaveLen(2))
		Expect(reports[0].Topic).To(Equal("idle"))
		Expect(reports[0].Channels).To(Equal([]string{"z"}))
		got := reports[1]
		Expect(got.Offered).To(BeEquivalentTo(10))
		Expect(got.Released).To(BeEquivalentTo(10))
		Expect(got.Delivered).To(BeEquivalentTo(10))
		Expect(got.Exceeded).To(BeEquivalentTo(10), "nothing is delivered within a nanosecond")
		Expect(got.Subscribers).To(BeEquivalentTo(1))
		l, err := obs.LatencyFromProto(got.Delivery)
		Expect(err).NotTo(HaveOccurred())
		Expect(l.Count()).To(BeEquivalentTo(10))

		// A subscriber that takes nothing is connected and does not read.
		sub, err := t.Subscribe("c", broker.Subscriber{}, func() {})
		Expect(err).NotTo(HaveOccurred())
		got = reported(b)[1]
		Expect(got.Subscribers).To(BeEquivalentTo(2))
		Expect(got.ChannelSubscribers).To(Equal([]uint32{1}))
		Expect(sub.Ready(1)).To(Succeed())
		got = reported(b)[1]
		Expect(got.ChannelSubscribers).To(Equal([]uint32{2}))
		Expect(got.Offered).To(BeZero())
		Expect(got.Delivered).To(BeZero())
		Expect(t.Stats().Delivery.Count()).To(BeEquivalentTo(10), "the stats since the start stay")
	})

	It("leaves out of a report what is still, where that may be", func() {
		b := start(nil)
		t := topic(b, "t")
		topic(b, "idle")
		r := read(t, "c", 100, true)
		listed := func(all bool) (names []string) {
			stats, changes := b.Report(all)
			Expect(changes).To(Equal(!all))
			for _, s := range stats {
				names = append(names, s.Topic)
			}
			return names
		}
		stats, changes := b.Report(false)
		Expect(stats).To(HaveLen(2), "they are new")
		Expect(changes).To(BeTrue())
		Expect(listed(false)).To(BeEmpty())
		Expect(publish(t, "x")).To(Succeed())
		Eventually(r.count).Should(Equal(1))
		Eventually(func() uint64 { return t.Stats().Delivered }).Should(BeEquivalentTo(1))
		Expect(listed(false)).To(Equal([]string{"t"}))
		Expect(listed(false)).To(Equal([]string{"t"}), "an interval without messages is reported once")
		Eventually(func() []string { return listed(false) }).Should(BeEmpty())
		Expect(listed(true)).To(Equal([]string{"idle", "t"}))

		By("changing what else is reported")
		sub, err := t.Subscribe("c", broker.Subscriber{}, func() {})
		Expect(err).NotTo(HaveOccurred())
		Expect(listed(false)).To(Equal([]string{"t"}))
		Expect(sub.Ready(1)).To(Succeed())
		Expect(listed(false)).To(Equal([]string{"t"}))
		Expect(t.CreateChannel("d")).To(Succeed())
		Expect(listed(false)).To(Equal([]string{"t"}))
		topic(b, "new")
		Expect(listed(false)).To(Equal([]string{"new"}))

		By("removing one")
		Expect(b.DeleteTopic("idle")).To(Succeed())
		stats, changes = b.Report(false)
		Expect(changes).To(BeFalse())
		Expect(stats).To(HaveLen(2))
		Expect(listed(false)).To(BeEmpty())

		By("preparing one, and creating it anew")
		prepare := func() {
			GinkgoHelper()
			Expect(b.Node().Prepare("new", nil, 0, time.Second, 0.99, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY, nil)).Error().NotTo(HaveOccurred())
		}
		unprepared := func() bool {
			GinkgoHelper()
			stats, _ := b.Report(false)
			i := slices.IndexFunc(stats, func(s *srtmv1.TopicStats) bool { return s.Topic == "new" })
			Expect(i).To(BeNumerically(">=", 0))
			exists, prepared := b.Node().Has("new")
			Expect([]bool{exists, prepared}).To(Equal([]bool{true, !stats[i].Unprepared}))
			return stats[i].Unprepared
		}
		prepare()
		Expect(unprepared()).To(BeFalse())
		Expect(b.DeleteTopic("new")).To(Succeed())
		exists, prepared := b.Node().Has("new")
		Expect([]bool{exists, prepared}).To(Equal([]bool{false, false}))
		topic(b, "new")
		Expect(unprepared()).To(BeTrue())
		prepare()
		Expect(unprepared()).To(BeFalse())
	})

	It("reports how much of each delivery is access delay", func() {
		b := start(nil)
		t := topic(b, "t")
		node := b.Node()
		Expect(node.Prepare("t", listed("c"), 1, time.Millisecond, 0.99, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY, nil)).Error().NotTo(HaveOccurred())
		r := read(t, "c", 100, true)
		Expect(publish(t, "x")).To(Succeed())
		_, err := grant(node, "t", tokenbucket.Share{Rate: tokenbucket.PerSecond(50), Burst: 1}, 0) // a token after 20 ms
		Expect(err).NotTo(HaveOccurred())
		Eventually(r.count).Should(Equal(1))
		Eventually(func() uint64 { return t.Stats().Delivered }).Should(BeEquivalentTo(1))
		got := reported(b)[0]
		Expect(got.Delivery.Index).To(HaveLen(1))
		Expect(got.DeliveryAccess).To(HaveLen(1))
		access, err := obs.LatencyFromProto(got.Access)
		Expect(err).NotTo(HaveOccurred())
		delivery, err := obs.LatencyFromProto(got.Delivery)
		Expect(err).NotTo(HaveOccurred())
		Expect(access.Quantile(1)).To(BeNumerically(">=", 20*time.Millisecond))
		Expect(got.DeliveryAccess[0]).To(BeNumerically("~", float64(access.Quantile(1))/float64(delivery.Quantile(1)), 0.02))
		Expect(reported(b)[0].DeliveryAccess).To(BeEmpty())
	})

	It("does not count what waits for consumers against the SLO", func() {
		var now atomic.Int64
		now.Store(int64(time.Hour))
		b := start(func(c *broker.Config) { c.Now = func() mono.Time { return mono.Time(now.Load()) } })
		t := topic(b, "t")
		testkit.Result(b.Node().Prepare("t", nil, 0, 10*time.Millisecond, 0.99, 0, nil)).Must(GinkgoTB())
		t.SetShare(tokenbucket.Share{Rate: tokenbucket.PerSecond(1e6), Burst: 100}, 100*tokenbucket.Token)
		put := func() {
			GinkgoHelper()
			at := mono.Time(now.Load())
			Expect(t.Publish(at, 0, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: at}})).To(Succeed())
		}
		var sub *broker.Subscription
		var err error
		write := func() {
			var out broker.Outgoing
			sub.Take(&out, 1<<20)
			sub.Wrote(&out)
		}
		for range 3 { // before there is a subscriber
			put()
		}
		now.Add(int64(2 * time.Second))
		sub, err = t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
		Expect(err).NotTo(HaveOccurred())
		now.Add(int64(time.Second))
		Expect(sub.Ready(4)).To(Succeed())
		put()
		write()
		put() // RDY is used up
		now.Add(int64(time.Second))
		Expect(sub.Ready(5)).To(Succeed())
		now.Add(int64(20 * time.Millisecond)) // the broker's own delay
		write()

		s := t.Stats()
		Expect(s.Delivered).To(BeEquivalentTo(5))
		Expect(s.Exceeded).To(BeEquivalentTo(1))
		Expect(s.Processing.CountAbove(0)).To(BeEquivalentTo(1))
		Expect(s.Delivery.Quantile(1)).To(BeNumerically("~", 20*time.Millisecond, time.Millisecond))
		Expect(s.Consumer.CountAbove(2 * time.Second)).To(BeEquivalentTo(3))
		Expect(s.Consumer.CountAbove(900 * time.Millisecond)).To(BeEquivalentTo(4))
		report := reported(b)[0]
		Expect(report.Consumer.Count).NotTo(BeEmpty())
	})

	It("lets a consumer that holds nothing rest, whatever that says then", func() {
		b := start(nil)
		t := topic(b, "t")
		sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
		Expect(err).NotTo(HaveOccurred())
		rest := func() []any {
			ready, rests := sub.Rest()
			return []any{ready, rests}
		}
		Expect(sub.Ready(2)).To(Succeed())
		Expect(publish(t, "1")).To(Succeed())
		Expect(rest()).To(Equal([]any{2, false}), "it holds one")
		Expect(sub.Ready(3)).To(Succeed())
		Expect(publish(t, "2")).To(Succeed())
		_, inFlight := sub.Holds()
		Expect(inFlight).To(Equal(2), "it has said RDY again, and gets more")
		Expect(rest()).To(Equal([]any{3, false}))
		Expect(t.EmptyChannel("c")).To(Succeed())
		Expect(rest()).To(Equal([]any{0, true}))
		Expect(sub.Ready(4)).To(Succeed())
		Expect(publish(t, "3")).To(Succeed())
		_, inFlight = sub.Holds()
		Expect(inFlight).To(BeZero())
	})

	It("counts publishers while they are there", func() {
		b := start(nil)
		t := topic(b, "t")
		p := t.AddPublisher("p1", "", police.Identity{})
		Expect(reported(b)[0].Publishers).To(BeEquivalentTo(1))
		p.Leave()
		Expect(reported(b)[0].Publishers).To(BeZero())
	})

	It("keeps a managed topic stopped until a share comes", func() {
		b := start(nil)
		node := b.Node()
		Expect(node.Prepare("t", listed("c"), 1, time.Millisecond, 0.99, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_UNSPECIFIED, nil)).Error().NotTo(HaveOccurred())
		t := topic(b, "t")
		r := read(t, "c", 10, true)
		Expect(publish(t, "x")).To(Succeed())
		Consistently(r.count, "30ms").Should(BeZero())
		share := tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 2}
		_, err := grant(node, "t", share, tokenbucket.Token)
		Expect(err).NotTo(HaveOccurred())
		Eventually(r.count).Should(Equal(1))

		Expect(node.Prepare("t", listed("c", "d"), 1, time.Second, 0.9, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT, nil)).Error().NotTo(HaveOccurred())
		s := t.Stats()
		Expect(s.Share).To(Equal(share), "preparing again keeps the share")
		Expect(s.Channels).To(HaveLen(2))
		Expect(s.SLO.Quantile).To(Equal(0.9))
	})

	It("refuses grants it cannot apply, and changes nothing", func() {
		node := start(nil).Node()
		_, err := grant(node, "nowhere", tokenbucket.Share{Rate: 1, Burst: 1}, 0)
		Expect(err).To(MatchError(broker.ErrUnknownTopic))
		Expect(node.Topics()).To(BeEmpty())
		Expect(node.Prepare("t", nil, 0, time.Second, 0.9, 0, nil)).Error().NotTo(HaveOccurred())
		_, err = grant(node, "t", tokenbucket.Share{Rate: -1, Burst: 1}, 0)
		Expect(err).To(HaveOccurred())
		_, err = grant(node, "t", tokenbucket.Share{Rate: 1, Burst: 1}, -5)
		Expect(err).To(HaveOccurred())
		Expect(node.Prepare("bad name", nil, 0, time.Second, 0.9, 0, nil)).Error().To(MatchError(broker.ErrBadName))
		Expect(node.Prepare("t", listed("bad name"), 1, time.Second, 0.9, 0, nil)).Error().To(MatchError(broker.ErrBadName))
		Expect(node.Topics()).To(Equal([]string{"t"}))
		Expect(node.Remove("t")).To(Succeed())
		Expect(node.Remove("t")).To(Succeed())
		Expect(node.Topics()).To(BeEmpty())
	})

	It("ends subscriptions and refuses publishes when a topic is deleted", func() {
		b := start(nil)
		t := topic(b, "t")
		r := read(t, "c", 1, false)
		Expect(b.DeleteTopic("t")).To(Succeed())
		Eventually(r.done).Should(BeClosed())
		Expect(publish(t, "x")).To(MatchError(broker.ErrGone))
		Expect(r.sub.Ready(2)).To(MatchError(broker.ErrGone))
		Expect(r.sub.FinishBatch(clock.Mono(), make([]wire.MessageID, 2), nil)).To(Equal([]error{broker.ErrGone, broker.ErrGone}))
		_, err := t.Subscribe("c", broker.Subscriber{}, func() {})
		Expect(err).To(MatchError(broker.ErrGone))
		Expect(b.DeleteTopic("t")).To(MatchError(broker.ErrUnknownTopic))
	})

	It("removes ephemeral channels and topics with their last subscriber", func() {
		b := start(nil)
		t := topic(b, "t#ephemeral")
		r := read(t, "c#ephemeral", 1, true)
		Expect(t.Stats().Channels).To(HaveLen(1))
		r.sub.Close()
		Expect(b.Topics()).To(BeEmpty())
		kept := topic(b, "kept")
		r = read(kept, "c#ephemeral", 1, true)
		r.sub.Close()
		Expect(kept.Stats().Channels).To(BeEmpty())
		Expect(b.Topics()).To(HaveLen(1))
	})

	It("drains what subscribers can take, and reports what none will", func() {
		b := start(nil)
		t := topic(b, "t")
		r := read(t, "c", 10, true)
		Expect(topic(b, "orphan").CreateChannel("nobody")).To(Succeed())
		Expect(publish(topic(b, "orphan"), "x")).To(Succeed())
		for range 1000 {
			Expect(publish(t, "x")).To(Succeed())
		}
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		Expect(b.Drain(ctx)).To(Equal(1))
		Expect(ctx.Err()).NotTo(HaveOccurred())
		Expect(r.count()).To(Equal(1000))
		Expect(publish(t, "late")).To(MatchError(broker.ErrDraining))
		_, err := b.CreateTopic("late")
		Expect(err).To(MatchError(broker.ErrDraining))
	})

	DescribeTable("does not drain what cannot move before the time is over",
		func(stay func(*broker.Topic)) {
			b := start(nil)
			t := topic(b, "t")
			read(t, "c", 10, true)
			stay(t)
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
			defer cancel()
			left := make(chan int, 1)
			go func() { left <- b.Drain(ctx) }()
			Eventually(left).Should(Receive(Equal(1)))
		},
		Entry("a message deferred for longer", func(t *broker.Topic) {
			now := clock.Mono()
			Expect(t.Publish(now, clock.Wall(), broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: now}, Defer: 2 * time.Hour})).To(Succeed())
		}),
		Entry("a message whose token comes later", func(t *broker.Topic) {
			t.SetShare(tokenbucket.Share{Rate: tokenbucket.MinRate, Burst: 1}, 0) // a token in 1000 s
			Expect(publish(t, "x")).To(Succeed())
		}),
		Entry("a message that has no share", func(t *broker.Topic) {
			t.SetShare(tokenbucket.Share{}, 0)
			Expect(publish(t, "x")).To(Succeed())
		}),
		Entry("a message in a paused topic", func(t *broker.Topic) {
			t.Pause()
			Expect(publish(t, "x")).To(Succeed())
		}),
		Entry("a message in a paused channel", func(t *broker.Topic) {
			Expect(t.PauseChannel("c")).To(Succeed())
			Expect(publish(t, "x")).To(Succeed())
		}),
	)

	It("waits for what was deferred and comes in time", func() {
		b := start(nil)
		t := topic(b, "t")
		r := read(t, "c", 10, true)
		now := clock.Mono()
		Expect(t.Publish(now, clock.Wall(), broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: now}, Defer: 100 * time.Millisecond})).To(Succeed())
		Expect(b.Drain(context.Background())).To(BeZero())
		Expect(r.count()).To(Equal(1))
	})

	It("refuses a batch that cannot fit before it copies any of it", func() {
		b := start(func(c *broker.Config) { c.Capacity = 10 })
		t := topic(b, "t")
		now := clock.Mono()
		Expect(t.PublishBatch(now, clock.Wall(), broker.Published{Arrival: stamp.Arrival{At: now}}, untouchable(11))).To(MatchError(queue.ErrFull))
		Expect(t.Stats().Counters.Refused).To(BeEquivalentTo(11))
		Expect(b.DeleteTopic("t")).To(Succeed())
		Expect(t.PublishBatch(now, clock.Wall(), broker.Published{Arrival: stamp.Arrival{At: now}}, untouchable(11))).To(MatchError(broker.ErrGone))
	})

	It("survives everything at once", func() {
		b := start(func(c *broker.Config) { c.Capacity = 50 })
		const publishers, each = 4, 2000
		t := topic(b, "t")
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(200_000), Burst: 20}, false)
		a, z := read(t, "a", 5, true), read(t, "z", 100, true)
		var wg sync.WaitGroup
		for p := range publishers {
			wg.Go(func() {
				defer GinkgoRecover()
				for i := range each {
					for errors.Is(publish(t, fmt.Sprint(p, i)), queue.ErrFull) {
						runtime.Gosched() // the readers make room
					}
				}
			})
		}
		wg.Go(func() {
			defer GinkgoRecover()
			for range 200 {
				t.Pause()
				t.Stats()
				b.Report(true)
				t.SetShare(tokenbucket.Share{Rate: tokenbucket.PerSecond(150_000), Burst: 10}, 0)
				t.Unpause()
			}
		})
		wg.Wait()
		Eventually(func() []int { return []int{a.count(), z.count()} }).
			Should(Equal([]int{publishers * each, publishers * each}))
		for _, r := range []*reader{a, z} {
			seen := map[string]bool{}
			for _, d := range r.deliveries() {
				seen[string(d.Body)] = true
			}
			Expect(seen).To(HaveLen(publishers*each), "each message once")
		}
	})
})
