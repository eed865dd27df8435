package ledger_test

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

func conforms(times []mono.Time, c tokenbucket.Share) (slack float64, err error) {
	return testkit.Envelope(times, int64(c.Rate), c.Burst)
}

func TestConformsToTheContract(t *testing.T) {
	c := tokenbucket.Share{Rate: 1_000_000, Burst: 3} // one per millisecond
	ms := func(times ...float64) (out []mono.Time) {
		for _, t := range times {
			out = append(out, mono.Time(t*1e6))
		}
		return out
	}
	for _, times := range [][]mono.Time{nil, ms(0, 0, 0), ms(0, 0, 0, 1, 2, 3), ms(5, 5, 5, 6, 20, 20, 20)} {
		if _, err := conforms(times, c); err != nil {
			t.Errorf("%v: %v", times, err)
		}
	}
	for _, times := range [][]mono.Time{ms(0, 0, 0, 0), ms(0, 0, 0, 0.999), ms(0, 1, 2, 2, 2, 2.5), ms(9, 3, 9, 9, 9)} {
		if _, err := conforms(times, c); err == nil {
			t.Errorf("%v passes", times)
		}
	}
}

// cluster is a ledger and brokers with nsqd's topics, in virtual time.
type cluster struct {
	rng         *rand.Rand
	now         mono.Time
	events      events
	order       int
	leases      ledger.Leases
	contract    tokenbucket.Share
	flex        ledger.Permille
	ledger      *ledger.Ledger
	contractSet bool // the ledger has the contract
	initial     []share.Assigned
	brokers     []*broker
	eligible    []mono.Time // as the buckets say
	released    []mono.Time // when the brokers released the messages
	lateness    time.Duration
	faults      bool
	arrived     int
	restarts    int // of the adaptor
}

const (
	topicName  = "t"
	backdating = 5 * time.Millisecond
)

type broker struct {
	id        string
	policy    ledger.Policy
	starts    int
	running   bool
	cut       bool // off from the adaptor
	session   int
	lastHello int // the session of the last hello that the ledger received
	topic     *queue.Topic
	fx        queue.Effects
	epoch     uint64
	base      tokenbucket.Share // on the broker's disk, with epoch
	flexUntil mono.Time
	leaseEnd  mono.Time
	wake      mono.Time // time of a scheduled event
}

type event struct {
	at    mono.Time
	order int // simultaneous events happen in the order of their creation
	run   func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(e[i].at, e[j].at), e[i].order-e[j].order) < 0
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any     { last := (*e)[len(*e)-1]; *e = (*e)[:len(*e)-1]; return last }

func (c *cluster) schedule(t mono.Time, f func()) {
	c.order++
	heap.Push(&c.events, event{at: t, order: c.order, run: f})
}

func (c *cluster) scheduleAfter(d time.Duration, f func()) { c.schedule(c.now.Add(d), f) }

// scheduleEvery repeats an action at random intervals.
func (c *cluster) scheduleEvery(mean time.Duration, f func()) {
	var next func()
	next = func() {
		f()
		c.scheduleAfter(c.delay(mean), next)
	}
	c.scheduleAfter(c.delay(mean), next)
}

// delay returns an exponentially distributed delay.
func (c *cluster) delay(mean time.Duration) time.Duration {
	return time.Duration(c.rng.ExpFloat64() * float64(mean))
}

func (c *cluster) run(until mono.Time) {
	for len(c.events) > 0 && c.events[0].at <= until {
		e := heap.Pop(&c.events).(event)
		c.now = e.at
		e.run()
	}
}

// send carries a message of a session one way: late, perhaps twice or never. A message is lost while
// the broker is cut off, or once the session is over.
func (c *cluster) send(b *broker, f func()) {
	copies := 1
	if c.faults {
		copies = []int{0, 1, 1, 1, 2}[c.rng.IntN(5)]
	}
	session := b.session
	for range copies {
		c.scheduleAfter(c.delay(2*time.Millisecond), func() {
			if b.running && !b.cut && b.session == session {
				f()
			}
		})
	}
}

