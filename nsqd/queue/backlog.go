package queue

import "github.com/srtm-io/srtm/internal/mono"

// backlog is the topic's own cursor, behind which messages wait.
type backlog struct {
	window window[*Message] // what waits in memory, by offset
	absent ring[Offset]     // what waited there in an earlier process and was not read yet
	behind bool
	late   int // messages from the window's end on
}

// free is how many messages may go into the backlog's memory and overtake none.
func (t *Topic) free() int {
	if t.backlog.behind || t.tight || t.backlog.absent.len() > 0 {
		return 0
	}
	if t.retained && t.logged() && !t.cfg.WriteThrough {
		return min(t.space(), max(0, t.cfg.Overflow-t.tail.underWay))
	}
	return t.space()
}

// space is how many messages the backlog's memory may still take. While memory is tight
// that is one, if it does not stay.
func (t *Topic) space() int {
	if !t.tight {
		return max(0, t.cfg.Capacity-t.waiting.len())
	}
	if t.waiting.len() == 0 && t.open() {
		return 1
	}
	return 0
}

// wants returns what the backlog has to get from the log, and from where: nothing until
// half of its memory is free, so that it comes in batches.
func (t *Topic) wants() (from Offset, n int) {
	l := &t.backlog
	if t.stopped || l.absent.len() == 0 && (!l.behind || t.known(l.window.end())) {
		return 0, 0
	}
	if n = t.space(); !t.tight && 2*n < t.cfg.Capacity {
		return 0, 0
	}
	if l.absent.len() > 0 {
		return l.absent.front(), n
	}
	return l.window.end(), n
}

// lack has the owner read what the backlog wants.
func (t *Topic) lack(fx *Effects) {
	if t.backlog.behind || t.backlog.absent.len() > 0 {
		if _, n := t.wants(); n > 0 {
			fx.Disk = true
		}
	}
}

func (t *Topic) refill(from, upTo Offset, msgs []*Message) {
	l := &t.backlog
	var m *Message
	for i := 0; l.absent.len() > 0; {
		o := l.absent.front()
		if o < from || o >= upTo {
			return
		}
		if m, i = at(msgs, i, o); m == nil {
			l.absent.pop()
			t.counters.Lost++
			t.gone(o)
			continue
		}
		if t.space() <= 0 {
			return
		}
		l.absent.pop()
		t.wait(m)
	}
	t.catchUp()
}

// catchUp takes what the backlog is behind with and is in memory, as far as there is space.
func (t *Topic) catchUp() {
	l := &t.backlog
	for l.behind && l.absent.len() == 0 {
		o := l.window.end()
		if o >= t.end {
			l.behind = false
			t.counters.Lost += uint64(max(0, l.late))
			t.counters.Accepted += uint64(max(0, -l.late)) // more than an earlier process knew of
			l.late = 0
			t.read.moved = true
			return
		}
		if !t.known(o) {
			return
		}
		m, none := t.next(o)
		switch {
		case m == nil:
			l.window.reach(none)
		case m.Only != nil:
			t.passed = t.passed || o < t.tail.next
			l.window.reach(m.Offset + 1)
		case t.space() <= 0:
			return
		default:
			l.late--
			t.wait(m)
		}
	}
}

// settleOnly lets channels have what is for them alone at the end of the log.
func (t *Topic) settleOnly(now mono.Time, fx *Effects) {
	if !t.passed || t.backlog.window.slots.len() > 0 {
		return
	}
	t.passed, t.front = false, t.end
	for _, c := range t.channels {
		c.behind = c.behind || c.tracked
		c.dispatch(now, fx)
		c.want(fx)
		t.due = min(t.due, c.Deadline())
	}
}

// gone says that what waited at an offset will not be released.
func (t *Topic) gone(o Offset) {
	t.backlog.window.done(o)
	for _, c := range t.channels {
		if c.tracked && t.isPending(c.window.get(o)) {
			c.window.done(o)
		}
	}
}
