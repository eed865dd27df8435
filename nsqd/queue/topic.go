// Package queue is the state machine of one topic. Messages wait for tokens, fan out to the
// channels, and are in flight to consumers until they are finished, requeued or time out. The
// package is pure: every step takes the time as an argument and returns the deliveries that the
// step causes. Package nsqd/broker owns the lock, the clock and the sockets.
//
// A Topic and its channels are one machine with one owner, because a release touches all of them.
// The alternative, a lock per channel, needs two locks for every fan-out and permits a
// half-released message.
//
// A late message waited for its token (Message.Access), for consumers, or for the broker. A
// message waits for consumers
//   - in the topic, while the topic is paused, has no channel, or has a full channel
//     (Message.Held);
//   - in a channel, while the channel is paused, has no consumer, or each consumer holds as many
//     messages as its RDY (Delivery.Waited). If a consumer did not take a delivery, the message
//     waited for that consumer. A message on disk behind such messages waits for consumers too.
//
// All other waiting is the broker's, and so is the time before the topic or channel existed (a
// restart of the broker). Credit from a FIN counts from when the broker reads the FIN. Both waits
// are computed from the instant at which the topic or channel was last open, so they cost one
// assignment if nothing waits.
//
// A message's way from PUB to FIN is Topic.Put, Topic.release and Channel. A contract decides
// when the message gets its token. A Channel has items (the messages in memory) and Consumers.
// The other parts handle messages beyond memory: Log, tail and readCache, which do not know their
// readers; Backlog, the topic's own cursor; cursor, a channel's cursor; and Cursors, which
// combines the log, the backlog and the channels. Disk has the steps of the log's owner. The topic
// and the channels refer to their parts, and a cursor refers to the backlog and the log. No part
// refers back.
//
// The package must not know connections or frames. Read nsqd/broker next.
package queue

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Config bounds a topic. Immutable.
type Config struct {
	// Capacity is the maximum number of messages that may wait in memory, in the topic's backlog
	// and in each channel. Must be >= 1.
	Capacity int
	// Overflow is the maximum number of further messages that may be on their way to disk because
	// the backlog or a channel had no room. 0: there is no disk. A channel without room stops the
	// topic from releasing, and a topic without room refuses messages. Only ephemeral channels
	// drop messages.
	Overflow int
	// WriteThrough means that the log stores every message before the topic accepts it in
	// Disk.Appended. Requires: Overflow > 0.
	WriteThrough bool
	// MaxUnfinished is the maximum distance, in messages, between a channel and its oldest
	// unfinished message. At this distance the channel falls behind. 0: no bound.
	MaxUnfinished int
	// ReadAhead is the size in bytes of the cache of messages read from the log for one cursor.
	// Cursors close behind use the cache. The newest read may exceed the size.
	ReadAhead int
	First     Offset
	// MaxInFlight limits how long a consumer may keep a message by touching it.
	MaxInFlight time.Duration
	// MaxBackdating limits how long before its release a message may get its token. An earlier
	// arrival counts as an arrival MaxBackdating before the release.
	MaxBackdating time.Duration
	Begin         mono.Time
	// HoldFrom returns the time from which the topic, if it is limited, releases no messages; nil:
	// never. The hold acts as a pause: waiting messages are held up, and the bucket earns tokens. The
	// result may change between two steps. A Tick must follow a change after the time has passed.
	HoldFrom func() mono.Time
	// Rand draws the messages of a sampling consumer.
	Rand *rand.Rand
}

// Topic is the machine. Not safe for concurrent use; its owner holds a lock.
//
// Invariant, checked by checkInvariants in tests: if the head of the backlog is eligible, the
// topic is not on hold and every channel has room, the step releases the head before it returns.
// A waiting message has no token yet. Only the head is judged, at its release, so a new share
// counts at once.
type Topic struct {
	contract Contract
	log      Log
	backlog  Backlog
	cursors  Cursors

	expiry  Expiry
	paused  bool
	stopped bool
	due     mono.Time // no later than the deadline of any channel
	reader  int       // for Want: the next cursor to read the log
}

// NewTopic returns a topic without channels and without a limit.
func NewTopic(cfg Config) *Topic {
	if cfg.Capacity < 1 || cfg.Rand == nil {
		panic("queue: a topic needs a capacity of at least 1 and a source of randomness")
	}
	t := &Topic{contract: newContract(cfg.HoldFrom), due: mono.Never}
	t.log = Log{cfg: &cfg, first: math.MaxUint64}
	t.log.jump(cfg.First)
	t.log.front, t.backlog = t.log.end, Backlog{log: &t.log, window: window[*Message]{next: t.log.end}}
	t.cursors = Cursors{log: &t.log, backlog: &t.backlog}
	return t
}

