package queue

import (
	"slices"
	"sort"

	"github.com/srtm-io/srtm/internal/mono"
)

// The topic's messages are one log. The topic's backlog, which waits for tokens, and
// each channel are cursors into it: a position up to which messages were taken, and
// what of those is open. What is before the position and not open is done, for good.
//
// A message is in memory while one of these has it: the backlog, a channel that has not
// finished it, the tail, or readCache. What a cursor has no memory for it leaves in the
// log: it is behind, and takes it later, in order.
//
// The log is written in order. As soon as something that is in memory alone is needed by
// a cursor that is behind, all up to there is to be written, but what no cursor needs any
// more: that is the tail. What comes after it is found by the cursors that have it, so a
// topic that keeps up has none. The alternative, a tail of all that is in memory, is one
// pointer more a message for the garbage collector to follow.
//
// Invariants, checked by checkInvariants in tests:
//   - front is beyond all that was ever released; what waits has an offset below the
//     backlog's end;
//   - a channel that is not behind has had all before front but what still waits, for
//     which it has a slot that is pending if the offset is below its end;
//   - late is how many messages a cursor that is behind has not taken;
//   - what is in the tail is held by it;
//   - what a cursor that is behind has not taken is in the log or in the tail.

// logged reports whether places in the log are kept.
func (t *Topic) logged() bool { return t.cfg.Overflow > 0 }

// accept gives a message its offset.
func (t *Topic) accept(m *Message) {
	m.Offset, m.spilled = t.end, false
	t.end++
}

// spill has a message written that a cursor is behind at, or that is retained.
func (t *Topic) spill(m *Message, fx *Effects) {
	fx.Disk = true
	if m.Offset < t.tail.next {
		return
	}
	t.writeUpTo(m.Offset+1, m)
	t.tail.count(m)
}

// writeUpTo has all written up to an offset, with last, which may be nil, for the
// message before it: no cursor need have that.
func (t *Topic) writeUpTo(o Offset, last *Message) {
	if t.tail.slots.len() == 0 {
		t.tail.reach(min(o-1, t.oldest()))
	}
	for at := t.tail.end(); at < o; at++ {
		m := last
		if m == nil || at+1 < o {
			m = t.inMemory(at)
		}
		if m != nil {
			m.ref()
		}
		t.tail.push(m)
	}
}

// oldest is an offset before which no cursor has anything in memory.
func (t *Topic) oldest() Offset {
	o := t.end
	if w := &t.backlog.window; w.slots.len() > 0 {
		o = w.next
	}
	for _, c := range t.channels {
		if c.window.slots.len() > 0 {
			o = min(o, c.window.next)
		}
	}
	return o
}

// inMemory returns the message that a cursor has at an offset; nil if none has. What was
// carried forward is in the tail at once.
func (t *Topic) inMemory(o Offset) *Message {
	if m := t.backlog.window.get(o); m != nil {
		return m
	}
	for _, c := range t.channels {
		if it := c.window.get(o); it != nil && it.msg != nil {
			return it.msg
		}
	}
	return nil
}

// needed is the offset from which on a cursor is behind.
func (t *Topic) needed() Offset {
	from := t.end
	if t.backlog.behind {
		from = t.backlog.window.end()
	}
	for _, c := range t.channels {
		if c.behind {
			from = min(from, c.window.end())
		}
	}
	return from
}

// TakeUnwritten appends to into what is to be written next, in order: at most so many
// messages, and of so many bytes but for the last. The owner appends them to the log
// at their offsets, then calls Written up to the offset returned, or nothing if that
// failed, and Effects.Unref in either case. One caller at a time.
func (t *Topic) TakeUnwritten(now mono.Time, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	under := t.tail.underWay
	into, upTo := t.tail.take(t.needed(), t.retained, into, most, bytes, fx)
	if t.tail.underWay < under { // there is room on the way to disk again
		t.advance(now, fx)
	}
	return into, upTo
}

// Unwritten reports whether there is anything for TakeUnwritten.
func (t *Topic) Unwritten() bool { return t.tail.slots.len() > 0 }

// Waits reports whether a message has no token yet: what is known of its release
// is to be written only after that. Requires: it is the machine's.
func (t *Topic) Waits(m *Message) bool { return t.backlog.window.get(m.Offset) == m }

// Written says that all before an offset that is needed is in the log.
func (t *Topic) Written(now mono.Time, upTo Offset, fx *Effects) {
	t.tail.pass(upTo, fx)
	for _, c := range t.channels {
		c.want(fx)
	}
	t.advance(now, fx) // there is room on the way to disk again
}

// Appended says that messages are in the log, from that offset on, and so accepted.
// It takes ownership of them. Requires: Config.WriteThrough.
func (t *Topic) Appended(now mono.Time, first Offset, fx *Effects, msgs ...*Message) {
	t.jump(first)
	for _, m := range msgs {
		t.counters.Accepted++
		t.counters.AcceptedBytes += uint64(len(m.Body))
		m.Offset, m.spilled = t.end, false
		t.jump(t.end + 1)
		if t.free() > 0 {
			fx.Held += m.Size()
			t.wait(m)
			continue
		}
		t.backlog.behind = true
		t.backlog.late++
		fx.Free = append(fx.Free, m)
	}
	t.changes++
	t.advance(now, fx)
	t.maxWaiting = max(t.maxWaiting, t.Waiting())
}

// jump leaves out the offsets before one. Requires: there is no tail.
func (t *Topic) jump(to Offset) {
	if to > t.end {
		t.end = to
		t.tail.reach(to)
	}
}

