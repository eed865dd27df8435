package queue

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
