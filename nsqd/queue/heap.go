package queue

import "github.com/srtm-io/srtm/internal/mono"

// dueHeap orders a channel's items by due time. Each item knows its index, so any item can be
// removed.
//
// dueHeap does not use container/heap, because its interface boxes every element and calls
// through a table on the delivery path.
//
// Invariant: h[i].due <= h[2i+1].due, h[2i+2].due, and h[i].place == i.
type dueHeap []*item

func (h dueHeap) next() mono.Time {
	if len(h) == 0 {
		return mono.Never
	}
	return h[0].due
}

func (h *dueHeap) push(it *item) {
	*h = append(*h, it)
	h.up(len(*h) - 1)
}

// remove removes an item. Requires: the item is in h.
func (h *dueHeap) remove(it *item) {
	old := *h
	i, last := int(it.place), len(old)-1
	moved := old[last]
	old[last] = nil
	*h = old[:last]
	it.place = -1
	if i == last {
		return
	}
	old[i] = moved
	moved.place = int32(i)
	h.fix(i)
}

// fix restores the order after the due time of the item at i changed.
func (h dueHeap) fix(i int) {
	if !h.down(i) {
		h.up(i)
	}
}

func (h dueHeap) up(i int) {
	it := h[i]
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].due <= it.due {
			break
		}
		h[i] = h[parent]
		h[i].place = int32(i)
		i = parent
	}
	h[i] = it
	it.place = int32(i)
}

// down reports whether the item moved.
func (h dueHeap) down(i int) bool {
	it, start := h[i], i
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if right := child + 1; right < len(h) && h[right].due < h[child].due {
			child = right
		}
		if it.due <= h[child].due {
			break
		}
		h[i] = h[child]
		h[i].place = int32(i)
		i = child
	}
	h[i] = it
	it.place = int32(i)
	return i != start
}
