package controller_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tbadaptor/loop"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Every spec runs on virtual time, over a network in memory. Durations depend on the system alone, not
// on the machine.
func TestController(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(10 * time.Second)
	SetDefaultEventuallyPollingInterval(50 * time.Millisecond)
	RunSpecs(t, "Controller", AroundNode(func(ctx context.Context, body func(context.Context)) {
		today := time.Now()
		testkit.Bubble(t, func(*testing.T) {
			defer GinkgoRecover()
			<-time.After(time.Until(today)) // virtual time begins in 2000, before clock.Mono's beginning
			endings = nil
			defer func() {
				for _, f := range slices.Backward(endings) {
					f()
				}
			}()
			defer GinkgoRecover()
			body(ctx)
		})
	}))
}

// endings are the functions given to atEnd.
var endings []func()

// atEnd runs f at the end of the spec, in reverse order of the calls. It is DeferCleanup on the spec's
// virtual time.
func atEnd(f func()) { endings = append(endings, f) }

// errInjected is the error that specs inject.
var errInjected = errors.New("injected")

// part is something that runs until it is stopped.
type part struct{ stop func() }

func start(run func(context.Context) error) *part {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	p := &part{stop: sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, errInjected) {
			AddReportEntry("stopped with", err)
			panic(err)
		}
	})}
	atEnd(p.stop)
	return p
}

func logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(GinkgoWriter, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// network is the listeners of a spec, by address.
var network sync.Map

// listener is a listener of the spec's network. A socket would stop the clock.
type listener struct {
	*bufconn.Listener
	address string
}

func (l *listener) Addr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(l.address))
}

func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return peer{conn, l.Addr()}, nil
}

// peer is a connection with a remote address.
type peer struct {
	net.Conn
	from net.Addr
}

func (p peer) RemoteAddr() net.Addr { return p.from }

func (l *listener) Close() error {
	network.CompareAndDelete(l.address, l)
	return l.Listener.Close()
}

// listen is net.Listen for the spec's network; port 0 picks a free port.
func listen(address string) net.Listener {
	GinkgoHelper()
	l := &listener{Listener: bufconn.Listen(1 << 16), address: address}
	for port := 1; strings.HasSuffix(address, ":0"); port++ {
		l.address = fmt.Sprint("127.0.0.1:", port)
		if _, found := network.LoadOrStore(l.address, l); !found {
			return l
		}
	}
	_, found := network.LoadOrStore(address, l)
	Expect(found).To(BeFalse(), "%s is listened on", address)
	return l
}

// overNetwork makes gRPC dial in the spec's network.
func overNetwork() grpc.DialOption {
	return grpc.WithContextDialer(dialNetwork)
}

func dialNetwork(ctx context.Context, address string) (net.Conn, error) {
	if l, found := network.Load(address); found {
		return l.(*listener).DialContext(ctx)
	}
	return nil, syscall.ECONNREFUSED
}

// startAdaptor serves a separate tbadaptor at the address.
func startAdaptor(ln net.Listener, options ...func(*loop.Config)) (*part, *loop.Server) {
	GinkgoHelper()
	cfg := loop.Config{Period: 20 * time.Millisecond, Window: time.Second, AckTimeout: 5 * time.Second, Leases: loop.DefaultLeases(), Log: logger()}
	for _, option := range options {
		option(&cfg)
	}
	adaptor, err := loop.New(cfg)
	Expect(err).NotTo(HaveOccurred())
	server := grpc.NewServer(service.ServerOptions()...)
	srtmv1.RegisterGrantServiceServer(server, adaptor)
	var group lifecycle.Group
	group.Add("grpc", lifecycle.ServeGRPC(ln, server))
	group.Add("adaptor", adaptor.Run)
	return start(group.Run), adaptor
}

// cluster is a loaddistributor under test, with clients of its services.
type cluster struct {
	*part
	control   *controller.Controller
	address   string
	admin     srtmv1.AdminServiceClient
	placement srtmv1.PlacementServiceClient
	grants    srtmv1.GrantServiceClient
	metrics   *prometheus.Registry // unless the spec has its own registry
}

type setup struct {
	adaptorAddress string                                      // empty: embedded
	grantAddress   string                                      // announced to brokers; empty: adaptorAddress
	wrap           func(controller.Adaptor) controller.Adaptor // nil: unchanged
	prepareTimeout time.Duration                               // 0: long
	config         func(*controller.Config)                    // nil: unchanged
	data           store.Store                                 // nil: nothing is kept
	address        string                                      // to listen on; empty: any
}

