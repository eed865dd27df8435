package tuner

import (
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// forecast is what a placement would do to a recorded trace.
type forecast struct {
	// access is the fraction of messages that their token alone makes late: who
	// waits so long that an unloaded message's processing no longer fits in the
	// SLO's latency. It is exact for the trace: access delay is a function of
	// arrivals. Messages that waited leave the bucket one by one, so that they
	// are processed like unloaded ones.
	access float64
	// processing is the fraction that brokers would be late with, by what they
	// absorb. It is a guess: it steers the search, and whatever it is worth the
	// test is valid.
	processing float64
	// seconds is how many whole ones the trace has, and deviation the standard
	// error of what is late, as far as these differ.
	seconds   int
	deviation float64
}

func (f forecast) late() float64 { return f.access + f.processing }

// Absorption is what a broker gets through within the SLO's latency: an envelope,
// like a contract, of a rate and so many messages at once. A message is late where
// the work that it finds, with its own, is more than Burst, draining at Rate. The
// zero Absorption: nothing is known.
type Absorption struct {
	Rate  tokenbucket.Rate
	Burst int64
}

// soft is how far around Burst the chance of being late rises from 0 to 1, as a
// fraction of Burst: what else delays messages differs from one to the next.
const soft = 0.1

// queue is a broker as a forecast sees it.
type queue struct {
	// Set once.
	each    time.Duration // of work for a message
	absorbs float64       // of work, ns; 0: whatever comes

	free mono.Time // when all work is done
}

// queueOf returns the queue of a broker that absorbs a, or of which is only known
// that it gets through rcap msg/s.
func queueOf(a Absorption, rcap int64) queue {
	rate := a.Rate
	if rate <= 0 {
		rate = tokenbucket.PerSecond(float64(max(1, rcap)))
	}
	each := time.Duration(float64(time.Second) / rate.PerSecond())
	return queue{each: each, absorbs: float64(a.Burst) * float64(each)}
}

// take adds a message that comes at the given time and returns the chance that it
// is late.
func (q *queue) take(at mono.Time) (late float64) {
	q.free = max(q.free, at).Add(q.each)
	if q.absorbs > 0 {
		over := float64(q.free.Sub(at))/q.absorbs - (1 - soft)
		late = max(0, min(1, over/(2*soft)))
	}
	return late
}

// tally is how many messages of some time were late.
type tally struct{ messages, late float64 }

// recorded is a trace, and where its messages go.
type recorded struct {
	arrivals []Arrival
	scratch  []mono.Time
}

// replay forecasts plan: where has the broker of each publisher, absorbed what
// each broker absorbs.
func (r *recorded) replay(s Setup, plan placement.Plan, where []int, absorbed []Absorption, unloaded time.Duration) (f forecast) {
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
		l := where[a.Publisher]
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
		late := work[l].take(e)
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

// deviation is the standard error of the late fraction over so many seconds with
// messages, infinite for fewer than two.
func deviation(seconds []tally) (n int, err float64) {
	sum, square := 0.0, 0.0
	for _, s := range seconds {
		if s.messages > 0 { // not a gap in what is known
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

// learn returns what broker l absorbed, if of its messages the fraction late took
// longer than the SLO's latency and the fraction halfLate longer than half of it:
// the least bursts with which these fractions of the trace would have had to wait.
// The difference is what the broker works off in half the latency, which is its
// rate. The zero Absorption where nothing can be said: nothing was late, or the
// broker had no messages.
func (r *recorded) learn(s Setup, where []int, l int, late, halfLate float64) Absorption {
	arrivals := r.at(where, l)
	if len(arrivals) == 0 || late <= 0 {
		return Absorption{}
	}
	b := s.Brokers[l]
	minimum := tokenbucket.PerSecond(float64(max(1, b.Mcap-b.Allocated)))
	a := Absorption{Rate: minimum}
	for range 4 { // the rate settles in two or three
		burst, err := tokenbucket.Profile(arrivals, a.Rate, max(1e-9, 1-late))
		if err != nil {
			return Absorption{} // more than any burst: it absorbs whatever comes
		}
		a.Burst = burst
		half, err := tokenbucket.Profile(arrivals, a.Rate, max(1e-9, 1-halfLate))
		if err != nil {
			break
		}
		a.Rate = min(tokenbucket.MaxRate, max(minimum, tokenbucket.PerSecond(float64(burst-half)/(s.Latency.Seconds()/2))))
	}
	// So far a message was late or not. With chances in between, as many are late
	// in the mean with a burst a little beside that.
	low, high := a.Burst-a.Burst/4, a.Burst+a.Burst/4
	for low < high {
		a.Burst = (low + high) / 2
		q := queueOf(a, 0)
		sum := 0.0
		for _, at := range arrivals {
			sum += q.take(at)
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

// absorbed returns what broker l, of which nothing was late, absorbs at the least, if
// that is more than was thought; else the zero Absorption.
func (r *recorded) absorbed(thought Absorption, where []int, l int) Absorption {
	arrivals := r.at(where, l)
	if len(arrivals) == 0 {
		return Absorption{}
	}
	burst, err := tokenbucket.Profile(arrivals, thought.Rate, 0.99) // it need not have met the worst
	if err != nil || burst <= thought.Burst {
		return Absorption{}
	}
	return Absorption{Rate: thought.Rate, Burst: burst}
}

// together returns how many messages of the trace arrive together at one broker at
// most: within a span of time, at a quantile of the messages that leaves chance
// meetings out.
func (r *recorded) together(span time.Duration, where []int, brokers int) int {
	most := 1
	var sizes []int
	for l := range brokers {
		sizes = sizes[:0]
		arrivals := r.at(where, l)
		first := 0
		for i, at := range arrivals {
			for at.Sub(arrivals[first]) > span {
				first++
			}
			sizes = append(sizes, i-first+1)
		}
		if len(sizes) > 0 {
			slices.Sort(sizes)
			most = max(most, sizes[tokenbucket.Rank(len(sizes), 0.99)])
		}
	}
	return most
}

// at returns when messages arrive at broker l, until it is called again.
func (r *recorded) at(where []int, l int) []mono.Time {
	r.scratch = r.scratch[:0]
	for _, a := range r.arrivals {
		if where[a.Publisher] == l {
			r.scratch = append(r.scratch, a.At)
		}
	}
	return r.scratch
}

// longestWait is for how long a message may wait for its token if it is to be within
// latency, where one that meets no other takes unloaded besides. Where that alone is too
// long, it is not for want of tokens, and only those are that wait for longer than the
// latency.
func longestWait(latency, unloaded time.Duration) time.Duration {
	if unloaded >= latency {
		return latency
	}
	return latency - unloaded
}
