package obs

import (
	"fmt"
	"io"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/srtm-io/srtm/internal/histogram"
)

// TaggedLatency is one histogram of a log.
type TaggedLatency struct {
	// Tag is its name: letters, digits and underscores.
	Tag     string
	Latency *histogram.Latency
}

// WriteLatencyLog writes the histograms of a measurement of the given length as an
// HdrHistogram log (format 1.3). The project's tools read this format in any language.
// Each line has a tag, the maximum in seconds, and all counts, values in microseconds.
func WriteLatencyLog(w io.Writer, length time.Duration, all ...TaggedLatency) error {
	log := hdrhistogram.NewHistogramLogWriter(w)
	write := func(err error) error {
		if err != nil {
			return fmt.Errorf("histogram log: %w", err)
		}
		return nil
	}
	if err := write(log.OutputLogFormatVersion()); err != nil {
		return err
	}
	if err := write(log.OutputComment("values in microseconds, Interval_Max in seconds")); err != nil {
		return err
	}
	if err := write(log.OutputLegend()); err != nil {
		return err
	}
	for _, t := range all {
		h := hdrhistogram.New(histogram.LowestMicros, histogram.HighestMicros, histogram.Digits)
		for i, n := range t.Latency.All() {
			low, _ := histogram.BucketRange(i)
			if err := write(h.RecordValues(low, n)); err != nil {
				return err
			}
		}
		h.SetTag(t.Tag)
		h.SetStartTimeMs(0)
		h.SetEndTimeMs(length.Milliseconds())
		if err := write(log.OutputIntervalHistogram(h)); err != nil {
			return err
		}
	}
	return nil
}
