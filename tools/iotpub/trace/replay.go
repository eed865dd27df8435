package trace

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"time"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// Options configure the replay of a trace.
type Options struct {
	// Compress divides all times, and so multiplies the rate; > 0.
	Compress float64
	// Copies is the number of superposed copies, at least 1. Copy c is rotated by c/Copies
	// of the span. From copy 1 on, ids and keys have the suffix "#c".
	Copies int
	// From and To select [From, To) of the recording; To = 0 means the end.
	From, To time.Duration
	// Spread delays each event that shares its stamp with others by a random time, uniform
	// in [0, Spread), before compression. Devices round stamps down to a tick. 0 disables
	// Spread.
	Spread time.Duration
	// Seed determines the random delays.
	Seed uint64
}

// DefaultSpread is the tick of the known recordings, 0.1 s.
const DefaultSpread = 100 * time.Millisecond

// Bounds of Options.
const (
	maxCompress = 1e6
	maxCopies   = 100_000
	maxSpread   = 10 * time.Second
)

// Validate returns every fault at once, joined, or nil.
func (o Options) Validate() error {
	var f faults.List
	f.If(!(o.Compress >= 1/maxCompress && o.Compress <= maxCompress), "compress: %v, want %v .. %v", o.Compress, 1/maxCompress, maxCompress) // NaN, too
	f.If(o.Copies < 1 || o.Copies > maxCopies, "copies: %d, want 1 .. %d", o.Copies, maxCopies)
	f.If(o.From < 0 || o.To < 0 || o.To != 0 && o.To <= o.From, "range: from %v to %v, want 0 <= from < to", o.From, o.To)
	f.If(o.Spread < 0 || o.Spread > maxSpread, "spread: %v, want 0 .. %v", o.Spread, maxSpread)
	return f.Err()
}

// Replay is a trace as a schedule. A Replay is immutable, and all its streams yield the
// same events.
type Replay struct {
	options Options
	events  []event // events of the range, with renumbered publishers and times from the range's start
	shared  []bool  // by event: another event has the same stamp
	span    time.Duration
	sources []schedule.Source
	base    int // number of publishers in the range
}

// Replay selects the range and numbers its publishers. Replay fails if an option is
// invalid, if the range has no event, or if the id of a copy is too long or not unique.
func (t *Trace) Replay(o Options) (*Replay, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	end := o.To
	if end == 0 {
		// The last stamp covers one tick.
		end = t.Last() + max(o.Spread, 1)
	}
	first := sort.Search(len(t.events), func(i int) bool { return t.events[i].at >= o.From })
	last := sort.Search(len(t.events), func(i int) bool { return t.events[i].at >= end })
	if first >= last {
		return nil, fmt.Errorf("no event between %v and %v: the last one is at %v", o.From, end, t.Last())
	}
	r := &Replay{options: o, span: end - o.From}
	number := make([]int32, len(t.publishers)) // new number + 1
	var counts []int
	var selected []Publisher
	for _, e := range t.events[first:last] {
		if number[e.publisher] == 0 {
			selected = append(selected, t.publishers[e.publisher])
			counts = append(counts, 0)
			number[e.publisher] = int32(len(selected))
		}
		n := number[e.publisher] - 1
		counts[n]++
		r.events = append(r.events, event{e.at - o.From, n, e.size})
	}
	r.base = len(selected)
	r.shared = make([]bool, len(r.events))
	for i := 1; i < len(r.events); i++ {
		if r.events[i].at == r.events[i-1].at {
			r.shared[i-1], r.shared[i] = true, true
		}
	}
	if int64(r.base)*int64(o.Copies) > MaxPublishers {
		return nil, fmt.Errorf("copies: %d of %d publishers are more than %d", o.Copies, r.base, MaxPublishers)
	}
	if err := r.number(selected, counts); err != nil {
		return nil, err
	}
	return r, nil
}