func (c *cluster) broadcast(grants []ledger.Grant) {
	for _, g := range grants {
		b := c.brokers[slices.IndexFunc(c.brokers, func(b *broker) bool { return b.id == g.Broker })]
		if b.lastHello == b.session {
			c.send(b, func() { c.apply(b, g) })
		}
	}
}

func (c *cluster) ack(b *broker, released tokenbucket.Tokens) {
	epoch, held := b.epoch, b.topic.Contract().Share()
	c.send(b, func() {
		if b.lastHello != b.session {
			return
		}
		grants, err := c.ledger.Ack(b.id, topicName, epoch, held, released)
		if err != nil {
			panic(err)
		}
		c.broadcast(grants)
	})
}

func (c *cluster) apply(b *broker, g ledger.Grant) {
	var released tokenbucket.Tokens
	if g.Epoch > b.epoch {
		lease := queue.Lease{Base: g.Base(), FlexUntil: mono.Never, Until: mono.Never}
		if g.Share != g.Base() {
			lease.FlexUntil = b.flexUntil
		}
		if b.policy == ledger.Strict {
			lease.Until = b.leaseEnd
		}
		released = b.topic.SetLeased(c.now, g.Share, lease, g.Tokens, &b.fx)
		b.epoch, b.base = g.Epoch, g.Base()
	}
	c.ack(b, released)
	c.drain(b)
}

// drain records the released messages and runs again at the next release.
func (c *cluster) drain(b *broker) {
	b.topic.Tick(c.now, &b.fx)
	for _, r := range b.fx.Released {
		c.eligible = append(c.eligible, r.Eligible)
		c.released = append(c.released, c.now)
		c.lateness = max(c.lateness, c.now.Sub(r.Eligible))
	}
	b.fx.Reset()
	if e := b.topic.ReleaseDeadline(); e != mono.Never && e != b.wake {
		b.wake = e
		// A timer fires late, perhaps after the end of a lease.
		late := time.Duration(0)
		if c.faults {
			late = c.delay(200 * time.Microsecond)
		}
		topic := b.topic
		c.schedule(max(c.now, e).Add(late), func() {
			if b.wake = mono.Never; b.topic == topic && b.running {
				c.drain(b)
			}
		})
	}
}

// hello sends a hello, which arrives later. The lease counts from the time of sending.
func (c *cluster) hello(b *broker) {
	b.session++
	c.drain(b)
	s := ledger.Session{Broker: b.id, Stamp: mono.Stamp{Process: fmt.Sprintf("%s.%d", b.id, b.starts)}, Place: identity.Place{Lock: b.id}, Policy: b.policy}
	if held := b.topic.Contract().Share(); !held.IsZero() {
		base := tokenbucket.Share{Rate: min(held.Rate, b.base.Rate), Burst: min(held.Burst, b.base.Burst)}
		flex := tokenbucket.Share{Rate: held.Rate - base.Rate, Burst: held.Burst - base.Burst}
		s.Shares = []ledger.HeldShare{{Topic: topicName, Share: held, Flex: flex, Epoch: b.epoch}}
	}
	at, session := c.now, b.session
	c.scheduleAfter(c.delay(2*time.Millisecond), func() {
		if b.session != session || b.cut {
			return
		}
		b.lastHello = session
		grants, err := c.ledger.Hello(s, c.now)
		if err != nil {
			panic(err)
		}
		c.renew(b, at)
		c.broadcast(grants)
		c.begin()
	})
}

func (c *cluster) renew(b *broker, at mono.Time) {
	c.send(b, func() {
		late := time.Duration(c.rng.Int64N(int64(c.leases.ClockBound) + 1))
		b.flexUntil = max(b.flexUntil, at.Add(c.leases.Flex+late))
		b.leaseEnd = max(b.leaseEnd, at.Add(c.leases.Session+late))
		until := mono.Never
		if b.policy == ledger.Strict {
			until = b.leaseEnd
		}
		b.topic.Renew(c.now, b.flexUntil, until, &b.fx)
		c.drain(b)
	})
}

