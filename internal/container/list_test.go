package container

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

type item struct {
	at Element[*item]
	n  int
}

func TestAgainstASlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l List[*item]
		var want []*item
		for n := range rapid.IntRange(0, 30).Draw(t, "steps") {
			if len(want) > 0 && rapid.Bool().Draw(t, "remove") {
				i := rapid.IntRange(0, len(want)-1).Draw(t, "which")
				want[i].at.Remove()
				want = slices.Delete(want, i, i+1)
			} else {
				v := &item{n: n}
				l.Push(&v.at, v)
				want = append(want, v)
			}
			if got := slices.Collect(l.All()); !slices.Equal(got, want) {
				t.Fatalf("got %v, want %v", got, want)
			}
			if front := l.Front(); len(want) > 0 && front != want[0] || len(want) == 0 && front != nil {
				t.Fatalf("the front is %v of %v", front, want)
			}
		}
		for v := range l.All() {
			v.at.Remove()
		}
		if l.Front() != nil {
			t.Fatal("each was removed, and it is not empty")
		}
	})
}

func TestAllocations(t *testing.T) {
	var l List[*item]
	v := &item{}
	if n := testing.AllocsPerRun(100, func() {
		l.Push(&v.at, v)
		l.Front().at.Remove()
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
