package tuner

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Modes of fitting.
const (
	ModeFast  = "fast"
	ModePaper = "paper"
)

// Setup is the start of a search.
type Setup struct {
	Policy  string
	Brokers []placement.Broker
	// Demand has the contract and the publishers. Its AtLeast is the first number of
	// brokers in a search over brokers.
	Demand placement.Demand
	// Quantile of the deliveries must take at most Latency.
	Quantile float64
	Latency  time.Duration
	// Start is the placement in force, which fast measures before any other; zero: none.
	Start placement.Plan
}

// Search searches for a placement. The caller carries out an Action, passes the
// observation, and gets the next, until an Action is final.
type Search interface {
	// Next takes the result of the last action, at first the zero Observation, and returns
	// the next action.
	Next(Observation) Action
}

// Action is the next step of a search.
type Action struct {
	// Plan must be in force. Changed: Plan differs from the previous plan.
	Plan    placement.Plan
	Changed bool
	// Settle is the wait after the change, Measure the following observation time.
	Settle, Measure time.Duration
	// Step describes the action for people.
	Step string
	// Forecast is the predicted late fraction under Plan, access delay included; below 0:
	// none. Confidence is the confidence of the test in progress; 0: none.
	Forecast, Confidence float64
	// Verdict describes the result of the previous plan for people; empty if the plan
	// stays or was not judged.
	Verdict string
	// Final: the search is over with Outcome, and Plan stays.
	Final   bool
	Outcome Outcome
}

// Observation is the measurement of an action.
type Observation struct {
	// Parts are the brokers' counts of deliveries and of deliveries later than the SLO's
	// latency, access delay included, and the measured quantile.
	Parts []Part
	// Slices are, for each broker of Setup, its deliveries in slices of time. All brokers
	// have the same slices. Only fast uses them.
	Slices [][]Slice
	// Arrivals are the arrivals in order of time. Access replaces them if they are
	// unknown: the number of released messages, and the number whose access delay left no
	// time for the processing of an unloaded message. Only fast uses them. Without
	// arrivals it forecasts nothing and tries one more broker at a time.
	Arrivals []Arrival
	Access   Slice
	// Unloaded is the processing delay of a message that meets no other message, a low
	// quantile; 0: unknown.
	Unloaded time.Duration
}

// Part is one broker's part of an Observation.
type Part struct {
	Count
	Quantile time.Duration
}

// Slice is one broker's deliveries in a slice of time: their number, the number with a
// processing delay above the SLO's latency, and the number above half of the latency.
type Slice struct{ Delivered, Late, HalfLate uint64 }

// Arrival is one message of a publisher, an index into the demand's Expand.
type Arrival struct {
	At        mono.Time
	Publisher int32
}

// Outcome is the result of a search.
type Outcome struct {
	// Fitted: the plan keeps the SLO, as far as the search knows.
	Fitted bool
	// Infeasible explains why there is no plan, if a bound of the placement was met.
	Infeasible *placement.Infeasible
	// Lacking: the brokers had no room for all publishers, or their processing is late. One
	// more broker may help.
	Lacking bool
	// Reason is for people.
	Reason string
	// Rounds is the number of measurements for each number of brokers, or iteration.
	Rounds []Rounds
	// Absorbed is the learned absorption by broker. Only fast learns it.
	Absorbed map[string]Absorption
}

// Rounds is a number of measurements with K brokers.
type Rounds struct{ K, Rounds int }

// Validate returns an error for a setup that cannot be searched. Package placement checks
// the demand and the brokers.
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

// budget returns the fraction that may be late.
func (s Setup) budget() float64 { return 1 - s.Quantile }

// planOf returns the plan for brokerOf, which gives each publisher's broker index or -1.
// Quotas and shares are in proportion to the publishers' rates. Unplaced publishers keep
// their proportion of the contract unused.
func (s Setup) planOf(brokerOf []int, publishers []placement.Publisher) placement.Plan {
	plan := placement.Plan{Policy: s.Policy}
	rates := make([]float64, len(s.Brokers)+1) // the last element: unplaced
	for i, l := range brokerOf {
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
		contract.Burst++ // unplaced publishers need a part of the rate but no token
	}
	shares, err := share.Proportion(contract, weights)
	if err != nil {
		// The burst is below the number of brokers, which placement refuses.
		panic(fmt.Sprintf("tuner: contract %+v over weights %v: %v", contract, weights, err))
	}
	quotas, err := share.Proportion(tokenbucket.Share{Rate: tokenbucket.Rate(s.Demand.Rate), Burst: contract.Burst}, weights)
	if err != nil {
		panic(fmt.Sprintf("tuner: rate %d over weights %v: %v", s.Demand.Rate, weights, err))
	}
	next := make([]int, len(s.Brokers))
	for l, b := range s.Brokers {
		if weights[l] == 0 {
			continue
		}
		next[l] = len(plan.Quotas)
		plan.Quotas = append(plan.Quotas, placement.Quota{Broker: b.ID, Rate: int64(quotas[l].Rate), Share: shares[l]})
	}
	plan.K = len(plan.Quotas)
	for i, l := range brokerOf {
		if l < 0 {
			continue
		}
		q := &plan.Quotas[next[l]]
		q.Publishers = append(q.Publishers, i)
	}
	return plan
}

// whereOf is the inverse of planOf: it returns each publisher's broker index in Setup, or
// -1.
func (s Setup) whereOf(plan placement.Plan, publishers int) []int {
	index := make(map[string]int, len(s.Brokers))
	for l, b := range s.Brokers {
		index[b.ID] = l
	}
	brokerOf := make([]int, publishers)
	for i := range brokerOf {
		brokerOf[i] = -1
	}
	for _, q := range plan.Quotas {
		for _, i := range q.Publishers {
			brokerOf[i] = index[q.Broker]
		}
	}
	return brokerOf
}
