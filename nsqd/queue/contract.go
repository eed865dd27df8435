package queue

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// OverLimit is what becomes of a message that has no token.
type OverLimit struct {
	// Reject refuses a message whose access delay would exceed MaxDelay.
	// Otherwise every message is accepted and waits.
	Reject   bool
	MaxDelay time.Duration
}

// Lease says how long the parts of a share last. What was eligible at an
// instant is judged by the share of that instant: a lease that ends between two
// steps counts from its end, not from the step after it.
type Lease struct {
	// Base is what is left of the share from FlexUntil on.
	Base      tokenbucket.Share
	FlexUntil mono.Time
	// From Until on there is no share at all; mono.Never: the base is for good.
	Until mono.Time
}

// Forever is the lease of a share that has no end.
func Forever(s tokenbucket.Share) Lease {
	return Lease{Base: s, FlexUntil: mono.Never, Until: mono.Never}
}

// lease is the Lease in force.
//
// Invariant: lapses is the first instant at which the share changes by itself.
type lease struct {
	Lease
	lapses mono.Time
}

func (l *lease) set(to Lease) {
	l.Lease = to
	l.lapses = min(to.FlexUntil, to.Until)
}

// contract says when a message that waits may leave: at once while the topic is not limited,
// and never while it is and the bucket is zero.
//
// Two envelopes. By the times at which messages have their tokens, a contract
// (r, b) is the bucket's: b + r*dt in any interval, exactly. By the times at which
// they leave there is none in that alone: a backlog that was paused for an hour would
// let go at once of all that had tokens meanwhile. So a message counts as having
// arrived no earlier than the backlog was last held up by anything but tokens (opened),
// and if it had its token more than Config.MaxBackdating ago, then it counts as
// having arrived so long ago, and may have to wait again. Hence every message leaves
// within MaxBackdating of its token, and in any interval dt at most
// b + r*(dt + MaxBackdating). What waits for the disk is not held up: with
// Config.WriteThrough everything does, and a conforming topic must not be judged by the
// disk's turns.
type contract struct {
	limited  bool
	bucket   tokenbucket.Hindsight
	lease    lease
	over     OverLimit
	holdFrom mono.Time // no message of a limited topic leaves from then on
	onHold   bool      // that held the backlog up in the newest step
	opened   mono.Time // see above; never falls
	heldUp   bool      // by something else than tokens, since the step before
	floor    mono.Time // MaxBackdating before the last step; never falls
	waited   mono.Time // what arrived later had its token at once; never falls
}

func newContract() contract {
	return contract{holdFrom: mono.Never, opened: math.MinInt64, floor: math.MinInt64, waited: math.MinInt64}
}

// Limited reports whether the topic has a contract.
func (c *contract) Limited() bool { return c.limited }

// Share returns the share in force; the zero Share without one.
func (c *contract) Share() tokenbucket.Share { return c.bucket.Share() }

// Tokens returns what the bucket holds.
func (c *contract) Tokens(now mono.Time) tokenbucket.Tokens { return c.bucket.Tokens(now) }

// eligible is when a message that arrived then may leave.
func (c *contract) eligible(arrival mono.Time) mono.Time {
	if !c.limited {
		return arrival
	}
	at, _ := c.judgedAt(arrival)
	return c.bucket.Eligible(at)
}

// take gives a message that arrived then its token if that is there by now, and says when it
// was and what the access delay is: see Message.
func (c *contract) take(arrival, now mono.Time) (eligible mono.Time, access time.Duration, ok bool) {
	if !c.limited {
		return arrival, 0, !now.Before(arrival)
	}
	at, late := c.judgedAt(arrival)
	e, ok := c.bucket.Take(at, now)
	arrived := max(arrival, c.opened)
	if !ok {
		c.waited = max(c.waited, arrived)
	} else if e > at {
		c.waited = max(c.waited, e)
	}
	return e, e.Sub(arrived) - late, ok
}

// judgedAt is when a message counts as having arrived, and for how long it then has
// had a token that does not count, since it was not released in time.
func (c *contract) judgedAt(arrival mono.Time) (at mono.Time, late time.Duration) {
	at = max(arrival, c.opened)
	switch {
	case at >= c.floor:
		return at, 0
	case at > c.waited: // spares a broker that is behind the search, below
		return c.floor, c.floor.Sub(at)
	}
	if e := c.bucket.Eligible(at); e < c.floor {
		return c.floor, c.floor.Sub(e)
	}
	return at, 0
}

// look brings the bounds of judgedAt up to now.
func (c *contract) look(now mono.Time, backdating time.Duration) {
	c.floor = max(c.floor, now.Add(-backdating))
	if c.heldUp {
		c.opened = max(c.opened, now)
	}
}

// delay is the access delay that the last of n messages would have, of which the first
// and the last arrived then, if nothing but tokens held the backlog up from now on.
func (c *contract) delay(n int, first, last mono.Time) time.Duration {
	first, last = max(first, c.opened, c.floor), max(last, c.opened, c.floor)
	e := c.bucket.After(int64(n), first)
	if n == 1 {
		e = c.bucket.Eligible(first)
	}
	if e == mono.Never {
		return math.MaxInt64
	}
	return max(0, e.Sub(last))
}

