package scenario

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/bucket"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// FitOptions configure a fit.
type FitOptions struct {
	Mode string // tuner.ModeFast or ModePaper
	// Round is the length of a round of the paper's search.
	Round time.Duration
	// Fast configures the fast search.
	Fast tuner.FastConfig
	// Check is the duration of a run with the placement found; 0: no run.
	Check time.Duration
	// Progress receives every change; may be nil.
	Progress func(at time.Duration, step string)
}

// FitResult is the result of fitting a topic. The JSON form is drlsim's contract.
type FitResult struct {
	Topic  string `json:"topic"`
	Mode   string `json:"mode"`
	Seed   uint64 `json:"seed"`
	Fitted bool   `json:"fitted"`
	Reason string `json:"reason"`
	// K is the final number of brokers, Unplaced the number of publishers without a
	// broker.
	K        int `json:"k"`
	Unplaced int `json:"unplaced"`
	// Placed is the second from which the final placement is in force.
	Placed float64 `json:"placed_s"`
	// Rounds are the placements tried, or the paper's rounds in each iteration.
	Rounds []Rounds `json:"rounds"`
	// Seconds is the total duration, until the SLO was shown to be kept.
	Seconds float64 `json:"seconds"`
	// Absorbed has the shares that a fast search learned for brokers.
	Absorbed map[string]Share `json:"absorbed,omitempty"`
	Contract Share            `json:"contract"`
	// Check is nil if there was no check.
	Check *Check `json:"check,omitempty"`
}

// Rounds is the number of measurements with K brokers.
type Rounds struct {
	K      int `json:"k"`
	Rounds int `json:"rounds"`
}

// Check is the result of a long run.
type Check struct {
	Seconds  float64      `json:"seconds"`
	Messages uint64       `json:"messages"`
	P99      bucket.Delay `json:"p99_s"`
	// Access and Processing are the 99th percentiles of the two parts of the latency.
	Access     bucket.Delay `json:"access_p99_s"`
	Processing bucket.Delay `json:"processing_p99_s"`
	Fraction   float64      `json:"late_fraction"`
	Met        bool         `json:"met"`
}

// slice is the interval at which the fast search receives late messages.
const slice = 10 * time.Millisecond

type fitRun struct {
	built   *Built
	placed  *Placed
	setup   tuner.Setup
	cluster *engine.Cluster
	latency time.Duration
	moved   mono.Time // last move of publishers
	// stream is a second copy of the topic's schedule, for the brokers' arrival stamps.
	stream    schedule.Stream
	next      schedule.Event
	exhausted bool

	// Observations since from.
	observedFrom mono.Time
	watching     bool
	checking     bool // only the parts are recorded
	parts        []*part
	slices       [][]tuner.Slice
	unloaded     *histogram.Latency
	restarted    bool
}

// Fit fits the first topic of a built scenario and replaces the topic's placement. The
// result depends only on the arguments.
func Fit(b *Built, o FitOptions) (*FitResult, error) {
	p := b.Topics[0]
	r := &fitRun{built: b, placed: p, latency: time.Duration(p.Spec.SLO.LatencyMs / 1000 * 1e9)}
	r.setup = tuner.Setup{
		Policy: p.Spec.Policy, Brokers: b.Brokers, Demand: p.Demand,
		Quantile: p.Spec.SLO.Quantile, Latency: r.latency,
	}
	rng := rand.New(rand.NewPCG(b.Scenario.Seed, 0xf17))
	var search tuner.Search
	var err error
	switch o.Mode {
	case tuner.ModePaper:
		search, err = tuner.NewPaper(r.setup, o.Round, rng)
	case tuner.ModeFast:
		search, err = tuner.NewFast(r.setup, o.Fast, rng)
	default:
		return nil, fmt.Errorf("unknown mode %q: there are %s, %s", o.Mode, tuner.ModeFast, tuner.ModePaper)
	}
	if err != nil {
		return nil, err
	}
	// No publisher has a broker before the search places one.
	p.Where = slices.Repeat([]int{engine.Nowhere}, len(p.Where))
	p.Shares = make([]tokenbucket.Share, len(b.Brokers))
	if r.cluster, err = b.Cluster(r.observe); err != nil {
		return nil, err
	}
	r.stream = p.Stream()
	r.read()
	r.forget()
	var observed tuner.Observation
	for {
		a := search.Next(observed)
		if a.Changed {
			if o.Progress != nil {
				o.Progress(time.Duration(r.cluster.Now()), a.Step)
			}
			if err := r.apply(a.Plan); err != nil {
				return nil, err
			}
		}
		if a.Final {
			return r.end(a, o)
		}
		r.watching = false
		r.cluster.Advance(r.cluster.Now().Add(a.Settle))
		r.forget()
		r.watching = true
		r.cluster.Advance(r.cluster.Now().Add(a.Measure))
		observed = r.observation()
	}
}

