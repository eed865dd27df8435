// Package histogram counts latencies in buckets, so that histograms of many writers can be
// merged, and says which part of a tail a part of the latency is.
package histogram

import (
	"iter"
	"math"
	"time"
)

// Layout of all latencies, so any two can be merged: 1 us to 60 s with 2 significant
// digits.
const (
	LowestMicros  = 1
	HighestMicros = 60_000_000
	Digits        = 2 // significant

	// lastIndex is the bucket of HighestMicros. 60e6 has 26 bits, and the layout keeps the
	// first 8 (228). So the index is 228-128 within the 128 counts of group 26-8+1.
	lastIndex = (26-8+1)*128 + (HighestMicros >> (26 - 8)) - 128

	// Buckets is the number of buckets.
	Buckets = lastIndex + 1

	// MaxLatency is the longest duration that a Latency distinguishes.
	MaxLatency = HighestMicros * time.Microsecond
)

// Latency counts durations and returns quantiles within 1 %. It is not safe for
// concurrent use: each writer owns a Latency, and readers merge them. Make it with
// NewLatency.
//
// The buckets are the buckets of an HdrHistogram, whose log format the latencies are
// written in. An HdrHistogram keeps all buckets, 20 KiB. A broker has several histograms
// per topic, and a topic's latencies fall into few buckets. So Latency allocates blocks
// of buckets on demand.
type Latency struct {
	counts  cells[int64]
	count   int64
	clamped int64
}

// NewLatency returns an empty Latency.
func NewLatency() *Latency { return new(Latency) }

// Record adds d, rounded up to a microsecond, so no quantile is too low. A negative d
// counts as 0, and a d above MaxLatency as MaxLatency. Both also count in Clamped. Record
// allocates only for the first of similar latencies.
func (l *Latency) Record(d time.Duration) { l.RecordMany(d, 1) }

// RecordMany adds d, n times. Requires: n >= 0.
func (l *Latency) RecordMany(d time.Duration, n int64) {
	switch {
	case d < 0:
		d = 0
		l.clamped += n
	case d > MaxLatency:
		d = MaxLatency
		l.clamped += n
	}
	*l.counts.at(bucketOf(d)) += n
	l.count += n
}

// Count returns the number of samples.
func (l *Latency) Count() int64 { return l.count }

// Clamped returns the number of samples out of range since the last Reset, here and in
// merged latencies. A histogram from the network has none.
func (l *Latency) Clamped() int64 { return l.clamped }

// Quantile returns the smallest duration that a fraction q of the samples do not exceed,
// rounded up by less than 1 % (from 256 us on); 0 without samples. q is clamped to [0,
// 1].
func (l *Latency) Quantile(q float64) time.Duration {
	if math.IsNaN(q) {
		q = 1
	}
	q = min(max(q, 0), 1)
	rank := min(max(int64(q*float64(l.count)+0.5), 1), l.count) // as in HdrHistogram
	var below int64
	for i, n := range l.All() {
		if below += n; below < rank {
			continue
		}
		low, high := BucketRange(i)
		if q == 0 {
			high = low
		}
		return min(time.Duration(high)*time.Microsecond, MaxLatency)
	}
	return 0
}

// Mean returns the mean of the samples, as exact as the samples; 0 without samples.
func (l *Latency) Mean() time.Duration {
	if l.count == 0 {
		return 0
	}
	micros := 0.0
	for i, n := range l.All() {
		low, high := BucketRange(i)
		micros += float64(n) * float64(low+high) / 2
	}
	return time.Duration(micros / float64(l.count) * float64(time.Microsecond))
}

// CountAbove returns the number of samples above d, to the resolution of the histogram:
// samples in the bucket of d do not count.
func (l *Latency) CountAbove(d time.Duration) (n int64) {
	for i, count := range l.All() {
		if low, _ := BucketRange(i); low > d.Microseconds() {
			n += count
		}
	}
	return n
}

// Merge adds the samples of other and does not modify other.
func (l *Latency) Merge(other *Latency) {
	l.clamped += other.clamped
	l.count += other.count
	for i, n := range other.counts.all() {
		*l.counts.at(i) += n
	}
}

// All yields the buckets with samples, in order, and their counts.
func (l *Latency) All() iter.Seq2[int, int64] { return l.counts.all() }

// Reset forgets all samples.
func (l *Latency) Reset() {
	l.counts.reset()
	l.count, l.clamped = 0, 0
}
