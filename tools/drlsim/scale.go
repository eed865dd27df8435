package main

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tools/sim/scale"
)

func scaleCommand() *cobra.Command {
	cfg := scale.Config{
		Size:   scale.Size{Brokers: 1000, Topics: 100_000, Publishers: 10_000_000},
		Policy: placement.SRTM, Rule: share.Proportional, Mcap: 64_000, Load: 0.7, GroupSize: 25, Ticks: 5, Seed: 1,
	}
	steps := 4
	cmd := &cobra.Command{
		Use:   "scale",
		Short: "What the control plane itself costs as a cluster grows",
		Long: `scale brings up clusters of growing size with the packages that the loaddistributor
and the tbadaptor decide with, and measures what that takes: the time to place a
topic, to commit it, to grant its shares; to retune all shares; to take back a
broker that was away; the memory; and how many gRPC messages it means. Nothing is
sent: what gRPC, goroutines and logging cost is not in it.

The last step has the size given, each one before it a tenth of the one after. The
sizes of topics fall as 1 over their rank. Counts are the same for the same seed;
times and bytes are this machine's. The largest size takes about a minute and
several gigabytes.`,
		Example: `  drlsim scale --output table
  drlsim scale --brokers 100 --topics 1000 --publishers 1000000 --steps 1`,
	}
	fs := cmd.Flags()
	fs.IntVar(&cfg.Brokers, "brokers", cfg.Brokers, "brokers of the last step")
	fs.IntVar(&cfg.Topics, "topics", cfg.Topics, "topics of the last step")
	fs.IntVar(&cfg.Publishers, "publishers", cfg.Publishers, "publishers of the last step, of all topics")
	fs.IntVar(&steps, "steps", steps, "number of `sizes`, 1 to 6")
	fs.StringVar(&cfg.Policy, "policy", cfg.Policy, "placement `policy`")
	fs.StringVar(&cfg.Rule, "rule", cfg.Rule, "share `rule`")
	fs.Int64Var(&cfg.Mcap, "mcap", cfg.Mcap, "what each broker carries, in `msg/s`")
	fs.Float64Var(&cfg.Load, "load", cfg.Load, "`part` of it that the contracts take")
	fs.IntVar(&cfg.GroupSize, "group-size", cfg.GroupSize, "`publishers` that share a correlation key")
	fs.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "seed of everything random")
	return leaf(cmd, func(cmd *cobra.Command) (answer, error) {
		configs, err := series(cfg, steps)
		if err != nil {
			return answer{}, usage(err)
		}
		var reports []scale.Report
		for i, c := range configs {
			r, err := scale.Run(c, meter(cmd.ErrOrStderr(), fmt.Sprintf("step %d of %d", i+1, len(configs))))
			if err != nil {
				return answer{}, err
			}
			reports = append(reports, r)
		}
		object := map[string]any{"seed": cfg.Seed, "policy": cfg.Policy, "rule": cfg.Rule, "steps": reports}
		return answer{[]any{object}, func(w io.Writer) error { return scaleTable(w, reports) }}, nil
	})
}

// series returns the studies of all steps, smallest first.
func series(last scale.Config, steps int) ([]scale.Config, error) {
	if steps < 1 || steps > 6 {
		return nil, fmt.Errorf("steps: %d, want 1 .. 6", steps)
	}
	var all []scale.Config
	var err error // of the last step that has one: it is nearest to what the user gave
	for i := range steps {
		c := last
		for range steps - 1 - i {
			c.Brokers, c.Topics, c.Publishers = max(1, c.Brokers/10), max(1, c.Topics/10), max(1, c.Publishers/10)
		}
		if fault := c.Validate(); fault != nil {
			err = fault
		}
		all = append(all, c)
	}
	return all, err
}

