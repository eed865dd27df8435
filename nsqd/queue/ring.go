package queue

// ring is a FIFO that grows by doubling and gives its memory back when it has
// been drained far below its size. The zero value is empty.
//
// Invariant: the n elements are buf[head], buf[head+1], ... modulo len(buf);
// all other slots hold the zero value, so that nothing popped stays reachable.
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
	// Shrink late (an eighth full) so that a queue that breathes does not
	// copy itself at every breath.
	if len(r.buf) > 64*ringMin && r.n < len(r.buf)/8 {
		r.resize(len(r.buf) / 2)
	}
	return v
}

func (r *ring[T]) clear() { *r = ring[T]{} }

func (r *ring[T]) resize(size int) {
	buf := make([]T, size)
	for i := range r.n {
		buf[i] = r.buf[(r.head+i)&(len(r.buf)-1)]
	}
	r.buf, r.head = buf, 0
}
