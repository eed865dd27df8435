package controller_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

// disconnected collects the publishers that the controller orders a broker to disconnect.
func disconnected(to chan []string) func(*agent.Config) {
	return func(cfg *agent.Config) {
		cfg.DrainPublishers = func(topic string, ids map[string]bool) int {
			var list []string
			for id := range ids {
				list = append(list, topic+"/"+id)
			}
			to <- list
			return len(list)
		}
	}
}

// publishersByBroker counts the publishers of a topic by broker.
func (c *cluster) publishersByBroker(name string, publishers int) map[string]int {
	GinkgoHelper()
	topic, err := c.control.View().Topic(name)
	Expect(err).NotTo(HaveOccurred())
	Expect(topic.Placement.Len()).To(Equal(publishers))
	count := map[string]int{}
	for i := range topic.Placement.Len() {
		count[topic.Placement.At(i).Broker]++
	}
	return count
}

func (c *cluster) update(s *srtmv1.TopicSpec) (*srtmv1.Topic, error) {
	r, err := c.admin.UpdateTopic(context.Background(), &srtmv1.UpdateTopicRequest{Spec: s})
	return r.GetTopic(), err
}

func masked(epoch uint64, s *srtmv1.TopicSpec, paths ...string) *srtmv1.UpdateTopicRequest {
	return &srtmv1.UpdateTopicRequest{Spec: s, UpdateMask: &fieldmaskpb.FieldMask{Paths: paths}, ExpectedEpoch: epoch}
}

func (c *cluster) drain(id string) {
	GinkgoHelper()
	Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: id})).Error().NotTo(HaveOccurred())
}

func hasTopic(node *agenttest.Node, topic string) func() bool {
	return func() bool { _, found := node.Topic(topic); return found }
}

