package tokenbucket

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	subtoken     = 1_000_000_000_000 // subtokens in a token
	subtokensPer = subtoken / int64(Token)
)

// deepest bounds how deep in debt a bucket can be. No clock reading lasts long
// enough to pay it off, so stopping there forgives nothing.
var deepest = int128{hi: 1 << 62}

// Bucket is the (r, b) envelope by virtual scheduling. The zero value has no
// share: it admits nothing (Eligible is mono.Never) until it is retuned. It is
// a plain value, not safe for concurrent use; copying it forks it.
//
// A message that arrives at a is eligible at
//
//	TAT = max(TAT, a) + T     e = max(a, TAT - b*T)     T = 1/r
//
// which is the unfinished work U, draining at r, of which a message adds 1 and
// waits until U <= b; the bucket holds b - U tokens, a debt where U > b.
//
// Exactness. The bucket counts in subtokens, 1e-12 of a token: a rate of r
// milli-messages per second earns exactly r subtokens per nanosecond, so that
// nothing is ever rounded but e itself, up to the next nanosecond. What is kept
// is not the TAT but
//
//	zero = r * (TAT - b*T) = r*TAT - b     (in subtokens)
//
// that is, r times the instant at which the bucket is empty, or was: it holds
// min(b, r*t - zero) subtokens at t. Keeping the TAT as nanoseconds and a fraction
// lost: b*T reaches 1e21 ns and overflows, zero cannot: |r*t| < 2^103,
// b <= 1e21, and deepest caps the rest.
//
// Invariant (A): after a message was taken at e,  r*e - zero <= b - 1 token.
// Invariant (B): after a message was taken at e,  r*e >= zero.
// Invariant (C): taking a message raises zero by at least 1 token.
//
// Envelope. For messages i < j taken under one share, in the order taken,
// whatever their stamps: (B), (C), (A) in turn give
//
//	r*e_j >= zero_j >= zero_i + (j-i) >= r*e_i - (b-1) + (j-i)
//	j-i+1 <= b + r*(e_j - e_i)
//
// exactly, in integers. The TAT never goes back, so a stamp out of order mints
// no token. (A) is the cap at b: e = a satisfies it because zero starts at or
// above r*a - b; e > a satisfies it when e, rounded up by less than a
// nanosecond, earns less than b - 1 tokens, always so for b >= 2 since r <= 1
// token per nanosecond; for b = 1 Take has to raise zero, and the nanosecond
// lost to rounding is not made up for later.
//
// Envelope over retunes at t_1 .. t_n, between message i under the share
// (r_0, b_0) and message j under (r_n, b_n), g_m tokens granted and f_m returned
// by the m-th:
//
//	j-i+1 <= b_0 + sum(g_m - f_m) + r_0*(t_1 - e_i) + r_1*(t_2 - t_1) + .. + r_n*(e_j - t_n)
//
// Proof: by (A) and (C), at t_1 the bucket holds at most r_0*(t_1 - e_i) + b_0
// less the messages since i, i included; Retune makes that at most g_1 - f_1
// more; from there to t_2 it earns at most r_1*(t_2 - t_1) and pays 1 for each
// message; and by (B) nothing is owed at e_j. So no retune creates a token, and
// tokens that f gave up and another bucket's g granted exist once. The terms
// are signed: they hold also for a message judged after t whose eligible time
// lies before it (it arrived before and the tokens were there).
type Bucket struct {
	// Set by New and Retune only.
	share   Share
	cap     int128    // share.Burst in subtokens
	granted int128    // subtokens that exist from since on and no earlier
	since   mono.Time // when they were granted; no later than the last retune

	zero int128 // see above
}

// New returns a bucket that starts empty at now: a share that is new to its
// holder brings no tokens. A share that Validate refuses is held as the zero
// Share and admits nothing.
func New(s Share, now mono.Time) Bucket {
	var b Bucket
	b.Retune(now, s, 0)
	return b
}

// NewFull returns a bucket that is full at now, and was before: a contract that
// was not used yet. A share that Validate refuses is held as the zero Share.
func NewFull(s Share, now mono.Time) Bucket {
	b := New(s, now)
	b.zero = b.zero.sub(b.cap)
	return b
}

// State is what a Bucket is beside its share, for who keeps millions of them.
type State struct {
	since mono.Time
	zero  int128
}

// State returns the bucket's.
func (b *Bucket) State() State { return State{b.since, b.zero} }

// Restore returns the bucket that had a state and a share. For Take and Eligible, all that
// it held when it was last granted something counts as granted then.
func Restore(share Share, s State) Bucket {
	return Bucket{
		share: share, cap: mul(share.Burst, subtoken), zero: s.zero,
		since: s.since, granted: mul(int64(s.since), int64(share.Rate)).sub(s.zero),
	}
}

// Share returns the share the bucket holds.
func (b *Bucket) Share() Share { return b.share }

// Eligible returns when a message that arrived at at could be released if its
// token were taken now; never before at, and mono.Never if that lies beyond
// the clock's range or there is no share. It changes nothing.
func (b *Bucket) Eligible(at mono.Time) mono.Time {
	e, _ := b.judge(at)
	return e
}

