package obs

import "time"

// Part goes with a Latency that measures a whole, as delivery latency, of which
// something is a part, as access delay: it has, for each bucket of the whole, the
// sum over what is counted there of part / whole. With that a tail can be said to
// be the part's doing or not, which two histograms cannot tell: the longest waits
// need not be in the longest deliveries. Sums can be added up like counts.
//
// The zero value is empty. It is not safe for concurrent use.
type Part struct {
	sums cells[float64]
}

// Record adds a whole, as Latency.Record takes it, and the part of it, which is
// taken as the whole where it is longer. It allocates as Latency.Record.
func (p *Part) Record(whole, part time.Duration) { p.RecordMany(whole, part, 1) }

// RecordMany is Record, n times. Requires: n >= 0.
func (p *Part) RecordMany(whole, part time.Duration, n int) {
	if part <= 0 || whole <= 0 {
		return
	}
	*p.sums.at(bucketOf(whole)) += float64(n) * min(float64(part)/float64(whole), 1)
}

// Of returns the sums of the buckets with these indices, which a Latency's Proto
// gave.
func (p *Part) Of(indices []uint32) []float64 {
	sums := make([]float64, len(indices))
	for i, index := range indices {
		sums[i] = p.sums.get(int(index))
	}
	return sums
}

// Reset empties p.
func (p *Part) Reset() { p.sums.reset() }

// MeanInTail returns the mean of part / whole over the samples at or above the
// quantile q of the whole, to the resolution of a Latency (1 %); ok is false
// without samples. counts and sums are by bucket; of no bucket is a sum missing.
// 0 <= q <= 1.
func MeanInTail(q float64, counts []uint64, sums []float64) (mean float64, ok bool) {
	var total uint64
	for _, n := range counts {
		total += n
	}
	// From the top: the tail has the bucket in which the samples below it are
	// less than q of all.
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
