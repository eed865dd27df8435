package broker_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tokenbucket"
)

// stored opens a broker over a folder. stop ends the broker as the end of a process would.
func stored(path string, fsync bool) (b *broker.Broker, stop func()) {
	return restored(path, 10, fsync)
}

// storedWith is stored with a change to the configuration, and functions to call before the broker is restored.
func storedWith(path string, change func(*broker.Config), before ...func(*broker.Broker)) *broker.Broker {
	GinkgoHelper()
	b, _ := opened(path, change)
	for _, do := range before {
		do(b)
	}
	Expect(b.Restore()).To(Succeed())
	return b
}

// clocked returns begin, which starts a broker on one folder with a wall clock that set moves.
func clocked(fsync bool) (begin func() (b *broker.Broker, stop func()), set *atomic.Int64) {
	path, set := GinkgoT().TempDir(), new(atomic.Int64)
	return func() (*broker.Broker, func()) {
		GinkgoHelper()
		b, stop := opened(path, func(*broker.Config) {}, func(c *broker.StorageConfig) {
			c.Fsync = fsync
			c.Clocks = func() (mono.Time, mono.Wall) { return clock.Mono(), clock.Wall() + mono.Wall(set.Load()) }
		})
		Expect(b.Restore()).To(Succeed())
		return b, stop
	}, set
}

// opened is a broker that is not restored yet.
func opened(path string, change func(*broker.Config), set ...func(*broker.StorageConfig)) (b *broker.Broker, end func()) {
	GinkgoHelper()
	storage := broker.StorageConfig{
		Path: path, Metadata: filepath.Join(path, "metadata.json"), SegmentBytes: 64 << 10, MaxRecord: 1 << 20, Overflow: 100, Log: slog.New(slog.NewTextHandler(GinkgoWriter, nil)),
	}
	for _, do := range set {
		do(&storage)
	}
	st, err := broker.OpenStorage(storage)
	Expect(err).NotTo(HaveOccurred())
	cfg := broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st}
	change(&cfg)
	b, err = broker.New(cfg)
	Expect(err).NotTo(HaveOccurred())
	end = sync.OnceFunc(func() {
		Expect(b.Close()).To(Succeed())
		Expect(st.Close()).To(Succeed())
	})
	DeferCleanup(end)
	return b, end
}

// publishAll publishes the numbers and waits while the topic is full.
func publishAll(t *broker.Topic, from, to int) {
	GinkgoHelper()
	tb, deadline := GinkgoTB(), time.Now().Add(testkit.Hang)
	for i := from; i < to; i++ {
		err := publish(t, strconv.Itoa(i))
		for ; errors.Is(err, queue.ErrFull) && time.Now().Before(deadline); err = publish(t, strconv.Itoa(i)) {
			runtime.Gosched()
		}
		testkit.Must(tb, err)
	}
}

func bodies(r *reader) (all []string) {
	for _, d := range r.deliveries() {
		all = append(all, string(d.Body))
	}
	return all
}

func numbers(from, to int) (all []string) {
	for i := from; i < to; i++ {
		all = append(all, strconv.Itoa(i))
	}
	return all
}

var _ = Describe("a broker with a disk", func() { storing(false) })

var _ = Describe("a broker that stores before it accepts", func() {
	storing(true)

	It("has on disk the accepted messages, and no finished message", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, true)
		t := topic(b, "t")
		Expect(t.Durable()).To(BeTrue())
		r := read(t, "c", 100, true)
		publishAll(t, 0, 499)
		Expect(durably(t, "499")).To(Succeed())
		Eventually(r.count).Should(Equal(500))
		Eventually(func() int { return t.Stats().Channels[0].InFlight }).Should(BeZero())
		stop()
		files, err := os.ReadDir(path)
		Expect(err).NotTo(HaveOccurred())
		for _, f := range files {
			Expect(f.Name()).NotTo(HavePrefix("t."))
		}
	})

	It("keeps an ephemeral topic in memory", func() {
		b, _ := stored(GinkgoT().TempDir(), true)
		t := topic(b, "t#ephemeral")
		Expect(t.Durable()).To(BeFalse())
		r := read(t, "c#ephemeral", 10, true)
		Expect(publish(t, "x")).To(Succeed())
		Eventually(r.count).Should(Equal(1))
	})
})

