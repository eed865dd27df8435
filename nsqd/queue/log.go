package queue

import (
	"slices"
	"sort"

	"github.com/srtm-io/srtm/internal/container"
)

// Log is one topic's messages in order of acceptance. The backlog and each channel are cursors
// into the log (see Cursors). Type Log is the part that the cursors share: its extent, and the
// messages that the log itself holds in memory.
//
// The owner writes the log in order. The tail holds the messages that are waiting for the write.
// When a cursor that is behind needs a message that is only in memory, the tail takes every
// message up to that message, except messages that no cursor needs. The cursors hold the messages
// after the tail, so a topic without lag has no tail. The alternative, a tail of all messages in
// memory, costs the garbage collector one more pointer a message.
//
// Invariants, checked by checkInvariants in tests:
//   - front is beyond all released messages;
//   - the tail holds a reference to each of its messages.
type Log struct {
	cfg      *Config // the topic's; set once
	end      Offset  // offset of the next message
	front    Offset  // beyond all released messages
	first    Offset  // oldest offset that a Seek can reach
	tail     tail
	read     readCache
	detour   readCache // messages read for one cursor that is far from read; empty outside Refill
	skipped  []span
	changes  uint64
	tight    bool // memory is short of bytes
	retained bool // the log stores every message, even if no cursor needs it
}

// SetTight sets whether memory is short, from the next step on. While memory is short, the
// backlogs count as full: a new message goes to disk, one message or batch at a time, or is
// refused if there is no disk. A message on disk comes back to memory only if it can leave memory
// at once, one message at a time. Messages already in memory stay.
func (l *Log) SetTight(tight bool) { l.tight = tight }

// SetRetained sets whether the log stores every message, from the next message on, even if all
// channels finish the message before the write.
func (l *Log) SetRetained(retained bool) { l.retained = retained }

// SetFirst sets the oldest offset that a Seek can reach.
func (l *Log) SetFirst(first Offset) { l.first = first }

// Front returns the offset beyond all released messages.
func (l *Log) Front() Offset { return l.front }

// StoredTo returns the offset before which the log has every message that a cursor needs.
func (l *Log) StoredTo() Offset { return l.tail.window.next }

// End returns the offset of the next message.
func (l *Log) End() Offset { return l.end }

// Changes counts the changes to the contents of Snapshot.
func (l *Log) Changes() uint64 { return l.changes }

// MarkChanged counts a change to the data that the owner saves beside the snapshot.
func (l *Log) MarkChanged() { l.changes++ }

// Unwritten reports whether TakeUnwritten has something to do.
func (l *Log) Unwritten() bool { return l.tail.window.slots.Len() > 0 }

// Carrying reports whether a message that was carried forward is not written yet.
func (l *Log) Carrying() bool { return l.tail.window.next < l.tail.rewritten }

// ForgetRead empties the read cache, which an idle topic does not need.
func (l *Log) ForgetRead(fx *Effects) { l.read.forget(fx) }

// Discard forgets the unwritten messages. Requires: Stop, and no channel has a message.
func (l *Log) Discard(fx *Effects) {
	l.tail.pass(l.end, fx)
	l.read.forget(fx)
}

// logged reports whether the log keeps the cursors' places.
func (l *Log) logged() bool { return l.cfg.Overflow > 0 }

// room reports whether n more messages may be on their way to disk. With nothing under way, a
// batch of any size has room, even under memory pressure.
func (l *Log) room(n int) bool {
	under, most := l.tail.underWay, l.cfg.Overflow
	return l.cfg.WriteThrough || !l.tight && under+n <= most || most > 0 && under == 0
}

func (l *Log) number(m *Message) {
	m.Offset, m.refs = l.end, m.refs&^spilled
	l.end++
}

// jump skips the offsets before to. Requires: the tail is empty.
func (l *Log) jump(to Offset) {
	if to > l.end {
		l.end = to
		l.tail.window.reach(to)
	}
}

// hasRead reports whether memory has the log's content at an offset, so a cursor needs no read.
func (l *Log) hasRead(o Offset) bool {
	return o >= l.tail.window.next || l.read.has(o) || l.detour.has(o)
}

// next returns the first message in memory from o on, for a cursor at o. Without one, next
// returns the offset up to which the log has no message. Requires: hasRead(o).
func (l *Log) next(o Offset) (m *Message, none Offset) {
	for _, r := range []*readCache{&l.read, &l.detour} {
		if r.has(o) {
			return r.after(o), r.to
		}
	}
	return l.tail.window.get(o), o + 1
}

// span is a run of offsets that no channel gets: messages emptied out of the backlog, or carried
// forward for a deleted channel. A cursor that is behind skips these messages.
type span struct{ from, to Offset }

// maxVoid is the number of spans that the log remembers for a Seek alone. A Seek brings back
// messages emptied in older spans.
const maxSkipped = 1000

