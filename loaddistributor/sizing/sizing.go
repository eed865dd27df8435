// Package sizing proposes a contract (r, b) from recorded arrivals. It also reports the
// cost of splitting the contract and the cost of a wrong contract. The package is pure.
//
// # The rate
//
// r is Headroom times the mean rate (1.1 in section 6 of the SRTM paper). A bucket with
// less than the mean rate queues without bound for any burst. The mean covers the whole
// record, including the silence before the first message and after the last message.
//
// # The burst
//
// The unfinished work U that a message finds in the bucket, including itself, depends
// only on r. The message's access delay is max(0, U - b)/r (appendix A of the paper). So
// the message waits at most Within if U <= b + r·Within, and b is the wanted quantile of
// U minus r·Within. No search is needed.
//
// This b fits the recorded trace. The uncertainty about the next trace depends on the
// length of the record. Hence sizing cuts the trace into Blocks of equal time, draws as
// many blocks with replacement, and sends them through the bucket in sequence. It repeats
// this Draws times (block bootstrap, Künsch 1989). b is the burst that suffices for a
// part Confidence of the draws. The method thus also covers the uncertainty of the mean
// rate. It treats correlation over more than a block as chance. It does not see periods
// longer than the trace, such as a day, nor events too rare for the trace.
//
// # Splitting
//
// Each of k brokers has (r/k, b/k). The publishers are dealt out in order of their rates,
// back and forth. By Proposition 1 the sum of delays can only grow with k.
package sizing

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	// Blocks is the number of parts of a trace. Draws is the number of repetitions.
	Blocks = 50
	Draws  = 200
	// MinMessages is the minimum number of messages of a trace: ten per block on average.
	MinMessages = 500
	// MaxBrokers bounds Wanted.Brokers.
	MaxBrokers = 32
)

// Wanted is the goal of the contract. The zero value of a field selects its default.
type Wanted struct {
	Quantile   float64       // of messages; default 0.99
	Within     time.Duration // access delay at Quantile; default 0
	Confidence float64       // default 0.95
	Headroom   float64       // r over the mean rate; default 1.1
	Brokers    int           // maximum number of brokers in Splits; default 4
}

func (w Wanted) withDefaults() Wanted {
	return Wanted{
		Quantile: cmp.Or(w.Quantile, 0.99), Within: w.Within, Confidence: cmp.Or(w.Confidence, 0.95),
		Headroom: cmp.Or(w.Headroom, 1.1), Brokers: cmp.Or(w.Brokers, 4),
	}
}

// Faults yields every invalid field of w with its problem.
func (w Wanted) Faults() iter.Seq2[string, string] {
	w = w.withDefaults()
	return func(yield func(field, problem string) bool) {
		_ = (w.Quantile > 0 && w.Quantile < 1 || yield("quantile", fmt.Sprintf("%v is not between 0 and 1", w.Quantile))) &&
			(w.Within >= 0 && w.Within <= time.Hour || yield("within", fmt.Sprintf("%v is not 0 to 1h", w.Within))) &&
			(w.Confidence >= 0.5 && w.Confidence < 1 || yield("confidence", fmt.Sprintf("%v is not 0.5 to less than 1", w.Confidence))) &&
			(w.Headroom > 1 && w.Headroom <= 100 || yield("headroom", fmt.Sprintf("%v is not above 1 and up to 100", w.Headroom))) &&
			(w.Brokers >= 1 && w.Brokers <= MaxBrokers || yield("brokers", fmt.Sprintf("%d is not 1 to %d", w.Brokers, MaxBrokers)))
	}
}

// Delays are the access delays of a replayed trace.
type Delays struct {
	Mean, Quantile time.Duration // at the wanted quantile
	Late           float64       // part of messages that wait longer than Wanted.Within
}

// Split is the cost of splitting over K brokers.
type Split struct {
	K int
	Delays
}

