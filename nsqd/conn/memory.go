package conn

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/nsq/wire"
)

// memoryBudget limits the memory of commands that are incomplete or wait to be carried out. It
// counts the buffers larger than maxIdle of all connections. If the buffers exceed limit bytes, the
// connection that has had such a buffer for longest ends. So a client that sends half a message and
// stops cannot lock out other clients. The memory of that connection is freed a moment later.
// Beyond twice the limit, a connection that needs more memory ends itself.
type memoryBudget struct {
	limit int64 // bytes; set once; 0: no limit

	ended atomic.Uint64 // connections ended for memory; written under mu

	mu struct {
		sync.Mutex
		used    int64
		holders list.List // of *client with a large buffer that were not ended, oldest first
	}
}

// memoryCharge is a connection's share of the b. Guarded by memoryBudget.mu, except large.
type memoryCharge struct {
	large   int64         // bytes; owned by the connection's reader
	element *list.Element // nil: not in the queue
}

var errMemoryShort = wire.NewError(wire.CodePubFailed, "PUB failed, incomplete messages use all the memory for them, and this message for longest")

// charge sets the size of the connection's buffer. If charge returns false, the
// connection must not use the buffer and must end.
func (b *memoryBudget) charge(c *client, size int) bool {
	n := int64(size)
	if n <= maxIdle {
		n = 0
	}
	if b.limit == 0 || n == c.charge.large {
		return true
	}
	b.mu.Lock()
	growth := n - c.charge.large
	var victim *client
	switch front := b.mu.holders.Front(); {
	case growth <= 0 || b.mu.used+growth <= b.limit || b.mu.used == c.charge.large: // or c has the only large buffer
	case c.memoryShort.Load():
		victim = c
	case front != nil && front.Value != c:
		victim = front.Value.(*client)
		b.end(victim)
		if b.mu.used+growth > 2*b.limit {
			b.end(c)
			victim = c
		}
	case b.mu.holders.Len() > 1 || b.mu.used+growth > 2*b.limit:
		b.end(c)
		victim = c
	}
	ok := victim != c
	if ok {
		b.mu.used += growth
		c.charge.large = n
		switch element := c.charge.element; {
		case n == 0 && element != nil:
			b.mu.holders.Remove(element)
			c.charge.element = nil
		case n > 0 && element == nil && !c.memoryShort.Load():
			c.charge.element = b.mu.holders.PushBack(c)
		}
	}
	b.mu.Unlock()
	return ok
}

// end ends the connection because memory is short. Requires: memoryBudget.mu held.
func (b *memoryBudget) end(c *client) {
	if c.charge.element != nil {
		b.mu.holders.Remove(c.charge.element)
		c.charge.element = nil
	}
	if !c.memoryShort.Swap(true) {
		b.ended.Add(1)
		c.quit()
	}
}

// cause returns why the connection ends. If memory is short, cause first sends the peer an error.
func (c *client) cause() error {
	if c.memoryShort.Load() {
		c.peer.Refuse(errMemoryShort)
	}
	if c.mqtt != nil && (c.quitting.Load() || c.stopping.Load()) {
		c.mqtt.EndByBroker()
	}
	_, cause := c.sess.Closing()
	return cause
}
