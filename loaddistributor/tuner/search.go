package tuner

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Names of the ways to fit.
const (
	ModeFast  = "fast"
	ModePaper = "paper"
)

// Setup is what a search starts from.
type Setup struct {
	Policy  string
	Brokers []placement.Broker
	// Demand has the contract and the publishers; its AtLeast is where a search
	// over brokers begins.
	Demand placement.Demand
	// Quantile of the deliveries are to take no longer than Latency.
	Quantile float64
	Latency  time.Duration
	// Start is the placement in force, which fast measures before it tries another;
	// zero: there is none.
	Start placement.Plan
}

// Search looks for a placement. The caller does what an Action says, tells what
// was observed, and asks again, until an Action is final.
type Search interface {
	// Next takes what the last action led to; the zero Observation at first.
	Next(Observation) Action
}

// Action is what to do next.
type Action struct {
	// Plan is to be in force. Changed: it is not the one before.
	Plan    placement.Plan
	Changed bool
	// Settle is how long to wait for the change to take hold, then Measure how
	// long to observe.
	Settle, Measure time.Duration
	// Step says what the action is for, for people.
	Step string
	// Forecast is what part of the messages would be late under Plan, access delay
	// included, by what was learned before; below 0: nothing was forecast. Confidence is
	// that of the test that goes on; 0: none does.
	Forecast, Confidence float64
	// Verdict is what has come of the plan that was in force before, for people; empty: it
	// stays, or was not judged.
	Verdict string
	// Final: the search is over, with this Outcome, and Plan stands.
	Final   bool
	Outcome Outcome
}

// Observation is what was delivered while an action was measured.
type Observation struct {
	// Parts are the brokers' counts of deliveries and of those later than the
	// SLO's latency, access delay included, and the measured quantile.
	Parts []Part
	// Slices are, for each broker of Setup, its deliveries in slices of time, the
	// same for all brokers. Only fast asks for them.
	Slices [][]Slice
	// Arrivals are when which publisher's messages arrived, in order of time, and
	// Access, where they are not known, how many messages were released and for
	// how many the access delay alone left no time for an unloaded message's
	// processing. Only fast asks for them; without arrivals it forecasts nothing,
	// and tries one broker more at a time.
	Arrivals []Arrival
	Access   Slice
	// Unloaded is the processing delay of a message that meets no other: a low
	// quantile. 0: not known.
	Unloaded time.Duration
}

// Part is one broker's part of an Observation.
type Part struct {
	Count
	Quantile time.Duration
}

// Slice is one broker's deliveries in a slice of time: how many, for how many the
// processing delay was above the SLO's latency, and for how many above half of it.
type Slice struct{ Delivered, Late, HalfLate uint64 }

// Arrival is one message of a publisher, an index into the demand's Expand.
type Arrival struct {
	At        mono.Time
	Publisher int32
}

// Outcome is how a search ended.
type Outcome struct {
	// Fitted: the plan keeps the SLO, as far as the search can tell.
	Fitted bool
	// Infeasible says why no plan was found, if a bound of the placement was met.
	Infeasible *placement.Infeasible
	// Reason is for people.
	Reason string
	// Rounds is how many measurements each value of k, or iteration, took.
	Rounds []Rounds
	// Absorbed is what was learned of the brokers. Only fast learns it.
	Absorbed map[string]Absorption
}

// Rounds is how many measurements were made with K brokers.
type Rounds struct{ K, Rounds int }

// Validate reports a setup that cannot be searched; the demand's and the brokers'
// faults are placement's.
func (s Setup) Validate() error {
	if !(s.Quantile > 0 && s.Quantile < 1) {
		return fmt.Errorf("quantile %v is not between 0 and 1", s.Quantile)
	}
	if s.Latency <= 0 {
		return fmt.Errorf("latency %v is not above 0", s.Latency)
	}
	if len(s.Demand.Publishers) == 0 && len(s.Demand.Groups) == 0 {
		return fmt.Errorf("no publishers to fit")
	}
	return nil
}

// budget is the fraction that may be late.
func (s Setup) budget() float64 { return 1 - s.Quantile }

// planOf describes where publishers are: where has for each the index of its
// broker, or -1. Quotas and shares are in proportion to the publishers' rates; what
// is not placed keeps its proportion of the contract unused.
func (s Setup) planOf(where []int, publishers []placement.Publisher) placement.Plan {
	plan := placement.Plan{Policy: s.Policy}
	rates := make([]float64, len(s.Brokers)+1) // the last: not placed
	for i, l := range where {
		if l < 0 {
			l = len(s.Brokers)
			plan.Unplaced = append(plan.Unplaced, i)
		}
		rates[l] += publishers[i].Rate
	}
	total := 0.0
	for _, r := range rates {
		total += r
	}
	weights := make([]int64, len(rates))
	for l, r := range rates {
		if r > 0 {
			weights[l] = max(1, int64(r/total*(1<<40)))
		}
	}
	contract := tokenbucket.Share{Rate: tokenbucket.Rate(s.Demand.RateMilli), Burst: s.Demand.Burst}
	if s.Demand.RateMilli == 0 {
		contract.Rate = tokenbucket.Rate(s.Demand.Rate * 1000)
	}
	brokers := int64(0)
	for _, w := range weights[:len(s.Brokers)] {
		if w > 0 {
			brokers++
		}
	}
	if len(plan.Unplaced) > 0 && contract.Burst == brokers {
		contract.Burst++ // who is not placed needs no token, only a part of the rate
	}
	shares, err := share.Proportion(contract, weights)
	if err != nil {
		// The burst is less than the number of brokers, which placement refuses.
		panic(fmt.Sprintf("tuner: contract %+v over weights %v: %v", contract, weights, err))
	}
	quotas, err := share.Proportion(tokenbucket.Share{Rate: tokenbucket.Rate(s.Demand.Rate), Burst: contract.Burst}, weights)
	if err != nil {
		panic(fmt.Sprintf("tuner: rate %d over weights %v: %v", s.Demand.Rate, weights, err))
	}
	at := make([]int, len(s.Brokers))
	for l, b := range s.Brokers {
		if weights[l] == 0 {
			continue
		}
		at[l] = len(plan.Quotas)
		plan.Quotas = append(plan.Quotas, placement.Quota{Broker: b.ID, Rate: int64(quotas[l].Rate), Share: shares[l]})
	}
	plan.K = len(plan.Quotas)
	for i, l := range where {
		if l < 0 {
			continue
		}
		q := &plan.Quotas[at[l]]
		q.Publishers = append(q.Publishers, i)
	}
	return plan
}

// whereOf is the inverse of planOf: for each publisher the index of its broker in
// Setup, -1 where it has none.
func (s Setup) whereOf(plan placement.Plan, publishers int) []int {
	index := make(map[string]int, len(s.Brokers))
	for l, b := range s.Brokers {
		index[b.ID] = l
	}
	where := make([]int, publishers)
	for i := range where {
		where[i] = -1
	}
	for _, q := range plan.Quotas {
		for _, i := range q.Publishers {
			where[i] = index[q.Broker]
		}
	}
	return where
}
