package figures

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/tools/sim/web"
)

// Figures of the Join-the-Best-Queue paper, the basis of the gateway's balancing.

const (
	jbqAssumed = "assumed: 320 ms of a processor, lognormal; each second's rate within 0-2 of the mean"
	// smoothing is the weight of a response time in the moving average of figures 4 and 8,
	// as in the paper.
	smoothing = 0.01
	// busier is a processor time with which silver machines of the paper's section 2 are at the 85 % that the paper states.
	busier = 460 * time.Millisecond
)

// balanced summarises runs of a cluster with one way to choose a server.
type balanced struct {
	overall map[string]spread // by statistic, ms
	means   []spread          // mean response time of each server, ms
	counts  []spread          // requests of each server
	rates   []spread          // requests/s of each server
	first   web.Result        // of the first seed
}

// statistics are the names in balanced.overall, in the order of the paper's table II.
var statistics = []string{"mean", "standard deviation", "p95", "p97", "p99"}

// ways simulates a cluster of the paper with each way to choose a server, with w.runs seeds, at
// most 5. All runs have the same machines. demand is the processor time of a request.
func (w *harness) ways(cluster string, demand time.Duration) (c web.Cluster, by map[string]balanced, err error) {
	if c, err = web.Find(cluster, w.seed); err != nil {
		return c, nil, err
	}
	for i := range c.Servers {
		c.Servers[i].Speed *= web.Demand.Seconds() / demand.Seconds()
	}
	ways := web.Ways()
	results, err := seeded(w, len(ways), func(i, seed int) (web.Result, error) {
		r := web.Run(web.Study{Cluster: c, Way: ways[i], Seed: w.seedOf(seed)})
		if seed > 0 {
			r.Answers = nil // only the first seed is plotted
		}
		return r, nil
	})
	if err != nil {
		return c, nil, err
	}
	by = make(map[string]balanced)
	for i, way := range ways {
		by[way.Name] = balancedOf(results[i])
	}
	return c, by, nil
}

func balancedOf(results []web.Result) balanced {
	over := func(value func(web.Result) float64) spread { return summarise(results, value) }
	b := balanced{first: results[0], overall: map[string]spread{
		"mean":               over(func(r web.Result) float64 { return r.Overall.Mean }),
		"standard deviation": over(func(r web.Result) float64 { return r.Overall.Sd }),
		"p95":                over(func(r web.Result) float64 { return r.Overall.P95 }),
		"p97":                over(func(r web.Result) float64 { return r.Overall.P97 }),
		"p99":                over(func(r web.Result) float64 { return r.Overall.P99 }),
	}}
	for i := range results[0].ByServer {
		b.means = append(b.means, over(func(r web.Result) float64 { return r.ByServer[i].Mean }))
		b.counts = append(b.counts, over(func(r web.Result) float64 { return float64(r.ByServer[i].Requests) }))
		b.rates = append(b.rates, over(func(r web.Result) float64 { return float64(r.ByServer[i].Requests) / float64(len(r.PerSecond)) }))
	}
	return b
}

// responses plots each server's response times over time, like figures 4 and 8.
func responses(id, title string, c web.Cluster, r web.Result) panel {
	p := panel{id: id, title: title, xLabel: "s", yLabel: "response time, ms, weighted over time", header: []string{"s", "server", "ms"}}
	p.series = make([]series, len(c.Servers))
	smooth, drawn := make([]float64, len(c.Servers)), make([]int, len(c.Servers))
	const every = 60 // s
	for i, s := range c.Servers {
		p.series[i].name = s.Name
	}
	for _, a := range r.Answers {
		response := a.Took.Seconds() * 1e3
		if smooth[a.Server] == 0 {
			smooth[a.Server] = response
		}
		smooth[a.Server] += smoothing * (response - smooth[a.Server])
		if at := int(a.At.Seconds()) / every; at > drawn[a.Server] {
			drawn[a.Server] = at
			p.series[a.Server].add(a.At.Seconds(), smooth[a.Server], 0, "")
			p.add(a.At.Seconds(), c.Servers[a.Server].Name, smooth[a.Server])
		}
	}
	return p
}

// perServer formats a value of each server, in the paper's order.
func perServer(byServer []spread) string {
	text := make([]string, len(byServer))
	for i, s := range byServer {
		text[i] = s.text(0)
	}
	return strings.Join(text, " / ")
}

