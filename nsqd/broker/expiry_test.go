package broker_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// letter is the body of a dead letter as its consumers read it.
type letter struct {
	Topic, Channel, ID, Body string
	Attempts                 int
	Timestamp                int64
	Base64                   []byte `json:"body_base64"`
	Attribute                []byte
}

func parse(body []byte) (l letter) {
	GinkgoHelper()
	Expect(json.Unmarshal(body, &l)).To(Succeed())
	return l
}

// failAll requeues every message of a channel at once until the spec ends. The reader holds the delivered messages.
func failAll(t *broker.Topic, channel string) *reader {
	GinkgoHelper()
	r := read(t, channel, 1, false)
	stop, stopped := make(chan struct{}), make(chan struct{})
	DeferCleanup(func() {
		close(stop)
		<-stopped
	})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for seen := 0; ; {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			for _, d := range r.deliveries()[seen:] {
				seen++
				_ = r.sub.Requeue(d.ID, 0)
			}
		}
	}()
	return r
}

// queued is a message in a queue of NSQ's nsqd.
type queued struct {
	id       string
	old      bool // older than the TTL
	attempts uint16
}

// writeQueue writes a queue's file as NSQ's nsqd 1.3 does.
func writeQueue(path string, messages []queued) {
	GinkgoHelper()
	var b []byte
	for _, m := range messages {
		published := time.Now()
		if m.old {
			published = published.Add(-2 * time.Hour)
		}
		b = binary.BigEndian.AppendUint32(b, uint32(8+2+16+len(m.id)))
		b = binary.BigEndian.AppendUint64(b, uint64(published.UnixNano()))
		b = binary.BigEndian.AppendUint16(b, m.attempts)
		b = append(append(b, m.id...), m.id...)
	}
	Expect(os.WriteFile(path, b, 0o600)).To(Succeed())
}

func channelOf(t *broker.Topic, name string) broker.ChannelStats {
	GinkgoHelper()
	for _, c := range t.Stats().Channels {
		if c.Name == name {
			return c
		}
	}
	Fail("there is no channel " + name)
	return broker.ChannelStats{}
}

