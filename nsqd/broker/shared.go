package broker

import (
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
)

// shared is what the topics of a broker share: its configuration and clock, the memory
// that they take from, the goroutines that they start.
type shared struct {
	// Set once.
	cfg            Config
	now            func() mono.Time
	pool           pool
	steps          sync.Pool       // of *step, between two uses
	metadataWriter *metadataWriter // nil without a Storage
	fenced         func(*Topic)    // another broker owns what its log has by now
	letters        *deadLetters
	// large has room for those who make messages of a large batch: a processor
	// is left to those who wait for events.
	large chan struct{}
	// batches is held by those who hand over a batch in slices; Close waits for them,
	// since what is accepted in part would be there after a restart.
	batches sync.RWMutex

	// Atomic.
	holdFrom     atomic.Int64  // mono.Time from which limited topics release nothing; Node.HoldFrom writes it, each step of a topic reads it
	held         atomic.Int64  // bytes of messages in memory; each step of a topic adds its part
	lastID       atomic.Uint64 // of messages; any goroutine adds
	lastConsumer atomic.Uint64 // likewise
	draining     atomic.Bool   // set once, by Drain; a publish that misses it is drained too
	channels     atomic.Int64  // of all topics; written under their mu
	refused      struct{ topics, channels atomic.Uint64 }

	// workers are the topics' goroutines; Close waits for them.
	workers sync.WaitGroup
}

func newShared(cfg Config) *shared {
	s := &shared{cfg: cfg, now: cfg.Now, large: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))}
	s.holdFrom.Store(int64(mono.Never))
	if s.now == nil {
		s.now = clock.Mono
	}
	// Ids must not repeat across restarts, or a late FIN would finish another
	// message; the wall clock is ahead of every id given before, as long as
	// fewer than 10^9 messages a second were published.
	s.lastID.Store(uint64(clock.Wall()))
	s.steps.New = func() any { return s.newStep() }
	return s
}

// changed says that topics or channels have come or gone, which is to be recorded.
func (s *shared) changed() {
	s.recorded()
	s.listed()
}

// listed says that topics or channels have come or gone.
func (s *shared) listed() {
	if s.cfg.Changed != nil {
		s.cfg.Changed()
	}
}

// recorded notes that what Recorded speaks of has changed.
func (s *shared) recorded() {
	if s.metadataWriter != nil {
		s.metadataWriter.changed()
	}
}

// hexOf returns the 8 hexadecimal digits of n, the first in the highest byte. It
// works on all of them at once: a loop over them is most of what it takes to make a
// message.
func hexOf(n uint32) uint64 {
	x := uint64(n)
	x = (x | x<<16) & 0x0000ffff0000ffff
	x = (x | x<<8) & 0x00ff00ff00ff00ff
	x = (x | x<<4) & 0x0f0f0f0f0f0f0f0f
	letters := (x + 0x0606060606060606) >> 4 & 0x0101010101010101 // of those above 9
	return x + 0x3030303030303030 + letters*('a'-'0'-10)
}

// newID draws a message id: 16 hexadecimal digits, as clients expect to print.
func (s *shared) newID() (id wire.MessageID) {
	n := s.lastID.Add(1)
	binary.BigEndian.PutUint64(id[:8], hexOf(uint32(n>>32)))
	binary.BigEndian.PutUint64(id[8:], hexOf(uint32(n)))
	return id
}
