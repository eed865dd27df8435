package failover

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/targets"
)

// patience is how long a test waits for what must happen; only a failure takes
// so long.
const patience = 60 * time.Second

var binaries struct{ nsqd, loaddistributor string }

// TestMain builds the daemons, or takes those in the folder SRTM_FAILOVER_BIN.
func TestMain(m *testing.M) {
	os.Exit(func() int {
		if dir := os.Getenv("SRTM_FAILOVER_BIN"); dir != "" {
			binaries.nsqd, binaries.loaddistributor = filepath.Join(dir, "nsqd"), filepath.Join(dir, "loaddistributor")
			return m.Run()
		}
		dir, err := os.MkdirTemp("", "failover")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		for pkg, to := range map[string]*string{"nsqd": &binaries.nsqd, "loaddistributor": &binaries.loaddistributor} {
			*to = filepath.Join(dir, pkg)
			if err := local.Build(context.Background(), "../../"+pkg, *to, false); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
		return m.Run()
	}())
}

// cluster is loaddistributors and brokers.
type cluster struct {
	t       *testing.T
	grpc    []string // of the loaddistributors
	flags   [][]string
	dirs    []string
	control []*local.Process
	brokers []*local.Process
	traces  []string // release traces, by broker
	conn    *grpc.ClientConn
}

// newCluster starts n loaddistributors with the flags, and brokers that join.
func newCluster(t *testing.T, n, brokers int, flags ...string) *cluster {
	t.Helper()
	c := &cluster{t: t}
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

// add makes a place for a loaddistributor, with its flags.
func (c *cluster) add(flags ...string) {
	c.t.Helper()
	at, err := local.Ports(2)
	if err != nil {
		c.t.Fatal(err)
	}
	c.grpc = append(c.grpc, at[0])
	c.dirs = append(c.dirs, c.t.TempDir())
	c.flags = append(c.flags, append([]string{
		"--grpc-address=" + at[0], "--http-address=" + at[1], "--tcp-address=", "--report-interval=200ms", "--evacuate-after=1m", "--fitting=off",
	}, flags...))
	c.control = append(c.control, nil)
}

// join starts a broker of the loaddistributors at these addresses.
func (c *cluster) join(addresses ...string) {
	c.t.Helper()
	dir := c.t.TempDir()
	trace := filepath.Join(dir, "released")
	d, err := local.NSQD(binaries.nsqd, dir, "--loaddistributor-address="+strings.Join(addresses, ","),
		fmt.Sprintf("--broker-id=b%d", len(c.brokers)+1), "--mcap=1000000", "--release-trace="+trace, "--msg-timeout=5m", "--mem-queue-size=100000", "--nudge-consumers-after=0s")
	if err != nil {
		c.t.Fatal(err)
	}
	c.brokers = append(c.brokers, d)
	c.traces = append(c.traces, trace)
	c.t.Cleanup(func() { c.stop(d) })
}

// connect dials, and waits for that many brokers.
func (c *cluster) connect(brokers int) {
	c.t.Helper()
	t := c.t
	var err error
	if c.conn, err = targets.Dial(c.grpc[0], grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.conn.Close() })
	eventually(t, "brokers have joined", func() bool {
		joined := 0
		_ = c.ask(func(ctx context.Context, admin srtmv1.AdminServiceClient) error {
			r, err := admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
			for _, b := range r.GetBrokers() {
				if b.Connected {
					joined++
				}
			}
			return err
		})
		return joined == brokers
	})
}

func (c *cluster) stop(d *local.Process) {
	if err := d.Stop(); err != nil {
		c.t.Error(err)
	}
}

// web is the HTTP address of loaddistributor i.
func (c *cluster) web(i int) string { return strings.TrimPrefix(c.flags[i][1], "--http-address=") }

// start starts loaddistributor i.
func (c *cluster) start(i int) {
	c.t.Helper()
	d, err := local.Run(binaries.loaddistributor, c.dirs[i], c.flags[i], local.Answers("http://"+c.web(i)+"/ping"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.control[i] = d
	c.t.Cleanup(func() { c.stop(d) })
}

// kill -9.
func (c *cluster) kill(i int) {
	c.t.Helper()
	if err := c.control[i].Kill(); err != nil {
		c.t.Fatal(err)
	}
}

// ask calls the leader once, wherever it is: each loaddistributor until one
// answers that leads.
func (c *cluster) ask(do func(context.Context, srtmv1.AdminServiceClient) error) (err error) {
	for _, address := range c.grpc {
		err = func() error {
			conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return err
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
			defer cancel()
			return do(ctx, srtmv1.NewAdminServiceClient(conn))
		}()
		if err == nil {
			return nil
		}
	}
	return err
}

// create creates a topic, and repeats the request until it is acknowledged.
func (c *cluster) create(spec *srtmv1.TopicSpec) {
	c.t.Helper()
	eventually(c.t, "topic "+spec.Name+" is created", func() bool {
		return c.ask(func(ctx context.Context, admin srtmv1.AdminServiceClient) error {
			return create(ctx, admin, spec)
		}) == nil
	})
}

func create(ctx context.Context, admin srtmv1.AdminServiceClient, spec *srtmv1.TopicSpec) error {
	stream, err := admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: spec, IdempotencyKey: "key of " + spec.Name})
	if err != nil {
		return err
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		if r.Topic != nil {
			return nil
		}
	}
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
	p, err := c.Publisher(ctx, topic, fmt.Sprintf("g.%d", i))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// clientLog is a test's log that counts the connections that a client says it lost.
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
	if err != nil {
		t.Fatal(err)
	}
	return cl
}

// receipt is a delivery: a message's body is its publisher and its number, and
// it carries the time at which its broker accepted it.
type receipt struct {
	publisher, number uint32
	accepted          int64
}

func body(publisher, number int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(publisher))
	return binary.LittleEndian.AppendUint32(b, uint32(number))
}

