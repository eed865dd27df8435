package queue

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
)

// item is a message's life in one channel, from the first delivery or deferral.
type item struct {
	msg        *Message // nil: absent, not in memory
	offset     Offset   // of msg
	behind     uint64   // place in ready: the fresh messages that entered ready before
	due        mono.Time
	delivered  mono.Time // start of the present delivery
	holder     *consumer // nil: ready or deferred
	prev, next *item     // in the holder's list
	chain      *item     // next in the bucket of index
	delivery   uint64    // number of the present delivery or dead letter, never reused; 0: none
	place      int32     // index in due; -1: not in due
	attempts   uint16    // deliveries, without cancelled deliveries
	sent       bool      // the present delivery was written (MarkSent)
}

// items are the messages that a channel has in memory.
//
// Invariants, checked by check in tests:
//   - every item is in exactly one place: ready, or due (in flight or deferred);
//   - a message has an item unless the message is fresh (see ready), and index has exactly the items;
//   - inFlight is the number of items that have a holder. All of them are due.
type items struct {
	ready      ready   // may be delivered
	due        dueHeap // in flight: by timeout; deferred: by end of deferral
	index      index
	inFlight   int
	deliveries uint64  // deliveries so far
	free       []*item // for reuse; at most maxFree
}

// maxFree bounds a channel's unused items, to about a megabyte.
const maxFree = 8192

// deferred returns the number of messages held back until a later time.
func (s *items) deferred() int { return len(s.due) - s.inFlight }

// deadline returns when the next message times out or ends its deferral; mono.Never if there is
// none.
func (s *items) deadline() mono.Time { return s.due.next() }

// enter takes a message for delivery.
func (s *items) enter(now mono.Time, m *Message) {
	m.ref()
	if m.Attempts == 0 && m.Defer <= 0 {
		s.ready.fresh.Push(m)
		return
	}
	it := s.make(m)
	it.attempts = m.Attempts
	if m.Defer > 0 {
		it.due = m.Arrival.Add(m.Defer)
	}
	s.place(now, it)
}

// pop removes the first ready message. Requires: ready.Len() > 0.
func (s *items) pop() *item {
	if s.ready.repeats() {
		return s.ready.again.Pop()
	}
	return s.make(s.ready.popFresh())
}

// make returns an item for a message of the channel.
func (s *items) make(m *Message) *item {
	var it *item
	if n := len(s.free); n > 0 {
		it = s.free[n-1]
		s.free[n-1] = nil
		s.free = s.free[:n-1]
	} else {
		it = new(item)
	}
	*it = item{msg: m, offset: m.Offset, place: -1}
	s.index.add(it)
	return it
}

// recycle keeps an item for reuse. Requires: nothing but index refers to the item.
func (s *items) recycle(it *item) {
	s.index.remove(it)
	*it = item{place: -1}
	if len(s.free) < maxFree {
		s.free = append(s.free, it)
	}
}

// place defers an item that is due later, and makes any other item ready.
func (s *items) place(now mono.Time, it *item) {
	if it.due > 0 && now.Before(it.due) {
		s.due.push(it)
		return
	}
	s.ready.push(it)
}

// deliver gives a ready item to a consumer.
func (s *items) deliver(now mono.Time, it *item, to *consumer) {
	to.take(it)
	s.deliveries++
	it.delivery = s.deliveries
	it.delivered = now
	it.due = timeoutAt(now.Add(to.timeout))
	s.inFlight++
	s.due.push(it)
}

// timeoutAt rounds t up to a millisecond, which is precise enough for a timeout. Removing one of
// many items with equal timeouts from the heap is cheap.
func timeoutAt(t mono.Time) mono.Time {
	const ms = mono.Time(time.Millisecond)
	t += ms - 1
	return t - t%ms
}

// takeDue removes the due items from due and returns them by due time, then by delivery.
func (s *items) takeDue(now mono.Time) (dueItems []*item) {
	for len(s.due) > 0 && !now.Before(s.due[0].due) {
		dueItems = append(dueItems, s.due[0])
		s.due.remove(s.due[0])
	}
	slices.SortStableFunc(dueItems, func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.delivery, b.delivery))
	})
	return dueItems
}

// forget releases all messages. Requires: no consumer holds a message.
func (s *items) forget(fx *Effects) {
	for m := range s.ready.all {
		fx.unref(m)
	}
	for _, it := range s.due {
		fx.unref(it.msg)
	}
	*s = items{deliveries: s.deliveries, free: s.free}
}

// ready holds the messages that a channel may deliver, in order. A fresh message was neither
// delivered nor deferred in the channel, so the channel knows nothing of the message but its
// place, and needs no item for the message until the first delivery. Most messages of a backlog
// are fresh. An item for each would take a third of the backlog's memory.
//
// Invariant, checked by check in tests: again is ordered by behind, which is at most left +
// fresh.Len().
type ready struct {
	fresh container.Queue[*Message]
	again container.Queue[*item]
	left  uint64 // fresh messages that were popped
}

func (r *ready) Len() int { return r.fresh.Len() + r.again.Len() }

// push appends a message that has an item.
func (r *ready) push(it *item) {
	it.behind = r.left + uint64(r.fresh.Len())
	r.again.Push(it)
}

// repeats reports whether the front has an item. Requires: Len() > 0.
func (r *ready) repeats() bool {
	return r.again.Len() > 0 && r.again.Front().behind <= r.left
}