func newCluster(s setup) *cluster {
	GinkgoHelper()
	c := &cluster{metrics: prometheus.NewPedanticRegistry()}
	ln := listen(cmp.Or(s.address, "127.0.0.1:0"))
	c.address = ln.Addr().String()
	server := grpc.NewServer(service.ServerOptions()...)
	cfg := controller.Config{
		ReportInterval: 20 * time.Millisecond, PrepareTimeout: 5 * time.Second, Window: time.Second,
		EvacuateAfter: time.Hour,
		GrantAddress:  s.adaptorAddress, Seed: uint64(GinkgoRandomSeed()), Log: logger(), Metrics: c.metrics,
	}
	if s.prepareTimeout != 0 {
		cfg.PrepareTimeout = s.prepareTimeout
	}
	if s.grantAddress != "" {
		cfg.GrantAddress = s.grantAddress
	}
	var group lifecycle.Group
	group.Add("grpc", lifecycle.ServeGRPC(ln, server))
	ownConn := dial(c.address)
	if s.data != nil {
		term, cat, err := s.data.Lead(context.Background(), c.address)
		Expect(err).NotTo(HaveOccurred())
		cfg.Journal, cfg.Catalog = term, cat
		group.Add("store", func(ctx context.Context) error {
			<-ctx.Done()
			return term.Resign(context.Background())
		})
	}
	if s.config != nil {
		s.config(&cfg)
	}
	var adaptor controller.Adaptor
	if s.adaptorAddress == "" {
		embedded, err := loop.New(loop.Config{
			Period: 20 * time.Millisecond, Window: time.Second, AckTimeout: cfg.PrepareTimeout, Leases: loop.DefaultLeases(), Log: logger(),
		})
		Expect(err).NotTo(HaveOccurred())
		srtmv1.RegisterGrantServiceServer(server, embedded)
		adaptor, c.grants = embedded, srtmv1.NewGrantServiceClient(ownConn)
		group.Add("adaptor", embedded.Run)
	} else {
		c.grants = srtmv1.NewGrantServiceClient(dial(s.adaptorAddress))
		adaptor = controller.Remote{Client: c.grants}
	}
	if s.wrap != nil {
		adaptor = s.wrap(adaptor)
	}
	control, err := controller.New(cfg, adaptor)
	Expect(err).NotTo(HaveOccurred())
	c.control = control
	services := rpc.New(control)
	services.Register(server)
	group.Add("sessions", services.Run)
	group.Add("controller", control.Run)
	c.admin, c.placement = srtmv1.NewAdminServiceClient(ownConn), srtmv1.NewPlacementServiceClient(ownConn)
	c.part = start(group.Run)
	synctest.Wait() // until the cluster has handled the end of earlier sessions
	return c
}

func dial(address string) *grpc.ClientConn {
	GinkgoHelper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), overNetwork())
	Expect(err).NotTo(HaveOccurred())
	atEnd(func() { Expect(conn.Close()).To(Succeed()) })
	return conn
}

// broker is a node in memory. The node's agent has joined a cluster.
type broker struct {
	*part
	id    string
	node  *agenttest.Node
	agent *agent.Agent
}

// join starts a broker and waits until topics can be placed on it and shares granted to it.
func (c *cluster) join(id string, mcap int64, node *agenttest.Node, options ...func(*agent.Config)) *broker {
	GinkgoHelper()
	b := c.arrive(id, mcap, node, options...)
	Eventually(func() bool { return c.broker(id).GetConnected() }).Should(BeTrue(), "broker %s", id)
	return b
}

// node joins a broker and returns its node.
func (c *cluster) node(id string, mcap int64) *agenttest.Node {
	GinkgoHelper()
	return c.join(id, mcap, agenttest.New()).node
}

func (c *cluster) arrive(id string, mcap int64, node *agenttest.Node, options ...func(*agent.Config)) *broker {
	GinkgoHelper()
	cfg := agent.Config{
		LoadDistributor: c.address, BrokerID: id, TCPAddress: id + ".example:4150", HTTPAddress: id + ".example:4151",
		Mcap: mcap, Version: "1.2.3", DialOptions: []grpc.DialOption{overNetwork()}, Hostname: id + ".example", Lock: "lock of " + id, Log: logger().With("agent", id),
	}
	for _, option := range options {
		option(&cfg)
	}
	a, err := agent.New(cfg, node)
	Expect(err).NotTo(HaveOccurred())
	return &broker{part: start(a.Run), id: id, node: node, agent: a}
}

// hang blocks the broker's next Prepare until release. The end of the spec also calls release, so that
// the agent can stop.
func (b *broker) hang() (entered <-chan struct{}, release func()) {
	in, out := make(chan struct{}), make(chan struct{})
	enter := sync.OnceFunc(func() { close(in) })
	release = sync.OnceFunc(func() { close(out) })
	atEnd(release)
	b.node.Sabotage(func(string) error { enter(); <-out; return nil }, nil)
	return in, release
}

func (c *cluster) brokers() []*srtmv1.Broker {
	GinkgoHelper()
	response, err := c.admin.ListBrokers(context.Background(), &srtmv1.ListBrokersRequest{})
	Expect(err).NotTo(HaveOccurred())
	return response.Brokers
}

func (c *cluster) broker(id string) *srtmv1.Broker {
	GinkgoHelper()
	for _, b := range c.brokers() {
		if b.Id == id {
			return b
		}
	}
	return nil
}

