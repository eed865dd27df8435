package queue

import "github.com/srtm-io/srtm/internal/container"

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
