package queue

import "github.com/srtm-io/srtm/internal/mono"

// Peek calls f with the messages that the channel would deliver next and has in memory, at
// most n, in order, with the deliveries so far. They are the machine's.
func (c *Channel) Peek(n int, f func(m *Message, attempts uint16)) {
	for i := range min(n, c.ready.len()) {
		it := c.ready.at(i)
		f(it.msg, it.attempts)
	}
}

// Unread returns where in the log the messages are that come after those: single ones, at
// most n, with the deliveries so far, and then all from an offset on that PeekTakes says;
// from the topic's front on there are none.
func (c *Channel) Unread(now mono.Time, n int) (single []Offset, attempts []uint16, from Offset) {
	for i := range c.absent.len() {
		if it := c.absent.at(i); len(single) < n && !now.Before(it.due) {
			single, attempts = append(single, it.offset), append(attempts, it.attempts)
		}
	}
	if c.behind {
		return single, attempts, c.window.end()
	}
	return single, attempts, c.topic.front
}

// PeekTakes reports whether a message of the log, which Unread says is to come, does.
func (c *Channel) PeekTakes(o Offset, only string) bool {
	_, ahead := c.ahead[o]
	return !ahead && o >= c.window.end() && o < c.topic.front && c.topic.line.window.get(o) == nil &&
		(only == "" || only == c.name) && !c.topic.avoided(o)
}

// PeekTail is Peek of what comes last, from an offset on, and is not in the log.
func (c *Channel) PeekTail(from Offset, n int, f func(m *Message, attempts uint16)) {
	t := c.topic
	for o := max(from, t.tail.next); o < t.front && n > 0; o++ {
		if m := t.tail.get(o); m != nil && m.isFor(c.name) && c.PeekTakes(o, "") {
			f(m, m.Attempts)
			n--
		}
	}
}