// Contract returns the topic's contract.
func (t *Topic) Contract() *Contract { return &t.contract }

// Backlog returns the messages that wait in the topic.
func (t *Topic) Backlog() *Backlog { return &t.backlog }

// Log returns the extent of the topic's log.
func (t *Topic) Log() *Log { return &t.log }

// Cursors returns the log's readers.
func (t *Topic) Cursors() *Cursors { return &t.cursors }

// Disk returns the steps of the disk.
func (t *Topic) Disk() *Disk { return (*Disk)(t) }

// Channel returns the channel with the given name, or nil.
func (t *Topic) Channel(name string) *Channel { return t.cursors.channel(name) }

// Channels returns the channels by name. The caller must not change the slice.
func (t *Topic) Channels() []*Channel { return t.cursors.channels }

// Put accepts all of msgs, in order, or none of them, and takes ownership of the messages.
// Errors: ErrFull, *OverLimitError.
func (t *Topic) Put(now mono.Time, fx *Effects, msgs ...*Message) error {
	if t.backlog.Free() < len(msgs) {
		// A message may have become eligible since the last step.
		t.advance(now, fx)
		if !t.backlog.Room(len(msgs)) {
			t.backlog.counters.Refused += uint64(len(msgs))
			return ErrFull
		}
	}
	if n := len(msgs); n > 0 {
		if err := t.Admit(now, 0, n, msgs[0].Arrival, msgs[n-1].Arrival); err != nil {
			return err
		}
	}
	t.Enter(now, fx, msgs...)
	return nil
}

// Enter accepts msgs, in order, even without room: the rest of a batch whose first messages Put
// accepted. Enter takes ownership of the messages.
func (t *Topic) Enter(now mono.Time, fx *Effects, msgs ...*Message) {
	for _, m := range msgs {
		fx.Held += m.Size()
		if t.log.number(m); t.log.retained && t.log.logged() {
			t.cursors.spill(m, fx)
		}
		if t.backlog.Free() > 0 {
			t.backlog.wait(m)
		} else {
			t.backlog.fallBehind()
			t.cursors.spill(m, fx)
		}
		t.backlog.accepted(m)
	}
	t.advance(now, fx)
	t.backlog.maxWaiting = max(t.backlog.maxWaiting, t.backlog.Waiting())
}

// Tick does what is due: releases, message timeouts and ends of deferrals.
func (t *Topic) Tick(now mono.Time, fx *Effects) {
	for _, c := range t.cursors.channels {
		c.expire(now)
		t.serve(now, c, fx)
	}
	t.advance(now, fx) // last: the channels have room now
	t.due = mono.Never
	for _, c := range t.cursors.channels {
		t.due = min(t.due, c.Deadline())
	}
}

// ReleaseDeadline returns when the head of the backlog gets its token or its TTL ends; mono.Never
// if no message waits for a token. The owner must call Tick then.
func (t *Topic) ReleaseDeadline() mono.Time {
	if t.backlog.waiting.Len() == 0 || !t.open() || t.contract.onHold {
		return mono.Never
	}
	arrival := t.backlog.waiting.Front().Arrival
	return min(t.contract.eligible(arrival), t.expiry.end(arrival))
}

// ChannelDeadline returns when the next message times out or ends its deferral; mono.Never if
// there is none. The owner must call Tick then. The result may be too early, because a FIN does
// not recompute it.
func (t *Topic) ChannelDeadline() mono.Time { return t.due }

// open reports whether a message may leave the topic, tokens apart.
func (t *Topic) open() bool {
	if t.paused || t.stopped || len(t.cursors.channels) == 0 {
		return false
	}
	for _, c := range t.cursors.channels {
		if !c.open() {
			return false
		}
	}
	return true
}

// memory returns the number of messages that may wait in memory. Under memory pressure the limit
// is one message, and only if the message can leave the topic at once.
func (t *Topic) memory() int {
	switch {
	case !t.log.tight:
		return t.log.cfg.Capacity
	case t.open():
		return 1
	}
	return 0
}

// wants returns the offset and the number of messages that the backlog needs from the log.
func (t *Topic) wants() (from Offset, n int) {
	if t.stopped {
		return 0, 0
	}
	return t.backlog.wants(t.memory())
}

