package queue

import (
	"github.com/srtm-io/srtm/internal/mono"
)

// Disk has the steps that the owner of the topic's log takes: writes to the log, reads from the
// log, and the restore.
type Disk Topic

func (d *Disk) topic() *Topic { return (*Topic)(d) }

// TakeUnwritten appends the next unwritten messages to into, in order. most limits their number.
// bytes limits their size, but the last message may exceed it. The owner appends the messages to
// the log at their offsets. If that succeeded, the owner calls Written with the returned offset.
// In either case the owner then calls Effects.Unref. One caller at a time.
func (d *Disk) TakeUnwritten(now mono.Time, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	t := d.topic()
	under := t.log.tail.underWay
	into, upTo := t.log.tail.take(t.cursors.needed(), t.log.retained, into, most, bytes, fx)
	if t.log.tail.underWay < under { // there is room on the way to disk again
		t.advance(now, fx)
	}
	return into, upTo
}

// Written records that the log has every needed message before an offset.
func (d *Disk) Written(now mono.Time, upTo Offset, fx *Effects) {
	t := d.topic()
	t.log.tail.pass(upTo, fx)
	for _, c := range t.cursors.channels {
		c.want(fx)
	}
	t.advance(now, fx) // there is room on the way to disk again
}

// Appended accepts messages that are in the log from offset first on. It takes ownership of the
// messages. Requires: Config.WriteThrough.
func (d *Disk) Appended(now mono.Time, first Offset, fx *Effects, msgs ...*Message) {
	t := d.topic()
	t.log.jump(first)
	for _, m := range msgs {
		t.backlog.accepted(m)
		m.Offset, m.refs = t.log.end, m.refs&^spilled
		t.log.jump(t.log.end + 1)
		if t.backlog.Free() > 0 {
			fx.Held += m.Size()
			t.backlog.wait(m)
			continue
		}
		t.backlog.fallBehind()
		fx.Free = append(fx.Free, m)
	}
	t.log.changes++
	t.advance(now, fx)
	t.backlog.maxWaiting = max(t.backlog.maxWaiting, t.backlog.Waiting())
}

// Want returns the next read of the log: up to n messages, from offset from on and before end. n
// is 0 if no cursor needs a message. The owner then calls Refill. The cursors take turns.
func (d *Disk) Want() (from Offset, n int, end Offset) {
	t := d.topic()
	for range len(t.cursors.channels) + 1 {
		if t.reader++; t.reader > len(t.cursors.channels) {
			t.reader = 0
		}
		if t.reader == 0 {
			from, n = t.wants()
		} else {
			from, n = t.cursors.channels[t.reader-1].wants()
		}
		if n > 0 {
			break
		}
	}
	if n > 0 && t.log.cfg.ReadAhead > 0 && !t.log.tight && t.log.read.follows(from) {
		n = max(n, readAtOnce)
	}
	return from, n, t.log.tail.window.next
}

// Refill takes what the owner read from the log: every message from offset from up to upTo.
// Refill takes ownership of the messages and gives back messages that no cursor wants.
func (d *Disk) Refill(now mono.Time, from, upTo Offset, msgs []*Message, fx *Effects) {
	t := d.topic()
	upTo = min(upTo, t.log.tail.window.next)
	for _, m := range msgs {
		m.refs &^= spilled
		m.ref()
		fx.Held += m.Size()
	}
	into := &t.log.read
	if !t.log.read.follows(from) {
		t.log.read.used = false
		into = &t.log.detour
	}
	into.add(from, upTo, msgs, t.log.cfg.ReadAhead, fx)
	t.backlog.refill(from, upTo, msgs, t.memory(), t.cursors.channels)
	for _, c := range t.cursors.channels {
		if c.refill(now, from, upTo, msgs); c.cursor.behind || c.cursor.absent.Len() > 0 || c.items.ready.Len() > 0 {
			c.dispatch(now, fx)
			c.want(fx)
		}
		t.due = min(t.due, c.Deadline())
	}
	fx.Unref(msgs)
	t.log.detour.forget(fx)
	t.log.read.moved = true
	t.log.changes++
	t.advance(now, fx)
}

// at returns the message with offset o, and the index at which to search for the next message.
func messageAt(msgs []*Message, i int, o Offset) (*Message, int) {
	for i < len(msgs) && msgs[i].Offset < o {
		i++
	}
	if i < len(msgs) && msgs[i].Offset == o {
		return msgs[i], i
	}
	return nil, i
}

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
func (cs *Cursors) Stuck(into []Carried, ratio int) []Carried {
	low, cut := cs.Low(), cs.log.end
	if b := cs.backlog; b.absent.Len() > 0 {
		return into
	} else if b.window.slots.Len() > 0 {
		cut = b.window.next
	} else if b.behind {
		cut = b.window.end()
	}
	for _, c := range cs.channels {
		if c.cursor.absent.Len() > 0 {
			return into
		}
		if c.cursor.tracked && c.cursor.behind {
			cut = min(cut, c.cursor.window.end())
		}
	}
	most := 0
	if cut > low {
		most = int(cut-low) / ratio
	}
	begin := len(into)
	for _, c := range cs.channels {
		if !c.cursor.tracked {
			continue
		}
		for o := c.cursor.window.next; o < min(cut, c.cursor.window.end()); o++ {
			original := c.cursor.window.get(o)
			if original == nil || cs.backlog.isPending(original) {
				continue
			}
			if o >= cs.log.tail.window.next { // else a crash could come between the two writes
				cs.writeUpTo(o+1, nil)
				return into[:begin]
			}
			it := c.items.index.of(original)
			if it == nil || len(into)-begin >= most {
				return into[:begin] // without an item the message is next in line and keeps its order
			}
			deferred := it.holder == nil && it.place >= 0
			switch {
			case it.holder != nil && !it.sent:
				return into[:begin] // the consumer is about to take the message
			case it.holder == nil && it.attempts == 0 && !deferred:
				return into[:begin] // the message is next in line and keeps its order
			}
			m := *original
			m.Body = nil // its memory belongs to the original
			m.SetContent(original.Body, original.Attribute())
			m.Only, m.Attempts = &c.cursor.name, it.attempts
			if deferred && it.delivery == 0 {
				m.Defer = max(0, it.due.Sub(m.Arrival))
			}
			m.refs = 0
			into = append(into, Carried{&m, c, it, o})
		}
	}
	return into
}

