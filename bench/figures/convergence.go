package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/fitting"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// paperSeconds are the times of table 1, by group size.
var paperSeconds = map[int]float64{5: 64, 10: 189, 15: 558, 20: 745, 25: 871, 30: 1058}

// fitMargin is how much of its burst the contract of table 1 has more than was
// profiled: without it nothing is left for groups that k does not divide.
const fitMargin = 0.5

// convergence is table 1: how long it takes to place a bursty topic, by the
// paper's search and by ours.
func convergence(w *workshop) (*work, error) {
	modes := []string{fitting.ModePaper, fitting.ModeFast}
	runs := max(1, w.runs/2)
	fitted := make([][]*scenario.FitResult, len(groupSizes)*len(modes))
	err := w.each(len(fitted), func(i int) error {
		for seed := range runs {
			t := grouped(schedule.Periodic, groupSizes[i/2], 0, "", 0)
			t.Contract = scenario.Contract{Margin: fitMargin, ProfileSeconds: 6 * w.seconds}
			s := w.scene(t)
			s.Seed = w.seed*1_000_003 + uint64(seed) + 1
			built, err := build(s)
			if err != nil {
				return err
			}
			r, err := scenario.Fit(built, scenario.FitOptions{
				Mode: modes[i%2], Round: fitting.DefaultRound, Check: time.Duration(12 * w.seconds * float64(time.Second)),
			})
			if err != nil {
				return err
			}
			fitted[i] = append(fitted[i], r)
		}
		return w.Err()
	})
	if err != nil {
		return nil, err
	}
	p := panel{
		id: "table1", title: "Table 1: time to place a topic, periodic groups", xLabel: "publishers in a group", yLabel: "seconds", logY: true,
		header: []string{"group_size", "mode", "runs", "fitted", "seconds", "seconds_sd", "k_mean", "long_run_p99_ms", "slo_met", "paper_seconds", "paper_k"},
	}
	curves := []series{{name: "paper, reported"}, {name: "paper's search, simulated"}, {name: "ours, simulated"}}
	made := &work{}
	for i, g := range groupSizes {
		curves[0].add(float64(g), paperSeconds[g], 0, strconv.Itoa(paperK[g]))
		var text [2]string
		for j, mode := range modes {
			found := fitted[2*i+j]
			var seconds, k, p99 []float64
			done, met := 0, 0
			for _, r := range found {
				seconds, k = append(seconds, r.Seconds), append(k, float64(r.K))
				if r.Fitted {
					done++
				}
				if c := r.Check; c != nil {
					p99 = append(p99, millis(int64(c.P99)))
					if c.Met {
						met++
					}
				}
			}
			s, ks := spreadOf(seconds), spreadOf(k)
			curves[1+j].add(float64(g), s.mean, s.sd, "")
			p.rows = append(p.rows, []string{
				strconv.Itoa(g), mode, strconv.Itoa(len(found)), strconv.Itoa(done), number(s.mean), number(s.sd), number(ks.mean), number(spreadOf(p99).mean),
				strconv.Itoa(met), number(paperSeconds[g]), strconv.Itoa(paperK[g]),
			})
			text[j] = fmt.Sprintf("%.0f s", s.mean)
			if s.mean < 10 {
				text[j] = fmt.Sprintf("%.1f s", s.mean)
			}
			text[j] += fmt.Sprintf(" (k %.1f, placed %d of %d, SLO met %d of %d)", ks.mean, done, len(found), met, len(p99))
		}
		made.rows = append(made.rows, row{
			Figure: "table 1", Quantity: fmt.Sprintf("time to place groups of %d", g), Paper: fmt.Sprintf("%.0f s (k %d)", paperSeconds[g], paperK[g]),
			Simulated: "its search " + text[0], Note: "ours " + text[1],
		})
	}
	p.series = curves
	made.panels = []panel{p}
	return made, nil
}
