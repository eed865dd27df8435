package queue

import (
	"maps"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
)

// cursor is a channel's place in its topic's log: all before the window is done.
//
// Invariants, checked by checkLog in tests: see cursors.
type cursor struct {
	// Set once.
	name    string
	log     *log
	backlog *backlog // what is not released yet
	tracked bool     // its place is kept

	window   window[*item]    // by offset
	absent   ring[*item]      // what an earlier process had in memory and was not read yet: its places
	ahead    map[Offset]*item // what is beyond the window's end, see carry.go; nil: done
	behind   bool
	late     int  // released messages from the window's end on
	estimate bool // late is one, since a Seek; at least 1, or the channel could be taken for empty
}

func newCursor(name string, l *log, b *backlog) cursor {
	return cursor{name: name, log: l, backlog: b, tracked: l.logged() && !wire.Ephemeral(name)}
}

// Name returns the channel's name.
func (c *cursor) Name() string { return c.name }

// Beyond is how many messages wait for a consumer that the channel has not in memory.
func (c *cursor) Beyond() int { return c.late + c.absent.len() }

// lead notes what is at an offset that the channel has not reached.
func (c *cursor) lead(o Offset, it *item) {
	if c.ahead == nil {
		c.ahead = make(map[Offset]*item)
	}
	c.ahead[o] = it
}

// close says that the channel is done with the message at an offset.
func (c *cursor) close(o Offset) {
	if o < c.window.end() {
		c.window.done(o)
	} else if c.tracked {
		c.lead(o, nil)
	}
}

// Unfinished is how far the channel is ahead of the oldest message that it has not
// finished, in messages: see Config.MaxUnfinished.
func (c *cursor) Unfinished() int { return c.window.slots.len() }

// Full reports whether there is more for the channel, which it does not get since it is as
// far ahead as it may be.
func (c *cursor) Full() bool {
	most := c.log.cfg.MaxUnfinished
	return c.behind && most > 0 && c.Unfinished() >= most
}

// reach makes the channel's run end at an offset: of those before it only what waits
// still comes.
func (c *cursor) reach(o Offset) {
	w := &c.backlog.window
	if w.slots.len() == 0 && len(c.ahead) == 0 {
		c.window.reach(o)
		return
	}
	for c.window.end() < o {
		at := c.window.end()
		if it, is := c.ahead[at]; is {
			delete(c.ahead, at)
			c.window.push(it)
		} else if w.get(at) != nil {
			c.window.push(c.backlog.pends())
		} else {
			c.window.push(nil)
		}
	}
}

// start puts the cursor of a channel that has had nothing where the topic's releases
// are.
func (c *cursor) start() {
	if !c.tracked {
		return
	}
	c.window.slots.clear()
	if c.window.next = c.log.front; c.backlog.window.slots.len() > 0 {
		c.window.next = min(c.log.front, c.backlog.window.next)
	}
	// order: all alike
	for o := range c.ahead {
		if o < c.window.next {
			delete(c.ahead, o)
		}
	}
	c.reach(c.log.front)
}

// seek puts an empty cursor at an offset before the topic's releases.
func (c *cursor) seek(to Offset, records int) {
	l, b := c.log, c.backlog
	for o := l.tail.next; o < l.end; o++ {
		m, waits := l.tail.get(o), b.window.get(o)
		if waits != nil || m != nil && (o >= l.front || o >= to && c.takes(m)) {
			records++ // of what waits, below: not in the log
		}
	}
	c.window.slots.clear()
	if c.window.next = to; b.window.slots.len() > 0 {
		c.window.next = min(to, b.window.next)
	}
	c.reach(to)
	c.behind, c.estimate, c.late = true, true, max(1, records-b.Waiting())
}

// empty has all that was released done with.
func (c *cursor) empty() {
	c.absent.clear()
	// order: all alike
	for o := range c.ahead {
		c.ahead[o] = nil
	}
	c.late, c.behind, c.estimate = 0, false, false
	c.start()
	c.log.changes++
	c.log.read.moved = true
}

