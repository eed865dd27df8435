package broker_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// retaining is a restored broker over a folder that keeps finished messages.
func retaining(path string, through bool, set ...func(*broker.StorageConfig)) (*broker.Broker, func()) {
	GinkgoHelper()
	set = append([]func(*broker.StorageConfig){func(c *broker.StorageConfig) {
		c.WriteThrough, c.Retain = through, metadata.Retention{Age: time.Hour}
	}}, set...)
	b, end := opened(path, func(*broker.Config) {}, set...)
	Expect(b.Restore()).To(Succeed())
	return b, end
}

// finishedAll publishes numbers to a channel and reads all of them.
func finishedAll(t *broker.Topic, channel string, from, to int) *reader {
	GinkgoHelper()
	r := read(t, channel, 100, true)
	publishAll(t, from, to)
	Eventually(r.count).Should(Equal(to - from))
	Eventually(func() int { return inFlight(t) }).Should(BeZero())
	return r
}

func inFlight(t *broker.Topic) (n int) {
	for _, c := range t.Stats().Channels {
		n += c.InFlight + c.Ready
	}
	return n
}

// again reads so many messages.
func again(t *broker.Topic, channel string, n int) []string {
	GinkgoHelper()
	r := read(t, channel, 100, true)
	Eventually(r.count).Should(Equal(n))
	Eventually(func() int { return inFlight(t) }).Should(BeZero())
	r.sub.Close()
	return bodies(r)
}