// consumer collects what all brokers deliver of a topic.
type consumer struct {
	mu       sync.Mutex
	receipts []receipt
	again    int // deliveries that were not the first
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

// consume reads a topic until the test ends, from the brokers that lookup names.
func (c *cluster) consume(topic string) *consumer {
	c.t.Helper()
	all := &consumer{}
	cfg := nsq.NewConfig()
	cfg.MaxInFlight = 6000
	cfg.LookupdPollInterval, cfg.LookupdPollJitter = 100*time.Millisecond, 0
	one, err := nsq.NewConsumer(topic, "all", cfg)
	if err != nil {
		c.t.Fatal(err)
	}
	one.SetLogger(slog.NewLogLogger(slog.DiscardHandler, 0), nsq.LogLevelError)
	one.AddHandler(all)
	var lookups []string
	for i := range c.flags {
		lookups = append(lookups, c.web(i))
	}
	if err := one.ConnectToNSQLookupds(lookups); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		one.Stop()
		<-one.StopChan
	})
	return all
}

// once fails unless every message was delivered exactly once, and every
// publisher's were accepted in their order, whichever broker it was.
func (c *consumer) once(t *testing.T, publishers, each int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	accepted := make([][]int64, publishers)
	for i := range accepted {
		accepted[i] = make([]int64, each)
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
			publishers*each, lost, twice, disorder, c.again)
	}
}

// envelope stops the brokers and fails unless the releases of a topic, all
// brokers' together, conform to the contract in their eligible times: any n of
// them take at least (n-b)/r.
func (c *cluster) envelope(topic string, rate float64, burst int) (releases int) {
	c.t.Helper()
	var eligible []int64
	for i, path := range c.traces {
		c.stop(c.brokers[i])
		f, err := os.Open(path)
		if err != nil {
			c.t.Fatal(err)
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			var arrival, at, released int64
			name, times, _ := strings.Cut(lines.Text(), ",")
			if _, err := fmt.Sscanf(times, "%d,%d,%d", &arrival, &at, &released); err != nil {
				c.t.Fatalf("%s: %q: %v", path, lines.Text(), err)
			}
			if name == topic {
				eligible = append(eligible, at)
			}
		}
		if err := lines.Err(); err != nil {
			c.t.Fatal(err)
		}
	}
	slices.Sort(eligible)
	// A bucket of the contract that is never empty, by unfinished work; a
	// microsecond for the rounding of each broker's rate and times.
	work, last, worst := 0.0, int64(0), 0.0
	for _, at := range eligible {
		work = max(0, work-rate*float64(at-last)/1e9) + 1
		last = at
		worst = max(worst, work-float64(burst))
	}
	if worst > rate*1e-6*float64(len(c.brokers)) {
		c.t.Errorf("%d releases of topic %s exceed the contract by %g messages", len(eligible), topic, worst)
	}
	return len(eligible)
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(patience); !is(); <-ticker.C {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// seed is printed with a failure.
func seed(t *testing.T) uint64 {
	s := uint64(time.Now().UnixNano())
	if given := os.Getenv("SRTM_FAILOVER_SEED"); given != "" {
		if _, err := fmt.Sscan(given, &s); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("SRTM_FAILOVER_SEED=%d", s)
	return s
}
