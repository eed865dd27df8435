package obs_test

import (
	"math"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestLatencyMetricCountsWhatIsBelowEachBound(t *testing.T) {
	l := histogram.NewLatency()
	for _, d := range []time.Duration{0, 10 * time.Microsecond, 300 * time.Microsecond, 3 * time.Millisecond, time.Minute} {
		l.Record(d)
	}
	var m dto.Metric
	testkit.Must(t, obs.LatencyMetric(l, prometheus.NewDesc("x", "help", nil, nil)).Write(&m))
	h := m.GetHistogram()
	testkit.Equal(t, h.GetSampleCount(), 5, "samples")
	if got, want := h.GetSampleSum(), 60.00331; math.Abs(got-want) > want/100 {
		t.Errorf("sum %g s, want %g within 1 %%", got, want)
	}
	want := map[float64]uint64{50e-6: 2, 200e-6: 2, 500e-6: 3, 2e-3: 3, 5e-3: 4, 10: 4}
	for _, b := range h.GetBucket() {
		if n, ok := want[b.GetUpperBound()]; ok && b.GetCumulativeCount() != n {
			t.Errorf("%d samples up to %g s, want %d", b.GetCumulativeCount(), b.GetUpperBound(), n)
		}
		delete(want, b.GetUpperBound())
	}
	if len(want) > 0 {
		t.Errorf("no bucket for %v", want)
	}
}

// The sum is HdrHistogram's.
func TestLatencyMetricHasTheSumOfAnHdrHistogram(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, h := histogram.NewLatency(), hdrhistogram.New(histogram.LowestMicros, histogram.HighestMicros, histogram.Digits)
		for _, micros := range rapid.SliceOf(rapid.OneOf(rapid.Int64Range(0, histogram.HighestMicros), rapid.Int64Range(0, 2000))).Draw(t, "micros") {
			l.Record(time.Duration(micros) * time.Microsecond)
			testkit.Must(t, h.RecordValue(micros))
		}
		var m dto.Metric
		testkit.Must(t, obs.LatencyMetric(l, prometheus.NewDesc("x", "help", nil, nil)).Write(&m))
		if got, want := m.GetHistogram().GetSampleSum(), h.Mean()*float64(h.TotalCount())/1e6; math.Abs(got-want) > 1e-9*(want+1) {
			t.Fatalf("sum %v, want %v", got, want)
		}
	})
}
