package queue

import (
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// A message that a channel does not finish, deferred for an hour or in flight for days, would
// keep the whole log behind it. So the topic carries the message forward: it appends the message
// again, for that channel alone, and finishes the message at its old offset. If the channel has
// not reached the new offset, cursor.ahead holds the message until then.

// Carried is a message to be carried forward.
type Carried struct {
	Message *Message // the message to append; a copy

	channel *Channel
	it      *item
	from    Offset
}

// Stuck appends the messages to carry forward so that the oldest part of the log becomes free. It
// appends nothing if that would free fewer than ratio offsets per message, or is impossible now.
func (cs *cursors) Stuck(into []Carried, ratio int) []Carried {
	low, cut := cs.Low(), cs.end
	if b := &cs.backlog; b.absent.len() > 0 {
		return into
	} else if b.window.slots.len() > 0 {
		cut = b.window.next
	} else if b.behind {
		cut = b.window.end()
	}
	for _, c := range cs.channels {
		if c.absent.len() > 0 {
			return into
		}
		if c.tracked && c.behind {
			cut = min(cut, c.window.end())
		}
	}
	most := 0
	if cut > low {
		most = int(cut-low) / ratio
	}
	begin := len(into)
	for _, c := range cs.channels {
		if !c.tracked {
			continue
		}
		for o := c.window.next; o < min(cut, c.window.end()); o++ {
			it := c.window.get(o)
			if it == nil || cs.isPending(it) {
				continue
			}
			if o >= cs.tail.next { // else a crash could come between the two writes
				cs.writeUpTo(o+1, nil)
				return into[:begin]
			}
			deferred := it.holder == nil && it.place >= 0
			switch {
			case len(into)-begin >= most:
				return into[:begin]
			case it.holder != nil && !it.handed:
				return into[:begin] // the consumer is about to take the message
			case it.holder == nil && it.attempts == 0 && !deferred:
				return into[:begin] // the message is next in line and keeps its order
			}
			m := *it.msg
			m.Body, m.Only, m.Attempts = slices.Clone(m.Body), &c.name, it.attempts
			if deferred && it.turn == 0 {
				m.Defer = max(0, it.due.Sub(m.Arrival))
			}
			m.refs, m.spilled = 0, false
			into = append(into, Carried{&m, c, it, o})
		}
	}
	return into
}

// Carry appends the messages from Stuck to the tail. Requires: no step between Stuck and Carry. A
// snapshot is invalid until these messages are written: see Carrying.
func (t *Topic) Carry(now mono.Time, carried []Carried, fx *Effects) {
	if len(carried) == 0 {
		return
	}
	for _, k := range carried {
		t.accept(k.Message)
		k.move(fx)
		t.writeUpTo(t.end, k.Message)
	}
	t.tail.carried = t.end
	fx.Disk = true
	t.goOn(now, fx)
}

// CarriedTo records that the messages from Stuck are in the log, from offset first on. If stored
// is false the new copies do not count, and the messages stay at their old offsets. Requires:
// Config.WriteThrough; no other append in between.
func (t *Topic) CarriedTo(now mono.Time, first Offset, carried []Carried, stored bool, fx *Effects) {
	t.jump(first)
	for _, k := range carried {
		k.Message.Offset = t.end
		t.jump(t.end + 1)
		switch {
		case t.Channel(k.channel.name) != k.channel: // the channel was deleted
			t.avoid(k.Message.Offset, k.Message.Offset+1)
		case stored && k.channel.window.get(k.from) == k.it:
			k.move(fx)
		default: // finished meanwhile, or not stored
			k.channel.lead(k.Message.Offset, nil)
		}
	}
	t.goOn(now, fx)
}

// move moves an item to its message's new offset.
func (k Carried) move(fx *Effects) {
	c, it := k.channel, k.it
	c.window.done(k.from)
	fx.unref(it.msg)
	it.msg, it.offset = k.Message, k.Message.Offset
	it.msg.ref()
	fx.Held += it.msg.Size()
	c.lead(it.offset, it)
	c.log.changes++
}

// FarAhead reports whether a channel is more than half as far ahead as MaxUnfinished permits.
func (cs *cursors) FarAhead() bool {
	for _, c := range cs.channels {
		if most := cs.cfg.MaxUnfinished; most > 0 && 2*c.Unfinished() > most {
			return true
		}
	}
	return false
}
