package broker

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/srtm-io/srtm/nsqd/queue"
)

// pool hands out messages whose bodies have room for so many bytes, and takes
// them back, so that steady traffic allocates nothing. Bodies come in powers of
// two; larger ones than the largest class are left to the garbage collector, as
// are messages that are not given back. What lies unused is let go by the second
// garbage collection after its last use. The zero value is ready; safe for
// concurrent use.
type pool struct {
	classes [poolClasses]sync.Pool // of *queue.Message, bodies of poolMin << i bytes
}

const (
	poolMin     = 64 // bytes
	poolClasses = 11 // up to 64 KiB
)

// class returns the class of bodies of that size; poolClasses or more: none.
func class(size int) int { return bits.Len(uint(max(size, 1)-1) / poolMin) }

// withBody is a message and its body in one allocation: B is an array of bytes. A
// backlog of a million messages is so many objects less for the garbage collector.
type withBody[B any] struct {
	queue.Message
	body B
}

func with[B any]() *queue.Message {
	m := new(withBody[B])
	m.Body = unsafe.Slice((*byte)(unsafe.Pointer(&m.body)), unsafe.Sizeof(m.body))[:0]
	return &m.Message
}

// newMessage makes one of each class but for the larger ones, which would lose more by
// the allocator's own classes.
var newMessage = [...]func() *queue.Message{
	with[[poolMin]byte], with[[poolMin << 1]byte], with[[poolMin << 2]byte],
	with[[poolMin << 3]byte], with[[poolMin << 4]byte], with[[poolMin << 5]byte],
}

// get returns a message with an empty body that has room for size bytes. Its
// other fields mean nothing.
func (p *pool) get(size int) *queue.Message {
	i := class(size)
	if i >= poolClasses {
		return &queue.Message{Body: make([]byte, 0, size)}
	}
	if m, ok := p.classes[i].Get().(*queue.Message); ok {
		m.Body = m.Body[:0]
		return m
	}
	if i < len(newMessage) {
		return newMessage[i]()
	}
	return &queue.Message{Body: make([]byte, 0, poolMin<<i)}
}

// put takes a message back. Requires: nothing refers to it.
func (p *pool) put(m *queue.Message) {
	poison(m)
	if i := class(cap(m.Body)); i < poolClasses && cap(m.Body) == poolMin<<i {
		p.classes[i].Put(m)
	}
}
