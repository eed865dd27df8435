package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/tools/sim/web"
)

// mqosResult is an object of the command's output.
type mqosResult struct {
	Schedule string         `json:"schedule"`
	Seed     uint64         `json:"seed"`
	Stopped  string         `json:"stopped,omitempty"`
	Classes  []web.VisitsOf `json:"classes,omitempty"`
}

func mqosCommand() *cobra.Command {
	v := web.Visits{Times: 1, Warmup: 60, Seconds: 200, Seed: 1}
	cmd := &cobra.Command{
		Use:   "mqos",
		Short: "What scheduling by several resources is worth, beside other ways",
		Long: `mqos simulates a website with a processor, a disk and a network behind a gateway
that schedules the requests of three classes, weights 6:3:1, with the gateway's own
code: without scheduling (nQoS), by the processor alone (sQoS), by all resources
(mQoS), and so as its paper has it (literal). The website is the paper's; what it
does not say is assumed (docs/evaluation/mqos.md).`,
		Example: `  drlsim mqos --output table
  drlsim mqos --times 0.1 --seconds 1000`,
	}
	fs := cmd.Flags()
	fs.Float64Var(&v.Times, "times", v.Times, "`factor` of the number of clients, 400 of each class")
	fs.Float64Var(&v.Seconds, "seconds", v.Seconds, "virtual `seconds` that are measured")
	fs.Uint64Var(&v.Seed, "seed", v.Seed, "`number` that decides all random choices")
	return leaf(cmd, func(*cobra.Command) (answer, error) {
		if !(v.Times > 0 && v.Times <= 1000) || !(v.Seconds >= 1 && v.Seconds <= 1e5) {
			return answer{}, usagef("times: %v, want above 0, to 1000; seconds: %v, want 1 .. 100000", v.Times, v.Seconds)
		}
		var results []mqosResult
		for _, v.Scheduling = range web.Schedulings() {
			o := mqosResult{Schedule: v.Name, Seed: v.Seed}
			var err error
			if o.Classes, err = web.RunSite(v); err != nil {
				o.Stopped = err.Error()
			}
			results = append(results, o)
		}
		return answered(mqosTable, results...), nil
	})
}

func mqosTable(w io.Writer, results []mqosResult) error {
	return grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		text := "schedule\tclass\trequests/s\t"
		for _, p := range web.Pages() {
			text += p.Name + "\t"
		}
		for _, name := range web.Resources() {
			text += name + " %%\t"
		}
		row(text + "queued, ms\tserved\t")
		for _, r := range results {
			if r.Stopped != "" {
				row("%s\t%s\t\t\t\t\t\t\t\t\t\t", r.Schedule, r.Stopped)
			}
			for i, c := range r.Classes {
				row("%s\t%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.0f\t%.0f\t", r.Schedule, fmt.Sprint(i+1), c.Total(),
					c.Rate[0], c.Rate[1], c.Rate[2], 100*c.Busy[0], 100*c.Busy[1], 100*c.Busy[2], c.Queued, c.Served)
			}
		}
	})
}
