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

// add takes what was read, all that there is in a part of the log.
func (r *readCache) add(t *Topic, from, upTo Offset, msgs []*Message, fx *Effects) {
	size := 0
	for _, m := range msgs {
		size += m.Size()
	}
	if from != r.to {
		r.forget(fx)
		r.from = from
	}
	for r.messages.len() > 0 && r.bytes+size > t.cfg.ReadAhead {
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

// ForgetRead gives back what was read for cursors close behind, which a topic in which
// nothing happens need not hold.
func (t *Topic) ForgetRead(fx *Effects) { t.read.forget(fx) }

// trimRead lets go of what no cursor has yet to reach that can go on, and of all while
// memory is tight.
func (t *Topic) trimRead(fx *Effects) {
	r := &t.read
	if r.from == r.to || !r.moved && !t.tight {
		return
	}
	r.moved = false
	needed := r.to
	if l := &t.backlog; l.behind && r.has(l.window.end()) {
		needed = l.window.end()
	}
	for _, c := range t.channels {
		if c.behind && r.has(c.window.end()) && !c.paused && len(c.consumers) > 0 && !c.Full() {
			needed = min(needed, c.window.end())
		}
	}
	if needed == r.to || t.tight {
		t.read.forget(fx)
		return
	}
	for r.messages.len() > 0 && r.messages.front().Offset < needed {
		t.read.drop(fx)
	}
	r.from = max(r.from, needed)
}

// caches reports whether what is read from an offset on is to be kept.
func (t *Topic) caches(from Offset) bool {
	return from == t.read.to || t.read.from == t.read.to || !t.read.used
}

// known reports whether a cursor need not read what is at an offset.
func (t *Topic) known(o Offset) bool {
	return o >= t.tail.next || t.read.has(o) || t.passing.has(o)
}

// next returns what a cursor that has come to an offset takes next: of what is in memory,
// the first message from there on, or how far there is none.
// Requires: known(o).
func (t *Topic) next(o Offset) (m *Message, none Offset) {
	for _, r := range []*readCache{&t.read, &t.passing} {
		if r.has(o) {
			return r.after(o), r.to
		}
	}
	return t.tail.get(o), o + 1
}
