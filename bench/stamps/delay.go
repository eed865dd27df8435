//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/tools/load"
)

// held is what nsqd itself made of a stream that keeps its contract.
type held struct {
	source string
	sent   int
	// access is from arrival to eligible, by the source's own arrival times;
	// whole from arrival to leaving the topic.
	access, whole quantiles
}

// delay runs nsqd with a contract that its publishers keep, while others keep
// the processors busy, and reports what each source makes it do.
func delay(ctx context.Context, c config, out io.Writer) error {
	w := tabwriter.NewWriter(out, 7, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(out, "\nA contract that is kept: access delay in nsqd, and the time from arrival until the message leaves its topic, us.")
	fmt.Fprintln(w, "source\tconns\tbusy\tmsg/s\tmessages\taccess p50\tp99\tmax\tleft p50\tp99\tmax\t")
	for _, rate := range c.rates {
		for _, mode := range c.modes {
			h, err := c.hold(ctx, mode, rate)
			if err != nil {
				return fmt.Errorf("%s at %d msg/s: %w", mode, rate, err)
			}
			fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", h.source, c.conns, c.busy, rate, h.sent,
				micros(h.access.p50), micros(h.access.p99), micros(h.access.max), micros(h.whole.p50), micros(h.whole.p99), micros(h.whole.max))
		}
	}
	return w.Flush()
}

func (c config) hold(ctx context.Context, mode hook.Mode, rate int) (h held, err error) {
	dir, err := os.MkdirTemp("", "stamps")
	if err != nil {
		return held{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	trace := filepath.Join(dir, "trace")
	contract := load.Contract(float64(rate), c.burst+1) // one more, as in evaluate
	r, source, err := c.perform(ctx, mode, rate, []string{
		"--release-trace=" + trace, fmt.Sprintf("--topic-limit=%s:%g:%d", load.Topic, contract.Rate.PerSecond(), contract.Burst),
	})
	if err != nil {
		return held{}, err
	}
	h.source, h.sent = source, r.Sent
	h.access, h.whole, err = readTrace(trace, h.sent, load.Warming)
	return h, err
}

// readTrace reads nsqd's release trace and leaves out what arrived in the time
// of warming up.
func readTrace(path string, want int, warm time.Duration) (access, whole quantiles, err error) {
	f, err := os.Open(path)
	if err != nil {
		return access, whole, err
	}
	defer f.Close()
	type release struct{ arrival, eligible, left mono.Time }
	var all []release
	first := mono.Never
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var at [3]mono.Time
		fields := strings.Split(lines.Text(), ",")
		for i := range at {
			if len(fields) != 1+len(at) {
				return access, whole, fmt.Errorf("release trace: %q", lines.Text())
			}
			ns, err := strconv.ParseInt(fields[1+i], 10, 64)
			if err != nil {
				return access, whole, fmt.Errorf("release trace: %w", err)
			}
			at[i] = mono.Time(ns)
		}
		all = append(all, release{at[0], at[1], at[2]})
		first = min(first, at[0])
	}
	if len(all) != want {
		return access, whole, fmt.Errorf("%d messages left the topic, %d were sent", len(all), want)
	}
	var a, w []time.Duration
	for _, r := range all {
		if !r.arrival.Before(first.Add(warm)) {
			a = append(a, r.eligible.Sub(r.arrival))
			w = append(w, r.left.Sub(r.arrival))
		}
	}
	return quantilesOf(a), quantilesOf(w), nil
}
