package queue

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

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

// lapse ends what has ended by now. Requires: limited.
func (t *Topic) lapse(now mono.Time) {
	l := &t.lease
	if now.Before(l.lapses) {
		return
	}
	to := l.Lease
	if !now.Before(to.FlexUntil) && to.FlexUntil <= to.Until {
		t.bucket.Retune(to.FlexUntil, to.Base, 0)
		to.FlexUntil = mono.Never
	}
	if !now.Before(to.Until) {
		t.bucket.Retune(to.Until, tokenbucket.Share{}, 0)
		to = Forever(tokenbucket.Share{})
	}
	l.set(to)
}
