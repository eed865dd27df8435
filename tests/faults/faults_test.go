package faults

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/wire"
	"github.com/srtm-io/srtm/tests/daemon"
)

// longer is the environment variable for a longer run: make faults.
const longer = "SRTM_FAULTS"

const (
	rate, burst = 3000, 60 // the contract, msg/s and messages
	offered     = 2 * rate
	topic       = "t"
)

var bin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "faults")
	for _, pkg := range []string{"nsqd", "loaddistributor", "tbadaptor"} {
		if err == nil {
			err = daemon.Build(context.Background(), "github.com/srtm-io/srtm/"+pkg, filepath.Join(dir, pkg), false)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bin = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// cluster is the processes and what they need to come back.
type cluster struct {
	t       *testing.T
	dir     string
	grpc    string // the loaddistributor's addresses
	web     string
	adaptor string // of a tbadaptor of its own; empty: embedded
	control *daemon.Daemon
	brokers []*broker
}

type broker struct {
	name, dir, tcp, web string
	policy              string
	proxy               *proxy // to the loaddistributor
	process             *daemon.Daemon
}

func (b *broker) trace() string { return filepath.Join(b.dir, "releases.csv") }

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

var leases = []string{"--flex-lease=600ms", "--session-lease=2s", "--clock-bound=50ms", "--log-level=warn"}

func (c *cluster) startControl() {
	c.t.Helper()
	flags := []string{
		"--grpc-address=" + c.grpc, "--http-address=" + c.web, "--tcp-address=", "--data-path=" + c.dir,
		"--report-interval=200ms",
	}
	if c.adaptor == "" {
		flags = append(append(flags, leases...), "--share-period=200ms")
	} else {
		flags = append(flags, "--tbadaptor-address="+c.adaptor)
	}
	d, err := daemon.Run(filepath.Join(bin, "loaddistributor"), c.dir, flags, daemon.Answers("http://"+c.web+"/ping"))
	c.must(err)
	c.control = d
}

func (c *cluster) startBroker(b *broker) {
	c.t.Helper()
	d, err := daemon.NSQDAt(filepath.Join(bin, "nsqd"), b.dir, b.tcp, b.web,
		"--broker-id="+b.name, "--loaddistributor-address="+b.proxy.address(), "--mcap=1100", "--policy="+b.policy,
		"--data-path="+b.dir, "--release-trace="+b.trace(), "--log-level=warn", "--drain-timeout=0s")
	c.must(err)
	b.process = d
}

func newCluster(t *testing.T, policies ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir()}
	free, err := daemon.Ports(2 + 2*len(policies))
	c.must(err)
	c.grpc, c.web = free[0], free[1]
	c.startControl()
	for i, policy := range policies {
		b := &broker{name: fmt.Sprintf("b%d", i), dir: t.TempDir(), tcp: free[2+2*i], web: free[3+2*i], policy: policy}
		b.proxy, err = newProxy(c.grpc)
		c.must(err)
		t.Cleanup(b.proxy.close)
		c.brokers = append(c.brokers, b)
		c.startBroker(b)
	}
	t.Cleanup(func() {
		for _, b := range c.brokers {
			if err := b.process.Kill(); err != nil {
				t.Error(err)
			}
		}
		if err := c.control.Kill(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// dial returns a connection to the loaddistributor, or to the adaptor.
func (c *cluster) dial(address string) *grpc.ClientConn {
	c.t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	c.must(err)
	c.t.Cleanup(func() { conn.Close() })
	return conn
}

// create creates the topic once all brokers are there.
func (c *cluster) create(ctx context.Context) {
	c.t.Helper()
	admin := srtmv1.NewAdminServiceClient(c.dial(c.grpc))
	for {
		stream, err := admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
			Name:      topic,
			Contract:  &srtmv1.Contract{RateMilli: rate * 1000, Burst: burst, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
			Groups:    []*srtmv1.PublisherGroup{{Count: 300, Rate: 10}},
			Channels:  []string{"c"},
			ShareRule: "robust",
		}}, grpc.WaitForReady(true))
		c.must(err)
		for err == nil {
			var r *srtmv1.CreateTopicResponse
			if r, err = stream.Recv(); err == nil && r.GetTopic() != nil {
				return
			}
		}
		if ctx.Err() != nil {
			c.t.Fatal(err)
		}
		wait(50 * time.Millisecond) // for the brokers to join
	}
}

func wait(d time.Duration) { <-time.NewTimer(d).C }

// publish offers perSecond messages to an address until ctx ends, over one
// connection after the other.
func publish(ctx context.Context, address string, perSecond int) {
	const tick = 10 * time.Millisecond
	n := int(float64(perSecond) * tick.Seconds())
	for ctx.Err() == nil {
		attempt(ctx, address, func(nc net.Conn, r *bufio.Reader) error {
			ticker := time.NewTicker(tick)
			defer ticker.Stop()
			for {
				select {
				case <-ticker.C:
				case <-ctx.Done():
					return nil
				}
				var out []byte
				for range n {
					out = wire.AppendPub(out, topic, []byte("message"))
				}
				if _, err := nc.Write(out); err != nil {
					return err
				}
				for range n {
					if _, _, err := frame(r); err != nil {
						return err
					}
				}
			}
		})
	}
}

// subscribe takes everything from an address until ctx ends, and counts it.
func subscribe(ctx context.Context, address string) (taken int) {
	for ctx.Err() == nil {
		attempt(ctx, address, func(nc net.Conn, r *bufio.Reader) error {
			if _, err := nc.Write(wire.AppendRdy(wire.AppendSub(nil, topic, "c"), 2000)); err != nil {
				return err
			}
			for {
				kind, data, err := frame(r)
				if err != nil {
					return err
				}
				if kind != wire.FrameMessage {
					continue
				}
				m, err := wire.ParseMessage(data)
				if err != nil {
					return err
				}
				taken++
				if _, err := nc.Write(wire.AppendFin(nil, m.ID)); err != nil {
					return err
				}
			}
		})
	}
	return taken
}

// attempt runs f over one connection, which ends with ctx. What happens to it is
// the test's doing.
func attempt(ctx context.Context, address string, f func(net.Conn, *bufio.Reader) error) {
	nc, err := net.Dial("tcp", address)
	if err != nil {
		select {
		case <-time.NewTimer(20 * time.Millisecond).C:
		case <-ctx.Done():
		}
		return
	}
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer func() {
		stop()
		nc.Close()
	}()
	if _, err := nc.Write(wire.AppendMagic(nil)); err == nil {
		_ = f(nc, bufio.NewReaderSize(nc, 64<<10))
	}
}

func frame(r io.Reader) (kind wire.FrameType, data []byte, err error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size < 4 || size > 1<<20 {
		return 0, nil, errors.New("not a frame")
	}
	data = make([]byte, size-4)
	_, err = io.ReadFull(r, data)
	return wire.FrameType(binary.BigEndian.Uint32(head[4:])), data, err
}

// release is a line of a trace.
type release struct{ eligible, released stamp.Mono }

// read returns the releases of all brokers. A line that a killed broker did not
// finish is the last of its process.
func (c *cluster) read() (all []release) {
	c.t.Helper()
	for _, b := range c.brokers {
		data, err := os.ReadFile(b.trace())
		c.must(err)
		for line := range strings.Lines(string(data)) {
			var r release
			var arrival int64
			if n, err := fmt.Sscanf(line, topic+",%d,%d,%d\n", &arrival, &r.eligible, &r.released); n != 3 || err != nil {
				c.t.Fatalf("%s: %q: %v", b.name, line, err)
			}
			all = append(all, r)
		}
	}
	return all
}

// trouble makes some, and mends it after a while.
func (c *cluster) trouble(ctx context.Context, rng *rand.Rand) (kills, cuts, losses int) {
	down := map[*broker]time.Time{}
	cut := map[*broker]time.Time{}
	controlDown := time.Time{}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for next := time.Now().Add(2 * time.Second); ; {
		over := ctx.Err() != nil
		now := time.Now()
		for _, b := range c.brokers {
			if at, is := down[b]; is && (over || now.After(at)) {
				c.startBroker(b)
				delete(down, b)
			}
			if at, is := cut[b]; is && (over || now.After(at)) {
				b.proxy.set(false)
				delete(cut, b)
			}
		}
		if !controlDown.IsZero() && (over || now.After(controlDown)) {
			c.startControl()
			controlDown = time.Time{}
		}
		if over {
			return kills, cuts, losses
		}
		if now.After(next) {
			next = now.Add(time.Duration(rng.IntN(800)) * time.Millisecond)
			b := c.brokers[rng.IntN(len(c.brokers))]
			back := now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
			switch n := rng.IntN(5); {
			case n == 0 && controlDown.IsZero():
				c.must(c.control.Kill())
				controlDown = now.Add(time.Duration(rng.IntN(2000)) * time.Millisecond)
				losses++
			case n <= 2 && down[b].IsZero():
				c.must(b.process.Kill())
				down[b] = back
				kills++
			case n >= 3 && cut[b].IsZero():
				b.proxy.set(true)
				cut[b] = back
				cuts++
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

func TestTheContractHoldsWhateverFails(t *testing.T) {
	length := 12 * time.Second
	if s := os.Getenv(longer); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatalf("%s: %v", longer, err)
		}
		length = d
	}
	c := newCluster(t, "available", "strict", "available")
	create, cancel := context.WithTimeout(t.Context(), daemon.Patience)
	defer cancel()
	c.create(create)

	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var mu sync.Mutex
	delivered := 0
	for _, b := range c.brokers {
		clients.Go(func() { publish(ctx, b.tcp, offered/len(c.brokers)) })
		clients.Go(func() {
			n := subscribe(ctx, b.tcp)
			mu.Lock()
			delivered += n
			mu.Unlock()
		})
	}
	defer clients.Wait()
	defer stop()
	failing, calm := context.WithTimeout(ctx, length)
	defer calm()
	began := time.Now()
	kills, cuts, losses := c.trouble(failing, testkit.Rand(t))
	took := time.Since(began)

	// All is mended: topics flow again by themselves. Then it is over.
	before := len(c.read())
	for end := time.Now().Add(daemon.Patience); len(c.read()) < before+rate; wait(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d messages left in %v after all was mended", len(c.read())-before, daemon.Patience)
		}
	}
	stop()
	clients.Wait()
	for _, b := range c.brokers {
		if err := b.process.Kill(); err != nil {
			t.Error(err)
		}
	}
	all := c.read()
	eligible, released := make([]stamp.Mono, len(all)), make([]stamp.Mono, len(all))
	var late time.Duration
	for i, r := range all {
		eligible[i], released[i] = r.eligible, r.released
		late = max(late, r.released.Sub(r.eligible))
	}
	span := slices.Max(released).Sub(slices.Min(released))
	slack, err := testkit.Envelope(eligible, rate*1000, burst)
	if err != nil {
		t.Errorf("by the times at which messages had their tokens: %v", err)
	}
	allowance := int64(math.Ceil(rate * late.Seconds()))
	lateSlack, err := testkit.Envelope(released, rate*1000, burst+allowance)
	if err != nil {
		t.Errorf("by the times at which they left, up to %v late: %v", late, err)
	}
	n := float64(len(all))
	t.Logf("%v of trouble: %d brokers killed, %d cut off, %d times no control plane", took, kills, cuts, losses)
	t.Logf("%d messages released in %v, %d delivered; %.3g intervals, worst slack %.3f messages (eligible), %.3f (released, at most %v late)",
		len(all), span, delivered, n*(n+1)/2, slack, lateSlack, late)
	t.Logf("availability: %.1f %% of what the contract allows was released", 100*n/(rate*span.Seconds()))
}
