package client_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/pacing/header"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestClient(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "client")
}

const topic = "t"

var _ = Describe("a publisher", func() {
	var (
		log       *fake.Log
		a, b      *fake.Broker
		placement *fake.Placement
		cfg       client.Config
		c         *client.Client
		ctx       context.Context
	)
	broker := func(name string) *fake.Broker {
		GinkgoHelper()
		b, err := fake.NewBrokerAt(name, log, testkit.Address(GinkgoTB())) // the port stays reserved while the broker is down
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(b.Close)
		return b
	}
	BeforeEach(func() {
		log = &fake.Log{}
		a, b = broker("a"), broker("b")
		var err error
		placement, err = fake.NewPlacementAt(testkit.Address(GinkgoTB()))
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(func() { placement.Close() })
		placement.Place(topic, a.Address(), "p", "q")
		cfg = client.Config{Address: placement.Address()}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.Background(), testkit.Hang)
		DeferCleanup(cancel)
	})
	JustBeforeEach(func() {
		var err error
		c, err = client.New(cfg)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			_ = c.Close(ctx) // some specs leave publishes unanswered
		})
	})
	open := func(id string) *client.Publisher {
		GinkgoHelper()
		p, err := c.Publisher(ctx, topic, id)
		Expect(err).NotTo(HaveOccurred())
		return p
	}
	// read returns the bodies that brokers read, in their order.
	read := func() (bodies []string) {
		for _, e := range log.Events() {
			if e.Kind == fake.Pub {
				for _, body := range e.Bodies {
					bodies = append(bodies, e.Broker+":"+string(body))
				}
			}
		}
		return bodies
	}
	// async publishes and returns a channel for the result.
	async := func(ctx context.Context, p *client.Publisher, body string) <-chan error {
		done := make(chan error, 1)
		go func() { done <- p.Publish(ctx, []byte(body)) }()
		return done
	}
	place := func(b *fake.Broker, ids ...string) { placement.Place(topic, b.Address(), ids...) }

	It("publishes at the broker that is its own, under its own name", func() {
		p := open("p")
		Expect(p.Publish(ctx, []byte("1"))).To(Succeed())
		Expect(p.MultiPublish(ctx, [][]byte{[]byte("2"), []byte("3")})).To(Succeed())
		Expect(p.DeferredPublish(ctx, 1500*time.Millisecond, []byte("4"))).To(Succeed())
		Expect(p.Broker()).To(Equal(a.Address()))
		Expect(a.Clients()).To(Equal([]string{"p"}))
		Expect(read()).To(Equal([]string{"a:1", "a:2", "a:3", "a:4"}))
		for _, e := range log.Events() {
			if e.Kind == fake.Pub {
				Expect(e.Topic).To(Equal(topic))
				Expect(e.Delay > 0).To(Equal(string(e.Bodies[0]) == "4"))
			}
		}
	})

	Context("that requests advice on its rate", func() {
		BeforeEach(func() { cfg.BrokersPace, cfg.Weight, cfg.Pacing = true, 4, client.PacingReport })

		It("gets advice with the answers", func() {
			a.Paces()
			p := open("p")
			Expect(p.Publish(ctx, []byte("1"))).To(Succeed())
			Expect(p.Pace().Paced).To(BeFalse())
			a.Hold(true)
			done := async(ctx, p, "2")
			Eventually(a.Held).Should(Equal(1))
			a.Say(wire.AppendResponse(nil, header.AppendOK(nil, header.OK{Paced: true, Weight: 3, Interval: time.Minute, Rate: 5000, Burst: 2})))
			Eventually(done).Should(Receive(BeNil()))
			Expect(p.Pace()).To(And(HaveField("Paced", true), HaveField("Rate", 5.0), HaveField("Burst", int64(2)), HaveField("Weight", uint8(3))))
		})

		Context("once the topic is paced", func() {
			BeforeEach(func() { cfg.BrokersPace = false })

			It("requests advice then, on a connection that takes over from the one before", func() {
				a.Paces()
				p := open("p")
				Expect(p.Publish(ctx, []byte("1"))).To(Succeed())
				placement.Pace(topic)
				n := 1
				Eventually(func() []fake.Event {
					n++
					Expect(p.Publish(ctx, []byte(fmt.Sprint(n)))).To(Succeed())
					return log.Events()
				}).Should(ContainElement(And(HaveField("Kind", fake.Pace), HaveField("Client", "p"))))
				Eventually(a.Clients).Should(Equal([]string{"p"}))
				var want []string
				for i := range n {
					want = append(want, fmt.Sprint("a:", i+1))
				}
				Expect(read()).To(Equal(want))
			})
		})

		It("does without where the broker does not know it, and publishes all the same", func() {
			p := open("p")
			Expect(p.Publish(ctx, []byte("1"))).To(Succeed())
			Expect(p.Pace().Paced).To(BeFalse())
			Expect(read()).To(Equal([]string{"a:1"}))
		})
	})

	It("leaves the caller's slice alone", func() {
		p := open("p")
		body := []byte("before")
		a.Hold(true)
		short, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- p.Publish(short, body) }()
		Eventually(a.Held).Should(Equal(1))
		cancel()
		Expect(<-done).To(MatchError(client.ErrUnanswered))
		copy(body, "after!")
		Expect(read()).To(Equal([]string{"a:before"}))
	})

	DescribeTable("does not open an unknown topic or publisher, and returns ErrUnknown", func(topic, id string) {
		_, err := c.Publisher(ctx, topic, id)
		Expect(err).To(MatchError(client.ErrUnknown))
		Expect(err).To(MatchError(ContainSubstring("is unknown")))
	},
		Entry("topic", "nothing", "p"),
		Entry("publisher", topic, "nobody"),
	)

	It("refuses a topic whose name is none", func() {
		_, err := c.Publisher(ctx, "no topic", "p")
		Expect(err).To(MatchError(ContainSubstring(`topic "no topic" is no valid name`)))
	})

	It("is opened once", func() {
		open("p")
		_, err := c.Publisher(ctx, topic, "p")
		Expect(err).To(MatchError(ContainSubstring("is open already")))
	})

	It("can be opened again after it was closed", func() {
		for i := range 3 {
			p := open("p")
			Expect(p.Publish(ctx, []byte(strconv.Itoa(i)))).To(Succeed())
			Expect(p.Close(ctx)).To(Succeed())
		}
		Expect(read()).To(Equal([]string{"a:0", "a:1", "a:2"}))
	})

	It("waits until its topic is active", func() {
		placement.Prepare(topic)
		done := make(chan *client.Publisher)
		go func() {
			defer GinkgoRecover()
			done <- open("p")
		}()
		Consistently(done).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
		place(a, "p")
		Eventually(done).Should(Receive())
	})

	It("returns what it waited for when its time is over", func() {
		a.Close()
		briefly := func() error {
			short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			defer cancel()
			_, err := c.Publisher(short, topic, "p")
			return err
		}
		// A busy machine may not connect to the broker in this time.
		Eventually(briefly).Should(And(MatchError(context.DeadlineExceeded), MatchError(ContainSubstring("connect to broker "+a.Address()))))
		placement.Close()
		Expect(briefly()).To(MatchError(context.DeadlineExceeded))
	})

	It("passes a refusal on, and continues", func() {
		a.Refuse(func(_ string, body []byte) *wire.Error {
			if string(body) == "no" {
				return wire.RateLimited(20 * time.Millisecond)
			}
			return nil
		})
		p := open("p")
		err := p.Publish(ctx, []byte("no"))
		refused, ok := errors.AsType[*client.RefusedError](err)
		Expect(ok).To(BeTrue(), "%v", err)
		Expect(*refused).To(Equal(client.RefusedError{Code: "E_RATE_LIMITED", Text: "retry_after_ms=20"}))
		Expect(p.Publish(ctx, []byte("yes"))).To(Succeed())
	})

	It("does not send what every broker hangs up for", func() {
		p := open("p")
		Expect(p.Publish(ctx, nil)).To(MatchError("client: not sent: the message is empty"))
		Expect(p.DeferredPublish(ctx, time.Second, []byte{})).To(MatchError("client: not sent: the message is empty"))
		Expect(p.DeferredPublish(ctx, -1, []byte("x"))).To(MatchError("client: not sent: deferred by -1ns"))
		Expect(p.MultiPublish(ctx, [][]byte{[]byte("x"), nil})).To(MatchError("client: not sent: message 2 of 2 is empty"))
		Expect(p.MultiPublish(ctx, nil)).To(MatchError("client: not sent: there is no message"))
		Expect(p.Publish(ctx, []byte("1"))).To(Succeed())
		Expect(read()).To(Equal([]string{"a:1"}))
	})

	It("connects again after a fatal refusal", func() {
		a.Refuse(func(_ string, body []byte) *wire.Error {
			if string(body) == "no" {
				return wire.NewError(wire.CodePubFailed, "cannot")
			}
			return nil
		})
		p := open("p")
		Expect(p.Publish(ctx, []byte("no"))).To(MatchError(ContainSubstring("E_PUB_FAILED cannot")))
		Expect(p.Publish(ctx, []byte("yes"))).To(Succeed())
	})

	It("keeps the order of concurrent publishes, and bounds them", func() {
		p := open("p")
		a.Hold(true)
		var results []<-chan error
		for i := range 5 {
			results = append(results, async(ctx, p, strconv.Itoa(i)))
			Eventually(a.Held).Should(Equal(i + 1))
		}
		a.Hold(false)
		for _, done := range results {
			Eventually(done).Should(Receive(BeNil()))
		}
		Expect(read()).To(Equal([]string{"a:0", "a:1", "a:2", "a:3", "a:4"}))
	})

	It("keeps the order in which publishes were begun", func() {
		p := open("p")
		a.Hold(true)
		pending := []client.Pending{
			p.BeginPublish(ctx, []byte("0")),
			p.BeginMultiPublish(ctx, [][]byte{[]byte("1"), []byte("2")}),
			p.BeginDeferredPublish(ctx, time.Second, []byte("3")),
			p.BeginPublish(ctx, []byte("4")),
		}
		Eventually(a.Held).Should(Equal(4))
		a.Hold(false)
		for _, one := range pending {
			Expect(one.Wait()).To(Succeed())
		}
		Expect(read()).To(Equal([]string{"a:0", "a:1", "a:2", "a:3", "a:4"}))
		Expect(p.BeginMultiPublish(ctx, nil).Wait()).NotTo(Succeed())
		Expect(p.Close(ctx)).To(Succeed())
		Expect(p.BeginPublish(ctx, nil).Wait()).To(MatchError(client.ErrClosed))
	})

	Context("with few unanswered publishes allowed", func() {
		BeforeEach(func() { cfg.MaxOutstanding = 2 })
		It("sends no more", func() {
			p := open("p")
			a.Hold(true)
			var results []<-chan error
			for i := range 5 {
				results = append(results, async(ctx, p, strconv.Itoa(i)))
			}
			Eventually(a.Held).Should(Equal(2))
			Consistently(a.Held).WithTimeout(50 * time.Millisecond).Should(Equal(2))
			a.Hold(false)
			for _, done := range results {
				Eventually(done).Should(Receive(BeNil()))
			}
		})
	})

	Describe("moving to another broker", func() {
		It("publishes there after the last answer of the old one", func() {
			p := open("p")
			a.Hold(true)
			first := async(ctx, p, "1")
			Eventually(a.Held).Should(Equal(1))
			place(b, "p")
			Eventually(b.Clients).Should(Equal([]string{"p"}))
			second := async(ctx, p, "2")
			Consistently(read).WithTimeout(50 * time.Millisecond).Should(Equal([]string{"a:1"}))
			a.Hold(false)
			Eventually(first).Should(Receive(BeNil()))
			Eventually(second).Should(Receive(BeNil()))
			Expect(read()).To(Equal([]string{"a:1", "b:2"}))
			Expect(p.Broker()).To(Equal(b.Address()))
			Eventually(a.Clients).Should(BeEmpty())
		})

		It("loses, repeats and reorders nothing under load", func() {
			const publishers = 5
			var ids []string
			for i := range publishers {
				ids = append(ids, fmt.Sprintf("p%d", i))
			}
			place(a, ids...)
			stop := make(chan struct{})
			sent := make([]int, publishers)
			var sending sync.WaitGroup
			for i, id := range ids {
				p := open(id)
				sending.Go(func() {
					defer GinkgoRecover()
					for {
						select {
						case <-stop:
							return
						default:
						}
						Expect(p.Publish(ctx, []byte(fmt.Sprintf("%s/%d", id, sent[i])))).To(Succeed())
						sent[i]++
					}
				})
			}
			for i := range 6 {
				to := []*fake.Broker{b, a}[i%2]
				was := len(read())
				place(to, ids...)
				Eventually(to.Clients).Should(Equal(ids))
				Eventually(func() int { return len(read()) }).Should(BeNumerically(">", was+50))
			}
			close(stop)
			sending.Wait()
			next, at, unanswered := map[string]int{}, map[string]string{}, map[string]int{}
			moves := 0
			for _, e := range log.Events() {
				switch e.Kind {
				case fake.Pub:
					id, n, _ := strings.Cut(string(e.Bodies[0]), "/")
					Expect(n).To(Equal(strconv.Itoa(next[id])))
					next[id]++
					if last := at[id]; last != "" && last != e.Broker {
						moves++
						Expect(unanswered[id]).To(BeZero())
					}
					at[id] = e.Broker
					unanswered[id]++
				case fake.Answer:
					unanswered[e.Client]--
				}
			}
			for i, id := range ids {
				Expect(next[id]).To(Equal(sent[i]))
			}
			Expect(moves).To(BeNumerically(">=", publishers))
		})

		It("stays while the new broker cannot be reached", func() {
			p := open("p")
			b.Close()
			place(b, "p")
			for i := range 20 {
				Expect(p.Publish(ctx, []byte(strconv.Itoa(i)))).To(Succeed())
			}
			Expect(p.Broker()).To(Equal(a.Address()))
			place(a, "p") // the dials end
			Expect(p.Publish(ctx, []byte("20"))).To(Succeed())
		})

		It("holds what comes while it has no place", func() {
			p := open("p")
			a.Hold(true)
			first := async(ctx, p, "1")
			Eventually(a.Held).Should(Equal(1))
			Eventually(func() int { _, open := placement.Watches(); return open }).Should(Equal(1))
			placement.Displace(topic, "p")
			// The publisher learns of the loss before it accepts the next message.
			Eventually(func() error {
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				return p.Publish(short, []byte("probe"))
			}).Should(And(MatchError(context.DeadlineExceeded), Not(MatchError(client.ErrUnanswered))))
			probes := read()
			second := async(ctx, p, "2")
			a.Hold(false)
			Eventually(first).Should(Receive(BeNil()))
			Eventually(a.Clients).Should(BeEmpty()) // after the publisher's last answer
			Consistently(second).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
			place(b, "p")
			Eventually(second).Should(Receive(BeNil()))
			Expect(read()).To(Equal(append(probes, "b:2")))
		})

		It("is opened when it has a place", func() {
			placement.Displace(topic, "p")
			Eventually(func() error { // a machine may be too busy to answer in that time
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				_, err := c.Publisher(short, topic, "p")
				return err
			}).Should(MatchError(ContainSubstring("not placed yet")))
			place(b, "p")
			Expect(open("p").Broker()).To(Equal(b.Address()))
		})

		It("sends again what the old broker left unread", func() {
			p := open("p")
			place(b, "p")
			Eventually(p.Broker).Should(Equal(b.Address()))
			b.Hold(true)
			first := async(ctx, p, "1")
			Eventually(b.Held).Should(Equal(1))
			b.Hold(false)
			Eventually(first).Should(Receive(BeNil()))
			b.GiveAway()
			place(a, "p")
			Expect(p.Publish(ctx, []byte("2"))).To(Succeed())
			Expect(read()).To(Equal([]string{"b:1", "a:2"}))
		})

		Context("from a broker that does not answer", func() {
			BeforeEach(func() { cfg.DrainTimeout = 50 * time.Millisecond })
			It("gives up waiting", func() {
				p := open("p")
				a.Hold(true)
				first := async(ctx, p, "1")
				Eventually(a.Held).Should(Equal(1))
				place(b, "p")
				var err error
				Eventually(first).Should(Receive(&err))
				Expect(err).To(MatchError(client.ErrUnanswered))
				Expect(err).To(MatchError(ContainSubstring("no last answer within 50ms")))
				Expect(p.Publish(ctx, []byte("2"))).To(Succeed())
				Expect(read()).To(Equal([]string{"a:1", "b:2"}))
			})
		})

		Context("from a broker that does not answer, without a place at first", func() {
			BeforeEach(func() { cfg.DrainTimeout = time.Second })
			It("gives up waiting, too", func() {
				p := open("p")
				a.Hold(true)
				first := async(ctx, p, "1")
				Eventually(a.Held).Should(Equal(1))
				Eventually(func() int { _, open := placement.Watches(); return open }).Should(Equal(1))
				placement.Displace(topic, "p")
				Eventually(func() error {
					short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
					defer cancel()
					return p.Publish(short, []byte("probe"))
				}).Should(And(MatchError(context.DeadlineExceeded), Not(MatchError(client.ErrUnanswered))))
				place(b, "p")
				second := async(ctx, p, "2")
				Eventually(second).Should(Receive(BeNil()))
				Expect(p.Broker()).To(Equal(b.Address()))
				Eventually(first).Should(Receive(MatchError(ContainSubstring("no last answer within 1s"))))
			})
		})
	})

	Describe("losing its connection", func() {
		// underWay leaves one publish without an answer.
		underWay := func(ctx context.Context, p *client.Publisher) <-chan error {
			GinkgoHelper()
			a.Hold(true)
			done := async(ctx, p, "1")
			Eventually(a.Held).Should(Equal(1))
			return done
		}
		It("connects again, also when nothing was under way", func() {
			p := open("p")
			for i := range 3 {
				Expect(p.Publish(ctx, []byte(strconv.Itoa(i)))).To(Succeed())
				a.HangUp()
				Eventually(a.Clients).Should(Equal([]string{"p"}))
			}
		})
		It("waits for a broker that comes back", func() {
			p := open("p")
			address := a.Address()
			a.Close()
			done := async(ctx, p, "1")
			Consistently(done).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
			again, err := fake.NewBrokerAt("again", log, address)
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(again.Close)
			Eventually(done).Should(Receive(BeNil()))
			Expect(read()).To(Equal([]string{"again:1"}))
		})
		It("sends again after an orderly end", func() {
			done := underWay(ctx, open("p"))
			a.HangUp()
			a.Hold(false)
			Eventually(done).Should(Receive(BeNil()))
			Expect(read()).To(Equal([]string{"a:1", "a:1"}), "the fake had accepted it: the one case that duplicates")
		})
		It("does not send again what its caller has given up", func() {
			p := open("p")
			short, cancel := context.WithCancel(ctx)
			done := underWay(short, p)
			cancel()
			Eventually(done).Should(Receive(MatchError(client.ErrUnanswered)))
			a.HangUp()
			a.Hold(false)
			Expect(p.Publish(ctx, []byte("2"))).To(Succeed())
			Expect(read()).To(Equal([]string{"a:1", "a:2"}))
		})
		It("does not say that a message was not sent which is to be sent again", func() {
			p := open("p")
			done := underWay(ctx, p)
			a.Close() // like a killed broker
			over, cancel := context.WithCancel(ctx)
			cancel()
			Expect(p.Close(over)).NotTo(Succeed())
			Eventually(done).Should(Receive(MatchError(client.ErrUnanswered)))
		})
		It("does not send again after a reset", func() {
			p := open("p")
			done := underWay(ctx, p)
			a.Abort()
			var err error
			Eventually(done).Should(Receive(&err))
			Expect(err).To(MatchError(client.ErrUnanswered))
			Expect(err).To(MatchError(ContainSubstring("reset")))
			a.Hold(false)
			Expect(p.Publish(ctx, []byte("2"))).To(Succeed())
			Expect(read()).To(Equal([]string{"a:1", "a:2"}))
		})
		It("fails what was under way when the broker sends more answers than it got commands", func() {
			p := open("p")
			done := underWay(ctx, p)
			two := wire.AppendResponse(wire.AppendResponse(nil, wire.OK), wire.OK)
			a.Say(two)
			Eventually(done).Should(Receive(BeNil()), "the first OK is an answer")
			a.Hold(false)
			Expect(p.Publish(ctx, []byte("2"))).To(Succeed())
		})
		Context("with ResendAlways", func() {
			BeforeEach(func() { cfg.Resend = client.ResendAlways })
			It("sends again after a reset", func() {
				done := underWay(ctx, open("p"))
				a.Abort()
				a.Hold(false)
				Eventually(done).Should(Receive(BeNil()))
				Expect(read()).To(Equal([]string{"a:1", "a:1"}))
			})
			It("does not send again what its caller has given up", func() {
				p := open("p")
				short, cancel := context.WithCancel(ctx)
				done := underWay(short, p)
				place(b, "p")
				b.Close()
				a.Close() // no broker to move to
				cancel()
				Eventually(done).Should(Receive(And(MatchError(context.Canceled), MatchError(client.ErrUnanswered))))
				Expect(read()).To(Equal([]string{"a:1"}))
			})
		})
		Context("with ResendNever", func() {
			BeforeEach(func() { cfg.Resend = client.ResendNever })
			It("does not send again after an orderly end", func() {
				done := underWay(ctx, open("p"))
				a.HangUp()
				Eventually(done).Should(Receive(MatchError(client.ErrUnanswered)))
				Expect(read()).To(Equal([]string{"a:1"}))
			})
		})
	})

	Describe("contexts", func() {
		It("sends nothing for one that has ended", func() {
			p := open("p")
			ended, cancel := context.WithCancel(ctx)
			cancel()
			err := p.Publish(ended, []byte("1"))
			Expect(err).To(MatchError(context.Canceled))
			Expect(err).NotTo(MatchError(client.ErrUnanswered))
			Expect(read()).To(BeEmpty())
		})
		It("says that a message was not sent while there was no broker", func() {
			p := open("p")
			a.Close()
			Eventually(func() error {
				short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				return p.Publish(short, []byte("1"))
			}).Should(SatisfyAll(MatchError(ContainSubstring("not sent")), MatchError(context.DeadlineExceeded), Not(MatchError(client.ErrUnanswered))))
		})
	})

	Describe("the control plane", func() {
		It("is not needed to continue, and is followed once it is back", func() {
			p := open("p")
			address := placement.Address()
			placement.Close()
			for i := range 3 {
				Expect(p.Publish(ctx, []byte(strconv.Itoa(i)))).To(Succeed())
			}
			a.HangUp()
			Expect(p.Publish(ctx, []byte("3"))).To(Succeed())
			var err error
			placement, err = fake.NewPlacementAt(address)
			Expect(err).NotTo(HaveOccurred())
			for range 20 {
				place(a, "p")
			}
			place(b, "p")
			Eventually(p.Broker).Should(Equal(b.Address()))
			Expect(p.Publish(ctx, []byte("4"))).To(Succeed())
		})
		It("gets one stream for all publishers of a topic", func() {
			ids := []string{"p", "q"}
			for i := range 30 {
				ids = append(ids, fmt.Sprintf("r%02d", i))
			}
			place(a, ids...)
			began := time.Now()
			for _, id := range ids {
				open(id)
			}
			Eventually(func() int { _, open := placement.Watches(); return open }).Should(Equal(1))
			place(b, ids...)
			Eventually(b.Clients).Should(Equal(ids))
			Eventually(func() int { _, open := placement.Watches(); return open }).Should(Equal(1), "the one before ends")
			opened, _ := placement.Watches()
			// On a busy machine publishers come one at a time.
			Expect(opened).To(BeNumerically("<=", 1+time.Since(began)/client.JoinPause), "a stream waits for more to join before the next is opened")
		})
		It("does not let one publisher's removal touch the others", func() {
			p, q := open("p"), open("q")
			placement.Remove(topic, "p")
			Eventually(func() error { return p.Publish(ctx, []byte("1")) }).Should(MatchError(client.ErrUnknown))
			Expect(q.Publish(ctx, []byte("2"))).To(Succeed())
			place(b, "q")
			Eventually(q.Broker).Should(Equal(b.Address()))
			Expect(p.Publish(ctx, []byte("3"))).To(MatchError(client.ErrUnknown))
			place(b, "p")
			Eventually(func() error { return p.Publish(ctx, []byte("4")) }).Should(Succeed())
		})
		It("is watched for the others in the same stream while one is not declared", func() {
			p, q := open("p"), open("q")
			place(b, "q")
			Eventually(q.Broker).Should(Equal(b.Address()), "the stream is of both")
			opened, _ := placement.Watches()
			placement.Remove(topic, "p")
			Eventually(func() error { return p.Publish(ctx, []byte("1")) }).Should(MatchError(client.ErrUnknown))
			for _, at := range []*fake.Broker{a, b} {
				place(at, "q")
				Eventually(q.Broker).Should(Equal(at.Address()))
			}
			Expect(p.Publish(ctx, []byte("2"))).To(MatchError(client.ErrUnknown))
			still, open := placement.Watches()
			Expect(still).To(Equal(opened), "no stream ended")
			Expect(open).To(Equal(1))
		})
		It("ends what is published to a deleted topic, until there is one again", func() {
			p := open("p")
			placement.Delete(topic)
			Eventually(func() error { return p.Publish(ctx, []byte("1")) }).Should(MatchError(client.ErrUnknown))
			was := len(read())
			Expect(p.Publish(ctx, []byte("2"))).To(MatchError(client.ErrUnknown))
			Expect(read()).To(HaveLen(was), "a publish would create the topic anew, without its contract")
			place(b, "p")
			Eventually(func() error { return p.Publish(ctx, []byte("3")) }).Should(Succeed())
			Expect(read()[was:]).To(ContainElement("b:3"))
		})
	})

	Describe("closing", func() {
		It("waits for answers, and refuses what comes after", func() {
			p := open("p")
			a.Hold(true)
			first := async(ctx, p, "1")
			Eventually(a.Held).Should(Equal(1))
			closed := make(chan error, 1)
			go func() { closed <- p.Close(ctx) }()
			ended, cancel := context.WithCancel(ctx)
			cancel()
			Eventually(func() error { return p.Publish(ended, []byte("2")) }).Should(MatchError(client.ErrClosed))
			Consistently(closed).WithTimeout(50 * time.Millisecond).ShouldNot(Receive())
			a.Hold(false)
			Eventually(closed).Should(Receive(BeNil()))
			Expect(<-first).To(Succeed())
			Expect(p.Close(ctx)).To(Succeed())
			Eventually(a.Clients).Should(BeEmpty())
			Expect(read()).To(Equal([]string{"a:1"}))
		})
		It("gives up when its context ends", func() {
			p := open("p")
			a.Hold(true)
			first := async(ctx, p, "1")
			Eventually(a.Held).Should(Equal(1))
			ended, cancel := context.WithCancel(ctx)
			cancel()
			Expect(p.Close(ended)).To(MatchError(context.Canceled))
			Expect(<-first).To(MatchError(client.ErrUnanswered))
		})
		It("ends with its client", func() {
			p, q := open("p"), open("q")
			Expect(c.Close(ctx)).To(Succeed())
			Expect(p.Publish(ctx, []byte("1"))).To(MatchError(client.ErrClosed))
			Expect(q.Publish(ctx, []byte("1"))).To(MatchError(client.ErrClosed))
			_, err := c.Publisher(ctx, topic, "p")
			Expect(err).To(HaveOccurred())
			Eventually(a.Clients).Should(BeEmpty())
		})
	})

	It("needs no loaddistributor if its broker is configured", func() {
		c, err := client.New(client.Config{Broker: b.Address()})
		Expect(err).NotTo(HaveOccurred())
		for _, id := range []string{"x", "y"} {
			p, err := c.Publisher(ctx, topic, id)
			Expect(err).NotTo(HaveOccurred())
			Expect(p.Publish(ctx, []byte(id))).To(Succeed())
		}
		Expect(read()).To(Equal([]string{"b:x", "b:y"}))
		Expect(c.Close(ctx)).To(Succeed())
	})

	It("comes with a client of its own for those who need one only", func() {
		p, err := client.NewPublisher(ctx, cfg, topic, "p")
		Expect(err).NotTo(HaveOccurred())
		Expect(p.Publish(ctx, []byte("1"))).To(Succeed())
		Expect(p.Close(ctx)).To(Succeed())
		Eventually(func() int { _, open := placement.Watches(); return open }).Should(BeZero())
		_, err = client.NewPublisher(ctx, cfg, topic, "nobody")
		Expect(err).To(MatchError(client.ErrUnknown))
	})
})

var _ = Describe("New", func() {
	It("refuses a configuration with faults", func() {
		_, err := client.New(client.Config{})
		Expect(err).To(MatchError(ContainSubstring("no address")))
		_, err = client.New(client.Config{Address: "x:1", Broker: "y:1"})
		Expect(err).To(MatchError(ContainSubstring("addresses of both")))
		_, err = client.New(client.Config{Address: "x:1", MaxOutstanding: -1})
		Expect(err).To(MatchError(ContainSubstring("max outstanding -1")))
		bad := nsq.NewConfig()
		bad.HeartbeatInterval = bad.ReadTimeout + 1
		_, err = client.New(client.Config{Address: "x:1", NSQ: bad})
		Expect(err).To(MatchError(ContainSubstring("NSQ configuration")))
	})
})