var _ = Describe("Updating a topic", func() {
	It("spreads it over one more broker, and moves no more publishers than need be", func() {
		c := newCluster(setup{})
		n1, n2 := agenttest.New(), agenttest.New()
		gone := make(chan []string, 10)
		c.join("b1", 600, n1, disconnected(gone))
		before := c.mustCreate(spec("t", 400, 10))
		c.join("b2", 600, n2)
		Expect(c.publishersByBroker("t", 400)).To(Equal(map[string]int{"b1": 400}))

		after, err := c.update(spec("t", 800, 20))
		Expect(err).NotTo(HaveOccurred())
		Expect(after.Epoch).To(BeNumerically(">", before.Epoch))
		Expect(c.publishersByBroker("t", 800)).To(Equal(map[string]int{"b1": 400, "b2": 400}))
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "400000/10", "b2": "400000/10"}))
		Consistently(gone, "50ms").ShouldNot(Receive(), "all could stay")
		Expect(c.broker("b1").Allocated).To(BeEquivalentTo(400))

		// And back: the broker that is no longer needed retires.
		c.mustUpdate(spec("t", 400, 10))
		Eventually(hasTopic(n2, "t")).Should(BeFalse())
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "400000/10"}))
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
	})

	It("sends brokers another SLO and other channels", func() {
		c := newCluster(setup{})
		node := c.node("b1", 600)
		c.mustCreate(spec("t", 400, 10))
		s := spec("t", 400, 10)
		s.Channels = []string{"main", "more"}
		s.Contract.Slo.Quantile = 0.9
		c.mustUpdate(s)
		topic, _ := node.Topic("t")
		Expect(topic.Channels).To(Equal([]string{"main", "more"}))
		Expect(topic.Quantile).To(Equal(0.9))
	})

	// Earlier, creating a channel moved 400 of 200 + 200 publishers, 102 after a move by hand, and 42
	// under the policy loadbalance.
	for name, placed := range map[string]struct {
		policy string
		hand   int
		want   map[string]int
	}{
		"as they were placed":        {"srtm", 0, map[string]int{"b1": 200, "b2": 200}},
		"as they were moved by hand": {"srtm", 51, map[string]int{"b1": 149, "b2": 251}},
		"as chance has it":           {"loadbalance", 0, map[string]int{"b1": 200, "b2": 200}},
	} {
		It("leaves publishers where they are, "+name+", when nothing changes that places them", func() {
			c := newCluster(setup{})
			n1 := agenttest.New()
			gone := make(chan []string, 10)
			c.join("b1", 300, n1, disconnected(gone))
			c.join("b2", 300, agenttest.New(), disconnected(gone))
			s := spec("t", 400, 10)
			s.Groups = []*srtmv1.PublisherGroup{{Key: "a", Count: 200, Rate: 1}, {Key: "b", Count: 200, Rate: 1}}
			s.PlacementPolicy = placed.policy
			c.mustCreate(s)
			if placed.hand > 0 {
				topic, err := c.control.View().Topic("t")
				Expect(err).NotTo(HaveOccurred())
				var ids []string
				for i := 0; len(ids) < placed.hand; i++ {
					if at := topic.Placement.At(i); at.Broker == "b1" {
						ids = append(ids, at.Publisher)
					}
				}
				c.mustMove("t", "b2", ids...)
				Eventually(gone).Should(Receive(HaveLen(placed.hand)))
				Eventually(gone).Should(Receive(HaveLen(placed.hand)), "who came late")
			}
			c.join("b3", 9000, agenttest.New(), disconnected(gone))
			before, err := c.control.View().Topic("t")
			Expect(err).NotTo(HaveOccurred())
			s.Channels = append(s.Channels, "more")
			s.Contract.Slo.Latency = durationpb.New(7 * time.Millisecond)
			s.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT
			s.ShareRule = "sqrt"
			c.mustUpdate(s)
			after, err := c.control.View().Topic("t")
			Expect(err).NotTo(HaveOccurred())
			Expect(after.Plan).To(Equal(before.Plan))
			topic, _ := n1.Topic("t")
			Expect(topic.Channels).To(Equal([]string{"main", "more"}))

			// A small rate increase moves no publisher either.
			s.Contract.RateMilli += 20_000
			c.mustUpdate(s)
			Expect(c.publishersByBroker("t", 400)).To(Equal(placed.want))
			Consistently(gone, "3s").ShouldNot(Receive())
		})
	}

	It("adds a channel while a broker drains that has nowhere to go", func() {
		c := newCluster(setup{})
		n1 := c.node("b1", 600)
		c.mustCreate(spec("t", 400, 10))
		c.drain("b1")
		Expect(c.admin.UpdateTopic(context.Background(), masked(0, &srtmv1.TopicSpec{Name: "t", Channels: []string{"other"}}, "channels"))).Error().NotTo(HaveOccurred())
		topic, _ := n1.Topic("t")
		Expect(topic.Channels).To(ContainElement("other"))
	})

	It("changes what the mask names, and nothing else", func() {
		c := newCluster(setup{})
		c.join("b1", 600, agenttest.New())
		s := spec("t", 400, 10)
		s.Publishers = []*srtmv1.Publisher{{Id: "p", CorrelationKey: "k", Rate: 2, Batch: 3}}
		s.Groups[0].Count = 300
		s.Contract.OverLimit, s.PlacementPolicy = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT, "maxmin"
		created := c.mustCreate(s)
		update := func(r *srtmv1.UpdateTopicRequest) *srtmv1.TopicSpec {
			GinkgoHelper()
			Expect(c.admin.UpdateTopic(context.Background(), r)).Error().NotTo(HaveOccurred())
			return c.topic("t").Spec
		}
		got := update(masked(created.Epoch, &srtmv1.TopicSpec{
			Name: "t", Contract: &srtmv1.Contract{RateMilli: 450_000, Burst: 20, Slo: &srtmv1.Slo{Quantile: 0.5}}, ShareRule: "sqrt",
		}, "contract.rate_milli", "contract.burst"))
		s.Contract.RateMilli, s.Contract.Burst = 450_000, 20
		Expect(proto.Equal(got, s)).To(BeTrue(), "%v", got)

		got = update(masked(0, &srtmv1.TopicSpec{
			Name: "t", Channels: []string{"x", "y"}, Contract: &srtmv1.Contract{Slo: &srtmv1.Slo{Latency: durationpb.New(time.Second)}},
		}, "publishers", "channels", "contract.slo.latency", "contract.over_limit", "placement_policy"))
		s.Publishers, s.Channels, s.PlacementPolicy = nil, []string{"x", "y"}, "srtm"
		s.Contract.Slo.Latency, s.Contract.OverLimit = durationpb.New(time.Second), srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY
		Expect(proto.Equal(got, s)).To(BeTrue(), "%v", got)

		// An update that names the topic's whole current state changes nothing.
		epoch := c.topic("t").Epoch
		got = update(masked(epoch, s, "contract", "publishers", "groups", "placement_policy", "channels", "share_rule"))
		Expect(proto.Equal(got, s)).To(BeTrue(), "%v", got)
		Expect(c.topic("t").Epoch).To(Equal(epoch))

		// Without a mask, as before masks existed, the update replaces everything but the names of the
		// rules.
		bare := &srtmv1.TopicSpec{Name: "t", Contract: s.Contract}
		got = update(&srtmv1.UpdateTopicRequest{Spec: bare})
		bare.PlacementPolicy, bare.ShareRule = "srtm", "static"
		Expect(proto.Equal(got, bare)).To(BeTrue(), "%v", got)
	})

	It("refuses a mask that names nothing, what there is not, or a fault, and an epoch that is over", func() {
		c := newCluster(setup{})
		c.join("b1", 600, agenttest.New())
		before := c.mustCreate(spec("t", 400, 10))
		named := &srtmv1.TopicSpec{Name: "t"}
		for _, paths := range [][]string{
			{}, {"name"}, {"contract.rate"}, {"contract", "quotas"}, {""}, {"groups.count"}, {"contract."}, {"*"},
			{"contract"}, {"contract.burst"}, make([]string, 101),
		} {
			_, err := c.admin.UpdateTopic(context.Background(), masked(0, named, paths...))
			Expect(status.Code(err)).To(Equal(codes.InvalidArgument), "%q: %v", paths, err)
		}
		Expect(c.admin.UpdateTopic(context.Background(), &srtmv1.UpdateTopicRequest{})).Error().To(failsWith(codes.InvalidArgument))
		Expect(c.admin.UpdateTopic(context.Background(), masked(before.Epoch, &srtmv1.TopicSpec{Name: "t", Channels: []string{"x"}}, "channels"))).Error().NotTo(HaveOccurred())
		_, err := c.admin.UpdateTopic(context.Background(), masked(before.Epoch, named, "channels"))
		Expect(err).To(failsWith(codes.Aborted))
		Expect(status.Convert(err).Details()).To(ContainElement(HaveField("Metadata", map[string]string{
			"epoch": strconv.FormatUint(c.topic("t").Epoch, 10),
		})))
		Expect(c.topic("t").Spec.Channels).To(Equal([]string{"x"}))
	})

	It("leaves everything as it was when it does not fit, or a broker fails", func() {
		c := newCluster(setup{prepareTimeout: 300 * time.Millisecond})
		n1, n2 := agenttest.New(), agenttest.New()
		c.join("b1", 600, n1)
		c.mustCreate(spec("t", 400, 10))
		c.join("b2", 600, n2)
		Expect(c.update(spec("t", 5000, 20))).Error().To(failsWith(codes.ResourceExhausted))
		n2.Sabotage(func(string) error { return errors.New("no disk") }, nil)
		Expect(c.update(spec("t", 800, 20))).Error().To(failsWith(codes.Unavailable))
		n2.Sabotage(nil, nil)
		Expect(c.publishersByBroker("t", 400)).To(Equal(map[string]int{"b1": 400}))
		Expect(c.broker("b1").Allocated).To(BeEquivalentTo(400))
		Expect(c.broker("b2").Allocated).To(BeZero())
		Expect(c.shares("t")).To(Equal(map[string]string{"b1": "400000/10"}))
		Expect(c.update(spec("t", 800, 20))).Error().NotTo(HaveOccurred(), "once the broker works")
		Expect(c.update(spec("nothing", 1, 1))).Error().To(failsWith(codes.NotFound))
	})

	It("reports to watchers which publishers joined and moved", func() {
		c := newCluster(setup{})
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 4, 10))
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		watch, err := c.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		r, err := watch.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Assignments).To(HaveLen(4))
		c.mustUpdate(spec("t", 6, 10))
		r, err = watch.Recv()
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Assignments).To(HaveLen(2))
		Expect(r.Assignments[0].PublisherId).To(Equal("g.4"))
	})
})

