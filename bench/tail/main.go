//go:build linux

// Command tail says where the slowest deliveries of poisson-1000 spent their time: it has
// the kernel's scheduler traced while bench/peer's scenario runs, and for each of the
// slowest in a thousand looks who ran, and who waited for a processor, between the time at
// which it was due and the time at which it was delivered. It needs perf, and the right to
// trace the whole machine.
//
//	go run ./bench/tail --srtm bin/nsqd > docs/performance/tail.md
package main

import (
	"bufio"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tools/load"
)

func main() { os.Exit(lifecycle.Main("tail", run)) }

func run(ctx context.Context) error {
	fs := flag.NewFlagSet("tail", flag.ContinueOnError)
	srtm := fs.String("srtm", "bin/nsqd", "`path` of nsqd (make build)")
	lasting := fs.Duration("duration", 10*time.Second, "how long is measured")
	if err := host.Parse(fs, os.Args[1:], os.Stdout); err != nil {
		return host.Usage(err)
	}
	path, err := host.Program(*srtm)
	if err != nil {
		return err
	}
	debug.SetGCPercent(400)
	runtime.GOMAXPROCS(load.Procs())
	s := load.Scenario{Name: "tail", Conns: 1000, Rate: 10_000, Size: 100, Together: 1, Channels: 1}
	s.Slowest = int(s.Rate * lasting.Seconds() / 1000)
	dir, err := os.MkdirTemp("", "tail")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// Threads are told apart by the name of their program, and there may be other nsqds.
	named := filepath.Join(dir, traced)
	if err := os.Symlink(path, named); err != nil {
		return err
	}
	collector, err := collections(dir)
	if err != nil {
		return err
	}
	defer collector.pipe.Close()
	script := filepath.Join(dir, "nsqd")
	if err := os.WriteFile(script, fmt.Appendf(nil, "#!/bin/sh\nGODEBUG=gctrace=1 exec %s \"$@\" 2>%s\n", named, collector.pipe.Name()), 0o700); err != nil {
		return err
	}
	file := filepath.Join(dir, "perf.data")
	perf := exec.CommandContext(ctx, "perf", "record", "-q", "-k", "CLOCK_MONOTONIC", "-m", "4M", "-e", "sched:sched_switch,sched:sched_wakeup,sched:sched_wakeup_new", "-a", "-o", file)
	perf.Stderr = os.Stderr
	if err := perf.Start(); err != nil {
		return fmt.Errorf("perf: %w", err)
	}
	r, err := load.Perform(ctx, load.Ours(script, ""), s, *lasting, 1)
	_ = perf.Process.Signal(unix.SIGINT)
	_ = perf.Wait() // it says that it was interrupted
	if err != nil {
		return err
	}
	events := exec.CommandContext(ctx, "perf", "script", "-i", file, "--ns", "-F", "time,event,trace")
	out, err := events.StdoutPipe()
	if err != nil {
		return err
	}
	if err := events.Start(); err != nil {
		return fmt.Errorf("perf script: %w", err)
	}
	spans, err := read(out)
	if err != nil {
		return err
	}
	if err := events.Wait(); err != nil {
		return fmt.Errorf("perf script: %w", err)
	}
	fmt.Printf("# Where the slowest deliveries spend their time\n\nWritten by `go run ./bench/tail`: do not edit. %s.\n\n", host.Machine(ctx))
	fmt.Printf("1,000 publishers at 10 msg/s each for %v, the scheduler traced meanwhile: p50 %.3f ms, p99 %.3f, p99.9 %.3f,\nmax %.3f; %.0f %% of all processor time went to others than nsqd and the load. The slowest %d deliveries,\none in a thousand:\n\n",
		*lasting, r.P50, r.P99, r.P999, r.Max, r.Others, len(r.Slowest))
	if r.Others > 10 {
		fmt.Printf("**Disturbed**: others had processors that nsqd and the load waited for. The shares hold for this run alone; the\nmeans of the rows in which nsqd or the load *runs* are nearest to what an idle machine shows.\n\n")
	}
	write(os.Stdout, r, spans, collector.end())
	return nil
}

// traced is the name of the broker's threads.
const traced = "nsqd-traced"

