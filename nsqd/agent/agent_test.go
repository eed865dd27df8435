package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tokenbucket"
)

// session is the serving end of a stream, which the spec drives.
type session[In, Out any] struct {
	in     chan *In
	out    chan *Out
	end    chan error // the handler's return value
	closed <-chan struct{}
}

func serve[In, Out any](stream grpc.BidiStreamingServer[In, Out], to chan *session[In, Out], down <-chan struct{}) error {
	s := &session[In, Out]{in: make(chan *In, 10_000), out: make(chan *Out), end: make(chan error, 1), closed: stream.Context().Done()}
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			s.in <- m
		}
	})
	to <- s
	for {
		select {
		case m := <-s.out:
			if err := stream.Send(m); err != nil {
				return err
			}
		case err := <-s.end:
			return err
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-down:
			return status.Error(codes.Unavailable, "down")
		}
	}
}

type (
	controlSession = session[srtmv1.BrokerMessage, srtmv1.ControllerMessage]
	grantSession   = session[srtmv1.NodeMessage, srtmv1.GrantMessage]
)

// plane is a control plane that the spec drives.
type plane struct {
	srtmv1.UnimplementedBrokerServiceServer
	srtmv1.UnimplementedGrantServiceServer
	address string
	control chan *controlSession
	grants  chan *grantSession
	down    chan struct{}
	stop    func()
}

type controlService struct{ *plane }
type grantService struct{ *plane }

func (s controlService) Session(stream grpc.BidiStreamingServer[srtmv1.BrokerMessage, srtmv1.ControllerMessage]) error {
	return serve(stream, s.control, s.down)
}

func (s grantService) Session(stream grpc.BidiStreamingServer[srtmv1.NodeMessage, srtmv1.GrantMessage]) error {
	return serve(stream, s.grants, s.down)
}

