package placement

import (
	"slices"
	"sort"
	"strconv"
	"strings"
)

// Fits is what could be asked instead of what fits nowhere. Each field is by
// itself, with all else as it was asked; 0: no value of it helps by itself.
type Fits struct {
	// Rate is the maximum r in whole msg/s, with as many publishers that send so
	// much less.
	Rate int64
	// Burst is the minimum b, in messages.
	Burst int64
	// Publishers is the minimum number of publishers that send as much together.
	Publishers int64
	// MoreBrokers is how many more brokers it takes, empty ones of the capacity
	// Mcap in msg/s: the median of those there are, of an even number the lesser.
	// At most maxMore; beyond it, 0.
	MoreBrokers, Mcap int64
}

// maxMore bounds how many brokers are proposed: more are no advice.
const maxMore = 10_000

func (f Fits) String() string {
	var parts []string
	add := func(n int64, before, after string) {
		if n > 0 {
			parts = append(parts, before+strconv.FormatInt(n, 10)+after)
		}
	}
	add(f.Rate, "r up to ", " msg/s")
	add(f.Burst, "b from ", " messages")
	add(f.Publishers, "", " publishers that send as much together")
	brokers := " more brokers of "
	if f.MoreBrokers == 1 {
		brokers = " more broker of "
	}
	add(f.MoreBrokers, "", brokers+strconv.FormatInt(f.Mcap, 10)+" msg/s")
	return strings.Join(parts, ", or ")
}

// fitting asks divide, which found no room, what it would have room for. More
// of a rate, or less of a burst, of publishers or of brokers never makes room,
// but for more brokers under LoadBalance, which spreads over them: so each is
// found by halves, and what halves find is asked once more.
//
// Requires: divide fails for these arguments, which are valid.
func fitting(policy string, brokers []Broker, d Demand, publishers int) (f Fits) {
	fits := func(brokers []Broker, d Demand, publishers int) bool {
		_, _, err := divide(policy, brokers, d, publishers)
		return err == nil
	}
	// least returns the least n in (above, to] that fits, or 0.
	least := func(above, to int64, fits func(int64) bool) int64 {
		if to <= above {
			return 0
		}
		n := above + 1 + int64(sort.Search(int(to-above-1), func(i int) bool { return fits(above + 1 + int64(i)) }))
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
	f.Burst = least(d.Burst, int64(len(brokers)), func(n int64) bool {
		d := d
		d.Burst = n
		return fits(brokers, d, publishers)
	})
	if publishers > 0 {
		f.Publishers = least(int64(publishers), int64(len(brokers)), func(n int64) bool { return fits(brokers, d, int(n)) })
	}
	f.Mcap = medianMcap(brokers)
	if f.Mcap > 0 {
		most := min(maxMore, (d.Rate-1)/f.Mcap+1+int64(d.AtLeast))
		f.MoreBrokers = least(0, most, func(n int64) bool {
			more := slices.Grow(slices.Clone(brokers), int(n))
			for range n {
				more = append(more, Broker{Mcap: f.Mcap})
			}
			return fits(more, d, publishers)
		})
	}
	if f.MoreBrokers == 0 {
		f.Mcap = 0
	}
	return f
}

func medianMcap(brokers []Broker) int64 {
	var all []int64
	for _, b := range brokers {
		if b.Mcap > 0 {
			all = append(all, b.Mcap)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[(len(all)-1)/2]
}
