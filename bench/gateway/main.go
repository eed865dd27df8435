// Package gateway measures the gateway in one run (make bench-gateway) and prints two
// Markdown tables. The first table compares the gateway's cost with a bare net/http reverse
// proxy. The second table compares the choice among servers of 1, 2 and 4 processors with
// HAProxy, nginx and Apache. Programs that are not installed are reported and left out.
// servers.go starts the programs.
package gateway

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/program"
)

// options holds the flags.
type options struct {
	bin    string
	rounds int
	length time.Duration
	rate   float64
	load   float64
	out    io.Writer
}

// Run prints the gateway's cost and the quality of its choice.
func Run(ctx context.Context, args []string, out, _ io.Writer) error {
	o := options{out: out}
	fs := flag.NewFlagSet("gateway", flag.ContinueOnError)
	fs.StringVar(&o.bin, "bin-dir", "bin", "`folder` of gateway")
	parts := fs.String("parts", "cost,choice", "which `tables`")
	fs.IntVar(&o.rounds, "rounds", 5, "how often the cost of each is measured, in turn; the choice half as often")
	fs.DurationVar(&o.length, "duration", 2*time.Second, "of each; five times as long for the choice")
	fs.Float64Var(&o.rate, "rate", 1000, "requests `per second` for the cost")
	fs.Float64Var(&o.load, "load", 0.7, "`part` of what the unequal servers can do")
	if err := host.Parse(fs, args, out); err != nil {
		return host.Usage(err)
	}
	var err error
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s, %d CPUs, open loop; medians of rounds in turn.\n", program.Version(), runtime.NumCPU())
	if strings.Contains(*parts, "cost") {
		err = o.cost(ctx)
	}
	if err == nil && strings.Contains(*parts, "choice") {
		err = o.choice(ctx)
	}
	return err
}

// figures are the metrics of a round; times in ms, except cpu.
type figures struct {
	mean, sd, p50, p99, p999 float64
	cpu                      float64 // us, per answer
	allocations              float64 // per answer
	shares                   []float64
}

func p50(f figures) float64   { return f.p50 }
func p99(f figures) float64   { return f.p99 }
func p999(f figures) float64  { return f.p999 }
func cpu(f figures) float64   { return f.cpu }
func sd(f figures) float64    { return f.sd }
func count(f figures) float64 { return f.allocations }

// micros converts a metric from ms to us.
func micros(value func(figures) float64) func(figures) float64 {
	return func(f figures) float64 { return 1e3 * value(f) }
}

// ask sends requests at a steady rate over the given number of connections, each with one
// request at a time.
func ask(s *decide.Server, rate float64, d time.Duration, connections int) (f figures, err error) {
	r, err := decide.HTTP(s, decide.Load{Rate: rate, Length: d, Connections: connections}, "/")
	if err != nil {
		return f, fmt.Errorf("%s: %w", s.Name, err)
	}
	ms := func(q float64) float64 { return r.Latency.Quantile(q).Seconds() * 1e3 }
	const n = 5000 // the histogram has no sums, so mean and sd are computed from quantiles
	var sum, squares float64
	for i := range n {
		v := ms((float64(i) + 0.5) / n)
		sum, squares = sum+v, squares+v*v
	}
	f.mean = sum / n
	f.sd = math.Sqrt(max(squares/n-f.mean*f.mean, 0))
	f.p50, f.p99, f.p999 = ms(.5), ms(.99), ms(.999)
	f.cpu = float64(r.CPU) / 1e3
	return f, nil
}

// Names of the subjects of targets.
const bare, ours = "bare ReverseProxy", "gateway"

// subject is a row of a table.
type subject struct {
	name string
	*decide.Server
	err     error  // why the subject did not start
	metrics string // host:port of the allocation metrics; empty: none
}

// mallocs returns the number of allocations so far.
func (s *subject) mallocs(ctx context.Context) (float64, error) {
	if s.metrics == "" {
		return 0, nil
	}
	all, err := host.Metrics(ctx, s.metrics)
	return all[decide.Mallocs], err
}

