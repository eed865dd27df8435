// Package container has containers in memory for a single owner: a heap (container/heap for
// elements with their own order), a queue, and a list whose elements do not allocate.
package container

// Heap is a binary heap: no element is before h[0]. The zero Heap is empty.
type Heap[T interface{ Before(T) bool }] []T

// Init orders elements as a heap.
func (h Heap[T]) Init() {
	for i := len(h)/2 - 1; i >= 0; i-- {
		h.down(i)
	}
}

// Push adds an element.
func (h *Heap[T]) Push(v T) {
	all := append(*h, v)
	*h = all
	for i := len(all) - 1; i > 0; {
		parent := (i - 1) / 2
		if !all[i].Before(all[parent]) {
			return
		}
		all[i], all[parent] = all[parent], all[i]
		i = parent
	}
}

// Pop removes and returns h[0]. Requires: h is not empty.
func (h *Heap[T]) Pop() T {
	all := *h
	first, last := all[0], len(all)-1
	all[0] = all[last]
	clear(all[last:]) // releases pointers
	*h = all[:last]
	h.Fix()
	return first
}

// Fix restores the order after h[0] has changed.
func (h Heap[T]) Fix() { h.down(0) }

// down restores the order after h[i] has moved back.
func (h Heap[T]) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && h[child+1].Before(h[child]) {
			child++
		}
		if !h[child].Before(h[i]) {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}
