package failover

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// patience is how long a client waits for an event that must happen.
const patience = local.Patience

func TestMain(m *testing.M) { localtest.Main(m) }

// release is the programs of a release.
type release struct{ nsqd, loaddistributor string }

// current returns our programs, or the programs in the folder SRTM_FAILOVER_BIN.
func current(t *testing.T) release {
	t.Helper()
	if dir := os.Getenv("SRTM_FAILOVER_BIN"); dir != "" {
		return release{filepath.Join(dir, "nsqd"), filepath.Join(dir, "loaddistributor")}
	}
	return release{localtest.Program(t, "nsqd"), localtest.Program(t, "loaddistributor")}
}

// cluster is loaddistributors and brokers.
type cluster struct {
	t       *testing.T
	release release
	grpc    []string // of the loaddistributors
	web     []string // HTTP addresses of the loaddistributors
	flags   [][]string
	dirs    []string
	control []*local.Process
	brokers []*local.Process
	traces  []string // release traces, by broker
}

// newCluster starts n loaddistributors with the flags, and their brokers.
func newCluster(t *testing.T, n, brokers int, flags ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, release: current(t)}
	for range n {
		c.add(flags...)
	}
	for i := range n {
		c.start(i)
	}
	for range brokers {
		c.join(c.grpc...)
	}
	c.connect(brokers)
	return c
}

// add reserves addresses for a loaddistributor with its flags.
func (c *cluster) add(flags ...string) {
	c.t.Helper()
	at := localtest.Ports(c.t, 2)
	c.grpc, c.web = append(c.grpc, at[0]), append(c.web, at[1])
	c.dirs = append(c.dirs, c.t.TempDir())
	c.flags = append(c.flags, append([]string{
		"--grpc-address=" + at[0], "--http-address=" + at[1], "--tcp-address=", "--report-interval=200ms", "--evacuate-after=1m", "--fitting=off",
	}, flags...))
	c.control = append(c.control, nil)
}

// join starts a broker of the loaddistributors at these addresses.
func (c *cluster) join(addresses ...string) {
	c.t.Helper()
	trace := filepath.Join(c.t.TempDir(), "released")
	c.joinWith(addresses, "--mcap=1000000", "--release-trace="+trace, "--msg-timeout=5m", "--mem-queue-size=100000", "--nudge-consumers-after=0s")
	c.traces = append(c.traces, trace)
}

func (c *cluster) joinWith(addresses []string, flags ...string) {
	c.t.Helper()
	flags = append([]string{"--loaddistributor-address=" + strings.Join(addresses, ","), fmt.Sprintf("--broker-id=b%d", len(c.brokers)+1)}, flags...)
	c.brokers = append(c.brokers, localtest.NSQD(c.t, c.release.nsqd, flags...))
}

// connect waits until the given number of brokers is connected.
func (c *cluster) connect(brokers int) {
	c.t.Helper()
	testkit.WaitFor(c.t, "brokers that have joined", func() bool {
		joined := 0
		r, _ := ask(c, srtmv1.AdminServiceClient.ListBrokers, &srtmv1.ListBrokersRequest{})
		for _, b := range r.GetBrokers() {
			if b.Connected {
				joined++
			}
		}
		return joined == brokers
	})
}

func (c *cluster) stop(d *local.Process) {
	testkit.NoError(c.t, d.Stop())
}

// start starts loaddistributor i.
func (c *cluster) start(i int) {
	c.t.Helper()
	d, err := local.Run(c.release.loaddistributor, c.dirs[i], c.flags[i], local.Answers("http://"+c.web[i]+"/ping"))
	c.control[i] = localtest.Watch(c.t, d, err)
}

// kill -9.
func (c *cluster) kill(i int) {
	c.t.Helper()
	testkit.Must(c.t, c.control[i].Kill())
}

// each calls the loaddistributors until one of them, the leader, carries the call out or refuses with
// a reason.
func (c *cluster) each(do func(context.Context, *grpc.ClientConn) error) (err error) {
	for _, address := range c.grpc {
		err = func() error {
			conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return err
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
			defer cancel()
			return do(ctx, conn)
		}()
		if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
			return err
		}
	}
	return err
}

// ask makes an admin request once to the leader, whichever process leads.
func ask[Q, A any](c *cluster, method func(srtmv1.AdminServiceClient, context.Context, *Q, ...grpc.CallOption) (*A, error), request *Q) (answer *A, err error) {
	err = c.each(func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		answer, err = method(srtmv1.NewAdminServiceClient(conn), ctx, request)
		return err
	})
	return answer, err
}

// topic returns GetTopic's answer; nil: no answer.
func (c *cluster) topic(name string) *srtmv1.Topic {
	r, _ := ask(c, srtmv1.AdminServiceClient.GetTopic, &srtmv1.GetTopicRequest{Name: name})
	return r.GetTopic()
}

// move is MovePublishers of topic t.
func (c *cluster) move(ids []string, to string) error {
	_, err := ask(c, srtmv1.AdminServiceClient.MovePublishers, &srtmv1.MovePublishersRequest{Topic: "t", PublisherIds: ids, BrokerId: to})
	return err
}