var _ = Describe("Publishers that move", func() {
	ids := func(numbers ...int) (all []string) {
		for _, n := range numbers {
			all = append(all, "t/g."+strconv.Itoa(n))
		}
		return all
	}
	for name, s := range map[string]struct {
		watches  [][]string
		followed bool
		now      []int // publishers that are disconnected immediately
		later    []int
	}{
		"no publisher watches":                      {nil, false, []int{0, 1, 2, 3}, nil},
		"two of four are watched":                   {[][]string{{"g.1"}, {"g.3", "g.1", "x"}}, false, []int{0, 2}, []int{1, 3}},
		"all are watched":                           {[][]string{{"g.2"}, nil}, false, nil, []int{0, 1, 2, 3}},
		"who watches a follower is not known there": {nil, true, nil, []int{0, 1, 2, 3}},
	} {
		It("are let go after a grace if they are watched: "+name, func() {
			c := newCluster(setup{config: func(cfg *controller.Config) { cfg.Followed = s.followed }})
			gone := make(chan []string, 10)
			c.join("b1", 600, agenttest.New(), disconnected(gone))
			c.mustCreate(spec("t", 4, 10))
			c.join("b2", 600, agenttest.New())
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			for _, publishers := range s.watches {
				watch, err := c.placement.Watch(ctx, &srtmv1.WatchRequest{Topic: "t", PublisherIds: publishers})
				Expect(err).NotTo(HaveOccurred())
				Expect(watch.Recv()).Error().NotTo(HaveOccurred())
			}
			// Publishers of the first broker that moved to the other broker and back stay.
			for _, to := range []string{"b2", "b1", "b2"} {
				c.mustMove("t", to, "g.0", "g.1", "g.2", "g.3")
			}
			for range 2 * min(len(s.now), 1) {
				Eventually(gone, "500ms").Should(Receive(ConsistOf(ids(s.now...))))
			}
			Consistently(gone, "900ms").ShouldNot(Receive())
			if len(s.later) > 0 {
				Eventually(gone, "200ms").Should(Receive(ConsistOf(ids(s.later...))))
			}
		})
	}
})

var _ = Describe("Consumers of a topic that moves", func() {
	nudged := func(to chan []string) func(*agent.Config) {
		return func(cfg *agent.Config) {
			cfg.NudgeConsumers = func(topic string, channels map[string]bool) int {
				to <- append(slices.Sorted(maps.Keys(channels)), topic, cfg.BrokerID)
				return len(channels)
			}
		}
	}
	read := func(node *agenttest.Node, by ...uint32) {
		node.Measure("t", &srtmv1.TopicStats{Topic: "t", Subscribers: 9, ChannelSubscribers: by})
	}
	var c *cluster
	var n1, n2 *agenttest.Node
	var nudges chan []string
	begin := func(config ...func(*controller.Config)) {
		GinkgoHelper()
		c, n1, n2, nudges = newCluster(setup{config: func(cfg *controller.Config) {
			for _, set := range config {
				set(cfg)
			}
		}}), agenttest.New(), agenttest.New(), make(chan []string, 10)
		c.join("b1", 600, n1, nudged(nudges))
		s := spec("t", 4, 10)
		s.Channels = []string{"a", "b", "c"}
		c.mustCreate(s)
		read(n1, 0, 2, 1)
		c.join("b2", 600, n2, nudged(nudges))
		Eventually(func() uint32 { return c.topic("t").GetStatus().GetPooled().GetSubscribers() }).Should(BeEquivalentTo(9))
	}
	where := func() map[string]int { return c.publishersByBroker("t", 4) }

	It("are disconnected to look again, and publishers wait for them", func() {
		begin()
		c.drain("b1")
		Eventually(nudges).Should(Receive(Equal([]string{"b", "c", "t", "b1"})))
		nodes, _, _ := c.control.View().Producers("t")
		Expect(nodes).To(HaveLen(2), "they find the new broker")
		read(n2, 0, 1, 0)
		Eventually(func() string { return c.topic("t").GetStatus().GetMoving() }).Should(
			MatchRegexp(`^before its publishers move, until ..:..:..: for consumers of c on b2, which have to look up the topic again$`))
		Expect(c.waits("b1")).To(Equal([]string{"t: " + c.topic("t").GetStatus().GetMoving()}))
		Eventually(nudges, "5s").Should(Receive(Equal([]string{"c", "t", "b1"})), "once more, halfway")
		Expect(where()).To(Equal(map[string]int{"b1": 4}))
		read(n2, 0, 1, 3)
		Eventually(where).Should(Equal(map[string]int{"b2": 4}))
		Expect(c.topic("t").GetStatus().GetMoving()).To(BeEmpty())
		Expect(nudges).To(BeEmpty())
	})

	It("are waited for while they look again, and are nowhere", func() {
		begin()
		c.drain("b1")
		Eventually(nudges).Should(Receive(Equal([]string{"b", "c", "t", "b1"})))
		read(n1, 0, 0, 0)
		Eventually(func() uint32 { return c.topic("t").GetStatus().GetBrokers()[0].Last.ChannelSubscribers[1] }).Should(BeZero())
		Consistently(where, "2s").Should(Equal(map[string]int{"b1": 4}))
		read(n2, 0, 1, 1)
		Eventually(where).Should(Equal(map[string]int{"b2": 4}))
	})

	It("are not waited for longer than the request allows", func() {
		begin()
		c.drain("b1")
		Consistently(where, "7900ms").Should(Equal(map[string]int{"b1": 4}))
		Eventually(where, "300ms").Should(Equal(map[string]int{"b2": 4}))
	})

	It("are nudged after the move, too, until they have come", func() {
		begin(func(cfg *controller.Config) { cfg.ConsumerWait = 200 * time.Millisecond })
		c.mustMove("t", "b2", "g.1")
		for range 4 { // more than during the move
			Eventually(nudges).Should(Receive(Equal([]string{"b", "c", "t", "b1"})))
		}
		read(n2, 0, 1, 0)
		Eventually(nudges).Should(Receive(Equal([]string{"c", "t", "b1"})))
	})

	It("are not waited for where they are, or where none moves to a new broker", func() {
		begin()
		read(n1, 0, 0, 0)
		Eventually(func() uint32 { return c.topic("t").GetStatus().GetBrokers()[0].Last.ChannelSubscribers[1] }).Should(BeZero())
		start := time.Now()
		c.mustMove("t", "b2", "g.0")
		read(n1, 1, 1, 1)
		Eventually(func() uint32 { return c.topic("t").GetStatus().GetBrokers()[0].Last.ChannelSubscribers[1] }).ShouldNot(BeZero())
		c.mustMove("t", "b2", "g.1")
		Expect(time.Since(start)).To(BeNumerically("<", time.Second))
		Expect(nudges).To(BeEmpty())
	})

	It("are nudged and not waited for when publishers have no broker", func() {
		begin()
		c.mustMove("t", "b2", "g.1")
		Eventually(nudges).Should(Receive())
		Eventually(nudges).Should(Receive())
		read(n2, 0, 1, 0)
		b4 := c.join("b4", 600, agenttest.New(), nudged(nudges))
		c.mustMove("t", "b4", "g.2")
		b4.stop()
		c.join("b3", 600, agenttest.New())
		for len(nudges) > 0 {
			<-nudges
		}
		start := time.Now()
		c.drain("b4")
		Eventually(func() int { return where()["b4"] }).Should(BeZero())
		Expect(time.Since(start)).To(BeNumerically("<", 2*time.Second))
	})
})

