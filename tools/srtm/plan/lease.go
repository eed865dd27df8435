package plan

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/tokenbucket"
)

// LeaseCommand returns `srtm admission plan`.
func LeaseCommand() *cobra.Command {
	var refill, capacity, rate float64
	var holders int
	cmd := &cobra.Command{
		Use:   "plan --refill CREDITS/S --capacity CREDITS --rate REQUESTS/S",
		Short: "What it costs that k holders divide a leased rule",
		Long: `plan says, on paper, what it costs that k holders hold equal parts of a rule of
mode lease in place of one bucket: requests that one bucket would admit meet an
empty part while others have credits. DELAY is what a request would wait for its
credit on average, if it waited (Proposition 1: it grows with k), PENALTY how
much more that is than with one holder. EMPTY is the percentage that would wait;
as these are denied instead, and take no credit, at most so many are denied.
Requests are Poisson, each holder gets as many, and each takes one credit. If some
holders get more, that costs little, since parts follow demand. The server that
owns the key counts as a holder.`,
		Example:       "  srtm admission plan --refill 100 --capacity 20 --rate 80 --holders 16",
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case !(refill >= 0.001 && refill <= 1e9):
				return usage("--refill %v: want 0.001 to 1e9", refill)
			case !(capacity >= 1 && capacity <= 1e9):
				return usage("--capacity %v: want 1 to 1e9", capacity)
			case !(rate > 0 && rate < refill):
				return usage("--rate %v: want more than 0 and less than --refill %v, or requests wait for ever", rate, refill)
			case holders < 1 || float64(holders) > capacity:
				return usage("--holders %d: want 1 to --capacity %v, for each holds a credit at least", holders, capacity)
			}
			t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', tabwriter.AlignRight)
			fmt.Fprintf(t, "HOLDERS\tREFILL/S\tCAPACITY\tEMPTY %%\tDELAY ms\tPENALTY ms\t\n")
			one := tokenbucket.ExpectedDelayExact(rate, refill, capacity)
			for k := 1; ; k = min(2*k, holders) {
				n := float64(k)
				delay := tokenbucket.ExpectedDelayExact(rate/n, refill/n, capacity/n)
				fmt.Fprintf(t, "%d\t%.4g\t%.4g\t%.3g\t%.3g\t%.3g\t\n", k, refill/n, capacity/n,
					100*tokenbucket.PDelayed(rate/n, refill/n, capacity/n), 1000*delay, 1000*(delay-one))
				if k == holders {
					return t.Flush()
				}
			}
		},
	}
	flags := cmd.Flags()
	flags.Float64Var(&refill, "refill", 0, "the rule's credits `per second`")
	flags.Float64Var(&capacity, "capacity", 0, "`credits` that its bucket holds")
	flags.Float64Var(&rate, "rate", 0, "requests `per second` at all holders together, below --refill")
	flags.IntVar(&holders, "holders", 8, "the largest `number` of holders shown, up to --capacity")
	return cmd
}