// create creates a topic, and repeats the request until it is acknowledged.
func (c *cluster) create(spec *srtmv1.TopicSpec) {
	c.t.Helper()
	testkit.WaitFor(c.t, "topic "+spec.Name, func() bool { return c.tryCreate(spec) == nil })
}

func (c *cluster) tryCreate(spec *srtmv1.TopicSpec) error {
	return c.each(func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := localtest.CreateTopic(ctx, conn, &srtmv1.CreateTopicRequest{Spec: spec, IdempotencyKey: "key of " + spec.Name})
		return err
	})
}

// contract returns a topic of count publishers.
func contract(name string, rate, burst int64, count int32) *srtmv1.TopicSpec {
	return &srtmv1.TopicSpec{
		Name: name,
		Contract: &srtmv1.Contract{
			RateMilli: rate * 1000, Burst: burst, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(10 * time.Millisecond)},
		},
		Groups:   []*srtmv1.PublisherGroup{{Key: "g", Count: count, Rate: float64(rate) / float64(count) / 2}},
		Channels: []string{"all"},
	}
}

// publisher returns an open publisher of a topic.
func publisher(t *testing.T, c *client.Client, topic string, i int) *client.Publisher {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return testkit.Result(c.Publisher(ctx, topic, fmt.Sprintf("g.%d", i))).Must(t)
}

// clientLog is a test's log. It counts the connections that a client reports as lost.
type clientLog struct {
	t    *testing.T
	lost atomic.Int64
}

func (l *clientLog) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(`"connection lost"`)) {
		l.lost.Add(1)
	}
	return l.t.Output().Write(line)
}

func newClient(t *testing.T, c *cluster) *client.Client {
	t.Helper()
	return newLoggedClient(c, &clientLog{t: t})
}

func newLoggedClient(c *cluster, log *clientLog) *client.Client {
	t := log.t
	t.Helper()
	cl, err := client.New(client.Config{Address: strings.Join(c.grpc, ","), Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	testkit.Must(t, err)
	return cl
}

// receipt is a delivery. A message's body is the publisher and a number, and the message carries the
// time of acceptance by the broker.
type receipt struct {
	publisher, number uint32
	accepted          int64
}

func body(publisher, number int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(publisher))
	return binary.LittleEndian.AppendUint32(b, uint32(number))
}

// consumer collects the deliveries of a topic from all brokers.
type consumer struct {
	mu       sync.Mutex
	receipts []receipt
	again    int // deliveries after the first
}

func (c *consumer) HandleMessage(m *nsq.Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.Attempts > 1 {
		c.again++
	}
	c.receipts = append(c.receipts, receipt{
		binary.LittleEndian.Uint32(m.Body), binary.LittleEndian.Uint32(m.Body[4:]), m.Timestamp,
	})
	return nil
}

func (c *consumer) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.receipts)
}

// lookups are where the loaddistributors answer consumers.
func (c *cluster) lookups() (urls []string) {
	for _, web := range c.web {
		urls = append(urls, "http://"+web)
	}
	return urls
}

// consume reads a topic until the test ends, from the brokers that lookup names.
func (c *cluster) consume(topic string) *consumer {
	c.t.Helper()
	all := &consumer{}
	localtest.Consume(c.t, topic, "all", all, func(cfg *nsq.Config) {
		cfg.MaxInFlight, cfg.LookupdPollInterval, cfg.LookupdPollJitter = 6000, 100*time.Millisecond, 0
	}, c.lookups()...)
	return all
}

// once fails unless every message was delivered exactly once, and every publisher's messages were
// accepted in order, on whichever broker.
func (c *consumer) once(t *testing.T, sent []int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	accepted := make([][]int64, len(sent))
	for i, n := range sent {
		accepted[i] = make([]int64, n)
	}
	twice, disorder, lost := 0, 0, 0
	for _, r := range c.receipts {
		at := &accepted[r.publisher][r.number]
		if *at != 0 {
			twice++
		}
		*at = r.accepted
	}
	for _, of := range accepted {
		for i, at := range of {
			if at == 0 {
				lost++
			} else if i > 0 && at < of[i-1] {
				disorder++
			}
		}
	}
	if lost+twice+disorder+c.again > 0 {
		t.Errorf("of %d messages %d were lost, %d delivered twice, %d accepted out of order, %d delivered again",
			len(c.receipts)-twice+lost, lost, twice, disorder, c.again)
	}
}

// envelope stops the brokers and fails unless the releases of a topic on all brokers together conform
// to the contract by their eligible times.
func (c *cluster) envelope(topic string, rate, burst int64) (releases int) {
	c.t.Helper()
	var all []testkit.Release
	for i, path := range c.traces {
		c.stop(c.brokers[i])
		all = append(all, testkit.ReadTrace(c.t, path, topic)...)
	}
	eligible, _ := testkit.Times(all)
	// A microsecond for the rounding of each broker's rate and times.
	if slack, err := testkit.Envelope(eligible, rate*1000, burst); slack < -float64(rate)*1e-6*float64(len(c.brokers)) {
		c.t.Errorf("%d releases of topic %s: %v", len(eligible), topic, err)
	}
	return len(eligible)
}
