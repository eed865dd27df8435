package figures

import (
	"errors"
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/tools/sim/web"
)

// Figures of the Join-the-Best-Queue paper, the basis of the gateway's balancing.

const (
	jbqAssumed = "assumed: 320 ms of a processor, lognormal; each second's rate within 0-2 of the mean"
	// smoothing is the weight of a response time in the moving average of figures 4 and 8,
	// as in the paper.
	smoothing = 0.01
	busy      = "busy"
)

// ways simulates a cluster of the paper with each method of choosing a server.
func (w *harness) ways(cluster string) (c web.Cluster, by map[string]web.Result, err error) {
	if c, err = web.Find(cluster, w.seed); err != nil {
		return c, nil, err
	}
	ways := web.Ways()
	got := make([]web.Result, len(ways))
	err = w.each(len(ways), func(i int) error {
		got[i] = web.Run(web.Study{Cluster: c, Way: ways[i], Seed: w.seed})
		return nil
	})
	by = make(map[string]web.Result)
	for i, way := range ways {
		by[way.Name] = got[i]
	}
	return c, by, err
}

// responses plots each server's response times over time, like figures 4 and 8.
func responses(id, title string, c web.Cluster, r web.Result) panel {
	p := panel{id: id, title: title, xLabel: "s", yLabel: "response time, ms, weighted over time", header: []string{"s", "server", "ms"}}
	p.series = make([]series, len(c.Servers))
	smooth, shown := make([]float64, len(c.Servers)), make([]int, len(c.Servers))
	const every = 60 // s
	for i, s := range c.Servers {
		p.series[i].name = s.Name
	}
	for _, a := range r.Answers {
		took := a.Took.Seconds() * 1e3
		if smooth[a.Server] == 0 {
			smooth[a.Server] = took
		}
		smooth[a.Server] += smoothing * (took - smooth[a.Server])
		if at := int(a.At.Seconds()) / every; at > shown[a.Server] {
			shown[a.Server] = at
			p.series[a.Server].add(a.At.Seconds(), smooth[a.Server], 0, "")
			p.add(a.At.Seconds(), c.Servers[a.Server].Name, smooth[a.Server])
		}
	}
	return p
}

// means formats each server's mean response time, in the paper's order.
func means(byServer []web.Summary) (text string) {
	for i, s := range byServer {
		text += fmt.Sprintf("%s%.0f", separator(i), s.Mean)
	}
	return text + " ms"
}

func requests(byServer []web.Summary) (text string) {
	for i, s := range byServer {
		text += fmt.Sprintf("%s%d", separator(i), s.Requests)
	}
	return text
}

// live measures the small cluster behind the gateway daemon. It returns the mean response
// times, and the numbers of requests scaled to 40,000. Without the daemon, note gives the
// reason.
func (w *harness) live(c web.Cluster, balance string) (times, counts, note string, err error) {
	byServer, err := w.behindGateway(c, balance)
	if why, missing := errors.AsType[impossible](err); missing {
		return "", "", "live: " + why.Error(), nil
	} else if err != nil {
		return "", "", "", err
	}
	sum := 0
	for _, s := range byServer {
		sum += s.Requests
	}
	for i := range byServer {
		byServer[i].Requests = byServer[i].Requests * c.Requests / sum
	}
	return means(byServer), requests(byServer), fmt.Sprintf("live: %d requests in a minute, %d times as fast, times and counts as the paper's", sum, jbqScale), nil
}

func separator(i int) string {
	if i == 0 {
		return ""
	}
	return " / "
}

// jbqBusy makes figure 4: bybusyness on a bronze, a silver and a gold machine.
func jbqBusy(w *harness) error {
	c, by, err := w.ways("small")
	if err != nil {
		return err
	}
	times, counts, note, err := w.live(c, busy)
	if err != nil {
		return err
	}
	w.plot(responses("jbq4", "Response times by bybusyness", c, by[busy]))
	w.tell(
		row{Figure: "JBQ 4", Quantity: "mean response times of bronze / silver / gold by bybusyness", Paper: "1400 / 600 / 400 ms", Simulated: means(by[busy].ByServer), Live: times, Note: jbqAssumed},
		row{Figure: "JBQ 4", Quantity: "requests, of 40,000", Paper: "6663 / 14432 / 18905", Simulated: requests(by[busy].ByServer), Live: counts, Note: note},
	)
	return nil
}

