package broker_test

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/tokenbucket"
)

// obstruct prevents writes of the metadata file until clear is called.
func obstruct(path string) (clear func()) {
	GinkgoHelper()
	obstacle := file(path) + ".new"
	Expect(os.RemoveAll(obstacle)).To(Succeed())
	Expect(os.MkdirAll(filepath.Join(obstacle, "x"), 0o700)).To(Succeed())
	return func() { Eventually(func() error { return os.RemoveAll(obstacle) }).Should(Succeed()) } // the metadata writer uses the path, too
}

var _ = Describe("an order", func() {
	share := tokenbucket.Share{Rate: tokenbucket.PerSecond(0.001), Burst: 1}
	retention := &metadata.Retention{Age: time.Hour}

	// what returns all state that orders change.
	what := func(b *broker.Broker) string {
		text := fmt.Sprint(names(b))
		for _, t := range b.Topics() {
			s := t.Stats()
			text += fmt.Sprintf(" %s waits %d limited %v retains %v", s.Name, s.Waiting, s.Limited && s.Name != "u", s.Retain) // the share of u comes from the cluster
			for _, c := range s.Channels {
				if c.Name == "z" {
					continue // after a crash a new channel may get messages that were released before
				}
				text += fmt.Sprintf(" %s:%d", c.Name, c.Ready+c.Deferred+c.InFlight)
			}
		}
		return text
	}
	prepare := func(topic string, channels ...string) func(*broker.Broker, *broker.Topic) error {
		return func(b *broker.Broker, _ *broker.Topic) error {
			_, err := b.Node().Prepare(topic, listed(channels...), 1, time.Second, 0.9, 0, nil)
			return err
		}
	}
	one := func(name string, created uint64, paused bool) []*srtmv1.TopicChannel {
		return []*srtmv1.TopicChannel{{Name: name, Created: created, Paused: paused}}
	}
	change := func(channels []*srtmv1.TopicChannel, deleted ...string) func(*broker.Broker, *broker.Topic) error {
		return func(b *broker.Broker, _ *broker.Topic) error {
			return b.Node().ChangeChannels(&srtmv1.ChannelOrder{Topic: "t", Version: 2, Channels: channels, Deleted: deleted})
		}
	}
	// Orders that change the record of a topic, and orders that move a cursor.
	records := map[string]func(*broker.Broker, *broker.Topic) error{
		"creates a topic": func(b *broker.Broker, _ *broker.Topic) error {
			_, err := b.OrderTopic("u")
			return err
		},
		"deletes a topic":                   func(b *broker.Broker, _ *broker.Topic) error { return b.DeleteTopic("t") },
		"deletes an unused topic":           func(b *broker.Broker, _ *broker.Topic) error { return b.DeleteUnused("unused") },
		"pauses a topic":                    func(_ *broker.Broker, t *broker.Topic) error { return t.Pause() },
		"unpauses a topic":                  func(b *broker.Broker, _ *broker.Topic) error { return topic(b, "paused").Unpause() },
		"limits a topic":                    func(_ *broker.Broker, t *broker.Topic) error { return t.Contract(share, false) },
		"unlimits a topic":                  func(b *broker.Broker, _ *broker.Topic) error { return topic(b, "limited").RemoveContract() },
		"retains a topic":                   func(_ *broker.Broker, t *broker.Topic) error { return t.Retain(retention) },
		"creates a channel":                 func(_ *broker.Broker, t *broker.Topic) error { return t.CreateChannel("z") },
		"deletes a channel":                 func(_ *broker.Broker, t *broker.Topic) error { return t.DeleteChannel("c") },
		"pauses a channel":                  func(_ *broker.Broker, t *broker.Topic) error { return t.PauseChannel("c") },
		"unpauses a channel":                func(_ *broker.Broker, t *broker.Topic) error { return t.UnpauseChannel("p") },
		"prepares a topic for the cluster":  prepare("u", "a", "b"),
		"creates a channel of the cluster":  change(one("z", 2, false)),
		"pauses a channel of the cluster":   change(one("c", 1, true)),
		"unpauses a channel of the cluster": change(one("p", 1, false)),
		"deletes a channel of the cluster":  change(nil, "c"),
		"replaces a channel of the cluster": change(one("c", 2, false)),
		"prepares a topic with other channels": func(b *broker.Broker, _ *broker.Topic) error {
			_, err := b.Node().Prepare("limited", one("c", 1, true), 1, time.Second, 0.9, 0, nil)
			return err
		},
		"removes a topic of the cluster":    func(b *broker.Broker, _ *broker.Topic) error { return b.Node().Remove("t") },
		"removes an unused topic of theirs": func(b *broker.Broker, _ *broker.Topic) error { return b.Node().RemoveUnused("unused", false) },
		"subscribes to a new channel": func(_ *broker.Broker, t *broker.Topic) error {
			sub, err := t.Subscribe("z", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
			if err == nil {
				sub.Close()
			}
			return err
		},
	}
	cursors := map[string]func(*broker.Broker, *broker.Topic) error{
		"empties a topic":                   func(b *broker.Broker, _ *broker.Topic) error { return topic(b, "paused").Empty() },
		"empties a channel":                 func(_ *broker.Broker, t *broker.Topic) error { return t.EmptyChannel("c") },
		"deletes a channel":                 func(_ *broker.Broker, t *broker.Topic) error { return t.DeleteChannel("c") },
		"deletes a channel of the cluster":  change(nil, "c"),
		"replaces a channel of the cluster": change(one("c", 2, false)),
		"seeks": func(_ *broker.Broker, t *broker.Topic) error {
			_, err := t.Seek("c", broker.Place{End: true})
			return err
		},
	}
	begin := func(disk *faulty, path string) (*broker.Broker, *broker.Topic) {
		GinkgoHelper()
		b := on(&disk.Disk, path)
		for name, channels := range map[string][]string{"t": {"c", "d", "p", "e"}, "paused": {"c", "e"}, "limited": {"c"}, "unused": nil} {
			for _, c := range channels {
				Expect(topic(b, name).CreateChannel(c)).To(Succeed())
			}
			topic(b, name)
		}
		Expect(topic(b, "paused").Pause()).To(Succeed())
		Expect(topic(b, "limited").Contract(share, false)).To(Succeed())
		t := topic(b, "t")
		Expect(t.PauseChannel("p")).To(Succeed())
		for _, c := range []string{"c", "d", "p", "e"} { // the cluster has these channels
			order := &srtmv1.ChannelOrder{Topic: "t", Version: 1, Channels: one(c, 1, c == "p")}
			Expect(b.Node().ChangeChannels(order)).To(Succeed())
		}
		for i := range 5 {
			Expect(durably(t, fmt.Sprint(i))).To(Succeed())
			Expect(durably(topic(b, "paused"), fmt.Sprint(i))).To(Succeed())
		}
		for _, name := range []string{"t", "paused"} { // stores cursors, too
			Eventually(topic(b, name).Stats).Should(HaveField("Waiting", Or(BeZero(), Equal(5))))
			Expect(topic(b, name).EmptyChannel("e")).To(Succeed())
		}
		Expect(b.Recorded()).To(Succeed())
		return b, t
	}
	after := func(path, want, when string) {
		GinkgoHelper()
		other, end := opened(crashed(path), func(*broker.Config) {}, func(c *broker.StorageConfig) { c.Fsync = true })
		Expect(other.Restore()).To(Succeed())
		defer end()
		Eventually(func() string { return what(other) }).Should(Equal(want), when) // channels get the waiting messages
	}
	check := func(order func(*broker.Broker, *broker.Topic) error, fail func(disk *faulty, path string) (mend func())) {
		GinkgoHelper()
		disk, path := newFaulty(), GinkgoT().TempDir()
		b, t := begin(disk, path)
		was := what(b)
		after(path, was, "before the order")
		mend := fail(disk, path)
		Expect(order(b, t)).To(MatchError(broker.ErrStorage))
		Expect(what(b)).To(Equal(was), "after the order that was refused")
		mend()
		after(path, was, "after a crash")
		Expect(order(b, t)).To(Succeed())
		is := what(b)
		Expect(is).NotTo(Equal(was), "after the order")
		after(path, is, "after the order and a crash")
	}
	for name, order := range records {
		It(name+" once its record can be written, and else changes nothing", func() {
			check(order, func(_ *faulty, path string) func() { return obstruct(path) })
		})
	}
	for name, order := range cursors {
		It(name+" once cursors can be written, and else changes nothing", func() {
			check(order, func(disk *faulty, _ string) func() {
				disk.unwritable.Store(true)
				return func() { disk.unwritable.Store(false) }
			})
		})
	}

	It("is refused while the data folder is gone", func() {
		for name, order := range records {
			disk, path := newFaulty(), filepath.Join(GinkgoT().TempDir(), "data")
			b, t := begin(disk, path)
			was := what(b)
			Expect(os.Rename(path, path+".away")).To(Succeed())
			Expect(order(b, t)).To(MatchError(broker.ErrStorage), name)
			Expect(what(b)).To(Equal(was), name)
			Expect(os.Rename(path+".away", path)).To(Succeed())
		}
		for name, order := range cursors {
			disk, path := newFaulty(), filepath.Join(GinkgoT().TempDir(), "data")
			b, t := begin(disk, path)
			was := what(b)
			Expect(os.Rename(path, path+".away")).To(Succeed())
			Expect(order(b, t)).To(MatchError(broker.ErrStorage), name)
			Expect(what(b)).To(Equal(was), name)
			Expect(os.Rename(path+".away", path)).To(Succeed())
		}
	})
})
