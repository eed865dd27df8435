package queue

import (
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/mono"
)

// cursors are a topic's log and its readers: the backlog, which waits for tokens, and the
// channels. Each reader is a cursor: a position up to which the reader took messages, and the
// open messages before the position. All other messages before the position are finished.
//
// A message is in memory while the backlog, a channel, the tail or readCache holds it. A cursor
// without memory leaves messages in the log. The cursor is then behind and takes the messages
// later, in order.
//
// Invariants, checked by checkInvariants in tests:
//   - each waiting message has an offset below the backlog's end;
//   - a channel that is not behind has had all messages before front except the waiting messages.
//     A waiting message below the channel's end has a pending slot in the channel's window;
//   - late is the number of messages that a cursor that is behind has not taken;
//   - the messages that a cursor that is behind has not taken are in the log or in the tail.
type cursors struct {
	log
	backlog
	channels []*Channel // by name
}

// Channel returns the channel with the given name, or nil.
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

// spill adds a message to the tail, for a cursor that is behind or because the topic retains all
// messages.
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

// writeUpTo adds all messages before an offset to the tail. last, unless nil, is the message just
// before the offset; no cursor needs to hold last.
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

// Keep adds all messages that are only in memory to the tail. The topic continues.
func (cs *cursors) Keep(fx *Effects) {
	cs.writeUpTo(cs.end, nil)
	fx.Disk = fx.Disk || cs.Unwritten()
}

// Leave discards the messages of ephemeral channels, and adds all other messages to the tail for
// the next process. Requires: Stop.
func (cs *cursors) Leave(fx *Effects) {
	for _, c := range cs.channels {
		if c.ephemeral {
			c.empty(fx)
		}
	}
	cs.writeUpTo(cs.end, nil)
}

// memoryAlone yields the messages that are only in memory, in order.
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

// Unstored returns the number of messages that are only in memory.
func (cs *cursors) Unstored() (n int) {
	for range cs.memoryAlone {
		n++
	}
	return n
}

// At returns the offset of the first message that is only in memory and was published at time or
// later; End if there is none.
func (cs *cursors) At(time mono.Wall) Offset {
	for m := range cs.memoryAlone {
		if m.Timestamp >= time {
			return m.Offset
		}
	}
	return cs.end
}

// oldest returns an offset before which no cursor has a message in memory.
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

// inMemory returns the message that a cursor holds at an offset, or nil. Messages carried forward
// are always in the tail.
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

// needed returns the first offset at which a cursor is behind.
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

// Low returns the offset before which no cursor needs the log. It also forgets old spans.
func (cs *cursors) Low() Offset {
	low := cs.end
	if b := &cs.backlog; b.behind || b.window.slots.len() > 0 {
		low = b.window.next
	}
	for _, c := range cs.channels {
		if c.tracked && (c.behind || c.window.slots.len() > 0) {
			low = min(low, c.window.next)
		}
		// order: the minimum of all
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

// trimRead drops messages from the read cache that no active cursor needs, or all of them under
// memory pressure.
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
