package up

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

const (
	// rateMargin is r divided by the offered rate, the paper's choice.
	rateMargin = 1.1
	// burstMargin is the minimum of b divided by the burst that the load needs. The
	// needed burst depends on the slowest 1 % of one recording, and differs between
	// recordings by some percent.
	burstMargin = 1.25
	// quickest is the minimum machine latency for deriving an SLO: a machine is not
	// always faster than this.
	quickest = time.Millisecond
)

// burstFor returns a b for which one broker has more tokens than the load needs, and each
// of k brokers fewer, by the same factor. A load that needs n on one broker needs about n
// on each of k, so b is n * sqrt(k).
func burstFor(need int64, brokers int) int64 {
	b := float64(need) * max(math.Sqrt(float64(brokers)), burstMargin)
	return int64(math.Ceil(b))
}

// sloFor returns the geometric mean of the machine's latency and the token wait of a
// blind split (0: none), at most a quarter of that wait, rounded to 1, 2 or 5 times a
// power of ten.
func sloFor(machine, split time.Duration) time.Duration {
	m, s := float64(max(machine, quickest)), float64(split)
	slo := min(math.Sqrt(m*s), s/4)
	if split == 0 {
		slo = 4 * m
	}
	slo = max(slo, float64(quickest))
	digit := math.Pow(10, math.Floor(math.Log10(slo)))
	nearest := digit
	for _, c := range []float64{2 * digit, 5 * digit, 10 * digit} {
		if math.Abs(math.Log(c/slo)) < math.Abs(math.Log(nearest/slo)) {
			nearest = c
		}
	}
	return time.Duration(nearest)
}

// access returns the waits for tokens if each message of a schedule is sent on time: the
// effect of the shares without the machine. at returns the index of a source's share.
func access(s schedule.Stream, shares []tokenbucket.Share, brokerOf func(source int32) int) *histogram.Latency {
	buckets := make([]tokenbucket.Bucket, len(shares))
	for i, share := range shares {
		buckets[i] = tokenbucket.NewFull(share, 0)
	}
	delays := histogram.NewLatency()
	for e, ok := s.Next(); ok; e, ok = s.Next() {
		b := &buckets[brokerOf(e.Source)]
		for range e.Count {
			delays.Record(b.Take(mono.Time(e.At)).Sub(mono.Time(e.At)))
		}
	}
	return delays
}

// splitWait returns the quantile of access if the contract and the sources are split
// evenly over the brokers.
func splitWait(s schedule.Stream, rate tokenbucket.Rate, burst int64, brokers int, quantile float64) time.Duration {
	shares := make([]tokenbucket.Share, brokers)
	for i := range shares {
		shares[i] = tokenbucket.Share{Rate: rate / tokenbucket.Rate(brokers), Burst: burst / int64(brokers)}
	}
	return access(s, shares, func(source int32) int { return int(source) % brokers }).Quantile(quantile)
}
