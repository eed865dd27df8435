package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tools/sim/scale"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// recording is traffic that the paper's authors did not have, compressed in time and
// superposed until it loads a broker as the paper's topics do.
type recording struct {
	id, title, file  string
	compress         float64
	copies           int
	from, seconds    float64 // of the recording
	burstExplanation string
}

// recorded are traffic detectors and pedestrian buttons.
var recorded = []recording{
	{"detectors", "vehicle detectors, 54 sites x 10", "odot_hires_detgroups_3x3h.csv.gz", 10, 54, 3600, 600, "10,000 msg/s in groups learned from another hour"},
	{"pedestrians", "pedestrian buttons, 10 states x 80", "odot_ped_911x24h.csv.gz", 80, 10, 50_400, 10_800, "9,650 msg/s, a group for each intersection"},
}

// path is that of the recording.
func (w *harness) path(t recording) (string, error) {
	file := filepath.Join(w.traces, t.file)
	if _, err := os.Stat(file); err != nil {
		return "", impossible{"the recorded traffic is not there: " + t.file}
	}
	return file, nil
}

// split is a recording over k idle brokers.
func (w *harness) split(t recording, file, policy string, k int) scenario.Scenario {
	lasts := t.seconds / t.compress
	s := w.scene(scenario.Topic{
		Load: scenario.Load{Trace: &scenario.Trace{
			File: file, Compress: t.compress, Copies: t.copies, From: t.from, To: t.from + t.seconds,
		}},
		Policy: policy, K: k, Contract: scenario.Contract{ProfileSeconds: lasts},
	})
	s.Duration = lasts - s.Warmup
	return s
}

// traces spreads recorded traffic over 1 to 6 idle brokers, correlated
// publishers apart and blindly.
func traces(w *harness) error {
	one := *w
	one.runs = max(1, w.runs/5)
	for _, t := range recorded {
		file, err := w.path(t)
		if err != nil {
			return err
		}
		split := func(policy string) curve {
			return func(k float64, _ []*outcome) (*outcome, error) { return one.repeat(w.split(t, file, policy, int(k))) }
		}
		got, err := w.points(upTo(brokers), split(placement.SRTM), split(placement.MaxMin))
		if err != nil {
			return err
		}
		policy := func(name string) func(float64, *outcome) []string {
			return func(float64, *outcome) []string { return []string{name} }
		}
		w.plot(latencies("trace-"+t.id, "Recorded: "+t.title, "brokers", "policy").fill(upTo(brokers), 1, got,
			line{name: "SRTM", y: p99Of, lead: policy(placement.SRTM)},
			line{name: "Max-Min (blind)", of: 1, y: p99Of, lead: policy(placement.MaxMin)}))
		first, last := got[0], got[brokers-1]
		w.tell(row{
			Figure: "recorded: " + t.id, Quantity: "p99 over k = 6 brokers: SRTM, blind", Simulated: ms(last[0].p99.mean) + ", " + ms(last[1].p99.mean),
			Note: fmt.Sprintf("%s; b = %.0f profiled; k = 1: %s", t.burstExplanation, first[0].burst.mean, ms(first[0].p99.mean)),
		})
	}
	return nil
}

// scaleStudy is what drlsim scale measures, in four sizes.
func scaleStudy(w *harness) error {
	p := panel{
		id: "scale-time", title: "The control plane's own cost", xLabel: "brokers (100 topics, 10,000 publishers each)", yLabel: "time, ms", logX: true, logY: true,
		header: []string{
			"brokers", "topics", "publishers", "widest", "place_p50_us", "place_max_us", "commit_p50_us", "grant_p50_us", "resolve_p50_us",
			"retune_all_p50_us", "rejoin_p50_us", "all_up_s", "catalog_bytes", "ledger_bytes", "messages_per_topic", "reports_per_s", "report_lines_per_s", "retuning_per_s",
		},
	}
	var last scale.Report
	for size := 1; size <= 1000; size *= 10 {
		if err := w.Err(); err != nil {
			return err
		}
		began := time.Now()
		r, err := scale.Run(scale.Config{
			Size:   scale.Size{Brokers: size, Topics: 100 * size, Publishers: 10_000 * size},
			Policy: placement.SRTM, Rule: share.Proportional, Mcap: 64_000, Load: 0.7, GroupSize: 25, Ticks: 5, Seed: w.seed,
		}, scale.Meter{
			Now: func() mono.Time { return mono.Time(time.Since(began)) },
			Heap: func() uint64 {
				var m runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			},
			Progress: w.progress,
		})
		if err != nil {
			return err
		}
		us := func(d time.Duration) float64 { return float64(d) / 1e3 }
		p.add(r.Brokers, r.Topics, r.Publishers, r.Widest, us(r.Place.P50), us(r.Place.Max), us(r.Commit.P50), us(r.Grant.P50), us(r.Resolve.P50), us(r.Tick.P50), us(r.Rejoin.P50), r.Up().Seconds(),
			r.CatalogBytes, r.LedgerBytes, r.Messages.PerTopic, r.Messages.ReportsPerSecond, r.Messages.EntriesPerSecond, r.Messages.GrantsPerSecond)
		at := float64(r.Brokers)
		p.point("place a topic, median", at, millis(r.Place.P50))
		p.point("place the largest topic", at, millis(r.Place.Max))
		p.point("a broker comes back", at, millis(r.Rejoin.P50))
		p.point("retune all shares", at, millis(r.Tick.P50))
		last = r
	}
	w.plot(p)
	w.tell(row{
		Figure: "scale", Quantity: "1,000 brokers, 100,000 topics, 10,000,000 publishers",
		Simulated: fmt.Sprintf("all placed in %.0f s, %.2f GB, %.0f gRPC messages/s", last.Up().Seconds(),
			float64(last.CatalogBytes+last.LedgerBytes)/1e9, last.Messages.PerSecond()),
		Note: fmt.Sprintf("a topic: %s to place (median), %s the largest, over %d brokers", ms(millis(last.Place.P50)), ms(millis(last.Place.Max)), last.Widest),
	})
	return nil
}
