package queue

// tail holds the messages that the log must store and has not stored yet, by offset. A nil slot
// is a message that no cursor needs.
//
// Invariant: underWay is the number of spilled messages in the tail.
type tail struct {
	window[*Message]
	underWay int    // messages on their way to disk for a cursor that is behind
	carried  Offset // must be written up to here before a snapshot
}

func (t *tail) release(m *Message, fx *Effects) {
	if m.spilled {
		m.spilled = false
		t.underWay--
	}
	fx.unref(m)
}

// take is Topic.TakeUnwritten without its effects on the topic. From needed on, a cursor is
// behind. take leaves out messages that no cursor needs, unless all is true.
func (t *tail) take(needed Offset, all bool, into []*Message, most, bytes int, fx *Effects) ([]*Message, Offset) {
	upTo, size := t.next, 0
	for o := upTo; o < t.end() && len(into) < most && size < bytes; o++ {
		if m := t.get(o); m == nil {
			// finished already
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

// pass moves the tail's beginning to an offset or beyond.
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
