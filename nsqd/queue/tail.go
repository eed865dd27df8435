package queue

// tail is what the log is to have and has not: messages that it holds, by offset, and nil for
// those that no cursor needs any more.
//
// Invariant: underWay is how many messages in it are spilled.
type tail struct {
	window[*Message]
	underWay int    // messages that a cursor is behind at
	carried  Offset // up to where it is to be written before a snapshot
}

// release ends the tail's hold on a message.
func (t *tail) release(m *Message, fx *Effects) {
	if m.spilled {
		m.spilled = false
		t.underWay--
	}
	fx.unref(m)
}

// take is Topic.TakeUnwritten, but for what there is room for then.
// From needed on a cursor is behind; what none has any more is left out, unless all is
// wanted.
func (t *tail) take(needed Offset, all bool, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	upTo, size := t.next, 0
	for o := upTo; o < t.end() && len(into) < most && size < bytes; o++ {
		if m := t.get(o); m == nil {
			// done already
		} else if m.refs == 1 && o < needed && m.Only == nil && !all {
			t.done(o)
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

// pass moves the tail's beginning up to an offset, or further on.
func (t *tail) pass(upTo Offset, fx *Effects) {
	for t.next < upTo && t.slots.len() > 0 {
		m := t.slots.pop()
		if t.next++; m != nil {
			t.release(m, fx)
		}
	}
	if t.slots.len() == 0 {
		t.reach(upTo)
	} else {
		t.trim()
	}
}
