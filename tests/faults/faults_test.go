package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tokenbucket"
)

// longer is the environment variable for a longer run: make faults.
const longer = "SRTM_FAULTS"

const (
	rate, burst = 3000, 60 // the contract, msg/s and messages
	offered     = 2 * rate
	lowestRate  = 600                    // of updates
	backdating  = 250 * time.Millisecond // nsqd's default
	topic       = "t"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// cluster is the processes and the data to restart them.
type cluster struct {
	t      *testing.T
	dir    string
	grpc   string // the loaddistributor's addresses
	web    string
	leases []string // lease flags of the adaptor's process
	// placement is the policy of the topic, mcap the mcap of each broker.
	placement string
	mcap      int
	control   *local.Process
	brokers   []*broker
	machines  machines
	real      func(machine string, reading mono.Time) mono.Time // nil: the brokers' clocks are right
	wall      func() time.Time                                  // the loaddistributor's wall clock; nil: time.Now
	store     []string                                          // flags of the loaddistributor's store
	durable   []string                                          // durability flags of the brokers
	ledger    ledger
	creations atomic.Int64  // attempts to create the topic, without the first; the latency of its SLO identifies the attempt
	undrain   []func() bool // ends of drains that the control plane has not acknowledged

	// The adaptor is a separate process, which brokers and the loaddistributor reach through the link.
	// With an embedded adaptor, these fields are unused. Publishers hold publishing for reading while
	// messages are in flight.
	publishing sync.RWMutex

	apart                   bool
	adaptorGRPC, adaptorWeb string
	link                    *local.Proxy
	adaptor                 *local.Process
	spare                   [2]string      // addresses of the next adaptor
	second                  *local.Process // a former adaptor, running beside the current adaptor on purpose; nil: none
}

type broker struct {
	name, dir, tcp, web string
	policy              string
	proxy               *local.Proxy // to the loaddistributor
	process             *local.Process
}

func (b *broker) trace() string { return filepath.Join(b.dir, "releases.csv") }

// machines says where the processes run.
type machines interface {
	// program returns the path of a program that runs on a machine.
	program(machine, pkg string) string
	// address returns the address on a machine for the port of a free loopback address.
	address(machine, free string) string
	// proxy returns a proxy of an address; nil: no proxy.
	proxy(target string) *local.Proxy
}

// loopback is one machine for all processes, with proxies between them.
type loopback struct{ t *testing.T }

func (l loopback) program(_, pkg string) string  { return localtest.Program(l.t, pkg) }
func (l loopback) address(_, free string) string { return free }
func (l loopback) proxy(target string) *local.Proxy {
	l.t.Helper()
	p := testkit.Result(local.NewProxy(target)).Must(l.t)
	l.t.Cleanup(p.Close)
	return p
}

// by returns the address of the proxy, or the address of the process if there is no proxy.
func by(p *local.Proxy, address string) string {
	if p == nil {
		return address
	}
	return p.Address()
}

func (c *cluster) must(err error) {
	c.t.Helper()
	testkit.Must(c.t, err)
}

// shortLeases end within a run.
var shortLeases = []string{"--flex-lease=600ms", "--session-lease=2s", "--clock-bound=50ms"}

func (c *cluster) startControl() {
	c.t.Helper()
	flags := []string{
		"--grpc-address=" + c.grpc, "--http-address=" + c.web, "--tcp-address=",
		"--report-interval=200ms", "--log-level=warn", "--fitting=off",
		"--auto-create=off", // a connected publisher must not create a deleted topic again
	}
	flags = append(flags, c.store...)
	if c.apart {
		flags = append(flags, "--tbadaptor-address="+by(c.link, c.adaptorGRPC), "--tbadaptor-lease=1s", "--clock-bound=50ms")
	} else {
		flags = append(append(flags, c.leases...), "--share-period=200ms")
	}
	d, err := local.Run(c.machines.program("control", "loaddistributor"), c.dir, flags, local.Answers("http://"+c.web+"/ping"))
	c.must(err)
	c.control = d
}

func (c *cluster) startAdaptor() {
	c.t.Helper()
	c.adaptor = c.startAdaptorAt(c.adaptorGRPC, c.adaptorWeb)
}

func (c *cluster) startAdaptorAt(rpc, web string) *local.Process {
	c.t.Helper()
	flags := append([]string{
		"--grpc-address=" + rpc, "--http-address=" + web, "--period=200ms", "--log-level=warn",
	}, c.leases...)
	d, err := local.Run(c.machines.program("adaptor", "tbadaptor"), c.dir, flags, local.Answers("http://"+web+"/ping"))
	c.must(err)
	return d
}

func (c *cluster) startBroker(b *broker) {
	c.t.Helper()
	flags := append([]string{
		"--broker-id=" + b.name, "--loaddistributor-address=" + by(b.proxy, c.grpc), fmt.Sprintf("--mcap=%d", c.mcap), "--policy=" + b.policy,
		"--data-path=" + b.dir, "--release-trace=" + b.trace(), "--log-level=warn", "--drain-timeout=0s",
	}, c.durable...)
	d, err := local.NSQDAt(c.machines.program(b.name, "nsqd"), b.dir, b.tcp, b.web, flags...)
	c.must(err)
	b.process = d
}

func newCluster(t *testing.T, apart bool, leases []string, policies ...string) *cluster {
	t.Helper()
	// The topic needs all three brokers.
	return newClusterOf(t, apart, leases, "srtm", 1100, policies...)
}

func newClusterOf(t *testing.T, apart bool, leases []string, placement string, mcap int, policies ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), leases: leases, apart: apart, placement: placement, mcap: mcap, machines: loopback{t}}
	c.store = []string{"--data-path=" + c.dir}
	if os.Getenv(longer) != "" {
		c.durable = []string{"--durability=fsync"}
	}
	c.start(policies)
	return c
}

