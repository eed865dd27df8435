package stats_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/stats"
)

const span = 10 * time.Second

func at(seconds float64) mono.Time { return mono.Time(seconds * float64(time.Second)) }

func TestAnEmptyWindow(t *testing.T) {
	var w stats.Window
	s := w.Summary(at(5), span)
	if s.Count() != 0 || s.Quantile(1) != 0 {
		t.Errorf("%d, %v", s.Count(), s.Quantile(1))
	}
	s.Merge(stats.Summary{})
	testkit.Equal(t, s.Count(), 0)
}

func TestOldLatenciesGo(t *testing.T) {
	var w stats.Window
	w.Record(at(100), span, time.Second)
	w.Record(at(104.9), span, 2*time.Second)
	w.Record(at(105), span, 3*time.Second) // the second half
	testkit.Equal(t, w.Summary(at(109.9), span).Count(), 3)
	if got := w.Summary(at(110), span); got.Count() != 1 || math.Abs(got.Quantile(0.5).Seconds()-3) > 0.03 {
		t.Errorf("%d %v", got.Count(), got.Quantile(0.5))
	}
	testkit.Equal(t, w.Summary(at(115), span).Count(), 0)
	w.Record(at(300), span, time.Second) // after a pause longer than the window
	testkit.Equal(t, w.Summary(at(300), span).Count(), 1)
}

func TestWhatIsOutOfRangeIsAtItsEnd(t *testing.T) {
	var w stats.Window
	w.Record(0, span, -time.Second)
	w.Record(0, span, 1000*time.Hour)
	s := w.Summary(0, span)
	if s.Quantile(0.1) != time.Microsecond || s.Quantile(1) < 48*time.Hour || s.Count() != 2 {
		t.Errorf("%v %v %d", s.Quantile(0.1), s.Quantile(1), s.Count())
	}
}

// The test compares a window with a list of all latencies. A window has every latency of the last half span and no
// latency older than the span; its quantiles are the quantiles of its latencies.
func TestAgainstAList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type sample struct {
			at mono.Time
			d  time.Duration
		}
		var w stats.Window
		var all []sample
		now := mono.Time(0)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(span)/4).Draw(t, "gap")))
			d := time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "latency"))
			w.Record(now, span, d)
			all = append(all, sample{now, d})
		}
		now = now.Add(time.Duration(rapid.Int64Range(0, int64(span)*2).Draw(t, "then")))
		s := w.Summary(now, span)
		least, most := 0, 0
		var ds []time.Duration
		for _, x := range all {
			if age := now.Sub(x.at); age < span {
				most++
				if age < span/2 {
					least++
				}
			}
		}
		if s.Count() < int64(least) || s.Count() > int64(most) {
			t.Fatalf("%d latencies, of %d in the half span and %d in the span", s.Count(), least, most)
		}
		for _, x := range all[len(all)-int(s.Count()):] {
			ds = append(ds, x.d)
		}
		slices.Sort(ds)
		for _, q := range []float64{0.5, 0.95, 0.99, 1} {
			if len(ds) == 0 {
				break
			}
			want := ds[int(math.Ceil(q*float64(len(ds))))-1]
			if got := s.Quantile(q); got < want.Truncate(time.Microsecond) || float64(got) > 1.01*float64(want)+2000 {
				t.Fatalf("quantile %v of %d: %v, want %v", q, len(ds), got, want)
			}
		}
		both := w.Summary(now, span)
		both.Merge(s)
		if both.Count() != 2*s.Count() || both.Quantile(1) != s.Quantile(1) {
			t.Fatalf("merged with itself: %d, %v", both.Count(), both.Quantile(1))
		}
	})
}