// Take is Eligible, and takes the token. Where it returns mono.Never it took
// nothing. It takes tokens that are still to come: a caller that releases
// messages waits for Eligible first, so that a retune in between is honoured.
func (b *Bucket) Take(at mono.Time) mono.Time {
	e, zero := b.judge(at)
	if e != mono.Never {
		b.zero = zero
	}
	return e
}

// Admit takes n tokens if the bucket holds them at now, for a caller who cannot
// wait, and otherwise nothing; then retry is how long until it would hold them,
// if no other message took any. It is math.MaxInt64 where it never will: without a
// share, and for n above the burst. Requires: n >= 0, and that now does not go
// back between calls.
//
// Envelope, by the same invariants as Take's: the admitted between i and j,
// both included, have at most b + r*(now_j - now_i) tokens.
func (b *Bucket) Admit(n int64, now mono.Time) (ok bool, retry time.Duration) {
	rate := int64(b.share.Rate)
	if rate == 0 || n > b.share.Burst {
		return false, math.MaxInt64
	}
	here := mul(int64(now), rate)
	zero := b.zero
	if full := here.sub(b.cap); zero.less(full) {
		zero = full
	}
	zero = zero.add(mul(n, subtoken))
	if !here.less(zero) && now >= b.since {
		b.zero = zero
		return true, 0
	}
	return false, max(mono.Time(zero.ceilDiv(rate)), b.since).Sub(now)
}

// FullAfter returns how long after now the bucket is full, if no message takes any tokens.
// It is math.MaxInt64 without a share.
func (b *Bucket) FullAfter(now mono.Time) time.Duration {
	if b.share.Rate == 0 {
		return math.MaxInt64
	}
	return max(0, max(mono.Time(b.zero.add(b.cap).ceilDiv(int64(b.share.Rate))), b.since).Sub(now))
}

// judge returns the eligible time of a message that arrived at at, and what
// zero is once its token is taken.
func (b *Bucket) judge(at mono.Time) (e mono.Time, zero int128) {
	rate := int64(b.share.Rate)
	if rate == 0 {
		return mono.Never, b.zero
	}
	here := mul(int64(at), rate)
	zero = b.zero
	if full := here.sub(b.cap); zero.less(full) {
		zero = full
	}
	zero = zero.add(from64(subtoken))
	e = at
	if here.less(zero) {
		e = mono.Time(zero.ceilDiv(rate))
		if b.share.Burst == 1 {
			zero = mul(int64(e), rate) // invariant (A)
		}
	}
	if e < b.since {
		e = b.ungranted(at, e, zero)
	}
	return e, zero
}

// ungranted corrects an eligible time e that lies before the last grant: a
// token that came with the grant was not there before it, so a message that
// would have had to wait without the grant has waited for it. Postcondition:
// e <= result <= since. (A) still holds: since the last retune, no earlier than
// since, zero was never below r*since - b, and a token was just taken.
func (b *Bucket) ungranted(at, e mono.Time, zero int128) mono.Time {
	own := mono.Time(zero.add(b.granted).ceilDiv(int64(b.share.Rate)))
	return min(max(at, own), b.since)
}

// subtokens returns what the bucket holds at now; below zero it is a debt.
func (b *Bucket) subtokens(now mono.Time) int128 {
	held := mul(int64(now), int64(b.share.Rate)).sub(b.zero)
	if b.cap.less(held) {
		return b.cap
	}
	return held
}

// Tokens returns what the bucket holds at now, rounded down: at most its burst,
// and less than zero if messages were taken whose eligible time is still to
// come.
func (b *Bucket) Tokens(now mono.Time) Tokens {
	return Tokens(b.subtokens(now).floorDiv(subtokensPer))
}

// Retune changes the share at now. What the bucket holds at now under the old
// share, and granted on top, is kept as far as it fits under the new burst; the
// rest is given up and returned, rounded down, so that the caller may
// grant it again. A debt stays a debt. Retune creates no token:
//
//	Tokens before + granted >= Tokens after + released
//
// and granted tokens are usable from now on, not for the past. A share that
// Validate refuses is held as the zero Share.
func (b *Bucket) Retune(now mono.Time, s Share, granted Tokens) (released Tokens) {
	if s.Validate() != nil {
		s = Share{}
	}
	held, room := b.subtokens(now), mul(s.Burst, subtoken)
	all := held.add(mul(int64(granted), subtokensPer))
	kept := all
	if room.less(kept) {
		kept = room
	}
	if s != b.share || kept != held {
		b.share, b.cap = s, room
		b.zero = mul(int64(now), int64(s.Rate)).sub(kept)
		if deepest.less(b.zero) {
			b.zero = deepest
		}
		if more := kept.sub(held); more.sign() > 0 {
			b.since, b.granted = now, more
		} else {
			b.since = min(b.since, now) // see ungranted
		}
	}
	return Tokens(all.sub(kept).floorDiv(subtokensPer))
}