// cause is what a delivery waits for.
type cause int

const (
	late     cause = iota // the load sends it after it was due
	turn                  // a thread of nsqd runs
	starved               // one could run, and none does
	received              // neither, and the load runs
	waiting               // nor that, but it could
	neither               // none of both can run
	causes
)

// about says of each cause what it is, and what is done about it, or why nothing is.
var about = [causes][2]string{
	{"the load sends it after it was due: its thread waits for a processor, or its timer is late", "not the broker's: subtract it"},
	{"nsqd runs: the turn before, and its own", "a turn is at most 64 reads, and what it brought is written after 64 KiB at the latest; two thirds are system calls ([where the time goes](../performance.md#where-the-time-goes)). A second loop is started where a processor is idle"},
	{"nsqd could run, and waits for a processor", "the load and others have it: on a broker's own processors there is none of it (`nice`, cpusets)"},
	{"the load runs and nsqd has nothing to do: the subscriber reads", "not the broker's"},
	{"the load could run, and waits for a processor", "not the broker's"},
	{"neither can run: a wake-up is under way, or the host has the processor", "the machine's: a processor that sleeps is woken by an interrupt, and a virtual one when its host gives it back"},
}

// span is a time of which one cause is known, up to the next.
type span struct {
	from  mono.Time
	cause cause
}

// thread is how a thread is.
type thread struct{ broker, runnable, running bool }

// read follows the scheduler's events: which of the broker's and the load's threads
// run, and which wait for a processor.
func read(r io.Reader) ([]span, error) {
	threads := map[int]*thread{}
	var runs, waits [2]int // load, broker
	count := func(t *thread, by int) {
		of := 0
		if t.broker {
			of = 1
		}
		if t.running {
			runs[of] += by
		} else if t.runnable {
			waits[of] += by
		}
	}
	set := func(comm string, id int, runnable, running bool) {
		t := threads[id]
		if t == nil {
			if comm != traced && comm != "tail" {
				return
			}
			t = &thread{broker: comm == traced}
			threads[id] = t
		}
		count(t, -1)
		t.runnable, t.running = runnable, running
		count(t, 1)
	}
	var spans []span
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		at, event, ok := strings.Cut(strings.TrimSpace(lines.Text()), ": ")
		seconds, err := strconv.ParseFloat(at, 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("perf script: %q", lines.Text())
		}
		name, fields, _ := strings.Cut(strings.TrimSpace(event), ": ")
		switch name {
		case "sched:sched_wakeup", "sched:sched_wakeup_new":
			id, _ := strconv.Atoi(field(fields, "pid="))
			if t := threads[id]; t == nil || !t.running {
				set(field(fields, "comm="), id, true, false)
			}
		case "sched:sched_switch":
			before, after, _ := strings.Cut(fields, " ==> ")
			id, _ := strconv.Atoi(field(before, "prev_pid="))
			set(field(before, "prev_comm="), id, strings.HasPrefix(field(before, "prev_state="), "R"), false)
			id, _ = strconv.Atoi(field(after, "next_pid="))
			set(field(after, "next_comm="), id, true, true)
		}
		is := neither
		switch {
		case runs[1] > 0:
			is = turn
		case waits[1] > 0:
			is = starved
		case runs[0] > 0:
			is = received
		case waits[0] > 0:
			is = waiting
		}
		if n := len(spans); n == 0 || spans[n-1].cause != is {
			spans = append(spans, span{mono.Time(seconds * 1e9), is})
		}
	}
	return spans, lines.Err()
}

// collection is one of garbage.
type collection struct {
	from, to mono.Time
	stopped  time.Duration // of that, for all goroutines
}

// collector hears of the collections from what the runtime prints at the end of each.
type collector struct {
	pipe *os.File
	read chan []collection
}

func collections(dir string) (*collector, error) {
	name := filepath.Join(dir, "collections")
	if err := unix.Mkfifo(name, 0o600); err != nil {
		return nil, err
	}
	pipe, err := os.OpenFile(name, os.O_RDWR, 0) // it does not end with its writer
	if err != nil {
		return nil, err
	}
	c := &collector{pipe: pipe, read: make(chan []collection, 1)}
	go func() {
		var all []collection
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			if one, ok := parseCollection(lines.Text(), clock.Mono()); ok {
				all = append(all, one)
			}
		}
		c.read <- all
	}()
	return c, nil
}