// start starts the processes, with one broker for each policy.
func (c *cluster) start(policies []string) {
	t, on, apart := c.t, c.machines, c.apart
	t.Helper()
	const own = 6
	free, err := local.Ports(own + 2*len(policies))
	c.must(err)
	c.grpc, c.web = on.address("control", free[0]), on.address("control", free[1])
	c.adaptorGRPC, c.adaptorWeb = on.address("adaptor", free[2]), on.address("adaptor", free[3])
	c.spare = [2]string{free[4], free[5]}
	c.link = on.proxy(c.adaptorGRPC)
	if apart {
		c.startAdaptor()
	}
	c.startControl()
	for i, policy := range policies {
		b := &broker{name: fmt.Sprintf("b%d", i), dir: t.TempDir(), policy: policy, proxy: on.proxy(c.grpc)}
		b.tcp, b.web = on.address(b.name, free[own+2*i]), on.address(b.name, free[own+1+2*i])
		c.brokers = append(c.brokers, b)
		c.startBroker(b)
	}
	t.Cleanup(func() {
		for _, b := range c.brokers {
			testkit.NoError(t, b.process.Kill())
		}
		testkit.NoError(t, c.control.Kill())
		for _, d := range []*local.Process{c.adaptor, c.second} {
			if d != nil {
				testkit.NoError(t, d.Kill())
			}
		}
	})
}

// create creates the topic once all brokers are there.
func (c *cluster) create(ctx context.Context) {
	c.t.Helper()
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(c.t, c.grpc))
	testkit.WaitFor(c.t, "all brokers", func() bool {
		r, err := admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{}, grpc.WaitForReady(true))
		return err == nil && len(r.Brokers) == len(c.brokers)
	})
	testkit.WaitFor(c.t, "topic, for which brokers have to join", func() bool {
		err := c.createTopic(ctx, admin, fixed()[0].contract)
		if ctx.Err() != nil {
			c.t.Fatal(err)
		}
		return err == nil
	})
}

