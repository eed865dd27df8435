package queue

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
)

// A snapshot is the state of a topic's cursors. All numbers are varints, except the version byte:
//
//	version 2
//	end, offset from which on nothing was written, front
//	backlog: position, number of written messages behind, runs of waiting messages
//	emptied spans: number, then the gap and the length of each
//	channels: number, then for each:
//	  length of the name, name, position,
//	  twice the number of written messages behind, plus 1 if estimated,
//	  runs of open messages,
//	  messages at or beyond the position: number, then for each the gap, and
//	  0 if finished, or 1, the attempts and the time as below
//
// Runs are offsets before the position: their number, then for each the gap to the previous run
// and twice the length. A message that was delivered or deferred is a run of its own: gap, 1,
// attempts, and the earliest time of the next delivery, in ns since the Unix epoch, or 0. A
// position is the window's first offset and the window's length.
const snapshotVersion = 2

// ErrSnapshot means that the snapshot is damaged or has another version.
var ErrSnapshot = errors.New("not a snapshot of cursors")

// Snapshot appends the state for Restore. wall converts times. Deliveries that were not sent
// do not count.
func (cs *Cursors) Snapshot(b []byte, wall func(mono.Time) mono.Wall) []byte {
	cs.Low() // forgets spans
	b = append(b, snapshotVersion)
	b = binary.AppendUvarint(b, uint64(cs.log.end))
	b = binary.AppendUvarint(b, uint64(cs.log.tail.window.next))
	b = binary.AppendUvarint(b, uint64(cs.log.front))

	w := cs.backlog
	if !w.behind {
		w.window.reach(cs.log.end)
	}
	e := runs{last: w.window.next}
	for i := range w.window.slots.Len() {
		if w.window.slots.At(i) != nil {
			e.add(w.window.next + Offset(i))
		}
	}
	onDisk := w.late
	if w.behind {
		for o := max(w.window.end(), cs.log.tail.window.next); o < cs.log.end; o++ {
			if m := cs.log.tail.window.get(o); m != nil && m.Only == nil {
				onDisk--
			}
		}
	}
	b = cursorHead(b, w.window.next, w.window.end(), onDisk)
	b = e.append(b)

	b = binary.AppendUvarint(b, uint64(len(cs.log.skipped)))
	last := Offset(0)
	for _, v := range cs.log.skipped {
		b = binary.AppendUvarint(b, uint64(v.from-last))
		b = binary.AppendUvarint(b, uint64(v.to-v.from))
		last = v.to
	}

	n := 0
	for _, c := range cs.channels {
		if c.cursor.tracked {
			n++
		}
	}
	b = binary.AppendUvarint(b, uint64(n))
	for _, c := range cs.channels {
		if c.cursor.tracked {
			b = c.cursor.snapshot(b, &c.items.index, wall)
		}
	}
	return b
}

func cursorHead(b []byte, next, end Offset, late int) []byte {
	b = binary.AppendUvarint(b, uint64(next))
	b = binary.AppendUvarint(b, uint64(end-next))
	return binary.AppendUvarint(b, uint64(max(0, late)))
}

func (c *cursor) snapshot(b []byte, present *index, wall func(mono.Time) mono.Wall) []byte {
	l := c.log
	b = binary.AppendUvarint(b, uint64(len(c.name)))
	b = append(b, c.name...)
	onDisk := c.late
	if !c.behind {
		c.reach(l.front)
	} else {
		for o := max(c.window.end(), l.tail.window.next); o < l.front; o++ {
			if m := l.tail.window.get(o); m != nil && c.takes(m) && c.backlog.window.get(o) == nil {
				onDisk--
			}
		}
	}
	onDisk = 2 * max(0, onDisk)
	if c.estimate {
		onDisk++
	}
	b = cursorHead(b, c.window.next, c.window.end(), onDisk)
	left := present.n // items in the rest of the window
	// order: a number
	for _, it := range c.ahead {
		if it != nil && it.msg != nil {
			left--
		}
	}
	e, absent := runs{last: c.window.next}, 0
	for i := range c.window.slots.Len() {
		m := c.window.slots.At(i)
		if m == nil {
			continue
		}
		o, it := c.window.next+Offset(i), (*item)(nil)
		switch {
		case c.backlog.isUnread(m):
			for c.absent.At(absent).offset < o {
				absent++
			}
			it = c.absent.At(absent)
		case left > 0: // items are near the front
			if it = present.of(m); it != nil {
				left--
			}
		}
		if it != nil {
			if attempts, due := it.state(wall); attempts > 0 || due > 0 {
				e.addSingle(o, attempts, due)
				continue
			}
		}
		e.add(o)
	}
	b = e.append(b)
	b = binary.AppendUvarint(b, uint64(len(c.ahead)))
	last := c.window.end()
	for _, o := range c.aheadOffsets() {
		b = binary.AppendUvarint(b, uint64(o-last))
		if last = o; c.ahead[o] == nil {
			b = append(b, 0)
			continue
		}
		attempts, due := c.ahead[o].state(wall)
		b = binary.AppendUvarint(append(b, 1), uint64(attempts))
		b = binary.AppendUvarint(b, uint64(due))
	}
	return b
}

