package broker_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// held returns how many messages a channel of topic t has, or -1 without the channel.
func held(b *broker.Broker, channel string) int {
	for _, c := range topic(b, "t").Stats().Channels {
		if c.Name == channel {
			return c.Ready + c.InFlight + c.Deferred
		}
	}
	return -1
}

// restored opens a broker over a folder, with room for so many messages in memory.
func restored(path string, capacity int, fsync bool) (b *broker.Broker, stop func()) {
	GinkgoHelper()
	b, stop = opened(path, func(c *broker.Config) { c.Capacity = capacity }, func(c *broker.StorageConfig) { c.Fsync = fsync })
	Expect(b.Restore()).To(Succeed())
	return b, stop
}

var _ = Describe("what an earlier process has left", func() {
	const total = 500
	left := func(channels ...string) (path string) {
		GinkgoHelper()
		path = GinkgoT().TempDir()
		b, stop := restored(path, 50, false)
		for _, c := range channels {
			Expect(topic(b, "t").CreateChannel(c)).To(Succeed())
		}
		publishAll(topic(b, "t"), 0, total)
		if len(channels) > 0 {
			Eventually(func() int { return topic(b, "t").Stats().Waiting }).Should(BeZero())
		}
		stop()
		return path
	}
	settled := func(b *broker.Broker) {
		GinkgoHelper()
		b.Recorded()
		last := -1
		Eventually(func() bool {
			s := topic(b, "t").Stats()
			now := s.Disk.Segments + s.Beyond
			for _, c := range s.Channels {
				now += c.Beyond
			}
			same := now == last
			last = now
			return same
		}).WithPolling(50 * time.Millisecond).Should(BeTrue())
	}

	for _, fsync := range []bool{false, true} {
		It(fmt.Sprintf("outlives a crash of this one, however much of it was read, fsync %v", fsync), func() {
			path := left("c", "d")
			for _, capacity := range []int{50, 10_000, 10} {
				b, _ := restored(path, capacity, fsync)
				read(topic(b, "t"), "d", 30, false) // takes some messages, and finishes none
				settled(b)
				path = crashed(path)
			}
			b, _ := restored(path, 50, fsync)
			for _, c := range []string{"c", "d"} {
				r := read(topic(b, "t"), c, 50, true)
				Eventually(r.count).Should(Equal(total))
				Expect(bodies(r)).To(Equal(numbers(0, total)))
			}
			Eventually(func() ([]string, error) { return filepath.Glob(filepath.Join(path, "*", "*.seg")) }).Should(BeEmpty())
		})
	}

	It("outlives a crash while it waits for channels, until each of them has finished it", func() {
		path := left()
		b, _ := restored(path, 10_000, false)
		t := topic(b, "t")
		t.Pause() // until both channels exist
		Expect(t.CreateChannel("slow")).To(Succeed())
		r := read(t, "c", 100, true)
		t.Unpause()
		Eventually(r.count).Should(Equal(total))
		settled(b)
		b, _ = restored(crashed(path), 10_000, false)
		Eventually(func() int { return held(b, "slow") }).Should(Equal(total))
		// Without the slow channel no segment is left.
		Expect(t.DeleteChannel("slow")).To(Succeed())
		Eventually(func() ([]string, error) { return filepath.Glob(filepath.Join(path, "*", "*.seg")) }).Should(BeEmpty())
	})

	It("is not counted as lost where it was finished and deleted, though that could not be recorded", func() {
		small := func(c *broker.StorageConfig) { c.SegmentBytes, c.WriteThrough = 1<<10, true }
		for _, waits := range []bool{false, true} {
			path := GinkgoT().TempDir()
			b, _ := opened(path, func(*broker.Config) {}, small)
			Expect(b.Restore()).To(Succeed())
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			if waits {
				t.Pause()
			}
			publishAll(t, 0, total)
			Eventually(t.Spilling).Should(BeZero()) // the disk work is finished
			t.FailSaves(math.MaxInt, syscall.EIO)
			t.Unpause()
			r := read(t, "c", 50, true)
			Eventually(r.count).Should(Equal(total))
			Eventually(func() ([]string, error) { return filepath.Glob(filepath.Join(path, "*", "*.seg")) }).Should(BeEmpty())
			b, _ = opened(crashed(path), func(*broker.Config) {}, small)
			Expect(b.Restore()).To(Succeed())
			t = topic(b, "t")
			t.Unpause()
			again := read(t, "c", 50, true)
			Eventually(func() bool { s := t.Stats(); return s.Waiting == 0 && held(b, "c") == 0 && s.Channels[0].Beyond == 0 }).Should(BeTrue())
			Expect(again.count()).To(BeNumerically("<", 20))
			s := t.Stats()
			Expect(s.Counters.Lost).To(BeZero())
			Expect(s.Channels[0].Counters.Lost).To(BeZero())
			Expect(s.Channels[0].Counters.Messages).To(BeEquivalentTo(again.count()))
		}
	})

	It("is reported as missing where its files were deleted, cut or emptied, and the rest comes", func() {
		for name, damage := range map[string]func(files []string) error{
			"the first deleted": func(files []string) error { return os.Remove(files[0]) },
			"all deleted": func(files []string) error {
				for _, f := range files {
					if err := os.Remove(f); err != nil {
						return err
					}
				}
				return nil
			},
			"one in the middle deleted": func(files []string) error { return os.Remove(files[2]) },
			"one in the middle cut":     func(files []string) error { return os.Truncate(files[2], 500) },
			"the first emptied":         func(files []string) error { return os.Truncate(files[0], 0) },
			"the last emptied":          func(files []string) error { return os.Truncate(files[len(files)-1], 0) },
		} {
			By(name)
			path := GinkgoT().TempDir()
			b, stop := opened(path, func(*broker.Config) {}, func(c *broker.StorageConfig) { c.SegmentBytes, c.WriteThrough = 1<<10, true })
			Expect(b.Restore()).To(Succeed())
			Expect(topic(b, "t").CreateChannel("c")).To(Succeed())
			publishAll(topic(b, "t"), 0, total)
			stop()
			files, err := filepath.Glob(filepath.Join(path, "t.log", "*.seg"))
			Expect(err).NotTo(HaveOccurred())
			Expect(len(files)).To(BeNumerically(">", 3))
			Expect(damage(files)).To(Succeed())
			b, stop = restored(path, 50, false)
			Expect(topic(b, "t").Stats().Disk.Missing).To(BeEquivalentTo(1))
			r := read(topic(b, "t"), "c", 50, true)
			Eventually(func() bool {
				s := topic(b, "t").Stats()
				return s.Waiting == 0 && held(b, "c") == 0 && s.Channels[0].Beyond == 0
			}).Should(BeTrue())
			Expect(r.count()).To(BeNumerically("<", total))
			published := r.count()
			publishAll(topic(b, "t"), 0, 10)
			Eventually(r.count).Should(Equal(published + 10))
			stop()
		}
	})

	It("is stored before it is drained, as soon as the disk takes it", func() {
		for _, failing := range []bool{false, true} {
			path := GinkgoT().TempDir()
			var full atomic.Bool
			full.Store(failing)
			disk := commitlog.OS()
			create := disk.Create
			disk.Create = func(file string) (commitlog.File, error) {
				if full.Load() {
					return nil, syscall.ENOSPC
				}
				return create(file)
			}
			b, _ := opened(path, func(c *broker.Config) { c.Capacity = 10_000 }, func(c *broker.StorageConfig) { c.Disk = &disk })
			Expect(b.Restore()).To(Succeed())
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			publishAll(t, 0, total)
			r := read(t, "c", 1, false) // so that there is a message to wait for
			Eventually(r.count).Should(Equal(1))
			ctx, end := context.WithCancel(context.Background())
			drained := make(chan int)
			go func() { drained <- b.Drain(ctx) }()
			if failing {
				Eventually(b.Health).Should(MatchError(syscall.ENOSPC))
				full.Store(false)
			}
			Eventually(func() int {
				killed, stop := restored(crashed(path), 10_000, false)
				defer stop()
				return held(killed, "c")
			}).Should(Equal(total))
			Consistently(drained, 0).ShouldNot(Receive())
			end()
			Expect(<-drained).To(Equal(total))
		}
	})

	It("does not come again when it was finished, emptied or deleted, once that was recorded", func() {
		path := left("c", "emptied", "deleted")
		b, _ := restored(path, 200, false)
		t := topic(b, "t")
		Expect(t.EmptyChannel("emptied")).To(Succeed())
		Expect(t.DeleteChannel("deleted")).To(Succeed())
		sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
		Expect(err).NotTo(HaveOccurred())
		Expect(sub.Ready(total)).To(Succeed())
		finished := 0
		Eventually(func() int {
			for _, m := range take(sub, plenty) {
				if finished++; finished <= total/2 {
					Expect(sub.Finish(m.ID)).To(Succeed())
				}
			}
			return finished
		}).Should(Equal(total))
		Eventually(func() []int {
			b, stop := restored(crashed(path), 200, false)
			defer stop()
			return []int{held(b, "c"), held(b, "emptied"), held(b, "deleted")}
		}).WithPolling(200 * time.Millisecond).Should(Equal([]int{total / 2, 0, -1}))
	})

	It("does not come again when it was finished in memory, though the process is killed while it stores the rest", func() {
		path, killed := GinkgoT().TempDir(), ""
		disk := commitlog.OS()
		rename := disk.Rename
		disk.Rename = func(from, to string) error {
			err := rename(from, to)
			if filepath.Ext(to) == ".seg" {
				killed = crashed(path)
			}
			return err
		}
		b, stop := opened(path, func(c *broker.Config) { c.Capacity = 100 }, func(c *broker.StorageConfig) { c.Disk = &disk })
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.CreateChannel("unread")).To(Succeed())
		r := read(t, "c", 100, true)
		publishAll(t, 0, 10)
		Eventually(r.count).Should(Equal(10))
		Eventually(func() int { return held(b, "c") }).Should(BeZero())
		b.Recorded()
		r.sub.Close()
		stop()
		b, _ = restored(killed, 100, false)
		Expect(held(b, "unread")).To(Equal(10))
		Expect(held(b, "c")).To(BeZero())
	})

	It("is left as it is by a start that fails", func() {
		for _, channels := range [][]string{{"c"}, nil} {
			path := left(channels...)
			disk := commitlog.OS()
			list := disk.List
			disk.List = func(folder string) ([]string, error) {
				if filepath.Base(folder) == "t.log" {
					return nil, syscall.EIO
				}
				return list(folder)
			}
			b, end := opened(path, func(*broker.Config) {}, func(c *broker.StorageConfig) { c.Disk = &disk })
			Expect(b.Restore()).To(MatchError(syscall.EIO))
			end()
			b, _ = restored(path, 50, false)
			r := read(topic(b, "t"), "c", 100, true)
			Eventually(r.count).Should(Equal(total))
			Expect(bodies(r)).To(Equal(numbers(0, total)))
		}
	})

	It("is kept where it is when the channel that has it cannot store it at the end", func() {
		path := left() // no channel had the message
		disk := commitlog.OS()
		create, open := disk.Create, disk.Open
		var full atomic.Bool
		disk.Open = func(file string) (commitlog.File, error) {
			if full.Load() && strings.Contains(file, "cursors.") { // the reserved space is not enough
				return nil, syscall.ENOSPC
			}
			return open(file)
		}
		disk.Create = func(file string) (commitlog.File, error) {
			if full.Load() {
				return nil, syscall.ENOSPC
			}
			return create(file)
		}
		opens := func() (*broker.Broker, *broker.Storage) {
			st, err := broker.OpenStorage(broker.StorageConfig{
				Path: path, Metadata: filepath.Join(path, "metadata.json"), MaxRecord: 1 << 20, Overflow: 100,
				Disk: &disk, Log: slog.New(slog.NewTextHandler(GinkgoWriter, nil)),
			})
			Expect(err).NotTo(HaveOccurred())
			b, err := broker.New(broker.Config{Capacity: 10_000, MaxMsgTimeout: time.Minute, AutoCreate: true, Storage: st})
			Expect(err).NotTo(HaveOccurred())
			Expect(b.Restore()).To(Succeed())
			return b, st
		}
		for range 2 {
			b, st := opens()
			Expect(topic(b, "t").CreateChannel("c")).To(Succeed())
			Eventually(func() int { return held(b, "c") }).Should(Equal(total))
			full.Store(true)
			Expect(b.Close()).To(MatchError(commitlog.ErrNoSpace))
			full.Store(false)
			Expect(st.Close()).To(Succeed())
		}
		b, _ := restored(path, 50, false)
		r := read(topic(b, "t"), "c", 100, true)
		Eventually(r.count).Should(Equal(total))
		Expect(bodies(r)).To(Equal(numbers(0, total)))
	})

	It("is kept through any ends, good and bad, until it is finished", func() {
		seed := uint64(GinkgoRandomSeed())
		rng := rand.New(rand.NewPCG(seed, 18))
		path := GinkgoT().TempDir()
		stored := map[string]bool{} // by an orderly end, and not finished
		next := 0
		for round := range 12 {
			b, stop := restored(path, []int{5, 50, 1000}[rng.IntN(3)], false)
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			sub, err := t.Subscribe("c", broker.Subscriber{MsgTimeout: time.Minute}, func() {})
			Expect(err).NotTo(HaveOccurred())
			Expect(sub.Ready(1 + rng.IntN(200))).To(Succeed())
			n := rng.IntN(100)
			publishAll(t, next, next+n)
			fresh := numbers(next, next+n)
			next += n
			for range rng.IntN(20) {
				for _, m := range take(sub, plenty) {
					if rng.IntN(3) > 0 {
						Expect(sub.Finish(m.ID)).To(Succeed())
						delete(stored, string(m.Body))
						fresh = slices.DeleteFunc(fresh, func(s string) bool { return s == string(m.Body) })
					}
				}
			}
			if rng.IntN(2) == 0 {
				stop()
				for _, name := range fresh {
					stored[name] = true
				}
			} else {
				path = crashed(path)
			}
			check, stopCheck := restored(crashed(path), 10_000, false)
			r := read(topic(check, "t"), "c", 10_000, false)
			there := func() (missing []string) {
				got := bodies(r)
				for name := range stored {
					if !slices.Contains(got, name) {
						missing = append(missing, name)
					}
				}
				return missing
			}
			Eventually(there).Should(BeEmpty(), "round %d, seed %s", round, strconv.FormatUint(seed, 10))
			stopCheck()
		}
	})
})