// live measures the small cluster behind the gateway daemon, in several runs. It returns the mean
// response times, and the numbers of requests scaled to 40,000. Without the daemon, note gives the
// reason.
func (w *harness) live(c web.Cluster, balance string) (times, counts, note string, err error) {
	var allTimes, allCounts, sums []string
	for run := range min(w.runs, liveRuns) {
		byServer, err := w.behindGateway(c, balance, w.seedOf(run))
		if why, missing := errors.AsType[impossible](err); missing {
			return "", "", "live: " + why.Error(), nil
		} else if err != nil {
			return "", "", "", err
		}
		sum := 0
		for _, s := range byServer {
			sum += s.Requests
		}
		means, requests := make([]string, len(byServer)), make([]string, len(byServer))
		for i, s := range byServer {
			means[i], requests[i] = fmt.Sprintf("%.0f", s.Mean), fmt.Sprint(s.Requests*c.Requests/sum)
		}
		allTimes, allCounts, sums = append(allTimes, strings.Join(means, " / ")+" ms"), append(allCounts, strings.Join(requests, " / ")), append(sums, fmt.Sprint(sum))
	}
	return overRuns(allTimes), overRuns(allCounts),
		fmt.Sprintf("live: %s requests in a minute, %d times as fast, times and counts as the paper's", overRuns(sums), jbqScale), nil
}

// jbqBusy makes figure 4: bybusyness on a bronze, a silver and a gold machine.
func jbqBusy(w *harness) error {
	c, by, err := w.ways("small", web.Demand)
	if err != nil {
		return err
	}
	times, counts, note, err := w.live(c, web.Busy)
	if err != nil {
		return err
	}
	w.out.plot(responses("jbq4", "Response times by bybusyness", c, by[web.Busy].first))
	w.out.tell(
		row{Figure: "JBQ 4", Quantity: "mean response times of bronze / silver / gold by bybusyness", Paper: "1400 / 600 / 400 ms", Simulated: perServer(by[web.Busy].means) + " ms", Live: times, Note: jbqAssumed},
		row{Figure: "JBQ 4", Quantity: "requests, of 40,000", Paper: "6663 / 14432 / 18905", Simulated: perServer(by[web.Busy].counts), Live: counts, Note: note},
	)
	return nil
}

// jbqLoad makes figure 7: the arriving load.
func jbqLoad(w *harness) error {
	for _, f := range []struct{ id, cluster, paper string }{{"7a", "small", "14.3/s, “very bursty”"}, {"7b", "medium", "29.96/s"}} {
		c, by, err := w.ways(f.cluster, web.Demand)
		if err != nil {
			return err
		}
		seconds := by[web.Busy].first.PerSecond
		p := panel{id: "jbq" + f.id, title: "Requests to the " + f.cluster + " cluster", xLabel: "s", yLabel: "requests/s", header: []string{"s", "requests"}}
		for i, n := range seconds[:min(600, len(seconds))] {
			p.point("each second, of the first 10 minutes", float64(i), float64(n))
			p.add(i, n)
		}
		w.out.plot(p)
		w.out.tell(row{
			Figure: "JBQ " + f.id, Quantity: "requests/s to the " + f.cluster + " cluster: mean, maximum", Paper: f.paper,
			Simulated: fmt.Sprintf("%.1f/s, %d/s", float64(c.Requests)/float64(len(seconds)), slices.Max(seconds)), Note: "an input",
		})
	}
	return nil
}

// jbqBest makes figure 8: JBQ on the machines of figure 4.
func jbqBest(w *harness) error {
	c, by, err := w.ways("small", web.Demand)
	if err != nil {
		return err
	}
	times, counts, note, err := w.live(c, web.JBQ)
	if err != nil {
		return err
	}
	w.out.plot(
		responses("jbq8", "Response times by JBQ", c, by[web.JBQ].first),
		responses("jbq8-literal", "Response times by JBQ as in the paper, T(0) = 100 ms", c, by[web.Literal].first))
	others := func(value func(balanced) string) string {
		return "as in the paper with T(0) = 100 ms: " + value(by[web.Literal]) + "; with T(0) = 0: " + value(by[web.LiteralZero]) + "; SED: " + value(by[web.SED])
	}
	counted := func(b balanced) string { return perServer(b.counts) }
	timed := func(b balanced) string { return perServer(b.means) + " ms" }
	w.out.tell(
		row{Figure: "JBQ 8", Quantity: "requests to bronze / silver / gold by JBQ, of 40,000", Paper: "5918 / 13072 / 21010", Simulated: counted(by[web.JBQ]), Live: counts, Note: others(counted) + "; " + note},
		row{Figure: "JBQ 8", Quantity: "mean response times", Paper: "closer than by bybusyness", Simulated: timed(by[web.JBQ]), Live: times, Note: others(timed)},
	)
	return nil
}

