package queue

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
)

// MessageID names a message on the wire.
type MessageID = wire.MessageID

// Delivery requests that the owner writes a message to a consumer. Until Channel.MarkSent the delivery
// may be cancelled: the message times out, the channel is emptied, or the consumer finishes an
// earlier delivery of the message.
type Delivery struct {
	Consumer ConsumerID
	Message  *Message
	Attempts uint16 // including this delivery: 1 for the first
	// Waited is how long the message waited in the channel for a consumer, at its first delivery.
	Waited time.Duration

	it     *item
	number uint64 // of the item's delivery
}

// IsCurrent reports whether the delivery was not cancelled.
func (d Delivery) IsCurrent() bool { return d.number != 0 && d.it.delivery == d.number }

// Channel is one queue of a topic: the channel gets a copy of every message and delivers each
// copy to one of its consumers. Operations with effects outside the channel are steps of the
// topic.
type Channel struct {
	// Set once.
	ephemeral bool
	begin     mono.Time

	cursor    cursor
	items     items
	consumers Consumers
	own       Expiry // the channel's settings
	expiry    Expiry // in force: own combined with the topic's
	burying   int    // dead letters that the owner is storing
	paused    bool
	stopped   bool      // with the topic, or deleted
	starved   bool      // messages waited for a consumer at the end of the last step
	opened    mono.Time // when messages last stopped waiting for a consumer

	counters ChannelCounters
}

// ChannelCounters only grow.
type ChannelCounters struct {
	Messages   uint64 // put into the channel
	Requeued   uint64 // by REQ
	TimedOut   uint64
	Finished   uint64
	Emptied    uint64
	Dropped    uint64            // no room in an ephemeral channel
	Lost       uint64            // could not be read back from disk
	Sampled    uint64            // left out because the next consumer takes a sample
	Delivered  uint64            // handed over, first deliveries and repeats
	ByDistance [Distances]uint64 // Delivered, by the distance of the consumer

	Expired      uint64 // discarded: TTL over
	GivenUp      uint64 // discarded: too many failed deliveries, and no dead letter topic
	DeadLettered uint64 // moved to a dead letter topic after too many failed deliveries
}

// maxDeferred is the number of deferred messages that a channel with a disk holds in memory
// beyond its capacity. A message deferred for an hour must not delay the messages behind it. The
// disk has no index by time.
const maxDeferred = 1_000_000

func newChannel(now mono.Time, name string, l *Log, b *Backlog) *Channel {
	return &Channel{
		cursor:    newCursor(name, l, b),
		ephemeral: wire.Ephemeral(name),
		begin:     now,
		opened:    now,
		consumers: Consumers{byID: make(map[ConsumerID]*consumer)},
	}
}

// memory returns how many more messages the channel may hold in memory.
func (c *Channel) memory() int {
	if c.cursor.log.tight {
		if c.items.ready.Len()+len(c.items.due) == 0 && c.consumers.hasCredit() && !c.paused && !c.stopped {
			return 1 // the message leaves at once
		}
		return 0
	}
	exempt := 0
	if c.cursor.tracked {
		exempt = maxDeferred
	}
	// Requeued messages may exceed the capacity.
	return max(0, c.cursor.log.cfg.Capacity-c.items.ready.Len()-max(0, c.Deferred()-exempt))
}

// space returns how many new messages the channel may take.
func (c *Channel) space() int {
	n := c.memory()
	if c.cursor.tracked && c.cursor.log.cfg.MaxUnfinished > 0 {
		n = min(n, max(0, c.cursor.log.cfg.MaxUnfinished-c.cursor.window.slots.Len()))
	}
	return n
}

// Depth returns the number of messages that are ready, in flight or deferred.
func (c *Channel) Depth() int { return c.Ready() + len(c.items.due) }

// Ready returns the number of messages that wait for a consumer with credit, in memory or on
// disk.
func (c *Channel) Ready() int { return c.items.ready.Len() + c.cursor.beyond() }

