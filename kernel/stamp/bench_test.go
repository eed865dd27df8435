package stamp_test

import (
	"testing"
)

// One message per segment, read as they come.
func BenchmarkMapper(b *testing.B) {
	r, m := newFakeRing(128), begin(0)
	off := int64(0)
	for b.Loop() {
		r.add(1, uint32(off), 200)
		if _, ok := m.Arrival(r, off, off+200); !ok {
			b.Fatal("not found")
		}
		off += 200
	}
}

func TestMapperAllocatesNothing(t *testing.T) {
	r, m := newFakeRing(128), begin(0)
	var off int64
	if n := testing.AllocsPerRun(1000, func() {
		r.add(1, uint32(off), 200)
		if _, ok := m.Arrival(r, off, off+200); !ok {
			t.Fatal("not found")
		}
		off += 200
	}); n != 0 {
		t.Errorf("%v allocations per message, want 0", n)
	}
}
