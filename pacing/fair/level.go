package fair

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// The constants of a Level.
const (
	drain = 0.5  // the paper's k_q: the part of the standing backlog that an interval takes off
	slack = 0.05 // the backlog that is not drained, in intervals' worth of capacity
	near  = 0.9  // of its advice: below, a publisher counts as limited by itself
	rise  = 1.1  // most by which the rate grows from interval to interval
)

// The bounds of an interval: Span. longest is what the wire's 16 bits of
// milliseconds hold.
const (
	shortest = 50 * time.Millisecond
	usual    = time.Second
	longest  = 65 * time.Second
	// minMessages is how many messages of capacity an interval has: fewer say nothing
	// about who sends.
	minMessages = 50
)

// remembered is how many intervals old the advice may be that a publisher
// follows, and one: what it was told is the least of them.
const remembered = 4

// Advice is what all publishers are told until the next interval ends.
type Advice struct {
	// Paced: publishers keep to Rate. Otherwise they share the burst freely, and
	// Rate is what they would be told.
	Paced bool
	// Rate is γ, in messages per second and unit of weight; it is at most the
	// capacity.
	Rate float64
	// SumWeights is the weight of all who sent.
	SumWeights float64
	// LimitedShare is the part, 0 to 1, of the messages that came from
	// publishers who sent less than they might.
	LimitedShare float64
	// Overload: more came than the capacity, on top of a backlog of a whole
	// interval.
	Overload bool
}

// RateOf returns what a publisher of a weight may send, in messages per second.
func (a Advice) RateOf(weight float64) float64 { return a.Rate * weight }

// BurstOf returns a publisher's part of a burst, in messages, at least 1.
func (a Advice) BurstOf(weight float64, burst int64) int64 {
	if a.SumWeights <= weight {
		return max(1, burst)
	}
	return max(1, int64(float64(burst)*weight/a.SumWeights))
}

// sums are over the messages of an interval, and then by second.
type sums struct {
	messages, limited float64 // λ, and λ_S: from publishers limited by themselves
	weights, greedy   float64 // Σw of all publishers, and W of those not in λ_S
	publishers, gaps  float64 // how many of known rate, and the sum of their mean gaps in seconds
}

// mix returns a part of s and a part of t.
func (s sums) mix(a float64, t sums, b float64) sums {
	return sums{
		a*s.messages + b*t.messages, a*s.limited + b*t.limited, a*s.weights + b*t.weights,
		a*s.greedy + b*t.greedy, a*s.publishers + b*t.publishers, a*s.gaps + b*t.gaps,
	}
}

// Level finds the water level of one resource of some capacity, a topic's share
// or a broker's: the rate γ per unit of weight with which those who want more
// than γ times their weight fill what those who want less leave over. It keeps
// nothing of any publisher: each message brings its publisher's weight and
// measured rate, and stands for 1/(rate · interval) of it.
//
//	told  = least γ of the last 4 intervals
//	each message:   rate < 0.9 told weight ?  λ_S += 1  :  W += weight / (rate t_s)
//	                Σw += weight / (rate t_s)            sums are smoothed by 1/2
//	Ceff  = C - min(C/2, k_q (q - 0.05 C t_s)+ / t_s)
//	equal = Ceff / Σw       level = max(equal, (Ceff - λ_S/t_s) / W)
//	rise  γ = min(level, 1.1 γ, C)      only while q <= 0.05 C t_s
//	fall  γ = min(γ, level), at once;   min(γ, equal) if q > C t_s and λ > C t_s
//	start γ = equal
//
// The paper's rule is γ = equal alone: capacity that a publisher leaves
// idle stays idle. Integrating γ, raising it faster, unsmoothed sums, falling to
// equal at short backlogs, and intervals below the publishers' mean gap oscillate.
//
// A Level is not safe for concurrent use.
type Level struct {
	// Of the interval under way. A message counts by these.
	told   float64
	span   float64 // seconds
	now    sums
	began  mono.Time
	begun  bool
	smooth sums

	// Of the intervals before.
	rate    float64
	history [remembered]float64 // the last advertised rates; 0: none yet
	next    int                 // where in history the next goes
	paced   bool
	rising  bool // the rate is below the water level
	above   int  // intervals in which more came than the capacity, up to now
	quiet   int  // intervals without a backlog in which pacing limited no publisher
}

// New returns a Level that is not paced.
func New() *Level { return &Level{span: usual.Seconds()} }

