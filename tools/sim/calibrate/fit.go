package calibrate

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// Load is who sent during a measurement: Poisson publishers without a limit.
type Load struct {
	Publishers int
	Rate       float64 // msg/s of all
	Batch      int     // messages that one sends back to back
	Duration   time.Duration
	Seed       uint64 // of the schedule
}

// Spec is the schedule of the load, the emulator's as well as the simulator's.
func (l Load) Spec() schedule.Spec {
	return schedule.Spec{Publishers: l.Publishers, Rate: l.Rate / float64(l.Publishers), Batch: l.Batch, Process: schedule.Poisson, Size: 100, Seed: l.Seed}
}

// Figures are what a broker makes of a load: quantiles of the processing delay,
// and the processor time for each message.
type Figures struct {
	P50, P99, P999 time.Duration
	CPU            time.Duration
}

// Measurement is a load and what became of it.
type Measurement struct {
	Load
	Figures
}

// Parameters are a broker of one server: constant service times, and the
// additional latency by three of its quantiles.
type Parameters struct {
	Wake, Message  time.Duration
	P50, P99, P999 time.Duration
}

// Overhead is the additional latency's distribution. Between the quantiles that
// are parameters it has the tail of an exponential one; above the last it stays
// there and below the median it falls to half of it, since measurements say
// nothing of either.
func (p Parameters) Overhead() []engine.Point {
	points := []engine.Point{{At: 0, Value: p.P50 / 2}}
	tail := func(from, to float64, low, high time.Duration, at ...float64) {
		for _, q := range at {
			part := math.Log((1-from)/(1-q)) / math.Log((1-from)/(1-to))
			points = append(points, engine.Point{At: q, Value: low + time.Duration(part*float64(high-low))})
		}
	}
	tail(0.5, 0.99, p.P50, p.P99, 0.5, 0.75, 0.9, 0.97)
	tail(0.99, 0.999, p.P99, p.P999, 0.99, 0.997, 0.999)
	return append(points, engine.Point{At: 1, Value: p.P999})
}

// Model is the engine's broker.
func (p Parameters) Model() (engine.Model, error) {
	overhead, err := engine.NewDist(p.Overhead())
	return engine.Model{Servers: 1, Wake: engine.Constant(p.Wake), Message: engine.Constant(p.Message), Overhead: overhead}, err
}

// Simulate has a broker of these parameters carry the load.
func Simulate(l Load, p Parameters) (Figures, error) {
	model, err := p.Model()
	if err != nil {
		return Figures{}, err
	}
	var delays []time.Duration
	cluster, err := engine.New([]engine.Model{model}, []engine.Topic{{
		Stream: schedule.Until(l.Spec().Stream(), l.Duration), Where: make([]int, l.Publishers),
	}}, l.Seed, func(d engine.Delivery) { delays = append(delays, d.Processing()) })
	if err != nil {
		return Figures{}, err
	}
	cluster.Advance(mono.Time(l.Duration))
	if len(delays) == 0 {
		return Figures{}, fmt.Errorf("nothing is sent at %v msg/s in %v", l.Rate, l.Duration)
	}
	slices.Sort(delays)
	at := func(q float64) time.Duration { return delays[tokenbucket.Rank(len(delays), q)] }
	return Figures{at(0.5), at(0.99), at(0.999), cluster.Busy(0) / time.Duration(len(delays))}, nil
}

// The weights of the squared logarithms of simulated to measured. The SLO is
// about the 99th percentile; a 99.9th of some seconds is a few messages. The
// processor time keeps the service times apart from the rest, and falls with the
// rate in a real broker, where several connections share a wake-up, as it does
// not in the engine.
const (
	weightP50  = 1.0
	weightP99  = 1.0
	weightP999 = 0.1
	weightCPU  = 0.1
)

// Steps of the search, as factors of e.
const (
	firstStep = 0.5
	lastStep  = 0.005
)

// maxTries bounds the search.
const maxTries = 1000

// Fit returns the parameters with which the simulated figures are closest to
// those measured: the least sum of squared logarithms, found by a search along
// each parameter. Every fault of the measurements is an error.
func Fit(measured []Measurement) (Parameters, error) {
	if err := validate(measured); err != nil {
		return Parameters{}, err
	}
	// Logarithms of the service times and of what each quantile has more than
	// the one before: any vector is a broker.
	cheapest, quietest := measured[0], measured[0]
	for _, m := range measured {
		if m.CPU < cheapest.CPU {
			cheapest = m
		}
		if m.P99 < quietest.P99 {
			quietest = m
		}
	}
	log := func(d time.Duration) float64 { return math.Log(float64(max(d, time.Microsecond))) }
	at := []float64{
		log(cheapest.CPU / 2), log(cheapest.CPU / 2),
		log(quietest.P50 / 2), log(quietest.P99 - quietest.P50), log(quietest.P999 - quietest.P99),
	}
	best, err := distance(measured, parameters(at))
	if err != nil {
		return Parameters{}, err
	}
	tries := 0
	for step := firstStep; step >= lastStep && tries < maxTries; {
		better := false
		for i := range at {
			for _, by := range []float64{step, -step} {
				next := slices.Clone(at)
				next[i] += by
				d, err := distance(measured, parameters(next))
				if err != nil {
					return Parameters{}, err
				}
				if tries++; d < best {
					at, best, better = next, d, true
					break
				}
			}
		}
		if !better {
			step /= 2
		}
	}
	return parameters(at), nil
}

func validate(measured []Measurement) error {
	if len(measured) < 2 {
		return fmt.Errorf("%d measurements: want 2 or more", len(measured))
	}
	var f faults.List
	for i, m := range measured {
		if m.Publishers < 1 || m.Duration <= 0 {
			f.If(true, "measurement %d: %d publishers for %v", i, m.Publishers, m.Duration)
			continue
		}
		f.If(m.P50 <= 0 || m.P99 < m.P50 || m.P999 < m.P99 || m.P999 > time.Minute, "measurement %d: quantiles %v, %v, %v do not ascend within 0 to a minute", i, m.P50, m.P99, m.P999)
		f.If(m.CPU <= 0 || m.CPU > time.Second, "measurement %d: %v of processor time for a message, want more than 0, up to 1s", i, m.CPU)
		err := m.Spec().Validate()
		f.If(err != nil, "measurement %d: %w", i, err)
	}
	return f.Err()
}

// parameters undoes the logarithms; more than a minute is of no use.
func parameters(at []float64) Parameters {
	exp := func(x float64) time.Duration { return time.Duration(math.Min(math.Exp(x), 60e9)) }
	p := Parameters{Wake: exp(at[0]), Message: exp(at[1]), P50: exp(at[2])}
	p.P99 = p.P50 + exp(at[3])
	p.P999 = p.P99 + exp(at[4])
	return p
}

func distance(measured []Measurement, p Parameters) (float64, error) {
	sum := 0.0
	for _, m := range measured {
		f, err := Simulate(m.Load, p)
		if err != nil {
			return 0, err
		}
		square := func(weight float64, got, want time.Duration) {
			l := math.Log(float64(max(got, 1)) / float64(want))
			sum += weight * l * l
		}
		square(weightP50, f.P50, m.P50)
		square(weightP99, f.P99, m.P99)
		square(weightP999, f.P999, m.P999)
		square(weightCPU, f.CPU, m.CPU)
	}
	return sum, nil
}