// spec is a contract of rate msg/s and burst messages, for rate publishers of 1 msg/s each. Shares
// stay as placed, so that tests can predict them.
func spec(name string, rate, burst int64) *srtmv1.TopicSpec {
	return &srtmv1.TopicSpec{
		Name: name,
		Contract: &srtmv1.Contract{
			RateMilli: rate * 1000, Burst: burst,
			Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(5 * time.Millisecond)},
		},
		Groups:   []*srtmv1.PublisherGroup{{Key: "g", Count: int32(rate), Rate: 1}},
		Channels: []string{"main"}, ShareRule: "static",
	}
}

// create runs a creation to its end.
func (c *cluster) create(ctx context.Context, s *srtmv1.TopicSpec, key string) (*srtmv1.Topic, []*srtmv1.CreateTopicResponse, error) {
	stream, err := c.admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: s, IdempotencyKey: key})
	if err != nil {
		return nil, nil, err
	}
	var all []*srtmv1.CreateTopicResponse
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if len(all) == 0 {
				return nil, nil, errors.New("the stream ended without a response")
			}
			return all[len(all)-1].Topic, all, nil
		}
		if err != nil {
			return nil, all, err
		}
		all = append(all, r)
	}
}

// creating runs a creation, and returns its result on a channel.
func (c *cluster) creating(ctx context.Context, s *srtmv1.TopicSpec, key string) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, _, err := c.create(ctx, s, key)
		done <- err
	}()
	return done
}

func (c *cluster) mustCreate(s *srtmv1.TopicSpec, key ...string) *srtmv1.Topic {
	GinkgoHelper()
	topic, _, err := c.create(context.Background(), s, strings.Join(key, ""))
	Expect(err).NotTo(HaveOccurred())
	Expect(topic.GetState()).To(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
	return topic
}

func (c *cluster) mustDelete(name string) {
	GinkgoHelper()
	Expect(c.admin.DeleteTopic(context.Background(), &srtmv1.DeleteTopicRequest{Name: name})).Error().NotTo(HaveOccurred())
}

func (c *cluster) move(topic, to string, publishers ...string) (*srtmv1.MovePublishersResponse, error) {
	return c.admin.MovePublishers(context.Background(), &srtmv1.MovePublishersRequest{Topic: topic, BrokerId: to, PublisherIds: publishers})
}

func (c *cluster) mustMove(topic, to string, publishers ...string) {
	GinkgoHelper()
	Expect(c.move(topic, to, publishers...)).Error().NotTo(HaveOccurred())
}

func (c *cluster) mustUpdate(s *srtmv1.TopicSpec) {
	GinkgoHelper()
	Expect(c.update(s)).Error().NotTo(HaveOccurred())
}

func (c *cluster) forget(broker string) (freed []*srtmv1.FreedShare) {
	GinkgoHelper()
	Eventually(func() error { // the broker's session with the adaptor may end after its session with the controller
		r, err := c.grants.ForgetBroker(context.Background(), &srtmv1.ForgetBrokerRequest{BrokerId: broker})
		freed = r.GetFreed()
		return err
	}).Should(Succeed())
	return freed
}

func (c *cluster) resolve(topic, publisher string) (*srtmv1.ResolveResponse, error) {
	return c.placement.Resolve(context.Background(), &srtmv1.ResolveRequest{Topic: topic, PublisherId: publisher})
}

func (c *cluster) topic(name string) *srtmv1.Topic {
	GinkgoHelper()
	response, err := c.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: name})
	Expect(err).NotTo(HaveOccurred())
	return response.Topic
}

// state returns the state with its reason, for Eventually.
func (c *cluster) state(name string) func() string {
	return func() string {
		t := c.topic(name)
		s := t.State.String()[len("TOPIC_STATE_"):]
		if t.Reason != "" {
			s += ": " + t.Reason
		}
		return s
	}
}

// shares returns the acknowledged shares of a topic by broker, as "rate/burst".
func (c *cluster) shares(name string) map[string]string {
	GinkgoHelper()
	response, err := c.grants.ListShares(context.Background(), &srtmv1.ListSharesRequest{Topic: name}, grpc.WaitForReady(true))
	Expect(err).NotTo(HaveOccurred())
	all := map[string]string{}
	for _, t := range response.Topics {
		for _, m := range t.Members {
			all[m.BrokerId] = fmt.Sprintf("%d/%d", m.GetAcknowledged().GetRateMilli(), m.GetAcknowledged().GetBurst())
		}
	}
	return all
}

// nothingLeft expects no trace of the topic anywhere.
func (c *cluster) nothingLeft(name string, brokers ...*broker) {
	GinkgoHelper()
	for _, b := range c.brokers() {
		Expect(b.Allocated).To(BeZero(), "broker %s", b.Id)
	}
	Expect(c.control.View().Topic(name)).Error().To(HaveOccurred())
	for _, b := range brokers {
		Eventually(func() bool { _, found := b.node.Topic(name); return found }).Should(BeFalse(), "broker %s still has the topic", b.id)
	}
	Eventually(func() map[string]string { return c.shares(name) }).Should(BeEmpty())
}
