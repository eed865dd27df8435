package queue

import (
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// Unread describes messages that a channel would deliver and that were not in memory at a Peek:
// single messages, and then the messages between two offsets for which Takes returns true. Unread
// describes the moment of the Peek, regardless of later steps.
type Unread struct {
	Single   []Offset
	Attempts []uint16 // deliveries so far, of each of Single
	From, To Offset

	channel string
	not     map[Offset]bool // beyond the channel's position, or not released yet
	void    []span
}

// Peek calls ready with the next messages of the channel that are in memory, then last with the
// messages behind the returned Unread. Each gets at most n messages, in order, with the
// deliveries so far. The messages belong to the machine.
func (c *Channel) Peek(now mono.Time, n int, ready, last func(m *Message, attempts uint16)) Unread {
	l := c.log
	for i := range min(n, c.ready.len()) {
		it := c.ready.at(i)
		ready(it.msg, it.attempts)
	}
	u := Unread{From: l.front, To: l.front, channel: c.name, not: map[Offset]bool{}, void: slices.Clone(l.void)}
	for i := range c.absent.len() {
		if it := c.absent.at(i); len(u.Single) < n && !now.Before(it.due) {
			u.Single, u.Attempts = append(u.Single, it.offset), append(u.Attempts, it.attempts)
		}
	}
	if !c.behind {
		return u
	}
	u.From = c.window.end()
	u.To = max(u.From, min(l.front, l.tail.next))
	// order: the result is a set
	for o := range c.ahead {
		u.not[o] = true
	}
	for o, w := u.From, &c.backlog.window; o < min(l.front, w.end()); o++ {
		if w.get(o) != nil {
			u.not[o] = true
		}
	}
	for o := u.To; o < l.front && n > 0; o++ {
		if m := l.tail.get(o); m != nil && m.isFor(c.name) && !u.not[o] && !l.avoided(o) {
			last(m, m.Attempts)
			n--
		}
	}
	return u
}

// Takes reports whether the channel would deliver a logged message at or after From. only names
// the message's single channel; empty: all channels.
func (u *Unread) Takes(o Offset, only string) bool {
	return o < u.To && !u.not[o] && (only == "" || only == u.channel) && !spanned(u.void, o)
}
