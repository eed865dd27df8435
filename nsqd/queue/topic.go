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
// when the message gets its token. A Channel has items (the messages in memory) and consumers.
// The other parts handle messages beyond memory: log, tail and readCache, which do not know their
// readers; backlog, the topic's own cursor; cursor, a channel's cursor; and cursors, which
// combines the log, the backlog and the channels. The topic and the channels refer to their
// parts, and a cursor refers to the backlog and the log. No part refers back.
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
	// Topic.Appended. Requires: Overflow > 0.
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
	contract
	cursors

	expiry  Expiry
	paused  bool
	stopped bool
	due     mono.Time // no later than the deadline of any channel
	turn    int       // for Want: whose turn to read the log
}

// NewTopic returns a topic without channels and without a limit.
func NewTopic(cfg Config) *Topic {
	if cfg.Capacity < 1 || cfg.Rand == nil {
		panic("queue: a topic needs a capacity of at least 1 and a source of randomness")
	}
	t := &Topic{contract: newContract(), due: mono.Never}
	t.log = log{cfg: &cfg, first: math.MaxUint64}
	t.jump(cfg.First)
	t.front, t.backlog = t.end, backlog{log: &t.log, window: window[*Message]{next: t.end}}
	return t
}

// Put accepts all of msgs, in order, or none of them, and takes ownership of the messages.
// Errors: ErrFull, *OverLimitError.
func (t *Topic) Put(now mono.Time, fx *Effects, msgs ...*Message) error {
	if t.free() < len(msgs) {
		// A message may have become eligible since the last step.
		t.advance(now, fx)
		if !t.Room(len(msgs)) {
			t.counters.Refused += uint64(len(msgs))
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
		if t.accept(m); t.retained && t.logged() {
			t.spill(m, fx)
		}
		if t.free() > 0 {
			t.wait(m)
		} else {
			t.fallBehind()
			t.spill(m, fx)
		}
		t.accepted(m)
	}
	t.advance(now, fx)
	t.maxWaiting = max(t.maxWaiting, t.Waiting())
}

// Takes reports whether n calls of Put would each accept a message at once, without waiting for
// room.
func (t *Topic) Takes(n int) bool {
	return !(t.limited && t.over.Reject) && t.free() >= n
}

// Room reports whether Put would have room for n messages now.
func (t *Topic) Room(n int) bool {
	n -= t.free()
	return n <= 0 || t.log.room(n)
}

// Tick does what is due: releases, message timeouts and ends of deferrals.
func (t *Topic) Tick(now mono.Time, fx *Effects) {
	for _, c := range t.channels {
		c.expire(now)
		t.serve(now, c, fx)
	}
	t.advance(now, fx) // last: the channels have room now
	t.due = mono.Never
	for _, c := range t.channels {
		t.due = min(t.due, c.Deadline())
	}
}

// ReleaseDeadline returns when the head of the backlog gets its token or its TTL ends; mono.Never
// if no message waits for a token. The owner must call Tick then.
func (t *Topic) ReleaseDeadline() mono.Time {
	if t.waiting.len() == 0 || !t.open() || t.onHold {
		return mono.Never
	}
	arrival := t.waiting.front().Arrival
	return min(t.eligible(arrival), t.expiry.end(arrival))
}

// ChannelDeadline returns when the next message times out or ends its deferral; mono.Never if
// there is none. The owner must call Tick then. The result may be too early, because a FIN does
// not recompute it.
func (t *Topic) ChannelDeadline() mono.Time { return t.due }

// open reports whether a message may leave the topic, tokens apart.
func (t *Topic) open() bool {
	if t.paused || t.stopped || len(t.channels) == 0 {
		return false
	}
	for _, c := range t.channels {
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
	case !t.tight:
		return t.cfg.Capacity
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

// advance releases messages from the head of the backlog while the head is eligible, and asks for
// a read of the log if the backlog has room.
func (t *Topic) advance(now mono.Time, fx *Effects) {
	t.release(now, fx)
	if t.backlog.behind || t.backlog.absent.len() > 0 {
		if _, n := t.wants(); n > 0 {
			fx.Disk = true
		}
	}
	t.trimRead(fx)
}

func (t *Topic) release(now mono.Time, fx *Effects) {
	t.lapse(now)
	t.look(now, t.cfg.MaxBackdating)
	if t.backlog.behind {
		t.backlog.catchUp(t.memory())
	}
	leaves := t.mayLeave(now)
	for leaves && t.waiting.len() > 0 && t.open() {
		m := t.waiting.front()
		if t.expiry.ended(m.Arrival, now) {
			// Each channel discards the message: no channel has a longer TTL than the topic.
			m.Access, m.Held, m.Released = 0, 0, now
			t.backlog.pop()
			t.counters.Released--
			t.counters.Expired++
		} else {
			e, access, ok := t.take(m.Arrival, now)
			if !ok {
				break
			}
			m.Access, m.Held, m.Released = access, 0, now
			if from := max(m.Arrival, t.cfg.Begin); from < t.opened {
				m.Held = t.opened.Sub(from)
			}
			t.backlog.pop()
			fx.Released = append(fx.Released, Release{Arrival: m.Arrival, Eligible: e, Released: now, Access: m.Access})
		}
		t.changes++
		t.front = max(t.front, m.Offset+1)
		for _, c := range t.channels {
			if c.release(now, m) {
				t.spill(m, fx)
			}
			c.dispatch(now, fx)
			t.due = min(t.due, c.Deadline())
		}
		fx.unref(m)
		if t.backlog.behind {
			t.backlog.catchUp(t.memory())
		}
	}
	if t.passed && !t.backlog.behind && t.backlog.window.slots.len() == 0 {
		// The end of the log may have messages for one channel only.
		t.passed, t.front = false, t.end
		for _, c := range t.channels {
			c.behind = c.behind || c.tracked
			t.serve(now, c, fx)
		}
	}
	t.heldUp = (t.limited || t.Waiting() > 0) && !(leaves && t.open())
}

// Pause stops releases; the topic still accepts messages.
func (t *Topic) Pause() { t.paused, t.heldUp = true, true }

// Stop ends releases and deliveries for good. The topic keeps its messages for Leave.
func (t *Topic) Stop() {
	t.stopped = true
	for _, c := range t.channels {
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
	t.front = t.end
	for _, c := range t.channels {
		if !c.tracked {
			continue
		}
		for o := c.window.next; o < c.window.end(); o++ {
			if t.isPending(c.window.get(o)) {
				c.window.done(o)
			}
		}
		if !c.behind {
			c.reach(t.end)
		}
	}
	t.changes++
	t.read.moved = true
	t.goOn(now, fx) // a channel may have been at MaxUnfinished
	return n
}

// CreateChannel returns the channel with the given name and creates the channel if necessary. The
// first channel gets the messages that waited for a channel.
func (t *Topic) CreateChannel(now mono.Time, name string, fx *Effects) *Channel {
	i, found := t.find(name)
	if found {
		return t.channels[i]
	}
	c := newChannel(now, name, &t.log, &t.backlog)
	c.expiry = t.expiry
	c.start()
	t.channels = slices.Insert(t.channels, i, c)
	t.changes++
	t.advance(now, fx)
	return c
}

// DeleteChannel removes the channel and its messages. The topic releases messages that waited
// only because the channel was full. Error: ErrUnknownChannel.
func (t *Topic) DeleteChannel(now mono.Time, name string, fx *Effects) error {
	i, found := t.find(name)
	if !found {
		return ErrUnknownChannel
	}
	c := t.channels[i]
	c.stopped = true // the owner may still have the channel
	for _, o := range c.aheadOffsets() {
		t.avoid(o, o+1) // else a new channel with the same name would get the message
	}
	c.empty(fx)
	t.channels = slices.Delete(t.channels, i, i+1)
	t.changes++
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
	t.settle(now, c, fx)
	return errs
}

// Requeue takes a message back from the consumer. The channel delivers the message again after
// delay. Error: ErrNotInFlight.
func (t *Topic) Requeue(now mono.Time, c *Channel, id ConsumerID, m MessageID, delay time.Duration, fx *Effects) error {
	if err := c.requeue(now, id, m, delay); err != nil {
		return err
	}
	t.settle(now, c, fx)
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
	if err := c.setReady(id, n); err != nil {
		return err
	}
	t.settle(now, c, fx)
	return nil
}

// Resume gives a stalled consumer credit again, because the consumer takes its deliveries.
func (t *Topic) Resume(now mono.Time, c *Channel, id ConsumerID, fx *Effects) {
	c.resume(id)
	t.settle(now, c, fx)
}

// RemoveConsumer takes back all messages that the consumer holds.
func (t *Topic) RemoveConsumer(now mono.Time, c *Channel, id ConsumerID, fx *Effects) {
	c.removeConsumer(id)
	t.settle(now, c, fx)
}

// UnpauseChannel resumes deliveries of the channel.
func (t *Topic) UnpauseChannel(now mono.Time, c *Channel, fx *Effects) {
	c.paused = false
	t.settle(now, c, fx)
}

// EmptyChannel discards the channel's messages and returns their number. Consumers lose the
// messages that they hold: the channel refuses their FIN.
func (t *Topic) EmptyChannel(now mono.Time, c *Channel, fx *Effects) int {
	n := c.empty(fx)
	t.settle(now, c, fx)
	return n
}

// Seek moves the channel's cursor to an offset. The channel gets every message released from that
// offset on, again if necessary, and nothing before. As in EmptyChannel, the channel loses the
// messages that are in flight, deferred or requeued. Messages not yet released come at their
// release. No message takes a second token. Messages from the offset on count again in
// ChannelCounters.Messages. records estimates the number of records in the log from the offset
// on. Error: ErrNoCursor.
func (t *Topic) Seek(now mono.Time, c *Channel, to Offset, records int, fx *Effects) error {
	if !c.tracked {
		return ErrNoCursor
	}
	if to < t.front {
		t.writeUpTo(t.front, nil) // the channel may need messages that are only in memory
	}
	c.empty(fx)
	if c.opened = now; to < t.front { // a repeated message is not the broker's delay
		c.seek(to, records)
		c.counters.Messages += uint64(c.late)
		fx.Disk = true
	}
	t.settle(now, c, fx)
	return nil
}

func (t *Topic) settle(now mono.Time, c *Channel, fx *Effects) {
	t.serve(now, c, fx)
	t.advance(now, fx)
}

// serve runs the channel's due deliveries.
func (t *Topic) serve(now mono.Time, c *Channel, fx *Effects) {
	c.dispatch(now, fx)
	t.due = min(t.due, c.Deadline())
	c.want(fx)
}

// goOn serves every channel, because channels at MaxUnfinished may have gained room.
func (t *Topic) goOn(now mono.Time, fx *Effects) {
	for _, c := range t.channels {
		t.serve(now, c, fx)
	}
	t.advance(now, fx)
}
