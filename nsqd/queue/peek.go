package queue

import (
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
)

// Unread is what a channel would deliver that was not in memory at the moment of a Peek,
// where it is in the log: single messages, and then those from one offset to another that
// Takes says. It holds of that moment, whatever the channel does meanwhile.
type Unread struct {
	Single   []Offset
	Attempts []uint16 // deliveries so far, of each of Single
	From, To Offset

	channel string
	not     map[Offset]bool // it has them beyond its position, or they are not released
	void    []span
}

// Peek calls ready with the messages that the channel would deliver next and has in memory,
// then last with those that come after all that it returns: at most n of each, in order,
// with the deliveries so far. They are the machine's.
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
	// order: a set
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

// Takes reports whether a message that the log has from From on is one of them. only is the
// channel that it is for; empty: all.
func (u *Unread) Takes(o Offset, only string) bool {
	return o < u.To && !u.not[o] && (only == "" || only == u.channel) && !spanned(u.void, o)
}
