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

// memoryCharge is a connection's share of the budget. Guarded by memoryBudget.mu, except large.
type memoryCharge struct {
	large   int64         // bytes; owned by the connection's reader
	element *list.Element // nil: not in the queue
}

var errMemoryShort = wire.NewError(wire.CodePubFailed, "PUB failed, the messages that are being sent take as much memory as they may, and this one for longest")

// chargeBuffer sets the size of the connection's buffer. If chargeBuffer returns false, the
// connection must not use the buffer and must end.
func (c *client) chargeBuffer(size int) bool {
	budget := &c.env.memory
	n := int64(size)
	if n <= maxIdle {
		n = 0
	}
	if budget.limit == 0 || n == c.charge.large {
		return true
	}
	budget.mu.Lock()
	growth := n - c.charge.large
	var victim *client
	switch front := budget.mu.holders.Front(); {
	case growth <= 0 || budget.mu.used+growth <= budget.limit || budget.mu.used == c.charge.large: // or c has the only large buffer
	case c.memoryShort.Load():
		victim = c
	case front != nil && front.Value != c:
		victim = front.Value.(*client)
		victim.endForMemory()
		if budget.mu.used+growth > 2*budget.limit {
			c.endForMemory()
			victim = c
		}
	case budget.mu.holders.Len() > 1 || budget.mu.used+growth > 2*budget.limit:
		c.endForMemory()
		victim = c
	}
	ok := victim != c
	if ok {
		budget.mu.used += growth
		c.charge.large = n
		switch element := c.charge.element; {
		case n == 0 && element != nil:
			budget.mu.holders.Remove(element)
			c.charge.element = nil
		case n > 0 && element == nil && !c.memoryShort.Load():
			c.charge.element = budget.mu.holders.PushBack(c)
		}
	}
	budget.mu.Unlock()
	return ok
}

// endForMemory ends the connection because memory is short. Requires: memoryBudget.mu held.
func (c *client) endForMemory() {
	budget := &c.env.memory
	if c.charge.element != nil {
		budget.mu.holders.Remove(c.charge.element)
		c.charge.element = nil
	}
	if !c.memoryShort.Swap(true) {
		budget.ended.Add(1)
		c.quit()
	}
}

// cause returns why the connection ends. If memory is short, cause first tells the peer.
func (c *client) cause() error {
	if c.memoryShort.Load() {
		c.sess.Refuse(errMemoryShort)
	}
	_, cause := c.sess.Closing()
	return cause
}
