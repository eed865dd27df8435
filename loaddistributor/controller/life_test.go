package controller_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/loop"
	"github.com/srtm-io/srtm/tokenbucket"
)

func instance(name string) func(*agent.Config) {
	return func(c *agent.Config) { c.Instance = name }
}

var _ = Describe("A broker of a topic", func() {
	var c *cluster
	var b1, b2 *broker
	begin := func() {
		c = newCluster(setup{})
		b1 = c.join("b1", 60, agenttest.New(), instance("one"))
		b2 = c.join("b2", 60, agenttest.New(), instance("two"))
		c.mustCreate(spec("t", 100, 10))
	}

	It("that goes keeps its share, and what is allocated on it", func() {
		begin()
		b2.stop()
		Eventually(c.state("t")).Should(HavePrefix("DEGRADED: broker b2 is gone"))
		Expect(c.broker("b2").Connected).To(BeFalse())
		Expect(c.broker("b2").Allocated).To(BeEquivalentTo(50), "what is allocated stays allocated")
		Expect(c.shares("t")).To(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}), "it may be using it")
		before, _ := b2.node.Topic("t")
		Expect(before.Share).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 5}), "the data path outlives the control plane")
	})

	It("that goes leaves publishers without a broker, which is reported, counted, and not within the SLO", func() {
		data := &store.Memory{}
		c = newCluster(setup{data: data})
		b1 = c.join("b1", 60, agenttest.New())
		b2 = c.join("b2", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10)) // 1 msg/s from each of 100
		fine := &srtmv1.TopicStats{Delivered: 20}
		b1.node.Measure("t", fine) // 1,000 msg/s
		b2.node.Measure("t", fine)
		status := func() *srtmv1.TopicStatus { return c.topic("t").Status }
		Eventually(func() *bool { return status().SloMet }).Should(HaveValue(BeTrue()))
		Expect(status().PublishersWithoutBroker).To(BeZero())

		b2.stop()
		left := time.Now()
		Eventually(func() uint32 { return status().PublishersWithoutBroker }).Should(BeEquivalentTo(50))
		Eventually(c.state("t")).Should(MatchRegexp("^DEGRADED: broker b2 is gone; 50 of 100 publishers have no broker, since ....-..-.. ..:..:.. UTC; the SLO is missed"))
		Expect(status().WithoutBrokerSince.AsTime()).To(BeTemporally("~", left, 100*time.Millisecond))
		Eventually(func() uint64 { return status().Unaccepted }, "3s").Should(BeNumerically("~", 50, 5), "50 msg/s in a window of 1 s")
		s := status()
		Expect(s.SloMet).To(HaveValue(BeFalse()))
		Expect(s.ExceedFraction).To(BeNumerically("~", float64(s.Unaccepted)/float64(s.Unaccepted+s.Pooled.Delivered), 1e-9))

		// A controller that has just started does not know yet that a broker is gone.
		address := c.address
		c.stop()
		c = newCluster(setup{data: data, address: address})
		Consistently(func() uint32 { return status().PublishersWithoutBroker }, "50ms").Should(BeZero())
		c.join("b2", 60, b2.node)
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
		Eventually(func() *bool { return status().SloMet }).Should(HaveValue(BeTrue()))
	})

	It("that does not come back is reported to keep its share, which an operator frees, and no other broker is blamed", func() {
		begin()
		b2.stop()
		late := histogram.NewLatency()
		late.Record(time.Second)
		b1.node.Measure("t", &srtmv1.TopicStats{Offered: 1, Delivered: 1000, Exceeded: 1000, Delivery: obs.LatencyProto(late)})
		Eventually(c.state("t")).Should(MatchRegexp(
			"^DEGRADED: broker b2 is gone; 50 of 100 publishers have no broker, since 20.*:..:.. UTC; the SLO is missed; 50 msg/s are reserved for b2, gone since 20.*:.* UTC; restart it, or `srtm share forget b2`$"))
		r := c.forget("b2")
		Expect(r).To(HaveLen(1))
		Expect(r[0].Topic).To(Equal("t"))
		Expect(r[0].Share.RateMilli).To(BeEquivalentTo(50_000))
		Eventually(c.state("t")).Should(And(HavePrefix("DEGRADED: broker b2 is gone; 50 of 100 "), HaveSuffix("; the SLO is missed, most on broker b1")))
	})

	It("that has not come back after a restart of the control plane is reported to hold up its topics' shares", func() {
		data := &store.Memory{}
		c = newCluster(setup{data: data})
		b1 = c.join("b1", 60, agenttest.New(), instance("one"))
		b2 = c.join("b2", 60, agenttest.New(), instance("two"))
		c.mustCreate(spec("t", 100, 10))
		b2.stop()
		Eventually(c.state("t")).Should(HavePrefix("DEGRADED: broker b2 is gone"))
		address := c.address
		c.stop()
		c = newCluster(setup{data: data, address: address, config: func(cfg *controller.Config) { cfg.EvacuateAfter = 20 * time.Second }})
		Eventually(c.state("t"), "30s").Should(MatchRegexp(
			"^DEGRADED: broker b2 is gone; 50 of 100 publishers have no broker, since 20.*; the SLO is missed; no share grows before b2, gone since 20.* or earlier, reports what it holds; restart it, or `srtm share forget b2`$"))
		r := c.forget("b2")
		Expect(r[0].Share).To(BeNil())
		Eventually(c.state("t")).Should(HavePrefix("DEGRADED: broker b2 is gone"))
	})

	It("that is started anew is prepared again and gets its share again, without tokens", func() {
		begin()
		b2.stop()
		Eventually(c.state("t")).Should(HavePrefix("DEGRADED: broker b2 is gone"))
		node := agenttest.New()
		c.join("b2", 60, node, instance("two again"))
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
		Eventually(func() tokenbucket.Share { t, _ := node.Topic("t"); return t.Share }).
			Should(Equal(tokenbucket.Share{Rate: 50_000, Burst: 5}))
		t, _ := node.Topic("t")
		Expect(t.Given).To(BeZero(), "the old process may have spent its tokens just now")
		Expect(t.Channels).To(Equal([]string{"main"}))
		Eventually(func() map[string]string { return c.shares("t") }).
			Should(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}))
	})

	It("that refuses to prepare again leaves the topic degraded until it does not", func() {
		begin()
		b2.stop()
		node := agenttest.New()
		refused := make(chan struct{}, 1000)
		node.Sabotage(func(string) error { refused <- struct{}{}; return errors.New("no room") }, nil)
		c.join("b2", 60, node, func(cfg *agent.Config) { cfg.Instance = "two again" })
		Eventually(refused).Should(Receive())
		Eventually(c.state("t")).Should(Equal("DEGRADED: broker b2 has not prepared the topic"))
		node.Sabotage(nil, nil)
		c.join("b2", 60, node, instance("two again")) // a new session sends a request at once
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
	})

	It("that comes back with less than was allocated degrades the topic, and gets nothing new", func() {
		begin()
		b1.stop()
		c.join("b1", 40, agenttest.New(), instance("one again"))
		Eventually(c.state("t")).Should(Equal("DEGRADED: broker b1 carries 40 msg/s, less than the 50 promised"))
		_, _, err := c.create(context.Background(), spec("u", 11, 10), "")
		Expect(infeasible(err)).To(Equal([]any{"rcap", int64(11), int64(10)}))
	})

	It("is replaced by a newer session with its id, which is left in peace", func() {
		begin()
		node := agenttest.New()
		c.join("b2", 70, node, instance("usurper"))
		Eventually(func() int64 { return c.broker("b2").Mcap }).Should(BeEquivalentTo(70))
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
		Expect(hasTopic(node, "t")()).To(BeTrue())
	})

	It("that moves is announced to watchers with its new address and a greater epoch", func() {
		begin()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		stream, err := c.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		first, err := stream.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(first.Assignments).To(HaveLen(100))
		Expect(first.More).To(BeFalse())

		b2.stop()
		c.join("b2", 60, agenttest.New(), instance("two again"), func(cfg *agent.Config) { cfg.TCPAddress = "moved.example:4150" })
		second, err := stream.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(second.Assignments).To(HaveLen(50), "only those that changed")
		Expect(second.Epoch).To(BeNumerically(">", first.Epoch))
		for _, a := range second.Assignments {
			Expect(a.BrokerId).To(Equal("b2"))
			Expect(a.TcpAddress).To(Equal("moved.example:4150"))
			Expect(a.Epoch).To(Equal(second.Epoch))
		}
	})
})

