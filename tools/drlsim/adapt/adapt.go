package adapt

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Arrival is a message that arrives at a broker.
type Arrival struct {
	At     stamp.Mono
	Broker int
}

// Phase is a part of a scenario of which figures are wanted.
type Phase struct {
	Name     string
	From, To stamp.Mono
}

// Scenario is a topic's traffic over its brokers.
type Scenario struct {
	Name     string
	Brokers  int
	Contract tokenbucket.Share
	Arrivals []Arrival // by time
	Phases   []Phase
}

// Figures are the 99th percentiles of access delays in a phase; 0 without
// messages.
type Figures struct {
	Phase   string          `json:"phase"`
	Pooled  time.Duration   `json:"pooled_p99_ns"`
	Brokers []time.Duration `json:"broker_p99_ns"`
}

// Poisson returns arrivals at rate msg/s in all from one instant to another,
// spread by weights.
func Poisson(rng *rand.Rand, from, to stamp.Mono, rate float64, weights ...float64) (all []Arrival) {
	var sum float64
	for _, w := range weights {
		sum += w
	}
	for at := from; ; {
		at = at.Add(time.Duration(rng.ExpFloat64() / rate * 1e9))
		if at >= to {
			return all
		}
		x, broker := rng.Float64()*sum, 0
		for x >= weights[broker] && broker < len(weights)-1 {
			x -= weights[broker]
			broker++
		}
		all = append(all, Arrival{at, broker})
	}
}

// Scenarios are those of the design: a topic of 10,000 msg/s, contract 1.1 times
// that and a burst of 60, over two brokers, Poisson; 20 s to settle in front.
func Scenarios(seed uint64) []Scenario {
	s := func(seconds float64) stamp.Mono { return stamp.Mono(seconds * 1e9) }
	contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(11_000), Burst: 60}
	rng := rand.New(rand.NewPCG(seed, 0))
	shift := Scenario{Name: "50/50, 90/10, 95/5", Brokers: 2, Contract: contract}
	shift.Arrivals = slices.Concat(
		Poisson(rng, 0, s(40), 10_000, 50, 50), Poisson(rng, s(40), s(80), 10_000, 90, 10), Poisson(rng, s(80), s(120), 10_000, 95, 5))
	shift.Phases = []Phase{
		{"50/50", s(20), s(40)}, {"90/10: first 5 s", s(40), s(45)}, {"90/10: after", s(55), s(80)},
		{"95/5: first 5 s", s(80), s(85)}, {"95/5: after", s(95), s(120)},
	}
	silent := Scenario{Name: "silent and back", Brokers: 2, Contract: contract}
	silent.Arrivals = slices.Concat(
		Poisson(rng, 0, s(40), 10_000, 50, 50), Poisson(rng, s(40), s(80), 5_000, 100, 0), Poisson(rng, s(80), s(120), 10_000, 50, 50))
	silent.Phases = []Phase{
		{"both", s(20), s(40)}, {"one silent", s(55), s(80)}, {"back: first 5 s", s(80), s(85)}, {"back: after", s(95), s(120)},
	}
	return []Scenario{shift, silent}
}

// Step and Window are those of the adaptor by default.
const (
	Step   = time.Second
	Window = 10 * time.Second
)

type broker struct {
	bucket  tokenbucket.Bucket
	queue   []int // arrivals that wait
	window  share.Window
	offered uint64
	most    int64
}