// number creates the sources of all copies.
func (r *Replay) number(kept []Publisher, counts []int) error {
	seen := make(map[string]bool, len(kept)*r.options.Copies)
	for c := range r.options.Copies {
		suffix := ""
		if c > 0 {
			suffix = fmt.Sprintf("#%d", c)
		}
		for i, p := range kept {
			s := schedule.Source{ID: p.ID + suffix, Key: p.Key, Batch: 1}
			s.Rate = float64(counts[i]) / r.span.Seconds() * r.options.Compress
			if p.Key != "" {
				s.Key += suffix
			}
			if len(s.ID) > MaxName || len(s.Key) > MaxName {
				return fmt.Errorf("copies: publisher %q of key %q: with the suffix %s a name is longer than %d bytes", p.ID, p.Key, suffix, MaxName)
			}
			if seen[s.ID] {
				return fmt.Errorf("copies: two publishers would have the id %q", s.ID)
			}
			seen[s.ID] = true
			r.sources = append(r.sources, s)
		}
	}
	return nil
}

// Sources returns the publishers of all copies, ordered by number, copy 0 first. The caller
// must not modify the slice.
func (r *Replay) Sources() []schedule.Source { return r.sources }

// Span is the length of the replay.
func (r *Replay) Span() time.Duration {
	return time.Duration(float64(r.span) / r.options.Compress)
}

// Stream returns the events of all copies. The stream ends after one pass.
func (r *Replay) Stream() schedule.Stream {
	m := &merged{}
	for c := range r.options.Copies {
		s := newCopy(r, c)
		if s.prime() {
			m.copies = append(m.copies, s)
		}
	}
	m.copies.Init()
	return m
}

// moved is a rotated and spread event of one copy, before compression.
type moved struct {
	at     time.Duration
	order  int // order of reading, for equal times
	source int32
	size   int32
}

// rotated yields the events of one copy in time order. Spread reorders neighbours, so an
// event waits in pending until no later event can precede it.
type rotated struct {
	r     *Replay
	shift time.Duration
	copy  int
	rng   rand.PCG
	start int // first event at or after shift
	read  int // number of events read from start on, wrapping
	// pending is sorted by (at, order), descending.
	pending []moved
	next    moved // next event, while in merged
}

func newCopy(r *Replay, c int) *rotated {
	s := &rotated{r: r, copy: c}
	s.shift = time.Duration(float64(r.span) * float64(c) / float64(r.options.Copies))
	s.start = sort.Search(len(r.events), func(i int) bool { return r.events[i].at >= s.shift })
	s.rng.Seed(r.options.Seed, uint64(c))
	return s
}

// base returns the next event to read, before Spread.
func (s *rotated) base() (index int, at time.Duration) {
	index = s.start + s.read
	if index < len(s.r.events) {
		return index, s.r.events[index].at - s.shift
	}
	index -= len(s.r.events)
	return index, s.r.events[index].at - s.shift + s.r.span
}

// prime moves the copy's next event to s.next. It returns false at the end.
func (s *rotated) prime() bool {
	for s.read < len(s.r.events) {
		index, at := s.base()
		if n := len(s.pending); n > 0 && s.pending[n-1].at < at {
			break
		}
		s.read++
		e := s.r.events[index]
		if s.r.shared[index] && s.r.options.Spread > 0 {
			at += time.Duration(rand.New(&s.rng).Int64N(int64(s.r.options.Spread)))
		}
		s.wait(moved{at, s.read, e.publisher + int32(s.copy*s.r.base), e.size})
	}
	if len(s.pending) == 0 {
		return false
	}
	s.next = s.pending[len(s.pending)-1]
	s.pending = s.pending[:len(s.pending)-1]
	return true
}

// wait inserts an event into pending. Few events share a tick, so insertion is cheaper than
// a heap, which would allocate for each event.
func (s *rotated) wait(e moved) {
	i, _ := slices.BinarySearchFunc(s.pending, e, func(a, b moved) int {
		return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(b.order, a.order))
	})
	s.pending = slices.Insert(s.pending, i, e)
}

// Before orders copies by their next events.
func (s *rotated) Before(o *rotated) bool {
	return s.next.at < o.next.at || s.next.at == o.next.at && s.copy < o.copy
}

// merged yields the events of all copies.
type merged struct{ copies container.Heap[*rotated] }

// Next implements schedule.Stream.
func (m *merged) Next() (schedule.Event, bool) {
	if len(m.copies) == 0 {
		return schedule.Event{}, false
	}
	s := m.copies[0]
	e := schedule.Event{
		At:     time.Duration(math.Round(float64(s.next.at) / s.r.options.Compress)),
		Source: s.next.source, Count: 1, Size: s.next.size,
	}
	if s.prime() {
		m.copies.Fix()
	} else {
		m.copies.Pop()
	}
	return e, true
}
