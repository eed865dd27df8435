package container

import (
	"cmp"
	"slices"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestQueueKeepsOrderThroughGrowthAndShrinking(t *testing.T) {
	rng := testkit.Rand(t)
	var q Queue[int]
	pushed, popped := 0, 0
	for range 200_000 {
		if q.Len() > 0 && rng.IntN(5000) < q.Len() {
			testkit.MustEqual(t, q.Pop(), popped, "popped")
			popped++
		} else {
			q.Push(pushed)
			pushed++
		}
		testkit.MustEqual(t, q.Len(), pushed-popped, "length")
	}
	for q.Len() > 0 {
		q.Pop()
	}
	if len(q.ring) > minShrunk {
		t.Errorf("an empty queue keeps %d slots", len(q.ring))
	}
}

func TestQueueInsertsAndSorts(t *testing.T) {
	rng := testkit.Rand(t)
	type element struct{ key, n int }
	later := func(a, b element) bool { return a.key > b.key }
	stable := func(a, b element) int { return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.n, b.n)) }
	var q Queue[element]
	var want []element
	for n := range 20_000 {
		if len(want) > 0 && rng.IntN(40) < 19 {
			testkit.MustEqual(t, q.Pop(), want[0], "popped")
			want = want[1:]
			continue
		}
		e := element{rng.IntN(50), n}
		switch {
		case rng.IntN(100) == 0: // out of order, and in order again
			q.Push(e)
			q.Sort(later)
		default:
			q.Insert(q.After(e, later), e)
		}
		want = append(want, e)
		slices.SortFunc(want, stable)
		for i, w := range want {
			if q.Len() != len(want) || q.At(i) != w {
				t.Fatalf("place %d of %d holds %v, want %v", i, q.Len(), q.At(i), w)
			}
		}
	}
}
