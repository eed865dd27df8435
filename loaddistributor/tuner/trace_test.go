package tuner

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

const (
	origin = mono.Wall(1_700_000_000_000_000_000)
	ms     = mono.Wall(time.Millisecond)
	second = mono.Wall(time.Second)
)

// index knows the publishers "0" to "99".
func index(id string) (int, bool) {
	i, err := strconv.Atoi(id)
	return i, err == nil && i >= 0 && i < 100
}

func newStarted(t *testing.T, brokers ...string) *Trace {
	t.Helper()
	trace := NewTrace(origin, index)
	trace.Expect(brokers, origin)
	for _, b := range brokers {
		if trace.Started(b) {
			t.Fatalf("begun before %s has said anything", b)
		}
		testkit.Must(t, trace.Add(b, Piece{First: true}, origin))
	}
	if !trace.Started(brokers...) || trace.Started("other") {
		t.Fatal("not begun, or another one's")
	}
	return trace
}

func add(t *testing.T, trace *Trace, broker string, p Piece, now mono.Wall) {
	t.Helper()
	testkit.Must(t, trace.Add(broker, p, now))
}

func arrivalAt(millis int64, publisher int32) Arrival {
	return Arrival{At: mono.Time(millis * int64(ms)), Publisher: publisher}
}

func expect(t *testing.T, got []Arrival, want ...Arrival) {
	t.Helper()
	testkit.EqualSlices(t, got, want, "taken")
}

func TestBrokersAreMergedInOrderOfTime(t *testing.T) {
	trace := newStarted(t, "a", "b")
	add(t, trace, "a", Piece{Publishers: []string{"7", "8"}, Start: origin + 100*ms, Gaps: []uint64{0, uint64(100 * ms)}, From: []uint32{0, 1}}, origin+250*ms)
	add(t, trace, "b", Piece{Publishers: []string{"9"}, Start: origin + 150*ms, Gaps: []uint64{0}, From: []uint32{0}}, origin+250*ms)
	add(t, trace, "a", Piece{Start: origin + 190*ms, Gaps: []uint64{0}, From: []uint32{1}}, origin+2*second)
	expect(t, trace.Take(origin+2*second)) // b has sent nothing since
	add(t, trace, "b", Piece{}, origin+2*second)
	expect(t, trace.Take(origin+2*second), arrivalAt(100, 7), arrivalAt(150, 9), arrivalAt(190, 8), arrivalAt(200, 8))
	expect(t, trace.Take(origin+2*second))
	testkit.Equal(t, trace.Counts(), (Counts{Captured: 4}))
}

