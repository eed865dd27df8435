package figures

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// groupSizes are the group sizes of figures 9 and 10 and of table 1.
var groupSizes = []float64{5, 10, 15, 20, 25, 30}

// table1 holds the paper's table 1 by group size: the duration of the search in seconds,
// and the final number of brokers.
var table1 = map[float64]struct {
	seconds float64
	k       int
}{5: {64, 1}, 10: {189, 2}, 15: {558, 3}, 20: {745, 4}, 25: {871, 5}, 30: {1058, 6}}

// marginQuantile is the quantile of the access delay from which b is profiled in figures 9
// to 11. The paper uses the SLO's quantile. Then waiting for tokens may use the whole 1 %
// that the SLO permits, and any processing delay exceeds the SLO. We give one half of the 1
// % to waiting and one half to processing.
const marginQuantile = 0.995

// synchronised lists the panels of figures 9 to 11.
var synchronised = []struct {
	panel   string
	process schedule.Process
}{{"a", schedule.Poisson}, {"b", schedule.Periodic}}

// grouped is the topic of figures 9 to 11: 1,000 publishers in batches of 10 messages.
func grouped(process schedule.Process, group, noiseMs float64, policy string, k int) scenario.Topic {
	return scenario.Topic{Load: scenario.Grouped(int(group), process, noiseMs), Policy: policy, K: k, Contract: scenario.Contract{ProfileQuantile: marginQuantile}}
}

// steady returns a harness with longer runs, since groups produce few bursts.
func (w *harness) steady() *harness {
	long := *w
	long.seconds, long.runs = 3*w.seconds, max(1, w.runs/2)
	return &long
}

// fewestThat is a curve of the topic on the fewest brokers that meet the SLO.
func (w *harness) fewestThat(topic func(x float64, policy string, k int) scenario.Topic, policy string) curve {
	return func(x float64, _ []*outcome) (*outcome, error) {
		return w.search(1, func(k int) scenario.Scenario { return w.scene(topic(x, policy, k)) })
	}
}

// correlation makes figures 9 and 10: groups that send at the same instants.
func correlation(w *harness) error {
	long := w.steady()
	for _, c := range synchronised {
		topic := func(g float64, policy string, k int) scenario.Topic { return grouped(c.process, g, 0, policy, k) }
		got, err := w.points(groupSizes, long.fewestThat(topic, placement.SRTM), long.fewestThat(topic, placement.MaxMin),
			func(g float64, before []*outcome) (*outcome, error) { // figure 10
				if srtm, own := before[0], before[1]; own.k == srtm.k {
					return own, nil
				}
				return long.repeat(long.scene(topic(g, placement.MaxMin, before[0].k)))
			},
			long.fewestThat(func(g float64, policy string, k int) scenario.Topic { // with the paper's profile
				t := topic(g, policy, k)
				t.Contract.ProfileQuantile = 0.99
				return t
			}, placement.SRTM))
		if err != nil {
			return err
		}
		srtm := line{name: "SRTM", y: p99Of, label: true, lead: named("srtm")}
		for _, f := range []struct {
			figure string
			beside line
		}{
			{"9", line{name: "Max-Min", of: 1, y: p99Of, label: true, lead: named("maxmin")}},
			{"10", line{name: "Max-Min over SRTM's brokers", of: 2, y: p99Of, label: true, lead: named("maxmin")}},
		} {
			p := latencies("fig"+f.figure+c.panel, fmt.Sprintf("Figure %s(%s): %s topic, synchronised groups", f.figure, c.panel, c.process), "publishers in a group", "group_size", "policy")
			w.out.plot(p.fill(groupSizes, 1, got, srtm, f.beside))
		}
		var ks, ratios []string
		for i, g := range groupSizes {
			ks = append(ks, fmt.Sprintf("%.0f→%d (paper's table 1: %d)", g, got[i][0].k, table1[g].k))
			ratios = append(ratios, fmt.Sprintf("%.0f→%.1f", g, got[i][2].p99.mean/got[i][0].p99.mean))
		}
		last := got[len(got)-1]
		best, own, same := last[0], last[1], last[2]
		w.out.tell(row{
			Figure: "9(" + c.panel + ")", Quantity: "SLO met at group size 30: SRTM, Max-Min", Paper: "yes; Max-Min “is forced to use fewer brokers”",
			Simulated: yes(best.met()) + ", " + yes(own.met()),
			Note:      fmt.Sprintf("p99 %s over %d brokers, %s over %d", best.p99.ms(), best.k, own.p99.ms(), own.k),
		}, row{
			Figure: "10(" + c.panel + ")", Quantity: "p99 at group size 30 over the same brokers: SRTM, Max-Min", Paper: "Max-Min's “even worse”",
			Simulated: best.p99.ms() + ", " + same.p99.ms(),
			Note:      fmt.Sprintf("k = %d; Max-Min's p99 over SRTM's by group size: %s", best.k, strings.Join(ratios, ", ")),
		}, row{
			Figure: "9(" + c.panel + ")", Quantity: "group sizes at which SRTM meets the SLO", Paper: "all",
			Simulated: fmt.Sprintf("%d of %d", count(got, 0, (*outcome).met), len(groupSizes)),
			Note: fmt.Sprintf("k: %s; with b profiled for the 99th percentile: %d of %d", strings.Join(ks, ", "),
				count(got, 3, (*outcome).met), len(groupSizes)),
		})
	}
	return nil
}

// noises are the intervals over which figure 11 spreads a group's messages, in ms.
var noises = []float64{0, 1, 2, 4, 8, 16}

