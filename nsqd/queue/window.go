package queue

import "github.com/srtm-io/srtm/internal/container"

// Offset is a message's place in its topic's log: the number of messages accepted before it.
type Offset uint64

// window is a run of offsets with a slot for each. The slot of a finished offset is the zero
// value.
//
// Invariant: the first slot, if any, is open.
type window[T comparable] struct {
	next  Offset // all offsets before are done
	slots container.Queue[T]
}

// end returns the first offset beyond the run.
func (w *window[T]) end() Offset { return w.next + Offset(w.slots.Len()) }

// get returns the open value at an offset, or the zero value.
func (w *window[T]) get(o Offset) (v T) {
	if o >= w.next && o < w.end() {
		v = w.slots.At(int(o - w.next))
	}
	return v
}

// push extends the run by one offset.
func (w *window[T]) push(v T) {
	var none T
	if v == none && w.slots.Len() == 0 {
		w.next++
		return
	}
	w.slots.Push(v)
}

// set replaces the value at an offset. Requires: o is in the run.
func (w *window[T]) set(o Offset, v T) { w.slots.Set(int(o-w.next), v) }

// done closes an offset. An offset outside the run is closed already.
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
	for w.slots.Len() > 0 && w.slots.Front() == none {
		w.slots.Pop()
		w.next++
	}
}

// reach extends the run with finished slots until it ends at o or beyond.
func (w *window[T]) reach(o Offset) {
	if w.slots.Len() == 0 {
		w.next = max(w.next, o)
		return
	}
	var none T
	for w.end() < o {
		w.slots.Push(none)
	}
}
