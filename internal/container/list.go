package container

import "iter"

// List is a doubly linked list whose elements are embedded in their values, so insertion
// and removal do not allocate. It is a ring of elements through end. The zero List is
// empty. Do not copy a List.
type List[T any] struct{ end Element[T] }

// Element is a value's place in a list. The zero Element is in no list.
type Element[T any] struct {
	prev, next *Element[T]
	value      T
}

// Push appends v, which contains e. Requires: e is in no list.
func (l *List[T]) Push(e *Element[T], v T) {
	if l.end.next == nil {
		l.end.prev, l.end.next = &l.end, &l.end
	}
	e.prev, e.next, e.value = l.end.prev, &l.end, v
	e.prev.next, e.next.prev = e, e
}

// Remove removes e from its list. Requires: e is in a list.
func (e *Element[T]) Remove() {
	e.prev.next, e.next.prev = e.next, e.prev
	*e = Element[T]{}
}

// Front returns the oldest value, or the zero T of an empty list.
func (l *List[T]) Front() (v T) {
	if l.end.next != nil {
		v = l.end.next.value // in an empty list next is end, without a value
	}
	return v
}

// All yields the values, oldest first. The caller may remove the present value during the
// iteration.
func (l *List[T]) All() iter.Seq[T] {
	return func(yield func(T) bool) {
		for e := l.end.next; e != nil && e != &l.end; {
			next := e.next
			if !yield(e.value) {
				return
			}
			e = next
		}
	}
}
