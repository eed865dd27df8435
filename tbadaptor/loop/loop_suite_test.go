package loop_test

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/loop"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestLoop(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	SetDefaultEventuallyPollingInterval(2 * time.Millisecond)
	RunSpecs(t, "Loop")
}

func config() loop.Config {
	return loop.Config{
		Period: 10 * time.Millisecond, Window: time.Second, AckTimeout: testkit.Hang, Leases: loop.DefaultLeases(),
		Log: slog.New(slog.NewTextHandler(GinkgoWriter, nil)),
	}
}

// adaptor is a Server on loopback with its own client.
type adaptor struct {
	server *loop.Server
	conn   *grpc.ClientConn
	client srtmv1.GrantServiceClient
	stop   func()
}

func newAdaptor(cfg loop.Config) *adaptor {
	GinkgoHelper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	server, err := loop.New(cfg)
	Expect(err).NotTo(HaveOccurred())
	transport := grpc.NewServer(service.ServerOptions()...)
	srtmv1.RegisterGrantServiceServer(transport, server)
	var group lifecycle.Group
	group.Add("grpc", lifecycle.ServeGRPC(ln, transport))
	group.Add("adaptor", server.Run)
	a := &adaptor{server: server, stop: testkit.Run(GinkgoTB(), group.Run)}
	a.conn, err = grpc.NewClient(ln.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(a.conn.Close)
	a.client = srtmv1.NewGrantServiceClient(a.conn)
	return a
}

// node is a broker's session, driven by the spec. Without an order of the spec, the node acknowledges
// nothing.
type node struct {
	stream grpc.BidiStreamingClient[srtmv1.NodeMessage, srtmv1.GrantMessage]
	grants chan *srtmv1.Grant
	ended  chan error
	leave  func()
	term   atomic.Uint64 // the last received term
}

func (a *adaptor) open() *node {
	GinkgoHelper()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := a.client.Session(ctx)
	Expect(err).NotTo(HaveOccurred())
	n := &node{stream: stream, grants: make(chan *srtmv1.Grant, 1000), ended: make(chan error, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			m, err := stream.Recv()
			if err != nil {
				n.ended <- err
				return
			}
			n.term.Store(max(m.GetGrant().GetTerm(), m.GetLease().GetTerm()))
			n.grants <- m.GetGrant()
		}
	}()
	n.leave = sync.OnceFunc(func() { cancel(); <-done })
	DeferCleanup(n.leave)
	return n
}

// join opens a session, sends a hello, and waits until the adaptor has received the hello.
func (a *adaptor) join(id, instance string, held ...*srtmv1.HeldShare) *node {
	GinkgoHelper()
	n := a.open()
	n.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Hello{Hello: &srtmv1.NodeHello{BrokerId: id, Instance: instance, Lock: id, Held: held}}})
	Eventually(func() []string { return a.server.State().Connected }).Should(ContainElement(id))
	return n
}

func (n *node) send(m *srtmv1.NodeMessage) {
	GinkgoHelper()
	Expect(n.stream.Send(m)).To(Succeed())
}

func (n *node) ack(g *srtmv1.Grant, released int64) {
	GinkgoHelper()
	n.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Ack{Ack: &srtmv1.GrantAck{
		Topic: g.Topic, Epoch: g.Epoch, Share: g.Share, ReleasedTokensMilli: released,
	}}})
}

// granted returns the next grant.
func (n *node) granted() *srtmv1.Grant {
	GinkgoHelper()
	var g *srtmv1.Grant
	Eventually(n.grants).Should(Receive(&g))
	return g
}

// accept acknowledges every grant in the background, as long as the session lasts.
func (n *node) accept() {
	go func() {
		for {
			select {
			case g := <-n.grants:
				_ = n.stream.Send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Ack{Ack: &srtmv1.GrantAck{
					Topic: g.Topic, Epoch: g.Epoch, Share: g.Share,
				}}}) // the session may be over
			case <-n.stream.Context().Done():
				return
			}
		}
	}()
}

func heldShare(topic string, epoch uint64, rate, burst int64) *srtmv1.HeldShare {
	return &srtmv1.HeldShare{Topic: topic, Epoch: epoch, Share: &srtmv1.Share{RateMilli: rate, Burst: burst}}
}

func members(shares ...any) []*srtmv1.Member {
	var all []*srtmv1.Member
	for i := 0; i < len(shares); i += 3 {
		all = append(all, &srtmv1.Member{
			BrokerId: shares[i].(string), Share: &srtmv1.Share{RateMilli: int64(shares[i+1].(int)), Burst: int64(shares[i+2].(int))},
			Publishers: 10,
		})
	}
	return all
}

func contract(topic string, rate, burst int64, members []*srtmv1.Member) *srtmv1.SetContractRequest {
	return &srtmv1.SetContractRequest{Topic: topic, Contract: &srtmv1.Contract{RateMilli: rate, Burst: burst}, Members: members, ShareRule: share.Static}
}

// set runs SetContract in the background.
func (a *adaptor) set(ctx context.Context, req *srtmv1.SetContractRequest) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := a.client.SetContract(ctx, req)
		done <- err
	}()
	return done
}

// acknowledged returns the shares in force by broker, as rate, burst.
func (a *adaptor) acknowledged(topic string) map[string][2]int64 {
	GinkgoHelper()
	r, err := a.client.ListShares(context.Background(), &srtmv1.ListSharesRequest{Topic: topic})
	Expect(err).NotTo(HaveOccurred())
	all := map[string][2]int64{}
	for _, t := range r.Topics {
		for _, m := range t.Members {
			all[m.BrokerId] = [2]int64{m.GetAcknowledged().GetRateMilli(), m.GetAcknowledged().GetBurst()}
		}
	}
	return all
}

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