var _ = Describe("a channel that seeks", func() {
	for _, through := range []bool{false, true} {
		Context(fmt.Sprint("where messages go through the disk: ", through), func() {
			It("gets again what is retained, from a place on, and nothing before", func() {
				path := GinkgoT().TempDir()
				b, end := retaining(path, through)
				t := topic(b, "t")
				finishedAll(t, "c", 0, 500).sub.Close()
				other := read(t, "other", 10, true)
				at, err := t.Seek("c", broker.Place{Offset: 490})
				Expect(err).NotTo(HaveOccurred())
				Expect(at).To(BeEquivalentTo(490))
				Expect(t.Stats().Channels[0].Ready).To(Equal(10))
				Expect(again(t, "c", 10)).To(Equal(numbers(490, 500)))
				_, err = t.Seek("c", broker.Place{Begin: true})
				Expect(err).NotTo(HaveOccurred())
				Expect(again(t, "c", 500)).To(Equal(numbers(0, 500)))
				Expect(other.count()).To(BeZero(), "it is another channel's")

				By("seeking past the process's end")
				other.sub.Close()
				end()
				b, _ = retaining(path, through)
				t = topic(b, "t")
				_, err = t.Seek("c", broker.Place{Begin: true})
				Expect(err).NotTo(HaveOccurred())
				Expect(again(t, "c", 500)).To(Equal(numbers(0, 500)))
				at, err = t.Seek("c", broker.Place{End: true})
				Expect(err).NotTo(HaveOccurred())
				Expect(at).To(BeEquivalentTo(500))
				_, err = t.Seek("c", broker.Place{Offset: 501})
				Expect(err).To(MatchError(broker.ErrSeek))
				Expect(t.Stats().Channels[0].Counters.Lost).To(BeZero())
			})
		})
	}

	It("gets again what was finished, also where the process ended before it wrote to disk for the first time", func() {
		for range 20 { // whether the first write comes before the end is up to the scheduler
			path := GinkgoT().TempDir()
			b, end := retaining(path, false)
			t := topic(b, "t")
			sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
			Expect(err).NotTo(HaveOccurred())
			Expect(sub.Ready(100)).To(Succeed())
			publishAll(t, 0, 5)
			var out broker.Outgoing
			for n := 0; n < 5; n += len(messages(&out)) {
				out.Reset()
				Expect(sub.Take(&out, plenty)).To(BeTrue())
				sub.Wrote(&out)
				for _, m := range messages(&out) {
					Expect(sub.Finish(m.ID)).To(Succeed())
				}
			}
			end()
			b, end = retaining(path, false)
			t = topic(b, "t")
			_, err = t.Seek("c", broker.Place{Begin: true})
			Expect(err).NotTo(HaveOccurred())
			Expect(again(t, "c", 5)).To(Equal(numbers(0, 5)))
			end()
		}
	})

	It("holds nothing of what it held: FIN is refused, what is deferred comes at once, or not", func() {
		b, _ := retaining(GinkgoT().TempDir(), true)
		t := topic(b, "t")
		r := read(t, "c", 2, false)
		publishAll(t, 0, 3)
		Eventually(r.count).Should(Equal(2))
		now := clock.Mono()
		Expect(t.Publish(now, clock.Wall(), broker.Published{Body: []byte("3"), Arrival: stamp.Arrival{At: now}, Defer: time.Hour})).To(Succeed())
		Expect(t.PauseChannel("c")).To(Succeed()) // otherwise the channel has the next message at once
		Expect(r.sub.Requeue(r.deliveries()[0].ID, time.Hour)).To(Succeed())
		_, err := t.Seek("c", broker.Place{Begin: true})
		Expect(err).NotTo(HaveOccurred())
		Expect(r.sub.Finish(r.deliveries()[1].ID)).To(MatchError(queue.ErrNotInFlight))
		Expect(t.UnpauseChannel("c")).To(Succeed())
		Eventually(func() []string { return bodies(r)[2:] }).Should(Equal([]string{"0", "1"}), "with attempts from 1")
		Expect(r.deliveries()[2].Attempts).To(BeEquivalentTo(1))
		Eventually(func() int { return t.Stats().Channels[0].Deferred }).Should(Equal(1), "a deferred publish keeps its time")
		_, err = t.Seek("c", broker.Place{End: true})
		Expect(err).NotTo(HaveOccurred())
		Expect(t.Stats().Channels[0]).To(And(HaveField("Ready", 0), HaveField("InFlight", 0), HaveField("Deferred", 0)))
	})

	It("begins at a time, on disk or in memory", func() {
		b, _ := retaining(GinkgoT().TempDir(), false)
		t := topic(b, "t")
		at := func(i int) mono.Wall { return mono.Wall(time.Hour) + mono.Wall(i)*mono.Wall(time.Second) }
		Expect(t.CreateChannel("c")).To(Succeed())
		for i := range 300 {
			for {
				now := clock.Mono()
				err := t.Publish(now, at(i), broker.Published{Body: []byte(strconv.Itoa(i)), Arrival: stamp.Arrival{At: now}})
				if err == nil {
					break
				}
				Expect(err).To(MatchError(queue.ErrFull))
			}
		}
		for _, from := range []int{0, 100, 299} {
			_, err := t.Seek("c", broker.Place{Time: at(from)})
			Expect(err).NotTo(HaveOccurred())
			Expect(again(t, "c", 300-from)).To(Equal(numbers(from, 300)))
		}
		_, err := t.Seek("c", broker.Place{Time: at(300)})
		Expect(err).NotTo(HaveOccurred())
		Expect(inFlight(t)).To(BeZero())
	})

	It("begins at a time in memory also where the log has none of what is before it", func() {
		disk := newFaulty()
		b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {}, func(c *broker.StorageConfig) { c.Disk = &disk.Disk })
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, 30)
		again(t, "c", 30)
		disk.unwritable.Store(true)
		publishAll(t, 30, 60) // on their way to the log, and finished before they are stored
		again(t, "c", 30)
		disk.unwritable.Store(false)
		Eventually(t.Spilling).Should(BeZero())
		publishAll(t, 60, 68)
		_, err := t.Seek("c", broker.Place{Time: clock.Wall() + mono.Wall(time.Hour)})
		Expect(err).NotTo(HaveOccurred())
		Expect(inFlight(t)).To(BeZero())
	})

	It("stays paused, and refuses where there is no log", func() {
		b, _ := retaining(GinkgoT().TempDir(), true)
		t := topic(b, "t")
		finishedAll(t, "c", 0, 20).sub.Close()
		Expect(t.PauseChannel("c")).To(Succeed())
		_, err := t.Seek("c", broker.Place{Begin: true})
		Expect(err).NotTo(HaveOccurred())
		r := read(t, "c", 100, true)
		Expect(t.Stats().Channels[0].Ready).To(Equal(20))
		Expect(r.count()).To(BeZero())
		Expect(t.UnpauseChannel("c")).To(Succeed())
		Eventually(r.count).Should(Equal(20))

		_, err = t.Seek("none", broker.Place{End: true})
		Expect(err).To(MatchError(broker.ErrUnknownChannel))
		Expect(t.CreateChannel("e#ephemeral")).To(Succeed())
		_, err = t.Seek("e#ephemeral", broker.Place{Begin: true})
		Expect(err).To(MatchError(queue.ErrNoCursor))
		memory := topic(b, "m#ephemeral")
		Expect(memory.CreateChannel("c")).To(Succeed())
		_, err = memory.Seek("c", broker.Place{Begin: true})
		Expect(err).To(MatchError(queue.ErrNoCursor))
		Expect(memory.Retain(nil)).To(MatchError(queue.ErrNoCursor))
	})

	It("is moved by the control plane, which gets the reason of a failure", func() {
		b, _ := retaining(GinkgoT().TempDir(), true)
		t := topic(b, "t")
		finishedAll(t, "c", 0, 20).sub.Close()
		Expect(t.CreateChannel("e#ephemeral")).To(Succeed())
		seek := func(topic, channel string, to *srtmv1.Place) string {
			r := b.Node().Seek(topic, channel, to, false)
			Expect(r.Error == "").To(Equal(r.Reason == ""))
			return fmt.Sprint(r.Offset, r.Reason)
		}
		begin := &srtmv1.Place{To: &srtmv1.Place_Begin{Begin: &emptypb.Empty{}}}
		end := &srtmv1.Place{To: &srtmv1.Place_End{End: &emptypb.Empty{}}}
		at := func(offset uint64) *srtmv1.Place { return &srtmv1.Place{To: &srtmv1.Place_Offset{Offset: offset}} }
		Expect(seek("t", "c", at(15))).To(Equal("15"))
		Expect(again(t, "c", 5)).To(HaveLen(5))
		Expect(seek("t", "c", begin)).To(Equal("0"))
		Expect(seek("t", "c", end)).To(Equal("20"))
		Expect(seek("t", "c", &srtmv1.Place{To: &srtmv1.Place_Time{Time: timestamppb.New(time.Unix(0, 0))}})).To(Equal("0"))
		Expect(again(t, "c", 20)).To(HaveLen(20))
		Expect(seek("t", "c", at(21))).To(Equal("0OFFSET_BEYOND_END"))
		Expect(seek("t", "c", nil)).To(Equal("0BROKER_FAILED"))
		Expect(seek("t", "none", end)).To(Equal("0CHANNEL_UNKNOWN"))
		Expect(seek("none", "c", end)).To(Equal("0TOPIC_UNKNOWN"))
		Expect(seek("t", "e#ephemeral", begin)).To(Equal("0NO_CURSOR"))
	})

	It("does not get what was emptied out of the topic", func() {
		b, _ := retaining(GinkgoT().TempDir(), true)
		t := topic(b, "t")
		finishedAll(t, "c", 0, 5).sub.Close()
		t.Pause()
		publishAll(t, 5, 10)
		t.Empty()
		t.Unpause()
		publishAll(t, 10, 15)
		_, err := t.Seek("c", broker.Place{Begin: true})
		Expect(err).NotTo(HaveOccurred())
		Expect(again(t, "c", 10)).To(Equal(append(numbers(0, 5), numbers(10, 15)...)))
	})
})

