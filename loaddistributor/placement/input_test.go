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

// Names finds exactly what Expand lists.
func TestNamesFindWhatExpandLists(t *testing.T) {
	d := placement.Demand{
		Publishers: []placement.Publisher{{ID: "gw"}, {ID: "g.12"}, {ID: "g.x"}},
		Groups:     []placement.Group{{Key: "g", Count: 12}, {Count: 3}, {Key: "h.1", Count: 1}},
	}
	names, _ := placement.NewNames(d)
	all := d.Expand()
	if names.Len() != len(all) {
		t.Errorf("%d names of %d", names.Len(), len(all))
	}
	for i, p := range all {
		if index, found := names.Index(p.ID); !found || index != i || names.ID(i) != p.ID {
			t.Errorf("publisher %d, %s, is named %s and found at %d, %v", i, p.ID, names.ID(i), index, found)
		}
	}
	for _, id := range []string{"", "g", "g.", "g.00", "g.01", "g.+1", "g.-1", "g.13", "g.1 ", "g.18446744073709551617", ".0", "pool.3", "h.0", "h.1.1"} {
		if index, found := names.Index(id); found {
			t.Errorf("%q is found at %d", id, index)
		}
	}
	for twice, d := range map[string]placement.Demand{
		"a":      {Publishers: []placement.Publisher{{ID: "a"}, {ID: "a"}}},
		"g.3":    {Publishers: []placement.Publisher{{ID: "g.3"}}, Groups: d.Groups},
		"pool.0": {Groups: []placement.Group{{Key: "pool", Count: 1}, {Count: 1}}},
	} {
		if names, got := placement.NewNames(d); names != nil || got != twice {
			t.Errorf("%q appears twice, not %q", twice, got)
		}
	}
}

func TestExpandListsGroupMembers(t *testing.T) {
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
