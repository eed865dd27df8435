package queue

import "sort"

// readCache is the part of the log that was read last. Of several cursors close to each other,
// the first cursor reads the log and the others use the cache. A distant cursor reads for itself.
//
// Invariant: messages are all messages of the log in [from, to), by offset. The cache holds a
// reference to each. Every message is still needed by a cursor.
type readCache struct {
	from, to Offset
	messages ring[*Message]
	bytes    int  // total Size of messages
	used     bool // since the last read elsewhere
	moved    bool // a cursor may have passed messages
}

// readAtOnce is the number of messages read at a time, even for a cursor with less room.
const readAtOnce = 1024

func (r *readCache) has(o Offset) bool { return o >= r.from && o < r.to }

// after returns the first message from an offset on, or nil. Requires: has(o).
func (r *readCache) after(o Offset) *Message {
	n := r.messages.len()
	if n == 0 {
		return nil
	}
	r.used, r.moved = true, true
	// Offsets are rarely missing: first try the index without gaps.
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

// goesOn reports whether the cache keeps messages read from an offset on.
func (r *readCache) goesOn(from Offset) bool { return from == r.to || r.from == r.to || !r.used }

func (r *readCache) drop(fx *Effects) {
	m := r.messages.pop()
	r.from = m.Offset + 1
	r.bytes -= m.Size()
	fx.unref(m)
}

func (r *readCache) forget(fx *Effects) {
	for r.messages.len() > 0 {
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

// trim drops the messages before an offset, which no cursor needs.
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
