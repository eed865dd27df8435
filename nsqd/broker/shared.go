package broker

import (
	"encoding/binary"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// shared holds what a broker's topics share: configuration, clock, memory and goroutines.
type shared struct {
	// Set once.
	cfg            Config
	now            func() mono.Time
	pool           pool
	steps          sync.Pool       // of *step
	metadataWriter *metadataWriter // nil without a Storage
	fenced         func(*Topic)    // called when another broker owns the topic's log
	letters        *deadLetters
	// large limits the goroutines that create messages of large batches, so that a
	// processor remains for goroutines that wait for events.
	large chan struct{}
	// batches is read-locked while a batch is accepted in slices. Close waits for such
	// batches, since a restart would restore a partial batch.
	batches sync.RWMutex

	// Atomic.
	// mono.Time from which limited topics release nothing; written by Node.HoldFrom, read
	// by each step of a topic
	holdFrom     atomic.Int64
	held         atomic.Int64  // bytes of messages in memory; updated by each step of a topic
	lastID       atomic.Uint64 // last message id; any goroutine adds
	lastConsumer atomic.Uint64 // last consumer id; any goroutine adds
	draining     atomic.Bool   // set once by Drain; a publication that misses the change is drained, too
	channels     atomic.Int64  // channels of all topics; written under their mu
	refused      struct{ topics, channels atomic.Uint64 }

	// workers are the topics' goroutines. Close waits for them.
	workers sync.WaitGroup
}

func newShared(cfg Config) *shared {
	s := &shared{cfg: cfg, now: cfg.Now, large: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))}
	s.holdFrom.Store(int64(mono.Never))
	if s.now == nil {
		s.now = clock.Mono
	}
	// Ids must not repeat across restarts; otherwise a late FIN would finish another
	// message. The wall clock exceeds every earlier id if fewer than 10^9 messages per
	// second were published.
	s.lastID.Store(uint64(clock.Wall()))
	s.steps.New = func() any { return s.newStep() }
	return s
}

// changed reports and records the creation or deletion of a topic or of its channels.
func (s *shared) changed(topic string) {
	s.recorded(topic)
	s.listed()
}

// listed reports the creation or deletion of topics or channels.
func (s *shared) listed() {
	if s.cfg.Changed != nil {
		s.cfg.Changed()
	}
}

// recorded marks the record of a topic in the metadata file as out of date.
func (s *shared) recorded(topic string) {
	if s.metadataWriter != nil {
		s.metadataWriter.changed(topic)
	}
}

// hexOf returns the 8 hexadecimal digits of n, the first in the highest byte. It converts
// all digits at once; a loop would take most of the time of creating a message.
func hexOf(n uint32) uint64 {
	x := uint64(n)
	x = (x | x<<16) & 0x0000ffff0000ffff
	x = (x | x<<8) & 0x00ff00ff00ff00ff
	x = (x | x<<4) & 0x0f0f0f0f0f0f0f0f
	letters := (x + 0x0606060606060606) >> 4 & 0x0101010101010101 // digits above 9
	return x + 0x3030303030303030 + letters*('a'-'0'-10)
}

// newID returns a new message id of 16 hexadecimal digits, which clients can print.
func (s *shared) newID() (id wire.MessageID) {
	n := s.lastID.Add(1)
	binary.BigEndian.PutUint64(id[:8], hexOf(uint32(n>>32)))
	binary.BigEndian.PutUint64(id[8:], hexOf(uint32(n)))
	return id
}

// pool recycles messages with bodies, so that steady traffic allocates nothing. There are
// four sizes of bodies from one power of two to the next. The garbage collector frees larger
// bodies, messages that are not returned, and unused messages at the second collection after
// their last use. The zero value is ready. A pool is safe for concurrent use.
type pool struct {
	classes [poolClasses]sync.Pool // of *queue.Message; class i has bodies of classSize(i) bytes
}

const (
	poolMin     = 64       // bytes
	poolClasses = 4*10 + 1 // up to 64 KiB
	fused       = 4*5 + 1  // classes with message and body in one allocation
)

// class returns the class of bodies of the given size; poolClasses or more: no class. With a
// class for each power of two alone, a backlog of messages of 100 bytes took 6 % more memory.
func class(size int) int {
	if size <= poolMin {
		return 0
	}
	n := uint(size - 1)
	length := bits.Len(n)
	return 4*(length-bits.Len(poolMin)) + int(n>>(length-3)&3) + 1
}

func classSize(class int) int { return (poolMin / 4) << (class / 4) * (4 + class%4) }

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
var newMessage = [fused]func() *queue.Message{
	with[[64]byte], with[[80]byte], with[[96]byte], with[[112]byte],
	with[[128]byte], with[[160]byte], with[[192]byte], with[[224]byte],
	with[[256]byte], with[[320]byte], with[[384]byte], with[[448]byte],
	with[[512]byte], with[[640]byte], with[[768]byte], with[[896]byte],
	with[[1024]byte], with[[1280]byte], with[[1536]byte], with[[1792]byte],
	with[[2048]byte],
}

// get returns a message with room for size bytes of content. The other fields are undefined.
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
	return &queue.Message{Body: make([]byte, 0, classSize(i))}
}

// put returns a message to the pool. Requires: nothing refers to the message.
func (p *pool) put(m *queue.Message) {
	poison(m)
	if i := class(cap(m.Body)); i < poolClasses && cap(m.Body) == classSize(i) {
		p.classes[i].Put(m)
	}
}
