package obs_test

import (
	"math"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

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