var _ = Describe("An adaptor of its own", func() {
	// held sums the shares of the topic that the nodes hold.
	held := func(name string, brokers ...*broker) tokenbucket.Share {
		var sum tokenbucket.Share
		for _, b := range brokers {
			t, _ := b.node.Topic(name)
			sum.Rate += t.Share.Rate
			sum.Burst += t.Share.Burst
		}
		return sum
	}

	It("that restarts gets its contracts back, and no share changes", func() {
		ln := listen("127.0.0.1:0")
		address := ln.Addr().String()
		first, _ := startAdaptor(ln)
		c := newCluster(setup{adaptorAddress: address})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		Expect(c.shares("t")).To(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}))

		first.stop()
		Expect(held("t", b1, b2)).To(Equal(tokenbucket.Share{Rate: 100_000, Burst: 10}))
		_, second := startAdaptor(listen(address))
		Eventually(func() map[string]string { return c.shares("t") }).
			Should(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}))
		Eventually(func() []string { return second.State().Adopting }).Should(BeEmpty())
		for _, b := range []*broker{b1, b2} {
			t, _ := b.node.Topic("t")
			Expect(t.Grants).To(Equal(1), "broker %s was granted nothing new", b.id)
		}
		// The broker enforces the contract again.
		c.mustDelete("t")
		c.nothingLeft("t", b1, b2)
	})

	It("that restarts while a broker is disconnected changes no share before the broker has called", func() {
		ln := listen("127.0.0.1:0")
		address := ln.Addr().String()
		first, _ := startAdaptor(ln)
		c := newCluster(setup{adaptorAddress: address})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		s := spec("t", 100, 10)
		s.ShareRule = "proportional"
		c.mustCreate(s)
		b1.node.Measure("t", &srtmv1.TopicStats{Offered: 100, MaxBacklog: 9})
		Eventually(func() bool { t, _ := b1.node.Topic("t"); return t.Share.Rate > 50_000 }).Should(BeTrue(), "the rule is at work")

		b2.stop()
		first.stop()
		before1, _ := b1.node.Topic("t")
		before2, _ := b2.node.Topic("t")
		_, second := startAdaptor(listen(address))
		Eventually(func() []string { return second.State().Adopting }).Should(Equal([]string{"t"}))
		Eventually(func() []string { return second.State().Connected }).Should(Equal([]string{"b1"}))
		now, _ := b1.node.Topic("t")
		Expect(now.Grants).To(Equal(before1.Grants), "b2 may be using its part")
		Expect(held("t", b1, b2).Rate).To(BeNumerically("<=", 100_000))

		// b2 comes back as a new process without a share, and the rest is shared.
		node := agenttest.New()
		c.join("b2", 60, node, instance("anew"))
		Eventually(func() bool { t, _ := node.Topic("t"); return t.Share.Rate > 0 }).Should(BeTrue())
		Expect(before2.Share.Rate).NotTo(BeZero())
		Eventually(func() tokenbucket.Share {
			a, _ := b1.node.Topic("t")
			b, _ := node.Topic("t")
			return tokenbucket.Share{Rate: a.Share.Rate + b.Share.Rate, Burst: a.Share.Burst + b.Share.Burst}
		}).Should(Equal(tokenbucket.Share{Rate: 100_000, Burst: 10}))
	})

	It("that restarts in the middle of a move divides a static topic as the move wants it", func() {
		ln := listen("127.0.0.1:0")
		address := ln.Addr().String()
		first, _ := startAdaptor(ln)
		restart := &afterUpdate{}
		c := newCluster(setup{adaptorAddress: address, wrap: restart.wrap})
		c.join("b1", 100, agenttest.New())
		c.join("b2", 100, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		from := places(c, "t", 1)[0]
		to := map[string]string{"b1": "b2", "b2": "b1"}[from]
		group := func(from, to int) (ids []string) {
			for i := range to - from {
				ids = append(ids, fmt.Sprintf("g.%d", from+i))
			}
			return ids
		}
		c.mustMove("t", to, group(0, 50)...)
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}))
		restart.then = func() {
			first.stop()
			startAdaptor(listen(address))
		}
		c.mustMove("t", to, group(50, 80)...)
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{from: "20000/2", to: "80000/8"}))
	})

	// The adaptor runs as in the daemon: it waits for a mandate, which the loaddistributor lends when
	// the mandate of the previous process must be over.
	It("that restarts is waited for, whenever a topic is created meanwhile", func() {
		lent := func(cfg *loop.Config) { cfg.ByMandate = true }
		lead := func(a *loop.Server, term uint64) {
			is, err := a.Lead(context.Background(), &srtmv1.LeadRequest{})
			Expect(err).NotTo(HaveOccurred())
			is, err = a.Lead(context.Background(), &srtmv1.LeadRequest{Instance: is.Instance, Stamp: is.Stamp, Lease: durationpb.New(time.Hour), Term: term})
			Expect(err).NotTo(HaveOccurred())
			Expect(is.Leads).To(BeTrue())
		}
		ln := listen("127.0.0.1:0")
		address := ln.Addr().String()
		adaptor, server := startAdaptor(ln, lent)
		lead(server, 1)
		c := newCluster(setup{adaptorAddress: address})
		c.join("b1", 600, agenttest.New())
		for restart := range 10 {
			created := []<-chan error{}
			create := func() {
				name := fmt.Sprintf("t%d-%d", restart, len(created))
				created = append(created, c.creating(context.Background(), spec(name, 1, 1), ""))
			}
			create()
			adaptor.stop()
			create()
			adaptor, server = startAdaptor(listen(address), lent)
			for range 8 {
				<-time.After(400 * time.Millisecond)
				create()
			}
			lead(server, uint64(restart)+2)
			for _, one := range created {
				Expect(<-one).To(Succeed())
			}
		}
	})

	It("that restarts, and then learns of a topic from a broker that was disconnected when it was deleted, forgets it", func() {
		ln, data := listen("127.0.0.1:0"), &store.Memory{}
		address := ln.Addr().String()
		first, _ := startAdaptor(ln)
		c := newCluster(setup{adaptorAddress: address, data: data})
		l := &line{conns: map[*lineConn]struct{}{}}
		b1 := c.join("b1", 60, agenttest.New(), l.option)
		c.mustCreate(spec("t", 50, 5))
		l.disconnect(true)
		Eventually(func() bool { return c.broker("b1").Connected }).Should(BeFalse())
		c.mustDelete("t")
		By("failing to create another one of the name meanwhile")
		b2 := c.join("b2", 60, agenttest.New())
		Expect(<-c.creating(context.Background(), spec("t", 50, 5), "")).To(HaveOccurred())
		c.stop()
		first.stop()
		_, second := startAdaptor(listen(address))
		l.reach()
		Eventually(func() []string { return second.State().Connected }, "30s").Should(ContainElement("b1"), "it learns of the topic first")
		c = newCluster(setup{adaptorAddress: address, data: data, address: c.address})
		Eventually(func() bool { return c.broker("b1").Connected }, "30s").Should(BeTrue())
		c.nothingLeft("t", b1, b2)
	})

	It("that is disconnected while a topic is deleted gets the order when it is back", func() {
		ln := listen("127.0.0.1:0")
		address := ln.Addr().String()
		startAdaptor(ln)
		gate := &removeGate{}
		c := newCluster(setup{adaptorAddress: address, wrap: gate.wrap})
		b1 := c.join("b1", 60, agenttest.New())
		c.mustCreate(spec("t", 50, 10))
		gate.closed.Store(true)
		c.mustDelete("t")
		Expect(c.shares("t")).NotTo(BeEmpty(), "the adaptor does not know yet")
		gate.closed.Store(false)
		c.nothingLeft("t", b1)
	})
})

