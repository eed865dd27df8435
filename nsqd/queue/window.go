package queue

import "slices"

// Offset is a message's place in its topic's log: the number of messages accepted before it.
type Offset uint64

// window is a run of offsets with a slot for each. The slot of a finished offset is the zero
// value.
//
// Invariant: the first slot, if any, is open.
type window[T comparable] struct {
	next  Offset // all offsets before are done
	slots ring[T]
}

// end returns the first offset beyond the run.
func (w *window[T]) end() Offset { return w.next + Offset(w.slots.len()) }

// get returns the open value at an offset, or the zero value.
func (w *window[T]) get(o Offset) (v T) {
	if o >= w.next && o < w.end() {
		v = w.slots.at(int(o - w.next))
	}
	return v
}

// push extends the run by one offset.
func (w *window[T]) push(v T) {
	var none T
	if v == none && w.slots.len() == 0 {
		w.next++
		return
	}
	w.slots.push(v)
}

// set replaces the value at an offset. Requires: o is in the run.
func (w *window[T]) set(o Offset, v T) { w.slots.set(int(o-w.next), v) }

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
	for w.slots.len() > 0 && w.slots.front() == none {
		w.slots.pop()
		w.next++
	}
}

// reach extends the run with finished slots until it ends at o or beyond.
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

// ring is a FIFO that grows by doubling and shrinks once it is mostly empty. The zero value is
// empty.
//
// Invariant: the n elements are buf[head], buf[head+1], ... modulo len(buf). All other slots hold
// the zero value, so a popped element is not reachable.
type ring[T any] struct {
	buf  []T // len is 0 or a power of two
	head int
	n    int
}

const ringMin = 8

func (r *ring[T]) len() int { return r.n }

// front returns the oldest element. Requires: len() > 0.
func (r *ring[T]) front() T { return r.buf[r.head] }

// at returns the element i places behind the oldest. Requires: 0 <= i < len().
func (r *ring[T]) at(i int) T { return r.buf[(r.head+i)&(len(r.buf)-1)] }

// set replaces the element at i. Requires: 0 <= i < len().
func (r *ring[T]) set(i int, v T) { r.buf[(r.head+i)&(len(r.buf)-1)] = v }

func (r *ring[T]) push(v T) {
	if r.n == len(r.buf) {
		r.resize(max(ringMin, 2*len(r.buf)))
	}
	r.buf[(r.head+r.n)&(len(r.buf)-1)] = v
	r.n++
}

// pop removes and returns the oldest element. Requires: len() > 0.
func (r *ring[T]) pop() T {
	var zero T
	v := r.buf[r.head]
	r.buf[r.head] = zero
	r.head = (r.head + 1) & (len(r.buf) - 1)
	r.n--
	// Shrink late (an eighth full), so a queue that shrinks and grows does not copy itself each
	// time.
	if len(r.buf) > 64*ringMin && r.n < len(r.buf)/8 {
		r.resize(len(r.buf) / 2)
	}
	return v
}

// after returns the index of the first element later than v in a sorted ring: the place where v
// belongs, behind its equals.
func (r *ring[T]) after(v T, later func(a, b T) bool) int {
	lo, hi := 0, r.n
	if hi > 0 && !later(r.at(hi-1), v) { // nearly always
		return hi
	}
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); later(r.at(mid), v) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// insert puts v before the element at i, or at the end. Requires: 0 <= i <= len().
func (r *ring[T]) insert(i int, v T) {
	r.push(v)
	mask := len(r.buf) - 1
	for j := r.n - 1; j > i; j-- {
		r.buf[(r.head+j)&mask] = r.buf[(r.head+j-1)&mask]
	}
	r.buf[(r.head+i)&mask] = v
}

// sort sorts the elements. The sort is stable.
func (r *ring[T]) sort(later func(a, b T) bool) {
	r.resize(len(r.buf))
	slices.SortStableFunc(r.buf[:r.n], func(a, b T) int {
		switch {
		case later(a, b):
			return 1
		case later(b, a):
			return -1
		}
		return 0
	})
}

func (r *ring[T]) clear() { *r = ring[T]{} }

func (r *ring[T]) resize(size int) {
	buf := make([]T, size)
	for i := range r.n {
		buf[i] = r.buf[(r.head+i)&(len(r.buf)-1)]
	}
	r.buf, r.head = buf, 0
}
