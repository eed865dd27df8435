package rawfd

import (
	"runtime"
	"sync"
	"time"
	_ "unsafe" // for goyield

	"github.com/srtm-io/srtm/internal/mono"
)

// Blocking is a goroutine that has the kernel wake its thread, again and again, rather than
// be parked by Go's poller. That takes a sixth less processor time for a message where each
// wakes the goroutine, and half where other goroutines work for it, but the runtime has to
// be told: for as long as the thread blocks, it keeps one of those that GOMAXPROCS counts.
type Blocking struct{ yielded mono.Time }

var processors struct {
	sync.Mutex
	own      int // GOMAXPROCS without them
	blocking int
}

// Begin comes first, and End last. There are more that GOMAXPROCS counts than goroutines
// between both: what a blocked thread keeps the runtime gets back only when its monitor
// looks, up to 10 ms later, and all other goroutines would wait for that.
func (b *Blocking) Begin() { occupied(1) }

// End comes once after Begin.
func (b *Blocking) End() { occupied(-1) }

func occupied(more int) {
	p := &processors
	p.Lock()
	defer p.Unlock()
	if p.blocking == 0 {
		p.own = runtime.GOMAXPROCS(0)
	}
	p.blocking += more
	if n := max(p.own, p.blocking+1); n != runtime.GOMAXPROCS(0) {
		runtime.GOMAXPROCS(n)
	}
}

// yieldEvery is how often others that wait for the same processor have their turn. A
// goroutine that the scheduler has not switched for 10 ms counts as one that computes without
// end: the runtime's monitor interrupts it, looks again every 20 us, and takes 3 % of a
// processor with that.
const yieldEvery = 5 * time.Millisecond

// Blocks comes before each call that may block. now is about when.
func (b *Blocking) Blocks(now mono.Time) {
	if now.Sub(b.yielded) >= yieldEvery {
		b.yielded = now
		goyield()
	}
}

// goyield is runtime.Gosched, but that it wakes no other thread to look for the goroutine,
// which goes on with its own processor after those that wait for that one. Two such
// wake-ups every 5 ms were a tenth of the processor time of a server that answers 2,000
// questions a second. Go keeps it for gVisor and others (go.dev/issue/67401).
//
//go:linkname goyield runtime.goyield
func goyield()
