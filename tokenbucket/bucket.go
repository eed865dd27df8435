// Package tokenbucket implements the (r, b) envelope for all its users: the broker that releases
// messages, the ledger that moves shares, the fitting that replays traces, and the simulator. The
// package is pure: it reads no clock, draws no random numbers, and knows nothing of topics,
// messages or brokers. Times are mono.Time.
//
// bucket.go is the limiter, exact in integers, with its guarantee and the proof. hindsight.go is
// the limiter for messages that are judged out of order, with the stronger guarantee that a broker
// needs. theory.go computes expected delays under Poisson arrivals. profile.go finds the burst that
// a recorded trace needs. Read nsqd/broker next for how a message waits until it is eligible,
// tbadaptor/ledger for who may call Retune, and admission/table for callers that cannot wait.
package tokenbucket

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	subtoken     = 1_000_000_000_000 // subtokens per token
	subtokensPer = subtoken / int64(Token)
)

// deepest limits a bucket's debt. No clock runs long enough to pay off this debt, so the limit
// forgives nothing.
var deepest = int128{hi: 1 << 62}

// Bucket implements the (r, b) envelope by virtual scheduling. The zero value has no share. It
// admits nothing (Eligible is mono.Never) until a Retune. A Bucket is a plain value and not safe
// for concurrent use. A copy is an independent bucket.
//
// The eligible time e of a message that arrives at a is
//
//	TAT = max(TAT, a) + T     e = max(a, TAT - b*T)     T = 1/r
//
// Equivalently: the unfinished work U drains at rate r, each message adds 1 to U, and the message
// waits until U <= b. The bucket holds b - U tokens, and has a debt if U > b.
//
// Exactness. The bucket counts in subtokens, 1e-12 of a token: a rate of r milli-messages per
// second earns exactly r subtokens per nanosecond. So only e is rounded, up to the next nanosecond.
// The bucket does not store the TAT but
//
//	zero = r * (TAT - b*T) = r*TAT - b     (in subtokens)
//
// which is r times the instant at which the bucket is, or was, empty. At t the bucket holds min(b,
// r*t - zero) subtokens. A TAT in nanoseconds with a fraction would overflow, because b*T reaches
// 1e21 ns. zero cannot overflow: |r*t| < 2^103, b <= 1e21, and deepest caps the rest.
//
// Invariant (A): after a message was taken at e,  r*e - zero <= b - 1 token. Invariant (B): after a
// message was taken at e,  r*e >= zero. Invariant (C): taking a message raises zero by at least 1
// token.
//
// Envelope. For messages i < j taken under one share, in the order taken, with any stamps, (B), (C)
// and (A) in turn give
//
//	r*e_j >= zero_j >= zero_i + (j-i) >= r*e_i - (b-1) + (j-i)
//	j-i+1 <= b + r*(e_j - e_i)
//
// exactly, in integers. The TAT never decreases, so a stamp out of order creates no token. (A) is
// the cap at b. If e = a, (A) holds because zero starts at or above r*a - b. If e > a, (A) holds if
// e, rounded up by less than a nanosecond, earns less than b - 1 tokens. That is always true for b
// >= 2, because r is at most 1 token per nanosecond. For b = 1 Take has to raise zero, and the
// nanosecond lost to rounding is not regained.
//
// Envelope over retunes at t_1 .. t_n, between message i under the share (r_0, b_0) and message j
// under (r_n, b_n), with g_m tokens granted and f_m returned by the m-th retune:
//
//	j-i+1 <= b_0 + sum(g_m - f_m) + r_0*(t_1 - e_i) + r_1*(t_2 - t_1) + .. + r_n*(e_j - t_n)
//
// Proof: by (A) and (C), at t_1 the bucket holds at most r_0*(t_1 - e_i) + b_0 less the messages
// from i on, including i. Retune adds at most g_1 - f_1. From t_1 to t_2 the bucket earns at most
// r_1*(t_2 - t_1) and pays 1 for each message. By (B) the bucket has no debt at e_j. So no retune
// creates a token, and tokens that one bucket returned (f) and another bucket was granted (g) exist
// once. The terms are signed. They also hold for a message that arrived before t, found its tokens,
// and is judged after t with an eligible time before t.
type Bucket struct {
	// Set by New and Retune only.
	share   Share
	cap     int128    // share.Burst in subtokens
	granted int128    // subtokens that exist from since on only
	since   mono.Time // time of the grant; no later than the last retune

	zero int128 // see above
}

// New returns a bucket that is empty at now, because a new share brings no tokens. A share that
// Validate refuses becomes the zero Share, which admits nothing.
func New(s Share, now mono.Time) Bucket {
	var b Bucket
	b.Retune(now, s, 0)
	return b
}

// NewFull returns a bucket that is full at now and was full before, like an unused contract. A
// share that Validate refuses becomes the zero Share.
func NewFull(s Share, now mono.Time) Bucket {
	b := New(s, now)
	b.zero = b.zero.sub(b.cap)
	return b
}

