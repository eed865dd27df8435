package hook

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// restTime is how long a released slot is not reused. A program run that still uses the slot for
// its old owner takes some hundred instructions in softirq, much less than restTime.
const restTime = mono.Time(time.Second)

// slotSize returns the size in bytes of a slot with that many records.
func slotSize(records int) int { return stamp.HeaderSize + stamp.RecordSize*records }

// slots owns the memory of record rings. The memory consists of chunks, which are maps that the
// program finds by number. User space maps the chunks in windows, because mapped memory counts as
// resident. Chunks and windows are added as connections come. A new chunk takes some milliseconds,
// because the kernel waits until no program run sees the old state. So a goroutine makes chunks
// ahead of need, and no caller waits.
type slots struct {
	// set once
	records    int
	window     uint32    // slots per mapped window
	chunk      uint32    // a multiple of window
	limit      uint32    // total number of slots
	quarantine mono.Time // how long a released slot is not reused
	// makeChunk makes another chunk and shows it to the program. Nil: all chunks exist.
	makeChunk func(number uint32) (*ebpf.Map, error)

	growing sync.WaitGroup
	mu      struct {
		sync.Mutex
		chunks  []*ebpf.Map
		windows [][]byte
		// free holds unused slots of mapped windows. quarantined holds released slots, oldest first.
		free    []uint32
		resting container.Queue[quarantined]
		taken   uint32
		busy    bool // a chunk is being made
		closed  bool
		refused uint64
		failure error // of the last attempt to make or map memory
	}
}

// quarantined is a released slot and the time at which it may be reused.
type quarantined struct {
	end  mono.Time
	slot uint32
}

// windowSlots returns the smallest number of slots, at least 256, that fill whole pages.
func windowSlots() uint32 {
	// A slot is a multiple of 64 bytes. Page sizes are powers of two.
	return uint32(max(256, os.Getpagesize()/64))
}

// errSlotSoon means that a chunk is being made. errNoSlot means that it is useless to try again
// soon.
var (
	errSlotSoon = errors.New("a ring will be free in a moment")
	errNoSlot   = errors.New("no ring is free")
)

// acquire returns a slot and its memory. Errors: errSlotSoon, errNoSlot.
func (s *slots) acquire(now mono.Time) (slot uint32, mem []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed || s.mu.taken == s.limit {
		s.mu.refused++
		return 0, nil, errNoSlot
	}
	if s.mu.resting.Len() > 0 && !now.Before(s.mu.resting.Front().end) {
		slot = s.mu.resting.Pop().slot
	} else {
		if len(s.mu.free) == 0 {
			s.mapWindowLocked()
		}
		last := len(s.mu.free) - 1
		if last < 0 {
			s.growLocked()
			s.mu.refused++
			if s.mu.busy && s.mu.failure == nil {
				return 0, nil, errSlotSoon
			}
			return 0, nil, errNoSlot
		}
		slot = s.mu.free[last]
		s.mu.free = s.mu.free[:last]
	}
	s.mu.taken++
	if s.shortLocked() {
		s.growLocked()
	}
	return slot, s.memLocked(slot), nil
}

// shortLocked reports whether the remaining slots could run out before the next chunk exists.
// Connections come in storms, and with more connections the goroutine that makes chunks waits
// longer for its turn.
func (s *slots) shortLocked() bool {
	return s.madeLocked()-s.mu.taken < max(s.chunk, s.mu.taken)/2
}

func (s *slots) release(slot uint32, now mono.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.taken--
	s.mu.resting.Push(quarantined{now + s.quarantine, slot})
}

// madeLocked returns the number of slots with kernel memory.
func (s *slots) madeLocked() uint32 { return min(uint32(len(s.mu.chunks))*s.chunk, s.limit) }

func (s *slots) memLocked(slot uint32) []byte {
	size := slotSize(s.records)
	at := int(slot%s.window) * size
	return s.mu.windows[slot/s.window][at : at+size : at+size]
}

// mapWindowLocked maps the next window, if its chunk exists.
func (s *slots) mapWindowLocked() {
	first := uint32(len(s.mu.windows)) * s.window
	if first >= s.madeLocked() {
		return
	}
	bytes := int(s.window) * slotSize(s.records)
	m := s.mu.chunks[first/s.chunk]
	mem, err := unix.Mmap(m.FD(), int64(first%s.chunk/s.window)*int64(bytes), bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		s.mu.failure = fmt.Errorf("map record rings: %w", err)
		return
	}
	s.mu.windows = append(s.mu.windows, mem)
	for slot := min(first+s.window, s.limit); slot > first; slot-- {
		s.mu.free = append(s.mu.free, slot-1)
	}
}

