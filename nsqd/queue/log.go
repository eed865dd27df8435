package queue

import (
	"slices"
	"sort"

	"github.com/srtm-io/srtm/internal/mono"
)

// Offset is a message's place in its topic's log: how many were accepted before it.
type Offset uint64

// window is what is open of a run of offsets: a slot is the zero value once that
// offset is done.
//
// Invariant: if there are slots, the first is open.
type window[T comparable] struct {
	next  Offset // all before are done
	slots ring[T]
}

// end is the first offset beyond the run.
func (w *window[T]) end() Offset { return w.next + Offset(w.slots.len()) }

// get returns what is open at an offset; the zero value if nothing is.
func (w *window[T]) get(o Offset) (v T) {
	if o >= w.next && o < w.end() {
		v = w.slots.at(int(o - w.next))
	}
	return v
}

// push makes the run longer by one.
func (w *window[T]) push(v T) {
	var none T
	if v == none && w.slots.len() == 0 {
		w.next++
		return
	}
	w.slots.push(v)
}

// set replaces what is open. Requires: o is in the run.
func (w *window[T]) set(o Offset, v T) { w.slots.set(int(o-w.next), v) }

// done closes an offset; one beside the run is closed already.
func (w *window[T]) done(o Offset) {
	if o < w.next || o >= w.end() {
		return
	}
	var none T
	w.set(o, none)
	w.trim()
}

// trim restores the invariant.
func (w *window[T]) trim() {
	var none T
	for w.slots.len() > 0 && w.slots.front() == none {
		w.slots.pop()
		w.next++
	}
}

// reach makes the run end at o, or further on, by slots that are done.
func (w *window[T]) reach(o Offset) {
	if w.slots.len() == 0 {
		w.next = max(w.next, o)
		return
	}
	var none T
	for w.end() < o {
		w.slots.push(none)
	}
}

// The topic's messages are one log. The topic's backlog, which waits for tokens, and
// each channel are cursors into it: a position up to which messages were taken, and
// what of those is open. What is before the position and not open is done, for good.
//
// A message is in memory while somebody has it: the backlog, a channel that has not
// finished it, or the tail. What a cursor has no memory for it leaves in the log: it
// is behind, and takes it later, in order.
//
// The log is written in order. As soon as something that is in memory alone is needed by
// a cursor that is behind, all up to there is to be written, but what nobody needs any
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

// backlog is the topic's own cursor, behind which messages wait.
type backlog struct {
	window window[*Message] // what waits in memory, by offset
	absent ring[Offset]     // what waited there in an earlier process and was not read yet
	behind bool
	late   int // messages from the window's end on
}

// free is how many messages may go into the backlog's memory past nobody.
func (t *Topic) free() int {
	if t.backlog.behind || t.tight || t.backlog.absent.len() > 0 {
		return 0
	}
	if t.retained && t.logged() && !t.cfg.WriteThrough {
		return min(t.space(), max(0, t.cfg.Overflow-t.underWay))
	}
	return t.space()
}

// space is how many messages the backlog's memory may still take. While memory is tight
// that is one, if it does not stay.
func (t *Topic) space() int {
	if !t.tight {
		return max(0, t.cfg.Capacity-t.waiting.len())
	}
	if t.waiting.len() == 0 && t.open() {
		return 1
	}
	return 0
}

// diskRoom reports whether n messages more may be on their way to disk. A batch
// larger than what may be gets there alone, and so does whatever comes while memory
// is tight.
func (t *Topic) diskRoom(n int) bool {
	return t.cfg.WriteThrough || !t.tight && t.underWay+n <= t.cfg.Overflow || t.cfg.Overflow > 0 && t.underWay == 0
}

// logged reports whether places in the log are kept.
func (t *Topic) logged() bool { return t.cfg.Overflow > 0 }

// accept gives a message its offset.
func (t *Topic) accept(m *Message) {
	m.Offset, m.spilled = t.end, false
	t.end++
}