// Want is what the log is to be read for next: from that offset on, so many
// messages, of those before end; none if n is 0. The owner then calls Refill. All
// that want something have a turn.
func (t *Topic) Want() (from Offset, n int, end Offset) {
	for range len(t.channels) + 1 {
		if t.turn++; t.turn > len(t.channels) {
			t.turn = 0
		}
		if t.turn == 0 {
			from, n = t.wants()
		} else {
			from, n = t.channels[t.turn-1].wants()
		}
		if n > 0 {
			break
		}
	}
	if n > 0 && t.cfg.ReadAhead > 0 && !t.tight && t.caches(from) {
		n = max(n, readAtOnce)
	}
	return from, n, t.tail.next
}

// Refill takes what was read from the log: all the messages that there are from one
// offset up to another. Those that no cursor wants it gives back at once. It takes
// ownership of them.
func (t *Topic) Refill(now mono.Time, from, upTo Offset, msgs []*Message, fx *Effects) {
	upTo = min(upTo, t.tail.next)
	for _, m := range msgs {
		m.spilled = false
		m.ref()
		fx.Held += m.Size()
	}
	into := &t.read
	if !t.caches(from) {
		t.read.used = false
		into = &t.passing
	}
	into.add(t, from, upTo, msgs, fx)
	t.refill(from, upTo, msgs)
	for _, c := range t.channels {
		if c.refill(now, from, upTo, msgs); c.behind || c.absent.len() > 0 || c.ready.len() > 0 {
			c.dispatch(now, fx)
			c.want(fx)
		}
		t.due = min(t.due, c.Deadline())
	}
	for _, m := range msgs {
		fx.unref(m)
	}
	t.passing.forget(fx)
	t.read.moved = true
	t.changes++
	t.advance(now, fx)
}

// at returns the message of that offset, and where to look for the next.
func at(msgs []*Message, i int, o Offset) (*Message, int) {
	for i < len(msgs) && msgs[i].Offset < o {
		i++
	}
	if i < len(msgs) && msgs[i].Offset == o {
		return msgs[i], i
	}
	return nil, i
}

// Low is the offset before which no cursor needs anything in the log.
func (t *Topic) Low() Offset {
	low := t.end
	if l := &t.backlog; l.behind || l.window.slots.len() > 0 {
		low = l.window.next
	}
	for _, c := range t.channels {
		if c.tracked && (c.behind || c.window.slots.len() > 0) {
			low = min(low, c.window.next)
		}
		// order: the least of all
		for o, it := range c.ahead {
			if it != nil {
				low = min(low, o)
			}
		}
	}
	for len(t.void) > 0 && t.void[0].to <= low && (t.void[0].to <= t.first || len(t.void) > maxVoid) {
		t.void = t.void[1:]
	}
	return low
}

// maxVoid is how many spans are remembered for a Seek alone. What was emptied before them
// comes again.
const maxVoid = 1000

// Retained says from where on the log has what a Seek may want.
func (t *Topic) Retained(first Offset) { t.first = first }

// Front is beyond all that was released.
func (t *Topic) Front() Offset { return t.front }

// At is the offset of the first message from a time of publication on that is in memory
// alone, or the end.
func (t *Topic) At(time mono.Wall) Offset {
	from := t.tail.next
	if t.tail.slots.len() == 0 {
		from = max(from, t.oldest())
	}
	for o := from; o < t.end; o++ {
		m := t.tail.get(o)
		if m == nil {
			m = t.inMemory(o)
		}
		if m != nil && m.Timestamp >= time {
			return o
		}
	}
	return t.end
}

// InLog is up to where the log has all that a cursor needs.
func (t *Topic) InLog() Offset { return t.tail.next }

// End is the offset of the next message.
func (t *Topic) End() Offset { return t.end }

// Changes is how often it changed so far what Snapshot says.
func (t *Topic) Changes() uint64 { return t.changes }

// span is a run of offsets that were emptied out of the backlog: who is behind finds
// messages there that were never released.
type span struct{ from, to Offset }

// avoid notes such offsets. Requires: in order.
func (t *Topic) avoid(from, to Offset) {
	if n := len(t.void); n > 0 && t.void[n-1].to >= from {
		t.void[n-1].to = max(t.void[n-1].to, to)
	} else if from < to {
		t.void = append(t.void, span{from, to})
	}
}

func (t *Topic) avoided(o Offset) bool { return spanned(t.void, o) }

func spanned(spans []span, o Offset) bool {
	i := sort.Search(len(spans), func(i int) bool { return spans[i].to > o })
	return i < len(spans) && spans[i].from <= o
}

// Discard forgets what is to be written. Requires: Stop, and no channel has a message.
func (t *Topic) Discard(fx *Effects) {
	t.tail.pass(t.end, fx)
	t.ForgetRead(fx)
}

// Keep has all that is in memory alone written, while the topic goes on.
func (t *Topic) Keep(fx *Effects) {
	t.writeUpTo(t.end, nil)
	fx.Disk = fx.Disk || t.Unwritten()
}

// Leave forgets what is ephemeral, and has all else written for the next process.
// Requires: Stop.
func (t *Topic) Leave(fx *Effects) {
	for _, c := range slices.Clone(t.channels) {
		if c.ephemeral {
			c.empty(fx)
		}
	}
	t.writeUpTo(t.end, nil)
}

// Unstored is how many messages are nowhere but in memory.
func (t *Topic) Unstored() (n int) {
	if t.tail.slots.len() == 0 {
		t.tail.reach(t.oldest())
	}
	for o := t.tail.next; o < t.end; o++ {
		if t.tail.get(o) != nil || t.inMemory(o) != nil {
			n++
		}
	}
	return n
}
