package placement

import (
	"cmp"
	"slices"
	"sort"
)

// heap is a binary heap of integers with items[0] first in the order of less.
type heap struct {
	items []int
	less  func(a, b int) bool
}

func newHeap(items []int, less func(a, b int) bool) *heap {
	h := &heap{items, less}
	for i := len(items)/2 - 1; i >= 0; i-- {
		h.down(i)
	}
	return h
}

// down moves items[i] down until no child comes before it.
func (h *heap) down(i int) {
	for first := 2*i + 1; first < len(h.items); first = 2*i + 1 {
		if second := first + 1; second < len(h.items) && h.less(h.items[second], h.items[first]) {
			first = second
		}
		if !h.less(h.items[first], h.items[i]) {
			return
		}
		h.items[i], h.items[first] = h.items[first], h.items[i]
		i = first
	}
}

// pop removes and returns the first element. Requires: the heap is not empty.
func (h *heap) pop() int {
	first, last := h.items[0], len(h.items)-1
	h.items[0] = h.items[last]
	h.items = h.items[:last]
	h.down(0)
	return first
}

// indices returns 0 to n-1.
func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// byRcap returns a heap of broker indices, largest rcap first, ties to the lower index. A
// heap is cheaper than a sorted list: most topics need one broker of a thousand.
func byRcap(brokers []Broker) *heap {
	return newHeap(indices(len(brokers)), func(a, b int) bool {
		if x, y := brokers[a].rcap(), brokers[b].rcap(); x != y {
			return x > y
		}
		return a < b
	})
}

// usable returns how many brokers have capacity left.
func usable(brokers []Broker) (n int) {
	for _, b := range brokers {
		if b.rcap() > 0 {
			n++
		}
	}
	return n
}

// maxmin divides rate over brokers by water-filling: each broker gets min(cap, fair
// share), and the others share what the capped brokers cannot take. No other division of
// rate under these caps has a larger smallest quota, nor, with the same smallest quota, a
// larger second smallest, and so on. The remainder goes to the lowest indices, one msg/s
// each.
//
// Requires: the caps sum to at least rate.
func maxmin(caps []int64, rate int64) []int64 {
	order := indices(len(caps))
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(caps[a], caps[b]) })
	quotas := make([]int64, len(caps))
	for i, l := range order {
		fair := rate / int64(len(order)-i)
		if caps[l] <= fair {
			quotas[l] = caps[l]
			rate -= caps[l]
			continue
		}
		equal := slices.Sorted(slices.Values(order[i:]))
		remainder := rate % int64(len(equal))
		for j, l := range equal {
			quotas[l] = fair // < caps[l]
			if int64(j) < remainder {
				quotas[l]++
			}
		}
		break
	}
	return quotas
}

// equalLoad raises the total load of each broker to a common level, within the broker's
// cap. A broker above the level gets its floor. The remainder goes to the lowest indices.
//
// Requires: the caps sum to at least rate, and neither their sum nor load plus cap
// overflows. The floors, each at most its cap, sum to at most rate.
func equalLoad(loads, floors, caps []int64, rate int64) []int64 {
	quota := func(l int, level int64) int64 { return min(max(floors[l], level-loads[l]), caps[l]) }
	total := func(level int64) (sum int64) {
		for l := range loads {
			sum += quota(l, level)
		}
		return sum
	}
	lowest, highest := slices.Min(loads), int64(0)
	for l := range loads {
		highest = max(highest, loads[l]+caps[l])
	}
	// The highest level that does not give out more than rate.
	level := lowest + int64(sort.Search(int(highest-lowest), func(i int) bool { return total(lowest+int64(i)+1) > rate }))
	quotas := make([]int64, len(loads))
	rest := rate
	for l := range loads {
		quotas[l] = quota(l, level)
		rest -= quotas[l]
	}
	for l := range loads {
		if rest > 0 && quota(l, level+1) > quotas[l] {
			quotas[l]++
			rest--
		}
	}
	return quotas
}