// skip adds a span and merges it with its neighbours.
func (l *Log) skip(from, to Offset) {
	if from >= to {
		return
	}
	i := sort.Search(len(l.skipped), func(i int) bool { return l.skipped[i].to >= from })
	end := i
	for ; end < len(l.skipped) && l.skipped[end].from <= to; end++ { // the spans touch
		from, to = min(from, l.skipped[end].from), max(to, l.skipped[end].to)
	}
	l.skipped = slices.Replace(l.skipped, i, end, span{from, to})
}

func (l *Log) isSkipped(o Offset) bool { return inSpan(l.skipped, o) }

func inSpan(spans []span, o Offset) bool {
	i := sort.Search(len(spans), func(i int) bool { return spans[i].to > o })
	return i < len(spans) && spans[i].from <= o
}

// tail holds the messages that the log must store and has not stored yet, by offset. A nil slot
// is a message that no cursor needs.
//
// Invariant: underWay is the number of spilled messages in the tail.
type tail struct {
	window    window[*Message]
	underWay  int    // messages on their way to disk for a cursor that is behind
	rewritten Offset // must be written up to here before a snapshot
}

func (t *tail) release(m *Message, fx *Effects) {
	if m.spilled() {
		m.refs &^= spilled
		t.underWay--
	}
	fx.unref(m)
}

// take is Topic.TakeUnwritten without its effects on the topic. From needed on, a cursor is
// behind. take leaves out messages that no cursor needs, unless all is true.
func (t *tail) take(needed Offset, all bool, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	upTo, size := t.window.next, 0
	for o := upTo; o < t.window.end() && len(into) < most && size < bytes; o++ {
		if m := t.window.get(o); m == nil {
			// finished already
		} else if m.refs.holders() == 1 && o < needed && m.Only == nil && !all {
			t.window.done(o)
			t.release(m, fx)
		} else {
			m.ref()
			into = append(into, m)
			size += m.Size()
		}
		upTo = o + 1
	}
	if len(into) == 0 {
		t.pass(upTo, fx)
	}
	return into, upTo
}

// pass moves the tail's beginning to an offset or beyond.
func (t *tail) pass(upTo Offset, fx *Effects) {
	for t.window.next < upTo && t.window.slots.Len() > 0 {
		m := t.window.slots.Pop()
		if t.window.next++; m != nil {
			t.release(m, fx)
		}
	}
	if t.window.slots.Len() == 0 {
		t.window.reach(upTo)
	} else {
		t.window.trim()
	}
}

// readCache is the part of the log that was read last. If several cursors are close to each
// other, the first cursor reads the log and the others use the cache. A distant cursor reads for itself.
//
// Invariant: messages are all messages of the log in [from, to), by offset. The cache holds a
// reference to each. Every message is still needed by a cursor.
type readCache struct {
	from, to Offset
	messages container.Queue[*Message]
	bytes    int  // total Size of messages
	used     bool // since the last read elsewhere
	moved    bool // a cursor may have passed messages
}

// readAtOnce is the number of messages read at a time, even for a cursor with less room.
const readAtOnce = 1024

func (r *readCache) has(o Offset) bool { return o >= r.from && o < r.to }

// after returns the first message from an offset on, or nil. Requires: has(o).
func (r *readCache) after(o Offset) *Message {
	n := r.messages.Len()
	if n == 0 {
		return nil
	}
	r.used, r.moved = true, true
	// Offsets are rarely missing: first try the index without gaps.
	first := r.messages.Front().Offset
	i := int(min(max(o, first)-first, Offset(n-1)))
	if m := r.messages.At(i); m.Offset == o {
		return m
	}
	if i = sort.Search(n, func(i int) bool { return r.messages.At(i).Offset >= o }); i == n {
		return nil
	}
	return r.messages.At(i)
}

// follows reports whether the cache keeps messages that are read from an offset on.
func (r *readCache) follows(from Offset) bool { return from == r.to || r.from == r.to || !r.used }

func (r *readCache) drop(fx *Effects) {
	m := r.messages.Pop()
	r.from = m.Offset + 1
	r.bytes -= m.Size()
	fx.unref(m)
}

func (r *readCache) forget(fx *Effects) {
	for r.messages.Len() > 0 {
		r.drop(fx)
	}
	r.from, r.used, r.moved = r.to, false, false
}

// add adds the messages of the log in [from, upTo). It drops old messages until the cache is
// within most bytes.
func (r *readCache) add(from, upTo Offset, msgs []*Message, most int, fx *Effects) {
	size := 0
	for _, m := range msgs {
		size += m.Size()
	}
	if from != r.to {
		r.forget(fx)
		r.from = from
	}
	for r.messages.Len() > 0 && r.bytes+size > most {
		r.drop(fx)
	}
	for _, m := range msgs {
		if m.Offset < upTo {
			m.ref()
			r.messages.Push(m)
			r.bytes += m.Size()
		}
	}
	r.to, r.moved = max(from, upTo), true
}

// trim drops the messages before an offset, which no cursor needs.
func (r *readCache) trim(needed Offset, fx *Effects) {
	r.moved = false
	if needed >= r.to {
		r.forget(fx)
		return
	}
	for r.messages.Len() > 0 && r.messages.Front().Offset < needed {
		r.drop(fx)
	}
	r.from = max(r.from, needed)
}
