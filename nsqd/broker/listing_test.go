package broker_test

import (
	"slices"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsqd/broker"
)

var _ = Describe("What a broker has", func() {
	var (
		changes   atomic.Int32
		elsewhere func(string) []string
		b         *broker.Broker
	)
	start := func() {
		GinkgoHelper()
		changes.Store(0)
		var err error
		b, err = broker.New(broker.Config{
			Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true, MaxChannelConsumers: 2,
			Channels: elsewhere,
			Changed: func() {
				changes.Add(1)
				for _, t := range b.Topics() { // must not deadlock: no lock is held
					t.ChannelNames()
				}
			},
		})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(b.Close)
	}
	BeforeEach(func() { elsewhere = nil })

	about := broker.Subscriber{MsgTimeout: time.Second}
	quiet := func() {}

	It("is called whenever a topic or a channel comes or goes, and not otherwise", func() {
		start()
		notified := func(n int) {
			GinkgoHelper()
			Expect(changes.Swap(0)).To(BeEquivalentTo(n))
		}
		t, err := b.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		notified(1)
		_, err = b.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		notified(0)
		Expect(t.CreateChannel("c")).To(Succeed())
		notified(1)
		Expect(t.CreateChannel("c")).To(Succeed())
		t.Pause()
		t.Unpause()
		notified(0)
		sub, err := t.Subscribe("e#ephemeral", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		notified(1)
		other, err := t.Subscribe("c", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		other.Close()
		notified(0)
		Expect(t.ChannelNames()).To(Equal([]string{"c", "e#ephemeral"}))
		sub.Close()
		notified(1)
		Expect(t.DeleteChannel("c")).To(Succeed())
		notified(1)
		Expect(b.DeleteTopic("t")).To(Succeed())
		notified(1)
		Expect(b.DeleteTopic("t")).NotTo(Succeed())
		notified(0)
		t, err = b.CreateTopic("t#ephemeral")
		Expect(err).NotTo(HaveOccurred())
		sub, err = t.Subscribe("e#ephemeral", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		notified(2)
		sub.Close()
		notified(2) // the channel, and then the topic
		Expect(b.Topics()).To(BeEmpty())
	})

	It("begins with the channels that the topic has elsewhere", func() {
		asked := []string{}
		elsewhere = func(topic string) []string {
			asked = append(asked, topic)
			return []string{"b", "not a name", "a"}
		}
		start()
		t, err := b.TopicForClient([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(t.ChannelNames()).To(Equal([]string{"a", "b"}))
		_, err = b.TopicForClient([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		_, err = b.CreateTopic("not a name")
		Expect(err).To(MatchError(broker.ErrBadName))
		Expect(asked).To(Equal([]string{"t"}))
		Expect(t.DeleteChannel("a")).To(Succeed())
		Expect(slices.Contains(t.ChannelNames(), "a")).To(BeFalse())
	})

	It("requests a topic once, however many callers want it at the same time", func() {
		var asked atomic.Int32
		answer := make(chan struct{})
		elsewhere = func(string) []string {
			asked.Add(1)
			<-answer
			return []string{"c"}
		}
		start()
		const clients = 50
		topics := make(chan *broker.Topic, clients)
		for range clients {
			go func() {
				defer GinkgoRecover()
				t, err := b.TopicForClient([]byte("t"))
				Expect(err).NotTo(HaveOccurred())
				topics <- t
			}()
		}
		Eventually(asked.Load).Should(BeEquivalentTo(1))
		Consistently(asked.Load, "30ms").Should(BeEquivalentTo(1))
		close(answer)
		var first *broker.Topic
		for range clients {
			var t *broker.Topic
			Eventually(topics).Should(Receive(&t))
			if first == nil {
				first = t
			}
			Expect(t).To(BeIdenticalTo(first))
		}
		Expect(asked.Load()).To(BeEquivalentTo(1))
		Expect(changes.Load()).To(BeEquivalentTo(1))
	})

	It("has only so many subscribers to a channel", func() {
		start()
		t, err := b.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		first, err := t.Subscribe("c", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		_, err = t.Subscribe("c", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		_, err = t.Subscribe("c", about, quiet)
		Expect(err).To(MatchError(broker.ErrTooManyConsumers))
		Expect(err).To(MatchError(HavePrefix(`channel "c" of topic "t", 2 consumers`)))
		_, err = t.Subscribe("d", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		first.Close()
		_, err = t.Subscribe("c", about, quiet)
		Expect(err).NotTo(HaveOccurred())
	})

	It("has only so many topics and channels, and others in the place of those that are gone", func() {
		b, err := broker.New(broker.Config{Capacity: 1, MaxMsgTimeout: time.Minute, AutoCreate: true, MaxTopics: 2, MaxTopicChannels: 2, MaxChannels: 3, Channels: func(topic string) []string {
			return map[string][]string{"big": {"a", "b", "c"}}[topic]
		}})
		Expect(err).NotTo(HaveOccurred())
		defer b.Close()
		big, t := topic(b, "big"), topic(b, "t")
		Expect(big.ChannelNames()).To(Equal([]string{"a", "b"}))
		_, err = b.TopicForClient([]byte("u"))
		Expect(err).To(MatchError(broker.ErrTooManyTopics))
		Expect(topic(b, "t")).To(BeIdenticalTo(t))
		Expect(big.CreateChannel("c")).To(MatchError(broker.ErrTooManyChannels))
		Expect(big.CreateChannel("a")).To(Succeed())
		sub, err := t.Subscribe("e#ephemeral", about, quiet)
		Expect(err).NotTo(HaveOccurred())
		_, err = t.Subscribe("f", about, quiet)
		Expect(err).To(MatchError(broker.ErrTooManyChannels))
		Expect(err).To(MatchError(HavePrefix(`channel "f" of topic "t", 1 channels, 3 in all`)))
		sub.Close() // and the ephemeral channel is deleted
		Expect(t.CreateChannel("f")).To(Succeed())
		topics, channels := b.Refused()
		Expect([]uint64{topics, channels}).To(Equal([]uint64{1, 3}))
		Expect(b.DeleteTopic("big")).To(Succeed())
		u := topic(b, "u")
		Expect(u.CreateChannel("a")).To(Succeed())
		Expect(u.CreateChannel("b")).To(Succeed())
	})

	It("restores more topics and channels than there may be", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		for _, name := range []string{"t", "u"} {
			t := topic(b, name)
			for _, c := range []string{"a", "b"} {
				Expect(t.CreateChannel(c)).To(Succeed())
			}
			publishAll(t, 0, 50)
		}
		stop()
		b = storedWith(path, func(c *broker.Config) { c.MaxTopics, c.MaxTopicChannels, c.MaxChannels = 1, 1, 1 })
		for _, name := range []string{"t", "u"} {
			Expect(topic(b, name).ChannelNames()).To(Equal([]string{"a", "b"}))
			Expect(topic(b, name).CreateChannel("c")).To(MatchError(broker.ErrTooManyChannels))
		}
	})

	It("cannot have fewer than no subscribers", func() {
		Expect(broker.Config{Capacity: 1, MaxMsgTimeout: 1, MaxChannelConsumers: -1}.Validate()).To(MatchError(ContainSubstring("--max-channel-consumers -1")))
	})
})
