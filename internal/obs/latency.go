package obs

import (
	"fmt"
	"math"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Layout of all latencies, so any two can be merged: 1 us to 60 s with 2 significant
// digits.
const (
	lowestMicros  = 1
	highestMicros = 60_000_000
	digits        = 2

	// lastIndex is the bucket of highestMicros. 60e6 has 26 bits, and the layout keeps the
	// first 8 (228). So the index is 228-128 within the 128 counts of group 26-8+1.
	lastIndex = (26-8+1)*128 + (highestMicros >> (26 - 8)) - 128
	buckets   = lastIndex + 1

	// MaxLatency is the longest duration that a Latency distinguishes.
	MaxLatency = highestMicros * time.Microsecond
)

// maxSamples bounds the samples of one histogram from the network, so sums of thousands
// of histograms do not overflow. At 10^9 msg/s it covers a third of a day in one report.
const maxSamples = 1 << 45

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
func (l *Latency) RecordMany(d time.Duration, n int) {
	switch {
	case d < 0:
		d = 0
		l.clamped += int64(n)
	case d > MaxLatency:
		d = MaxLatency
		l.clamped += int64(n)
	}
	*l.counts.at(bucketOf(d)) += int64(n)
	l.count += int64(n)
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
	for i, n := range l.counts.all() {
		if below += n; below < rank {
			continue
		}
		low, high := bucketRange(i)
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
	for i, n := range l.counts.all() {
		low, high := bucketRange(i)
		micros += float64(n) * float64(low+high) / 2
	}
	return time.Duration(micros / float64(l.count) * float64(time.Microsecond))
}

// CountAbove returns the number of samples above d, to the resolution of the histogram:
// samples in the bucket of d do not count.
func (l *Latency) CountAbove(d time.Duration) (n int64) {
	for i, count := range l.counts.all() {
		if low, _ := bucketRange(i); low > d.Microseconds() {
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

// Reset forgets all samples.
func (l *Latency) Reset() {
	l.counts.reset()
	l.count, l.clamped = 0, 0
}

// Proto returns the samples as a message with only the buckets in use.
func (l *Latency) Proto() *srtmv1.Histogram {
	p := &srtmv1.Histogram{
		LowestUs: lowestMicros, HighestUs: highestMicros, SignificantDigits: digits,
	}
	for i, n := range l.counts.all() {
		p.Index = append(p.Index, uint32(i))
		p.Count = append(p.Count, uint64(n))
	}
	return p
}

// LatencyFromProto is the inverse of Proto. Nil is an empty histogram. It refuses a
// different layout, indices out of range or not ascending, counts of 0, lists of
// different lengths, and more samples than maxSamples.
func LatencyFromProto(p *srtmv1.Histogram) (*Latency, error) {
	l := NewLatency()
	if p == nil {
		return l, nil
	}
	if p.LowestUs != lowestMicros || p.HighestUs != highestMicros || p.SignificantDigits != digits {
		return nil, fmt.Errorf("histogram of %d..%d us with %d digits: want %d..%d us with %d digits",
			p.LowestUs, p.HighestUs, p.SignificantDigits, lowestMicros, highestMicros, digits)
	}
	if len(p.Index) != len(p.Count) {
		return nil, fmt.Errorf("histogram with %d indices and %d counts", len(p.Index), len(p.Count))
	}
	if len(p.Index) > buckets {
		return nil, fmt.Errorf("histogram with %d buckets: the layout has %d", len(p.Index), buckets)
	}
	var total uint64
	for i, index := range p.Index {
		switch {
		case int64(index) > lastIndex:
			return nil, fmt.Errorf("histogram index %d: the last one is %d", index, lastIndex)
		case i > 0 && index <= p.Index[i-1]:
			return nil, fmt.Errorf("histogram index %d after %d: want ascending", index, p.Index[i-1])
		case p.Count[i] == 0:
			return nil, fmt.Errorf("histogram index %d has no samples", index)
		case p.Count[i] > maxSamples-total:
			return nil, fmt.Errorf("histogram of more than %d samples", int64(maxSamples))
		}
		total += p.Count[i]
		*l.counts.at(int(index)) = int64(p.Count[i])
	}
	l.count = int64(total)
	return l, nil
}