// state returns the item's state for the next process: the deliveries, and the earliest time of
// the next delivery, or 0.
func (it *item) state(wall func(mono.Time) mono.Wall) (attempts uint16, due mono.Wall) {
	attempts = it.attempts
	switch {
	case it.holder != nil: // the next process delivers the message at once
		if !it.sent { // as in consumer.release
			attempts--
		}
	case it.delivery != 0: // a dead letter that is not stored: the next process delivers it at once
	case it.due > 0 && (it.place >= 0 || it.msg == nil): // deferred, or absent
		due = wall(it.due)
	}
	return attempts, due
}

// runs encodes offsets in ascending order.
type runs struct {
	b     []byte
	n     int
	last  Offset // beyond the last run
	first Offset // of the run not encoded yet
	len   uint64
}

func (r *runs) add(o Offset) {
	if r.len > 0 && r.first+Offset(r.len) == o {
		r.len++
		return
	}
	r.flush()
	r.first, r.len = o, 1
}

func (r *runs) flush() {
	if r.len == 0 {
		return
	}
	r.b = binary.AppendUvarint(r.b, uint64(r.first-r.last))
	r.b = binary.AppendUvarint(r.b, 2*r.len)
	r.n++
	r.last, r.len = r.first+Offset(r.len), 0
}

func (r *runs) addSingle(o Offset, attempts uint16, due mono.Wall) {
	r.flush()
	r.b = binary.AppendUvarint(r.b, uint64(o-r.last))
	r.b = binary.AppendUvarint(r.b, 1)
	r.b = binary.AppendUvarint(r.b, uint64(attempts))
	r.b = binary.AppendUvarint(r.b, uint64(due))
	r.n++
	r.last = o + 1
}

func (r *runs) append(b []byte) []byte {
	r.flush()
	b = binary.AppendUvarint(b, uint64(r.n))
	return append(b, r.b...)
}

// decoder reads a snapshot. After an error it reads zeros.
type decoder struct {
	b      []byte
	faulty bool
}

