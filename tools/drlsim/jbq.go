package main

import (
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/tools/sim/web"
)

// jbqResult is an object of the command's output.
type jbqResult struct {
	Cluster string      `json:"cluster"`
	Balance string      `json:"balance"`
	Seed    uint64      `json:"seed"`
	Overall web.Summary `json:"overall"`
	Servers []jbqServer `json:"servers"`
}

type jbqServer struct {
	Server     string  `json:"server"`
	Processors int     `json:"processors"`
	Speed      float64 `json:"speed"`
	Rate       float64 `json:"requests_per_second"`
	web.Summary
}

// maxJBQ limits the virtual time, in seconds.
const maxJBQ = 1_000_000

func jbqCommand() *cobra.Command {
	var cluster string
	var seed uint64
	var requests int
	var rate float64
	cmd := &cobra.Command{
		Use:   "jbq",
		Short: "Response times of web servers by JBQ and by other ways to choose a server",
		Long: `jbq sends requests to simulated web servers of unequal size and compares response
times by the way a server is chosen. The gateway's own code runs:

  jbq         the gateway's Join the Best Queue
  literal     the paper's; T(0), which the paper does not state, is 100 ms
  literal-0   the paper's with T(0) = 0
  busy        bybusyness of Apache
  rr          round robin
  sed         shortest expected delay with known capacities, as a reference

The clusters are the paper's, of machines with 1 (bronze), 2 (silver) and 4 (gold)
processors. docs/evaluation/jbq.md lists the assumptions.`,
		Example: `  drlsim jbq --output table
  drlsim jbq --cluster medium --rate 60`,
	}
	fs := cmd.Flags()
	fs.StringVar(&cluster, "cluster", "small", "`name` of the cluster: medium, silver or small")
	fs.IntVar(&requests, "requests", 0, "`number` of requests, in place of the paper's")
	fs.Float64Var(&rate, "rate", 0, "mean arrivals in `requests/s`, in place of the paper's")
	fs.Uint64Var(&seed, "seed", 1, "`number` that decides all random choices")
	return leaf(cmd, func(*cobra.Command) (answer, error) {
		c, err := web.Find(cluster, seed)
		if err != nil {
			return answer{}, usage(err)
		}
		if requests < 0 || requests > 10_000_000 || rate < 0 || rate > 1e6 {
			return answer{}, usagef("requests: %d, want 0 .. 10000000; rate: %v, want 0 .. 1000000", requests, rate)
		}
		if requests > 0 {
			c.Requests = requests
		}
		if rate > 0 {
			c.Rate = rate
		}
		if float64(c.Requests)/c.Rate > maxJBQ {
			return answer{}, usagef("requests: %d at %v/s take longer than %d s", requests, rate, maxJBQ)
		}
		var results []jbqResult
		for _, way := range web.Ways() {
			r := web.Run(web.Study{Cluster: c, Way: way, Seed: seed})
			o := jbqResult{Cluster: cluster, Balance: way.Name, Seed: seed, Overall: r.Overall}
			for i, s := range r.ByServer {
				o.Servers = append(o.Servers, jbqServer{c.Servers[i].Name, c.Servers[i].Processors, c.Servers[i].Speed, float64(s.Requests) / float64(len(r.PerSecond)), s})
			}
			results = append(results, o)
		}
		return answered(jbqTable, results...), nil
	})
}

func jbqTable(w io.Writer, results []jbqResult) error {
	return grid(w, tabwriter.AlignRight, func(row func(string, ...any)) {
		row("balance\tserver\trequests\tmean, ms\tsd\tp95\tp97\tp99\t")
		for _, r := range results {
			line := func(server string, s web.Summary) {
				row("%s\t%s\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t", r.Balance, server, s.Requests, s.Mean, s.Sd, s.P95, s.P97, s.P99)
			}
			line("all", r.Overall)
			for _, s := range r.Servers {
				line(s.Server, s.Summary)
			}
		}
	})
}
