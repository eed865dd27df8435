package scenario_test

import (
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// p99ByKeys runs a topic by each kind of keys, and returns the p99 of its delivery
// latency, ms.
func p99ByKeys(t *testing.T, topic scenario.Topic, duration float64, seed uint64) map[string]float64 {
	t.Helper()
	late := map[string]float64{}
	for _, topic.Keys = range []string{scenario.Declared, scenario.Learned, scenario.Blind} {
		topic.Name = "t"
		built, err := scenario.New(scenario.Scenario{Seed: seed, Duration: duration, Brokers: []scenario.Broker{{ID: "b", Count: 6}}, Topics: []scenario.Topic{topic}})
		if err != nil {
			t.Fatal(err)
		}
		r, err := scenario.Run(built)
		if err != nil {
			t.Fatal(err)
		}
		late[topic.Keys] = float64(r.Topics[0].Delivery.P99) / 1e6
	}
	return late
}

// Groups that nobody declared are found in other traffic of the same publishers, and
// serve as well as those declared (figure 11).
func TestLearnedKeysServeAsWellAsDeclaredOnes(t *testing.T) {
	for _, process := range []schedule.Process{schedule.Poisson, schedule.Periodic} {
		for _, noise := range []float64{0, 4} {
			late := p99ByKeys(t, scenario.Topic{
				Load: scenario.Grouped(25, process, noise), K: 5,
				Contract: scenario.Contract{ProfileQuantile: 0.995}, Learning: scenario.Learning{Seconds: 60},
			}, 6, 0)
			if late["learned"] > 1.1*late["declared"] || late["learned"] > late["blind"]/5 {
				t.Errorf("%s, noise %v ms: p99, ms: %v", process, noise, late)
			}
		}
	}
}

// Few groups are found in the recorded traffic, and without them a placement is as good as
// its luck: so only means are compared.
func TestKeysLearnedFromAnotherHourOfARecording(t *testing.T) {
	file := filepath.Join(testkit.Shared(t), "traces", "odot_hires_detgroups_3x3h.csv.gz")
	learned, blind := 0.0, 0.0
	for seed := range uint64(4) {
		late := p99ByKeys(t, scenario.Topic{
			Load: scenario.Load{Trace: &scenario.Trace{File: file, Compress: 10, Copies: 5, From: 3600, To: 3840}}, K: 4,
			Learning: scenario.Learning{From: 1800, To: 3600},
		}, 20, seed)
		learned, blind = learned+late["learned"], blind+late["blind"]
	}
	if learned > 1.25*blind {
		t.Errorf("sum of p99, ms: learned %.0f, blind %.0f", learned, blind)
	}
}

func TestKeysAreOfAKind(t *testing.T) {
	_, err := scenario.New(scenario.Scenario{Duration: 1, Brokers: []scenario.Broker{{ID: "b"}}, Topics: []scenario.Topic{{
		Name: "t", Load: scenario.Load{Publishers: 1, Rate: 1}, Keys: "guessed",
	}}})
	if err == nil {
		t.Error("guessed keys are taken")
	}
}
