package fleet_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/fleet"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestFleet(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "fleet")
}

const (
	topic = "t"
	run   = 7
)

var _ = Describe("a fleet", behaviour)

// readyAtOnce asks a fleet that may not have tried to connect yet.
func readyAtOnce(ctx context.Context, f *fleet.Fleet) error {
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	return f.Ready(ctx)
}

func behaviour() {
	var (
		log     *fake.Log
		a, b    *fake.Broker
		spec    schedule.Spec
		length  time.Duration
		cfg     fleet.Config
		f       *fleet.Fleet
		ctx     context.Context
		cancel  context.CancelFunc
		running sync.WaitGroup
		ended   error
	)
	newBroker := func(name string) *fake.Broker {
		broker, err := fake.NewBroker(name, log)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(broker.Close)
		return broker
	}
	BeforeEach(func() {
		log = &fake.Log{}
		a, b = newBroker("a"), newBroker("b")
		spec = schedule.Spec{Publishers: 20, Rate: 50, Batch: 1, Process: schedule.Poisson, Size: 100, Seed: 42}
		length = 100 * time.Millisecond
		cfg = fleet.Config{Topic: topic, Run: run, Address: a.Address(), Capture: true, Drain: testkit.Hang}
	})
	start := func() {
		GinkgoHelper()
		cfg.Sources = spec.Sources()
		cfg.Stream = func() schedule.Stream { return schedule.Until(spec.Stream(), length) }
		var err error
		f, err = fleet.New(cfg)
		Expect(err).NotTo(HaveOccurred())
		ctx, cancel = context.WithCancel(context.Background())
		running.Go(func() { ended = f.Run(ctx) })
		DeferCleanup(func() {
			cancel()
			running.Wait()
		})
	}
	ready := func() {
		GinkgoHelper()
		ctx, cancel := context.WithTimeout(ctx, testkit.Hang)
		defer cancel()
		Expect(f.Ready(ctx)).To(Succeed())
	}
	// begin starts the sending of a connected fleet.
	begin := func() {
		GinkgoHelper()
		start()
		ready()
		f.Start(clock.Mono())
	}
	// finish waits for the end of the schedule and of draining.
	finish := func() fleet.Stats {
		GinkgoHelper()
		running.Wait()
		Expect(ended).NotTo(HaveOccurred())
		s := f.Stats()
		Expect(s.Offered).To(Equal(s.Accepted+s.RefusedTotal()+s.Unanswered+s.Skipped), "%+v", s)
		Expect(s.Open()).To(BeZero())
		Expect(f.Accepted().Len()).To(Equal(s.Accepted))
		Expect(f.Captured()).To(HaveLen(int(s.Sent)))
		Expect(s.Lateness.Count()).To(BeNumerically("==", s.Sent))
		Expect(s.Answer.Count()).To(BeNumerically("==", s.Accepted))
		Expect(s.Connected).To(BeZero())
		return s
	}
	offered := func() uint64 {
		return uint64(len(schedule.Arrivals(schedule.Until(spec.Stream(), length))))
	}
	// received returns the messages that brokers read, in order, by client, and checks that each message belongs to its
	// publisher.
	received := func() map[string][]payload.Payload {
		GinkgoHelper()
		byClient := map[string][]payload.Payload{}
		for _, e := range log.Events() {
			if e.Kind != fake.Pub {
				continue
			}
			Expect(e.Topic).To(Equal(topic))
			for _, body := range e.Bodies {
				Expect(body).To(HaveLen(spec.Size))
				p, ok := payload.Parse(body)
				Expect(ok).To(BeTrue())
				Expect(p.Run).To(BeNumerically("==", run))
				Expect(cfg.Sources[p.Source].ID).To(Equal(e.Client))
				byClient[e.Client] = append(byClient[e.Client], p)
			}
		}
		return byClient
	}
	// inOrder checks that each publisher's messages came in order, each once. With gaps, some messages may be missing.
	inOrder := func(gaps bool) {
		GinkgoHelper()
		for client, messages := range received() {
			for i, m := range messages {
				if gaps {
					if i > 0 {
						Expect(m.Seq).To(BeNumerically(">", messages[i-1].Seq), client)
					}
				} else {
					Expect(m.Seq).To(BeNumerically("==", i), client)
				}
				if i > 0 {
					Expect(m.Intended).To(BeNumerically(">=", messages[i-1].Intended), client)
				}
			}
		}
	}

	It("sends every message of the schedule once, in order, at its time or after", func() {
		start()
		ready()
		at := clock.Mono()
		f.Start(at)
		s := finish()
		Expect(s.Accepted).To(Equal(offered()))
		Expect(s.Offered).To(Equal(s.Accepted))
		Expect(s.Strange + s.Lost + s.Moved).To(BeZero())
		Expect(s.Lateness.Clamped()).To(BeZero(), "a message was sent before its time")
		inOrder(false)
		i := 0
		events := schedule.Until(spec.Stream(), length)
		seq := map[int32]uint32{}
		for {
			e, ok := events.Next()
			if !ok {
				break
			}
			Expect(f.Accepted().Has(uint32(e.Source), seq[e.Source])).To(BeTrue())
			m := received()[cfg.Sources[e.Source].ID][seq[e.Source]]
			Expect(m.Intended).To(Equal(at.Add(e.At)))
			seq[e.Source]++
			if i++; i == 20 {
				break // received is slow; the checks above cover the rest
			}
		}
		Eventually(a.Clients).Should(BeEmpty()) // the broker notices the end at its next read
	})

	It("shares the publishers among workers", func() {
		cfg.Workers = 3
		start()
		ready()
		Expect(a.Clients()).To(HaveLen(20))
		Expect(f.Stats().Connected).To(Equal(20))
		f.Start(clock.Mono())
		Expect(finish().Accepted).To(Equal(offered()))
		inOrder(false)
	})

	DescribeTable("sends a batch back to back", func(mpub bool) {
		spec.Batch, cfg.Mpub = 5, mpub
		begin()
		Expect(finish().Accepted).To(Equal(offered()))
		inOrder(false)
		commands := 0
		for _, e := range log.Events() {
			if e.Kind == fake.Pub {
				commands++
				Expect(e.Bodies).To(HaveLen(map[bool]int{true: 5, false: 1}[mpub]))
			}
		}
		Expect(commands).To(BeNumerically("==", map[bool]uint64{true: offered() / 5, false: offered()}[mpub]))
	},
		Entry("as PUBs", false),
		Entry("as one MPUB", true),
	)

	It("sends a group's messages together", func() {
		spec.GroupSize, spec.Sync = 10, true
		begin()
		Expect(finish().Accepted).To(Equal(offered()))
		groups := map[string]map[string]int{} // intended time and group to clients
		for client, messages := range received() {
			for _, m := range messages {
				at := fmt.Sprint(m.Intended, client[:strings.IndexByte(client, '.')])
				if groups[at] == nil {
					groups[at] = map[string]int{}
				}
				groups[at][client]++
			}
		}
		for at, clients := range groups {
			Expect(clients).To(HaveLen(10), at)
		}
	})

	It("pads no message below what it must carry", func() {
		spec.Size = 0
		begin()
		spec.Size = payload.Size
		finish()
		Expect(received()).NotTo(BeEmpty())
	})

	It("counts refusals by their code and continues", func() {
		n := 0
		a.Refuse(func(string, []byte) *wire.Error {
			if n++; n%3 == 0 {
				return wire.RateLimited(time.Second)
			}
			return nil
		})
		begin()
		s := finish()
		Expect(s.Refused).To(Equal(map[string]uint64{"E_RATE_LIMITED": offered() / 3}))
		Expect(s.Accepted).To(Equal(offered() - offered()/3))
		Expect(s.Lost).To(BeZero())
	})

	It("connects again after a fatal refusal, and says why", func() {
		var once sync.Once
		a.Refuse(func(string, []byte) (refusal *wire.Error) {
			once.Do(func() { refusal = wire.NewError(wire.CodePubFailed, "no room") })
			return refusal
		})
		begin()
		s := finish()
		Expect(s.Refused).To(Equal(map[string]uint64{"E_PUB_FAILED": 1}))
		Expect(s.Lost).To(BeNumerically(">=", 1))
		Expect(s.LastError).To(ContainSubstring("E_PUB_FAILED no room"))
		Expect(s.Accepted + s.Unanswered).To(Equal(offered() - 1))
	})

	It("bounds the codes it counts", func() {
		n := 0
		a.Refuse(func(string, []byte) *wire.Error {
			n++
			return &wire.Error{Code: wire.ErrorCode(fmt.Sprintf("E_%d", n))}
		})
		begin()
		s := finish()
		Expect(len(s.Refused)).To(BeNumerically("<=", 65))
		Expect(s.Refused[fleet.OtherCode]).To(Equal(offered() - 64))
	})

	It("survives a lost connection: what was unanswered is counted and not sent again", func() {
		length = time.Hour
		a.Hold(true)
		begin()
		Eventually(a.Held).Should(BeNumerically(">", 5))
		a.HangUp()
		a.Hold(false)
		Eventually(func() uint64 { return f.Stats().Accepted }).Should(BeNumerically(">", 20))
		f.Stop()
		s := finish()
		Expect(s.Unanswered).To(BeNumerically(">", 5))
		Expect(s.Lost).To(BeNumerically(">=", 20))
		Expect(s.Accepted).To(Equal(s.Offered - s.Unanswered))
		inOrder(true)
	})

	It("skips what it cannot hold while there is no broker", func() {
		spec.Rate, cfg.MaxWaiting, cfg.Drain = 1000, 3, time.Millisecond
		start()
		ready()
		a.Close()
		Eventually(func() int { return f.Stats().Connected }).Should(BeZero())
		f.Start(clock.Mono())
		s := finish()
		Expect(s.Skipped).To(Equal(offered()))
		Expect(s.Sent).To(BeZero())
		Expect(s.LastError).To(ContainSubstring("refused"))
	})

	It("does not send more than may be unanswered", func() {
		spec.Publishers, spec.Rate, cfg.MaxOutstanding, cfg.Drain = 1, 1000, 4, 20*time.Millisecond
		a.Hold(true)
		begin()
		s := finish()
		Expect(s.Sent).To(BeNumerically("==", 4))
		Expect(s.Unanswered).To(BeNumerically("==", 4))
		Expect(s.Skipped).To(Equal(offered() - 4))
		Expect(s.Held).To(Equal(offered() - 4))
	})

	It("answers heartbeats", func() {
		start()
		ready()
		a.Heartbeat()
		Eventually(func() (clients []string) {
			for _, e := range log.Events() {
				if e.Kind == fake.Nop {
					clients = append(clients, e.Client)
				}
			}
			return clients
		}).Should(HaveLen(20))
		f.Stop()
		finish()
	})

	DescribeTable("hangs up on a server that says what it may not", func(frame []byte, why string) {
		start()
		ready()
		a.Say(frame)
		Eventually(func() uint64 { return f.Stats().Strange }).Should(BeNumerically("==", 20))
		Eventually(func() int { return f.Stats().Connected }).Should(Equal(20))
		Expect(f.Stats().LastError).To(ContainSubstring(why))
		f.Start(clock.Mono())
		s := finish()
		Expect(s.Accepted).To(Equal(offered()))
	},
		Entry("an OK to nothing", wire.AppendResponse(nil, wire.OK), "an OK without a command"),
		Entry("an error to nothing", wire.AppendError(nil, wire.NewError(wire.CodeInvalid, "what?")), "E_INVALID what?"),
		Entry("a message", wire.AppendMessage(nil, 1, 1, wire.MessageID{}, []byte("m")), "unexpected message"),
		Entry("another response", wire.AppendResponse(nil, "NO"), "unexpected response"),
		Entry("no frame", []byte{0, 0, 0, 1, 0, 0, 0, 0}, "malformed frame"),
		Entry("too large a frame", []byte{0x7f, 0, 0, 0, 0, 0, 0, 0}, "malformed frame"),
	)

	It("stops early on Stop, and drains", func() {
		length = time.Hour
		begin()
		Eventually(func() uint64 { return f.Stats().Accepted }).Should(BeNumerically(">", 10))
		f.Stop()
		s := finish()
		Expect(s.Accepted).To(Equal(s.Offered))
		f.Stop()   // harmless
		f.Start(1) // too late
	})

	It("stops at once when its context ends", func() {
		length = time.Hour
		a.Hold(true)
		begin()
		Eventually(a.Held).Should(BeNumerically(">", 0))
		cancel()
		running.Wait()
		Expect(ended).To(MatchError(context.Canceled))
		s := f.Stats()
		Expect(s.Unanswered).To(BeNumerically(">", 0))
		Expect(s.Open()).To(BeZero())
		Expect(f.Ready(context.Background())).To(Succeed(), "it had been ready")
	})

	It("says who is missing when not everyone gets a connection", func() {
		a.Close()
		start()
		Eventually(func() error { return readyAtOnce(ctx, f) }).Should(And(
			MatchError(context.DeadlineExceeded),
			MatchError(And(ContainSubstring("0 of 20 publishers connected"), ContainSubstring("refused"))),
		))
		f.Stop()
		finish()
		Expect(f.Ready(context.Background())).To(MatchError(ContainSubstring("stopped before")))
	})

	Context("placed by assignments", func() {
		assign := func(broker *fake.Broker, epoch uint64, sources ...int32) {
			var all []fleet.Assignment
			if len(sources) == 0 {
				for i := range spec.Publishers {
					sources = append(sources, int32(i))
				}
			}
			for _, i := range sources {
				all = append(all, fleet.Assignment{Source: i, Address: broker.Address(), Epoch: epoch})
			}
			f.Assign(all)
		}
		// handedOver checks, for every client that moved, that its first publish at a broker came after the last answer
		// of the broker before.
		handedOver := func() (moves int) {
			GinkgoHelper()
			at, open := map[string]string{}, map[string]int{}
			for _, e := range log.Events() {
				switch e.Kind {
				case fake.Pub:
					if last, known := at[e.Client]; known && last != e.Broker {
						moves++
						Expect(open[e.Client]).To(BeZero(), "%s published at %s with unanswered publishes at %s", e.Client, e.Broker, last)
					}
					at[e.Client] = e.Broker
					open[e.Client]++
				case fake.Answer:
					open[e.Client]--
				}
			}
			return moves
		}
		BeforeEach(func() {
			cfg.Address = ""
			length = time.Hour
		})
		accepted := func() uint64 { return f.Stats().Accepted }
		more := func() {
			GinkgoHelper()
			was := accepted()
			Eventually(accepted).Should(BeNumerically(">", was+40))
		}

		// onA makes all publishers send at a.
		onA := func() {
			GinkgoHelper()
			start()
			assign(a, 1)
			ready()
			f.Start(clock.Mono())
		}

		It("connects no publisher before", func() {
			start()
			Expect(f.Stats().Connected).To(BeZero())
			Expect(log.Events()).To(BeEmpty())
			assign(a, 1)
			ready()
			Expect(a.Clients()).To(HaveLen(20))
			f.Stop()
			finish()
		})

		It("moves every publisher without loss and in order", func() {
			start()
			assign(a, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
			assign(b, 1, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
			ready()
			f.Start(clock.Mono())
			more()
			assign(b, 2)
			Eventually(a.Clients).Should(BeEmpty())
			more()
			assign(a, 3)
			Eventually(b.Clients).Should(BeEmpty())
			more()
			f.Stop()
			s := finish()
			Expect(s.Moved).To(BeNumerically("==", 30))
			Expect(s.Accepted).To(Equal(s.Offered))
			Expect(s.Lost).To(BeZero())
			inOrder(false)
			Expect(handedOver()).To(BeNumerically(">", 5))
		})

		It("waits for the old broker's last answer, and keeps what is due meanwhile", func() {
			onA()
			more()
			a.Hold(true)
			Eventually(a.Held).Should(BeNumerically(">=", 20))
			assign(b, 2)
			Eventually(b.Clients).Should(HaveLen(20))
			was := f.Stats()
			Eventually(func() uint64 { return f.Stats().Offered }).Should(BeNumerically(">", was.Offered+20))
			a.Hold(false)
			Eventually(a.Clients).Should(BeEmpty())
			more()
			f.Stop()
			s := finish()
			Expect(s.Accepted).To(Equal(s.Offered))
			Expect(s.Moved).To(BeNumerically("==", 20))
			Expect(handedOver()).To(BeNumerically(">", 5)) // clients that published at both brokers
			inOrder(false)
		})

		It("goes to the new broker when the old one hangs up first", func() {
			onA()
			a.Hold(true)
			Eventually(func() int { return len(a.Clients()) }).Should(Equal(20))
			Eventually(a.Held).Should(BeNumerically(">=", 20))
			assign(b, 2)
			Eventually(b.Clients).Should(HaveLen(20))
			a.HangUp()
			more()
			f.Stop()
			s := finish()
			Expect(s.Unanswered).To(BeNumerically(">=", 20))
			Expect(s.Accepted).To(Equal(s.Offered - s.Unanswered))
			inOrder(true) // the brokers may not have read the last messages
		})

		It("stays where it is while the new broker cannot be reached", func() {
			start()
			assign(a, 1)
			ready()
			b.Close()
			assign(b, 2)
			f.Start(clock.Mono())
			more()
			Eventually(func() uint64 { return f.Stats().Lost }).Should(BeNumerically(">", 20))
			more()
			assign(a, 3) // and the fleet gives up the dial
			more()
			f.Stop()
			s := finish()
			Expect(s.Accepted).To(Equal(s.Offered))
			Expect(s.Moved).To(BeZero())
		})

		It("ignores an assignment that is older than the last, and one for an unknown publisher", func() {
			start()
			assign(a, 5)
			ready()
			assign(b, 4)
			f.Assign([]fleet.Assignment{{Source: 20, Address: b.Address(), Epoch: 9}, {Source: -1, Address: b.Address(), Epoch: 9}})
			f.Start(clock.Mono())
			more()
			f.Stop()
			Expect(finish().Moved).To(BeZero())
			for _, e := range log.Events() {
				Expect(e.Broker).To(Equal("a"))
			}
		})

		It("skips what is due while a publisher has no place", func() {
			spec.Publishers, spec.Rate = 1, 1000
			start()
			f.Assign([]fleet.Assignment{{Address: a.Address(), Epoch: 1}})
			ready()
			f.Assign([]fleet.Assignment{{Epoch: 2}, {Source: 7, Epoch: 2}})
			Eventually(func() int { return f.Stats().Connected }).Should(BeZero())
			f.Start(clock.Mono())
			Eventually(func() uint64 { return f.Stats().Skipped }).Should(BeNumerically(">", 20))
			f.Assign([]fleet.Assignment{{Address: b.Address(), Epoch: 1}}) // an older epoch
			f.Assign([]fleet.Assignment{{Address: b.Address(), Epoch: 3}})
			more()
			f.Stop()
			s := finish()
			Expect(s.Accepted).To(BeNumerically("==", s.Offered-s.Skipped))
			Expect(s.Lost).To(BeZero())
			Eventually(a.Clients).Should(BeEmpty())
			inOrder(false)
		})

		It("answers for what was under way when a publisher lost its place", func() {
			spec.Publishers, spec.Rate = 1, 1000
			start()
			f.Assign([]fleet.Assignment{{Address: a.Address(), Epoch: 1}})
			ready()
			a.Hold(true)
			f.Start(clock.Mono())
			Eventually(a.Held).Should(BeNumerically(">", 3))
			f.Assign([]fleet.Assignment{{Epoch: 2}})
			Eventually(func() uint64 { return f.Stats().Skipped }).Should(BeNumerically(">", 3))
			a.Hold(false)
			f.Stop()
			s := finish()
			Expect(s.Accepted).To(Equal(s.Sent))
			Expect(s.Unanswered).To(BeZero())
			inOrder(false)
		})

		It("carries on after quick changes of mind", func() {
			onA()
			for epoch := uint64(2); epoch < 40; epoch++ {
				assign([]*fake.Broker{a, b}[epoch%2], epoch)
				f.Stats() // lets the worker act on the new assignment
			}
			assign(b, 40)
			Eventually(b.Clients).Should(HaveLen(20))
			more()
			Eventually(a.Clients).Should(BeEmpty())
			f.Stop()
			s := finish()
			Expect(s.Accepted).To(Equal(s.Offered))
			inOrder(false)
			handedOver()
		})
	})
}

var _ = Describe("New", func() {
	It("refuses what cannot work", func() {
		_, err := fleet.New(fleet.Config{})
		Expect(err).To(MatchError("a fleet without publishers"))
		_, err = fleet.New(fleet.Config{Sources: []schedule.Source{{ID: "a"}}, Heartbeat: 1})
		Expect(err).To(MatchError(ContainSubstring("heartbeat 1ns: want at least 1s")))
	})
	It("starts nothing", func() {
		f, err := fleet.New(fleet.Config{Sources: []schedule.Source{{ID: "a"}}, Address: "127.0.0.1:1"})
		Expect(err).NotTo(HaveOccurred())
		f.Stop()
		Expect(f.Run(context.Background())).To(Succeed())
		Expect(f.Accepted()).To(Equal(verify.NewSet(1)))
	})
	It("gives up an address that is none", func() {
		f, err := fleet.New(fleet.Config{Sources: []schedule.Source{{ID: "a"}}, Address: "nowhere"})
		Expect(err).NotTo(HaveOccurred())
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { _ = f.Run(ctx) })
		Eventually(func() error { return readyAtOnce(ctx, f) }).Should(MatchError(ContainSubstring("missing port")))
		cancel()
		running.Wait()
	})
})
