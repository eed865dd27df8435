package placement

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/srtm-io/srtm/internal/plural"
)

// Fits lists changes that would make an infeasible demand fit. Each field is the change
// of one value with all others as requested. 0 means that no value of the field helps.
type Fits struct {
	// Rate is the maximum r in whole msg/s, with the same number of publishers, each
	// sending proportionally less.
	Rate int64
	// Burst is the minimum b, in messages.
	Burst int64
	// Publishers is the minimum number of publishers with the same total rate.
	Publishers int64
	// MoreBrokers is the number of additional empty brokers, each with capacity Mcap in
	// msg/s: the (lower) median of the present brokers. MoreBrokers is 0 if more than
	// maxMore would be needed.
	MoreBrokers, Mcap int64
}

// maxMore limits MoreBrokers: a larger number is no advice.
const maxMore = 10_000

func (f Fits) String() string {
	var parts []string
	add := func(n int64, format string, args ...any) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(f.Rate, "r up to %d msg/s", f.Rate)
	add(f.Burst, "b from %s", plural.Count(f.Burst, "message"))
	add(f.Publishers, "%s that send as much together", plural.Count(f.Publishers, "publisher"))
	add(f.MoreBrokers, "%s of %d msg/s", plural.Count(f.MoreBrokers, "more broker"), f.Mcap)
	return strings.Join(parts, ", or ")
}

// fitting searches for the changes after which divide succeeds. A higher rate never makes
// a demand fit, and neither does a smaller burst, fewer publishers or fewer brokers, so
// fitting uses binary search. LoadBalance is an exception: it spreads the topic over
// every added broker. Therefore smallest checks its result again.
//
// Requires: divide fails for these arguments, which are valid.
func fitting(policy string, brokers []Broker, d Demand, publishers int) (f Fits) {
	fits := func(brokers []Broker, d Demand, publishers int) bool {
		_, _, err := divide(policy, brokers, d, publishers)
		return err == nil
	}
	// smallest returns the smallest n in (low, high] that fits, or 0.
	smallest := func(low, high int64, fits func(int64) bool) int64 {
		if high <= low {
			return 0
		}
		n := low + 1 + int64(sort.Search(int(high-low-1), func(i int) bool { return fits(low + 1 + int64(i)) }))
		if !fits(n) {
			return 0
		}
		return n
	}
	f.Rate = int64(sort.Search(int(d.Rate-1), func(i int) bool {
		d := d
		d.Rate = int64(i) + 1
		return !fits(brokers, d, publishers)
	}))
	f.Burst = smallest(d.Burst, int64(len(brokers)), func(n int64) bool {
		d := d
		d.Burst = n
		return fits(brokers, d, publishers)
	})
	if publishers > 0 {
		f.Publishers = smallest(int64(publishers), int64(len(brokers)), func(n int64) bool { return fits(brokers, d, int(n)) })
	}
	f.Mcap = medianMcap(brokers)
	if f.Mcap > 0 {
		limit := min(maxMore, (d.Rate-1)/f.Mcap+1+int64(d.AtLeast))
		f.MoreBrokers = smallest(0, limit, func(n int64) bool {
			enlarged := slices.Grow(slices.Clone(brokers), int(n))
			for range n {
				enlarged = append(enlarged, Broker{Mcap: f.Mcap})
			}
			return fits(enlarged, d, publishers)
		})
	}
	if f.MoreBrokers == 0 {
		f.Mcap = 0
	}
	return f
}

func medianMcap(brokers []Broker) int64 {
	var mcaps []int64
	for _, b := range brokers {
		if b.Mcap > 0 {
			mcaps = append(mcaps, b.Mcap)
		}
	}
	if len(mcaps) == 0 {
		return 0
	}
	slices.Sort(mcaps)
	return mcaps[(len(mcaps)-1)/2]
}
