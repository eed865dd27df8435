package stamp_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// fakeRing is a ring whose writer does the steps of the kernel side one at a time.
type fakeRing struct {
	size uint64
	head uint64
	top  uint32
	at   []mono.Time
	meta []stamp.Meta
	// looked, if set, runs before each look at a record and may add records.
	looked func()
}

func newFakeRing(size uint64) *fakeRing {
	r := &fakeRing{size: size, at: make([]mono.Time, size), meta: make([]stamp.Meta, size)}
	for i := range r.meta {
		r.meta[i] = stamp.BlankMeta(uint64(i))
	}
	return r
}

func (r *fakeRing) Head() uint64 { return r.head }
func (r *fakeRing) Size() uint64 { return r.size }

func (r *fakeRing) Record(i uint64) (stamp.Record, bool) {
	if r.looked != nil {
		r.looked()
	}
	m := r.meta[i%r.size]
	if !m.Of(i) || r.head-i > r.size {
		return stamp.Record{}, false
	}
	return stamp.MakeRecord(r.at[i%r.size], m), true
}

func (r *fakeRing) reserve() (index uint64) { r.head++; return r.head - 1 }

func (r *fakeRing) publish(index uint64, at mono.Time, seq, size uint32) {
	rec := stamp.Record{At: at, Seq: seq, Size: size, First: index > 0 && int32(seq-r.top) >= 0}
	if end := seq + size; index == 0 || int32(end-r.top) > 0 {
		r.top = end
	}
	r.at[index%r.size], r.meta[index%r.size] = at, stamp.PackMeta(index, rec)
}

func (r *fakeRing) add(at mono.Time, seq, size uint32) { r.publish(r.reserve(), at, seq, size) }

func begin(base uint32) *stamp.Mapper {
	m := &stamp.Mapper{}
	m.Begin(base, nil, false, 0)
	return m
}

func exact(at mono.Time) stamp.Arrival { return stamp.Arrival{At: at, Source: stamp.Exact} }
func bound(at mono.Time) stamp.Arrival { return stamp.Arrival{At: at, Source: stamp.UpperBound} }