func (c *cursor) aheadOffsets() []Offset { return slices.Sorted(maps.Keys(c.ahead)) }

// takes reports whether a message that is in the log is the channel's.
func (c *cursor) takes(m *Message) bool {
	return m.isFor(c.name) && !c.log.avoided(m.Offset)
}

// The steps of a channel that takes messages by its cursor.

// release takes a message that the topic releases, or is behind with it: then the log has to
// have it.
func (c *Channel) release(now mono.Time, m *Message) (behind bool) {
	if m.Offset < c.window.end() && !c.backlog.isPending(c.window.get(m.Offset)) {
		return false // it has had it
	}
	c.counters.Messages++
	switch {
	case !c.tracked:
		if c.ephemeral && c.space() <= 0 {
			c.counters.Dropped++
			return false
		}
		c.enter(now, m)
	case m.Offset < c.window.end():
		c.window.set(m.Offset, c.enter(now, m))
	case c.behind || c.space() <= 0:
		c.behind = true
		c.late++
		return true
	default:
		c.reach(m.Offset)
		c.window.push(c.enter(now, m))
	}
	return false
}

// wants is as of the backlog.
func (c *Channel) wants() (from Offset, n int) {
	if c.stopped {
		return 0, 0
	}
	n = c.memory()
	switch {
	case !c.log.tight && 2*n < c.log.cfg.Capacity:
		return 0, 0
	case c.absent.len() > 0:
		return c.absent.front().offset, n
	case c.behind && !c.log.known(c.window.end()):
		return c.window.end(), c.space()
	}
	return 0, 0
}

func (c *Channel) want(fx *Effects) {
	if c.behind || c.absent.len() > 0 {
		if _, n := c.wants(); n > 0 {
			fx.Disk = true
		}
	}
}

func (c *Channel) refill(now mono.Time, from, upTo Offset, msgs []*Message) {
	var m *Message
	for i := 0; c.absent.len() > 0; {
		it := c.absent.front()
		if it.offset < from || it.offset >= upTo {
			return
		}
		if m, i = at(msgs, i, it.offset); m == nil {
			c.absent.pop()
			c.counters.Lost++
			c.close(it.offset)
			continue
		}
		if c.memory() <= 0 {
			return
		}
		c.absent.pop()
		m.ref()
		it.msg = m
		c.place(now, it)
	}
	c.catchUp(now)
}

// next takes a message that the channel is behind with; false if there is no space.
func (c *Channel) next(now mono.Time, m *Message) bool {
	c.reach(m.Offset)
	if _, is := c.ahead[m.Offset]; is || c.backlog.window.get(m.Offset) != nil {
		c.reach(m.Offset + 1)
		return true
	}
	if c.space() <= 0 {
		return false
	}
	if c.late > 1 || c.late == 1 && !c.estimate {
		c.late--
	} else { // more than was estimated, or than an earlier process knew of
		c.counters.Messages++
	}
	c.window.push(c.enter(now, m))
	return true
}

// catchUp takes what the channel is behind with and is in memory, as far as there is
// space.
func (c *Channel) catchUp(now mono.Time) {
	l := c.log
	for c.behind && c.absent.len() == 0 {
		o := c.window.end()
		if o >= l.front {
			if c.estimate {
				c.counters.Emptied += uint64(c.late)
			} else {
				c.counters.Lost += uint64(c.late)
			}
			c.behind, c.late, c.estimate = false, 0, false
			l.read.moved = true
			return
		}
		if !l.known(o) {
			return
		}
		switch m, none := l.next(o); {
		case m == nil || m.Offset >= l.front:
			c.reach(min(none, l.front))
		case !c.takes(m):
			c.reach(m.Offset + 1)
		case !c.next(now, m):
			return
		}
	}
}
