// Package fair computes what publishers that share a capacity may send now, in proportion to their
// weights. It only uses sums over their messages, as in the Improved EFXCP paper (whose own rule is
// in tools/sim/link). The package knows neither publishers nor connections, has no clock, and sends
// nothing. Its owner calls Message for each message and Interval at the end of each interval.
// pacing/sender implements a publisher's reaction to the advice.
package fair

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Constants of a Level.
const (
	drain       = 0.5  // the paper's k_q: fraction of the standing backlog that an interval drains
	slack       = 0.05 // backlog that is not drained, in intervals' worth of capacity
	selfLimited = 0.9  // fraction of its advice below which a publisher counts as self-limited
	rise        = 1.1  // maximum growth of the rate from interval to interval
)

// Limits of Span. longest fits the wire's 16 bits of milliseconds.
const (
	shortest = 50 * time.Millisecond
	usual    = time.Second
	longest  = 65 * time.Second
	// minMessages is the minimum number of messages of capacity in an interval. Fewer messages do
	// not show who sends.
	minMessages = 50
)

// remembered is the maximum age, in intervals, of advice that a publisher may still follow, plus
// one. advised is the minimum over this time.
const remembered = 4

// Advice is the advice for all publishers until the next interval ends.
type Advice struct {
	// Paced means that publishers keep to Rate. Otherwise they share the burst freely, and Rate is
	// what their advice would be.
	Paced bool
	// Rate is γ, in messages per second and unit of weight, at most the capacity.
	Rate float64
	// SumWeights is the sum of the weights of all senders.
	SumWeights float64
	// LimitedShare is the fraction, 0 to 1, of the messages from publishers that sent less than
	// they might.
	LimitedShare float64
	// Overload means that the messages exceeded the capacity, in addition to a backlog of a whole
	// interval.
	Overload bool
}

// RateOf returns what a publisher of that weight may send, in messages per second.
func (a Advice) RateOf(weight float64) float64 { return a.Rate * weight }

// BurstOf returns a publisher's part of burst, in messages, at least 1.
func (a Advice) BurstOf(weight float64, burst int64) int64 {
	if a.SumWeights <= weight {
		return max(1, burst)
	}
	return max(1, int64(float64(burst)*weight/a.SumWeights))
}

// totals are sums over the messages of an interval. combine converts them to values per second.
type totals struct {
	messages, limited float64 // λ, and λ_S: from self-limited publishers
	weights, greedy   float64 // Σw of all publishers, and W of the publishers not in λ_S
	publishers, gaps  float64 // number of publishers with a known rate, and the sum of their mean gaps in seconds
}

// combine returns a*s + b*t.
func (s totals) combine(a float64, t totals, b float64) totals {
	return totals{
		a*s.messages + b*t.messages, a*s.limited + b*t.limited, a*s.weights + b*t.weights,
		a*s.greedy + b*t.greedy, a*s.publishers + b*t.publishers, a*s.gaps + b*t.gaps,
	}
}

// Level finds the water level of one resource with some capacity: a topic's share or a broker.
// Publishers that want more than γ times their weight are greedy. At the water level γ, a rate per
// unit of weight, greedy publishers use the capacity that the others leave over. A Level stores
// nothing about a publisher: each message brings its publisher's weight and measured rate, and
// stands for 1/(rate · interval) of the publisher.
//
//	advised = least γ of the last 4 intervals
//	each message:   rate < 0.9 advised weight ?  λ_S += 1  :  W += weight / (rate t_s)
//	                Σw += weight / (rate t_s)            sums are smoothed by 1/2
//	Ceff  = C - min(C/2, k_q (q - 0.05 C t_s)+ / t_s)
//	equal = Ceff / Σw       level = max(equal, (Ceff - λ_S/t_s) / W)
//	rise  γ = min(level, 1.1 γ, C)      only while q <= 0.05 C t_s
//	fall  γ = min(γ, level), at once;   min(γ, equal) if q > C t_s and λ > C t_s
//	start γ = equal
//
// The paper's rule is γ = equal alone, which leaves a publisher's idle capacity unused. The
// following variants oscillate: integrating γ, raising γ faster, unsmoothed sums, falling to equal
// at short backlogs, and intervals below the publishers' mean gap.
//
// A Level is not safe for concurrent use.
type Level struct {
	// Of the current interval. Messages are counted with these values.
	advised       float64
	span          float64 // seconds
	current       totals
	intervalStart mono.Time
	started       bool
	smooth        totals

	// Of the previous intervals.
	rate     float64
	history  [remembered]float64 // the last advertised rates; 0: none yet
	next     int                 // index in history for the next rate
	paced    bool
	rising   bool // the rate is below the water level
	above    int  // consecutive intervals with more messages than the capacity
	unneeded int  // consecutive intervals without a backlog in which pacing limited no publisher
}

