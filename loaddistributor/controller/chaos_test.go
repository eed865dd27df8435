package controller_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tokenbucket"
)

var (
	chaosRuns = flag.Int("chaos", 6, "how many seeds of the chaos spec are run")
	chaosSeed = flag.Uint64("chaos-seed", 1, "the first of them")
)

// line is the connection over which a broker's agent dials. A test can cut the line, or break it so
// that the other end does not notice immediately.
type line struct {
	mu    sync.Mutex
	down  bool
	conns map[*lineConn]struct{}
}

type lineConn struct {
	net.Conn
	of *line
}

func (l *line) dial(ctx context.Context, address string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		return nil, net.ErrClosed
	}
	conn, err := dialNetwork(ctx, address)
	if err != nil {
		return nil, err
	}
	c := &lineConn{conn, l}
	l.conns[c] = struct{}{}
	return c, nil
}

// option has an agent dial over the line.
func (l *line) option(cfg *agent.Config) {
	cfg.DialOptions = []grpc.DialOption{grpc.WithContextDialer(l.dial)}
}

// Close leaves the other end without notice for a while.
func (c *lineConn) Close() error {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if _, open := c.of.conns[c]; open {
		delete(c.of.conns, c)
		time.AfterFunc(300*time.Millisecond, func() { _ = c.Conn.Close() })
	}
	return nil
}

// disconnect ends all connections; down: no new connections are possible.
func (l *line) disconnect(down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = down
	for c := range l.conns {
		_ = c.SetReadDeadline(time.Unix(1, 0))
	}
}

// reach reconnects the line.
func (l *line) reach() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = false
}

// chaosBroker is a broker process, running or ended.
type chaosBroker struct {
	*broker // nil: the process has ended
	line    *line
	began   int
}

// chaos is a cluster in which random events happen at the same time.
type chaos struct {
	rng      *rand.Rand
	data     *store.Memory
	gate     *journalGate
	setup    setup
	c        *cluster
	adaptor  *part
	brokers  map[string]*chaosBroker
	ids      []string
	topics   []string
	ports    sync.Map // by broker: what a probe finds; absent: nothing answers
	requests sync.WaitGroup
	log      []string
}

const (
	chaosRate  = 80 // msg/s, at most, of a topic
	chaosBurst = 20
)

func newChaos(seed uint64) *chaos {
	h := &chaos{
		rng: rand.New(rand.NewPCG(seed, 0)), data: &store.Memory{}, brokers: map[string]*chaosBroker{},
		ids: []string{"b1", "b2", "b3", "b4"}, topics: []string{"t1", "t2", "t3"},
	}
	h.setup = setup{data: h.data, prepareTimeout: time.Second, config: func(cfg *controller.Config) {
		h.gate = &journalGate{}
		gatedJournal(h.gate)(cfg)
		cfg.EvacuateAfter, cfg.ConsumerWait, cfg.Fitting = 500*time.Millisecond, 500*time.Millisecond, tuner.ModeFast
		if seed%3 == 0 {
			cfg.Fitting, cfg.FittingRound = tuner.ModePaper, 200*time.Millisecond
		}
		if seed%5 > 0 {
			cfg.Probe = func(_ context.Context, address string) (accepts, refuses bool) {
				is, _ := h.ports.Load(strings.SplitN(address, ".", 2)[0])
				return is == "accepts", is == "refuses"
			}
		}
	}}
	if seed%4 > 0 { // otherwise the leader has the adaptor in its own process
		ln := listen("127.0.0.1:0")
		h.setup.adaptorAddress = ln.Addr().String()
		h.adaptor, _ = startAdaptor(ln)
	}
	h.c = newCluster(h.setup)
	h.setup.address = h.c.address
	for _, id := range h.ids {
		h.begin(id)
	}
	return h
}