func TestMapperCases(t *testing.T) {
	type ask struct {
		start, end int64
		want       stamp.Arrival
		unknown    bool
	}
	type seg struct {
		at        mono.Time
		off, size uint32
	}
	known := func(start, end int64, at mono.Time) ask { return ask{start: start, end: end, want: exact(at)} }
	upTo := func(start, end int64, at mono.Time) ask { return ask{start: start, end: end, want: bound(at)} }
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
		{"duplicate: either may have been taken", 0, []seg{{10, 0, 10}, {11, 0, 10}, {12, 10, 5}}, []ask{upTo(0, 10, 11), known(10, 15, 12)}},
		{"duplicate of a reordered segment", 0, []seg{{10, 10, 10}, {11, 0, 10}, {12, 10, 10}}, []ask{known(0, 10, 11), upTo(10, 20, 12)}},
		{"duplicate of a message's first half", 0, []seg{{10, 0, 10}, {11, 10, 10}, {12, 0, 10}, {13, 20, 10}}, []ask{upTo(0, 20, 12), known(20, 30, 13)}},
		{"retransmitted with other boundaries", 0, []seg{{10, 0, 10}, {11, 20, 10}, {15, 5, 25}},
			[]ask{known(0, 5, 10), upTo(5, 8, 15), known(10, 15, 15), upTo(15, 22, 15), upTo(22, 30, 15)}},
		{"forged: sent ahead, dropped, and sent later", 0, []seg{{10, 0, 10}, {11, 10, 90}, {50, 10, 10}, {60, 20, 80}},
			[]ask{known(0, 10, 10), upTo(10, 20, 50), upTo(20, 100, 60)}},
		{"forged: half of it ahead", 0, []seg{{10, 0, 10}, {11, 10, 90}, {50, 10, 45}, {60, 55, 45}}, []ask{known(0, 10, 10), upTo(10, 55, 50), upTo(55, 100, 60)}},
		{"forged: round the circle and back", 0, []seg{{10, 0, 10}, {11, 10, 10}, {12, 1<<31 - 5, 10}, {50, 10, 10}},
			[]ask{known(0, 10, 10), upTo(10, 20, 50)}},
		{"forged: far ahead, and nothing else", 0, []seg{{10, 1 << 20, 100}, {11, 0, 10}, {12, 10, 10}}, []ask{known(0, 10, 11), known(10, 20, 12)}},
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

// A message of the same segment as the previous message has the time of a copy that came since.
func TestMapperSeesACopyBetweenTwoMessagesOfASegment(t *testing.T) {
	r, m := newFakeRing(64), begin(7)
	r.add(10, 7, 30)
	for start, want := range []stamp.Arrival{exact(10), exact(10), bound(50)} {
		if start == 2 {
			r.add(50, 27, 10)
		}
		start := int64(10 * start)
		a, ok := m.Arrival(r, start, start+10)
		testkit.Equal(t, ok, true, "found at %d", start)
		testkit.Equal(t, a, want, "arrival at %d", start)
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

// A record that is reserved but not written yet has the content of the previous lap. The mapper must neither use nor
// pass the record.
func TestMapperWaitsForUnpublishedRecords(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	for i := range uint32(64) {
		r.add(mono.Time(i), i*10, 10)
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

	// If the first early records of a message were dropped, the remaining records give the end of the message, unless
	// they may be second copies.
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
	at := func(i int) mono.Time { return mono.Time(1000 + 10*i) }
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
		want := exact(at(i))
		if i < 200-size { // the oldest remaining record is used instead
			want = stamp.Arrival{At: at(200 - size), Source: stamp.Overwritten}
		}
		testkit.Equal(t, a, want, "message %d", i)
	}
	if m.Lost() != lost {
		t.Errorf("lost %d records, want %d", m.Lost(), lost)
	}
}

// A message in more segments than the ring holds loses records and keeps its stamp.
func TestMapperMessageLargerThanTheRing(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	for i := range uint32(1000) {
		r.add(mono.Time(i), i*100, 100)
	}
	a, ok := m.Arrival(r, 0, 100_000)
	if !ok || a.At != 999 {
		t.Errorf("%+v, %v, want 999", a, ok)
	}
}

// If the first copy of a segment was overwritten, its retransmission must not pass for the first copy.
func TestMapperDoubtsCopiesAfterAnOverrun(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	for i := range uint32(70) {
		r.add(mono.Time(i), i*10, 10)
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

// An early record is older than the records of the ring, so an early record must not replace a record that the ring has
// overwritten.
func TestMapperDropsEarlyRecordsWithAnOverrun(t *testing.T) {
	early := []stamp.Record{{At: 5, Seq: 0, Size: 10}, {At: 6, Seq: 10, Size: 90}} // the second was dropped
	r := newFakeRing(64)
	r.add(100, 10, 10) // accepted by TCP
	for i := range mono.Time(64) {
		r.add(101+i, 5000, 10)
	}
	var m stamp.Mapper
	m.Begin(0, early, false, 0)
	if a, ok := m.Arrival(r, 10, 20); !ok || a != (stamp.Arrival{At: 101, Source: stamp.Overwritten}) {
		t.Errorf("%+v, %v, want no earlier than the record that was lost", a, ok)
	}
}

// Records may be overwritten during the search: the mapper first sees the forged record, and then the accepted record is
// overwritten.
func TestMapperLooksAgainWhenOverwrittenMeanwhile(t *testing.T) {
	r, m := newFakeRing(64), begin(0)
	r.add(10, 0, 10) // dropped by TCP
	for range 10 {
		r.add(11, 5000, 10)
	}
	r.add(50, 0, 10) // accepted by TCP
	looks := 0
	r.looked = func() {
		if looks++; looks == 5 {
			for range 64 {
				r.add(51, 5000, 10)
			}
		}
	}
	if a, ok := m.Arrival(r, 0, 10); !ok || a.At.Before(50) {
		t.Errorf("%+v, %v, want no earlier than 50", a, ok)
	}
	r.looked = func() { r.add(52, 5000, 10) } // faster than the reader
	if a, ok := m.Arrival(r, 10, 20); ok {
		t.Errorf("%+v, want the time after the read", a)
	}
}

// tcp is the slow, obvious receiver. It accepts segments in its window that were not dropped, and knows the acceptance
// time of each byte.
type tcp struct {
	window uint32
	next   uint32 // offset of the next byte to deliver
	taken  map[uint32]mono.Time
	copies map[uint32]int // copies of a byte among all segments that came
}

func (x *tcp) came(at mono.Time, off, size uint32, drop bool) {
	for o := off; o != off+size; o++ {
		x.copies[o]++
		if _, have := x.taken[o]; !have && !drop && int32(o-x.next) >= 0 && o-x.next < x.window {
			x.taken[o] = at
		}
	}
	for {
		if _, have := x.taken[x.next]; !have {
			return
		}
		x.next++
	}
}

// complete returns when TCP had accepted the bytes [start, end), and whether each byte came once.
func (x *tcp) complete(start, end uint32) (at mono.Time, once bool) {
	once = true
	for o := start; o != end; o++ {
		at = max(at, x.taken[o])
		once = once && x.copies[o] == 1
	}
	return at, once
}

// For any network, any forgery and any delay of the reader, no stamp is earlier than the time when TCP accepted the last
// byte. Without an overrun there is a stamp, and the stamp is exact for bytes that came once. With an overrun, a stamp
// marked exact is exact unless timestamps are forged. No stamp is later than the newest record.
func TestMapperAgreesWithTCP(t *testing.T) {
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
	offset := rapid.SampledFrom([]int64{0, 1<<32 - 20}).Draw(t, "offset") // offset of the first byte of the test
	first := base + uint32(offset)

	r, m := newFakeRing(size), &stamp.Mapper{}
	peer := &tcp{window: 1000, taken: map[uint32]mono.Time{}, copies: map[uint32]int{}}
	var now mono.Time
	var sent, parsed uint32 // relative to offset
	var pending []uint32    // offsets in flight out of order, one byte each
	type slow struct {
		index     uint64
		at        mono.Time
		off, size uint32
	}
	var halfway []slow // records reserved by a CPU that has not published them yet
	finish := func() {
		for _, s := range halfway {
			r.publish(s.index, s.at, first+s.off, s.size)
			peer.came(s.at, s.off, s.size, false)
		}
		halfway = nil
	}
	arrive := func(off, size uint32, drop bool) {
		now += mono.Time(rapid.IntRange(0, 3).Draw(t, "pause"))
		r.add(now, first+off, size)
		peer.came(now, off, size, drop)
	}
	// Segments from before the ring. Only the last few are left.
	var early []stamp.Record
	for range rapid.IntRange(0, 12).Draw(t, "early") {
		off, n := rapid.Uint32Range(0, 20).Draw(t, "offset"), rapid.Uint32Range(1, 12).Draw(t, "size")
		now++
		early = append(early, stamp.Record{At: now, Seq: first + off, Size: n})
		peer.came(now, off, n, rapid.Bool().Draw(t, "dropped"))
		sent = max(sent, off+n)
	}
	lost, forged := len(early) > stamp.EarlyRecords, len(early) > 0
	for off := range sent {
		if _, have := peer.taken[off]; !have {
			pending = append(pending, off)
		}
	}
	m.Begin(base, early[max(0, len(early)-stamp.EarlyRecords):], lost, offset)
	forge := func() {
		forged = true
		off := sent + rapid.SampledFrom([]uint32{0, 1, 5, 20, 1000, 1 << 20, 1<<31 - 20, 1 << 31, 1<<32 - 1<<20, 1<<32 - 20, 1<<32 - 5, 1<<32 - 1}).Draw(t, "distance")
		arrive(off, rapid.Uint32Range(1, 60).Draw(t, "size"), true)
	}
	t.Repeat(map[string]func(*rapid.T){
		"segment": func(t *rapid.T) {
			n := rapid.Uint32Range(1, 12).Draw(t, "size")
			arrive(sent, n, false)
			sent += n
		},
		"segment on a slow CPU": func(t *rapid.T) {
			n := rapid.Uint32Range(1, 12).Draw(t, "size")
			now++
			halfway = append(halfway, slow{r.reserve(), now, sent, n})
			sent += n
		},
		"slow CPUs come to it": func(t *rapid.T) { finish() },
		"burst": func(t *rapid.T) {
			finish() // no CPU is slower than half a lap
			for range rapid.IntRange(20, 40).Draw(t, "segments") {
				arrive(sent, 2, false)
				sent += 2
			}
		},
		"forged segment": func(t *rapid.T) { forge() },
		"flood": func(t *rapid.T) {
			finish()
			for range rapid.IntRange(20, 100).Draw(t, "segments") {
				forge()
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
			off := rapid.Uint32Range(peer.next-min(peer.next, 20), sent-1).Draw(t, "offset")
			arrive(off, rapid.Uint32Range(1, sent-off).Draw(t, "size"), false)
		},
		"recovery": func(t *rapid.T) {
			for i, off := range pending {
				if _, have := peer.taken[off]; !have && off-peer.next < peer.window {
					pending = pending[i+1:]
					arrive(off, 1, false)
					return
				}
			}
			t.Skip("nothing lost")
		},
		"read": func(t *rapid.T) {
			meanwhile := rapid.IntRange(0, 2000).Draw(t, "looks until a flood")
			r.looked = func() {
				if meanwhile--; meanwhile == 0 && len(halfway) == 0 {
					for range 40 {
						forge()
					}
				}
			}
			for peer.next > parsed {
				n := rapid.Uint32Range(1, 15).Draw(t, "message")
				if parsed+n > peer.next || rapid.IntRange(0, 9).Draw(t, "stop") == 0 {
					return
				}
				start, end := offset+int64(parsed), offset+int64(parsed+n)
				want, once := peer.complete(parsed, parsed+n)
				a, ok := m.Arrival(r, start, end)
				lost = lost || m.Lost() > 0
				parsed += n
				say := func(problem string) {
					t.Fatalf("[%d, %d): %+v, %v, taken %d: %s", start, end, a, ok, want, problem)
				}
				switch {
				case !ok:
					if !lost {
						say("unknown, but no record was overwritten")
					}
				case a.At.Before(want):
					say("earlier than it was taken")
				case a.Source == stamp.Exact:
					if a.At != want && (!lost || !forged) {
						say("not exact")
					}
				case !lost && once:
					say("not exact, but no record was overwritten, and each byte came once")
				case now.Before(a.At):
					say(fmt.Sprintf("after the newest record, %d", now))
				}
			}
		},
	})
}
