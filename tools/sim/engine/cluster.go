package engine

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/srtm-io/srtm/internal/fifo"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// Nowhere is the broker of a source that sends nothing.
const Nowhere = -1

// Topic is what a topic starts as.
type Topic struct {
	// Stream says who sends when; offsets count from virtual time 0. The
	// cluster reads it from then on.
	Stream schedule.Stream
	// Where is the broker of each source, or Nowhere.
	Where []int
	// Limited topics hold a share on each broker, in the order of the brokers,
	// with full buckets: a contract that has not been used. Shares must be nil
	// where not.
	Limited bool
	Shares  []tokenbucket.Share
}

// Delivery is what became of one message.
type Delivery struct {
	Topic, Broker int
	Source        int32
	At            mono.Time // it arrived at the broker
	Eligible      mono.Time // it had its token; At where the topic is not limited
	Done          mono.Time // its subscriber has it
}

// Access is the access delay, the wait for a token.
func (d Delivery) Access() time.Duration { return d.Eligible.Sub(d.At) }

// Processing is the processing delay, all but the wait for a token.
func (d Delivery) Processing() time.Duration { return d.Done.Sub(d.Eligible) }

// Latency is the delivery latency, the SLO's subject.
func (d Delivery) Latency() time.Duration { return d.Done.Sub(d.At) }

// Cluster is brokers at work in virtual time. Make it with New. It is not safe
// for concurrent use.
type Cluster struct {
	// Set once.
	observe func(Delivery)

	now     mono.Time
	brokers []broker
	topics  []topic
}

type topic struct {
	stream  schedule.Stream
	head    schedule.Event // the next, while !over
	over    bool
	where   []int
	limited bool
}

// broker is one queue. A lane is a topic's line before it.
type broker struct {
	model Model
	rng   *rand.Rand
	free  []mono.Time // when each server is, ascending is not kept
	busy  time.Duration
	lanes []lane
	// waiting lists the lanes that are not empty, by topic.
	waiting []int
}

// lane is the messages of one topic that wait for tokens at one broker.
//
// Invariant: next is when the head may leave, while the line is not empty.
type lane struct {
	bucket  tokenbucket.Bucket
	line    fifo.Queue[message]
	next    mono.Time
	retuned mono.Time // nothing judged after it leaves before it
	step    Step      // under way
}

// message is one in a lane.
type message struct {
	at     mono.Time
	source int32
	first  bool // of its batch
}

// New returns a cluster at virtual time 0. observe is called for each delivery,
// in the order in which a broker begins its work. Chance comes from seed, with a
// generator for each broker. Every fault is an error.
func New(models []Model, topics []Topic, seed uint64, observe func(Delivery)) (*Cluster, error) {
	c := &Cluster{observe: observe}
	if len(models) == 0 {
		return nil, fmt.Errorf("no brokers")
	}
	for i, m := range models {
		if err := m.Validate(); err != nil {
			return nil, fmt.Errorf("broker %d: %w", i, err)
		}
		b := broker{model: m, rng: rand.New(rand.NewPCG(seed, uint64(i))), free: make([]mono.Time, m.Servers), lanes: make([]lane, len(topics))}
		c.brokers = append(c.brokers, b)
	}
	for i, t := range topics {
		if err := c.checkWhere(t.Where); err != nil {
			return nil, fmt.Errorf("topic %d: %w", i, err)
		}
		if !t.Limited && t.Shares != nil || t.Limited && len(t.Shares) != len(models) {
			return nil, fmt.Errorf("topic %d: %d shares for %d brokers", i, len(t.Shares), len(models))
		}
		for l, s := range t.Shares {
			if err := s.Validate(); err != nil {
				return nil, fmt.Errorf("topic %d, broker %d: %w", i, l, err)
			}
			c.brokers[l].lanes[i].bucket = tokenbucket.NewFull(s, 0)
		}
		state := topic{stream: t.Stream, where: append([]int(nil), t.Where...), limited: t.Limited}
		state.read()
		c.topics = append(c.topics, state)
	}
	return c, nil
}

func (c *Cluster) checkWhere(where []int) error {
	for source, l := range where {
		if l < Nowhere || l >= len(c.brokers) {
			return fmt.Errorf("source %d is at broker %d of %d", source, l, len(c.brokers))
		}
	}
	return nil
}

