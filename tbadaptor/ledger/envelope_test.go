package ledger_test

import (
	"cmp"
	"container/heap"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// conforms checks the contract on the releases of all brokers together, exactly
// and for every interval: of messages i <= j in the order of their times,
// j-i+1 <= b + r*(t_j - t_i). That is, j - r*t_j never rises b or more above
// the lowest value it had.
func conforms(times []stamp.Mono, c tokenbucket.Share) error {
	const grain = 1e12 // a token, where r milli-msg/s are r grains per nanosecond
	times = slices.Sorted(slices.Values(times))
	var lowest int64
	from := 0
	for j, e := range times {
		level := int64(j)*grain - int64(c.Rate)*int64(e)
		if j == 0 || level < lowest {
			lowest, from = level, j
		}
		if level-lowest > (c.Burst-1)*grain {
			return fmt.Errorf("%d messages in %v, the contract is %v msg/s, burst %d",
				j-from+1, e.Sub(times[from]), c.Rate.PerSecond(), c.Burst)
		}
	}
	return nil
}

func TestConformsToTheContract(t *testing.T) {
	c := tokenbucket.Share{Rate: 1_000_000, Burst: 3} // one per millisecond
	ms := func(times ...float64) (out []stamp.Mono) {
		for _, t := range times {
			out = append(out, stamp.Mono(t*1e6))
		}
		return out
	}
	for _, times := range [][]stamp.Mono{nil, ms(0, 0, 0), ms(0, 0, 0, 1, 2, 3), ms(5, 5, 5, 6, 20, 20, 20)} {
		if err := conforms(times, c); err != nil {
			t.Errorf("%v: %v", times, err)
		}
	}
	for _, times := range [][]stamp.Mono{ms(0, 0, 0, 0), ms(0, 0, 0, 0.999), ms(0, 1, 2, 2, 2, 2.5), ms(9, 3, 9, 9, 9)} {
		if conforms(times, c) == nil {
			t.Errorf("%v passes", times)
		}
	}
}

// cluster is a ledger and brokers with real buckets, in virtual time.
type cluster struct {
	rng      *rand.Rand
	now      stamp.Mono
	events   events
	order    int
	contract tokenbucket.Share
	ledger   *ledger.Ledger
	brokers  []*broker
	eligible []stamp.Mono // as the buckets say
	released []stamp.Mono // when the brokers let them go
	faults   bool
	arrived  int
}

const topicName = "t"

type broker struct {
	id      string
	starts  int
	up      bool
	session int
	bucket  tokenbucket.Bucket
	epoch   uint64
	queue   []stamp.Mono
	wake    stamp.Mono // for which there is an event
}

type event struct {
	at    stamp.Mono
	order int // events of one instant happen in the order they were made
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(e[i].at, e[j].at), e[i].order-e[j].order) < 0
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any     { last := (*e)[len(*e)-1]; *e = (*e)[:len(*e)-1]; return last }

func (c *cluster) at(t stamp.Mono, do func()) {
	c.order++
	heap.Push(&c.events, event{at: t, order: c.order, do: do})
}

func (c *cluster) after(d time.Duration, do func()) { c.at(c.now.Add(d), do) }

// soon is a delay of exponential distribution.
func (c *cluster) soon(mean time.Duration) time.Duration {
	return time.Duration(c.rng.ExpFloat64() * float64(mean))
}

func (c *cluster) run(until stamp.Mono) {
	for len(c.events) > 0 && c.events[0].at <= until {
		e := heap.Pop(&c.events).(event)
		c.now = e.at
		e.do()
	}
}

// send carries a message of a session one way: late, perhaps twice or never,
// and not at all once the session is over.
func (c *cluster) send(b *broker, do func()) {
	copies := 1
	if c.faults {
		copies = []int{0, 1, 1, 1, 2}[c.rng.IntN(5)]
	}
	session := b.session
	for range copies {
		c.after(c.soon(2*time.Millisecond), func() {
			if b.up && b.session == session {
				do()
			}
		})
	}
}

func (c *cluster) broadcast(grants []ledger.Grant) {
	for _, g := range grants {
		b := c.brokers[slices.IndexFunc(c.brokers, func(b *broker) bool { return b.id == g.Broker })]
		c.send(b, func() { c.apply(b, g) })
	}
}

func (c *cluster) apply(b *broker, g ledger.Grant) {
	var released tokenbucket.Tokens
	if g.Epoch > b.epoch {
		released = b.bucket.Retune(c.now, g.Share, g.Tokens)
		b.epoch = g.Epoch
	}
	epoch, held := b.epoch, b.bucket.Share()
	c.send(b, func() {
		grants, err := c.ledger.Ack(b.id, topicName, epoch, held, released)
		if err != nil {
			panic(err)
		}
		c.broadcast(grants)
	})
	c.drain(b)
}

// drain releases what is eligible and comes back when the next one is.
func (c *cluster) drain(b *broker) {
	for len(b.queue) > 0 {
		e := b.bucket.Eligible(b.queue[0])
		if e > c.now {
			if e != stamp.Never && e != b.wake {
				b.wake = e
				c.at(e, func() { c.drain(b) })
			}
			return
		}
		c.eligible = append(c.eligible, b.bucket.Take(b.queue[0]))
		c.released = append(c.released, c.now)
		b.queue = b.queue[1:]
	}
}

func (c *cluster) hello(b *broker) {
	b.session++
	var held []ledger.Held
	if s := b.bucket.Share(); !s.IsZero() {
		held = []ledger.Held{{Topic: topicName, Share: s, Epoch: b.epoch}}
	}
	grants, err := c.ledger.Hello(b.id, fmt.Sprintf("%s.%d", b.id, b.starts), held)
	if err != nil {
		panic(err)
	}
	c.broadcast(grants)
}

// traffic is bursts at random brokers, now and then all at one.
func (c *cluster) traffic(perSecond float64, burst int) {
	favourite := c.rng.IntN(len(c.brokers))
	var next func()
	next = func() {
		n := 1 + c.rng.IntN(2*burst-1)
		b := c.brokers[favourite]
		if c.rng.IntN(3) > 0 {
			b = c.brokers[c.rng.IntN(len(c.brokers))]
		}
		if c.rng.IntN(100) == 0 {
			favourite = c.rng.IntN(len(c.brokers))
		}
		if b.up {
			for range n {
				b.queue = append(b.queue, c.now)
			}
			c.arrived += n
			c.drain(b)
		}
		c.after(c.soon(time.Duration(float64(burst)/perSecond*1e9)), next)
	}
	c.after(0, next)
}

// retunes moves shares about, sometimes far.
func (c *cluster) retunes(every time.Duration) {
	var next func()
	next = func() {
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
		grants, err := c.ledger.Propose(topicName, target)
		if err != nil {
			panic(err)
		}
		c.broadcast(grants)
		c.after(c.soon(every), next)
	}
	c.after(c.soon(every), next)
}

// trouble ends sessions and processes; both come back after a while.
func (c *cluster) trouble(every time.Duration) {
	var next func()
	next = func() {
		b := c.brokers[c.rng.IntN(len(c.brokers))]
		if b.up {
			b.session++ // what is on the way is lost
			if c.rng.IntN(2) == 0 {
				b.up, b.queue, b.bucket, b.epoch = false, nil, tokenbucket.Bucket{}, 0
			}
			c.after(c.soon(3*time.Millisecond), func() { c.broadcast(c.ledger.Disconnect(b.id)) })
			c.after(c.soon(20*time.Millisecond), func() {
				if !b.up {
					b.up = true
					b.starts++
				}
				c.hello(b)
			})
		}
		c.after(c.soon(every), next)
	}
	c.after(c.soon(every), next)

	var resend func()
	resend = func() {
		for _, b := range c.brokers {
			c.broadcast(c.ledger.Outstanding(b.id))
		}
		c.after(10*time.Millisecond, resend)
	}
	c.after(10*time.Millisecond, resend)
}

func newCluster(rng *rand.Rand, brokers int, contract tokenbucket.Share) *cluster {
	c := &cluster{rng: rng, contract: contract, ledger: ledger.New(0)}
	weights := map[string]int64{}
	for i := range brokers {
		b := &broker{id: fmt.Sprintf("b%d", i), up: true, starts: 1}
		c.brokers = append(c.brokers, b)
		weights[b.id] = 1 + rng.Int64N(5)
		c.hello(b)
	}
	var initial []share.Assigned
	ids := slices.Sorted(maps.Keys(weights))
	w := make([]int64, len(ids))
	for i, id := range ids {
		w[i] = weights[id]
	}
	shares, err := share.Proportion(contract, w)
	if err != nil {
		panic(err)
	}
	for i, id := range ids {
		initial = append(initial, share.Assigned{Broker: id, Share: shares[i]})
	}
	grants, err := c.ledger.SetContract(topicName, contract, initial)
	if err != nil {
		panic(err)
	}
	c.broadcast(grants)
	return c
}

func TestAllBrokersTogetherKeepTheContract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.IntRange(1, 6).Draw(t, "brokers")
		contract := tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.Int64Range(50_000, 5_000_000).Draw(t, "r")),
			Burst: rapid.Int64Range(int64(k), 100).Draw(t, "b"),
		}
		load := rapid.Float64Range(0.2, 3).Draw(t, "load")
		burst := rapid.IntRange(1, 50).Draw(t, "messages at once")
		c := newCluster(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)), k, contract)
		c.faults = true
		c.traffic(load*contract.Rate.PerSecond(), burst)
		c.retunes(30 * time.Millisecond)
		c.trouble(50 * time.Millisecond)
		c.run(stamp.Mono(time.Second))
		if err := conforms(c.eligible, contract); err != nil {
			t.Fatalf("eligible: %v", err)
		}
		if err := conforms(c.released, contract); err != nil {
			t.Fatalf("released: %v", err)
		}
		if err := c.ledger.CheckInvariants(); err != nil {
			t.Fatal(err)
		}
	})
}

// Safety alone would be had by releasing nothing: without faults, brokers that
// are all overloaded get nearly all of r, however their shares move.
func TestRetuningCostsLittleRate(t *testing.T) {
	contract := tokenbucket.Share{Rate: 2_000_000, Burst: 60}
	c := newCluster(testkit.Rand(t), 4, contract)
	for range 4 { // so that no broker runs dry
		c.traffic(2*contract.Rate.PerSecond(), 5)
	}
	c.retunes(30 * time.Millisecond)
	const seconds = 5
	c.run(stamp.Mono(seconds * time.Second))
	if err := conforms(c.eligible, contract); err != nil {
		t.Fatal(err)
	}
	got, all := len(c.eligible), seconds*contract.Rate.PerSecond()
	if float64(got) < 0.8*all {
		t.Errorf("%d messages released in %d s, the contract allows %.0f", got, seconds, all)
	}
	t.Logf("%d messages released of %d that arrived, the contract allows %.0f", got, c.arrived, all)
}
