package placement

import (
	"cmp"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestHeapPopsInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		items := rapid.SliceOf(rapid.IntRange(0, 50)).Draw(t, "of")
		h := newHeap(slices.Clone(items), func(a, b int) bool { return a < b })
		slices.Sort(items)
		for _, want := range items {
			testkit.MustEqual(t, h.pop(), want, "of %v", items)
		}
	})
}

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

// Adding a broker or a publisher costs a few comparisons. The number is constant, or grows as the
// logarithm of the number of brokers.
func TestComparisonsDoNotGrowWithTheBrokers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	for _, n := range []int{10, 100, 1000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			brokers := make([]Broker, n)
			for i := range brokers {
				brokers[i] = Broker{ID: fmt.Sprintf("b%04d", i), Mcap: 1 + rng.Int64N(1000)}
			}
			compared := 0
			order := byRcap(brokers)
			less := order.less
			order = newHeap(order.items, func(a, b int) bool { compared++; return less(a, b) })
			if order.pop(); compared > 3*n+2*bits.Len(uint(n)) {
				t.Errorf("%d comparisons for one of %d brokers", compared, n)
			}
			compared = 0
			for range 10 * n {
				order.down(0)
			}
			if largest := 10 * n * 2 * bits.Len(uint(n)); compared > largest {
				t.Errorf("%d comparisons for %d publishers, want at most %d", compared, 10*n, largest)
			}
		})
	}
}
