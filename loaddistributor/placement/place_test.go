package placement_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// paper is the setting of the paper's figure 8: six brokers with these loads,
// in thousands of messages per second, and room for 64 each.
func paper() []placement.Broker {
	var brokers []placement.Broker
	for i, k := range []int64{10, 40, 50, 60, 70, 80} {
		brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%d", i+1), Mcap: 64_000, Allocated: k * 1000})
	}
	return brokers
}

// sensors is a topic of n publishers at 10 msg/s, in groups of 25, that uses
// all of its contract.
func sensors(n int) placement.Demand {
	d := placement.Demand{Topic: "t", Rate: int64(n) * 10, Burst: 100}
	for g := 0; n > 0; g++ {
		d.Groups = append(d.Groups, placement.Group{Key: fmt.Sprintf("g%d", g), Count: min(n, 25), Rate: 10})
		n -= 25
	}
	return d
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

func rates(p placement.Plan) map[string]int64 {
	m := map[string]int64{}
	for _, q := range p.Quotas {
		m[q.Broker] = q.Rate
	}
	return m
}

func TestThePapersFigure8(t *testing.T) {
	type quotas = map[string]int64
	for _, c := range []struct {
		publishers int
		policy     string
		want       quotas
	}{
		// It fits on the least loaded broker: the policies agree.
		{2000, "srtm", quotas{"b1": 20_000}},
		{2000, "maxmin", quotas{"b1": 20_000}},
		{2000, "conc", quotas{"b1": 20_000}},
		{4000, "maxmin", quotas{"b1": 40_000}},
		{4000, "conc", quotas{"b1": 40_000}},
		// Two brokers: conc brings both to 55,000.
		{6000, "srtm", quotas{"b1": 36_000, "b2": 24_000}},
		{6000, "conc", quotas{"b1": 45_000, "b2": 15_000}},
		// Three: the paper's example. Conc leaves 10,000 for the third broker,
		// all three then carry 60,000; max-min gives it all it can take.
		{8000, "srtm", quotas{"b1": 42_000, "b2": 24_000, "b3": 14_000}},
		{8000, "maxmin", quotas{"b1": 42_000, "b2": 24_000, "b3": 14_000}},
		{8000, "conc", quotas{"b1": 50_000, "b2": 20_000, "b3": 10_000}},
		// An even split over six is more than three of them can take.
		{600, "loadbalance", quotas{"b1": 1500, "b2": 1500, "b3": 1500, "b4": 1500}},
		{4800, "loadbalance", quotas{"b1": 15_000, "b2": 15_000, "b3": 14_000, "b4": 4000}},
	} {
		plan, err := placement.Place(c.policy, paper(), sensors(c.publishers), seeded(1))
		if err != nil {
			t.Errorf("%s, %d publishers: %v", c.policy, c.publishers, err)
			continue
		}
		if got := rates(plan); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s, %d publishers: quotas %v, want %v", c.policy, c.publishers, got, c.want)
		}
		if plan.Policy != c.policy || plan.K != len(c.want) {
			t.Errorf("%s, %d publishers: plan of %s with k %d, want k %d", c.policy, c.publishers, plan.Policy, plan.K, len(c.want))
		}
		for _, q := range plan.Quotas {
			if int64(len(q.Publishers))*10 != q.Rate {
				t.Errorf("%s: %d publishers at 10 msg/s on %s, its quota is %d", c.policy, len(q.Publishers), q.Broker, q.Rate)
			}
		}
	}
}

