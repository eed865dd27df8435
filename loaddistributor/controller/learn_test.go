package controller_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing/synctest"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tokenbucket"
)

// weighed counts the bytes of publishers that are written.
type weighed struct {
	controller.Journal
	written *atomic.Int64
}

func (w weighed) Append(ctx context.Context, base uint64, events []catalog.Event) error {
	for _, e := range events {
		if moving, ok := e.(catalog.TopicMoving); ok {
			for _, p := range moving.Spec.Demand.Publishers {
				w.written.Add(int64(len(fmt.Sprintf(`{"id":%q,"key":%q,"rate":%v},`, p.ID, p.Key, p.Rate))))
			}
		}
	}
	return w.Journal.Append(ctx, base, events)
}

// counting counts the messages of a broker's sessions that are about arrivals.
type counting struct{ pieces, requests atomic.Int64 }

func (*counting) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*counting) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*counting) HandleConn(context.Context, stats.ConnStats)                       {}
func (c *counting) HandleRPC(_ context.Context, s stats.RPCStats) {
	switch s := s.(type) {
	case *stats.OutPayload:
		if m, ok := s.Payload.(*srtmv1.BrokerMessage); ok && m.GetArrivals() != nil {
			c.pieces.Add(1)
		}
	case *stats.InPayload:
		if m, ok := s.Payload.(*srtmv1.ControllerMessage); ok && m.GetCapture() != nil {
			c.requests.Add(1)
		}
	}
}

// unlisted is an open topic's specification.
func unlisted(name string, rate, burst int64) *srtmv1.TopicSpec {
	s := spec(name, rate, burst)
	s.Groups = nil
	return s
}