// storing describes the guarantees of both modes.
func storing(fsync bool) {
	const total = 5000
	stored := func(path string) (*broker.Broker, func()) {
		GinkgoHelper()
		return stored(path, fsync)
	}

	It("keeps what does not fit into memory, in order, for every channel", func() {
		b, _ := stored(GinkgoT().TempDir())
		t := topic(b, "t")
		Expect(t.CreateChannel("slow")).To(Succeed())
		fast := read(t, "fast", 100, true)
		publishAll(t, 0, total)
		Eventually(fast.count).Should(Equal(total))
		Expect(bodies(fast)).To(Equal(numbers(0, total)))
		slow := read(t, "slow", 3, true)
		Eventually(slow.count).Should(Equal(total))
		Expect(bodies(slow)).To(Equal(numbers(0, total)))
	})

	It("deletes the files of what was taken", func() {
		path := GinkgoT().TempDir()
		b, _ := stored(path)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, total) // many files of 64 KiB
		Eventually(func() int { return t.Stats().Disk.Segments }).Should(BeNumerically(">", 3))
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(total))
		Eventually(func() int { return t.Stats().Disk.Segments }).Should(BeZero())
		Eventually(func() ([]string, error) { return filepath.Glob(filepath.Join(path, "*.log", "*.seg")) }).Should(BeEmpty(), "they go just after they count no more")
	})

	It("resumes after a restart at the same message, with attempts and order", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, total)
		held := read(t, "c", 5, false)
		Eventually(held.count).Should(Equal(5))
		Expect(topic(b, "waits").Name()).To(Equal("waits"))
		publishAll(topic(b, "waits"), 0, 300) // no channel: all in the topic's own backlog
		stop()

		b, stop = stored(path)
		t = topic(b, "t")
		r := read(t, "c", 50, true)
		Eventually(r.count).Should(Equal(total))
		Expect(bodies(r)).To(Equal(numbers(0, total)))
		Expect(r.deliveries()[0].Attempts).To(BeEquivalentTo(2), "it was delivered once before the restart")
		Expect(r.deliveries()[5].Attempts).To(BeEquivalentTo(1))
		w := read(topic(b, "waits"), "c", 50, true)
		Eventually(w.count).Should(Equal(300))
		Expect(bodies(w)).To(Equal(numbers(0, 300)))
		for _, t := range b.Topics() {
			Eventually(func() int { return t.Stats().Channels[0].InFlight }).Should(BeZero())
		}
		stop()

		b, _ = stored(path)
		for _, t := range b.Topics() {
			s := t.Stats()
			Expect(s.Waiting+s.Channels[0].Ready+s.Channels[0].Deferred).To(BeZero(), "nothing was left")
		}
		Expect(filepath.Glob(filepath.Join(path, "*.log"))).To(BeEmpty())
	})

	It("has removed the log of an unused topic when it says so, or a crash would bring the topic back", func() {
		path := GinkgoT().TempDir()
		b, _ := stored(path)
		for i := range 20 {
			t := topic(b, fmt.Sprint("t", i))
			Expect(t.CreateChannel("c")).To(Succeed())
			Expect(t.Retain(&metadata.Retention{Age: time.Hour})).To(Succeed())
			publishAll(t, 0, 50)
			r := read(t, "c", 50, true)
			Eventually(r.count).Should(Equal(50))
			Eventually(func() int { return t.Stats().Channels[0].InFlight }).Should(BeZero())
			Expect(b.DeleteUnused(t.Name())).To(Succeed())
			Expect(filepath.Glob(filepath.Join(path, t.Name()+".log"))).To(BeEmpty())
		}
	})

	It("leaves to the next process what it is too late to delete", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, 50)
		Expect(b.Close()).To(Succeed())
		Expect(b.DeleteTopic("t")).To(MatchError(broker.ErrDraining))
		Expect(b.DeleteUnused("t")).NotTo(Succeed())
		Expect(t.DeleteChannel("c")).To(MatchError(broker.ErrDraining))
		stop()
		b, _ = stored(path)
		r := read(topic(b, "t"), "c", 50, true)
		Eventually(r.count).Should(Equal(50))
	})

	It("keeps the eligible order and times of a limited topic over the disk", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path)
		t := topic(b, "t")
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(2000), Burst: 5}, false)
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, 1000)
		stop()
		b, _ = stored(path)
		t = topic(b, "t")
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(2000), Burst: 5}, false)
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(1000))
		Expect(bodies(r)).To(Equal(numbers(0, 1000)))
	})

	It("forgets what is emptied or deleted, on disk too", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(t.CreateChannel("d")).To(Succeed())
		publishAll(t, 0, 1000)
		Eventually(func() int { return t.Stats().Waiting }).Should(BeZero())
		Expect(t.EmptyChannel("c")).To(Succeed())
		Expect(t.DeleteChannel("d")).To(Succeed())
		publishAll(t, 1000, 2000)
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(1000))
		Expect(bodies(r)).To(Equal(numbers(1000, 2000)))
		publishAll(topic(b, "gone"), 0, 500)
		Expect(b.DeleteTopic("gone")).To(Succeed())
		stop()
		files, err := os.ReadDir(path)
		Expect(err).NotTo(HaveOccurred())
		for _, f := range files {
			Expect(f.Name()).NotTo(Or(ContainSubstring("gone"), ContainSubstring("#d"), ContainSubstring("#c")), "left behind")
		}
	})

	It("skips a damaged file, counts what is lost, and delivers the rest", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path)
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		publishAll(t, 0, total)
		Eventually(func() int { return t.Stats().Waiting }).Should(BeZero())
		stop()
		var segments []string
		Expect(filepath.Walk(path, func(p string, i os.FileInfo, err error) error {
			if err == nil && i.Size() > 40<<10 {
				segments = append(segments, p)
			}
			return err
		})).To(Succeed())
		Expect(len(segments)).To(BeNumerically(">", 2))
		f, err := os.OpenFile(segments[1], os.O_WRONLY, 0)
		Expect(err).NotTo(HaveOccurred())
		_, err = f.WriteAt([]byte("rotten"), 30<<10)
		Expect(errors.Join(err, f.Close())).NotTo(HaveOccurred())

		b, _ = stored(path)
		t = topic(b, "t")
		r := read(t, "c", 100, true)
		lost := func() uint64 { return t.Stats().Channels[0].Counters.Lost }
		Eventually(func() int { return r.count() + int(lost()) }).Should(Equal(total))
		Expect(lost()).To(And(BeNumerically(">", 0), BeNumerically("<", total/2)))
	})

	It("does not lose a message when it is stopped under load", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path)
		t := topic(b, "t")
		seen := map[string]int{}
		r := read(t, "c", 20, true)
		accepted := 0
		for r.count() < 200 {
			if err := publish(t, fmt.Sprint(accepted)); err == nil {
				accepted++
			}
		}
		stop()
		for _, s := range bodies(r) {
			seen[s]++
		}
		b, _ = stored(path)
		again := read(topic(b, "t"), "c", 20, true)
		Eventually(func() int {
			all := map[string]bool{}
			for s := range seen {
				all[s] = true
			}
			for _, s := range bodies(again) {
				all[s] = true
			}
			return len(all)
		}).Should(Equal(accepted))
	})
}

