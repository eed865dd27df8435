package conn

import (
	"sync"

	"github.com/srtm-io/srtm/internal/rawfd"
)

// inbox passes connections and orders from other goroutines to a loop, and wakes the loop.
type inbox struct {
	poller *rawfd.Poller // set once; the loop's

	mu struct {
		sync.Mutex
		slots  []*slot
		order  order // if to is set, an order to carry out
		asleep bool  // the loop's goroutine waits, or is about to wait
		ended  bool
	}
	drained []*slot // mu.slots of the previous turn; owned by the loop
}

// put adds a connection. Requires: the caller set s.queued.
func (b *inbox) put(s *slot) {
	b.mu.Lock()
	b.mu.slots = append(b.mu.slots, s)
	b.wakeLocked()
	b.mu.Unlock()
}

// setOrder gives the loop an order for the end of a turn. Requires: the loop has carried out its
// previous order.
func (b *inbox) setOrder(o order) {
	b.mu.Lock()
	b.mu.order = o
	b.wakeLocked()
	b.mu.Unlock()
}

// end ends the loop. Requires: the loop has no connections.
func (b *inbox) end() {
	b.mu.Lock()
	b.mu.ended = true
	b.wakeLocked()
	b.mu.Unlock()
}

// wakeLocked wakes the loop if it waits. The nonblocking wake-up happens under mu, so that close
// cannot close the descriptor meanwhile.
func (b *inbox) wakeLocked() {
	if b.mu.asleep {
		b.mu.asleep = false
		b.poller.Wake()
	}
}

// next returns the loop's order. idle reports that the inbox is empty, so that the loop may wait;
// the loop must call awake after it waits. The loop calls next and the methods below.
func (b *inbox) next() (o order, idle, ended bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o, b.mu.order = b.mu.order, order{}
	idle = len(b.mu.slots) == 0 && o.to == nil
	b.mu.asleep = idle
	return o, idle, b.mu.ended
}

func (b *inbox) markAwake() {
	b.mu.Lock()
	b.mu.asleep = false
	b.mu.Unlock()
}

// drain removes and returns the connections. The caller clears the slice before the next call.
func (b *inbox) drain() []*slot {
	b.mu.Lock()
	b.mu.slots, b.drained = b.drained[:0], b.mu.slots
	b.mu.Unlock()
	return b.drained
}

func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.asleep = false // prevents a wake-up on a closed descriptor
	b.poller.Close()
}
