package figures

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/obs"
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

func micros(d time.Duration) string { return fmt.Sprintf("%.0f us", float64(d)/1e3) }

// janusBalancer sends requests to a router directly and behind HAProxy, 1,000 per second
// like the paper.
func janusBalancer(w *harness) error {
	_, web, dir, stop, err := w.admission(decide.Generous())
	if err != nil {
		return err
	}
	defer stop()
	direct, err := decide.HTTP(web, decide.Load{Rate: 1000, Length: 10 * time.Second, Connections: 16}, "/qos?key=%s")
	if err != nil {
		return err
	}
	w.out.tell(row{
		Figure: "Janus 5", Quantity: "latency of /qos, asked directly: mean (live: median), P90", Paper: "1140 us, 1410 us",
		Live: micros(direct.Latency.Quantile(.5)) + ", " + micros(direct.Latency.Quantile(.9)), Note: "the paper: between EC2 instances; here on loopback",
	})
	proxied := row{Figure: "Janus 5", Quantity: "the same behind a gateway", Paper: "1650 us, 2370 us", Note: "not made: HAProxy is not installed"}
	proxy, err := decide.HAProxy(dir, decide.HAProxyBefore(web.At))
	switch {
	case errors.Is(err, host.ErrAbsent):
	case err != nil:
		return err
	default:
		defer proxy.Stop()
		behind, err := decide.HTTP(proxy, decide.Load{Rate: 1000, Length: 10 * time.Second, Connections: 16}, "/qos?key=%s")
		if err != nil {
			return err
		}
		proxied.Live, proxied.Note = micros(behind.Latency.Quantile(.5))+", "+micros(behind.Latency.Quantile(.9)), "HAProxy, one thread"
	}
	w.out.tell(proxied)
	return nil
}

// janusSpread counts keys of the paper's four kinds on 20 servers, by the paper's rule and
// by ours, with w.runs seeds, at most 5. For random keys, the statistic has the chi-square
// distribution with 19 degrees of freedom. Sequential numbers go on from seed to seed.
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
	p := panel{id: "janus6", title: "Keys of 20 servers", xLabel: "server", yLabel: "percent of the keys", header: []string{"kind", "server", "paper's rule %", "paper's rule_sd", "ours %", "ours_sd"}}
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
			Note: "4,096 partitions: " + describe(ours) + "; by chance sd 0.031, chi-square up to 36",
		})
	}
	w.out.plot(p)
	return nil
}

// janusScale measures the cost of a decision in each layer, with one process per layer. It
// models the decisions per second by the number of processors.
func janusScale(w *harness) error {
	udp, _, dir, stop, err := w.admission(decide.Generous(), "--role=all")
	if err != nil {
		return err
	}
	defer stop()
	bin, err := filepath.Abs(w.bin)
	if err != nil {
		return err
	}
	_, router, err := decide.Admission(w, bin, dir, decide.Generous(), "--role=router", "--server", udp.At, "--attempts=1000")
	if err != nil {
		return err
	}
	defer router.Stop()
	if _, err := decide.HTTP(router, decide.Load{Rate: 1000, Length: 2 * time.Second, Connections: 16}, "/qos?key=%s"); err != nil { // loads all keys
		return err
	}
	routed, err := decide.HTTP(router, decide.Load{Rate: 2000, Length: 10 * time.Second, Connections: 16}, "/qos?key=%s")
	if err != nil {
		return err
	}
	decided, err := decide.UDP(udp, decide.Load{Rate: 5000, Length: 10 * time.Second, Connections: 1}, false)
	if err != nil {
		return err
	}
	p := panel{id: "janus7-12", title: "Requests that processors decide, modelled", xLabel: "processors of the layer", yLabel: "requests/s", header: []string{"processors", "routers, requests/s", "servers, requests/s"}}
	for _, n := range []float64{1, 2, 4, 8, 16, 32, 40} {
		a, b := n/routed.CPU.Seconds(), n/decided.CPU.Seconds()
		p.point("routers", n, a)
		p.point("servers", n, b)
		p.add(n, a, b)
	}
	w.out.plot(p)
	w.out.tell(
		row{Figure: "Janus 7-9", Quantity: "a router's CPU for a decision; requests/s of 10 nodes with 4 processors", Paper: "linear", Simulated: fmt.Sprintf("%.0f/s", 40/routed.CPU.Seconds()), Live: micros(routed.CPU), Note: "modelled: processors over the CPU time measured at 2,000/s, while no other layer is the bottleneck"},
		row{Figure: "Janus 10-12", Quantity: "a server's CPU for a decision; requests/s of 10 nodes with 4 processors", Paper: "linear; above 100,000/s", Simulated: fmt.Sprintf("%.0f/s", 40/decided.CPU.Seconds()), Live: micros(decided.CPU), Note: "modelled likewise, at 5,000/s"},
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
	served, refused := [3]*obs.Latency{}, [3]*obs.Latency{}
	var mu sync.Mutex // guards admitted, served and refused
	var asking sync.WaitGroup
	browser := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	defer browser.CloseIdleConnections()
	for k := range names {
		served[k], refused[k] = obs.NewLatency(), obs.NewLatency()
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
	tenths := func(of *obs.Latency) string { return fmt.Sprintf("%.1f ms", float64(of.Quantile(.9))/1e6) }
	w.out.plot(p)
	w.out.tell(
		row{Figure: "Janus 13(a)", Quantity: "served once the bucket is empty, rules (100, 1000) and (10, 100)", Paper: "100/s, 10/s", Live: fmt.Sprintf("%.1f/s, %.1f/s", float64(last[1])/10, float64(last[2])/10), Note: "mean of the last 10 s of 60"},
		row{Figure: "Janus 13(b)", Quantity: "P90 of what is served without QoS, with it, and of refusals", Paper: "27 ms, 30 ms, 3 ms", Live: tenths(served[0]) + ", " + tenths(served[1]) + ", " + tenths(refused[2]), Note: "the application waits 25 ms"},
	)
	return nil
}
