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
		w.out.tell(row{
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
		invented := ""
		if i > 0 {
			invented = ", invented"
		}
		note(fmt.Sprintf("request %d, %v%s", i+1, r.Cost, invented), paper)
	}
	s.Done(first, nil)
	note("the response to request 1", "RACs grow by its vector")
	w.out.plot(p)
	return nil
}

// visited is the result of a scheduling method, by seed and class.
type visited [][]web.VisitsOf

// visits simulates the paper's website with every scheduling method, with w.runs seeds, at most 5.
func (w *harness) visits() (map[string]visited, error) {
	ways := web.Schedulings()
	got, err := seeded(w, len(ways), func(i, seed int) ([]web.VisitsOf, error) {
		return web.RunSite(web.Visits{Scheduling: ways[i], Times: 1, Warmup: 6 * w.seconds, Seconds: 60 * w.seconds, Seed: w.seedOf(seed)})
	})
	visits := map[string]visited{}
	for i, way := range ways {
		visits[way.Name] = got[i]
	}
	return visits, err
}

// class summarises a number of a class.
func (v visited) class(i int, value func(web.VisitsOf) float64) spread {
	return summarise(v, func(classes []web.VisitsOf) float64 { return value(classes[i]) })
}

// sum summarises the sum of a number over the classes.
func (v visited) sum(value func(web.VisitsOf) float64) spread {
	return summarise(v, func(classes []web.VisitsOf) (sum float64) {
		for _, c := range classes {
			sum += value(c)
		}
		return sum
	})
}

// bars is a panel with a curve per class over the given names.
func bars(id, title, yLabel string, names []string, v visited, value func(c web.VisitsOf, i int) float64) panel {
	p := panel{id: id, title: title, yLabel: yLabel, header: []string{"class"}}
	for _, name := range names {
		p.header = append(p.header, name, name+"_sd")
	}
	for i, c := range v[0] {
		s := series{name: fmt.Sprintf("class %d, weight %v", i+1, c.Weight)}
		var all []spread
		for j, name := range names {
			y := v.class(i, func(c web.VisitsOf) float64 { return value(c, j) })
			all = append(all, y)
			s.add(float64(j+1), y.mean, y.sd, name)
		}
		p.series = append(p.series, s)
		p.add(i+1, values(all...))
	}
	return p
}

// triple formats a number per class.
func (v visited) triple(decimals int, value func(web.VisitsOf) float64) string {
	text := make([]string, len(v[0]))
	for i := range text {
		text[i] = v.class(i, value).text(decimals)
	}
	return strings.Join(text, " / ")
}

// mqosShares makes figure 7: the classes' shares of each resource.
func mqosShares(w *harness) error {
	visits, err := w.visits()
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
			if impossible, missing := errors.AsType[impossible](err); missing {
				note += "; live: " + impossible.Error()
			} else if err != nil {
				return err
			} else {
				note, live = note+fmt.Sprintf("; live: a fifth of the clients, pages take %d times as long", mqosScale), shares
			}
		}
		w.out.plot(bars("mqos7-"+way.Name, "Resources by "+way.Name, "% of the resource", web.Resources(), visits[way.Name], func(c web.VisitsOf, i int) float64 { return 100 * c.Busy[i] }))
		for k, name := range web.Resources() {
			r := row{Figure: "mQoS 7", Quantity: name + " by " + way.Name + ", % by class", Paper: paper[way.Name][k], Live: live[k], Note: note}
			r.Simulated = visits[way.Name].triple(1, func(c web.VisitsOf) float64 { return 100 * c.Busy[k] })
			if way.Literal {
				r.Quantity, r.Note = name+" by mQoS as the paper has it, % by class", "it skips what does not fit, and grants deficits to all meanwhile"
			}
			w.out.tell(r)
		}
	}
	return nil
}