// meter measures this process, and shows progress about once a second.
func meter(w io.Writer, step string) scale.Meter {
	began := time.Now()
	shown := time.Duration(0)
	return scale.Meter{
		Now: func() mono.Time { return mono.Time(time.Since(began)) },
		Heap: func() uint64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		},
		Progress: func(stage string, done, total int) {
			if now := time.Since(began); now-shown >= time.Second {
				shown = now
				fmt.Fprintf(w, "%s: %s, %d of %d, %.0f s\n", step, stage, done, total, now.Seconds())
			}
		},
	}
}

// scaleTable prints a line for each figure and a column for each size; the last
// column is the exponent with which the figure grows from the last size but one
// to the last.
func scaleTable(w io.Writer, reports []scale.Report) error {
	count := func(of func(scale.Report) int) func(scale.Report) float64 {
		return func(r scale.Report) float64 { return float64(of(r)) }
	}
	type line struct {
		label, format string
		of            func(scale.Report) float64
	}
	lines := []line{
		{"brokers", "%.0f", count(func(r scale.Report) int { return r.Brokers })},
		{"topics", "%.0f", count(func(r scale.Report) int { return r.Topics })},
		{"publishers", "%.0f", count(func(r scale.Report) int { return r.Publishers })},
		{"publishers of the largest topic", "%.0f", count(func(r scale.Report) int { return r.Largest })},
		{"brokers of the widest topic", "%.0f", count(func(r scale.Report) int { return r.Widest })},
		{"split topics", "%.0f", count(func(r scale.Report) int { return r.Split })},
	}
	for _, t := range []struct {
		label string
		of    func(scale.Report) scale.Times
	}{
		{"place", func(r scale.Report) scale.Times { return r.Place }}, {"commit", func(r scale.Report) scale.Times { return r.Commit }},
		{"grant", func(r scale.Report) scale.Times { return r.Grant }}, {"resolve", func(r scale.Report) scale.Times { return r.Resolve }},
		{"retune all", func(r scale.Report) scale.Times { return r.Tick }}, {"broker comes back", func(r scale.Report) scale.Times { return r.Rejoin }},
	} {
		lines = append(lines, line{t.label + ", p50, us", "%.1f", func(r scale.Report) float64 { return float64(t.of(r).P50) / 1e3 }},
			line{t.label + ", max, us", "%.1f", func(r scale.Report) float64 { return float64(t.of(r).Max) / 1e3 }})
	}
	lines = append(lines, []line{
		{"all topics up, s", "%.2f", func(r scale.Report) float64 { return r.Up().Seconds() }},
		{"catalog, MB", "%.1f", func(r scale.Report) float64 { return float64(r.CatalogBytes) / 1e6 }},
		{"catalog, bytes per publisher", "%.0f", func(r scale.Report) float64 { return float64(r.CatalogBytes) / float64(r.Publishers) }},
		{"ledger, MB", "%.1f", func(r scale.Report) float64 { return float64(r.LedgerBytes) / 1e6 }},
		{"messages to bring a topic up", "%.1f", func(r scale.Report) float64 { return r.Messages.PerTopic }},
		{"reports, messages/s", "%.0f", func(r scale.Report) float64 { return r.Messages.ReportsPerSecond }},
		{"lines in them, 1/s", "%.0f", func(r scale.Report) float64 { return r.Messages.EntriesPerSecond }},
		{"retuning, messages/s", "%.0f", func(r scale.Report) float64 { return r.Messages.GrantsPerSecond }},
	}...)
	err := grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		for _, l := range lines {
			text, exponent, before := l.label+"\t", "", 0.0
			for _, r := range reports {
				v := l.of(r)
				text += fmt.Sprintf(l.format+"\t", v)
				if exponent = ""; before > 0 && v > 0 {
					exponent = fmt.Sprintf("%.2f", math.Log10(v/before))
				}
				before = v
			}
			row("%s%s\t", text, exponent)
		}
	})
	if err == nil {
		_, err = fmt.Fprintln(w, "Last column: exponent of growth in the last step, 1 for proportional.")
	}
	return err
}