// afterUpdate calls a function when the adaptor has accepted another division.
type afterUpdate struct {
	controller.Adaptor
	then func() // nil: nothing
}

func (u *afterUpdate) wrap(a controller.Adaptor) controller.Adaptor { u.Adaptor = a; return u }

func (u *afterUpdate) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	err := u.Adaptor.Set(ctx, c, mode)
	if then := u.then; mode == adaptor.Update && err == nil && then != nil {
		u.then = nil
		then()
	}
	return err
}

var _ = Describe("Deleting a topic", func() {
	It("removes it everywhere, and its name can be used again", func() {
		c := newCluster(setup{})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		Expect(c.admin.DeleteTopic(context.Background(), &srtmv1.DeleteTopicRequest{Name: "t"})).Error().To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
		for range 3 {
			first := c.mustCreate(spec("t", 100, 10))
			c.mustDelete("t")
			c.nothingLeft("t", b1, b2)
			again := c.mustCreate(spec("t", 40, 5))
			Expect(again.Epoch).To(BeNumerically(">", first.Epoch))
			Eventually(func() map[string]string { return c.shares("t") }).Should(HaveLen(1))
			c.mustDelete("t")
		}
	})

	It("waits for a creation under way, and a creation for it", func() {
		c := newCluster(setup{})
		b := c.join("b1", 60, agenttest.New())
		entered, release := b.hang()
		created := c.creating(context.Background(), spec("t", 50, 10), "")
		Eventually(entered).Should(BeClosed())
		deleted := make(chan error, 1)
		go func() { deleted <- c.control.Delete(context.Background(), "t") }()
		Consistently(deleted, "20ms").ShouldNot(Receive())
		release()
		Eventually(created).Should(Receive(BeNil()))
		Eventually(deleted).Should(Receive(BeNil()))
		c.nothingLeft("t", b)
	})

	It("leaves a disconnected broker for later", func() {
		c := newCluster(setup{})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New(), instance("two"))
		c.mustCreate(spec("t", 100, 10))
		b2.stop()
		Eventually(c.state("t")).Should(HavePrefix("DEGRADED"))
		c.mustDelete("t")
		Expect(hasTopic(b1.node, "t")()).To(BeFalse())
		Expect(c.broker("b2").Allocated).To(BeZero())
		Expect(hasTopic(b2.node, "t")()).To(BeTrue())
		c.join("b2", 60, b2.node, instance("two again"))
		Eventually(hasTopic(b2.node, "t")).Should(BeFalse())
		c.nothingLeft("t", b1, b2)
	})

	It("does not bring it back under its name, from a broker that was disconnected", func() {
		c := newCluster(setup{})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		old := spec("t", 100, 10)
		old.Channels = []string{"old"}
		c.mustCreate(old)
		b2.node.Sabotage(nil, func(string) error { return errInjected })
		c.mustDelete("t")
		b2.node.Sabotage(nil, nil)
		for range 2 { // the second time b2 is back before it receives anything
			c.mustCreate(spec("t", 100, 10))
			for _, b := range []*broker{b1, b2} {
				left, _ := b.node.Topic("t")
				Expect(left.Channels).To(Equal([]string{"main"}), "%s", b.id)
			}
			Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}))
			b2.stop()
			Eventually(c.state("t")).Should(HavePrefix("DEGRADED"))
			c.forget("b2")
			c.mustDelete("t")
			small := spec("t", 40, 4)
			small.Channels = []string{"old"}
			c.mustCreate(small)
			b2 = c.join("b2", 60, b2.node)
			c.mustMove("t", "b2", "g.0")
			moved, _ := b2.node.Topic("t")
			Expect(moved.Channels).To(Equal([]string{"old"}))
			c.mustDelete("t")
			c.nothingLeft("t", b1, b2)
		}
	})

	It("ends the watches", func() {
		c := newCluster(setup{})
		c.join("b1", 60, agenttest.New())
		c.mustCreate(spec("t", 50, 10))
		stream, err := c.placement.Watch(context.Background(), &srtmv1.WatchRequest{Topic: "t", PublisherIds: []string{"g.3", "g.7"}})
		Expect(err).NotTo(HaveOccurred())
		first, err := stream.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(first.Assignments).To(HaveLen(2))
		Expect(c.control.Delete(context.Background(), "t")).To(Succeed())
		Expect(stream.Recv()).Error().To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
	})
})

