//go:build linux

// Package scaling measures the value of event loops. An nsqd with 1, 2, 4, ... loops, up to
// one per processor, and with --io-loops=auto, takes as many messages as possible from
// publishers of one topic, and of many topics.
//
//	go run ./bench scaling --nsqd bin/nsqd
//
// Each topic has a publisher and a subscriber. The publisher writes 50 messages of 100
// bytes at a time. The load shares the processors with the broker. On four or more
// processors the load uses only the upper half, and the broker the lower half.
package scaling

import (
	"context"
	"flag"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/load"
)

// size is the length of a message in bytes.
const size = 100

// Run prints the page about event loops and processors.
func Run(ctx context.Context, args []string, stdout, _ io.Writer) error {
	fs := flag.NewFlagSet("scaling", flag.ContinueOnError)
	path := fs.String("nsqd", "bin/nsqd", "`path` of the broker (make build)")
	lasting := fs.Duration("duration", 4*time.Second, "how long publishers send")
	rounds := fs.Int("rounds", 3, "number of runs; the table has medians")
	topics := fs.Int("topics", 2*runtime.NumCPU(), "`number` of topics of the second half; the first has one")
	if err := host.Parse(fs, args, stdout); err != nil {
		return host.Usage(err)
	}
	nsqd, err := host.Program(*path)
	if err != nil {
		return err
	}
	return run(ctx, stdout, nsqd, *lasting, *rounds, *topics)
}

func run(ctx context.Context, out io.Writer, nsqd string, lasting time.Duration, rounds, most int) error {
	cpus := runtime.NumCPU()
	loops := []string{}
	for n := 1; n < 2*cpus; n *= 2 {
		loops = append(loops, strconv.Itoa(min(n, cpus)))
	}
	loops = append(loops, "auto")
	pinned := ""
	if cpus >= 4 {
		pinned = fmt.Sprintf("0-%d", cpus/2-1)
		var mine unix.CPUSet
		for cpu := cpus / 2; cpu < cpus; cpu++ {
			mine.Set(cpu)
		}
		if err := unix.SchedSetaffinity(0, &mine); err != nil {
			return fmt.Errorf("pin the load: %w", err)
		}
	}
	fmt.Fprintf(out, "# Event loops and processors\n\nMade by `make scaling`. Measured: %d processors, broker on %s; medians of %d runs of %v,\nalternating. Messages of %d bytes, one publisher and one subscriber a topic, as fast as they go.\n\n",
		cpus, orAll(pinned), rounds, lasting, size)
	host.Head(out, "topics", "loops", "at the end", "msg/s in and out", "to 1 loop", "CPU us/msg")
	for _, n := range slices.Compact([]int{1, most}) {
		var subjects []host.Subject[result]
		for _, l := range loops {
			subjects = append(subjects, host.Subject[result]{Name: l, Measure: func(int) (result, error) { return measure(ctx, nsqd, l, n, lasting, pinned) }})
		}
		all, err := host.Rounds(ctx, rounds, subjects)
		if err != nil {
			return fmt.Errorf("%d topics: %w", n, err)
		}
		medians := make([]result, len(loops))
		for i, l := range loops {
			r := median(all[l])
			medians[i] = r
			host.Rowf(out, "%d\t%s\t%d\t%.0f\t%.2f\t%.2f", n, l, r.loops, rate(r), rate(r)/rate(medians[0]), r.CPU)
		}
		if n == most && len(loops) > 2 {
			model(out, medians[0].CPU, medians[1].CPU)
		}
	}
	return nil
}

// model extrapolates the costs with one and two loops to larger machines. With two loops,
// half of the messages go from one loop to another. With n loops, the part is (n-1)/n.
func model(out io.Writer, oneLoop, two float64) {
	fmt.Fprintf(out, "\n**Modelled**, not measured: loops that share nothing but what the two did, on a broker's own\n"+
		"processors, with many topics: a message costs %.2f us on one loop and %.2f us more if it goes to another.\n\n", oneLoop, max(0, 2*(two-oneLoop)))
	host.Head(out, "processors", "CPU us/msg", "msg/s at most")
	for _, n := range []float64{1, 2, 4, 16, 64} {
		cost := oneLoop + 2*max(0, two-oneLoop)*(1-1/n)
		host.Rowf(out, "%.0f\t%.2f\t%.1f M", n, cost, n/cost)
	}
	fmt.Fprintln(out, "\nOne topic's messages pass under one lock, so it stays at what one loop carries, whatever the\nnumber of processors: its rows above.")
}

func orAll(pinned string) string {
	if pinned == "" {
		return "all of them, with the load"
	}
	return pinned
}

// result is the result of one run, and the number of loops at its end.
type result struct {
	load.Result
	loops int
}

func rate(r result) float64 { return r.OutPerSecond }

// median returns the run with the median rate.
func median(all []result) result {
	slices.SortFunc(all, func(a, b result) int { return int(rate(a) - rate(b)) })
	return all[len(all)/2]
}

// measure measures nsqd with a number of loops. The broker uses only the processors that
// pinned lists, or all processors if pinned is empty.
func measure(ctx context.Context, nsqd, loops string, topics int, lasting time.Duration, pinned string) (r result, err error) {
	b := load.NSQ("srtm", nsqd, "", func(load.Scenario) []string { return []string{"--io-loops=" + loops} })
	if args := b.Args; pinned != "" {
		b.Path = "taskset"
		b.Args = func(at load.Place, s load.Scenario) ([]string, error) {
			all, err := args(at, s)
			return append([]string{"-c", pinned, nsqd}, all...), err
		}
	}
	b.BeforeStop = func(ctx context.Context, at load.Place) error {
		all, err := host.Metrics(ctx, at.Web)
		for name := range all {
			if strings.HasPrefix(name, "srtm_nsqd_loop_connections{") {
				r.loops++
			}
		}
		return err
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(load.Procs() + 2*topics))
	r.Result, err = load.Perform(ctx, b, load.Scenario{Conns: topics, Topics: topics, Channels: 1, Size: size, Together: 50}, lasting, 1)
	return r, err
}
