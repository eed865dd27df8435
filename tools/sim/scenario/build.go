package scenario

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/trace"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// Built is a scenario ready to run.
type Built struct {
	Scenario *Scenario
	// Brokers is the snapshot for placing the scenario's topics. Models are the brokers'
	// models, in the same order.
	Brokers []placement.Broker
	Models  []engine.Model
	Topics  []*Placed
	// background has the existing loads of brokers.
	background []background
}

type background struct {
	broker int
	source *source
}

// Placed is a topic with its contract and placement.
type Placed struct {
	Spec     Topic
	Contract tokenbucket.Share
	Demand   placement.Demand
	// Plan is zero if Infeasible is set.
	Plan       placement.Plan
	Infeasible *placement.Infeasible
	// Where is the broker of each publisher. Shares is the share of each broker, zero for
	// brokers without the topic.
	Where  []int
	Shares []tokenbucket.Share

	source *source
}

// Stream returns the topic's schedule from its start. Every call returns the same
// schedule.
func (p *Placed) Stream() schedule.Stream { return p.source.stream() }

// source is a load ready to run.
type source struct {
	publishers []placement.Publisher
	stream     func() schedule.Stream
	rate       float64 // mean msg/s of all publishers
}

func (l Load) source(seed uint64) (*source, error) {
	var sources []schedule.Source
	s := &source{}
	if l.Trace != nil {
		recording, err := trace.Open(l.Trace.File)
		if err != nil {
			return nil, err
		}
		replay, err := recording.Replay(l.Trace.options(seed))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.Trace.File, err)
		}
		sources, s.stream = replay.Sources(), replay.Stream
	} else {
		spec := l.spec(seed)
		sources, s.stream = spec.Sources(), func() schedule.Stream { return spec.Stream() }
	}
	for _, p := range sources {
		s.publishers = append(s.publishers, placement.Publisher{ID: p.ID, Key: p.Key, Rate: p.Rate, Batch: p.Batch})
		s.rate += p.Rate
	}
	return s, nil
}

// Build reads the calibration and traces, profiles contracts, and places the topics one
// after the other, as they would arrive. A topic that cannot be placed is no error: it
// has Infeasible set and sends no messages.
func Build(s *Scenario) (*Built, error) {
	calibration, err := ReadCalibration(s.Calibration)
	if err != nil {
		return nil, err
	}
	b := &Built{Scenario: s}
	var f faults.List
	for i, spec := range s.Brokers {
		model, mcap, err := calibration.Model(spec.Model)
		if err != nil {
			f.If(true, "brokers[%d]: %w", i, err)
			continue
		}
		for _, id := range spec.names() {
			broker := placement.Broker{ID: id, Mcap: cmp.Or(spec.Mcap, mcap)}
			if spec.Background != nil {
				load, err := spec.Background.source(s.seed("background " + id))
				if err != nil {
					f.If(true, "brokers[%d].background: %w", i, err)
					break
				}
				broker.Allocated = int64(math.Ceil(load.rate * (1 - 1e-9)))
				b.background = append(b.background, background{len(b.Brokers), load})
			}
			broker.Allocated = cmp.Or(spec.Allocated, broker.Allocated)
			b.Brokers = append(b.Brokers, broker)
			b.Models = append(b.Models, model)
		}
	}
	if err := f.Err(); err != nil {
		return nil, err
	}
	snapshot := slices.Clone(b.Brokers)
	for i, spec := range s.Topics {
		p, err := s.place(spec, snapshot)
		if err != nil {
			return nil, fmt.Errorf("topics[%d]: %w", i, err)
		}
		for _, q := range p.Plan.Quotas {
			snapshot[find(snapshot, q.Broker)].Allocated += q.Rate
		}
		b.Topics = append(b.Topics, p)
	}
	return b, nil
}

func find(brokers []placement.Broker, id string) int {
	return slices.IndexFunc(brokers, func(b placement.Broker) bool { return b.ID == id })
}

// seed returns a seed for each use, which does not change when other uses are added.
func (s *Scenario) seed(use string) uint64 {
	h := uint64(14695981039346656037) // FNV-1a
	for _, c := range []byte(use) {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return rand.NewPCG(s.Seed, h).Uint64()
}

func (s *Scenario) place(spec Topic, snapshot []placement.Broker) (*Placed, error) {
	load, err := spec.Load.source(s.seed("topic " + spec.Name))
	if err != nil {
		return nil, err
	}
	p := &Placed{Spec: spec, source: load}
	if p.Contract, err = spec.Contract.profile(load); err != nil {
		return nil, fmt.Errorf("contract: %w", err)
	}
	publishers, err := s.keyed(spec, load.publishers)
	if err != nil {
		return nil, fmt.Errorf("learning: %w", err)
	}
	p.Demand = placement.Demand{
		Topic: spec.Name, Rate: (int64(p.Contract.Rate) + 999) / 1000, RateMilli: int64(p.Contract.Rate), Burst: p.Contract.Burst,
		Publishers: publishers, AtLeast: spec.AtLeast,
	}
	brokers := snapshot
	if spec.K > 0 {
		brokers = forced(snapshot, spec.K, p.Demand.Rate)
		p.Demand.AtLeast = spec.K
	}
	plan, err := s.placeKeyed(spec, brokers, p.Demand)
	if errors.As(err, &p.Infeasible) {
		p.Where = slices.Repeat([]int{engine.Nowhere}, len(load.publishers))
		p.Shares = make([]tokenbucket.Share, len(snapshot))
		return p, nil
	}
	if err != nil {
		return nil, err
	}
	p.Plan = plan
	p.Where, p.Shares = Layout(plan, snapshot, len(load.publishers))
	return p, nil
}

// Layout converts a plan for the engine: the broker of each publisher, or engine.Nowhere,
// and the share of each broker.
func Layout(plan placement.Plan, brokers []placement.Broker, publishers int) (brokerOf []int, shares []tokenbucket.Share) {
	brokerOf, shares = slices.Repeat([]int{engine.Nowhere}, publishers), make([]tokenbucket.Share, len(brokers))
	for _, q := range plan.Quotas {
		l := find(brokers, q.Broker)
		shares[l] = q.Share
		for _, i := range q.Publishers {
			brokerOf[i] = l
		}
	}
	return brokerOf, shares
}

// forced returns a snapshot of the k brokers with the largest rcap, with enough mcap for
// the rate.
func forced(snapshot []placement.Broker, k int, rate int64) []placement.Broker {
	brokers := slices.Clone(snapshot)
	slices.SortStableFunc(brokers, func(a, b placement.Broker) int { return cmp.Compare(b.Mcap-b.Allocated, a.Mcap-a.Allocated) })
	brokers = brokers[:k]
	for i := range brokers {
		b := &brokers[i]
		b.Mcap = max(b.Mcap, b.Allocated+(rate+int64(k)-1)/int64(k))
	}
	return brokers
}

// profile fills in the zero values of the contract.
func (c Contract) profile(load *source) (tokenbucket.Share, error) {
	contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(c.Rate), Burst: c.Burst}
	if c.Rate == 0 {
		contract.Rate = tokenbucket.PerSecond(1.1 * load.rate)
	}
	if c.Burst == 0 {
		arrivals := schedule.Arrivals(schedule.Until(load.stream(), time.Duration(c.ProfileSeconds*1e9)))
		burst, err := tokenbucket.Profile(arrivals, contract.Rate, c.ProfileQuantile)
		if err != nil {
			return tokenbucket.Share{}, err
		}
		contract.Burst = int64(math.Ceil(float64(burst) * (1 + c.Margin)))
	}
	return contract, contract.Validate()
}
