package controller_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

// places returns the broker of each publisher of a group.
func places(c *cluster, topic string, publishers int) (all []string) {
	GinkgoHelper()
	for i := range publishers {
		r, err := c.resolve(topic, fmt.Sprintf("g.%d", i))
		Expect(err).NotTo(HaveOccurred())
		all = append(all, r.Assignment.BrokerId)
	}
	return all
}

// journalGate is a journal that a test can block or make fail.
type journalGate struct {
	controller.Journal
	mu     sync.Mutex
	closed chan struct{} // Append waits for it; nil: Append does not wait
	fault  error
	waits  chan struct{} // 1 deep: an Append has come to the journalGate
	full   bool          // the journal takes no dump
	dumps  atomic.Int64  // requested dumps
}

func (g *journalGate) Compact(ctx context.Context, dump catalog.Dump) error {
	g.dumps.Add(1)
	if g.full {
		return errInjected
	}
	return g.Journal.Compact(ctx, dump)
}

func (g *journalGate) Append(ctx context.Context, base uint64, events []catalog.Event) error {
	g.mu.Lock()
	closed, fault := g.closed, g.fault
	g.mu.Unlock()
	if fault != nil {
		return fault
	}
	if closed != nil {
		select {
		case g.waits <- struct{}{}:
		default:
		}
		<-closed
	}
	return g.Journal.Append(ctx, base, events)
}

// shut blocks later Appends until open.
func (g *journalGate) shut() (open func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	closed := make(chan struct{})
	g.closed = closed
	open = sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.closed = nil
		close(closed)
	})
	atEnd(open)
	return open
}

func (g *journalGate) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fault = err
}

func gatedJournal(g *journalGate) func(*controller.Config) {
	g.waits = make(chan struct{}, 1)
	return func(cfg *controller.Config) {
		if cfg.Journal != nil { // once the store is open
			g.Journal = cfg.Journal
			cfg.Journal = g
		}
	}
}

// slowJournal needs a second for each write.
type slowJournal struct{ controller.Journal }

func (j slowJournal) Append(ctx context.Context, base uint64, events []catalog.Event) error {
	<-time.After(time.Second)
	return j.Journal.Append(ctx, base, events)
}

var _ = Describe("A slow journal", func() {
	// Each plan once waited for its write before the next plan began: a crash of a broker with 3,333
	// topics took 3,333 writes.
	It("serves the plans of many topics by one write", func() {
		c := newCluster(setup{data: &store.Memory{}, prepareTimeout: time.Minute, config: func(cfg *controller.Config) {
			cfg.Journal = slowJournal{cfg.Journal}
		}})
		c.join("b", 1000, agenttest.New())
		began := time.Now()
		var all []<-chan error
		for i := range 60 {
			all = append(all, c.creating(context.Background(), spec(fmt.Sprint("t", i), 10, 1), ""))
		}
		for _, done := range all {
			Expect(<-done).To(Succeed())
		}
		Expect(time.Since(began)).To(BeNumerically("<", 30*time.Second), "for 60 topics")
	})
})

var _ = Describe("A restart with a slow broker", func() {
	// Each request was repeated when its time was over, and the answer to the first request was ignored.
	// A broker that needed longer for all topics than the time limit never became complete.
	It("requests each topic once", func() {
		const topics = 30
		data := &store.Memory{}
		set := setup{data: data, prepareTimeout: 5 * time.Second}
		c := newCluster(set)
		b := c.join("b", 1000, agenttest.New())
		for i := range topics {
			c.mustCreate(spec(fmt.Sprint("t", i), 10, 1))
		}
		set.address = c.address
		c.stop()
		var prepared atomic.Int64
		b.node.Sabotage(func(string) error { prepared.Add(1); <-time.After(time.Second); return nil }, nil)
		c = newCluster(set)
		Eventually(func() bool { return c.broker("b").GetConnected() }).WithTimeout(time.Minute).Should(BeTrue())
		Eventually(func() (active int) {
			for i := range topics {
				if c.state(fmt.Sprint("t", i))() == "ACTIVE" {
					active++
				}
			}
			return active
		}).WithTimeout(10 * time.Minute).WithPolling(time.Second).Should(Equal(topics))
		<-time.After(time.Minute)
		Expect(prepared.Load()).To(BeNumerically("==", topics), "orders to prepare a topic")
	})
})