func (t *topic) read() {
	e, ok := t.stream.Next()
	t.head, t.over = e, !ok
}

// Now is the virtual time: all that happens before it has happened.
func (c *Cluster) Now() mono.Time { return c.now }

// Advance lets time pass until to. Messages whose token comes later stay in
// line; a message in a broker's queue has been observed, even if its delivery
// lies after to.
//
// Requires: to >= Now(); a source is a number into Where.
func (c *Cluster) Advance(to mono.Time) {
	for {
		// There are few topics: looking at each beats a heap.
		first := -1
		for i := range c.topics {
			if t := &c.topics[i]; !t.over && (first < 0 || t.head.At < c.topics[first].head.At) {
				first = i
			}
		}
		if first < 0 || mono.Time(c.topics[first].head.At) >= to {
			break
		}
		t := &c.topics[first]
		e := t.head
		t.read()
		if l := t.where[e.Source]; l != Nowhere {
			c.arrive(l, first, e)
		}
	}
	for l := range c.brokers {
		c.drain(l, to-1)
	}
	c.now = to
}

// arrive takes an event to its broker.
func (c *Cluster) arrive(l, topic int, e schedule.Event) {
	at := mono.Time(e.At)
	c.drain(l, at)
	b := &c.brokers[l]
	lane := &b.lanes[topic]
	lane.step.Offered += uint64(e.Count)
	for i := range e.Count {
		m := message{at: at, source: e.Source, first: i == 0}
		if !c.topics[topic].limited {
			c.serve(l, topic, m, at, at)
			continue
		}
		if lane.line.Len() == 0 {
			if eligible := lane.bucket.Eligible(at); eligible <= at {
				lane.bucket.Take(at)
				c.serve(l, topic, m, at, at)
				continue
			}
			b.wait(topic)
		}
		lane.line.Push(m)
		if lane.line.Len() == 1 {
			lane.judge()
		}
		lane.step.MaxBacklog = max(lane.step.MaxBacklog, int64(lane.line.Len()))
	}
}

// judge asks when the head may leave.
func (l *lane) judge() { l.next = max(l.bucket.Eligible(l.line.Front().at), l.retuned) }

func (b *broker) wait(topic int) {
	i := len(b.waiting)
	b.waiting = append(b.waiting, topic)
	for ; i > 0 && b.waiting[i-1] > topic; i-- {
		b.waiting[i] = b.waiting[i-1]
	}
	b.waiting[i] = topic
}

// drain serves what has its token by to, in the order in which tokens come; of
// equals, the topic of the lower number first.
func (c *Cluster) drain(l int, to mono.Time) {
	b := &c.brokers[l]
	for len(b.waiting) > 0 {
		first := 0
		for i, topic := range b.waiting {
			if b.lanes[topic].next < b.lanes[b.waiting[first]].next {
				first = i
			}
		}
		topic := b.waiting[first]
		lane := &b.lanes[topic]
		if lane.next > to {
			return
		}
		ready := lane.next
		m := lane.line.Pop()
		lane.bucket.Take(m.at)
		c.serve(l, topic, m, ready, ready)
		if lane.line.Len() == 0 {
			b.waiting = append(b.waiting[:first], b.waiting[first+1:]...)
		} else {
			lane.judge()
		}
	}
}

// serve has the first server that is free work on m, from ready on.
// Requires: ready does not descend from call to call of one broker.
func (c *Cluster) serve(l, topic int, m message, eligible, ready mono.Time) {
	b := &c.brokers[l]
	server := 0
	for i, free := range b.free {
		if free < b.free[server] {
			server = i
		}
	}
	work := b.model.Message.Draw(b.rng)
	if m.first {
		work += b.model.Wake.Draw(b.rng)
	}
	done := max(ready, b.free[server]).Add(work)
	b.free[server] = done
	b.busy += work
	c.observe(Delivery{
		Topic: topic, Broker: l, Source: m.source, At: m.at,
		Eligible: eligible, Done: done.Add(b.model.Overhead.Draw(b.rng)),
	})
}

