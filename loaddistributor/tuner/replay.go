package tuner

import (
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// forecast is the predicted effect of a placement on a recorded trace.
type forecast struct {
	// access is the fraction of messages made late by their tokens alone: after the wait,
	// an unloaded message's processing no longer fits in the SLO's latency. access is
	// exact for the trace, because access delay is a function of arrivals. Messages that
	// waited leave the bucket one by one, so they are processed like unloaded messages.
	access float64
	// processing is the estimated fraction that brokers make late, by what they absorb.
	// The estimate only steers the search; the test is valid in any case.
	processing float64
	// seconds is the number of whole seconds in the trace. deviation is the standard error
	// of the late fraction over these seconds.
	seconds   int
	deviation float64
}

func (f forecast) late() float64 { return f.access + f.processing }

// Absorption is a broker's capacity within the SLO's latency: an envelope of a rate and a
// burst, like a contract. A message is late if the work that it finds, including its own,
// exceeds Burst, draining at Rate. The zero Absorption means unknown.
type Absorption struct {
	Rate  tokenbucket.Rate
	Burst int64
}

// soft is the range around Burst, as a fraction of Burst, in which the chance of being
// late rises from 0 to 1. Other causes delay messages differently.
const soft = 0.1

// queue is the forecast's model of a broker.
type queue struct {
	// Set by queueOf.
	perMessage time.Duration // work per message
	absorbs    float64       // of work, ns; 0: unlimited

	free mono.Time // end of all queued work
}

// queueOf returns the queue of a broker that absorbs a. If a is unknown, the queue drains
// rcap msg/s.
func queueOf(a Absorption, rcap int64) queue {
	rate := a.Rate
	if rate <= 0 {
		rate = tokenbucket.PerSecond(float64(max(1, rcap)))
	}
	perMessage := time.Duration(float64(time.Second) / rate.PerSecond())
	return queue{perMessage: perMessage, absorbs: float64(a.Burst) * float64(perMessage)}
}

// add adds a message that arrives at the given time and returns its chance of being
// late.
func (q *queue) add(at mono.Time) (late float64) {
	q.free = max(q.free, at).Add(q.perMessage)
	if q.absorbs > 0 {
		excess := float64(q.free.Sub(at))/q.absorbs - (1 - soft)
		late = max(0, min(1, excess/(2*soft)))
	}
	return late
}

// tally counts the late messages of a period.
type tally struct{ messages, late float64 }

// recorded is a trace of arrivals.
type recorded struct {
	arrivals []Arrival
	scratch  []mono.Time
}

// replay forecasts plan. brokerOf gives the broker of each publisher, absorbed what each
// broker absorbs.
func (r *recorded) replay(s Setup, plan placement.Plan, brokerOf []int, absorbed []Absorption, unloaded time.Duration) (f forecast) {
	if len(r.arrivals) == 0 {
		return forecast{}
	}
	start := r.arrivals[0].At
	contract, work := make([]tokenbucket.Bucket, len(s.Brokers)), make([]queue, len(s.Brokers))
	shares := make(map[string]tokenbucket.Share, len(plan.Quotas))
	for _, q := range plan.Quotas {
		shares[q.Broker] = q.Share
	}
	for l, b := range s.Brokers {
		contract[l] = tokenbucket.NewFull(shares[b.ID], start)
		work[l] = queueOf(absorbed[l], b.Mcap-b.Allocated)
	}
	longest := longestWait(s.Latency, unloaded)
	var seconds []tally
	for _, a := range r.arrivals {
		second := int(a.At.Sub(start) / time.Second)
		for len(seconds) <= second {
			seconds = append(seconds, tally{})
		}
		seconds[second].messages++
		l := brokerOf[a.Publisher]
		if l < 0 {
			continue
		}
		e := contract[l].Take(a.At)
		if e == mono.Never || e.Sub(a.At) > longest {
			f.access++
			seconds[second].late++
			if e == mono.Never {
				continue
			}
		}
		late := work[l].add(e)
		if e.Sub(a.At) <= longest {
			f.processing += late
			seconds[second].late += late
		}
	}
	n := float64(len(r.arrivals))
	f.access /= n
	f.processing /= n
	f.seconds, f.deviation = deviation(seconds[:len(seconds)-1])
	return f
}

// deviation returns the standard error of the late fraction over the seconds with
// messages; infinite for fewer than two.
func deviation(seconds []tally) (n int, err float64) {
	sum, square := 0.0, 0.0
	for _, s := range seconds {
		if s.messages > 0 { // else a hole in the trace
			f := s.late / s.messages
			sum += f
			square += f * f
			n++
		}
	}
	if n < 2 {
		return n, math.Inf(1)
	}
	return n, math.Sqrt(max(0, square-sum*sum/float64(n)) / float64(n) / float64(n-1))
}

// absorption returns what broker l absorbed. late is the fraction of the broker's messages
// that took longer than the SLO's latency, and halfLate the fraction that took longer
// than half of it. absorption finds the smallest bursts for which these fractions of the trace
// would have waited. The difference between the bursts is the work done in half the
// latency, which gives the rate. absorption returns the zero Absorption if nothing was late or
// the broker had no messages.
func (r *recorded) absorption(s Setup, brokerOf []int, l int, late, halfLate float64) Absorption {
	arrivals := r.arrivalsAt(brokerOf, l)
	if len(arrivals) == 0 || late <= 0 {
		return Absorption{}
	}
	b := s.Brokers[l]
	minimum := tokenbucket.PerSecond(float64(max(1, b.Mcap-b.Allocated)))
	a := Absorption{Rate: minimum}
	for range 4 { // the rate settles in two or three
		burst, err := tokenbucket.Profile(arrivals, a.Rate, max(1e-9, 1-late))
		if err != nil {
			return Absorption{} // more than any burst: the broker absorbs everything
		}
		a.Burst = burst
		half, err := tokenbucket.Profile(arrivals, a.Rate, max(1e-9, 1-halfLate))
		if err != nil {
			break
		}
		a.Rate = min(tokenbucket.MaxRate, max(minimum, tokenbucket.PerSecond(float64(burst-half)/(s.Latency.Seconds()/2))))
	}
	// So far a message was either late or not. With chances in between, a slightly
	// different burst gives the same mean.
	low, high := a.Burst-a.Burst/4, a.Burst+a.Burst/4
	for low < high {
		a.Burst = (low + high) / 2
		q := queueOf(a, 0)
		sum := 0.0
		for _, at := range arrivals {
			sum += q.add(at)
		}
		if sum > late*float64(len(arrivals)) {
			low = a.Burst + 1
		} else {
			high = a.Burst
		}
	}
	a.Burst = max(1, low)
	return a
}

// raisedAbsorption returns a lower bound of what broker l, without late messages, absorbs, if the
// bound exceeds the earlier estimate; otherwise the zero Absorption.
func (r *recorded) raisedAbsorption(estimate Absorption, brokerOf []int, l int) Absorption {
	arrivals := r.arrivalsAt(brokerOf, l)
	if len(arrivals) == 0 {
		return Absorption{}
	}
	burst, err := tokenbucket.Profile(arrivals, estimate.Rate, 0.99) // the trace need not contain the worst case
	if err != nil || burst <= estimate.Burst {
		return Absorption{}
	}
	return Absorption{Rate: estimate.Rate, Burst: burst}
}

// coincidence returns the maximum number of messages that arrive together at one broker:
// within a span of time, at a quantile of the messages that excludes chance coincidences.
func (r *recorded) coincidence(span time.Duration, brokerOf []int, brokers int) int {
	largest := 1
	var sizes []int
	for l := range brokers {
		sizes = sizes[:0]
		arrivals := r.arrivalsAt(brokerOf, l)
		first := 0
		for i, at := range arrivals {
			for at.Sub(arrivals[first]) > span {
				first++
			}
			sizes = append(sizes, i-first+1)
		}
		if len(sizes) > 0 {
			slices.Sort(sizes)
			largest = max(largest, sizes[tokenbucket.Rank(len(sizes), 0.99)])
		}
	}
	return largest
}

// arrivalsAt returns the arrival times at broker l. The slice is valid until the next call.
func (r *recorded) arrivalsAt(brokerOf []int, l int) []mono.Time {
	r.scratch = r.scratch[:0]
	for _, a := range r.arrivals {
		if brokerOf[a.Publisher] == l {
			r.scratch = append(r.scratch, a.At)
		}
	}
	return r.scratch
}

// longestWait returns how long a message may wait for its token and still be within
// latency, if processing takes unloaded. If processing alone takes longer than latency,
// tokens are not the cause, and only waits above latency count.
func longestWait(latency, unloaded time.Duration) time.Duration {
	if unloaded >= latency {
		return latency
	}
	return latency - unloaded
}