// jbqLoad makes figure 7: the arriving load.
func jbqLoad(w *harness) error {
	for _, f := range []struct{ id, cluster, paper string }{{"7a", "small", "14.3/s"}, {"7b", "medium", "29.96/s"}} {
		c, by, err := w.ways(f.cluster)
		if err != nil {
			return err
		}
		seconds := by[busy].PerSecond
		p := panel{id: "jbq" + f.id, title: "Requests to the " + f.cluster + " cluster", xLabel: "s", yLabel: "requests/s", header: []string{"s", "requests"}}
		for i, n := range seconds[:min(600, len(seconds))] {
			p.point("each second, of the first 10 minutes", float64(i), float64(n))
			p.add(i, n)
		}
		w.plot(p)
		w.tell(row{
			Figure: "JBQ " + f.id, Quantity: "requests/s to the " + f.cluster + " cluster: mean, greatest", Paper: f.paper + ", “very bursty”",
			Simulated: fmt.Sprintf("%.1f/s, %d/s", float64(c.Requests)/float64(len(seconds)), slices.Max(seconds)), Note: "an input",
		})
	}
	return nil
}

// jbqBest makes figure 8: JBQ on the machines of figure 4.
func jbqBest(w *harness) error {
	c, by, err := w.ways("small")
	if err != nil {
		return err
	}
	times, counts, note, err := w.live(c, "jbq")
	if err != nil {
		return err
	}
	w.plot(responses("jbq8", "Response times by JBQ", c, by["jbq"]), responses("jbq8-literal", "Response times by JBQ as the paper has it", c, by["literal"]))
	w.tell(
		row{Figure: "JBQ 8", Quantity: "requests to bronze / silver / gold by JBQ, of 40,000", Paper: "5918 / 13072 / 21010", Simulated: requests(by["jbq"].ByServer), Live: counts, Note: "the paper's own form: " + requests(by["literal"].ByServer) + "; " + note},
		row{Figure: "JBQ 8", Quantity: "mean response times", Paper: "closer than by bybusyness", Simulated: means(by["jbq"].ByServer), Live: times, Note: "the paper's own form: " + means(by["literal"].ByServer)},
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
	p := panel{id: "jbqII", header: []string{"cluster", "balance", "mean ms", "sd", "p95", "p97", "p99"}}
	for _, cluster := range []string{"small", "medium", "silver"} {
		_, by, err := w.ways(cluster)
		if err != nil {
			return err
		}
		of := func(way string) [5]float64 {
			s := by[way].Overall
			return [5]float64{s.Mean, s.Sd, s.P95, s.P97, s.P99}
		}
		for _, way := range web.Ways() {
			all := of(way.Name)
			p.add(cluster, way.Name, all[:])
		}
		change := func(way string, i int) string {
			was, is := of(busy)[i], of(way)[i]
			return fmt.Sprintf("%.0f → %.0f ms (%+.1f %%)", was, is, 100*(was-is)/was)
		}
		for i, quantity := range []string{"mean", "standard deviation", "p95", "p97", "p99"} {
			w.tell(row{
				Figure: "JBQ II", Quantity: quantity + " of response times, " + cluster + " cluster: bybusyness → JBQ (+: less)",
				Paper: paper[cluster][i], Simulated: change("jbq", i), Note: "the paper's own form: " + change("literal", i),
			})
		}
	}
	w.plot(p)
	return nil
}

// jbqServers makes table III: each server of the medium cluster.
func jbqServers(w *harness) error {
	paper := [8][2]string{
		{"638 ms at 2.97/s", "320 ms at 0.37/s"}, {"768 ms at 2.60/s", "360 ms at 1.66/s"},
		{"355 ms at 4.05/s", "353 ms at 1.25/s"}, {"342 ms at 4.04/s", "478 ms at 8.47/s"}, {"323 ms at 4.00/s", "483 ms at 8.91/s"},
		{"408 ms at 4.16/s", "384 ms at 2.12/s"}, {"460 ms at 3.98/s", "432 ms at 2.53/s"}, {"385 ms at 4.17/s", "434 ms at 4.65/s"},
	}
	c, by, err := w.ways("medium")
	if err != nil {
		return err
	}
	at := func(way string, i int) string {
		r := by[way]
		return fmt.Sprintf("%.0f ms at %.2f/s", r.ByServer[i].Mean, float64(r.ByServer[i].Requests)/float64(len(r.PerSecond)))
	}
	p := panel{id: "jbqIII", header: []string{"server", "processors", "speed", "bybusyness", "JBQ", "JBQ, the paper's own form"}}
	for i, s := range c.Servers {
		p.add(s.Name, s.Processors, s.Speed, at(busy, i), at("jbq", i), at("literal", i))
		w.tell(row{
			Figure: "JBQ III", Quantity: s.Name + ": bybusyness; JBQ",
			Paper: paper[i][0] + "; " + paper[i][1], Simulated: at(busy, i) + "; " + at("jbq", i),
			Note: fmt.Sprintf("speed %.2f, by chance; the paper's own form: %s", s.Speed, at("literal", i)),
		})
	}
	w.plot(p)
	return nil
}
