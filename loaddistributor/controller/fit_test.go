package controller_test

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/fitting"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

// measured is a report of n messages, of which so many took longer than the 5 ms
// of spec's SLO to process, and so many had to wait for longer for a token.
func measured(n, slow, waited int) *srtmv1.TopicStats {
	processing, access := obs.NewLatency(), obs.NewLatency()
	for i := range n {
		p, a := 100*time.Microsecond, time.Duration(0)
		if i < slow {
			p = 20 * time.Millisecond
		}
		if i < waited {
			a = 20 * time.Millisecond
		}
		processing.Record(p)
		access.Record(a)
	}
	late := uint64(max(slow, waited))
	return &srtmv1.TopicStats{
		Interval: durationpb.New(20 * time.Millisecond), Offered: uint64(n), Released: uint64(n), Delivered: uint64(n), Exceeded: late,
		Processing: processing.Proto(), Access: access.Proto(), Delivery: processing.Proto(), Publishers: 1,
	}
}

// fitting returns what a topic's fitting says.
func (c *cluster) fitting(name string) func() string {
	return func() string {
		r, err := c.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: name})
		Expect(err).NotTo(HaveOccurred())
		return r.GetTopic().GetStatus().GetFitting()
	}
}

// fit is the same for programs.
func (c *cluster) fit(name string) *srtmv1.Fit {
	r, err := c.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: name})
	Expect(err).NotTo(HaveOccurred())
	return r.GetTopic().GetStatus().GetFit()
}

func (c *cluster) rounds(name string) (all [][2]uint32) {
	for _, r := range c.fit(name).GetRounds() {
		all = append(all, [2]uint32{r.K, r.Rounds})
	}
	return all
}

var _ = Describe("Fitting", func() {
	// Groups of 10 that are declared to send together: some 3,000 messages settle
	// a test where nothing is late.
	order := func() *srtmv1.TopicSpec {
		s := spec("t", 100, 20)
		s.Groups = nil
		for _, key := range []string{"g1", "g2", "g3", "g4", "g5", "g6", "g7", "g8", "g9", "g10"} {
			s.Groups = append(s.Groups, &srtmv1.PublisherGroup{Key: key, Count: 10, Rate: 1})
		}
		return s
	}
	fast := func(cfg *controller.Config) { cfg.Fitting = fitting.ModeFast }

	It("waits for publishers, and leaves a topic that keeps its SLO where it is", func() {
		c := newCluster(setup{config: fast})
		node := agenttest.New()
		c.join("b1", 600, node)
		c.join("b2", 600, agenttest.New())
		topic := c.mustCreate(order())
		Eventually(c.fitting("t")).Should(Equal("waiting for publishers"))
		Expect(c.fit("t").GetEnded() || c.fit("t").GetTook() != nil).To(BeFalse())
		node.Measure("t", measured(200, 0, 0))
		Eventually(c.fitting("t")).Should(ContainSubstring("0 % late by processing, tested with error 0.1"))
		Expect(c.fit("t").GetEnded() && c.fit("t").GetFitted() && c.fit("t").GetTook().AsDuration() > 0).To(BeTrue())
		Expect(c.rounds("t")).To(Equal([][2]uint32{{1, 1}}))
		Expect(c.topic("t").Epoch).To(Equal(topic.Epoch))
		Expect(c.where("t", 100)).To(Equal(map[string]int{"b1": 100}))
	})

	It("spreads a topic over one broker more while processing is late", func() {
		c := newCluster(setup{config: fast})
		n1, n2, n3 := agenttest.New(), agenttest.New(), agenttest.New()
		c.join("b1", 600, n1)
		c.join("b2", 600, n2)
		c.join("b3", 600, n3)
		c.mustCreate(order())
		n1.Measure("t", measured(200, 50, 0))
		Eventually(func() int { return len(c.where("t", 100)) }).Should(Equal(2))
		n1.Measure("t", measured(100, 0, 0))
		Eventually(func() bool { _, there := n2.Topic("t"); return there }).Should(BeTrue())
		n2.Measure("t", measured(100, 0, 0))
		Eventually(c.fitting("t")).Should(ContainSubstring("tested with error"))
		Expect(c.where("t", 100)).To(Equal(map[string]int{"b1": 50, "b2": 50}))
		Expect(c.rounds("t")).To(Equal([][2]uint32{{1, 1}, {2, 1}}))
		Eventually(func() map[string]string { return c.shares("t") }).Should(Equal(map[string]string{"b1": "50000/10", "b2": "50000/10"}))
	})

	It("does not split a topic whose tokens are late", func() {
		c := newCluster(setup{config: fast})
		node := agenttest.New()
		c.join("b1", 600, node)
		c.join("b2", 600, agenttest.New())
		c.mustCreate(order())
		node.Measure("t", measured(200, 0, 40))
		Eventually(c.fitting("t")).Should(ContainSubstring("token bucket"))
		Expect(c.fit("t").GetEnded()).To(BeTrue())
		Expect(c.fit("t").GetFitted()).To(BeFalse())
		Expect(c.where("t", 100)).To(Equal(map[string]int{"b1": 100}))
	})

	It("gives up what an operator has moved meanwhile", func() {
		c := newCluster(setup{config: fast})
		node := agenttest.New()
		c.join("b1", 600, node)
		c.join("b2", 600, agenttest.New())
		c.mustCreate(order())
		node.Measure("t", measured(100, 0, 0))
		Eventually(c.fitting("t")).Should(ContainSubstring("1 brokers"))
		_, err := c.admin.MovePublishers(context.Background(), &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: []string{"g1.0"}, BrokerId: "b2"})
		Expect(err).NotTo(HaveOccurred())
		Eventually(c.fitting("t")).Should(Equal("another placement came between"))
	})

	It("is off unless it is asked for", func() {
		c := newCluster(setup{})
		node := agenttest.New()
		c.join("b1", 600, node)
		c.mustCreate(order())
		Expect(c.fitting("t")()).To(BeEmpty())
		_, err := controller.New(controller.Config{Fitting: "slow"}, nil)
		Expect(err).To(MatchError(ContainSubstring(`fitting "slow"`)))
	})
})
