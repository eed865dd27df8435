package figures

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// The paper's cluster and SLO.
const (
	brokers = 6
	// sloMs is the bound of the 99th percentile.
	sloMs = 1.0
)

// harness makes a figure.
type harness struct {
	context.Context
	options
	name      string
	stderr    io.Writer
	lastShown time.Time
	out       *work // the output
}

func newHarness(ctx context.Context, o options, name string, stderr io.Writer) *harness {
	return &harness{Context: ctx, options: o, name: name, stderr: stderr, lastShown: time.Now(), out: &work{}}
}

// each calls f for 0 .. n-1, concurrently on all processors, and shows the progress. The
// caller stores results at index i to keep their order.
func (w *harness) each(n int, f func(i int) error) error {
	var mu sync.Mutex
	done := 0
	all, ctx := errgroup.WithContext(w)
	all.SetLimit(runtime.NumCPU())
	for i := range n {
		all.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			err := f(i)
			mu.Lock()
			defer mu.Unlock()
			done++
			w.progress("points", done, n)
			return err
		})
	}
	return all.Wait()
}

// seeded calls run for n configurations, with w.runs seeds each, at most 5, and returns the results
// by configuration and seed.
func seeded[T any](w *harness, n int, run func(i, seed int) (T, error)) ([][]T, error) {
	seeds := min(w.runs, 5)
	results := make([][]T, n)
	for i := range results {
		results[i] = make([]T, seeds)
	}
	return results, w.each(n*seeds, func(i int) (err error) {
		results[i/seeds][i%seeds], err = run(i/seeds, i%seeds)
		return err
	})
}

// summarise returns the spread of a number over the results.
func summarise[T any](results []T, value func(T) float64) spread {
	all := make([]float64, len(results))
	for i, r := range results {
		all[i] = value(r)
	}
	return spreadOf(all)
}

// progress prints the progress at most every two seconds.
func (w *harness) progress(what string, done, n int) {
	if now := time.Now(); now.Sub(w.lastShown) >= 2*time.Second {
		w.lastShown = now
		fmt.Fprintf(w.stderr, "%s: %s, %d of %d\n", w.name, what, done, n)
	}
}

// spread is a mean and a standard deviation.
type spread struct{ mean, sd float64 }

func spreadOf(v []float64) (s spread) {
	for _, x := range v {
		s.mean += x / float64(len(v))
	}
	for _, x := range v {
		s.sd += (x - s.mean) * (x - s.mean)
	}
	s.sd = math.Sqrt(s.sd / float64(max(1, len(v)-1)))
	return s
}

func (s spread) times(by float64) spread { return spread{s.mean * by, s.sd * by} }

// text formats mean and standard deviation with a number of decimals.
func (s spread) text(decimals int) string {
	return fmt.Sprintf("%.*f ± %.*f", decimals, s.mean, decimals, s.sd)
}

func (s spread) String() string { return s.text(2) }

// values returns mean and standard deviation of each spread, as cells of a CSV file.
func values(all ...spread) []float64 {
	cells := make([]float64, 0, 2*len(all))
	for _, s := range all {
		cells = append(cells, s.mean, s.sd)
	}
	return cells
}

// outcome summarises several runs of a scenario with different seeds; delays in ms.
type outcome struct {
	k                  int
	runs               int
	p50, p95, p99      spread
	access, processing spread // p99
	late               spread // fraction of messages later than the SLO
	// parts is the p99 of each used broker, by id.
	parts map[string]spread
	// quota is the number of publishers per broker in the first run.
	quota map[string]int
	burst spread // b of the contract
	// infeasible explains why nothing was run.
	infeasible string
}

// met reports whether the mean p99 is within the SLO.
func (o *outcome) met() bool { return o.infeasible == "" && o.p99.mean <= sloMs }

