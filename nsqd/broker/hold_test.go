package broker_test

import (
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
	"github.com/srtm-io/srtm/tokenbucket"
)

// The agent moves the hold ahead of the clock several times in a lease, and no step of an idle topic
// sees the moves. The next publish must not be held by a hold that was moved long ago.
var _ = Describe("a topic under a contract that was idle while the hold moved", func() {
	single := func(t *broker.Topic, now mono.Time, p broker.Published) error { return t.Publish(now, 1, p) }
	batch := func(n int) put {
		return func(t *broker.Topic, now mono.Time, p broker.Published) error {
			return t.PublishBatch(now, 1, p, alike(n))
		}
	}
	for kind, put := range map[string]put{
		"a publish":     single,
		"a batch":       batch(3),
		"a large batch": batch(600),
		"one of several publishes": func(t *broker.Topic, now mono.Time, p broker.Published) error {
			return t.PublishEach(now, 1, []broker.Published{p}, nil)[0]
		},
	} {
		It("releases "+kind+" at once", func() {
			p := newPulse()
			holds(start(func(c *broker.Config) { c.Now = p.read }), p, put)
		})
	}
	for kind, put := range map[string]put{
		"a stored publish":     single,
		"a stored batch":       batch(3),
		"a large stored batch": batch(600),
		"one of several stored publishes": func(t *broker.Topic, _ mono.Time, p broker.Published) error {
			return t.StoreEach(1, []broker.Published{p}, nil)[0]
		},
	} {
		It("releases "+kind+" at once, although the write takes longer than the hold", func() {
			p := newPulse()
			disk := logtest.Disk(func(f commitlog.File) commitlog.File { return timed{f, p.run} })
			b, _ := opened(GinkgoT().TempDir(), func(c *broker.Config) { c.Capacity, c.Now = 10_000, p.read },
				func(c *broker.StorageConfig) { c.Disk, c.WriteThrough = &disk, true })
			Expect(b.Restore()).To(Succeed())
			holds(b, p, put)
		})
	}

	It("releases a message in a step during whose start the hold moves", func() {
		p := newPulse()
		b := start(func(c *broker.Config) { c.Now = p.read })
		t := limited(b, p)
		Expect(single(t, p.read(), broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: p.read()}})).To(Succeed())
		during := func() {
			p.now.Add(int64(half - 1))
			p.move()
			p.now.Add(int64(half - 1))
		}
		p.during.Store(&during)
		Expect(t.CreateChannel("c")).To(Succeed())
		Expect(t.Stats().Waiting).To(BeZero())
	})
})

const half = time.Second // of a lease

type put func(*broker.Topic, mono.Time, broker.Published) error

// pulse is the clock of a broker, and the agent that moves the hold ahead of the clock.
type pulse struct {
	now    atomic.Int64
	during atomic.Pointer[func()] // called once by the next read of the clock

	mu   sync.Mutex
	node *broker.Node // nil: the agent does not run
}

func newPulse() *pulse {
	p := &pulse{}
	p.now.Store(int64(time.Hour))
	return p
}

func (p *pulse) read() mono.Time {
	if f := p.during.Swap(nil); f != nil {
		(*f)()
	}
	return mono.Time(p.now.Load())
}

// start starts the agent; a nil node stops the agent.
func (p *pulse) start(node *broker.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.node = node; node != nil {
		p.move()
	}
}

func (p *pulse) move() { p.node.HoldFrom(mono.Time(p.now.Load()).Add(half)) }

// run lets the time of two holds pass while the agent runs.
func (p *pulse) run() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := 0; p.node != nil && i < 8; i++ {
		p.now.Add(int64(half / 4))
		p.move()
	}
}

// timed is a file on which time passes during each write.
type timed struct {
	commitlog.File
	pass func()
}

func (f timed) WriteAt(b []byte, at int64) (int, error) {
	f.pass()
	return f.File.WriteAt(b, at)
}

// limited returns a topic without a channel. Its bucket has tokens for all messages of a test.
func limited(b *broker.Broker, p *pulse) *broker.Topic {
	GinkgoHelper()
	p.start(b.Node())
	t := topic(b, "t")
	testkit.Result(grant(b.Node(), "t", tokenbucket.Share{Rate: 1000, Burst: 5000}, 5000*tokenbucket.Token)).Must(GinkgoTB())
	return t
}

func holds(b *broker.Broker, p *pulse, put put) {
	GinkgoHelper()
	t := limited(b, p)
	Expect(t.CreateChannel("c")).To(Succeed())
	publish := func() {
		GinkgoHelper()
		at := p.read()
		Expect(put(t, at, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: at}})).To(Succeed())
	}
	p.run()
	publish()
	Expect(t.Stats().Waiting).To(BeZero())
	p.start(nil)
	p.now.Add(int64(half))
	publish()
	Expect(t.Stats().Waiting).To(BeNumerically(">", 0), "a hold that has passed holds")
	p.start(b.Node())
	Expect(t.Stats().Waiting).To(BeZero())
}