// begin starts a broker's process.
func (h *chaos) begin(id string) {
	b := h.brokers[id]
	if b == nil {
		b = &chaosBroker{}
		h.brokers[id] = b
	}
	b.began++
	h.ports.Store(id, "accepts")
	b.line = &line{conns: map[*lineConn]struct{}{}}
	b.broker = h.c.arrive(id, 100, agenttest.New(), instance(fmt.Sprint(id, "-", b.began)), b.line.option)
}

// reach reconnects a broker.
func (h *chaos) reach(id string) {
	h.brokers[id].line.reach()
	h.ports.Store(id, "accepts")
}

// attempt starts a request. The request may fail, but must not hang.
func (h *chaos) attempt(what string, f func(context.Context, *cluster) error) {
	c := h.c
	ctx, cancel := context.WithCancel(context.Background())
	if h.rng.IntN(5) == 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(h.rng.IntN(300))*time.Millisecond)
	}
	h.note("%s", what)
	h.requests.Go(func() {
		defer cancel()
		err := f(ctx, c)
		fmt.Fprintln(GinkgoWriter, "CHAOS", what, "ended with", err)
	})
}

func (h *chaos) note(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
	fmt.Fprintln(GinkgoWriter, "CHAOS", h.log[len(h.log)-1])
}

func pick[E any](rng *rand.Rand, of []E) E { return of[rng.IntN(len(of))] }

// spec draws a specification of the topic; t3 is an open topic.
func (h *chaos) spec(name string) *srtmv1.TopicSpec {
	s := spec(name, int64(20+20*h.rng.IntN(chaosRate/20)), int64(5+h.rng.IntN(chaosBurst-4)))
	if name == "t3" {
		s.Groups = nil
	}
	if h.rng.IntN(3) == 0 {
		s.Contract.Slo.Latency = durationpb.New(6 * time.Millisecond)
	}
	return s
}

// happen causes one random event.
func (h *chaos) happen() {
	topic, id := pick(h.rng, h.topics), pick(h.rng, h.ids)
	b := h.brokers[id]
	switch n := h.rng.IntN(100); {
	case n < 16:
		s, key := h.spec(topic), pick(h.rng, []string{"", "key-" + topic})
		h.attempt("create "+topic, func(ctx context.Context, c *cluster) error { _, _, err := c.create(ctx, s, key); return err })
	case n < 22:
		h.attempt("delete "+topic, func(ctx context.Context, c *cluster) error {
			_, err := c.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: topic})
			return err
		})
	case n < 30:
		s := h.spec(topic)
		h.attempt("update "+topic, func(ctx context.Context, c *cluster) error {
			_, err := c.admin.UpdateTopic(ctx, &srtmv1.UpdateTopicRequest{Spec: s})
			return err
		})
	case n < 42:
		ids := []string{fmt.Sprint("g.", h.rng.IntN(20)), fmt.Sprint("g.", h.rng.IntN(20))}[:1+h.rng.IntN(2)]
		h.attempt("move "+topic+" to "+id, func(ctx context.Context, c *cluster) error {
			_, err := c.admin.MovePublishers(ctx, &srtmv1.MovePublishersRequest{Topic: topic, BrokerId: id, PublisherIds: ids})
			return err
		})
	case n < 50:
		undo, force := h.rng.IntN(2) == 0, h.rng.IntN(4) == 0
		h.attempt(fmt.Sprint("drain ", id, " undo ", undo), func(ctx context.Context, c *cluster) error {
			_, err := c.admin.DrainBroker(ctx, &srtmv1.DrainBrokerRequest{BrokerId: id, Undo: undo, Force: force && !undo})
			return err
		})
	case n < 56:
		h.attempt("profile "+topic, func(ctx context.Context, c *cluster) error {
			stream, err := c.admin.ProfileTopic(ctx, &srtmv1.ProfileTopicRequest{Name: topic, Lasts: durationpb.New(10 * time.Second)})
			for err == nil {
				_, err = stream.Recv()
			}
			return err
		})
	case n < 60 && b.broker == nil: // an operator's removal would count for more than a running broker
		h.attempt("remove "+id, func(ctx context.Context, c *cluster) error {
			_, err := c.admin.RemoveBroker(ctx, &srtmv1.RemoveBrokerRequest{BrokerId: id})
			return err
		})
	case n < 68 && b.broker != nil:
		h.note("%s ends", id)
		h.ports.Store(id, "refuses")
		b.stop()
		b.broker = nil
	case n < 76 && b.broker == nil:
		h.note("%s begins", id)
		h.begin(id)
	case n < 84 && b.broker != nil:
		down := h.rng.IntN(2) == 0
		h.note("%s is cut off: %v", id, down)
		if b.line.disconnect(down); down {
			h.ports.Delete(id)
		}
	case n < 88 && b.broker != nil:
		h.note("%s is reached again", id)
		h.reach(id)
	case n < 90:
		h.note("the leader ends")
		h.c.stop()
		h.c = newCluster(h.setup)
	case n < 92:
		h.note("the journal fails")
		h.gate.fail(errInjected)
		<-time.After(time.Duration(h.rng.IntN(50)) * time.Millisecond)
		h.c.stop()
		h.c = newCluster(h.setup)
	case n < 94 && h.adaptor != nil:
		h.note("the adaptor restarts")
		h.adaptor.stop()
		<-time.After(time.Duration(h.rng.IntN(1500)) * time.Millisecond)
		h.adaptor, _ = startAdaptor(listen(h.setup.adaptorAddress))
	case n < 97 && b.broker != nil:
		var asked atomic.Int64
		fails := func(string) error {
			if asked.Add(1)%2 == 0 {
				return errInjected
			}
			return nil
		}
		h.note("%s fails now and then", id)
		b.node.Sabotage(fails, fails)
	default:
		if b.broker != nil {
			h.note("%s is healthy", id)
			b.node.Sabotage(nil, nil)
		}
	}
}

