package figures

import (
	"errors"
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/tools/sim/web"
)

// Figures of the mQoS paper, the basis of the gateway's scheduling.

const mqosAssumed = "assumed: what pages take, 6:3:1 turned round; twice as many clients for cgi"

// mqosExample makes figure 6: the counters after each of three requests and a response.
func mqosExample(w *harness) error {
	s, err := schedule.New(schedule.Config{
		Classes: []schedule.Class{{Weight: 6, Queue: 99}, {Weight: 3, Queue: 99}, {Weight: 1, Queue: 99}}, Resources: 3, Servers: 1,
	})
	if err != nil {
		return err
	}
	// The first vector is the paper's; the paper does not give the others.
	vectors := []schedule.Vector{{6, 5, 3}, {3, 2, 7}, {2, 8, 4}}
	for class := range 3 {
		for range 3 {
			for _, v := range vectors {
				if err := s.Arrive(&schedule.Request{Class: class, Cost: v}); err != nil {
					return err
				}
			}
		}
	}
	p := panel{id: "mqos6", header: []string{"after", "RAC cpu", "disk", "network", "DC of class 1 cpu", "disk", "network"}}
	note := func(after, paper string) {
		rac, dc := s.Server(0).Free, s.Classes()[0].Deficit
		p.add(after, rac[0], rac[1], rac[2], dc[0], dc[1], dc[2])
		w.tell(row{
			Figure: "mQoS 6", Quantity: "RACs; class 1's DCs, after " + after, Paper: paper,
			Simulated: fmt.Sprintf("%v, %v, %v; %v, %v, %v", rac[0], rac[1], rac[2], dc[0], dc[1], dc[2]),
		})
	}
	var first *schedule.Request
	for i, paper := range []string{"cpu's sub-scheduler first; (6, 5, 3) from 100s and 60s", "the network's next", "the disk's next"} {
		r, _, ok := s.Next(schedule.First)
		if !ok {
			return fmt.Errorf("request %d was not sent", i+1)
		}
		if i == 0 {
			first = r
		}
		note(fmt.Sprintf("request %d, %v", i+1, r.Cost), paper)
	}
	s.Done(first, nil)
	note("the response to request 1", "RACs grow by its vector")
	w.plot(p)
	return nil
}

// visits simulates the paper's website with every scheduling method.
func (w *harness) visits() (map[string][]web.VisitsOf, error) {
	ways := web.Schedulings()
	got := make([][]web.VisitsOf, len(ways))
	err := w.each(len(ways), func(i int) (err error) {
		got[i], err = web.RunSite(web.Visits{Scheduling: ways[i], Times: 1, Warmup: 6 * w.seconds, Seconds: 60 * w.seconds, Seed: w.seed})
		return err
	})
	by := map[string][]web.VisitsOf{}
	for i, way := range ways {
		by[way.Name] = got[i]
	}
	return by, err
}

// bars is a panel with a curve per class over the given names.
func bars(id, title, yLabel string, names []string, classes []web.VisitsOf, of func(c web.VisitsOf, i int) float64) panel {
	p := panel{id: id, title: title, yLabel: yLabel, header: append([]string{"class"}, names...)}
	for i, c := range classes {
		s, values := series{name: fmt.Sprintf("class %d, weight %v", i+1, c.Weight)}, make([]float64, len(names))
		for j, name := range names {
			values[j] = of(c, j)
			s.add(float64(j+1), values[j], 0, name)
		}
		p.series = append(p.series, s)
		p.add(i+1, values)
	}
	return p
}

// triple formats a number per class.
func triple(classes []web.VisitsOf, format string, of func(web.VisitsOf) float64) string {
	text := make([]string, len(classes))
	for i, c := range classes {
		text[i] = fmt.Sprintf(format, of(c))
	}
	return strings.Join(text, " / ")
}

// mqosShares makes figure 7: the classes' shares of each resource.
func mqosShares(w *harness) error {
	by, err := w.visits()
	if err != nil {
		return err
	}
	paper := map[string][3]string{
		"nQoS": {"thirds", "thirds", "thirds"}, "sQoS": {"6:3:1, used up", "wasted", "wasted"}, "mQoS": {"6:3:1, used up", "6:3:1, used up", "6:3:1, used up"},
	}
	schedulers := map[string]string{"nQoS": "none", "sQoS": "single:cpu", "mQoS": "mqos"}
	for _, way := range web.Schedulings() {
		note, live := mqosAssumed, [3]string{}
		if flag := schedulers[way.Name]; flag != "" {
			shares, err := w.liveShares(flag)
			if why, missing := errors.AsType[impossible](err); missing {
				note += "; live: " + why.Error()
			} else if err != nil {
				return err
			} else {
				note += fmt.Sprintf("; live: a fifth of the clients, pages take %d times as long", mqosScale)
				for k, s := range shares {
					live[k] = fmt.Sprintf("%.1f / %.1f / %.1f", s[0], s[1], s[2])
				}
			}
		}
		w.plot(bars("mqos7-"+way.Name, "Resources by "+way.Name, "% of the resource", web.Resources(), by[way.Name], func(c web.VisitsOf, i int) float64 { return 100 * c.Busy[i] }))
		for k, name := range web.Resources() {
			r := row{Figure: "mQoS 7", Quantity: name + " by " + way.Name + ", % by class", Paper: paper[way.Name][k], Live: live[k], Note: note}
			r.Simulated = triple(by[way.Name], "%.1f", func(c web.VisitsOf) float64 { return 100 * c.Busy[k] })
			if way.Literal {
				r.Quantity, r.Note = name+" by mQoS as the paper has it, % by class", "it skips what does not fit, and grants deficits to all meanwhile"
			}
			w.tell(r)
		}
	}
	return nil
}

