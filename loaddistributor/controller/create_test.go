package controller_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tokenbucket"
)

// fails matches a gRPC error with the code and the ErrorInfo reason.
func fails(code codes.Code, reason string) OmegaMatcher {
	return WithTransform(func(err error) string {
		s := status.Convert(err)
		for _, d := range s.Details() {
			if info, ok := d.(*errdetails.ErrorInfo); ok {
				return s.Code().String() + " " + info.Reason
			}
		}
		return s.Code().String() + " without a reason: " + s.Message()
	}, Equal(code.String()+" "+reason))
}

var _ = Describe("A dry run of a creation", func() {
	It("answers how the topic would be placed, or why it cannot be, and does nothing", func() {
		c := newCluster(setup{})
		node := agenttest.New()
		c.join("b1", 600, node)
		c.join("b2", 600, agenttest.New())
		plan := func(s *srtmv1.TopicSpec, key string) (*srtmv1.Topic, error) {
			stream, err := c.admin.CreateTopic(context.Background(), &srtmv1.CreateTopicRequest{Spec: s, DryRun: true, IdempotencyKey: key})
			Expect(err).NotTo(HaveOccurred())
			r, err := stream.Recv()
			return r.GetTopic(), err
		}
		planned, err := plan(spec("t", 1000, 10), "")
		Expect(err).NotTo(HaveOccurred())
		Expect(planned.Quotas).To(HaveLen(2))
		Expect(planned.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_PLACING))
		Expect(hasTopic(node, "t")()).To(BeFalse())
		Expect(c.broker("b1").Allocated).To(BeZero())
		_, err = plan(spec("t", 2000, 10), "")
		Expect(status.Code(err)).To(Equal(codes.ResourceExhausted))
		_, err = plan(spec("t", 1000, 10), "key")
		Expect(status.Code(err)).To(Equal(codes.InvalidArgument))

		c.mustCreate(spec("t", 1000, 10))
		_, err = plan(spec("t", 1000, 10), "")
		Expect(status.Code(err)).To(Equal(codes.AlreadyExists))
	})
})