// Message counts a message of a publisher of a weight, above 0, and of a rate as
// measured, this message included, in messages per second. A rate that is not
// known yet is 0; such a message stands for one publisher.
func (l *Level) Message(weight, rate float64) {
	gap := l.span
	if rate > 0 && rate <= math.MaxFloat64 {
		gap = 1 / rate
		l.now.publishers += gap
		l.now.gaps += gap * min(gap, usual.Seconds())
	} else {
		rate = math.MaxFloat64
	}
	l.now.messages++
	l.now.weights += weight * gap
	if rate < near*l.told*weight {
		l.now.limited++
	} else {
		l.now.greedy += weight * gap
	}
}

// Interval ends an interval at now and returns the advice for the next. capacity
// is C in messages per second; queueMin the shortest backlog in the interval, in
// messages; ts the interval's length as meant. What came in it is taken over the
// time that really passed since the last call.
func (l *Level) Interval(now mono.Time, capacity, queueMin float64, ts time.Duration) Advice {
	passed := now.Sub(l.began).Seconds()
	if !l.begun || passed <= 0 {
		passed = ts.Seconds()
	}
	cur := l.now.mix(1/passed, sums{}, 0)
	if l.smooth = l.smooth.mix(0.5, cur, 0.5); !l.begun {
		l.smooth = cur
	}
	l.began, l.begun, l.now, l.span = now, true, sums{}, ts.Seconds()

	was := l.paced
	l.turn(cur, capacity, queueMin)
	overload := queueMin > capacity*ts.Seconds() && cur.messages > capacity
	if was && l.paced {
		l.adjust(overload, capacity, queueMin, ts.Seconds())
	} else {
		l.rate = l.equal(capacity, queueMin, ts.Seconds())
	}

	l.history[l.next] = l.rate
	l.next = (l.next + 1) % remembered
	l.told = math.Inf(1)
	for _, r := range l.history {
		l.told = min(l.told, r)
	}
	a := Advice{Paced: l.paced, Rate: l.rate, SumWeights: l.smooth.weights, Overload: overload && l.paced}
	if l.smooth.messages > 0 {
		a.LimitedShare = l.smooth.limited / l.smooth.messages
	}
	return a
}

// turn decides whether publishers are paced: once there was a backlog for a whole
// interval, or more than the capacity twice running; no longer after 5 intervals
// without a backlog in which pacing limited no publisher. That little came is not enough:
// it may be little because of the pacing; nor that all were limited by themselves
// while the rate still rises: one of little weight goes under in 2 %.
func (l *Level) turn(cur sums, capacity, queue float64) {
	l.above, l.quiet = l.above+1, l.quiet+1
	if cur.messages <= capacity {
		l.above = 0
	}
	if queue > 0 || cur.limited < 0.98*cur.messages || l.rising {
		l.quiet = 0
	}
	switch {
	case !l.paced:
		l.paced = queue > 0 || l.above >= 2
		l.quiet, l.rising = 0, true
	case l.quiet >= 5:
		l.paced = false
	}
}

// equal returns an equal part for each unit of weight.
func (l *Level) equal(capacity, queue, ts float64) float64 {
	if l.smooth.weights == 0 {
		return capacity
	}
	return min(capacity, l.room(capacity, queue, ts)/l.smooth.weights)
}

// room is the capacity less what drains the backlog.
func (l *Level) room(capacity, queue, ts float64) float64 {
	return capacity - min(capacity/2, drain*max(0, queue-slack*capacity*ts)/ts)
}

// adjust moves the rate of paced publishers to the water level.
func (l *Level) adjust(overload bool, capacity, queue, ts float64) {
	equal, level := l.equal(capacity, queue, ts), capacity
	if l.smooth.greedy > 0 {
		level = min(capacity, max(equal, (l.room(capacity, queue, ts)-l.smooth.limited)/l.smooth.greedy))
	}
	l.rising = level > l.rate
	switch {
	case l.rate == 0: // there was no capacity
		l.rate = equal
	case !l.rising:
		l.rate = level
	case queue <= slack*capacity*ts:
		l.rate = min(level, rise*l.rate)
	}
	if overload {
		l.rate = min(l.rate, equal)
	}
}

// Span returns how long the next interval is to be: the publishers' mean gap and
// round trip, within 50 ms and 1 s, but long enough for 50 messages of the
// capacity, in messages per second; at most 65 s. Without capacity it is 1 s, since
// some may come.
func (l *Level) Span(capacity float64, rtt time.Duration) time.Duration {
	mean := shortest
	if l.smooth.publishers > 0 {
		mean = time.Duration(l.smooth.gaps / l.smooth.publishers * 1e9)
	}
	span := min(max(mean+rtt, shortest), usual)
	if capacity <= 0 {
		return usual
	}
	if need := minMessages / capacity; need > span.Seconds() {
		return time.Duration(min(need, longest.Seconds()) * 1e9)
	}
	return span
}
