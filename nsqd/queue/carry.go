package queue

import (
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// A message that a channel does not get done with, since it is deferred for an hour or
// in flight for days, would keep all of the log that came after it. So it is carried
// forward: appended again, for that channel alone, and done at its old place. Its new
// place may be one that the channel has not reached: then it is in cursor.ahead until
// it has.

// Carried is such a message.
type Carried struct {
	Message *Message // as it is to be appended; a copy

	channel *Channel
	it      *item
	from    Offset
}

// Stuck appends what is to be carried forward, for the oldest part of the log to
// become free; nothing if that would not free ratio times as many places at least, or
// cannot be.
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
			if o >= cs.tail.next { // or a crash could come between the two
				cs.writeUpTo(o+1, nil)
				return into[:begin]
			}
			deferred := it.holder == nil && it.place >= 0
			switch {
			case len(into)-begin >= most:
				return into[:begin]
			case it.holder != nil && !it.handed:
				return into[:begin] // its consumer is about to take it
			case it.holder == nil && it.attempts == 0 && !deferred:
				return into[:begin] // its turn comes, and the order stays
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

// Carry puts at the end of the tail what Stuck returned, in the same step. Until it is
// written a snapshot would not hold: see Carrying.
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

// CarriedTo says that what Stuck returned is in the log, from that offset on; unless it is
// stored, it does not count there, and stays where it was.
// Requires: Config.WriteThrough; nothing was appended by others since.
func (t *Topic) CarriedTo(now mono.Time, first Offset, carried []Carried, stored bool, fx *Effects) {
	t.jump(first)
	for _, k := range carried {
		k.Message.Offset = t.end
		t.jump(t.end + 1)
		switch {
		case t.Channel(k.channel.name) != k.channel: // deleted
			t.avoid(k.Message.Offset, k.Message.Offset+1)
		case stored && k.channel.window.get(k.from) == k.it:
			k.move(fx)
		default: // done, or not stored
			k.channel.lead(k.Message.Offset, nil)
		}
	}
	t.goOn(now, fx)
}

// move puts an item to its message's new place.
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

// FarAhead reports whether a channel is half as far ahead as it may be.
func (cs *cursors) FarAhead() bool {
	for _, c := range cs.channels {
		if most := cs.cfg.MaxUnfinished; most > 0 && 2*c.Unfinished() > most {
			return true
		}
	}
	return false
}