// New returns a Level that is not paced.
func New() *Level { return &Level{span: usual.Seconds()} }

// Message counts a message. weight (above 0) and rate (messages per second, including this message)
// are its publisher's. A rate of 0 is unknown; such a message stands for one publisher.
func (l *Level) Message(weight, rate float64) {
	gap := l.span
	if rate > 0 && rate <= math.MaxFloat64 {
		gap = 1 / rate
		l.current.publishers += gap
		l.current.gaps += gap * min(gap, usual.Seconds())
	} else {
		rate = math.MaxFloat64
	}
	l.current.messages++
	l.current.weights += weight * gap
	if rate < selfLimited*l.advised*weight {
		l.current.limited++
	} else {
		l.current.greedy += weight * gap
	}
}

// Interval ends an interval at now and returns the advice for the next. capacity is C in messages
// per second. queueMin is the shortest backlog in the interval, in messages. ts is the intended
// length of the interval. Rates are computed over the true time since the previous call.
func (l *Level) Interval(now mono.Time, capacity, queueMin float64, ts time.Duration) Advice {
	passed := now.Sub(l.intervalStart).Seconds()
	if !l.started || passed <= 0 {
		passed = ts.Seconds()
	}
	cur := l.current.combine(1/passed, totals{}, 0)
	if l.smooth = l.smooth.combine(0.5, cur, 0.5); !l.started {
		l.smooth = cur
	}
	l.intervalStart, l.started, l.current, l.span = now, true, totals{}, ts.Seconds()

	wasPaced := l.paced
	l.decidePaced(cur, capacity, queueMin)
	overload := queueMin > capacity*ts.Seconds() && cur.messages > capacity
	if wasPaced && l.paced {
		l.adjust(overload, capacity, queueMin, ts.Seconds())
	} else {
		l.rate = l.equal(capacity, queueMin, ts.Seconds())
	}

	l.history[l.next] = l.rate
	l.next = (l.next + 1) % remembered
	l.advised = math.Inf(1)
	for _, r := range l.history {
		l.advised = min(l.advised, r)
	}
	a := Advice{Paced: l.paced, Rate: l.rate, SumWeights: l.smooth.weights, Overload: overload && l.paced}
	if l.smooth.messages > 0 {
		a.LimitedShare = l.smooth.limited / l.smooth.messages
	}
	return a
}

// decidePaced decides whether publishers are paced. Pacing starts after a whole interval with a
// backlog, or after two consecutive intervals above the capacity. Pacing stops after 5 intervals
// without a backlog in which pacing limited no publisher. Two weaker conditions do not suffice: a
// low rate may be the result of pacing, and while the rate rises, a limited publisher of little
// weight may be hidden in the tolerated 2 %.
func (l *Level) decidePaced(cur totals, capacity, queue float64) {
	l.above, l.unneeded = l.above+1, l.unneeded+1
	if cur.messages <= capacity {
		l.above = 0
	}
	if queue > 0 || cur.limited < 0.98*cur.messages || l.rising {
		l.unneeded = 0
	}
	switch {
	case !l.paced:
		l.paced = queue > 0 || l.above >= 2
		l.unneeded, l.rising = 0, true
	case l.unneeded >= 5:
		l.paced = false
	}
}

// equal returns an equal part for each unit of weight.
func (l *Level) equal(capacity, queue, ts float64) float64 {
	if l.smooth.weights == 0 {
		return capacity
	}
	return min(capacity, l.usable(capacity, queue, ts)/l.smooth.weights)
}

// usable returns the capacity minus the part that drains the backlog.
func (l *Level) usable(capacity, queue, ts float64) float64 {
	return capacity - min(capacity/2, drain*max(0, queue-slack*capacity*ts)/ts)
}

// adjust moves the rate of paced publishers to the water level.
func (l *Level) adjust(overload bool, capacity, queue, ts float64) {
	equal, level := l.equal(capacity, queue, ts), capacity
	if l.smooth.greedy > 0 {
		level = min(capacity, max(equal, (l.usable(capacity, queue, ts)-l.smooth.limited)/l.smooth.greedy))
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

// Span returns the length of the next interval: the publishers' mean gap plus the round trip, from
// 50 ms to 1 s, but long enough for 50 messages of capacity (messages per second), and at most 65
// s. Without capacity it is 1 s, because capacity may come.
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