// spill has a message written that somebody is behind at, or that is retained.
func (t *Topic) spill(m *Message, fx *Effects) {
	fx.Disk = true
	if m.Offset < t.tail.next {
		return
	}
	t.writeUpTo(m.Offset+1, m)
	if !m.spilled {
		m.spilled = true
		t.underWay++
	}
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

// unref says that a holder of the message needs it no longer.
func (t *Topic) unref(m *Message, fx *Effects) {
	m.refs--
	switch {
	case m.refs == 0:
		fx.Free = append(fx.Free, m)
		fx.Held -= m.Size()
	case m.refs < 0:
		panic("queue: message " + string(m.ID[:]) + " is given back too often")
	}
}

// unspill ends the tail's hold on a message.
func (t *Topic) unspill(m *Message, fx *Effects) {
	if m.spilled {
		m.spilled = false
		t.underWay--
	}
	t.unref(m, fx)
}

// needed is the offset from which on somebody is behind.
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
// failed, and Unref in either case. One caller at a time.
func (t *Topic) TakeUnwritten(now mono.Time, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	upTo, from, size, under := t.tail.next, t.needed(), 0, t.underWay
	for o := upTo; o < t.tail.end() && len(into) < most && size < bytes; o++ {
		if m := t.tail.get(o); m == nil {
			// done already
		} else if m.refs == 1 && o < from && m.Only == nil && !t.retained {
			t.tail.done(o)
			t.unspill(m, fx)
		} else {
			m.ref()
			into = append(into, m)
			size += m.Size()
		}
		upTo = o + 1
	}
	if len(into) == 0 {
		t.pastTail(upTo, fx)
	}
	if t.underWay < under { // there is room on the way to disk again
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
	t.pastTail(upTo, fx)
	for _, c := range t.channels {
		c.want(fx)
	}
	t.advance(now, fx) // there is room on the way to disk again
}

// pastTail moves the tail's beginning.
func (t *Topic) pastTail(upTo Offset, fx *Effects) {
	for t.tail.next < upTo && t.tail.slots.len() > 0 {
		m := t.tail.slots.pop()
		if t.tail.next++; m != nil {
			t.unspill(m, fx)
		}
	}
	if t.tail.slots.len() == 0 {
		t.tail.reach(upTo)
	} else {
		t.tail.trim()
	}
}

// Unref says that the owner needs messages no longer that it got by TakeUnwritten.
func (t *Topic) Unref(msgs []*Message, fx *Effects) {
	for _, m := range msgs {
		t.unref(m, fx)
	}
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
// offset up to another. Those that nobody wants any more it lets go at once. It takes
// ownership of them.
func (t *Topic) Refill(now mono.Time, from, upTo Offset, msgs []*Message, fx *Effects) {
	upTo = min(upTo, t.tail.next)
	for _, m := range msgs {
		m.spilled = false
		m.ref()
		fx.Held += m.Size()
	}
	passing := !t.caches(from)
	if passing {
		t.read.used = false
		t.read, t.passing = t.passing, t.read
	}
	t.addRead(from, upTo, msgs, fx)
	t.refill(from, upTo, msgs)
	for _, c := range t.channels {
		if c.refill(now, from, upTo, msgs); c.behind || c.absent.len() > 0 || c.ready.len() > 0 {
			c.dispatch(now, fx)
			c.want(fx)
		}
		t.due = min(t.due, c.Deadline())
	}
	for _, m := range msgs {
		t.unref(m, fx)
	}
	if passing {
		t.ForgetRead(fx)
		t.read, t.passing = t.passing, t.read
		t.read.moved = true
	}
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

// The backlog as a cursor.

// wants returns what the backlog has to get from the log, and from where: nothing until
// half of its memory is free, so that it comes in batches.
func (t *Topic) wants() (from Offset, n int) {
	l := &t.backlog
	if t.stopped || l.absent.len() == 0 && (!l.behind || t.known(l.window.end())) {
		return 0, 0
	}
	if n = t.space(); !t.tight && 2*n < t.cfg.Capacity {
		return 0, 0
	}
	if l.absent.len() > 0 {
		return l.absent.front(), n
	}
	return l.window.end(), n
}

// lack has the owner read what the backlog wants.
func (t *Topic) lack(fx *Effects) {
	if t.backlog.behind || t.backlog.absent.len() > 0 {
		if _, n := t.wants(); n > 0 {
			fx.Disk = true
		}
	}
}

func (t *Topic) refill(from, upTo Offset, msgs []*Message) {
	l := &t.backlog
	var m *Message
	for i := 0; l.absent.len() > 0; {
		o := l.absent.front()
		if o < from || o >= upTo {
			return
		}
		if m, i = at(msgs, i, o); m == nil {
			l.absent.pop()
			t.counters.Lost++
			t.gone(o)
			continue
		}
		if t.space() <= 0 {
			return
		}
		l.absent.pop()
		t.wait(m)
	}
	t.catchUp()
}

// catchUp takes what the backlog is behind with and is in memory, as far as there is space.
func (t *Topic) catchUp() {
	l := &t.backlog
	for l.behind && l.absent.len() == 0 {
		o := l.window.end()
		if o >= t.end {
			l.behind = false
			t.counters.Lost += uint64(max(0, l.late))
			t.counters.Accepted += uint64(max(0, -l.late)) // more than an earlier process knew of
			l.late = 0
			t.read.moved = true
			return
		}
		if !t.known(o) {
			return
		}
		m, none := t.next(o)
		switch {
		case m == nil:
			l.window.reach(none)
		case m.Only != nil:
			t.passed = t.passed || o < t.tail.next
			l.window.reach(m.Offset + 1)
		case t.space() <= 0:
			return
		default:
			l.late--
			t.wait(m)
		}
	}
}

// settleOnly lets channels have what is for them alone at the end of the log.
func (t *Topic) settleOnly(fx *Effects) {
	if !t.passed || t.backlog.window.slots.len() > 0 {
		return
	}
	t.passed, t.front = false, t.end
	for _, c := range t.channels {
		c.behind = c.behind || c.tracked
		c.want(fx)
	}
}

// gone says that what waited at an offset will not be released.
func (t *Topic) gone(o Offset) {
	t.backlog.window.done(o)
	for _, c := range t.channels {
		if c.tracked && t.isPending(c.window.get(o)) {
			c.window.done(o)
		}
	}
}

// Low is the offset before which nobody needs anything in the log.
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

// InLog is up to where the log has all that anybody needs.
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

// A channel as a cursor.

// pends is in channels' windows where the message is not released yet.
func (t *Topic) pends() *item {
	if t.pending == nil {
		t.pending = new(item)
	}
	return t.pending
}

func (t *Topic) isPending(it *item) bool { return it != nil && it == t.pending }

// release takes a message that the topic releases.
func (c *Channel) release(now mono.Time, m *Message, fx *Effects) {
	t := c.topic
	switch {
	case !c.tracked:
		c.counters.Messages++
		if c.ephemeral && c.space() <= 0 {
			c.counters.Dropped++
			return
		}
		c.enter(now, m)
	case m.Offset < c.window.end():
		if t.isPending(c.window.get(m.Offset)) { // else it has had it
			c.counters.Messages++
			c.window.set(m.Offset, c.enter(now, m))
		}
	case c.behind || c.space() <= 0:
		c.counters.Messages++
		c.behind = true
		c.late++
		t.spill(m, fx)
	default:
		c.counters.Messages++
		c.reach(m.Offset)
		c.window.push(c.enter(now, m))
	}
}

// reach makes the channel's run end at an offset: of those before it only what waits
// still comes.
func (c *Channel) reach(o Offset) {
	l := &c.topic.backlog.window
	if l.slots.len() == 0 && len(c.ahead) == 0 {
		c.window.reach(o)
		return
	}
	for c.window.end() < o {
		at := c.window.end()
		if it, is := c.ahead[at]; is {
			delete(c.ahead, at)
			c.window.push(it)
		} else if l.get(at) != nil {
			c.window.push(c.topic.pends())
		} else {
			c.window.push(nil)
		}
	}
}

// start puts the cursor of a channel that has had nothing where the topic's releases
// are.
func (c *Channel) start() {
	if !c.tracked {
		return
	}
	t := c.topic
	c.window.slots.clear()
	if c.window.next = t.front; t.backlog.window.slots.len() > 0 {
		c.window.next = min(t.front, t.backlog.window.next)
	}
	// order: all alike
	for o := range c.ahead {
		if o < c.window.next {
			delete(c.ahead, o)
		}
	}
	c.reach(t.front)
}

// seek puts an empty cursor at an offset before the topic's releases.
func (c *Channel) seek(to Offset, records int, fx *Effects) {
	t := c.topic
	for o := t.tail.next; o < t.end; o++ {
		m, waits := t.tail.get(o), t.backlog.window.get(o)
		if waits != nil || m != nil && (o >= t.front || o >= to && c.takes(m)) {
			records++ // of what waits, below: not in the log
		}
	}
	c.window.slots.clear()
	if c.window.next = to; t.backlog.window.slots.len() > 0 {
		c.window.next = min(to, t.backlog.window.next)
	}
	c.reach(to)
	c.behind, c.estimate, c.late = true, true, max(0, records-t.Waiting())
	c.counters.Messages += uint64(c.late)
	fx.Disk = true
}

// caughtUp ends being behind.
func (c *Channel) caughtUp() {
	c.topic.read.moved = true
	if c.behind = false; c.estimate {
		c.counters.Emptied += uint64(c.late)
	} else {
		c.counters.Lost += uint64(c.late)
	}
	c.late, c.estimate = 0, false
}

// wants is as of the backlog.
func (c *Channel) wants() (from Offset, n int) {
	t := c.topic
	if c.stopped {
		return 0, 0
	}
	n = c.memory()
	switch {
	case !t.tight && 2*n < t.cfg.Capacity:
		return 0, 0
	case c.absent.len() > 0:
		return c.absent.front().offset, n
	case c.behind && !t.known(c.window.end()):
		return c.window.end(), c.space()
	}
	return 0, 0
}

func (c *Channel) want(fx *Effects) {
	if c.behind || c.absent.len() > 0 {
		if _, n := c.wants(); n > 0 {
			fx.Disk = true
		}
	}
}

// takes reports whether a message that is in the log is the channel's.
func (c *Channel) takes(m *Message) bool {
	return m.isFor(c.name) && !c.topic.avoided(m.Offset)
}

func (c *Channel) refill(now mono.Time, from, upTo Offset, msgs []*Message) {
	var m *Message
	for i := 0; c.absent.len() > 0; {
		it := c.absent.front()
		if it.offset < from || it.offset >= upTo {
			return
		}
		if m, i = at(msgs, i, it.offset); m == nil {
			c.absent.pop()
			c.counters.Lost++
			c.close(it.offset)
			continue
		}
		if c.memory() <= 0 {
			return
		}
		c.absent.pop()
		m.ref()
		it.msg = m
		c.place(now, it)
	}
	c.catchUp(now)
}

// next takes a message that the channel is behind with; false if there is no space.
func (c *Channel) next(now mono.Time, m *Message) bool {
	c.reach(m.Offset)
	if _, is := c.ahead[m.Offset]; is || c.topic.backlog.window.get(m.Offset) != nil {
		c.reach(m.Offset + 1)
		return true
	}
	if c.space() <= 0 {
		return false
	}
	if c.late--; c.late < 0 { // more than an earlier process knew of
		c.late = 0
		c.counters.Messages++
	}
	c.window.push(c.enter(now, m))
	return true
}

// catchUp takes what the channel is behind with and is in memory, as far as there is
// space.
func (c *Channel) catchUp(now mono.Time) {
	t := c.topic
	for c.behind && c.absent.len() == 0 {
		o := c.window.end()
		if o >= t.front {
			c.caughtUp()
			return
		}
		if !t.known(o) {
			return
		}
		switch m, none := t.next(o); {
		case m == nil || m.Offset >= t.front:
			c.reach(min(none, t.front))
		case !c.takes(m):
			c.reach(m.Offset + 1)
		case !c.next(now, m):
			return
		}
	}
}

// Discard forgets what is to be written. Requires: Stop, nobody needs a message.
func (t *Topic) Discard(fx *Effects) {
	t.pastTail(t.end, fx)
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
