package placement

import (
	"cmp"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// slowDeal does what deal does, with a look at every broker for every publisher.
func slowDeal(a *assignment, order []int, counts []int64) {
	for _, i := range order {
		largest := -1
		for l := range a.quotas {
			if (counts == nil || counts[l] > 0) && (largest < 0 || a.deficit[l] > a.deficit[largest]) {
				largest = l
			}
		}
		a.brokerOf[i] = largest
		a.deficit[largest] -= a.rates[i]
		if counts != nil {
			counts[largest]--
		}
	}
}

func TestDealIsAsBeforeTheHeap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var publishers []Publisher
		for range rapid.IntRange(1, 60).Draw(t, "publishers") {
			publishers = append(publishers, Publisher{Rate: float64(rapid.IntRange(1, 5).Draw(t, "rate"))})
		}
		slices.SortStableFunc(publishers, func(x, y Publisher) int { return cmp.Compare(y.Rate, x.Rate) })
		quotas := rapid.SliceOfN(rapid.Int64Range(1, 4), 1, 20).Draw(t, "quotas")
		fast, slow := newAssignment(Demand{Publishers: publishers}, quotas), newAssignment(Demand{Publishers: publishers}, quotas)
		_, pool := fast.groups()
		fast.expect(pool)
		slow.expect(pool)
		var counts []int64
		if rapid.Bool().Draw(t, "counted") {
			counts = make([]int64, len(quotas))
			for range publishers {
				counts[rapid.IntRange(0, len(quotas)-1).Draw(t, "broker")]++
			}
		}
		fast.deal(pool, slices.Clone(counts))
		slowDeal(slow, pool, counts)
		if !slices.Equal(fast.brokerOf, slow.brokerOf) {
			t.Fatalf("%v, want %v", fast.brokerOf, slow.brokerOf)
		}
	})
}
