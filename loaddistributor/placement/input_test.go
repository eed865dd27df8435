package placement_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

func TestDemandFaults(t *testing.T) {
	type (
		publishers = []placement.Publisher
		groups     = []placement.Group
	)
	long := strings.Repeat("x", placement.MaxID+1)
	for _, c := range []struct {
		name string
		edit func(*placement.Demand)
		want []string // field: words of the problem, in order
	}{
		{"sound", func(*placement.Demand) {}, nil},
		{"publishers use all of the rate", func(d *placement.Demand) {
			for i := range 1000 {
				d.Publishers = append(d.Publishers, placement.Publisher{ID: fmt.Sprint(i), Rate: 0.1})
			}
		}, nil},
		{"exact rate", func(d *placement.Demand) { d.RateMilli = 99_001 }, nil},
		{"empty topic", func(d *placement.Demand) { d.Topic = "" }, []string{"topic: is empty"}},
		{"r = 0", func(d *placement.Demand) { d.Rate = 0 }, []string{"rate: 0 msg/s is outside"}},
		{"r < 0", func(d *placement.Demand) { d.Rate = -1 }, []string{"rate: -1 msg/s is outside"}},
		{"r absurd", func(d *placement.Demand) { d.Rate = placement.MaxRate + 1 }, []string{"rate: 1000000001 msg/s is outside"}},
		{"exact r < 0", func(d *placement.Demand) { d.RateMilli = -5 }, []string{"rate: -5 milli-msg/s is negative"}},
		{"exact r above", func(d *placement.Demand) { d.RateMilli = 100_001 }, []string{"rate: 100 msg/s is not 100001 milli-msg/s rounded up"}},
		{"exact r below", func(d *placement.Demand) { d.RateMilli = 99_000 }, []string{"rate: 100 msg/s is not 99000"}},
		{"b = 0", func(d *placement.Demand) { d.Burst = 0 }, []string{"burst: 0 messages is outside"}},
		{"b absurd", func(d *placement.Demand) { d.Burst = math.MaxInt64 }, []string{"burst: 9223372036854775807 messages is outside"}},
		{"all at once", func(d *placement.Demand) { *d = placement.Demand{} },
			[]string{"topic: is empty", "rate: 0 msg/s", "burst: 0 messages"}},
		{"publishers' faults", func(d *placement.Demand) {
			d.Publishers = publishers{
				{ID: "", Rate: 1}, {ID: long, Rate: 1}, {ID: "a", Key: long, Rate: 1}, {ID: "b\xff", Rate: 1}, {ID: "c", Key: "\xff", Rate: 1},
				{ID: "d", Rate: 0}, {ID: "e", Rate: -1}, {ID: "f", Rate: math.NaN()}, {ID: "g", Rate: math.Inf(1)},
				{ID: "h", Rate: 1, Batch: -1}, {ID: "i", Rate: 1, Batch: placement.MaxBatch + 1}, {ID: "d", Rate: 1},
			}
		}, []string{
			"publishers[0].id: is empty", "publishers[1].id: has 65 bytes", "publishers[2].key: has 65 bytes",
			"publishers[3].id: \"b\\xff\" is not valid", "publishers[4].key: \"\\xff\" is not valid",
			"publishers[5].rate: 0 is not", "publishers[6].rate: -1 is not", "publishers[7].rate: NaN is not", "publishers[8].rate: +Inf is not",
			"publishers[9].batch: -1 messages", "publishers[10].batch: 1000001 messages", "publishers[11].id: \"d\" is the id of publishers[5] too",
		}},
		{"groups' faults", func(d *placement.Demand) {
			d.Groups = groups{
				{Key: "a", Count: 0, Rate: 1}, {Key: "b", Count: -1, Rate: 1}, {Key: "c", Count: math.MaxInt, Rate: 1},
				{Key: "d", Count: 1, Rate: 0}, {Key: "e", Count: 1, Rate: math.NaN()}, {Key: "f", Count: 1, Rate: 1, Batch: -1},
				{Key: "a", Count: 1, Rate: 1}, {Key: long[:63], Count: 1, Rate: 1}, {Key: "\xff", Count: 1, Rate: 1},
			}
		}, []string{
			"groups[0].count: 0 is outside", "groups[1].count: -1 is outside", "groups[2].count: 9223372036854775807 is outside",
			"groups[3].rate: 0 is not", "groups[4].rate: NaN is not", "groups[5].batch: -1 messages",
			"groups[6].key: \"a\" would name its publishers a.<i> as groups[0] does", "groups[7].key: its publishers' ids would have 65 bytes",
			"groups[8].key: \"\\xff\" is not valid",
		}},
		{"two pools", func(d *placement.Demand) { d.Groups = groups{{Count: 1, Rate: 1}, {Count: 1, Rate: 1}} },
			[]string{"groups[1].key: \"\" would name its publishers pool.<i> as groups[0]"}},
		{"a group called pool beside the pool", func(d *placement.Demand) { d.Groups = groups{{Count: 1, Rate: 1}, {Key: "pool", Count: 1, Rate: 1}} },
			[]string{"groups[1].key: \"pool\" would name its publishers pool.<i>"}},
		{"publishers named like those of a group", func(d *placement.Demand) {
			d.Publishers = publishers{{ID: "g.0", Rate: 1}, {ID: "g.2", Rate: 1}, {ID: "g.1", Rate: 1}, {ID: "g.01", Rate: 1}, {ID: "g.-1", Rate: 1}, {ID: "g.", Rate: 1}, {ID: "g", Rate: 1}, {ID: "x.g.1", Rate: 1}}
			d.Groups = groups{{Key: "g", Count: 2, Rate: 1}}
		}, []string{"publishers[0].id: \"g.0\" is the id of a publisher of groups[0]", "publishers[2].id: \"g.1\" is the id of a publisher of groups[0]"}},
		{"too many", func(d *placement.Demand) {
			d.Rate = placement.MaxRate
			d.Groups = groups{{Key: "a", Count: placement.MaxPublishers, Rate: 1}, {Key: "b", Count: 1, Rate: 1}}
		}, []string{"publishers: 1000001 with those of the groups, at most 1000000"}},
		{"more than the contract", func(d *placement.Demand) { d.Groups = groups{{Key: "a", Count: 10, Rate: 10.01}} },
			[]string{"rate: the publishers' rates sum to 100.1 msg/s, more than the contract's 100"}},
		{"more than the exact contract", func(d *placement.Demand) {
			d.RateMilli = 99_500
			d.Groups = groups{{Key: "a", Count: 10, Rate: 10}}
		}, []string{"rate: the publishers' rates sum to 100 msg/s, more than the contract's 99.5"}},
		{"a sum beyond all numbers", func(d *placement.Demand) {
			d.Publishers = publishers{{ID: "a", Rate: math.MaxFloat64}, {ID: "b", Rate: math.MaxFloat64}}
		},
			[]string{"rate: the publishers' rates sum to +Inf"}},
	} {
		d := placement.Demand{Topic: "t", Rate: 100, Burst: 10}
		c.edit(&d)
		err := d.Validate()
		_, placeErr := placement.Place("srtm", []placement.Broker{{ID: "b", Mcap: math.MaxInt64}}, d, nil)
		if len(c.want) == 0 {
			if err != nil || placeErr != nil {
				t.Errorf("%s: %v, %v", c.name, err, placeErr)
			}
			continue
		}
		var faults placement.FieldErrors
		if !errors.As(err, &faults) || len(faults) != len(c.want) {
			t.Errorf("%s: %d faults, want %d: %v", c.name, len(faults), len(c.want), err)
			continue
		}
		for i, f := range faults {
			if !strings.HasPrefix(f.Error(), c.want[i]) {
				t.Errorf("%s: fault %d is %q, want %q", c.name, i, f, c.want[i])
			}
		}
		if placeErr == nil || placeErr.Error() != err.Error() {
			t.Errorf("%s: Place says %v, Validate %v", c.name, placeErr, err)
		}
	}
}

