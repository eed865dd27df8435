package share

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func atTime(d time.Duration) mono.Time { return mono.Time(d) }

func TestWindow(t *testing.T) {
	var w Window
	var l Load
	if w.Fill(&l, 0); l != (Load{}) {
		t.Errorf("empty: %+v", l)
	}
	for i, s := range []Step{
		{Length: time.Second, Offered: 100, MaxBacklog: 9, Backlog: 1},
		{Length: time.Second, Offered: 20, MaxBacklog: 4, Backlog: 4},
		{Length: 2 * time.Second, Offered: 30, MaxBacklog: 3, Backlog: 2}, // a long step counts for its length
	} {
		s.At = atTime(time.Duration(i+1) * time.Second)
		w.Add(s)
	}
	for _, test := range []struct {
		from                time.Duration
		rate                float64
		maxBacklog, backlog int64
	}{
		{0, 150.0 / 4, 9, 2},
		{time.Second, 150.0 / 4, 9, 2}, // the first is exactly on the edge
		{time.Second + 1, 50.0 / 3, 4, 2},
		{3 * time.Second, 15, 3, 2},
		{4 * time.Second, 0, 0, 0},
	} {
		if w.Fill(&l, atTime(test.from)); l.Rate != test.rate || l.MaxBacklog != test.maxBacklog || l.Backlog != test.backlog {
			t.Errorf("from %v: %+v, want %+v", test.from, l, test)
		}
	}
}

func TestWindowIsBounded(t *testing.T) {
	var w Window
	for i := range 10 * maxSteps {
		w.Add(Step{At: atTime(time.Duration(i)), Length: time.Second, Offered: uint64(i)})
	}
	if len(w.steps) != maxSteps || w.steps[0].Offered != 9*maxSteps {
		t.Errorf("%d steps are kept, the oldest is %d", len(w.steps), w.steps[0].Offered)
	}
}

// fill returns the load of steps of a second.
func fill(offered ...uint64) (l Load) {
	var w Window
	for i, n := range offered {
		w.Add(Step{At: atTime(time.Duration(i)), Length: time.Second, Offered: n})
	}
	w.Fill(&l, 0)
	return l
}

func TestARateThatJumpsIsFollowedAtOnce(t *testing.T) {
	for _, test := range []struct {
		name    string
		offered []uint64
		recent  float64
	}{
		{"steady", []uint64{5000, 5070, 4930, 5010}, 5002.5},
		{"up", []uint64{5000, 5070, 4930, 5010, 9000}, 9000},
		{"up and on", []uint64{5000, 5070, 4930, 5010, 9000, 9100}, 9100}, // 9,000 includes messages from before
		{"up, and on and on", []uint64{5000, 5070, 4930, 5010, 9000, 9100, 9200}, 9150},
		{"down", []uint64{5000, 5070, 4930, 5010, 0}, 0},
		{"from nothing", []uint64{0, 0, 0, 100}, 100},
		{"few messages are no jump", []uint64{2, 0, 3, 1, 4}, 2},
		{"bursts are not", []uint64{100, 1000, 50, 900, 120, 1100}, 545},
	} {
		testkit.Equal(t, fill(test.offered...).Recent, test.recent, "%s", test.name)
	}
}

func TestDispersion(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	poisson, bursts := sums{}, sums{}
	for range 4000 {
		n := uint64(0)
		for e := rng.ExpFloat64(); e < 50; e += rng.ExpFloat64() {
			n++
		}
		poisson.add(Step{Length: time.Second, Offered: n})
		bursts.add(Step{Length: time.Second, Offered: 10 * n})
	}
	if d := poisson.dispersion(); math.Abs(d-1) > 0.1 {
		t.Errorf("Poisson arrivals: %v, want 1", d)
	}
	if d := bursts.dispersion(); math.Abs(d-10) > 1 {
		t.Errorf("ten at a time: %v, want 10", d)
	}
	if l := fill(5, 6); l.Dispersion != 0 {
		t.Errorf("of two steps: %v, want none", l.Dispersion)
	}
}

func TestDiffers(t *testing.T) {
	s := func(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: rate, Burst: burst}
	}
	have := []Assigned{{"b1", s(1000, 100)}, {"b2", s(1000, 100)}, {"b3", tokenbucket.Share{}}}
	for _, test := range []struct {
		name    string
		want    []Assigned
		differs bool
	}{
		{"the same", []Assigned{{"b1", s(1000, 100)}, {"b2", s(1000, 100)}}, false},
		{"within the band", []Assigned{{"b1", s(1050, 95)}, {"b2", s(950, 105)}}, false},
		{"a rate outside", []Assigned{{"b1", s(1051, 100)}, {"b2", s(949, 100)}}, true},
		{"a broker left out", []Assigned{{"b1", s(1000, 100)}}, true},
	} {
		testkit.Equal(t, Differs(have, test.want), test.differs, "%s", test.name)
	}
}

// Under Robust and Sqrt, a broker that needs exactly its share gets the share. In sum and floors both
// rules behave as the others (TestSplitKeepsItsPromises).
func TestNeedsAreMet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := tokenbucket.Share{Rate: 1_000_000, Burst: 100}
		var loads []Load
		left := 0.85 * total.Rate.PerSecond()
		k := rapid.IntRange(1, 5).Draw(t, "brokers")
		for i := range k {
			l := Load{Broker: string(rune('a' + i)), Publishers: 1}
			l.Recent = rapid.Float64Range(0, left).Draw(t, "rate")
			l.Dispersion = rapid.Float64Range(0, 50).Draw(t, "dispersion")
			l.MaxBacklog = rapid.Int64Range(0, 500).Draw(t, "backlog")
			left -= l.Recent
			loads = append(loads, l)
		}
		for _, rule := range []string{Robust, Sqrt} {
			got := testkit.Result(Split(rule, total, loads)).Must(t)
			for i, a := range got {
				if rule == Sqrt && a.Share.Rate.PerSecond() < 0.97*loads[i].Recent-1 {
					t.Fatalf("%s: %s gets %v msg/s, needs %v", rule, a.Broker, a.Share.Rate.PerSecond(), loads[i].Recent)
				}
				if a.Share.Rate < total.Rate/tokenbucket.Rate(k)/20-1 {
					t.Fatalf("%s: %s gets %v msg/s, less than the floor", rule, a.Broker, a.Share.Rate.PerSecond())
				}
				if evenPart := total.Burst / int64(k); rule == Robust && a.Share.Burst < evenPart/2-int64(k) {
					t.Fatalf("%s: %s gets a burst of %d, less than half of an even one", rule, a.Broker, a.Share.Burst)
				}
			}
		}
	})
}
