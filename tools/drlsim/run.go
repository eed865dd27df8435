package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/tools/sim/scenario"
)

func runCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "run --scenario FILE|-",
		Short: "Simulate brokers, topics and publishers of a scenario",
		Long: `run simulates the brokers and topics of a scenario, event by event: publishers'
schedules, placement by a policy, a token bucket for each share, brokers as queues
that work for so long on each message, and shares that follow the load, if wanted.
Placement, buckets and share rules are the production's own.

The scenario is a JSON object; times are in seconds, rates in msg/s:

  seed, duration_s, warmup_s
  calibration   how fast brokers are: "paper" (the default: chosen by what the
                paper says of its brokers), or a file
  brokers       [{"id":"b","count":6,"model":"","mcap":0,"allocated":0,"background":LOAD}]
  topics        [{"name":"t", LOAD, "contract":{"rate":0,"burst":0,
                "profile_s":0,"profile_quantile":0.99,"margin":0},
                "slo":{"quantile":0.99,"latency_ms":1}, "policy":"srtm",
                "k":0, "at_least":0,
                "adapt":{"rule":"proportional","step_s":1,"window":10,"every":1}}]
  LOAD          "publishers", "rate" (of each), "batch", "group_size", "sync",
                "noise_ms", "process" ("poisson" or "periodic"), or
                "trace":{"file":"","compress":1,"copies":1,"from_s":0,"to_s":0}

A rate or burst of 0 is profiled from the load: 1.1 times its mean, and the least
burst with which profile_quantile (by default the SLO's) of the access delay is 0
over profile_s, and so much of it more as margin says. With k the topic is spread over
exactly k brokers, whether their mcap suffices or not.

Output: one JSON object. For each topic its placement, the SLO's verdict, and
quantiles of access, processing and delivery delay, in all and by broker, of the
messages that arrived in the measured time; for each broker how busy it was.`,
		Example: `  drlsim run --scenario figure6a.json
  drlsim run --scenario - --seed 7 --output table < table1.json`,
	}
	read := scenarioFlags(cmd)
	return leaf(cmd, func(*cobra.Command) (answer, error) {
		s, err := read()
		if err != nil {
			return answer{}, err
		}
		built, err := scenario.Build(s)
		if err != nil {
			return answer{}, err
		}
		r, err := scenario.Run(built)
		return answer{[]any{r}, func(w io.Writer) error { return runTable(w, r) }}, err
	}, "scenario")
}

func runTable(w io.Writer, r *scenario.Report) error {
	return grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		row("topic\tbroker\tpublishers\trate/s\tburst\tmessages\taccess p99\tprocessing p99\tp50\tp99\tp99.9\tlate\tSLO\t")
		line := func(topic, broker string, publishers int, s scenario.Share, f scenario.Figures, exceeded uint64, slo string) {
			late := 0.0
			if f.Messages > 0 {
				late = float64(exceeded) / float64(f.Messages) * 100
			}
			row("%s\t%s\t%d\t%s\t%d\t%d\t%v\t%v\t%v\t%v\t%v\t%.3f %%\t%s\t", topic, broker, publishers, milli(s.RateMilli), s.Burst, f.Messages,
				time.Duration(f.Access.P99), time.Duration(f.Processing.P99), time.Duration(f.Delivery.P50),
				time.Duration(f.Delivery.P99), time.Duration(f.Delivery.P999), late, slo)
		}
		for _, t := range r.Topics {
			if f := t.Infeasible; f != nil {
				row("%s\tinfeasible: %s, %d needed, %d there\t\t\t\t\t\t\t\t\t\t\t\t", t.Name, f.Bound, f.Need, f.Have)
				continue
			}
			for _, p := range t.Parts {
				line(t.Name, p.Broker, p.Publishers, p.Share, p.Figures, p.Exceeded, "")
			}
			line(t.Name, fmt.Sprintf("all %d", t.K), t.Publishers, t.Contract, t.Figures, t.SLO.Exceeded, either(t.SLO.Met, "met", "missed"))
		}
	})
}

func either(is bool, yes, no string) string {
	if is {
		return yes
	}
	return no
}
