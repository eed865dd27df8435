package queue

import (
	"maps"
	"slices"
	"sort"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
)

// cursor is a channel's place in its topic's log. All messages before the window are finished.
//
// Invariants, checked by checkLog in tests: see cursors.
type cursor struct {
	// Set once.
	name    string
	log     *Log
	backlog *Backlog // messages not released yet
	tracked bool     // the log keeps the channel's place

	window   window[*Message]       // by offset; see Backlog for the placeholders
	absent   container.Queue[*item] // messages that an earlier process had in memory, not read yet; by offset
	ahead    map[Offset]*item       // messages beyond the window's end, see Carried; nil: finished
	behind   bool
	late     int  // released messages from the window's end on
	estimate bool // late is an estimate since a Seek, at least 1, so the channel does not look empty
}

func newCursor(name string, l *Log, b *Backlog) cursor {
	return cursor{name: name, log: l, backlog: b, tracked: l.logged() && !wire.Ephemeral(name)}
}

// beyond returns the number of messages that wait for a consumer and are not in memory.
func (c *cursor) beyond() int { return c.late + c.absent.Len() }

// setAhead sets the item at an offset that the channel has not reached.
func (c *cursor) setAhead(o Offset, it *item) {
	if c.ahead == nil {
		c.ahead = make(map[Offset]*item)
	}
	c.ahead[o] = it
}

// slot returns the window's value for an item.
func (c *cursor) slot(it *item) *Message {
	switch {
	case it == nil:
		return nil
	case it.msg == nil:
		return c.backlog.notRead()
	}
	return it.msg
}

// absentAt returns the absent item at an offset, or nil.
func (c *cursor) absentAt(o Offset) *item {
	i := sort.Search(c.absent.Len(), func(i int) bool { return c.absent.At(i).offset >= o })
	if i < c.absent.Len() && c.absent.At(i).offset == o {
		return c.absent.At(i)
	}
	return nil
}

// close finishes the message at an offset.
func (c *cursor) close(o Offset) {
	if o < c.window.end() {
		c.window.done(o)
	} else if c.tracked {
		c.setAhead(o, nil)
	}
}

// unfinished returns the distance from the oldest unfinished message to the end of the window.
func (c *cursor) unfinished() int { return c.window.slots.Len() }

// full reports whether MaxUnfinished keeps further messages from the channel.
func (c *cursor) full() bool {
	most := c.log.cfg.MaxUnfinished
	return c.behind && most > 0 && c.unfinished() >= most
}

// reach extends the window to an offset. The skipped messages are finished, except messages in
// ahead and messages that wait in the backlog.
func (c *cursor) reach(o Offset) {
	w := &c.backlog.window
	if w.slots.Len() == 0 && len(c.ahead) == 0 {
		c.window.reach(o)
		return
	}
	for c.window.end() < o {
		offset := c.window.end()
		if it, found := c.ahead[offset]; found {
			delete(c.ahead, offset)
			c.window.push(c.slot(it))
		} else if w.get(offset) != nil {
			c.window.push(c.backlog.notReleased())
		} else {
			c.window.push(nil)
		}
	}
}

// start moves the cursor of an empty channel to the front of the topic's releases.
func (c *cursor) start() {
	if !c.tracked {
		return
	}
	c.window.slots.Clear()
	if c.window.next = c.log.front; c.backlog.window.slots.Len() > 0 {
		c.window.next = min(c.log.front, c.backlog.window.next)
	}
	// order: the loop treats all offsets alike
	for o := range c.ahead {
		if o < c.window.next {
			delete(c.ahead, o)
		}
	}
	c.reach(c.log.front)
}

// seek moves an empty cursor to an offset before the topic's front.
func (c *cursor) seek(to Offset, records int) {
	l, b := c.log, c.backlog
	for o := l.tail.window.next; o < l.end; o++ {
		m, waits := l.tail.window.get(o), b.window.get(o)
		if waits != nil || m != nil && (o >= l.front || o >= to && c.takes(m)) {
			records++ // messages that wait are subtracted below: they are not counted in the log
		}
	}
	c.window.slots.Clear()
	if c.window.next = to; b.window.slots.Len() > 0 {
		c.window.next = min(to, b.window.next)
	}
	c.reach(to)
	c.behind, c.estimate, c.late = true, true, max(1, records-b.Waiting())
}

// empty finishes all released messages.
func (c *cursor) empty() {
	c.absent.Clear()
	// order: the loop treats all offsets alike
	for o := range c.ahead {
		c.ahead[o] = nil
	}
	c.late, c.behind, c.estimate = 0, false, false
	c.start()
	c.log.changes++
	c.log.read.moved = true
}

func (c *cursor) aheadOffsets() []Offset { return slices.Sorted(maps.Keys(c.ahead)) }

// takes reports whether the channel gets a message that is in the log.
func (c *cursor) takes(m *Message) bool {
	return m.isFor(c.name) && !c.log.isSkipped(m.Offset)
}

// The steps of a channel that takes messages by its cursor.

// wants returns the offset and the number of messages that the channel needs from the log: see
// backlog.wants.
func (c *Channel) wants() (from Offset, n int) {
	if c.stopped {
		return 0, 0
	}
	n = c.memory()
	switch {
	case !c.cursor.log.tight && 2*n < c.cursor.log.cfg.Capacity:
		return 0, 0
	case c.cursor.absent.Len() > 0:
		return c.cursor.absent.Front().offset, n
	case c.cursor.behind && !c.cursor.log.hasRead(c.cursor.window.end()):
		return c.cursor.window.end(), c.space()
	}
	return 0, 0
}

