package tuner

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Evidence is the record of one broker during suspicion.
type Evidence struct {
	Broker string
	// Load is the broker's load in this time. Share is its share of the contract.
	Load  Load
	Share tokenbucket.Share
	// Unloaded is the processing delay of a message that meets no other message.
	Unloaded time.Duration
	// Arrivals are the broker's arrivals in order of time. If there are fewer than enough,
	// only the reports count.
	Arrivals []Arrival
}

// enoughArrivals reports whether there are enough arrivals for a replay.
func (e *Evidence) enoughArrivals() bool { return len(e.Arrivals) >= minCount }

// waitedFraction returns the fraction of arrivals that the bucket alone makes late: the token
// arrives so late that the processing of an unloaded message no longer fits.
func (e *Evidence) waitedFraction(latency time.Duration) float64 {
	longest := longestWait(latency, e.Unloaded)
	b := tokenbucket.NewFull(e.Share, e.Arrivals[0].At)
	late := 0
	for _, a := range e.Arrivals {
		if eligible := b.Take(a.At); eligible == mono.Never || eligible.Sub(a.At) > longest {
			late++
		}
	}
	return float64(late) / float64(len(e.Arrivals))
}

// judge reports whether the bucket explains the missed SLO, and why. It takes the larger
// of two counts of messages that waited for tokens: by replay and by reports. The replay
// does not know the bucket's debt at the start of the record. The reports do not include
// waits slightly below the SLO's latency.
func (e *Evidence) judge(t Suspect, budget float64) (blamed bool, reason string) {
	if !e.enoughArrivals() {
		return e.Load.blame() <= budget && e.Load.Delivered >= minCount, "by the access delays that the broker reports, for it records too few arrivals"
	}
	waited := e.waitedFraction(t.Latency)
	late, reported := 1.0, 0.0
	if n := float64(e.Load.Delivered); n > 0 {
		late, reported = float64(e.Load.Exceeded)/n, float64(e.Load.Waited)/n
	}
	return late-max(waited, reported) <= budget,
		fmt.Sprintf("%s late, of which tokens explain %s by a replay of %d arrivals and %s by reports",
			Percent(late), Percent(waited), len(e.Arrivals), Percent(reported))
}

// fewest returns how many of the publishers, from the first on, must leave so that the
// rest keeps the SLO according to the record. It returns false if the record does not
// suffice, or if moving all of them is not enough.
//
// The model of the broker is a bucket with the broker's rate for the topic. Its burst is
// the smallest burst for which as much of the record waits as was late.
func (e *Evidence) fewest(t Suspect, publishers []int) (n int, ok bool) {
	index := slices.IndexFunc(t.Brokers, func(b placement.Broker) bool { return b.ID == e.Broker })
	plan := t.Plan.On(e.Broker)
	if !e.enoughArrivals() || index < 0 || plan < 0 || e.Load.Delivered == 0 {
		return 0, false
	}
	b := t.Brokers[index]
	absorbs := tokenbucket.Share{Rate: tokenbucket.PerSecond(float64(max(1, b.Mcap-b.Allocated+t.Plan.Quotas[plan].Rate)))}
	times := make([]mono.Time, len(e.Arrivals))
	for i, a := range e.Arrivals {
		times[i] = a.At
	}
	var err error
	if absorbs.Burst, err = tokenbucket.Profile(times, absorbs.Rate, max(1e-9, 1-e.Load.blame())); err != nil {
		return 0, false // the broker absorbs any burst, so its rate is the problem
	}
	order := make(map[int32]int, len(publishers))
	for i, p := range publishers {
		order[int32(p)] = i
	}
	keepsBudget := func(n int) bool {
		work := tokenbucket.NewFull(absorbs, e.Arrivals[0].At)
		late, count := 0, 0
		for _, a := range e.Arrivals {
			if i, moves := order[a.Publisher]; moves && i < n {
				continue
			}
			count++
			if work.Take(a.At) > a.At {
				late++
			}
		}
		return float64(late) <= (1-t.Quantile)*float64(count)
	}
	n = 1 + sort.Search(len(publishers), func(i int) bool { return keepsBudget(i + 1) })
	return n, n <= len(publishers)
}