func (c *cluster) createTopic(ctx context.Context, admin srtmv1.AdminServiceClient, contract tokenbucket.Share) error {
	spec := &srtmv1.TopicSpec{
		Name:      topic,
		Contract:  &srtmv1.Contract{RateMilli: int64(contract.Rate), Burst: contract.Burst, Slo: sloOf(c.creations.Load())},
		Groups:    groups(contract),
		Channels:  []string{"c"},
		ShareRule: "robust",

		PlacementPolicy: c.placement,
	}
	_, err := topics.Create(ctx, admin, &srtmv1.CreateTopicRequest{Spec: spec}, nil, grpc.WaitForReady(true))
	return err
}

// groups are publishers that declare four fifths of a contract.
func groups(contract tokenbucket.Share) []*srtmv1.PublisherGroup {
	const publishers = 300
	return []*srtmv1.PublisherGroup{{Count: publishers, Rate: contract.Rate.PerSecond() * 4 / 5 / publishers}}
}

func wait(d time.Duration) { <-time.NewTimer(d).C }

// publish offers perSecond messages to an address until ctx ends, over one connection after the other,
// and counts the accepted messages. After slow answers it makes up for at most a tenth of a second.
func (c *cluster) publish(ctx context.Context, b *broker, perSecond int, accepted *atomic.Int64) {
	const tick, most = 10 * time.Millisecond, 100 * time.Millisecond
	var known int64 // creation of the topic that the broker knows; -1: none
	var asked time.Time
	counts := func() bool {
		if created := c.creations.Load(); known != created && time.Since(asked) > most {
			if asked = time.Now(); c.knows(b) {
				known = created
			}
		}
		return known == c.creations.Load()
	}
	for ctx.Err() == nil {
		attempt(ctx, b.tcp, func(nc net.Conn, r *bufio.Reader) error {
			known = -1 // a broker that restarts may have an earlier topic again
			ticker := time.NewTicker(tick)
			defer ticker.Stop()
			for last := time.Now(); ; {
				select {
				case <-ticker.C:
				case <-ctx.Done():
					return nil
				}
				now := time.Now()
				n := int(float64(perSecond) * min(now.Sub(last), most).Seconds())
				last = now
				if err := c.send(nc, r, n, accepted, counts); err != nil {
					return err
				}
			}
		})
	}
}

// send publishes n messages, unless the topic is being replaced, and takes the answers. counts reports
// whether the ledger may expect the accepted messages.
func (c *cluster) send(nc net.Conn, r *bufio.Reader, n int, accepted *atomic.Int64, counts func() bool) error {
	if !c.publishing.TryRLock() {
		return nil
	}
	defer c.publishing.RUnlock()
	expected := counts()
	var out []byte
	first := c.ledger.number(n)
	for i := range n {
		out = wire.AppendPub(out, topic, strconv.AppendInt(nil, first+int64(i), 10))
	}
	if _, err := nc.Write(out); err != nil {
		return err
	}
	for i := range n {
		kind, data, err := next(nc, r)
		if err != nil {
			return err
		}
		if kind == wire.FrameResponse && string(data) == wire.OK {
			if expected {
				c.ledger.accepted(first + int64(i))
			}
			accepted.Add(1)
		}
	}
	return nil
}

// next returns the next frame that is no heartbeat, and answers heartbeats.
func next(nc net.Conn, r *bufio.Reader) (wire.FrameType, []byte, error) {
	for {
		kind, data, err := frames.Read(r, maxFrame)
		if err != nil || kind != wire.FrameResponse || string(data) != wire.Heartbeat {
			return kind, data, err
		}
		if _, err := nc.Write(wire.AppendNop(nil)); err != nil {
			return 0, nil, err
		}
	}
}