// checkTraffic makes brokers report their load for all existing topics.
func (h *chaos) checkTraffic(much bool) {
	for _, name := range h.topics {
		topic, err := h.c.control.View().Topic(name)
		for id, b := range h.brokers {
			if b.broker == nil {
				continue
			}
			if _, found := b.node.Topic(name); !found {
				continue
			}
			if err != nil || !much || topic.Plan.On(id) < 0 {
				b.node.Measure(name, nil)
				continue
			}
			b.node.Measure(name, measured(200, h.rng.IntN(2)*h.rng.IntN(20), 0))
			b.node.Arrive(name, 0, agenttest.Arrival{At: mono.Wall(time.Now().UnixNano()), Publisher: "g.0"})
		}
	}
}

// bounded expects that no topic holds more than was ever sold of it. A deleted topic on a broker that
// did not get the order does not count for a new topic of the same name.
func (h *chaos) bounded() {
	GinkgoHelper()
	for _, name := range h.topics {
		held := map[uint64]tokenbucket.Share{} // by when the topic was created
		for _, b := range h.brokers {
			if b.broker == nil {
				continue
			}
			is, _ := b.node.Topic(name)
			at := is.Identity.GetCreated()
			sum := held[at]
			held[at] = tokenbucket.Share{Rate: sum.Rate + is.Share.Rate, Burst: sum.Burst + is.Share.Burst}
		}
		for _, sum := range held {
			Expect(sum.Rate).To(BeNumerically("<=", chaosRate*1000), "topic %s has %v", name, held)
			Expect(sum.Burst).To(BeNumerically("<=", chaosBurst), "topic %s has %v", name, held)
		}
	}
}

// allowedReason matches the normal states of a topic that was offered too much, or drained by force.
var allowedReason = regexp.MustCompile(`^(; )?((over contract since|broker b\d carries \d+ msg/s, less than)[^;]*(; the excess is still being delivered)?)(; broker b\d carries [^;]*|; over contract since [^;]*(; the excess is still being delivered)?)*$`)

