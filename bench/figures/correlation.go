package main

import (
	"fmt"
	"strconv"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// groupSizes are those of figures 9 and 10 and of table 1.
var groupSizes = []int{5, 10, 15, 20, 25, 30}

// paperK is on how many brokers SRTM ended, by group size (table 1).
var paperK = map[int]int{5: 1, 10: 2, 15: 3, 20: 4, 25: 5, 30: 6}

// marginQuantile is the quantile of the access delay that b is profiled for in
// figures 9 to 11. The paper profiles for the SLO's own: then waiting for tokens
// may take all of the 1 % that the SLO leaves, and whatever processing adds is too
// much. Half of it for each is the least that lets either be.
const marginQuantile = 0.995

// grouped is the topic of figures 9 to 11: 1,000 publishers, 10 messages at once.
func grouped(process schedule.Process, group int, noiseMs float64, policy string, k int) scenario.Topic {
	return scenario.Topic{
		Load: scenario.Load{
			Publishers: 1000, Rate: perPublisher, Batch: 10, GroupSize: group, Sync: true, NoiseMs: noiseMs, Process: process,
		},
		Policy: policy, K: k, Contract: scenario.Contract{ProfileQuantile: marginQuantile},
	}
}

// steady is a workshop whose runs last longer: groups are few, and so are bursts.
func (w *workshop) steady() *workshop {
	long := *w
	long.seconds, long.runs = 3*w.seconds, max(1, w.runs/2)
	return &long
}

// pair is both policies at one point of figures 9 to 11.
type pair struct {
	srtm, maxmin *outcome
	// same is Max-Min over SRTM's k: figure 10.
	same *outcome
}

func (w *workshop) pair(at func(policy string, k int) scenario.Topic) (p pair, err error) {
	p.srtm, _, err = w.search(1, brokers, func(k int) scenario.Scenario { return w.scene(at(placement.SRTM, k)) })
	if err != nil {
		return p, err
	}
	var tried []*outcome
	p.maxmin, tried, err = w.search(1, brokers, func(k int) scenario.Scenario { return w.scene(at(placement.MaxMin, k)) })
	if err != nil {
		return p, err
	}
	for _, o := range tried {
		if o.k == p.srtm.k {
			p.same = o
		}
	}
	if p.same == nil {
		p.same, err = w.repeat(w.scene(at(placement.MaxMin, p.srtm.k)))
	}
	return p, err
}

// correlation is figures 9 and 10: groups that fire as one.
func correlation(w *workshop) (*work, error) {
	made := &work{}
	long := w.steady()
	for _, c := range []struct {
		panel   string
		process schedule.Process
	}{{"a", schedule.Poisson}, {"b", schedule.Periodic}} {
		pairs := make([]pair, len(groupSizes))
		err := w.each(len(groupSizes), func(i int) (err error) {
			pairs[i], err = long.pair(func(policy string, k int) scenario.Topic { return grouped(c.process, groupSizes[i], 0, policy, k) })
			return err
		})
		if err != nil {
			return nil, err
		}
		// The paper's own profile, for SRTM alone.
		literal := make([]*outcome, len(groupSizes))
		err = w.each(len(groupSizes), func(i int) (err error) {
			literal[i], _, err = long.search(1, brokers, func(k int) scenario.Scenario {
				t := grouped(c.process, groupSizes[i], 0, placement.SRTM, k)
				t.Contract.ProfileQuantile = 0.99
				return long.scene(t)
			})
			return err
		})
		if err != nil {
			return nil, err
		}
		literally := 0
		for _, o := range literal {
			if o.met() {
				literally++
			}
		}
		nine, ten := groupPanel("9", c.panel, c.process), groupPanel("10", c.panel, c.process)
		srtm, best, same := series{name: "SRTM"}, series{name: "Max-Min"}, series{name: "Max-Min over SRTM's brokers"}
		met := 0
		for i, g := range groupSizes {
			p := pairs[i]
			x := float64(g)
			srtm.add(x, p.srtm.p99.mean, p.srtm.p99.sd, strconv.Itoa(p.srtm.k))
			best.add(x, p.maxmin.p99.mean, p.maxmin.p99.sd, strconv.Itoa(p.maxmin.k))
			same.add(x, p.same.p99.mean, p.same.p99.sd, strconv.Itoa(p.same.k))
			group := strconv.Itoa(g)
			nine.rows = append(nine.rows, append([]string{group, "srtm"}, p.srtm.cells()...), append([]string{group, "maxmin"}, p.maxmin.cells()...))
			ten.rows = append(ten.rows, append([]string{group, "srtm"}, p.srtm.cells()...), append([]string{group, "maxmin"}, p.same.cells()...))
			if p.srtm.met() {
				met++
			}
			if g == 30 {
				made.rows = append(made.rows, row{
					Figure: "9(" + c.panel + ")", Quantity: "SLO met at group size 30: SRTM, Max-Min", Paper: "yes, no",
					Simulated: yes(p.srtm.met()) + ", " + yes(p.maxmin.met()),
					Note:      fmt.Sprintf("p99 %s over %d brokers, %s over %d", ms(p.srtm.p99.mean), p.srtm.k, ms(p.maxmin.p99.mean), p.maxmin.k),
				}, row{
					Figure: "10(" + c.panel + ")", Quantity: "p99 at group size 30 over the same brokers: SRTM, Max-Min", Paper: "Max-Min's “even worse”",
					Simulated: ms(p.srtm.p99.mean) + ", " + ms(p.same.p99.mean), Note: fmt.Sprintf("k = %d", p.srtm.k),
				})
			}
		}
		made.rows = append(made.rows, row{
			Figure: "9(" + c.panel + ")", Quantity: "group sizes at which SRTM meets the SLO", Paper: "all",
			Simulated: fmt.Sprintf("%d of %d", met, len(groupSizes)), Note: fmt.Sprintf("k: %s; with b profiled for the 99th percentile: %d of %d", ks(pairs), literally, len(groupSizes)),
		})
		nine.series, ten.series = []series{srtm, best}, []series{srtm, same}
		made.panels = append(made.panels, nine, ten)
	}
	return made, nil
}

// ks lists SRTM's k by group size, beside the paper's.
func ks(pairs []pair) (text string) {
	for i, g := range groupSizes {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%d→%d (paper %d)", g, pairs[i].srtm.k, paperK[g])
	}
	return text
}

func groupPanel(figure, part string, process schedule.Process) panel {
	return panel{
		id: "fig" + figure + part, title: fmt.Sprintf("Figure %s(%s): %s topic, synchronised groups", figure, part, process),
		xLabel: "publishers in a group", yLabel: "p99 of delivery latency, ms", logY: true, limit: sloMs,
		header: append([]string{"group_size", "policy"}, columns...),
	}
}

// noises are the intervals over which figure 11 spreads a group's messages, ms.
var noises = []float64{0, 1, 2, 4, 8, 16}

// noise is figure 11: groups of 25 that do not fire as one.
func noise(w *workshop) (*work, error) {
	made := &work{}
	long := w.steady()
	for _, c := range []struct {
		panel   string
		process schedule.Process
	}{{"a", schedule.Poisson}, {"b", schedule.Periodic}} {
		pairs := make([]pair, len(noises))
		err := w.each(len(noises), func(i int) (err error) {
			pairs[i], err = long.pair(func(policy string, k int) scenario.Topic { return grouped(c.process, 25, noises[i], policy, k) })
			return err
		})
		if err != nil {
			return nil, err
		}
		p := panel{
			id: "fig11" + c.panel, title: fmt.Sprintf("Figure 11(%s): %s topic, groups of 25", c.panel, c.process),
			xLabel: "interval over which a group sends, ms", yLabel: "p99 of delivery latency, ms", logY: true, limit: sloMs,
			header: append([]string{"noise_ms", "policy"}, columns...),
		}
		srtm, best := series{name: "SRTM"}, series{name: "Max-Min"}
		better := 0
		for i, n := range noises {
			srtm.add(n, pairs[i].srtm.p99.mean, pairs[i].srtm.p99.sd, strconv.Itoa(pairs[i].srtm.k))
			best.add(n, pairs[i].maxmin.p99.mean, pairs[i].maxmin.p99.sd, strconv.Itoa(pairs[i].maxmin.k))
			p.rows = append(p.rows, append([]string{number(n), "srtm"}, pairs[i].srtm.cells()...), append([]string{number(n), "maxmin"}, pairs[i].maxmin.cells()...))
			if pairs[i].srtm.p99.mean < pairs[i].maxmin.p99.mean {
				better++
			}
		}
		p.series = []series{srtm, best}
		made.panels = append(made.panels, p)
		first, last := pairs[0], pairs[len(pairs)-1]
		made.rows = append(made.rows,
			row{
				Figure: "11(" + c.panel + ")", Quantity: "intervals at which SRTM's p99 is below Max-Min's", Paper: "all small ones",
				Simulated: fmt.Sprintf("%d of %d", better, len(noises)),
			},
			row{
				Figure: "11(" + c.panel + ")", Quantity: "brokers at 0 and at 16 ms: SRTM, Max-Min", Paper: "fewer with a larger interval",
				Simulated: fmt.Sprintf("%d → %d, %d → %d", first.srtm.k, last.srtm.k, first.maxmin.k, last.maxmin.k),
				Note:      fmt.Sprintf("p99 %s → %s, %s → %s", ms(first.srtm.p99.mean), ms(last.srtm.p99.mean), ms(first.maxmin.p99.mean), ms(last.maxmin.p99.mean)),
			})
	}
	return made, nil
}