// Carry appends the messages from Stuck to the tail. Requires: no step between Stuck and Carry. A
// snapshot is invalid until these messages are written: see Carrying.
func (d *Disk) Carry(now mono.Time, carried []Carried, fx *Effects) {
	t := d.topic()
	if len(carried) == 0 {
		return
	}
	for _, k := range carried {
		t.log.number(k.Message)
		k.move(fx)
		t.cursors.writeUpTo(t.log.end, k.Message)
	}
	t.log.tail.rewritten = t.log.end
	fx.Disk = true
	t.settle(now, fx, t.cursors.channels...)
}

// CarriedTo records that the messages from Stuck are in the log, from offset first on. If stored
// is false the new copies do not count, and the messages stay at their old offsets. Requires:
// Config.WriteThrough; no other append in between.
func (d *Disk) CarriedTo(now mono.Time, first Offset, carried []Carried, stored bool, fx *Effects) {
	t := d.topic()
	t.log.jump(first)
	for _, k := range carried {
		k.Message.Offset = t.log.end
		t.log.jump(t.log.end + 1)
		switch {
		case t.Channel(k.channel.cursor.name) != k.channel: // the channel was deleted
			t.log.skip(k.Message.Offset, k.Message.Offset+1)
		case stored && k.channel.items.index.of(k.channel.cursor.window.get(k.from)) == k.it:
			k.move(fx)
		default: // finished meanwhile, or not stored
			k.channel.cursor.setAhead(k.Message.Offset, nil)
		}
	}
	t.settle(now, fx, t.cursors.channels...)
}

// move moves an item to its message's new offset.
func (k Carried) move(fx *Effects) {
	c, it := k.channel, k.it
	c.cursor.window.done(k.from)
	fx.unref(it.msg)
	it.msg, it.offset = k.Message, k.Message.Offset
	it.msg.ref()
	fx.Held += it.msg.Size()
	c.cursor.setAhead(it.offset, it)
	c.cursor.log.changes++
}

// FarAhead reports whether a channel is more than half as far ahead as MaxUnfinished permits.
func (cs *Cursors) FarAhead() bool {
	for _, c := range cs.channels {
		if most := cs.log.cfg.MaxUnfinished; most > 0 && 2*c.cursor.unfinished() > most {
			return true
		}
	}
	return false
}

// A takeover moves the log of a dead owner into another owner's log. Undone lists the unfinished
// messages of a machine restored from the dead owner's log. Appended and TakenOver add the
// messages to the new log.

// Undone is a message that a channel has not finished.
type Undone struct {
	Channel string
	// Fresh means that the channel has not reached the message. Attempts and due time are then as
	// in the record.
	Fresh    bool
	Attempts uint16
	Due      mono.Time // earliest time of the next delivery; 0: at once
}

// Undone appends the channels that have not finished the message at an offset. only names the
// message's single channel; empty: all channels. waits reports that the message waits for its
// token. Requires: Restore, and Found for every message in the log; no other step since.
func (cs *Cursors) Undone(into []Undone, o Offset, only string) (of []Undone, waits bool) {
	if only == "" && (cs.backlog.window.get(o) != nil || o >= cs.log.front) {
		return into, !cs.log.isSkipped(o)
	}
	for _, c := range cs.channels {
		if !c.cursor.tracked || only != "" && only != c.cursor.name {
			continue
		}
		it, reached := c.cursor.ahead[o]
		if o < c.cursor.window.end() {
			it, reached = c.cursor.absentAt(o), true
		}
		switch {
		case it != nil:
			into = append(into, Undone{Channel: c.cursor.name, Attempts: it.attempts, Due: it.due})
		case !reached && !cs.log.isSkipped(o):
			into = append(into, Undone{Channel: c.cursor.name, Fresh: true})
		}
	}
	return into, false
}

// TakenOver records that messages with tokens from another owner are in the log from offset first
// on, each for one channel. Messages of unknown channels are dropped. Requires:
// Config.WriteThrough.
func (d *Disk) TakenOver(now mono.Time, first Offset, undone []Undone, fx *Effects) {
	t := d.topic()
	t.log.jump(first)
	for _, u := range undone {
		o := t.log.end
		t.log.jump(o + 1)
		if c := t.Channel(u.Channel); c != nil && c.cursor.tracked {
			it := &item{offset: o, place: -1, attempts: u.Attempts, due: u.Due}
			c.cursor.setAhead(o, it)
			c.cursor.absent.Push(it)
			c.cursor.behind = true // later messages wait until this message is read
			c.counters.Messages++
			c.want(fx)
		} else {
			t.log.skip(o, o+1)
		}
	}
	t.log.changes++
	t.settle(now, fx, t.cursors.channels...)
}
