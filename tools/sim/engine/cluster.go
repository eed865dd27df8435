// Package engine simulates brokers under contracts, event by event. The input is the
// publishers' schedules. The output is the times at which each message arrived, had its
// token and was delivered. The package is pure: it uses virtual time and seeded
// randomness. tokenbucket of production enforces the contracts; only the broker is a
// model, as a server with a service time. The caller's observer counts deliveries.
//
// dist.go has service times, model.go the broker model, cluster.go the simulation. Read
// tools/sim/scenario next, which supplies the arguments.
package engine

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// Nowhere is the broker of a source that sends no messages.
const Nowhere = -1

// Topic is the initial state of a topic.
type Topic struct {
	// Stream is the schedule of messages; offsets count from virtual time 0. The cluster
	// owns Stream.
	Stream schedule.Stream
	// Where is the broker of each source, or Nowhere.
	Where []int
	// Limited topics hold a share on each broker, in the order of the brokers, with full
	// buckets, like an unused contract. Shares must be nil if Limited is false.
	Limited bool
	Shares  []tokenbucket.Share
}

// Delivery records the times of one message.
type Delivery struct {
	Topic, Broker int
	Source        int32
	At            mono.Time // arrival at the broker
	Eligible      mono.Time // time of the token; At if the topic is not limited
	Done          mono.Time // arrival at the subscriber
}

// Access is the access delay, the wait for a token.
func (d Delivery) Access() time.Duration { return d.Eligible.Sub(d.At) }

// Processing is the processing delay: the latency without the wait for a token.
func (d Delivery) Processing() time.Duration { return d.Done.Sub(d.Eligible) }

// Latency is the delivery latency, the SLO's subject.
func (d Delivery) Latency() time.Duration { return d.Done.Sub(d.At) }

// Cluster simulates brokers in virtual time. Make it with New. It is not safe for
// concurrent use.
type Cluster struct {
	// Set once.
	observe func(Delivery)

	now     mono.Time
	brokers []broker
	topics  []topic
}

type topic struct {
	stream  schedule.Stream
	head    schedule.Event // next event, unless over
	over    bool
	where   []int
	limited bool
}

// broker is one queue, with a lane for each topic before it.
type broker struct {
	model Model
	rng   *rand.Rand
	free  []mono.Time // when each server is free, not sorted
	busy  time.Duration
	lanes []lane
	// waiting lists the lanes that are not empty, by topic.
	waiting []int
}

// lane holds the messages of one topic that wait for tokens at one broker.
//
// Invariant: next is when the head may leave, if line is not empty.
type lane struct {
	bucket  tokenbucket.Bucket
	line    container.Queue[message]
	next    mono.Time
	retuned mono.Time // no message judged after a change leaves before it
	step    Step      // current step
}

type message struct {
	at     mono.Time
	source int32
	first  bool // first of its batch
}

// New returns a cluster at virtual time 0. It calls observe for each delivery, in the
// order in which a broker begins the work. Each broker has its own random generator,
// derived from seed. Every fault is an error.
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

// Now returns the virtual time. All earlier events have happened.
func (c *Cluster) Now() mono.Time { return c.now }

// Advance advances the time to to. Messages with later tokens stay in their lanes. A
// message in a broker's queue is already observed, even if its delivery is after to.
//
// Requires: to >= Now(); every source is an index of Where.
func (c *Cluster) Advance(to mono.Time) {
	for {
		// There are few topics: a linear search beats a heap.
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

// arrive delivers an event to its broker.
func (c *Cluster) arrive(l, topic int, e schedule.Event) {
	due := mono.Time(e.At)
	c.drain(l, due)
	b := &c.brokers[l]
	lane := &b.lanes[topic]
	lane.step.Offered += uint64(e.Count)
	for i := range e.Count {
		m := message{at: due, source: e.Source, first: i == 0}
		if !c.topics[topic].limited {
			c.serve(l, topic, m, due, due)
			continue
		}
		if lane.line.Len() == 0 {
			if eligible := lane.bucket.Eligible(due); eligible <= due {
				lane.bucket.Take(due)
				c.serve(l, topic, m, due, due)
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

// judge computes when the head may leave.
func (l *lane) judge() { l.next = max(l.bucket.Eligible(l.line.Front().at), l.retuned) }

func (b *broker) wait(topic int) {
	i := len(b.waiting)
	b.waiting = append(b.waiting, topic)
	for ; i > 0 && b.waiting[i-1] > topic; i-- {
		b.waiting[i] = b.waiting[i-1]
	}
	b.waiting[i] = topic
}

// drain serves the messages with a token by to, in the order of the tokens; ties go to
// the topic with the lower number.
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

// serve assigns m to the server that is free first, from ready on. Requires: ready does
// not descend between calls for one broker.
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

// Move changes the brokers of the topic's sources for later messages. Where is as in
// Topic. Waiting messages stay on their brokers.
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

// Restart gives a limited topic new shares with full buckets, as if the contract were
// unused. A new placement starts like this if the topic has been idle for long enough.
// Waiting messages are judged again.
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

// Grant changes a broker's share of a limited topic now, as tokenbucket.Retune does.
// Requires: s is valid.
func (c *Cluster) Grant(topic, broker int, s tokenbucket.Share, tokens tokenbucket.Tokens) (released tokenbucket.Tokens) {
	lane := &c.brokers[broker].lanes[topic]
	released = lane.bucket.Retune(c.now, s, tokens)
	lane.changed(c.now)
	return released
}

// Share returns a broker's share of a topic.
func (c *Cluster) Share(topic, broker int) tokenbucket.Share {
	return c.brokers[broker].lanes[topic].bucket.Share()
}

// Step is a broker's report about a topic.
type Step struct {
	Offered             uint64
	MaxBacklog, Backlog int64 // the largest in the step, and at its end
}

// Step ends a step of a topic at a broker and returns its report.
func (c *Cluster) Step(topic, broker int) Step {
	lane := &c.brokers[broker].lanes[topic]
	ended := lane.step
	ended.Backlog = int64(lane.line.Len())
	lane.step = Step{MaxBacklog: ended.Backlog}
	return ended
}

// Retune changes the topic's shares now. Tokens released by shrinking buckets go to the
// growing buckets, in proportion to their burst growth. Retune creates no tokens. The
// change is instantaneous only in the simulation: in production a share grows only after
// other brokers have acknowledged to shrink.
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

// Busy returns the total working time of a broker's servers, including the rest of
// current work.
func (c *Cluster) Busy(broker int) time.Duration { return c.brokers[broker].busy }

// Waiting returns the number of a topic's messages that wait for tokens at a broker.
func (c *Cluster) Waiting(topic, broker int) int { return c.brokers[broker].lanes[topic].line.Len() }