var _ = Describe("A broker that drains", func() {
	It("gives up its topics once they are empty, and gets no new ones", func() {
		c := newCluster(setup{})
		n1, n2 := agenttest.New(), agenttest.New()
		gone := make(chan []string, 10)
		c.join("b1", 600, n1, disconnected(gone))
		c.mustCreate(spec("t", 10, 10))
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Depth: 3})
		c.join("b2", 600, n2)
		c.drain("b1")
		Eventually(func() map[string]int { return c.publishersByBroker("t", 10) }).Should(Equal(map[string]int{"b2": 10}))
		Eventually(gone).Should(Receive(ConsistOf("t/g.0", "t/g.1", "t/g.2", "t/g.3", "t/g.4", "t/g.5", "t/g.6", "t/g.7", "t/g.8", "t/g.9")))
		Expect(c.broker("b1").Draining).To(BeTrue())

		// The broker keeps messages that consumers have not had, with tokens to release them, and
		// consumers find them there.
		Consistently(hasTopic(n1, "t"), "100ms").Should(BeTrue())
		nodes, _, _ := c.control.View().Producers("t")
		Expect(nodes).To(HaveLen(2))
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "250/1", "b2": "9750/9"}))
		// Reports show that the topic is empty, but messages have come since.
		n1.Use("t", true)
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t"})
		Consistently(hasTopic(n1, "t"), "200ms").Should(BeTrue())
		Expect(c.shares("t")).To(Equal(map[string]string{"b1": "250/1", "b2": "9750/9"}))
		n1.Use("t", false)
		Eventually(hasTopic(n1, "t")).Should(BeFalse())
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b2": "10000/10"}))
		Eventually(func() []string { return c.broker("b1").Topics }).Should(BeEmpty())

		c.mustCreate(spec("u", 10, 10))
		Expect(c.publishersByBroker("u", 10)).To(Equal(map[string]int{"b2": 10}))
		Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: "b1", Undo: true})).Error().NotTo(HaveOccurred())
		Expect(c.broker("b1").Draining).To(BeFalse())
		Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: "nobody"})).Error().To(failsWith(codes.NotFound))
	})

	// One token, two brokers: the old broker keeps the token while it has something to release. Then
	// the new broker gets the token, and the contract is never exceeded.
	It("gives up a topic with as many tokens as brokers, which take turns", func() {
		c := newCluster(setup{})
		n1, n2 := agenttest.New(), agenttest.New()
		c.join("b1", 600, n1)
		c.mustCreate(spec("t", 400, 1))
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Offered: 40, Publishers: 400})
		Eventually(func() uint64 { return c.topic("t").GetStatus().GetPooled().GetOffered() }).Should(BeNumerically(">", 0))
		c.join("b2", 600, n2)
		old, moved := map[string]string{"b1": "400000/1"}, map[string]string{"b2": "400000/1"}
		holders := func() map[string]string { return c.shares("t") }

		c.drain("b1")
		Eventually(func() map[string]int { return c.publishersByBroker("t", 400) }).Should(Equal(map[string]int{"b2": 400}))
		Consistently(holders, "100ms").Should(Equal(old), "while publishers leave")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Backlog: 3, Depth: 5})
		Consistently(holders, "100ms").Should(Equal(old), "while messages wait for tokens")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Depth: 8})
		Eventually(holders).Should(Equal(moved))
		Consistently(hasTopic(n1, "t"), "50ms").Should(BeTrue(), "consumers have not had all")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Backlog: 1, Depth: 8})
		Eventually(holders).Should(Equal(old), "something came all the same")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t"})
		Eventually(hasTopic(n1, "t")).Should(BeFalse())
		Eventually(holders).Should(Equal(moved))
		Eventually(func() []string { return c.broker("b1").Topics }).Should(BeEmpty())
	})

	It("keeps what fits nowhere else", func() {
		c := newCluster(setup{})
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 400, 10))
		c.drain("b1")
		Consistently(func() map[string]int { return c.publishersByBroker("t", 400) }, "100ms").Should(Equal(map[string]int{"b1": 400}))
		Expect(c.waits("b1")).To(Equal([]string{"t: its publishers fit nowhere else: infeasible: there are no brokers"}))
		c.join("b2", 600, agenttest.New())
		Eventually(func() map[string]int { return c.publishersByBroker("t", 400) }).Should(Equal(map[string]int{"b2": 400}))
	})
})

