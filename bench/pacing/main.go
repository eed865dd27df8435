// Package pacing overloads a topic on a real nsqd, in three equal runs. In the mode advise,
// nsqd advises publishers of their rates. In the mode police, nsqd also polices publishers,
// and about half of the publishers ignore the advice. In the mode delay, nsqd only delays
// messages. For comparison, other brokers without a contract serve a subscriber that
// processes messages at the contract's rate.
//
// For each run the package prints
//   - the accepted (other brokers: delivered) rate divided by the contract's rate,
//   - Jain's index of the publishers' rates divided by their parts,
//   - the largest relative deviation of a publisher from its part,
//   - the backlog,
//   - the p99 latency of the obedient publishers, which offer half of their part, from the
//     due time to the delivery.
//
// The numbers are ratios of counters. Nothing is asserted.
package pacing

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/tools/iotpub/greedy"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/load"
)

// weight returns the weight of publisher i, as in the paper.
func (c config) weight(i int) float64 { return []float64{1, 2, 4, 8, 10}[i%5] }

// config holds the flags.
type config struct {
	nsqd              string
	rate, load        float64
	burst, publishers int
	warm, steady      time.Duration
	stdout, stderr    io.Writer
	quiet             bool // does not poll the backlog, since polling costs CPU time
}

// obedient publishers offer half of their part. loud publishers offer five times as much as
// others.
func obedient(i int) bool { return i%10 == 5 }
func loud(i int) bool     { return i%10 == 0 }

// demands returns the offered rate and the part of each publisher. An obedient publisher's
// part is its offered rate. The other publishers share the rest by weight.
func (c config) demands() (demands, parts []float64) {
	sum, rest, left := 0.0, 0.0, c.rate
	for i := range c.publishers {
		sum += c.weight(i)
	}
	for i := range c.publishers {
		d := c.load * c.rate * c.weight(i) / sum
		switch {
		case obedient(i):
			d = c.rate * c.weight(i) / sum / 2
			left -= d
		case loud(i):
			d *= 5
			fallthrough
		default:
			rest += c.weight(i)
		}
		demands = append(demands, d)
	}
	for i, d := range demands {
		if !obedient(i) {
			d = left * c.weight(i) / rest
		}
		parts = append(parts, d)
	}
	return demands, parts
}

// outcome is the result of a run.
type outcome struct {
	rates   []float64 // by publisher, msg/s
	refused int64
	depths  []int64
	late    time.Duration // p99 of the obedient publishers
	cpu     time.Duration // of the broker, per message
}

// line writes a row of the table.
func (c config) line(name string, o outcome) {
	rates, depths := o.rates, o.depths
	_, parts := c.demands()
	total, ratio, square, farthest := 0.0, 0.0, 0.0, 0.0
	for i, rate := range rates {
		total += rate
		x := rate / parts[i]
		ratio += x
		square += x * x
		farthest = max(farthest, math.Abs(x-1))
	}
	slices.Sort(depths)
	host.Rowf(c.stdout, "%s\t%.3f\t%.4f\t%.3f\t%d\t%d\t%d\t%v", name, total/c.rate, ratio*ratio/(float64(len(rates))*square), farthest, o.refused,
		load.Quantile(depths, 0.99), load.Quantile(depths, 1), o.late.Round(100*time.Microsecond))
}

// peer measures a broker without a contract.
func (c config) peer(ctx context.Context, b load.Broker) (o outcome, err error) {
	demands, _ := c.demands()
	got, err := b.Overload(ctx, load.Overload{Rate: c.rate, Demand: demands, Size: 100, Warm: c.warm, Steady: c.steady})
	if err != nil {
		return o, err
	}
	for i, l := range got.Latency {
		if obedient(i) {
			o.late = max(o.late, l)
		}
	}
	o.rates, o.depths = got.Delivered, []int64{got.LineP99, got.Line}
	return o, nil
}

// Run prints the results of an overloaded topic.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c := config{stdout: stdout, stderr: stderr}
	fs := flag.NewFlagSet("pacing", flag.ContinueOnError)
	fs.StringVar(&c.nsqd, "nsqd", "bin/nsqd", "`program` to measure")
	fs.Float64Var(&c.rate, "rate", 2000, "rate of the contract, in `msg/s`")
	fs.IntVar(&c.burst, "burst", 100, "burst of the contract, in `messages`")
	fs.Float64Var(&c.load, "load", 1.5, "offered rate, in contracts; each publisher offers this multiple of its part, every tenth publisher five times as much")
	fs.IntVar(&c.publishers, "publishers", 50, "`number` of publishers, of weights 1, 2, 4, 8, 10 in turns")
	fs.DurationVar(&c.warm, "warm-up", 10*time.Second, "time before counting")
	fs.DurationVar(&c.steady, "steady", 15*time.Second, "time of counting")
	nsq := fs.String("nsq", "", "`path` of another broker that takes nsqd's flags")
	nats := fs.String("nats", "nats-server", "`path` of nats-server")
	mosquitto := fs.String("mosquitto", "mosquitto", "`path` of mosquitto")
	rounds := fs.Int("cost", 0, "measure the cost of pacing while no publisher is paced, in this number of `rounds` (needs --load of 0.5 or less)")
	if err := host.Parse(fs, args, stdout); err != nil {
		return host.Usage(err)
	}
	var err error
	if c.nsqd, err = host.Program(c.nsqd); err != nil {
		return err
	}
	if *rounds > 0 {
		c.quiet = true
		return c.cost(ctx, *rounds)
	}
	peers := []load.Broker{load.NATS(*nats), load.Mosquitto(*mosquitto)}
	if *nsq != "" {
		peers = append([]load.Broker{load.AnotherNSQ("another nsqd", *nsq, "")}, peers...)
	}
	host.Head(stdout, "mode", "accepted/r", "Jain", "farthest", "refused", "backlog p99", "backlog max", "p99 of the obedient")
	var failed []error
	show := func(name string, o outcome, err error) {
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			return
		}
		c.line(name, o)
	}
	for _, mode := range []string{"delay", "advise", "police"} {
		o, err := c.run(ctx, mode)
		show(mode, o, err)
	}
	for _, b := range peers {
		path, err := host.Program(b.Path)
		if err != nil {
			fmt.Fprintf(stderr, "%s is skipped: %v\n", b.Name, err)
			continue
		}
		b.Path = path
		o, err := c.peer(ctx, b)
		show(b.Name, o, err)
	}
	return errors.Join(failed...)
}