var _ = Describe("A restart of the loaddistributor", func() {
	It("brings back topics, placements, epochs and keys", func() {
		data := &store.Memory{}
		first := newCluster(setup{data: data})
		node := first.node("b1", 600)
		before := first.mustCreate(spec("t", 400, 10), "key")
		was, err := first.resolve("t", "g.7")
		Expect(err).NotTo(HaveOccurred())
		prepared, _ := node.Topic("t")
		Expect(prepared.Identity.GetLog()).NotTo(BeZero())
		first.stop()

		// The broker's agent reconnects by itself, because it knows only the address.
		second := newCluster(setup{data: data, address: first.address})
		now, err := second.resolve("t", "g.7")
		Expect(err).NotTo(HaveOccurred(), "before any broker is back")
		Expect(now.Assignment.BrokerId).To(Equal(was.Assignment.BrokerId))
		Expect(now.Assignment.Epoch).To(Equal(was.Assignment.Epoch))
		Eventually(second.state("t")).Should(Equal("ACTIVE"))
		Eventually(func() map[string]string { return second.shares("t") }).Should(Equal(map[string]string{"b1": "400000/10"}))
		same, _ := node.Topic("t")
		Expect(same.Identity).To(Equal(prepared.Identity), "or it would be taken for another topic")

		again := second.mustCreate(spec("t", 400, 10), "key")
		Expect(again.Epoch).To(Equal(before.Epoch))
		Expect(<-second.creating(context.Background(), spec("t", 500, 10), "key")).To(failsWith(codes.FailedPrecondition))

		// Epochs continue from the last epoch.
		other := second.mustCreate(spec("u", 100, 10))
		Expect(other.Epoch).To(BeNumerically(">", before.Epoch))
	})

	It("that has lost its store leaves publishers where they are, and denies what no broker holds", func() {
		first := newCluster(setup{data: &store.Memory{}})
		first.join("b1", 60, agenttest.New())
		absent := first.join("b2", 60, agenttest.New())
		first.mustCreate(spec("t", 100, 10))
		first.stop()
		absent.stop()
		second := newCluster(setup{data: &store.Memory{}, address: first.address, config: func(cfg *controller.Config) { cfg.Grace = 15 * time.Second }})
		resolved := func(topic string) error {
			_, err := second.resolve(topic, "g.7")
			return err
		}
		watched := func(topic string) error {
			stream, err := second.placement.Watch(context.Background(), &srtmv1.WatchRequest{Topic: topic, PublisherIds: []string{"g.7"}})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}
		described := func(topic string) error {
			_, err := second.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: topic})
			return err
		}
		for _, asked := range []func(string) error{resolved, watched, described} {
			Expect(asked("t")).To(fails(codes.Unavailable, rpc.ReasonUnread))
			Expect(asked("never was")).To(fails(codes.Unavailable, rpc.ReasonUnread), "no broker has come yet")
		}
		Eventually(func() bool { return second.broker("b1").GetConnected() }).Should(BeTrue())
		// A second topic of the same name would have none of the messages.
		Expect(<-second.creating(context.Background(), spec("t", 40, 10), "")).To(fails(codes.Unavailable, rpc.ReasonUnread))
		<-time.After(15 * time.Second)
		for _, asked := range []func(string) error{resolved, watched, described} {
			Expect(asked("t")).To(fails(codes.Unavailable, rpc.ReasonUnread))
			Expect(asked("never was")).To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
		}
		second.mustCreate(spec("t", 40, 10))
		Expect(resolved("t")).To(Succeed())
		second.mustDelete("t")
		Expect(resolved("t")).To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
	})

	It("that has lost its store rebuilds it from what brokers keep, once all of a topic's are there", func() {
		first := newCluster(setup{data: &store.Memory{}})
		b1, b2, b3 := agenttest.New(), agenttest.New(), agenttest.New()
		first.join("b1", 60, b1)
		files, err := agent.OpenFiles(GinkgoT().TempDir())
		Expect(err).NotTo(HaveOccurred())
		disk := func(cfg *agent.Config) { cfg.Store = files }
		second := first.join("b2", 60, b2, instance("one"), disk)
		first.mustCreate(spec("t", 100, 10), "key")
		first.join("b3", 60, b3)
		first.mustMove("t", "b3", "g.0")
		first.mustCreate(spec("small", 4, 4))
		first.mustCreate(spec("gone", 4, 4))
		first.mustDelete("gone")
		was, epoch, shares := places(first, "t", 100), first.topic("t").Epoch, first.shares("t")
		first.stop()
		second.stop()

		data := &store.Memory{}
		again := newCluster(setup{data: data, address: first.address})
		resolves := func(topic string) func() error {
			return func() error {
				_, err := again.resolve(topic, "g.0")
				return err
			}
		}
		Eventually(resolves("small")).Should(Succeed())
		Eventually(func() bool { return again.broker("b3").GetConnected() }).Should(BeTrue())
		<-time.After(15 * time.Second) // longer than brokers take to come back
		Expect(resolves("t")()).To(fails(codes.Unavailable, rpc.ReasonUnread), "b2 may know better")
		again.join("b2", 60, b2, instance("two"), disk)
		Eventually(resolves("t")).Should(Succeed())
		Eventually(again.state("t")).Should(Equal("ACTIVE"))
		Expect(places(again, "t", 100)).To(Equal(was))
		Expect(again.topic("t").Epoch).To(BeNumerically(">", epoch))
		Eventually(func() map[string]string { return again.shares("t") }).Should(Equal(shares))
		same := again.mustCreate(spec("t", 100, 10), "key")
		Expect(same.Epoch).To(Equal(again.topic("t").Epoch))
		Expect(resolves("gone")()).To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
		again.stop()
		third := newCluster(setup{data: crash(data), address: first.address})
		Expect(places(third, "t", 100)).To(Equal(was))
	})

	It("that has lost its store gets it back from an export, with every publisher where it was", func() {
		first := newCluster(setup{data: &store.Memory{}})
		first.join("b1", 60, agenttest.New())
		first.join("b2", 60, agenttest.New())
		first.mustCreate(spec("t", 100, 10), "key")
		first.mustCreate(spec("later", 4, 4))
		Expect(first.control.Calibrate("b2", 77)).Error().NotTo(HaveOccurred())
		was, epoch := places(first, "t", 100), first.topic("t").Epoch
		stream, err := first.admin.ExportCluster(context.Background(), &srtmv1.ExportClusterRequest{})
		Expect(err).NotTo(HaveOccurred())
		var text []byte
		for m, err := stream.Recv(); !errors.Is(err, io.EOF); m, err = stream.Recv() {
			Expect(err).NotTo(HaveOccurred())
			text = append(text, m.Text...)
		}
		first.mustDelete("later")
		first.stop()

		data := &store.Memory{}
		second := newCluster(setup{data: data, address: first.address})
		importing := func(text []byte) (*srtmv1.ImportClusterResponse, error) {
			stream, err := second.admin.ImportCluster(context.Background())
			Expect(err).NotTo(HaveOccurred())
			for len(text) > 0 {
				n := min(len(text), 100)
				if stream.Send(&srtmv1.ImportClusterRequest{Text: text[:n]}) != nil {
					break
				}
				text = text[n:]
			}
			return stream.CloseAndRecv()
		}
		Expect(importing(text[:len(text)-1])).Error().To(fails(codes.InvalidArgument, rpc.ReasonBadRequest))
		done, err := importing(text)
		Expect(err).NotTo(HaveOccurred())
		Expect(done.Topics).To(BeEquivalentTo(2))
		again, err := importing(text)
		Expect(err).NotTo(HaveOccurred())
		Expect(again.Topics).To(BeZero())
		Expect(again.Brokers).To(BeZero())
		Expect(again.LeftOut).To(HaveLen(2))
		Expect(second.control.Calibrate("b2", 0)).Error().NotTo(HaveOccurred())
		again, err = importing(text)
		Expect(err).NotTo(HaveOccurred())
		Expect(again.Brokers).To(BeEquivalentTo(1), "b2 has its capacity again")
		Expect(places(second, "t", 100)).To(Equal(was))
		Expect(second.topic("t").Epoch).To(BeNumerically(">", epoch), "or publishers would take it for something old")
		Eventually(second.state("t")).Should(Equal("ACTIVE"))
		Expect(second.broker("b2").CalibratedMcap).To(BeEquivalentTo(77))
		Eventually(func() map[string]string { return second.shares("t") }).Should(Equal(map[string]string{"b1": "50000/5", "b2": "50000/5"}))
		same := second.mustCreate(spec("t", 100, 10), "key")
		epoch = second.topic("t").Epoch
		Expect(same.Epoch).To(Equal(epoch))
		second.stop()
		third := newCluster(setup{data: crash(data), address: first.address})
		Expect(places(third, "t", 100)).To(Equal(was))
		Eventually(third.state("later")).Should(Equal("ACTIVE"))
		Expect(third.topic("t").Epoch).To(Equal(epoch))
	})

	It("that has lost its store leaves topics out of an import that brokers keep, perhaps from after the export", func() {
		first, former := newCluster(setup{data: &store.Memory{}}), agenttest.New()
		first.join("b1", 200, former)
		first.mustCreate(spec("t", 100, 10))
		text, err := first.control.View().Export()
		Expect(err).NotTo(HaveOccurred())
		first.join("b2", 200, agenttest.New())
		var all []string
		for i := range 100 {
			all = append(all, fmt.Sprintf("g.%d", i))
		}
		first.mustMove("t", "b2", all...)
		Eventually(hasTopic(former, "t")).Should(BeFalse())
		first.stop()

		second := newCluster(setup{data: &store.Memory{}, address: first.address, config: func(cfg *controller.Config) { cfg.Grace = 15 * time.Second }})
		for _, id := range []string{"b1", "b2"} {
			Eventually(func() bool { return second.broker(id).GetConnected() }).Should(BeTrue())
		}
		<-time.After(time.Second) // for what the brokers keep
		imported, err := second.control.Import(text)
		Expect(err).NotTo(HaveOccurred())
		Expect(imported.Topics).To(BeZero())
		Expect(imported.LeftOut).To(ConsistOf(ContainSubstring("topic t: broker b2 keeps it, and it comes back by itself")))
		<-time.After(15 * time.Second)
		Eventually(second.state("t")).Should(Equal("ACTIVE"))
		Expect(second.publishersByBroker("t", 100)).To(Equal(map[string]int{"b2": 100}), "b2 has the messages")
	})

	It("that has lost its store retires a rebuilt topic from brokers that it had left and that come later", func() {
		first, former := newCluster(setup{data: &store.Memory{}}), agenttest.New()
		old := first.join("b1", 60, former)
		first.mustCreate(spec("t", 4, 4))
		former.Use("t", true) // messages wait
		first.join("b2", 60, agenttest.New())
		first.mustMove("t", "b2", "g.0", "g.1", "g.2", "g.3")
		first.stop()
		old.stop()

		second := newCluster(setup{data: &store.Memory{}, address: first.address})
		Eventually(func() error { _, err := second.resolve("t", "g.0"); return err }).Should(Succeed())
		second.join("b1", 60, former, instance("another"))
		Consistently(hasTopic(former, "t")).Should(BeTrue())
		Expect(second.broker("b1").ConfiguredMcap).To(BeEquivalentTo(60))
		former.Use("t", false)
		Eventually(hasTopic(former, "t")).Should(BeFalse(), "its messages are gone")
		Expect(second.publishersByBroker("t", 4)).To(Equal(map[string]int{"b2": 4}))
	})

	It("that has lost its store retires an imported topic from brokers that have it from after the export", func() {
		first, later := newCluster(setup{data: &store.Memory{}}), agenttest.New()
		first.join("b1", 60, agenttest.New())
		first.mustCreate(spec("t", 4, 4))
		text, err := first.control.View().Export()
		Expect(err).NotTo(HaveOccurred())
		first.join("b2", 60, later)
		lost := first.join("b3", 60, agenttest.New())
		first.mustMove("t", "b2", "g.0", "g.1")
		first.mustMove("t", "b3", "g.2", "g.3")
		first.stop()
		lost.stop()

		second := newCluster(setup{data: &store.Memory{}, address: first.address})
		for _, id := range []string{"b1", "b2"} {
			Eventually(func() bool { return second.broker(id).GetConnected() }).Should(BeTrue())
		}
		<-time.After(time.Second) // for what the brokers keep
		Expect(second.control.Import(text)).To(HaveField("Topics", 1), "b3 has not come with the topic")
		Eventually(hasTopic(later, "t")).Should(BeFalse(), "it has no message")
		Expect(second.publishersByBroker("t", 4)).To(Equal(map[string]int{"b1": 4}))
	})

	It("that has lost its store retires an imported topic from brokers that join after the import", func() {
		first, later := newCluster(setup{data: &store.Memory{}}), agenttest.New()
		first.join("b1", 60, agenttest.New())
		first.mustCreate(spec("t", 4, 4))
		text, err := first.control.View().Export()
		Expect(err).NotTo(HaveOccurred())
		old := first.join("b2", 60, later)
		first.mustMove("t", "b2", "g.0", "g.1", "g.2", "g.3")
		first.stop()
		old.stop()

		second := newCluster(setup{data: &store.Memory{}, address: first.address})
		Eventually(func() bool { return second.broker("b1").GetConnected() }).Should(BeTrue())
		Expect(second.control.Import(text)).To(HaveField("Topics", 1))
		later.Use("t", true) // messages wait
		second.join("b2", 60, later, instance("another"))
		Eventually(func() map[string]string { return second.shares("t") }).Should(HaveKey("b2"), "a share to deliver the messages")
		later.Use("t", false)
		Eventually(hasTopic(later, "t")).Should(BeFalse(), "its messages are gone")
		Expect(second.publishersByBroker("t", 4)).To(Equal(map[string]int{"b1": 4}))
	})

	// The broker may hold a share. The next adaptor learns of the share only from the broker.
	DescribeTable("rolls back a creation that no caller knows of", func(granted bool) {
		data := &store.Memory{}
		first := newCluster(setup{data: data})
		node := agenttest.New()
		b := first.join("b1", 600, node)
		entered, release := b.hang()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		created := make(chan struct{})
		go func() {
			defer close(created)
			_, _, _ = first.create(ctx, spec("t", 400, 10), "key")
		}()
		Eventually(entered).Should(BeClosed())
		// A crash: the next process finds what is durable now.
		copied := crash(data)
		if !granted {
			cancel()
			synctest.Wait()
		}
		release()
		Eventually(created).Should(BeClosed())
		first.stop()

		second := newCluster(setup{data: copied, address: first.address})
		Eventually(func() error { _, err := second.control.View().Topic("t"); return err }).Should(MatchError(catalog.ErrTopicUnknown))
		Eventually(func() bool { return second.broker("b1").GetConnected() }).Should(BeTrue())
		second.nothingLeft("t", b)
		topic := second.mustCreate(spec("t", 400, 10), "key")
		Expect(topic.State).To(Equal(srtmv1.TopicState_TOPIC_STATE_ACTIVE))
	}, Entry("before a share was granted", false), Entry("after that", true))

	It("keeps what brokers have acknowledged of a creation that it rolls back", func() {
		data := &store.Memory{}
		first := newCluster(setup{data: data})
		node := agenttest.New()
		node.Use("t", true) // messages wait
		var removals atomic.Int64
		b := first.join("b1", 600, node)
		entered, release := b.hang()
		created := first.creating(context.Background(), spec("t", 400, 10), "key")
		Eventually(entered).Should(BeClosed())
		copied := crash(data)
		release()
		Eventually(created).Should(Receive(BeNil()))
		first.stop()
		node.Sabotage(nil, func(string) error { removals.Add(1); return nil })

		second := newCluster(setup{data: copied, address: first.address})
		Eventually(func() error { _, err := second.control.View().Topic("t"); return err }).Should(MatchError(catalog.ErrTopicUnknown))
		Eventually(func() bool { return second.broker("b1").GetConnected() }).Should(BeTrue())
		Consistently(hasTopic(node, "t"), "12s").Should(BeTrue())
		second.mustCreate(spec("t", 400, 10), "key")
		Expect(removals.Load()).To(BeZero())
		kept, _ := node.Topic("t")
		Expect(kept.Retired).To(BeFalse())
	})

	It("finishes a deletion", func() {
		data := &store.Memory{}
		first := newCluster(setup{data: data})
		node := agenttest.New()
		b := first.join("b1", 600, node)
		first.mustCreate(spec("t", 400, 10))
		asked, proceed := make(chan struct{}), make(chan struct{})
		enter := sync.OnceFunc(func() { close(asked) })
		node.Sabotage(nil, func(string) error { enter(); <-proceed; return nil })
		deleted := make(chan error, 1)
		go func() {
			_, err := first.admin.DeleteTopic(context.Background(), &srtmv1.DeleteTopicRequest{Name: "t"})
			deleted <- err
		}()
		Eventually(asked).Should(BeClosed())
		copied := crash(data)
		close(proceed)
		Eventually(deleted).Should(Receive())
		first.stop()

		second := newCluster(setup{data: copied, address: first.address})
		Eventually(func() error { _, err := second.control.View().Topic("t"); return err }).Should(MatchError(catalog.ErrTopicUnknown))
		Eventually(func() bool { return second.broker("b1").GetConnected() }).Should(BeTrue())
		second.nothingLeft("t", b)
	})
})