var _ = Describe("An open topic", func() {
	slow := func(cfg *controller.Config) { cfg.ReportInterval, cfg.Window = time.Second, 10*time.Second }
	// publish makes each publisher send rate messages a second until the spec ends, to the node that
	// where returns at the time.
	publish := func(rate int, where func(publisher string) *agenttest.Node, publishers ...string) {
		done := make(chan struct{})
		atEnd(func() { close(done) })
		go func() {
			for {
				for _, p := range publishers {
					if node := where(p); node != nil {
						node.Arrive("t", 0, slices.Repeat([]agenttest.Arrival{{At: clock.Wall(), Publisher: p}}, rate)...)
					}
				}
				select {
				case <-done:
					return
				case <-time.After(time.Second):
				}
			}
		}()
	}
	at := func(node *agenttest.Node) func(string) *agenttest.Node {
		return func(string) *agenttest.Node { return node }
	}

	It("takes each client that publishes for a publisher, and knows it after a restart", func() {
		data := &store.Memory{}
		c := newCluster(setup{data: data, config: slow})
		b1, b2 := c.join("b1", 1000, agenttest.New()), c.join("b2", 1000, agenttest.New())
		created := c.mustCreate(unlisted("t", 1000, 10))
		Expect(created.Quotas).To(HaveLen(1), "as few brokers as can be")
		home, other := b1, b2
		if created.Quotas[0].BrokerId == "b2" {
			home, other = b2, b1
		}
		for _, id := range []string{"p", "q"} {
			r, err := c.resolve("t", id)
			Expect(err).NotTo(HaveOccurred())
			Expect(r.Assignment.BrokerId).To(Equal(home.id))
		}
		start := time.Now()
		publish(8, at(home.node), "p")
		Eventually(func() []*srtmv1.LearnedPublisher { return c.topic("t").Learned.Publishers }).WithTimeout(time.Minute).Should(HaveLen(1))
		<-time.After(20 * time.Second)
		topic := c.topic("t")
		p := topic.Learned.Publishers[0]
		Expect(p.Id).To(Equal("p"))
		Expect(p.Rate).To(BeNumerically("~", 8, 1))
		Expect([]string{p.BrokerId, p.SendsTo}).To(Equal([]string{home.id, home.id}))
		Expect(p.Since.AsTime()).To(BeTemporally("~", start, 10*time.Second))
		Expect(topic.Spec.Publishers).To(BeEmpty(), "they were not ordered")
		Expect(topic.Quotas[0].Publishers).To(BeEquivalentTo(1))
		Expect(topic.Learned.Notes).To(BeEmpty())

		// Another broker, which does not have the topic, gets messages.
		other.node.Create("t")
		other.node.Measure("t", &srtmv1.TopicStats{Offered: 5, Publishers: 1, Interval: durationpb.New(time.Second)})
		Eventually(func() []string { return c.topic("t").Learned.Notes }).Should(ConsistOf(
			And(ContainSubstring("broker "+other.id+", which does not have the topic"), ContainSubstring(home.id+".example:4150"))))

		// An operator's change keeps the learned publishers.
		update := unlisted("t", 4, 10)
		c.mustUpdate(update)
		Expect(c.topic("t").Quotas[0].Publishers).To(BeEquivalentTo(1))
		c.mustUpdate(unlisted("t", 1000, 10))

		<-time.After(30 * time.Second)

		address := c.address
		c.stop()
		again := newCluster(setup{data: data, config: slow, address: address})
		Eventually(func() bool { return again.broker(home.id).GetConnected() }).WithTimeout(time.Minute).Should(BeTrue())
		Eventually(func() int { return len(again.topic("t").GetLearned().GetPublishers()) }).Should(Equal(1))
		known := again.topic("t")
		Expect(known.Learned.Publishers[0].Since.AsTime()).To(BeTemporally("~", p.Since.AsTime(), time.Second))
		Expect(known.Quotas[0].Publishers).To(BeEquivalentTo(1))
		<-time.After(30 * time.Second)
		Expect(again.topic("t").Epoch).To(Equal(known.Epoch), "nothing has changed")
	})

	// Each idle topic once took four messages a second.
	It("sends no message of its own while no client publishes", func() {
		c := newCluster(setup{config: slow})
		var sent counting
		b := c.join("b", 10_000, agenttest.New(), func(cfg *agent.Config) {
			cfg.DialOptions = append(cfg.DialOptions, grpc.WithStatsHandler(&sent))
		})
		const topics, seconds = 60, 30
		for i := range topics {
			c.mustCreate(unlisted(fmt.Sprint("t", i), 10, 1))
		}
		captures := func() (n int) {
			for i := range topics {
				n += b.node.Captures(fmt.Sprint("t", i))
			}
			return n
		}
		Eventually(captures).WithTimeout(time.Minute).Should(Equal(topics))
		<-time.After(10 * time.Second)
		pieces, requests := sent.pieces.Load(), sent.requests.Load()
		<-time.After(seconds * time.Second)
		Expect(sent.pieces.Load()-pieces).To(BeNumerically("<=", 2*seconds+1), "messages about arrivals")
		Expect(sent.requests.Load()-requests).To(BeNumerically("<=", seconds+1), "requests for arrivals")
		Expect(captures()).To(Equal(topics), "every record continues")
		b.node.Arrive("t7", 0, agenttest.Arrival{At: clock.Wall(), Publisher: "p"})
		before := sent.pieces.Load()
		Eventually(func() int64 { return sent.pieces.Load() - before }).WithTimeout(10 * time.Second).Should(BeNumerically(">=", 2))
	})

	It("goes to another broker with those that are too much for one, and stays there", func() {
		c := newCluster(setup{config: slow})
		nodes := map[string]*agenttest.Node{"b1": c.node("b1", 300), "b2": c.node("b2", 300)}
		Expect(c.mustCreate(unlisted("t", 500, 10)).Quotas).To(HaveLen(2))
		var ids []string
		for i := range 12 {
			ids = append(ids, fmt.Sprintf("p%d", i))
		}
		// The publishers first come to one broker together, and then follow the advice.
		first, err := c.resolve("t", "p0")
		Expect(err).NotTo(HaveOccurred())
		where := func(p string) *agenttest.Node {
			if at, err := c.control.View().Resolve("t", p); err == nil {
				return nodes[at.Broker]
			}
			return nil
		}
		for _, p := range ids {
			Expect(where(p)).To(BeIdenticalTo(nodes[first.Assignment.BrokerId]))
		}
		publish(40, where, ids...)
		count := func() (all []uint32) {
			for _, q := range c.topic("t").Quotas {
				all = append(all, q.Publishers)
			}
			return all
		}
		Eventually(count).WithTimeout(2 * time.Minute).Should(ConsistOf(BeEquivalentTo(7), BeEquivalentTo(5)))
		Eventually(func() map[srtmv1.MoveReason]int { return c.moved("t") }).Should(Equal(map[srtmv1.MoveReason]int{srtmv1.MoveReason_MOVE_REASON_CORRELATION: 5}))
		Expect(c.topic("t").Status.Moves[0]).To(And(HaveField("From", first.Assignment.BrokerId), HaveField("By", ""), HaveField("Why", "publishers learned")))
		<-time.After(3 * time.Minute) // the publishers fire together, which is learned, too
		epoch, quotas := c.topic("t").Epoch, count()
		<-time.After(90 * time.Second)
		Expect(count()).To(Equal(quotas))
		Expect(c.topic("t").Epoch).To(Equal(epoch), "it flaps")
	})

	It("has a contract that follows what is offered, beginning with an SLO alone", func() {
		data := &store.Memory{}
		c := newCluster(setup{data: data, config: slow})
		node := c.node("b1", 1000)
		s := unlisted("t", 0, 0)
		created := c.mustCreate(s, "key")
		Expect([]int64{created.Spec.Contract.RateMilli, created.Spec.Contract.Burst}).To(Equal([]int64{500_000, 500}), "half of the broker's, which is less than the default")
		Expect(c.mustCreate(s, "key").Epoch).To(Equal(created.Epoch))
		publish(40, at(node), "p")
		Expect(c.topic("t").Spec.Auto.Measured).To(BeFalse())
		Eventually(func() bool { return c.topic("t").Spec.Auto.Measured }).WithTimeout(2 * time.Minute).Should(BeTrue())
		contract := c.topic("t").Spec.Contract
		// A window may contain one more burst of 40.
		Expect(contract.RateMilli).To(BeNumerically("~", 50_000, 5000))
		Expect(contract.Burst).To(BeNumerically("~", 40, 2))
		Expect(c.broker("b1").Allocated).To(BeNumerically("~", 50, 5), "the rest is for others again")
		Expect(c.topic("t").Learned.Notes).To(BeEmpty())

		address := c.address
		c.stop()
		again := newCluster(setup{data: data, config: slow, address: address})
		Expect(again.topic("t").Spec.Contract.RateMilli).To(Equal(contract.RateMilli))
		bad := unlisted("u", 10, 10)
		bad.Auto = &srtmv1.AutoContract{MaxRateMilli: 5000, MinBurst: 20, MaxBurst: 10}
		_, _, err := again.create(context.Background(), bad, "")
		Expect(err).To(HaveOccurred())
	})

	It("reserves the loaddistributor's default until it is measured", func() {
		c := newCluster(setup{})
		bare := &srtmv1.TopicSpec{Name: "early"}
		_, _, err := c.create(context.Background(), bare, "")
		Expect(infeasible(err)).To(Equal([]any{"brokers", int64(1), int64(0)}), "no fault of a contract that was not given")
		c.node("b1", 20_000)
		for i, contract := range []*srtmv1.Contract{nil, {}, {Slo: &srtmv1.Slo{Quantile: 0.9}}} {
			name := fmt.Sprintf("bare%d", i)
			created := c.mustCreate(&srtmv1.TopicSpec{Name: name, Contract: contract}, "")
			is := created.Spec.Contract
			Expect([]int64{is.RateMilli, is.Burst}).To(Equal([]int64{1000 * rpc.DefaultReservation.Rate, rpc.DefaultReservation.Burst}))
			Expect([]int64{created.Spec.Auto.MaxRateMilli, created.Spec.Auto.MaxBurst}).To(Equal([]int64{10_000_000, 10_000}), "half of the broker's capacity")
			Expect(is.Slo.Latency.AsDuration()).To(Equal(topics.DefaultLatency))
			Expect(is.Slo.Quantile).To(Equal(cmp.Or(contract.GetSlo().GetQuantile(), topics.DefaultQuantile)))
		}
		Expect(c.broker("b1").Allocated).To(Equal(3 * rpc.DefaultReservation.Rate))
	})

	It("follows what is offered as far as its tenant's limit, and reports that", func() {
		c := newCluster(setup{config: func(cfg *controller.Config) {
			slow(cfg)
			cfg.TenantRates = map[string]tokenbucket.Rate{"acme": tokenbucket.PerSecond(30)}
		}})
		node := c.node("b1", 1000)
		c.topicOf("acme", "other")
		_, err := c.control.Create(context.Background(), &catalog.Spec{
			Demand: placement.Demand{Topic: "t", Rate: 15, RateMilli: 15_000, Burst: 100, Open: true},
			SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Channels: []string{"main"}, Tenant: "acme",
			Auto: catalog.Auto{MaxRate: 500_000, MinBurst: 1, MaxBurst: 100},
		}, "", "", func(controller.Progress) error { return nil })
		Expect(err).NotTo(HaveOccurred())
		publish(40, at(node), "p")
		Eventually(func() bool { return c.topic("t").Spec.Auto.Measured }).WithTimeout(2 * time.Minute).Should(BeTrue())
		Eventually(func() int64 { return c.topic("t").Spec.Contract.RateMilli }).WithTimeout(time.Minute).Should(BeEquivalentTo(20_000))
		Expect(c.topic("t").Learned.Notes).To(ContainElement(MatchRegexp("^the contract would follow the traffic to .* msg/s, and --tenant-rate leaves tenant acme 20 msg/s for it: raise --tenant-rate")))
	})

	It("stays as it was measured when another leads, until that one has measured less", func() {
		data := &store.Memory{}
		first := newCluster(setup{data: data, config: slow})
		node := first.node("b1", 1000)
		first.mustCreate(unlisted("t", 0, 0))
		var p, q atomic.Bool
		p.Store(true)
		q.Store(true)
		publish(40, func(id string) *agenttest.Node {
			if id == "p" && p.Load() || id == "q" && q.Load() {
				return node
			}
			return nil
		}, "p", "q")
		Eventually(func() bool { return first.topic("t").Spec.Auto.Measured }).WithTimeout(2 * time.Minute).Should(BeTrue())
		Eventually(func() int { return len(first.topic("t").Learned.Publishers) }).WithTimeout(time.Minute).Should(Equal(2))
		<-time.After(2 * time.Minute)
		was := first.topic("t")
		// 20 s of one burst per second: a burst at the very end may fall on either side.
		Expect(was.Spec.Contract.RateMilli).To(BeNumerically("~", 100_000, 10_000))
		first.stop()

		// The broker does not find the next controller for longer than a publisher may be silent.
		q.Store(false)
		second := newCluster(setup{data: data, config: slow, address: "127.0.0.1:99"})
		<-time.After(learned.Forget + 2*time.Minute)
		is := second.topic("t")
		Expect(is.Spec.Contract.String()).To(Equal(was.Spec.Contract.String()))
		Expect(is.Epoch).To(Equal(was.Epoch), "nothing was written")
		Expect(is.Learned.Publishers).To(HaveLen(2))
		second.stop()

		third := newCluster(setup{data: data, config: slow, address: first.address})
		Eventually(func() bool { return third.broker("b1").GetConnected() }).WithTimeout(time.Minute).Should(BeTrue())
		<-time.After(5 * time.Minute)
		Expect(third.topic("t").Spec.Contract.String()).To(Equal(was.Spec.Contract.String()))
		<-time.After(7 * time.Minute)
		is = third.topic("t")
		Expect(is.Learned.Publishers).To(HaveLen(1), "q was silent")
		Expect(is.Spec.Contract.RateMilli).To(BeNumerically("~", 50_000, 10_000), "it follows what differs by a quarter")
	})

	It("is not moved, nor the store filled, by a program of 10,000 identities, over a fail-over", func() {
		data, written := &store.Memory{}, &atomic.Int64{}
		counted := func(cfg *controller.Config) {
			slow(cfg)
			cfg.Journal = weighed{cfg.Journal, written}
		}
		c := newCluster(setup{data: data, config: counted})
		nodes := map[string]*agenttest.Node{"b1": c.node("b1", 5000), "b2": c.node("b2", 5000)}
		start := time.Now()
		c.mustCreate(unlisted("t", 4000, 100))
		home := c.topic("t").Quotas[0].BrokerId
		publish(40, at(nodes[home]), "honest")
		Eventually(func() int { return len(c.topic("t").Learned.Publishers) }).WithTimeout(time.Minute).Should(Equal(1))
		since := c.topic("t").Learned.Publishers[0].Since.Seconds
		done := make(chan struct{})
		atEnd(func() { close(done) })
		go func() {
			for n := 0; ; n++ {
				flood := make([]agenttest.Arrival, 2000)
				for i := range flood { // each of 10,000 sends every 5 s, for half a minute
					id := n%5*len(flood) + i
					flood[i] = agenttest.Arrival{At: clock.Wall(), Publisher: fmt.Sprintf("feigned-%d-%d", id, (n+id)/30)}
				}
				nodes[home].Arrive("t", 0, flood...)
				select {
				case <-done:
					return
				case <-time.After(time.Second):
				}
			}
		}()
		honest := func(c *cluster) {
			GinkgoHelper()
			r, err := c.resolve("t", "honest")
			Expect(err).NotTo(HaveOccurred())
			Expect(r.Assignment.BrokerId).To(Equal(home))
			p := c.topic("t").Learned.Publishers[0] // of the highest rate
			Expect([]any{p.Id, p.CorrelationKey, p.Since.Seconds}).To(Equal([]any{"honest", "", since}))
			Expect(p.Rate).To(BeNumerically("~", 40, 5))
		}
		<-time.After(time.Minute)
		honest(c)
		c.stop()
		again := newCluster(setup{data: data, config: counted, address: c.address})
		Eventually(func() []*srtmv1.LearnedPublisher { return again.topic("t").Learned.Publishers }).WithTimeout(time.Minute).ShouldNot(BeEmpty())
		honest(again)
		<-time.After(time.Minute)
		honest(again)
		bound := 2*(learned.WriteBurst+50*learned.Max) + int(learned.WriteRate*time.Since(start).Seconds())
		Expect(written.Load()).To(And(BeNumerically("<", bound), BeNumerically(">", learned.Max*10)))
	})

	It("does not move a publisher whom others feign to be, at another broker, or to fire with", func() {
		c := newCluster(setup{config: slow})
		nodes := map[string]*agenttest.Node{"b1": c.node("b1", 300), "b2": c.node("b2", 300)}
		Expect(c.mustCreate(unlisted("t", 500, 10)).Quotas).To(HaveLen(2))
		first, err := c.resolve("t", "victim")
		Expect(err).NotTo(HaveOccurred())
		home, other := nodes[first.Assignment.BrokerId], nodes["b1"]
		if home == other {
			other = nodes["b2"]
		}
		send := func(node *agenttest.Node, owner string, ids ...string) {
			for range 2 {
				for _, id := range ids {
					node.Arrive("t", 0, agenttest.Arrival{At: clock.Wall(), Publisher: id, Owner: owner})
				}
			}
		}
		var feigned atomic.Bool
		done := make(chan struct{})
		atEnd(func() { close(done) })
		go func() {
			for n := 0; ; n++ {
				send(home, "auth:fleet", "victim")
				send(home, "auth:fleet", "friend")
				if feigned.Load() {
					for range 5 {
						send(other, "auth:thief", "victim")
					}
					for i := range 10 {
						send(home, "auth:thief", fmt.Sprint("echo-", i))
						send(other, "auth:thief", fmt.Sprint("echo'-", i))
					}
				}
				select {
				case <-done:
					return
				case <-time.After(time.Second + time.Duration(n*n%17)*10*time.Millisecond): // no clock
				}
			}
		}()
		victim := func() *srtmv1.LearnedPublisher {
			for _, p := range c.topic("t").Learned.Publishers {
				if p.Id == "victim" {
					return p
				}
			}
			return nil
		}
		Eventually(victim).WithTimeout(time.Minute).ShouldNot(BeNil())
		<-time.After(30 * time.Second)
		was := victim()
		feigned.Store(true)
		<-time.After(5 * time.Minute)
		is, topic := victim(), c.topic("t")
		Expect([]any{is.BrokerId, is.SendsTo, is.Since.Seconds}).To(Equal([]any{was.BrokerId, was.SendsTo, was.Since.Seconds}))
		Expect(is.Rate).To(BeNumerically("~", was.Rate, was.Rate/4), "what others send is theirs")
		Expect(topic.Learned.Publishers).To(ContainElement(HaveField("Id", "auth:thief/victim")))
		Expect(topic.Status.Moves).NotTo(ContainElement(HaveField("PublisherId", BeElementOf("victim", "friend"))))
	})

	It("is profiled, as one with a list is", func() {
		c := newCluster(setup{config: slow})
		node := c.node("b1", 1000)
		publish(40, at(node), "g.0", "g.1")
		for _, s := range []*srtmv1.TopicSpec{unlisted("t", 100, 10), spec("t", 100, 10)} {
			c.mustCreate(s)
			profile := func(lasts time.Duration) (*srtmv1.Profile, error) {
				stream, err := c.admin.ProfileTopic(context.Background(), &srtmv1.ProfileTopicRequest{Name: "t", Lasts: durationpb.New(lasts)})
				Expect(err).NotTo(HaveOccurred())
				for {
					if r, err := stream.Recv(); err != nil || r.Profile != nil {
						return r.GetProfile(), err
					}
				}
			}
			p, err := profile(learned.Window)
			Expect(err).NotTo(HaveOccurred(), "the shortest that may be asked for")
			Expect(p.Messages).To(BeNumerically("~", 800, 100))
			p, err = profile(time.Minute)
			Expect(err).NotTo(HaveOccurred())
			Expect(p.MeanRate).To(BeNumerically("~", 80, 5))
			Expect(p.NeededBurst).To(BeEquivalentTo(80), "all come at one instant of a second")
			Expect(p.Missing).To(BeNumerically("<", 0.05))
			Expect(p.Splits[0].Delays.Late).To(BeNumerically("<=", 0.01))
			Expect(profile(time.Second)).Error().To(HaveOccurred())

			first := make(chan error, 1)
			go func() { _, err := profile(time.Minute); first <- err }()
			<-time.After(5 * time.Second)
			Expect(profile(time.Minute)).Error().To(MatchError(ContainSubstring("is being profiled")))
			Expect(<-first).NotTo(HaveOccurred())
			c.mustDelete("t")
		}
	})

	It("is profiled with the silence before and after a burst", func() {
		c := newCluster(setup{config: slow})
		node := c.node("b1", 1000)
		c.mustCreate(unlisted("t", 100, 10))
		done := make(chan controller.Profiled, 1)
		go func() {
			defer GinkgoRecover()
			p, err := c.control.Profile(context.Background(), "t", time.Minute, sizing.Wanted{}, func(int) error { return nil })
			Expect(err).NotTo(HaveOccurred())
			done <- p
		}()
		<-time.After(40 * time.Second)
		node.Arrive("t", 0, slices.Repeat([]agenttest.Arrival{{At: clock.Wall(), Publisher: "p"}}, 600)...)
		p := <-done
		Expect(p.Messages).To(Equal(600))
		Expect(p.Mean).To(BeNumerically("~", 10, 0.5))
	})

	It("is profiled until no caller waits for it, or it is gone; four at a time", func() {
		c := newCluster(setup{config: slow})
		c.node("b1", 1000)
		names := []string{"t0", "t1", "t2", "t3", "t4"}
		for _, name := range names {
			c.mustCreate(unlisted(name, 10, 10))
		}
		ended := map[string]chan error{}
		profile := func(name string) (cancel func()) {
			ctx, cancel := context.WithCancel(context.Background())
			atEnd(cancel)
			done := make(chan error, 1)
			ended[name] = done
			go func() {
				_, err := c.control.Profile(ctx, name, time.Hour, sizing.Wanted{}, func(int) error { return nil })
				done <- err
			}()
			synctest.Wait()
			return cancel
		}
		for _, name := range names[:3] {
			profile(name)
		}
		cancel := profile("t3")
		profile("t4")
		Expect(<-ended["t4"]).To(And(MatchError(catalog.ErrTopicState), MatchError(ContainSubstring("4 others are being profiled"))))
		cancel()
		Expect(<-ended["t3"]).To(MatchError(context.Canceled))
		profile("t4")
		Consistently(ended["t4"], "30s", "1s").ShouldNot(Receive())
		c.mustDelete("t0")
		Eventually(ended["t0"]).Should(Receive(MatchError(catalog.ErrTopicUnknown)))
		// The next topic of this name is another topic, and there is room for it.
		c.mustCreate(unlisted("t0", 10, 10))
		profile("t0")
		Consistently(ended["t0"], "30s", "1s").ShouldNot(Receive())
	})

	It("is recorded at once by a broker whose session is another, also where the end of the former is not seen", func() {
		c := newCluster(setup{config: slow})
		l := &line{conns: map[*lineConn]struct{}{}}
		node := agenttest.New()
		c.join("b1", 1000, node, l.option)
		c.mustCreate(unlisted("t", 100, 10))
		Eventually(func() bool { return node.Captured("t") }).Should(BeTrue())
		for range 4 {
			<-time.After(7 * time.Second) // virtual time; the capture is renewed every 5 s
			l.disconnect(false)
			Eventually(func() bool { return node.Captured("t") }).Should(BeFalse())
			Eventually(func() bool { return node.Captured("t") }).WithTimeout(1500 * time.Millisecond).Should(BeTrue())
		}
	})

	It("becomes one with a list, and open again", func() {
		c := newCluster(setup{config: slow})
		node := c.node("b1", 1000)
		c.mustCreate(unlisted("t", 100, 10))
		publish(8, at(node), "p")
		Eventually(func() uint32 { return c.topic("t").Quotas[0].Publishers }).WithTimeout(time.Minute).Should(BeEquivalentTo(1))
		c.mustUpdate(spec("t", 100, 10))
		topic := c.topic("t")
		Expect(topic.Learned).To(BeNil())
		Expect(topic.Quotas[0].Publishers).To(BeEquivalentTo(100))
		Expect(c.resolve("t", "p")).Error().To(HaveOccurred())
		c.mustUpdate(unlisted("t", 100, 10))
		Expect(c.resolve("t", "p")).Error().NotTo(HaveOccurred())
		Eventually(func() uint32 { return c.topic("t").Quotas[0].Publishers }).WithTimeout(time.Minute).Should(BeEquivalentTo(1))
	})
})
