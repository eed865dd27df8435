package broker

import (
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// Both timers keep one guarantee: a set alarm fires, and not before its time unless an earlier alarm was set.
func TestAlarmFires(t *testing.T) {
	for name, kind := range map[string]func() (timer, error){"coarse": newCoarseTimer, "sharp": newSharpTimer} {
		t.Run(name, func(t *testing.T) {
			var wg sync.WaitGroup
			fired := make(chan mono.Time, 10)
			a := newAlarm(&wg, clock.Mono, kind, func(now mono.Time) { fired <- now })
			for i := range 20 {
				at := clock.Mono().Add(time.Duration(i%3) * time.Millisecond)
				a.noLater(at.Add(time.Minute))
				a.noLater(at)
				a.noLater(at.Add(time.Second)) // no earlier: ignored
				if got := <-fired; got.Before(at) {
					t.Errorf("fired %v early", at.Sub(got))
				}
			}
			a.noLater(clock.Mono().Add(-time.Hour)) // past: at once
			<-fired
			a.noLater(clock.Mono().Add(time.Hour))
			a.close()
			a.close()
			a.noLater(0) // closed: nothing happens
			wg.Wait()
			if len(fired) > 0 {
				t.Error("fired after close")
			}
		})
	}
}

// A topic that never waits costs no goroutine.
func TestAlarmStartsWithTheFirstTime(t *testing.T) {
	var wg sync.WaitGroup
	a := newAlarm(&wg, clock.Mono, func() (timer, error) {
		t.Error("a timer was made for nothing")
		return newCoarseTimer()
	}, nil)
	a.noLater(mono.Never)
	a.close()
	wg.Wait()
}

// BenchmarkAlarmLateness reports how late each timer fires in a process that
// is otherwise idle.
func BenchmarkAlarmLateness(b *testing.B) {
	for name, kind := range map[string]func() (timer, error){"coarse": newCoarseTimer, "sharp": newSharpTimer} {
		b.Run(name, func(b *testing.B) {
			var wg sync.WaitGroup
			fired := make(chan mono.Time, 1)
			a := newAlarm(&wg, clock.Mono, kind, func(now mono.Time) { fired <- now })
			var late time.Duration
			for b.Loop() {
				at := clock.Mono().Add(300 * time.Microsecond)
				a.noLater(at)
				late += (<-fired).Sub(at)
			}
			b.ReportMetric(float64(late.Microseconds())/float64(b.N), "us-late/op")
			a.close()
			wg.Wait()
		})
	}
}
