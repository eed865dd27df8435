package queue

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
)

// MessageID names a message on the wire.
type MessageID = wire.MessageID

// Distance is how far a consumer is from the broker.
type Distance uint8

// The distances. Where they are not measured, all consumers are near.
const (
	Near      Distance = iota // in the broker's zone
	Neighbour                 // in another zone of its region
	Far                       // elsewhere
)

// Distances is how many there are.
const Distances = int(Far) + 1

// ConsumerID names a consumer; the broker gives each subscription its own.
type ConsumerID uint64

// Delivery asks for a message to be written to a consumer. Until it is handed
// over (Channel.MarkSent) it may come to nothing: the message times out, is emptied,
// or is finished by a consumer that had it before.
type Delivery struct {
	Consumer ConsumerID
	Message  *Message
	Attempts uint16 // of this delivery: 1 for the first
	// Waited is for how long the message waited for a consumer, in the channel; of
	// the first delivery.
	Waited time.Duration

	it   *item
	turn uint64 // the item's at the time
}

// Channel is one queue of a topic: a copy of every message, each delivered to
// one of its consumers. What it may cause elsewhere are steps of the topic.
//
// Invariants, checked by checkInvariants in tests:
//   - every item is in exactly one place: ready, or due (in flight or deferred);
//   - inFlight has exactly the due items that have a holder;
//   - a consumer's inFlight is the number of items that it holds, <= its ready
//     at the time each was delivered;
//   - a consumer that did not take a delivery before it came to nothing is
//     stalled, and has no credit until it takes one: deliveries that are
//     not taken do not pile up, they are at most twice the maximum ready;
//   - a consumer with credit is in the ring of those with credit of its distance, once; it may
//     also list consumers that lost their credit since, or are gone, which are
//     skipped.
type Channel struct {
	// Set once.
	name      string
	log       *log
	backlog   *backlog // what is not released yet
	ephemeral bool
	tracked   bool // its place in the log is kept: it is a cursor
	begin     mono.Time

	// State.
	window    window[*item]    // by offset
	absent    ring[*item]      // what an earlier process had in memory and was not read yet: its places
	ahead     map[Offset]*item // what is beyond the window's end, see carry.go; nil: done
	behind    bool
	late      int         // released messages from the window's end on
	estimate  bool        // late is one, since a Seek; at least 1, or the channel could be taken for empty
	ready     ring[*item] // what is in memory and may be delivered
	due       dueHeap     // in flight: by timeout; deferred: by end of deferral
	inFlight  flights
	deferred  int
	consumers map[ConsumerID]*consumer
	credited  [Distances]ring[*consumer] // FIFOs, so that consumers take turns
	paused    bool
	stopped   bool      // with the topic, or deleted
	starved   bool      // since the step before, messages wait for a consumer
	opened    mono.Time // until when they last did
	turns     uint64    // deliveries so far
	free      []*item   // for reuse; at most maxFree

	counters ChannelCounters
}

// ChannelCounters only grow.
type ChannelCounters struct {
	Messages  uint64 // put into the channel
	Requeued  uint64 // by REQ
	TimedOut  uint64
	Finished  uint64
	Emptied   uint64
	Dropped   uint64 // had no room, and the channel is ephemeral
	Lost      uint64 // could not be read back from disk
	Sampled   uint64 // left out because the consumer whose turn it was takes a sample
	Delivered uint64 // handed over, for the first time and again
}

// item is a message's life in one channel.
type item struct {
	msg        *Message // nil: absent
	offset     Offset   // of msg
	due        mono.Time
	delivered  mono.Time // of the present delivery
	holder     *consumer // nil: ready or deferred
	prev, next *item     // of those that holder holds
	chain      *item     // of flights
	turn       uint64    // of the present delivery, never used twice; 0 without a holder
	place      int32     // in due; -1 when not there
	attempts   uint16    // deliveries, those apart that came to nothing
	handed     bool      // the present delivery was
}

type consumer struct {
	id       ConsumerID
	timeout  time.Duration
	sample   int // percent of messages to deliver; 0: all
	ready    int
	inFlight int
	held     *item // the list of what it holds, the last delivered first; nil: nothing
	distance Distance
	listed   bool // is in Channel.credited
	stalled  bool // see Channel
}

// take gives an item to the consumer, and release takes it away.
func (c *consumer) take(it *item) {
	it.holder, it.next = c, c.held
	if c.held != nil {
		c.held.prev = it
	}
	c.held = it
	c.inFlight++
}

