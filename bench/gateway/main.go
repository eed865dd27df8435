// Command gateway measures the gateway in one run (make bench-gateway) and prints two
// tables in Markdown: what it costs beside a bare net/http reverse proxy, and how well it
// chooses among servers of 1, 2 and 4 processors, beside HAProxy, nginx and Apache. What
// is not installed is left out, saying so. It decides nothing; servers.go starts what is
// measured.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
)

func main() {
	if err := serve(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(lifecycle.Main("gateway", func(ctx context.Context) error { return run(ctx, os.Args[1:], os.Stdout) }))
}

// options are the command line's.
type options struct {
	bin    string
	rounds int
	length time.Duration
	rate   float64
	load   float64
	out    io.Writer
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o := options{out: out}
	fs := flag.NewFlagSet("gateway", flag.ContinueOnError)
	fs.StringVar(&o.bin, "bin-dir", "bin", "`folder` of gateway")
	parts := fs.String("parts", "cost,choice", "which `tables`")
	fs.IntVar(&o.rounds, "rounds", 5, "how often the cost of each is measured, in turn; the choice half as often")
	fs.DurationVar(&o.length, "duration", 2*time.Second, "of each; five times as long for the choice")
	fs.Float64Var(&o.rate, "rate", 1000, "requests `per second` for the cost")
	fs.Float64Var(&o.load, "load", 0.7, "`part` of what the unequal servers can do")
	if err := fs.Parse(args); err != nil {
		return lifecycle.UsageError{Err: err}
	}
	var err error
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s, %d CPUs, open loop; medians of rounds in turn.\n", obs.Version(), runtime.NumCPU())
	if strings.Contains(*parts, "cost") {
		err = o.cost(ctx)
	}
	if err == nil && strings.Contains(*parts, "choice") {
		err = o.choice(ctx)
	}
	return err
}

// figures of a round; times in ms but for CPU.
type figures struct {
	mean, sd, p50, p99, p999 float64
	cpu                      float64 // us, per answer
	allocations              float64 // per answer
	shares                   []float64
}

// ask sends requests at a steady rate over as many connections, each of which has one at
// a time, and takes nothing but 200 for an answer.
func ask(s *decide.Server, rate float64, d time.Duration, connections int) (f figures, err error) {
	r, err := decide.Ask(s, decide.Load{Rate: rate, Length: d, Connections: connections}, decide.Stream(func(int64) string { return "GET / HTTP/1.1\r\nHost: x\r\n\r\n" }, func(in *bufio.Reader) error {
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s answered %s", s.Name, resp.Status)
		}
		return nil
	}))
	if err != nil {
		return f, fmt.Errorf("%s: %w", s.Name, err)
	}
	ms := func(q float64) float64 { return r.Latency.Quantile(q).Seconds() * 1e3 }
	const n = 5000 // quantiles, for what the histogram does not add up
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

// subject is a line of a table.
type subject struct {
	name string
	*decide.Server
	mallocs func() (float64, error) // nil: it does not say
	rounds  []figures
}

func (s *subject) median(of func(figures) float64) float64 {
	values := make([]float64, len(s.rounds))
	for i, r := range s.rounds {
		values[i] = of(r)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// present leaves out what is not installed.
func (o *options) present(all []*subject, errs []error) (there []*subject, err error) {
	for i, s := range all {
		switch {
		case errs[i] == nil:
			there = append(there, s)
		case errors.Is(errs[i], decide.ErrAbsent):
			fmt.Fprintf(o.out, "\n%s: left out: %v\n", s.name, errs[i])
		default:
			err = errors.Join(err, fmt.Errorf("%s: %w", s.name, errs[i]))
		}
	}
	return there, err
}

// stop stops those that have started.
func stop(all ...*subject) {
	for _, s := range all {
		if s.Server != nil && s.Process != nil {
			_ = s.Stop() // it has been measured
		}
	}
}

// cost compares what a request takes of each proxy before one server that answers at once.
func (o *options) cost(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "bench-gateway-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	backend, err := self("backend", "0")
	if err != nil {
		return err
	}
	defer backend.Stop()
	all, errs := proxies(o.bin, dir, []string{backend.At}, true)
	defer stop(all...)
	subjects, err := o.present(all, errs)
	if err != nil {
		return err
	}
	for round := range o.rounds + 1 { // the first warms up
		for _, s := range subjects {
			var before, after float64
			if s.mallocs != nil {
				before, err = s.mallocs()
			}
			f, err2 := ask(s.Server, o.rate, o.length, 16)
			if s.mallocs != nil && err == nil {
				after, err = s.mallocs()
			}
			if err := errors.Join(err, err2, ctx.Err()); err != nil {
				return err
			}
			f.allocations = (after - before) / (o.rate * o.length.Seconds())
			if round > 0 {
				s.rounds = append(s.rounds, f)
			}
		}
	}
	fmt.Fprintf(o.out, "\nOne server that answers at once, %.0f requests/s, %d rounds of %v:\n\n| | p50 us | p99 us | p99.9 us | CPU us | allocations |\n|---|---|---|---|---|---|\n", o.rate, o.rounds, o.length)
	for _, s := range subjects {
		allocations := "–"
		if s.mallocs != nil {
			allocations = fmt.Sprintf("%.1f", s.median(func(f figures) float64 { return f.allocations }))
		}
		fmt.Fprintf(o.out, "| %s | %.0f | %.0f | %.0f | %.1f | %s |\n", s.name, 1e3*s.median(p50), 1e3*s.median(p99), 1e3*s.median(func(f figures) float64 { return f.p999 }), s.median(cpu), allocations)
	}
	bare, ours := subjects[0], subjects[2]
	count := func(f figures) float64 { return f.allocations }
	fmt.Fprintln(o.out, "\n| the gateway, to a bare ReverseProxy | is | target | kept |\n|---|---|---|---|")
	o.judge("CPU", ours.median(cpu)/bare.median(cpu), 1.15, "%.2f")
	o.judge("p99", ours.median(p99)/bare.median(p99), 1.2, "%.2f")
	o.judge("allocations more", ours.median(count)-bare.median(count), 2, "%.1f")
	return nil
}

func p50(f figures) float64 { return f.p50 }
func p99(f figures) float64 { return f.p99 }
func cpu(f figures) float64 { return f.cpu }
func sd(f figures) float64  { return f.sd }

func (o *options) judge(what string, is, limit float64, format string) {
	kept := "yes"
	if is > limit {
		kept = "no"
	}
	fmt.Fprintf(o.out, "| %s | "+format+" | <= %v | %s |\n", what, is, limit, kept)
}

// choice compares how each chooses among three servers.
func (o *options) choice(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "bench-gateway-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var backends []*decide.Server
	var at []string
	capacity := 0.0
	for _, processors := range []int{1, 2, 4} {
		b, err := self("backend", fmt.Sprint(processors))
		if err != nil {
			return err
		}
		defer b.Stop()
		backends, at = append(backends, b), append(at, b.At)
		capacity += float64(processors) / service.Seconds()
	}
	all, errs := proxies(o.bin, dir, at, false)
	defer stop(all...)
	subjects, err := o.present(all, errs)
	if err != nil {
		return err
	}
	rate := o.load * capacity
	rounds := max(o.rounds/2, 1)
	for range rounds {
		for _, s := range subjects {
			const connections = 256
			if _, err := ask(s.Server, rate, o.length, connections); err != nil { // it learns
				return err
			}
			before := served(backends)
			f, err := ask(s.Server, rate, 5*o.length, connections)
			if err := errors.Join(err, ctx.Err()); err != nil {
				return err
			}
			sum := 0.0
			for i, n := range served(backends) {
				f.shares = append(f.shares, n-before[i])
				sum += n - before[i]
			}
			for i := range f.shares {
				f.shares[i] *= 100 / sum
			}
			s.rounds = append(s.rounds, f)
		}
	}
	fmt.Fprintf(o.out, "\nServers of 1, 2 and 4 processors, %v of one a request, lognormal; %.0f requests/s, %.0f %% of what they can do, %d rounds of %v:\n\n", service, rate, 100*o.load, rounds, 5*o.length)
	fmt.Fprintln(o.out, "| | mean ms | sd ms | p50 ms | p99 ms | p99.9 ms | sent to each, % |\n|---|---|---|---|---|---|---|")
	var best, bestSd float64
	for i, s := range subjects {
		shares := make([]string, len(at))
		for k := range shares {
			shares[k] = fmt.Sprintf("%.0f", s.median(func(f figures) float64 { return f.shares[k] }))
		}
		fmt.Fprintf(o.out, "| %s | %.1f | %.1f | %.1f | %.1f | %.1f | %s |\n", s.name, s.median(func(f figures) float64 { return f.mean }), s.median(sd), s.median(p50), s.median(p99), s.median(func(f figures) float64 { return f.p999 }), strings.Join(shares, " / "))
		if i > 1 && (best == 0 || s.median(p99) < best) {
			best = s.median(p99)
		}
		if i > 1 && (bestSd == 0 || s.median(sd) < bestSd) {
			bestSd = s.median(sd)
		}
	}
	if best > 0 {
		fmt.Fprintln(o.out, "\n| the gateway, to the best of the others | is | target | kept |\n|---|---|---|---|")
		o.judge("p99", subjects[0].median(p99)/best, 1, "%.2f")
		o.judge("standard deviation", subjects[0].median(sd)/bestSd, 1, "%.2f")
	}
	return nil
}