// Error is the cost of a wrong contract.
type Error struct {
	Change string // "r -10 %"
	tokenbucket.Share
	Delays
	// Unbounded: the rate is below the rate of the messages, so delays grow with the
	// duration.
	Unbounded bool
}

// Proposal is a contract with its evidence.
type Proposal struct {
	tokenbucket.Share
	// Needed is the burst that this trace needed. Burst includes the confidence.
	Needed   int64
	Messages int
	Span     time.Duration
	Mean     float64 // msg/s
	Splits   []Split
	Errors   []Error
}

// ErrShort: the trace has too few messages.
var ErrShort = fmt.Errorf("fewer than %d messages, or all at one instant", MinMessages)

// Propose returns a contract for a trace in order of time, recorded from start until
// end. If the recording period is unknown, the period from the first to the last
// message counts. Errors are the first of Wanted.Faults, ErrShort, and
// *tokenbucket.ShareError if the trace needs more than the maximum share.
func Propose(trace []tuner.Arrival, start, end mono.Time, w Wanted, rng *rand.Rand) (*Proposal, error) {
	for field, problem := range w.Faults() {
		return nil, fmt.Errorf("%s: %s", field, problem)
	}
	w = w.withDefaults()
	if len(trace) < MinMessages {
		return nil, ErrShort
	}
	start, end = min(start, trace[0].At), max(end, trace[len(trace)-1].At)
	if start == end {
		return nil, ErrShort
	}
	p := &Proposal{Messages: len(trace), Span: end.Sub(start)}
	p.Mean = float64(len(trace)-1) / p.Span.Seconds()
	p.Rate = tokenbucket.PerSecond(w.Headroom * p.Mean)
	if err := (tokenbucket.Share{Rate: p.Rate, Burst: 1}).Validate(); err != nil {
		return nil, err
	}
	p.Needed = Burst(trace, p.Rate.PerSecond(), w.Quantile, w.Within)
	p.Burst = burst(confident(trace, start, end, p.Rate, w, rng), p.Rate.PerSecond(), w.Within)
	p.Burst = max(p.Burst, p.Needed)
	if err := p.Share.Validate(); err != nil {
		return nil, err
	}
	order := byRate(trace)
	for k := 1; k <= w.Brokers && int64(k) <= p.Burst; k++ {
		p.Splits = append(p.Splits, Split{k, replay(trace, p.Share, k, order, w)})
	}
	for _, e := range []struct {
		change string
		share  tokenbucket.Share
	}{
		{"r -10 %", tokenbucket.Share{Rate: max(p.Rate*9/10, tokenbucket.MinRate), Burst: p.Burst}},
		{"r -5 %", tokenbucket.Share{Rate: max(p.Rate*19/20, tokenbucket.MinRate), Burst: p.Burst}},
		{"b -50 %", tokenbucket.Share{Rate: p.Rate, Burst: max(1, p.Burst/2)}},
		{"b -75 %", tokenbucket.Share{Rate: p.Rate, Burst: max(1, p.Burst/4)}},
		{"b +100 %", tokenbucket.Share{Rate: p.Rate, Burst: min(2*p.Burst, tokenbucket.MaxBurst)}},
	} {
		p.Errors = append(p.Errors, Error{e.change, e.share, replay(trace, e.share, 1, nil, w), e.share.Rate.PerSecond() <= p.Mean})
	}
	return p, nil
}

// Burst returns the tokens with which a quantile of a trace's messages waits at most
// limit, at a rate in msg/s. Requires: there are messages, in order of time.
func Burst(trace []tuner.Arrival, rate, quantile float64, limit time.Duration) int64 {
	works := make([]float64, len(trace)) // work, in messages, that each message finds, including itself
	u, last := 0.0, trace[0].At
	for i, a := range trace {
		u = max(0, u-a.At.Sub(last).Seconds()*rate) + 1
		works[i], last = u, a.At
	}
	slices.Sort(works)
	return burst(works[tokenbucket.Rank(len(works), quantile)], rate, limit)
}

