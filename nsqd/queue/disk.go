package queue

import "github.com/srtm-io/srtm/internal/mono"

// The steps of the disk: what it takes of the log and what it gives back.

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
	if n > 0 && t.cfg.ReadAhead > 0 && !t.tight && t.read.goesOn(from) {
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
