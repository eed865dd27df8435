package controller_test

import (
	"context"
	"fmt"
	"slices"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

var _ = Describe("The channels of a topic", func() {
	var c *cluster
	var b1, b2 *broker
	// begin makes a topic on two brokers.
	begin := func(s setup) {
		GinkgoHelper()
		c = newCluster(s)
		b1, b2 = c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
	}
	// listed returns the channels of the catalog, with a "!" after the name of a paused channel.
	listed := func() (names []string) {
		GinkgoHelper()
		r, err := c.admin.ListChannels(context.Background(), &srtmv1.ListChannelsRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		for _, one := range r.Channels {
			if names = append(names, one.Name); one.Paused {
				names[len(names)-1] += "!"
			}
		}
		return names
	}
	on := func(node *agenttest.Node) (names []string) {
		t, _ := node.Topic("t")
		for _, name := range t.Channels {
			if slices.Contains(t.Paused, name) {
				name += "!"
			}
			names = append(names, name)
		}
		return names
	}
	// subscribe creates a channel as a consumer does, and returns the answer.
	subscribe := func(b *broker, channel string) error {
		b.node.Subscribe("t", channel)
		return b.agent.Confirm("t", channel, 0)
	}
	remove := func(channel string) (pending []string, err error) {
		r, err := c.admin.DeleteChannel(context.Background(), &srtmv1.DeleteChannelRequest{Topic: "t", Channel: channel})
		return r.GetPending(), err
	}

	It("are in the catalog and on all brokers when a consumer is answered that creates one", func() {
		begin(setup{})
		Expect(subscribe(b1, "new")).To(Succeed())
		Expect(listed()).To(Equal([]string{"main", "new"}))
		Expect(on(b1.node)).To(Equal([]string{"main", "new"}))
		Expect(on(b2.node)).To(Equal([]string{"main", "new"}))
		t, _ := b1.node.Topic("t")
		Expect(t.Settled).To(ContainElement("new"))
		b1.stop()
		Expect(subscribe(b1, "late")).To(MatchError(agent.ErrDisconnected))
	})

	It("are created on a broker that the topic moves to, and one that appears meanwhile", func() {
		begin(setup{})
		Expect(subscribe(b1, "before")).To(Succeed())
		b3 := c.join("b3", 60, agenttest.New())
		entered, release := b3.hang()
		var all sync.WaitGroup
		all.Go(func() {
			defer GinkgoRecover()
			Expect(c.admin.MovePublishers(context.Background(), &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: []string{"g.0"}, BrokerId: "b3"})).Error().NotTo(HaveOccurred())
		})
		<-entered
		all.Go(func() {
			defer GinkgoRecover()
			Expect(subscribe(b1, "meanwhile")).To(MatchError(agent.ErrUnanswered), "b3 does not say that it has the channel")
			release()
		})
		all.Wait()
		Expect(on(b3.node)).To(Equal([]string{"before", "main", "meanwhile"}))
		Expect(subscribe(b1, "meanwhile")).To(Succeed(), "now it is known")
	})

	It("come from all brokers that bring some, after a restart of the control plane, too", func() {
		data := &store.Memory{}
		begin(setup{data: data})
		Expect(subscribe(b2, "kept")).To(Succeed())
		b1.stop()
		b2.stop()
		b1.node.Subscribe("t", "one")
		b2.node.Subscribe("t", "two")
		c.stop()
		c = newCluster(setup{data: data})
		Expect(listed()).To(Equal([]string{"kept", "main"}))
		c.join("b1", 60, b1.node)
		c.join("b2", 60, b2.node)
		for _, channels := range []func() []string{listed, func() []string { return on(b1.node) }, func() []string { return on(b2.node) }} {
			Eventually(channels).Should(Equal([]string{"kept", "main", "one", "two"}))
		}
		Eventually(func() srtmv1.TopicState { return c.topic("t").State }).Should(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
	})

	It("are on all brokers before a topic is active of which a broker had some", func() {
		c = newCluster(setup{})
		b1, b2 = c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		b1.node.Create("t", "own")
		c.mustCreate(spec("t", 100, 10))
		Expect(on(b2.node)).To(Equal([]string{"main", "own"}))
		Expect(listed()).To(Equal([]string{"main", "own"}))
	})

	It("are paused and deleted on all brokers, also on one that is disconnected meanwhile", func() {
		begin(setup{})
		Expect(subscribe(b1, "gone")).To(Succeed())
		Expect(c.admin.PauseChannel(context.Background(), &srtmv1.PauseChannelRequest{Topic: "t", Channel: "gone"})).Error().NotTo(HaveOccurred())
		Expect(on(b1.node)).To(Equal([]string{"gone!", "main"}))
		Expect(on(b2.node)).To(Equal([]string{"gone!", "main"}))
		b2.stop()
		Eventually(func() bool { return c.broker("b2").Connected }).Should(BeFalse())
		Expect(remove("gone")).To(Equal([]string{"b2"}))
		Expect(b1.agent.ChangeChannel(context.Background(), "t", "main", srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE)).To(Succeed())
		Expect(on(b1.node)).To(Equal([]string{"main!"}))
		Expect(on(b2.node)).To(Equal([]string{"gone!", "main"}))
		b2 = c.join("b2", 60, b2.node)
		Eventually(func() []string { return on(b2.node) }).Should(Equal([]string{"main!"}))
		Expect(listed()).To(Equal([]string{"main!"}))
		Expect(b2.agent.ChangeChannel(context.Background(), "t", "main", srtmv1.ChannelChange_CHANNEL_CHANGE_UNPAUSE)).To(Succeed())
		Expect(on(b1.node)).To(Equal([]string{"main"}))

		// Requested again.
		Expect(remove("gone")).Error().To(fails(codes.NotFound, rpc.ReasonChannelUnknown))
		Expect(b1.agent.ChangeChannel(context.Background(), "t", "gone", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE)).To(Succeed())
		Expect(b1.agent.ChangeChannel(context.Background(), "t", "gone", srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE)).To(MatchError(agent.ErrChannelUnknown))
		Expect(b1.agent.ChangeChannel(context.Background(), "other", "gone", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE)).To(MatchError(agent.ErrTopicUnknown))
	})

	It("do not come back with an update that does not name them", func() {
		begin(setup{})
		Expect(remove("main")).To(BeEmpty())
		Expect(c.topic("t").Spec.Channels).To(BeEmpty())
		Expect(c.admin.UpdateTopic(context.Background(), masked(0, &srtmv1.TopicSpec{Name: "t", Contract: &srtmv1.Contract{Burst: 12}}, "contract.burst"))).Error().NotTo(HaveOccurred())
		Expect(listed()).To(BeEmpty())
		Expect(c.admin.UpdateTopic(context.Background(), masked(0, &srtmv1.TopicSpec{Name: "t", Channels: []string{"main"}}, "channels"))).Error().NotTo(HaveOccurred())
		Expect(on(b2.node)).To(Equal([]string{"main"}))
	})

	It("may be thousands, and have a bound", func() {
		begin(setup{})
		const many = 1000
		var all sync.WaitGroup
		for i := range many {
			all.Go(func() {
				defer GinkgoRecover()
				b := b1
				if i%2 == 1 {
					b = b2
				}
				Expect(subscribe(b, fmt.Sprint("c", i))).To(Succeed())
			})
		}
		all.Wait()
		Expect(listed()).To(HaveLen(many + 1))
		Expect(on(b1.node)).To(Equal(listed()))
		Expect(on(b2.node)).To(Equal(listed()))
		var more []string
		for i := range catalog.MaxChannels - many - 1 {
			more = append(more, fmt.Sprint("d", i))
		}
		Expect(c.control.ChangeChannel(context.Background(), "t", srtmv1.ChannelChange_CHANNEL_CHANGE_CREATE, more...)).To(BeEmpty())
		_, err := c.admin.CreateChannel(context.Background(), &srtmv1.CreateChannelRequest{Topic: "t", Channel: "last"})
		Expect(err).To(fails(codes.ResourceExhausted, rpc.ReasonTooManyChannels))
		Expect(subscribe(b1, "last")).To(MatchError(agent.ErrTooManyChannels))
		b3 := c.join("b3", 60, agenttest.New())
		_, err = c.admin.MovePublishers(context.Background(), &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: []string{"g.0"}, BrokerId: "b3"})
		Expect(err).NotTo(HaveOccurred())
		Expect(on(b3.node)).To(HaveLen(catalog.MaxChannels))
	})

	It("of MQTT clients are deleted by a broker without the topic, unless they have consumers", func() {
		begin(setup{})
		b3 := c.join("b3", 60, agenttest.New())
		change := func(channel string, change srtmv1.ChannelChange) error {
			return b3.agent.ChangeChannel(context.Background(), "t", channel, change)
		}
		Expect(subscribe(b1, "mqtt.sensor")).To(Succeed())
		b1.node.Measure("t", &srtmv1.TopicStats{Offered: 1, ChannelSubscribers: []uint32{0, 1}})
		Eventually(func() uint64 { return c.topic("t").Status.Pooled.GetOffered() }).Should(BeNumerically(">", 0), "a report has come")
		Expect(change("mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED)).To(MatchError(agent.ErrChannelInUse))
		Expect(change("main", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE)).To(MatchError(agent.ErrTopicUnknown))
		Expect(change("mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE)).To(MatchError(agent.ErrTopicUnknown))
		Expect(listed()).To(Equal([]string{"main", "mqtt.sensor"}))
		b1.node.Measure("t", &srtmv1.TopicStats{})
		Eventually(func() error { return change("mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED) }).Should(Succeed())
		Expect(on(b1.node)).To(Equal([]string{"main"}))
		Expect(on(b2.node)).To(Equal([]string{"main"}))

		By("unless another broker has claimed them", func() {
			claim := func(b *broker) error {
				return b.agent.ChangeChannel(context.Background(), "t", "mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_CLAIM)
			}
			Expect(claim(b3)).To(MatchError(agent.ErrChannelUnknown))
			Expect(subscribe(b1, "mqtt.sensor")).To(Succeed())
			Expect(claim(b3)).To(Succeed())
			Expect(claim(b1)).To(Succeed())
			Expect(change("mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED)).To(MatchError(agent.ErrChannelInUse))
			Expect(claim(b3)).To(Succeed())
			Expect(change("mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED)).To(Succeed())
			Expect(on(b1.node)).To(Equal([]string{"main"}))
		})

		Expect(subscribe(b1, "mqtt.sensor")).To(Succeed())
		Expect(change("mqtt.sensor", srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE)).To(Succeed())
		Expect(listed()).To(Equal([]string{"main"}))
	})
})
