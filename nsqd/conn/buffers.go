package conn

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Buffers are small while little comes, since most connections are idle
// sensors, and grow to what a client sends at once.
const (
	minBuffer = 512
	maxIdle   = 16 << 10 // a buffer larger than this is given back when empty
)

// buffers hands out memory for what connections have read and not carried out
// yet, in powers of two, and takes it back, so that commands that come in
// several reads cost no allocation. What lies unused is let go by the second
// garbage collection. The zero value is ready; safe for concurrent use.
type buffers struct {
	// classes have *byte, the first of minBuffer << i: a slice in an interface
	// would be an allocation.
	classes [bufferClasses]sync.Pool
}

// bufferClasses is up to 1 MiB, the largest message by default; beyond that
// memory is left to the garbage collector.
const bufferClasses = 12

// get returns a buffer of size bytes or more, all of which are to be used.
func (p *buffers) get(size int) []byte {
	i := bits.Len(uint(max(size, 1)-1) / minBuffer)
	if i >= bufferClasses {
		return make([]byte, size)
	}
	if b, ok := p.classes[i].Get().(*byte); ok {
		return unsafe.Slice(b, minBuffer<<i)
	}
	return make([]byte, minBuffer<<i)
}

// put takes a buffer back, whole, or does nothing. Requires: nothing refers to it.
func (p *buffers) put(b []byte) {
	poison(b)
	i := bits.Len(uint(max(len(b), 1)-1) / minBuffer)
	if i < bufferClasses && len(b) == minBuffer<<i {
		p.classes[i].Put(unsafe.SliceData(b))
	}
}

// makeRoom makes space behind w. The buffer grows by doubling as bytes come,
// never ahead of them: a size that a client only announces costs no memory. It
// reports false if there may be none; then the connection is to end.
func (c *client) makeRoom() bool {
	unread := c.w - c.r
	if unread == 0 {
		c.r, c.w = 0, 0
		if len(c.buf) > maxIdle {
			c.giveBack()
		}
	}
	need := max(c.sess.Need(), unread+1)
	if c.r+need <= len(c.buf) {
		return true
	}
	if c.r > 0 {
		copy(c.buf, c.buf[c.r:c.w])
		c.r, c.w = 0, unread
	}
	if c.w == len(c.buf) {
		most := max(need, maxIdle)
		if wire.PeekVerb(c.buf[:c.w]) == wire.VerbMpub { // which says message by message what it needs
			most = max(most, c.env.cfg.Session.Limits.MaxCommandSize())
		}
		return c.grow(min(2*len(c.buf), most))
	}
	return true
}

// grow moves what is unread to a buffer of that size or more. Requires: the old
// one is the connection's own, and nothing else refers to it. It reports false, and
// does nothing, if there may be none.
func (c *client) grow(size int) bool {
	buf := c.env.buffers.get(size)
	if !c.holds(len(buf)) {
		c.env.buffers.put(buf)
		return false
	}
	n := copy(buf, c.buf[c.r:c.w])
	c.env.buffers.put(c.buf)
	c.buf, c.r, c.w = buf, 0, n
	return true
}

// giveBack empties the buffer, and gives it back. Requires as for grow.
func (c *client) giveBack() {
	c.env.buffers.put(c.buf)
	c.buf, c.r, c.w = nil, 0, 0
	c.holds(0)
}
