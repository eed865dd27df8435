//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/tools/load"
)

func main() { os.Exit(lifecycle.Main("replicated", start)) }

const (
	publishers = 10
	size       = 100
	warming    = time.Second
	ahead      = 200 // messages of a publisher that are not acknowledged, in a flood
	batch      = 50  // messages in one command, in a flood of batches
	// patience is how long what was paced may take to be delivered, at the end.
	patience = 10 * time.Second
)

type config struct {
	programs
	rate    float64
	lasting time.Duration
	rounds  int
	seed    uint64
}

func start(ctx context.Context) error {
	c, err := parse(os.Args[1:])
	if err != nil {
		return host.Usage(err)
	}
	servers := c.servers()
	paced, flood, batches := map[string][]result{}, map[string][]result{}, map[string][]result{}
	for round := range c.rounds {
		for i := range servers {
			s := servers[(i+round)%len(servers)]
			for _, work := range []struct {
				name string
				rate float64
				of   int
				into map[string][]result
			}{{"paced", c.rate, 1, paced}, {"flood", 0, 1, flood}, {"batches", 0, batch, batches}} {
				if work.of > 1 && !s.batches {
					continue
				}
				r, err := measure(ctx, s, work.rate, work.of, c.lasting, c.seed+uint64(round))
				if err != nil {
					return fmt.Errorf("%s, %s, round %d: %w", s.name, work.name, round+1, err)
				}
				work.into[s.name] = append(work.into[s.name], r)
				fmt.Fprintf(os.Stderr, "round %d, %s, %s: %.0f msg/s, acknowledged p99 %.2f ms, delivered p99 %.2f ms, %.1f us/msg\n",
					round+1, s.name, work.name, r.in, r.acked[1], r.delivered[1], r.cpu)
			}
		}
	}
	return c.page(ctx, os.Stdout, servers, paced, flood, batches)
}

func parse(args []string) (c config, err error) {
	fs := flag.NewFlagSet("replicated", flag.ContinueOnError)
	fs.StringVar(&c.nsqd, "nsqd", "bin/nsqd", "`path` of our broker (make build)")
	fs.StringVar(&c.nats, "nats", "bin/nats-server", "`path` of nats-server (make build)")
	fs.StringVar(&c.upstream, "upstream", "", "`path` of NSQ's nsqd (default: left out)")
	fs.Float64Var(&c.rate, "rate", 2000, "`msg/s` of the paced publishers in all")
	fs.DurationVar(&c.lasting, "duration", 3*time.Second, "how long is measured, after a second of warming up")
	fs.IntVar(&c.rounds, "rounds", 3, "how often; the tables have medians")
	fs.Uint64Var(&c.seed, "seed", 1, "of the schedules")
	if err := host.Parse(fs, args, os.Stdout); err != nil {
		return c, err
	}
	if c.rounds < 1 || c.rounds > 100 || c.lasting < 100*time.Millisecond || c.lasting > time.Minute || !(c.rate > 0) {
		return c, errors.New("want 1 to 100 --rounds, --duration of 100ms to 1m, and a --rate above 0")
	}
	for _, p := range []*string{&c.nsqd, &c.nats, &c.upstream} {
		if *p == "" {
			continue
		}
		if *p, err = filepath.Abs(*p); err != nil { // they run in folders of their own
			return c, err
		}
		if _, err := os.Stat(*p); err != nil {
			return c, err
		}
	}
	return c, nil
}

// result is of one run.
type result struct {
	acked, delivered [3]float64 // ms from when it was to be sent: p50, p99, p99.9
	in, out          float64    // msg/s acknowledged and delivered
	cpu              float64    // us of all servers, for a message that came in and went out
	rss              float64    // MB of all servers
}

// recorder gathers times of what was to be sent while it is measured.
type recorder struct {
	from, to time.Duration // since began
	began    time.Time

	mu    sync.Mutex
	all   []time.Duration
	count atomic.Int64 // at any time
}

func (r *recorder) note(sent time.Duration) {
	now := time.Since(r.began)
	r.count.Add(1)
	if sent < r.from || sent >= r.to {
		return
	}
	r.mu.Lock()
	r.all = append(r.all, now-sent)
	r.mu.Unlock()
}

func (r *recorder) quantiles() (q [3]float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.all)
	for i, p := range []float64{0.5, 0.99, 0.999} {
		q[i] = float64(load.Quantile(r.all, p)) / 1e6
	}
	return q
}