// mqosThroughput makes figure 8.
func mqosThroughput(w *harness) error {
	by, err := w.visits()
	if err != nil {
		return err
	}
	total := map[string]float64{}
	p := panel{id: "mqos8", header: []string{"schedule", "class 1", "class 2", "class 3", "all"}}
	for _, way := range web.Schedulings() {
		var rates []float64
		for _, c := range by[way.Name] {
			total[way.Name] += c.Total()
			rates = append(rates, c.Total())
		}
		p.add(way.Name, rates, total[way.Name])
		r := row{Figure: "mQoS 8", Quantity: "requests/s by " + way.Name + ": all; by class", Paper: map[string]string{"nQoS": "300; thirds", "sQoS": "260; 6:3:1", "mQoS": "300; 6:3:1"}[way.Name]}
		r.Simulated = fmt.Sprintf("%.0f; %s", total[way.Name], triple(by[way.Name], "%.0f", web.VisitsOf.Total))
		w.tell(r)
	}
	w.tell(row{
		Figure: "mQoS 8", Quantity: "throughput of mQoS over that of sQoS", Paper: "+21 %",
		Simulated: fmt.Sprintf("%+.0f %%", 100*(total["mQoS"]/total["sQoS"]-1)), Note: "the paper's own 300 over 260 are +15 %; 300/s is an input",
	})
	w.plot(p)
	return nil
}

// mqosTypes makes figures 9 to 11: requests by page, and latency.
func mqosTypes(w *harness) error {
	by, err := w.visits()
	if err != nil {
		return err
	}
	names := make([]string, len(web.Pages()))
	for i, page := range web.Pages() {
		names[i] = page.Name
	}
	p := panel{id: "mqos10", header: []string{"schedule", "class", "queued ms", "served ms"}}
	for _, way := range web.Schedulings() {
		classes := by[way.Name]
		var answers, waits float64
		sums := make([]web.VisitsOf, 1)
		for i, c := range classes {
			answers, waits = answers+c.Total(), waits+c.Total()*(c.Queued+c.Served)
			for j := range names {
				sums[0].Rate[j] += c.Rate[j]
			}
			p.add(way.Name, i+1, c.Queued, c.Served)
		}
		w.plot(bars("mqos9-"+way.Name, "Requests by "+way.Name, "requests/s", names, classes, func(c web.VisitsOf, i int) float64 { return c.Rate[i] }))
		w.tell(
			row{Figure: "mQoS 9", Quantity: "cgi / photo / stream by " + way.Name + ", requests/s", Paper: map[string]string{"sQoS": "not balanced", "mQoS": "balanced"}[way.Name], Simulated: fmt.Sprintf("%.0f / %.0f / %.0f", sums[0].Rate[0], sums[0].Rate[1], sums[0].Rate[2])},
			row{
				Figure: "mQoS 10", Quantity: "latency by " + way.Name + ": mean; by class, s", Paper: map[string]string{"nQoS": "alike, longer than mQoS", "sQoS": "by class, longer", "mQoS": "by class, not exactly 6:3:1; shortest"}[way.Name],
				Simulated: fmt.Sprintf("%.2f; %s", waits/answers/1e3, triple(classes, "%.2f", func(c web.VisitsOf) float64 { return (c.Queued + c.Served) / 1e3 })),
				Note:      "1,200 clients that always wait for an answer: the mean is 1,200 over the throughput",
			})
		if way.Name == "mQoS" {
			w.tell(row{
				Figure: "mQoS 11", Quantity: "queueing; service by class, ms", Paper: "differs; almost the same",
				Simulated: triple(classes, "%.0f", func(c web.VisitsOf) float64 { return c.Queued }) + "; " + triple(classes, "%.0f", func(c web.VisitsOf) float64 { return c.Served }),
			})
		}
	}
	w.plot(p)
	return nil
}
