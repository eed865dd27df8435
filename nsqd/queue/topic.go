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
	// Capacity is the maximum number of messages that may wait in the topic's
	// backlog, and in each channel, in memory. Must be >= 1.
	Capacity int
	// Overflow is how many messages more may be on their way to disk, since the backlog
	// or a channel had no room for them; 0 where there is no disk. A channel that has
	// no room, here or there, keeps the topic from releasing; a topic that has none
	// refuses. Nothing is ever dropped.
	Overflow int
	// WriteThrough says that every message is in the log before it is accepted, by
	// Topic.Appended. Requires: Overflow > 0.
	WriteThrough bool
	// MaxUnfinished is how far a channel may be ahead of the oldest message that it
	// has not finished, in messages; it is behind then. 0: it is not bounded.
	MaxUnfinished int
	// ReadAhead is how many bytes of messages stay in memory that were read from the log
	// for one cursor, for those close behind it; what is read at a time apart.
	ReadAhead int
	// First is the offset of the first message.
	First Offset
	// MaxInFlight is how long a consumer may keep a message by touching it.
	MaxInFlight time.Duration
	// MaxBackdating is how far before its release a message may have its token:
	// one that arrived earlier than that is judged as if it had arrived then.
	MaxBackdating time.Duration
	// Begin is when the topic begins.
	Begin mono.Time
	// Rand draws which messages a sampling consumer gets.
	Rand *rand.Rand
}

// Topic is the machine. Not safe for concurrent use; its owner holds a lock.
//
// Invariant, checked by checkInvariants in tests: if the head of the backlog is eligible,
// the topic is not on hold
// and every channel has room, it is released before the step returns. A waiting message has
// taken no token yet: only the head is judged, when it is released, so that a new share
// counts from then on.
type Topic struct {
	contract
	cursors

	expiry  Expiry
	paused  bool
	stopped bool
	due     mono.Time // no later than the deadline of any channel
	turn    int       // of Want
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

// Put accepts all of msgs, in order, or none of them.
// Errors: ErrFull, *OverLimitError. It takes ownership of the messages.
func (t *Topic) Put(now mono.Time, fx *Effects, msgs ...*Message) error {
	if t.free() < len(msgs) {
		// What is eligible may not have been released yet: time passed.
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

// Enter accepts msgs, in order, whatever room there is: the rest of a batch of
// which Put took the first. It takes ownership of them.
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

// Takes reports whether Put, n times, would accept each of n messages and none of
// them has to wait for room.
func (t *Topic) Takes(n int) bool {
	return !(t.limited && t.over.Reject) && t.free() >= n
}

// Room reports whether Put would have room for n messages now.
func (t *Topic) Room(n int) bool {
	n -= t.free()
	return n <= 0 || t.log.room(n)
}

// Tick does what is due: releases, message timeouts, deferred messages.
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

// ReleaseDeadline is when the head of the backlog gets its token; mono.Never if
// nothing waits for that. Tick must be called then.
func (t *Topic) ReleaseDeadline() mono.Time {
	if t.waiting.len() == 0 || !t.open() || t.onHold {
		return mono.Never
	}
	arrival := t.waiting.front().Arrival
	return min(t.eligible(arrival), t.expiry.end(arrival))
}

// ChannelDeadline is when the next message times out or ends its deferral, or
// before: it may be of one that is done with since the last Tick, lest every step
// have to ask all channels. mono.Never if there is none. Tick must be called then.
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

// memory is how many messages may wait in memory. While that is tight it is one, which does
// not stay.
func (t *Topic) memory() int {
	switch {
	case !t.tight:
		return t.cfg.Capacity
	case t.open():
		return 1
	}
	return 0
}

// wants returns what the backlog has to get from the log, and from where.
func (t *Topic) wants() (from Offset, n int) {
	if t.stopped {
		return 0, 0
	}
	return t.backlog.wants(t.memory())
}

// advance releases from the head of the backlog while it is eligible, and has the
// backlog filled up from behind.
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
			// Each channel discards it: no channel has a longer TTL than the topic.
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
		// Channels may have what is for them alone at the end of the log.
		t.passed, t.front = false, t.end
		for _, c := range t.channels {
			c.behind = c.behind || c.tracked
			t.serve(now, c, fx)
		}
	}
	t.heldUp = (t.limited || t.Waiting() > 0) && !(leaves && t.open())
}

// Pause stops releases; messages are still accepted.
func (t *Topic) Pause() { t.paused, t.heldUp = true, true }

// Stop ends releases and deliveries for good, whatever step comes after it:
// what is held stays as it is, for Leave.
func (t *Topic) Stop() {
	t.stopped = true
	for _, c := range t.channels {
		c.stopped = true
	}
}

// Unpause releases what became eligible meanwhile.
func (t *Topic) Unpause(now mono.Time, fx *Effects) {
	t.paused = false
	t.advance(now, fx)
}

// Paused reports whether the topic is paused.
func (t *Topic) Paused() bool { return t.paused }

// Empty discards the messages that wait in the topic and returns how many.
// Its channels keep theirs.
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
	t.goOn(now, fx) // a channel may have been as far ahead as it may be
	return n
}