// measure publishes at a rate, 0: as fast as it goes, so many messages at a time.
func measure(ctx context.Context, s server, rate float64, of int, lasting time.Duration, seed uint64) (r result, err error) {
	dir, err := os.MkdirTemp("", "replicated")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	it, err := s.start(ctx, dir)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, it.stop()) }()
	var all []publisher
	for range publishers {
		p, err := it.publisher()
		if err != nil {
			return r, err
		}
		all = append(all, p)
	}

	acked := &recorder{began: time.Now(), from: warming, to: warming + lasting}
	delivered := &recorder{began: acked.began, from: acked.from, to: acked.to}
	// A body says when it was to be sent.
	end, err := it.consume(func(body []byte) { delivered.note(time.Duration(binary.BigEndian.Uint64(body))) })
	if err != nil {
		return r, err
	}
	defer end()
	ctx, cancel := context.WithDeadline(ctx, acked.began.Add(acked.to))
	defer cancel()
	var sending, answers sync.WaitGroup
	var fault atomic.Pointer[error]
	for i, p := range all {
		sending.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			free := make(chan struct{}, ahead)
			for next := time.Duration(0); ctx.Err() == nil; {
				if rate > 0 {
					next += time.Duration(rng.ExpFloat64() * publishers / rate * 1e9)
					if !clock.Sleep(ctx, time.Until(acked.began.Add(next))) {
						return
					}
				} else {
					for range of { // room for all of them
						select {
						case free <- struct{}{}:
						case <-ctx.Done():
							return
						}
					}
					next = time.Since(acked.began)
				}
				sent := next
				bodies := make([][]byte, of)
				for i := range bodies {
					bodies[i] = binary.BigEndian.AppendUint64(make([]byte, 0, size), uint64(sent))[:size]
				}
				answers.Add(1)
				err := p.publish(bodies, func(err error) {
					defer answers.Done()
					if err != nil {
						fault.CompareAndSwap(nil, &err)
						return
					}
					for range of {
						acked.note(sent)
						if rate == 0 {
							<-free
						}
					}
				})
				if err != nil {
					answers.Done()
					fault.CompareAndSwap(nil, &err)
					return
				}
			}
		})
	}
	if !clock.Sleep(ctx, time.Until(acked.began.Add(warming))) {
		return r, ctx.Err()
	}
	before, err := it.cpu()
	in, out := acked.count.Load(), delivered.count.Load()
	sending.Wait()
	after, err2 := it.cpu()
	seconds := (time.Since(acked.began) - warming).Seconds()
	r.in, r.out = float64(acked.count.Load()-in)/seconds, float64(delivered.count.Load()-out)/seconds
	r.cpu = (after - before) * 1e6 / max(1, (r.in+r.out)/2*seconds)
	var err3 error
	r.rss, err3 = it.rss()
	if err := errors.Join(err, err2, err3); err != nil {
		return r, err
	}
	answers.Wait()
	if err := fault.Load(); err != nil {
		return r, *err
	}
	for limit := time.Now().Add(patience); rate > 0 && delivered.count.Load() < acked.count.Load(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(limit) {
			return r, fmt.Errorf("%d of %d messages are delivered %v after the end", delivered.count.Load(), acked.count.Load(), patience)
		}
	}
	for _, p := range all {
		p.close()
	}
	r.acked, r.delivered = acked.quantiles(), delivered.quantiles()
	return r, nil
}

// cpu is the processor time that all servers have used, in seconds.
func (s *system) cpu() (sum float64, err error) {
	for _, p := range s.processes {
		used, err := p.CPU()
		if err != nil {
			return 0, err
		}
		sum += used.Seconds()
	}
	return sum, nil
}

// rss is what all servers have in memory, in MB.
func (s *system) rss() (sum float64, err error) {
	for _, p := range s.processes {
		bytes, err := p.RSS()
		if err != nil {
			return 0, err
		}
		sum += float64(bytes) / 1e6
	}
	return sum, nil
}

func (c config) page(ctx context.Context, w io.Writer, servers []server, paced, flood, batches map[string][]result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# What replication costs\n\nMade by `make bench-replicated`: do not edit. Commit %s, kernel %s, %d processors, %s; medians of %d\nrounds of %v, alternating. Messages of %d bytes, %d publishers, one consumer, the stock Go clients of\nNSQ and NATS. All servers and the load share the processors and the disk.\n\n",
		host.Commit(ctx), host.Kernel(), runtime.NumCPU(), runtime.Version(), c.rounds, c.lasting, size, publishers)
	for _, s := range servers {
		fmt.Fprintf(&b, "- **%s**: %s\n", s.name, s.what)
	}
	fmt.Fprintf(&b, "\n## %.0f msg/s, at random times\n\nMilliseconds from when a message was to be sent. CPU and memory are of all servers together.\nA message may be delivered before it is acknowledged: its publisher waits until it is stored.\n\n", c.rate)
	b.WriteString("| | acknowledged p50 | p99 | p99.9 | delivered p50 | p99 | p99.9 | CPU us/msg | RSS MB |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, s := range servers {
		of := paced[s.name]
		fmt.Fprintf(&b, "| %s |", s.name)
		for i := range 3 {
			fmt.Fprintf(&b, " %.2f |", median(of, func(r result) float64 { return r.acked[i] }))
		}
		for i := range 3 {
			fmt.Fprintf(&b, " %.2f |", median(of, func(r result) float64 { return r.delivered[i] }))
		}
		fmt.Fprintf(&b, " %.0f | %.0f |\n", median(of, func(r result) float64 { return r.cpu }), median(of, func(r result) float64 { return r.rss }))
	}
	fmt.Fprintf(&b, "\n## As fast as it goes\n\nAt most %d messages of each publisher are not acknowledged; NSQ's client also sends %d in a command.\nWhat is delivered later waits in the broker. CPU is for a message that came in and went out.\n\n", ahead, batch)
	b.WriteString("| | in a command | acknowledged/s | delivered/s | CPU us/msg | RSS MB |\n|---|---|---|---|---|---|\n")
	for _, s := range servers {
		for _, work := range []struct {
			of  string
			all []result
		}{{"1", flood[s.name]}, {fmt.Sprint(batch), batches[s.name]}} {
			if len(work.all) == 0 {
				continue
			}
			fmt.Fprintf(&b, "| %s | %s | %.0f | %.0f | %.1f | %.0f |\n", s.name, work.of,
				median(work.all, func(r result) float64 { return r.in }), median(work.all, func(r result) float64 { return r.out }),
				median(work.all, func(r result) float64 { return r.cpu }), median(work.all, func(r result) float64 { return r.rss }))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func median(all []result, of func(result) float64) float64 {
	var vs []float64
	for _, r := range all {
		vs = append(vs, of(r))
	}
	slices.Sort(vs)
	return vs[len(vs)/2]
}
