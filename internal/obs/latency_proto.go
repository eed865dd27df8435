package obs

import (
	"fmt"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
)

// maxSamples bounds the samples of one histogram from the network, so sums of thousands
// of histograms do not overflow. At 10^9 msg/s it covers a third of a day in one report.
const maxSamples = 1 << 45

// LatencyProto returns the samples as a message with only the buckets in use.
func LatencyProto(l *histogram.Latency) *srtmv1.Histogram {
	p := &srtmv1.Histogram{
		LowestUs: histogram.LowestMicros, HighestUs: histogram.HighestMicros, SignificantDigits: histogram.Digits,
	}
	for i, n := range l.All() {
		p.Index = append(p.Index, uint32(i))
		p.Count = append(p.Count, uint64(n))
	}
	return p
}

// LatencyFromProto is the inverse of LatencyProto. Nil is an empty histogram. It refuses a
// different layout, indices out of range or not ascending, counts of 0, lists of
// different lengths, and more samples than maxSamples.
func LatencyFromProto(p *srtmv1.Histogram) (*histogram.Latency, error) {
	l := histogram.NewLatency()
	if p == nil {
		return l, nil
	}
	if p.LowestUs != histogram.LowestMicros || p.HighestUs != histogram.HighestMicros || p.SignificantDigits != histogram.Digits {
		return nil, fmt.Errorf("histogram of %d..%d us with %d digits: want %d..%d us with %d digits",
			p.LowestUs, p.HighestUs, p.SignificantDigits, histogram.LowestMicros, histogram.HighestMicros, histogram.Digits)
	}
	if len(p.Index) != len(p.Count) {
		return nil, fmt.Errorf("histogram with %d indices and %d counts", len(p.Index), len(p.Count))
	}
	if len(p.Index) > histogram.Buckets {
		return nil, fmt.Errorf("histogram with %d buckets: the layout has %d", len(p.Index), histogram.Buckets)
	}
	var total uint64
	for i, index := range p.Index {
		switch {
		case int64(index) >= histogram.Buckets:
			return nil, fmt.Errorf("histogram index %d: the last one is %d", index, histogram.Buckets-1)
		case i > 0 && index <= p.Index[i-1]:
			return nil, fmt.Errorf("histogram index %d after %d: want ascending", index, p.Index[i-1])
		case p.Count[i] == 0:
			return nil, fmt.Errorf("histogram index %d has no samples", index)
		case p.Count[i] > maxSamples-total:
			return nil, fmt.Errorf("histogram of more than %d samples", int64(maxSamples))
		}
		total += p.Count[i]
		low, _ := histogram.BucketRange(int(index))
		l.RecordMany(time.Duration(low)*time.Microsecond, int64(p.Count[i]))
	}
	return l, nil
}
