package figures

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/srtm-io/srtm/tools/sim/link"
)

// Figures of the Improved EFXCP paper, with three controls: the paper's literal rules, the
// same rules with paced packets, and the water level of our brokers.

// transport is the paper's basic setting. A run lasts for about a million packets in each
// direction, and at least 100 round trips.
func (w *harness) transport(control string, change func(*link.Config)) link.Config {
	c := link.Config{
		Capacity: 300e6, RTT: 60 * time.Millisecond, Flows: 50, ToS: []int{1, 2, 4, 8, 10},
		Seed: w.seed, Control: control, Buffer: 1,
	}
	change(&c)
	if c.Duration == 0 {
		c.Duration = max(time.Duration(1e6*8000/c.Capacity*1e9), 100*c.RTT, 6*time.Second)
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

// swept is the result of a control at an x.
type swept struct {
	ratios []float64
	link.Result
}

// sweep describes a figure with the parts a to c: the throughput of flows by control and x.
type sweep struct {
	figure, title, xLabel string
	xs                    []float64
	change                func(c *link.Config, x float64)
	// The paper's statements about shares and queue, and a note about the shares.
	ratio, queue, note string
}

var (
	byCapacity = sweep{
		figure: "3", title: "throughput by capacity", xLabel: "Mb/s", xs: []float64{25, 50, 100, 300, 1000, 2000, 4000},
		change: func(c *link.Config, x float64) { c.Capacity = x * 1e6 },
		ratio:  "“maintained excellently” but for ToS 1 at 25 and 50 Mb/s", queue: "“almost below 1 %”",
	}
	byRTT = sweep{
		figure: "4", title: "throughput by RTT", xLabel: "ms", xs: []float64{12, 30, 60, 120, 300, 800, 1200},
		change: func(c *link.Config, x float64) { c.RTT = time.Duration(x * 1e6) },
		ratio:  "as in 3", queue: "low; 1-3 % variation above 1000 ms",
	}
	byWeb = sweep{
		figure: "5", title: "throughput among short flows", xLabel: "short flows/s", xs: []float64{1, 10, 50, 200, 500, 1000},
		change: func(c *link.Config, x float64) { c.Web = x },
		ratio:  "“excellent”", queue: "low; 1-5 % at 200/s", note: "of the long flows among themselves; short ones are of ToS 1",
	}
)

// make makes the figure of a sweep.
func (s sweep) make(w *harness) error {
	_, err := w.sweep(s)
	return err
}

// sweep simulates each control at each x, and draws ratios, utilization and queue. It adds
// the rows of every sweep, and returns the results by control and x.
func (w *harness) sweep(of sweep) (by map[string][]swept, err error) {
	figure, xLabel, xs := of.figure, of.xLabel, of.xs
	controls := link.Controls()
	got := make([]swept, len(controls)*len(xs))
	err = w.each(len(got), func(i int) error {
		c := w.transport(controls[i/len(xs)], func(c *link.Config) { of.change(c, xs[i%len(xs)]) })
		if err := c.Validate(); err != nil {
			return err
		}
		r := link.Run(c)
		got[i] = swept{ratios(c, r, false), r}
		return nil
	})
	if err != nil {
		return nil, err
	}
	a := panel{id: "iefxcp" + figure + "a", title: "IEFXCP " + figure + "(a): " + of.title, xLabel: xLabel, yLabel: "throughput over the ideal one of ToS 1", logX: true}
	b := panel{id: "iefxcp" + figure + "b", title: "IEFXCP " + figure + "(b): utilization", xLabel: xLabel, yLabel: "%", logX: true}
	q := panel{id: "iefxcp" + figure + "c", title: "IEFXCP " + figure + "(c): mean queue", xLabel: xLabel, yLabel: "% of the buffer", logX: true, logY: true}
	a.header = strings.Split("x,control,tos1,tos2,tos4,tos8,tos10,utilization,queue_mean,queue_max,drops", ",")
	b.header, q.header = []string{"x", "control", "utilization_percent"}, []string{"x", "control", "queue_mean_percent"}
	by = make(map[string][]swept)
	for k, control := range controls {
		by[control] = got[k*len(xs) : (k+1)*len(xs)]
		for i, s := range by[control] {
			if control != link.Paced {
				for j, tos := range allToS {
					a.point(control+", ToS "+tos, xs[i], s.ratios[j])
				}
			}
			b.point(control, xs[i], 100*s.Utilization)
			q.point(control, xs[i], 100*s.QueueMean)
			a.add(xs[i], control, s.ratios, s.Utilization, s.QueueMean, s.QueueMax, float64(s.Drops))
			b.add(xs[i], control, 100*s.Utilization)
			q.add(xs[i], control, 100*s.QueueMean)
		}
	}
	w.plot(a, b, q)
	w.tell(of.rows(by)...)
	return by, nil
}

// allToS are the ToS values of the flows.
var allToS = []string{"1", "2", "4", "8", "10"}

// listed formats a value per control in a cell.
func listed(value func(control string) string) string {
	all := make([]string, len(link.Controls()))
	for i, control := range link.Controls() {
		all[i] = control + " " + value(control)
	}
	return strings.Join(all, "; ")
}

// rows returns the rows of a sweep: the worst deviation from 1:2:4:8:10, the lowest
// utilization, and the queues.
func (s sweep) rows(by map[string][]swept) []row {
	name := "IEFXCP " + s.figure
	worst := func(of func(s swept) float64, pick func(a, b float64) float64) string {
		return listed(func(control string) string {
			v := of(by[control][0])
			for _, s := range by[control][1:] {
				v = pick(v, of(s))
			}
			return fmt.Sprintf("%.2f", v)
		})
	}
	off := func(s swept) float64 { // deviation from the mean per ToS
		sum, most := 0.0, 0.0
		tos := []float64{1, 2, 4, 8, 10}
		for i, r := range s.ratios {
			sum += r / tos[i] / 5
		}
		for i, r := range s.ratios {
			most = max(most, math.Abs(r/tos[i]/sum-1))
		}
		return 100 * most
	}
	return []row{
		{Figure: name, Quantity: "shares off 1:2:4:8:10, worst, %", Paper: s.ratio, Simulated: worst(off, math.Max), Note: s.note},
		{Figure: name, Quantity: "utilization, lowest, %", Paper: "high", Simulated: worst(func(s swept) float64 { return 100 * s.Utilization }, math.Min)},
		{Figure: name, Quantity: "mean queue, longest, % of the buffer", Paper: s.queue, Simulated: worst(func(s swept) float64 { return 100 * s.QueueMean }, math.Max)},
		{Figure: name, Quantity: "longest queue, % of the buffer", Paper: "1-3 %; 5 % among short flows", Simulated: worst(func(s swept) float64 { return 100 * s.QueueMax }, math.Max)},
	}
}

// iefxcpCapacity makes figure 3, and an addition to the paper: results by the degree of
// congestion at which a router reports overload.
func iefxcpCapacity(w *harness) error {
	by, err := w.sweep(byCapacity)
	if err != nil {
		return err
	}
	w.tell(row{
		Figure: "IEFXCP 3(a)", Quantity: "ToS 1 over its ideal at 25, 50 and 300 Mb/s", Paper: "dips at 25 and 50",
		Simulated: listed(func(control string) string {
			s := by[control]
			return fmt.Sprintf("%.2f, %.2f, %.2f", s[0].ratios[0], s[1].ratios[0], s[3].ratios[0])
		}),
		Note: "the window is 0.75 packets at 25 Mb/s, of which whole windows make 1, and 1.5 at 50, of which they make 1",
	})
	thetas := []float64{0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5}
	results := make([]link.Result, 2*len(thetas))
	err = w.each(len(results), func(i int) error {
		results[i] = link.Run(w.transport(link.Controls()[i/len(thetas)], func(c *link.Config) { c.Theta = thetas[i%len(thetas)] }))
		return nil
	})
	if err != nil {
		return err
	}
	p := panel{id: "iefxcp3theta", title: "IEFXCP: overload where ρ > θ, 300 Mb/s", xLabel: "θ", yLabel: "%", header: []string{"theta", "control", "utilization", "queue_mean", "queue_max"}}
	for k, control := range link.Controls()[:2] {
		var values []string
		for i, theta := range thetas {
			r := results[k*len(thetas)+i]
			p.point(control+", utilization", theta, 100*r.Utilization)
			p.point(control+", mean queue", theta, 100*r.QueueMean)
			p.add(theta, control, r.Utilization, r.QueueMean, r.QueueMax)
			values = append(values, fmt.Sprintf("%v: %.1f, %.2f", theta, 100*r.Utilization, 100*r.QueueMean))
		}
		w.tell(row{
			Figure: "IEFXCP θ", Quantity: "utilization and mean queue, %, by the ρ above which overload is said: " + control,
			Paper: "θ = 1", Simulated: strings.Join(values, "; "), Note: "300 Mb/s, 60 ms",
		})
	}
	w.plot(p)
	return nil
}

// iefxcpSudden makes figure 6.
func iefxcpSudden(w *harness) error {
	controls := link.Controls()
	results := make([]link.Result, len(controls))
	err := w.each(len(controls), func(i int) error {
		results[i] = link.Run(w.transport(controls[i], func(c *link.Config) {
			c.Duration, c.Sample, c.Join, c.From, c.To = time.Minute, 500*time.Millisecond, 50, 20*time.Second, 40*time.Second
		}))
		return nil
	})
	if err != nil {
		return err
	}
	u := panel{id: "iefxcp6b", title: "IEFXCP 6(b): utilization", xLabel: "s", yLabel: "%", header: []string{"s", "control", "utilization", "queue", "tos1_bps", "tos2_bps", "tos4_bps", "tos8_bps", "tos10_bps"}}
	q := panel{id: "iefxcp6c", title: "IEFXCP 6(c): longest queue of each half second", xLabel: "s", yLabel: "% of the buffer", header: []string{"s", "control", "queue"}}
	peak, drained, lowest, settled := map[string]float64{}, map[string]time.Duration{}, map[string]float64{}, map[string]string{}
	for k, control := range controls {
		a := panel{id: "iefxcp6a-" + control, title: "IEFXCP 6(a): throughput, " + control, xLabel: "s", yLabel: "Mb/s", header: []string{"s", "tos", "mbps"}}
		lowest[control] = 1
		share, n := 0.0, 0.0
		for _, s := range results[k].Series {
			at := s.At.Seconds()
			u.point(control, at, 100*s.Utilization)
			q.point(control, at, 100*s.Queue)
			u.add(at, control, s.Utilization, s.Queue, s.Throughput)
			q.add(at, control, s.Queue)
			for i, tos := range allToS {
				a.point("ToS "+tos, at, s.Throughput[i]/1e6)
				a.add(at, tos, s.Throughput[i]/1e6)
			}
			if at > 20 && at <= 40 && s.Queue > peak[control] {
				peak[control] = s.Queue
			}
			if at > 20 && at <= 40 && s.Queue > 0.1 {
				drained[control] = s.At - 20*time.Second
			}
			if at > 10 {
				lowest[control] = min(lowest[control], s.Utilization)
			}
			if at > 35 && at <= 40 {
				share, n = share+s.Throughput[4], n+1
			}
		}
		settled[control] = fmt.Sprintf("%.2f", share/n/(10*300e6/500))
		w.plot(a)
	}
	w.plot(u, q)
	percent := func(of map[string]float64) string {
		return listed(func(control string) string { return fmt.Sprintf("%.1f", 100*of[control]) })
	}
	w.tell(
		row{Figure: "IEFXCP 6(a)", Quantity: "ToS 10 over its ideal among 100 flows, 35 to 40 s", Paper: "“adapts quickly”", Simulated: listed(func(c string) string { return settled[c] })},
		row{Figure: "IEFXCP 6(b)", Quantity: "lowest utilization of 500 ms after 10 s, %", Paper: "high", Simulated: percent(lowest)},
		row{Figure: "IEFXCP 6(c)", Quantity: "longest queue after 50 joined, % of the buffer", Paper: "a sudden rise", Simulated: percent(peak)},
		row{Figure: "IEFXCP 6(c)", Quantity: "last half second with more than 10 %, s after they joined", Paper: "“drained quickly”", Simulated: listed(func(c string) string { return fmt.Sprintf("%.1f", drained[c].Seconds()) })},
	)
	return nil
}

// liars simulates the paper's future work: five flows, one of each ToS, claim 255.
func liars(w *harness) error {
	p := panel{id: "liars", header: []string{"control", "police", "liars_part", "honest_part", "utilization", "queue_mean", "drops"}}
	for _, control := range link.Controls() {
		var parts [2]string
		var lines [2][]any
		err := w.each(2, func(i int) error {
			c := w.transport(control, func(c *link.Config) { c.Greedy, c.Police = 5, i == 1 })
			r := link.Run(c)
			part := func(greedy bool) (sum float64) {
				for j, v := range ratios(c, r, greedy) {
					sum += v / float64(c.ToS[j]) / 5
				}
				return sum
			}
			parts[i] = fmt.Sprintf("%.2f, %.2f", part(true), part(false))
			lines[i] = []any{control, yes(c.Police), part(true), part(false), r.Utilization, r.QueueMean, float64(r.Drops)}
			return nil
		})
		if err != nil {
			return err
		}
		p.add(lines[0]...)
		p.add(lines[1]...)
		w.tell(row{
			Figure: "IEFXCP, liars", Quantity: "what liars and the honest have of their parts: " + control, Paper: "“our next work”",
			Simulated: "without police " + parts[0] + "; with it " + parts[1], Note: "5 flows of 50, one of each ToS, claim 255",
		})
	}
	w.plot(p)
	return nil
}