// jbqStatistics makes table II: the response times of three clusters.
func jbqStatistics(w *harness) error {
	paper := map[string][5]string{
		"small":  {"626 → 755 ms (-20.7 %)", "476 → 385 ms (+19.1 %)", "1467 → 1412 ms (+3.7 %)", "1707 → 1594 ms (+6.6 %)", "2382 → 2018 ms (+15.2 %)"},
		"medium": {"440 → 450 ms (-2.3 %)", "250 → 203 ms (+18.8 %)", "873 → 813 ms (+6.9 %)", "1006 → 912 ms (+9.3 %)", "1384 → 1155 ms (+16.6 %)"},
		"silver": {"414 → 431 ms (-4.2 %)", "191 → 186 ms (+2.9 %)", "746 → 763 ms (-2.3 %)", "856 → 867 ms (-1.3 %)", "1117 → 1132 ms (-1.3 %)"},
	}
	p := panel{id: "jbqII", header: strings.Split("cluster,balance,mean ms,mean_sd,sd,sd_sd,p95,p95_sd,p97,p97_sd,p99,p99_sd", ",")}
	for _, cluster := range []string{"small", "medium", "silver"} {
		_, by, err := w.ways(cluster, web.Demand)
		if err != nil {
			return err
		}
		for _, way := range web.Ways() {
			var all []spread
			for _, name := range statistics {
				all = append(all, by[way.Name].overall[name])
			}
			p.add(cluster, way.Name, values(all...))
		}
		for i, name := range statistics {
			w.out.tell(row{
				Figure: "JBQ II", Quantity: name + " of response times, " + cluster + " cluster: bybusyness → JBQ (+: less)",
				Paper: paper[cluster][i], Simulated: change(by, name),
				Note: fmt.Sprintf("as in the paper with T(0) = 100 ms: %s ms; with T(0) = 0: %s ms; SED: %s ms",
					by[web.Literal].overall[name].text(0), by[web.LiteralZero].overall[name].text(0), by[web.SED].overall[name].text(0)),
			})
		}
		if _, by, err = w.ways(cluster, busier); err != nil {
			return err
		}
		var was, is float64 // the paper's means
		if _, err := fmt.Sscanf(paper[cluster][0], "%f → %f", &was, &is); err != nil {
			return err
		}
		w.out.tell(row{
			Figure: "JBQ II, busier", Quantity: fmt.Sprintf("mean of response times, %s cluster, with %d ms of a processor", cluster, busier.Milliseconds()),
			Paper: paper[cluster][0], Simulated: change(by, "mean"),
			Note: fmt.Sprintf("%.1f and %.1f times the paper's; as in the paper with T(0) = 100 ms: %s ms", by[web.Busy].overall["mean"].mean/was, by[web.JBQ].overall["mean"].mean/is, by[web.Literal].overall["mean"].text(0)),
		})
	}
	w.out.plot(p)
	return nil
}

// change formats a statistic by bybusyness and by JBQ.
func change(by map[string]balanced, statistic string) string {
	was, is := by[web.Busy].overall[statistic], by[web.JBQ].overall[statistic]
	return fmt.Sprintf("%s → %s ms (%+.1f %%)", was.text(0), is.text(0), 100*(was.mean-is.mean)/was.mean)
}

// jbqServers makes table III: each server of the medium cluster.
func jbqServers(w *harness) error {
	paper := [8][2]string{
		{"638 ms at 2.97/s", "320 ms at 0.37/s"}, {"768 ms at 2.60/s", "360 ms at 1.66/s"},
		{"355 ms at 4.05/s", "353 ms at 1.25/s"}, {"342 ms at 4.04/s", "478 ms at 8.47/s"}, {"323 ms at 4.00/s", "483 ms at 8.91/s"},
		{"408 ms at 4.16/s", "384 ms at 2.12/s"}, {"460 ms at 3.98/s", "432 ms at 2.53/s"}, {"385 ms at 4.17/s", "434 ms at 4.65/s"},
	}
	c, by, err := w.ways("medium", web.Demand)
	if err != nil {
		return err
	}
	at := func(way string, i int) string {
		return fmt.Sprintf("%s ms at %v/s", by[way].means[i].text(0), by[way].rates[i])
	}
	p := panel{id: "jbqIII", header: strings.Split("server,processors,speed,balance,mean ms,mean_sd,requests/s,requests/s_sd", ",")}
	for i, s := range c.Servers {
		for _, way := range web.Ways() {
			p.add(s.Name, s.Processors, s.Speed, way.Name, values(by[way.Name].means[i], by[way.Name].rates[i]))
		}
		w.out.tell(row{
			Figure: "JBQ III", Quantity: s.Name + ": bybusyness; JBQ",
			Paper: paper[i][0] + "; " + paper[i][1], Simulated: at(web.Busy, i) + "; " + at(web.JBQ, i),
			Note: fmt.Sprintf("speed %.2f, by chance; as in the paper with T(0) = 100 ms: %s; SED: %s", s.Speed, at(web.Literal, i), at(web.SED, i)),
		})
	}
	w.out.plot(p)
	return nil
}