var _ = Describe("Measuring a broker", func() {
	It("has a topic on it alone, beside its capacity, drained or full", func() {
		data := &store.Memory{}
		c := newCluster(setup{data: data})
		c.join("b1", 600, agenttest.New())
		b2 := c.join("b2", 400, agenttest.New())
		c.mustCreate(spec("full", 1000, 10))
		c.drain("b2")
		measure := func(id string, s *srtmv1.TopicSpec, key string) error {
			stream, err := c.admin.CreateTopic(context.Background(), &srtmv1.CreateTopicRequest{Spec: s, MeasuredBrokerId: id, IdempotencyKey: key})
			for err == nil {
				_, err = stream.Recv()
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		s := spec("m", 1_000_000, 1_000_000)
		Expect(status.Code(measure("b2", s, ""))).To(Equal(codes.InvalidArgument), "with publishers")
		s.Groups = nil
		Expect(status.Code(measure("b2", s, "key"))).To(Equal(codes.InvalidArgument))
		Expect(status.Code(measure("b3", s, ""))).To(Equal(codes.NotFound))
		Expect(measure("b2", s, "")).To(Succeed())
		Expect(c.broker("b2").Allocated).To(BeEquivalentTo(400))
		Expect(c.shares("m")).To(Equal(map[string]string{"b2": "1000000000/1000000"}))

		// The topic stays there, also under another leader.
		c.stop()
		c = newCluster(setup{data: data, address: c.address})
		Eventually(c.state("m")).Should(Equal("ACTIVE"))
		Consistently(func() int { return len(c.topic("m").Quotas) }, "2s").Should(Equal(1))
		c.mustDelete("m")
		Expect(hasTopic(b2.node, "m")()).To(BeFalse())
	})
})

var _ = Describe("Creating a topic", func() {
	It("places it, prepares the brokers, grants the shares, and then it is active", func() {
		c := newCluster(setup{})
		b1, b2 := c.join("b1", 600, agenttest.New()), c.join("b2", 600, agenttest.New())
		c.join("b3", 100, agenttest.New())
		s := spec("t", 1000, 40)
		s.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT
		topic, steps, err := c.create(context.Background(), s, "")
		Expect(err).NotTo(HaveOccurred())

		var states []srtmv1.TopicState
		for _, step := range steps {
			states = append(states, step.State)
		}
		Expect(states).To(Equal([]srtmv1.TopicState{
			srtmv1.TopicState_TOPIC_STATE_PLACING, srtmv1.TopicState_TOPIC_STATE_PREPARING,
			srtmv1.TopicState_TOPIC_STATE_PREPARING, srtmv1.TopicState_TOPIC_STATE_ACTIVE,
		}))
		Expect(topic.Epoch).NotTo(BeZero())
		Expect(topic.Quotas).To(HaveLen(2), "the fewest brokers that can carry it")
		for i, b := range []*broker{b1, b2} {
			q := topic.Quotas[i]
			Expect(q.BrokerId).To(Equal(b.id))
			Expect(q.Rate).To(BeEquivalentTo(500))
			Expect(q.Groups).To(Equal(map[string]uint32{"g": 500}))
			t, there := b.node.Topic("t")
			Expect(there).To(BeTrue())
			Expect(t.Identity).NotTo(BeNil())
			Expect(t).To(Equal(agenttest.Topic{
				Identity: t.Identity,
				Limited:  true, Channels: []string{"main"}, SLO: 5 * time.Millisecond, Quantile: 0.99,
				OverLimit: srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT,
				Share:     tokenbucket.Share{Rate: 500_000, Burst: 20},
				Base:      tokenbucket.Share{Rate: 500_000, Burst: 20}, // the rule is static
				FlexUntil: mono.Never, Until: mono.Never,
				Given:  20 * tokenbucket.Token, // an unused contract is full
				Grants: 1,
			}))
			Expect(c.broker(b.id).Allocated).To(BeEquivalentTo(500))
		}
		Expect(c.shares("t")).To(Equal(map[string]string{"b1": "500000/20", "b2": "500000/20"}))

		counts := map[string]int{}
		for i := range 1000 {
			a, err := c.control.View().Resolve("t", fmt.Sprintf("g.%d", i))
			Expect(err).NotTo(HaveOccurred())
			counts[a.Broker]++
		}
		Expect(counts).To(Equal(map[string]int{"b1": 500, "b2": 500}))
		r, err := c.resolve("t", "g.7")
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Assignment.PublisherId).To(Equal("g.7"))
		Expect(r.Assignment.BrokerId).To(BeElementOf("b1", "b2"))
		Expect(r.Assignment.TcpAddress).To(Equal(r.Assignment.BrokerId + ".example:4150"))
		Expect(r.Assignment.HttpAddress).To(Equal(r.Assignment.BrokerId + ".example:4151"))
		Expect(r.Assignment.Epoch).To(Equal(topic.Epoch))
		Expect(c.resolve("t", "g.1000")).Error().To(fails(codes.NotFound, rpc.ReasonPublisherUnknown))
		Expect(c.resolve("u", "g.1")).Error().To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
	})

	It("refuses a name that is taken, and one that is being created", func() {
		c := newCluster(setup{})
		b := c.join("b1", 100, agenttest.New())
		entered, release := b.hang()
		first := c.creating(context.Background(), spec("t", 10, 5), "")
		Eventually(entered).Should(BeClosed())
		Expect(<-c.creating(context.Background(), spec("t", 10, 5), "")).To(fails(codes.AlreadyExists, rpc.ReasonTopicExists))
		Expect(c.resolve("t", "g.1")).Error().To(fails(codes.FailedPrecondition, rpc.ReasonTopicNotActive))
		release()
		Eventually(first).Should(Receive(BeNil()))
		Expect(<-c.creating(context.Background(), spec("t", 10, 5), "")).To(fails(codes.AlreadyExists, rpc.ReasonTopicExists))
	})

	Describe("with an idempotency key", func() {
		It("returns the topic to a repetition, and refuses another request", func() {
			c := newCluster(setup{})
			c.join("b1", 100, agenttest.New())
			first := c.mustCreate(spec("t", 10, 5), "key")
			again := c.mustCreate(spec("t", 10, 5), "key")
			Expect(again.Epoch).To(Equal(first.Epoch))
			Expect(c.broker("b1").Allocated).To(BeEquivalentTo(10))

			Expect(<-c.creating(context.Background(), spec("t", 11, 5), "key")).To(fails(codes.FailedPrecondition, rpc.ReasonKeyReused))
			Expect(<-c.creating(context.Background(), spec("u", 10, 5), "key")).To(fails(codes.FailedPrecondition, rpc.ReasonKeyReused))
			Expect(<-c.creating(context.Background(), spec("t", 10, 5), "other key")).To(fails(codes.AlreadyExists, rpc.ReasonTopicExists))
		})

		It("lets a repetition wait with the first, whose caller may leave", func() {
			c := newCluster(setup{})
			b := c.join("b1", 100, agenttest.New())
			entered, release := b.hang()
			ctx, leave := context.WithCancel(context.Background())
			first, second := make(chan error, 1), make(chan error, 1)
			go func() {
				_, _, err := c.create(ctx, spec("t", 10, 5), "key")
				first <- err
			}()
			Eventually(entered).Should(BeClosed())
			stream, err := c.admin.CreateTopic(context.Background(), &srtmv1.CreateTopicRequest{Spec: spec("t", 10, 5), IdempotencyKey: "key"})
			Expect(err).NotTo(HaveOccurred())
			Expect(stream.Recv()).Error().NotTo(HaveOccurred())
			Expect(<-c.creating(context.Background(), spec("u", 10, 5), "key")).To(fails(codes.FailedPrecondition, rpc.ReasonKeyReused))
			go func() {
				var err error
				for err == nil {
					var r *srtmv1.CreateTopicResponse
					if r, err = stream.Recv(); r.GetTopic() != nil {
						break
					}
				}
				second <- err
			}()
			leave()
			Eventually(first).Should(Receive(failsWith(codes.Canceled)))
			release()
			Eventually(second).Should(Receive(BeNil()))
			Expect(c.state("t")()).To(Equal("ACTIVE"))
		})
	})

	Describe("when it fails", func() {
		It("reports what bound an infeasible one hits, and leaves nothing", func() {
			c := newCluster(setup{})
			_, _, err := c.create(context.Background(), spec("t", 10, 5), "")
			Expect(err).To(fails(codes.ResourceExhausted, rpc.ReasonInfeasible))
			Expect(infeasible(err)).To(Equal([]any{"brokers", int64(1), int64(0)}))

			b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 50, agenttest.New())
			_, _, err = c.create(context.Background(), spec("t", 111, 5), "")
			Expect(infeasible(err)).To(Equal([]any{"rcap", int64(111), int64(110)}))
			_, _, err = c.create(context.Background(), spec("t", 110, 1), "")
			Expect(infeasible(err)).To(Equal([]any{"burst", int64(2), int64(1)}))
			c.nothingLeft("t", b1, b2)
			c.mustCreate(spec("t", 110, 2))
		})

		It("rolls back when a broker refuses", func() {
			c := newCluster(setup{})
			b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
			b2.node.Sabotage(func(string) error { return errors.New("no more topics here") }, nil)
			_, _, err := c.create(context.Background(), spec("t", 100, 5), "key")
			Expect(err).To(fails(codes.Unavailable, rpc.ReasonBrokerFailed))
			Expect(err).To(MatchError(ContainSubstring("broker b2: refused: no more topics here")))
			c.nothingLeft("t", b1, b2)

			b2.node.Sabotage(nil, nil)
			Expect(<-c.creating(context.Background(), spec("t", 100, 5), "key")).NotTo(HaveOccurred())
		})

		It("rolls back when a broker does not answer, and clears the broker when it does", func() {
			c := newCluster(setup{prepareTimeout: 50 * time.Millisecond})
			b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
			_, release := b2.hang()
			_, _, err := c.create(context.Background(), spec("t", 100, 5), "")
			Expect(err).To(fails(codes.Unavailable, rpc.ReasonBrokerFailed))
			Expect(err).To(MatchError(ContainSubstring("broker b2: " + controller.ErrNoAnswer.Error())))
			c.nothingLeft("t", b1)
			release()
			Eventually(hasTopic(b2.node, "t")).Should(BeFalse())
		})

		It("rolls back when a broker disconnects meanwhile", func() {
			c := newCluster(setup{})
			b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
			entered, release := b2.hang()
			failed := c.creating(context.Background(), spec("t", 100, 5), "")
			Eventually(entered).Should(BeClosed())
			stopped := make(chan struct{})
			go func() { defer close(stopped); b2.stop() }()
			// The agent cannot stop while its node hangs, but the agent's session ends.
			var err error
			Eventually(failed).Should(Receive(&err))
			Expect(err).To(fails(codes.Unavailable, rpc.ReasonBrokerFailed))
			Expect(err).To(MatchError(ContainSubstring("broker b2: " + controller.ErrBrokerGone.Error())))
			release()
			Eventually(stopped).Should(BeClosed())
			c.nothingLeft("t", b1)

			// The broker gets the order when it is back, because its node still has the topic.
			b2.node.Sabotage(nil, nil)
			Expect(hasTopic(b2.node, "t")()).To(BeTrue())
			c.join("b2", 60, b2.node)
			Eventually(hasTopic(b2.node, "t")).Should(BeFalse())
		})

		It("rolls back when the brokers cannot reach the adaptor", func() {
			ln := listen("127.0.0.1:0")
			defer ln.Close() // accepts connections and sends nothing
			c := newCluster(setup{grantAddress: ln.Addr().String(), prepareTimeout: time.Second})
			b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
			_, _, err := c.create(context.Background(), spec("t", 100, 5), "")
			Expect(err).To(fails(codes.Unavailable, rpc.ReasonAdaptorFailed))
			Expect(err).To(MatchError(ContainSubstring("b1 (not connected), b2 (not connected)")))
			c.nothingLeft("t", b1, b2)
		})

		It("rolls back when the adaptor refuses, and when it is unavailable", func() {
			gate := &gate{}
			c := newCluster(setup{prepareTimeout: time.Second, wrap: gate.wrap})
			b1 := c.join("b1", 60, agenttest.New())
			gate.set(status.Error(codes.FailedPrecondition, "not today"))
			_, _, err := c.create(context.Background(), spec("t", 50, 5), "")
			Expect(err).To(fails(codes.Unavailable, rpc.ReasonAdaptorFailed))
			Expect(err).To(MatchError(ContainSubstring("not today")))
			c.nothingLeft("t", b1)

			gate.set(status.Error(codes.Unavailable, "connection refused"))
			Expect(<-c.creating(context.Background(), spec("t", 50, 5), "")).To(fails(codes.Unavailable, rpc.ReasonAdaptorFailed))
			c.nothingLeft("t", b1)

			gate.set(nil)
			c.mustCreate(spec("t", 50, 5))
		})

		// Clients can publish to a broker as soon as the broker has the topic. Here, b1 has acknowledged messages.
		Describe("leaves messages that were acknowledged meanwhile on their broker", func() {
			var c *cluster
			var b1, b2 *broker
			var removals atomic.Int64
			failing := func() {
				GinkgoHelper()
				b2.node.Sabotage(func(string) error { return errors.New("no more topics here") }, nil)
				Expect(<-c.creating(context.Background(), spec("t", 100, 5), "")).To(fails(codes.Unavailable, rpc.ReasonBrokerFailed))
				b2.node.Sabotage(nil, nil)
			}
			remains := func() {
				GinkgoHelper()
				Consistently(hasTopic(b1.node, "t"), "12s").Should(BeTrue())
				kept, _ := b1.node.Topic("t")
				Expect(kept.Retired).To(BeTrue(), "so that no more messages come")
				Expect(kept.Identity).To(BeNil())
				Expect(c.control.View().Topic("t")).Error().To(MatchError(catalog.ErrTopicUnknown))
				Expect(hasTopic(b2.node, "t")()).To(BeFalse())
			}
			continues := func() {
				GinkgoHelper()
				topic, _ := b1.node.Topic("t")
				Expect(topic.Retired).To(BeFalse())
				Expect(topic.Identity).NotTo(BeNil())
			}
			delivers := func() { // as a retiring broker
				GinkgoHelper()
				Eventually(func() map[string]string { return c.shares("t") }).Should(HaveKey("b1"), "a share to deliver the messages")
				Eventually(func() *srtmv1.TopicIdentity { kept, _ := b1.node.Topic("t"); return kept.Identity }).ShouldNot(BeNil())
				Consistently(removals.Load, "1s").Should(BeZero(), "also when the broker has prepared the topic")
				b1.node.Use("t", false)
				Eventually(hasTopic(b1.node, "t")).Should(BeFalse(), "its messages are gone")
				Expect(c.publishersByBroker("t", 50)).To(Equal(map[string]int{"b2": 50}))
				c.mustDelete("t")
				c.nothingLeft("t", b1, b2)
			}
			begin := func(options ...func(*controller.Config)) {
				removals.Store(0)
				c = newCluster(setup{prepareTimeout: time.Second, config: func(cfg *controller.Config) {
					for _, option := range options {
						option(cfg)
					}
				}})
				b1, b2 = c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
				b1.node.Use("t", true)
				b1.node.Sabotage(nil, func(string) error { removals.Add(1); return nil })
			}

			failingWithoutB1 := func() { // b1 has the topic and is away when the creation fails
				GinkgoHelper()
				begin()
				entered, release := b2.hang()
				failed := c.creating(context.Background(), spec("t", 100, 5), "")
				Eventually(entered).Should(BeClosed())
				Eventually(hasTopic(b1.node, "t")).Should(BeTrue())
				b1.stop()
				Eventually(failed).Should(Receive(HaveOccurred()))
				release()
			}

			It("for the next creation", func() {
				begin()
				failing()
				remains()
				b1.node.Measure("t", &srtmv1.TopicStats{Topic: "t", Backlog: 2})
				c.drain("b1")
				Eventually(func() string { return c.broker("b1").Waits[0].Reason }).Should(Equal("its creation failed after the broker had acknowledged 2 messages"))
				Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: "b1", Undo: true})).Error().NotTo(HaveOccurred())
				c.mustCreate(spec("t", 100, 5))
				continues()
				Expect(removals.Load()).To(BeZero())
				c.mustDelete("t")
				Eventually(hasTopic(b1.node, "t")).Should(BeFalse())
				c.nothingLeft("t", b1, b2)
			})

			It("from which the next creation, on other brokers, has them delivered", func() {
				begin()
				failing()
				c.drain("b1")
				c.mustCreate(spec("t", 50, 5))
				delivers()
			})

			It("and no topic is rebuilt from the failed creation if the store is lost", func() {
				begin()
				failing()
				c.stop()
				second := newCluster(setup{data: &store.Memory{}, address: c.address})
				Eventually(func() bool { return second.broker("b1").GetConnected() }).Should(BeTrue())
				Consistently(func() []catalog.Topic { return second.control.View().Topics("", 10) }, "20s").Should(BeEmpty())
				Expect(hasTopic(b1.node, "t")()).To(BeTrue())
				second.mustCreate(spec("t", 100, 5))
				continues()
				Expect(removals.Load()).To(BeZero())
			})

			It("where clients do not find them", func() {
				begin()
				failing()
				remains()
				_, _, found := c.control.View().Producers("t")
				Expect(found).To(BeFalse(), "so that a subscription creates the topic")
				Expect(c.control.View().TopicNames()).To(BeEmpty())
			})

			force := func() {
				GinkgoHelper()
				Expect(c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: "b1", Force: true})).Error().NotTo(HaveOccurred())
			}

			It("until a drain by force", func() {
				begin()
				failing()
				b1.node.Measure("t", &srtmv1.TopicStats{Topic: "t", Backlog: 2})
				remains()
				force()
				Eventually(hasTopic(b1.node, "t")).Should(BeFalse())
				Eventually(func() bool { return c.broker("b1").SafeToStop }).Should(BeTrue())
			})

			It("from which a drain by force leaves consumers of the next creation time to get them", func() {
				begin()
				failing()
				b1.node.Measure("t", &srtmv1.TopicStats{Topic: "t", Backlog: 2})
				remains()
				c.drain("b1")
				c.mustCreate(spec("t", 50, 5))
				force()
				Consistently(removals.Load, "500ms").Should(BeZero(), "not for a window yet")
				Eventually(hasTopic(b1.node, "t")).Should(BeFalse())
			})

			It("also if the journal is slow after the next creation", func() {
				g := &journalGate{}
				begin(gatedJournal(g))
				failing()
				c.drain("b1")
				c.mustCreate(spec("t", 50, 5))
				open := g.shut()
				Consistently(removals.Load, "30s").Should(BeZero())
				open()
				delivers()
			})

			It("until they are gone", func() {
				begin()
				failing()
				remains()
				b1.node.Use("t", false)
				Eventually(hasTopic(b1.node, "t")).Should(BeFalse())
				c.nothingLeft("t", b1, b2)
			})

			It("also if the broker is disconnected meanwhile", func() {
				failingWithoutB1()
				c.join("b1", 60, b1.node)
				remains()
				c.mustCreate(spec("t", 100, 5))
				continues()
				Expect(removals.Load()).To(BeZero())
			})

			It("also if the broker comes back after the next creation", func() {
				failingWithoutB1()
				c.mustCreate(spec("t", 50, 5))
				c.join("b1", 60, b1.node)
				delivers()
			})

			It("but not after the topic is created again and deleted", func() {
				begin()
				failing()
				c.drain("b1")
				c.mustCreate(spec("t", 50, 5))
				c.mustDelete("t")
				Eventually(hasTopic(b1.node, "t")).Should(BeFalse())
				c.nothingLeft("t", b1, b2)
			})
		})

		It("is rolled back when its caller leaves", func() {
			c := newCluster(setup{})
			b1 := c.join("b1", 60, agenttest.New())
			entered, release := b1.hang()
			ctx, leave := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() {
				_, err := c.control.Create(ctx, &catalog.Spec{
					Demand: placement.Demand{Topic: "t", Rate: 50, RateMilli: 50_000, Burst: 5},
					SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Millisecond}, Policy: "srtm", ShareRule: "static",
				}, "", "", func(controller.Progress) error { return nil })
				done <- err
			}()
			Eventually(entered).Should(BeClosed())
			leave()
			Eventually(done).Should(Receive(MatchError(context.Canceled)))
			release()
			Eventually(func() error { _, err := c.control.View().Topic("t"); return err }).Should(HaveOccurred())
			c.nothingLeft("t", b1)
		})

		It("is rolled back when the loaddistributor stops", func() {
			c := newCluster(setup{})
			b1, b2 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
			entered, release := b2.hang()
			done := c.creating(context.Background(), spec("t", 100, 5), "")
			Eventually(entered).Should(BeClosed())
			Eventually(hasTopic(b1.node, "t")).Should(BeTrue())
			stopped := make(chan struct{})
			go func() { defer close(stopped); c.stop() }()
			Eventually(hasTopic(b1.node, "t")).Should(BeFalse())
			release()
			Eventually(stopped).Should(BeClosed())
			Expect(<-done).To(fails(codes.Unavailable, rpc.ReasonShuttingDown))
			for _, b := range []*broker{b1, b2} {
				Expect(hasTopic(b.node, "t")()).To(BeFalse(), "broker %s", b.id)
			}
		})
	})

	It("bounds the sum of a tenant's contracts, however many requests come at the same time", func() {
		c := newCluster(setup{config: func(cfg *controller.Config) {
			cfg.TenantRates = map[string]tokenbucket.Rate{"acme": tokenbucket.PerSecond(100), "*": tokenbucket.PerSecond(30)}
		}})
		c.join("b1", 1000, agenttest.New())
		try := func(tenant, name string, rate int64) error {
			_, err := c.control.Create(context.Background(), &catalog.Spec{
				Demand: placement.Demand{Topic: name, Rate: rate, RateMilli: 1000 * rate, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 1, Rate: 1}}},
				SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Tenant: tenant,
			}, "", "", func(controller.Progress) error { return nil })
			return err
		}
		errs := make([]error, 5)
		var all sync.WaitGroup
		for i := range errs {
			all.Go(func() { errs[i] = try("acme", fmt.Sprintf("t%d", i), 30) })
		}
		all.Wait()
		created := 0
		for _, err := range errs {
			if err == nil {
				created++
			} else {
				Expect(errors.As(err, new(*controller.QuotaError))).To(BeTrue(), "%v", err)
			}
		}
		Expect(created).To(Equal(3))
		Expect(try("other", "o", 30)).To(Succeed())
		err := try("third", "p", 31)
		Expect(errors.As(err, new(*controller.QuotaError))).To(BeTrue())
		Expect(err).To(MatchError(ContainSubstring("31 msg/s beside the 0 msg/s of its other topics are more than 30 msg/s")))
		Expect(try("", "q", 500)).To(Succeed(), "an operator's")
		grow := func(to int64) error {
			_, err := c.control.Update(context.Background(), "o", 0, func(present *catalog.Spec) (*catalog.Spec, error) {
				more := *present
				more.Demand.Rate, more.Demand.RateMilli = to, 1000*to
				return &more, nil
			})
			return err
		}
		Expect(errors.As(grow(31), new(*controller.QuotaError))).To(BeTrue())
		Expect(grow(20)).To(Succeed())
		Expect(grow(30)).To(Succeed())
	})

	It("never allocates more than a broker carries, however many requests come at the same time", func() {
		c := newCluster(setup{})
		mcap := map[string]int64{"b1": 100, "b2": 150, "b3": 75}
		for id, m := range mcap {
			c.join(id, m, agenttest.New())
		}
		const topics = 100
		policies := []string{"srtm", "maxmin", "conc", "loadbalance"}
		errs := make([]error, topics)
		var all sync.WaitGroup
		for i := range topics {
			all.Go(func() {
				s := spec(fmt.Sprintf("t%d", i), int64(3+i), 100)
				s.PlacementPolicy = policies[i%len(policies)]
				_, _, errs[i] = c.create(context.Background(), s, "")
			})
		}
		all.Wait()
		var sum int64
		created := 0
		for i, err := range errs {
			if err == nil {
				created++
				sum += int64(3 + i)
				topic := c.topic(fmt.Sprintf("t%d", i))
				Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
				var quotas int64
				for _, q := range topic.Quotas {
					quotas += q.Rate
				}
				Expect(quotas).To(BeEquivalentTo(3+i), "quotas of %v", topic)
			} else {
				Expect(err).To(fails(codes.ResourceExhausted, rpc.ReasonInfeasible))
			}
		}
		var allocated int64
		for _, b := range c.brokers() {
			Expect(b.Allocated).To(BeNumerically("<=", mcap[b.Id]), "broker %s", b.Id)
			allocated += b.Allocated
		}
		Expect(allocated).To(Equal(sum))
		Expect(created).To(And(BeNumerically(">", 0), BeNumerically("<", topics)), "some fit, not all")
	})
})

