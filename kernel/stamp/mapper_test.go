package stamp_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/kernel/stamp"
)

// fakeRing is a ring with a writer that does what the kernel side does, one
// step at a time.
type fakeRing struct {
	size uint64
	head uint64
	top  uint32
	at   []stamp.Mono
	meta []stamp.Meta
}

func newFakeRing(size uint64) *fakeRing {
	r := &fakeRing{size: size, at: make([]stamp.Mono, size), meta: make([]stamp.Meta, size)}
	for i := range r.meta {
		r.meta[i] = stamp.BlankMeta(uint64(i))
	}
	return r
}

func (r *fakeRing) Head() uint64 { return r.head }
func (r *fakeRing) Size() uint64 { return r.size }

func (r *fakeRing) Record(i uint64) (stamp.Record, bool) {
	m := r.meta[i%r.size]
	if !m.Of(i) || r.head-i > r.size {
		return stamp.Record{}, false
	}
	return stamp.MakeRecord(r.at[i%r.size], m), true
}

func (r *fakeRing) reserve() (index uint64) { r.head++; return r.head - 1 }

func (r *fakeRing) publish(index uint64, at stamp.Mono, seq, size uint32) {
	rec := stamp.Record{At: at, Seq: seq, Size: size, First: index > 0 && int32(seq-r.top) >= 0}
	if end := seq + size; index == 0 || int32(end-r.top) > 0 {
		r.top = end
	}
	r.at[index%r.size], r.meta[index%r.size] = at, stamp.PackMeta(index, rec)
}

func (r *fakeRing) add(at stamp.Mono, seq, size uint32) { r.publish(r.reserve(), at, seq, size) }

func begin(base uint32) *stamp.Mapper {
	m := &stamp.Mapper{}
	m.Begin(base, nil, false, 0)
	return m
}

func exact(at stamp.Mono) stamp.Arrival { return stamp.Arrival{At: at, Source: stamp.Exact} }

func TestMapperCases(t *testing.T) {
	type ask struct {
		start, end int64
		want       stamp.Arrival
		unknown    bool
	}
	type seg struct {
		at        stamp.Mono
		off, size uint32
	}
	known := func(start, end int64, at stamp.Mono) ask { return ask{start: start, end: end, want: exact(at)} }
	for _, tc := range []struct {
		name string
		base uint32
		segs []seg
		asks []ask
	}{
		{"several messages in a segment", 7, []seg{{10, 0, 30}}, []ask{known(0, 10, 10), known(10, 20, 10), known(20, 30, 10)}},
		{"a message over many segments", 7, []seg{{10, 0, 10}, {11, 10, 10}, {15, 20, 10}}, []ask{known(0, 30, 15)}},
		{"boundaries across", 7, []seg{{10, 0, 15}, {11, 15, 15}}, []ask{known(0, 10, 10), known(10, 20, 11), known(20, 30, 11)}},
		{"sequence numbers wrap within a message", 0xffff_fffa, []seg{{10, 0, 4}, {11, 4, 4}, {12, 8, 4}},
			[]ask{known(0, 3, 10), known(3, 7, 11), known(7, 12, 12)}},
		{"reordered: the hole completes the message", 0, []seg{{10, 10, 10}, {12, 0, 10}}, []ask{known(0, 20, 12)}},
		{"reordered: behind the hole it was there before", 0, []seg{{10, 10, 10}, {12, 0, 10}}, []ask{known(0, 10, 12), known(10, 20, 10)}},
		{"duplicate: the first copy counts", 0, []seg{{10, 0, 10}, {11, 0, 10}, {12, 10, 5}}, []ask{known(0, 10, 10), known(10, 15, 12)}},
		{"duplicate of a reordered segment", 0, []seg{{10, 10, 10}, {11, 0, 10}, {12, 10, 10}}, []ask{known(0, 20, 11)}},
		{"retransmitted with other boundaries", 0, []seg{{10, 0, 10}, {11, 20, 10}, {15, 5, 25}}, []ask{known(0, 8, 10), known(8, 22, 15), known(22, 30, 11)}},
		{"in reverse", 0, []seg{{10, 30, 10}, {11, 20, 10}, {12, 10, 10}, {13, 0, 10}}, []ask{known(0, 40, 13)}},
		{"unknown and no record missing", 0, []seg{{10, 10, 10}}, []ask{{start: 0, end: 10, unknown: true}, known(10, 20, 10)}},
		{"largest segment", 3, []seg{{10, 0, 524280}, {11, 524280, 5}}, []ask{known(0, 524280, 10), known(524280, 524285, 11)}},
		{"offsets beyond 4 GiB", 0, []seg{{10, 5, 5}}, []ask{known(1<<32+5, 1<<32+10, 10)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, m := newFakeRing(64), begin(tc.base)
			for _, s := range tc.segs {
				r.add(s.at, tc.base+s.off, s.size)
			}
			for _, a := range tc.asks {
				got, ok := m.Arrival(r, a.start, a.end)
				if ok == a.unknown || got != a.want {
					t.Errorf("[%d, %d): %+v, %v, want %+v", a.start, a.end, got, ok, a.want)
				}
			}
		})
	}
}