// A loss on one broker leaves a hole in the whole trace.
func TestLossOnOneBrokerLeavesAHole(t *testing.T) {
	addOne := func(trace *Trace, broker string, at, now mono.Wall, changes ...func(*Piece)) {
		p := Piece{Publishers: []string{broker}, Start: at, Gaps: []uint64{0}, From: []uint32{0}}
		if len(trace.records[broker].index) > 0 {
			p.Publishers = nil
		}
		for _, f := range changes {
			f(&p)
		}
		add(t, trace, broker, p, now)
	}
	t.Run("lost", func(t *testing.T) {
		trace := newStarted(t, "1", "2")
		addOne(trace, "1", origin+100*ms, origin+250*ms)
		addOne(trace, "2", origin+200*ms, origin+250*ms)
		addOne(trace, "1", origin+300*ms, origin+500*ms, func(p *Piece) { p.Lost = 5 })
		addOne(trace, "2", origin+400*ms, origin+500*ms)
		addOne(trace, "1", origin+600*ms, origin+2*second)
		addOne(trace, "2", origin+700*ms, origin+2*second)
		expect(t, trace.Take(origin+2*second), arrivalAt(100, 1), arrivalAt(200, 2), arrivalAt(600, 1), arrivalAt(700, 2))
		testkit.Equal(t, trace.Counts(), (Counts{Captured: 4, Lost: 5, Holed: 2}))
	})
	t.Run("an unknown publisher", func(t *testing.T) {
		trace := newStarted(t, "1", "2")
		addOne(trace, "1", origin+100*ms, origin+250*ms, func(p *Piece) {
			p.Publishers, p.Gaps, p.From = []string{"1", "unknown"}, []uint64{0, 1}, []uint32{0, 1}
		})
		addOne(trace, "2", origin+200*ms, origin+250*ms)
		addOne(trace, "1", origin+300*ms, origin+2*second)
		addOne(trace, "2", origin+400*ms, origin+2*second)
		expect(t, trace.Take(origin+2*second), arrivalAt(300, 1), arrivalAt(400, 2))
		testkit.Equal(t, trace.Counts(), (Counts{Captured: 2, Unknown: 1, Holed: 2}))
	})
	t.Run("a broker that comes later", func(t *testing.T) {
		trace := newStarted(t, "1")
		addOne(trace, "1", origin+100*ms, origin+250*ms)
		trace.Expect([]string{"1", "2"}, origin+300*ms)
		addOne(trace, "1", origin+400*ms, origin+500*ms)
		add(t, trace, "2", Piece{First: true}, origin+500*ms)
		addOne(trace, "1", origin+600*ms, origin+2*second)
		addOne(trace, "2", origin+700*ms, origin+2*second)
		expect(t, trace.Take(origin+2*second), arrivalAt(100, 1), arrivalAt(600, 1), arrivalAt(700, 2))
	})
	t.Run("a broker that falls silent", func(t *testing.T) {
		trace := newStarted(t, "1", "2")
		addOne(trace, "2", origin+200*ms, origin+250*ms)
		for now := origin + 250*ms; now <= origin+5*second; now += 250 * ms {
			addOne(trace, "1", now-1, now)
		}
		expect(t, trace.Take(origin+5*second), arrivalAt(200, 2), Arrival{At: mono.Time(250*ms - 1), Publisher: 1})
		trace.Expect([]string{"1"}, origin+5*second) // the broker has left
		addOne(trace, "1", origin+5100*ms, origin+7*second)
		expect(t, trace.Take(origin+7*second), arrivalAt(5100, 1))
	})
	t.Run("no room", func(t *testing.T) {
		trace := newStarted(t, "1")
		for i := range MaxPending/MaxMessages + 1 {
			addOne(trace, "1", origin+mono.Wall(i)*100*ms, origin+mono.Wall(i)*100*ms+50*ms, func(p *Piece) {
				p.Gaps, p.From = make([]uint64, MaxMessages), make([]uint32, MaxMessages)
			})
		}
		add(t, trace, "1", Piece{}, origin+2*second)
		testkit.Equal(t, len(trace.Take(origin+2*second)), MaxPending, "taken")
		if c := trace.Counts(); c.Lost != MaxMessages || c.Captured != MaxPending {
			t.Errorf("%+v", c)
		}
	})
}

// The search does not take the trace for a long time, while brokers lose messages all the time. The number of
// holes stays small.
func TestHolesAreFew(t *testing.T) {
	trace := newStarted(t, "b1", "b2")
	now := origin
	for range 1000 {
		now += 250 * ms
		add(t, trace, "b1", Piece{Lost: 1}, now)
		add(t, trace, "b2", Piece{Lost: 1}, now+1)
	}
	if n := len(trace.holes); n > 2 {
		t.Errorf("%d holes are kept for a record that continues", n)
	}
}

func TestWhatComesTooLateIsLeftOut(t *testing.T) {
	trace := newStarted(t, "a")
	add(t, trace, "a", Piece{Publishers: []string{"1"}, Start: origin + 900*ms, Gaps: []uint64{0}, From: []uint32{0}}, origin+2*second)
	expect(t, trace.Take(origin+2*second), arrivalAt(900, 1))
	add(t, trace, "a", Piece{Start: origin + 800*ms, Gaps: []uint64{0, uint64(1200 * ms)}, From: []uint32{0, 0}}, origin+3*second)
	expect(t, trace.Take(origin+3*second), arrivalAt(2000, 1))
	testkit.Equal(t, trace.Counts(), (Counts{Captured: 2, Late: 1}))
}