// crash returns a store with everything that is durable in data now.
func crash(data *store.Memory) *store.Memory {
	GinkgoHelper()
	return data.Clone()
}

var _ = Describe("What is not durable", func() {
	It("is not shown", func() {
		g := &journalGate{}
		c := newCluster(setup{data: &store.Memory{}, config: gatedJournal(g)})
		c.join("b1", 600, agenttest.New())
		open := g.shut()
		created := c.creating(context.Background(), spec("t", 400, 10), "")
		Eventually(g.waits).Should(Receive())
		Expect(c.control.View().Topics("", 10)).To(BeEmpty())
		Expect(c.broker("b1").Allocated).To(BeZero())
		Consistently(created, "50ms").ShouldNot(Receive())
		open()
		Eventually(created).Should(Receive(BeNil()))
	})

	It("continues if the journal refuses a dump, and tries again", func() {
		gate := &journalGate{full: true}
		c := newCluster(setup{data: &store.Memory{}, config: gatedJournal(gate)})
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		Expect(gate.dumps.Load()).To(BeEquivalentTo(1))
		for range 1000 {
			Expect(c.control.Calibrate("b1", 600)).Error().NotTo(HaveOccurred())
		}
		Eventually(gate.dumps.Load).Should(BeEquivalentTo(2))
		Expect(c.state("t")()).To(Equal("ACTIVE"))
	})

	It("is answered with an error when the journal fails, and the controller ends", func() {
		g := &journalGate{}
		c := newCluster(setup{data: &store.Memory{}, config: gatedJournal(g)})
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 200, 10))
		g.fail(errInjected)
		Expect(<-c.creating(context.Background(), spec("u", 200, 10), "")).To(failsWith(codes.Unavailable))
		Expect(c.control.View().Topic("u")).Error().To(MatchError(catalog.ErrTopicUnknown))
	})
})

