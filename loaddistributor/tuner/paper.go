package tuner

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// DefaultRound is the length of a measurement round in the paper.
const DefaultRound = 60 * time.Second

// fullness is the part of the SLO's latency from which a broker's quantile ends its search:
// 20 % below, as in the paper.
const fullness = 0.8

// Paper is the search of the SRTM paper (sections 4.2 and 6.5), in rounds of fixed
// length. An iteration places the unassigned publishers on the fewest non-full brokers,
// by their rcap, and measures. A broker that violates the SLO searches by bisection for
// the number of publishers that it can hold. All searching brokers search in the same
// rounds. A broker's search ends when the broker keeps the SLO within 20 % below it, or
// has no number left to try. The broker is then full, and its excess goes to the next
// iteration. The search ends when all publishers are placed or no broker is left.
//
// Publishers beyond the tried number have no broker in the meantime.
type Paper struct {
	setup      Setup
	round      time.Duration
	rng        *rand.Rand
	publishers []placement.Publisher

	brokerOf []int // by publisher: broker, or -1
	full     []bool
	searches []bisection // searches of the current iteration, by broker; nil publishers: none
	rounds   []Rounds
	started  bool
	outcome  *Outcome
}

// bisection is the search of one broker. Requires: any first n publishers are spread over
// the groups in proportion.
type bisection struct {
	publishers []int // all publishers given to the broker; nil: no search
	low, high  int   // low keeps the SLO, high does not
	attempt    int
}

// NewPaper returns the search with rounds of the given length. rng serves policies that
// place at random.
func NewPaper(setup Setup, round time.Duration, rng *rand.Rand) (*Paper, error) {
	if err := setup.Validate(); err != nil {
		return nil, err
	}
	if round <= 0 {
		return nil, fmt.Errorf("rounds of %v", round)
	}
	setup.Brokers = slices.Clone(setup.Brokers)
	p := &Paper{setup: setup, round: round, rng: rng, publishers: setup.Demand.Expand()}
	p.brokerOf = slices.Repeat([]int{-1}, len(p.publishers))
	p.full = make([]bool, len(setup.Brokers))
	p.searches = make([]bisection, len(setup.Brokers))
	return p, nil
}

// Next implements Search.
func (p *Paper) Next(o Observation) Action {
	if p.outcome != nil {
		return p.final()
	}
	if !p.started {
		p.started = true
		return p.iterate("placing all publishers")
	}
	p.rounds[len(p.rounds)-1].Rounds++
	verdict := p.judge(o)
	if searching := p.searching(); len(searching) > 0 {
		a := p.measure(fmt.Sprintf("%s violate the SLO: searching for how many publishers they hold", strings.Join(searching, ", ")))
		a.Verdict = verdict
		return a
	}
	if slices.Contains(p.brokerOf, -1) {
		a := p.iterate("placing what full brokers returned")
		a.Verdict = verdict
		return a
	}
	return p.end(Outcome{Fitted: true, Reason: "every broker keeps the SLO"})
}

// judge evaluates a round and advances the searches. A broker without deliveries kept the
// SLO. judge returns the brokers that missed the SLO, for people.
func (p *Paper) judge(o Observation) (verdict string) {
	var violating []string
	parts := make(map[string]Part, len(o.Parts))
	for _, part := range o.Parts {
		parts[part.Part] = part
	}
	for l, b := range p.setup.Brokers {
		if p.full[l] {
			continue
		}
		part := parts[b.ID]
		late := float64(min(part.Exceeded, part.Delivered)) / max(1, float64(part.Delivered))
		met := late <= p.setup.budget()*(1+tolerance)
		if !met {
			violating = append(violating, b.ID)
		}
		s := &p.searches[l]
		close := false
		switch {
		case s.publishers == nil && met:
			continue
		case s.publishers == nil:
			publishers := p.inProportion(l)
			*s = bisection{publishers: publishers, high: len(publishers)}
		case met:
			s.low = s.attempt
			close = float64(part.Quantile) >= fullness*float64(p.setup.Latency)
		default:
			s.high = s.attempt
		}
		if s.high-s.low <= 1 || close {
			s.attempt = s.low
			p.assignAttempt(l)
			p.full[l], s.publishers = true, nil
			continue
		}
		s.attempt = (s.low + s.high) / 2
		p.assignAttempt(l)
	}
	if violating == nil {
		return "kept by those who sent"
	}
	return "missed on " + strings.Join(violating, ", ")
}