// subscribe takes all messages from an address until ctx ends, and counts them.
func (c *cluster) subscribe(ctx context.Context, address string) (taken int) {
	for ctx.Err() == nil {
		attempt(ctx, address, func(nc net.Conn, r *bufio.Reader) error {
			if _, err := nc.Write(wire.AppendRdy(wire.AppendSub(nil, topic, "c"), 2000)); err != nil {
				return err
			}
			for {
				kind, data, err := next(nc, r)
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
				c.ledger.delivered(m.Body)
				if _, err := nc.Write(wire.AppendFin(nil, m.ID)); err != nil {
					return err
				}
			}
		})
	}
	return taken
}

// attempt runs f over one connection until ctx ends. Errors of the connection are the test's doing.
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

// ledger records which messages were accepted and have not been delivered, by number.
type ledger struct {
	mu struct {
		sync.Mutex
		last  int64
		taken int           // deliveries
		open  map[int64]int // 1: accepted, -1: delivered before the answer arrived
	}
}

// number reserves count numbers, and returns the first number.
func (l *ledger) number(count int) (first int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first = l.mu.last + 1
	l.mu.last += int64(count)
	return first
}

func (l *ledger) accepted(number int64) { l.set(number, 1) }

func (l *ledger) delivered(body []byte) {
	l.mu.Lock()
	l.mu.taken++
	l.mu.Unlock()
	if number, err := strconv.ParseInt(string(body), 10, 64); err == nil {
		l.set(number, -1)
	}
}

// deliveries returns the number of deliveries.
func (l *ledger) deliveries() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.taken
}

func (l *ledger) set(number int64, to int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.open == nil {
		l.mu.open = map[int64]int{}
	}
	switch was := l.mu.open[number]; {
	case was == 0:
		l.mu.open[number] = to
	case was != to:
		delete(l.mu.open, number)
	}
}

// forget removes all messages, because their topic was deleted.
func (l *ledger) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.mu.open)
}

// missing returns the numbers of the accepted messages that were not delivered.
func (l *ledger) missing() (numbers []int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for number, state := range l.mu.open {
		if state > 0 {
			numbers = append(numbers, number)
		}
	}
	return numbers
}

// maxFrame is more than a broker sends here.
const maxFrame = 1 << 20

// read returns the releases of all brokers.
func (c *cluster) read() (all []testkit.Release) {
	c.t.Helper()
	for _, b := range c.brokers {
		for _, r := range testkit.ReadTrace(c.t, b.trace(), topic) {
			if c.real != nil {
				r.Arrival, r.Eligible, r.Released = c.real(b.name, r.Arrival), c.real(b.name, r.Eligible), c.real(b.name, r.Released)
			}
			all = append(all, r)
		}
	}
	return all
}

// mishap is a failure of a part, and its repair. One part fails in one way at a time.
type mishap struct {
	kind, part string
	do, mend   func()
	longest    time.Duration
}

func (c *cluster) kill(kind, part string, d **local.Process, again func(), longest time.Duration) mishap {
	return mishap{kind, part, func() { c.must((*d).Kill()) }, again, longest}
}

func (c *cluster) freeze(kind, part string, d **local.Process, longest time.Duration) mishap {
	return mishap{
		kind, part,
		func() { c.must((*d).Signal(syscall.SIGSTOP)) }, func() { c.must((*d).Signal(syscall.SIGCONT)) }, longest,
	}
}

func cut(kind, part string, p *local.Proxy, longest time.Duration) mishap {
	return mishap{kind, part, func() { p.Cut(true) }, func() { p.Cut(false) }, longest}
}

