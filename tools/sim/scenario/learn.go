package scenario

import (
	"math/rand/v2"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/correlation"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// The correlation keys for placement.
const (
	Declared = "declared" // the keys of the load
	Learned  = "learned"  // the keys that correlation finds in other traffic of the same publishers
	Blind    = "blind"    // none
)

// Learning selects the traffic from which keys are learned: From to To of a trace, or the
// Seconds (0: 60) of the load after the run. Later traffic is as good as earlier traffic
// for a load that does not change, and periodic publishers keep their phases.
type Learning struct {
	Seconds float64 `json:"seconds,omitempty"`
	From    float64 `json:"from_s,omitempty"`
	To      float64 `json:"to_s,omitempty"`
}

// lessons is the number of learning steps.
const lessons = 6

// keyed returns the load's publishers with the keys for the topic's placement.
func (s *Scenario) keyed(t Topic, publishers []placement.Publisher) ([]placement.Publisher, error) {
	if t.Keys == Declared {
		return publishers, nil
	}
	keyed := slices.Clone(publishers)
	for i := range keyed {
		keyed[i].Key = ""
	}
	if t.Keys == Blind {
		return keyed, nil
	}
	load := t.Load
	if load.Trace != nil {
		earlier := *load.Trace
		earlier.From, earlier.To = t.Learning.From, t.Learning.To
		load.Trace = &earlier
	}
	source, err := load.source(s.seed("topic " + t.Name))
	if err != nil {
		return nil, err
	}
	learner := correlation.New(correlation.Config{})
	begin := duration(s.Warmup + s.Duration)
	lasts := duration(t.Learning.Seconds)
	if load.Trace != nil {
		begin, lasts = 0, duration((load.Trace.To-load.Trace.From)/load.Trace.Compress)
	}
	stream := schedule.Until(source.stream(), begin+lasts)
	lesson := max(1, lasts/lessons)
	for due := begin + lesson; ; {
		e, more := stream.Next()
		for ; due <= begin+lasts && (!more || e.At >= due); due += lesson {
			learner.Learn()
		}
		if !more {
			break
		}
		if e.At < begin {
			continue
		}
		for range e.Count {
			learner.Arrive(source.publishers[e.Source].ID, mono.Time(e.At))
		}
	}
	for i := range keyed {
		keyed[i].Key = learner.Key(keyed[i].ID)
	}
	return keyed, nil
}

// placeKeyed is placement.Place. It shuffles publishers without declared keys, because a
// load numbers its publishers by group.
func (s *Scenario) placeKeyed(t Topic, brokers []placement.Broker, d placement.Demand) (placement.Plan, error) {
	rng := rand.New(rand.NewPCG(s.seed("placement "+t.Name), 0))
	if t.Keys == Declared {
		return placement.Place(t.Policy, brokers, d, rng)
	}
	order := rng.Perm(len(d.Publishers))
	declared := d.Publishers
	d.Publishers = make([]placement.Publisher, len(declared))
	for i, j := range order {
		d.Publishers[i] = declared[j]
	}
	plan, err := placement.Place(t.Policy, brokers, d, rng)
	for _, q := range plan.Quotas {
		for i, j := range q.Publishers {
			q.Publishers[i] = order[j]
		}
	}
	return plan, err
}
