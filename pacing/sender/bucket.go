// Package sender implements a paced publisher: Bucket keeps a publisher to the rate and burst that
// a broker advised. The package has no clock and does not wait. Its users, the client library and
// the simulator, wait. pacing/fair computes the advice.
package sender

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// valid is the number of intervals after which advice expires, because its broker may be gone.
const valid = 10

// Advice is the advice in a broker's reply.
type Advice struct {
	Paced    bool             // keep to Rate and Burst; otherwise send freely
	Overload bool             // for information
	Rate     tokenbucket.Rate // of this publisher, weight included
	Burst    int64            // messages
	Interval time.Duration    // until the broker's next advice
}

// Pace is a publisher's current pace.
type Pace struct {
	Paced bool
	Rate  tokenbucket.Rate // 0 while not paced
	Burst int64            // 0 while not paced
	// Wait is the time until the next message may be sent. Messages that Report counted ahead
	// of the pace extend Wait beyond one gap.
	Wait time.Duration
}

// Bucket keeps one publisher to the latest advice. The zero Bucket admits everything.
// Not safe for concurrent use.
type Bucket struct {
	advice  Advice
	expires mono.Time // end of the advice's validity
	bucket  tokenbucket.Bucket
	last    mono.Time // time of the last message
	sent    bool
}

// Advise applies advice that came at now. The bucket keeps the tokens that fit. Advice
// brings no tokens, except that at the start of pacing the time since the last message counts.
func (b *Bucket) Advise(a Advice, now mono.Time) {
	share := tokenbucket.Share{
		Rate:  min(max(a.Rate, tokenbucket.MinRate), tokenbucket.MaxRate),
		Burst: min(max(a.Burst, tokenbucket.MinBurst), tokenbucket.MaxBurst),
	}
	switch {
	case !a.Paced:
	case b.paced(now):
		b.bucket.Retune(now, share, 0)
	case !b.sent:
		b.bucket = tokenbucket.NewFull(share, now)
	default:
		b.bucket = tokenbucket.New(share, b.last)
	}
	a.Rate, a.Burst = share.Rate, share.Burst
	b.advice, b.expires = a, now.Add(valid*max(a.Interval, 0))
}

func (b *Bucket) paced(now mono.Time) bool { return b.advice.Paced && now < b.expires }

// Wait takes the tokens of n messages, n >= 0, to be sent at now, and returns 0. Or it takes
// nothing and returns how long to wait before the next call; call earlier if advice comes. A full
// bucket admits more messages than the burst, and the missing tokens become a debt.
//
// Requires: now does not decrease.
func (b *Bucket) Wait(n int, now mono.Time) time.Duration {
	if !b.paced(now) {
		b.last, b.sent = now, true
		return 0
	}
	if ok, retry := b.bucket.Admit(min(int64(n), b.advice.Burst), now); !ok {
		return min(retry, b.expires.Sub(now))
	}
	b.addDebt(n-int(min(int64(n), b.advice.Burst)), now)
	return 0
}

// Report counts n messages sent at now regardless of the pace.
func (b *Bucket) Report(n int, now mono.Time) { b.addDebt(n, now) }

func (b *Bucket) addDebt(n int, now mono.Time) {
	b.last, b.sent = now, true
	if b.paced(now) {
		b.bucket.Retune(now, b.bucket.Share(), -tokenbucket.Tokens(n)*tokenbucket.Token)
	}
}

// Pace returns the publisher's pace at now.
func (b *Bucket) Pace(now mono.Time) Pace {
	if !b.paced(now) {
		return Pace{}
	}
	return Pace{Paced: true, Rate: b.advice.Rate, Burst: b.advice.Burst, Wait: b.bucket.Eligible(now).Sub(now)}
}