// advance releases messages from the head of the backlog while the head is eligible, and requests
// a read of the log if the backlog has room.
func (t *Topic) advance(now mono.Time, fx *Effects) {
	t.release(now, fx)
	if t.backlog.behind || t.backlog.absent.Len() > 0 {
		if _, n := t.wants(); n > 0 {
			fx.Disk = true
		}
	}
	t.cursors.trimRead(fx)
}

func (t *Topic) release(now mono.Time, fx *Effects) {
	t.contract.lapse(now)
	t.contract.observe(now, t.log.cfg.MaxBackdating)
	if t.backlog.behind {
		t.backlog.catchUp(t.memory())
	}
	leaves, released := t.contract.mayLeave(now), false
	for leaves && t.backlog.waiting.Len() > 0 && t.open() {
		m := t.backlog.waiting.Front()
		if t.expiry.ended(m.Arrival, now) {
			// Each channel discards the message: no channel has a longer TTL than the topic.
			m.Access, m.Held, m.Released = 0, 0, now
			t.backlog.pop()
			t.backlog.counters.Released--
			t.backlog.counters.Expired++
		} else {
			e, access, ok := t.contract.take(m.Arrival, now)
			if !ok {
				break
			}
			m.Access, m.Held, m.Released = access, 0, now
			if from := max(m.Arrival, t.log.cfg.Begin); from < t.contract.opened {
				m.Held = t.contract.opened.Sub(from)
			}
			t.backlog.pop()
			fx.Released = append(fx.Released, Release{Arrival: m.Arrival, Eligible: e, Released: now, Access: m.Access})
		}
		t.log.changes++
		t.log.front = max(t.log.front, m.Offset+1)
		for _, c := range t.cursors.channels {
			if c.release(now, m) {
				t.cursors.spill(m, fx)
			}
			c.dispatch(now, fx)
			t.due = min(t.due, c.Deadline())
		}
		fx.unref(m)
		if t.backlog.behind {
			t.backlog.catchUp(t.memory())
		}
		released = true
	}
	if released {
		for _, c := range t.cursors.channels {
			c.want(fx) // the channel may have room now
		}
	}
	if t.backlog.foreign && !t.backlog.behind && t.backlog.window.slots.Len() == 0 {
		// The end of the log may have messages for one channel only.
		t.backlog.foreign, t.log.front = false, t.log.end
		for _, c := range t.cursors.channels {
			c.cursor.behind = c.cursor.behind || c.cursor.tracked
			t.serve(now, c, fx)
		}
	}
	t.contract.blocked = (t.contract.limited || t.backlog.Waiting() > 0) && !(leaves && t.open())
}

// Pause stops releases; the topic still accepts messages.
func (t *Topic) Pause() { t.paused, t.contract.blocked = true, true }

// Stop ends releases and deliveries for good. The topic keeps its messages for Cursors.StoreLast.
func (t *Topic) Stop() {
	t.stopped = true
	for _, c := range t.cursors.channels {
		c.stopped = true
	}
}

// Unpause resumes releases.
func (t *Topic) Unpause(now mono.Time, fx *Effects) {
	t.paused = false
	t.advance(now, fx)
}

func (t *Topic) Paused() bool { return t.paused }

// Empty discards the messages that wait in the topic and returns their number. The channels keep
// their messages.
func (t *Topic) Empty(now mono.Time, fx *Effects) int {
	n := t.backlog.empty(fx)
	t.log.front = t.log.end
	for _, c := range t.cursors.channels {
		if !c.cursor.tracked {
			continue
		}
		for o := c.cursor.window.next; o < c.cursor.window.end(); o++ {
			if t.backlog.isPending(c.cursor.window.get(o)) {
				c.cursor.window.done(o)
			}
		}
		if !c.cursor.behind {
			c.cursor.reach(t.log.end)
		}
	}
	t.log.changes++
	t.log.read.moved = true
	t.settle(now, fx, t.cursors.channels...) // a channel may have been at MaxUnfinished
	return n
}

// CreateChannel returns the channel with the given name and creates the channel if necessary. The
// first channel gets the messages that waited for a channel.
func (t *Topic) CreateChannel(now mono.Time, name string, fx *Effects) *Channel {
	i, found := t.cursors.find(name)
	if found {
		return t.cursors.channels[i]
	}
	c := newChannel(now, name, &t.log, &t.backlog)
	c.expiry = t.expiry
	c.cursor.start()
	t.cursors.channels = slices.Insert(t.cursors.channels, i, c)
	t.log.changes++
	t.advance(now, fx)
	return c
}