// logFiles returns how many segments a topic has on disk.
func logFiles(path, topic string) int {
	GinkgoHelper()
	files, err := filepath.Glob(filepath.Join(path, topic+".log", "*.seg"))
	Expect(err).NotTo(HaveOccurred())
	return len(files)
}

var _ = Describe("retention", func() {
	It("keeps what is done for so long, and what is not done for ever", func() {
		path := GinkgoT().TempDir()
		b, end := retaining(path, true, func(c *broker.StorageConfig) { c.SegmentBytes, c.Retain = 1<<10, metadata.Retention{} })
		t := topic(b, "t")
		Expect(t.Retain(&metadata.Retention{Bytes: 4 << 10})).To(Succeed())
		finishedAll(t, "c", 0, 300).sub.Close()
		Eventually(func() int { return logFiles(path, "t") }).Should(BeNumerically("<=", 6))
		Expect(logFiles(path, "t")).To(BeNumerically(">=", 4))
		b.Recorded()
		end()
		b, _ = retaining(path, true, func(c *broker.StorageConfig) { c.SegmentBytes, c.Retain = 1<<10, metadata.Retention{} })
		t = topic(b, "t")
		Expect(logFiles(path, "t")).To(BeNumerically(">=", 4), "its own retention is recorded")
		at, err := t.Seek("c", broker.Place{Begin: true})
		Expect(err).NotTo(HaveOccurred())
		Expect(at).To(And(BeNumerically(">", 100), BeNumerically("<", 290)), "the oldest that is retained")
		Expect(again(t, "c", 300-int(at))).To(Equal(numbers(int(at), 300)))

		By("keeping none from now on")
		Expect(t.Retain(nil)).To(Succeed())
		finishedAll(t, "c", 300, 301).sub.Close()
		Eventually(func() int { return logFiles(path, "t") }).Should(BeZero())
		publishAll(t, 301, 401)
		Consistently(func() int { return t.Stats().Channels[0].Ready }, "300ms").Should(Equal(100))
	})

	It("ends by itself in a topic that rests, after a restart and when there is none any more", func() {
		path := GinkgoT().TempDir()
		set := func(c *broker.StorageConfig) {
			c.SegmentBytes, c.Retain = 1<<10, metadata.Retention{Bytes: 4 << 10}
		}
		b, end := retaining(path, true, set)
		finishedAll(topic(b, "t"), "c", 0, 300).sub.Close()
		end()
		b, end = retaining(path, true, set, func(c *broker.StorageConfig) { c.Retain.Bytes = 2 << 10 })
		topic(b, "t").TrimOld()
		Expect(logFiles(path, "t")).To(BeNumerically("<=", 3))
		Expect(topic(b, "t").Retain(&metadata.Retention{})).To(Succeed())
		topic(b, "t").TrimOld()
		Expect(logFiles(path, "t")).To(BeZero())
		end()
	})

	It("does not count for --max-log-bytes", func() {
		path := GinkgoT().TempDir()
		set := func(c *broker.StorageConfig) { c.SegmentBytes, c.MaxLogBytes = 1<<10, 3<<10 }
		b, end := retaining(path, true, set)
		t := topic(b, "t")
		r := read(t, "c", 100, true)
		publishAll(t, 0, 300)
		Eventually(r.count).Should(Equal(300))
		r.sub.Close()
		Eventually(t.Spilling).Should(BeZero())
		end()
		b, _ = retaining(path, true, set)
		t = topic(b, "t")
		Expect(t.CreateChannel("e#ephemeral")).To(Succeed())
		_, err := t.Seek("e#ephemeral", broker.Place{Begin: true})
		Expect(err).To(MatchError(queue.ErrNoCursor))
		for i := 0; ; i++ {
			if errors.Is(publish(t, "x"), queue.ErrFull) {
				Expect(i).To(BeNumerically(">", 10), "neither a restart nor a seek that was refused needs anything")
				break
			}
			Expect(i).To(BeNumerically("<", 100))
		}
	})
})