var _ = Describe("a message that is never finished", func() {
	for _, through := range []bool{false, true} {
		It(fmt.Sprintf("keeps neither the log nor what was finished behind it, stored first %v", through), func() {
			path := GinkgoT().TempDir()
			open := func() (*broker.Broker, func()) {
				b, stop := opened(path, func(c *broker.Config) { c.Capacity = 100 }, func(c *broker.StorageConfig) { c.WriteThrough = through })
				Expect(b.Restore()).To(Succeed())
				return b, stop
			}
			b, _ := open()
			t := topic(b, "t")
			Expect(t.CreateChannel("c")).To(Succeed())
			now := clock.Mono()
			Expect(t.Publish(now, clock.Wall(), broker.Published{Body: []byte("later"), Arrival: stamp.Arrival{At: now}, Defer: time.Hour})).To(Succeed())
			t.Pause()
			publishAll(t, 0, 3000) // most messages go to disk
			t.Unpause()
			r := read(t, "c", 100, true)
			for range 4 {
				Eventually(r.count).Should(BeNumerically(">=", 3000))
				t.Pause()
				from := r.count()
				publishAll(t, from, from+3000)
				t.Unpause()
				Eventually(r.count).Should(Equal(from + 3000))
			}
			Eventually(func() int { return t.Stats().Disk.Segments }).Should(BeNumerically("<=", 3))
			Eventually(func() int { return held(b, "c") }).Should(Equal(1)) // the messages that were read are finished a little later
			By("a crash")
			Eventually(t.Spilling).Should(BeZero())
			path = crashed(path)
			b, stop := open()
			Eventually(func() int { return topic(b, "t").Stats().Channels[0].Deferred }).Should(Equal(1))
			Expect(held(b, "c")).To(Equal(1))
			By("an orderly end")
			stop()
			b, _ = open()
			Eventually(func() int { return topic(b, "t").Stats().Channels[0].Deferred }).Should(Equal(1))
			Expect(held(b, "c")).To(Equal(1))
		})
	}
})