// Run has the rule follow the scenario and returns the figures of its phases.
func Run(sc Scenario, rule string) ([]Figures, error) {
	led := ledger.New(0, ledger.Leases{})
	brokers := make([]*broker, sc.Brokers)
	index := map[string]int{}
	even := make([]int64, sc.Brokers)
	for i := range brokers {
		brokers[i], even[i] = &broker{}, 1
		index[name(i)] = i
		if _, err := led.Hello(ledger.Session{Broker: name(i), Instance: "1"}, 0); err != nil {
			return nil, err
		}
	}
	shares, err := share.Proportion(sc.Contract, even)
	if err != nil {
		return nil, err
	}
	have := make([]share.Assigned, sc.Brokers)
	for i, s := range shares {
		have[i] = share.Assigned{Broker: name(i), Share: s}
	}
	delays := make([]time.Duration, len(sc.Arrivals))
	drain := func(b *broker, now stamp.Mono) {
		for len(b.queue) > 0 {
			i := b.queue[0]
			at := sc.Arrivals[i].At
			if b.bucket.Eligible(at) > now {
				return
			}
			delays[i] = b.bucket.Take(at).Sub(at)
			b.queue = b.queue[1:]
		}
	}
	// A grant takes milliseconds, and this is about seconds: it is applied at once.
	apply := func(now stamp.Mono, grants []ledger.Grant) error {
		for len(grants) > 0 {
			g := grants[0]
			b := brokers[index[g.Broker]]
			drain(b, now)
			more, err := led.Ack(g.Broker, g.Topic, g.Epoch, g.Share, b.bucket.Retune(now, g.Share, g.Tokens))
			if err != nil {
				return err
			}
			grants = append(grants[1:], more...)
		}
		return nil
	}
	grants, err := led.SetContract("t", ledger.Terms{Contract: sc.Contract}, have)
	if err == nil {
		err = apply(0, grants)
	}
	if err != nil {
		return nil, err
	}

	tick := func(now stamp.Mono) error {
		loads := make([]share.Load, sc.Brokers)
		for i, b := range brokers {
			drain(b, now)
			b.window.Add(share.Step{At: now, Length: Step, Offered: b.offered, MaxBacklog: b.most, Backlog: int64(len(b.queue))}, now.Add(-Window))
			b.offered, b.most = 0, int64(len(b.queue))
			loads[i] = share.Load{Broker: name(i), Share: have[i].Share, Publishers: 1}
			b.window.Fill(&loads[i], now.Add(-Window))
		}
		want, err := share.Split(rule, sc.Contract, loads)
		if err != nil || !share.Differs(have, want) {
			return err
		}
		have = want
		grants, err := led.Propose("t", want)
		if err != nil {
			return err
		}
		return apply(now, grants)
	}
	next := stamp.Mono(Step)
	for i, a := range sc.Arrivals {
		for a.At >= next {
			if err := tick(next); err != nil {
				return nil, err
			}
			next = next.Add(Step)
		}
		b := brokers[a.Broker]
		b.offered++
		b.queue = append(b.queue, i)
		drain(b, a.At)
		b.most = max(b.most, int64(len(b.queue)))
	}
	for range 3600 { // what still waits
		if err := tick(next); err != nil {
			return nil, err
		}
		next = next.Add(Step)
		if !slices.ContainsFunc(brokers, func(b *broker) bool { return len(b.queue) > 0 }) {
			break
		}
	}
	return figures(sc, delays), nil
}

func name(i int) string { return fmt.Sprintf("b%03d", i) }

func figures(sc Scenario, delays []time.Duration) (all []Figures) {
	for _, p := range sc.Phases {
		per := make([][]time.Duration, sc.Brokers)
		var pooled []time.Duration
		for i, a := range sc.Arrivals {
			if a.At >= p.From && a.At < p.To {
				per[a.Broker] = append(per[a.Broker], delays[i])
				pooled = append(pooled, delays[i])
			}
		}
		f := Figures{Phase: p.Name, Pooled: p99(pooled)}
		for _, d := range per {
			f.Brokers = append(f.Brokers, p99(d))
		}
		all = append(all, f)
	}
	return all
}

func p99(delays []time.Duration) time.Duration {
	if len(delays) == 0 {
		return 0
	}
	slices.Sort(delays)
	return delays[tokenbucket.Rank(len(delays), 0.99)]
}