func TestPlaceReportsAllFaultsAtOnce(t *testing.T) {
	brokers := []placement.Broker{{ID: "a", Mcap: -1}, {ID: "a", Allocated: -2}, {}}
	plan, err := placement.Place("best", brokers, placement.Demand{}, nil)
	want := []string{
		`policy: "best" is not one of conc, loadbalance, maxmin, srtm`,
		"brokers[0].mcap: -1 msg/s is negative",
		`brokers[1].id: "a" is the id of brokers[0] too`,
		"brokers[1].allocated: -2 msg/s is negative",
		"brokers[2].id: is empty",
		"topic: is empty", "rate: 0 msg/s is outside 1 to 1000000000", "burst: 0 messages is outside 1 to 1000000000",
	}
	if err == nil || err.Error() != strings.Join(want, "; ") {
		t.Errorf("%v\nwant %s", err, strings.Join(want, "; "))
	}
	if !reflect.DeepEqual(plan, placement.Plan{}) {
		t.Errorf("a plan all the same: %+v", plan)
	}
}

func TestALongListOfFaultsIsCut(t *testing.T) {
	d := placement.Demand{Topic: "t", Rate: 1, Burst: 1, Publishers: make([]placement.Publisher, 1000)}
	var faults placement.FieldErrors
	if err := d.Validate(); !errors.As(err, &faults) {
		t.Fatal(err)
	}
	if len(faults) != 2999 { // 1000 empty ids and rates, 999 repeated ids
		t.Errorf("%d faults", len(faults))
	}
	if text := faults.Error(); len(text) > 1000 || !strings.HasSuffix(text, "; and 2989 more") {
		t.Errorf("the text has %d bytes: %s", len(text), text)
	}
}