func (c *consumer) release(it *item) {
	if it.prev != nil {
		it.prev.next = it.next
	} else {
		c.held = it.next
	}
	if it.next != nil {
		it.next.prev = it.prev
	}
	it.holder, it.prev, it.next = nil, nil, nil
	c.inFlight--
}

func (c *consumer) credit() bool { return c.inFlight < c.ready && !c.stalled }

// maxFree items are a megabyte, of a channel that has had so many messages.
const maxFree = 8192

// maxDeferred is how many deferred messages a channel with a disk holds in memory
// beside its capacity: what waits for an hour must not keep what is behind it from
// its readers. There is no index of what is on disk by time.
const maxDeferred = 1_000_000

func newChannel(now mono.Time, name string, l *log, b *backlog) *Channel {
	c := &Channel{
		name:      name,
		log:       l,
		backlog:   b,
		ephemeral: wire.Ephemeral(name),
		begin:     now,
		opened:    now,
		consumers: make(map[ConsumerID]*consumer),
	}
	c.tracked = l.logged() && !c.ephemeral
	return c
}

// memory is how many messages more it may hold there.
func (c *Channel) memory() int {
	if c.log.tight {
		if c.ready.len()+len(c.due) == 0 && c.hasCredit() && !c.paused && !c.stopped {
			return 1 // it does not stay
		}
		return 0
	}
	exempt := 0
	if c.tracked {
		exempt = maxDeferred
	}
	// What is given back may exceed the capacity.
	return max(0, c.log.cfg.Capacity-c.ready.len()-max(0, c.deferred-exempt))
}

// space is how many messages it may take that it has not had.
func (c *Channel) space() int {
	n := c.memory()
	if c.tracked && c.log.cfg.MaxUnfinished > 0 {
		n = min(n, max(0, c.log.cfg.MaxUnfinished-c.window.slots.len()))
	}
	return n
}

// Name returns the channel's name.
func (c *Channel) Name() string { return c.name }

// Depth is the number of messages it holds, ready, in flight or deferred.
func (c *Channel) Depth() int { return c.Ready() + len(c.due) }

// Ready is the number of messages that wait for a consumer with credit, in
// memory or beyond.
func (c *Channel) Ready() int { return c.ready.len() + c.Beyond() }

// Beyond is how many of them it has not in memory.
func (c *Channel) Beyond() int { return c.late + c.absent.len() }

// InFlight is the number of messages that consumers hold.
func (c *Channel) InFlight() int { return c.inFlight.n }

// Deferred is the number of messages held back until a later time.
func (c *Channel) Deferred() int { return c.deferred }

// Deadline is when the next message times out or ends its deferral; mono.Never
// if there is none.
func (c *Channel) Deadline() mono.Time { return c.due.next() }

// Pause stops deliveries; Topic.UnpauseChannel resumes them.
func (c *Channel) Pause() { c.paused = true }

// Paused reports whether deliveries are paused.
func (c *Channel) Paused() bool { return c.paused }

// Consumers is the number of consumers.
func (c *Channel) Consumers() int { return len(c.consumers) }

// Readers is how many of them may hold a message: their RDY is not 0.
func (c *Channel) Readers() (n int) {
	// order: a sum
	for _, w := range c.consumers {
		if w.ready > 0 {
			n++
		}
	}
	return n
}

// ConsumerIDs are the consumers, the oldest first.
func (c *Channel) ConsumerIDs() []ConsumerID { return slices.Sorted(maps.Keys(c.consumers)) }

// Counters returns the channel's counters.
func (c *Channel) Counters() ChannelCounters { return c.counters }

// AddConsumer registers a consumer without credit. timeout is how long it may
// hold a message; sample is the percentage of messages it wants, 0 for all: the
// others are finished in its turn without being delivered. A message
// goes to the nearest consumer with credit.
// Requires: the id is not in use.
func (c *Channel) AddConsumer(id ConsumerID, timeout time.Duration, sample int, distance Distance) {
	if c.consumers[id] != nil {
		panic("queue: consumer id in use")
	}
	c.consumers[id] = &consumer{id: id, timeout: timeout, sample: sample, distance: distance}
}

// Holds returns the ready count and the number of messages in flight of a
// consumer; zeros if there is no such consumer.
func (c *Channel) Holds(id ConsumerID) (ready, inFlight int) {
	if w := c.consumers[id]; w != nil {
		return w.ready, w.inFlight
	}
	return 0, 0
}

// open reports whether the channel lets the topic release. An ephemeral one
// always does: it would rather drop messages than hold others back.
func (c *Channel) open() bool {
	return c.ephemeral || !c.behind && c.space() > 0 || c.log.room(1)
}