func bodiesOf(messages []broker.Peeked) (all []string) {
	for _, m := range messages {
		all = append(all, string(m.Body))
	}
	return all
}

var _ = Describe("peeking", func() {
	It("shows what comes next, in memory and on disk, and takes nothing", func() {
		for _, through := range []bool{false, true} {
			b, _ := retaining(GinkgoT().TempDir(), through)
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			publishAll(t, 0, 300)
			Eventually(func() int { return t.Stats().Channels[0].Ready }).Should(Equal(300))
			shown := func(n int) (all []string) {
				GinkgoHelper()
				messages, err := t.Peek("c", n)
				Expect(err).NotTo(HaveOccurred())
				for i, m := range messages {
					Expect(m.Offset).To(BeEquivalentTo(i))
					all = append(all, string(m.Body))
				}
				return all
			}
			Expect(shown(1)).To(Equal(numbers(0, 1)))
			Expect(shown(5)).To(Equal(numbers(0, 5)), "of memory")
			Expect(shown(250)).To(Equal(numbers(0, 250)), "and of the disk")
			Expect(shown(1000)).To(Equal(numbers(0, 300)))
			Expect(again(t, "c", 300)).To(Equal(numbers(0, 300)))
			Expect(shown(10)).To(BeEmpty())
			_, err := t.Peek("none", 1)
			Expect(err).To(MatchError(broker.ErrUnknownChannel))
		}
	})

	It("shows what a seek brings back while that is read", func() {
		b, _ := retaining(GinkgoT().TempDir(), true)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, 50)
		Eventually(func() int { return t.Stats().Channels[0].Ready }).Should(Equal(50))
		for i := range 200 {
			from := i * 7 % 48
			_, err := t.Seek("c", broker.Place{Offset: uint64(from)})
			Expect(err).NotTo(HaveOccurred())
			for range 3 {
				messages, err := t.Peek("c", 2)
				Expect(err).NotTo(HaveOccurred())
				Expect(bodiesOf(messages)).To(Equal(numbers(from, from+2)))
			}
		}
	})

	It("is bounded in bytes, and shows what was restored", func() {
		path := GinkgoT().TempDir()
		b, end := retaining(path, true)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		large := strings.Repeat("x", 300<<10)
		for range 8 {
			Expect(publish(t, large)).To(Succeed())
		}
		messages, err := t.Peek("c", 100)
		Expect(err).NotTo(HaveOccurred())
		Expect(messages).To(HaveLen(3))
		end()
		b, _ = retaining(path, true)
		messages, err = topic(b, "t").Peek("c", 2)
		Expect(err).NotTo(HaveOccurred())
		Expect(messages).To(HaveLen(2))
		Expect(string(messages[1].Body)).To(Equal(large))
	})
})

