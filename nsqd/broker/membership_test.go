package broker_test

import (
	"errors"
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// listed returns channels as the control plane names them, created at version 1.
func listed(names ...string) (channels []*srtmv1.TopicChannel) {
	for _, name := range names {
		channels = append(channels, &srtmv1.TopicChannel{Name: name, Created: 1})
	}
	return channels
}

var _ = Describe("A channel in a cluster", func() {
	var asked []string
	var answer error
	clustered := func(c *broker.Config) {
		c.AutoCreate = false
		c.Confirm = func(topic, channel string, created uint64) error {
			asked = append(asked, fmt.Sprint(topic, " ", channel, " ", created))
			return answer
		}
	}
	is := func(log, created uint64) *srtmv1.TopicIdentity {
		return &srtmv1.TopicIdentity{Log: log, Created: created}
	}
	prepare := func(b *broker.Broker, identity *srtmv1.TopicIdentity, version uint64, channels ...*srtmv1.TopicChannel) (unknown []string) {
		GinkgoHelper()
		left, err := b.Node().Prepare("t", channels, version, time.Second, 0.9, 0, identity)
		Expect(err).NotTo(HaveOccurred())
		for _, c := range left {
			unknown = append(unknown, c.Name)
		}
		return unknown
	}
	created := func(name string, at uint64) *srtmv1.TopicChannel {
		return &srtmv1.TopicChannel{Name: name, Created: at}
	}
	subscribe := func(b *broker.Broker, channel string) error {
		sub, err := topic(b, "t").Subscribe(channel, broker.Subscriber{MsgTimeout: time.Minute}, func() {})
		if err == nil {
			sub.Close()
		}
		return err
	}
	BeforeEach(func() { asked, answer = nil, nil })

	It("is reported when a client creates it, and until all brokers have it", func() {
		b := storedWith(GinkgoT().TempDir(), clustered)
		prepare(b, is(1, 1), 1, created("c", 1))
		Expect(subscribe(b, "new")).To(Succeed())
		answer = errors.New("not in time")
		Expect(subscribe(b, "new")).To(Succeed())
		Expect(topic(b, "t").CreateChannel("new")).To(Succeed())
		Expect(subscribe(b, "e#ephemeral")).To(Succeed())
		Expect(asked).To(Equal([]string{"t new 0", "t new 0", "t new 0"}))
		asked = nil
		Expect(b.Node().ChangeChannels(&srtmv1.ChannelOrder{Topic: "t", Identity: is(1, 1), Version: 7, Channels: []*srtmv1.TopicChannel{created("new", 7)}})).To(Succeed())
		Expect(subscribe(b, "new")).To(Succeed())
		Expect(asked).To(Equal([]string{"t new 7"}))
		b.Node().Settled("t", []string{"new"})
		Expect(subscribe(b, "new")).To(Succeed())
		Expect(asked).To(HaveLen(1))
	})

	It("keeps its messages if the creation of the topic fails, until the topic is created again", func() {
		path := GinkgoT().TempDir()
		b, stop := opened(path, clustered, func(*broker.StorageConfig) {})
		Expect(b.Restore()).To(Succeed())
		node := b.Node()
		prepare(b, is(1, 1), 1, created("c", 1))
		t := topic(b, "t")
		Expect(publish(t, "x")).To(Succeed())
		p := t.AddPublisher("p", "", police.Identity{})
		Expect(node.RemoveUnused("t", true)).To(MatchError(broker.ErrInUse))
		Expect(publish(t, "y")).To(MatchError(broker.ErrRetired))
		Expect(node.Identity("t")).To(BeNil())
		p.Leave()
		stop()

		b = storedWith(path, clustered)
		Expect(b.Node().Identity("t")).To(BeNil(), "also after a restart")
		Expect(b.Node().RemoveUnused("t", true)).To(MatchError(broker.ErrInUse))
		// The new topic has the same channel, in another version.
		Expect(prepare(b, is(1, 5), 5, created("c", 5))).To(BeEmpty())
		b.Node().Retire("t", false)
		Expect(publish(topic(b, "t"), "z")).To(Succeed())
		Expect(b.Node().Grant("t", tokenbucket.Share{Rate: 1e6, Burst: 10}, tokenbucket.Share{Rate: 1e6, Burst: 10}, mono.Never, mono.Never, 10_000)).Error().NotTo(HaveOccurred())
		r := read(topic(b, "t"), "c", 5, false)
		Eventually(r.count).Should(Equal(2))
		Expect(string(r.deliveries()[0].Body)).To(Equal("x"))
	})

	It("goes with a topic whose creation fails, if the topic has publishers and no messages", func() {
		b := storedWith(GinkgoT().TempDir(), clustered)
		prepare(b, is(1, 1), 1, created("c", 1))
		defer topic(b, "t").AddPublisher("p", "", police.Identity{}).Leave()
		Expect(b.Node().RemoveUnused("t", true)).To(Succeed())
		Expect(b.Node().Topics()).To(BeEmpty())
	})

	It("is removed again if the topic may not have it", func() {
		b := storedWith(GinkgoT().TempDir(), clustered)
		prepare(b, is(1, 1), 1)
		answer = fmt.Errorf("no: %w", broker.ErrTooManyChannels)
		Expect(subscribe(b, "new")).To(MatchError(broker.ErrTooManyChannels))
		Expect(topic(b, "t").ChannelNames()).To(BeEmpty())
	})

	It("is the control plane's list, and the channels that the control plane does not know", func() {
		path := GinkgoT().TempDir()
		b, stop := opened(path, clustered, func(*broker.StorageConfig) {})
		Expect(b.Restore()).To(Succeed())
		prepare(b, is(1, 1), 5, created("deleted", 2), created("anew", 3), created("kept", 4), created("later", 5))
		answer = errors.New("cut off")
		Expect(subscribe(b, "own")).To(Succeed())
		publishAll(topic(b, "t"), 0, 10)
		share := tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 100}
		testkit.Result(grant(b.Node(), "t", share, 100*tokenbucket.Token)).Must(GinkgoTB())
		Eventually(func() int { return held(b, "anew") }).Should(Equal(10))
		stop()

		// The process before got the other channels, and the new process has them from the metadata.
		b, stop = opened(path, clustered, func(*broker.StorageConfig) {})
		Expect(b.Restore()).To(Succeed())
		paused := created("kept", 4)
		paused.Paused = true
		Expect(prepare(b, is(1, 1), 9, created("anew", 8), paused)).To(Equal([]string{"own"}))
		Expect(topic(b, "t").ChannelNames()).To(Equal([]string{"anew", "kept", "own"}))
		Expect(held(b, "anew")).To(BeZero(), "it is another one")
		Expect(held(b, "kept")).To(Equal(10))
		Expect(topic(b, "t").Stats().Channels[1].Paused).To(BeTrue())

		By("the catalog's store has gone back")
		Expect(prepare(b, is(1, 1), 7, created("kept", 4))).To(ConsistOf("anew", "own"))

		By("the store was lost: its versions say nothing")
		Expect(prepare(b, is(2, 3), 30, created("kept", 20), created("anew", 20))).To(Equal([]string{"own"}))
		Expect(held(b, "kept")).To(Equal(10))

		By("an order is of another topic of the name, or a deletion of an earlier channel")
		order := func(of *srtmv1.TopicIdentity, version uint64, deleted ...string) {
			GinkgoHelper()
			Expect(b.Node().ChangeChannels(&srtmv1.ChannelOrder{Topic: "t", Identity: of, Version: version, Deleted: deleted})).To(Succeed())
		}
		order(is(1, 1), 40, "kept")
		order(is(2, 3), 19, "kept")
		order(is(2, 3), 40, "own")
		Expect(topic(b, "t").ChannelNames()).To(Equal([]string{"anew", "kept", "own"}))
		order(is(2, 3), 40, "kept")
		Expect(topic(b, "t").ChannelNames()).To(Equal([]string{"anew", "own"}))
		stop()
	})

	It("has what was recorded before an order is answered, after a crash", func() {
		path := GinkgoT().TempDir()
		b := storedWith(path, clustered)
		prepare(b, is(1, 1), 1)
		Expect(b.Node().ChangeChannels(&srtmv1.ChannelOrder{Topic: "t", Identity: is(1, 1), Version: 2, Channels: []*srtmv1.TopicChannel{created("new", 2)}})).To(Succeed())
		after := storedWith(crashed(path), clustered)
		Expect(topic(after, "t").ChannelNames()).To(Equal([]string{"new"}))
	})
})