func TestBlindPoliciesNeedRandomness(t *testing.T) {
	for _, policy := range placement.Policies() {
		_, err := placement.Place(policy, paper(), sensors(100), nil)
		if (policy == placement.SRTM) != (err == nil) {
			t.Errorf("%s without rng: %v", policy, err)
		}
		d := sensors(100)
		d.Groups = nil
		if _, err := placement.Place(policy, paper(), d, nil); err != nil {
			t.Errorf("%s without rng and without publishers: %v", policy, err)
		}
	}
}

func TestInfeasible(t *testing.T) {
	two := []placement.Broker{{ID: "a", Mcap: 60}, {ID: "b", Mcap: 50, Allocated: 10}}
	for _, c := range []struct {
		name    string
		brokers []placement.Broker
		policy  string
		demand  placement.Demand
		want    placement.Infeasible
	}{
		{"nobody", nil, "srtm", placement.Demand{Rate: 5, Burst: 1}, placement.Infeasible{Bound: "brokers", Need: 1, Have: 0}},
		{"too little", two, "srtm", placement.Demand{Rate: 101, Burst: 9}, placement.Infeasible{Bound: "rcap", Need: 101, Have: 100, Fits: placement.Fits{Rate: 100, MoreBrokers: 1, Mcap: 50}}},
		{"too little, conc", two, "conc", placement.Demand{Rate: 101, Burst: 9}, placement.Infeasible{Bound: "rcap", Need: 101, Have: 100, Fits: placement.Fits{Rate: 100, MoreBrokers: 1, Mcap: 50}}},
		{"too little, loadbalance", two, "loadbalance", placement.Demand{Rate: 101, Burst: 9}, placement.Infeasible{Bound: "rcap", Need: 101, Have: 100, Fits: placement.Fits{Rate: 100, MoreBrokers: 1, Mcap: 50}}},
		{"all are full", []placement.Broker{{ID: "a", Mcap: 1, Allocated: 5}}, "srtm", placement.Demand{Rate: 1, Burst: 9}, placement.Infeasible{Bound: "rcap", Need: 1, Have: 0, Fits: placement.Fits{MoreBrokers: 1, Mcap: 1}}},
		{"b < k", two, "srtm", placement.Demand{Rate: 61, Burst: 1}, placement.Infeasible{Bound: "burst", Need: 2, Have: 1, Fits: placement.Fits{Rate: 60, Burst: 2}}},
		{"b < k, conc", two, "conc", placement.Demand{Rate: 61, Burst: 1}, placement.Infeasible{Bound: "burst", Need: 2, Have: 1, Fits: placement.Fits{Rate: 60, Burst: 2}}},
		{"b < n, loadbalance", two, "loadbalance", placement.Demand{Rate: 10, Burst: 1}, placement.Infeasible{Bound: "burst", Need: 2, Have: 1, Fits: placement.Fits{Rate: 1, Burst: 2}}},
		{"fewer publishers than brokers needed", two, "srtm",
			placement.Demand{Rate: 61, Burst: 9, Publishers: []placement.Publisher{{ID: "p", Rate: 61}}}, placement.Infeasible{Bound: "publishers", Need: 2, Have: 1, Fits: placement.Fits{Rate: 60, Publishers: 2}}},
		{"the same, loadbalance", two, "loadbalance",
			placement.Demand{Rate: 61, Burst: 9, Publishers: []placement.Publisher{{ID: "p", Rate: 61}}}, placement.Infeasible{Bound: "publishers", Need: 2, Have: 1, Fits: placement.Fits{Rate: 60, Publishers: 2}}},
		{"capacity near the end of the range", []placement.Broker{{ID: "a", Mcap: 5}, {ID: "b", Mcap: math.MaxInt64, Allocated: math.MaxInt64 - 5}},
			"srtm", placement.Demand{Rate: placement.MaxRate, Burst: 9}, placement.Infeasible{Bound: "rcap", Need: placement.MaxRate, Have: 10, Fits: placement.Fits{Rate: 10}}},
	} {
		c.demand.Topic = "t"
		plan, err := placement.Place(c.policy, c.brokers, c.demand, seeded(1))
		var got *placement.Infeasible
		if !errors.As(err, &got) || *got != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, &c.want)
		}
		if !reflect.DeepEqual(plan, placement.Plan{}) {
			t.Errorf("%s: a partial plan: %+v", c.name, plan)
		}
	}
}

