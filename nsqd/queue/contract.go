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
// Invariant: ends is the first instant at which the lease changes the share.
type lease struct {
	terms Lease
	ends  mono.Time
}

func (l *lease) set(to Lease) {
	l.terms = to
	l.ends = min(to.FlexUntil, to.Until)
}

// Contract decides when a waiting message may leave: at once in an unlimited topic, and never in
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
type Contract struct {
	limited  bool
	bucket   tokenbucket.Hindsight
	lease    lease
	over     OverLimit
	holdFrom func() mono.Time // Config.HoldFrom
	onHold   bool             // holdFrom held the backlog up in the newest step
	opened   mono.Time        // see above; never falls
	blocked  bool             // by anything but tokens, since the last step
	floor    mono.Time        // MaxBackdating before the last step; never falls
	lastWait mono.Time        // each later arrival got its token at once; never falls
}

func newContract(holdFrom func() mono.Time) Contract {
	return Contract{holdFrom: holdFrom, opened: math.MinInt64, floor: math.MinInt64, lastWait: math.MinInt64}
}

// Limited reports whether the topic has a contract.
func (c *Contract) Limited() bool { return c.limited }

// Share returns the share in force, or the zero Share without a contract.
func (c *Contract) Share() tokenbucket.Share { return c.bucket.Share() }

// Rejects reports whether the policy refuses messages that would wait too long for a token.
func (c *Contract) Rejects() bool { return c.limited && c.over.Reject }

// BurstNeeded estimates the burst with which no message of the last second would have waited for
// a token; 0 without messages or without a limit. maxWaiting is the maximum backlog of the second.
func (c *Contract) BurstNeeded(maxWaiting int) int64 {
	used, short := c.bucket.Used()
	if short {
		used += int64(maxWaiting)
	}
	return used
}

// Tokens returns the bucket's tokens.
func (c *Contract) Tokens(now mono.Time) tokenbucket.Tokens { return c.bucket.Tokens(now) }

// eligible returns when a message that arrived at arrival may leave.
func (c *Contract) eligible(arrival mono.Time) mono.Time {
	if !c.limited {
		return arrival
	}
	effective, _ := c.effective(arrival)
	return c.bucket.Eligible(effective)
}

// take takes a token for a message if the token is available by now. take returns when the token
// was available and the access delay: see Message.
func (c *Contract) take(arrival, now mono.Time) (eligible mono.Time, access time.Duration, ok bool) {
	if !c.limited {
		return arrival, 0, !now.Before(arrival)
	}
	effective, late := c.effective(arrival)
	e, ok := c.bucket.Take(effective, now)
	arrived := max(arrival, c.opened)
	if !ok {
		c.lastWait = max(c.lastWait, arrived)
	} else if e > effective {
		c.lastWait = max(c.lastWait, e)
	}
	return e, e.Sub(arrived) - late, ok
}

// effective returns a message's effective arrival time. late is how long the message had a token
// that no longer counts, because the topic did not release the message in time.
func (c *Contract) effective(arrival mono.Time) (effective mono.Time, late time.Duration) {
	effective = max(arrival, c.opened)
	switch {
	case effective >= c.floor:
		return effective, 0
	case effective > c.lastWait: // spares a late broker the search below
		return c.floor, c.floor.Sub(effective)
	}
	if e := c.bucket.Eligible(effective); e < c.floor {
		return c.floor, c.floor.Sub(e)
	}
	return effective, 0
}

// observe moves the bounds of effective up to now.
func (c *Contract) observe(now mono.Time, backdating time.Duration) {
	c.floor = max(c.floor, now.Add(-backdating))
	if c.blocked {
		c.opened = max(c.opened, now)
	}
}

// delay returns the access delay of the last of n messages if nothing but tokens holds up the
// backlog from now on. first and last are the arrivals of the first and the last message.
func (c *Contract) delay(n int, first, last mono.Time) time.Duration {
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
func (c *Contract) lapse(now mono.Time) {
	l := &c.lease
	if !c.limited || now.Before(l.ends) {
		return
	}
	to := l.terms
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

// mayLeave reports whether messages may leave at now, tokens apart.
func (c *Contract) mayLeave(now mono.Time) bool {
	c.onHold = c.limited && c.holdFrom != nil && !now.Before(c.holdFrom())
	return !c.onHold
}

// The steps of a contract.

// Limit puts the topic under a contract without a share: until SetShare the topic releases
// nothing. In a limited topic, Limit only changes the policy.
func (t *Topic) Limit(over OverLimit) {
	t.contract.over = over
	if !t.contract.limited {
		t.contract.limited = true
		t.backlog.sort()
		t.contract.bucket = tokenbucket.Hindsight{}
		t.contract.lease.set(Forever(tokenbucket.Share{}))
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
	if !t.contract.limited {
		panic("queue: a share for a topic without a limit")
	}
	t.contract.lapse(now)
	released := t.contract.bucket.Retune(now, s, granted)
	t.contract.lease.set(of)
	t.advance(now, fx)
	return released
}

// Unlimit ends the topic's contract. Messages that wait for tokens get them now, with their wait
// until now as access delay.
func (t *Topic) Unlimit(now mono.Time, fx *Effects) {
	if !t.contract.limited {
		return
	}
	most := tokenbucket.Share{Rate: tokenbucket.MaxRate, Burst: tokenbucket.MaxBurst}
	t.SetShare(now, most, tokenbucket.Tokens(tokenbucket.MaxBurst)*tokenbucket.Token, fx)
	t.contract.limited, t.contract.over, t.contract.bucket = false, OverLimit{}, tokenbucket.Hindsight{}
	t.backlog.byArrival = false
	t.contract.lease.set(Forever(tokenbucket.Share{}))
	t.advance(now, fx)
}

// Renew moves the ends of the lease and reports whether there is a flexible part. Renew does not
// bring back a lapsed part. Requires: Limited.
func (t *Topic) Renew(now, flexUntil, until mono.Time, fx *Effects) (flex bool) {
	if !t.contract.limited {
		panic("queue: a lease for a topic without a limit")
	}
	t.contract.lapse(now)
	to := t.contract.lease.terms
	if flex = to.FlexUntil != mono.Never; flex {
		to.FlexUntil = flexUntil
	}
	if !t.contract.bucket.Share().IsZero() {
		to.Until = until
	}
	t.contract.lease.set(to)
	t.advance(now, fx)
	return flex
}

// Admit checks whether the topic's policy accepts n messages, and counts a refusal. first and
// last are the arrivals of the first and the last message. ahead is the number of messages that
// were admitted and not appended yet; first is then the arrival of the first of these. With
// Config.WriteThrough the owner then stores the messages and calls Appended. Error:
// *OverLimitError.
func (t *Topic) Admit(now mono.Time, ahead, n int, first, last mono.Time) error {
	if n == 0 || !t.contract.Rejects() {
		return nil
	}
	t.contract.observe(now, t.log.cfg.MaxBackdating)
	if t.backlog.waiting.Len() > 0 {
		first = min(first, t.backlog.waiting.Front().Arrival)
	}
	if d := t.contract.delay(t.backlog.Waiting()+ahead+n, first, last); d > t.contract.over.MaxDelay {
		return t.backlog.Refuse(&OverLimitError{Delay: d, Limit: t.contract.over.MaxDelay}, n)
	}
	return nil
}
