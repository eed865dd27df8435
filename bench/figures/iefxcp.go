package figures

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/tools/sim/link"
)

// Figures of the Improved EFXCP paper. The paper does not say which path ACKs take, and the queue
// depends on it, so the paper's rules are simulated with both paths.

// rules are rules of transport, and the path of ACKs.
type rules struct {
	name, control string
	bypass        bool // ACKs return without a queue
}

var (
	paperRules  = rules{"paper", link.Paper, false}            // literally; ACKs share the reverse queue with data
	bypassRules = rules{"paper, ACK bypass", link.Paper, true} // literally
	pacedRules  = rules{"paced", link.Paced, false}            // real windows, packets paced
	levelRules  = rules{"level", link.Level, false}            // the water level of our brokers
	allRules    = []rules{paperRules, bypassRules, pacedRules, levelRules}
)

// gain is the gain α in all figures but one. The paper states none.
const gain = 0.5

// capacity is the capacity of a link in all figures but one, in bit/s.
const capacity = 300e6

// transport is the paper's basic setting. A run lasts for about 300,000 packets in each
// direction, and at least 100 round trips.
func transport(of rules, change func(*link.Config)) link.Config {
	c := link.Config{
		Capacity: capacity, RTT: 60 * time.Millisecond, Flows: 50, ToS: []int{1, 2, 4, 8, 10},
		Control: of.control, Bypass: of.bypass, Buffer: 1, Alpha: gain,
	}
	change(&c)
	if c.Duration == 0 {
		c.Duration = max(time.Duration(3e5*8000/c.Capacity*1e9), 100*c.RTT, 6*time.Second)
		c.Duration = min(c.Duration, max(time.Minute, 100*c.RTT))
	}
	return c
}

// ratios returns the mean throughput of flows by ToS, divided by the ideal throughput of
// ToS 1. greedy selects greedy or honest flows.
func ratios(c link.Config, r link.Result, greedy bool) []float64 {
	all := 0
	for _, f := range r.Flows {
		all += f.ToS
	}
	got := make([]float64, len(c.ToS))
	for i, tos := range c.ToS {
		n := 0.0
		for _, f := range r.Flows {
			if f.ToS == tos && f.Greedy == greedy {
				got[i] += f.Throughput
				n++
			}
		}
		got[i] /= max(1, n) * c.Capacity / float64(all)
	}
	return got
}

// unfairness returns the largest deviation of a flow's share by ToS from the mean share.
func unfairness(ratios []float64) float64 {
	tos := []float64{1, 2, 4, 8, 10}
	mean, largest := 0.0, 0.0
	for i, r := range ratios {
		mean += r / tos[i] / float64(len(tos))
	}
	for i, r := range ratios {
		largest = max(largest, math.Abs(r/tos[i]/mean-1))
	}
	return largest
}

// transported summarises runs with different seeds.
type transported struct {
	ratios                           []spread // by ToS
	unfairness                       spread
	utilization, queueMean, queueMax spread
	drops                            spread
	first                            link.Result // of the first seed
	results                          []link.Result
}

// transports simulates configurations, each with several seeds.
func (w *harness) transports(configs ...link.Config) ([]transported, error) {
	results, err := seeded(w, len(configs), func(i, seed int) (r link.Result, err error) {
		c := configs[i]
		c.Seed = w.seedOf(seed)
		if err := c.Validate(); err != nil {
			return r, err
		}
		return link.Run(c), nil
	})
	if err != nil {
		return nil, err
	}
	got := make([]transported, len(configs))
	for i, c := range configs {
		all := results[i]
		t := transported{
			unfairness:  summarise(all, func(r link.Result) float64 { return unfairness(ratios(c, r, false)) }),
			utilization: summarise(all, func(r link.Result) float64 { return r.Utilization }),
			queueMean:   summarise(all, func(r link.Result) float64 { return r.QueueMean }),
			queueMax:    summarise(all, func(r link.Result) float64 { return r.QueueMax }),
			drops:       summarise(all, func(r link.Result) float64 { return float64(r.Drops) }),
			first:       all[0], results: all,
		}
		for tos := range c.ToS {
			t.ratios = append(t.ratios, summarise(all, func(r link.Result) float64 { return ratios(c, r, false)[tos] }))
		}
		got[i] = t
	}
	return got, nil
}