// waits returns the conditions that a drain waits for, and "safe" at the drain's end.
func (c *cluster) waits(id string) (all []string) {
	GinkgoHelper()
	b := c.broker(id)
	for _, w := range b.Waits {
		all = append(all, w.Topic+": "+w.Reason)
	}
	if b.SafeToStop {
		all = append(all, "safe")
	}
	return all
}

var _ = Describe("What a drain waits for", func() {
	var c *cluster
	var n1 *agenttest.Node
	waits := func() []string { return c.waits("b1") }
	force := func() {
		Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: "b1", Force: true})).Error().NotTo(HaveOccurred())
	}
	// retired drains b1, except for what b1 reports about topic t.
	retired := func(s setup, left *srtmv1.TopicStats, channels ...string) {
		GinkgoHelper()
		c, n1 = newCluster(s), agenttest.New()
		c.join("b1", 600, n1)
		t := spec("t", 400, 10)
		t.Channels = channels
		c.mustCreate(t)
		c.join("b2", 600, agenttest.New())
		n1.Measure("t", left)
		<-time.After(50 * time.Millisecond) // virtual time, enough for a report
		c.drain("b1")
		Eventually(func() map[string]int { return c.publishersByBroker("t", 400) }).Should(Equal(map[string]int{"b2": 400}))
	}

	It("is consumers, which are disconnected to look again, and then it is safe to stop", func() {
		retired(setup{}, &srtmv1.TopicStats{Topic: "t", Depth: 3, Backlog: 4}, "main")
		Expect(c.broker("b2").SafeToStop).To(BeFalse(), "it does not drain")
		Eventually(waits).Should(Equal([]string{"t: consumers have not finished 7 messages; connected: 0 consumers"}))
		Expect(c.broker("b1").Waits[0].Remedy).To(Equal("connect consumers to its channels (main), or empty these; --force to lose what no consumer takes"))
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Publishers: 1, Subscribers: 2})
		Eventually(waits).Should(Equal([]string{"t: the broker still has 1 publishing connection, and its last report has 0 new messages"}))
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t"})
		Eventually(waits).Should(Equal([]string{"safe"}))
	})

	It("is a paused channel, with the remedy to unpause it", func() {
		retired(setup{}, &srtmv1.TopicStats{Topic: "t", Depth: 3, Subscribers: 1}, "main", "other")
		Eventually(waits).Should(Equal([]string{"t: consumers have not finished 3 messages; connected: 1 consumer"}))
		Expect(c.broker("b1").Waits[0].Remedy).To(Equal("--force to lose what no consumer takes"))
		Expect(c.admin.PauseChannel(context.Background(), &srtmv1.PauseChannelRequest{Topic: "t", Channel: "main"})).Error().NotTo(HaveOccurred())
		Expect(c.broker("b1").Waits[0].Remedy).To(Equal("unpause its paused channels (main); --force to lose what no consumer takes"))
	})

	It("is consumers of a topic that has no channel yet", func() {
		retired(setup{}, &srtmv1.TopicStats{Topic: "t", Backlog: 4})
		Eventually(waits).Should(Equal([]string{"t: consumers have not finished 4 messages; connected: 0 consumers"}))
		Expect(c.broker("b1").Waits[0].Remedy).To(Equal("connect a consumer: the topic has no channel; --force to lose what no consumer takes"))
	})

	It("is a topic that another controller placed there, as long as it is used", func() {
		retired(setup{}, &srtmv1.TopicStats{Topic: "t"})
		n1.Create("own")
		Eventually(waits).Should(Equal([]string{"safe"}))
		n1.Measure("own", &srtmv1.TopicStats{Topic: "own", Subscribers: 1})
		Eventually(waits).Should(Equal([]string{"own: the loaddistributor did not place it here, and it is in use"}))
	})

	It("is messages of a topic that the catalog has on other brokers only", func() {
		retired(setup{}, &srtmv1.TopicStats{Topic: "t"})
		Eventually(waits).Should(Equal([]string{"safe"}))
		n1.Create("t", "main")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Depth: 3, Backlog: 4})
		Eventually(waits).Should(Equal([]string{"t: the loaddistributor did not place it here, and it is in use; consumers have not finished 7 messages"}))
		Expect(c.broker("b1").Waits[0].Remedy).To(HaveSuffix("connect consumers to the broker's own address, or empty its channels there"))
	})

	It("is lost by force once no consumer takes it", func() {
		retired(setup{data: &store.Memory{}}, &srtmv1.TopicStats{Topic: "t", Depth: 3, Subscribers: 1, Delivered: 1})
		force()
		Expect(c.broker("b1").Forced).To(BeTrue())
		Consistently(hasTopic(n1, "t"), "3s").Should(BeTrue(), "a consumer takes it")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Depth: 3, Offered: 1})
		Consistently(hasTopic(n1, "t"), "3s").Should(BeTrue(), "a publisher is there")
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Depth: 3, Subscribers: 1})
		Consistently(hasTopic(n1, "t"), "500ms").Should(BeTrue(), "not for a window yet")
		Eventually(hasTopic(n1, "t")).Should(BeFalse())
		Eventually(waits).Should(Equal([]string{"safe"}))
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b2": "400000/10"}))
	})

	It("is beyond the others' capacity by force, also after a restart", func() {
		data := &store.Memory{}
		c, n1 = newCluster(setup{data: data}), agenttest.New()
		n2 := agenttest.New()
		b1 := c.join("b1", 600, n1)
		c.mustCreate(spec("t", 400, 10))
		c.join("b2", 100, n2)
		c.join("b3", 200, agenttest.New())
		c.drain("b1")
		Eventually(waits).Should(ContainElement(ContainSubstring("t: its publishers fit nowhere else: infeasible: 400 msg/s requested")))
		force()
		c.drain("b1") // the drain is not forced any more
		Consistently(func() map[string]int { return c.publishersByBroker("t", 400) }, "6s").Should(Equal(map[string]int{"b1": 400}))
		b1.stop()
		force()
		Expect(c.broker("b1").Forced).To(BeTrue())
		for range 2 { // from events, and from a dump
			c.stop()
			c = newCluster(setup{data: data, address: c.address})
			Expect(c.broker("b1").Forced).To(BeTrue())
		}
		c.join("b1", 600, n1)
		Eventually(func() int { return c.publishersByBroker("t", 400)["b1"] }).Should(BeZero())
		where := c.publishersByBroker("t", 400)
		Expect(where["b2"]).To(BeNumerically(">", 100), "%v", where)
		Expect(where["b3"]).To(BeNumerically(">", 200), "%v", where)
		Eventually(c.state("t")).Should(MatchRegexp("DEGRADED: broker b2 carries 100 msg/s, less than the 1.. promised"))
		Eventually(waits).Should(Equal([]string{"safe"}))
		Eventually(func() map[string]string { return c.shares("t") }).ShouldNot(HaveKey("b1"))
	})

	It("is nothing that is both ended and forced", func() {
		c = newCluster(setup{})
		Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: "b1", Force: true, Undo: true})).Error().To(failsWith(codes.InvalidArgument))
	})
})

