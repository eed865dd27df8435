package queue

import (
	"testing"

	"pgregory.net/rapid"
)

// TestIndexEqualsAMap compares an index with a map.
func TestIndexEqualsAMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var f index
		holder := &consumer{id: 7}
		want := map[MessageID]*item{}
		var ids []MessageID
		check := func() {
			if f.n != len(want) {
				rt.Fatalf("%d items, want %d", f.n, len(want))
			}
			for _, id := range ids {
				if got := f.get(&id, 7); got != want[id] {
					rt.Fatalf("%s: %p, want %p", id, got, want[id])
				}
				if it := want[id]; it != nil && f.of(it.msg) != it {
					rt.Fatalf("%s: the index has another item of the message", id)
				}
			}
		}
		next := 0
		for range rapid.IntRange(1, 20).Draw(rt, "rounds") {
			for range rapid.IntRange(0, 3000).Draw(rt, "more") {
				m := message(next, 0)
				next++
				it := &item{msg: m, holder: holder}
				f.add(it)
				want[m.ID] = it
				ids = append(ids, m.ID)
			}
			for range rapid.IntRange(0, 3000).Draw(rt, "less") {
				if len(ids) == 0 {
					break
				}
				i := rapid.IntRange(0, len(ids)-1).Draw(rt, "which")
				if it := want[ids[i]]; it != nil {
					f.remove(it)
					delete(want, ids[i])
				}
				ids[i] = ids[len(ids)-1]
				ids = ids[:len(ids)-1]
			}
			check()
		}
		f.clear()
		clear(want)
		check()
	})
}
