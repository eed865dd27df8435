package main

import (
	"fmt"
	"math"
	"strconv"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// perPublisher is the rate of each publisher in all of the paper's experiments.
const perPublisher = 10.0 // msg/s

// penalty is figure 6: a Poisson topic over 1 to 6 idle brokers.
func penalty(w *workshop) (*work, error) {
	made := &work{}
	for _, c := range []struct {
		id         string
		publishers int
	}{{"6a", 1000}, {"6b", 6000}} {
		outcomes := make([]*outcome, brokers)
		err := w.each(brokers, func(i int) (err error) {
			outcomes[i], err = w.repeat(w.scene(scenario.Topic{
				Load: scenario.Load{Publishers: c.publishers, Rate: perPublisher}, Policy: placement.MaxMin, K: i + 1,
			}))
			return err
		})
		if err != nil {
			return nil, err
		}
		p := panel{
			id: "fig" + c.id, title: fmt.Sprintf("Figure %s: %d Poisson publishers", c.id, c.publishers),
			xLabel: "brokers", yLabel: "delivery latency, ms", logY: true, limit: sloMs,
			header: append([]string{"publishers"}, columns...),
		}
		median, p95, p99, access := series{name: "median"}, series{name: "95th"}, series{name: "99th"}, series{name: "99th of access delay"}
		for _, o := range outcomes {
			x := float64(o.k)
			median.add(x, o.p50.mean, o.p50.sd, "")
			p95.add(x, o.p95.mean, o.p95.sd, "")
			p99.add(x, o.p99.mean, o.p99.sd, "")
			access.add(x, o.access.mean, o.access.sd, "")
			p.rows = append(p.rows, append([]string{strconv.Itoa(c.publishers)}, o.cells()...))
		}
		p.series = []series{median, p95, p99, access}
		made.panels = append(made.panels, p)
		last := outcomes[brokers-1]
		if c.id == "6a" {
			made.rows = append(made.rows, row{
				Figure: "6(a)", Quantity: "p99 of 1,000 publishers over k = 6 brokers", Paper: "14.7 ms", Simulated: ms(last.p99.mean),
				Note: fmt.Sprintf("b = %.0f profiled; k = 1: %s", last.burst.mean, ms(outcomes[0].p99.mean)),
			})
			continue
		}
		best := 0
		for k := range outcomes {
			if outcomes[k].p99.mean < outcomes[best].p99.mean {
				best = k
			}
		}
		made.rows = append(made.rows,
			row{
				Figure: "6(b)", Quantity: "k with the least p99, 6,000 publishers", Paper: "2", Simulated: strconv.Itoa(best + 1),
				Note: fmt.Sprintf("p99 %s there, %s for k = 6", ms(outcomes[best].p99.mean), ms(last.p99.mean)),
			},
			row{
				Figure: "6(b)", Quantity: "one broker is overloaded by 6,000 publishers", Paper: "yes, “a large tail latency”",
				Simulated: yes(!outcomes[0].met()), Note: "p99 " + ms(outcomes[0].p99.mean) + " for k = 1",
			})
	}
	return made, nil
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// profile is one way in which the publishers of figures 7 and 8 send.
type profile struct {
	panel   string // a .. d
	process schedule.Process
	batch   int
}

var profiles = []profile{
	{"a", schedule.Poisson, 1}, {"b", schedule.Poisson, 10}, {"c", schedule.Periodic, 1}, {"d", schedule.Periodic, 10},
}

func (p profile) title(figure string) string {
	return fmt.Sprintf("Figure %s(%s): %s, batch %d", figure, p.panel, p.process, p.batch)
}

// sizes are the numbers of publishers of figures 7 and 8.
var sizes = []int{1000, 2000, 4000, 6000, 8000, 10_000}

// fewest is the k to begin with: no broker of the model carries more.
func fewest(publishers int) int {
	return max(1, int(math.Ceil(float64(publishers)*perPublisher/100_000)))
}

// concentration is figure 7: a topic on idle brokers, over all of them (LB) or
// over the fewest that keep the SLO (Conc).
func concentration(w *workshop) (*work, error) {
	made := &work{}
	type cell struct{ lb, conc *outcome }
	met, worst, missed := 0, 0.0, 0
	for _, pr := range profiles {
		cells := make([]cell, len(sizes))
		err := w.each(2*len(sizes), func(i int) (err error) {
			n := sizes[i/2]
			at := func(policy string, k int) scenario.Scenario {
				return w.scene(scenario.Topic{
					Load: scenario.Load{Publishers: n, Rate: perPublisher, Batch: pr.batch, Process: pr.process}, Policy: policy, K: k,
				})
			}
			if i%2 == 0 {
				cells[i/2].lb, err = w.repeat(at(placement.LoadBalance, brokers))
				return err
			}
			cells[i/2].conc, _, err = w.search(fewest(n), brokers, func(k int) scenario.Scenario { return at(placement.Conc, k) })
			return err
		})
		if err != nil {
			return nil, err
		}
		p := panel{
			id: "fig7" + pr.panel, title: pr.title("7"), xLabel: "publishers, thousands", yLabel: "p99 of delivery latency, ms", logY: true, limit: sloMs,
			header: append([]string{"publishers", "policy"}, columns...),
		}
		lb, conc := series{name: "LB"}, series{name: "Conc"}
		for i, n := range sizes {
			x := float64(n) / 1000
			lb.add(x, cells[i].lb.p99.mean, cells[i].lb.p99.sd, strconv.Itoa(cells[i].lb.k))
			conc.add(x, cells[i].conc.p99.mean, cells[i].conc.p99.sd, strconv.Itoa(cells[i].conc.k))
			p.rows = append(p.rows, append([]string{strconv.Itoa(n), "loadbalance"}, cells[i].lb.cells()...), append([]string{strconv.Itoa(n), "conc"}, cells[i].conc.cells()...))
			if cells[i].conc.met() {
				met++
			}
			if !cells[i].lb.met() {
				missed++
			}
			worst = max(worst, cells[i].conc.p99.mean)
		}
		p.series = []series{lb, conc}
		made.panels = append(made.panels, p)
	}
	all := len(profiles) * len(sizes)
	made.rows = []row{
		{Figure: "7", Quantity: "configurations in which Conc meets the SLO", Paper: "all", Simulated: fmt.Sprintf("%d of %d", met, all), Note: "worst p99 " + ms(worst)},
		{Figure: "7", Quantity: "configurations in which LB misses it", Paper: "all (“consistently fails”)", Simulated: fmt.Sprintf("%d of %d", missed, all)},
	}
	return made, nil
}