var _ = Describe("a message that is given up", func() {
	for _, through := range []bool{false, true} {
		It(fmt.Sprintf("goes to the dead letter topic with its channel and attempts, through the disk: %v", through), func() {
			b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {}, func(c *broker.StorageConfig) { c.WriteThrough, c.Fsync = through, through })
			Expect(b.Restore()).To(Succeed())
			t := topic(b, "t")
			Expect(t.SetExpiry(expiry.Settings{MaxAttempts: 3, DeadLetter: "t.dead"})).To(Succeed())
			failAll(t, "c")
			Expect(publish(t, "poison")).To(Succeed())
			Expect(publishWith(t, "\xff\x00", "\x00fleet/7")).To(Succeed())
			dead := read(topic(b, "t.dead"), "d", 10, true)
			Eventually(dead.count).Should(Equal(2))
			for _, m := range dead.deliveries() {
				l := parse(m.Body)
				Expect(l.Topic).To(Equal("t"))
				Expect(l.Channel).To(Equal("c"))
				Expect(l.Attempts).To(Equal(3))
				Expect(l.ID).To(HaveLen(16))
				Expect(l.Timestamp).NotTo(BeZero())
				Expect(l.Body + string(l.Base64) + string(l.Attribute)).To(Or(Equal("poison"), Equal("\xff\x00\x00fleet/7")))
			}
			Eventually(func() uint64 { return channelOf(t, "c").Counters.DeadLettered }).Should(BeEquivalentTo(2))
			Expect(inFlight(t)).To(BeZero())
		})
	}

	It("stays in its channel while the dead letter topic refuses, and goes there after a restart", func() {
		path := GinkgoT().TempDir()
		var tries atomic.Int64
		refusing := func(c *broker.Config) {
			c.AutoCreate = false
			c.DeadLetter = func(context.Context, string, []byte) error {
				tries.Add(1)
				return errors.New("refused")
			}
		}
		b, end := opened(path, refusing)
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.SetExpiry(expiry.Settings{MaxAttempts: 1, DeadLetter: "elsewhere"})).To(Succeed())
		failAll(t, "c")
		Expect(publish(t, "poison")).To(Succeed())
		Eventually(tries.Load).Should(BeEquivalentTo(1))
		Eventually(func() int { return channelOf(t, "c").Deferred }).Should(Equal(1))
		end()

		got := make(chan string, 1)
		b, _ = opened(path, func(c *broker.Config) {
			c.AutoCreate = false
			c.DeadLetter = func(_ context.Context, topic string, body []byte) error {
				got <- topic + ": " + parse(body).Body
				return nil
			}
		})
		Expect(b.Restore()).To(Succeed())
		Eventually(got).Should(Receive(Equal("elsewhere: poison")))
		t = topic(b, "t")
		Eventually(func() uint64 { return channelOf(t, "c").Counters.DeadLettered }).Should(BeEquivalentTo(1))
	})

	It("is counted where there is no dead letter topic", func() {
		b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.SetChannelExpiry("c", expiry.Settings{MaxAttempts: 2})).To(Succeed())
		failAll(t, "c")
		Expect(publish(t, "poison")).To(Succeed())
		Eventually(func() uint64 { return channelOf(t, "c").Counters.GivenUp }).Should(BeEquivalentTo(1))
		Expect(channelOf(t, "c").Counters.Delivered).To(BeEquivalentTo(2))
	})

	It("expires without a consumer", func() {
		b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(t.SetExpiry(expiry.Settings{TTL: 5 * time.Millisecond})).To(Succeed())
		publishAll(t, 0, 500) // more than memory takes
		Eventually(func() uint64 { return channelOf(t, "c").Counters.Expired }).Should(BeEquivalentTo(500))
		Expect(inFlight(t)).To(BeZero())
	})

	It("is given up by the same settings after a restart", func() {
		path := GinkgoT().TempDir()
		b, end := opened(path, func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		of := expiry.Settings{TTL: time.Hour, MaxAttempts: 3, DeadLetter: "t.dead"}
		Expect(t.SetExpiry(of)).To(Succeed())
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(t.SetChannelExpiry("c", expiry.Settings{TTL: time.Minute})).To(Succeed())
		end()
		b, _ = opened(path, func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t = topic(b, "t")
		Expect(t.Stats().Expiry).To(Equal(of))
		Expect(channelOf(t, "c").Expiry).To(Equal(expiry.Settings{TTL: time.Minute, MaxAttempts: 3, DeadLetter: "t.dead"}))
	})

	It("has no settings that contradict each other", func() {
		b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		for text, e := range map[string]expiry.Settings{
			"dead_letter needs max_attempts": {DeadLetter: "d"},
			"the topic itself":               {MaxAttempts: 1, DeadLetter: "t"},
			"not the name of a topic":        {MaxAttempts: 1, DeadLetter: "a b"},
			"ttl 1ns is outside":             {TTL: 1},
			"max_attempts 65536 is outside":  {MaxAttempts: 65536},
		} {
			Expect(t.SetExpiry(e)).To(MatchError(ContainSubstring(text)))
			Expect(t.Stats().Expiry).To(Equal(expiry.Settings{}))
		}
		Expect(t.SetChannelExpiry("c", expiry.Settings{DeadLetter: "d"})).To(MatchError(expiry.ErrNoAttempts))
	})

	It("is given up by what NSQ's nsqd left of it, once, through an import and a restart", func() {
		const most, rounds = 3, 15
		rng := testkit.Rand(GinkgoTB())
		for range rounds {
			path := GinkgoT().TempDir()
			b, end := opened(path, func(*broker.Config) {})
			Expect(b.Restore()).To(Succeed())
			Expect(topic(b, "t").SetExpiry(expiry.Settings{TTL: time.Hour, MaxAttempts: most, DeadLetter: "t.dead"})).To(Succeed())
			end()

			// Each channel's queue has some of the messages, each delivered as often as the limit permits.
			queues := map[string][]queued{}
			for i := range 1 + rng.IntN(40) {
				m := queued{id: fmt.Sprintf("%016d", i), old: rng.IntN(3) == 0}
				for _, channel := range []string{"c", "d"} {
					if rng.IntN(4) > 0 {
						m.attempts = uint16(rng.IntN(most + 3))
						queues[channel] = append(queues[channel], m)
					}
				}
			}
			Expect(os.WriteFile(filepath.Join(path, "nsqd.dat"), []byte(`{"topics":[{"name":"t","channels":[{"name":"c"},{"name":"d"}]}]}`), 0o600)).To(Succeed())
			for channel, messages := range queues {
				writeQueue(filepath.Join(path, "t:"+channel+".diskqueue.000000.dat"), messages)
			}

			b, end = opened(path, func(*broker.Config) {})
			Expect(b.Restore()).To(Succeed())
			restarts := rng.IntN(2) == 0
			if restarts {
				end()
				b, end = opened(path, func(*broker.Config) {})
				Expect(b.Restore()).To(Succeed())
			}
			t := topic(b, "t")
			failed, want := map[string]*reader{}, map[string]int{}
			for channel, messages := range queues {
				failed[channel] = failAll(t, channel)
				for _, m := range messages {
					if !m.old {
						want[channel+" "+m.id] = max(most, int(m.attempts))
					}
				}
			}
			dead := read(topic(b, "t.dead"), "all", 100, true)
			for channel, messages := range queues {
				Eventually(func() int { c := channelOf(t, channel); return c.Ready + c.Beyond + c.InFlight + c.Deferred }).Should(BeZero())
				if c := channelOf(t, channel).Counters; !restarts {
					Expect(c.Expired + c.DeadLettered).To(BeEquivalentTo(len(messages)))
				}
			}
			Eventually(dead.count).Should(BeNumerically(">=", len(want)))
			if !restarts { // a stop between a letter's write and the message's end stores the letter again
				Expect(dead.count()).To(Equal(len(want)))
			}
			got := map[string]int{}
			for _, d := range dead.deliveries() {
				l := parse(d.Body)
				got[l.Channel+" "+l.Body] = l.Attempts
			}
			Expect(got).To(Equal(want))
			for channel, messages := range queues {
				of := map[string]queued{}
				for _, m := range messages {
					of[m.id] = m
				}
				for _, d := range failed[channel].deliveries() {
					m := of[string(d.Body)]
					Expect(m.old).To(BeFalse(), "message %s of channel %s expired before the import", m.id, channel)
					Expect(d.Attempts).To(And(BeNumerically(">", m.attempts), BeNumerically("<=", most)))
				}
			}
			end()
		}
	})
})
