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
	var form string
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
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkForm(form); err != nil {
				return usageError{err}
			}
			configs, err := series(cfg, steps)
			if err != nil {
				return usageError{err}
			}
			var reports []scale.Report
			for i, c := range configs {
				r, err := scale.Run(c, meter(cmd.ErrOrStderr(), fmt.Sprintf("step %d of %d", i+1, len(configs))))
				if err != nil {
					return err
				}
				reports = append(reports, r)
			}
			if form == formTable {
				return scaleTable(cmd.OutOrStdout(), reports)
			}
			return writeJSON(cmd.OutOrStdout(), map[string]any{"seed": cfg.Seed, "policy": cfg.Policy, "rule": cfg.Rule, "steps": reports})
		},
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
	outputFlag(cmd, &form)
	return cmd
}

// series returns the studies of all steps, smallest first.
func series(last scale.Config, steps int) ([]scale.Config, error) {
	if steps < 1 || steps > 6 {
		return nil, fmt.Errorf("steps: %d, want 1 .. 6", steps)
	}
	var all []scale.Config
	var faults []error
	for i := range steps {
		c := last
		for range steps - 1 - i {
			c.Brokers, c.Topics, c.Publishers = max(1, c.Brokers/10), max(1, c.Topics/10), max(1, c.Publishers/10)
		}
		if err := c.Validate(); err != nil {
			faults = append(faults, err)
		}
		all = append(all, c)
	}
	// Those of the last step are what the user gave.
	if len(faults) > 0 {
		return nil, faults[len(faults)-1]
	}
	return all, nil
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
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(label string, of func(scale.Report) float64, format string) {
		fmt.Fprint(tw, label, "\t")
		var values []float64
		for _, r := range reports {
			values = append(values, of(r))
			fmt.Fprintf(tw, format+"\t", of(r))
		}
		exponent := ""
		if n := len(values); n > 1 && values[n-2] > 0 && values[n-1] > 0 {
			exponent = fmt.Sprintf("%.2f", math.Log10(values[n-1]/values[n-2]))
		}
		fmt.Fprintf(tw, "%s\t\n", exponent)
	}
	us := func(of func(scale.Report) time.Duration) func(scale.Report) float64 {
		return func(r scale.Report) float64 { return float64(of(r)) / 1e3 }
	}
	row("brokers", func(r scale.Report) float64 { return float64(r.Brokers) }, "%.0f")
	row("topics", func(r scale.Report) float64 { return float64(r.Topics) }, "%.0f")
	row("publishers", func(r scale.Report) float64 { return float64(r.Publishers) }, "%.0f")
	row("publishers of the largest topic", func(r scale.Report) float64 { return float64(r.Largest) }, "%.0f")
	row("brokers of the widest topic", func(r scale.Report) float64 { return float64(r.Widest) }, "%.0f")
	row("split topics", func(r scale.Report) float64 { return float64(r.Split) }, "%.0f")
	for _, t := range []struct {
		label string
		of    func(scale.Report) scale.Times
	}{
		{"place", func(r scale.Report) scale.Times { return r.Place }}, {"commit", func(r scale.Report) scale.Times { return r.Commit }},
		{"grant", func(r scale.Report) scale.Times { return r.Grant }}, {"resolve", func(r scale.Report) scale.Times { return r.Resolve }},
		{"retune all", func(r scale.Report) scale.Times { return r.Tick }}, {"broker comes back", func(r scale.Report) scale.Times { return r.Rejoin }},
	} {
		row(t.label+", p50, us", us(func(r scale.Report) time.Duration { return t.of(r).P50 }), "%.1f")
		row(t.label+", max, us", us(func(r scale.Report) time.Duration { return t.of(r).Max }), "%.1f")
	}
	row("all topics up, s", func(r scale.Report) float64 { return (r.Place.Total + r.Commit.Total + r.Grant.Total).Seconds() }, "%.2f")
	row("catalog, MB", func(r scale.Report) float64 { return float64(r.CatalogBytes) / 1e6 }, "%.1f")
	row("catalog, bytes per publisher", func(r scale.Report) float64 { return float64(r.CatalogBytes) / float64(r.Publishers) }, "%.0f")
	row("ledger, MB", func(r scale.Report) float64 { return float64(r.LedgerBytes) / 1e6 }, "%.1f")
	row("messages to bring a topic up", func(r scale.Report) float64 { return r.Messages.PerTopic }, "%.1f")
	row("reports, messages/s", func(r scale.Report) float64 { return r.Messages.ReportsPerSecond }, "%.0f")
	row("lines in them, 1/s", func(r scale.Report) float64 { return r.Messages.EntriesPerSecond }, "%.0f")
	row("retuning, messages/s", func(r scale.Report) float64 { return r.Messages.GrantsPerSecond }, "%.0f")
	if err := flush(tw); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(w, "Last column: exponent of growth in the last step, 1 for proportional."); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
