package client

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestRetryWaitsFollowTheRoundTrip(t *testing.T) {
	var r roundTrip
	check := func(want ...time.Duration) {
		t.Helper()
		for i, w := range want {
			testkit.Equal(t, r.wait(i+1, false), w, "after %d were sent it waits", i+1)
		}
	}
	check(time.Millisecond, 2*time.Millisecond, 4*time.Millisecond, 5*time.Millisecond)
	r.saw(20 * time.Microsecond) // and four times the variation of 40 us
	check(100*time.Microsecond, 200*time.Microsecond, 400*time.Microsecond, 800*time.Microsecond, 1600*time.Microsecond)
	r = roundTrip{}
	r.saw(200 * time.Microsecond)
	check(600 * time.Microsecond)
	r.saw(200 * time.Microsecond)
	check(500 * time.Microsecond)
	r.saw(time.Second)
	check(5 * time.Millisecond)
	testkit.Equal(t, r.wait(1<<20, false), 5*time.Millisecond, "in the end it waits")
	testkit.Equal(t, r.wait(3, true), 100*time.Microsecond, "the paper's client waits")
}
