package placement

import (
	"cmp"
	"slices"
	"sort"
)

// byRcap returns the indices of brokers, largest rcap first, ties to the lower
// index.
func byRcap(brokers []Broker) []int {
	order := make([]int, len(brokers))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(brokers[b].rcap(), brokers[a].rcap()) })
	return order
}

// fewest returns how many brokers, taken in order, can carry rate, and what
// all of them can: if that is less than rate, no number is enough and k is 0.
func fewest(brokers []Broker, order []int, rate int64) (k int, have int64) {
	for i, broker := range order {
		have += brokers[broker].rcap() // no overflow: below rate until the last
		if have >= rate {
			return i + 1, have
		}
	}
	return 0, have
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

// maxmin gives each broker min(cap, fair share), and what the capped ones fall
// short of to the others, until nothing is left (water-filling). No other
// division of rate under these caps has a larger smallest quota, nor, that one
// set aside, a larger second, and so on. What does not divide goes to the
// lowest indices, one msg/s each.
//
// Requires: the caps sum to at least rate.
func maxmin(caps []int64, rate int64) []int64 {
	order := make([]int, len(caps))
	for i := range order {
		order[i] = i
	}
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
		more := rate % int64(len(equal))
		for j, l := range equal {
			quotas[l] = fair // < caps[l]
			if int64(j) < more {
				quotas[l]++
			}
		}
		break
	}
	return quotas
}

// equalLoad gives each broker what lifts its total load to a common level, as
// far as its cap allows; a broker that carries more than the level already
// gets its floor. What does not divide goes to the lowest indices.
//
// Requires: the caps sum to at least rate, the sum fits; so does load plus cap.
// The floors, each at most its cap, sum to at most rate.
func equalLoad(loads, floors, caps []int64, rate int64) []int64 {
	quota := func(l int, level int64) int64 { return min(max(floors[l], level-loads[l]), caps[l]) }
	given := func(level int64) (sum int64) {
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
	level := lowest + int64(sort.Search(int(highest-lowest), func(i int) bool { return given(lowest+int64(i)+1) > rate }))
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
