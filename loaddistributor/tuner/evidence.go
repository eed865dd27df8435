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

// Evidence is what was recorded at one broker while it was suspected.
type Evidence struct {
	Broker string
	// Load is what it did in that time, Share what it held of the contract.
	Load  Load
	Share tokenbucket.Share
	// Unloaded is the processing delay of a message that meets no other.
	Unloaded time.Duration
	// Arrivals are those at the broker, in order of time; fewer than a fraction
	// takes: nothing is known but the reports.
	Arrivals []Arrival
}

// known reports whether there is something to replay.
func (e *Evidence) known() bool { return len(e.Arrivals) >= enough }

// waited is the fraction of arrivals that the bucket alone makes late: a message's
// token comes so late that an unloaded message's processing no longer fits.
func (e *Evidence) waited(latency time.Duration) float64 {
	most := longestWait(latency, e.Unloaded)
	b := tokenbucket.NewFull(e.Share, e.Arrivals[0].At)
	late := 0
	for _, a := range e.Arrivals {
		if eligible := b.Take(a.At); eligible == mono.Never || eligible.Sub(a.At) > most {
			late++
		}
	}
	return float64(late) / float64(len(e.Arrivals))
}

// judge reports whether the bucket explains that the SLO is missed, and says by
// what. A message that waited for its token counts for the bucket by the replay or
// by the reports, whichever has more: the replay knows nothing of what the bucket
// owed when the record began, the reports nothing of those that waited a little
// less than the SLO allows.
func (e *Evidence) judge(t Suspect, budget float64) (blamed bool, why string) {
	if !e.known() {
		return e.Load.blame() <= budget && e.Load.Delivered >= enough, "by the access delays that the broker reports, for it records too few arrivals"
	}
	waited := e.waited(t.Latency)
	late, reported := 1.0, 0.0
	if n := float64(e.Load.Delivered); n > 0 {
		late, reported = float64(e.Load.Exceeded)/n, float64(e.Load.Waited)/n
	}
	return late-max(waited, reported) <= budget,
		fmt.Sprintf("%s late, of which tokens explain %s by a replay of %d arrivals and %s by reports",
			Percent(late), Percent(waited), len(e.Arrivals), Percent(reported))
}

// fewest returns how many of the publishers, from the first on, have to go until
// the rest keeps the SLO, as far as the record tells; false if it does not, or all
// of them are not enough.
//
// The broker is taken for a bucket again: of the rate that it has for the topic,
// and the smallest burst with which as much of the record waits as was late.
func (e *Evidence) fewest(t Suspect, publishers []int) (n int, ok bool) {
	at := slices.IndexFunc(t.Brokers, func(b placement.Broker) bool { return b.ID == e.Broker })
	plan := t.Plan.On(e.Broker)
	if !e.known() || at < 0 || plan < 0 || e.Load.Delivered == 0 {
		return 0, false
	}
	b := t.Brokers[at]
	absorbs := tokenbucket.Share{Rate: tokenbucket.PerSecond(float64(max(1, b.Mcap-b.Allocated+t.Plan.Quotas[plan].Rate)))}
	times := make([]mono.Time, len(e.Arrivals))
	for i, a := range e.Arrivals {
		times[i] = a.At
	}
	var err error
	if absorbs.Burst, err = tokenbucket.Profile(times, absorbs.Rate, max(1e-9, 1-e.Load.blame())); err != nil {
		return 0, false // it absorbs any burst: the rate is too much for it
	}
	order := make(map[int32]int, len(publishers))
	for i, p := range publishers {
		order[int32(p)] = i
	}
	keeps := func(n int) bool {
		work := tokenbucket.NewFull(absorbs, e.Arrivals[0].At)
		late, count := 0, 0
		for _, a := range e.Arrivals {
			if i, goes := order[a.Publisher]; goes && i < n {
				continue
			}
			count++
			if work.Take(a.At) > a.At {
				late++
			}
		}
		return float64(late) <= (1-t.Quantile)*float64(count)
	}
	n = 1 + sort.Search(len(publishers), func(i int) bool { return keeps(i + 1) })
	return n, n <= len(publishers)
}