// cost compares the cost of a message with and without pacing, while no publisher is paced.
func (c config) cost(ctx context.Context, rounds int) error {
	measure := func(mode string) host.Subject[outcome] {
		return host.Subject[outcome]{Name: mode, Measure: func(int) (outcome, error) { return c.run(ctx, mode) }}
	}
	got, err := host.Rounds(ctx, rounds, []host.Subject[outcome]{measure("delay"), measure("advise")})
	if err != nil {
		return err
	}
	host.Head(c.stdout, "", "off", "advise", "ratio")
	for _, q := range []struct {
		name  string
		value func(outcome) float64
	}{
		{"CPU of the broker, a message", func(o outcome) float64 { return float64(o.cpu) }},
		{"p99 of the obedient", func(o outcome) float64 { return float64(o.late) }},
	} {
		withoutPacing, withPacing := host.Median(got["delay"], q.value), host.Median(got["advise"], q.value)
		host.Rowf(c.stdout, "%s\t%v\t%v\t%.3f", q.name, time.Duration(withoutPacing), time.Duration(withPacing), withPacing/withoutPacing)
	}
	return nil
}

func (c config) run(ctx context.Context, mode string) (o outcome, err error) {
	dir, err := os.MkdirTemp("", "pacing")
	if err != nil {
		return o, err
	}
	defer os.RemoveAll(dir)
	flags := map[string]string{"delay": "off", "advise": "advise", "police": "police"}
	nsqd, err := local.NSQD(c.nsqd, dir, "--log-level=error", "--max-weight=10", "--mem-queue-size=1000000",
		fmt.Sprintf("--topic-limit=t:%g:%d", c.rate, c.burst), "--pacing="+flags[mode])
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, nsqd.Kill()) }() // Kill, since storing the backlog would only take time
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	var late struct {
		sync.Mutex
		measuring bool
		all       []time.Duration
	}
	all.Go(func() {
		greedy.Consume(ctx, nsqd.TCP, "t", "c", func(p payload.Payload) {
			late.Lock()
			defer late.Unlock()
			if late.measuring && obedient(int(p.Source)) {
				late.all = append(late.all, clock.Mono().Sub(p.Intended))
			}
		})
	})
	publishers := make([]*greedy.Publisher, c.publishers)
	demands, _ := c.demands()
	for i := range publishers {
		p := &greedy.Publisher{ID: strconv.Itoa(i), Number: uint32(i), Demand: demands[i], Greedy: mode == "police" && i%2 == 1 && !obedient(i)}
		if mode != "delay" {
			p.Weight = uint8(c.weight(i))
		}
		publishers[i] = p
		all.Go(func() {
			if err := p.Run(ctx, "t", 100, func(context.Context) (string, error) { return nsqd.TCP, nil }); err != nil {
				fmt.Fprintln(c.stderr, err)
			}
		})
	}
	if !clock.Sleep(ctx, c.warm) {
		return o, ctx.Err()
	}
	began := clock.Mono()
	acceptedBefore := make([]int64, len(publishers))
	for i, p := range publishers {
		acceptedBefore[i] = p.Accepted.Load()
		o.refused -= p.Refused.Load()
	}
	before, err := nsqd.CPU()
	if err != nil {
		return o, err
	}
	late.Lock()
	late.measuring = true
	late.Unlock()
	for clock.Mono().Sub(began) < c.steady {
		if !c.quiet {
			depth, err := host.Depth(ctx, nsqd.HTTP, "t")
			if err != nil {
				return o, err
			}
			o.depths = append(o.depths, depth)
		}
		time.Sleep(50 * time.Millisecond)
	}
	after, err := nsqd.CPU()
	if err != nil {
		return o, err
	}
	seconds, messages := clock.Mono().Sub(began).Seconds(), int64(0)
	for i, p := range publishers {
		n := p.Accepted.Load() - acceptedBefore[i]
		messages += n
		o.rates = append(o.rates, float64(n)/seconds)
		o.refused += p.Refused.Load()
	}
	o.cpu = (after - before) / time.Duration(max(messages, 1))
	late.Lock()
	defer late.Unlock()
	slices.Sort(late.all)
	o.late = load.Quantile(late.all, 0.99)
	return o, nil
}
