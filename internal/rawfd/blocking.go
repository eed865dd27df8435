package rawfd

import (
	"runtime"
	"sync"
	"time"
	_ "unsafe" // for goyield

	"github.com/srtm-io/srtm/internal/mono"
)

// Blocking is a goroutine whose thread the kernel wakes repeatedly, instead of Go's
// poller. This saves a sixth of the processor time per message if each message wakes the
// goroutine, and half if other goroutines work for it. But the runtime must know: while
// the thread blocks, it occupies one of the GOMAXPROCS processors.
type Blocking struct{ yielded mono.Time }

var processors struct {
	sync.Mutex
	unblocked int // GOMAXPROCS without the blocking goroutines
	blocking  int
}

// Begin comes first, and End last. Between them GOMAXPROCS is raised by the number of
// blocking goroutines. Otherwise the runtime regains a blocked thread's processor only
// when its monitor looks, up to 10 ms later, and all other goroutines would wait.
func (b *Blocking) Begin() { occupied(1) }

// End comes once after Begin.
func (b *Blocking) End() { occupied(-1) }

func occupied(change int) {
	p := &processors
	p.Lock()
	defer p.Unlock()
	if p.blocking == 0 {
		p.unblocked = runtime.GOMAXPROCS(0)
	}
	p.blocking += change
	if n := max(p.unblocked, p.blocking+1); n != runtime.GOMAXPROCS(0) {
		runtime.GOMAXPROCS(n)
	}
}

// yieldEvery is the interval after which other goroutines of the same processor get a
// turn. Without a switch for 10 ms, the runtime's monitor takes the goroutine for an
// endless computation. It then interrupts the goroutine, looks again every 20 us, and
// takes 3 % of a processor.
const yieldEvery = 5 * time.Millisecond

// Blocks precedes each call that may block. now is the approximate time.
func (b *Blocking) Blocks(now mono.Time) {
	if now.Sub(b.yielded) >= yieldEvery {
		b.yielded = now
		goyield()
	}
}

// goyield is runtime.Gosched without the wake-up of another thread. The goroutine goes to
// the end of the run queue of its own processor. Two such wake-ups every 5 ms took a
// tenth of the processor time of a server with 2,000 requests a second. Go keeps goyield
// for gVisor and others (go.dev/issue/67401).
//
//go:linkname goyield runtime.goyield
func goyield()
