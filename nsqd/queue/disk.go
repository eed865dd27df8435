package queue

import "github.com/srtm-io/srtm/internal/mono"

// The steps of the disk: writes to the log and reads from the log.

// TakeUnwritten appends the next unwritten messages to into, in order. most limits their number.
// bytes limits their size, but the last message may exceed it. The owner appends the messages to
// the log at their offsets. If that succeeded, the owner calls Written with the returned offset.
// In either case the owner then calls Effects.Unref. One caller at a time.
func (t *Topic) TakeUnwritten(now mono.Time, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	under := t.tail.underWay
	into, upTo := t.tail.take(t.needed(), t.retained, into, most, bytes, fx)
	if t.tail.underWay < under { // there is room on the way to disk again
		t.advance(now, fx)
	}
	return into, upTo
}

// Written records that the log has every needed message before an offset.
func (t *Topic) Written(now mono.Time, upTo Offset, fx *Effects) {
	t.tail.pass(upTo, fx)
	for _, c := range t.channels {
		c.want(fx)
	}
	t.advance(now, fx) // there is room on the way to disk again
}

// Appended accepts messages that are in the log from offset first on. It takes ownership of the
// messages. Requires: Config.WriteThrough.
func (t *Topic) Appended(now mono.Time, first Offset, fx *Effects, msgs ...*Message) {
	t.jump(first)
	for _, m := range msgs {
		t.accepted(m)
		m.Offset, m.spilled = t.end, false
		t.jump(t.end + 1)
		if t.free() > 0 {
			fx.Held += m.Size()
			t.wait(m)
			continue
		}
		t.fallBehind()
		fx.Free = append(fx.Free, m)
	}
	t.changes++
	t.advance(now, fx)
	t.maxWaiting = max(t.maxWaiting, t.Waiting())
}

// Want returns the next read of the log: up to n messages, from offset from on and before end. n
// is 0 if no cursor wants a message. The owner then calls Refill. The cursors take turns.
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
	if n > 0 && t.cfg.ReadAhead > 0 && !t.tight && t.read.goesOn(from) {
		n = max(n, readAtOnce)
	}
	return from, n, t.tail.next
}

// Refill takes what the owner read from the log: every message from offset from up to upTo.
// Refill takes ownership of the messages and gives back messages that no cursor wants.
func (t *Topic) Refill(now mono.Time, from, upTo Offset, msgs []*Message, fx *Effects) {
	upTo = min(upTo, t.tail.next)
	for _, m := range msgs {
		m.spilled = false
		m.ref()
		fx.Held += m.Size()
	}
	into := &t.read
	if !t.read.goesOn(from) {
		t.read.used = false
		into = &t.passing
	}
	into.add(from, upTo, msgs, t.cfg.ReadAhead, fx)
	t.refill(from, upTo, msgs, t.memory(), t.channels)
	for _, c := range t.channels {
		if c.refill(now, from, upTo, msgs); c.behind || c.absent.len() > 0 || c.ready.len() > 0 {
			c.dispatch(now, fx)
			c.want(fx)
		}
		t.due = min(t.due, c.Deadline())
	}
	fx.Unref(msgs)
	t.passing.forget(fx)
	t.read.moved = true
	t.changes++
	t.advance(now, fx)
}

// at returns the message with offset o, and the index at which to search for the next message.
func at(msgs []*Message, i int, o Offset) (*Message, int) {
	for i < len(msgs) && msgs[i].Offset < o {
		i++
	}
	if i < len(msgs) && msgs[i].Offset == o {
		return msgs[i], i
	}
	return nil, i
}
