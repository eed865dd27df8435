package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/sim/bucket"
	"github.com/srtm-io/srtm/tools/sim/shares"
)

// defaultFlex is the adaptor's, percent.
const defaultFlex = 5

func sharesCommand() *cobra.Command {
	var (
		seed, seeds uint64
		load        float64
		flex        int64
		only        []string
		rules       []string
		file        string
		faster      float64
		split       int
	)
	cmd := &cobra.Command{
		Use:   "shares",
		Short: "Access delays while shares follow the traffic, by rule",
		Long: `shares has every rule follow a topic through trouble: its publishers move, a broker
dies, comes back, is frozen, the traffic shifts. 200 Poisson publishers at 20 msg/s
are --load of the contract's rate, its burst is 100, the SLO 99 % within 20 ms; the
rules, the ledger and the buckets are the production's own, with the adaptor's
defaults. Of each scenario, the median and the worst of --seeds seeds:

  p99          99th percentile of access delays in the worst ten seconds after the
               trouble began, of publishers that keep to their part and have not
               lost their broker
  all p99      of all publishers
  no broker    how long a publisher was without one
  unaccepted   messages that found no broker when they were made; they are sent
               when there is one
  healed       when the last second ended in which more than 1 % were late

With --arrivals the traffic is that of a file (as for drlsim bucket, its lines
sorted), --faster times as fast, spread over --split brokers by publisher; the
contract is 1.1 times its mean rate and, per broker, 30 messages more than one
of 1.1 times would have in 100 ms. It prints the 99th percentiles of its thirds.`,
		Example: `  drlsim shares --output table
  drlsim shares --scenario drain,crash --rule sqrt --seeds 1`,
	}
	cmd.Flags().Uint64Var(&seed, "seed", 1, "`number` that the Poisson arrivals are drawn by, of the first run")
	cmd.Flags().Uint64Var(&seeds, "seeds", 20, "`runs`, each with the next seed")
	cmd.Flags().Float64Var(&load, "load", 0.8, "`part` of the contract's rate that is sent")
	cmd.Flags().Int64Var(&flex, "flex-percent", defaultFlex, "`part` of each share that is on a lease, in percent")
	cmd.Flags().StringSliceVar(&only, "scenario", nil, "`names` of the scenarios; default: all")
	cmd.Flags().StringSliceVar(&rules, "rule", share.Rules(), "`names` of the rules")
	cmd.Flags().StringVar(&file, "arrivals", "", "`file` of arrival times, or - for standard input")
	cmd.Flags().Float64Var(&faster, "faster", 1, "`factor` by which the file's time is compressed")
	cmd.Flags().IntVar(&split, "split", 2, "`brokers` that the file's publishers are spread over")
	return leaf(cmd, func(cmd *cobra.Command) (answer, error) {
		switch {
		case !(faster > 0) || split < 1 || split > 100:
			return answer{}, usagef("--faster %v and --split %d: want more than 0, and 1 to 100", faster, split)
		case seeds < 1 || seeds > 1000:
			return answer{}, usagef("--seeds %d: want 1 to 1000", seeds)
		case !(load >= 0.1 && load <= 1):
			return answer{}, usagef("--load %v: want 0.1 to 1", load)
		case flex < 0 || flex > 100:
			return answer{}, usagef("--flex-percent %d: want 0 to 100", flex)
		}
		for _, rule := range rules {
			if !slices.Contains(share.Rules(), rule) {
				return answer{}, usagef("unknown rule %q: there are %s", rule, strings.Join(share.Rules(), ", "))
			}
		}
		if file != "" {
			return sharesRecorded(cmd, file, faster, split, rules, ledger.Permille(10*flex))
		}
		for _, name := range only {
			if !slices.Contains(shares.Names(), name) {
				return answer{}, usagef("unknown scenario %q: there are %s", name, strings.Join(shares.Names(), ", "))
			}
		}
		return sharesTrouble(trouble{seed, seeds, load, ledger.Permille(10 * flex), only, rules})
	})
}

// trouble is what is to be simulated.
type trouble struct {
	seed, seeds uint64
	load        float64
	flex        ledger.Permille
	only, rules []string
}

// spread is a figure over the seeds.
type spread[T cmp.Ordered] struct {
	Median T `json:"median"`
	Worst  T `json:"worst"`
}

func spreadOf[T cmp.Ordered](all []shares.Outcome, of func(shares.Outcome) T) spread[T] {
	values := make([]T, len(all))
	for i, o := range all {
		values[i] = of(o)
	}
	slices.Sort(values)
	return spread[T]{values[(len(values)-1)/2], values[len(values)-1]}
}

