package figures

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/histogram"
)

// Figures of the Janus paper, the basis of admission.

// admission starts the admission daemon in a temporary folder. stop ends the daemon.
func (w *harness) admission(rules []*srtmv1.AdmissionRule, flags ...string) (udp, web *decide.Server, dir string, stop func() error, err error) {
	dir, stop, err = w.daemon("admission", func(bin, dir string) (_ *decide.Server, err error) {
		udp, web, err = decide.Admission(w, bin, dir, rules, flags...)
		return udp, err
	})
	return udp, web, dir, stop, err
}

// tails formats quantiles in a unit.
func tails(of *histogram.Latency, unit time.Duration, format string, quantiles ...float64) string {
	text := make([]string, len(quantiles))
	for i, q := range quantiles {
		text[i] = fmt.Sprintf(format, float64(of.Quantile(q))/float64(unit))
	}
	return strings.Join(text, ", ")
}

// janusBalancer sends requests to a router directly and behind HAProxy, 1,000 per second
// like the paper.
func janusBalancer(w *harness) error {
	_, web, dir, stop, err := w.admission(decide.Generous())
	if err != nil {
		return err
	}
	defer stop()
	proxy, absent := decide.HAProxy(dir, decide.HAProxyBefore(web.At))
	defer decide.Stop(proxy)
	rows := []row{
		{Quantity: "latency of /qos, asked directly: mean (live: median), P90, P99, P99.9, us", Paper: "1140, 1410; P99 and P99.9 in a plot", Note: "the paper: between EC2 instances; here on loopback"},
		{Quantity: "the same behind a gateway", Paper: "1650, 2370; P99 and P99.9 in a plot", Note: "HAProxy, one thread"},
	}
	for i, to := range []*decide.Server{web, proxy} {
		rows[i].Figure = "Janus 5"
		if i == 1 && errors.Is(absent, host.ErrAbsent) {
			rows[i].Note = "not made: HAProxy is not installed"
			break
		}
		if i == 1 && absent != nil {
			return absent
		}
		got, err := decide.HTTP(to, decide.Load{Rate: 1000, Length: 10 * time.Second, Connections: 16}, "/qos?key=%s")
		if err != nil {
			return err
		}
		rows[i].Live = tails(got.Latency, time.Microsecond, "%.0f", .5, .9, .99, .999)
	}
	w.out.tell(rows...)
	return nil
}

