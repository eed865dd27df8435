package queue

import (
	"fmt"
	"slices"
)

// Line is a queue of messages of which the front is in memory and the rest may
// be on disk. The machine decides what goes there and what comes back; the
// topic's owner moves it, by TakeOverflow, Topic.Stored and Topic.Refill.
//
// Invariant: in the order in which they were put come the messages in memory
// (held by the topic or channel itself, and there in an order of their own), then
// those stored, then those taken, then those in overflow. Nothing is put into memory while anything is beyond it, so the
// order survives the way over the disk.
type Line struct {
	// Set once.
	channel  *Channel // nil: the topic's own line
	capacity int      // of the memory part
	limit    int      // of taken and overflow together
	through  bool     // nothing enters memory but from disk
	tight    *bool    // the topic's: memory is short of bytes

	// State.
	memory   func() int
	passes   func() bool    // one message more would leave memory at once
	stored   int            // on disk, as the owner said
	taken    int            // the owner is writing them
	overflow ring[*Message] // to be written
	epoch    Epoch
	put, out uint64 // messages ever put into overflow, and of those stored or forgotten
}

// Epoch changes when a line is emptied: what the owner moved under an older
// one is void.
type Epoch uint64

func newLine(cfg Config, tight *bool, channel *Channel, memory func() int, passes func() bool) Line {
	return Line{channel: channel, capacity: cfg.Capacity, limit: cfg.Overflow, through: cfg.Through, tight: tight, memory: memory, passes: passes}
}

// Channel returns the channel whose line it is; nil for the topic's own.
func (l *Line) Channel() *Channel { return l.channel }

// beyond is the number of messages that are not in memory, or not for long.
func (l *Line) beyond() int { return l.stored + l.taken + l.overflow.len() }

// space is how many messages the memory part may still take. While memory is
// tight that is one, if it does not stay.
func (l *Line) space() int {
	if !*l.tight {
		return max(0, l.capacity-l.memory()) // what is given back may exceed the capacity
	}
	if l.passes() {
		return 1
	}
	return 0
}

// free is how many messages may go into memory.
func (l *Line) free() int {
	if l.through || l.beyond() > 0 || *l.tight && l.channel == nil {
		return 0
	}
	return l.space()
}

// room reports whether n more messages have a place, in memory or beyond. A
// batch larger than what may be on its way to disk gets there alone, and so does
// whatever comes while memory is tight.
func (l *Line) room(n int) bool {
	n -= l.free()
	underWay := l.taken + l.overflow.len()
	return n <= 0 || !*l.tight && underWay+n <= l.limit || l.limit > 0 && underWay == 0
}

// spill puts a message behind what is beyond. Requires: room.
func (l *Line) spill(m *Message, fx *Effects) {
	m.hold()
	l.overflow.push(m)
	l.put++
	fx.Overflowing = append(fx.Overflowing, l)
}

// TakeOverflow appends up to max messages that are to be written to into. The
// owner writes them in order and then calls Topic.Stored with the epoch; until then
// they stay in memory and count as taken. When it needs them no longer, it calls
// Topic.LetGo.
func (l *Line) TakeOverflow(into []*Message, max int) ([]*Message, Epoch) {
	for max > 0 && l.overflow.len() > 0 {
		into = append(into, l.overflow.pop())
		l.taken++
		max--
	}
	return into, l.epoch
}

// settled says that the n oldest of the messages taken are on disk; false if
// the line was emptied meanwhile.
func (l *Line) settled(n int, e Epoch) bool {
	if e != l.epoch {
		return false
	}
	if n > l.taken {
		panic("queue: more messages stored than taken")
	}
	l.taken -= n
	l.stored += n
	l.out += uint64(n)
	return true
}

// giveBack undoes taking; false as for settled. Requires: msgs are all that are
// taken, the oldest first.
func (l *Line) giveBack(msgs []*Message, e Epoch) bool {
	if e != l.epoch {
		return false
	}
	if l.taken != len(msgs) {
		panic(fmt.Sprintf("queue: %d messages given back of %d taken", len(msgs), l.taken))
	}
	l.taken = 0
	for _, m := range slices.Backward(msgs) {
		l.overflow.unpop(m)
	}
	return true
}

// Overflowed is how many messages were ever put into the line on their way to
// disk, and how many of those have arrived there or were forgotten.
func (l *Line) Overflowed() (put, arrived uint64) { return l.put, l.out }

// Stored is how many messages are on disk and were not read.
func (l *Line) Stored() int { return l.stored }

// Pending reports whether messages are on their way to disk.
func (l *Line) Pending() bool { return l.taken+l.overflow.len() > 0 }

// Through reports whether everything in the line goes over the disk.
func (l *Line) Through() bool { return l.through }

// done says that the line needs the message of a ticket no longer.
func (l *Line) done(k Ticket, fx *Effects) {
	if k != 0 {
		fx.Done = append(fx.Done, Done{l, k})
	}
}

// Wanted is how many messages the line wants back from disk now: none until
// half of its memory is free, so that they come in batches, unless all do. The owner reads
// them and calls Topic.Refill with the epoch.
func (l *Line) Wanted() (int, Epoch) {
	free := l.space()
	if l.stored == 0 || free == 0 || !l.through && !*l.tight && 2*free < l.capacity {
		return 0, l.epoch
	}
	return min(free, l.stored), l.epoch
}

// refill says that n messages came back from disk; false as for settled.
func (l *Line) refill(n int, e Epoch) bool {
	if e != l.epoch {
		return false
	}
	if n > l.stored {
		panic("queue: more messages came back from disk than were stored")
	}
	l.stored -= n
	return true
}

// recall takes the next message back that has not gone to disk yet, if memory
// has room for it.
func (l *Line) recall() (m *Message, ok bool) {
	if l.through || l.overflow.len() == 0 || l.stored > 0 || l.taken > 0 || l.space() == 0 {
		return nil, false
	}
	return l.overflow.pop(), true
}

// forget drops all that is beyond memory and returns how much that was. What
// the owner is writing or has written is its to remove.
func (l *Line) forget(fx *Effects) int {
	n := l.beyond()
	if n > 0 || l.through {
		fx.Overflowing = append(fx.Overflowing, l) // so that the disk is emptied too
	}
	l.out = l.put
	l.stored, l.taken = 0, 0
	for i := range l.overflow.len() {
		fx.letGo(l.overflow.at(i))
	}
	l.overflow.clear()
	l.epoch++
	return n
}