// repeat runs a scenario with w.runs seeds.
func (w *harness) repeat(s scenario.Scenario) (*outcome, error) {
	o := &outcome{runs: w.runs, parts: map[string]spread{}, quota: map[string]int{}}
	targets := []*spread{&o.p50, &o.p95, &o.p99, &o.access, &o.processing, &o.late, &o.burst}
	values := make([][]float64, len(targets))
	parts := map[string][]float64{}
	for i := range w.runs {
		if err := w.Err(); err != nil {
			return nil, err
		}
		s.Seed = w.seedOf(i)
		built, err := scenario.New(s)
		if err != nil {
			return nil, err
		}
		r, err := scenario.Run(built)
		if err != nil {
			return nil, err
		}
		t := &r.Topics[0]
		if f := t.Infeasible; f != nil {
			o.infeasible = fmt.Sprintf("%s: %d needed, %d there", f.Bound, f.Need, f.Have)
			return o, nil
		}
		o.k = t.K
		for j, v := range []float64{
			millis(t.Delivery.P50), millis(t.Delivery.P95), millis(t.Delivery.P99), millis(t.Access.P99), millis(t.Processing.P99),
			t.SLO.Fraction, float64(t.Contract.Burst),
		} {
			values[j] = append(values[j], v)
		}
		for _, p := range t.Parts {
			parts[p.Broker] = append(parts[p.Broker], millis(p.Delivery.P99))
			if i == 0 {
				o.quota[p.Broker] = p.Publishers
			}
		}
	}
	for j, target := range targets {
		*target = spreadOf(values[j])
	}
	for id, v := range parts {
		o.parts[id] = spreadOf(v)
	}
	return o, nil
}

// seedOf is the seed of run i.
func (w *harness) seedOf(i int) uint64 { return w.seed*1_000_003 + uint64(i) + 1 }

func millis[D ~int64](ns D) float64 { return float64(ns) / 1e6 }

// search runs a scenario on an increasing number of brokers, k or more, and stops at the
// first number that meets the SLO. If no number does, search returns the outcome with the
// least p99, like the paper.
func (w *harness) search(from int, scenarioAt func(k int) scenario.Scenario) (best *outcome, err error) {
	for k := from; k <= brokers; k++ {
		o, err := w.repeat(scenarioAt(k))
		if err != nil {
			return nil, err
		}
		if best == nil || o.infeasible == "" && o.p99.mean < best.p99.mean {
			best = o
		}
		if o.infeasible != "" || o.met() {
			return best, nil
		}
		k = max(k, o.k)
	}
	return best, nil
}

// scene is a scenario with one topic on idle brokers.
func (w *harness) scene(t scenario.Topic) scenario.Scenario {
	t.Name = "t"
	if t.Contract.ProfileSeconds == 0 {
		t.Contract.ProfileSeconds = w.seconds + w.warmup()
	}
	return scenario.Scenario{
		Calibration: scenario.Paper, Warmup: w.warmup(), Duration: w.seconds,
		Brokers: []scenario.Broker{{ID: "b", Count: brokers}}, Topics: []scenario.Topic{t},
	}
}

// warmup is the time before the measurement, in seconds. Queues start empty and fill to
// their usual length during the warm-up.
func (w *harness) warmup() float64 { return min(1, w.seconds) }

// columns are the CSV columns of an outcome.
var columns = []string{
	"k", "p50_ms", "p50_sd", "p95_ms", "p95_sd", "p99_ms", "p99_sd", "access_p99_ms", "processing_p99_ms",
	"late_fraction", "burst", "slo_met", "runs", "infeasible",
}

func (o *outcome) cells() []string {
	if o.infeasible != "" {
		return slices.Concat(slices.Repeat([]string{""}, len(columns)-1), []string{o.infeasible})
	}
	return cells(o.k, o.p50.mean, o.p50.sd, o.p95.mean, o.p95.sd, o.p99.mean, o.p99.sd, o.access.mean, o.processing.mean, o.late.mean, o.burst.mean,
		o.met(), o.runs, "")
}

// cells formats values for a CSV file, and flattens lists.
func cells(values ...any) (all []string) {
	for _, value := range values {
		switch v := value.(type) {
		case float64:
			all = append(all, number(v))
		case []float64:
			for _, x := range v {
				all = append(all, number(x))
			}
		case []string:
			all = append(all, v...)
		default:
			all = append(all, fmt.Sprint(v))
		}
	}
	return all
}

// number formats a number with four significant digits.
func number(x float64) string { return strconv.FormatFloat(x, 'g', 4, 64) }

// ms formats milliseconds for people.
func ms(x float64) string { return fmt.Sprintf("%.*f ms", decimals(x), x) }

// ms formats milliseconds and their standard deviation for people.
func (s spread) ms() string { return s.text(decimals(s.mean)) + " ms" }

// decimals returns the number of decimals that gives a positive number three digits.
func decimals(x float64) int {
	switch {
	case x >= 100:
		return 0
	case x >= 10:
		return 1
	}
	return 2
}
