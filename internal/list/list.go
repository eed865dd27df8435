// Package list is a doubly linked list whose elements are parts of their values, so that
// adding and removing one allocates nothing.
package list

import "iter"

// List is a ring of elements through end. The zero List is empty. It may not be copied.
type List[T any] struct{ end Element[T] }

// Element is a value's place in a list. The zero Element is in none.
type Element[T any] struct {
	prev, next *Element[T]
	value      T
}

// Push adds v, of which e is a part, behind all others. Requires: e is in no list.
func (l *List[T]) Push(e *Element[T], v T) {
	if l.end.next == nil {
		l.end.prev, l.end.next = &l.end, &l.end
	}
	e.prev, e.next, e.value = l.end.prev, &l.end, v
	e.prev.next, e.next.prev = e, e
}

// Remove takes e out of its list. Requires: it is in one.
func (e *Element[T]) Remove() {
	e.prev.next, e.next.prev = e.next, e.prev
	*e = Element[T]{}
}

// Front is the oldest value, the zero T if there is none.
func (l *List[T]) Front() (v T) {
	if l.end.next != nil {
		v = l.end.next.value // of an empty list that is end, which has none
	}
	return v
}

// All are the values, oldest first. The one that it is at may be removed meanwhile.
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
