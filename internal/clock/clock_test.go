package clock

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMonoNeverGoesBack(t *testing.T) {
	last := Mono()
	for range 100_000 {
		now := Mono()
		if now.Before(last) {
			t.Fatalf("went back by %v", last.Sub(now))
		}
		last = now
	}
}

func TestBootGoesOnNoSlowerThanMono(t *testing.T) {
	boot, mono := Boot(), sysMono()
	if b, m := Boot().Sub(boot), sysMono().Sub(mono); b < 0 || Boot().Sub(boot) < m {
		t.Errorf("%v, and %v of CLOCK_MONOTONIC", b, m)
	}
	testkit.Equal(t, testing.AllocsPerRun(100, func() { Boot() }), 0, "allocations")
}

// Two processes compare their readings, so Mono must be the system's own clock.
func TestMonoAgreesWithTheSystemClock(t *testing.T) {
	for range 1000 {
		before := Mono()
		sys := sysMono()
		after := Mono()
		const slack = 50 * time.Microsecond // calibration error, and NTP slewing since start
		if sys.Before(before.Add(-slack)) || after.Add(slack).Before(sys) {
			t.Fatalf("system clock %d is outside [%d, %d] by more than %v", sys, before, after, slack)
		}
	}
}