// noise makes figure 11: groups of 25 that send at slightly different times.
func noise(w *harness) error {
	long := w.steady()
	for _, c := range synchronised {
		topic := func(ms float64, policy string, k int) scenario.Topic { return grouped(c.process, 25, ms, policy, k) }
		got, err := w.points(noises, long.fewestThat(topic, placement.SRTM), long.fewestThat(topic, placement.MaxMin))
		if err != nil {
			return err
		}
		p := latencies("fig11"+c.panel, fmt.Sprintf("Figure 11(%s): %s topic, groups of 25", c.panel, c.process), "interval over which a group sends, ms", "noise_ms", "policy")
		w.out.plot(p.fill(noises, 1, got,
			line{name: "SRTM", y: p99Of, label: true, lead: named("srtm")},
			line{name: "Max-Min", of: 1, y: p99Of, label: true, lead: named("maxmin")}))
		better := 0
		for _, outcomes := range got {
			if outcomes[0].p99.mean < outcomes[1].p99.mean {
				better++
			}
		}
		first, last := got[0], got[len(got)-1]
		w.out.tell(row{
			Figure: "11(" + c.panel + ")", Quantity: "intervals at which SRTM's p99 is below Max-Min's", Paper: "all small ones",
			Simulated: fmt.Sprintf("%d of %d", better, len(noises)),
		}, row{
			Figure: "11(" + c.panel + ")", Quantity: "brokers at 0 and at 16 ms: SRTM, Max-Min", Paper: "fewer with a larger interval",
			Simulated: fmt.Sprintf("%d → %d, %d → %d", first[0].k, last[0].k, first[1].k, last[1].k),
			Note:      fmt.Sprintf("p99 %s → %s, %s → %s", first[0].p99.ms(), last[0].p99.ms(), first[1].p99.ms(), last[1].p99.ms()),
		})
	}
	return nil
}

// fitMargin is the burst in table 1's contract beyond the profiled burst, as a fraction.
// Without the margin, groups that k does not divide could not be placed.
const fitMargin = 0.5

// asShipped are the settings of a cluster: it allows for hosts that stall, and looks at each report.
var asShipped = tuner.FastConfig{Stall: tuner.DefaultStall, Step: time.Second, Settle: time.Second}

// convergence makes table 1: the paper's search, ours as a cluster runs it, and ours without stalls and with ten looks a second.
func convergence(w *harness) error {
	modes := []struct {
		name, mode, title string
		fast              tuner.FastConfig
	}{
		{tuner.ModePaper, tuner.ModePaper, "paper's search, simulated", tuner.FastConfig{}},
		{tuner.ModeFast, tuner.ModeFast, "ours, simulated", asShipped},
		{tuner.ModeFast + ", no stalls", tuner.ModeFast, "ours without stalls, simulated", tuner.FastConfig{}},
	}
	fitted, err := seeded(w, len(groupSizes)*len(modes), func(i, seed int) (*scenario.FitResult, error) {
		t := grouped(schedule.Periodic, groupSizes[i/len(modes)], 0, "", 0)
		t.Contract = scenario.Contract{Margin: fitMargin, ProfileSeconds: 6 * w.seconds}
		s := w.scene(t)
		s.Seed = w.seedOf(seed)
		built, err := scenario.New(s)
		if err != nil {
			return nil, err
		}
		mode := modes[i%len(modes)]
		return scenario.Fit(built, scenario.FitOptions{
			Mode: mode.mode, Round: tuner.DefaultRound, Check: time.Duration(12 * w.seconds * float64(time.Second)),
			Fast: mode.fast,
		})
	})
	if err != nil {
		return err
	}
	p := panel{
		id: "table1", title: "Table 1: time to place a topic, periodic groups", xLabel: "publishers in a group", yLabel: "seconds", logY: true,
		header: []string{"group_size", "mode", "runs", "fitted", "seconds", "seconds_sd", "k_mean", "long_run_p99_ms", "slo_met", "paper_seconds", "paper_k"},
		series: []series{{name: "paper, reported"}},
	}
	for _, mode := range modes {
		p.series = append(p.series, series{name: mode.title})
	}
	for i, g := range groupSizes {
		paper := table1[g]
		p.series[0].add(g, paper.seconds, 0, strconv.Itoa(paper.k))
		text := make([]string, len(modes))
		for j, mode := range modes {
			found := fitted[len(modes)*i+j]
			var seconds, k, p99 []float64
			done, met := 0, 0
			for _, r := range found {
				seconds, k = append(seconds, r.Seconds), append(k, float64(r.K))
				if r.Fitted {
					done++
				}
				if c := r.Check; c != nil {
					p99 = append(p99, millis(c.P99))
					if c.Met {
						met++
					}
				}
			}
			s, ks := spreadOf(seconds), spreadOf(k)
			p.series[1+j].add(g, s.mean, s.sd, "")
			p.add(g, mode.name, len(found), done, s.mean, s.sd, ks.mean, spreadOf(p99).mean, met, paper.seconds, paper.k)
			text[j] = fmt.Sprintf("%.1f ± %.1f s (k %.1f, fitted %d of %d, SLO met %d of %d)", s.mean, s.sd, ks.mean, done, len(found), met, len(p99))
		}
		w.out.tell(row{
			Figure: "table 1", Quantity: fmt.Sprintf("time to place groups of %.0f", g), Paper: fmt.Sprintf("%.0f s (k %d)", paper.seconds, paper.k),
			Simulated: "ours " + text[1], Note: "the paper's search " + text[0] + "; ours without an allowance for stalls " + text[2],
		})
	}
	w.out.plot(p)
	return nil
}
