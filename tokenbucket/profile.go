package tokenbucket

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// ErrNoArrivals reports an empty trace.
var ErrNoArrivals = errors.New("no arrivals")

// Replay takes a token from b for each arrival, in order, and returns the access delays. A message
// that is never admitted has the longest delay.
func Replay(arrivals []mono.Time, b *Bucket) []time.Duration {
	delays := make([]time.Duration, len(arrivals))
	for i, at := range arrivals {
		delays[i] = accessDelay(at, b.Take(at))
	}
	return delays
}

func accessDelay(at, e mono.Time) time.Duration {
	d := e.Sub(at) // never below 0, but may overflow
	if e == mono.Never || d < 0 {
		return math.MaxInt64
	}
	return d
}

// Profile returns the smallest burst for which the given quantile of a trace's access delays is 0.
// The trace is judged in the given order by a bucket that is full at the first arrival. The
// quantile (above 0, at most 1) is by nearest rank: at 0.99, at most 1 of each full 100 messages
// waits. The paper (section 6) uses 1.1 times the trace's mean rate and the quantile 0.99.
//
// The result is as random as the trace: rare bursts determine it, and it differs between two hours
// of one source. Profile measures this trace and does not predict the next.
//
// Errors: ErrNoArrivals; a *ShareError for the rate, or for the burst if the trace needs more than
// MaxBurst.
func Profile(arrivals []mono.Time, rate Rate, quantile float64) (burst int64, err error) {
	if err := (Share{Rate: rate, Burst: MinBurst}).Validate(); err != nil {
		return 0, err
	}
	if !(quantile > 0 && quantile <= 1) {
		return 0, fmt.Errorf("quantile %v is not over 0 and at most 1", quantile)
	}
	if len(arrivals) == 0 {
		return 0, ErrNoArrivals
	}
	// The unfinished work that a message finds and adds to does not depend on the burst. The
	// message waits if the work exceeds the burst. So the burst is the quantile of the work,
	// rounded up, and no search is necessary.
	work := make([]int64, len(arrivals))
	tat := mul(int64(arrivals[0]), int64(rate)) // in subtokens, as in Bucket
	for i, at := range arrivals {
		position := mul(int64(at), int64(rate))
		if tat.less(position) {
			tat = position
		}
		tat = tat.add(from64(subtoken))
		work[i] = tat.sub(position).ceilDiv(subtoken)
	}
	slices.Sort(work)
	need := work[Rank(len(work), quantile)]
	if need > MaxBurst {
		return 0, &ShareError{Field: "burst", Value: need, Min: MinBurst, Max: MaxBurst}
	}
	if need == 1 {
		// A bucket of one token loses part of a nanosecond on each message that waits (see Bucket),
		// and may just fail the definition.
		bucket := NewFull(Share{Rate: rate, Burst: 1}, arrivals[0])
		delays := Replay(arrivals, &bucket)
		slices.Sort(delays)
		if delays[Rank(len(delays), quantile)] > 0 {
			need = 2
		}
	}
	return need, nil
}

// Rank returns the index of the quantile q (0 to 1) among n sorted values by nearest rank: the
// smallest value that a share q of all values does not exceed. Requires: n >= 1.
func Rank(n int, q float64) int {
	// A product such as 0.07 * 100 is slightly above its true value, which must not add a rank.
	const slack = 1 - 4*0x1p-53
	return min(max(int(math.Ceil(q*float64(n)*slack))-1, 0), n-1)
}
