package queue

import "github.com/srtm-io/srtm/internal/mono"

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

// TakenOver records that messages with tokens from another owner are in the log from offset first
// on, each for one channel. Messages of unknown channels are dropped. Requires:
// Config.WriteThrough.
func (t *Topic) TakenOver(now mono.Time, first Offset, undone []Undone, fx *Effects) {
	t.jump(first)
	for _, u := range undone {
		o := t.end
		t.jump(o + 1)
		if c := t.Channel(u.Channel); c != nil && c.tracked {
			it := &item{offset: o, place: -1, attempts: u.Attempts, due: u.Due}
			c.lead(o, it)
			c.absent.push(it)
			c.behind = true // later messages wait until this message is read
			c.counters.Messages++
			c.want(fx)
		} else {
			t.avoid(o, o+1)
		}
	}
	t.changes++
	t.goOn(now, fx)
}