// grid simulates all rules at every x. It returns the results by the name of the rules and by x.
func (w *harness) grid(all []rules, xs []float64, change func(c *link.Config, x float64)) (map[string][]transported, error) {
	var configs []link.Config
	for _, rules := range all {
		for _, x := range xs {
			configs = append(configs, transport(rules, func(c *link.Config) { change(c, x) }))
		}
	}
	got, err := w.transports(configs...)
	if err != nil {
		return nil, err
	}
	by := make(map[string][]transported)
	for k, rules := range all {
		by[rules.name] = got[k*len(xs) : (k+1)*len(xs)]
	}
	return by, nil
}

// sweep describes a figure with the parts a to c: the throughput of flows by rules and x.
type sweep struct {
	figure, title, xLabel string
	xs                    []float64
	change                func(c *link.Config, x float64)
	// queues are the parts of the figure that show the queue over time, and their xs.
	queues []queueOverTime
	// The paper's statements about the shares, the mean queue and the longest queue, and a note about the shares.
	ratio, mean, longest, note string
}

type queueOverTime struct {
	part string
	x    float64
}

var (
	byCapacity = sweep{
		figure: "3", title: "throughput by capacity", xLabel: "Mb/s", xs: []float64{25, 50, 100, 300, 1000, 2000, 4000},
		change: func(c *link.Config, x float64) { c.Capacity = x * 1e6 },
		queues: []queueOverTime{{"d", 100}},
		ratio:  "“maintained excellently” but for ToS 1 at 25 and 50 Mb/s", mean: "“almost below 1 %”", longest: "1-3 % at 100 Mb/s",
	}
	byRTT = sweep{
		figure: "4", title: "throughput by RTT", xLabel: "ms", xs: []float64{12, 30, 60, 120, 300, 800, 1200},
		change: func(c *link.Config, x float64) { c.RTT = time.Duration(x * 1e6) },
		queues: []queueOverTime{{"d", 120}, {"e", 1200}},
		ratio:  "“excellent”", mean: "low", longest: "1-3 % above 1,000 ms, stable up to 800 ms",
	}
	byWeb = sweep{
		figure: "5", title: "throughput among short flows", xLabel: "short flows/s", xs: []float64{1, 10, 50, 200, 500, 1000},
		change: func(c *link.Config, x float64) { c.Web = x },
		queues: []queueOverTime{{"d", 200}},
		ratio:  "“excellent”", mean: "low", longest: "1-5 % at 200/s", note: "of the long flows among themselves; short ones are of ToS 1",
	}
)

// make makes the figure of a sweep.
func (s sweep) make(w *harness) error {
	_, err := w.sweep(s)
	return err
}

// sweep simulates all rules at each x, and draws ratios, utilization and queues. It adds
// the rows of every sweep, and returns the results by the name of the rules and x.
func (w *harness) sweep(of sweep) (by map[string][]transported, err error) {
	by, err = w.grid(allRules, of.xs, func(c *link.Config, x float64) {
		of.change(c, x)
		c.Sample = c.RTT
	})
	if err != nil {
		return nil, err
	}
	id := "iefxcp" + of.figure
	name := "IEFXCP " + of.figure
	a := panel{id: id + "a", title: name + "(a): " + of.title, xLabel: of.xLabel, yLabel: "throughput over the ideal one of ToS 1", logX: true}
	b := panel{id: id + "b", title: name + "(b): utilization", xLabel: of.xLabel, yLabel: "%", logX: true}
	q := panel{id: id + "c", title: name + "(c): mean queue", xLabel: of.xLabel, yLabel: "% of the buffer", logX: true, logY: true}
	a.header = strings.Split("x,rules,tos1,tos1_sd,tos2,tos2_sd,tos4,tos4_sd,tos8,tos8_sd,tos10,tos10_sd", ",")
	b.header = strings.Split("x,rules,utilization_percent,utilization_percent_sd", ",")
	q.header = strings.Split("x,rules,queue_mean_percent,queue_mean_percent_sd,queue_max_percent,queue_max_percent_sd,drops,drops_sd", ",")
	for _, rules := range allRules {
		for i, t := range by[rules.name] {
			x := of.xs[i]
			if rules != pacedRules {
				for j, tos := range allToS {
					a.spread(rules.name+", ToS "+tos, x, t.ratios[j])
				}
			}
			b.spread(rules.name, x, t.utilization.times(100))
			q.spread(rules.name, x, t.queueMean.times(100))
			a.add(x, rules.name, values(t.ratios...))
			b.add(x, rules.name, values(t.utilization.times(100)))
			q.add(x, rules.name, values(t.queueMean.times(100), t.queueMax.times(100), t.drops))
		}
	}
	w.out.plot(a, b, q)
	for _, over := range of.queues {
		w.out.plot(of.overTime(over, by))
	}
	w.out.tell(of.rows(by)...)
	return by, nil
}

