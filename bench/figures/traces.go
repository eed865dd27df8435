package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// recorded is traffic that the paper's authors did not have: traffic detectors
// and pedestrian buttons, compressed in time and superposed until they load a
// broker as the paper's topics do.
var recorded = []struct {
	id, title, file  string
	compress         float64
	copies           int
	from, seconds    float64 // of the recording
	burstExplanation string
}{
	{"detectors", "vehicle detectors, 54 sites x 10", "odot_hires_detgroups_3x3h.csv.gz", 10, 54, 3600, 600, "10,000 msg/s in groups learned from another hour"},
	{"pedestrians", "pedestrian buttons, 10 states x 80", "odot_ped_911x24h.csv.gz", 80, 10, 50_400, 10_800, "9,650 msg/s, a group for each intersection"},
}

// traces spreads recorded traffic over 1 to 6 idle brokers, correlated
// publishers apart and blindly.
func traces(w *workshop) (*work, error) {
	made := &work{}
	policies := []string{placement.SRTM, placement.MaxMin}
	for _, t := range recorded {
		file := filepath.Join(w.traces, t.file)
		if _, err := os.Stat(file); err != nil {
			return nil, impossible{"the recorded traffic is not there: " + t.file}
		}
		one := *w
		one.runs = max(1, w.runs/5)
		outcomes := make([]*outcome, 2*brokers)
		err := w.each(len(outcomes), func(i int) (err error) {
			lasts := t.seconds / t.compress
			s := w.scene(scenario.Topic{
				Load: scenario.Load{Trace: &scenario.Trace{
					File: file, Compress: t.compress, Copies: t.copies, From: t.from, To: t.from + t.seconds,
				}},
				Policy: policies[i%2], K: 1 + i/2, Contract: scenario.Contract{ProfileSeconds: lasts},
			})
			s.Duration = lasts - s.Warmup
			outcomes[i], err = one.repeat(s)
			return err
		})
		if err != nil {
			return nil, err
		}
		p := panel{
			id: "trace-" + t.id, title: "Recorded: " + t.title, xLabel: "brokers", yLabel: "p99 of delivery latency, ms", logY: true, limit: sloMs,
			header: append([]string{"policy"}, columns...),
		}
		curves := [2]series{{name: "SRTM"}, {name: "Max-Min (blind)"}}
		for i, o := range outcomes {
			p.rows = append(p.rows, append([]string{policies[i%2]}, o.cells()...))
			curves[i%2].add(float64(o.k), o.p99.mean, o.p99.sd, "")
		}
		p.series = curves[:]
		made.panels = append(made.panels, p)
		one6, srtm, blind := outcomes[0], outcomes[2*brokers-2], outcomes[2*brokers-1]
		made.rows = append(made.rows, row{
			Figure: "recorded: " + t.id, Quantity: "p99 over k = 6 brokers: SRTM, blind", Simulated: ms(srtm.p99.mean) + ", " + ms(blind.p99.mean),
			Note: fmt.Sprintf("%s; b = %s profiled; k = 1: %s", t.burstExplanation, strconv.FormatFloat(one6.burst.mean, 'f', 0, 64), ms(one6.p99.mean)),
		})
	}
	return made, nil
}
