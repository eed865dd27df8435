package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

type fitOptions struct {
	modes  []string
	round  time.Duration
	check  time.Duration
	alpha  float64
	limits struct{ step, settle, aim, cap time.Duration }
	stall  time.Duration
}

// modeWarm is a second fast search, on brokers known from the first.
const modeWarm = "warm"

func (o *fitOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&o.modes, "mode", []string{tuner.ModeFast}, "`searches`, with commas: fast, paper, warm (fast, on brokers that a first search has measured)")
	f.DurationVar(&o.round, "round", tuner.DefaultRound, "length of a round of the paper's search")
	f.DurationVar(&o.check, "check", 5*time.Minute, "length of the run that checks the placement; 0: no check")
	f.Float64Var(&o.alpha, "alpha", 0.1, "fast: `chance` of an error of the test, between 0 and 1")
	f.DurationVar(&o.limits.step, "step", 100*time.Millisecond, "fast: time between two evaluations of a test")
	f.DurationVar(&o.limits.settle, "settle", 100*time.Millisecond, "fast: time until a change takes effect")
	f.DurationVar(&o.limits.aim, "aim", 8*time.Second, "fast: try a number of brokers only if the forecast length of its test is at most this; at most --cap")
	f.DurationVar(&o.limits.cap, "cap", time.Minute, "fast: maximum length of the test of a placement")
	f.DurationVar(&o.stall, "stall", 0, "fast: maximum length of a stall of a host, with the work that piles up meanwhile; brokers allow for 100ms, simulated hosts do not stall")
	f.Bool("counts", false, "")
	_ = f.MarkDeprecated("counts", "fast always uses arrivals and counts only") // fails only for unknown flags
}

func (o *fitOptions) validate() error {
	for _, mode := range o.modes {
		if mode != tuner.ModeFast && mode != tuner.ModePaper && mode != modeWarm {
			return fmt.Errorf("unknown mode %q: there are fast, paper, warm", mode)
		}
	}
	if o.round <= 0 || o.check < 0 || o.stall < 0 || o.limits.step <= 0 || o.limits.settle <= 0 || o.limits.aim <= 0 || o.limits.cap <= 0 {
		return fmt.Errorf("--round, --step, --settle, --aim and --cap are above 0, --check and --stall are 0 or more")
	}
	if !(o.alpha > 0 && o.alpha < 1) {
		return fmt.Errorf("--alpha %v is not between 0 and 1", o.alpha)
	}
	return nil
}

func (o *fitOptions) options(mode string) scenario.FitOptions {
	return scenario.FitOptions{
		Mode: mode, Round: o.round, Check: o.check,
		Fast: tuner.FastConfig{Alpha: o.alpha, Stall: o.stall, Step: o.limits.step, Settle: o.limits.settle, Aim: min(o.limits.aim, o.limits.cap), Cap: o.limits.cap},
	}
}

// run fits the first topic of s in a mode.
func (o *fitOptions) run(s *scenario.Scenario, mode string) (*scenario.FitResult, error) {
	options := o.options(mode)
	if mode == modeWarm {
		options.Mode, options.Check = tuner.ModeFast, 0
		cold, err := fitOnce(s, options)
		if err != nil {
			return nil, err
		}
		options.Check = o.check
		options.Fast.Absorbed = make(map[string]tuner.Absorption, len(cold.Absorbed))
		for broker, a := range cold.Absorbed {
			options.Fast.Absorbed[broker] = tuner.Absorption{Rate: tokenbucket.Rate(a.RateMilli), Burst: a.Burst}
		}
	}
	r, err := fitOnce(s, options)
	if err != nil {
		return nil, err
	}
	r.Mode = mode
	return r, nil
}

func fitOnce(s *scenario.Scenario, o scenario.FitOptions) (*scenario.FitResult, error) {
	built, err := scenario.Build(s)
	if err != nil {
		return nil, err
	}
	return scenario.Fit(built, o)
}

// fitted is a result and its name in a table.
type fitted struct {
	name string
	*scenario.FitResult
}

// fits appends to a the results of fitting the first topic of s in every mode.
func (o *fitOptions) fits(a []fitted, s *scenario.Scenario, name string) ([]fitted, error) {
	for _, mode := range o.modes {
		r, err := o.run(s, mode)
		if err != nil {
			return nil, err
		}
		a = append(a, fitted{cmp.Or(name, r.Topic), r})
	}
	return a, nil
}

