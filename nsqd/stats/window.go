// Package stats has the statistics of a broker that are not counters: end-to-end latencies, from
// a message's arrival to its FIN, over a sliding window, and the Go runtime's memory in the form
// of NSQ's /stats and statsd. The package reads no clock: times are arguments, from any single
// clock.
package stats

import (
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/srtm-io/srtm/internal/mono"
)

// The range of every histogram: 1 us to 2 days with 2 significant digits, in 34 KiB. A message
// may wait long for a consumer.
const (
	lowest  = time.Microsecond
	highest = 48 * time.Hour
	digits  = 2
)

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(int64(lowest/time.Microsecond), int64(highest/time.Microsecond), digits)
}

// Window keeps the latencies of the recent past: between half of its span and the whole span. The
// zero Window is empty and allocates with the first latency. Not safe for concurrent use.
//
// A Window has two histograms. After each half span it drops the older histogram and starts a new
// one, so old latencies go in bulk and cost nothing in between.
type Window struct {
	recent, older *hdrhistogram.Histogram // nil: empty
	since         mono.Time               // start of recent
}

// Record adds a latency observed at now. span is the window's span.
func (w *Window) Record(now mono.Time, span, latency time.Duration) {
	w.roll(now, span)
	if w.recent == nil {
		w.recent = newHistogram()
	}
	micros := min(max(latency, lowest), highest) / time.Microsecond
	if err := w.recent.RecordValue(int64(micros)); err != nil {
		panic(fmt.Sprintf("stats: latency of %d us: %v", micros, err))
	}
}

// roll drops latencies that are too old at now.
func (w *Window) roll(now mono.Time, span time.Duration) {
	half := span / 2
	switch age := now.Sub(w.since); {
	case w.recent == nil && w.older == nil:
		w.since = now
	case age >= 2*half:
		w.recent, w.older, w.since = nil, nil, now
	case age >= half:
		spare := w.older
		w.older, w.since = w.recent, w.since.Add(half)
		if w.recent = spare; spare != nil {
			spare.Reset()
		}
	}
}

// Summary returns the latencies that the window holds at now.
func (w *Window) Summary(now mono.Time, span time.Duration) Summary {
	w.roll(now, span)
	var s Summary
	s.merge(w.recent)
	s.merge(w.older)
	return s
}

// Summary is a snapshot of a window. The zero Summary is empty.
type Summary struct{ h *hdrhistogram.Histogram }

func (s *Summary) merge(h *hdrhistogram.Histogram) {
	if h == nil || h.TotalCount() == 0 {
		return
	}
	if s.h == nil {
		s.h = newHistogram()
	}
	if dropped := s.h.Merge(h); dropped != 0 {
		panic(fmt.Sprintf("stats: merging dropped %d of the same layout", dropped))
	}
}

// Merge adds the latencies of o. It does not modify o.
func (s *Summary) Merge(o Summary) { s.merge(o.h) }

// Count returns the number of latencies.
func (s Summary) Count() int64 {
	if s.h == nil {
		return 0
	}
	return s.h.TotalCount()
}

// Quantile returns the smallest latency that a fraction q in (0, 1] does not exceed, rounded up
// by less than 1 %; 0 without latencies.
func (s Summary) Quantile(q float64) time.Duration {
	if s.h == nil {
		return 0
	}
	// The histogram would round the rank to the nearest.
	n := float64(s.h.TotalCount())
	rank := math.Ceil(q*n - 1e-9)
	return time.Duration(s.h.ValueAtPercentile(rank/n*100)) * time.Microsecond
}