var _ = Describe("a stored topic that is deleted while clients publish", func() {
	for _, fsync := range []bool{false, true} {
		It(fmt.Sprintf("leaves nothing in the way of its successor: fsync=%v", fsync), func() {
			path := GinkgoT().TempDir()
			b, stop := stored(path, fsync)
			over := make(chan struct{})
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					defer GinkgoRecover()
					for {
						select {
						case <-over:
							return
						default:
						}
						t := topic(b, "t")
						for range 20 { // more than memory holds
							if err := publish(t, "old"); errors.Is(err, broker.ErrGone) {
								break
							}
							runtime.Gosched() // the topic may be full
						}
					}
				})
			}
			for range 100 {
				if err := b.DeleteTopic("t"); err != nil {
					Expect(err).To(MatchError(broker.ErrUnknownTopic))
				}
				runtime.Gosched()
			}
			close(over)
			wg.Wait()
			if err := b.DeleteTopic("t"); err != nil {
				Expect(err).To(MatchError(broker.ErrUnknownTopic))
			}
			// Deleted messages may take a moment to leave the disk.
			Eventually(func() error { return publish(topic(b, "t"), "0") }).Should(Succeed())
			publishAll(topic(b, "t"), 1, 300)
			r := read(topic(b, "t"), "c", 50, true)
			Eventually(r.count).Should(Equal(300))
			Expect(bodies(r)).To(Equal(numbers(0, 300)))
			stop()
		})
	}
})

