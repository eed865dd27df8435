package broker

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/srtm-io/srtm/nsqd/queue"
)

// pool recycles messages with bodies, so that steady traffic allocates nothing. Bodies have
// sizes of powers of two. The garbage collector frees larger bodies, messages that are not
// returned, and unused messages at the second collection after their last use. The zero
// value is ready. A pool is safe for concurrent use.
type pool struct {
	classes [poolClasses]sync.Pool // of *queue.Message; class i has bodies of poolMin << i bytes
}

const (
	poolMin     = 64 // bytes
	poolClasses = 11 // up to 64 KiB
)

// class returns the class of bodies of the given size; poolClasses or more: no class.
func class(size int) int { return bits.Len(uint(max(size, 1)-1) / poolMin) }

// withBody holds a message and its body in one allocation. B is a byte array. A backlog of
// a million messages then has a million fewer objects for the garbage collector.
type withBody[B any] struct {
	queue.Message
	body B
}

func with[B any]() *queue.Message {
	m := new(withBody[B])
	m.Body = unsafe.Slice((*byte)(unsafe.Pointer(&m.body)), unsafe.Sizeof(m.body))[:0]
	return &m.Message
}

// newMessage allocates a message of each small class. Larger classes would waste memory,
// because of the allocator's size classes.
var newMessage = [...]func() *queue.Message{
	with[[poolMin]byte], with[[poolMin << 1]byte], with[[poolMin << 2]byte],
	with[[poolMin << 3]byte], with[[poolMin << 4]byte], with[[poolMin << 5]byte],
}

// get returns a message with an empty body of at least size bytes capacity. The other
// fields are undefined.
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

// put returns a message to the pool. Requires: nothing refers to the message.
func (p *pool) put(m *queue.Message) {
	poison(m)
	if i := class(cap(m.Body)); i < poolClasses && cap(m.Body) == poolMin<<i {
		p.classes[i].Put(m)
	}
}