// State is a Bucket without its share, for an owner of millions of buckets.
type State struct {
	since mono.Time
	zero  int128
}

// State returns the bucket's state.
func (b *Bucket) State() State { return State{b.since, b.zero} }

// Restore returns the bucket with the given share and state. For Take and Eligible, everything that
// the bucket held at its last grant counts as granted then.
func Restore(share Share, s State) Bucket {
	return Bucket{
		share: share, cap: mul(share.Burst, subtoken), zero: s.zero,
		since: s.since, granted: mul(int64(s.since), int64(share.Rate)).sub(s.zero),
	}
}

// Share returns the share the bucket holds.
func (b *Bucket) Share() Share { return b.share }

// Eligible returns when a message that arrived at at could be released if it took its token now.
// The result is never before at. It is mono.Never without a share or beyond the clock's range.
// Eligible changes nothing.
func (b *Bucket) Eligible(at mono.Time) mono.Time {
	e, _ := b.judge(at)
	return e
}

// Take is Eligible and also takes the token. If it returns mono.Never, it took nothing. Take also
// takes future tokens. So a caller that releases messages waits until Eligible before Take, in
// order to respect a retune meanwhile.
func (b *Bucket) Take(at mono.Time) mono.Time {
	e, zero := b.judge(at)
	if e != mono.Never {
		b.zero = zero
	}
	return e
}

// Admit takes n tokens if the bucket holds them at now, for a caller that cannot wait. Otherwise it
// takes nothing, and retry is the time until the bucket would hold n tokens if no other message
// took any. retry is math.MaxInt64 without a share and for n above the burst. Requires: n >= 0; now
// does not decrease between calls.
//
// Envelope, by Take's invariants: the messages admitted from i to j, including both, have at most b
// + r*(now_j - now_i) tokens.
func (b *Bucket) Admit(n int64, now mono.Time) (ok bool, retry time.Duration) {
	rate := int64(b.share.Rate)
	if rate == 0 || n > b.share.Burst {
		return false, math.MaxInt64
	}
	position := mul(int64(now), rate)
	zero := b.zero
	if full := position.sub(b.cap); zero.less(full) {
		zero = full
	}
	zero = zero.add(mul(n, subtoken))
	if !position.less(zero) && now >= b.since {
		b.zero = zero
		return true, 0
	}
	return false, max(mono.Time(zero.ceilDiv(rate)), b.since).Sub(now)
}

// FullAfter returns the time from now until the bucket is full, if no message takes tokens. It is
// math.MaxInt64 without a share.
func (b *Bucket) FullAfter(now mono.Time) time.Duration {
	if b.share.Rate == 0 {
		return math.MaxInt64
	}
	return max(0, max(mono.Time(b.zero.add(b.cap).ceilDiv(int64(b.share.Rate))), b.since).Sub(now))
}

// judge returns the eligible time of a message that arrived at at, and the value of zero after its
// token is taken.
func (b *Bucket) judge(at mono.Time) (e mono.Time, zero int128) {
	rate := int64(b.share.Rate)
	if rate == 0 {
		return mono.Never, b.zero
	}
	position := mul(int64(at), rate)
	zero = b.zero
	if full := position.sub(b.cap); zero.less(full) {
		zero = full
	}
	zero = zero.add(from64(subtoken))
	e = at
	if position.less(zero) {
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

// ungranted corrects an eligible time e before the last grant. Tokens of the grant did not exist
// before it, so a message that would have waited without the grant must wait for the grant.
// Postcondition: e <= result <= since. (A) still holds: since the last retune, which is no earlier
// than since, zero was never below r*since - b, and a token was just taken.
func (b *Bucket) ungranted(at, e mono.Time, zero int128) mono.Time {
	earliest := mono.Time(zero.add(b.granted).ceilDiv(int64(b.share.Rate)))
	return min(max(at, earliest), b.since)
}

// subtokens returns what the bucket holds at now; a negative value is a debt.
func (b *Bucket) subtokens(now mono.Time) int128 {
	held := mul(int64(now), int64(b.share.Rate)).sub(b.zero)
	if b.cap.less(held) {
		return b.cap
	}
	return held
}

// Tokens returns what the bucket holds at now, rounded down: at most its burst, and less than zero
// if taken messages have eligible times after now.
func (b *Bucket) Tokens(now mono.Time) Tokens {
	return Tokens(b.subtokens(now).floorDiv(subtokensPer))
}

// Retune changes the share at now. The bucket keeps its tokens at now under the old share, plus
// granted, as far as they fit under the new burst. It returns the rest, rounded down, so that the
// caller may grant them again. A debt stays a debt. Retune creates no token:
//
//	Tokens before + granted >= Tokens after + released
//
// Granted tokens are usable from now on, not for the past. A share that Validate refuses becomes
// the zero Share.
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
