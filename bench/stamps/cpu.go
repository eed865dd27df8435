//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/tools/load"
)

// usage is what one measurement cost, per message.
type usage struct {
	broker time.Duration // in the broker's process
	// all adds the process that sends and receives, in whose time the filter runs on
	// loopback.
	all    time.Duration
	source string
}

// cpu measures the broker with each source, in turns, so that what else the
// machine does falls on all alike.
func cpu(ctx context.Context, c config, out io.Writer) error {
	fmt.Fprintln(out, "\nProcessor time per message, us: medians of the rounds, and of their ratios to the last source.")
	w := tabwriter.NewWriter(out, 7, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "source\tconns\tmsg/s\tbroker\tratio\tleast\tmost\tbroker and load\tratio\tleast\tmost\t")
	for _, rate := range c.rates {
		rounds := make([][]usage, len(c.modes))
		for range c.rounds {
			for i, mode := range c.modes {
				u, err := c.use(ctx, mode, rate)
				if err != nil {
					return fmt.Errorf("%s at %d msg/s: %w", mode, rate, err)
				}
				rounds[i] = append(rounds[i], u)
			}
		}
		base := rounds[len(rounds)-1]
		for _, us := range rounds {
			brokers, alls := column(us, base, func(u usage) time.Duration { return u.broker }), column(us, base, func(u usage) time.Duration { return u.all })
			fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t\n", us[0].source, c.conns, rate, brokers, alls)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// column describes one kind of cost: the median, and how its ratio to the base
// of the same round is spread.
func column(us, base []usage, of func(usage) time.Duration) string {
	var times []time.Duration
	var ratios []float64
	for i, u := range us {
		times = append(times, of(u))
		ratios = append(ratios, float64(of(u))/float64(of(base[i])))
	}
	slices.Sort(times)
	slices.Sort(ratios)
	mid := len(times) / 2
	return fmt.Sprintf("%.2f\t%.3f\t%.3f\t%.3f", float64(times[mid])/1e3, ratios[mid], ratios[0], ratios[len(ratios)-1])
}

// use measures one run of the broker.
func (c config) use(ctx context.Context, mode hook.Mode, rate int) (usage, error) {
	r, source, err := c.perform(ctx, mode, rate, nil)
	us := func(v float64) time.Duration { return time.Duration(v * 1e3) }
	return usage{us(r.CPU), us(r.CPU + r.Load), source}, err
}

// perform has the broker carry the load with stamps from one source, and says which
// it was.
func (c config) perform(ctx context.Context, mode hook.Mode, rate int, flags []string) (r load.Result, source string, err error) {
	b := load.NSQ("nsqd", c.nsqd, "", func(load.Scenario) []string {
		return append([]string{"--arrival-stamps=" + string(mode)}, flags...)
	})
	b.Listens = func(ctx context.Context, at load.Place) error {
		source, err = stampSource(ctx, at.Web)
		if mode == hook.EBPF && source != "ebpf" {
			err = errors.Join(err, fmt.Errorf("the broker uses %q", source))
		}
		return err
	}
	r, err = load.Perform(ctx, b, c.scenario(rate), c.duration, c.seed)
	if err == nil && r.Missing > 0 {
		err = fmt.Errorf("%d of %d messages were not delivered", r.Missing, r.Sent)
	}
	return r, source, err
}

// scenario is the work of all measurements.
func (c config) scenario(rate int) load.Scenario {
	return load.Scenario{Name: "stamps", Conns: c.conns, Rate: float64(rate), Together: 1, Size: c.size, Channels: 1, Burst: c.burst, Busy: c.busy}
}

// stampSource asks a broker where its stamps come from.
func stampSource(ctx context.Context, web string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+web+"/info", nil)
	if err != nil {
		return "", err
	}
	client := http.Client{Timeout: local.Patience, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var info struct {
		Stamps hook.Info `json:"arrival_stamps"`
	}
	err = json.NewDecoder(resp.Body).Decode(&info)
	return info.Stamps.Source, err
}
