package sender

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// valid is how many intervals advice counts for: its broker may be gone.
const valid = 10

// Advice is what a broker's reply says.
type Advice struct {
	Paced    bool             // keep to Rate and Burst; without, send freely
	Overload bool             // informative
	Rate     tokenbucket.Rate // this publisher's, weight included
	Burst    int64            // messages
	Interval time.Duration    // until the broker's next advice
}

// Pace is where a publisher stands.
type Pace struct {
	Paced bool
	Rate  tokenbucket.Rate // 0 while not paced
	Burst int64            // 0 while not paced
	// Wait is how long until a message may be sent; it grows beyond one gap where
	// Report counted messages ahead of the pace.
	Wait time.Duration
}

// Bucket keeps one publisher to the latest advice. The zero Bucket lets
// everything pass. It is not safe for concurrent use.
type Bucket struct {
	advice Advice
	until  mono.Time // the advice counts before it
	bucket tokenbucket.Bucket
	last   mono.Time // a message was sent
	sent   bool
}

// Advise takes over advice that came at now. Tokens are kept as far as they fit;
// none come with the advice, except those that the time since the last message
// has earned when pacing begins.
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
	b.advice, b.until = a, now.Add(valid*max(a.Interval, 0))
}

// paced reports whether there is advice to keep to.
func (b *Bucket) paced(now mono.Time) bool { return b.advice.Paced && now < b.until }

// Wait takes the tokens of n messages, n >= 0, that are to be sent at now and
// returns 0, or takes nothing and returns how long to wait before asking again;
// ask earlier if advice comes. More messages than the burst are let go when the
// bucket is full, and what they lack is paid before the next.
//
// Requires: now does not go back.
func (b *Bucket) Wait(n int, now mono.Time) time.Duration {
	if !b.paced(now) {
		b.last, b.sent = now, true
		return 0
	}
	if ok, retry := b.bucket.Admit(min(int64(n), b.advice.Burst), now); !ok {
		return min(retry, b.until.Sub(now))
	}
	b.owe(n-int(min(int64(n), b.advice.Burst)), now)
	return 0
}

// Report counts n messages that are sent at now whether they may or not.
func (b *Bucket) Report(n int, now mono.Time) { b.owe(n, now) }

func (b *Bucket) owe(n int, now mono.Time) {
	b.last, b.sent = now, true
	if b.paced(now) {
		b.bucket.Retune(now, b.bucket.Share(), -tokenbucket.Tokens(n)*tokenbucket.Token)
	}
}

// Pace returns where the publisher stands at now.
func (b *Bucket) Pace(now mono.Time) Pace {
	if !b.paced(now) {
		return Pace{}
	}
	return Pace{Paced: true, Rate: b.advice.Rate, Burst: b.advice.Burst, Wait: b.bucket.Eligible(now).Sub(now)}
}
