package queue

import "github.com/srtm-io/srtm/internal/mono"

// A channel is a cursor into its topic's log.

// release takes a message that the topic releases, or is behind with it: then the log has to
// have it.
func (c *Channel) release(now mono.Time, m *Message) (behind bool) {
	switch {
	case !c.tracked:
		c.counters.Messages++
		if c.ephemeral && c.space() <= 0 {
			c.counters.Dropped++
			return false
		}
		c.enter(now, m)
	case m.Offset < c.window.end():
		if c.backlog.isPending(c.window.get(m.Offset)) { // else it has had it
			c.counters.Messages++
			c.window.set(m.Offset, c.enter(now, m))
		}
	case c.behind || c.space() <= 0:
		c.counters.Messages++
		c.behind = true
		c.late++
		return true
	default:
		c.counters.Messages++
		c.reach(m.Offset)
		c.window.push(c.enter(now, m))
	}
	return false
}

// reach makes the channel's run end at an offset: of those before it only what waits
// still comes.
func (c *Channel) reach(o Offset) {
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
func (c *Channel) start() {
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
func (c *Channel) seek(to Offset, records int, fx *Effects) {
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
	c.counters.Messages += uint64(c.late)
	fx.Disk = true
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

// takes reports whether a message that is in the log is the channel's.
func (c *Channel) takes(m *Message) bool {
	return m.isFor(c.name) && !c.log.avoided(m.Offset)
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
