package histogram

import "time"

// Part accompanies a Latency of a whole, such as delivery latency, and measures a part of
// the whole, such as access delay. For each bucket of the whole, Part has the sum of part
// / whole over the bucket's samples. So Part can attribute a tail to the part. Two
// histograms cannot, because the longest waits need not be in the longest deliveries.
// Sums can be added like counts.
//
// The zero value is empty. It is not safe for concurrent use.
type Part struct {
	sums cells[float64]
}

// Record adds a whole (see Latency.Record) and its part, capped at the whole. It
// allocates like Latency.Record.
func (p *Part) Record(whole, part time.Duration) { p.RecordMany(whole, part, 1) }

// RecordMany is Record, n times. Requires: n >= 0.
func (p *Part) RecordMany(whole, part time.Duration, n int64) {
	if part <= 0 || whole <= 0 {
		return
	}
	*p.sums.at(bucketOf(whole)) += float64(n) * min(float64(part)/float64(whole), 1)
}

// Of returns the sums of the buckets with the given indices. Latency.All yields indices.
func (p *Part) Of(indices []uint32) []float64 {
	sums := make([]float64, len(indices))
	for i, index := range indices {
		sums[i] = p.sums.get(int(index))
	}
	return sums
}

// Reset empties p.
func (p *Part) Reset() { p.sums.reset() }

// MeanInTail returns the mean of part / whole over the samples at or above the quantile q
// of the whole, to the resolution of a Latency (1 %); ok is false without samples. counts
// and sums are by bucket, of equal length. 0 <= q <= 1.
func MeanInTail(q float64, counts []uint64, sums []float64) (mean float64, ok bool) {
	var total uint64
	for _, n := range counts {
		total += n
	}
	// From the top down to the bucket below which less than q of all samples lie.
	var n uint64
	var sum float64
	for i := len(counts) - 1; i >= 0; i-- {
		n += counts[i]
		sum += sums[i]
		if n > 0 && float64(total-n) < q*float64(total) {
			break
		}
	}
	if n == 0 {
		return 0, false
	}
	return min(sum/float64(n), 1), true
}
