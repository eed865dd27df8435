package queue

import (
	"encoding/binary"
	"errors"

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

// Snapshot appends the state for Restore. wall converts times. Deliveries that were not handed
// over do not count.
func (cs *cursors) Snapshot(b []byte, wall func(mono.Time) mono.Wall) []byte {
	cs.Low() // forgets spans
	b = append(b, snapshotVersion)
	b = binary.AppendUvarint(b, uint64(cs.end))
	b = binary.AppendUvarint(b, uint64(cs.tail.next))
	b = binary.AppendUvarint(b, uint64(cs.front))

	w := &cs.backlog
	if !w.behind {
		w.window.reach(cs.end)
	}
	e := runs{last: w.window.next}
	for i := range w.window.slots.len() {
		if w.window.slots.at(i) != nil {
			e.add(w.window.next + Offset(i))
		}
	}
	onDisk := w.late
	if w.behind {
		for o := max(w.window.end(), cs.tail.next); o < cs.end; o++ {
			if m := cs.tail.get(o); m != nil && m.Only == nil {
				onDisk--
			}
		}
	}
	b = cursorHead(b, w.window.next, w.window.end(), onDisk)
	b = e.append(b)

	b = binary.AppendUvarint(b, uint64(len(cs.void)))
	last := Offset(0)
	for _, v := range cs.void {
		b = binary.AppendUvarint(b, uint64(v.from-last))
		b = binary.AppendUvarint(b, uint64(v.to-v.from))
		last = v.to
	}

	n := 0
	for _, c := range cs.channels {
		if c.tracked {
			n++
		}
	}
	b = binary.AppendUvarint(b, uint64(n))
	for _, c := range cs.channels {
		if c.tracked {
			b = c.snapshot(b, wall)
		}
	}
	return b
}

func cursorHead(b []byte, next, end Offset, late int) []byte {
	b = binary.AppendUvarint(b, uint64(next))
	b = binary.AppendUvarint(b, uint64(end-next))
	return binary.AppendUvarint(b, uint64(max(0, late)))
}

func (c *cursor) snapshot(b []byte, wall func(mono.Time) mono.Wall) []byte {
	l := c.log
	b = binary.AppendUvarint(b, uint64(len(c.name)))
	b = append(b, c.name...)
	onDisk := c.late
	if !c.behind {
		c.reach(l.front)
	} else {
		for o := max(c.window.end(), l.tail.next); o < l.front; o++ {
			if m := l.tail.get(o); m != nil && c.takes(m) && c.backlog.window.get(o) == nil {
				onDisk--
			}
		}
	}
	onDisk = 2 * max(0, onDisk)
	if c.estimate {
		onDisk++
	}
	b = cursorHead(b, c.window.next, c.window.end(), onDisk)
	e := runs{last: c.window.next}
	for i := range c.window.slots.len() {
		it := c.window.slots.at(i)
		if it == nil {
			continue
		}
		o := c.window.next + Offset(i)
		attempts, at := it.state(wall)
		if attempts == 0 && at == 0 {
			e.add(o)
			continue
		}
		e.one(o, attempts, at)
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
		attempts, at := c.ahead[o].state(wall)
		b = binary.AppendUvarint(append(b, 1), uint64(attempts))
		b = binary.AppendUvarint(b, uint64(at))
	}
	return b
}

// state returns the item's state for the next process: the deliveries, and the earliest time of
// the next delivery, or 0.
func (it *item) state(wall func(mono.Time) mono.Wall) (attempts uint16, at mono.Wall) {
	attempts = it.attempts
	switch {
	case it.holder != nil: // the next process delivers the message at once
		if !it.handed { // as in consumer.release
			attempts--
		}
	case it.turn != 0: // a dead letter that is not stored: the next process delivers it at once
	case it.due > 0 && (it.place >= 0 || it.msg == nil): // deferred, or absent
		at = wall(it.due)
	}
	return attempts, at
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

func (r *runs) one(o Offset, attempts uint16, due mono.Wall) {
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
	at := next
	for n := d.num(); n > 0 && !d.faulty; n-- {
		at += Offset(d.num())
		kind, attempts, due := d.num(), uint64(0), uint64(0)
		length := kind / 2
		if kind%2 == 1 {
			length, attempts, due = 1, d.num(), d.num()
		}
		if at < next || at > end || length > uint64(end-at) || attempts > 1<<16-1 || int64(due) < 0 {
			d.faulty, d.b = true, nil
			return
		}
		for ; length > 0; length-- {
			f(at, uint16(attempts), mono.Wall(due))
			at++
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
