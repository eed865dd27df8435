package rawfd

import (
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
)

// Others that have no processor but the loop's have their turn when it yields.
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
