package conn

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/nsq/wire"
)

// room limits the memory of commands that are incomplete or wait to be carried out. It counts the
// buffers larger than maxIdle of all connections. If the buffers exceed most bytes, the connection
// that has had such a buffer for longest ends. So a client that sends half a message and stops
// cannot lock out other clients. The memory of that connection is freed a moment later. Beyond
// twice the limit, a connection that needs more memory ends itself.
type room struct {
	most int64 // limit in bytes; set once; 0: no limit

	refused atomic.Uint64 // connections ended for memory; written under mu

	mu struct {
		sync.Mutex
		all   int64
		queue list.List // of *client with a large buffer that were not ended, oldest first
	}
}

// charge is a connection's share of the room. Guarded by room.mu, except large.
type charge struct {
	large int64         // bytes; owned by the connection's reader
	place *list.Element // nil: not in the queue
}

var errNoRoom = wire.NewError(wire.CodePubFailed, "PUB failed, the messages that are being sent take as much memory as they may, and this one for longest")

// holds sets the size of the connection's buffer. If holds returns false, the connection must not
// use the buffer and must end.
func (c *client) holds(size int) bool {
	r := &c.env.room
	n := int64(size)
	if n <= maxIdle {
		n = 0
	}
	if r.most == 0 || n == c.charge.large {
		return true
	}
	r.mu.Lock()
	more := n - c.charge.large
	var out *client
	switch front := r.mu.queue.Front(); {
	case more <= 0 || r.mu.all+more <= r.most || r.mu.all == c.charge.large: // or c has the only large buffer
	case c.crowded.Load():
		out = c
	case front != nil && front.Value != c:
		out = front.Value.(*client)
		out.crowd()
		if r.mu.all+more > 2*r.most {
			c.crowd()
			out = c
		}
	case r.mu.queue.Len() > 1 || r.mu.all+more > 2*r.most:
		c.crowd()
		out = c
	}
	ok := out != c
	if ok {
		r.mu.all += more
		c.charge.large = n
		switch at := c.charge.place; {
		case n == 0 && at != nil:
			r.mu.queue.Remove(at)
			c.charge.place = nil
		case n > 0 && at == nil && !c.crowded.Load():
			c.charge.place = r.mu.queue.PushBack(c)
		}
	}
	r.mu.Unlock()
	return ok
}

// crowd ends the connection because memory is short. Requires: room.mu held.
func (c *client) crowd() {
	r := &c.env.room
	if c.charge.place != nil {
		r.mu.queue.Remove(c.charge.place)
		c.charge.place = nil
	}
	if !c.crowded.Swap(true) {
		r.refused.Add(1)
		c.quit()
	}
}

// cause returns why the connection ends. If memory is short, cause first tells the peer.
func (c *client) cause() error {
	if c.crowded.Load() {
		c.sess.Refuse(errNoRoom)
	}
	_, cause := c.sess.Closing()
	return cause
}