// Pause stops deliveries; Topic.UnpauseChannel resumes them.
func (c *Channel) Pause() { c.paused = true }

func (c *Channel) Paused() bool { return c.paused }

// Deadline returns when the next message times out, ends its deferral or expires; mono.Never if
// there is none.
func (c *Channel) Deadline() mono.Time {
	deadline := c.items.deadline()
	if c.expiry.TTL > 0 && c.items.ready.Len() > 0 && !c.stopped {
		m, _ := c.items.ready.front()
		deadline = min(deadline, c.expiry.end(m.Arrival))
	}
	return deadline
}

// Name returns the channel's name.
func (c *Channel) Name() string { return c.cursor.name }

// Consumers returns the channel's consumers.
func (c *Channel) Consumers() *Consumers { return &c.consumers }

// Beyond returns the number of messages that wait for a consumer and are not in memory.
func (c *Channel) Beyond() int { return c.cursor.beyond() }

// Unfinished returns the distance, in messages, from the channel's oldest unfinished message to
// the end of its window: see Config.MaxUnfinished.
func (c *Channel) Unfinished() int { return c.cursor.unfinished() }

// Full reports whether MaxUnfinished keeps further messages from the channel.
func (c *Channel) Full() bool { return c.cursor.full() }

// InFlight returns the number of messages that consumers hold.
func (c *Channel) InFlight() int { return c.items.inFlight }

// Deferred returns the number of messages held back until a later time.
func (c *Channel) Deferred() int { return c.items.deferred() }

func (c *Channel) Counters() ChannelCounters { return c.counters }

// open reports whether the channel lets the topic release. An ephemeral channel always does: it
// drops messages rather than hold back other channels.
func (c *Channel) open() bool {
	return c.ephemeral || !c.cursor.behind && c.space() > 0 || c.cursor.log.room(1)
}

// release takes a message that the topic releases. It returns true if the channel falls behind,
// and then the log must store the message.
func (c *Channel) release(now mono.Time, m *Message) (behind bool) {
	if m.Offset < c.cursor.window.end() && !c.cursor.backlog.isPending(c.cursor.window.get(m.Offset)) {
		return false // the channel had the message before
	}
	c.counters.Messages++
	switch {
	case !c.cursor.tracked:
		if c.ephemeral && c.space() <= 0 {
			c.counters.Dropped++
			return false
		}
		c.items.enter(now, m)
	case m.Offset < c.cursor.window.end():
		c.cursor.window.set(m.Offset, m)
		c.items.enter(now, m)
	case c.cursor.behind || c.space() <= 0:
		c.cursor.behind = true
		c.cursor.late++
		return true
	default:
		c.cursor.reach(m.Offset)
		c.cursor.window.push(m)
		c.items.enter(now, m)
	}
	return false
}

// dispatch delivers ready messages to consumers with credit, in turn.
func (c *Channel) dispatch(now mono.Time, fx *Effects) {
	if c.starved {
		c.opened, c.starved = now, false
	}
	expires := c.expiry != Expiry{} && !c.stopped
	if expires {
		c.discardExpired(now, fx)
	}
	if c.paused || c.stopped {
		c.starved = c.Ready() > 0
		return
	}
	if c.cursor.behind {
		c.catchUp(now)
	}
	for c.items.ready.Len() > 0 {
		if expires {
			if c.discardExpired(now, fx); c.items.ready.Len() == 0 {
				break
			}
		}
		w := c.consumers.nearest()
		if w == nil {
			c.starved = true
			return
		}
		it := c.items.pop()
		if c.cursor.behind {
			c.catchUp(now)
		}
		if w.sample > 0 && c.cursor.log.cfg.Rand.IntN(100) >= w.sample {
			c.counters.Sampled++
			c.done(it, fx)
			c.consumers.list(w)
			continue
		}
		if it.attempts < ^uint16(0) {
			it.attempts++
		}
		waited := c.waited(it, now)
		c.items.deliver(now, it, w)
		fx.Deliveries = append(fx.Deliveries, Delivery{Consumer: w.id, Message: it.msg, Attempts: it.attempts, Waited: waited, it: it, number: it.delivery})
		c.consumers.list(w)
	}
	c.starved = c.cursor.beyond() > 0 && !c.consumers.hasCredit()
}

