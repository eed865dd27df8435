package queue

import (
	"math"

	"github.com/srtm-io/srtm/internal/mono"
)

// Restoring is a topic of an earlier process, until the owner has reported the log's contents.
type Restoring struct {
	// From is the offset from which on the owner reports the log's contents.
	From Offset
	// Needed is the first offset that a cursor needs according to the snapshot. If the log begins
	// later, the messages in between were lost, or they were finished and deleted and the
	// snapshot with that state was lost.
	Needed Offset

	topic   *Topic
	written Offset          // from here on the snapshot does not know the log's contents
	end     Offset          // from here on a message for one channel is in the log twice
	present map[Offset]bool // the log's messages from written on
}

// Restore restores the topic's state from snapshot b of an earlier process. Without a snapshot
// the whole log is new to the topic. The owner then calls Found for each message in the log from
// From on, and then Done.
//
// If the topic lacks a channel of the snapshot, Restore creates the channel if wanted returns
// true. A channel that is not in the snapshot begins at the front of the releases. The log has
// nothing before first, so earlier messages in an old snapshot count as finished.
//
// After ErrSnapshot the topic is as without a snapshot. Requires: a new topic with a disk.
func (t *Topic) Restore(now mono.Time, b []byte, first Offset, fromWall func(mono.Wall) mono.Time, wanted func(channel string) bool, fx *Effects) (*Restoring, error) {
	r := &Restoring{Needed: first, topic: t, end: math.MaxUint64, present: make(map[Offset]bool)}
	t.backlog.behind = true
	if len(b) == 0 {
		return r, nil
	}
	if b[0] != snapshotVersion {
		return r, ErrSnapshot
	}
	t.unread = new(Message)
	d := decoder{b: b[1:]}
	end, written, front := Offset(d.num()), Offset(d.num()), Offset(d.num())
	next, pos, late := d.head()
	waits := window[*Message]{next: next}
	var absent ring[Offset]
	needed := first
	d.open(next, pos, func(o Offset, _ uint16, _ mono.Wall) {
		if needed = min(needed, o); o < first {
			return
		}
		waits.reach(o)
		waits.push(t.unread)
		absent.push(o)
	})
	waits.reach(pos)
	if late > 0 {
		needed = min(needed, pos)
	}
	var void []span
	at := Offset(0)
	for n := d.num(); n > 0 && !d.faulty; n-- {
		at += Offset(d.num())
		to := at + Offset(d.num())
		void = append(void, span{at, to})
		at = to
	}
	var cursors []cursor
	for n := d.num(); n > 0 && !d.faulty; n-- {
		c := newCursor(d.name(), &t.log, &t.backlog)
		if low := c.restore(&d, &waits, first, fromWall); t.Channel(c.name) != nil || wanted(c.name) {
			needed = min(needed, low)
		}
		cursors = append(cursors, c)
	}
	if d.faulty || len(d.b) > 0 || written > end || front > end || pos > end {
		return r, ErrSnapshot
	}
	for _, c := range cursors { // first: an incomplete backlog must not look complete to CreateChannel
		if t.Channel(c.name) == nil && wanted(c.name) {
			t.CreateChannel(now, c.name, fx)
		}
	}
	t.end, t.front, t.void = end, front, void
	t.backlog.window, t.backlog.absent, t.backlog.behind, t.backlog.late = waits, absent, true, late
	if r.From, r.written, r.end = written, written, end; needed < written {
		r.Needed = needed
	}
	uncounted := late > 0 && pos < first // part of the counted messages is gone, so Found counts again
	for _, c := range cursors {
		uncounted = uncounted || c.late > 0 && c.window.end() < first
	}
	if uncounted {
		r.From, t.backlog.late = min(written, first), 0
	}
	for _, from := range cursors {
		if uncounted {
			from.late, from.estimate = 0, false
		}
		if c := t.Channel(from.name); c != nil {
			c.cursor = from
			continue
		}
		// The channel was deleted since.
		// order: the result is a set
		for o := range from.ahead {
			t.avoid(o, o+1)
		}
	}
	for _, c := range t.channels {
		if !c.behind {
			c.start()
		}
	}
	return r, nil
}

