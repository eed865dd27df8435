package broker_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// full is the system's disk, which at times accepts no data.
type full struct {
	commitlog.File
	is *atomic.Bool
}

func (f full) WriteAt(b []byte, at int64) (int, error) {
	if f.is.Load() {
		return 0, syscall.ENOSPC
	}
	return f.File.WriteAt(b, at)
}

// The count of held bytes must not drift: the broker subtracts the count from the memory that others may use.
var _ = Describe("the memory of messages, whatever is done to them", func() {
	for _, through := range []bool{false, true} {
		It(fmt.Sprintf("is none when they are gone, stored first: %v", through), func() {
			for seed := range uint64(3) {
				var isFull atomic.Bool
				disk := logtest.Disk(func(f commitlog.File) commitlog.File { return full{f, &isFull} })
				path := GinkgoT().TempDir()
				open := func() (*broker.Broker, func()) {
					b, end := opened(path, func(c *broker.Config) { c.Capacity, c.MaxMemory = 20, 200*(100+queue.Overhead) },
						func(c *broker.StorageConfig) { c.Disk, c.WriteThrough = &disk, through })
					Expect(b.Restore()).To(Succeed())
					return b, end
				}
				b, end := open()
				for life := range 2 {
					var wg sync.WaitGroup
					for worker := range 4 {
						rng := rand.New(rand.NewPCG(seed, uint64(10*life+worker)))
						wg.Go(func() {
							defer GinkgoRecover()
							for range 60 {
								t, err := b.CreateTopic(fmt.Sprintf("t%d", rng.IntN(2)))
								Expect(err).NotTo(HaveOccurred())
								channel := fmt.Sprintf("c%d", rng.IntN(2))
								if rng.IntN(4) == 0 {
									channel += "#ephemeral"
								}
								now := clock.Mono()
								p := broker.Published{Arrival: stamp.Arrival{At: now}, NoWait: rng.IntN(2) == 0}
								switch rng.IntN(12) {
								case 0, 1, 2: // any error will do here and below
									p.Body = make([]byte, 1+rng.IntN(200))
									_ = t.Publish(now, clock.Wall(), p)
								case 3, 4:
									_ = t.PublishBatch(now, clock.Wall(), p, alike(1+rng.IntN(900)))
								case 5:
									p.Body = []byte("x")
									t.PublishEach(now, clock.Wall(), []broker.Published{p, p, p, p, p}, nil)
								case 6:
									_ = t.CreateChannel(channel)
								case 7:
									_ = t.DeleteChannel(channel)
								case 8:
									_ = t.EmptyChannel(channel)
									t.Empty()
								case 9:
									if rng.IntN(2) == 0 {
										t.Pause()
									} else {
										t.Unpause()
									}
								case 10:
									isFull.Store(rng.IntN(3) == 0)
								case 11:
									sub, err := t.Subscribe(channel, broker.Subscriber{MsgTimeout: time.Minute}, func() {})
									if err != nil {
										continue
									}
									_ = sub.Ready(100)
									var out broker.Outgoing
									sub.Take(&out, plenty)
									for _, d := range messages(&out) {
										if rng.IntN(3) > 0 {
											_ = sub.Finish(d.ID)
										}
									}
									sub.Close()
								}
								if rng.IntN(40) == 0 {
									_ = b.DeleteTopic(t.Name())
								}
								if rng.IntN(8) == 0 {
									isFull.Store(false)
								}
							}
						})
					}
					wg.Wait()
					isFull.Store(false)
					if life == 0 {
						end()
						b, end = open()
					}
				}
				for _, t := range b.Topics() {
					Expect(b.DeleteTopic(t.Name())).To(Succeed())
				}
				Eventually(func() int64 { held, _ := b.Memory(); return held }).Should(BeZero(), "seed %d", seed)
				end()
			}
		})
	}
})
