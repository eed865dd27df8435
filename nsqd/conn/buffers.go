package conn

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Buffers start small, since most connections are idle sensors, and grow with the bytes that a
// client sends at once.
const (
	minBuffer = 512
	maxIdle   = 16 << 10 // a larger buffer is returned when empty
)

// buffers is a pool of read buffers in powers of two, so that a command that comes in several reads
// costs no allocation. The second garbage collection frees unused buffers. The zero value is ready.
// Safe for concurrent use.
type buffers struct {
	// classes hold *byte, the first byte of minBuffer << i bytes: a slice in an interface would
	// cost an allocation.
	classes [bufferClasses]sync.Pool
}

// bufferClasses covers buffers up to 1 MiB, the default maximum message size. Larger buffers are
// left to the garbage collector.
const bufferClasses = 12

// get returns a buffer of at least size bytes.
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

// put returns a whole buffer to the pool. It drops buffers of other sizes. Requires: nothing refers
// to b.
func (p *buffers) put(b []byte) {
	poison(b)
	i := bits.Len(uint(max(len(b), 1)-1) / minBuffer)
	if i < bufferClasses && len(b) == minBuffer<<i {
		p.classes[i].Put(unsafe.SliceData(b))
	}
}

// makeRoom makes space behind w. The buffer doubles as bytes arrive, so an announced size alone
// costs no memory. If makeRoom returns false, the connection must end.
func (c *client) makeRoom() bool {
	unread := c.w - c.r
	if unread == 0 {
		c.r, c.w = 0, 0
		if len(c.buf) > maxIdle {
			c.releaseBuffer()
		}
	}
	need := max(c.peer.Need(), unread+1)
	if c.r+need <= len(c.buf) {
		return true
	}
	if c.r > 0 {
		copy(c.buf, c.buf[c.r:c.w])
		c.r, c.w = 0, unread
	}
	if c.w == len(c.buf) {
		limit := max(need, maxIdle)
		if c.mqtt == nil && wire.PeekVerb(c.buf[:c.w]) == wire.VerbMpub { // MPUB announces the size of each message on its own
			limit = max(limit, c.env.cfg.Session.Limits.MaxCommandSize())
		}
		return c.grow(min(2*len(c.buf), limit))
	}
	return true
}

// grow moves the unread bytes to a buffer of at least size bytes. It returns false and does nothing
// if memory is short. Requires: the connection owns the old buffer, and nothing else refers to it.
func (c *client) grow(size int) bool {
	buf := c.env.buffers.get(size)
	if !c.env.memory.charge(c, len(buf)) {
		c.env.buffers.put(buf)
		return false
	}
	n := copy(buf, c.buf[c.r:c.w])
	c.env.buffers.put(c.buf)
	c.buf, c.r, c.w = buf, 0, n
	return true
}

// releaseBuffer empties the buffer, so that the client is not paused, and returns it to the pool. Requires: as for grow.
func (c *client) releaseBuffer() {
	c.env.buffers.put(c.buf)
	c.buf, c.r, c.w, c.paused = nil, 0, 0, false
	c.env.memory.charge(c, 0)
}