func fitCommand() *cobra.Command {
	var o fitOptions
	cmd := &cobra.Command{
		Use:   "fit --scenario FILE|-",
		Short: "Find a placement that keeps a topic's SLO, by measurement on simulated brokers",
		Long: `fit runs a search of the loaddistributor on simulated brokers. The search places the
first topic of a scenario (see "drlsim run --help"), in place of the scenario's own
placement. A long run then checks the placement.

  paper  rounds of fixed length; brokers that violate the SLO search, by bisection,
         for how many publishers they hold; the rest goes to further brokers
  fast   a sequential test of processing delays, replay of the captured arrivals for
         access delays and for forecasts, and a search over the number of brokers
  warm   fast once more, with what it learned of the brokers the first time

Output: a JSON object on a line for each mode, with
  - whether the search found a placement, and why not;
  - k, and the rounds for each k;
  - the second of the last change of the placement, and the second at which the
    search had shown that the placement keeps the SLO;
  - the long run.`,
		Example: `  drlsim fit --scenario topic.json --mode fast,paper --output table`,
	}
	read := scenarioFlags(cmd)
	o.flags(cmd)
	return leaf(cmd, func(*cobra.Command) (answer, error) {
		if err := o.validate(); err != nil {
			return answer{}, usage(err)
		}
		s, err := read()
		if err != nil {
			return answer{}, err
		}
		results, err := o.fits(nil, s, "")
		return answered(fitTable, results...), err
	}, "scenario")
}

func fitTable(w io.Writer, results []fitted) error {
	return grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		row("topic\tmode\tfitted\tk\trounds\tplaced s\tseconds\tunplaced\tlong-run p99\tlate\tSLO\t")
		for _, r := range results {
			rounds := make([]string, len(r.Rounds))
			for j, n := range r.Rounds {
				rounds[j] = fmt.Sprintf("%dx%d", n.K, n.Rounds)
			}
			p99, late, met := "", "", ""
			if c := r.Check; c != nil {
				p99, late, met = time.Duration(c.P99).String(), fmt.Sprintf("%.3f %%", c.Fraction*100), either(c.Met, "met", "missed")
			}
			row("%s\t%s\t%s\t%d\t%s\t%.1f\t%.1f\t%d\t%s\t%s\t%s\t", r.name, r.Mode, either(r.Fitted, "yes", "no"), r.K, strings.Join(rounds, " "),
				r.Placed, r.Seconds, r.Unplaced, p99, late, met)
		}
	})
}

func convergenceCommand() *cobra.Command {
	var (
		groups      []int
		seeds       int
		first       uint64
		process     string
		calibration string
		margin      float64
		o           fitOptions
	)
	cmd := &cobra.Command{
		Use:   "convergence",
		Short: "The paper's Table 1: how long it takes to place a bursty topic",
		Long: `convergence fits the topic of the paper's Table 1 (section 6.5) on six simulated
brokers that are empty: 1,000 publishers at 10 msg/s in batches of 10, in groups of
5 to 30 that send at the same instants. A long run then checks the placement.

The paper does not say how the contract was chosen in this experiment; its other
experiments profile r as 1.1 times the rate and b so that the 99th percentile of
the access delay is just 0, which leaves no room for groups that do not divide.
Elsewhere the paper says that a limiter is often configured with a margin: here b
is larger by the fraction --margin.

Output: one JSON object on a line for each group size, seed and mode, as of fit.`,
		Example: `  drlsim convergence --output table
  drlsim convergence --mode fast --seeds 20 --check 10m`,
	}
	f := cmd.Flags()
	f.IntSliceVar(&groups, "groups", []int{5, 10, 15, 20, 25, 30}, "`sizes` of the groups")
	f.IntVar(&seeds, "seeds", 1, "`number` of seeds for each size")
	f.Uint64Var(&first, "first-seed", 1, "the `seed` to begin with; 1 or more")
	f.StringVar(&process, "process", "periodic", "spacing of a group's batches: `poisson or periodic`")
	f.StringVar(&calibration, "calibration", scenario.Paper, "`name` or file of the brokers' speed")
	f.Float64Var(&margin, "margin", 0.5, "`fraction` of the contract's burst on top of the profiled one")
	o.flags(cmd)
	f.Lookup("mode").DefValue = "fast,paper"
	o.modes = []string{tuner.ModeFast, tuner.ModePaper}
	return leaf(cmd, func(*cobra.Command) (answer, error) {
		if err := o.validate(); err != nil {
			return answer{}, usage(err)
		}
		if seeds < 1 || first < 1 {
			return answer{}, usagef("--seeds %d and --first-seed %d are 1 or more", seeds, first)
		}
		var results []fitted
		for _, size := range groups {
			for seed := first; seed < first+uint64(seeds); seed++ {
				name := fmt.Sprintf("groups of %d", size)
				s := &scenario.Scenario{
					Seed: seed, Duration: 60, Calibration: calibration, Brokers: []scenario.Broker{{ID: "b", Count: 6}},
					Topics: []scenario.Topic{{
						Name: name, Contract: scenario.Contract{Margin: margin}, Load: scenario.Grouped(size, schedule.Process(process), 0),
					}},
				}
				err := s.Complete()
				if err != nil {
					return answer{}, usage(err)
				}
				if results, err = o.fits(results, s, fmt.Sprintf("%s, seed %d", name, seed)); err != nil {
					return answer{}, err
				}
			}
		}
		return answered(fitTable, results...), nil
	})
}
