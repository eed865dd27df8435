package controller_test

import (
	"context"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

var _ = Describe("A seek", func() {
	begin := &srtmv1.Place{To: &srtmv1.Place_Begin{Begin: &emptypb.Empty{}}}
	offset := &srtmv1.Place{To: &srtmv1.Place_Offset{Offset: 3}}
	var c *cluster
	var b1, b2 *broker
	seek := func(topic, channel string, to *srtmv1.Place, only string) ([]string, error) {
		r, err := c.admin.SeekChannel(context.Background(), &srtmv1.SeekChannelRequest{Topic: topic, Channel: channel, To: to, BrokerId: only})
		var all []string
		for _, b := range r.GetBrokers() {
			Expect(b.Offset == 7).To(Equal(b.Reason == ""))
			Expect(b.Error == "").To(Equal(b.Reason == ""))
			all = append(all, strings.TrimSpace(b.BrokerId+" "+b.Reason))
		}
		return all, err
	}
	// pose is a session in a broker's name, without a broker.
	pose := func(id string, seeks bool) (orders <-chan *srtmv1.SeekOrder, end func()) {
		ctx, cancel := context.WithCancel(context.Background())
		atEnd(cancel)
		stream, err := srtmv1.NewBrokerServiceClient(dial(c.address)).Session(ctx)
		Expect(err).NotTo(HaveOccurred())
		Expect(stream.Send(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Hello{Hello: &srtmv1.BrokerHello{
			BrokerId: id, Instance: "i", TcpAddress: id + ":1", HttpAddress: id + ":2", Mcap: 60, Topics: []string{"t"}, Seeks: seeks,
			Lock: "lock of " + id, Stamp: uint64(clock.Mono()),
		}}})).To(Succeed())
		Expect(stream.Recv()).Error().NotTo(HaveOccurred())
		got := make(chan *srtmv1.SeekOrder, 10)
		go func() {
			for {
				m, err := stream.Recv()
				if err != nil {
					return
				}
				if m.GetSeek() != nil {
					got <- m.GetSeek()
				}
			}
		}()
		return got, cancel
	}
	ready := func() {
		c = newCluster(setup{})
		b1, b2 = c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New())
		c.node("b3", 60).Create("t", "main") // b3 is not among the brokers of the placed topic
		s := spec("t", 100, 10)
		s.Channels = []string{"main"}
		c.mustCreate(s)
	}

	It("is carried out by the topic's brokers, each of which reports the outcome", func() {
		ready()
		Expect(seek("t", "main", begin, "")).To(Equal([]string{"b1", "b2"}))
		Expect(seek("t", "main", offset, "b2")).To(Equal([]string{"b2"}))
		b1.node.Drop("t")
		Expect(seek("t", "main", begin, "")).To(Equal([]string{"b1 TOPIC_UNKNOWN", "b2"}))
		Expect(seek("t", "other", begin, "")).Error().To(fails(codes.NotFound, rpc.ReasonChannelUnknown))
	})

	It("is refused before any broker gets a request", func() {
		ready()
		for _, bad := range []struct {
			topic, only string
			to          *srtmv1.Place
			code        codes.Code
			reason      string
		}{
			{"none", "", begin, codes.NotFound, rpc.ReasonTopicUnknown},
			{"t", "b3", begin, codes.NotFound, rpc.ReasonBrokerUnknown},
			{"t", "", offset, codes.InvalidArgument, rpc.ReasonBadRequest},
			{"t", "", nil, codes.InvalidArgument, rpc.ReasonBadRequest},
		} {
			Expect(seek(bad.topic, "main", bad.to, bad.only)).Error().To(fails(bad.code, bad.reason))
		}
		b2.stop()
		Eventually(func() bool { return c.broker("b2").Connected }).Should(BeFalse())
		_, err := seek("t", "main", begin, "")
		Expect(err).To(fails(codes.Unavailable, rpc.ReasonBrokerFailed))
		Expect(err).To(MatchError(ContainSubstring("b2")))
		pose("b2", false)
		Expect(seek("t", "main", begin, "")).Error().To(fails(codes.FailedPrecondition, rpc.ReasonBrokerTooOld))
		Expect(seek("t", "main", begin, "b1")).To(Equal([]string{"b1"}))
	})

	It("reports the outcome of each broker, also where another did not answer", func() {
		ready()
		b1.stop()
		pose("b1", true)
		for range 10 {
			Expect(seek("t", "main", begin, "")).To(Equal([]string{"b1 BROKER_FAILED", "b2"}))
		}
	})

	It("waits for no broker that does not answer, or leaves", func() {
		ready()
		b2.stop()
		orders, end := pose("b2", true)
		Expect(seek("t", "main", begin, "")).To(Equal([]string{"b1", "b2 BROKER_FAILED"}))
		Expect(orders).To(Receive())
		go func() { <-orders; end() }()
		start := time.Now()
		Expect(seek("t", "main", begin, "")).To(Equal([]string{"b1", "b2 BROKER_FAILED"}))
		Expect(time.Since(start)).To(BeNumerically("<", 5*time.Second), "virtual; it is known at once")
	})
})
