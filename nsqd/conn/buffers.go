package conn

import (
	"math/bits"
	"sync"
	"unsafe"
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

// bufferClasses is up to 1 MiB, the greatest message by default; beyond that
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

// put takes a buffer back, whole, or does nothing. Requires: nobody refers to it.
func (p *buffers) put(b []byte) {
	scribble(b)
	i := bits.Len(uint(max(len(b), 1)-1) / minBuffer)
	if i < bufferClasses && len(b) == minBuffer<<i {
		p.classes[i].Put(unsafe.SliceData(b))
	}
}
