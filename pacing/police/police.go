package police

import (
	"maps"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	// MaxPublishers is how many identities a table knows at most; those beyond are one
	// publisher together, of weight 1.
	MaxPublishers = 100_000

	// late is how many intervals old the advice may be that a publisher keeps to.
	late = 4
	// slack is what a publisher may send above its advice: messages that left evenly
	// arrive in bunches.
	slack = 1.1
	// A publisher of which more than tolerated of the messages were refused over some
	// intervals, and more than chance has not, has no slack: it does not listen, and
	// would have slack for good. fade is what an interval leaves of those before.
	tolerated = 0.05
	chance    = 3
	fade      = 63.0 / 64
	// kept is how long a publisher without a connection is known, so that
	// connecting anew brings nothing.
	kept = 10 * time.Second
	// The rate is measured anew after a pause that is longer than forgotten and than
	// few messages take at that rate: its mean would be far too low for long, and who
	// is slow counts for more.
	forgotten = 10 * time.Second
	few       = 8
)

// Identity is whom connections belong to.
type Identity struct {
	Kind string // how it is known: "auth", "cert", "client", "addr"
	ID   string // as groups have it
}

// Publisher is what is known of one identity. It belongs to its table.
type Publisher struct {
	id          string
	connections int
	wish        uint8
	weight      float64
	meter       fair.Meter
	known       bool      // a message was counted
	last        mono.Time // the latest message

	// Of policing.
	interval         uint64 // of the advice that bucket follows; 0: none
	bucket           tokenbucket.Bucket
	offered, refused float64 // messages, those of earlier intervals faded
}

// Table is a topic's publishers, and the advice that they have. New makes one. Not
// safe for concurrent use.
//
// Bounded over-admission: in any interval dt a publisher is admitted at most
// (burst + rate·t_s) + rate·dt, with the rate of what it was told lately, times 1.1
// until it is seen not to listen.
type Table struct {
	weights    Weights
	publishers map[Identity]*Publisher
	others     Publisher
	swept      mono.Time

	advice   fair.Advice
	burst    int64
	span     time.Duration
	interval uint64        // of the advice; grows
	lately   [late]float64 // rates advised, the latest at interval % late; 0: not paced
}

// New returns a table without publishers, that are told nothing.
func New(w Weights) *Table {
	t := &Table{publishers: make(map[Identity]*Publisher), others: Publisher{weight: 1}}
	t.SetWeights(w)
	return t
}

// SetWeights replaces what publishers are entitled to.
func (t *Table) SetWeights(w Weights) {
	t.weights = w
	// order: each by itself
	for _, p := range t.publishers {
		p.weight = t.weights.of(p.id, p.wish)
	}
}

// Enter returns the publisher that a new connection belongs to, until Leave.
func (t *Table) Enter(is Identity) *Publisher {
	p := t.publishers[is]
	switch {
	case p != nil:
	case len(t.publishers) >= MaxPublishers:
		p = &t.others
	default:
		p = &Publisher{id: is.ID, weight: t.weights.of(is.ID, 0)}
		t.publishers[is] = p
	}
	p.connections++
	return p
}

// Leave takes a connection off its publisher, at now.
func (t *Table) Leave(p *Publisher, now mono.Time) {
	p.connections--
	p.last = max(p.last, now)
}

// Wish is the weight that the publisher wants, 1 to 255; of several wishes the last
// counts.
func (t *Table) Wish(p *Publisher, weight uint8) {
	if p != &t.others {
		p.wish, p.weight = weight, t.weights.of(p.id, weight)
	}
}

// Advise tells publishers the advice for an interval of span that begins at now, with
// the burst, in messages, that they share.
func (t *Table) Advise(a fair.Advice, burst int64, span time.Duration, now mono.Time) {
	t.advice, t.burst, t.span = a, burst, span
	t.interval++
	if t.lately[t.interval%late] = 0; a.Paced {
		t.lately[t.interval%late] = a.Rate
	}
	if now.Sub(t.swept) >= kept {
		t.swept = now
		// order: likewise
		maps.DeleteFunc(t.publishers, func(_ Identity, p *Publisher) bool {
			return p.connections == 0 && now.Sub(p.last) >= kept
		})
	}
}