// janusSpread counts keys of the paper's four kinds on 20 servers, by the paper's rule and
// by ours, with w.runs seeds, at most 5. For random keys, the statistic has the chi-square
// distribution with 19 degrees of freedom. Sequential numbers continue from seed to seed.
func janusSpread(w *harness) error {
	const servers, n, usual = 20, 500_000, 36.2 // usual: the 99th percentile of chi-square
	kinds := []struct {
		name string
		key  func(rng *rand.Rand, i int) string
	}{
		{"UUIDs", func(rng *rand.Rand, _ int) string {
			a, b := rng.Uint64(), rng.Uint64()
			return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", a>>32, a>>16&0xffff, a&0xffff, b>>48, b&(1<<48-1))
		}},
		{"times", func(rng *rand.Rand, _ int) string {
			return time.Unix(rng.Int64N(1_700_000_000), 0).UTC().Format("2006-01-02-15-04-05")
		}},
		{"words of random letters", func(rng *rand.Rand, _ int) string {
			letters := make([]byte, 3+rng.IntN(10))
			for i := range letters {
				letters[i] = 'a' + byte(rng.IntN(26))
			}
			return string(letters)
		}},
		{"sequential numbers", func(_ *rand.Rand, i int) string { return fmt.Sprint(1_500_000_001 + i) }},
	}
	type shares [servers]float64 // percent of the keys
	type keys struct{ paper, ours shares }
	got, err := seeded(w, len(kinds), func(kind, seed int) (k keys, err error) {
		rng, seen := rand.New(rand.NewPCG(w.seedOf(seed), 6)), make(map[string]bool, n)
		for i := seed * n; len(seen) < n; i++ {
			key := kinds[kind].key(rng, i)
			if seen[key] {
				continue
			}
			seen[key] = true
			k.paper[rule.Partition(key, servers)] += 100. / n
			k.ours[rule.Partition(key, rule.Partitions)*servers/rule.Partitions] += 100. / n
		}
		return k, nil
	})
	if err != nil {
		return err
	}
	p := panel{id: "janus6", title: "Keys of 20 servers by the paper's rule", xLabel: "server", yLabel: "percent of the keys", header: []string{"kind", "server", "paper's rule %", "paper's rule_sd", "ours %", "ours_sd"}}
	for k, kind := range kinds {
		describe := func(of func(keys) shares) string {
			low, high := 100., 0.
			squares := func(k keys) (sum float64) {
				for _, share := range of(k) {
					low, high = min(low, share), max(high, share)
					sum += (share - 100./servers) * (share - 100./servers)
				}
				return sum
			}
			chi := summarise(got[k], func(k keys) float64 { return squares(k) * n / 100 * servers / 100 })
			sd := summarise(got[k], func(k keys) float64 { return math.Sqrt(squares(k) / servers) })
			text := fmt.Sprintf("%.3f-%.3f %%, sd %s, chi-square %s", low, high, sd.text(3), chi.text(0))
			if chi.mean > usual {
				text += " (more than chance)"
			}
			return text
		}
		paper, ours := func(k keys) shares { return k.paper }, func(k keys) shares { return k.ours }
		for i := range servers {
			share := summarise(got[k], func(k keys) float64 { return k.paper[i] })
			p.spread(kind.name, float64(i), share)
			p.add(kind.name, i, values(share, summarise(got[k], func(k keys) float64 { return k.ours[i] })))
		}
		w.out.tell(row{
			Figure: "Janus 6", Quantity: "share of a server of 20, 500,000 " + kind.name, Paper: "4.933-5.065 %, sd below 0.03", Simulated: describe(paper),
			Note: "4,096 partitions: " + describe(ours) + "; by chance sd 0.031 (partitions: 0.032), chi-square up to 36",
		})
	}
	w.out.plot(p)
	return nil
}

// processes starts servers, and routers that ask all of them. Each server has its own store, so
// the routers divide the partitions among the servers.
func (w *harness) processes(n [2]int) (routers, servers []*decide.Server, stop func(), err error) {
	var stops []func() error
	stop = func() {
		for _, end := range stops {
			_ = end()
		}
	}
	ask := []string{"--role=router", "--attempts=1000"}
	for i := range n[1] + n[0] {
		flags := ask
		if i < n[1] {
			flags = nil // --role=all, which also accepts rules
		}
		udp, web, _, end, err := w.admission(decide.Generous(), flags...)
		if err != nil {
			stop()
			return nil, nil, nil, err
		}
		if stops = append(stops, end); i < n[1] {
			servers, ask = append(servers, udp), append(ask, "--server="+udp.At)
		} else {
			routers = append(routers, web)
		}
	}
	return routers, servers, stop, nil
}

// decided is a round: the results of the routers, and the CPU time of the servers.
type decided struct {
	decide.Result // CPU is a router's for a decision
	servers       time.Duration
	took          float64 // s
}