// enter takes a message into memory.
func (c *Channel) enter(now mono.Time, m *Message) *item {
	it := c.newItem(m)
	it.attempts = m.Attempts
	if m.Defer > 0 {
		it.due = m.Arrival.Add(m.Defer)
	}
	c.place(now, it)
	return it
}

// place makes an item deferred, if it is due later, or ready.
func (c *Channel) place(now mono.Time, it *item) {
	if it.due > 0 && now.Before(it.due) {
		c.due.push(it)
		c.deferred++
		return
	}
	c.ready.push(it)
}

// dispatch hands ready messages to consumers with credit, in turn.
func (c *Channel) dispatch(now mono.Time, fx *Effects) {
	if c.starved {
		c.opened, c.starved = now, false
	}
	if c.paused || c.stopped {
		c.starved = c.Ready() > 0
		return
	}
	if c.behind {
		c.catchUp(now)
	}
	for c.ready.len() > 0 {
		w := c.nearest()
		if w == nil {
			c.starved = true
			return
		}
		it := c.ready.pop()
		if c.behind {
			c.catchUp(now)
		}
		if w.sample > 0 && c.log.cfg.Rand.IntN(100) >= w.sample {
			c.counters.Sampled++
			c.recycle(it, fx)
			c.list(w)
			continue
		}
		if it.attempts < ^uint16(0) {
			it.attempts++
		}
		waited := c.waited(it, now)
		c.turns++
		w.take(it)
		it.turn = c.turns
		it.delivered = now
		it.due = timeoutAt(now.Add(w.timeout))
		c.inFlight.add(it)
		c.due.push(it)
		fx.Deliveries = append(fx.Deliveries, Delivery{Consumer: w.id, Message: it.msg, Attempts: it.attempts, Waited: waited, it: it, turn: it.turn})
		c.list(w)
	}
	c.starved = c.Beyond() > 0 && !c.hasCredit()
}

// waited is for how long a message that is handed over now waited for that.
func (c *Channel) waited(it *item, now mono.Time) time.Duration {
	m := it.msg
	from := max(m.Released, c.begin)
	if m.Defer > 0 {
		from = max(from, m.Arrival.Add(m.Defer))
	}
	switch {
	case it.delivered != 0: // to one that did not take it
		return max(0, now.Sub(from))
	case from >= c.opened:
		return 0
	}
	c.opened = now // also for what is behind it
	return c.opened.Sub(from)
}

// nearest takes the nearest consumer with credit off the list of those with credit, of
// several the one whose turn it is; nil if none has credit.
func (c *Channel) nearest() *consumer {
	for d := range c.credited {
		for ring := &c.credited[d]; ring.len() > 0; {
			w := ring.pop()
			w.listed = false
			if w.credit() {
				return w
			}
		}
	}
	return nil
}

// hasCredit reports whether any consumer has credit.
func (c *Channel) hasCredit() bool {
	for d := range c.credited {
		for ring := &c.credited[d]; ring.len() > 0; {
			if ring.front().credit() {
				return true
			}
			ring.pop().listed = false
		}
	}
	return false
}

// list lists w if it has credit.
func (c *Channel) list(w *consumer) {
	if w.credit() && !w.listed {
		w.listed = true
		c.credited[w.distance].push(w)
	}
}

// take removes an item from its holder's hands.
func (c *Channel) take(id ConsumerID, m MessageID) (*item, error) {
	it := c.inFlight.get(&m, id)
	if it == nil {
		return nil, ErrNotInFlight
	}
	c.drop(it)
	return it, nil
}

func (c *Channel) drop(it *item) {
	c.inFlight.remove(it)
	c.due.remove(it)
	c.endDelivery(it)
}

// endDelivery ends the item's delivery.
func (c *Channel) endDelivery(it *item) {
	w := it.holder
	if !it.handed {
		// It came to nothing. A client library gives a message up after so many
		// attempts, which this was none of.
		it.attempts--
		w.stalled = true
	}
	w.release(it)
	it.turn, it.handed = 0, false
	c.list(w)
}

// MarkSent says that a delivery is being written now. It reports false if the
// delivery came to nothing before.
func (c *Channel) MarkSent(d Delivery) bool {
	if !c.IsCurrent(d) {
		return false
	}
	d.it.handed = true
	c.counters.Delivered++
	return true
}

// IsCurrent reports whether a delivery that was not handed over has not come to
// nothing either.
func (c *Channel) IsCurrent(d Delivery) bool { return d.turn != 0 && d.it.turn == d.turn }