// Move sends what the topic's sources send from now on elsewhere. Where is as in
// Topic. What waits stays where it is.
func (c *Cluster) Move(topic int, where []int) error {
	if len(where) != len(c.topics[topic].where) {
		return fmt.Errorf("topic %d: %d sources, want %d", topic, len(where), len(c.topics[topic].where))
	}
	if err := c.checkWhere(where); err != nil {
		return fmt.Errorf("topic %d: %w", topic, err)
	}
	copy(c.topics[topic].where, where)
	return nil
}

// Restart gives a limited topic new shares, with full buckets, as if its
// contract had not been used: what a new placement starts with once the old one
// has been idle for long enough. What waits is judged anew.
func (c *Cluster) Restart(topic int, shares []tokenbucket.Share) error {
	if err := c.checkShares(topic, shares); err != nil {
		return err
	}
	for l, s := range shares {
		lane := &c.brokers[l].lanes[topic]
		lane.bucket = tokenbucket.NewFull(s, c.now)
		lane.changed(c.now)
	}
	return nil
}

func (l *lane) changed(now mono.Time) {
	l.retuned = now
	if l.line.Len() > 0 {
		l.judge()
	}
}

// Grant changes one broker's share of a limited topic now, as tokenbucket.Retune does.
// Requires: s is valid.
func (c *Cluster) Grant(topic, broker int, s tokenbucket.Share, tokens tokenbucket.Tokens) (released tokenbucket.Tokens) {
	lane := &c.brokers[broker].lanes[topic]
	released = lane.bucket.Retune(c.now, s, tokens)
	lane.changed(c.now)
	return released
}

// Share is a broker's of a topic.
func (c *Cluster) Share(topic, broker int) tokenbucket.Share {
	return c.brokers[broker].lanes[topic].bucket.Share()
}

// Step is what a broker reports of a topic.
type Step struct {
	Offered             uint64
	MaxBacklog, Backlog int64 // the largest, and at the end
}

// Step ends a step of a topic at a broker.
func (c *Cluster) Step(topic, broker int) Step {
	lane := &c.brokers[broker].lanes[topic]
	ended := lane.step
	ended.Backlog = int64(lane.line.Len())
	lane.step = Step{MaxBacklog: ended.Backlog}
	return ended
}

// Retune changes the topic's shares now. Tokens that the shrinking buckets give
// up go to the growing ones, in proportion to what their burst grows by; none is
// created. The instant agreement of all brokers is the simulation's licence: in
// production a share grows only after others have acknowledged to shrink.
func (c *Cluster) Retune(topic int, shares []tokenbucket.Share) error {
	if err := c.checkShares(topic, shares); err != nil {
		return err
	}
	var released tokenbucket.Tokens
	var growth int64
	for l, s := range shares {
		growth += max(0, s.Burst-c.Share(topic, l).Burst)
	}
	for _, grow := range []bool{false, true} {
		for l, s := range shares {
			more := s.Burst - c.Share(topic, l).Burst
			if (more > 0) != grow {
				continue
			}
			granted := tokenbucket.Tokens(0)
			if grow {
				granted = released * tokenbucket.Tokens(more) / tokenbucket.Tokens(growth)
				released -= granted
				growth -= more
			}
			released += c.Grant(topic, l, s, granted)
		}
	}
	return nil
}

func (c *Cluster) checkShares(topic int, shares []tokenbucket.Share) error {
	if !c.topics[topic].limited {
		return fmt.Errorf("topic %d is not limited", topic)
	}
	if len(shares) != len(c.brokers) {
		return fmt.Errorf("topic %d: %d shares for %d brokers", topic, len(shares), len(c.brokers))
	}
	for l, s := range shares {
		if err := s.Validate(); err != nil {
			return fmt.Errorf("topic %d, broker %d: %w", topic, l, err)
		}
	}
	return nil
}

// Busy is how long the servers of a broker have worked, summed over them, work
// begun counted to its end.
func (c *Cluster) Busy(broker int) time.Duration { return c.brokers[broker].busy }

// Waiting is how many messages of a topic wait for tokens at a broker.
func (c *Cluster) Waiting(topic, broker int) int { return c.brokers[broker].lanes[topic].line.Len() }