var _ = Describe("a channel whose consumer never finishes one message", func() {
	It("gets no more at the bound, reports that, and stops neither the others nor publishers", func() {
		const total = 2000
		b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {}, func(c *broker.StorageConfig) { c.MaxUnfinished = 50 })
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		stuck, other := read(t, "stuck", 10, false), read(t, "other", 10, true)
		next, first := 0, wire.MessageID{} // the next delivery to finish, and the message that is not finished
		finish := func() int {
			all := stuck.deliveries()
			for ; next < len(all); next++ {
				if d := all[next]; string(d.Body) == "0" {
					first = d.ID
				} else if err := stuck.sub.Finish(d.ID); err != nil {
					Fail(err.Error())
				}
			}
			return len(all)
		}
		publishAll(t, 0, total)
		Eventually(other.count).Should(Equal(total))
		Eventually(finish).WithPolling(time.Millisecond).Should(Equal(50))
		Consistently(finish, "100ms").Should(Equal(50))
		stats := t.Stats()
		Expect(stats.Channels[0]).To(And(HaveField("Name", "other"), HaveField("Full", false)))
		Expect(stats.Channels[1]).To(And(HaveField("Unfinished", 50), HaveField("Full", true), HaveField("Ready", total-50)))
		Expect(stats.Memory).To(BeNumerically("<", 100<<10))
		Expect(stuck.sub.Finish(first)).To(Succeed())
		Eventually(finish).WithPolling(time.Millisecond).Should(Equal(total))
		Expect(t.Stats().Channels[1].Full).To(BeFalse())
	})
})

var _ = Describe("an order that was answered", func() {
	It("stands after a crash: seek, empty, delete, and delete of a topic", func() {
		path := GinkgoT().TempDir()
		b, _ := retaining(path, true, func(c *broker.StorageConfig) { c.Retain = metadata.Retention{} })
		t := topic(b, "t")
		for _, c := range []string{"emptied", "sought", "deleted"} {
			Expect(t.CreateChannel(c)).To(Succeed())
		}
		publishAll(t, 0, 20)
		gone := topic(b, "gone")
		Expect(gone.CreateChannel("c")).To(Succeed())
		publishAll(gone, 0, 20)

		Expect(t.EmptyChannel("emptied")).To(Succeed())
		_, err := t.Seek("sought", broker.Place{Offset: 15})
		Expect(err).NotTo(HaveOccurred())
		Expect(t.DeleteChannel("deleted")).To(Succeed())
		Expect(t.CreateChannel("deleted")).To(Succeed()) // another channel of the same name
		Expect(b.DeleteTopic("gone")).To(Succeed())
		b.Recorded()

		b, _ = retaining(crashed(path), true)
		t = topic(b, "t")
		depths := map[string]int{}
		for _, c := range t.Stats().Channels {
			depths[c.Name] = c.Ready
		}
		Expect(depths).To(Equal(map[string]int{"emptied": 0, "sought": 5, "deleted": 0}))
		_, err = b.Topic([]byte("gone"))
		Expect(err).To(MatchError(broker.ErrUnknownTopic))
	})

	It("stands after a crash: a seek where all was done and the topic rested", func() {
		for _, through := range []bool{false, true} {
			path := GinkgoT().TempDir()
			b, _ := retaining(path, through)
			t := topic(b, "t")
			finishedAll(t, "c", 0, 100).sub.Close()
			Eventually(t.Spilling).Should(BeZero())
			_, err := t.Seek("c", broker.Place{Offset: 50})
			Expect(err).NotTo(HaveOccurred())
			b.Recorded()
			b, _ = retaining(crashed(path), through)
			Expect(held(b, "c")).To(Equal(50), "through the disk: %v", through)
		}
	})

	It("waits for the removal of a topic's log", func() {
		disk := commitlog.OS()
		var removed atomic.Bool
		rename := disk.Rename
		disk.Rename = func(from, to string) error {
			err := rename(from, to)
			if filepath.Ext(to) == ".removed" {
				removed.Store(true)
			}
			return err
		}
		b := on(&disk, GinkgoT().TempDir())
		Expect(durably(topic(b, "t"), "old")).To(Succeed())
		Expect(b.DeleteTopic("t")).To(Succeed())
		Expect(removed.Load()).To(BeTrue())
	})
})
