package controller_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
)

// cable is a broker's way to the control plane.
type cable struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

var errCut = errors.New("the cable is cut")

func (c *cable) dial(ctx context.Context, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut {
		return nil, errCut
	}
	conn, err := dialNetwork(ctx, address)
	if err == nil {
		c.conns = append(c.conns, conn)
	}
	return conn, err
}

// set cuts or repairs the cable.
func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
}

// through has a broker reach the control plane through the cable.
func (c *cable) through(cfg *agent.Config) {
	cfg.DialOptions = []grpc.DialOption{grpc.WithContextDialer(c.dial)}
}

func strictly(cfg *agent.Config) { cfg.Policy = agent.Strict }

// unmoving is a journal that fails when a move is complete.
type unmoving struct{ controller.Journal }

func (j unmoving) Append(ctx context.Context, base uint64, events []catalog.Event) error {
	if slices.ContainsFunc(events, func(e catalog.Event) bool { _, moved := e.(catalog.TopicMoved); return moved }) {
		return errInjected
	}
	return j.Journal.Append(ctx, base, events)
}

// withheld is an adaptor that gets no contract while holds is set.
type withheld struct {
	controller.Adaptor
	holds *atomic.Bool
}

func (w withheld) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	if w.holds.Load() {
		return errInjected
	}
	return w.Adaptor.Set(ctx, c, mode)
}

// dying is a journal that fails once dies is set.
type dying struct {
	controller.Journal
	dies *atomic.Bool
}

func (j dying) Append(ctx context.Context, base uint64, events []catalog.Event) error {
	if j.dies.Load() {
		return errInjected
	}
	return j.Journal.Append(ctx, base, events)
}

// unanswering is an adaptor that answers no update of a contract. It reports the beginning and the end
// of the call.
type unanswering struct {
	controller.Adaptor
	begins, ends chan struct{}
}

func (u unanswering) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	if mode != adaptor.Update {
		return u.Adaptor.Set(ctx, c, mode)
	}
	u.begins <- struct{}{}
	<-ctx.Done()
	u.ends <- struct{}{}
	return ctx.Err()
}

// unconfirmed returns the brokers that may use more than the contract, and how much each may use.
func unconfirmed(l *srtmv1.Lowering) map[string]int64 {
	all := map[string]int64{}
	for _, b := range l.GetBrokers() {
		all[b.BrokerId] = b.Share.GetRateMilli()
	}
	return all
}

func busyFor(err error) map[string]int64 {
	for _, d := range status.Convert(err).Details() {
		if l, is := d.(*srtmv1.Lowering); is {
			return unconfirmed(l)
		}
	}
	return nil
}