// round sends requests to all routers in equal parts.
func (w *harness) round(routers, servers []*decide.Server, rate float64, length time.Duration) (d decided, err error) {
	cpu := func() (sum time.Duration) {
		for _, s := range servers {
			sum += s.CPU()
		}
		return sum
	}
	results, before, start := make([]decide.Result, len(routers)), cpu(), time.Now()
	var all errgroup.Group
	for i, to := range routers {
		all.Go(func() (err error) {
			results[i], err = decide.HTTP(to, decide.Load{Rate: rate / float64(len(routers)), Length: length, Connections: 16}, "/qos?key=%s")
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return d, err
	}
	d.servers, d.took, d.Latency = cpu()-before, time.Since(start).Seconds(), histogram.NewLatency()
	for _, r := range results {
		d.Answered += r.Answered
		d.CPU += r.CPU / time.Duration(len(results))
		d.Latency.Merge(r.Latency)
	}
	d.servers /= time.Duration(d.Answered)
	return d, nil
}

// decisions are the measured numbers of a round.
var decisions = []struct {
	name string
	of   func(decided) float64
}{
	{"router_us", func(d decided) float64 { return d.CPU.Seconds() * 1e6 }},
	{"server_us", func(d decided) float64 { return d.servers.Seconds() * 1e6 }},
	{"routers_%", func(d decided) float64 { return d.used(d.CPU) }},
	{"servers_%", func(d decided) float64 { return d.used(d.servers) }},
	{"answered/s", func(d decided) float64 { return float64(d.Answered) / d.took }},
	{"p50_us", func(d decided) float64 { return float64(d.Latency.Quantile(.5)) / 1e3 }},
	{"p90_us", func(d decided) float64 { return float64(d.Latency.Quantile(.9)) / 1e3 }},
	{"p99_us", func(d decided) float64 { return float64(d.Latency.Quantile(.99)) / 1e3 }},
	{"p99.9_us", func(d decided) float64 { return float64(d.Latency.Quantile(.999)) / 1e3 }},
}

// used returns the percentage of this machine's processors that a layer used.
func (d decided) used(cpu time.Duration) float64 {
	return 100 * cpu.Seconds() * float64(d.Answered) / d.took / float64(runtime.NumCPU())
}

// janusScale measures CPU for a decision with several routers and servers as processes, at rising
// rates, until less than 95 % are answered in time. More processors are modelled.
func janusScale(w *harness) error {
	length := time.Duration(w.seconds / 5 * float64(time.Second))
	p := panel{id: "janus7-12", title: "CPU for a decision, 2,000 requests/s for each process", xLabel: "processes of the layer", yLabel: "us", header: []string{"routers", "servers", "requests/s"}}
	for _, m := range decisions {
		p.header = append(p.header, m.name, m.name+"_sd")
	}
	var at, most []spread // with one router and one server; with the highest rate that was carried
	var layers [2][]string
	best, bestOf := 0.0, [2]int{}
	for _, n := range [][2]int{{1, 1}, {2, 1}, {4, 1}, {1, 2}, {1, 4}, {4, 4}} {
		routers, servers, stop, err := w.processes(n)
		if err != nil {
			return err
		}
		defer stop()
		for _, rate := range []float64{0, 1000, 2000, 4000, 8000, 16000, 32000, 64000} {
			rounds := make([]decided, min(w.runs, 5))
			for i := range rounds {
				if rounds[i], err = w.round(routers, servers, max(rate, 500), length); err != nil {
					return err
				}
			}
			if rate == 0 { // loads all keys
				continue
			}
			got := make([]spread, len(decisions))
			for i, m := range decisions {
				got[i] = summarise(rounds, m.of)
			}
			p.add(n[0], n[1], rate, values(got...))
			if got[4].mean < .95*rate {
				break
			}
			if rate > best {
				best, bestOf, most = rate, n, got
			}
			for layer, name := range []string{"routers", "servers"} {
				if n[1-layer] == 1 && rate == 2000*float64(n[layer]) {
					p.spread(name, float64(n[layer]), got[layer])
					layers[layer] = append(layers[layer], got[layer].text(0))
				}
			}
			if at == nil {
				at = got
			}
		}
		stop()
	}
	if w.out.plot(p); most == nil {
		return impossible{"this machine does not carry 1,000 requests/s"}
	}
	for layer, name := range []string{"routers with 1 server", "servers with 1 router"} {
		w.out.tell(row{Figure: []string{"Janus 7-9", "Janus 10-12"}[layer], Quantity: "CPU for a decision in 1, 2 and 4 " + name + ", 2,000 requests/s for each, us", Paper: []string{"linear, up to 8 routers", "linear"}[layer], Live: strings.Join(layers[layer], " / "), Note: "linear growth needs equal CPU"})
	}
	w.out.tell(
		row{Figure: "Janus 7-12", Quantity: "latency with 1 router and 1 server: median, P90, P99, P99.9, us", Live: at[5].text(0) + ", " + at[6].text(0) + ", " + at[7].text(0) + ", " + at[8].text(0), Note: "1,000 requests/s"},
		row{Figure: "Janus 7-12", Quantity: "most requests/s carried; routers, servers; % of the processors used by routers, servers", Paper: "in plots", Live: fmt.Sprintf("%.0f; %d, %d; %s, %s", best, bestOf[0], bestOf[1], most[2].text(0), most[3].text(0)), Note: fmt.Sprintf("%d processors, shared with the sender of the requests", runtime.NumCPU())},
		row{Figure: "Janus 7-12", Quantity: "requests/s of 10 nodes with 4 processors: routers, servers", Paper: "servers: above 100,000", Simulated: fmt.Sprintf("%.0f, %.0f", 40e6/most[0].mean, 40e6/most[1].mean), Note: "a model, not measured: processors over the CPU for a decision at the most requests/s carried"},
	)
	return nil
}

// janusApplication limits a web application with a delay of 25 ms by the paper's two rules.
func janusApplication(w *harness) error {
	const rate, length = 130, 60
	rules := []*srtmv1.AdmissionRule{{Key: "known", RefillMilli: 100_000, Capacity: 1000}, {Key: "*", RefillMilli: 10_000, Capacity: 100}}
	udp, _, _, stop, err := w.admission(rules)
	if err != nil {
		return err
	}
	defer stop()
	asks, err := client.New(client.Config{Servers: []string{udp.At}})
	if err != nil {
		return err
	}
	defer asks.Close()
	app := http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		time.Sleep(25 * time.Millisecond)
		_, _ = io.WriteString(rw, "photos")
	})
	at, end, err := w.serve(asks.Limit(func(r *http.Request) string { return r.URL.Query().Get("user") }, app))
	if err != nil {
		return err
	}
	defer end()

	names := []string{"", "known", "unknown"} // without QoS, then one per rule
	var admitted [3][length + 2]int
	served, refused := [3]*histogram.Latency{}, [3]*histogram.Latency{}
	var mu sync.Mutex // guards admitted, served and refused
	var asking sync.WaitGroup
	browser := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	defer browser.CloseIdleConnections()
	for k := range names {
		served[k], refused[k] = histogram.NewLatency(), histogram.NewLatency()
	}
	start := time.Now()
	for i := range rate * length {
		due := start.Add(time.Duration(i) * time.Second / rate)
		select {
		case <-time.After(time.Until(due)):
		case <-w.Done():
			asking.Wait()
			return w.Err()
		}
		for k, name := range names {
			asking.Go(func() {
				resp, err := browser.Get("http://" + at + "/?user=" + name)
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				mu.Lock()
				defer mu.Unlock()
				if resp.StatusCode == http.StatusOK {
					served[k].Record(time.Since(due))
					admitted[k][i/rate]++
				} else {
					refused[k].Record(time.Since(due))
				}
			})
		}
	}
	asking.Wait()
	p := panel{id: "janus13", title: "A web application under two rules, 130 requests/s", xLabel: "s", yLabel: "requests/s that it served", header: []string{"s", "(100, 1000)", "(10, 100)"}}
	last := [3]int{}
	for s := range length {
		for k := 1; k < 3; k++ {
			p.point(p.header[k], float64(s), float64(admitted[k][s]))
			if s >= length-10 {
				last[k] += admitted[k][s]
			}
		}
		p.add(s, admitted[1][s], admitted[2][s])
	}
	tails := func(of *histogram.Latency) string { return tails(of, time.Millisecond, "%.1f", .9, .99, .999) }
	w.out.plot(p)
	w.out.tell(
		row{Figure: "Janus 13(a)", Quantity: "served once the bucket is empty, rules (100, 1000) and (10, 100)", Paper: "100/s, 10/s", Live: fmt.Sprintf("%.1f/s, %.1f/s", float64(last[1])/10, float64(last[2])/10), Note: "mean of the last 10 s of 60"},
		row{Figure: "Janus 13(b)", Quantity: "P90, P99, P99.9 in ms: served without QoS; served with QoS; refused", Paper: "P90 27; 30; 3; others in a plot", Live: tails(served[0]) + "; " + tails(served[1]) + "; " + tails(refused[2]), Note: "the application waits 25 ms"},
	)
	return nil
}
