package tuner

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

var config = RebalanceConfig{Sustained: 20 * time.Second, Cooldown: 30 * time.Second, MaxPart: DefaultMaxPart}

// topic is 200 publishers of 1 msg/s in two groups, on b1 and b2; b3 is free.
func topic(t testing.TB) Suspect {
	d := placement.Demand{Topic: "t", Rate: 200, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 100, Rate: 1}, {Key: "h", Count: 100, Rate: 1}}}
	brokers := []placement.Broker{{ID: "b1", Mcap: 150}, {ID: "b2", Mcap: 150}}
	p := testkit.Result(placement.Place(placement.SRTM, brokers, d, nil)).Must(t)
	for i := range brokers {
		brokers[i].Allocated = 100
	}
	return Suspect{
		Quantile: 0.99, Plan: p, Demand: d, Brokers: append(brokers, placement.Broker{ID: "b3", Mcap: 1000}),
		Loads: []Load{{Broker: "b1", Delivered: 1000}, {Broker: "b2", Delivered: 1000}},
	}
}

// atSecond is so many seconds after the beginning.
func atSecond(seconds int) mono.Time { return mono.Time(seconds) * mono.Time(time.Second) }

// run decides every second, from the second first on, and returns the moves.
func (w *Watch) run(t *Suspect, first, seconds int, change func(second int, t *Suspect)) (at []int, moves []Move) {
	for s := first; s < first+seconds; s++ {
		if change != nil {
			change(s, t)
		}
		if m, v := w.Decide(atSecond(s), config, *t); v == Overloaded {
			at, moves = append(at, s), append(moves, m)
		}
	}
	return at, moves
}

func TestAnOverloadThatLasts(t *testing.T) {
	var w Watch
	suspected := topic(t)
	suspected.Loads[0].Exceeded = 30
	at, moves := w.run(&suspected, 0, 100, nil)
	// After the first, the overload has to last anew, and the cooldown to end.
	if !slices.Equal(at, []int{20, 50, 80}) {
		t.Fatalf("moves at %v", at)
	}
	m := moves[0]
	if m.From != "b1" || m.To != "b2" || len(m.Publishers) != 10 {
		t.Errorf("moved %+v", m)
	}
	groups := map[string]int{}
	publishers := suspected.Demand.Expand()
	for _, i := range m.Publishers {
		groups[publishers[i].Key]++
	}
	if !reflect.DeepEqual(groups, map[string]int{"g": 5, "h": 5}) {
		t.Errorf("of the groups went %v", groups)
	}
}

func TestWhatMovesNothing(t *testing.T) {
	for name, change := range map[string]func(second int, t *Suspect){
		"all brokers are healthy":         func(_ int, t *Suspect) { t.Loads[0].Exceeded = 5 },
		"within the budget, but not well": func(_ int, t *Suspect) { t.Loads[0].Exceeded = 9 },
		"the bucket's fault":              func(_ int, t *Suspect) { t.Loads[0].Exceeded, t.Loads[0].Waited = 300, 295 },
		"too little to judge":             func(_ int, t *Suspect) { t.Loads[0].Delivered, t.Loads[0].Exceeded = 99, 50 },
		"an overload that comes and goes": func(s int, t *Suspect) { t.Loads[0].Exceeded = uint64(s / 15 % 2 * 50) },
		"no broker has room or is healthy": func(_ int, t *Suspect) {
			t.Loads[0].Exceeded, t.Brokers[1].Allocated, t.Brokers[2].Allocated = 50, 150, 1000
		},
		"others are overloaded, too":        func(_ int, t *Suspect) { t.Loads[0].Exceeded, t.Loads[1].Exceeded, t.Brokers = 50, 8, t.Brokers[:2] },
		"no token for one more broker":      func(_ int, t *Suspect) { t.Loads[0].Exceeded, t.Brokers[1].Allocated, t.Demand.Burst = 50, 150, 2 },
		"a broker that is no member (late)": func(_ int, t *Suspect) { t.Loads[0] = Load{Broker: "b9", Delivered: 1000, Exceeded: 50} },
	} {
		var w Watch
		suspected := topic(t)
		if at, moves := w.run(&suspected, 0, 200, change); len(moves) > 0 {
			t.Errorf("%s: %+v at %v", name, moves, at)
		}
	}
}

// Hovering between calm and the budget does not end a violation that has begun.
func TestHysteresis(t *testing.T) {
	var w Watch
	suspected := topic(t)
	at, _ := w.run(&suspected, 0, 25, func(s int, t *Suspect) {
		t.Loads[0].Exceeded = 8
		if s == 0 || s == 20 {
			t.Loads[0].Exceeded = 20
		}
	})
	testkit.EqualSlices(t, at, []int{20}, "moves at")
}