// front returns the first message and its deliveries so far. Requires: Len() > 0.
func (r *ready) front() (*Message, uint16) {
	if r.repeats() {
		it := r.again.Front()
		return it.msg, it.attempts
	}
	return r.fresh.Front(), 0
}

// popFresh removes the first message. Requires: Len() > 0, and the front has no item.
func (r *ready) popFresh() *Message {
	r.left++
	return r.fresh.Pop()
}

// all yields the messages in order, with their deliveries so far.
func (r *ready) all(yield func(m *Message, attempts uint16) bool) {
	again := 0
	repeats := func(left uint64) bool {
		for ; again < r.again.Len() && r.again.At(again).behind <= left; again++ {
			if it := r.again.At(again); !yield(it.msg, it.attempts) {
				return false
			}
		}
		return true
	}
	for i := range r.fresh.Len() {
		if !repeats(r.left+uint64(i)) || !yield(r.fresh.At(i), 0) {
			return
		}
	}
	repeats(r.left + uint64(r.fresh.Len()))
}

// index finds items by the ids of their messages. It is a hash table with chains through the
// items themselves, so steady traffic allocates nothing. A Go map does not guarantee that. The
// zero value is empty.
//
// Invariant: an item with the id's hash h is in the chain buckets[h], once.
type index struct {
	buckets []*item // len is 0 or a power of two
	n       int
}

const indexMin = 16

// bucket relies on the broker to assign the ids: clients cannot cause collisions. Requires:
// len(buckets) > 0.
func (f *index) bucket(id *MessageID) **item {
	h := binary.BigEndian.Uint64(id[:8]) + binary.BigEndian.Uint64(id[8:])
	h *= 0x9e3779b97f4a7c15 // Fibonacci hashing: the high bits are the mixed ones
	return &f.buckets[h>>(64-bits.TrailingZeros(uint(len(f.buckets))))]
}

// get returns an item with the given id and holder, or nil. After a Seek there may be two such
// items if the message was carried forward.
func (f *index) get(id *MessageID, holder ConsumerID) *item {
	if f.n == 0 {
		return nil
	}
	it := *f.bucket(id)
	for it != nil && (it.msg.ID != *id || it.holder == nil || it.holder.id != holder) {
		it = it.chain
	}
	return it
}

// of returns the item of a message, or nil if the message is fresh, nil or a placeholder.
func (f *index) of(m *Message) *item {
	if f.n == 0 || m == nil {
		return nil
	}
	it := *f.bucket(&m.ID)
	for it != nil && it.msg != m {
		it = it.chain
	}
	return it
}

// add adds an item. Requires: the item has a message.
func (f *index) add(it *item) {
	if f.n >= len(f.buckets) {
		f.resize(max(indexMin, 2*len(f.buckets)))
	}
	b := f.bucket(&it.msg.ID)
	it.chain, *b = *b, it
	f.n++
}

// remove removes an item. Requires: the item is in f.
func (f *index) remove(it *item) {
	link := f.bucket(&it.msg.ID)
	for *link != it {
		link = &(*link).chain
	}
	*link, it.chain = it.chain, nil
	f.n--
	// Shrink late, as container.Queue does.
	if len(f.buckets) > 64*indexMin && f.n < len(f.buckets)/8 {
		f.resize(len(f.buckets) / 2)
	}
}

// resize moves all items to a new number of buckets.
func (f *index) resize(size int) {
	old := f.buckets
	f.buckets = make([]*item, size)
	for _, it := range old {
		for it != nil {
			next := it.chain
			b := f.bucket(&it.msg.ID)
			it.chain, *b = *b, it
			it = next
		}
	}
}

// clear forgets all items. The items keep their chain pointers.
func (f *index) clear() { *f = index{} }

// dueHeap orders a channel's items by due time. Each item knows its index, so any item can be
// removed.
//
// dueHeap does not use container/heap, because its interface boxes every element and calls
// through a table on the delivery path.
//
// Invariant: h[i].due <= h[2i+1].due, h[2i+2].due, and h[i].place == i.
type dueHeap []*item

func (h dueHeap) next() mono.Time {
	if len(h) == 0 {
		return mono.Never
	}
	return h[0].due
}

func (h *dueHeap) push(it *item) {
	*h = append(*h, it)
	h.up(len(*h) - 1)
}

// remove removes an item. Requires: the item is in h.
func (h *dueHeap) remove(it *item) {
	old := *h
	i, last := int(it.place), len(old)-1
	moved := old[last]
	old[last] = nil
	*h = old[:last]
	it.place = -1
	if i == last {
		return
	}
	old[i] = moved
	moved.place = int32(i)
	h.fix(i)
}

// fix restores the order after the due time of the item at i changed.
func (h dueHeap) fix(i int) {
	if !h.down(i) {
		h.up(i)
	}
}

func (h dueHeap) up(i int) {
	it := h[i]
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].due <= it.due {
			break
		}
		h[i] = h[parent]
		h[i].place = int32(i)
		i = parent
	}
	h[i] = it
	it.place = int32(i)
}

// down reports whether the item moved.
func (h dueHeap) down(i int) bool {
	it, start := h[i], i
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if right := child + 1; right < len(h) && h[right].due < h[child].due {
			child = right
		}
		if it.due <= h[child].due {
			break
		}
		h[i] = h[child]
		h[i].place = int32(i)
		i = child
	}
	h[i] = it
	it.place = int32(i)
	return i != start
}