var _ = Describe("Watching", func() {
	It("reports a topic that is paced later, also to its brokers", func() {
		c := newCluster(setup{})
		b := c.join("b1", 60, agenttest.New())
		s := spec("t", 50, 10)
		s.Pacing = srtmv1.PacingMode_PACING_MODE_OFF
		c.mustCreate(s)
		stream, err := c.placement.Watch(context.Background(), &srtmv1.WatchRequest{Topic: "t", PublisherIds: []string{"g.3"}})
		Expect(err).NotTo(HaveOccurred())
		first, err := stream.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(first.Assignments[0].Pacing).To(BeFalse())
		s.Pacing = srtmv1.PacingMode_PACING_MODE_POLICE
		Expect(c.admin.UpdateTopic(context.Background(), &srtmv1.UpdateTopicRequest{Spec: s})).Error().NotTo(HaveOccurred())
		then, err := stream.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(then.Assignments).To(HaveLen(1))
		Expect(then.Assignments[0].Pacing).To(BeTrue())
		Expect(then.Assignments[0].BrokerId).To(Equal("b1"))
		Eventually(func() any {
			t, _ := b.node.Topic("t")
			return t.Pacing
		}).Should(BeEquivalentTo(srtmv1.PacingMode_PACING_MODE_POLICE))
	})

	It("refuses what is unknown or not yet there", func() {
		c := newCluster(setup{})
		b := c.join("b1", 60, agenttest.New())
		watch := func(topic string, publishers ...string) error {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			stream, err := c.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: topic, PublisherIds: publishers})
			Expect(err).NotTo(HaveOccurred())
			_, err = stream.Recv()
			return err
		}
		Expect(watch("t")).To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
		entered, release := b.hang()
		created := c.creating(context.Background(), spec("t", 50, 10), "")
		Eventually(entered).Should(BeClosed())
		Expect(watch("t")).To(fails(codes.FailedPrecondition, rpc.ReasonTopicNotActive))
		release()
		Eventually(created).Should(Receive(BeNil()))
		Expect(watch("t", "g.0", "g.0")).To(fails(codes.InvalidArgument, rpc.ReasonBadRequest))
		Expect(watch("t", "g.0")).To(Succeed())
	})

	It("answers for each publisher, whether it is declared or not", func() {
		c := newCluster(setup{})
		c.join("b1", 1000, agenttest.New())
		wanted := spec("t", 100, 10)
		wanted.Groups[0].Count = 50
		c.mustCreate(wanted)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		stream, err := c.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: "t", PublisherIds: []string{"g.0", "nobody", "g.49", "later"}})
		Expect(err).NotTo(HaveOccurred())
		next := func() string {
			response, err := stream.Recv()
			Expect(err).NotTo(HaveOccurred())
			text := ""
			for _, a := range response.Assignments {
				Expect(a.Epoch).To(Equal(response.Epoch))
				text += fmt.Sprintf("%s %s%v; ", a.PublisherId, a.BrokerId, a.Unknown)
			}
			return text
		}
		Expect(next()).To(Equal("g.0 b1false; nobody true; g.49 b1false; later true; "))
		wanted.Publishers = []*srtmv1.Publisher{{Id: "later", Rate: 1}}
		update := func(publishers int32) {
			wanted.Groups[0].Count = publishers
			Expect(c.admin.UpdateTopic(ctx, &srtmv1.UpdateTopicRequest{Spec: wanted})).Error().NotTo(HaveOccurred())
		}
		update(49)
		Expect(next()).To(Equal("g.49 true; later b1false; "))
		update(50)
		Expect(next()).To(Equal("g.49 b1false; "))
	})

	It("never holds up the controller, and sends a slow watcher only the latest state", func() {
		c := newCluster(setup{})
		b1 := c.join("b1", 20_000, agenttest.New())
		c.mustCreate(spec("t", 6000, 10))
		ctx, cancel := context.WithCancel(context.Background())
		changes := make(chan controller.Change)
		done := make(chan error, 1)
		go func() {
			done <- c.control.View().Watch(ctx, "t", nil, func(change controller.Change) error {
				select {
				case changes <- change:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		}()
		// The broker sends and nothing is received, while the broker moves ten times.
		for i := range 10 {
			b1.stop()
			port := fmt.Sprintf("b1.example:%d", 5000+i)
			b1 = c.join("b1", 20_000, agenttest.New(), func(cfg *agent.Config) { cfg.TCPAddress = port })
			Eventually(func() string { return c.broker("b1").TcpAddress }).Should(Equal(port))
		}
		seen := map[string]catalog.Assignment{}
		rounds := 0
		for len(seen) < 6000 || seen["g.0"].TCPAddress != "b1.example:5009" {
			var change controller.Change
			Eventually(changes).Should(Receive(&change))
			Expect(len(change.Assignments)).To(BeNumerically("<=", 5000))
			for _, a := range change.Assignments {
				Expect(a.Epoch).To(Equal(change.Epoch))
				seen[a.Publisher] = a
			}
			if !change.More {
				rounds++
			}
		}
		Expect(rounds).To(BeNumerically("<=", 3), "not every step it missed")
		cancel()
		Expect(<-done).To(MatchError(context.Canceled))
	})
})

var _ = Describe("The stats of a topic", func() {
	latencies := func(counts map[time.Duration]int) *srtmv1.Histogram {
		l := histogram.NewLatency()
		for d, n := range counts {
			for range n {
				l.Record(d)
			}
		}
		return obs.LatencyProto(l)
	}

	It("are merged over the window, and judged", func() {
		c := newCluster(setup{})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		Eventually(func() uint64 { return c.topic("t").Status.Pooled.GetOffered() }).Should(BeZero())
		Expect(c.topic("t").Status.SloMet).To(BeNil(), "nothing was delivered")

		valid := &srtmv1.TopicStats{
			Interval: durationpb.New(20 * time.Millisecond), Offered: 1, Released: 1, Delivered: 1000, Exceeded: 2,
			MaxBacklog: 4, Backlog: 1, Depth: 2, Publishers: 50, Subscribers: 1,
			Delivery: latencies(map[time.Duration]int{time.Millisecond: 998, 100 * time.Millisecond: 2}),
		}
		b1.node.Measure("t", valid)
		b2.node.Measure("t", valid)
		Eventually(func() bool {
			s := c.topic("t").Status
			return len(s.Brokers) == 2 && s.Brokers[0].Window.GetDelivered() >= 3000 && s.Brokers[1].Window.GetDelivered() >= 3000
		}).Should(BeTrue())
		status := c.topic("t").Status
		Expect(status.Window.AsDuration()).To(Equal(time.Second))
		Expect(status.SloMet).To(HaveValue(BeTrue()))
		Expect(status.ExceedFraction).To(Equal(0.002))
		for i, b := range status.Brokers {
			Expect(b.BrokerId).To(Equal([]string{"b1", "b2"}[i]))
			Expect(b.Share).NotTo(BeNil())
			Expect(b.Share.RateMilli).To(BeEquivalentTo(50_000))
			Expect(b.Epoch).NotTo(BeZero())
			Expect(b.Last.Delivered).To(BeEquivalentTo(1000))
			Expect(b.Window.Publishers).To(BeEquivalentTo(50), "a level, not a sum")
			Expect(b.Window.MaxBacklog).To(BeEquivalentTo(4))
		}
		pooled := status.Pooled
		Expect(pooled.Delivered).To(Equal(status.Brokers[0].Window.Delivered + status.Brokers[1].Window.Delivered))
		Expect(pooled.Publishers).To(BeEquivalentTo(100))
		Expect(pooled.Depth).To(BeEquivalentTo(4))
		l, err := obs.LatencyFromProto(pooled.Delivery)
		Expect(err).NotTo(HaveOccurred())
		Expect(l.Count()).To(BeEquivalentTo(pooled.Delivered))
		Expect(l.Quantile(0.9)).To(BeNumerically("~", time.Millisecond, 20*time.Microsecond))
		Expect(l.Quantile(1)).To(BeNumerically("~", 100*time.Millisecond, 2*time.Millisecond))
		Expect(c.state("t")()).To(Equal("ACTIVE"))

		// Too few messages for a verdict, however late.
		b1.node.Measure("t", &srtmv1.TopicStats{})
		b2.node.Measure("t", &srtmv1.TopicStats{})
		Eventually(func() uint64 { return c.topic("t").Status.Pooled.GetDelivered() }).Should(BeZero())
		version := c.control.View().State().Version
		b2.node.Measure("t", &srtmv1.TopicStats{Delivered: 3, Exceeded: 1})
		Eventually(func() uint64 { return c.topic("t").Status.Pooled.GetDelivered() }).WithPolling(10 * time.Millisecond).Should(BeNumerically(">=", 3))
		b2.node.Measure("t", &srtmv1.TopicStats{})
		Consistently(func() *bool { return c.topic("t").Status.SloMet }).Should(BeNil())
		Expect(c.state("t")()).To(Equal("ACTIVE"))
		b1.node.Measure("t", valid)

		// A single broker above three budgets is hidden in the pooled figure, but the controller finds
		// it.
		b2.node.Measure("t", &srtmv1.TopicStats{Interval: durationpb.New(20 * time.Millisecond), Delivered: 10, Exceeded: 1})
		Eventually(c.state("t")).Should(Equal("DEGRADED: the SLO is missed, most on broker b2"))
		b2.node.Measure("t", valid)
		Eventually(c.state("t")).Should(Equal("ACTIVE"))

		// A topic that offers more than its contract of 100 msg/s has no claim to its SLO.
		b1.node.Measure("t", &srtmv1.TopicStats{Interval: durationpb.New(20 * time.Millisecond), Offered: 6, Delivered: 1000, Exceeded: 900, Backlog: 100})
		Eventually(c.state("t")).Should(MatchRegexp(`^DEGRADED: over contract since 20.*:.. UTC, by \d{2,3} msg/s$`))
		Eventually(func() float64 { return c.topic("t").Status.ExceedFraction }).Should(BeNumerically(">", 0.3))
		Consistently(c.state("t")).ShouldNot(ContainSubstring("SLO"))
		Expect(c.topic("t").Status.SloMet).To(BeNil())
		within := proto.CloneOf(valid) // brokers may be reading good now
		within.Offered = 0
		b1.node.Measure("t", within)
		b2.node.Measure("t", within)
		Eventually(c.state("t")).Should(MatchRegexp("over contract since .*; the excess is still being delivered$"))
		Eventually(c.state("t")).WithTimeout(10 * time.Minute).Should(Equal("ACTIVE"))
		Expect(c.control.View().State().Version).To(Equal(version), "no verdict is kept")
	})

	It("report what fraction of the p99 is access delay, pooled over the deliveries", func() {
		c := newCluster(setup{})
		b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		// Both brokers have slow messages, but b2's are slower. The pooled p99 consists of b2's
		// messages, and the parts of b1's delays do not matter.
		measure := func(slow time.Duration, n int, access float64) *srtmv1.TopicStats {
			return &srtmv1.TopicStats{
				Interval: durationpb.New(20 * time.Millisecond), Delivered: 200,
				Delivery:       latencies(map[time.Duration]int{time.Millisecond: 200 - n, slow: n}),
				DeliveryAccess: []float64{98, access},
			}
		}
		b1.node.Measure("t", measure(10*time.Millisecond, 4, 4))
		b2.node.Measure("t", measure(100*time.Millisecond, 8, 2))
		fractions := func() (all []float64) {
			s := c.topic("t").Status
			for _, b := range s.Brokers {
				if b.P99AccessFraction != nil {
					all = append(all, *b.P99AccessFraction)
				}
			}
			if s.P99AccessFraction != nil {
				all = append(all, *s.P99AccessFraction)
			}
			return all
		}
		// b2's messages are a hundredth of all when b2 has a third as many reports as b1.
		Eventually(fractions).Should(Equal([]float64{1, 0.25, 0.25}))

		b1.node.Measure("t", &srtmv1.TopicStats{
			Interval: durationpb.New(20 * time.Millisecond), Delivered: 1, Delivery: latencies(map[time.Duration]int{time.Second: 1}),
		})
		Eventually(fractions).Should(Equal([]float64{0.25}), "b1 does not say any more")
	})

	It("end a session that reports nonsense, and change nothing", func() {
		c := newCluster(setup{})
		b1 := c.join("b1", 60, agenttest.New())
		c.mustCreate(spec("t", 50, 10))
		ended := func(nonsense *srtmv1.TopicStats) error {
			// A second session observes this, because the agent only reconnects.
			stream, err := srtmv1.NewBrokerServiceClient(dial(c.address)).Session(context.Background())
			Expect(err).NotTo(HaveOccurred())
			Expect(stream.Send(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Hello{Hello: &srtmv1.BrokerHello{
				BrokerId: "b9", Instance: "i", TcpAddress: "b9:1", HttpAddress: "b9:2", Mcap: 10,
			}}})).To(Succeed())
			Expect(stream.Recv()).Error().NotTo(HaveOccurred())
			Expect(stream.Send(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Report{Report: &srtmv1.BrokerReport{
				Topics: []*srtmv1.TopicStats{nonsense},
			}}})).To(Succeed())
			_, err = stream.Recv()
			return err
		}
		one := latencies(map[time.Duration]int{time.Second: 1})
		for _, nonsense := range []*srtmv1.TopicStats{
			{Delivered: 1, Exceeded: 2},
			{DeliveryAccess: []float64{0}},
			{Delivery: one, DeliveryAccess: []float64{0, 0}},
			{Delivery: one, DeliveryAccess: []float64{-0.1}},
			{Delivery: one, DeliveryAccess: []float64{1.1}},
			{Delivery: one, DeliveryAccess: []float64{math.NaN()}},
		} {
			nonsense.Topic, nonsense.Interval = "t", durationpb.New(time.Second)
			Expect(ended(nonsense)).To(fails(codes.InvalidArgument, rpc.ReasonBadRequest), "%v", nonsense)
		}
		Eventually(func() bool { return c.broker("b9").Connected }).Should(BeFalse())
		Expect(c.state("t")()).To(Equal("ACTIVE"))
		Expect(b1.node.Topics()).To(Equal([]string{"t"}))
	})
})

