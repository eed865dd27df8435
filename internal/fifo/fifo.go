// Package fifo is a queue in memory, for who owns it alone.
package fifo

// Queue is a ring that grows by doubling, and keeps its size. The zero Queue is empty.
type Queue[T any] struct {
	ring  []T // len is 0 or a power of two
	first int
	n     int
}

// Len returns how many are in it.
func (q *Queue[T]) Len() int { return q.n }

// Front is the oldest, until the next Push or Pop. Requires: Len() > 0.
func (q *Queue[T]) Front() *T { return &q.ring[q.first] }

// Push adds one behind all others.
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

// Pop takes the oldest out. Requires: Len() > 0.
func (q *Queue[T]) Pop() T {
	v := q.ring[q.first]
	clear(q.ring[q.first : q.first+1]) // what it points to may go
	q.first = (q.first + 1) & (len(q.ring) - 1)
	q.n--
	return v
}