// settled returns what is not in its final state after all events have ended.
func (h *chaos) settled() (wrong []string) {
	add := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	for _, b := range h.c.brokers() {
		if !b.Connected {
			add("broker %s is disconnected", b.Id)
		}
	}
	for _, name := range h.topics {
		topic, err := h.c.control.View().Topic(name)
		shares := h.c.shares(name)
		// If the adaptor restarted in the middle of a move, brokers may still divide the contract as
		// before the move, because the adaptor recovers the shares that brokers hold.
		var held tokenbucket.Share
		for _, id := range h.ids {
			is, found := h.brokers[id].node.Topic(name)
			member := err == nil && topic.Plan.On(id) >= 0
			switch {
			case member != found:
				add("broker %s is to have topic %s: %v; has it: %v", id, name, member, found)
			case member && !is.Limited:
				add("broker %s does not limit topic %s", id, name)
			case member && is.Share.IsZero():
				add("broker %s has no share of topic %s", id, name)
			}
			held = tokenbucket.Share{Rate: held.Rate + is.Share.Rate, Burst: held.Burst + is.Share.Burst}
			if _, holds := shares[id]; holds != member {
				add("the adaptor has a share of topic %s for %s: %v, want %v", name, id, holds, member)
			}
		}
		if err == nil && topic.State != catalog.Active && !allowedReason.MatchString(topic.Reason) {
			add("topic %s is %v: %s", name, topic.State, topic.Reason)
		}
		if err == nil && (int64(held.Rate) != topic.Spec.Demand.RateMilli || held.Burst != topic.Spec.Demand.Burst) {
			add("brokers have %v of topic %s, which has %+v", held, name, topic.Spec.Demand)
		}
		if err == nil && (topic.Next != nil || len(topic.Retiring) > 0) {
			add("topic %s moves still, or is retiring from %v", name, topic.Retiring)
		}
	}
	return wrong
}

func (h *chaos) run() {
	for range 60 {
		h.happen()
		for range h.rng.IntN(8) {
			<-time.After(time.Duration(h.rng.IntN(100)) * time.Millisecond) // virtual
			h.checkTraffic(true)
			h.bounded()
		}
	}
	By("healing")
	h.note("healing")
	h.checkTraffic(false)
	for _, id := range h.ids {
		b := h.brokers[id]
		if b.broker == nil {
			h.begin(id)
		}
		h.reach(id)
		b.node.Sabotage(nil, nil)
	}
	asked := make(chan struct{})
	go func() { h.requests.Wait(); close(asked) }()
	select {
	case <-asked:
	case <-time.After(2 * time.Minute): // virtual
		Fail("a request hangs")
	}
	Eventually(func() []string {
		h.checkTraffic(false)
		h.bounded()
		for _, b := range h.c.brokers() {
			if b.Draining {
				_, _ = h.c.admin.DrainBroker(context.Background(), &srtmv1.DrainBrokerRequest{BrokerId: b.Id, Undo: true})
			}
		}
		return h.settled()
	}, "3m", "500ms").Should(BeEmpty())
	synctest.Wait()
}

var _ = Describe("A cluster to which everything happens at once", func() {
	It("settles", func() {
		for i := range *chaosRuns {
			seed := *chaosSeed + uint64(i)
			By(fmt.Sprint("seed ", seed))
			h := newChaos(seed)
			func() {
				defer func() {
					if r := recover(); r != nil {
						AddReportEntry("what happened", slices.Concat([]string{fmt.Sprint("seed ", seed)}, h.log))
						panic(r)
					}
				}()
				h.run()
			}()
			h.c.stop()
			if h.adaptor != nil {
				h.adaptor.stop()
			}
			for _, b := range h.brokers {
				b.stop()
			}
		}
	})
})
