package conn

import (
	"sync"

	"github.com/srtm-io/srtm/internal/poll"
)

// inbox is what other goroutines have for a loop, and ends its wait for events.
type inbox struct {
	poller *poll.Poller // set once; the loop's

	mu struct {
		sync.Mutex
		slots  []*slot
		order  order // to: nil, or to be carried out
		asleep bool  // the loop's goroutine waits, or is about to
		ended  bool
	}
	taken []*slot // mu.slots of the turn before; owned by the loop
}

// put puts a connection in. Requires: the caller set s.queued.
func (b *inbox) put(s *slot) {
	b.mu.Lock()
	b.mu.slots = append(b.mu.slots, s)
	b.wakeLocked()
	b.mu.Unlock()
}

// tell has the loop carry something out at the end of a turn. Requires: it has
// carried out what it was told before.
func (b *inbox) tell(o order) {
	b.mu.Lock()
	b.mu.order = o
	b.wakeLocked()
	b.mu.Unlock()
}

// end ends the loop. Requires: it has no connection any more.
func (b *inbox) end() {
	b.mu.Lock()
	b.mu.ended = true
	b.wakeLocked()
	b.mu.Unlock()
}

// wakeLocked ends the loop's wait, if there is one. The write is made under the
// lock, so that the descriptor is not closed meanwhile; it does not block.
func (b *inbox) wakeLocked() {
	if b.mu.asleep {
		b.mu.asleep = false
		b.poller.Wake()
	}
}

// next returns what the loop is told, and whether it is to wait since there is nothing in;
// then awake follows. For the loop, as all below.
func (b *inbox) next() (o order, idle, ended bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o, b.mu.order = b.mu.order, order{}
	idle = len(b.mu.slots) == 0 && o.to == nil
	b.mu.asleep = idle
	return o, idle, b.mu.ended
}

func (b *inbox) awake() {
	b.mu.Lock()
	b.mu.asleep = false
	b.mu.Unlock()
}

// take takes the connections out, for the caller to clear before the next call.
func (b *inbox) take() []*slot {
	b.mu.Lock()
	b.mu.slots, b.taken = b.taken[:0], b.mu.slots
	b.mu.Unlock()
	return b.taken
}

// close closes the poller.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.asleep = false // there is no wait to be ended
	b.poller.Close()
}
