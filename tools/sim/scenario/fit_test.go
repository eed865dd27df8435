package scenario_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

func fit(t *testing.T, topic string, o scenario.FitOptions) *scenario.FitResult {
	t.Helper()
	s, err := scenario.Read(strings.NewReader(`{"duration_s":60,"brokers":[{"id":"b","count":6}],"topics":[{"name":"t",` + topic + `}]}`))
	testkit.Must(t, err)
	built := testkit.Result(scenario.Build(s)).Must(t)
	return testkit.Result(scenario.Fit(built, o)).Must(t)
}

// A row of the paper's Table 1: for groups of 15 the paper reports 558 s and three brokers.
func TestARowOfTable1(t *testing.T) {
	const topic = `"publishers":1000,"rate":10,"batch":10,"group_size":15,"sync":true,"process":"periodic","contract":{"margin":0.5}`
	paper := fit(t, topic, scenario.FitOptions{Mode: tuner.ModePaper, Round: time.Minute, Check: 10 * time.Second})
	fast := fit(t, topic, scenario.FitOptions{Mode: tuner.ModeFast, Check: 10 * time.Second})
	for _, r := range []*scenario.FitResult{paper, fast} {
		if !r.Fitted || r.Unplaced != 0 || r.K < 2 || r.K > 4 || r.Rounds[0].K != 1 || r.Check == nil || !r.Check.Met || r.Check.Messages != 100_000 {
			t.Errorf("%s: %+v, check %+v", r.Mode, r, r.Check)
		}
	}
	rounds := 0
	for _, n := range paper.Rounds {
		rounds += n.Rounds
	}
	if paper.Seconds != float64(60*rounds) || rounds < 4 {
		t.Errorf("paper: %d rounds in %v s", rounds, paper.Seconds)
	}
	if fast.Seconds > 10 || fast.K > paper.K || fast.Placed <= 0 || fast.Placed > 2 {
		t.Errorf("fast was placed after %v s and done after %v s, on %d brokers; paper takes %d", fast.Placed, fast.Seconds, fast.K, paper.K)
	}
}

func TestTheSameSeedGivesTheSameFit(t *testing.T) {
	const topic = `"publishers":300,"rate":10,"batch":10,"group_size":25,"sync":true,"policy":"maxmin","contract":{"margin":1}`
	var steps [2][]string
	for i := range steps {
		for _, mode := range []string{tuner.ModeFast, tuner.ModePaper} {
			r := fit(t, topic, scenario.FitOptions{Mode: mode, Round: 5 * time.Second, Progress: func(at time.Duration, step string) {
				steps[i] = append(steps[i], fmt.Sprint(at, step))
			}})
			steps[i] = append(steps[i], fmt.Sprintf("%+v", *r))
		}
	}
	if !reflect.DeepEqual(steps[0], steps[1]) || len(steps[0]) < 4 {
		t.Errorf("%v\n%v", steps[0], steps[1])
	}
}

func TestUnknownMode(t *testing.T) {
	s, err := scenario.Read(strings.NewReader(`{"duration_s":1,"brokers":[{"id":"b"}],"topics":[{"name":"t","publishers":1,"rate":1}]}`))
	testkit.Must(t, err)
	built := testkit.Result(scenario.Build(s)).Must(t)
	_, err = scenario.Fit(built, scenario.FitOptions{Mode: "slow"})
	testkit.ErrorHas(t, err, `"slow"`)
}