// assignAttempt gives broker l the first publishers of its search, as many as it tries next.
func (p *Paper) assignAttempt(l int) {
	s := &p.searches[l]
	for i, publisher := range s.publishers {
		p.brokerOf[publisher] = l
		if i >= s.attempt {
			p.brokerOf[publisher] = -1
		}
	}
}

// inProportion returns broker l's publishers in an order whose every prefix is spread
// over their groups in proportion.
func (p *Paper) inProportion(l int) []int {
	sizes := map[string]int{}
	var publishers []int
	for i, broker := range p.brokerOf {
		if broker == l {
			publishers = append(publishers, i)
			sizes[p.publishers[i].Key]++
		}
	}
	counts := map[string]int{}
	place := make(map[int]float64, len(publishers))
	for _, i := range publishers {
		key := p.publishers[i].Key
		place[i] = (float64(counts[key]) + 0.5) / float64(sizes[key])
		counts[key]++
	}
	slices.SortStableFunc(publishers, func(a, b int) int { return cmp.Compare(place[a], place[b]) })
	return publishers
}

func (p *Paper) searching() (names []string) {
	for l, s := range p.searches {
		if s.publishers != nil {
			names = append(names, p.setup.Brokers[l].ID)
		}
	}
	return names
}

// iterate places the unassigned publishers on brokers that are not full.
func (p *Paper) iterate(step string) Action {
	var unassigned []placement.Publisher
	var index []int
	var rate, totalRate float64
	for i, l := range p.brokerOf {
		totalRate += p.publishers[i].Rate
		if l < 0 {
			unassigned = append(unassigned, p.publishers[i])
			index = append(index, i)
			rate += p.publishers[i].Rate
		}
	}
	allocated := make([]float64, len(p.setup.Brokers))
	for i, l := range p.brokerOf {
		if l >= 0 {
			allocated[l] += p.publishers[i].Rate
		}
	}
	// They take the contract in proportion to their rates.
	scale := float64(p.setup.Demand.Rate) / totalRate
	var brokers []placement.Broker
	for l, b := range p.setup.Brokers {
		if p.full[l] {
			continue
		}
		b.Allocated += int64(math.Ceil(allocated[l] * scale * (1 - tolerance)))
		brokers = append(brokers, b)
	}
	d := placement.Demand{
		Topic: p.setup.Demand.Topic, Rate: max(1, int64(math.Ceil(rate*scale*(1-tolerance)))),
		Burst: p.setup.Demand.Burst, Publishers: unassigned,
	}
	plan, err := placement.Place(p.setup.Policy, brokers, d, p.rng)
	if err != nil {
		var infeasible *placement.Infeasible
		if !errors.As(err, &infeasible) {
			return p.end(Outcome{Reason: err.Error()})
		}
		return p.end(Outcome{
			Infeasible: infeasible,
			Lacking:    infeasible.Capacity(),
			Reason:     fmt.Sprintf("%d of %d publishers fit on no broker that is not full: %v", len(unassigned), len(p.brokerOf), infeasible),
		})
	}
	broker := p.setup.whereOf(plan, len(unassigned))
	used := map[int]bool{}
	for j, i := range index {
		p.brokerOf[i] = broker[j]
	}
	for _, l := range p.brokerOf {
		if l >= 0 {
			used[l] = true
		}
	}
	if int64(len(used)) > p.setup.Demand.Burst {
		for _, i := range index {
			p.brokerOf[i] = -1
		}
		return p.end(Outcome{Infeasible: &placement.Infeasible{Bound: "burst", Need: int64(len(used)), Have: p.setup.Demand.Burst}, Reason: "each broker needs a token"})
	}
	p.rounds = append(p.rounds, Rounds{K: len(used)})
	return p.measure(step)
}

func (p *Paper) measure(step string) Action {
	return Action{Plan: p.setup.planOf(p.brokerOf, p.publishers), Changed: true, Measure: p.round, Step: step, Forecast: -1}
}

func (p *Paper) end(o Outcome) Action {
	o.Rounds = p.rounds
	p.outcome = &o
	return p.final()
}

func (p *Paper) final() Action {
	return Action{Plan: p.setup.planOf(p.brokerOf, p.publishers), Changed: true, Step: p.outcome.Reason, Final: true, Outcome: *p.outcome}
}
