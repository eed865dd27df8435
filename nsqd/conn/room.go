package conn

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/nsq/wire"
)

// room bounds what connections hold of commands that have not come whole, or that
// wait to be carried out: the buffers larger than maxIdle, of all connections
// together. Where they take more than most bytes, the connection ends that has had
// one for longest: who sends half a message and stops must not keep those out who
// send theirs. What is ended goes a moment later; beyond twice the bound a
// connection that needs more ends itself.
type room struct {
	most int64 // bytes; set once; 0: no bound

	refused atomic.Uint64 // connections; written under mu

	mu struct {
		sync.Mutex
		all   int64
		queue list.List // of *client that have one and are not ended for it, the oldest first
	}
}

// charge is what a connection has in it. Guarded by room.mu, but for large.
type charge struct {
	large int64         // owned by the connection's reader
	place *list.Element // nil: not in the queue
}

var errNoRoom = wire.NewError(wire.CodePubFailed, "PUB failed, the messages that are being sent take as much memory as they may, and this one for longest")

// holds says how large the connection's buffer is now. It reports false if it has to
// do without, and to end.
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
	case more <= 0 || r.mu.all+more <= r.most || r.mu.all == c.charge.large: // or it is alone
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

// crowd ends the connection for want of room. Requires: room.mu held.
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

// cause tells the peer why it is ended, if that is for want of room, and returns
// why.
func (c *client) cause() error {
	if c.crowded.Load() {
		c.sess.Refuse(errNoRoom)
	}
	_, cause := c.sess.Closing()
	return cause
}
