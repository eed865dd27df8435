package fifo

import "testing"

func TestQueueKeepsTheOrder(t *testing.T) {
	var q Queue[int]
	next := 0
	for i := range 1000 {
		q.Push(i)
		if i%3 == 0 {
			if got := q.Pop(); got != next {
				t.Fatalf("got %d, want %d", got, next)
			}
			next++
		}
		if q.Len() != i+1-next || q.Len() > 0 && *q.Front() != next {
			t.Fatalf("%d in it, want %d, from %d on", q.Len(), i+1-next, next)
		}
	}
	for ; next < 1000; next++ {
		if got := q.Pop(); got != next {
			t.Fatalf("got %d, want %d", got, next)
		}
	}
	if q.Len() != 0 {
		t.Errorf("%d are left", q.Len())
	}
}
