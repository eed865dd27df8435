package main

import (
	"fmt"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/drlsim/adapt"
	"github.com/srtm-io/srtm/tools/drlsim/arrivals"
)

func sharesCommand() *cobra.Command {
	var (
		seed   uint64
		file   string
		faster float64
		split  int
		form   string
	)
	cmd := &cobra.Command{
		Use:   "shares",
		Short: "Access delays while shares follow the traffic, by rule",
		Long: `shares has every rule follow changing traffic and prints the 99th percentile of
access delays, pooled and of each broker, by phase: two brokers whose traffic
shifts from 50/50 to 90/10 and 95/5, and one of two that falls silent and comes
back (10,000 msg/s, Poisson, contract 11,000/60), with the adaptor's defaults.

With --arrivals the traffic is that of a file (as for drlsim bucket, its lines
sorted), --faster times as fast, spread over --split brokers by publisher; the
contract is 1.1 times its mean rate and, per broker, 30 messages more than one
of 1.1 times would have in 100 ms; the phases are its thirds.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkForm(form); err != nil {
				return usageError{err}
			}
			if faster <= 0 || split < 1 || split > 100 {
				return usagef("--faster %v and --split %d: want more than 0, and 1 to 100", faster, split)
			}
			scenarios := adapt.Scenarios(seed)
			if file != "" {
				trace, err := arrivals.ReadFile(file, cmd.InOrStdin())
				if err != nil {
					return err
				}
				sc, err := recorded(file, trace, faster, split)
				if err != nil {
					return err
				}
				scenarios = []adapt.Scenario{sc}
			}
			type result struct {
				Scenario string          `json:"scenario"`
				Rule     string          `json:"rule"`
				Phases   []adapt.Figures `json:"phases"`
			}
			var results []result
			for _, sc := range scenarios {
				for _, rule := range share.Rules() {
					f, err := adapt.Run(sc, rule)
					if err != nil {
						return fmt.Errorf("%s, %s: %w", sc.Name, rule, err)
					}
					results = append(results, result{sc.Name, rule, f})
				}
			}
			if form == formJSON {
				return writeJSON(cmd.OutOrStdout(), results)
			}
			tw := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "scenario\tphase\trule\tpooled p99\tp99 by broker")
			for _, r := range results {
				for _, f := range r.Phases {
					fmt.Fprintf(tw, "%s\t%s\t%s\t%v\t", r.Scenario, f.Phase, r.Rule, f.Pooled.Round(time.Microsecond))
					for _, d := range f.Brokers {
						fmt.Fprintf(tw, "%v ", d.Round(time.Microsecond))
					}
					fmt.Fprintln(tw)
				}
			}
			return flush(tw)
		},
	}
	cmd.Flags().Uint64Var(&seed, "seed", 1, "`number` that the Poisson arrivals are drawn by")
	cmd.Flags().StringVar(&file, "arrivals", "", "`file` of arrival times, or - for standard input")
	cmd.Flags().Float64Var(&faster, "faster", 1, "`factor` by which the file's time is compressed")
	cmd.Flags().IntVar(&split, "split", 2, "`brokers` that the file's publishers are spread over")
	outputFlag(cmd, &form)
	return cmd
}

// recorded makes a scenario of a trace.
func recorded(name string, trace []arrivals.Arrival, faster float64, split int) (adapt.Scenario, error) {
	if !slices.IsSortedFunc(trace, func(a, b arrivals.Arrival) int { return int(min(1, max(-1, a.At-b.At))) }) {
		return adapt.Scenario{}, fmt.Errorf("%s: its lines are not sorted by time", name)
	}
	first, last := trace[0].At, trace[len(trace)-1].At
	span := time.Duration(float64(last.Sub(first)) / faster)
	if span < 30*time.Second {
		return adapt.Scenario{}, fmt.Errorf("%s: lasts %v, want 30s for rules to follow it", name, span)
	}
	rate := 1.1 * float64(len(trace)) / span.Seconds()
	sc := adapt.Scenario{Name: name, Brokers: split, Contract: tokenbucket.Share{
		Rate: tokenbucket.PerSecond(rate), Burst: int64(rate/10) + 30*int64(split),
	}}
	placed := map[string]int{}
	for i, a := range trace {
		to, known := placed[a.Publisher]
		switch {
		case a.Publisher == "":
			to = i % split
		case !known:
			to = len(placed) % split
			placed[a.Publisher] = to
		}
		sc.Arrivals = append(sc.Arrivals, adapt.Arrival{At: stamp.Mono(float64(a.At.Sub(first)) / faster), Broker: to})
	}
	third := stamp.Mono(span / 3)
	sc.Phases = []adapt.Phase{{Name: "first third", From: 0, To: third}, {Name: "second", From: third, To: 2 * third}, {Name: "last", From: 2 * third, To: stamp.Never}}
	return sc, nil
}
