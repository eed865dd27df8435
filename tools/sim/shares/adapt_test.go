package shares

import (
	"reflect"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

// What a seller of contracts expects of the default rule: publishers that keep to
// their part do not notice what happens to others, and a move is noticed by none.
func TestTheSLOHoldsThroughTrouble(t *testing.T) {
	all := map[string]bool{"move": true}
	for _, sc := range Scenarios(1, 0.8, "move", "return") {
		delays, err := Run(sc, share.Default, 200)
		testkit.Must(t, err)
		o := sc.Outcome(delays)
		if o.P99 > 2*SLO || all[sc.Name] && (o.All > 2*SLO || o.Unaccepted > 0.001) {
			t.Errorf("%s: %+v", sc.Name, o)
		}
		if sc.Name == "move" {
			again, err := Run(sc, share.Default, 200)
			if err != nil || !reflect.DeepEqual(delays, again) {
				t.Errorf("a second run differs: %v", err)
			}
		}
	}
}

// After a shift of the traffic, rules that follow it serve again within its
// contract, and shares that do not move never do.
func TestSharesFollowAShift(t *testing.T) {
	for _, sc := range Scenarios(7, 0.8, "90/10") {
		for rule, follows := range map[string]bool{share.Static: false, share.Sqrt: true} {
			delays := testkit.Result(Run(sc, rule, 200)).Must(t)
			if o := sc.Outcome(delays); (o.Healed < 10*time.Second) != follows {
				t.Errorf("%s: %+v", rule, o)
			}
		}
	}
}