func newPlane() *plane {
	GinkgoHelper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	p := &plane{
		address: ln.Addr().String(), control: make(chan *controlSession, 10), grants: make(chan *grantSession, 10),
		down: make(chan struct{}),
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	srtmv1.RegisterBrokerServiceServer(server, controlService{p})
	srtmv1.RegisterGrantServiceServer(server, grantService{p})
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	p.stop = sync.OnceFunc(func() {
		close(p.down)
		server.Stop()
		<-served
	})
	DeferCleanup(func() { p.stop() })
	return p
}

func config(address string) agent.Config {
	return agent.Config{
		LoadDistributor: address, BrokerID: "b1", Instance: "i1", TCPAddress: "b1.example:4150", HTTPAddress: "b1.example:4151",
		Hostname: "host", Mcap: 500, Version: "1.2.3",
		Log: slog.New(slog.NewTextHandler(GinkgoWriter, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

func run(a *agent.Agent) (stop func()) {
	return testkit.Run(GinkgoTB(), a.Run)
}

// next returns the next message of a kind, and skips others.
func next[In, Out, T any](s *session[In, Out], pick func(*In) T) T {
	GinkgoHelper()
	var got T
	Eventually(func() bool {
		select {
		case m := <-s.in:
			got = pick(m)
			return any(got) != any(*new(T))
		default:
			return false
		}
	}).Should(BeTrue(), "a %T", got)
	return got
}

func accept[S any](sessions chan S) S {
	GinkgoHelper()
	var s S
	Eventually(sessions).Should(Receive(&s))
	return s
}

// send sends a message to the broker.
func (s *session[In, Out]) send(m *Out) {
	GinkgoHelper()
	Eventually(s.out).Should(BeSent(m))
}

func welcome(grants string, interval time.Duration) *srtmv1.ControllerMessage {
	return &srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Hello{Hello: &srtmv1.ControllerHello{
		GrantAddress: grants, ReportInterval: durationpb.New(interval),
	}}}
}

func prepare(request uint64, topic string) *srtmv1.ControllerMessage {
	return &srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Prepare{Prepare: &srtmv1.PrepareTopic{
		Request: request, Topic: topic, Channels: []*srtmv1.TopicChannel{{Name: "c", Created: 1}}, ChannelsVersion: 1,
		Slo: &srtmv1.Slo{Quantile: 0.9, Latency: durationpb.New(time.Millisecond)},
	}}}
}

func remove(request uint64, topic string) *srtmv1.ControllerMessage {
	return &srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Remove{Remove: &srtmv1.RemoveTopic{Request: request, Topic: topic}}}
}

func grant(topic string, epoch uint64, rate, burst, tokens int64) *srtmv1.GrantMessage {
	return &srtmv1.GrantMessage{Message: &srtmv1.GrantMessage_Grant{Grant: &srtmv1.Grant{
		Topic: topic, Epoch: epoch, Share: &srtmv1.Share{RateMilli: rate, Burst: burst}, TokensMilli: tokens,
	}}}
}

func result(s *controlSession) *srtmv1.PrepareResult {
	GinkgoHelper()
	return next(s, (*srtmv1.BrokerMessage).GetPrepareResult)
}

// ack returns the next acknowledgement as topic, epoch, rate, burst, released.
func ack(s *grantSession) []any {
	GinkgoHelper()
	a := next(s, (*srtmv1.NodeMessage).GetAck)
	return []any{a.Topic, a.Epoch, a.GetShare().GetRateMilli(), a.GetShare().GetBurst(), a.ReleasedTokensMilli}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

var _ = Describe("The agent", func() {
	var p *plane
	var node *agenttest.Node
	var stop func()
	var subject *agent.Agent
	BeforeEach(func() {
		p, node = newPlane(), agenttest.New()
		var err error
		subject, err = agent.New(config(p.address), node)
		Expect(err).NotTo(HaveOccurred())
	})
	joined := func() (*controlSession, *grantSession) {
		GinkgoHelper()
		stop = run(subject)
		control := accept(p.control)
		next(control, (*srtmv1.BrokerMessage).GetHello)
		control.send(welcome("", time.Minute))
		grants := accept(p.grants)
		next(grants, (*srtmv1.NodeMessage).GetHello)
		return control, grants
	}

	It("sends its identity, and requests grants at the address that it gets", func() {
		node.Create("z")
		node.Create("a")
		other := newPlane()
		run(subject)
		control := accept(p.control)
		hello := next(control, (*srtmv1.BrokerMessage).GetHello)
		Expect(hello.BrokerId).To(Equal("b1"))
		Expect(hello.Instance).To(Equal("i1"))
		Expect(hello.TcpAddress).To(Equal("b1.example:4150"))
		Expect(hello.HttpAddress).To(Equal("b1.example:4151"))
		Expect(hello.Hostname).To(Equal("host"))
		Expect(hello.Version).To(Equal("1.2.3"))
		Expect(hello.Mcap).To(BeEquivalentTo(500))
		Expect(hello.Topics).To(Equal([]string{"a", "z"}))

		control.send(welcome(other.address, time.Second))
		first := accept(other.grants)
		Expect(next(first, (*srtmv1.NodeMessage).GetHello).BrokerId).To(Equal("b1"))
		Consistently(p.grants, "10ms").ShouldNot(Receive())

		control.send(welcome("", time.Second)) // the grant stream moves to the control stream's address
		second := accept(p.grants)
		again := next(second, (*srtmv1.NodeMessage).GetHello)
		Expect(again.Instance).To(Equal("i1"))
		Expect(again.Stamp).To(BeNumerically(">", hello.Stamp))
		Eventually(first.closed).Should(BeClosed())
	})

	It("prepares and removes topics, and reports why it cannot", func() {
		control, _ := joined()
		control.send(prepare(1, "t"))
		Expect(result(control)).To(HaveField("Error", ""))
		t, there := node.Topic("t")
		Expect(there).To(BeTrue())
		Expect(t.Channels).To(Equal([]string{"c"}))
		Expect(t.SLO).To(Equal(time.Millisecond))
		Expect(t.Quantile).To(Equal(0.9))
		Expect(t.Share.IsZero()).To(BeTrue(), "nothing is released before a grant")

		bad := prepare(2, "u")
		bad.GetPrepare().Slo.Quantile = 1
		control.send(bad)
		r := result(control)
		Expect(r.Request).To(BeEquivalentTo(2))
		Expect(r.Error).To(ContainSubstring("quantile 1"))
		durable := prepare(7, "u")
		durable.GetPrepare().Durability = srtmv1.Durability_DURABILITY_FSYNC
		control.send(durable)
		Expect(result(control).Error).To(HavePrefix("the topic wants --durability=fsync, and this broker has "))

		node.Sabotage(func(string) error { return errors.New("disk full") }, func(string) error { return errors.New("still read") })
		control.send(prepare(3, "u"))
		Expect(result(control)).To(HaveField("Error", "disk full"))
		control.send(remove(4, "t"))
		Expect(result(control)).To(HaveField("Error", "still read"))
		node.Sabotage(nil, nil)
		control.send(remove(5, "t"))
		Expect(result(control)).To(HaveField("Error", ""))
		Expect(node.Topics()).To(BeEmpty())
		control.send(remove(6, "never was"))
		Expect(result(control)).To(HaveField("Error", ""))
	})

	It("has in force what it is granted after another process had its id", func() {
		control, grants := joined()
		defer stop()
		control.send(prepare(1, "t"))
		Expect(result(control).Error).To(BeEmpty())
		grants.send(grant("t", 1, 10_000, 5, 0))
		Expect(ack(grants)).To(HaveExactElements("t", uint64(1), int64(10_000), int64(5), int64(0)))

		grants.end <- service.CodedError(codes.AlreadyExists, errors.New("in use"), &errdetails.ErrorInfo{Reason: identity.ReasonInUse})
		again := accept(p.grants)
		Expect(next(again, (*srtmv1.NodeMessage).GetHello).Held).To(BeEmpty())
		t, _ := node.Topic("t")
		Expect(t.Share.IsZero()).To(BeTrue(), "it has given up its share")
		again.send(grant("t", 2, 20_000, 6, 1000))
		Expect(ack(again)).To(HaveExactElements("t", uint64(2), int64(20_000), int64(6), int64(0)))
		t, _ = node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 20_000, Burst: 6}), "the control session has no reason to prepare the topic again")
	})

	order := func(request uint64, topic, channel string) *srtmv1.ControllerMessage {
		return &srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_ChannelOrder{ChannelOrder: &srtmv1.ChannelOrder{
			Request: request, Topic: topic, Version: request, Channels: []*srtmv1.TopicChannel{{Name: channel, Created: request}},
		}}}
	}
	applied := func(s *controlSession) *srtmv1.ChannelsApplied {
		GinkgoHelper()
		return next(s, (*srtmv1.BrokerMessage).GetChannelsApplied)
	}

	It("carries out channel orders beside the owner, and answers when the disk has them", func() {
		control, grants := joined()
		defer stop()
		for i, topic := range []string{"t", "u"} {
			control.send(prepare(uint64(i+1), topic))
			Expect(result(control)).To(HaveField("Error", ""))
		}
		begun, disk := make(chan string, 10), make(chan error)
		node.SabotageChange(func(topic string) error {
			begun <- topic
			return <-disk
		})
		control.send(order(11, "t", "d"))
		Eventually(begun).Should(Receive(Equal("t")))
		// The disk has written nothing yet.
		grants.send(grant("u", 1, 1000, 2, 0))
		Expect(ack(grants)).To(Equal([]any{"u", uint64(1), int64(1000), int64(2), int64(0)}))
		again := prepare(20, "t")
		again.GetPrepare().ChannelsVersion = 1
		control.send(again)
		disk <- nil
		var first *srtmv1.BrokerMessage
		Eventually(control.in).Should(Receive(&first))
		Expect(first.GetChannelsApplied().GetRequest()).To(Equal(uint64(11)), "%v: before the PrepareTopic that follows", first)
		Expect(result(control)).To(And(HaveField("Request", uint64(20)), HaveField("Error", "")))
		is, _ := node.Topic("t")
		Expect(is.Channels).To(Equal([]string{"c", "d"}))
	})

	It("carries out a channel order after the message before it", func() {
		control, _ := joined()
		defer stop()
		entered, disk := make(chan struct{}), make(chan error)
		node.Sabotage(func(string) error {
			close(entered)
			return <-disk
		}, nil)
		begun := make(chan string, 10)
		node.SabotageChange(func(topic string) error {
			begun <- topic
			return nil
		})
		control.send(prepare(1, "t"))
		Eventually(entered).Should(BeClosed())
		control.send(order(2, "t", "d"))
		Consistently(begun, "50ms").ShouldNot(Receive())
		disk <- nil
		Expect(result(control)).To(HaveField("Error", ""))
		Expect(applied(control)).To(HaveField("Request", uint64(2)))
		is, _ := node.Topic("t")
		Expect(is.Channels).To(Equal([]string{"c", "d"}))
	})

	It("carries out the orders of a session before the next session begins", func() {
		control, _ := joined()
		defer stop()
		control.send(prepare(1, "t"))
		Expect(result(control)).To(HaveField("Error", ""))
		begun, disk := make(chan string, 10), make(chan error)
		node.SabotageChange(func(topic string) error {
			begun <- topic
			return <-disk
		})
		control.send(order(11, "t", "d"))
		Eventually(begun).Should(Receive())
		control.end <- nil
		Eventually(func() bool { return subject.State().Control.Connected }).Should(BeFalse())
		Consistently(p.control, "50ms").ShouldNot(Receive())
		disk <- nil
		control = accept(p.control)
		next(control, (*srtmv1.BrokerMessage).GetHello)
		is, _ := node.Topic("t")
		Expect(is.Channels).To(Equal([]string{"c", "d"}))
	})

	It("deletes what it has of a topic of the same name that was deleted, once", func() {
		control, _ := joined()
		defer stop()
		order := func(log, created uint64, deletedBefore bool) (channels []string) {
			GinkgoHelper()
			m := prepare(1, "t")
			m.GetPrepare().Identity = &srtmv1.TopicIdentity{Log: log, Created: created}
			m.GetPrepare().DeletedBefore = deletedBefore
			control.send(m)
			Expect(result(control).Error).To(BeEmpty())
			t, _ := node.Topic("t")
			Expect(t.Identity).To(HaveField("Created", created))
			return t.Channels
		}
		old := []string{"c", "old"}
		node.Create("t", "old")
		Expect(order(1, 5, false)).To(Equal(old), "it had no identity")
		Expect(order(1, 5, true)).To(Equal(old), "it is that one")
		Expect(order(2, 7, false)).To(Equal(old), "of another log")
		Expect(order(2, 6, false)).To(Equal(old), "of that log as it was before")
		Expect(order(2, 9, false)).To(Equal([]string{"c"}), "of an earlier topic")
		node.Create("t", "old")
		Expect(order(2, 9, true)).To(Equal([]string{"c"}), "what had no identity is of the one that was deleted")
		node.Create("t", "old")
		control.send(prepare(1, "t"))
		Expect(result(control).Error).To(BeEmpty())
		t, _ := node.Topic("t")
		Expect(t.Channels).To(Equal(old), "an order without an identity")
	})

	It("keeps the records of its topics, and gives them back", func() {
		control, _ := joined()
		defer stop()
		recalled := func(topics ...string) (all []string) {
			GinkgoHelper()
			control.send(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Recall{Recall: &srtmv1.RecallTopics{Topics: topics}}})
			for _, r := range next(control, (*srtmv1.BrokerMessage).GetRecords).Records {
				all = append(all, fmt.Sprintf("%s:%.3s", r.Topic, r.Record))
			}
			return all
		}
		keep := func(topic, record string) *srtmv1.ControllerMessage {
			return &srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Keep{Keep: &srtmv1.KeepRecord{Topic: topic, Record: []byte(record)}}}
		}
		for _, topic := range []string{"t", "u"} {
			m := prepare(1, topic)
			m.GetPrepare().Record = []byte("old")
			control.send(m)
			Expect(result(control).Error).To(BeEmpty())
		}
		control.send(keep("t", "new"))
		control.send(keep("nowhere", "new"))
		Expect(recalled("nowhere", "u", "t")).To(Equal([]string{"nowhere:", "u:old", "t:new"}))
		control.send(keep("t", strings.Repeat("x", 1<<20)))
		Expect(recalled("t", "u")).To(Equal([]string{"t:xxx"}), "what fits; one at least")
		Expect(recalled("u", "t")).To(Equal([]string{"u:old"}))
		control.send(prepare(1, "u"))
		Expect(result(control).Error).To(BeEmpty())
		control.send(remove(1, "t"))
		Expect(result(control).Error).To(BeEmpty())
		Expect(recalled("t", "u")).To(Equal([]string{"t:", "u:old"}))
	})

	It("puts grants in force in the order of their epochs", func() {
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(grant("t", 7, 50_000, 4, 4000))
		Expect(ack(grants)).To(Equal([]any{"t", uint64(7), int64(50_000), int64(4), int64(0)}))
		grants.send(grant("t", 6, 90_000, 9, 9000)) // an older epoch
		Expect(ack(grants)).To(Equal([]any{"t", uint64(7), int64(50_000), int64(4), int64(0)}))
		grants.send(grant("t", 8, -1, 1, 0)) // invalid values
		Expect(ack(grants)).To(Equal([]any{"t", uint64(7), int64(50_000), int64(4), int64(0)}))
		grants.send(grant("t", 9, 50_000, 1, 0))
		Expect(ack(grants)).To(Equal([]any{"t", uint64(9), int64(50_000), int64(1), int64(3000)}), "what does not fit is given back")
		t, _ := node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 1}))
		Expect(t.Grants).To(Equal(2))
	})

	It("keeps a grant that comes before its topic", func() {
		control, grants := joined()
		grants.send(grant("t", 7, 50_000, 4, 4000))
		Expect(ack(grants)).To(Equal([]any{"t", uint64(7), int64(50_000), int64(4), int64(0)}))
		control.send(prepare(1, "t"))
		result(control)
		t, _ := node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 4}))
		Expect(t.Given).To(Equal(4 * tokenbucket.Token))

		// A topic deleted without the agent gets its share when the topic is prepared again.
		node.Drop("t")
		grants.send(grant("t", 8, 60_000, 5, 1000))
		Expect(ack(grants)).To(Equal([]any{"t", uint64(8), int64(60_000), int64(5), int64(0)}))
		control.send(prepare(2, "t"))
		result(control)
		t, _ = node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 60_000, Burst: 5}))
		Expect(t.Given).To(Equal(1*tokenbucket.Token), "the tokens of the deleted one are gone")
	})

	It("puts the share it holds in force again when its topic was deleted behind its back", func() {
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(grant("t", 7, 50_000, 4, 4000))
		ack(grants)
		node.Drop("t")
		control.send(prepare(2, "t"))
		result(control)
		t, _ := node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 4}), "the adaptor counts on it")
		Expect(t.Given).To(BeZero(), "the tokens of the deleted one are gone")
		grants.send(grant("t", 8, 60_000, 5, 0))
		Expect(ack(grants)).To(Equal([]any{"t", uint64(8), int64(60_000), int64(5), int64(0)}))

		By("creating it anew there")
		node.Create("t")
		control.send(prepare(5, "t"))
		result(control)
		t, _ = node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 60_000, Burst: 5}))
		Expect(t.Given).To(BeZero())

		control.send(prepare(3, "never granted"))
		result(control)
		node.Drop("never granted")
		control.send(prepare(4, "never granted"))
		result(control)
		t, _ = node.Topic("never granted")
		Expect(t.Share.IsZero()).To(BeTrue())
		Eventually(func() int { return subject.State().Kept }).Should(BeZero())
	})

	It("logs that it cannot reach the loaddistributor, once", func() {
		var log bytes.Buffer
		var mu sync.Mutex
		lines := func() string {
			mu.Lock()
			defer mu.Unlock()
			return log.String()
		}
		p.stop()
		cfg := config(p.address)
		cfg.Log = slog.New(slog.NewTextHandler(writer(func(b []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(b)
		}), nil))
		a, err := agent.New(cfg, node)
		Expect(err).NotTo(HaveOccurred())
		run(a)
		Eventually(lines).Should(And(ContainSubstring("level=WARN"), ContainSubstring("cannot connect"), ContainSubstring("connection refused"), ContainSubstring(p.address)))
		Consistently(lines, "300ms").ShouldNot(MatchRegexp("(?s)cannot connect; retrying.*cannot connect; retrying"))
	})

	It("comes back when a session breaks, with what it holds", func() {
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(grant("t", 7, 50_000, 4, 0))
		ack(grants)

		grants.end <- status.Error(codes.Unavailable, "restarting")
		grants = accept(p.grants)
		hello := next(grants, (*srtmv1.NodeMessage).GetHello)
		Expect(hello.Held).To(HaveLen(1))
		Expect(hello.Held[0].Topic).To(Equal("t"))
		Expect(hello.Held[0].Epoch).To(BeEquivalentTo(7))
		Expect(hello.Held[0].Share.RateMilli).To(BeEquivalentTo(50_000))

		control.end <- nil
		control = accept(p.control)
		Expect(next(control, (*srtmv1.BrokerMessage).GetHello).Topics).To(Equal([]string{"t"}))
		Consistently(grants.closed, "10ms").ShouldNot(BeClosed())
		t, _ := node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 4}))

		control.send(remove(2, "t"))
		result(control)
		grants.end <- nil
		Expect(next(accept(p.grants), (*srtmv1.NodeMessage).GetHello).Held).To(BeEmpty())
	})

	It("leaves the shares in force when it stops", func() {
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(grant("t", 7, 50_000, 4, 0))
		ack(grants)
		stop()
		Eventually(control.closed).Should(BeClosed())
		Eventually(grants.closed).Should(BeClosed())
		t, _ := node.Topic("t")
		Expect(t.Share).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 4}))
		Expect(subject.Run(context.Background())).To(MatchError(ContainSubstring("twice")))
	})

	It("reports every topic to the one and the loads of prepared ones to the other", func() {
		node.Create("free")
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		node.Measure("t", &srtmv1.TopicStats{Offered: 12, MaxBacklog: 5, Backlog: 3, BurstNeeded: 7, Delivered: 4})
		control.send(welcome("", 10*time.Millisecond))
		report := next(control, (*srtmv1.BrokerMessage).GetReport)
		Expect(report.Topics).To(HaveLen(2))
		Expect(report.Topics[0].Topic).To(Equal("free"))
		Expect(report.Topics[1].Topic).To(Equal("t"))
		Expect(report.Topics[1].Delivered).To(BeEquivalentTo(4))
		Expect(report.Topics[1].Channels).To(Equal([]string{"c"}))
		Expect(report.Topics[1].Interval.AsDuration()).To(BeNumerically(">", 0))
		loads := next(grants, (*srtmv1.NodeMessage).GetReport).Topics
		Expect(loads).To(HaveLen(1))
		Expect(loads[0].Topic).To(Equal("t"))
		Expect(loads[0].Offered).To(BeEquivalentTo(12))
		Expect(loads[0].MaxBacklog).To(BeEquivalentTo(5))
		Expect(loads[0].Backlog).To(BeEquivalentTo(3))
		Expect(loads[0].BurstNeeded).To(BeEquivalentTo(7))
		Expect(loads[0].Step.AsDuration()).To(BeNumerically(">", 0))

		control.send(welcome("", -time.Second)) // an invalid interval: the old interval stays
		for len(control.in) > 0 {
			<-control.in
		}
		next(control, (*srtmv1.BrokerMessage).GetReport)
		Eventually(func() time.Duration { return subject.State().Reporting }).Should(Equal(10 * time.Millisecond))
	})

	It("reports changes only, once the loaddistributor has requested them and has had a whole report", func() {
		node.Create("free")
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		asks := welcome("", 10*time.Millisecond)
		asks.GetHello().ReportChanges = true
		control.send(asks)
		reports := func(control *controlSession) *srtmv1.BrokerReport {
			return next(control, (*srtmv1.BrokerMessage).GetReport)
		}
		whole := reports(control)
		Expect(whole.Changes).To(BeFalse())
		Expect(whole.Topics).To(HaveLen(2))
		Eventually(func() bool { r := reports(control); return r.Changes && len(r.Topics) == 0 }).Should(BeTrue())
		Eventually(func() bool {
			loads := next(grants, (*srtmv1.NodeMessage).GetReport).Topics
			return len(loads) == 1 && loads[0].Topic == "t" && loads[0].Offered == 0 && loads[0].Step.AsDuration() > 0
		}).Should(BeTrue(), "the adaptor gets every prepared topic")

		control.end <- nil
		control = accept(p.control)
		next(control, (*srtmv1.BrokerMessage).GetHello)
		whole = reports(control)
		Expect(whole.Changes).To(BeFalse(), "another session knows nothing")
		Expect(whole.Topics).To(HaveLen(2))
		Expect(reports(control).Changes).To(BeFalse(), "it has not asked")
	})

	It("reports that the control plane does not answer", func() {
		Expect(subject.Health()).To(MatchError(And(ContainSubstring("the loaddistributor does not answer"), ContainSubstring("the share adaptor does not answer"))))
		stop = run(subject)
		defer stop()
		control := accept(p.control)
		next(control, (*srtmv1.BrokerMessage).GetHello)
		control.send(welcome("", 10*time.Millisecond))
		grants := accept(p.grants)
		hello := next(grants, (*srtmv1.NodeMessage).GetHello)
		Consistently(subject.Health, "30ms").Should(MatchError(ContainSubstring("the share adaptor does not answer")), "it has given no lease")
		grants.send(lease(hello.Stamp, time.Hour, time.Hour))
		Eventually(subject.Health).Should(Succeed())
		p.stop()
		Eventually(func() string { return fmt.Sprint(subject.Health()) }).Should(MatchRegexp(`the loaddistributor does not answer at \S+ \(.+\): .*; the share adaptor does not answer at \S+ \(.+\): messages leave by the bases of shares$`))
		Expect(errors.As(subject.Health(), new(obs.Notice))).To(BeTrue(), "the broker serves its clients")
	})

	It("shows its state", func() {
		Expect(subject.State()).To(HaveField("Control.Connected", false))
		control, grants := joined()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(grant("t", 7, 50_000, 4, 0))
		grants.send(grant("later", 8, 50_000, 4, 0))
		ack(grants)
		ack(grants)
		control.send(welcome("", 10*time.Millisecond))
		Eventually(func() []agent.HoldingState { return subject.State().Held }).Should(Equal([]agent.HoldingState{
			{Topic: "later", Epoch: 8, RateMilli: 50_000, Burst: 4, BaseRateMilli: 50_000, BaseBurst: 4}, {Topic: "t", Epoch: 7, RateMilli: 50_000, Burst: 4, BaseRateMilli: 50_000, BaseBurst: 4},
		}))
		s := subject.State()
		Expect(s.Kept).To(Equal(1))
		Expect(s.Control).To(Equal(agent.SessionState{Address: p.address, Connected: true}))
		Expect(s.Grants).To(Equal(agent.SessionState{Address: p.address, Connected: true}))
		p.stop()
		Eventually(func() bool { return subject.State().Control.Connected || subject.State().Grants.Connected }).Should(BeFalse())
		Expect(subject.State().Control.LastError).NotTo(BeEmpty())
	})
})