// waited returns how long a message that is delivered now waited for a consumer.
func (c *Channel) waited(it *item, now mono.Time) time.Duration {
	m := it.msg
	from := max(m.Released, c.begin)
	if m.Defer > 0 {
		from = max(from, m.Arrival.Add(m.Defer))
	}
	switch {
	case it.delivered != 0: // a consumer did not take the previous delivery
		return max(0, now.Sub(from))
	case from >= c.opened:
		return 0
	}
	c.opened = now // also for the messages behind
	return c.opened.Sub(from)
}

// take takes an item from the consumer that holds it.
func (c *Channel) take(id ConsumerID, m MessageID) (*item, error) {
	it := c.items.index.get(&m, id)
	if it == nil {
		return nil, ErrNotInFlight
	}
	c.items.due.remove(it)
	c.endDelivery(it)
	return it, nil
}

// endDelivery takes an item from its holder. Requires: the item is not in due.
func (c *Channel) endDelivery(it *item) {
	c.items.inFlight--
	w := it.holder
	w.release(it)
	c.consumers.list(w)
}

// MarkSent records that the owner writes a delivery now. It returns false if the delivery was
// cancelled.
func (c *Channel) MarkSent(d Delivery) bool {
	if !d.IsCurrent() {
		return false
	}
	d.it.sent = true
	c.counters.Delivered++
	c.counters.ByDistance[d.it.holder.distance]++
	return true
}

func (c *Channel) finish(id ConsumerID, m MessageID, fx *Effects) error {
	it, err := c.take(id, m)
	if err == nil {
		c.counters.Finished++
		fx.Finished = append(fx.Finished, it.msg)
		c.done(it, fx)
	}
	return err
}

func (c *Channel) requeue(now mono.Time, id ConsumerID, m MessageID, delay time.Duration) error {
	it, err := c.take(id, m)
	if err != nil {
		return err
	}
	c.counters.Requeued++
	c.cursor.log.changes++
	it.due = now.Add(delay)
	c.items.place(now, it)
	return nil
}

func (c *Channel) touch(now mono.Time, id ConsumerID, m MessageID) error {
	it := c.items.index.get(&m, id)
	if it == nil {
		return ErrNotInFlight
	}
	it.due = min(now.Add(it.holder.timeout), it.delivered.Add(c.cursor.log.cfg.MaxInFlight))
	c.items.due.fix(int(it.place))
	return nil
}

// expire makes due items ready: ends of deferrals and timeouts.
func (c *Channel) expire(now mono.Time) {
	if c.stopped {
		return
	}
	for _, it := range c.items.takeDue(now) {
		if it.holder != nil {
			c.counters.TimedOut++
			c.endDelivery(it)
		}
		c.unbury(it)
		c.items.ready.push(it)
	}
}

func (c *Channel) removeConsumer(id ConsumerID) {
	for _, it := range slices.Backward(c.consumers.take(id)) {
		c.items.due.remove(it)
		c.endDelivery(it)
		c.items.ready.push(it)
	}
}

func (c *Channel) empty(fx *Effects) int {
	n := c.Depth()
	c.counters.Emptied += uint64(n)
	for _, it := range c.items.due {
		if it.holder != nil {
			c.endDelivery(it)
		}
		c.unbury(it)
	}
	c.items.forget(fx)
	c.cursor.empty()
	return n
}

// done ends an item in the channel. Requires: nothing but the index refers to the item.
func (c *Channel) done(it *item, fx *Effects) {
	c.cursor.log.changes++
	m := it.msg
	c.cursor.close(it.offset)
	c.items.recycle(it)
	fx.unref(m)
}
