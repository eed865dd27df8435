// Package figures reproduces the figures and tables of the SRTM paper's evaluation (section
// 6), and of other papers. It adds figures that the papers do not have, such as recorded
// traffic. Most figures are simulated at the paper's full size (tools/sim/scenario). Some
// are measured live at a smaller scale, with the project's own binaries on this machine.
// Each figure becomes a CSV file and a plot. A table compares our results with the paper's
// statements.
//
// The package only describes scenarios. Placement, shares and verdicts come from the
// production code. Read figure.go for the list, and docs/evaluation for the results.
package figures

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/faults"
)

// options holds the flags.
type options struct {
	out, pages, bin, traces string
	only                    string
	seed                    uint64
	runs                    int
	seconds                 float64
}

// Run makes the selected figures.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o options
	fs := flag.NewFlagSet("figures", flag.ContinueOnError)
	fs.StringVar(&o.out, "out", "docs/evaluation", "`folder` for the CSV files and plots")
	fs.StringVar(&o.pages, "pages", "docs/evaluation", "`folder` of the pages whose tables are kept up to date; empty: none")
	fs.StringVar(&o.bin, "bin-dir", "bin", "`folder` of the binaries, for what is measured live")
	fs.StringVar(&o.traces, "traces", "../shared/traces", "`folder` of the recorded traffic; without the folder, the figures of recorded traffic say so")
	fs.StringVar(&o.only, "only", "", "comma-separated `names` of figures; empty: all. There are "+strings.Join(names(), ", "))
	fs.Uint64Var(&o.seed, "seed", 1, "seed of all random choices: the same seed gives the same simulated figures")
	fs.IntVar(&o.runs, "runs", 10, "simulations of each point, with different seeds")
	fs.Float64Var(&o.seconds, "seconds", 10, "virtual `seconds` that each simulation measures")
	if err := host.Parse(fs, args, stdout); err != nil {
		return host.Usage(err)
	}
	if err := o.validate(); err != nil {
		return host.Usage(err)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	began := time.Now()
	for _, f := range figures {
		if o.only != "" && !slices.Contains(strings.Split(o.only, ","), f.name) {
			continue
		}
		out, err := f.run(ctx, o, stderr)
		if impossible, missing := errors.AsType[impossible](err); missing {
			out, err = &work{rows: []row{{Figure: f.name, Quantity: f.title, Note: "not made: " + impossible.Error()}}}, nil
		}
		if err != nil {
			return fmt.Errorf("figure %s: %w", f.name, err)
		}
		if err := out.write(o.out, f.name); err != nil {
			return fmt.Errorf("figure %s: %w", f.name, err)
		}
		fmt.Fprintf(stderr, "%s: done, %.0f s from the start\n", f.name, time.Since(began).Seconds())
	}
	if o.pages == "" {
		return nil
	}
	return updatePages(o.pages, o.out)
}

func (o options) validate() error {
	var f faults.List
	f.If(o.runs < 1 || o.runs > 1000, "runs: %d, want 1 .. 1000", o.runs)
	f.If(!(o.seconds >= 0.1 && o.seconds <= 3600), "seconds: %v, want 0.1 .. 3600", o.seconds)
	for name := range strings.SplitSeq(o.only, ",") {
		f.If(o.only != "" && !slices.Contains(names(), name), "no figure %q: there are %s", name, strings.Join(names(), ", "))
	}
	return f.Err()
}

// impossible is the reason why a figure cannot be made on this machine.
type impossible struct{ reason string }

func (e impossible) Error() string { return e.reason }
