package fitting

import (
	"cmp"
	"slices"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// forecast is what a placement would do to a recorded trace.
type forecast struct {
	// access is the fraction of messages that their token alone makes late: who
	// waits so long that a lone message's processing no longer fits in the
	// SLO's latency. It is exact for the trace: access delay is a function of
	// arrivals. Messages that waited leave the bucket one by one, so that they
	// are processed like lone ones.
	access float64
	// processing is the fraction that a broker would be late with, by what it
	// absorbs. It is a guess, and only steers the search.
	processing float64
}

func (f forecast) late() float64 { return f.access + f.processing }

// Absorption is what a broker gets through within the SLO's latency: an envelope,
// like a contract, of a rate and so many messages at once. A message is late where
// the work before it, draining at Rate, is more than Burst: it would have had to
// wait in such a bucket. So the bucket that judges contracts forecasts brokers as
// well, and tokenbucket.Profile finds what was absorbed. The zero Absorption:
// nothing is known.
type Absorption struct {
	Rate  tokenbucket.Rate
	Burst int64
}

// recorded is a trace, and where its messages go.
type recorded struct {
	arrivals []Arrival
	scratch  []stamp.Mono
}

// replay forecasts plan: where has the broker of each publisher; absorbed what
// each broker absorbs; where nothing is known, that counts as all.
func (r *recorded) replay(s Setup, plan placement.Plan, where []int, absorbed []Absorption, lone time.Duration) forecast {
	if len(r.arrivals) == 0 {
		return forecast{}
	}
	start := r.arrivals[0].At
	contract, work := make([]tokenbucket.Bucket, len(s.Brokers)), make([]tokenbucket.Bucket, len(s.Brokers))
	shares := make(map[string]tokenbucket.Share, len(plan.Quotas))
	for _, q := range plan.Quotas {
		shares[q.Broker] = q.Share
	}
	for l, b := range s.Brokers {
		contract[l] = tokenbucket.NewFull(shares[b.ID], start)
		if absorbed[l].Burst > 0 {
			work[l] = tokenbucket.NewFull(tokenbucket.Share(absorbed[l]), start)
		}
	}
	longest := s.Latency - lone
	access, processing := 0, 0
	for _, a := range r.arrivals {
		l := where[a.Publisher]
		if l < 0 {
			continue
		}
		e := contract[l].Take(a.At)
		late := e == stamp.Never || e.Sub(a.At) > longest
		if late {
			access++
		}
		if absorbed[l].Burst > 0 && e != stamp.Never && work[l].Take(e) > e && !late {
			processing++
		}
	}
	n := float64(len(r.arrivals))
	return forecast{float64(access) / n, float64(processing) / n}
}

// learn returns what broker l absorbed, if of its messages the fraction late took
// longer than the SLO's latency and the fraction halfLate longer than half of it:
// the least bursts with which these fractions of the trace would have had to wait.
// The difference is what the broker works off in half the latency, which is its
// rate. The zero Absorption where nothing can be said: nothing was late, or the
// broker had no messages.
func (r *recorded) learn(s Setup, where []int, l int, late, halfLate float64) Absorption {
	r.scratch = r.scratch[:0]
	for _, a := range r.arrivals {
		if where[a.Publisher] == l {
			r.scratch = append(r.scratch, a.At)
		}
	}
	if len(r.scratch) == 0 || late <= 0 {
		return Absorption{}
	}
	b := s.Brokers[l]
	least := tokenbucket.PerSecond(float64(max(1, b.Mcap-b.Allocated)))
	a := Absorption{Rate: least}
	for range 4 { // the rate settles in two or three
		burst, err := tokenbucket.Profile(r.scratch, a.Rate, max(1e-9, 1-late))
		if err != nil {
			return Absorption{} // more than any burst: it absorbs whatever comes
		}
		a.Burst = burst
		half, err := tokenbucket.Profile(r.scratch, a.Rate, max(1e-9, 1-halfLate))
		if err != nil {
			break
		}
		a.Rate = min(tokenbucket.MaxRate, max(least, tokenbucket.PerSecond(float64(burst-half)/(s.Latency.Seconds()/2))))
	}
	return a
}

// together returns how many messages of the trace arrive together at most: within
// a span of time, at a quantile of the messages that leaves chance meetings out.
func (r *recorded) together(span time.Duration) int {
	if len(r.arrivals) == 0 {
		return 1
	}
	sizes := make([]int, 0, len(r.arrivals))
	first := 0
	for i, a := range r.arrivals {
		for a.At.Sub(r.arrivals[first].At) > span {
			first++
		}
		sizes = append(sizes, i-first+1)
	}
	slices.SortFunc(sizes, cmp.Compare[int])
	return sizes[tokenbucket.Rank(len(sizes), 0.99)]
}