func TestSkipDropsEarlierArrivals(t *testing.T) {
	trace := newStarted(t, "a")
	add(t, trace, "a", Piece{Publishers: []string{"1"}, Start: origin + 100*ms, Gaps: []uint64{0, uint64(200 * ms)}, From: []uint32{0, 0}}, origin+2*second)
	trace.Skip(origin + 200*ms)
	expect(t, trace.Take(origin+2*second), arrivalAt(300, 1))
	trace.Skip(origin + 200*ms) // a skip does not go back
	if c := trace.Counts(); c != (Counts{Captured: 1}) || trace.takenUntil != origin+1500*ms {
		t.Errorf("%+v, taken to %v", c, trace.takenUntil)
	}
}

func TestBadPieces(t *testing.T) {
	now := origin + second
	fine := func() Piece {
		return Piece{Publishers: []string{"2"}, Start: origin + 500*ms, Gaps: []uint64{0, 5}, From: []uint32{0, 1}}
	}
	for _, c := range []struct {
		field string
		spoil func(*Piece)
	}{
		{"publisher", func(p *Piece) { p.From = p.From[:1] }},
		{"publisher[1]", func(p *Piece) { p.From[1] = 2 }},
		{"publisher[1]", func(p *Piece) { p.First = true }}, // a first piece starts a new list, with one publisher
		{"publishers", func(p *Piece) { p.Publishers = make([]string, MaxPublishers) }},
		{"gap_ns[0]", func(p *Piece) { p.Gaps[0] = 1 }},
		{"gap_ns[1]", func(p *Piece) { p.Gaps[1] = 1 << 63 }},
		{"gap_ns[1]", func(p *Piece) { p.Gaps[1] = uint64(MaxAway) + 1 }},
		{"gap_ns", func(p *Piece) { p.Gaps, p.From = make([]uint64, MaxMessages+1), make([]uint32, MaxMessages+1) }},
		{"gap_ns[1]", func(p *Piece) { p.Start = 1<<63 - 1 }},
		{"start_ns", func(p *Piece) { p.Start = 0 }},
		{"start_ns", func(p *Piece) { p.Start = -1 << 63 }},
		{"start_ns", func(p *Piece) { p.Start = now - 11*second }},
		{"start_ns", func(p *Piece) { p.Start = now + 11*second }},
		{"lost", func(p *Piece) { p.Lost = 1 << 60 }},
	} {
		t.Run(c.field, func(t *testing.T) {
			trace := newStarted(t, "a")
			add(t, trace, "a", Piece{Publishers: []string{"1"}, Start: origin + 100*ms, Gaps: []uint64{0}, From: []uint32{0}}, origin+250*ms)
			p := fine()
			c.spoil(&p)
			var bad *PieceError
			if err := trace.Add("a", p, now); !errors.As(err, &bad) || bad.Field != c.field {
				t.Fatalf("%v, want a fault of %s", err, c.field)
			}
			// Earlier pieces stay. Later pieces have no publisher numbers to refer to.
			if err := trace.Add("a", fine(), now); !errors.As(err, &bad) || bad.Field != "first" || trace.Started("a") {
				t.Errorf("%v, begun %v", err, trace.Started("a"))
			}
			p = fine()
			p.First, p.Publishers = true, []string{"3", "4"}
			add(t, trace, "a", p, now)
			add(t, trace, "a", Piece{Start: now + 100*ms, Gaps: []uint64{0}, From: []uint32{1}}, now+second)
			expect(t, trace.Take(now+second), arrivalAt(100, 1), arrivalAt(1100, 4))
			testkit.Equal(t, trace.Counts(), (Counts{Captured: 2, Holed: 2, Refused: 2}))
		})
	}
	trace := newStarted(t, "a")
	if err := trace.Add("other", Piece{Lost: 1 << 63}, now); err != nil || trace.Counts() != (Counts{}) {
		t.Errorf("a broker that is not expected: %v, %+v", err, trace.Counts())
	}
}

