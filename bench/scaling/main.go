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
//
// A second table has the broker on one processor and the load on another. Two loops are then
// as fast as one, except for what their handovers cost. The rest of the cost of a second
// processor is the exchange of memory between processors.
package scaling

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	all := make([]int, cpus)
	for cpu := range all {
		all[cpu] = cpu
	}
	alone, contended := exchange(1), exchange(2) // before pin
	broker, where := all, "all of them, with the load"
	if cpus >= 4 {
		broker, where = all[:cpus/2], fmt.Sprintf("the first %d", cpus/2)
		if err := pin(all[cpus/2:]); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "# Event loops and processors\n\nMade by `make scaling`. Measured: %d processors, broker on %s; medians of %d runs of %v,\nalternating. Messages of %d bytes, one publisher and one subscriber a topic, as fast as they go.\n\n",
		cpus, where, rounds, lasting, size)
	host.Head(out, header...)
	var medians []result
	for _, n := range slices.Compact([]int{1, most}) {
		var err error
		if medians, err = table(ctx, out, nsqd, loops, n, rounds, lasting, broker); err != nil {
			return err
		}
	}
	if cpus == 1 {
		return nil
	}
	fmt.Fprintf(out, "\nThe broker on one processor, the load on another:\n\n")
	if err := pin(all[1:2]); err != nil {
		return err
	}
	host.Head(out, header...)
	one, err := table(ctx, out, nsqd, loops[:2], most, rounds, lasting, all[:1])
	if err != nil {
		return err
	}
	model(out, medians[0].CPU, medians[1].CPU, one[1].CPU-one[0].CPU, alone, contended)
	return nil
}

var header = []string{"topics", "loops", "at the end", "msg/s in and out", "to 1 loop", "CPU us/msg"}

// table measures nsqd with each number of loops, on some processors, and returns the medians.
func table(ctx context.Context, out io.Writer, nsqd string, loops []string, topics, rounds int, lasting time.Duration, cpus []int) ([]result, error) {
	var subjects []host.Subject[result]
	for _, l := range loops {
		subjects = append(subjects, host.Subject[result]{Name: l, Measure: func(int) (result, error) { return measure(ctx, nsqd, l, topics, lasting, cpus) }})
	}
	all, err := host.Rounds(ctx, rounds, subjects)
	if err != nil {
		return nil, fmt.Errorf("%d topics: %w", topics, err)
	}
	medians := make([]result, len(loops))
	for i, l := range loops {
		r := median(all[l])
		medians[i] = r
		host.Rowf(out, "%d\t%s\t%d\t%.0f\t%.2f\t%.2f", topics, l, r.loops, rate(r), rate(r)/rate(medians[0]), r.CPU)
	}
	return medians, nil
}

// pin restricts this process to some processors: all threads, since a new thread begins with
// the processors of its creator.
func pin(cpus []int) error {
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("pin the load: %w", err)
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err == nil {
			err = unix.SchedSetaffinity(id, &set)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("pin the load: %w", err)
		}
	}
	return nil
}

// model extrapolates the costs with one and two loops to larger machines. With two loops,
// half of the messages go from one loop to another. With n loops, the part is (n-1)/n.
// handover is what two loops cost on one processor; alone and contended are results of exchange.
func model(out io.Writer, oneLoop, two, handover, alone, contended float64) {
	more := max(0, 2*(two-oneLoop))
	fmt.Fprintf(out, "\n**Modelled**, not measured: loops that share nothing but what the two did, on a broker's own\n"+
		"processors, with many topics: a message costs %.2f us on one loop and %.2f us more if it goes to another. Of these,\n"+
		"%.2f us are the handover itself, and the rest the exchange of memory between processors.\n\n", oneLoop, more, min(more, max(0, 2*handover)))
	host.Head(out, "processors", "CPU us/msg", "msg/s at most")
	for _, n := range []float64{1, 2, 4, 16, 64} {
		cost := oneLoop + more*(1-1/n)
		host.Rowf(out, "%.0f\t%.2f\t%.1f M", n, cost, n/cost)
	}
	fmt.Fprintf(out, `
What binds first:

- **A topic's lock.** All messages of a topic pass under one lock, so a topic stays at what one loop carries, whatever
  the number of processors: its rows above.
- **The count of memory and the last id**, one number each for the broker. A message that comes alone changes them three
  times: its publish and its FIN change the count, and the message takes an id. Here a processor changes a number of its own in %.1f ns,
  and a number that two processors change in %.1f ns. So these numbers carry at most %.0f M messages/s. The model
  reaches this rate on %s. Below it, nothing needs to be divided.
  The two processors here may be threads of one core. An exchange between distant cores takes longer, and the limit
  comes sooner.

What a larger machine would show: the rows above for 4, 16 and 64 loops, with the load on processors or machines of
its own; and the processor time that `+"`/debug/pprof/profile`"+` shows in a topic's lock and in these two
numbers, to see whether the topic's lock is still the first.
`, alone, contended, 1e3/(3*contended), reached(oneLoop, more, 1e3/(3*contended)))
}

// reached names the number of processors on which the model carries most million messages a
// second.
func reached(oneLoop, more, most float64) string {
	for n := 1; n <= 1024; n *= 2 {
		if float64(n)/(oneLoop+more*(1-1/float64(n))) >= most {
			return fmt.Sprintf("%d processors", n)
		}
	}
	return "no machine of up to 1,024 processors"
}

// exchange returns the time of a change in ns, for goroutines that change one number together.
func exchange(goroutines int) float64 {
	const changes = 5_000_000
	var number atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	for range goroutines {
		all.Go(func() {
			for range changes {
				number.Add(1)
			}
		})
	}
	all.Wait()
	return float64(time.Since(start).Nanoseconds()) / float64(number.Load())
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

// measure measures nsqd with a number of loops, on some processors.
func measure(ctx context.Context, nsqd, loops string, topics int, lasting time.Duration, cpus []int) (r result, err error) {
	b := load.NSQ("srtm", nsqd, "", func(load.Scenario) []string { return []string{"--io-loops=" + loops} })
	args, list := b.Args, strings.Trim(strings.ReplaceAll(fmt.Sprint(cpus), " ", ","), "[]")
	b.Path = "taskset"
	b.Args = func(at load.Place, s load.Scenario) ([]string, error) {
		all, err := args(at, s)
		return append([]string{"-c", list, nsqd}, all...), err
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