func TestMapperKnowsNothingBeforeBegin(t *testing.T) {
	var m stamp.Mapper
	r := newFakeRing(64)
	r.add(1, 0, 10)
	if a, ok := m.Arrival(r, 0, 10); ok {
		t.Errorf("%+v without a base", a)
	}
}

// A record that is reserved but not written yet holds the previous lap, which
// must neither be used nor passed.
func TestMapperWaitsForUnpublishedRecords(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	for i := range uint32(64) {
		r.add(stamp.Mono(i), i*10, 10)
	}
	if a, ok := m.Arrival(r, 0, 640); !ok || a != exact(63) {
		t.Fatalf("first lap: %+v, %v", a, ok)
	}
	late := r.reserve()
	r.add(101, 650, 10) // another CPU was faster
	if a, ok := m.Arrival(r, 650, 660); !ok || a != exact(101) {
		t.Fatalf("after an unpublished record: %+v, %v", a, ok)
	}
	r.publish(late, 100, 640, 10)
	m2 := begin(0)
	if a, ok := m2.Arrival(r, 640, 650); !ok || a != exact(100) {
		t.Errorf("fresh reader: %+v, %v", a, ok)
	}
}

func TestMapperUsesEarlyRecords(t *testing.T) {
	early := []stamp.Record{{At: 5, Seq: 100, Size: 10}, {At: 6, Seq: 110, Size: 10}}
	r := newFakeRing(64)
	r.add(7, 120, 10)
	var m stamp.Mapper
	m.Begin(100, early, false, 0)
	for i, want := range []stamp.Arrival{exact(5), exact(6), exact(7)} {
		if a, ok := m.Arrival(r, int64(i)*10, int64(i)*10+10); !ok || a != want {
			t.Errorf("message %d: %+v, %v, want %+v", i, a, ok, want)
		}
	}

	// Of a message that begins in records dropped from the early ones, what is
	// left tells the end, unless it may be a second copy.
	for _, first := range []bool{true, false} {
		want, after := exact(6), exact(7)
		if !first {
			want.Source, after.Source = stamp.UpperBound, stamp.UpperBound
		}
		early[1].First = first
		m = stamp.Mapper{}
		m.Begin(100, early[1:], true, 0)
		if a, ok := m.Arrival(r, 0, 20); !ok || a != want {
			t.Errorf("half lost: %+v, %v, want %+v", a, ok, want)
		}
		if a, ok := m.Arrival(r, 20, 30); !ok || a != after {
			t.Errorf("after it: %+v, %v, want %+v", a, ok, after)
		}
	}
}

func TestMapperForgetsEarlyRecordsBeforeNumbersComeRound(t *testing.T) {
	var m stamp.Mapper
	r := newFakeRing(64)
	m.Begin(100, []stamp.Record{{At: 5, Seq: 200, Size: 10}}, false, 0)
	if a, ok := m.Arrival(r, 1<<32+100, 1<<32+110); ok {
		t.Errorf("%+v from a record 4 GiB older", a)
	}
}