// Advice returns the advice in force, the length of its interval, and its number,
// which grows from each to the next.
func (t *Table) Advice() (a fair.Advice, span time.Duration, number uint64) {
	return t.advice, t.span, t.interval
}

// Told is what one connection of the publisher may send: each has its part. The burst
// is at least 2: with 1, who wakes up late has lost a token for good.
func (t *Table) Told(p *Publisher) (rate tokenbucket.Rate, burst int64) {
	n := max(p.connections, 1)
	rate = tokenbucket.PerSecond(t.advice.RateOf(p.weight) / float64(n))
	return max(rate, tokenbucket.MinRate), max(t.advice.BurstOf(p.weight, t.burst)/int64(n), 2)
}

// Each calls f with each publisher, in no order, but not for those beyond MaxPublishers.
func (t *Table) Each(f func(Identity, *Publisher)) {
	// order: the caller's
	for is, p := range t.publishers {
		f(is, p)
	}
}

// Count tells l of n messages that arrived at at, and measures the publisher's rate by
// them. While that is not known, as after a pause, they are one publisher's all the
// same.
func (p *Publisher) Count(l *fair.Level, n int, at mono.Time) {
	if pause := at.Sub(p.last); pause > forgotten && pause.Seconds()*p.meter.Rate() > few {
		p.meter, p.known = fair.Meter{}, false
	}
	p.last = max(p.last, at)
	for range n {
		rate := l.Measure(&p.meter, p.last)
		if rate == 0 && p.known {
			rate = math.MaxFloat64
		}
		p.known = true
		l.Message(p.weight, rate)
	}
}

// Rate returns the rate as last measured, in messages per second.
func (p *Publisher) Rate() float64 { return p.meter.Rate() }

// Weight returns what counts, which may be less than was wished for.
func (p *Publisher) Weight() float64 { return p.weight }

// Admit asks whether n messages that arrived at at are within what the publisher was
// told; if not, nothing is taken, and retry is how long until they would be. More than
// its burst are let go when nothing is owed, and paid for afterwards. All are as long
// as some may not have heard that they are paced.
func (t *Table) Admit(p *Publisher, n int, at mono.Time) (ok bool, retry time.Duration) {
	most := 0.0
	for _, rate := range t.lately {
		if rate == 0 {
			p.interval = 0
			return true, 0
		}
		most = max(most, rate)
	}
	at = max(at, p.last)
	if p.interval != t.interval {
		t.retune(p, most, at)
	}
	burst := p.bucket.Share().Burst
	p.offered += float64(n)
	if ok, retry = p.bucket.Admit(min(int64(n), burst), at); !ok {
		p.refused += float64(n)
		return false, retry
	}
	if over := int64(n) - burst; over > 0 {
		p.bucket.Retune(at, p.bucket.Share(), -tokenbucket.Tokens(over)*tokenbucket.Token)
	}
	return true, 0
}

// retune brings the publisher's bucket up to the interval. most: of the rates that it
// may have been told.
func (t *Table) retune(p *Publisher, most float64, at mono.Time) {
	rate := slack * most * p.weight
	if p.refused > max(tolerated*p.offered, chance) {
		rate = t.advice.Rate * p.weight
	}
	burst := float64(t.advice.BurstOf(p.weight, t.burst)) + math.Ceil(rate*t.span.Seconds())
	share := tokenbucket.Share{
		Rate:  min(max(tokenbucket.PerSecond(rate), tokenbucket.MinRate), tokenbucket.MaxRate),
		Burst: int64(min(burst, float64(tokenbucket.MaxBurst))),
	}
	if p.interval == 0 {
		p.bucket = tokenbucket.NewFull(share, at)
	} else {
		p.bucket.Retune(at, share, 0)
	}
	p.interval, p.offered, p.refused = t.interval, fade*p.offered, fade*p.refused
}