var _ = Describe("A broker's capacity", func() {
	It("is what was calibrated, also after a restart of either side, until it is taken back", func() {
		data := &store.Memory{}
		c := newCluster(setup{data: data})
		b1 := c.join("b1", 600, agenttest.New())
		set := func(id string, mcap int64) (*srtmv1.Broker, error) {
			r, err := c.admin.SetBrokerCapacity(context.Background(), &srtmv1.SetBrokerCapacityRequest{BrokerId: id, Mcap: mcap})
			return r.GetBroker(), err
		}
		b, err := set("b1", 300)
		Expect(err).NotTo(HaveOccurred())
		Expect([]int64{b.Mcap, b.ConfiguredMcap, b.CalibratedMcap}).To(Equal([]int64{300, 600, 300}))

		err = <-c.creating(context.Background(), spec("t", 301, 10), "")
		Expect(err).To(failsWith(codes.ResourceExhausted))
		Expect(fits(err).GetRate()).To(BeEquivalentTo(300))
		c.mustCreate(spec("t", 300, 10))

		b1.stop()
		Eventually(func() bool { return c.broker("b1").Connected }).Should(BeFalse())
		c.join("b1", 700, agenttest.New())
		Expect(c.broker("b1").Mcap).To(BeEquivalentTo(300))
		c.stop()
		c = newCluster(setup{data: data, address: c.address})
		Expect(c.broker("b1").Mcap).To(BeEquivalentTo(300))
		Eventually(c.state("t")).Should(Equal("ACTIVE"))

		Expect(set("b1", 200)).Error().NotTo(HaveOccurred())
		Eventually(c.state("t")).Should(ContainSubstring("DEGRADED"))
		b, err = set("b1", 0)
		Expect(err).NotTo(HaveOccurred())
		Expect([]int64{b.Mcap, b.ConfiguredMcap, b.CalibratedMcap}).To(Equal([]int64{700, 700, 0}))
		Eventually(c.state("t")).Should(Equal("ACTIVE"))

		Expect(set("nobody", 1)).Error().To(failsWith(codes.NotFound))
		for _, mcap := range []int64{-1, 1_000_000_001} {
			Expect(set("b1", mcap)).Error().To(failsWith(codes.InvalidArgument))
		}
	})
})

var _ = Describe("A broker that is disconnected for long", func() {
	It("has its publishers placed elsewhere, and keeps its part until it is back", func() {
		c := newCluster(setup{config: func(cfg *controller.Config) { cfg.EvacuateAfter = 50 * time.Millisecond }})
		n1, n2 := agenttest.New(), agenttest.New()
		b1 := c.join("b1", 600, n1)
		c.mustCreate(spec("t", 400, 10))
		c.join("b2", 600, n2)
		b1.stop()
		Eventually(func() map[string]int { return c.publishersByBroker("t", 400) }).Should(Equal(map[string]int{"b2": 400}))
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
		// The share that b1 may still be using goes to no other broker: b2 has nothing yet.
		Expect(c.shares("t")["b1"]).To(Equal("400000/10"))

		c.join("b1", 600, n1)
		Eventually(hasTopic(n1, "t")).Should(BeFalse())
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b2": "400000/10"}))
	})

	It("has a share for what it holds when its process was another one", func() {
		c := newCluster(setup{config: func(cfg *controller.Config) { cfg.EvacuateAfter = 50 * time.Millisecond }})
		b1 := c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 400, 10))
		c.join("b2", 600, agenttest.New())
		b1.stop()
		Eventually(func() map[string]int { return c.publishersByBroker("t", 400) }).Should(Equal(map[string]int{"b2": 400}))

		node := agenttest.New()
		node.Create("t", "main")
		node.Measure("t", &srtmv1.TopicStats{Topic: "t", Backlog: 3})
		c.join("b1", 600, node, instance("one again"))
		Eventually(func() bool { t, _ := node.Topic("t"); return t.Share.Rate > 0 }).Should(BeTrue())
		t, _ := node.Topic("t")
		Expect(t.SLO).NotTo(BeZero())
		node.Measure("t", &srtmv1.TopicStats{Topic: "t"})
		Eventually(hasTopic(node, "t")).Should(BeFalse())
	})
})