func (d *decoder) num() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.faulty, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) name() string {
	n := d.num()
	if n > uint64(len(d.b)) {
		d.faulty, d.b = true, nil
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

// head reads a cursor's position. It limits the length, and so the memory of the window.
func (d *decoder) head() (next, end Offset, late int) {
	next = Offset(d.num())
	length := d.num()
	late = int(d.num())
	if length > 1<<28 || late < 0 {
		d.faulty, d.b = true, nil
		length = 0
	}
	return next, next + Offset(length), late
}

// open calls f with each open offset, in ascending order, all before end.
func (d *decoder) open(next, end Offset, f func(o Offset, attempts uint16, due mono.Wall)) {
	offset := next
	for n := d.num(); n > 0 && !d.faulty; n-- {
		offset += Offset(d.num())
		kind, attempts, due := d.num(), uint64(0), uint64(0)
		length := kind / 2
		if kind%2 == 1 {
			length, attempts, due = 1, d.num(), d.num()
		}
		if offset < next || offset > end || length > uint64(end-offset) || attempts > 1<<16-1 || int64(due) < 0 {
			d.faulty, d.b = true, nil
			return
		}
		for ; length > 0; length-- {
			f(offset, uint16(attempts), mono.Wall(due))
			offset++
		}
	}
}

// FirstSnapshot returns the snapshot of a log that an import has filled. The channels have had no
// message. Messages before released need no token. next is the offset of the next message.
func FirstSnapshot(released, next Offset, channels []string) []byte {
	b := []byte{snapshotVersion}
	b = binary.AppendUvarint(b, uint64(next))
	b = binary.AppendUvarint(b, 0)
	b = binary.AppendUvarint(b, uint64(released))
	b = cursorHead(b, released, released, 0)
	b = append(b, 0, 0) // no message waits in memory, no spans
	b = binary.AppendUvarint(b, uint64(len(channels)))
	for _, c := range channels {
		b = binary.AppendUvarint(b, uint64(len(c)))
		b = append(b, c...)
		b = cursorHead(b, 0, 0, 0)
		b = append(b, 0, 0) // no open messages before the position, none ahead
	}
	return b
}

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
func (disk *Disk) Restore(now mono.Time, b []byte, first Offset, fromWall func(mono.Wall) mono.Time, wanted func(channel string) bool, fx *Effects) (*Restoring, error) {
	t := disk.topic()
	r := &Restoring{Needed: first, topic: t, end: math.MaxUint64, present: make(map[Offset]bool)}
	t.backlog.behind = true
	if len(b) == 0 {
		return r, nil
	}
	if b[0] != snapshotVersion {
		return r, ErrSnapshot
	}
	d := decoder{b: b[1:]}
	end, written, front := Offset(d.num()), Offset(d.num()), Offset(d.num())
	next, pos, late := d.head()
	waits := window[*Message]{next: next}
	var absent container.Queue[Offset]
	needed := first
	d.open(next, pos, func(o Offset, _ uint16, _ mono.Wall) {
		if needed = min(needed, o); o < first {
			return
		}
		waits.reach(o)
		waits.push(t.backlog.notRead())
		absent.Push(o)
	})
	waits.reach(pos)
	if late > 0 {
		needed = min(needed, pos)
	}
	var void []span
	offset := Offset(0)
	for n := d.num(); n > 0 && !d.faulty; n-- {
		offset += Offset(d.num())
		to := offset + Offset(d.num())
		void = append(void, span{offset, to})
		offset = to
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
	t.log.end, t.log.front, t.log.skipped = end, front, void
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
			t.log.skip(o, o+1)
		}
	}
	for _, c := range t.cursors.channels {
		if !c.cursor.behind {
			c.cursor.start()
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
		c.absent.Push(it)
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
			c.window.push(c.backlog.notReleased())
		} else {
			c.window.push(c.slot(absent(o, attempts, due)))
		}
	})
	c.window.reach(pos)
	offset := pos
	for n := d.num(); n > 0 && !d.faulty; n-- {
		offset += Offset(d.num())
		var it *item
		if d.num() > 0 {
			it = absent(offset, uint16(d.num()), mono.Wall(d.num()))
		}
		c.setAhead(offset, it)
	}
	return needed
}

// Found reports that the log has a message at an offset, for all channels or for channel only.
// Requires: ascending offsets.
func (r *Restoring) Found(o Offset, only string) {
	t, b := r.topic, &r.topic.backlog
	if o >= r.written && (only != "" || o < max(t.log.front, b.window.end())) { // no channel had a message behind these
		r.present[o] = true
	}
	if only != "" && o >= r.end { // carried forward after the snapshot: the channel still has the message at its old offset
		if c := t.Channel(only); c == nil {
			t.log.skip(o, o+1)
		} else if c.cursor.tracked {
			c.cursor.setAhead(o, nil)
		}
	}
	if t.log.end = max(t.log.end, o+1); o >= b.window.end() {
		switch {
		case only == "":
			b.late++
			return
		case b.late == 0 && b.absent.Len() == 0: // as if released
			b.window.reach(o + 1)
			t.log.front = o + 1
		default:
			return // until the backlog has passed the message
		}
	}
	if b.window.get(o) != nil || t.log.isSkipped(o) {
		return
	}
	for _, c := range t.cursors.channels {
		if _, found := c.cursor.ahead[o]; !found && c.cursor.tracked && o >= c.cursor.window.end() && (only == "" || only == c.cursor.name) {
			c.cursor.behind = true
			c.cursor.late++
		}
	}
}

// Done ends the restore. next is the log's next offset.
func (r *Restoring) Done(now mono.Time, next Offset, fx *Effects) {
	t, b := r.topic, &r.topic.backlog
	// Messages that were only in memory are lost.
	lost := func(o Offset) bool { return o >= r.written && !r.present[o] }
	for range b.absent.Len() {
		if o := b.absent.Pop(); lost(o) {
			b.lose(o, t.cursors.channels)
		} else {
			b.absent.Push(o)
		}
	}
	t.log.end = max(t.log.end, next)
	t.log.tail.window.next = t.log.end
	t.backlog.counters.Accepted += uint64(t.backlog.Waiting())
	for _, c := range t.cursors.channels {
		for range c.cursor.absent.Len() {
			it := c.cursor.absent.Pop()
			if lost(it.offset) {
				c.cursor.close(it.offset)
				continue
			}
			c.cursor.absent.Push(it)
		}
		c.counters.Messages += uint64(c.Depth())
		c.catchUp(now)
		c.want(fx)
	}
	t.advance(now, fx)
}