var _ = Describe("A configuration", func() {
	It("is refused with all its faults", func() {
		_, err := agent.New(agent.Config{
			LoadDistributor: "nowhere", BrokerID: "b 1", TCPAddress: "x:0", HTTPAddress: ":4151", Mcap: 0,
		}, agenttest.New())
		Expect(err).To(HaveOccurred())
		for _, part := range []string{"loaddistributor", "broker id", "TCP address", "HTTP address", "mcap", "logger"} {
			Expect(err.Error()).To(ContainSubstring(part))
		}
		cfg := config("127.0.0.1:1")
		cfg.BrokerID = strings.Repeat("b", 65)
		Expect(cfg.Validate()).To(MatchError(ContainSubstring("broker id")))
		Expect(config("127.0.0.1:1").Validate()).To(Succeed())
	})

	It("draws an instance, and registers its metrics once", func() {
		cfg := config("127.0.0.1:1")
		cfg.Instance, cfg.Metrics = "", prometheus.NewRegistry()
		a, err := agent.New(cfg, agenttest.New())
		Expect(err).NotTo(HaveOccurred())
		cfg2 := cfg
		cfg2.Metrics = nil
		b, err := agent.New(cfg2, agenttest.New())
		Expect(err).NotTo(HaveOccurred())
		Expect(a.State().Instance).NotTo(BeEmpty())
		Expect(a.State().Instance).NotTo(Equal(b.State().Instance))
		Expect(func() { _, _ = agent.New(cfg, agenttest.New()) }).To(PanicWith(MatchError(ContainSubstring("duplicate"))))
	})
})
