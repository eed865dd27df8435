package queue

import (
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/mono"
)

// Cursors are a topic's log and its readers: the backlog, which waits for tokens, and the
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
type Cursors struct {
	log      *Log
	backlog  *Backlog
	channels []*Channel // by name
}

// channel returns the channel with the given name, or nil.
func (cs *Cursors) channel(name string) *Channel {
	if i, found := cs.find(name); found {
		return cs.channels[i]
	}
	return nil
}

func (cs *Cursors) find(name string) (int, bool) {
	return slices.BinarySearchFunc(cs.channels, name, func(c *Channel, name string) int {
		return strings.Compare(c.cursor.name, name)
	})
}

// spill adds a message to the tail, for a cursor that is behind or because the topic retains all
// messages.
func (cs *Cursors) spill(m *Message, fx *Effects) {
	fx.Disk = true
	if m.Offset < cs.log.tail.window.next {
		return
	}
	cs.writeUpTo(m.Offset+1, m)
	if !m.spilled() {
		m.refs |= spilled
		cs.log.tail.underWay++
	}
}

// writeUpTo adds all messages before an offset to the tail. last, unless nil, is the message just
// before the offset; no cursor needs to hold last.
func (cs *Cursors) writeUpTo(o Offset, last *Message) {
	if cs.log.tail.window.slots.Len() == 0 {
		cs.log.tail.window.reach(min(o-1, cs.oldest()))
	}
	for offset := cs.log.tail.window.end(); offset < o; offset++ {
		m := last
		if m == nil || offset+1 < o {
			m = cs.inMemory(offset)
		}
		if m != nil {
			m.ref()
		}
		cs.log.tail.window.push(m)
	}
}

// StoreAll adds all messages that are only in memory to the tail. The topic continues.
func (cs *Cursors) StoreAll(fx *Effects) {
	cs.writeUpTo(cs.log.end, nil)
	fx.Disk = fx.Disk || cs.log.Unwritten()
}

// StoreLast discards the messages of ephemeral channels, and adds all other messages to the tail for
// the next process. Requires: Stop.
func (cs *Cursors) StoreLast(fx *Effects) {
	for _, c := range cs.channels {
		if c.ephemeral {
			c.empty(fx)
		}
	}
	cs.writeUpTo(cs.log.end, nil)
}

// unstored yields the messages that are only in memory, in order.
func (cs *Cursors) unstored(yield func(*Message) bool) {
	from := cs.log.tail.window.next
	if cs.log.tail.window.slots.Len() == 0 {
		from = max(from, cs.oldest())
	}
	for o := from; o < cs.log.end; o++ {
		m := cs.log.tail.window.get(o)
		if m == nil {
			m = cs.inMemory(o)
		}
		if m != nil && !yield(m) {
			return
		}
	}
}

// Unstored returns the number of messages that are only in memory.
func (cs *Cursors) Unstored() (n int) {
	for range cs.unstored {
		n++
	}
	return n
}

// At returns the offset of the first message that is only in memory and was published at time or
// later; End if there is none.
func (cs *Cursors) At(time mono.Wall) Offset {
	for m := range cs.unstored {
		if m.Timestamp >= time {
			return m.Offset
		}
	}
	return cs.log.end
}

// oldest returns an offset before which no cursor has a message in memory.
func (cs *Cursors) oldest() Offset {
	o := cs.log.end
	if w := cs.backlog.window; w.slots.Len() > 0 {
		o = w.next
	}
	for _, c := range cs.channels {
		if c.cursor.window.slots.Len() > 0 {
			o = min(o, c.cursor.window.next)
		}
	}
	return o
}

// inMemory returns the message that a cursor holds at an offset, or nil. Messages carried forward
// are always in the tail.
func (cs *Cursors) inMemory(o Offset) *Message {
	if m := cs.backlog.window.get(o); m != nil {
		return m
	}
	for _, c := range cs.channels {
		if m := c.cursor.window.get(o); m != nil && !cs.backlog.isPending(m) && !cs.backlog.isUnread(m) {
			return m
		}
	}
	return nil
}

// needed returns the first offset at which a cursor is behind.
func (cs *Cursors) needed() Offset {
	from := cs.log.end
	if cs.backlog.behind {
		from = cs.backlog.window.end()
	}
	for _, c := range cs.channels {
		if c.cursor.behind {
			from = min(from, c.cursor.window.end())
		}
	}
	return from
}

// Low returns the offset before which no cursor needs the log. It also forgets old spans.
func (cs *Cursors) Low() Offset {
	low := cs.log.end
	if b := cs.backlog; b.behind || b.window.slots.Len() > 0 {
		low = b.window.next
	}
	for _, c := range cs.channels {
		if c.cursor.tracked && (c.cursor.behind || c.cursor.window.slots.Len() > 0) {
			low = min(low, c.cursor.window.next)
		}
		// order: the minimum of all
		for o, it := range c.cursor.ahead {
			if it != nil {
				low = min(low, o)
			}
		}
	}
	for len(cs.log.skipped) > 0 && cs.log.skipped[0].to <= low && (cs.log.skipped[0].to <= cs.log.first || len(cs.log.skipped) > maxSkipped) {
		cs.log.skipped = cs.log.skipped[1:]
	}
	return low
}

// trimRead drops messages from the read cache that no active cursor needs, or all of them under
// memory pressure.
func (cs *Cursors) trimRead(fx *Effects) {
	r := &cs.log.read
	if r.from == r.to || !r.moved && !cs.log.tight {
		return
	}
	needed := r.to
	if !cs.log.tight {
		if o := cs.backlog.window.end(); cs.backlog.behind && r.has(o) {
			needed = o
		}
		for _, c := range cs.channels {
			if o := c.cursor.window.end(); c.cursor.behind && r.has(o) && !c.paused && c.consumers.Len() > 0 && !c.cursor.full() {
				needed = min(needed, o)
			}
		}
	}
	r.trim(needed, fx)
}
