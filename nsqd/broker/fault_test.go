package broker_test

import (
	"io"
	"log/slog"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/gbytes"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/replicated"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// sent publishes a message and returns where the message is stored.
func sent(t *broker.Topic, body string) (at broker.Stored) {
	GinkgoHelper()
	now := clock.Mono()
	Expect(t.Publish(now, clock.Wall(), broker.Published{Body: []byte(body), Arrival: stamp.Arrival{At: now}, Stored: &at})).To(Succeed())
	return at
}

// durably publishes a message and waits until the message is on stable storage.
func durably(t *broker.Topic, body string) error {
	GinkgoHelper()
	return t.Sync(sent(t, body))
}

// faulty is the system's disk whose fsyncs and writes can be made to fail.
type faulty struct {
	commitlog.Disk
	failing, unwritable atomic.Bool
}

type faultyFile struct {
	commitlog.File
	disk *faulty
}

func (f faultyFile) Sync() error {
	if f.disk.failing.Load() {
		return syscall.EIO
	}
	return f.File.Sync()
}

func (f faultyFile) WriteAt(p []byte, off int64) (int, error) {
	if f.disk.unwritable.Load() {
		return 0, syscall.ENOSPC
	}
	return f.File.WriteAt(p, off)
}

func newFaulty() *faulty {
	d := new(faulty)
	d.Disk = logtest.Disk(func(f commitlog.File) commitlog.File { return faultyFile{f, d} })
	return d
}

func on(disk *commitlog.Disk, path string) *broker.Broker {
	GinkgoHelper()
	b, _ := opened(path, func(*broker.Config) {}, func(c *broker.StorageConfig) { c.Fsync, c.Disk = true, disk })
	Expect(b.Restore()).To(Succeed())
	return b
}

var _ = Describe("a failed fsync", func() {
	It("is reported to the publishers of its messages, at any time, and to no later publisher", func() {
		disk := newFaulty()
		b := on(&disk.Disk, GinkgoT().TempDir())
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		t.Pause() // nothing is released meanwhile
		Expect(durably(t, "0")).To(Succeed())
		slow := sent(t, "1")
		disk.failing.Store(true)
		for i := 2; i < 5; i++ {
			Expect(durably(t, strconv.Itoa(i))).To(MatchError(broker.ErrStorage))
		}
		Expect(b.Health()).To(MatchError(syscall.EIO))
		disk.failing.Store(false)
		for i := 5; i < 10; i++ {
			Expect(durably(t, strconv.Itoa(i))).To(Succeed())
		}
		Expect(t.Sync(slow)).To(MatchError(broker.ErrStorage), "what became of it is not known")
		Expect(durably(t, "10")).To(Succeed())
		Eventually(b.Health).Should(Succeed())
		t.Unpause()
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(11))
		Expect(bodies(r)).To(Equal(numbers(0, 11)))
	})
})

var _ = Describe("a disk that is full", func() {
	It("is logged once for the publishers who met it, until a message is stored", func() {
		disk := newFaulty()
		log := gbytes.NewBuffer()
		b, _ := opened(GinkgoT().TempDir(), func(*broker.Config) {}, func(c *broker.StorageConfig) {
			c.WriteThrough, c.Disk, c.Log = true, &disk.Disk, slog.New(slog.NewTextHandler(log, nil))
		})
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		for i := range 2 {
			disk.unwritable.Store(true)
			for range 3 {
				Expect(publish(t, "refused")).To(MatchError(broker.ErrStorage))
			}
			Expect(strings.Count(string(log.Contents()), "cannot store messages")).To(Equal(i + 1))
			disk.unwritable.Store(false)
			Expect(publish(t, "stored")).To(Succeed())
		}
	})
})

var _ = Describe("a broker that closes", func() {
	It("has stored all messages even if it cannot delete finished messages", func() {
		b := on(nil, GinkgoT().TempDir())
		t := topic(b, "t")
		Expect(durably(t, "held")).To(Succeed())
		t.FailTrims(syscall.EIO)
		Expect(b.Close()).To(Succeed())
	})
	It("saves finished messages, however long the election of a leader takes", func() {
		b := on(nil, GinkgoT().TempDir())
		t := topic(b, "t")
		t.Pause()
		Expect(durably(t, "held")).To(Succeed())
		t.FailSaves(5, replicated.ErrUnavailable)
		Expect(b.Close()).To(Succeed())
	})
	It("gives up where there is none", func() {
		b := on(nil, GinkgoT().TempDir())
		t := topic(b, "t")
		t.Pause()
		Expect(durably(t, "held")).To(Succeed())
		t.FailSaves(1000, replicated.ErrUnavailable)
		Expect(b.Close()).To(MatchError(replicated.ErrUnavailable))
	})
})