// twoAdaptors replaces a stopped tbadaptor by another, for the loaddistributor and some of the
// brokers. When the stopped adaptor continues, there are two.
func (c *cluster) twoAdaptors(rng *rand.Rand) mishap {
	return mishap{"times two tbadaptors", "tbadaptor", func() {
		staying := map[int]bool{}
		for _, b := range c.brokers {
			if rng.IntN(2) == 0 {
				maps.Copy(staying, ports(c.t, b.process.Pid()))
			}
		}
		if c.second != nil {
			c.must(c.second.Kill())
		}
		c.must(c.adaptor.Signal(syscall.SIGSTOP))
		c.second, c.spare, c.adaptorGRPC, c.adaptorWeb = c.adaptor, [2]string{c.adaptorGRPC, c.adaptorWeb}, c.spare[0], c.spare[1]
		c.startAdaptor()
		c.link.Retarget(c.adaptorGRPC)
		c.link.Drop(func(port int) bool { return !staying[port] })
	}, func() { c.must(c.second.Signal(syscall.SIGCONT)) }, 4 * time.Second}
}

// drain moves the topic away from a broker, and afterwards lets the broker have topics again.
func (c *cluster) drain(b *broker, longest time.Duration) mishap {
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(c.t, c.grpc))
	order := func(undo bool) error {
		limit, cancel := context.WithTimeout(c.t.Context(), time.Second)
		defer cancel()
		_, err := admin.DrainBroker(limit, &srtmv1.DrainBrokerRequest{BrokerId: b.name, Undo: undo}, grpc.WaitForReady(true))
		return err
	}
	return mishap{
		"drains", b.name + "'s drain",
		func() { _ = order(false) }, // the control plane may be unavailable
		func() { c.undrain = append(c.undrain, func() bool { return order(true) == nil }) }, longest,
	}
}

// mishap draws a mishap: of eight, two kill a broker, one stops a broker for a while, two cut a broker
// off from the loaddistributor, and three hit the control plane.
func (c *cluster) mishap(rng *rand.Rand) mishap {
	b := c.brokers[rng.IntN(len(c.brokers))]
	if os.Getenv(longer) != "" && rng.IntN(8) == 0 {
		return c.drain(b, 3*time.Second)
	}
	switch rng.IntN(8) {
	case 0, 1:
		return cut("brokers cut off", b.name+"'s way", b.proxy, 3*time.Second)
	case 2, 3:
		return c.kill("brokers killed", b.name, &b.process, func() { c.startBroker(b) }, 3*time.Second)
	case 4:
		return c.freeze("brokers stopped", b.name, &b.process, 2*time.Second)
	}
	control := []mishap{
		c.kill("times no loaddistributor", "loaddistributor", &c.control, c.startControl, 2*time.Second),
		c.freeze("times the loaddistributor stopped", "loaddistributor", &c.control, 2*time.Second),
	}
	if c.apart {
		control = append(control, c.twoAdaptors(rng),
			c.kill("times no tbadaptor", "tbadaptor", &c.adaptor, c.startAdaptor, 2*time.Second),
			cut("times tbadaptor cut off", "tbadaptor's way", c.link, 2*time.Second))
	}
	return control[rng.IntN(len(control))]
}

// administration changes the topic, and records the API's promises.
type administration struct {
	c        *cluster
	admin    srtmv1.AdminServiceClient
	promises promises

	updates      int
	replacements int // of the topic
	lowerings    lowerings
}

func (c *cluster) administer() *administration {
	return &administration{c: c, admin: srtmv1.NewAdminServiceClient(localtest.Dial(c.t, c.grpc)), promises: fixed()}
}

// call makes a request that may fail, but not because of its content.
func (a *administration) call(patience time.Duration, f func(context.Context) error) error {
	limit, cancel := context.WithTimeout(a.c.t.Context(), patience)
	defer cancel()
	err := f(limit)
	if err != nil && status.Code(err) == codes.InvalidArgument {
		a.c.t.Error(err)
	}
	return err
}

func (a *administration) acknowledged(contract tokenbucket.Share, l *srtmv1.Lowering) {
	now := time.Now
	if a.c.wall != nil {
		now = a.c.wall
	}
	a.promises.acknowledged(contract, l, now())
	a.lowerings.add(a.promises.last().former)
}

