package client

import (
	"testing"
	"time"
)

func TestWaits(t *testing.T) {
	var r roundTrip
	check := func(want ...time.Duration) {
		t.Helper()
		for i, w := range want {
			if got := r.wait(i+1, false); got != w {
				t.Errorf("after %d were sent it waits %v, want %v", i+1, got, w)
			}
		}
	}
	check(time.Millisecond, 2*time.Millisecond, 4*time.Millisecond, 5*time.Millisecond)
	r.saw(20 * time.Microsecond) // and 40 us of four times the variation
	check(100*time.Microsecond, 200*time.Microsecond, 400*time.Microsecond, 800*time.Microsecond, 1600*time.Microsecond)
	r = roundTrip{}
	r.saw(200 * time.Microsecond)
	check(600 * time.Microsecond)
	r.saw(200 * time.Microsecond)
	check(500 * time.Microsecond)
	r.saw(time.Second)
	check(5 * time.Millisecond)
	if got := r.wait(1<<20, false); got != 5*time.Millisecond {
		t.Errorf("in the end it waits %v", got)
	}
	if got := r.wait(3, true); got != 100*time.Microsecond {
		t.Errorf("the paper's client waits %v", got)
	}
}
