package container

import (
	"math/bits"
	"slices"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

type number int

func (n number) Before(o number) bool { return n < o }

func TestTheLeastComesFirst(t *testing.T) {
	rng := testkit.Rand(t)
	var h Heap[number]
	for range 100 {
		h = append(h, number(rng.IntN(50)))
	}
	h.Init()
	left := slices.Sorted(slices.Values(h))
	for len(left) > 0 {
		switch rng.IntN(4) {
		case 0:
			v := number(rng.IntN(50))
			h.Push(v)
			left = append(left, v)
		case 1:
			left[0] = number(rng.IntN(50))
			h[0] = left[0]
			h.Fix()
		default:
			testkit.MustEqual(t, h.Pop(), left[0])
			left = left[1:]
		}
		slices.Sort(left)
		if len(h) != len(left) || len(h) > 0 && h[0] != left[0] {
			t.Fatalf("%d of %d on top, want %v", h[:min(1, len(h))], len(h), left)
		}
	}
}

// counted is a number that counts its comparisons.
type counted struct {
	number
	comparisons *int
}

func (c counted) Before(o counted) bool {
	*c.comparisons++
	return c.number < o.number
}

func TestComparisonsGrowWithTheLogarithm(t *testing.T) {
	rng := testkit.Rand(t)
	for _, n := range []int{10, 100, 1000} {
		comparisons := 0
		h := make(Heap[counted], n)
		for i := range h {
			h[i] = counted{number(rng.IntN(1000)), &comparisons}
		}
		h.Init()
		h.Pop()
		if most := 2*n + 2*bits.Len(uint(n)); comparisons > most {
			t.Errorf("%d comparisons for the first of %d, want at most %d", comparisons, n, most)
		}
		comparisons = 0
		for range 10 * n {
			h[0].number += number(rng.IntN(1000))
			h.Fix()
		}
		if most := 10 * n * 2 * bits.Len(uint(n)); comparisons > most {
			t.Errorf("%d comparisons for %d changes of %d, want at most %d", comparisons, 10*n, n, most)
		}
	}
}