// burst returns the tokens with which a message that finds the given work waits at most
// limit.
func burst(work, rate float64, limit time.Duration) int64 {
	need := math.Ceil(work - rate*limit.Seconds() - 1e-6) // sums of fractions are rounded
	return max(1, int64(min(need, float64(tokenbucket.MaxBurst)+1)))
}

// confident returns the quantile of work that a part w.Confidence of draws does not
// exceed.
func confident(trace []tuner.Arrival, start, end mono.Time, rate tokenbucket.Rate, w Wanted, rng *rand.Rand) float64 {
	// block i has the messages bounds[i] to bounds[i+1].
	length := float64(end-start)/Blocks + 1e-3
	bounds, i := make([]int, Blocks+1), 0
	for b := range bounds {
		for i < len(trace) && float64(trace[i].At-start) < float64(b)*length {
			i++
		}
		bounds[b] = i
	}
	perNano := rate.PerSecond() / 1e9
	quantiles := make([]int, Draws)
	var counts []int // number of messages by the work that they found
	for d := range quantiles {
		clear(counts)
		u, last, n := 0.0, 0.0, 0
		for position := range Blocks {
			b := rng.IntN(Blocks)
			shift := float64(position-b) * length
			for _, a := range trace[bounds[b]:bounds[b+1]] {
				t := float64(a.At-start) + shift
				u = max(0, u-(t-last)*perNano) + 1
				last = t
				v := int(math.Ceil(u - 1e-6))
				for len(counts) <= v {
					counts = append(counts, 0)
				}
				counts[v]++
				n++
			}
		}
		rank := tokenbucket.Rank(max(n, 1), w.Quantile)
		for v, sum := 0, 0; v < len(counts); v++ {
			if sum += counts[v]; sum > rank {
				quantiles[d] = v
				break
			}
		}
	}
	slices.Sort(quantiles)
	return float64(quantiles[tokenbucket.Rank(Draws, w.Confidence)])
}

// byRate returns each publisher's rank by number of messages. All publishers that are not
// distinguished (-1) count as one.
func byRate(trace []tuner.Arrival) map[int32]int {
	counts := map[int32]int{}
	for _, a := range trace {
		counts[a.Publisher]++
	}
	var publishers []int32
	// order: sorted below
	for p := range counts {
		publishers = append(publishers, p)
	}
	slices.SortFunc(publishers, func(a, b int32) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
	for i, p := range publishers {
		counts[p] = i
	}
	return counts
}

// replay sends a trace through k buckets.
func replay(trace []tuner.Arrival, s tokenbucket.Share, k int, order map[int32]int, w Wanted) Delays {
	u, last := make([]float64, k), make([]mono.Time, k)
	for l := range last {
		last[l] = trace[0].At
	}
	rate, tokens := s.Rate.PerSecond()/float64(k), float64(s.Burst)/float64(k)
	delays := make([]float64, len(trace)) // s
	sum, late := 0.0, 0
	for i, a := range trace {
		l := 0
		if k > 1 {
			if l = order[a.Publisher] % (2 * k); l >= k {
				l = 2*k - 1 - l
			}
		}
		u[l] = max(0, u[l]-a.At.Sub(last[l]).Seconds()*rate) + 1
		last[l] = a.At
		delays[i] = max(0, u[l]-tokens) / rate
		if delays[i] < 1e-9 {
			delays[i] = 0
		}
		sum += delays[i]
		if delays[i] > w.Within.Seconds()+1e-9 {
			late++
		}
	}
	slices.Sort(delays)
	return Delays{
		Mean: seconds(sum / float64(len(trace))), Quantile: seconds(delays[tokenbucket.Rank(len(delays), w.Quantile)]),
		Late: float64(late) / float64(len(trace)),
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