var _ = Describe("Moving publishers", func() {
	It("takes their part of the contract along", func() {
		c := newCluster(setup{})
		gone := make(chan []string, 10)
		c.join("b1", 600, agenttest.New(), disconnected(gone))
		c.mustCreate(spec("t", 100, 10))
		c.join("b2", 600, agenttest.New())
		r, err := c.move("t", "b2", "g.0", "g.9")
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Topic.Quotas).To(HaveLen(2))
		Expect(c.publishersByBroker("t", 100)).To(Equal(map[string]int{"b1": 98, "b2": 2}))
		Eventually(gone).Should(Receive(ConsistOf("t/g.0", "t/g.9")))
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "98000/9", "b2": "2000/1"}))
		Expect(c.move("t", "b7", "g.0")).Error().To(failsWith(codes.NotFound))
		Expect(c.move("t", "b2", "g.100")).Error().To(failsWith(codes.NotFound))
	})

	It("selects them by group and by broker", func() {
		c := newCluster(setup{})
		c.node("b1", 600)
		s := spec("t", 100, 20)
		s.Groups = []*srtmv1.PublisherGroup{{Key: "g", Count: 30, Rate: 1}, {Key: "h", Count: 20, Rate: 1}, {Count: 10, Rate: 1}}
		c.mustCreate(s)
		c.node("b2", 600)
		c.node("b3", 600)
		for _, step := range []struct {
			what   string
			want   map[string]int
			choose func(*srtmv1.MovePublishersRequest)
		}{
			{"a group", map[string]int{"b1": 30, "b2": 30}, func(r *srtmv1.MovePublishersRequest) { r.Group = proto.String("g") }},
			{"those without a key", map[string]int{"b1": 20, "b2": 40}, func(r *srtmv1.MovePublishersRequest) { r.Group = proto.String("") }},
			{"a group of a broker", map[string]int{"b1": 20, "b2": 10, "b3": 30}, func(r *srtmv1.MovePublishersRequest) {
				r.Group, r.FromBrokerId, r.BrokerId = proto.String("g"), "b2", "b3"
			}},
			{"a broker's", map[string]int{"b2": 30, "b3": 30}, func(r *srtmv1.MovePublishersRequest) { r.FromBrokerId = "b1" }},
			{"all", map[string]int{"b2": 60}, func(r *srtmv1.MovePublishersRequest) { r.All = true }},
		} {
			r := &srtmv1.MovePublishersRequest{Topic: "t", BrokerId: "b2"}
			step.choose(r)
			Expect(c.admin.MovePublishers(context.Background(), r)).Error().NotTo(HaveOccurred(), step.what)
			Expect(c.publishersByBroker("t", 60)).To(Equal(step.want), step.what)
		}
		for code, r := range map[codes.Code]*srtmv1.MovePublishersRequest{
			codes.NotFound:        {Topic: "t", BrokerId: "b2", FromBrokerId: "b1"},
			codes.InvalidArgument: {Topic: "t", BrokerId: "b2", All: true, PublisherIds: []string{"g.0"}},
		} {
			Expect(c.admin.MovePublishers(context.Background(), r)).Error().To(failsWith(code))
		}
		Expect(c.admin.MovePublishers(context.Background(), &srtmv1.MovePublishersRequest{Topic: "t", BrokerId: "b2", Group: proto.String("none")})).
			Error().To(MatchError(ContainSubstring(`topic t, group "none": there are no publishers`)))
	})

	It("lets those go again who have come late, but not those who have come back", func() {
		c := newCluster(setup{})
		gone := make(chan []string, 10)
		n1 := agenttest.New()
		c.join("b1", 600, n1, disconnected(gone))
		c.mustCreate(spec("t", 3, 10))
		c.join("b2", 600, agenttest.New())
		move := func(to string, ids ...string) {
			GinkgoHelper()
			c.mustMove("t", to, ids...)
		}
		// On a slow machine the second call may be due before g.1 is back. Then the call is no answer,
		// and the publishers move once more.
		Eventually(func() (again []string) {
			move("b1", "g.0")
			move("b2", "g.0", "g.1")
			Eventually(gone).Should(Receive(ConsistOf("t/g.0", "t/g.1")))
			move("b1", "g.1")
			Eventually(gone).Should(Receive(&again))
			return again
		}).WithTimeout(30 * time.Second).Should(ConsistOf("t/g.0"))
		Consistently(gone, "100ms").ShouldNot(Receive())

		// A broker without publishers of its own keeps the topic while a publisher is connected.
		n1.Use("t", true)
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Publishers: 1})
		move("b2", "g.1", "g.2")
		Eventually(gone).Should(Receive(ConsistOf("t/g.1", "t/g.2")))
		Eventually(gone).Should(Receive(ConsistOf("t/g.1", "t/g.2")))
		Eventually(gone).Should(Receive(ConsistOf("t/g.0", "t/g.1", "t/g.2")))
		n1.Use("t", false)
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t"})
		Eventually(hasTopic(n1, "t")).Should(BeFalse())
	})

	It("loses nothing that came to a broker of a move that fails", func() {
		gate := &gate{}
		c := newCluster(setup{wrap: gate.wrap})
		n2 := agenttest.New()
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		c.join("b2", 600, n2)
		fail := func() {
			GinkgoHelper()
			gate.set(status.Error(codes.InvalidArgument, "no"))
			Expect(c.move("t", "b2", "g.0")).Error().To(HaveOccurred())
			gate.set(nil)
		}
		producers := func() int {
			nodes, _, _ := c.control.View().Producers("t")
			return len(nodes)
		}
		n2.Use("t", true)
		fail()
		Expect(c.publishersByBroker("t", 100)).To(Equal(map[string]int{"b1": 100}))
		// The topic stays there to be read, with tokens to release messages.
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "97500/9", "b2": "2500/1"}))
		n2.Measure("t", &srtmv1.TopicStats{Topic: "t", Depth: 1})
		Consistently(hasTopic(n2, "t"), "200ms").Should(BeTrue())
		Expect(producers()).To(Equal(2))

		n2.Measure("t", &srtmv1.TopicStats{Topic: "t"})
		n2.Use("t", false)
		Eventually(hasTopic(n2, "t")).Should(BeFalse())
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "100000/10"}))
		Eventually(producers).Should(Equal(1))

		// A broker without any messages of the topic does not keep the topic.
		fail()
		Expect(hasTopic(n2, "t")()).To(BeFalse())
		Expect(producers()).To(Equal(1))
		Expect(c.shares("t")).To(Equal(map[string]string{"b1": "100000/10"}))
	})

	It("is taken back after a crash in the middle", func() {
		data := &store.Memory{}
		first := newCluster(setup{data: data})
		n2 := agenttest.New()
		first.join("b1", 600, agenttest.New())
		first.mustCreate(spec("t", 100, 10))
		b2 := first.join("b2", 600, n2)
		entered, release := b2.hang()
		moved := make(chan error, 1)
		go func() {
			_, err := first.move("t", "b2", "g.0")
			moved <- err
		}()
		Eventually(entered).Should(BeClosed())
		copied := crash(data)
		release()
		Eventually(moved).Should(Receive())
		first.stop()

		n2.Use("t", true) // messages have come there
		second := newCluster(setup{data: copied, address: first.address})
		Eventually(second.state("t")).Should(Equal("ACTIVE"))
		Expect(second.publishersByBroker("t", 100)).To(Equal(map[string]int{"b1": 100}))
		Eventually(func() map[string]string { return second.shares("t") }).Should(Equal(map[string]string{"b1": "97500/9", "b2": "2500/1"}))
		Consistently(hasTopic(n2, "t"), "100ms").Should(BeTrue())
		n2.Use("t", false)
		Eventually(hasTopic(n2, "t")).Should(BeFalse())
		Eventually(func() map[string]string { return second.shares("t") }).Should(Equal(map[string]string{"b1": "100000/10"}))
	})
})