// overTime shows the queue of the first seed over time at an x.
func (s sweep) overTime(of queueOverTime, by map[string][]transported) panel {
	p := panel{
		id: "iefxcp" + s.figure + of.part, title: fmt.Sprintf("IEFXCP %s(%s): queue at %v %s", s.figure, of.part, of.x, s.xLabel),
		xLabel: "s", yLabel: "% of the buffer", logY: true, header: []string{"s", "rules", "queue_percent"},
	}
	i := slices.Index(s.xs, of.x)
	for _, rules := range allRules {
		for _, sample := range by[rules.name][i].first.Series {
			p.point(rules.name, sample.At.Seconds(), 100*sample.Queue)
			p.add(sample.At.Seconds(), rules.name, 100*sample.Queue)
		}
	}
	return p
}

// allToS are the ToS values of the flows.
var allToS = []string{"1", "2", "4", "8", "10"}

// listed formats a value of each of the rules in a cell.
func listed(of []rules, value func(rules) string) string {
	all := make([]string, len(of))
	for i, r := range of {
		all[i] = r.name + " " + value(r)
	}
	return strings.Join(all, "; ")
}

// rows returns the rows of a sweep: the worst deviation from 1:2:4:8:10, the lowest
// utilization, and the queues. Each is the mean over the seeds at the worst x.
func (s sweep) rows(by map[string][]transported) []row {
	name := "IEFXCP " + s.figure
	worst := func(of func(transported) spread, worse func(a, b float64) bool) string {
		return listed(allRules, func(r rules) string {
			v := of(by[r.name][0])
			for _, t := range by[r.name][1:] {
				if o := of(t); worse(o.mean, v.mean) {
					v = o
				}
			}
			return v.times(100).String()
		})
	}
	more := func(a, b float64) bool { return a > b }
	less := func(a, b float64) bool { return a < b }
	return []row{
		{Figure: name, Quantity: "shares off 1:2:4:8:10, worst, %", Paper: s.ratio, Simulated: worst(func(t transported) spread { return t.unfairness }, more), Note: s.note},
		{Figure: name, Quantity: "utilization, lowest, %", Paper: "high", Simulated: worst(func(t transported) spread { return t.utilization }, less)},
		{Figure: name, Quantity: "mean queue, longest, % of the buffer", Paper: s.mean, Simulated: worst(func(t transported) spread { return t.queueMean }, more)},
		{Figure: name, Quantity: "longest queue, % of the buffer", Paper: s.longest, Simulated: worst(func(t transported) spread { return t.queueMax }, more)},
	}
}

// iefxcpCapacity makes figure 3, and two additions to the paper: results by the degree of
// congestion at which a router reports overload, and by the gain of windows.
func iefxcpCapacity(w *harness) error {
	by, err := w.sweep(byCapacity)
	if err != nil {
		return err
	}
	w.out.tell(row{
		Figure: "IEFXCP 3(a)", Quantity: "ToS 1 over its ideal at 25, 50 and 300 Mb/s", Paper: "dips at 25 and 50",
		Simulated: listed(allRules, func(r rules) string {
			t := by[r.name]
			return fmt.Sprintf("%.2f, %.2f, %.2f", t[0].ratios[0].mean, t[1].ratios[0].mean, t[3].ratios[0].mean)
		}),
		Note: "the window is 0.75 packets at 25 Mb/s, of which whole windows make 1, and 1.5 at 50, of which they make 1",
	})
	if err := w.parameter(parameter{
		id: "theta", title: "overload where ρ > θ", label: "θ", quantity: "by the ρ above which a router signals overload", paper: "θ is not stated",
		xs: []float64{0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5}, change: func(c *link.Config, x float64) { c.Theta = x },
	}); err != nil {
		return err
	}
	return w.parameter(parameter{
		id: "alpha", title: "gain of windows", label: "α", quantity: "by the gain of windows", paper: "α is not stated",
		xs: []float64{0.05, 0.1, 0.2, 0.3, 0.4, 0.5}, change: func(c *link.Config, x float64) { c.Alpha = x },
	})
}

