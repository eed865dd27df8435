package testkit

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

// bubbles counts the open bubbles, and holds the process's number of processors before
// the first bubble.
var bubbles struct {
	sync.Mutex
	open, processors int
}

// Bubble runs f in a bubble of testing/synctest, where time is virtual. While a bubble is
// open the process has one processor. Under the race detector all timers of a bubble
// share one context. Two goroutines that read channels of expired timers at once both use
// this context, and the detector ends the process ("ThreadSanitizer: CHECK failed:
// tsan_rtl.cpp", go.dev/issue/78156). With one processor no two goroutines run at once.
// The detector finds races by their order, not by their time.
func Bubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	bubbles.Lock()
	if bubbles.open++; bubbles.open == 1 {
		bubbles.processors = runtime.GOMAXPROCS(1)
	}
	bubbles.Unlock()
	defer func() {
		bubbles.Lock()
		defer bubbles.Unlock()
		if bubbles.open--; bubbles.open == 0 {
			runtime.GOMAXPROCS(bubbles.processors)
		}
	}()
	synctest.Test(t, f)
}