func (c *Channel) want(fx *Effects) {
	if c.cursor.behind || c.cursor.absent.Len() > 0 {
		if _, n := c.wants(); n > 0 {
			fx.Disk = true
		}
	}
}

func (c *Channel) refill(now mono.Time, from, upTo Offset, msgs []*Message) {
	var m *Message
	for i := 0; c.cursor.absent.Len() > 0; {
		it := c.cursor.absent.Front()
		if it.offset < from || it.offset >= upTo {
			return
		}
		if m, i = messageAt(msgs, i, it.offset); m == nil {
			c.cursor.absent.Pop()
			c.counters.Lost++
			c.cursor.close(it.offset)
			continue
		}
		if c.memory() <= 0 {
			return
		}
		c.cursor.absent.Pop()
		m.ref()
		reached := it.offset < c.cursor.window.end()
		if reached {
			c.cursor.window.set(it.offset, m)
		}
		if reached && it.attempts == 0 && it.due == 0 {
			c.items.ready.fresh.Push(m)
			continue
		}
		it.msg = m
		c.items.index.add(it)
		c.items.place(now, it)
	}
	c.catchUp(now)
}

// next takes a message while the channel is behind. It returns false without space.
func (c *Channel) next(now mono.Time, m *Message) bool {
	c.cursor.reach(m.Offset)
	if _, found := c.cursor.ahead[m.Offset]; found || c.cursor.backlog.window.get(m.Offset) != nil {
		c.cursor.reach(m.Offset + 1)
		return true
	}
	if c.space() <= 0 {
		return false
	}
	if c.cursor.late > 1 || c.cursor.late == 1 && !c.cursor.estimate {
		c.cursor.late--
	} else { // more than estimated, or than an earlier process knew of
		c.counters.Messages++
	}
	c.cursor.window.push(m)
	c.items.enter(now, m)
	return true
}

// catchUp takes messages that are in memory until the channel is up to date or has no space.
func (c *Channel) catchUp(now mono.Time) {
	l := c.cursor.log
	for c.cursor.behind && c.cursor.absent.Len() == 0 {
		o := c.cursor.window.end()
		if o >= l.front {
			if c.cursor.estimate {
				c.counters.Emptied += uint64(c.cursor.late)
			} else {
				c.counters.Lost += uint64(c.cursor.late)
			}
			c.cursor.behind, c.cursor.late, c.cursor.estimate = false, 0, false
			l.read.moved = true
			return
		}
		if !l.hasRead(o) {
			return
		}
		switch m, none := l.next(o); {
		case m == nil || m.Offset >= l.front:
			c.cursor.reach(min(none, l.front))
		case !c.cursor.takes(m):
			c.cursor.reach(m.Offset + 1)
		case !c.next(now, m):
			return
		}
	}
}

// Unread describes messages that a channel would deliver and that were not in memory at a Peek:
// single messages, and then the messages between two offsets for which Takes returns true. Unread
// describes the moment of the Peek, regardless of later steps.
type Unread struct {
	Single   []Offset
	Attempts []uint16 // deliveries so far, of each of Single
	From, To Offset

	channel  string
	excluded map[Offset]bool // beyond the channel's position, or not released yet
	skipped  []span
}

// Peek calls ready with the next messages of the channel that are in memory, then last with the
// messages behind the returned Unread. Each gets at most n messages, in order, with the
// deliveries so far. The messages belong to the machine.
func (c *Channel) Peek(now mono.Time, n int, ready, last func(m *Message, attempts uint16)) Unread {
	l := c.cursor.log
	left := n
	for m, attempts := range c.items.ready.all {
		if left--; left < 0 {
			break
		}
		ready(m, attempts)
	}
	u := Unread{From: l.front, To: l.front, channel: c.cursor.name, excluded: map[Offset]bool{}, skipped: slices.Clone(l.skipped)}
	for i := range c.cursor.absent.Len() {
		if it := c.cursor.absent.At(i); len(u.Single) < n && !now.Before(it.due) {
			u.Single, u.Attempts = append(u.Single, it.offset), append(u.Attempts, it.attempts)
		}
	}
	if !c.cursor.behind {
		return u
	}
	u.From = c.cursor.window.end()
	u.To = max(u.From, min(l.front, l.tail.window.next))
	// order: the result is a set
	for o := range c.cursor.ahead {
		u.excluded[o] = true
	}
	for o, w := u.From, &c.cursor.backlog.window; o < min(l.front, w.end()); o++ {
		if w.get(o) != nil {
			u.excluded[o] = true
		}
	}
	for o := u.To; o < l.front && n > 0; o++ {
		if m := l.tail.window.get(o); m != nil && m.isFor(c.cursor.name) && !u.excluded[o] && !l.isSkipped(o) {
			last(m, m.Attempts)
			n--
		}
	}
	return u
}

// Takes reports whether the channel would deliver a logged message at or after From. only names
// the message's single channel; empty: all channels.
func (u *Unread) Takes(o Offset, only string) bool {
	return o < u.To && !u.excluded[o] && (only == "" || only == u.channel) && !inSpan(u.skipped, o)
}
