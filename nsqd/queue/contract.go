package queue

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// OverLimit is the policy for a message without a token.
type OverLimit struct {
	// Reject refuses a message whose access delay would exceed MaxDelay. Otherwise the topic
	// accepts every message, and the message waits.
	Reject   bool
	MaxDelay time.Duration
}

// Lease says how long the parts of a share last. The share of an instant judges the messages that
// were eligible at that instant. A lease that ends between two steps therefore counts from its
// end, not from the next step.
type Lease struct {
	// Base is the share from FlexUntil on.
	Base      tokenbucket.Share
	FlexUntil mono.Time
	// From Until on there is no share. mono.Never: the base does not end.
	Until mono.Time
}

// Forever returns the lease of a share that does not end.
func Forever(s tokenbucket.Share) Lease {
	return Lease{Base: s, FlexUntil: mono.Never, Until: mono.Never}
}

// lease is the Lease in force.
//
// Invariant: lapses is the first instant at which the lease changes the share.
type lease struct {
	Lease
	lapses mono.Time
}

func (l *lease) set(to Lease) {
	l.Lease = to
	l.lapses = min(to.FlexUntil, to.Until)
}

// contract decides when a waiting message may leave: at once in an unlimited topic, and never in
// a limited topic whose share is zero.
//
// By the times at which messages get their tokens, a contract (r, b) is exactly the bucket's
// envelope: b + r*dt in any interval dt. The tokens alone do not bound the times at which
// messages leave: a backlog that was paused for an hour would release at once all messages that
// got tokens in the hour. So two rules move a message's arrival:
//   - a message counts as having arrived no earlier than opened, the last instant at which
//     anything but tokens held up the backlog;
//   - a message that got its token more than Config.MaxBackdating ago counts as having arrived
//     MaxBackdating ago, and may have to wait again.
//
// Hence every message leaves within MaxBackdating of its token, and at most b + r*(dt +
// MaxBackdating) messages leave in any interval dt. Waiting for the disk does not hold up the
// backlog. With Config.WriteThrough every message waits for the disk, and a conforming topic must
// not suffer from the disk's batches.
type contract struct {
	limited  bool
	bucket   tokenbucket.Hindsight
	lease    lease
	over     OverLimit
	holdFrom mono.Time // from then on no message of a limited topic leaves
	onHold   bool      // holdFrom held the backlog up in the newest step
	opened   mono.Time // see above; never falls
	heldUp   bool      // by anything but tokens, since the last step
	floor    mono.Time // MaxBackdating before the last step; never falls
	waited   mono.Time // each later arrival got its token at once; never falls
}

func newContract() contract {
	return contract{holdFrom: mono.Never, opened: math.MinInt64, floor: math.MinInt64, waited: math.MinInt64}
}

// Limited reports whether the topic has a contract.
func (c *contract) Limited() bool { return c.limited }

// Share returns the share in force, or the zero Share without a contract.
func (c *contract) Share() tokenbucket.Share { return c.bucket.Share() }

// Tokens returns the bucket's tokens.
func (c *contract) Tokens(now mono.Time) tokenbucket.Tokens { return c.bucket.Tokens(now) }

// eligible returns when a message that arrived at arrival may leave.
func (c *contract) eligible(arrival mono.Time) mono.Time {
	if !c.limited {
		return arrival
	}
	at, _ := c.judgedAt(arrival)
	return c.bucket.Eligible(at)
}

// take takes a token for a message if the token is available by now. take returns when the token
// was available and the access delay: see Message.
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

// judgedAt returns a message's effective arrival time. late is how long the message had a token
// that no longer counts, because the topic did not release the message in time.
func (c *contract) judgedAt(arrival mono.Time) (at mono.Time, late time.Duration) {
	at = max(arrival, c.opened)
	switch {
	case at >= c.floor:
		return at, 0
	case at > c.waited: // spares a late broker the search below
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

// delay returns the access delay of the last of n messages if nothing but tokens holds up the
// backlog from now on. first and last are the arrivals of the first and the last message.
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

// lapse ends the parts of the lease that have ended by now.
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

// HoldFrom stops a limited topic from releasing messages from the given time on. A later HoldFrom
// moves the time. The hold acts as a pause: waiting messages are held up, and the bucket earns
// tokens. Requires: a Tick follows if the previous time has passed.
func (c *contract) HoldFrom(at mono.Time) { c.holdFrom = at }

// mayLeave reports whether messages may leave at now, tokens apart.
func (c *contract) mayLeave(now mono.Time) bool {
	c.onHold = c.limited && !now.Before(c.holdFrom)
	return !c.onHold
}

// The steps of a contract.

// Limit puts the topic under a contract without a share: until SetShare the topic releases
// nothing. In a limited topic, Limit only changes the policy.
func (t *Topic) Limit(over OverLimit) {
	t.over = over
	if !t.limited {
		t.limited = true
		t.backlog.sort()
		t.bucket = tokenbucket.Hindsight{}
		t.lease.set(Forever(tokenbucket.Share{}))
	}
}

// SetShare is SetLeased with a lease that does not end.
func (t *Topic) SetShare(now mono.Time, s tokenbucket.Share, granted tokenbucket.Tokens, fx *Effects) tokenbucket.Tokens {
	return t.SetLeased(now, s, Forever(s), granted, fx)
}

// SetLeased changes the share from now on, for the duration of the lease. It adds granted tokens
// to the bucket and returns the tokens given up. The new share also judges messages that already
// wait. Requires: Limited.
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

// Unlimit ends the topic's contract. Messages that wait for tokens get them now, with their wait
// until now as access delay.
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

// Renew moves the ends of the lease and reports whether there is a flexible part. Renew does not
// bring back a lapsed part. Requires: Limited.
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

// Admit checks whether the topic's policy accepts n messages, and counts a refusal. first and
// last are the arrivals of the first and the last message. ahead is the number of messages that
// were admitted and not appended yet; first is then the arrival of the first of these. With
// Config.WriteThrough the owner then stores the messages and calls Appended. Error:
// *OverLimitError.
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

// BurstNeeded estimates the burst with which no message of the last second would have waited for
// a token; 0 without messages or without a limit. The estimate counts the maximum backlog since
// the last TakeMaxWaiting.
func (t *Topic) BurstNeeded() int64 {
	used, short := t.bucket.Used()
	if short {
		used += int64(max(t.maxWaiting, t.Waiting()))
	}
	return used
}
