package queue

import (
	"cmp"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// item is a message's life in one channel.
type item struct {
	msg        *Message // nil: absent, not in memory
	offset     Offset   // of msg
	due        mono.Time
	delivered  mono.Time // start of the present delivery
	holder     *consumer // nil: ready or deferred
	prev, next *item     // in the holder's list
	chain      *item     // next in the bucket of flights
	turn       uint64    // number of the present delivery or dead letter, never reused; 0: none
	place      int32     // index in due; -1: not in due
	attempts   uint16    // deliveries, without cancelled deliveries
	handed     bool      // the present delivery was written (MarkSent)
}

// items are the messages that a channel has in memory.
//
// Invariants, checked by check in tests:
//   - every item is in exactly one place: ready, or due (in flight or deferred);
//   - inFlight has exactly the due items that have a holder.
type items struct {
	ready    ring[*item] // may be delivered
	due      dueHeap     // in flight: by timeout; deferred: by end of deferral
	inFlight flights
	turns    uint64  // deliveries so far
	free     []*item // for reuse; at most maxFree
}

// maxFree bounds a channel's unused items, to about a megabyte.
const maxFree = 8192

// InFlight returns the number of messages that consumers hold.
func (s *items) InFlight() int { return s.inFlight.n }

// Deferred returns the number of messages held back until a later time.
func (s *items) Deferred() int { return len(s.due) - s.inFlight.n }

// Deadline returns when the next message times out or ends its deferral; mono.Never if there is
// none.
func (s *items) Deadline() mono.Time { return s.due.next() }

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
	m.ref()
	return it
}

// recycle keeps an item for reuse. Requires: nothing refers to the item any more.
func (s *items) recycle(it *item) {
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
	s.turns++
	it.turn = s.turns
	it.delivered = now
	it.due = timeoutAt(now.Add(to.timeout))
	s.inFlight.add(it)
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
func (s *items) takeDue(now mono.Time) (again []*item) {
	for len(s.due) > 0 && !now.Before(s.due[0].due) {
		again = append(again, s.due[0])
		s.due.remove(s.due[0])
	}
	slices.SortStableFunc(again, func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.turn, b.turn))
	})
	return again
}

// forget releases all messages. Requires: no consumer holds a message.
func (s *items) forget(fx *Effects) {
	for i := range s.ready.len() {
		fx.unref(s.ready.at(i).msg)
	}
	for _, it := range s.due {
		fx.unref(it.msg)
	}
	*s = items{turns: s.turns, free: s.free}
}