// parameter describes utilization and queue by a parameter of the paper's rules, in the basic
// setting.
type parameter struct {
	id, title, label, quantity, paper string
	xs                                []float64
	change                            func(c *link.Config, x float64)
}

// parameter makes a panel and rows of a parameter.
func (w *harness) parameter(of parameter) error {
	all := []rules{paperRules, bypassRules, pacedRules}
	by, err := w.grid(all, of.xs, of.change)
	if err != nil {
		return err
	}
	p := panel{
		id: "iefxcp3" + of.id, title: "IEFXCP: " + of.title + ", 300 Mb/s", xLabel: of.label, yLabel: "%",
		header: strings.Split(of.id+",rules,utilization_percent,utilization_percent_sd,queue_mean_percent,queue_mean_percent_sd,queue_max_percent,queue_max_percent_sd", ","),
	}
	for _, rules := range all {
		var texts []string
		for i, x := range of.xs {
			t := by[rules.name][i]
			utilization, queue := t.utilization.times(100), t.queueMean.times(100)
			p.spread(rules.name+", utilization", x, utilization)
			p.spread(rules.name+", mean queue", x, queue)
			p.add(x, rules.name, values(utilization, queue, t.queueMax.times(100)))
			texts = append(texts, fmt.Sprintf("%v: %v, %v", x, utilization, queue))
		}
		w.out.tell(row{
			Figure: "IEFXCP " + of.label, Quantity: "utilization and mean queue, %, " + of.quantity + ": " + rules.name,
			Paper: of.paper, Simulated: strings.Join(texts, "; "), Note: "300 Mb/s, 60 ms",
		})
	}
	w.out.plot(p)
	return nil
}

// iefxcpSudden makes figure 6.
func iefxcpSudden(w *harness) error {
	by, err := w.grid(allRules, []float64{50}, func(c *link.Config, x float64) {
		c.Duration, c.Sample, c.Join, c.From, c.To = time.Minute, 500*time.Millisecond, int(x), 20*time.Second, 40*time.Second
	})
	if err != nil {
		return err
	}
	u := panel{id: "iefxcp6b", title: "IEFXCP 6(b): utilization", xLabel: "s", yLabel: "%", header: []string{"s", "rules", "utilization", "queue", "tos1_bps", "tos2_bps", "tos4_bps", "tos8_bps", "tos10_bps"}}
	q := panel{id: "iefxcp6c", title: "IEFXCP 6(c): longest queue of each half second", xLabel: "s", yLabel: "% of the buffer", header: []string{"s", "rules", "queue"}}
	changes := make(map[rules]suddenly)
	for _, rules := range allRules {
		got := by[rules.name][0]
		a := panel{id: "iefxcp6a-" + strings.ReplaceAll(rules.name, ", ", "-"), title: "IEFXCP 6(a): throughput, " + rules.name, xLabel: "s", yLabel: "Mb/s", header: []string{"s", "tos", "mbps"}}
		a.id = strings.ToLower(strings.ReplaceAll(a.id, " ", "-"))
		for _, s := range got.first.Series {
			at := s.At.Seconds()
			u.point(rules.name, at, 100*s.Utilization)
			q.point(rules.name, at, 100*s.Queue)
			u.add(at, rules.name, s.Utilization, s.Queue, s.Throughput)
			q.add(at, rules.name, s.Queue)
			for i, tos := range allToS {
				a.point("ToS "+tos, at, s.Throughput[i]/1e6)
				a.add(at, tos, s.Throughput[i]/1e6)
			}
		}
		w.out.plot(a)
		changes[rules] = suddenlyOf(got.results)
	}
	w.out.plot(u, q)
	of := func(value func(suddenly) spread) string {
		return listed(allRules, func(r rules) string { return value(changes[r]).String() })
	}
	w.out.tell(
		row{Figure: "IEFXCP 6(a)", Quantity: "ToS 10 over its ideal among 100 flows, 35 to 40 s", Paper: "“adapt quickly”", Simulated: of(func(s suddenly) spread { return s.settled })},
		row{Figure: "IEFXCP 6(b)", Quantity: "lowest utilization of 500 ms after 10 s, %", Paper: "high", Simulated: of(func(s suddenly) spread { return s.lowest.times(100) })},
		row{Figure: "IEFXCP 6(c)", Quantity: "longest queue of 500 ms, 10 to 19.5 s, % of the buffer", Paper: "low and stable", Simulated: of(func(s suddenly) spread { return s.before.times(100) })},
		row{Figure: "IEFXCP 6(c)", Quantity: "longest queue after 50 joined, % of the buffer", Paper: "a sudden rise", Simulated: of(func(s suddenly) spread { return s.peak.times(100) })},
		row{Figure: "IEFXCP 6(c)", Quantity: "until the first 500 ms in which the queue is within 1.1 times the longest before, or 1 % of the buffer, s after they joined", Paper: "“drained quickly”", Simulated: listed(allRules, func(r rules) string { return changes[r].drainedText() })},
		row{Figure: "IEFXCP 6(c)", Quantity: "longest queue of 500 ms, 25 to 40 s, % of the buffer", Paper: "low and stable", Simulated: of(func(s suddenly) spread { return s.later.times(100) })},
	)
	return nil
}