// update changes the topic's contract. Without an answer, either contract may hold.
func (a *administration) update(contract tokenbucket.Share) error {
	a.promises.during(contract)
	return a.call(3*time.Second, func(ctx context.Context) error {
		r, err := a.admin.UpdateTopic(ctx, &srtmv1.UpdateTopicRequest{
			Spec:       &srtmv1.TopicSpec{Name: topic, Contract: &srtmv1.Contract{RateMilli: int64(contract.Rate), Burst: contract.Burst}, Groups: groups(contract)},
			UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"contract.rate_milli", "contract.burst", "groups"}},
		}, grpc.WaitForReady(true))
		if err == nil {
			a.acknowledged(contract, r.Topic.Lowering)
			a.updates++
		}
		return err
	})
}

// look reads which brokers may still use former shares, if any may.
func (a *administration) look() {
	if len(a.promises.last().former) == 0 {
		return
	}
	_ = a.call(time.Second, func(ctx context.Context) error {
		r, err := a.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: topic, OmitPublishers: true}, grpc.WaitForReady(true))
		if err == nil {
			a.acknowledged(a.promises.last().contract, r.Topic.Lowering)
		}
		return err
	})
}

// replace deletes the topic and creates it again, with nothing published in between. replace retries
// until both succeed.
func (a *administration) replace(contract tokenbucket.Share) {
	t := a.c.t
	a.c.publishing.Lock()
	defer a.c.publishing.Unlock()
	old := a.promises.last().contract
	until := time.Now().Add(local.Patience)
	for {
		err := a.call(20*time.Second, func(ctx context.Context) error {
			r, err := a.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: topic}, grpc.WaitForReady(true))
			if err == nil {
				a.acknowledged(tokenbucket.Share{}, r.Lowering)
			}
			return err
		})
		if err == nil || status.Code(err) == codes.NotFound { // an earlier attempt has deleted the topic: no answer names the former shares
			break
		}
		if time.Now().After(until) {
			t.Errorf("the topic is not deleted: %v", err)
			return
		}
		wait(100 * time.Millisecond)
	}
	a.promises.during(contract)
	a.replacements++
	for {
		a.c.creations.Add(1) // by attempt: a broker that was cut off keeps the topic of an attempt that failed
		err := a.call(10*time.Second, func(ctx context.Context) error { return a.c.createTopic(ctx, a.admin, contract) })
		if status.Code(err) == codes.AlreadyExists { // an earlier attempt has created the topic, and the answer was lost
			err = a.call(10*time.Second, a.recallCreation)
		}
		if err == nil {
			break
		}
		if time.Now().After(until) {
			t.Errorf("the topic is not created, after %v: %v", old, err)
			return
		}
		wait(100 * time.Millisecond)
	}
	a.c.ledger.forget()
	a.promises = append(a.promises, promise{at: clock.Mono(), contract: contract, fresh: true})
}

// recallCreation sets the number of the last creation to the number in the SLO of the topic.
func (a *administration) recallCreation(ctx context.Context) error {
	r, err := a.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: topic, OmitPublishers: true}, grpc.WaitForReady(true))
	if err == nil {
		a.c.creations.Store(int64((r.Topic.Spec.Contract.Slo.Latency.AsDuration() - sloOf(0).Latency.AsDuration()) / time.Millisecond))
	}
	return err
}

// change changes the contract up and down, and deletes and creates the topic, until ctx ends. At the
// end the contract is the first contract again.
func (a *administration) change(ctx context.Context, rng *rand.Rand) {
	for ctx.Err() == nil {
		contract := tokenbucket.Share{Rate: tokenbucket.Rate(lowestRate+rng.Int64N(rate-lowestRate+1)) * 1000, Burst: burst/3 + rng.Int64N(burst*2/3+1)}
		if rng.IntN(10) == 0 {
			a.replace(contract)
		} else {
			_ = a.update(contract)
		}
		for range 1 + rng.IntN(5) {
			wait(200 * time.Millisecond)
			a.look()
		}
	}
	for end := time.Now().Add(local.Patience); a.update(fixed()[0].contract) != nil; wait(100 * time.Millisecond) {
		if time.Now().After(end) {
			a.c.t.Error("the contract does not become what it was")
			break
		}
	}
}