// cost compares the cost of a request among proxies, with a server that answers without
// delay.
func (o *options) cost(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "bench-gateway-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	backend, err := decide.Bare("backend", "0")
	if err != nil {
		return err
	}
	defer decide.Stop(backend)
	all := proxies(o.bin, dir, []*decide.Server{backend}, true)
	defer stop(all)
	subjects, err := o.subjects(all, func(s *subject) (figures, error) {
		before, err := s.mallocs(ctx)
		if err != nil {
			return figures{}, err
		}
		f, err := ask(s.Server, o.rate, o.length, 16)
		if err != nil {
			return f, err
		}
		after, err := s.mallocs(ctx)
		f.allocations = (after - before) / (o.rate * o.length.Seconds())
		return f, err
	})
	if err != nil {
		return err
	}
	if _, err := host.Rounds(ctx, 1, subjects); err != nil { // warm-up
		return err
	}
	got, err := host.Rounds(ctx, o.rounds, subjects)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.out, "\nOne server that answers at once, %.0f requests/s, %d rounds of %v:\n\n", o.rate, o.rounds, o.length)
	table := host.Table[figures]{
		host.Figure("p50 us", "%.0f", micros(p50)), host.Figure("p99 us", "%.0f", micros(p99)), host.Figure("p99.9 us", "%.0f", micros(p999)),
		host.Figure("CPU us", "%.1f", cpu),
		{Title: "allocations", Format: "%.1f", Value: func(f figures) (float64, bool) { return f.allocations, f.allocations > 0 }},
	}
	table.Write(o.out, subjects, got)
	host.Judge(o.out, "the gateway, to a bare ReverseProxy", got, []host.Target[figures]{
		host.Ratio("CPU", ours, bare, cpu, 1.15), host.Ratio("p99", ours, bare, p99, 1.2),
		{What: "allocations more", Format: "%.1f", Limit: 2, Value: func(results map[string][]figures) (float64, bool) {
			return host.Median(results[ours], count) - host.Median(results[bare], count), true
		}},
	})
	return nil
}

// choice compares how the proxies choose among three servers.
func (o *options) choice(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "bench-gateway-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var backends []*decide.Server
	capacity := 0.0
	for _, processors := range []int{1, 2, 4} {
		b, err := decide.Bare("backend", fmt.Sprint(processors))
		if err != nil {
			return err
		}
		defer decide.Stop(b)
		backends = append(backends, b)
		capacity += float64(processors) / decide.Service.Seconds()
	}
	all := proxies(o.bin, dir, backends, false)
	defer stop(all)
	rate, rounds := o.load*capacity, max(o.rounds/2, 1)
	subjects, err := o.subjects(all, func(s *subject) (f figures, err error) {
		const connections = 256
		if _, err := ask(s.Server, rate, o.length, connections); err != nil { // learning phase
			return f, err
		}
		before := served(ctx, backends)
		if f, err = ask(s.Server, rate, 5*o.length, connections); err != nil {
			return f, err
		}
		sum := 0.0
		for i, n := range served(ctx, backends) {
			f.shares = append(f.shares, n-before[i])
			sum += n - before[i]
		}
		for i := range f.shares {
			f.shares[i] *= 100 / sum
		}
		return f, nil
	})
	if err != nil {
		return err
	}
	got, err := host.Rounds(ctx, rounds, subjects)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.out, "\nServers of 1, 2 and 4 processors, %v of one a request, lognormal; %.0f requests/s, %.0f %% of what they can do, %d rounds of %v:\n\n", decide.Service, rate, 100*o.load, rounds, 5*o.length)
	table := host.Table[figures]{
		host.Figure("mean ms", "%.1f", func(f figures) float64 { return f.mean }), host.Figure("sd ms", "%.1f", sd),
		host.Figure("p50 ms", "%.1f", p50), host.Figure("p99 ms", "%.1f", p99), host.Figure("p99.9 ms", "%.1f", p999),
		{Title: "sent to each, %", Text: func(rounds []figures) string {
			shares := make([]string, len(backends))
			for k := range shares {
				shares[k] = fmt.Sprintf("%.0f", host.Median(rounds, func(f figures) float64 { return f.shares[k] }))
			}
			return strings.Join(shares, " / ")
		}},
	}
	table.Write(o.out, subjects, got)
	if len(subjects) > 2 { // others besides the two gateways
		best := func(what string, value func(figures) float64) host.Target[figures] {
			return host.Target[figures]{What: what, Format: "%.2f", Limit: 1, Value: func(results map[string][]figures) (float64, bool) {
				least := math.Inf(1)
				for _, s := range subjects[2:] {
					least = min(least, host.Median(results[s.Name], value))
				}
				return host.Median(results[ours], value) / least, true
			}}
		}
		host.Judge(o.out, "the gateway, to the best of the others", got, []host.Target[figures]{best("p99", p99), best("standard deviation", sd)})
	}
	return nil
}

// subjects returns the started servers with their measurement.
func (o *options) subjects(all []*subject, measure func(*subject) (figures, error)) ([]host.Subject[figures], error) {
	var subjects []host.Subject[figures]
	for _, s := range all {
		subjects = append(subjects, host.Subject[figures]{Name: s.name, Err: s.err, Measure: func(int) (figures, error) { return measure(s) }})
	}
	fmt.Fprintln(o.out)
	return host.Present(o.out, subjects)
}
