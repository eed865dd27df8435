package container

import (
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