func (a *administration) String() string {
	return fmt.Sprintf("%d updates, %d deletions and creations; %d answers named brokers that might use more: %v", a.updates, a.replacements, a.lowerings.answers, a.lowerings.brokers)
}

func sloOf(creation int64) *srtmv1.Slo {
	return &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second + time.Duration(creation)*time.Millisecond)}
}

// knows reports whether a broker has the topic of the last creation, or no topic. A broker that is cut
// off, or that has just restarted, may still have the topic of an earlier or a failed creation. The broker accepts
// messages for the earlier topic, and deletes them together with it.
func (c *cluster) knows(b *broker) bool {
	text, _, err := localtest.Ask(http.MethodGet, "http://"+b.web+"/stats?format=json&include_clients=false&topic="+topic, "")
	var stats struct {
		Topics []struct {
			SRTM struct {
				SLO struct {
					Micros int64 `json:"latency_us"`
				}
			}
		}
	}
	if err != nil || json.Unmarshal([]byte(text), &stats) != nil {
		return false
	}
	return len(stats.Topics) == 0 || stats.Topics[0].SRTM.SLO.Micros == sloOf(c.creations.Load()).Latency.AsDuration().Microseconds()
}

// trouble causes mishaps until ctx ends, repairs all, and returns a summary.
func (c *cluster) trouble(ctx context.Context, rng *rand.Rand) string {
	type open struct {
		mishap
		until time.Time
	}
	var now []open
	counts := map[string]int{}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for next := time.Now().Add(2 * time.Second); ; {
		over := ctx.Err() != nil
		c.undrain = slices.DeleteFunc(c.undrain, func(ended func() bool) bool { return ended() })
		now = slices.DeleteFunc(now, func(o open) bool {
			is := over || time.Now().After(o.until)
			if is {
				o.mend()
			}
			return is
		})
		if over {
			testkit.WaitFor(c.t, "ends of drains", func() bool {
				c.undrain = slices.DeleteFunc(c.undrain, func(ended func() bool) bool { return ended() })
				return len(c.undrain) == 0
			})
			break
		}
		m := c.mishap(rng)
		if c.apart && len(counts) == 0 {
			m = c.twoAdaptors(rng) // in every run
		}
		if time.Now().After(next) && !slices.ContainsFunc(now, func(o open) bool { return o.part == m.part }) {
			m.do()
			counts[m.kind]++
			now = append(now, open{m, time.Now().Add(time.Duration(rng.Int64N(int64(m.longest))))})
			next = time.Now().Add(time.Duration(rng.IntN(800)) * time.Millisecond)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
	var list []string
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		list = append(list, fmt.Sprintf("%d %s", counts[kind], kind))
	}
	return strings.Join(list, ", ")
}

// load offers perSecond messages to each broker and takes their deliveries until stop. stop returns
// the number of deliveries, and accepted counts accepted messages.
func (c *cluster) load(perSecond ...int) (accepted *atomic.Int64, stop func() (delivered int64)) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var clients sync.WaitGroup
	var taken atomic.Int64
	accepted = &atomic.Int64{}
	for i, b := range c.brokers {
		clients.Go(func() { c.publish(ctx, b, perSecond[i], accepted) })
		clients.Go(func() { taken.Add(int64(c.subscribe(ctx, b.tcp))) })
	}
	stop = func() int64 {
		cancel()
		clients.Wait()
		return taken.Load()
	}
	c.t.Cleanup(func() { stop() })
	return accepted, stop
}