func TestMapperAfterAnOverrun(t *testing.T) {
	const size, each = 64, 10
	r, m := newFakeRing(size), begin(0)
	at := func(i int) stamp.Mono { return stamp.Mono(1000 + 10*i) }
	put := func(from, to int) {
		for i := from; i < to; i++ {
			r.add(at(i), uint32(i*each), each)
		}
	}
	put(0, 5)
	for i := range 5 {
		if a, ok := m.Arrival(r, int64(i)*each, int64(i+1)*each); !ok || a != exact(at(i)) {
			t.Fatalf("before it: message %d: %+v, %v", i, a, ok)
		}
	}
	put(5, 200)
	// The reader's last retired record is 4, so 4..135 were overwritten.
	var lost uint64 = 200 - size - 4
	for i := 5; i < 200; i++ {
		a, ok := m.Arrival(r, int64(i)*each, int64(i+1)*each)
		if !ok {
			t.Fatalf("message %d: nothing", i)
		}
		want := stamp.Exact
		if i < 200-size {
			want = stamp.Interpolated
		}
		// Segments came evenly, so interpolation must hit to a byte's worth.
		if d := a.At.Sub(at(i)); a.Source != want || d < -1 || d > 1 {
			t.Errorf("message %d: %+v, want %v at %d", i, a, want, at(i))
		}
	}
	if m.Lost() != lost {
		t.Errorf("lost %d records, want %d", m.Lost(), lost)
	}
}

// A message in more segments than the ring holds loses records, but not its
// stamp.
func TestMapperMessageLargerThanTheRing(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	for i := range uint32(1000) {
		r.add(stamp.Mono(i), i*100, 100)
	}
	a, ok := m.Arrival(r, 0, 100_000)
	if !ok || a.At != 999 {
		t.Errorf("%+v, %v, want 999", a, ok)
	}
}

// A retransmission after its first copy was overwritten must not pass for the
// first copy.
func TestMapperDoubtsCopiesAfterAnOverrun(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	for i := range uint32(70) {
		r.add(stamp.Mono(i), i*10, 10)
	}
	r.add(500, 20, 10) // spurious retransmissions
	r.add(501, 30, 10)
	for i, want := range []stamp.Arrival{2: {At: 500, Source: stamp.UpperBound}, 3: {At: 501, Source: stamp.UpperBound}, 69: exact(69)} {
		a, ok := m.Arrival(r, int64(i)*10, int64(i)*10+10)
		if want.At > 0 && (!ok || a != want) {
			t.Errorf("message %d: %+v, %v, want %+v", i, a, ok, want)
		}
	}
}

// history is the slow obvious mapper: it keeps everything.
type history []stamp.Record

// arrival returns when the last byte of [start, end) came for the first time.
func (h history) arrival(base uint32, start, end int64) (at stamp.Mono) {
	for off := start; off < end; off++ {
		for _, rec := range h {
			if base+uint32(off)-rec.Seq < rec.Size {
				at = max(at, rec.At)
				break
			}
		}
	}
	return at
}

// Whatever the network does, and however late the reader is: without overrun
// every stamp is exact; with it, exact stamps still are, bounds are bounds,
// and nothing lies after the newest record.
func TestMapperAgreesWithAFullHistory(t *testing.T) {
	rapid.Check(t, checkMapper)
}

func FuzzMapper(f *testing.F) {
	f.Add([]byte("several messages, a lost segment, and then a few more"))
	f.Add(make([]byte, 1024))
	f.Fuzz(rapid.MakeFuzz(checkMapper))
}

