package queue

import (
	"slices"
	"sort"
)

// log is what a topic's messages are: one log, in order of acceptance, into which the
// backlog and each channel are cursors (see there). This is what cursors share of it: how
// far it goes, and what of it is in memory beside what they have themselves.
//
// It is written in order. As soon as something that is in memory alone is needed by
// a cursor that is behind, all up to there is to be written, but what no cursor needs any
// more: that is the tail. What comes after it is found by the cursors that have it, so a
// topic that keeps up has none. The alternative, a tail of all that is in memory, is one
// pointer more a message for the garbage collector to follow.
//
// Invariants, checked by checkInvariants in tests:
//   - front is beyond all that was ever released;
//   - what is in the tail is held by it.
type log struct {
	cfg      *Config // set once: the topic's
	end      Offset  // of the next message
	front    Offset  // beyond all that were released
	first    Offset  // it has nothing before that a Seek could want
	tail     tail
	read     readCache
	passing  readCache // what is read beside read, for one cursor; empty but in Refill
	void     []span
	changes  uint64
	tight    bool // memory is short of bytes
	retained bool // every message is to be in it, whether or not a cursor needs it
}

// SetTight says whether memory is short of bytes from the next step on. Then the
// backlogs are full, whatever their capacity: what is put goes to disk, one message
// or batch at a time, or is refused where there is none; and of what is there,
// one message comes back to memory where it can leave it at once. What is in
// memory stays.
func (l *log) SetTight(tight bool) { l.tight = tight }

// SetRetained says whether every message is to be in the log, from the next one on, though
// all channels may be done with it before it is written.
func (l *log) SetRetained(retained bool) { l.retained = retained }

// Retained says from where on the log has what a Seek may want.
func (l *log) Retained(first Offset) { l.first = first }

// Front is beyond all that was released.
func (l *log) Front() Offset { return l.front }

// InLog is up to where the log has all that a cursor needs.
func (l *log) InLog() Offset { return l.tail.next }

// End is the offset of the next message.
func (l *log) End() Offset { return l.end }

// Changes is how often it changed so far what Snapshot says.
func (l *log) Changes() uint64 { return l.changes }

// Unwritten reports whether there is anything for TakeUnwritten.
func (l *log) Unwritten() bool { return l.tail.slots.len() > 0 }

// Carrying reports whether something that was carried forward is not written yet.
func (l *log) Carrying() bool { return l.tail.next < l.tail.carried }

// ForgetRead gives back what was read for cursors close behind, which a topic in which
// nothing happens need not hold.
func (l *log) ForgetRead(fx *Effects) { l.read.forget(fx) }

// Discard forgets what is to be written. Requires: Stop, and no channel has a message.
func (l *log) Discard(fx *Effects) {
	l.tail.pass(l.end, fx)
	l.read.forget(fx)
}

// logged reports whether places in the log are kept.
func (l *log) logged() bool { return l.cfg.Overflow > 0 }

// room reports whether n messages more may be on their way to disk. A batch
// larger than what may be gets there alone, and so does whatever comes while memory
// is tight.
func (l *log) room(n int) bool {
	under, most := l.tail.underWay, l.cfg.Overflow
	return l.cfg.WriteThrough || !l.tight && under+n <= most || most > 0 && under == 0
}

// accept gives a message its offset.
func (l *log) accept(m *Message) {
	m.Offset, m.spilled = l.end, false
	l.end++
}

// jump leaves out the offsets before one. Requires: there is no tail.
func (l *log) jump(to Offset) {
	if to > l.end {
		l.end = to
		l.tail.reach(to)
	}
}

// known reports whether a cursor need not read what is at an offset.
func (l *log) known(o Offset) bool {
	return o >= l.tail.next || l.read.has(o) || l.passing.has(o)
}

// next returns what a cursor that has come to an offset takes next: of what is in memory,
// the first message from there on, or how far there is none.
// Requires: known(o).
func (l *log) next(o Offset) (m *Message, none Offset) {
	for _, r := range []*readCache{&l.read, &l.passing} {
		if r.has(o) {
			return r.after(o), r.to
		}
	}
	return l.tail.get(o), o + 1
}

// span is a run of offsets that were emptied out of the backlog, or carried forward for a
// channel that is gone: who is behind finds messages there that no channel gets.
type span struct{ from, to Offset }

// maxVoid is how many spans are remembered for a Seek alone. What was emptied before them
// comes again.
const maxVoid = 1000

// avoid notes such offsets.
func (l *log) avoid(from, to Offset) {
	if from >= to {
		return
	}
	i := sort.Search(len(l.void), func(i int) bool { return l.void[i].to >= from })
	end := i
	for ; end < len(l.void) && l.void[end].from <= to; end++ { // they touch
		from, to = min(from, l.void[end].from), max(to, l.void[end].to)
	}
	l.void = slices.Replace(l.void, i, end, span{from, to})
}

func (l *log) avoided(o Offset) bool { return spanned(l.void, o) }

func spanned(spans []span, o Offset) bool {
	i := sort.Search(len(spans), func(i int) bool { return spans[i].to > o })
	return i < len(spans) && spans[i].from <= o
}
