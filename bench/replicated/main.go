//go:build linux

package replicated

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/tools/load"
)

const (
	publishers = 10
	size       = 100
	warming    = time.Second
	ahead      = 200 // unacknowledged messages per publisher, in a flood
	batch      = 50  // messages per command, in a flood of batches
	// patience bounds the wait for paced messages after the end.
	patience = 10 * time.Second
)

type config struct {
	programs
	rate    float64
	lasting time.Duration
	rounds  int
	seed    uint64
}

// Run prints the page about the cost of replication.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c, err := parse(args, stdout)
	if err != nil {
		return host.Usage(err)
	}
	var subjects []host.Subject[result]
	for _, s := range c.servers() {
		for _, w := range works {
			if w.of > 1 && !s.batches {
				continue
			}
			rate := 0.0
			if w.paced {
				rate = c.rate
			}
			name := s.name + ", " + w.name
			subjects = append(subjects, host.Subject[result]{Name: name, Measure: func(round int) (result, error) {
				r, err := measure(ctx, s, rate, w.of, c.lasting, c.seed+uint64(round))
				if err == nil {
					fmt.Fprintf(stderr, "round %d, %s: %.0f msg/s, acknowledged p99 %.2f ms, delivered p99 %.2f ms, %.1f us/msg\n",
						round+1, name, r.in, r.acked[1], r.delivered[1], r.cpu)
				}
				return r, err
			}})
		}
	}
	got, err := host.Rounds(ctx, c.rounds, subjects)
	if err != nil {
		return err
	}
	return c.page(ctx, stdout, got)
}

// works are the kinds of work for each server.
var works = []struct {
	name  string
	paced bool // at config.rate, otherwise as fast as possible
	of    int  // messages per command
}{{"paced", true, 1}, {"flood", false, 1}, {"batches", false, batch}}

func parse(args []string, help io.Writer) (c config, err error) {
	fs := flag.NewFlagSet("replicated", flag.ContinueOnError)
	fs.StringVar(&c.nsqd, "nsqd", "bin/nsqd", "`path` of our broker (make build)")
	fs.StringVar(&c.nats, "nats", "bin/nats-server", "`path` of nats-server (make build)")
	fs.StringVar(&c.upstream, "upstream", "", "`path` of NSQ's nsqd (default: left out)")
	fs.Float64Var(&c.rate, "rate", 2000, "`msg/s` of the paced publishers in all")
	fs.DurationVar(&c.lasting, "duration", 3*time.Second, "how long is measured, after a second of warming up")
	fs.IntVar(&c.rounds, "rounds", 3, "how often; the tables have medians")
	fs.Uint64Var(&c.seed, "seed", 1, "of the schedules")
	if err := host.Parse(fs, args, help); err != nil {
		return c, err
	}
	if c.rounds < 1 || c.rounds > 100 || c.lasting < 100*time.Millisecond || c.lasting > time.Minute || !(c.rate > 0) {
		return c, errors.New("want 1 to 100 --rounds, --duration of 100ms to 1m, and a --rate above 0")
	}
	for _, p := range []*string{&c.nsqd, &c.nats, &c.upstream} {
		if *p == "" {
			continue
		}
		if *p, err = host.Program(*p); err != nil {
			return c, err
		}
	}
	return c, nil
}

// result is the result of one run.
type result struct {
	acked, delivered [3]float64 // ms from the scheduled send time: p50, p99, p99.9
	in, out          float64    // msg/s acknowledged and delivered
	cpu              float64    // us of all servers, per message received and delivered
	rss              float64    // MB of all servers
}

// recorder collects the latencies of messages scheduled within the measurement.
type recorder struct {
	from, to time.Duration // times since began
	began    time.Time

	mu    sync.Mutex
	all   []time.Duration
	count atomic.Int64 // of all messages
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

// measure publishes at a rate, with the given number of messages per command. Rate 0 means
// as fast as possible.
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
	// A body holds its scheduled send time.
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
					for range of { // reserves room for all messages
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
	before, _, err := it.used()
	in, out := acked.count.Load(), delivered.count.Load()
	sending.Wait()
	after, resident, err2 := it.used()
	if err := errors.Join(err, err2); err != nil {
		return r, err
	}
	seconds := (time.Since(acked.began) - warming).Seconds()
	r.in, r.out = float64(acked.count.Load()-in)/seconds, float64(delivered.count.Load()-out)/seconds
	r.cpu, r.rss = (after-before)*1e6/max(1, (r.in+r.out)/2*seconds), resident
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

// used returns the processor time of all servers, in seconds, and their memory, in MB.
func (s *system) used() (cpu, rss float64, err error) {
	for _, p := range s.processes {
		spent, err := p.CPU()
		bytes, err2 := p.RSS()
		if err := errors.Join(err, err2); err != nil {
			return 0, 0, err
		}
		cpu, rss = cpu+spent.Seconds(), rss+float64(bytes)/1e6
	}
	return cpu, rss, nil
}

// delays returns the columns of three quantiles, in ms.
func delays(what string, of func(result) [3]float64) (t host.Table[result]) {
	for i, title := range []string{what + " p50", "p99", "p99.9"} {
		t = append(t, host.Figure(title, "%.2f", func(r result) float64 { return of(r)[i] }))
	}
	return t
}

func cpu(r result) float64 { return r.cpu }
func rss(r result) float64 { return r.rss }

func (c config) page(ctx context.Context, w io.Writer, got map[string][]result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# What replication costs\n\nMade by `make bench-replicated`: do not edit. %s; medians of %d\nrounds of %v, alternating. Messages of %d bytes, %d publishers, one consumer, the stock Go clients of\nNSQ and NATS. All servers and the load share the processors and the disk.\n\n",
		host.Machine(ctx), c.rounds, c.lasting, size, publishers)
	for _, s := range c.servers() {
		fmt.Fprintf(&b, "- **%s**: %s\n", s.name, s.what)
	}
	paced := slices.Concat(delays("acknowledged", func(r result) [3]float64 { return r.acked }), delays("delivered", func(r result) [3]float64 { return r.delivered }),
		host.Table[result]{host.Figure("CPU us/msg", "%.0f", cpu), host.Figure("RSS MB", "%.0f", rss)})
	flood := host.Table[result]{
		host.Figure("acknowledged/s", "%.0f", func(r result) float64 { return r.in }), host.Figure("delivered/s", "%.0f", func(r result) float64 { return r.out }),
		host.Figure("CPU us/msg", "%.1f", cpu), host.Figure("RSS MB", "%.0f", rss),
	}
	fmt.Fprintf(&b, "\n## %.0f msg/s, at random times\n\nMilliseconds from when a message was to be sent. CPU and memory are of all servers together.\nA message may be delivered before it is acknowledged: its publisher waits until it is stored.\n\n", c.rate)
	paced.Head(&b, "")
	for _, s := range c.servers() {
		paced.Row(&b, got[s.name+", paced"], s.name)
	}
	fmt.Fprintf(&b, "\n## As fast as it goes\n\nAt most %d messages of each publisher are not acknowledged; NSQ's client also sends %d in a command.\nWhat is delivered later waits in the broker. CPU is for a message that came in and went out.\n\n", ahead, batch)
	flood.Head(&b, "", "in a command")
	for _, s := range c.servers() {
		for _, work := range works[1:] {
			if rounds := got[s.name+", "+work.name]; len(rounds) > 0 {
				flood.Row(&b, rounds, s.name, fmt.Sprint(work.of))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
