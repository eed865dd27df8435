package figures

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// recording is recorded traffic, which the paper does not use. The recording is compressed
// in time and superposed until the load is as high as in the paper.
type recording struct {
	id, title, file  string
	compress         float64
	copies           int
	from, seconds    float64 // within the recording
	burstExplanation string
}

// recorded lists recordings of traffic detectors and pedestrian buttons.
var recorded = []recording{
	{"detectors", "vehicle detectors, 54 copies x 10", "odot_hires_detgroups_3x3h.csv.gz", 10, 54, 3600, 600, "10,384 msg/s in groups learned from another hour"},
	{"pedestrians", "pedestrian buttons and signals, 10 copies x 80", "odot_ped_911x24h.csv.gz", 80, 10, 50_400, 10_800, "9,650 msg/s, a group for each intersection"},
}

// path returns the path of a recording.
func (w *harness) path(t recording) (string, error) {
	file := filepath.Join(w.traces, t.file)
	if _, err := os.Stat(file); err != nil {
		return "", impossible{"the recorded traffic is not there: " + t.file}
	}
	return file, nil
}

// split is a scenario with a recording over k idle brokers.
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

// traces places recorded traffic on 1 to 6 idle brokers, once with correlated publishers
// apart and once blindly.
func traces(w *harness) error {
	half := *w
	half.runs = max(1, w.runs/2)
	for _, t := range recorded {
		file, err := w.path(t)
		if err != nil {
			return err
		}
		split := func(policy string) curve {
			return func(k float64, _ []*outcome) (*outcome, error) { return half.repeat(w.split(t, file, policy, int(k))) }
		}
		got, err := w.points(upTo(brokers), split(placement.SRTM), split(placement.MaxMin))
		if err != nil {
			return err
		}
		policy := func(name string) func(float64, *outcome) []string {
			return func(float64, *outcome) []string { return []string{name} }
		}
		w.out.plot(latencies("trace-"+t.id, "Recorded: "+t.title, "brokers", "policy").fill(upTo(brokers), 1, got,
			line{name: "SRTM", y: p99Of, lead: policy(placement.SRTM)},
			line{name: "Max-Min (blind)", of: 1, y: p99Of, lead: policy(placement.MaxMin)}))
		first, last := got[0], got[brokers-1]
		w.out.tell(row{
			Figure: "recorded: " + t.id, Quantity: "p99 over k = 6 brokers: SRTM, blind", Simulated: last[0].p99.ms() + ", " + last[1].p99.ms(),
			Note: fmt.Sprintf("%s; b = %.0f profiled; k = 1: %s", t.burstExplanation, first[0].burst.mean, first[0].p99.ms()),
		})
	}
	return nil
}