// shareCounter counts the answers about all shares, and how many of these report a change.
type shareCounter struct {
	controller.Adaptor
	all, full *atomic.Int32
}

func (a shareCounter) Shares(ctx context.Context, topic string, unless uint64) (*srtmv1.ListSharesResponse, error) {
	r, err := a.Adaptor.Shares(ctx, topic, unless)
	if topic == "" {
		a.all.Add(1)
		a.full.Add(int32(min(len(r.GetTopics()), 1)))
	}
	return r, err
}

var _ = Describe("The comparison of contracts", func() {
	It("goes through all topics only where one of both sides has changed", func() {
		var all, full atomic.Int32
		c := newCluster(setup{wrap: func(a controller.Adaptor) controller.Adaptor { return shareCounter{a, &all, &full} }})
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 200, 10))
		<-time.After(time.Second) // virtual
		counted := func() (compared, looked int32) {
			before, beforeFull := all.Load(), full.Load()
			<-time.After(10 * time.Second)
			return all.Load() - before, full.Load() - beforeFull
		}
		compared, looked := counted()
		Expect(compared).To(BeNumerically(">", 100))
		Expect(looked).To(BeZero())
		c.mustCreate(spec("u", 200, 10))
		<-time.After(time.Second)
		Expect(full.Load()).To(BeNumerically(">", 1))
		_, looked = counted()
		Expect(looked).To(BeZero())
	})
})
