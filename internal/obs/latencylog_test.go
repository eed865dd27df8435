package obs_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
)

// The histogram's own project reads the log and finds the measured samples.
func TestLatencyLogHoldsEverySample(t *testing.T) {
	a, b := histogram.NewLatency(), histogram.NewLatency()
	for i := range 1000 {
		a.Record(time.Duration(i) * 37 * time.Microsecond)
	}
	var file bytes.Buffer
	testkit.Must(t, obs.WriteLatencyLog(&file, 90*time.Second, obs.TaggedLatency{Tag: "answer", Latency: a}, obs.TaggedLatency{Tag: "end_to_end", Latency: b}))
	log := hdrhistogram.NewHistogramLogReader(&file)
	for _, want := range []struct {
		tag string
		l   *histogram.Latency
	}{{"answer", a}, {"end_to_end", b}} {
		h, err := log.NextIntervalHistogram()
		if err != nil || h == nil {
			t.Fatalf("%s: %v", want.tag, err)
		}
		if h.Tag() != want.tag || h.TotalCount() != want.l.Count() || h.EndTimeMs()-h.StartTimeMs() != 90_000 {
			t.Errorf("%s of %d ms with %d samples, want %s of 90 s with %d", h.Tag(), h.EndTimeMs()-h.StartTimeMs(), h.TotalCount(), want.tag, want.l.Count())
		}
		for _, q := range []float64{0, 0.5, 0.99, 1} {
			testkit.Equal(t, time.Duration(h.ValueAtPercentile(100*q))*time.Microsecond, want.l.Quantile(q), "quantile %v", q)
		}
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestLatencyLogThatCannotBeWritten(t *testing.T) {
	if err := obs.WriteLatencyLog(full{}, time.Second, obs.TaggedLatency{Tag: "a", Latency: histogram.NewLatency()}); err == nil {
		t.Error("no error")
	}
}
