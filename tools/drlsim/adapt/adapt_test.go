package adapt

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// After a shift of the traffic, rules that follow it serve again within its
// contract, and shares that do not move never do.
func TestSharesFollowAShift(t *testing.T) {
	s := func(seconds float64) stamp.Mono { return stamp.Mono(seconds * 1e9) }
	rng := rand.New(rand.NewPCG(7, 0))
	sc := Scenario{
		Brokers: 2, Contract: tokenbucket.Share{Rate: tokenbucket.PerSecond(1100), Burst: 40},
		Arrivals: append(Poisson(rng, 0, s(20), 1000, 1, 1), Poisson(rng, s(20), s(50), 1000, 9, 1)...),
		Phases:   []Phase{{"before", s(10), s(20)}, {"after", s(35), s(50)}},
	}
	for rule, follows := range map[string]bool{share.Static: false, share.Robust: true, share.Sqrt: true} {
		got, err := Run(sc, rule)
		if err != nil {
			t.Fatal(err)
		}
		if p := got[1].Pooled; (p < 100*time.Millisecond) != follows {
			t.Errorf("%s: p99 %v after the shift", rule, p)
		}
		again, err := Run(sc, rule)
		if err != nil || !reflect.DeepEqual(got, again) {
			t.Errorf("%s: a second run differs: %v, %v", rule, again, err)
		}
	}
}
