package scenario_test

import (
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// p99ByKeys runs a topic with each kind of keys and returns the p99 of the delivery latency in ms.
func p99ByKeys(t *testing.T, topic scenario.Topic, duration float64, seed uint64) map[string]float64 {
	t.Helper()
	late := map[string]float64{}
	for _, topic.Keys = range []string{scenario.Declared, scenario.Learned, scenario.Blind} {
		topic.Name = "t"
		built, err := scenario.New(scenario.Scenario{Seed: seed, Duration: duration, Brokers: []scenario.Broker{{ID: "b", Count: 6}}, Topics: []scenario.Topic{topic}})
		testkit.Must(t, err)
		r := testkit.Result(scenario.Run(built)).Must(t)
		late[topic.Keys] = float64(r.Topics[0].Delivery.P99) / 1e6
	}
	return late
}

// Groups that are not declared are learned from other traffic of the same publishers. Learned groups serve as well as
// declared groups (figure 11), even if the number of brokers does not divide the groups.
func TestLearnedKeysServeAsWellAsDeclaredOnes(t *testing.T) {
	for _, process := range []schedule.Process{schedule.Poisson, schedule.Periodic} {
		for _, c := range []struct {
			noise float64
			k     int
		}{{1, 3}, {4, 5}} {
			for seed := uint64(1); seed < 3; seed++ {
				late := p99ByKeys(t, scenario.Topic{
					Load: scenario.Grouped(25, process, c.noise), K: c.k,
					Contract: scenario.Contract{ProfileQuantile: 0.995}, Learning: scenario.Learning{Seconds: 30},
				}, 6, seed)
				if late["learned"] > 1.1*late["declared"] || c.k == 5 && late["learned"] > late["blind"]/5 {
					t.Errorf("%s, %+v, seed %d: p99, ms: %v", process, c, seed, late)
				}
			}
		}
	}
}

// Recorded publishers are active together over seconds, and groups learned in one hour serve in the next hour. A
// placement without groups depends on luck, so the test compares sums.
func TestKeysLearnedFromAnotherHourOfARecording(t *testing.T) {
	file := filepath.Join(testkit.Shared(t), "traces", "odot_hires_detgroups_3x3h.csv.gz")
	learned, blind := 0.0, 0.0
	for seed := uint64(1); seed < 3; seed++ {
		late := p99ByKeys(t, scenario.Topic{
			Load: scenario.Load{Trace: &scenario.Trace{File: file, Compress: 10, Copies: 20, From: 3600, To: 3720}}, K: 6,
			Learning: scenario.Learning{From: 2400, To: 3600},
		}, 10, seed)
		learned, blind = learned+late["learned"], blind+late["blind"]
	}
	t.Logf("sum of p99, ms: learned %.0f, blind %.0f", learned, blind)
	if learned > 0.75*blind {
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