// renewals renews the leases.
func (c *cluster) renewals() {
	for _, b := range c.brokers {
		c.scheduleEvery(c.leases.Flex/5, func() {
			if !b.running {
				return
			}
			at := c.now
			c.drain(b)
			if b.epoch > 0 {
				c.ack(b, 0) // the lapsed part
			}
			c.send(b, func() {
				if b.lastHello != b.session {
					return
				}
				if renewed, grants := c.ledger.Renew(b.id, c.now); renewed {
					c.renew(b, at)
					c.broadcast(grants)
				}
			})
		})
	}
	c.scheduleEvery(c.leases.Flex/10, func() {
		over, grants := c.ledger.Expire(c.now)
		for _, o := range over {
			b := c.brokers[slices.IndexFunc(c.brokers, func(b *broker) bool { return b.id == o.Broker })]
			b.lastHello = 0
			c.scheduleAfter(c.delay(10*time.Millisecond), func() { c.greet(b) })
		}
		c.broadcast(grants)
	})
}

// greet sends hellos until a ledger receives it.
func (c *cluster) greet(b *broker) {
	if b.running && b.lastHello != b.session {
		c.hello(b)
		c.scheduleAfter(c.delay(20*time.Millisecond), func() { c.greet(b) })
	}
}

// begin gives the first ledger its contract once all brokers are connected.
func (c *cluster) begin() {
	if c.contractSet || slices.ContainsFunc(c.brokers, func(b *broker) bool { return b.lastHello == 0 }) {
		return
	}
	c.contractSet = true
	grants, err := c.ledger.SetContract(topicName, ledger.Terms{Contract: c.contract, Flex: c.flex}, c.initial)
	if err != nil {
		panic(err)
	}
	c.broadcast(grants)
}

// bringBack plays the contract's owner, at any time after a restart of the adaptor: it restores the
// contract, or changes the shares of the contract.
func (c *cluster) bringBack() {
	do, shares := c.ledger.Adopt, c.initial
	if c.rng.IntN(2) == 0 {
		do, shares = c.ledger.Change, slices.Clone(c.initial)
		from, to := c.rng.IntN(len(shares)), c.rng.IntN(len(shares))
		rate, burst := shares[from].Share.Rate/3, shares[from].Share.Burst/3
		shares[from].Share.Rate -= rate
		shares[from].Share.Burst -= burst
		shares[to].Share.Rate += rate
		shares[to].Share.Burst += burst
	}
	grants, err := do(topicName, ledger.Terms{Contract: c.contract, Flex: c.flex, Former: c.contract}, shares, nil)
	if err != nil {
		panic(err)
	}
	c.broadcast(grants)
}

// traffic makes bursts at random brokers, and occasionally all bursts at one broker.
func (c *cluster) traffic(perSecond float64, burst int) {
	favourite := c.rng.IntN(len(c.brokers))
	c.scheduleEvery(time.Duration(float64(burst)/perSecond*1e9), func() {
		n := 1 + c.rng.IntN(2*burst-1)
		b := c.brokers[favourite]
		if c.rng.IntN(3) > 0 {
			b = c.brokers[c.rng.IntN(len(c.brokers))]
		}
		if c.rng.IntN(100) == 0 {
			favourite = c.rng.IntN(len(c.brokers))
		}
		if !b.running {
			return
		}
		for range n {
			m := &queue.Message{Arrival: c.now}
			if c.faults && c.rng.IntN(3) == 0 { // read late, and out of order
				m.Arrival = m.Arrival.Add(-c.delay(2 * time.Millisecond))
			}
			if err := b.topic.Put(c.now, &b.fx, m); err != nil {
				panic(err)
			}
		}
		c.arrived += n
		c.drain(b)
	})
}

