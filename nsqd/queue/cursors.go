package queue

import (
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/mono"
)

// cursors are a topic's log and all that take messages from it: the backlog, which waits
// for tokens, and the channels. A cursor is a position up to which messages were taken, and
// what of those is open. What is before the position and not open is done, for good.
//
// A message is in memory while one of these has it: the backlog, a channel that has not
// finished it, the tail, or readCache. What a cursor has no memory for it leaves in the
// log: it is behind, and takes it later, in order.
//
// Invariants, checked by checkInvariants in tests:
//   - what waits has an offset below the backlog's end;
//   - a channel that is not behind has had all before front but what still waits, for
//     which it has a slot that is pending if the offset is below its end;
//   - late is how many messages a cursor that is behind has not taken;
//   - what a cursor that is behind has not taken is in the log or in the tail.
type cursors struct {
	log
	backlog
	channels []*Channel // by name
}

// Channel returns the channel of that name, or nil.
func (cs *cursors) Channel(name string) *Channel {
	if i, found := cs.find(name); found {
		return cs.channels[i]
	}
	return nil
}

// Channels returns the channels by name. The caller must not change the slice.
func (cs *cursors) Channels() []*Channel { return cs.channels }

func (cs *cursors) find(name string) (int, bool) {
	return slices.BinarySearchFunc(cs.channels, name, func(c *Channel, name string) int {
		return strings.Compare(c.name, name)
	})
}

// spill has a message written that a cursor is behind at, or that is retained.
func (cs *cursors) spill(m *Message, fx *Effects) {
	fx.Disk = true
	if m.Offset < cs.tail.next {
		return
	}
	cs.writeUpTo(m.Offset+1, m)
	if !m.spilled {
		m.spilled = true
		cs.tail.underWay++
	}
}

// writeUpTo has all written up to an offset, with last, which may be nil, for the
// message before it: no cursor need have that.
func (cs *cursors) writeUpTo(o Offset, last *Message) {
	if cs.tail.slots.len() == 0 {
		cs.tail.reach(min(o-1, cs.oldest()))
	}
	for at := cs.tail.end(); at < o; at++ {
		m := last
		if m == nil || at+1 < o {
			m = cs.inMemory(at)
		}
		if m != nil {
			m.ref()
		}
		cs.tail.push(m)
	}
}

// Keep has all that is in memory alone written, while the topic goes on.
func (cs *cursors) Keep(fx *Effects) {
	cs.writeUpTo(cs.end, nil)
	fx.Disk = fx.Disk || cs.Unwritten()
}

// Leave forgets what is ephemeral, and has all else written for the next process.
// Requires: Stop.
func (cs *cursors) Leave(fx *Effects) {
	for _, c := range cs.channels {
		if c.ephemeral {
			c.empty(fx)
		}
	}
	cs.writeUpTo(cs.end, nil)
}

// memoryAlone yields the messages that are nowhere but in memory, in order.
func (cs *cursors) memoryAlone(yield func(*Message) bool) {
	from := cs.tail.next
	if cs.tail.slots.len() == 0 {
		from = max(from, cs.oldest())
	}
	for o := from; o < cs.end; o++ {
		m := cs.tail.get(o)
		if m == nil {
			m = cs.inMemory(o)
		}
		if m != nil && !yield(m) {
			return
		}
	}
}

// Unstored is how many messages are nowhere but in memory.
func (cs *cursors) Unstored() (n int) {
	for range cs.memoryAlone {
		n++
	}
	return n
}

// At is the offset of the first message from a time of publication on that is in memory
// alone, or the end.
func (cs *cursors) At(time mono.Wall) Offset {
	for m := range cs.memoryAlone {
		if m.Timestamp >= time {
			return m.Offset
		}
	}
	return cs.end
}

// oldest is an offset before which no cursor has anything in memory.
func (cs *cursors) oldest() Offset {
	o := cs.end
	if w := &cs.backlog.window; w.slots.len() > 0 {
		o = w.next
	}
	for _, c := range cs.channels {
		if c.window.slots.len() > 0 {
			o = min(o, c.window.next)
		}
	}
	return o
}

// inMemory returns the message that a cursor has at an offset; nil if none has. What was
// carried forward is in the tail at once.
func (cs *cursors) inMemory(o Offset) *Message {
	if m := cs.backlog.window.get(o); m != nil {
		return m
	}
	for _, c := range cs.channels {
		if it := c.window.get(o); it != nil && it.msg != nil {
			return it.msg
		}
	}
	return nil
}

// needed is the offset from which on a cursor is behind.
func (cs *cursors) needed() Offset {
	from := cs.end
	if cs.backlog.behind {
		from = cs.backlog.window.end()
	}
	for _, c := range cs.channels {
		if c.behind {
			from = min(from, c.window.end())
		}
	}
	return from
}

// Low is the offset before which no cursor needs anything in the log.
func (cs *cursors) Low() Offset {
	low := cs.end
	if b := &cs.backlog; b.behind || b.window.slots.len() > 0 {
		low = b.window.next
	}
	for _, c := range cs.channels {
		if c.tracked && (c.behind || c.window.slots.len() > 0) {
			low = min(low, c.window.next)
		}
		// order: the least of all
		for o, it := range c.ahead {
			if it != nil {
				low = min(low, o)
			}
		}
	}
	for len(cs.void) > 0 && cs.void[0].to <= low && (cs.void[0].to <= cs.first || len(cs.void) > maxVoid) {
		cs.void = cs.void[1:]
	}
	return low
}

// trimRead lets go of what was read that no cursor has yet to reach that can go on, and of
// all while memory is tight.
func (cs *cursors) trimRead(fx *Effects) {
	r := &cs.read
	if r.from == r.to || !r.moved && !cs.tight {
		return
	}
	needed := r.to
	if !cs.tight {
		if o := cs.backlog.window.end(); cs.backlog.behind && r.has(o) {
			needed = o
		}
		for _, c := range cs.channels {
			if o := c.window.end(); c.behind && r.has(o) && !c.paused && c.Consumers() > 0 && !c.Full() {
				needed = min(needed, o)
			}
		}
	}
	r.trim(needed, fx)
}
