//go:build linux

// Package replicated measures the cost of replication from the view of an application's
// clients. It compares
//
//   - our nsqd with --durability=memory, fsync, and replicated with one and with three NATS
//     JetStream servers;
//
//   - a stream of three JetStream servers;
//
//   - with --upstream, the nsqd of the project NSQ, which keeps messages in memory.
//
//     go run ./bench replicated --nsqd bin/nsqd --nats bin/nats-server
//
// All servers run on this machine and share one disk, so replicas cost processor time and
// loopback traffic but no network. Each server is measured alone. Each round starts with
// another server. The load is the load of tools/load (see works).
package replicated

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/load"
)

const (
	publishers = 10
	size       = 100
	ahead      = 200 // messages without a reply per publisher, in a flood
	batch      = 50  // messages per command, in a flood of batches
)

type config struct {
	nsqd, nats, upstream string
	rate                 float64
	lasting              time.Duration
	rounds               int
	seed                 uint64
}

// server is a system under test.
type server struct {
	load.Broker
	what string
}

func (c config) servers() []server {
	all := []server{
		{load.Durable(c.nsqd, "memory"), "our nsqd, in memory until it ends"},
		{load.Durable(c.nsqd, "fsync"), "our nsqd, on the disk before OK"},
		{load.Replicated(c.nsqd, c.nats, 1), "our nsqd, `--durability=replicated` on one nats-server"},
		{load.Replicated(c.nsqd, c.nats, 3), "our nsqd, `--durability=replicated` on three nats-servers"},
		{load.JetStream(c.nats, 3), "a stream of three replicas, without nsqd"},
	}
	if c.upstream != "" {
		all = append(all, server{load.AnotherNSQ("upstream", c.upstream, load.Unbuffered), "NSQ's nsqd, in memory"})
	}
	return all
}

// works returns the work for each server. Paced publishers send at random times (Poisson),
// regardless of replies: latency counts from the scheduled send time until the reply and until
// the delivery. In a flood, publishers send as fast as possible, with a bounded number of
// messages without a reply. The last work needs commands with many messages.
func (c config) works() []load.Scenario {
	all := []load.Scenario{
		{Name: "paced", Rate: c.rate, Together: 1, Acked: true},
		{Name: "flood", Closed: true, Together: 1, Ahead: ahead},
		{Name: "batches", Closed: true, Together: batch, Ahead: ahead, Batch: true, NSQOnly: true},
	}
	for i := range all {
		all[i].Conns, all[i].Size, all[i].Channels = publishers, size, 1
	}
	return all
}

// Run prints the page about the cost of replication.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c, err := parse(args, stdout)
	if err != nil {
		return host.Usage(err)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(load.Procs()))
	var subjects []host.Subject[load.Result]
	for _, s := range c.servers() {
		for _, w := range c.works() {
			if w.NSQOnly && !s.NSQ {
				continue
			}
			name := s.Name + ", " + w.Name
			subjects = append(subjects, host.Subject[load.Result]{Name: name, Measure: func(round int) (load.Result, error) {
				r, err := load.Perform(ctx, s.Broker, w, c.lasting, c.seed+uint64(round))
				if err == nil {
					fmt.Fprintf(stderr, "round %d, %s: %.0f msg/s, delivered p99 %.2f ms, %.1f us/msg, %d missing\n", round+1, name, r.InPerSecond, r.P99, r.CPU, r.Missing)
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

func parse(args []string, help io.Writer) (c config, err error) {
	fs := flag.NewFlagSet("replicated", flag.ContinueOnError)
	fs.StringVar(&c.nsqd, "nsqd", "bin/nsqd", "`path` of our broker (make build)")
	fs.StringVar(&c.nats, "nats", "bin/nats-server", "`path` of nats-server (make build)")
	fs.StringVar(&c.upstream, "upstream", "", "`path` of NSQ's nsqd (default: left out)")
	fs.Float64Var(&c.rate, "rate", 2000, "`msg/s` of the paced publishers in all")
	fs.DurationVar(&c.lasting, "duration", 3*time.Second, "how long each run is measured; paced runs first warm up for a second")
	fs.IntVar(&c.rounds, "rounds", 3, "number of runs of each server; the tables have medians")
	fs.Uint64Var(&c.seed, "seed", 1, "seed of the schedules")
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

// delays returns the columns of three quantiles, in ms.
func delays(what string, value func(load.Result) []float64) (t host.Table[load.Result]) {
	for i, title := range []string{what + " p50", "p99", "p99.9"} {
		t = append(t, host.Figure(title, "%.2f", func(r load.Result) float64 { return value(r)[i] }))
	}
	return t
}

func cpu(r load.Result) float64 { return r.CPU }
func rss(r load.Result) float64 { return r.RSS }

func (c config) page(ctx context.Context, w io.Writer, got map[string][]load.Result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# What replication costs\n\nMade by `make bench-replicated`: do not edit. %s; medians of %d\nrounds of %v, alternating. Messages of %d bytes, %d publishers, one consumer. All servers and the\nload share the processors and the disk.\n\n",
		host.Machine(ctx), c.rounds, c.lasting, size, publishers)
	for _, s := range c.servers() {
		fmt.Fprintf(&b, "- **%s**: %s\n", s.Name, s.what)
	}
	paced := slices.Concat(delays("acknowledged", func(r load.Result) []float64 { return r.Acked }), delays("delivered", func(r load.Result) []float64 { return []float64{r.P50, r.P99, r.P999} }),
		host.Table[load.Result]{host.Figure("CPU us/msg", "%.0f", cpu), host.Figure("RSS MB", "%.0f", rss)})
	flood := host.Table[load.Result]{
		host.Figure("acknowledged/s", "%.0f", func(r load.Result) float64 { return r.InPerSecond }), host.Figure("delivered/s", "%.0f", func(r load.Result) float64 { return r.OutPerSecond }),
		host.Figure("CPU us/msg", "%.1f", cpu), host.Figure("RSS MB", "%.0f", rss),
	}
	fmt.Fprintf(&b, "\n## %.0f msg/s, at random times\n\nMilliseconds from when a message was to be sent. CPU and memory are of all servers together.\nA message may be delivered before it is acknowledged: its publisher waits until it is stored.\n\n", c.rate)
	paced.Head(&b, "")
	for _, s := range c.servers() {
		paced.Row(&b, got[s.Name+", paced"], s.Name)
	}
	fmt.Fprintf(&b, "\n## As fast as it goes\n\nAt most %d messages of each publisher are not acknowledged; to NSQ's protocol also %d in a command.\nWhat is delivered later waits in the broker. CPU is for a message that came in and went out.\n\n", ahead, batch)
	flood.Head(&b, "", "in a command")
	for _, s := range c.servers() {
		for _, work := range c.works()[1:] {
			if rounds := got[s.Name+", "+work.Name]; len(rounds) > 0 {
				flood.Row(&b, rounds, s.Name, fmt.Sprint(work.Together))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