func failsWith(code codes.Code) OmegaMatcher {
	return WithTransform(func(err error) codes.Code { return status.Code(err) }, Equal(code))
}

func infeasible(err error) []any {
	for _, d := range status.Convert(err).Details() {
		if i, ok := d.(*srtmv1.Infeasible); ok {
			return []any{i.Bound, i.Need, i.Have}
		}
	}
	return nil
}

// fits returns the feasible values that an error reports.
func fits(err error) *srtmv1.Fits {
	for _, d := range status.Convert(err).Details() {
		if i, ok := d.(*srtmv1.Infeasible); ok {
			return i.Fits
		}
	}
	return nil
}

// gate is an adaptor whose SetContract fails on request.
type gate struct {
	controller.Adaptor
	mu  sync.Mutex
	err error
}

func (g *gate) wrap(a controller.Adaptor) controller.Adaptor { g.Adaptor = a; return g }

func (g *gate) set(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.err = err
}

func (g *gate) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	g.mu.Lock()
	err := g.err
	g.mu.Unlock()
	if err != nil {
		return err
	}
	return g.Adaptor.Set(ctx, c, mode)
}

// removeGate is an adaptor that accepts no removals while the gate is closed.
type removeGate struct {
	controller.Adaptor
	closed atomic.Bool
}

func (g *removeGate) wrap(a controller.Adaptor) controller.Adaptor { g.Adaptor = a; return g }

func (g *removeGate) Remove(ctx context.Context, topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	if g.closed.Load() {
		return nil, status.Error(codes.Unavailable, "connection refused")
	}
	return g.Adaptor.Remove(ctx, topic, awaited, strict)
}
