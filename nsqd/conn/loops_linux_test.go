package conn

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Shuffle changes the loops at random, unless the last change is still in progress. Shuffle adds a loop while there are
// fewer than most, removes a loop, or moves some of a loop's connections to another loop. Shuffle reports whether it
// did.
func (s *Server) Shuffle(random *rand.Rand, most int) bool {
	g := s.loops()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.orderPending.Load() {
		return false
	}
	for _, l := range g.all {
		l.effort.look(mono.Time(1)) // the work of earlier turns is known
	}
	n := len(g.all)
	c := change{kind: startLoop}
	if n == most || n > 1 && random.IntN(4) > 0 {
		from := random.IntN(n)
		c = change{kind: moveWork, from: from, to: (from + 1 + random.IntN(n-1)) % n, share: random.Float64() * 1.5}
		if random.IntN(3) == 0 {
			c.kind = endLoop
		}
	}
	g.apply(c)
	return true
}

func TestProcessorsThatHaveNothingToDo(t *testing.T) {
	var p processors
	testkit.Equal(t, p.meanIdle(1), -1, "processors before the first moment")
	if got := p.meanIdle(2); p.idle <= 0 || got < 0 {
		t.Errorf("%v, %v since the system started", got, p.idle)
	}
	testkit.Equal(t, p.meanIdle(2+mono.Time(11*lookInterval)), -1, "over a time that is too long")
}

// A turn's length is its processor time. Time that the system gave to other threads does not count.
func TestBusyIsProcessorTime(t *testing.T) {
	runtime.LockOSThread() // otherwise the thread may change between turns
	defer runtime.UnlockOSThread()
	var e effort
	for range 10 * sampleEvery {
		e.beginTurn()
		if e.turns%sampleEvery == 1 {
			e.cpu -= 2 * time.Millisecond // as if the thread had run for 2 ms
		}
		e.endTurn(8 * time.Millisecond)
	}
	if busy, wall := e.busy.Load(), int64(10*sampleEvery*8*time.Millisecond); busy < wall/5 || busy > wall/2 {
		t.Errorf("%d ns of %d, a quarter of which the thread ran", busy, wall)
	}
}
