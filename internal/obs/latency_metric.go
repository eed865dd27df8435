package obs

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/histogram"
)

// metricBounds are the upper bounds of exposed latency buckets, the same everywhere so
// buckets can be added.
var metricBounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond,
	10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 500 * time.Millisecond, time.Second, 10 * time.Second,
}

// LatencyMetric returns the samples as a Prometheus histogram in seconds. A sample within 1 % of
// a bound may count on either side. The sum is as exact as the samples.
func LatencyMetric(l *histogram.Latency, desc *prometheus.Desc, labels ...string) prometheus.Metric {
	buckets := make(map[float64]uint64, len(metricBounds))
	var below uint64
	next, micros := 0, 0.0
	for i, n := range l.All() {
		low, high := histogram.BucketRange(i)
		for next < len(metricBounds) && low > metricBounds[next].Microseconds() {
			buckets[metricBounds[next].Seconds()] = below
			next++
		}
		below += uint64(n)
		micros += float64(n) * float64((low+high+1)/2)
	}
	for ; next < len(metricBounds); next++ {
		buckets[metricBounds[next].Seconds()] = below
	}
	return prometheus.MustNewConstHistogram(desc, below, micros/1e6, buckets, labels...)
}