// DeleteChannel removes the channel and its messages. The topic releases messages that waited
// only because the channel was full. Error: ErrUnknownChannel.
func (t *Topic) DeleteChannel(now mono.Time, name string, fx *Effects) error {
	i, found := t.cursors.find(name)
	if !found {
		return ErrUnknownChannel
	}
	c := t.cursors.channels[i]
	c.stopped = true // the owner may still have the channel
	for _, o := range c.cursor.aheadOffsets() {
		t.log.skip(o, o+1) // else a new channel with the same name would get the message
	}
	c.empty(fx)
	t.cursors.channels = slices.Delete(t.cursors.channels, i, i+1)
	t.log.changes++
	t.advance(now, fx)
	return nil
}

// The steps of a consumer. Each step may make room in a full channel, so each step ends with a
// release.

// FinishBatch finishes messages in the channel, in one step, and appends the result of each
// message to errs. Error: ErrNotInFlight.
func (t *Topic) FinishBatch(now mono.Time, c *Channel, id ConsumerID, batch []MessageID, fx *Effects, errs []error) []error {
	for _, m := range batch {
		errs = append(errs, c.finish(id, m, fx))
	}
	t.settle(now, fx, c)
	return errs
}

// Requeue takes a message back from the consumer. The channel delivers the message again after
// delay. Error: ErrNotInFlight.
func (t *Topic) Requeue(now mono.Time, c *Channel, id ConsumerID, m MessageID, delay time.Duration, fx *Effects) error {
	if err := c.requeue(now, id, m, delay); err != nil {
		return err
	}
	t.settle(now, fx, c)
	return nil
}

// Touch restarts a message's timeout, up to Config.MaxInFlight after its delivery. Error:
// ErrNotInFlight.
func (t *Topic) Touch(now mono.Time, c *Channel, id ConsumerID, m MessageID) error {
	err := c.touch(now, id, m)
	t.due = min(t.due, c.Deadline())
	return err
}

// SetReady sets the consumer's RDY: how many messages it may hold at once. Error:
// ErrUnknownConsumer.
func (t *Topic) SetReady(now mono.Time, c *Channel, id ConsumerID, n int, fx *Effects) error {
	if err := c.consumers.setReady(id, n); err != nil {
		return err
	}
	t.settle(now, fx, c)
	return nil
}

// Resume gives a stalled consumer credit again, because the consumer takes its deliveries.
func (t *Topic) Resume(now mono.Time, c *Channel, id ConsumerID, fx *Effects) {
	c.consumers.resume(id)
	t.settle(now, fx, c)
}

// RemoveConsumer takes back all messages that the consumer holds.
func (t *Topic) RemoveConsumer(now mono.Time, c *Channel, id ConsumerID, fx *Effects) {
	c.removeConsumer(id)
	t.settle(now, fx, c)
}

// UnpauseChannel resumes deliveries of the channel.
func (t *Topic) UnpauseChannel(now mono.Time, c *Channel, fx *Effects) {
	c.paused = false
	t.settle(now, fx, c)
}

// EmptyChannel discards the channel's messages and returns their number. Consumers lose the
// messages that they hold: the channel refuses their FIN.
func (t *Topic) EmptyChannel(now mono.Time, c *Channel, fx *Effects) int {
	n := c.empty(fx)
	t.settle(now, fx, c)
	return n
}

// Seek moves the channel's cursor to an offset. The channel gets every message released from that
// offset on, again if necessary, and nothing before. As in EmptyChannel, the channel loses the
// messages that are in flight, deferred or requeued. Messages not yet released come at their
// release. No message takes a second token. Messages from the offset on count again in
// ChannelCounters.Messages. records estimates the number of records in the log from the offset
// on. Error: ErrNoCursor.
func (t *Topic) Seek(now mono.Time, c *Channel, to Offset, records int, fx *Effects) error {
	if !c.cursor.tracked {
		return ErrNoCursor
	}
	if to < t.log.front {
		t.cursors.writeUpTo(t.log.front, nil) // the channel may need messages that are only in memory
	}
	c.empty(fx)
	if c.opened = now; to < t.log.front { // a repeated message is not the broker's delay
		c.cursor.seek(to, records)
		c.counters.Messages += uint64(c.cursor.late)
		fx.Disk = true
	}
	t.settle(now, fx, c)
	return nil
}

// settle ends a step that changed the given channels.
func (t *Topic) settle(now mono.Time, fx *Effects, changed ...*Channel) {
	for _, c := range changed {
		t.serve(now, c, fx)
	}
	t.advance(now, fx)
}

// serve runs the channel's due deliveries.
func (t *Topic) serve(now mono.Time, c *Channel, fx *Effects) {
	c.dispatch(now, fx)
	t.due = min(t.due, c.Deadline())
	c.want(fx)
}