// suddenly has the reaction to flows that join at 20 s and leave at 40 s.
type suddenly struct {
	settled spread // throughput of ToS 10 over its ideal, 35 to 40 s
	lowest  spread // utilization after 10 s
	before  spread // longest queue of a sample, 10 to 19.5 s
	peak    spread // longest queue while the flows are there
	drained spread // s after the join until the first sample whose queue is within 1.1 times before, or 1 % of the buffer
	later   spread // longest queue of a sample, 25 to 40 s
	// drains is how many runs drained while the flows were there. Only these count in drained.
	drains, runs int
}

// drainedText says how long the queue took, and in how many runs the queue stayed.
func (s suddenly) drainedText() string {
	switch s.drains {
	case s.runs:
		return s.drained.String()
	case 0:
		return "not in 20 s"
	}
	return fmt.Sprintf("%v in %d of %d runs, not in 20 s in the others", s.drained, s.drains, s.runs)
}

func suddenlyOf(results []link.Result) suddenly {
	var settled, lowest, before, peak, drained, later []float64
	for _, r := range results {
		utilization, longestBefore, longest, longestLater, drainTime := 1.0, 0.0, 0.0, 0.0, math.NaN()
		share, n := 0.0, 0.0
		for _, s := range r.Series {
			switch at := s.At.Seconds(); {
			case at <= 10:
				continue
			case at < 20: // the sample of 20 s has the first packets of the new flows
				longestBefore = max(longestBefore, s.Queue)
			case at <= 40:
				longest = max(longest, s.Queue)
				if math.IsNaN(drainTime) && s.Queue < longest && s.Queue <= max(1.1*longestBefore, 0.01) {
					drainTime = at - 20
				}
				if at > 25 {
					longestLater = max(longestLater, s.Queue)
				}
				if at > 35 {
					share, n = share+s.Throughput[len(s.Throughput)-1], n+1
				}
			}
			utilization = min(utilization, s.Utilization)
		}
		settled = append(settled, share/n/(10*300e6/500))
		lowest, before, peak, later = append(lowest, utilization), append(before, longestBefore), append(peak, longest), append(later, longestLater)
		if !math.IsNaN(drainTime) {
			drained = append(drained, drainTime)
		}
	}
	return suddenly{spreadOf(settled), spreadOf(lowest), spreadOf(before), spreadOf(peak), spreadOf(drained), spreadOf(later), len(drained), len(results)}
}