var _ = Describe("A broker's id", func() {
	type hello struct {
		instance, lock string
		stamp          uint64
	}
	var data *store.Memory
	var c *cluster
	join := func(h hello) (*controller.Session, error) {
		return c.control.Join(&srtmv1.BrokerHello{
			BrokerId: "b", Instance: h.instance, Lock: h.lock, Stamp: h.stamp, TcpAddress: h.instance + ":1", HttpAddress: "b:2", Mcap: 10, DataPath: "/" + h.instance,
		}, "")
	}
	lives := func(s *controller.Session) error {
		return c.control.Handle(s, &srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Report{Report: &srtmv1.BrokerReport{}}})
	}
	used := func() OmegaMatcher { return BeAssignableToTypeOf(new(identity.InUse)) }
	lost := func() OmegaMatcher { return BeAssignableToTypeOf(new(identity.Lost)) }
	begin := func() {
		data = &store.Memory{}
		c = newCluster(setup{data: data})
	}

	DescribeTable("while there is a session", func(first, second hello, refusal OmegaMatcher) {
		begin()
		before, err := join(first)
		Expect(err).NotTo(HaveOccurred())
		after, err := join(second)
		if refusal != nil {
			Expect(err).To(refusal)
			Expect(lives(before)).To(Succeed())
			return
		}
		Expect(err).NotTo(HaveOccurred())
		Expect(lives(after)).To(Succeed())
		Expect(lives(before)).To(MatchError(controller.ErrReplaced))
	},
		Entry("goes to a process that holds the lock of the data folder", hello{"one", "l", 5}, hello{"two", "l", 6}, nil),
		Entry("does not go to the process before", hello{"two", "l", 6}, hello{"one", "l", 5}, lost()),
		Entry("does not go to a process with another data folder", hello{"one", "l", 5}, hello{"two", "m", 6}, used()),
		Entry("does not go to a process without a lock", hello{"one", "", 5}, hello{"two", "", 6}, used()),
		Entry("goes to a later session of the process", hello{"one", "l", 5}, hello{"one", "l", 6}, nil),
		Entry("does not go to an earlier session of the process", hello{"one", "l", 5}, hello{"one", "l", 4}, MatchError(identity.ErrReplaced)),
		Entry("goes to a session of a process that reports no time", hello{"one", "", 0}, hello{"one", "", 0}, nil),
	)

	It("is shown with the process that was refused, and the owner gets a request", func() {
		begin()
		first := testkit.Result(join(hello{"one", "l", 5})).Must(GinkgoTB())
		_, err := join(hello{"two", "m", 6})
		Expect(err).To(MatchError(And(ContainSubstring("one:1"), ContainSubstring("/one"), ContainSubstring("two:1"), ContainSubstring("/two"))))
		refused, some := c.control.View().Refused("b")
		Expect(some).To(BeTrue())
		Expect(refused.Place.Address).To(Equal("two:1"))
		Expect(refused.Place.Folder).To(Equal("/two"))
		Expect(refused.Count).To(BeEquivalentTo(1))
		Expect(c.control.Handle(first, &srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Records{Records: &srtmv1.TopicRecords{}}})).To(Succeed())
	})

	It("stays with a process whose session is over until its lease is", func() {
		begin()
		first := testkit.Result(join(hello{"one", "l", 5})).Must(GinkgoTB())
		c.control.Leave(first)
		Expect(join(hello{"two", "m", 6})).Error().To(used())
		Eventually(func() error { _, err := join(hello{"two", "m", 6}); return err }).Should(Succeed())
		Expect(join(hello{"one", "l", 99})).Error().To(lost(), "nothing that the old process says counts")
	})

	It("stays with a process through a restart of the loaddistributor", func() {
		begin()
		first := testkit.Result(join(hello{"one", "l", 5})).Must(GinkgoTB())
		Eventually(c.control.View().Brokers).Should(HaveLen(1))
		c.control.Leave(first)
		c.stop()
		c = newCluster(setup{data: data})
		Expect(join(hello{"two", "m", 6})).Error().To(used())
		Expect(join(hello{"one", "l", 6})).Error().NotTo(HaveOccurred())
	})
})

