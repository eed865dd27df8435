package limit

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Whatever a server does, and in whatever order the server answers, the limit stays between its
// bounds. So requests always flow and never all at once.
func TestLimitStaysWithinItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		least := rapid.IntRange(0, 8).Draw(t, "least")
		l := New(least)
		now := mono.Time(1)
		type flight struct {
			sample Sample
			since  mono.Time
		}
		var flying []flight
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "passed")))
			switch do := rapid.IntRange(0, 4).Draw(t, "do"); {
			case do < 2 && len(flying) < l.Most():
				flying = append(flying, flight{l.Sent(len(flying)+1, rapid.Bool().Draw(t, "waiting"), now), now})
			case do == 2:
				l.Tick(now)
			case len(flying) > 0:
				i := rapid.IntRange(0, len(flying)-1).Draw(t, "which")
				f := flying[i]
				flying = append(flying[:i], flying[i+1:]...)
				took := rapid.SampledFrom([]time.Duration{now.Sub(f.since), 0, time.Hour, -1}).Draw(t, "took")
				l.Answered(f.sample, rapid.Uint32().Draw(t, "slot"), took, took/2, now)
			}
			if l.Most() < 1 || l.Most() > maxLimit || l.limit < float64(max(least, 1)) || !(l.knee >= 1) || l.probing > int(l.limit) {
				t.Fatalf("at most %d in flight, %d during a probe; limit %v, knee %v", l.Most(), l.probing, l.limit, l.knee)
			}
		}
	})
}

// A server that answers nothing gets some more requests, because the requests may be streams.
func TestLimitGrowsALittleWhileNothingIsAnswered(t *testing.T) {
	l, now := New(1), mono.Time(1)
	for i := range l.Most() {
		l.Sent(i+1, true, now)
	}
	before := l.Most()
	l.Tick(now.Add(stuckAfter - 1))
	testkit.Equal(t, l.Most(), before, "before its time")
	for range 100 {
		now = now.Add(stuckAfter)
		l.Tick(now)
	}
	testkit.Equal(t, l.Most(), int(stuckMost), "after a while")
}

func TestAllocation(t *testing.T) {
	l, now := New(1), mono.Time(1)
	n := testing.AllocsPerRun(1000, func() {
		now = now.Add(time.Millisecond)
		s := l.Sent(5, true, now)
		l.Answered(s, 7, time.Millisecond, time.Millisecond, now)
		l.Tick(now)
	})
	testkit.Equal(t, n, 0, "allocations of a request")
}
