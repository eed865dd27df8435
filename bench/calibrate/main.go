//go:build linux

package calibrate

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/tools/sim/calibrate"
)

// config is what the flags say.
type config struct {
	out, nsqd, machine string
	loads              []calibrate.Load
	slo                time.Duration
	messages           int // of each simulation of the fit
	args               []string
}

// Run measures nsqd and writes the calibration of it.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c, err := parse(args, stdout)
	if err != nil {
		return host.Usage(err)
	}
	var runs []measured
	for _, l := range c.loads {
		m, err := c.measure(ctx, l)
		if err != nil {
			return fmt.Errorf("%s: %w", name(l), err)
		}
		fmt.Fprintf(stderr, "%s: p50 %v, p99 %v, %v of processor time for each message\n", name(l), m.P50, m.P99, m.CPU)
		runs = append(runs, m)
	}
	made, err := fitted(c, runs)
	if err != nil {
		return err
	}
	made.Commit, made.Kernel, made.Machine = host.Commit(ctx), host.Kernel(), c.machine
	if err := host.WriteJSON(c.out, made); err != nil {
		return err
	}
	table(stdout, made)
	return nil
}

func name(l calibrate.Load) string {
	return fmt.Sprintf("%g msg/s in batches of %d", l.Rate, l.Batch)
}

func parse(args []string, help io.Writer) (c config, err error) {
	fs := flag.NewFlagSet("calibrate", flag.ContinueOnError)
	bin := fs.String("bin-dir", "bin", "`folder` of nsqd (make build)")
	loads := fs.String("loads", "1000,2000,5000,10000,10000/10,20000/10", "comma-separated `msg/s` of all publishers, with /n in batches of n")
	publishers := fs.Int("publishers", 200, "Poisson publishers, each with a connection")
	duration := fs.Duration("duration", 6*time.Second, "how long each load is sent")
	seed := fs.Uint64("seed", 1, "of the schedules")
	fs.StringVar(&c.out, "out", "", "`file` for the calibration")
	fs.DurationVar(&c.slo, "slo", time.Millisecond, "99th percentile within which the maximum rate of single messages is the broker's mcap")
	fs.IntVar(&c.messages, "messages", 50_000, "`messages` that the fit simulates of each load, each time")
	fs.StringVar(&c.machine, "machine", "", "`words` about this machine, for the file")
	if err := host.Parse(fs, args, help); err != nil {
		return c, err
	}
	c.args = args
	var f faults.List
	f.If(c.out == "", "--out is needed: the file for the calibration")
	f.If(*publishers < 1 || *publishers > 10_000, "--publishers %d: want 1 to 10000", *publishers)
	f.If(*duration < 100*time.Millisecond || *duration > time.Minute, "--duration %v: want 100ms to 1m", *duration)
	f.If(c.messages < 1000 || c.messages > 10_000_000, "--messages %d: want 1000 to 10000000", c.messages)
	f.If(c.slo <= 0, "--slo %v is not above 0", c.slo)
	if err := f.Err(); err != nil {
		return c, err
	}
	single := false
	for i, text := range strings.Split(*loads, ",") {
		l, err := parseLoad(text)
		l.Publishers, l.Duration, l.Seed = *publishers, *duration, *seed+uint64(i)
		if err == nil {
			err = l.Spec().Validate()
		}
		f.If(err != nil, "--loads %q: %w", text, err)
		single = single || l.Batch == 1
		c.loads = append(c.loads, l)
	}
	f.If(len(c.loads) < 2, "--loads: %d, want 2 or more", len(c.loads))
	f.If(!single, "--loads: want one of single messages, for the mcap")
	if err := f.Err(); err != nil {
		return c, err
	}
	if c.nsqd, err = host.Program(filepath.Join(*bin, "nsqd")); err != nil {
		return c, fmt.Errorf("%w: run make build", err)
	}
	return c, nil
}

// parseLoad reads rate or rate/batch.
func parseLoad(text string) (l calibrate.Load, err error) {
	rate, batch, batched := strings.Cut(text, "/")
	l.Batch = 1
	if l.Rate, err = strconv.ParseFloat(rate, 64); err != nil || !(l.Rate >= 1 && l.Rate <= 1e6) {
		return l, errors.New("want a rate of 1 to 1000000 msg/s")
	}
	if batched {
		if l.Batch, err = strconv.Atoi(batch); err != nil || l.Batch < 1 || l.Batch > 1000 {
			return l, errors.New("want a batch of 1 to 1000 messages")
		}
	}
	return l, nil
}