// Stalled reports whether a delivery to the consumer came to nothing since its
// last Resume.
func (c *Channel) Stalled(id ConsumerID) bool {
	w := c.consumers[id]
	return w != nil && w.stalled
}

func (c *Channel) finish(id ConsumerID, m MessageID, fx *Effects) (*Message, error) {
	it, err := c.take(id, m)
	if err != nil {
		return nil, err
	}
	c.counters.Finished++
	msg := it.msg
	c.recycle(it, fx)
	return msg, nil
}

func (c *Channel) requeue(now mono.Time, id ConsumerID, m MessageID, delay time.Duration) error {
	it, err := c.take(id, m)
	if err != nil {
		return err
	}
	c.counters.Requeued++
	c.log.changes++
	if delay > 0 {
		it.due = now.Add(delay)
		c.due.push(it)
		c.deferred++
	} else {
		c.ready.push(it)
	}
	return nil
}

func (c *Channel) touch(now mono.Time, id ConsumerID, m MessageID) error {
	it := c.inFlight.get(&m, id)
	if it == nil {
		return ErrNotInFlight
	}
	it.due = min(now.Add(it.holder.timeout), it.delivered.Add(c.log.cfg.MaxInFlight))
	c.due.fix(int(it.place))
	return nil
}

func (c *Channel) setReady(id ConsumerID, n int) error {
	w := c.consumers[id]
	if w == nil {
		return ErrUnknownConsumer
	}
	w.ready = n
	c.list(w)
	return nil
}

// expire makes ready what is due: deferred messages and timed-out ones.
func (c *Channel) expire(now mono.Time) {
	if c.stopped {
		return
	}
	type due struct {
		*item
		turn uint64 // that it had
	}
	var again []due
	for len(c.due) > 0 && !now.Before(c.due[0].due) {
		it := due{c.due[0], c.due[0].turn}
		if it.holder != nil {
			c.counters.TimedOut++
			c.drop(it.item)
		} else {
			c.due.remove(it.item)
			c.deferred--
		}
		again = append(again, it)
	}
	slices.SortStableFunc(again, func(a, b due) int {
		return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.turn, b.turn))
	})
	for _, it := range again {
		c.ready.push(it.item)
	}
}

// timeoutAt is the millisecond that ends at t or contains it, by its end. A timeout
// needs no more, and to take one of many messages that time out together from the
// heap costs nothing.
func timeoutAt(t mono.Time) mono.Time {
	const ms = mono.Time(time.Millisecond)
	t += ms - 1
	return t - t%ms
}

func (c *Channel) removeConsumer(id ConsumerID) {
	w := c.consumers[id]
	if w == nil {
		return
	}
	delete(c.consumers, id)
	w.ready = 0
	// Subscribers that come and go must not pile up there, nor each of them look
	// through all.
	if ring := &c.credited[w.distance]; w.listed && ring.len() > 2*len(c.consumers) {
		for range ring.len() {
			if h := ring.pop(); c.consumers[h.id] == h {
				ring.push(h)
			} else {
				h.listed = false
			}
		}
	}
	var back []*item
	for it := w.held; it != nil; it = it.next {
		back = append(back, it)
	}
	for _, it := range slices.Backward(back) {
		c.drop(it)
		c.ready.push(it)
	}
}

func (c *Channel) empty(fx *Effects) int {
	n := c.Depth()
	c.counters.Emptied += uint64(n)
	for i := range c.ready.len() {
		fx.unref(c.ready.at(i).msg)
	}
	c.ready.clear()
	for _, it := range c.due {
		if it.holder != nil {
			c.endDelivery(it)
		}
		fx.unref(it.msg)
	}
	c.due = nil
	c.inFlight.clear()
	c.absent.clear()
	// order: all alike
	for o := range c.ahead {
		c.ahead[o] = nil
	}
	c.deferred, c.late, c.behind, c.estimate = 0, 0, false, false
	c.start()
	c.log.changes++
	c.log.read.moved = true
	return n
}

func (c *Channel) newItem(m *Message) *item {
	var it *item
	if n := len(c.free); n > 0 {
		it = c.free[n-1]
		c.free[n-1] = nil
		c.free = c.free[:n-1]
	} else {
		it = new(item)
	}
	*it = item{msg: m, offset: m.Offset, place: -1}
	m.ref()
	return it
}

// recycle keeps the item for reuse, and lets its message go.
// Requires: nothing refers to the item any more.
func (c *Channel) recycle(it *item, fx *Effects) {
	c.log.changes++
	c.close(it.offset)
	fx.unref(it.msg)
	*it = item{place: -1}
	if len(c.free) < maxFree {
		c.free = append(c.free, it)
	}
}