// retunes moves parts of shares between brokers, sometimes large parts.
func (c *cluster) retunes(every time.Duration) {
	c.scheduleEvery(every, func() {
		var loads []share.Load
		for _, b := range c.brokers {
			loads = append(loads, share.Load{
				Broker: b.id, Rate: c.rng.ExpFloat64(), MaxBacklog: c.rng.Int64N(20), Publishers: 1,
			})
		}
		target, err := share.Split(share.Proportional, c.contract, loads)
		if err != nil {
			panic(err)
		}
		if v, _ := c.ledger.Topic(topicName); v.Contract.IsZero() {
			return // not set, or not restored
		}
		grants, err := c.ledger.Propose(topicName, target)
		if err != nil {
			panic(err)
		}
		c.broadcast(grants)
	})
}

// boot starts a broker's process with an empty bucket. With the policy Available the process continues
// with its predecessor's base, from the disk.
func (c *cluster) boot(b *broker) {
	b.running, b.starts, b.session = true, b.starts+1, b.session+1
	b.flexUntil, b.leaseEnd, b.wake = 0, 0, mono.Never
	b.topic = queue.NewTopic(queue.Config{Capacity: 1 << 20, MaxInFlight: time.Minute, MaxBackdating: backdating, Rand: c.rng})
	b.topic.Limit(queue.OverLimit{})
	b.topic.CreateChannel(c.now, "c", &b.fx)
	if b.policy != ledger.Available {
		b.epoch, b.base = 0, tokenbucket.Share{}
	}
	b.topic.SetShare(c.now, b.base, 0, &b.fx)
	c.greet(b)
}

// trouble ends sessions and processes and cuts brokers off, for a while each. Occasionally the adaptor
// loses its memory.
func (c *cluster) trouble(every time.Duration) {
	c.scheduleEvery(every, func() {
		b := c.brokers[c.rng.IntN(len(c.brokers))]
		if !b.running || b.cut {
			return
		}
		ended := func() {
			if b.lastHello != 0 {
				b.lastHello = 0
				c.broadcast(c.ledger.Disconnect(b.id))
			}
		}
		switch c.rng.IntN(8) {
		case 0, 1: // the session ends
			b.session++ // messages in flight are lost
			c.scheduleAfter(c.delay(3*time.Millisecond), ended)
			c.scheduleAfter(c.delay(20*time.Millisecond), func() { c.greet(b) })
		case 2, 3: // the process ends, and the adaptor notices, or not
			b.session++
			b.running = false
			if c.rng.IntN(2) == 0 {
				c.scheduleAfter(c.delay(3*time.Millisecond), ended)
			}
			c.scheduleAfter(c.delay(40*time.Millisecond), func() { c.boot(b) })
		case 4, 5, 6: // no session ends
			b.cut = true
			c.scheduleAfter(c.delay(2*c.leases.Session/3), func() {
				b.cut = false
				c.greet(b)
			})
		case 7:
			c.restarts++
			if !c.contractSet {
				break
			}
			c.ledger = ledger.New(uint64(c.now)+1e12, c.leases)
			for range 1 + c.rng.IntN(3) {
				c.scheduleAfter(c.delay(20*time.Millisecond), c.bringBack)
			}
			for _, b := range c.brokers {
				b.lastHello, b.session = 0, b.session+1
				c.scheduleAfter(c.delay(20*time.Millisecond), func() { c.greet(b) })
			}
		}
	})
	c.scheduleEvery(10*time.Millisecond, func() {
		for _, b := range c.brokers {
			c.broadcast(c.ledger.Outstanding(b.id))
		}
	})
}