// iefxcpRouters adds to the paper what it describes and does not simulate: several routers. The
// lowest rate on the path remains, and no router overwrites an overload.
func iefxcpRouters(w *harness) error {
	const cross, routers = 25, 3
	by, err := w.grid(allRules, []float64{routers}, func(c *link.Config, x float64) {
		c.Routers, c.Cross, c.Duration = int(x), cross, 20*time.Second
	})
	if err != nil {
		return err
	}
	p := panel{id: "iefxcprouters", header: strings.Split("rules,link,utilization_percent,utilization_percent_sd,queue_mean_percent,queue_mean_percent_sd,through,through_sd,crossing,crossing_sd", ",")}
	through, crossing, used, queue := map[string]spread{}, map[string]spread{}, map[string]string{}, map[string]string{}
	for _, rules := range allRules {
		results := by[rules.name][0].results
		// mean is the mean throughput of flows over their ToS, and over max-min fairness.
		mean := func(flows func(link.Result) []link.Flow, ideal float64) spread {
			return summarise(results, func(r link.Result) (part float64) {
				for _, f := range flows(r) {
					part += f.Throughput / float64(f.ToS) / ideal / float64(len(flows(r)))
				}
				return part
			})
		}
		// The last link carries 50 flows of all and 50 of its own, of ToS 5 in the mean. The
		// second carries 25 of its own, for which half of the link remains.
		ideal := capacity / 500
		through[rules.name] = mean(func(r link.Result) []link.Flow { return r.Flows }, ideal)
		crossing[rules.name] = mean(func(r link.Result) []link.Flow { return r.Crossing[:cross] }, 2*ideal)
		var texts, queues []string
		for l := range routers {
			u := summarise(results, func(r link.Result) float64 { return 100 * r.Links[l].Utilization })
			q := summarise(results, func(r link.Result) float64 { return 100 * r.Links[l].QueueMean })
			p.add(rules.name, l+1, values(u, q, through[rules.name], crossing[rules.name]))
			texts, queues = append(texts, u.String()), append(queues, q.String())
		}
		used[rules.name], queue[rules.name] = strings.Join(texts, ", "), strings.Join(queues, ", ")
	}
	w.out.plot(p)
	note := "50 flows over three links of 300 Mb/s; 25 other flows on the second, 50 on the third"
	w.out.tell(
		row{Figure: "IEFXCP, routers", Quantity: "flows over three links: throughput over max-min fairness", Paper: "the lowest rate of the path", Simulated: listed(allRules, func(r rules) string { return through[r.name].String() }), Note: note},
		row{Figure: "IEFXCP, routers", Quantity: "flows of the second link: throughput over max-min fairness", Simulated: listed(allRules, func(r rules) string { return crossing[r.name].String() }), Note: "(3) assumes that every flow follows γo; flows that another router limits do not"},
		row{Figure: "IEFXCP, routers", Quantity: "utilization of the three links, %", Simulated: listed(allRules, func(r rules) string { return used[r.name] })},
		row{Figure: "IEFXCP, routers", Quantity: "mean queue of the three links, % of the buffer", Simulated: listed(allRules, func(r rules) string { return queue[r.name] })},
	)
	return nil
}

// untrusted simulates the paper's future work: five flows, one of each ToS, claim 255.
func untrusted(w *harness) error {
	policed := []float64{0, 1}
	by, err := w.grid(allRules, policed, func(c *link.Config, x float64) { c.Greedy, c.Police = 5, x > 0 })
	if err != nil {
		return err
	}
	p := panel{id: "untrusted", header: strings.Split("rules,police,untrusted_part,untrusted_part_sd,honest_part,honest_part_sd,utilization,utilization_sd,queue_mean,queue_mean_sd,drops,drops_sd", ",")}
	c := transport(paperRules, func(*link.Config) {})
	for _, rules := range allRules {
		var texts [2]string
		for i, t := range by[rules.name] {
			part := func(greedy bool) spread {
				return summarise(t.results, func(r link.Result) (part float64) {
					for tos, v := range ratios(c, r, greedy) {
						part += v / float64(c.ToS[tos]) / float64(len(c.ToS))
					}
					return part
				})
			}
			p.add(rules.name, yes(policed[i] > 0), values(part(true), part(false), t.utilization, t.queueMean, t.drops))
			texts[i] = part(true).String() + ", " + part(false).String()
		}
		w.out.tell(row{
			Figure: "IEFXCP, untrusted flows", Quantity: "throughput of untrusted and of honest flows over their parts: " + rules.name, Paper: "“our next work”",
			Simulated: "without police " + texts[0] + "; with police " + texts[1], Note: "5 flows of 50, one of each ToS, claim 255",
		})
	}
	w.out.plot(p)
	return nil
}