// flows waits until a number of further messages are delivered.
func (c *cluster) flows(messages int) {
	c.t.Helper()
	before := c.ledger.deliveries()
	for end := time.Now().Add(local.Patience); c.ledger.deliveries() < before+messages; wait(100 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("%d messages were delivered in %v, want %d", c.ledger.deliveries()-before, local.Patience, messages)
		}
	}
}

// verify ends the brokers and checks their releases against the promises.
func (c *cluster) verify(delivered int64, promised promises) {
	t := c.t
	t.Helper()
	for _, b := range c.brokers {
		testkit.NoError(t, b.process.Kill())
	}
	all := c.read()
	eligible, released := testkit.Times(all)
	var late time.Duration
	for _, r := range all {
		late = max(late, r.Released.Sub(r.Eligible))
	}
	if late > backdating {
		t.Errorf("a message left %v after it had its token, %v is the most", late, backdating)
	}
	span := slices.Max(released).Sub(slices.Min(released))
	slack, err := promised.kept(eligible, 0)
	if err != nil {
		t.Errorf("by the times at which messages had their tokens: %v", err)
	}
	lateSlack, err := promised.kept(released, backdating)
	if err != nil {
		t.Errorf("by the times at which they left: %v", err)
	}
	n := float64(len(all))
	t.Logf("%d messages released in %v, %d delivered; %.3g intervals, worst slack %.3f messages (eligible), %.3f (released, at most %v late)",
		len(all), span, delivered, n*(n+1)/2, slack, lateSlack, late)
	t.Logf("availability: %.1f %% of what the contract allows was released", 100*n/(rate*span.Seconds()))
}

// settle ends publishing, and checks that all accepted messages arrive and that the contract was kept.
func (c *cluster) settle(stop func() int64, promised promises) {
	t := c.t
	t.Helper()
	c.publishing.Lock()
	defer c.publishing.Unlock()
	for end := time.Now().Add(2 * local.Patience); len(c.ledger.missing()) > 0; wait(100 * time.Millisecond) {
		if time.Now().After(end) {
			missing := c.ledger.missing()
			slices.Sort(missing)
			t.Errorf("%d accepted messages are not delivered, numbers %d to %d", len(missing), missing[0], missing[len(missing)-1])
			for _, b := range c.brokers {
				text, _, err := localtest.Ask(http.MethodGet, "http://"+b.web+"/stats?format=text&topic="+topic, "")
				t.Logf("%s: %v\n%s", b.name, err, text)
			}
			break
		}
	}
	c.verify(stop(), promised)
}

func TestTheContractHoldsWhateverFails(t *testing.T) {
	length := 10 * time.Second
	if s := os.Getenv(longer); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatalf("%s: %v", longer, err)
		}
		length = d / 2 // for each deployment
	}
	for name, apart := range map[string]bool{"embedded": false, "daemon": true} {
		t.Run(name, func(t *testing.T) {
			// The topic is on all brokers, and each broker could carry all of it, so the contract can
			// be changed while some brokers are disconnected.
			c := newClusterOf(t, apart, shortLeases, "loadbalance", rate+100, "available", "strict", "available")
			create, cancel := context.WithTimeout(t.Context(), local.Patience)
			defer cancel()
			c.create(create)
			_, stop := c.load(offered/3, offered/3, offered/3)
			failing, calm := context.WithTimeout(t.Context(), length)
			defer calm()
			began := time.Now()
			rng := testkit.Rand(t)
			a := c.administer()
			changed := make(chan struct{})
			others := rand.New(rand.NewPCG(rng.Uint64(), 0))
			go func() {
				defer close(changed)
				a.change(failing, others)
			}()
			troubles := c.trouble(failing, rng)
			<-changed
			t.Logf("%v of trouble: %s; %v", time.Since(began), troubles, a)
			c.flows(rate) // again, by itself
			if os.Getenv(longer) != "" {
				c.settle(stop, a.promises)
			} else {
				c.verify(stop(), a.promises)
			}
		})
	}
}