// mqosThroughput makes figure 8.
func mqosThroughput(w *harness) error {
	visits, err := w.visits()
	if err != nil {
		return err
	}
	p := panel{id: "mqos8", header: []string{"schedule", "class 1", "class 1_sd", "class 2", "class 2_sd", "class 3", "class 3_sd", "all", "all_sd"}}
	for _, way := range web.Schedulings() {
		v := visits[way.Name]
		total := v.sum(web.VisitsOf.Total)
		p.add(way.Name, values(v.class(0, web.VisitsOf.Total), v.class(1, web.VisitsOf.Total), v.class(2, web.VisitsOf.Total), total))
		paper := map[string]string{"nQoS": "close to 300; thirds", "sQoS": "260; close to 6:3:1", "mQoS": "close to 300; close to 6:3:1"}[way.Name]
		w.out.tell(row{Figure: "mQoS 8", Quantity: "requests/s by " + way.Name + ": all; by class", Paper: paper, Simulated: total.text(1) + "; " + v.triple(1, web.VisitsOf.Total)})
	}
	gains := make([]float64, len(visits["mQoS"]))
	for i := range gains {
		value := func(v visited) float64 { return v[i : i+1].sum(web.VisitsOf.Total).mean }
		gains[i] = 100 * (value(visits["mQoS"])/value(visits["sQoS"]) - 1)
	}
	w.out.tell(row{
		Figure: "mQoS 8", Quantity: "throughput of mQoS over that of sQoS", Paper: "+21 %",
		Simulated: "+" + spreadOf(gains).text(1) + " %", Note: "the paper's own 300 over 260 are +15 %; 300/s is an input",
	})
	w.out.plot(p)
	return nil
}

// mqosTypes makes figures 9 to 11: requests by page, and latency.
func mqosTypes(w *harness) error {
	visits, err := w.visits()
	if err != nil {
		return err
	}
	names := make([]string, len(web.Pages()))
	for i, page := range web.Pages() {
		names[i] = page.Name
	}
	p := panel{id: "mqos10", header: []string{"schedule", "class", "queued ms", "queued_sd", "served ms", "served_sd"}}
	for _, way := range web.Schedulings() {
		v := visits[way.Name]
		latency := func(c web.VisitsOf) float64 { return (c.Queued + c.Served) / 1e3 }
		queued, served := func(c web.VisitsOf) float64 { return c.Queued }, func(c web.VisitsOf) float64 { return c.Served }
		for i := range v[0] {
			p.add(way.Name, i+1, values(v.class(i, queued), v.class(i, served)))
		}
		rates := make([]string, len(names))
		for j := range names {
			rates[j] = v.sum(func(c web.VisitsOf) float64 { return c.Rate[j] }).text(1)
		}
		mean := summarise(v, func(classes []web.VisitsOf) float64 {
			var answers, waits float64
			for _, c := range classes {
				answers, waits = answers+c.Total(), waits+c.Total()*latency(c)
			}
			return waits / answers
		})
		w.out.plot(bars("mqos9-"+way.Name, "Requests by "+way.Name, "requests/s", names, v, func(c web.VisitsOf, i int) float64 { return c.Rate[i] }))
		w.out.tell(
			row{Figure: "mQoS 9", Quantity: "cgi / photo / stream by " + way.Name + ", requests/s", Paper: map[string]string{"sQoS": "not balanced", "mQoS": "balanced"}[way.Name], Simulated: strings.Join(rates, " / ")},
			row{
				Figure: "mQoS 10", Quantity: "latency by " + way.Name + ": mean; by class, s", Paper: map[string]string{"nQoS": "alike, longer than mQoS", "sQoS": "by class, longer", "mQoS": "by class, not exactly 6:3:1; shortest"}[way.Name],
				Simulated: mean.text(2) + "; " + v.triple(2, latency),
				Note:      "1,200 clients that always wait for an answer: the mean is 1,200 over the throughput",
			})
		if way.Name == "mQoS" {
			w.out.tell(row{
				Figure: "mQoS 11", Quantity: "queueing; service by class, ms", Paper: "differs; almost the same",
				Simulated: v.triple(0, queued) + "; " + v.triple(0, served),
			})
		}
	}
	w.out.plot(p)
	return nil
}