func checkMapper(t *rapid.T) {
	const size = 64
	base := rapid.SampledFrom([]uint32{0, 1, 1 << 31, 0xffff_fff0, 0x7fff_fff8}).Draw(t, "base")
	offset := rapid.SampledFrom([]int64{0, 1<<32 - 20}).Draw(t, "offset") // of the first byte here
	first := base + uint32(offset)

	r, m := newFakeRing(size), &stamp.Mapper{}
	m.Begin(base, nil, false, offset)
	var all history
	var now stamp.Mono
	var sent, delivered, parsed uint32 // relative to offset
	var pending []uint32               // offsets in flight out of order, one byte each
	have := map[uint32]bool{}
	type slow struct {
		index     uint64
		at        stamp.Mono
		off, size uint32
	}
	var halfway []slow // records reserved by a CPU that has not come to publish them
	publish := func(s slow) {
		r.publish(s.index, s.at, first+s.off, s.size)
		all[s.index] = stamp.Record{At: s.at, Seq: first + s.off, Size: s.size}
		for i := range s.size {
			have[s.off+i] = true
		}
		for have[delivered] {
			delivered++
		}
	}
	finish := func() {
		for _, s := range halfway {
			publish(s)
		}
		halfway = nil
	}
	reserve := func(off, size uint32) slow {
		now += stamp.Mono(rapid.IntRange(0, 3).Draw(t, "pause"))
		all = append(all, stamp.Record{})
		return slow{r.reserve(), now, off, size}
	}
	arrive := func(off, size uint32) { publish(reserve(off, size)) }
	overrun := false
	t.Repeat(map[string]func(*rapid.T){
		"segment": func(t *rapid.T) {
			n := rapid.Uint32Range(1, 12).Draw(t, "size")
			arrive(sent, n)
			sent += n
		},
		"segment on a slow CPU": func(t *rapid.T) {
			n := rapid.Uint32Range(1, 12).Draw(t, "size")
			halfway = append(halfway, reserve(sent, n))
			sent += n
		},
		"slow CPUs come to it": func(t *rapid.T) { finish() },
		"burst": func(t *rapid.T) {
			finish() // no CPU is slower than half a lap
			for range rapid.IntRange(20, 40).Draw(t, "segments") {
				arrive(sent, 2)
				sent += 2
			}
		},
		"loss": func(t *rapid.T) {
			n := rapid.Uint32Range(1, 12).Draw(t, "size")
			for i := range n {
				pending = append(pending, sent+i)
			}
			sent += n
		},
		"retransmission": func(t *rapid.T) {
			if sent == 0 {
				t.Skip("nothing sent")
			}
			finish() // two copies do not come within the same half microsecond
			off := rapid.Uint32Range(delivered-min(delivered, 20), sent-1).Draw(t, "offset")
			arrive(off, rapid.Uint32Range(1, sent-off).Draw(t, "size"))
		},
		"recovery": func(t *rapid.T) {
			if len(pending) == 0 {
				t.Skip("nothing lost")
			}
			off := pending[0]
			pending = pending[1:]
			if !have[off] {
				arrive(off, 1)
			}
		},
		"read": func(t *rapid.T) {
			for delivered > parsed {
				n := rapid.Uint32Range(1, 15).Draw(t, "message")
				if parsed+n > delivered || rapid.IntRange(0, 9).Draw(t, "stop") == 0 {
					return
				}
				start, end := offset+int64(parsed), offset+int64(parsed+n)
				lost := m.Lost()
				a, ok := m.Arrival(r, start, end)
				overrun = overrun || m.Lost() > lost
				parsed += n
				want := all.arrival(base, start, end)
				say := func(problem string) {
					t.Fatalf("[%d, %d): %+v, %v, truth %d: %s", start, end, a, ok, want, problem)
				}
				switch {
				case !ok:
					if !overrun {
						say("unknown, but no record was overwritten")
					}
				case a.Source == stamp.Exact:
					if a.At != want {
						say("not exact")
					}
				case !overrun:
					say("not exact, but no record was overwritten")
				case a.Source == stamp.UpperBound && a.At.Before(want):
					say("not an upper bound")
				case now.Before(a.At):
					say(fmt.Sprintf("after the newest record, %d", now))
				}
			}
		},
	})
}