// growLocked starts to make further chunks, unless that is in progress.
func (s *slots) growLocked() {
	if s.mu.busy || s.mu.closed || s.makeChunk == nil || s.madeLocked() == s.limit {
		return
	}
	s.mu.busy = true
	s.growing.Go(s.grow)
}

// grow makes chunks, at least one, until there are enough slots.
func (s *slots) grow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for more := true; more; more = s.mu.failure == nil && !s.mu.closed && s.shortLocked() && s.madeLocked() < s.limit {
		number := uint32(len(s.mu.chunks)) // only grow adds chunks, and only one grow runs
		s.mu.Unlock()
		m, err := s.makeChunk(number)
		s.mu.Lock()
		s.mu.failure = err
		if err == nil {
			s.mu.chunks = append(s.mu.chunks, m)
		}
	}
	s.mu.busy = false
}

func (s *slots) add(m *ebpf.Map) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.chunks = append(s.mu.chunks, m)
}

// close frees the memory. If slots are still taken, close leaves the memory mapped, because their
// readers may access it, and returns an error.
func (s *slots) close() error {
	s.mu.Lock()
	s.mu.closed = true
	s.mu.Unlock()
	s.growing.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.mu.taken > 0 {
		errs = append(errs, fmt.Errorf("close with %d connections not released: their rings stay in memory", s.mu.taken))
	} else {
		for _, w := range s.mu.windows {
			errs = append(errs, unix.Munmap(w))
		}
		s.mu.windows, s.mu.free, s.mu.resting = nil, nil, container.Queue[quarantined]{}
	}
	for _, m := range s.mu.chunks {
		errs = append(errs, m.Close())
	}
	s.mu.chunks = nil
	return errors.Join(errs...)
}

// ring is one slot's memory as the reader sees it. It implements stamp.Ring.
type ring struct {
	// set once
	mem  []byte
	mask uint64
	// shift is added to the kernel's times; nonzero in a time namespace.
	shift mono.Time
}

func newRing(mem []byte, shift mono.Time) ring {
	return ring{mem: mem, mask: uint64(len(mem)-stamp.HeaderSize)/stamp.RecordSize - 1, shift: shift}
}

// word64 returns the aligned 8-byte word that contains that offset. The kernel may change it at any
// moment.
func (r *ring) word64(at uint64) *uint64 { return (*uint64)(unsafe.Pointer(&r.mem[at&^7])) }

func (r *ring) word32(at uint64) *uint32 { return (*uint32)(unsafe.Pointer(&r.mem[at&^3])) }

// reset prepares the memory for a new owner.
//
// Requires: the program does not reach the slot.
func (r *ring) reset(cookie uint64) {
	for at := uint64(0); at < stamp.HeaderSize; at += 8 {
		atomic.StoreUint64(r.word64(at), 0)
	}
	for i := range r.mask + 1 {
		at := stamp.HeaderSize + i*stamp.RecordSize
		atomic.StoreUint64(r.word64(at), 0)
		atomic.StoreUint64(r.word64(at+8), uint64(stamp.BlankMeta(i)))
	}
	atomic.StoreUint64(r.word64(stamp.OffsetCookie), cookie)
}

// disown stops the program from writing to the slot.
func (r *ring) disown() { atomic.StoreUint64(r.word64(stamp.OffsetCookie), 0) }

// base returns the sequence number of stream offset 0. ok is false until the program knows it.
func (r *ring) base() (base uint32, ok bool) {
	ok = atomic.LoadUint32(r.word32(stamp.OffsetBaseSet)) != 0
	return atomic.LoadUint32(r.word32(stamp.OffsetBase)), ok
}

func (r *ring) Head() uint64 { return atomic.LoadUint64(r.word64(stamp.OffsetHead)) }
func (r *ring) Size() uint64 { return r.mask + 1 }

// Record implements stamp.Ring. The program reserves an index, stores the time, and publishes the
// record by storing meta. A lap later it does the same in the same place, where the time changes
// first. But head has moved by then, so Record checks head last.
func (r *ring) Record(index uint64) (stamp.Record, bool) {
	at := stamp.HeaderSize + (index&r.mask)*stamp.RecordSize
	meta := stamp.Meta(atomic.LoadUint64(r.word64(at + 8)))
	if !meta.Of(index) {
		return stamp.Record{}, false
	}
	ts := mono.Time(atomic.LoadUint64(r.word64(at)))
	if r.Head()-index > r.mask+1 {
		return stamp.Record{}, false
	}
	return stamp.MakeRecord(ts+r.shift, meta), true
}