var _ = Describe("An overloaded broker", func() {
	// late makes b1 deliver a topic late, because it lacks capacity or tokens.
	late := func(mode controller.Rebalance, bucket bool, change ...func(*tuner.RebalanceConfig)) (*cluster, func() map[string]int, *agenttest.Node) {
		c := newCluster(setup{config: func(cfg *controller.Config) {
			cfg.Rebalance = mode
			cfg.RebalanceRules = tuner.RebalanceConfig{Sustained: 50 * time.Millisecond, Cooldown: time.Hour, MaxPart: 0.05}
			for _, do := range change {
				do(&cfg.RebalanceRules)
			}
		}})
		n1, n2 := c.node("b1", 600), c.node("b2", 600)
		c.mustCreate(spec("t", 800, 10))
		access := histogram.NewLatency()
		for range 1000 {
			if bucket {
				access.Record(time.Second)
			} else {
				access.Record(0)
			}
		}
		n1.Measure("t", &srtmv1.TopicStats{Topic: "t", Delivered: 1000, Exceeded: 900, Access: obs.LatencyProto(access)})
		n2.Measure("t", &srtmv1.TopicStats{Topic: "t", Delivered: 1000})
		return c, func() map[string]int { return c.publishersByBroker("t", 800) }, n1
	}
	recorded := func(r *tuner.RebalanceConfig) { r.Capture = 1500 * time.Millisecond }
	// send makes bursts of publishers of b1 arrive at fixed intervals, while the controller records
	// arrivals and until it stops recording.
	send := func(c *cluster, node *agenttest.Node, burst int, every time.Duration) {
		topic, err := c.control.View().Topic("t")
		Expect(err).NotTo(HaveOccurred())
		var here []string
		for i := range topic.Placement.Len() {
			if a := topic.Placement.At(i); a.Broker == "b1" {
				here = append(here, a.Publisher)
			}
		}
		ctx, stop := context.WithCancel(context.Background())
		var sending sync.WaitGroup
		atEnd(func() { stop(); sending.Wait() })
		sending.Go(func() {
			ticker := time.NewTicker(every)
			defer ticker.Stop()
			for n := 0; ctx.Err() == nil; <-ticker.C {
				at := clock.Wall()
				for range burst {
					node.Arrive("t", 0, agenttest.Arrival{At: at, Publisher: here[n%len(here)]})
					n++
				}
			}
		})
	}

	It("is relieved when a replay of its arrivals does not blame its bucket", func() {
		c, where, node := late(controller.RebalanceOn, false, recorded)
		send(c, node, 1, 5*time.Millisecond)
		Eventually(func() bool { return node.Captured("t") }).Should(BeTrue())
		Expect(c.moves("moves_proposed")()).To(BeZero(), "while they are being recorded")
		Eventually(c.moves("moves_proposed")).Should(BeEquivalentTo(1))
		Eventually(func() int { return where()["b2"] }).Should(And(BeNumerically(">", 400), BeNumerically("<=", 440)))
		Eventually(func() bool { return node.Captured("t") }).Should(BeFalse())
		Expect(c.moves("bucket_limited")()).To(BeZero())
	})

	It("is left alone when a replay blames its bucket, whatever it reports", func() {
		c, where, node := late(controller.RebalanceOn, false, recorded)
		send(c, node, 100, 100*time.Millisecond) // for a share of 400 msg/s, burst 5
		Eventually(c.moves("bucket_limited")).Should(BeEquivalentTo(1))
		Expect(c.moves("moves_proposed")()).To(BeZero())
		Expect(where()).To(Equal(map[string]int{"b1": 400, "b2": 400}))
	})

	It("is judged by its reports when it records nothing", func() {
		c, where, node := late(controller.RebalanceOn, false, recorded)
		Eventually(func() bool { return node.Captured("t") }).Should(BeTrue())
		Eventually(where).Should(Equal(map[string]int{"b1": 360, "b2": 440}))
		Expect(c.moves("bucket_limited")()).To(BeZero())
	})

	It("is relieved of a twentieth of the publishers", func() {
		c, where, _ := late(controller.RebalanceOn, false)
		Eventually(where).Should(Equal(map[string]int{"b1": 360, "b2": 440}))
		// The publishers' whole part of the contract has moved with them.
		Eventually(func() map[string]string { return c.shares("t") }).Should(And(
			HaveKeyWithValue("b1", HavePrefix("360000/")), HaveKeyWithValue("b2", HavePrefix("440000/"))))
		Consistently(where, "100ms").Should(Equal(map[string]int{"b1": 360, "b2": 440}), "in the cooldown")
		Expect(c.moved("t")).To(Equal(map[srtmv1.MoveReason]int{srtmv1.MoveReason_MOVE_REASON_REBALANCE: 40}))
		Expect(c.topic("t").Status.Moves[0]).To(And(HaveField("From", "b1"), HaveField("To", "b2"), HaveField("By", ""), HaveField("Why", HavePrefix("overload, "))))
	})

	It("is only reported in a dry run", func() {
		c, where, _ := late(controller.RebalanceDryRun, false)
		Eventually(c.moves("moves_proposed")).Should(BeEquivalentTo(1))
		Expect(where()).To(Equal(map[string]int{"b1": 400, "b2": 400}))
	})

	It("is left alone when its bucket is to blame", func() {
		c, where, _ := late(controller.RebalanceOn, true)
		Eventually(c.state("t")).Should(HavePrefix("DEGRADED: the SLO is missed"))
		Consistently(where, "200ms").Should(Equal(map[string]int{"b1": 400, "b2": 400}))
	})
})
