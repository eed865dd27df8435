package reconcile

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestLatecomersAreNudgedUntilTheyCome(t *testing.T) {
	begin := time.Unix(1e9, 0)
	late := Late{map[string][]string{"c": {"b3", "b4"}, "d": {"b3"}}}
	planned, retiring := []string{"b2", "b3", "b4"}, []string{"b1"}
	everywhere := []string{"c", "d"}
	for name, test := range map[string]struct {
		read func(second int) map[string][]string // channels with consumers, by broker
		plan func(second int) []string            // nil: planned
		want []string                             // nudges, with their seconds
		end  int                                  // second of the last step
	}{
		"they never come": {
			read: func(int) map[string][]string { return map[string][]string{"b1": {"c"}, "b2": everywhere} },
			want: []string{"4 {b1 [c]}", "4 {b2 [d]}", "12 {b1 [c]}", "12 {b2 [d]}", "28 {b1 [c]}", "28 {b2 [d]}"},
			end:  28,
		},
		"they come one after the other": {
			read: func(second int) map[string][]string {
				all := map[string][]string{"b2": everywhere}
				if second >= 5 {
					all["b3"] = []string{"c"}
				}
				if second >= 13 {
					all["b3"] = everywhere
				}
				if second >= 20 {
					all["b4"] = everywhere
				}
				return all
			},
			want: []string{"4 {b2 [c d]}", "12 {b2 [c d]}"},
			end:  20,
		},
		"there are none": {
			read: func(int) map[string][]string { return nil },
			end:  28,
		},
		"the topic leaves the new brokers": {
			read: func(int) map[string][]string { return map[string][]string{"b2": everywhere} },
			plan: func(second int) []string { return planned[:1+max(0, 2-second/10)] },
			want: []string{"4 {b2 [c d]}", "12 {b2 [c d]}"},
			end:  20,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewLatecomers(nil, late, 4*time.Second, begin)
			var got []string
			for second := 0; ; second++ {
				brokers := planned
				if test.plan != nil {
					brokers = test.plan(second)
				}
				nudges, over := r.Step(brokers, retiring, test.read(second), begin.Add(time.Duration(second)*time.Second))
				for _, n := range nudges {
					got = append(got, fmt.Sprintf("%d %v", second, n))
				}
				if over {
					testkit.Equal(t, second, test.end, "the end")
					break
				}
			}
			testkit.EqualSlices(t, got, test.want)
		})
	}
}

// A broker that was new in an earlier move is not new in the next.
func TestLatecomersOfAnEarlierMoveStayLate(t *testing.T) {
	begin := time.Unix(1e9, 0)
	first := NewLatecomers(nil, Late{map[string][]string{"c": {"b2"}}}, time.Second, begin)
	r := NewLatecomers(first, Late{map[string][]string{"c": {"b3"}, "d": {"b3"}}}, time.Second, begin)
	nudges, over := r.Step([]string{"b1", "b2", "b3"}, nil, map[string][]string{"b1": {"c"}, "b3": {"c", "d"}}, begin.Add(time.Second))
	testkit.Equal(t, over, false)
	testkit.MustEqual(t, len(nudges), 1)
	testkit.Equal(t, nudges[0].Broker, "b1")
	if !slices.Equal(nudges[0].Channels, []string{"c"}) {
		t.Errorf("nudged %v", nudges[0].Channels)
	}
}