func newCluster(rng *rand.Rand, policies []ledger.Policy, contract tokenbucket.Share, flex ledger.Permille) *cluster {
	leases := ledger.Leases{Flex: 30 * time.Millisecond, Session: 120 * time.Millisecond, ClockBound: 3 * time.Millisecond}
	c := &cluster{rng: rng, contract: contract, leases: leases, flex: flex, ledger: ledger.New(0, leases)}
	var weights []int64
	for range policies {
		weights = append(weights, 1+rng.Int64N(5))
	}
	shares, err := share.Proportion(contract, weights)
	if err != nil {
		panic(err)
	}
	for i, policy := range policies {
		b := &broker{id: fmt.Sprintf("b%d", i), policy: policy}
		c.brokers = append(c.brokers, b)
		c.initial = append(c.initial, share.Assigned{Broker: b.id, Share: shares[i]})
	}
	for _, b := range c.brokers {
		c.boot(b)
	}
	c.renewals()
	return c
}

// The main guarantee: whatever happens to messages, processes and the adaptor, and however the shares
// move, all brokers together keep the contract exactly, by the times at which their messages had
// tokens. Brokers release messages later, by at most backdating, so the excess by release times is at
// most r times backdating.
func TestAllBrokersTogetherKeepTheContract(t *testing.T) {
	var runs, messages, restarts int
	var intervals float64
	tightest := math.Inf(1)
	rapid.Check(t, func(t *rapid.T) {
		policies := rapid.SliceOfN(rapid.SampledFrom([]ledger.Policy{ledger.Available, ledger.Strict}), 1, 6).Draw(t, "brokers")
		contract := tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.Int64Range(50_000, 5_000_000).Draw(t, "r")),
			Burst: rapid.Int64Range(int64(len(policies)), 100).Draw(t, "b"),
		}
		load := rapid.Float64Range(0.2, 3).Draw(t, "load")
		burst := rapid.IntRange(1, 50).Draw(t, "messages at once")
		flex := ledger.Permille(rapid.Int64Range(0, 1000).Draw(t, "flexible"))
		c := newCluster(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)), policies, contract, flex)
		c.faults = true
		c.traffic(load*contract.Rate.PerSecond(), burst)
		c.retunes(30 * time.Millisecond)
		c.trouble(150 * time.Millisecond)
		c.run(mono.Time(time.Second))
		slack, err := conforms(c.eligible, contract)
		if err != nil {
			t.Fatalf("eligible: %v", err)
		}
		if c.lateness > backdating {
			t.Fatalf("released %v after its token", c.lateness)
		}
		late := int64(math.Ceil(contract.Rate.PerSecond() * backdating.Seconds()))
		if _, err := conforms(c.released, tokenbucket.Share{Rate: contract.Rate, Burst: contract.Burst + late}); err != nil {
			t.Fatalf("released: %v", err)
		}
		testkit.Must(t, c.ledger.CheckForm())
		runs, messages, restarts, tightest = runs+1, messages+len(c.eligible), restarts+c.restarts, min(tightest, slack)
		intervals += float64(len(c.eligible)) * float64(len(c.eligible)+1) / 2
	})
	t.Logf("%d runs, %d restarts of the adaptor, %d messages, %.3g intervals; the tightest had room for %.3f messages", runs, restarts, messages, intervals, tightest)
}

// Releasing nothing would also be safe. Without faults, brokers that are all overloaded get nearly all
// of r, however their shares move.
func TestRetuningCostsLittleRate(t *testing.T) {
	contract := tokenbucket.Share{Rate: 2_000_000, Burst: 60}
	c := newCluster(testkit.Rand(t), slices.Repeat([]ledger.Policy{ledger.Available}, 4), contract, 500)
	for range 4 { // so that no broker runs out of messages
		c.traffic(2*contract.Rate.PerSecond(), 5)
	}
	c.retunes(30 * time.Millisecond)
	const seconds = 5
	c.run(mono.Time(seconds * time.Second))
	testkit.Result(conforms(c.eligible, contract)).Must(t)
	got, all := len(c.eligible), seconds*contract.Rate.PerSecond()
	if float64(got) < 0.8*all {
		t.Errorf("%d messages released in %d s, the contract allows %.0f", got, seconds, all)
	}
	t.Logf("%d messages released of %d that arrived, the contract allows %.0f", got, c.arrived, all)
}