var _ = Describe("a broker that a loaddistributor places topics on", func() {
	It("releases nothing of a topic it restored before its share has come", func() {
		path := GinkgoT().TempDir()
		b, stop := stored(path, false)
		publishAll(topic(b, "t"), 0, 100)
		stop()
		b = storedWith(path, func(c *broker.Config) { c.AutoCreate = false })
		t, err := b.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		r := read(t, "c", 50, true)
		Expect(publish(t, "100")).To(Succeed())
		Expect(t.Stats().Counters.Released).To(BeZero(), "the contract may be in use elsewhere")
		node := b.Node()
		Expect(node.Prepare("t", listed("c"), 1, time.Second, 0.99, 0, nil)).Error().NotTo(HaveOccurred())
		_, err = grant(node, "t", tokenbucket.Share{Rate: tokenbucket.PerSecond(1e5), Burst: 10}, 0)
		Expect(err).NotTo(HaveOccurred())
		Eventually(r.count).Should(Equal(101))
		Expect(bodies(r)).To(Equal(numbers(0, 101)))
	})
})

var _ = Describe("a broker whose machine's clock was put", func() {
	for _, fsync := range []bool{false, true} {
		for _, step := range []time.Duration{-time.Hour, time.Hour} {
			It(fmt.Sprintf("by %v before its start delivers what was stored (fsync %t)", step, fsync), func() {
				path := GinkgoT().TempDir()
				b, stop := stored(path, fsync)
				t := topic(b, "t")
				Expect(t.CreateChannel("c")).To(Succeed())
				publishAll(t, 0, 50)
				now := b.Now()
				Expect(t.Publish(now, 1, broker.Published{Body: []byte("later"), Arrival: stamp.Arrival{At: now}, Defer: 2 * time.Hour})).To(Succeed())
				publishAll(topic(b, "waits"), 0, 50) // for a channel
				stop()

				b, _ = opened(path, func(*broker.Config) {}, func(c *broker.StorageConfig) {
					c.Fsync = fsync
					c.Clocks = func() (mono.Time, mono.Wall) { return clock.Mono(), clock.Wall() + mono.Wall(step) }
				})
				Expect(b.Restore()).To(Succeed())
				r, w := read(topic(b, "t"), "c", 50, true), read(topic(b, "waits"), "c", 50, true)
				Eventually(r.count).Should(Equal(50))
				Eventually(w.count).Should(Equal(50))
				Expect(bodies(w)).To(Equal(numbers(0, 50)))
				Eventually(func() int { return topic(b, "t").Stats().Channels[0].Deferred }).Should(Equal(1), "it is not due by either clock")
			})

			It(fmt.Sprintf("by %v while it ran has what is deferred due when it was to be (fsync %t)", step, fsync), func() {
				begin, set := clocked(fsync)
				b, stop := begin()
				t := topic(b, "t")
				Expect(t.CreateChannel("c")).To(Succeed())
				for body, after := range map[string]time.Duration{"soon": time.Millisecond, "later": 50 * time.Minute} {
					now := b.Now()
					Expect(t.Publish(now, 1, broker.Published{Body: []byte(body), Arrival: stamp.Arrival{At: now}, Defer: after})).To(Succeed())
				}
				Eventually(func() int { return t.Stats().Waiting }).Should(BeZero())
				set.Store(int64(step))
				stop()
				b, _ = begin()
				r := read(topic(b, "t"), "c", 50, true)
				Eventually(r.count).Should(BeNumerically(">=", 1))
				Eventually(func() int { return topic(b, "t").Stats().Channels[0].InFlight }).Should(BeZero())
				Expect(bodies(r)).To(Equal([]string{"soon"}))
				Expect(topic(b, "t").Stats().Channels[0].Deferred).To(Equal(1))
			})

			It(fmt.Sprintf("by %v while it ran knows the age of each message, before and after a restart (fsync %t)", step, fsync), func() {
				begin, set := clocked(fsync)
				b, stop := begin()
				t := topic(b, "t")
				Expect(t.SetExpiry(expiry.Settings{TTL: 30 * time.Minute})).To(Succeed())
				for _, channel := range []string{"c", "d"} {
					Expect(t.CreateChannel(channel)).To(Succeed())
				}
				publishAll(t, 0, 50) // most of the messages go to disk
				Eventually(func() int { return t.Stats().Waiting }).Should(BeZero())
				set.Store(int64(step))
				publishAll(t, 50, 100)
				Eventually(func() int { return t.Stats().Waiting }).Should(BeZero())
				r := read(t, "c", 50, true)
				Eventually(r.count).Should(Equal(100))
				publishAll(t, 100, 120)
				now := b.Now()
				Expect(t.Publish(now, 1, broker.Published{Body: []byte("later"), Arrival: stamp.Arrival{At: now}, Defer: 20 * time.Minute})).To(Succeed())
				Eventually(r.count).Should(Equal(120))
				stop()
				b, _ = begin()
				r = read(topic(b, "t"), "d", 200, true)
				Eventually(r.count).Should(BeNumerically(">=", 70), "the age of messages from before the step is not known")
				Expect(bodies(r)).To(ContainElements(numbers(50, 120)))
				Expect(bodies(r)).NotTo(ContainElement("later"))
			})
		}
	}
})