func TestQuotas(t *testing.T) {
	broker := func(id string, mcap, allocated int64) placement.Broker {
		return placement.Broker{ID: id, Mcap: mcap, Allocated: allocated}
	}
	for _, c := range []struct {
		name, policy string
		brokers      []placement.Broker
		rate         int64
		want         map[string]int64
	}{
		{"equal rcap: the lower index is taken", "srtm",
			[]placement.Broker{broker("z", 10, 0), broker("y", 10, 0), broker("x", 10, 0)}, 15,
			map[string]int64{"z": 8, "y": 7}},
		{"what does not divide goes to the lowest indices", "srtm",
			[]placement.Broker{broker("c", 10, 0), broker("b", 10, 0), broker("a", 10, 0)}, 23,
			map[string]int64{"c": 8, "b": 8, "a": 7}},
		{"over-promised brokers have no capacity, not a negative one", "srtm",
			[]placement.Broker{broker("a", 10, 50), broker("b", 10, 0), broker("c", 10, 4)}, 16,
			map[string]int64{"b": 10, "c": 6}},
		{"exactly full", "maxmin",
			[]placement.Broker{broker("a", 7, 0), broker("b", 5, 0), broker("c", 3, 0)}, 15,
			map[string]int64{"a": 7, "b": 5, "c": 3}},
		{"shortfall of one capped broker is redistributed, and caps another", "maxmin",
			[]placement.Broker{broker("a", 100, 0), broker("b", 30, 0), broker("c", 12, 0)}, 135,
			map[string]int64{"a": 93, "b": 30, "c": 12}},
		{"conc on brokers of different size: equal loads, not equal quotas", "conc",
			[]placement.Broker{broker("a", 100, 40), broker("b", 50, 0)}, 80,
			map[string]int64{"a": 30, "b": 50}},
		{"conc over unequal loads: the busy one gets little, but as it is needed, something", "conc",
			[]placement.Broker{broker("a", 200, 110), broker("b", 100, 0)}, 101,
			map[string]int64{"a": 1, "b": 100}},
		{"conc's odd message goes to the lowest index", "conc",
			[]placement.Broker{broker("a", 10, 1), broker("b", 10, 0)}, 12,
			map[string]int64{"a": 6, "b": 6}},
		{"loadbalance ignores what brokers carry while they can", "loadbalance",
			[]placement.Broker{broker("a", 100, 70), broker("b", 100, 0), broker("c", 100, 50)}, 91,
			map[string]int64{"a": 30, "b": 31, "c": 30}},
		{"loadbalance of less than a message each", "loadbalance",
			[]placement.Broker{broker("a", 10, 0), broker("b", 10, 0), broker("c", 10, 0)}, 2,
			map[string]int64{"a": 1, "b": 1}},
		{"capacities near the end of the range do not overflow", "srtm",
			[]placement.Broker{broker("a", math.MaxInt64, 0), broker("b", math.MaxInt64, 1)}, placement.MaxRate,
			map[string]int64{"a": placement.MaxRate}},
		{"nor do loads", "conc",
			[]placement.Broker{broker("a", math.MaxInt64, math.MaxInt64-2), broker("b", math.MaxInt64, math.MaxInt64-3)}, 4,
			map[string]int64{"a": 2, "b": 2}},
	} {
		plan, err := placement.Place(c.policy, c.brokers, placement.Demand{Topic: "t", Rate: c.rate, Burst: 10}, nil)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		got := rates(plan)
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// AtLeast spreads over more brokers than the rate needs: the largest of them,
// and what there is of them has to be enough.
func TestAtLeast(t *testing.T) {
	for _, c := range []struct {
		policy  string
		atLeast int
		want    map[string]int64
	}{
		{"srtm", 0, map[string]int64{"b1": 40_000}},
		{"srtm", 1, map[string]int64{"b1": 40_000}},
		{"srtm", 2, map[string]int64{"b1": 20_000, "b2": 20_000}},
		{"maxmin", 3, map[string]int64{"b1": 13_334, "b2": 13_333, "b3": 13_333}},
		{"srtm", 4, map[string]int64{"b1": 12_000, "b2": 12_000, "b3": 12_000, "b4": 4_000}},
		// Conc lifts the emptiest first: two would be enough, the third gets none.
		{"conc", 3, map[string]int64{"b1": 35_000, "b2": 5_000}},
		{"loadbalance", 2, map[string]int64{"b1": 12_000, "b2": 12_000, "b3": 12_000, "b4": 4_000}},
	} {
		d := sensors(4000)
		d.AtLeast = c.atLeast
		plan, err := placement.Place(c.policy, paper(), d, seeded(1))
		if err != nil {
			t.Errorf("%s over at least %d: %v", c.policy, c.atLeast, err)
			continue
		}
		if got := rates(plan); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s over at least %d: %v, want %v", c.policy, c.atLeast, got, c.want)
		}
	}
	d := sensors(4000)
	d.AtLeast = 5 // brokers 5 and 6 are full
	_, err := placement.Place("srtm", paper(), d, nil)
	if want := (&placement.Infeasible{Bound: "brokers", Need: 5, Have: 4, Fits: placement.Fits{MoreBrokers: 1, Mcap: 64_000}}); !reflect.DeepEqual(err, want) {
		t.Errorf("over at least 5 of 4: %v, want %v", err, want)
	}
	d.AtLeast = -1
	if err := d.Validate(); err == nil {
		t.Error("over at least -1 brokers is fine")
	}
}