// apply applies a plan. The first plan starts with full buckets, because the contract is
// unused. Later, tokens move with the shares.
func (r *fitRun) apply(plan placement.Plan) error {
	brokerOf, shares := Layout(plan, r.built.Brokers, len(r.placed.Where))
	if err := r.cluster.Move(0, brokerOf); err != nil {
		return err
	}
	if !slices.Equal(brokerOf, r.placed.Where) {
		r.moved = r.cluster.Now()
	}
	r.placed.Where = brokerOf
	if r.restarted {
		return r.cluster.Retune(0, shares)
	}
	r.restarted = true
	return r.cluster.Restart(0, shares)
}

func (r *fitRun) read() {
	e, ok := r.stream.Next()
	r.next, r.exhausted = e, !ok
}

func (r *fitRun) forget() {
	r.observedFrom = r.cluster.Now()
	r.parts = newParts(len(r.built.Brokers))
	r.slices = make([][]tuner.Slice, len(r.built.Brokers))
	r.unloaded = histogram.NewLatency()
}

func (r *fitRun) observe(d engine.Delivery) {
	if d.Topic != 0 || !r.watching {
		return
	}
	if d.At >= r.observedFrom {
		r.parts[d.Broker].record(d, r.latency)
	}
	if r.checking {
		return
	}
	r.unloaded.Record(d.Processing())
	i := int(d.Eligible.Sub(r.observedFrom) / slice)
	slices := &r.slices[d.Broker]
	for len(*slices) <= i {
		*slices = append(*slices, tuner.Slice{})
	}
	(*slices)[i].Delivered++
	if d.Processing() > r.latency {
		(*slices)[i].Late++
	}
	if d.Processing() > r.latency/2 {
		(*slices)[i].HalfLate++
	}
}

func (r *fitRun) observation() tuner.Observation {
	o := tuner.Observation{Slices: r.slices, Unloaded: r.unloaded.Quantile(0.1)}
	for !r.exhausted && mono.Time(r.next.At) < r.cluster.Now() {
		for range r.next.Count {
			o.Arrivals = append(o.Arrivals, tuner.Arrival{At: mono.Time(r.next.At), Publisher: r.next.Source})
		}
		r.read()
	}
	for l, c := range r.built.counts(r.parts) {
		o.Parts = append(o.Parts, tuner.Part{Count: c, Quantile: r.parts[l].delivery.Quantile(r.setup.Quantile)})
	}
	return o
}

func (r *fitRun) end(a tuner.Action, o FitOptions) (*FitResult, error) {
	out := &FitResult{
		Topic: r.placed.Spec.Name, Mode: o.Mode, Seed: r.built.Scenario.Seed, Fitted: a.Outcome.Fitted, Reason: a.Outcome.Reason,
		K: a.Plan.K, Unplaced: len(a.Plan.Unplaced), Placed: time.Duration(r.moved).Seconds(), Seconds: time.Duration(r.cluster.Now()).Seconds(), Absorbed: map[string]Share{},
		Contract: shareOf(r.placed.Contract), Rounds: []Rounds{},
	}
	for _, n := range a.Outcome.Rounds {
		out.Rounds = append(out.Rounds, Rounds(n))
	}
	for id, absorbed := range a.Outcome.Absorbed {
		out.Absorbed[id] = Share{RateMilli: int64(absorbed.Rate), Burst: absorbed.Burst}
	}
	if o.Check == 0 || a.Plan.K == 0 {
		return out, nil
	}
	r.watching = false
	r.cluster.Advance(r.cluster.Now().Add(time.Second))
	r.forget()
	r.watching, r.checking = true, true
	r.cluster.Advance(r.cluster.Now().Add(o.Check))
	all := newPart()
	for _, p := range r.parts {
		all.add(p)
	}
	v := r.built.judge(r.setup.Quantile, r.parts)
	at := func(l *histogram.Latency) bucket.Delay { return bucket.Delay(l.Quantile(0.99)) }
	out.Check = &Check{
		Seconds: o.Check.Seconds(), Messages: uint64(all.delivery.Count()), P99: at(all.delivery), Access: at(all.access), Processing: at(all.processing),
		Fraction: v.Fraction, Met: v.Met,
	}
	return out, nil
}
