package rawfd

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
)

// Goroutines that share the loop's only processor get their turn when the loop yields.
func TestOthersHaveTheirTurn(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var b Blocking
	var ran atomic.Bool
	go ran.Store(true)
	b.Blocks(0)
	if ran.Load() {
		t.Error("yielded at once")
	}
	if b.Blocks(mono.Time(yieldEvery)); !ran.Load() {
		t.Error("did not yield")
	}
}
