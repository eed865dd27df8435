package container

// Queue is a ring that grows by doubling and never shrinks. The zero Queue is empty.
type Queue[T any] struct {
	ring  []T // len is 0 or a power of two
	first int
	n     int
}

// Len returns the number of elements.
func (q *Queue[T]) Len() int { return q.n }

// Front returns the oldest element, valid until the next Push or Pop. Requires: Len() >
// 0.
func (q *Queue[T]) Front() *T { return &q.ring[q.first] }

// Push appends an element.
func (q *Queue[T]) Push(v T) {
	if q.n == len(q.ring) {
		grown := make([]T, max(1, 2*q.n))
		copied := copy(grown, q.ring[q.first:])
		copy(grown[copied:], q.ring[:q.first])
		q.ring, q.first = grown, 0
	}
	q.ring[(q.first+q.n)&(len(q.ring)-1)] = v
	q.n++
}

// Pop removes and returns the oldest element. Requires: Len() > 0.
func (q *Queue[T]) Pop() T {
	v := q.ring[q.first]
	clear(q.ring[q.first : q.first+1]) // releases pointers
	q.first = (q.first + 1) & (len(q.ring) - 1)
	q.n--
	return v
}