// end returns what was heard.
func (c *collector) end() []collection {
	c.pipe.Close()
	return <-c.read
}

// parseCollection reads a line of the runtime's that was printed at that time:
//
//	gc 1 @0.038s 0%: 0.018+1.3+0.076 ms clock, ...
//
// which are the times of a stop, of marking, and of another stop.
func parseCollection(line string, at mono.Time) (c collection, ok bool) {
	if !strings.HasPrefix(line, "gc ") {
		return c, false
	}
	_, times, _ := strings.Cut(line, "%: ")
	times, _, ok = strings.Cut(times, " ms clock")
	parts := strings.Split(times, "+")
	if !ok || len(parts) != 3 {
		return c, false
	}
	c.from, c.to = at, at
	for i, part := range parts {
		ms, err := strconv.ParseFloat(part, 64)
		if err != nil {
			return c, false
		}
		took := time.Duration(ms * float64(time.Millisecond))
		c.from = c.from.Add(-took)
		if i != 1 {
			c.stopped += took
		}
	}
	return c, true
}

// field is the word after a key.
func field(s, key string) string {
	_, rest, _ := strings.Cut(s, key)
	word, _, _ := strings.Cut(rest, " ")
	return word
}

// write writes a table of the causes of the slowest deliveries.
func write(w io.Writer, r load.Result, spans []span, collected []collection) {
	var sums [causes]time.Duration
	var most [causes]int
	var all time.Duration
	for _, d := range r.Slowest {
		var parts [causes]time.Duration
		parts[late] = d.Sent.Sub(d.Due)
		i, found := slices.BinarySearchFunc(spans, d.Sent, func(s span, at mono.Time) int { return cmp.Compare(s.from, at) })
		if !found {
			i = max(0, i-1)
		}
		for at := d.Sent; at.Before(d.Delivered); i++ {
			end := d.Delivered
			if i+1 < len(spans) {
				end = min(end, spans[i+1].from)
			}
			parts[spans[i].cause] += end.Sub(at)
			at = end
		}
		for i, part := range parts {
			sums[i] += part
			all += part
		}
		most[slices.Index(parts[:], slices.Max(parts[:]))]++
	}
	n := max(1, len(r.Slowest))
	fmt.Fprintf(w, "| cause | ms of each, mean | %% of their time | mostly that | what is done about it |\n|---|---|---|---|---|\n")
	for i := range causes {
		fmt.Fprintf(w, "| %s | %.3f | %.0f | %d | %s |\n", about[i][0], sums[i].Seconds()*1e3/float64(n), 100*sums[i].Seconds()/max(all.Seconds(), 1e-9), most[i], about[i][1])
	}
	cycles, marking, stopped := 0, time.Duration(0), time.Duration(0)
	for _, c := range collected {
		if len(spans) == 0 || c.to.Before(spans[0].from) || spans[len(spans)-1].from.Before(c.from) {
			continue // not while the scheduler was traced
		}
		cycles++
		marking, stopped = marking+c.to.Sub(c.from), stopped+c.stopped
	}
	during, within := 0, time.Duration(0)
	for _, d := range r.Slowest {
		shared := time.Duration(0)
		for _, c := range collected {
			shared += max(0, min(c.to, d.Delivered).Sub(max(c.from, d.Sent)))
		}
		if within += shared; shared > 0 {
			during++
		}
	}
	fmt.Fprintf(w, "\nGarbage was collected %d times meanwhile ([why so seldom](../decisions/0002-garbage-collection.md)), in %.1f ms, %.2f of them with\nall stopped: %d of these deliveries were under way meanwhile, for %.0f %% of all their time, which is in the rows above.\nThe topic's lock is not waited for: with one loop, no other thread takes it on this path.\n",
		cycles, marking.Seconds()*1e3, stopped.Seconds()*1e3, during, 100*within.Seconds()/max(all.Seconds(), 1e-9))
}
