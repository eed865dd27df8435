package container

import "slices"

// Queue is a ring that grows by doubling and shrinks once it is mostly empty. The zero Queue is
// empty.
//
// Invariant: the n elements are ring[first], ring[first+1], ... modulo len(ring). All other slots
// hold the zero value, so a popped element is not reachable.
type Queue[T any] struct {
	ring  []T // len is 0 or a power of two
	first int
	n     int
}

// minShrunk is the number of slots below which a queue does not shrink.
const minShrunk = 512

// Len returns the number of elements.
func (q *Queue[T]) Len() int { return q.n }

// Front returns the oldest element. Requires: Len() > 0.
func (q *Queue[T]) Front() T { return q.ring[q.first] }

// At returns the element i places behind the oldest. Requires: 0 <= i < Len().
func (q *Queue[T]) At(i int) T { return q.ring[(q.first+i)&(len(q.ring)-1)] }

// Set replaces the element at i. Requires: 0 <= i < Len().
func (q *Queue[T]) Set(i int, v T) { q.ring[(q.first+i)&(len(q.ring)-1)] = v }

// Push appends an element.
func (q *Queue[T]) Push(v T) {
	if q.n == len(q.ring) {
		q.resize(max(1, 2*q.n))
	}
	q.ring[(q.first+q.n)&(len(q.ring)-1)] = v
	q.n++
}

// Pop removes and returns the oldest element. Requires: Len() > 0.
func (q *Queue[T]) Pop() T {
	var zero T
	v := q.ring[q.first]
	q.ring[q.first] = zero
	q.first = (q.first + 1) & (len(q.ring) - 1)
	q.n--
	// Shrink late (an eighth full), so a queue that shrinks and grows does not copy itself each
	// time.
	if len(q.ring) > minShrunk && q.n < len(q.ring)/8 {
		q.resize(len(q.ring) / 2)
	}
	return v
}

// After returns the index of the first element later than v in a sorted queue: the place where v
// belongs, behind its equals.
func (q *Queue[T]) After(v T, later func(a, b T) bool) int {
	lo, hi := 0, q.n
	if hi > 0 && !later(q.At(hi-1), v) { // nearly always
		return hi
	}
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); later(q.At(mid), v) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// Insert puts v before the element at i, or at the end. Requires: 0 <= i <= Len().
func (q *Queue[T]) Insert(i int, v T) {
	q.Push(v)
	for j := q.n - 1; j > i; j-- {
		q.Set(j, q.At(j-1))
	}
	q.Set(i, v)
}

// Sort sorts the elements. The sort is stable.
func (q *Queue[T]) Sort(later func(a, b T) bool) {
	q.resize(len(q.ring))
	slices.SortStableFunc(q.ring[:q.n], func(a, b T) int {
		switch {
		case later(a, b):
			return 1
		case later(b, a):
			return -1
		}
		return 0
	})
}

// Clear removes all elements.
func (q *Queue[T]) Clear() { *q = Queue[T]{} }

func (q *Queue[T]) resize(size int) {
	ring := make([]T, size)
	for i := range q.n {
		ring[i] = q.At(i)
	}
	q.ring, q.first = ring, 0
}