func TestTheNextBrokerWhereMembersAreFull(t *testing.T) {
	var w Watch
	suspected := topic(t)
	suspected.Loads[0].Exceeded, suspected.Brokers[1].Allocated = 50, 145
	if _, moves := w.run(&suspected, 0, 30, nil); len(moves) != 1 || moves[0].To != "b3" {
		t.Errorf("%+v", moves)
	}
}

// Two brokers are at their limit: moved publishers do not come back while this could be flapping.
func TestNothingComesBackSoon(t *testing.T) {
	var w Watch
	suspected := topic(t)
	suspected.Brokers = suspected.Brokers[:2]
	at, moves := w.run(&suspected, 0, 300, func(s int, t *Suspect) {
		t.Loads[0].Exceeded, t.Loads[1].Exceeded = 50, 0
		if s > 25 {
			t.Loads[0].Exceeded, t.Loads[1].Exceeded = 0, 50
		}
	})
	testkit.Equal(t, len(moves), 1, "%+v at %v", moves, at)
}

// Whatever is measured, a move takes publishers of its source to another broker that has room for
// them. It never exceeds the allowed part, and never falls within the cooldown.
func TestMoveStaysWithinRoomAndCooldown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w Watch
		d := placement.Demand{Topic: "t", Burst: rapid.Int64Range(3, 6).Draw(t, "burst")}
		for g := range 3 {
			d.Groups = append(d.Groups, placement.Group{
				Key: fmt.Sprint("g", g), Count: rapid.IntRange(1, 60).Draw(t, "count"), Rate: float64(rapid.IntRange(1, 4).Draw(t, "rate")),
			})
		}
		for _, p := range d.Expand() {
			d.Rate += int64(p.Rate)
		}
		var brokers []placement.Broker
		for i := range 4 {
			brokers = append(brokers, placement.Broker{ID: fmt.Sprint("b", i), Mcap: rapid.Int64Range(100, 300).Draw(t, "mcap")})
		}
		plan, err := placement.Place(placement.SRTM, brokers, d, nil)
		if err != nil {
			return
		}
		for i := range brokers {
			for _, q := range plan.Quotas {
				if q.Broker == brokers[i].ID {
					brokers[i].Allocated = q.Rate
				}
			}
		}
		publishers := d.Expand()
		last := -1000
		for s := range 200 {
			suspected := Suspect{Quantile: 0.9, Plan: plan, Demand: d, Brokers: brokers}
			for _, q := range plan.Quotas {
				x := uint64(0)
				if s/40%2 == 0 {
					x = rapid.Uint64Range(0, 300).Draw(t, "exceeded")
				}
				suspected.Loads = append(suspected.Loads, Load{Broker: q.Broker, Delivered: 1000, Exceeded: x, Waited: x / 3})
			}
			m, v := w.Decide(atSecond(s), config, suspected)
			if v != Overloaded {
				continue
			}
			if s-last < 30 || m.From == m.To || len(m.Publishers) > max(1, len(publishers)/20) || len(m.Publishers) == 0 {
				t.Fatalf("%+v at %d after %d", m, s, last)
			}
			last = s
			at := slices.IndexFunc(plan.Quotas, func(q placement.Quota) bool { return q.Broker == m.From })
			rate := 0.0
			for _, i := range m.Publishers {
				if !slices.Contains(plan.Quotas[at].Publishers, i) {
					t.Fatalf("publisher %d is not on %s", i, m.From)
				}
				rate += publishers[i].Rate
			}
			to := slices.IndexFunc(brokers, func(b placement.Broker) bool { return b.ID == m.To })
			if to < 0 || float64(brokers[to].Mcap-brokers[to].Allocated) < rate {
				t.Fatalf("no room on %s for %v", m.To, rate)
			}
			if _, err := placement.Shift(plan, d, m.Publishers, m.To); err != nil {
				t.Fatalf("%+v cannot be carried out: %v", m, err)
			}
		}
	})
}

func TestValidate(t *testing.T) {
	testkit.NoError(t, config.Validate())
	for _, c := range []RebalanceConfig{{}, {Sustained: 1, Cooldown: 1, MaxPart: 1.1}, {Sustained: 1, Cooldown: -1, MaxPart: 0.1}, {Sustained: 1, Cooldown: 1, MaxPart: 0.1, Capture: time.Hour}} {
		if c.Validate() == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}