// restore reads a cursor that snapshot wrote. waits are the messages that wait in the backlog.
// Messages before first count as finished. restore returns the lesser of first and the first
// offset that the channel needs.
func (c *cursor) restore(d *decoder, waits *window[*Message], first Offset, fromWall func(mono.Wall) mono.Time) (needed Offset) {
	needed = first
	absent := func(o Offset, attempts uint16, due mono.Wall) *item {
		if needed = min(needed, o); o < first {
			return nil
		}
		it := &item{offset: o, place: -1, attempts: attempts}
		if due > 0 {
			it.due = fromWall(due)
		}
		c.absent.push(it)
		return it
	}
	next, pos, late := d.head()
	c.behind, c.late, c.estimate = true, max(late/2, late%2), late%2 > 0
	c.window.next = next
	if late > 0 {
		needed = min(needed, pos)
	}
	d.open(next, pos, func(o Offset, attempts uint16, due mono.Wall) {
		if needed = min(needed, o); o < first {
			return
		}
		c.window.reach(o)
		if waits.get(o) != nil {
			c.window.push(c.backlog.pends())
		} else {
			c.window.push(absent(o, attempts, due))
		}
	})
	c.window.reach(pos)
	at := pos
	for n := d.num(); n > 0 && !d.faulty; n-- {
		at += Offset(d.num())
		var it *item
		if d.num() > 0 {
			it = absent(at, uint16(d.num()), mono.Wall(d.num()))
		}
		c.lead(at, it)
	}
	return needed
}

// Found reports that the log has a message at an offset, for all channels or for channel only.
// Requires: ascending offsets.
func (r *Restoring) Found(o Offset, only string) {
	t, b := r.topic, &r.topic.backlog
	if o >= r.written && (only != "" || o < max(t.front, b.window.end())) { // no channel had a message behind these
		r.present[o] = true
	}
	if only != "" && o >= r.end { // carried forward after the snapshot: the channel still has the message at its old offset
		if c := t.Channel(only); c == nil {
			t.avoid(o, o+1)
		} else if c.tracked {
			c.lead(o, nil)
		}
	}
	if t.end = max(t.end, o+1); o >= b.window.end() {
		switch {
		case only == "":
			b.late++
			return
		case b.late == 0 && b.absent.len() == 0: // as if released
			b.window.reach(o + 1)
			t.front = o + 1
		default:
			return // until the backlog has passed the message
		}
	}
	if b.window.get(o) != nil || t.avoided(o) {
		return
	}
	for _, c := range t.channels {
		if _, is := c.ahead[o]; !is && c.tracked && o >= c.window.end() && (only == "" || only == c.name) {
			c.behind = true
			c.late++
		}
	}
}

// Done ends the restore. next is the log's next offset.
func (r *Restoring) Done(now mono.Time, next Offset, fx *Effects) {
	t, b := r.topic, &r.topic.backlog
	// Messages that were only in memory are lost.
	lost := func(o Offset) bool { return o >= r.written && !r.present[o] }
	for range b.absent.len() {
		if o := b.absent.pop(); lost(o) {
			b.lose(o, t.channels)
		} else {
			b.absent.push(o)
		}
	}
	t.end = max(t.end, next)
	t.tail.next = t.end
	t.counters.Accepted += uint64(t.Waiting())
	for _, c := range t.channels {
		for range c.absent.len() {
			it := c.absent.pop()
			if lost(it.offset) {
				c.close(it.offset)
				continue
			}
			c.absent.push(it)
		}
		c.counters.Messages += uint64(c.Depth())
		c.catchUp(now)
		c.want(fx)
	}
	t.advance(now, fx)
}
