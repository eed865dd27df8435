// Package police identifies a topic's publishers, limits their weights, and detects publishers that
// send more than advised. The package trusts no header field. It measures a publisher's rate. The
// weight is the smaller of the requested and the permitted weight. All connections of an identity
// are one publisher. An identity is as reliable as its issuer: a client_id, or an address of many
// publishers, is only as good as the network.
//
// The package is pure. pacing/fair computes the advice.
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
	// MaxPublishers is the maximum number of identities in a table. All further identities are one
	// publisher of weight 1.
	MaxPublishers = 100_000

	// maxAdviceAge is the maximum age, in intervals, of advice that a publisher may still follow.
	maxAdviceAge = 4
	// slack is the factor by which a publisher may exceed its advice, because evenly sent messages
	// arrive in bunches.
	slack = 1.1
	// A publisher loses its slack if several intervals refused more than the fraction tolerated of
	// its messages, and more than chance messages. Such a publisher ignores its advice
	// and would use the slack permanently. fade is the factor by which each interval reduces the
	// earlier counts.
	tolerated = 0.05
	chance    = 3
	fade      = 63.0 / 64
	// rememberFor is how long a publisher without a connection is remembered, so that a reconnect gains
	// nothing.
	rememberFor = 10 * time.Second
	// The rate is measured from scratch after a pause that is longer than forgotten, and longer
	// than fewMessages messages take at the old rate. Otherwise the mean would be too low for a long time,
	// and a slow publisher has more influence.
	forgotten   = 10 * time.Second
	fewMessages = 8
)

// Identity identifies the owner of connections.
type Identity struct {
	Kind string // source of the identity: "auth", "cert", "client", "addr"
	ID   string // in the format of Group
}

// Publisher is the state of one identity. Owned by its table.
type Publisher struct {
	id          string
	connections int
	requested   uint8
	weight      float64
	meter       fair.Meter
	counted     bool      // a message was counted
	last        mono.Time // time of the latest message

	// Policing.
	interval         uint64 // number of the advice that bucket follows; 0: none
	bucket           tokenbucket.Bucket
	offered, refused float64 // messages; earlier intervals are faded
}

// Table holds a topic's publishers and their advice. Create it with New. Not safe for concurrent
// use.
//
// Bounded over-admission: in any interval dt a publisher is admitted at most (burst + rate·t_s) +
// rate·dt. Here rate is 1.1 times the recent advice, or the advice itself for a publisher known to
// ignore advice.
type Table struct {
	weights    Weights
	publishers map[Identity]*Publisher
	overflow   Publisher
	swept      mono.Time

	advice      fair.Advice
	burst       int64
	span        time.Duration
	interval    uint64                // number of the advice; increases
	recentRates [maxAdviceAge]float64 // recently advised rates, the latest at interval % late; 0: not paced
}

// New returns a table without publishers and without advice.
func New(w Weights) *Table {
	t := &Table{publishers: make(map[Identity]*Publisher), overflow: Publisher{weight: 1}}
	t.SetWeights(w)
	return t
}

// SetWeights replaces the permitted weights.
func (t *Table) SetWeights(w Weights) {
	t.weights = w
	// order: each by itself
	for _, p := range t.publishers {
		p.weight = t.weights.effective(p.id, p.requested)
	}
}

// Enter returns the publisher of a new connection. The caller must call Leave at the end of the
// connection.
func (t *Table) Enter(identity Identity) *Publisher {
	p := t.publishers[identity]
	switch {
	case p != nil:
	case len(t.publishers) >= MaxPublishers:
		p = &t.overflow
	default:
		p = &Publisher{id: identity.ID, weight: t.weights.effective(identity.ID, 0)}
		t.publishers[identity] = p
	}
	p.connections++
	return p
}

// Leave removes a connection from its publisher, at now.
func (t *Table) Leave(p *Publisher, now mono.Time) {
	p.connections--
	p.last = max(p.last, now)
}

// RequestWeight sets the weight that the publisher requests, 1 to 255. The last call applies.
func (t *Table) RequestWeight(p *Publisher, weight uint8) {
	if p != &t.overflow {
		p.requested, p.weight = weight, t.weights.effective(p.id, weight)
	}
}

