package testkit

import (
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// Envelope checks a contract (r, b) on releases, exactly and for every interval. For
// messages i <= j in the order of their times, j-i+1 <= b + r*(t_j - t_i). Equivalently,
// j - r*t_j never rises by b or more above its lowest earlier value. slack is the number
// of messages that the tightest interval could still have held.
//
// rateMilli times the span of times, in nanoseconds, must fit an int64, and so must the
// number of messages times 1e12.
func Envelope(times []mono.Time, rateMilli, burst int64) (slack float64, err error) {
	const token = 1e12 // in subtokens: r milli-msg/s are r subtokens per nanosecond
	times = slices.Sorted(slices.Values(times))
	var lowest, highest int64
	from, worst, since := 0, 0, 0
	for j, t := range times {
		level := int64(j)*token - rateMilli*int64(t.Sub(times[0]))
		if j == 0 || level < lowest {
			lowest, from = level, j
		}
		if level-lowest > highest {
			highest, worst, since = level-lowest, j, from
		}
	}
	slack = float64((burst-1)*token-highest) / token
	if highest > (burst-1)*token {
		return slack, fmt.Errorf("%d messages in %v, the contract is %v msg/s, burst %d",
			worst-since+1, times[worst].Sub(times[since]), float64(rateMilli)/1000, burst)
	}
	return slack, nil
}