// However a schedule is cut into brokers and overlapping pieces, the trace equals the schedule.
func TestTheTraceIsTheSchedule(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		brokers := rapid.SliceOfNDistinct(rapid.StringMatching("[a-z]"), 1, 4, rapid.ID[string]).Draw(r, "brokers")
		trace := newStarted(t, brokers...)
		type message struct {
			at         mono.Wall
			publisher  int32
			reportedBy int // the piece that reports it
		}
		records := map[string][]message{}
		var want []Arrival
		now := origin
		for range rapid.IntRange(0, 200).Draw(r, "messages") {
			now += mono.Wall(rapid.Int64Range(1, 50e6).Draw(r, "gap"))
			m := message{at: now, publisher: int32(rapid.IntRange(0, 99).Draw(r, "publisher"))}
			late := mono.Wall(rapid.Int64Range(0, int64(200*ms)).Draw(r, "read late by"))
			m.reportedBy = int((now - origin + late) / (250 * ms))
			b := rapid.SampledFrom(brokers).Draw(r, "broker")
			records[b] = append(records[b], m)
			want = append(want, Arrival{At: mono.Time(now - origin), Publisher: m.publisher})
		}
		numbers := map[string]map[int32]uint32{}
		var got []Arrival
		for piece := range int((now-origin)/(250*ms)) + 5 {
			end := origin + mono.Wall(piece+1)*250*ms
			for _, b := range brokers {
				if numbers[b] == nil {
					numbers[b] = map[int32]uint32{}
				}
				var p Piece
				var last mono.Wall
				slices.SortStableFunc(records[b], func(x, y message) int { return cmp.Compare(x.at, y.at) })
				for _, m := range records[b] {
					if m.reportedBy != piece {
						continue
					}
					if p.Start == 0 {
						p.Start, last = m.at, m.at
					}
					n, named := numbers[b][m.publisher]
					if !named {
						n = uint32(len(numbers[b]))
						numbers[b][m.publisher] = n
						p.Publishers = append(p.Publishers, fmt.Sprint(m.publisher))
					}
					p.Gaps, p.From = append(p.Gaps, uint64(m.at-last)), append(p.From, n)
					last = m.at
				}
				testkit.Must(r, trace.Add(b, p, end))
			}
			got = append(got, trace.Take(end)...)
		}
		if !reflect.DeepEqual(got, want) {
			r.Fatalf("took\n%v, want\n%v", got, want)
		}
	})
}

// For any input: no panic, the accepted arrivals are in order, and the trace contains nothing of a
// refused piece.
func FuzzTrace(f *testing.F) {
	f.Add([]byte{0, 1, 5, 2, 0, 3, 9, 200, 1, 1, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		trace := NewTrace(origin, index)
		trace.Expect([]string{"0", "1"}, origin)
		now, last := origin, mono.Time(0)
		next := func() int64 {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int64(int8(b))
		}
		for len(data) > 0 {
			now += mono.Wall(max(0, next())) * 10 * ms
			p := Piece{First: next() > 0, Start: now + mono.Wall(next())*100*ms, Lost: uint64(next())}
			for range next() % 8 {
				p.Publishers = append(p.Publishers, fmt.Sprint(next()))
			}
			for range next() % 8 {
				p.Gaps, p.From = append(p.Gaps, uint64(next())*uint64(10*ms)), append(p.From, uint32(next()))
			}
			pending := len(trace.pending)
			err := trace.Add(fmt.Sprint(next()%3), p, now)
			if err != nil && len(trace.pending) != pending {
				t.Fatalf("refused (%v), and %d arrivals were kept of it", err, len(trace.pending)-pending)
			}
			for _, a := range trace.Take(now) {
				if a.At < last || a.Publisher < 0 || a.Publisher >= 100 {
					t.Fatalf("%v after %v", a, last)
				}
				last = a.At
			}
		}
	})
}
