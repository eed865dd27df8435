package stamp_test

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// BenchmarkMapper reads one message per segment as the segments come.
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

// BenchmarkMapperTogether reads messages that came together in one segment.
func BenchmarkMapperTogether(b *testing.B) {
	const together = 50
	r, m := newFakeRing(128), begin(0)
	off := int64(0)
	for i := 0; b.Loop(); i++ {
		if i%together == 0 {
			r.add(1, uint32(off), together*200)
		}
		if _, ok := m.Arrival(r, off, off+200); !ok {
			b.Fatal("not found")
		}
		off += 200
	}
}

// BenchmarkMapperLate reads messages that wait in a segment each.
func BenchmarkMapperLate(b *testing.B) {
	const wait = 100
	for _, bc := range []struct {
		name  string
		ahead uint32 // of a segment that was never accepted; 0: no such segment
	}{{"in order", 0}, {"behind a forged segment", 1 << 20}} {
		b.Run(bc.name, func(b *testing.B) {
			r, m := newFakeRing(128), begin(0)
			off := int64(0)
			for i := 0; b.Loop(); i++ {
				if i%wait == 0 {
					if bc.ahead > 0 {
						r.add(1, uint32(off)+bc.ahead, 200)
					}
					for j := range uint32(wait) {
						r.add(1, uint32(off)+200*j, 200)
					}
				}
				if _, ok := m.Arrival(r, off, off+200); !ok {
					b.Fatal("not found")
				}
				off += 200
			}
		})
	}
}

func TestMapperAllocatesNothing(t *testing.T) {
	r, m := newFakeRing(128), begin(0)
	var off int64
	testkit.Equal(t, testing.AllocsPerRun(1000, func() {
		r.add(1, uint32(off), 200)
		if _, ok := m.Arrival(r, off, off+200); !ok {
			t.Fatal("not found")
		}
		off += 200
	}), 0, "allocations per message")
}