// lapse ends what has ended by now.
func (c *contract) lapse(now mono.Time) {
	l := &c.lease
	if !c.limited || now.Before(l.lapses) {
		return
	}
	to := l.Lease
	if !now.Before(to.FlexUntil) && to.FlexUntil <= to.Until {
		c.bucket.Retune(to.FlexUntil, to.Base, 0)
		to.FlexUntil = mono.Never
	}
	if !now.Before(to.Until) {
		c.bucket.Retune(to.Until, tokenbucket.Share{}, 0)
		to = Forever(tokenbucket.Share{})
	}
	l.set(to)
}

// HoldFrom has no message leave from then on while the topic is limited, until a later
// HoldFrom moves that time. What waits is held up, as by a pause, and the bucket earns tokens.
// Requires: a Tick follows if the time before has passed.
func (c *contract) HoldFrom(at mono.Time) { c.holdFrom = at }

// mayLeave reports whether messages may leave at now, tokens apart.
func (c *contract) mayLeave(now mono.Time) bool {
	c.onHold = c.limited && !now.Before(c.holdFrom)
	return !c.onHold
}

// The steps of a contract.

// Limit puts the topic under a contract, with no share yet: until SetShare
// nothing is released. If it is limited already, only the policy changes.
func (t *Topic) Limit(over OverLimit) {
	t.over = over
	if !t.limited {
		t.limited = true
		t.backlog.sort()
		t.bucket = tokenbucket.Hindsight{}
		t.lease.set(Forever(tokenbucket.Share{}))
	}
}

// SetShare is SetLeased for good.
func (t *Topic) SetShare(now mono.Time, s tokenbucket.Share, granted tokenbucket.Tokens, fx *Effects) tokenbucket.Tokens {
	return t.SetLeased(now, s, Forever(s), granted, fx)
}

// SetLeased changes the share from now on, for as long as the lease says, with
// granted tokens moved to it, and returns the tokens given up. Messages already
// waiting are judged by the new share. Requires: Limited.
func (t *Topic) SetLeased(now mono.Time, s tokenbucket.Share, of Lease, granted tokenbucket.Tokens, fx *Effects) tokenbucket.Tokens {
	if !t.limited {
		panic("queue: a share for a topic without a limit")
	}
	t.lapse(now)
	released := t.bucket.Retune(now, s, granted)
	t.lease.set(of)
	t.advance(now, fx)
	return released
}

// Unlimit ends the topic's contract. What waits for tokens has them now; that it
// waited for them until now is its access delay.
func (t *Topic) Unlimit(now mono.Time, fx *Effects) {
	if !t.limited {
		return
	}
	most := tokenbucket.Share{Rate: tokenbucket.MaxRate, Burst: tokenbucket.MaxBurst}
	t.SetShare(now, most, tokenbucket.Tokens(tokenbucket.MaxBurst)*tokenbucket.Token, fx)
	t.limited, t.over, t.bucket = false, OverLimit{}, tokenbucket.Hindsight{}
	t.byArrival = false
	t.lease.set(Forever(tokenbucket.Share{}))
	t.advance(now, fx)
}

// Renew moves the ends of the lease, and reports whether there is a flexible
// part: what has lapsed it does not bring back. Requires: Limited.
func (t *Topic) Renew(now, flexUntil, until mono.Time, fx *Effects) (flex bool) {
	if !t.limited {
		panic("queue: a lease for a topic without a limit")
	}
	t.lapse(now)
	to := t.lease.Lease
	if flex = to.FlexUntil != mono.Never; flex {
		to.FlexUntil = flexUntil
	}
	if !t.bucket.Share().IsZero() {
		to.Until = until
	}
	t.lease.set(to)
	t.advance(now, fx)
	return flex
}

// Admit asks whether a topic with Config.WriteThrough would take n messages, of which the
// first and the last arrived then, behind so many that were admitted before and are not
// appended yet: then first is the first of those. It refuses what Put refuses, and counts
// it. The owner then stores them and calls Appended. Error: *OverLimitError.
func (t *Topic) Admit(now mono.Time, ahead, n int, first, last mono.Time) error {
	if n == 0 || !t.limited || !t.over.Reject {
		return nil
	}
	t.look(now, t.cfg.MaxBackdating)
	if t.waiting.len() > 0 {
		first = min(first, t.waiting.front().Arrival)
	}
	if d := t.delay(t.Waiting()+ahead+n, first, last); d > t.over.MaxDelay {
		return t.Refuse(&OverLimitError{Delay: d, Limit: t.over.MaxDelay}, n)
	}
	return nil
}

// BurstNeeded is the burst with which no message of the last second would have
// waited for a token, as far as is known since the last TakeMaxWaiting; 0 without
// messages or without a limit.
func (t *Topic) BurstNeeded() int64 {
	used, short := t.bucket.Used()
	if short {
		used += int64(max(t.maxWaiting, t.Waiting()))
	}
	return used
}