var _ = Describe("a broker that stores before it accepts, after a crash", func() {
	// depth returns the whole depth of a channel.
	depth := func(b *broker.Broker, channel string) func() int {
		return func() int {
			for _, c := range topic(b, "t").Stats().Channels {
				if c.Name == channel {
					return c.Ready + c.InFlight + c.Deferred
				}
			}
			return -1
		}
	}

	It("does not give a channel again what that has stored", func() {
		path := GinkgoT().TempDir()
		b, _ := stored(path, true)
		t := topic(b, "t")
		for _, c := range []string{"a", "b"} {
			Expect(t.CreateChannel(c)).To(Succeed())
		}
		b.Recorded()
		for round := range 3 { // files of an earlier process, and then of another
			from := round * 100
			publishAll(topic(b, "t"), from, from+100)
			for _, c := range []string{"a", "b"} {
				Eventually(depth(b, c)).Should(Equal(from + 100))
				// All messages are in the channel's disk queue, except those read ahead.
				Eventually(func() int { return topic(b, "t").Stats().Waiting }).Should(BeZero())
			}
			// Chance decides which messages a file has and which the topic had not finished with, but each message is
			// somewhere.
			path = crashed(path)
			b, _ = stored(path, true)
			Eventually(func() int { return topic(b, "t").Stats().Waiting }).Should(BeZero())
		}
		for _, c := range []string{"a", "b"} {
			r := read(topic(b, "t"), c, 50, true)
			Eventually(r.count).Should(BeNumerically(">=", 300))
			Eventually(depth(b, c)).Should(BeZero())
			Expect(bodies(r)).To(Equal(numbers(0, 300)))
		}
	})

	It("does not deliver again what was finished, once that was recorded", func() {
		path := GinkgoT().TempDir()
		b, _ := stored(path, true)
		t := topic(b, "t")
		r := read(t, "c", 50, true)
		Expect(t.CreateChannel("slow")).To(Succeed())
		publishAll(t, 0, 200)
		Eventually(r.count).Should(Equal(200))
		cursor := func() (all string) {
			files, err := filepath.Glob(filepath.Join(path, "t.log", "cursors*"))
			Expect(err).NotTo(HaveOccurred())
			for _, name := range files {
				b, _ := os.ReadFile(name)
				all += string(b)
			}
			return all
		}
		Eventually(cursor).ShouldNot(BeEmpty())
		last := ""
		Eventually(func() bool { same := cursor() == last; last = cursor(); return same }).WithPolling(700 * time.Millisecond).Should(BeTrue())
		b, _ = stored(crashed(path), true)
		Eventually(func() int { return topic(b, "t").Stats().Waiting }).Should(BeZero())
		Expect(depth(b, "c")()).To(BeZero())
		Eventually(depth(b, "slow")).Should(Equal(200))
	})
})

var _ = Describe("a log with a bound", func() {
	DescribeTable("refuses publishes beyond it until channels have finished some messages, and keeps the accepted messages",
		func(through bool) {
			path := GinkgoT().TempDir()
			bounded := func(c *broker.StorageConfig) { c.MaxLogBytes, c.SegmentBytes, c.WriteThrough = 8<<10, 1<<10, through }
			b, end := opened(path, func(*broker.Config) {}, bounded)
			Expect(b.Restore()).To(Succeed())
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			n := 0
			for ; n < 1000; n++ {
				if err := publish(t, fmt.Sprintf("%0100d", n)); errors.Is(err, queue.ErrFull) {
					break
				} else {
					Expect(err).NotTo(HaveOccurred())
				}
			}
			Expect(n).To(BeNumerically("<", 300))
			Expect(b.Health()).To(Succeed(), "nothing is wrong with the disk")
			end()

			b, _ = opened(path, func(*broker.Config) {}, bounded)
			Expect(b.Restore()).To(Succeed())
			t = topic(b, "t")
			Expect(t.Stats().Channels[0].Ready).To(Equal(n))
			Expect(publish(t, "more")).To(MatchError(queue.ErrFull))
			Expect(t.EmptyChannel("c")).To(Succeed())
			Eventually(func() error { return publish(t, "more") }).Should(Succeed())
		},
		Entry("in memory", false), Entry("through the disk", true))
})
