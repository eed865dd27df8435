package container

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestQueueKeepsTheOrder(t *testing.T) {
	var q Queue[int]
	next := 0
	for i := range 1000 {
		q.Push(i)
		if i%3 == 0 {
			testkit.MustEqual(t, q.Pop(), next)
			next++
		}
		if q.Len() != i+1-next || q.Len() > 0 && *q.Front() != next {
			t.Fatalf("%d in it, want %d, from %d on", q.Len(), i+1-next, next)
		}
	}
	for ; next < 1000; next++ {
		testkit.MustEqual(t, q.Pop(), next)
	}
	testkit.Equal(t, q.Len(), 0, "are left")
}