var _ = Describe("messages that are stored together", func() {
	var disk *faulty
	var b *broker.Broker
	var t *broker.Topic
	store := func(bodies ...string) (errs []error, at []broker.Stored) {
		now := clock.Mono()
		at = make([]broker.Stored, len(bodies))
		var batch []broker.Published
		for i, body := range bodies {
			batch = append(batch, broker.Published{Body: []byte(body), Arrival: stamp.Arrival{At: now}, Stored: &at[i]})
		}
		return t.StoreEach(clock.Wall(), batch, []error{io.EOF}), at
	}
	BeforeEach(func() {
		disk = newFaulty()
		b = on(&disk.Disk, GinkgoT().TempDir())
		t = topic(b, "t")
	})

	It("are delivered in order, and each knows where it is", func() {
		errs, at := store(numbers(0, 5)...)
		Expect(errs).To(Equal([]error{io.EOF, nil, nil, nil, nil, nil}), "what was there stays")
		Expect(t.Sync(at[4])).To(Succeed())
		Expect(at[0]).NotTo(Equal(at[1]))
		errs, _ = store()
		Expect(errs).To(Equal([]error{io.EOF}))
		Expect(durably(t, "5")).To(Succeed())
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(6))
		Expect(bodies(r)).To(Equal(numbers(0, 6)))
		Expect(t.Stats().Counters.Accepted).To(BeEquivalentTo(6))
	})

	It("are refused one by one where the contract refuses", func() {
		node := b.Node()
		Expect(node.Prepare("t", listed("c"), 1, time.Millisecond, 0.99, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT, nil)).Error().NotTo(HaveOccurred())
		_, err := grant(node, "t", tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 3}, 3*tokenbucket.Token)
		Expect(err).NotTo(HaveOccurred())
		errs, _ := store(numbers(0, 5)...)
		Expect(errs[1:4]).To(HaveEach(Not(HaveOccurred())))
		Expect(errs[4:]).To(HaveEach(BeAssignableToTypeOf(&queue.OverLimitError{})))
		Expect(t.Stats().Counters.Refused).To(BeEquivalentTo(2))
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(3))
		Expect(bodies(r)).To(Equal(numbers(0, 3)))
	})

	It("come one behind the other, wherever the memory that they are in was before", func() {
		b.Reuse(100)
		_, at := store(numbers(0, 10)...)
		Expect(at[9]).To(Equal(broker.At(10)))
		b.Reuse(100)
		Expect(sent(t, "10")).To(Equal(broker.At(11)))
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(11))
		Expect(bodies(r)).To(Equal(numbers(0, 11)))
	})

	It("are no overload of their own making", func() {
		b, _ := opened(GinkgoT().TempDir(), func(c *broker.Config) { c.Pacing, c.MaxWeight = broker.PaceAdvise, 10 }, func(c *broker.StorageConfig) { c.Fsync = true })
		Expect(b.Restore()).To(Succeed())
		t := topic(b, "t")
		Expect(t.CreateChannel("c")).To(Succeed())
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 1}, false)
		as := t.AddPublisher("p", "", police.Identity{Kind: "client", ID: "p"})
		as.Pace(1)
		now := clock.Mono()
		var batch []broker.Published
		for range 64 {
			batch = append(batch, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: now}, From: as})
		}
		Expect(t.StoreEach(clock.Wall(), batch, nil)).To(HaveEach(Not(HaveOccurred())))
		Expect(t.Stats().Waiting).To(BeNumerically(">", 50))
		Expect(t.LeastBacklog()).To(Or(BeZero(), Equal(math.MaxInt)), "the first of them found nothing waiting")
	})

	It("are all refused by a disk that takes none, and by a topic that is gone", func() {
		disk.unwritable.Store(true)
		errs, _ := store(numbers(0, 3)...)
		Expect(errs[1:]).To(HaveEach(MatchError(broker.ErrStorage)))
		Expect(t.Stats().Counters.Refused).To(BeEquivalentTo(3))
		disk.unwritable.Store(false)
		errs, _ = store(numbers(3, 5)...)
		Expect(errs[1:]).To(HaveEach(Not(HaveOccurred())))
		r := read(t, "c", 100, true)
		Eventually(r.count).Should(Equal(2))
		Expect(bodies(r)).To(Equal(numbers(3, 5)))
		Expect(b.DeleteTopic("t")).To(Succeed())
		errs, _ = store("x")
		Expect(errs[1]).To(MatchError(broker.ErrGone))
	})
})

var _ = Describe("a topic that is deleted and published to again", func() {
	It("waits until the files of the first are gone", func() {
		disk := commitlog.OS()
		removing, remove := make(chan struct{}), make(chan struct{})
		rename := disk.Rename
		disk.Rename = func(from, to string) error {
			if filepath.Ext(to) == ".removed" {
				select {
				case removing <- struct{}{}:
				case <-remove:
				}
				<-remove
			}
			return rename(from, to)
		}
		b := on(&disk, GinkgoT().TempDir())
		Expect(durably(topic(b, "t"), "old")).To(Succeed())
		deleted, published := make(chan error, 1), make(chan error, 1)
		go func() { deleted <- b.DeleteTopic("t") }()
		<-removing
		Consistently(deleted, "50ms").ShouldNot(Receive(), "a crash would bring it back")
		go func() {
			defer GinkgoRecover()
			published <- durably(topic(b, "t"), "new")
		}()
		Consistently(published, "50ms").ShouldNot(Receive())
		close(remove)
		Expect(<-deleted).To(Succeed())
		Expect(<-published).To(Succeed())
		r := read(topic(b, "t"), "c", 1, true)
		Eventually(r.count).Should(Equal(1))
		Expect(bodies(r)).To(Equal([]string{"new"}))
	})

	It("refuses nothing", func() {
		b := on(nil, GinkgoT().TempDir())
		for range 100 {
			Expect(durably(topic(b, "t"), "x")).To(Succeed())
			Expect(b.DeleteTopic("t")).To(Succeed())
		}
	})
})
