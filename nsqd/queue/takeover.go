package queue

import "github.com/srtm-io/srtm/internal/mono"

// A log whose owner is gone is brought into another's: Undone says, of a machine that was
// restored from the one, what is not done; Appended and TakenOver put it into the other.

// Undone is a message that a channel has not finished.
type Undone struct {
	Channel string
	// Fresh: the channel has not got as far; attempts and due are as the record says.
	Fresh    bool
	Attempts uint16
	Due      mono.Time // when it may be delivered at the earliest; 0: at once
}

// Undone appends the channels that have not finished the message at an offset, which the log
// has for all of them or for that one, or reports that it waits for its token.
// Requires: Restore, and Found for all that the log has; nothing else since.
func (cs *cursors) Undone(into []Undone, o Offset, only string) (of []Undone, waits bool) {
	if only == "" && (cs.backlog.window.get(o) != nil || o >= cs.front) {
		return into, !cs.avoided(o)
	}
	for _, c := range cs.channels {
		if !c.tracked || only != "" && only != c.name {
			continue
		}
		it, known := c.ahead[o]
		if o < c.window.end() {
			it, known = c.window.get(o), true
		}
		switch {
		case it != nil:
			into = append(into, Undone{Channel: c.name, Attempts: it.attempts, Due: it.due})
		case !known && !cs.avoided(o):
			into = append(into, Undone{Channel: c.name, Fresh: true})
		}
	}
	return into, false
}

// TakenOver says that messages are in the log, from that offset on, which had their tokens
// elsewhere, each for one channel. Those of channels that do not exist are dropped.
// Requires: Config.WriteThrough.
func (t *Topic) TakenOver(now mono.Time, first Offset, undone []Undone, fx *Effects) {
	t.jump(first)
	for _, u := range undone {
		o := t.end
		t.jump(o + 1)
		if c := t.Channel(u.Channel); c != nil && c.tracked {
			it := &item{offset: o, place: -1, attempts: u.Attempts, due: u.Due}
			c.lead(o, it)
			c.absent.push(it)
			c.behind = true // what comes later waits until it is read
			c.counters.Messages++
			c.want(fx)
		} else {
			t.avoid(o, o+1)
		}
	}
	t.changes++
	t.goOn(now, fx)
}