func sharesTrouble(t trouble) (answer, error) {
	type result struct {
		Scenario   string                `json:"scenario"`
		Rule       string                `json:"rule"`
		P99        spread[time.Duration] `json:"p99_ns"`
		All        spread[time.Duration] `json:"all_p99_ns"`
		NoBroker   spread[time.Duration] `json:"no_broker_ns"`
		Unaccepted spread[float64]       `json:"unaccepted"`
		Healed     spread[time.Duration] `json:"healed_ns"`
	}
	type key struct{ scenario, rule string }
	outcomes := map[key][]shares.Outcome{}
	var order []key
	for seed := range t.seeds {
		for _, sc := range shares.Scenarios(t.seed+seed, t.load, t.only...) {
			for _, rule := range t.rules {
				delays, err := shares.Run(sc, rule, t.flex)
				if err != nil {
					return answer{}, fmt.Errorf("%s, %s: %w", sc.Name, rule, err)
				}
				k := key{sc.Name, rule}
				if seed == 0 {
					order = append(order, k)
				}
				outcomes[k] = append(outcomes[k], sc.Outcome(delays))
			}
		}
	}
	var results []result
	for _, k := range order {
		all := outcomes[k]
		results = append(results, result{
			Scenario: k.scenario, Rule: k.rule,
			P99:        spreadOf(all, func(o shares.Outcome) time.Duration { return o.P99 }),
			All:        spreadOf(all, func(o shares.Outcome) time.Duration { return o.All }),
			NoBroker:   spreadOf(all, func(o shares.Outcome) time.Duration { return o.NoBroker }),
			Unaccepted: spreadOf(all, func(o shares.Outcome) float64 { return o.Unaccepted }),
			Healed:     spreadOf(all, func(o shares.Outcome) time.Duration { return o.Healed }),
		})
	}
	return answer{[]any{results}, func(w io.Writer) error {
		return grid(w, 0, func(row func(string, ...any)) {
			row("scenario\trule\tp99, ms\tworst\tall p99, ms\tworst\tno broker, s\tunaccepted\thealed, s\tworst")
			ms := func(d time.Duration) float64 { return float64(d) / 1e6 }
			for _, r := range results {
				row("%s\t%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.2f %%\t%.0f\t%.0f", r.Scenario, r.Rule, ms(r.P99.Median), ms(r.P99.Worst),
					ms(r.All.Median), ms(r.All.Worst), r.NoBroker.Worst.Seconds(), 100*r.Unaccepted.Worst, r.Healed.Median.Seconds(), r.Healed.Worst.Seconds())
			}
		})
	}}, nil
}

func sharesRecorded(cmd *cobra.Command, file string, faster float64, split int, rules []string, flex ledger.Permille) (answer, error) {
	trace, err := bucket.ReadFile(file, cmd.InOrStdin())
	if err != nil {
		return answer{}, err
	}
	sc, err := recorded(file, trace, faster, split)
	if err != nil {
		return answer{}, err
	}
	type result struct {
		Scenario string           `json:"scenario"`
		Rule     string           `json:"rule"`
		Phases   []shares.Figures `json:"phases"`
	}
	var results []result
	for _, rule := range rules {
		delays, err := shares.Run(sc, rule, flex)
		if err != nil {
			return answer{}, fmt.Errorf("%s, %s: %w", sc.Name, rule, err)
		}
		results = append(results, result{sc.Name, rule, sc.Figures(delays)})
	}
	return answer{[]any{results}, func(w io.Writer) error {
		return grid(w, 0, func(row func(string, ...any)) {
			row("scenario\tphase\trule\tpooled p99\tp99 by broker")
			for _, r := range results {
				for _, f := range r.Phases {
					text := ""
					for _, d := range f.Brokers {
						text += fmt.Sprint(d.Round(time.Microsecond), " ")
					}
					row("%s\t%s\t%s\t%v\t%s", r.Scenario, f.Phase, r.Rule, f.Pooled.Round(time.Microsecond), text)
				}
			}
		})
	}}, nil
}

// maxSpan bounds a trace that rules follow step by step, in seconds.
const maxSpan = 30 * 24 * 3600

// recorded makes a scenario of a trace.
func recorded(name string, trace []bucket.Arrival, faster float64, split int) (shares.Scenario, error) {
	if !slices.IsSortedFunc(trace, func(a, b bucket.Arrival) int { return int(min(1, max(-1, a.At-b.At))) }) {
		return shares.Scenario{}, fmt.Errorf("%s: its lines are not sorted by time", name)
	}
	first, last := trace[0].At, trace[len(trace)-1].At
	lasts := last.Sub(first).Seconds() / faster
	if !(lasts >= 30 && lasts <= maxSpan) {
		return shares.Scenario{}, fmt.Errorf("%s: lasts %.6g s, want 30 for rules to follow it, and %d at most", name, lasts, maxSpan)
	}
	span := time.Duration(lasts * 1e9)
	rate := 1.1 * float64(len(trace)) / lasts
	sc := shares.Scenario{Name: name, Contract: tokenbucket.Share{
		Rate: tokenbucket.PerSecond(rate), Burst: int64(rate/10) + 30*int64(split),
	}}
	if sc.Contract.Rate < tokenbucket.Rate(split) {
		return shares.Scenario{}, fmt.Errorf("%s: %.6g messages per second are too few for %d brokers", name, float64(len(trace))/lasts, split)
	}
	sc.Start = shares.Evenly(sc.Contract, split)
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
		sc.Arrivals = append(sc.Arrivals, shares.Arrival{At: mono.Time(float64(a.At.Sub(first)) / faster), Broker: to})
	}
	third := mono.Time(span / 3)
	sc.Phases = []shares.Phase{{Name: "first third", From: 0, To: third}, {Name: "second", From: third, To: 2 * third}, {Name: "last", From: 2 * third, To: mono.Never}}
	return sc, nil
}