// Advise sets the advice for an interval of length span that begins at now, with the shared burst
// in messages.
func (t *Table) Advise(a fair.Advice, burst int64, span time.Duration, now mono.Time) {
	t.advice, t.burst, t.span = a, burst, span
	t.interval++
	if t.recentRates[t.interval%maxAdviceAge] = 0; a.Paced {
		t.recentRates[t.interval%maxAdviceAge] = a.Rate
	}
	if now.Sub(t.swept) >= rememberFor {
		t.swept = now
		// order: each on its own
		maps.DeleteFunc(t.publishers, func(_ Identity, p *Publisher) bool {
			return p.connections == 0 && now.Sub(p.last) >= rememberFor
		})
	}
}

// Advice returns the advice in force, the length of its interval, and its number, which increases
// with each advice.
func (t *Table) Advice() (a fair.Advice, span time.Duration, number uint64) {
	return t.advice, t.span, t.interval
}

// Allowance returns what one connection of the publisher may send. The publisher's connections have
// equal parts. The burst is at least 2, because with 1 a sender that wakes up late loses a token
// permanently.
func (t *Table) Allowance(p *Publisher) (rate tokenbucket.Rate, burst int64) {
	n := max(p.connections, 1)
	rate = tokenbucket.PerSecond(t.advice.RateOf(p.weight) / float64(n))
	return max(rate, tokenbucket.MinRate), max(t.advice.BurstOf(p.weight, t.burst)/int64(n), 2)
}

// Each calls f for each publisher, in no particular order, except the publishers beyond
// MaxPublishers.
func (t *Table) Each(f func(Identity, *Publisher)) {
	// order: the caller's
	for identity, p := range t.publishers {
		f(identity, p)
	}
}

// Count reports to l the n messages that arrived at time at, and updates the publisher's rate. If
// the rate is unknown after a pause, the messages do not count as additional publishers.
func (p *Publisher) Count(l *fair.Level, n int, at mono.Time) {
	if pause := at.Sub(p.last); pause > forgotten && pause.Seconds()*p.meter.Rate() > fewMessages {
		p.meter, p.counted = fair.Meter{}, false
	}
	p.last = max(p.last, at)
	for range n {
		rate := l.Measure(&p.meter, p.last)
		if rate == 0 && p.counted {
			rate = math.MaxFloat64
		}
		p.counted = true
		l.Message(p.weight, rate)
	}
}

// Rate returns the last measured rate, in messages per second.
func (p *Publisher) Rate() float64 { return p.meter.Rate() }

// Weight returns the effective weight, which may be less than requested.
func (p *Publisher) Weight() float64 { return p.weight }

// Admit reports whether n messages that arrived at at are within the publisher's advice. If not,
// Admit takes nothing, and retry is the time until Admit would admit n messages. If the publisher
// has no debt, Admit admits more messages than the burst, as a debt. While a publisher may not know
// of its pacing yet, Admit admits all messages.
func (t *Table) Admit(p *Publisher, n int, at mono.Time) (ok bool, retry time.Duration) {
	maxRate := 0.0
	for _, rate := range t.recentRates {
		if rate == 0 {
			p.interval = 0
			return true, 0
		}
		maxRate = max(maxRate, rate)
	}
	at = max(at, p.last)
	if p.interval != t.interval {
		t.retune(p, maxRate, at)
	}
	burst := p.bucket.Share().Burst
	p.offered += float64(n)
	if ok, retry = p.bucket.Admit(min(int64(n), burst), at); !ok {
		p.refused += float64(n)
		return false, retry
	}
	if excess := int64(n) - burst; excess > 0 {
		p.bucket.Retune(at, p.bucket.Share(), -tokenbucket.Tokens(excess)*tokenbucket.Token)
	}
	return true, 0
}

// retune updates the publisher's bucket to the current interval. most is the highest rate that the
// publisher may have been advised.
func (t *Table) retune(p *Publisher, maxRate float64, at mono.Time) {
	rate := slack * maxRate * p.weight
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