func TestWhatFitsExactlyIsFeasible(t *testing.T) {
	two := []placement.Broker{{ID: "a", Mcap: 60}, {ID: "b", Mcap: 50, Allocated: 10}}
	for _, policy := range placement.Policies() {
		d := placement.Demand{Topic: "t", Rate: 100, Burst: 2, Publishers: []placement.Publisher{{ID: "p", Rate: 60}, {ID: "q", Rate: 40}}}
		plan, err := placement.Place(policy, two, d, seeded(1))
		if err != nil || plan.K != 2 {
			t.Errorf("%s: %+v, %v", policy, plan, err)
			continue
		}
		for i, want := range []int64{60, 40} {
			q := plan.Quotas[i]
			if q.Rate != want || q.Share.Burst != 1 || len(q.Publishers) != 1 || q.Publishers[0] != i {
				t.Errorf("%s: quota %d is %+v", policy, i, q)
			}
		}
	}
}

func TestExpand(t *testing.T) {
	d := placement.Demand{
		Publishers: []placement.Publisher{{ID: "gw", Key: "g", Rate: 7, Batch: 3}},
		Groups:     []placement.Group{{Key: "g", Count: 2, Rate: 1, Batch: 4}, {Count: 1, Rate: 2}},
	}
	want := []placement.Publisher{
		{ID: "gw", Key: "g", Rate: 7, Batch: 3},
		{ID: "g.0", Key: "g", Rate: 1, Batch: 4},
		{ID: "g.1", Key: "g", Rate: 1, Batch: 4},
		{ID: "pool.0", Rate: 2},
	}
	if got := d.Expand(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
}

func TestSharesFollowTheExactRate(t *testing.T) {
	brokers := []placement.Broker{{ID: "a", Mcap: 2}, {ID: "b", Mcap: 1}}
	plan, err := placement.Place("srtm", brokers, placement.Demand{Topic: "t", Rate: 3, RateMilli: 2_500, Burst: 4}, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, b := plan.Quotas[0], plan.Quotas[1]
	if a.Rate != 2 || b.Rate != 1 || a.Share.Rate != 1667 || b.Share.Rate != 833 || a.Share.Burst != 3 || b.Share.Burst != 1 {
		t.Errorf("%+v", plan.Quotas)
	}
}