var _ = Describe("The directory", func() {
	It("lists placed topics once they are active, and others while they are reported", func() {
		c := newCluster(setup{})
		node := agenttest.New()
		node.Create("free", "x")
		b1 := c.join("b1", 60, node)
		b2 := c.join("b2", 60, agenttest.New())
		Eventually(c.control.View().TopicNames).Should(Equal([]string{"free"}))
		ids := func(topic string) []string {
			nodes, _, _ := c.control.View().Producers(topic)
			var ids []string
			for _, n := range nodes {
				ids = append(ids, n.ID)
			}
			return ids
		}
		Expect(ids("free")).To(Equal([]string{"b1"}))
		Eventually(func() []string { _, channels, _ := c.control.View().Producers("free"); return channels }).Should(Equal([]string{"x"}))

		entered, release := b2.hang()
		created := c.creating(context.Background(), spec("t", 100, 10), "")
		Eventually(entered).Should(BeClosed())
		Eventually(b1.node.Topics).Should(ContainElement("t"))
		_, _, found := c.control.View().Producers("t")
		Expect(found).To(BeFalse(), "not before it is active: a consumer would create it without a limit")
		release()
		Eventually(created).Should(Receive(BeNil()))
		Expect(ids("t")).To(Equal([]string{"b1", "b2"}))
		Expect(c.control.View().TopicNames()).To(Equal([]string{"free", "t"}))
		_, channels, _ := c.control.View().Producers("t")
		Expect(channels).To(Equal([]string{"main"}))

		b2.stop()
		Eventually(func() []string { return ids("t") }).Should(Equal([]string{"b1"}))
		nodes := c.control.View().Nodes()
		Expect(nodes).To(HaveLen(1))
		Expect(nodes[0].Topics).To(Equal([]string{"free", "t"}))
		Expect(nodes[0].Remote).To(HavePrefix("127.0.0.1:"))

		b1.node.Drop("free")
		Eventually(c.control.View().TopicNames).Should(Equal([]string{"t"}))
		_, _, found = c.control.View().Producers("free")
		Expect(found).To(BeFalse())
		b1.stop()
		Eventually(func() bool { nodes, _, found := c.control.View().Producers("t"); return found && len(nodes) == 0 }).Should(BeTrue())
	})
})