var _ = Describe("A contract that is lowered", func() {
	var (
		data  *store.Memory
		c     *cluster
		away  cable
		lower = spec("t", 60, 6)
	)
	// begin creates a topic of 150 msg/s on three brokers, b1 behind the cable.
	begin := func(options ...func(*agent.Config)) {
		data, away = &store.Memory{}, cable{}
		c = newCluster(setup{data: data})
		c.join("b1", 60, agenttest.New(), append(options, away.through)...)
		c.node("b2", 60)
		c.node("b3", 60)
		c.mustCreate(spec("t", 150, 15))
		Expect(c.shares("t")).To(HaveLen(3))
	}
	restart := func() {
		address := c.address
		c.stop()
		c = newCluster(setup{data: data, address: address})
		Eventually(func() bool { return c.broker("b2").Connected && c.broker("b3").Connected }).Should(BeTrue())
	}
	joined := func() bool {
		return c.broker("b1").Connected && c.broker("b2").Connected && c.broker("b3").Connected
	}
	gone := func() {
		away.set(true)
		Eventually(func() bool { return c.broker("b1").Connected }).Should(BeFalse())
	}
	// recorded returns the unconfirmed shares in the catalog, which a restart keeps. GetTopic also queries
	// the adaptor, so GetTopic may return fewer shares before the catalog does.
	recorded := func() map[string]int64 {
		page, err := c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{})
		Expect(err).NotTo(HaveOccurred())
		return unconfirmed(page.Topics[0].Lowering)
	}
	// state returns the topic's state in the catalog.
	state := func() srtmv1.TopicState {
		page, err := c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{})
		Expect(err).NotTo(HaveOccurred())
		return page.Topics[0].State
	}
	others := func() (sum int64) {
		response, err := c.grants.ListShares(context.Background(), &srtmv1.ListSharesRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		for _, t := range response.Topics {
			for _, m := range t.Members {
				if m.BrokerId != "b1" {
					sum += m.Acknowledged.GetRateMilli()
				}
			}
		}
		return sum
	}

	It("is in force on all brokers when the update returns", func() {
		begin()
		topic, err := c.update(lower)
		Expect(err).NotTo(HaveOccurred())
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
		Expect(topic.Lowering).To(BeNil())
		var sum int64
		response, err := c.grants.ListShares(context.Background(), &srtmv1.ListSharesRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		for _, m := range response.Topics[0].Members {
			sum += m.Reserved.GetRateMilli()
		}
		Expect(sum).To(BeNumerically("<=", 60_000))
	})

	It("is raised at once by what a silent broker cannot hold, and names that broker until it confirms", func() {
		begin()
		topic, err := c.update(spec("t", 165, 16))
		Expect(err).NotTo(HaveOccurred())
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE), "all brokers are connected")
		Expect(topic.Raising).To(BeNil())
		Expect(others()).To(BeEquivalentTo(110_000))

		c.node("b4", 60)
		gone()
		restart()
		Eventually(func() bool { return c.broker("b4").Connected }).Should(BeTrue())
		Eventually(others).Should(BeEquivalentTo(110_000), "the contract is brought back")
		topic, err = c.update(spec("t", 180, 18))
		Expect(err).NotTo(HaveOccurred())
		Expect(others()).To(BeEquivalentTo(125_000), "b1 holds at most 55 of the former 165 msg/s")
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_RAISING))
		Expect(topic.Lowering).To(BeNil())
		Expect(topic.Raising.InForce.RateMilli).To(BeEquivalentTo(125_000))
		Expect(topic.Raising.Brokers).To(HaveExactElements(And(HaveField("BrokerId", "b1"), HaveField("Connected", false))))
		Expect(topic.Reason).To(HavePrefix("125 msg/s and burst 12 of the raised contract are in force; the rest waits for broker b1 to return: reach it, restart it, or `srtm share forget b1`"))

		restart()
		Eventually(c.state("t")).Should(HavePrefix("RAISING: "))
		page, err := c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{})
		Expect(err).NotTo(HaveOccurred())
		Expect(page.Topics[0].State).To(Equal(srtmv1.TopicState_TOPIC_STATE_RAISING))
		Expect(page.Topics[0].Reason).To(HavePrefix("the raised contract is not in force on all brokers"))
		away.set(false)
		Eventually(state).Should(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
		restart()
		Consistently(c.state("t")).ShouldNot(HavePrefix("RAISING"))
	})

	It("names the brokers that cannot be reached, through restarts, until they confirm", func() {
		begin()
		gone()
		topic, err := c.update(lower)
		Expect(err).NotTo(HaveOccurred())
		Expect(others()).To(BeNumerically("<=", 60_000), "connected brokers have confirmed")
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_LOWERING))
		Expect(unconfirmed(topic.Lowering)).To(Equal(map[string]int64{"b1": 50_000}))
		Expect(topic.Lowering.Brokers[0].Until).To(BeNil())
		Expect(topic.Lowering.Brokers[0].Policy).To(Equal(srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE))
		Expect(topic.Reason).To(HavePrefix("broker b1 may use 50 msg/s and burst 5, with no end: policy available; reach it, restart it, or `srtm share forget b1`"))

		for range 2 {
			restart()
			Eventually(c.state("t")).Should(HavePrefix("LOWERING: broker b1 may use 50 msg/s and burst 5, with no end"))
			Expect(others()).To(BeNumerically("<=", 60_000))
		}
		page, err := c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{})
		Expect(err).NotTo(HaveOccurred())
		Expect(page.Topics[0].State).To(Equal(srtmv1.TopicState_TOPIC_STATE_LOWERING))
		away.set(false)
		Eventually(state).Should(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
		restart()
		Consistently(c.state("t")).ShouldNot(HavePrefix("LOWERING"))
	})

	It("is in force on connected brokers while the adaptor, which has restarted, awaits another", func() {
		begin()
		gone()
		restart() // from here on nothing is known of b1's share
		topic, err := c.update(lower)
		Expect(err).NotTo(HaveOccurred())
		Expect(others()).To(BeNumerically("<=", 60_000))
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_LOWERING))
		Expect(unconfirmed(topic.Lowering)).To(Equal(map[string]int64{"b1": 150_000}), "as much as the former contract")
		c.forget("b1")
		Eventually(c.state("t")).ShouldNot(HavePrefix("LOWERING"))
	})

	It("names the brokers that may use a raise that an earlier loaddistributor did not complete", func() {
		begin()
		Expect(c.update(lower)).Error().NotTo(HaveOccurred())
		c.stop()
		c = newCluster(setup{data: data, address: c.address, config: func(cfg *controller.Config) { cfg.Journal = unmoving{cfg.Journal} }})
		Eventually(joined).Should(BeTrue())
		Expect(c.update(spec("t", 165, 15))).Error().To(MatchError(ContainSubstring(errInjected.Error())))
		away.set(true)
		for range 2 {
			restart()
			Eventually(c.state("t")).Should(HavePrefix("LOWERING: broker b1 may use 165 msg/s and burst 15, with no end"))
			Eventually(recorded).Should(Equal(map[string]int64{"b1": 165_000}), "b2 and b3 have reported")
		}
		topic, err := c.update(spec("t", 90, 9))
		Expect(err).NotTo(HaveOccurred())
		Expect(others()).To(BeNumerically("<=", 90_000))
		Expect(unconfirmed(topic.Lowering)).To(Equal(map[string]int64{"b1": 165_000}))
		away.set(false)
		Eventually(state).Should(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
		Eventually(func() bool { return c.broker("b1").Connected }).Should(BeTrue())
		Expect(c.update(spec("t", 165, 15))).Error().NotTo(HaveOccurred())
		Eventually(others).Should(BeEquivalentTo(110_000))
	})

	It("names the brokers that may use a raise that was reverted, while the adaptor still divides the raise", func() {
		ln := listen("127.0.0.1:0")
		address := ln.Addr().String()
		startAdaptor(ln)
		data, away = &store.Memory{}, cable{}
		var ends, holds atomic.Bool
		// The journal fails at the end of the first move to 165 msg/s. Afterwards the adaptor gets no contract.
		config := func(cfg *controller.Config) {
			if ends.Load() {
				cfg.Journal = unmoving{cfg.Journal}
			}
		}
		wrap := func(a controller.Adaptor) controller.Adaptor { return withheld{a, &holds} }
		c = newCluster(setup{data: data, adaptorAddress: address, config: config, wrap: wrap})
		c.join("b1", 60, agenttest.New(), away.through)
		c.node("b2", 60)
		c.node("b3", 60)
		c.mustCreate(lower)
		c.stop()
		ends.Store(true)
		c = newCluster(setup{data: data, address: c.address, adaptorAddress: address, config: config, wrap: wrap})
		Eventually(joined).Should(BeTrue())
		Expect(c.update(spec("t", 165, 15))).Error().To(MatchError(ContainSubstring(errInjected.Error())))
		c.stop()
		ends.Store(false)
		holds.Store(true)
		c = newCluster(setup{data: data, address: c.address, adaptorAddress: address, config: config, wrap: wrap})
		Eventually(joined).Should(BeTrue())
		all := map[string]int64{"b1": 165_000, "b2": 165_000, "b3": 165_000}
		Expect(unconfirmed(c.topic("t").Lowering)).To(Equal(all))
		topic, err := c.update(lower)
		Expect(err).NotTo(HaveOccurred())
		Expect(unconfirmed(topic.Lowering)).To(Equal(all), "the contract is what it was, and the adaptor divides another")
		Consistently(recorded).Should(Equal(all))
		holds.Store(false)
		Eventually(recorded).Should(BeEmpty())
		Expect(others()).To(BeNumerically("<=", 60_000))
	})

	It("is not sent to the adaptor any more once the journal has failed, since another loaddistributor may lead", func() {
		var dies atomic.Bool
		begins, ends := make(chan struct{}, 1), make(chan struct{}, 1)
		c = newCluster(setup{
			data: &store.Memory{}, config: func(cfg *controller.Config) { cfg.Journal = dying{cfg.Journal, &dies} },
			wrap: func(a controller.Adaptor) controller.Adaptor { return unanswering{a, begins, ends} },
		})
		c.node("b1", 60)
		c.mustCreate(spec("t", 50, 5))
		go func() { _, _ = c.update(lower) }()
		Eventually(begins).Should(Receive())
		dies.Store(true)
		Expect(c.control.Calibrate("b1", 70)).Error().To(HaveOccurred())
		Eventually(ends, "100ms").Should(Receive())
	})

	It("reports when a strict broker stops, which then has stopped", func() {
		begin(strictly)
		gone()
		topic, err := c.update(lower)
		Expect(err).NotTo(HaveOccurred())
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_LOWERING))
		b1 := topic.Lowering.Brokers[0]
		left := time.Until(b1.Until.AsTime())
		Expect(left).To(BeNumerically("~", 30*time.Second, time.Second))
		Expect(b1.MostMessages).To(BeNumerically("~", 5+50*left.Seconds(), 2))
		<-time.After(left - time.Second)
		Expect(c.state("t")()).To(HavePrefix("LOWERING"))
		<-time.After(time.Second + 200*time.Millisecond)
		Eventually(c.state("t"), "1s").ShouldNot(HavePrefix("LOWERING"))
	})

	It("reports after a restart when a strict broker stops", func() {
		begin(strictly)
		<-time.After(time.Second) // the policy is kept
		gone()
		restart()
		topic, err := c.update(lower)
		Expect(err).NotTo(HaveOccurred())
		b1 := topic.Lowering.Brokers[0]
		Expect(b1.Policy).To(Equal(srtmv1.LeasePolicy_LEASE_POLICY_STRICT))
		Expect(time.Until(b1.Until.AsTime())).To(BeNumerically("~", 30*time.Second, 5*time.Second))
		<-time.After(time.Until(b1.Until.AsTime()) + 300*time.Millisecond)
		Eventually(c.state("t"), "1s").ShouldNot(HavePrefix("LOWERING"))
	})

	It("that is removed keeps its name busy, through restarts, until all have given it up", func() {
		begin()
		gone()
		deleted, err := c.admin.DeleteTopic(context.Background(), &srtmv1.DeleteTopicRequest{Name: "t"})
		Expect(err).NotTo(HaveOccurred())
		Expect(unconfirmed(deleted.Lowering)).To(Equal(map[string]int64{"b1": 50_000}))
		for range 3 {
			_, _, err := c.create(context.Background(), lower, "")
			Expect(err).To(failsWith(codes.Unavailable))
			Expect(err).To(MatchError(ContainSubstring("the contract of a deleted topic t may still be in use: broker b1 may use 50 msg/s and burst 5")))
			Expect(busyFor(err)).To(Equal(map[string]int64{"b1": 50_000}))
			restart()
		}
		away.set(false)
		Eventually(func() error { _, _, err := c.create(context.Background(), lower, ""); return err }, "30s").Should(Succeed())
		Expect(c.topic("t").Lowering).To(BeNil())
	})

	It("that is removed after a restart of the adaptor waits for a broker that has sent nothing since", func() {
		begin()
		gone()
		restart()
		deleted, err := c.admin.DeleteTopic(context.Background(), &srtmv1.DeleteTopicRequest{Name: "t"})
		Expect(err).NotTo(HaveOccurred())
		Expect(unconfirmed(deleted.Lowering)).To(Equal(map[string]int64{"b1": 150_000}))
		_, _, err = c.create(context.Background(), lower, "")
		Expect(busyFor(err)).To(Equal(map[string]int64{"b1": 150_000}))
		restart()
		c.forget("b1")
		c.mustCreate(lower)
	})

	It("is in force on connected brokers after a restart of a tbadaptor of its own", func() {
		data, away = &store.Memory{}, cable{}
		adaptors := listen("127.0.0.1:0")
		address := adaptors.Addr().String()
		adaptor, _ := startAdaptor(adaptors)
		c = newCluster(setup{data: data, adaptorAddress: address})
		c.join("b1", 60, agenttest.New(), away.through)
		c.node("b2", 60)
		c.node("b3", 60)
		c.mustCreate(spec("t", 150, 15))
		c.mustCreate(spec("u", 30, 3))
		gone()
		Expect(c.update(lower)).To(HaveField("State", srtmv1.TopicState_TOPIC_STATE_LOWERING))
		c.mustDelete("u")
		adaptor.stop()
		startAdaptor(listen(address))
		Eventually(others).Should(BeNumerically(">", 0))
		Consistently(c.state("t")).Should(HavePrefix("LOWERING: broker b1 may use 50 msg/s"))
		Expect(others()).To(BeNumerically("<=", 60_000))
		away.set(false)
		Eventually(c.state("t"), "30s").Should(Equal("ACTIVE"))
	})
})