// CreateChannel returns the channel of that name and creates it if need be.
// The first channel gets the messages that waited for one.
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

// DeleteChannel removes the channel with all it holds. What waited only
// because that channel was full is released.
func (t *Topic) DeleteChannel(now mono.Time, name string, fx *Effects) error {
	i, found := t.find(name)
	if !found {
		return ErrUnknownChannel
	}
	c := t.channels[i]
	c.stopped = true // the owner may still have it
	for _, o := range c.aheadOffsets() {
		t.avoid(o, o+1) // another of its name would get it
	}
	c.empty(fx)
	t.channels = slices.Delete(t.channels, i, i+1)
	t.changes++
	t.advance(now, fx)
	return nil
}

// The steps of a consumer. Each may make room in a full channel, so each ends
// by releasing what can be released.

// FinishBatch ends the lives of messages in the channel, in one step: it appends to errs
// what became of each. Error: ErrNotInFlight.
func (t *Topic) FinishBatch(now mono.Time, c *Channel, id ConsumerID, batch []MessageID, fx *Effects, errs []error) []error {
	for _, m := range batch {
		errs = append(errs, c.finish(id, m, fx))
	}
	t.settle(now, c, fx)
	return errs
}

// Requeue gives a message back, to be delivered again after delay.
// Error: ErrNotInFlight.
func (t *Topic) Requeue(now mono.Time, c *Channel, id ConsumerID, m MessageID, delay time.Duration, fx *Effects) error {
	if err := c.requeue(now, id, m, delay); err != nil {
		return err
	}
	t.settle(now, c, fx)
	return nil
}

// Touch restarts a message's timeout, up to Config.MaxInFlight after its
// delivery. Error: ErrNotInFlight.
func (t *Topic) Touch(now mono.Time, c *Channel, id ConsumerID, m MessageID) error {
	err := c.touch(now, id, m)
	t.due = min(t.due, c.Deadline())
	return err
}

// SetReady sets how many messages the consumer may hold at once.
// Error: ErrUnknownConsumer.
func (t *Topic) SetReady(now mono.Time, c *Channel, id ConsumerID, n int, fx *Effects) error {
	if err := c.setReady(id, n); err != nil {
		return err
	}
	t.settle(now, c, fx)
	return nil
}

// Resume gives a stalled consumer credit again: it takes its deliveries.
func (t *Topic) Resume(now mono.Time, c *Channel, id ConsumerID, fx *Effects) {
	c.resume(id)
	t.settle(now, c, fx)
}

// RemoveConsumer gives back all that the consumer holds.
func (t *Topic) RemoveConsumer(now mono.Time, c *Channel, id ConsumerID, fx *Effects) {
	c.removeConsumer(id)
	t.settle(now, c, fx)
}

// UnpauseChannel resumes them.
func (t *Topic) UnpauseChannel(now mono.Time, c *Channel, fx *Effects) {
	c.paused = false
	t.settle(now, c, fx)
}

// EmptyChannel discards the channel's messages and returns how many. What
// consumers hold is theirs no longer: their FIN will be refused.
func (t *Topic) EmptyChannel(now mono.Time, c *Channel, fx *Effects) int {
	n := c.empty(fx)
	t.settle(now, c, fx)
	return n
}

// Seek moves the channel's cursor: it gets what was released from that offset on, once
// more if it had it, and nothing before it. What it holds, in flight, deferred or requeued,
// it holds no longer, as with EmptyChannel; what is not released yet comes when it is. None
// of it takes a token again. What it gets from there on counts as published to it anew.
// records is about how many the log has from there on. Error: ErrNoCursor.
func (t *Topic) Seek(now mono.Time, c *Channel, to Offset, records int, fx *Effects) error {
	if !c.tracked {
		return ErrNoCursor
	}
	if to < t.front {
		t.writeUpTo(t.front, nil) // what memory alone has, and perhaps for this channel alone
	}
	c.empty(fx)
	if c.opened = now; to < t.front { // it is not the broker that was late with what comes again
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

// serve has a channel do what it may do now.
func (t *Topic) serve(now mono.Time, c *Channel, fx *Effects) {
	c.dispatch(now, fx)
	t.due = min(t.due, c.Deadline())
	c.want(fx)
}

// goOn does what channels may do now that were too far ahead.
func (t *Topic) goOn(now mono.Time, fx *Effects) {
	for _, c := range t.channels {
		t.serve(now, c, fx)
	}
	t.advance(now, fx)
}
