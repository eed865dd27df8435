package queue

import "sort"

// readCache is the part of the log that was read last: of the cursors that are close to one
// another the first reads, and the others find here what it read. One that is further away
// reads for itself.
//
// Invariant: messages are all that the log has in [from, to), by offset, each held by the
// cache; there are none that no cursor has yet to reach.
type readCache struct {
	from, to Offset
	messages ring[*Message]
	bytes    int  // Size of them all
	used     bool // since the last read elsewhere
	moved    bool // a cursor may have passed messages
}

// readAtOnce is how many messages are read at a time, though a cursor has room for fewer.
const readAtOnce = 1024

func (r *readCache) has(o Offset) bool { return o >= r.from && o < r.to }

// after returns the first message from an offset on; nil if there is none.
// Requires: has(o).
func (r *readCache) after(o Offset) *Message {
	n := r.messages.len()
	if n == 0 {
		return nil
	}
	r.used, r.moved = true, true
	// Seldom is an offset missing: look where it is if none is.
	first := r.messages.front().Offset
	i := int(min(max(o, first)-first, Offset(n-1)))
	if m := r.messages.at(i); m.Offset == o {
		return m
	}
	if i = sort.Search(n, func(i int) bool { return r.messages.at(i).Offset >= o }); i == n {
		return nil
	}
	return r.messages.at(i)
}

// goesOn reports whether what is read from an offset on is to be kept.
func (r *readCache) goesOn(from Offset) bool { return from == r.to || r.from == r.to || !r.used }

// drop lets the oldest message go.
func (r *readCache) drop(fx *Effects) {
	m := r.messages.pop()
	r.from = m.Offset + 1
	r.bytes -= m.Size()
	fx.unref(m)
}

// forget lets all go.
func (r *readCache) forget(fx *Effects) {
	for r.messages.len() > 0 {
		r.drop(fx)
	}
	r.from, r.used, r.moved = r.to, false, false
}

// add takes what was read, all that there is in a part of the log, and keeps at most so many
// bytes of what was read before.
func (r *readCache) add(from, upTo Offset, msgs []*Message, most int, fx *Effects) {
	size := 0
	for _, m := range msgs {
		size += m.Size()
	}
	if from != r.to {
		r.forget(fx)
		r.from = from
	}
	for r.messages.len() > 0 && r.bytes+size > most {
		r.drop(fx)
	}
	for _, m := range msgs {
		if m.Offset < upTo {
			m.ref()
			r.messages.push(m)
			r.bytes += m.Size()
		}
	}
	r.to, r.moved = max(from, upTo), true
}

// trim lets go of what is before an offset, which no cursor has yet to reach.
func (r *readCache) trim(needed Offset, fx *Effects) {
	r.moved = false
	if needed >= r.to {
		r.forget(fx)
		return
	}
	for r.messages.len() > 0 && r.messages.front().Offset < needed {
		r.drop(fx)
	}
	r.from = max(r.from, needed)
}
