package tuner

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Piece is one message of a broker's record. srtmv1.Arrivals explains each field.
type Piece struct {
	First      bool
	Publishers []string
	Start      mono.Wall
	Gaps       []uint64
	From       []uint32
	Lost       uint64
}

// Bounds of a broker's record and of the memory. A piece is normally a quarter of a
// second.
const (
	MaxMessages   = 1 << 18          // per piece
	MaxPublishers = 2 << 20          // named by one broker
	MaxPending    = 1 << 19          // arrivals not taken yet; 8 MB
	MaxAway       = 10 * time.Second // between a piece's times and its receipt
)

const (
	// Slack is the delay after a piece until the trace counts as complete. A connection
	// that is read late reports its arrivals late, and clocks differ a little.
	Slack = 500 * time.Millisecond
	// Silence is the time after which the other brokers no longer wait for a silent
	// broker.
	Silence = 2 * time.Second
	// unknownPart is the maximum part of a piece from publishers outside the topic.
	unknownPart = 0.01
)

// Trace merges the records of a topic's brokers. Make it with NewTrace.
//
// Invariant: the arrivals returned by all calls of Take are in order of time.
type Trace struct {
	// Set by NewTrace.
	origin mono.Wall
	index  func(id string) (int, bool)

	records    map[string]*record // expected brokers
	pending    []stamped
	holes      []span    // not in order; few, since adjacent holes are merged
	takenUntil mono.Wall // arrivals before takenUntil are no longer returned
	counts     Counts
}

// record is the record of one broker.
type record struct {
	started   bool    // the first piece has come
	index     []int32 // of the publishers that it has named; -1: not in the topic
	lastPiece mono.Wall
}

type stamped struct {
	time      mono.Wall
	publisher int32
}

// span is a time [from, to) with missing arrivals.
type span struct{ from, to mono.Wall }

// Counts counts messages and pieces.
type Counts struct {
	// Captured went into the trace. Unknown came from publishers outside the topic. Lost
	// were not recorded or found no room. Late came after their time was taken. Holed
	// were dropped with a hole.
	Captured, Unknown, Lost, Late, Holed uint64
	// Refused counts refused pieces.
	Refused uint64
}

// PieceError explains an invalid piece.
type PieceError struct{ Field, Problem string }

func (e *PieceError) Error() string { return e.Field + ": " + e.Problem }

// NewTrace returns a trace that begins at origin, its time 0. index returns the number of
// the topic's publisher with the id.
func NewTrace(origin mono.Wall, index func(id string) (int, bool)) *Trace {
	return &Trace{origin: origin, takenUntil: origin, index: index, records: map[string]*record{}}
}

// Expect sets the brokers that receive messages from now on. Until a new broker has
// started recording, the trace has a hole.
func (t *Trace) Expect(brokers []string, now mono.Wall) {
	for _, id := range slices.Sorted(maps.Keys(t.records)) {
		if !slices.Contains(brokers, id) {
			delete(t.records, id)
		}
	}
	for _, id := range brokers {
		if t.records[id] == nil {
			t.records[id] = &record{lastPiece: now}
		}
	}
}

// Started reports whether all of the brokers have started recording.
func (t *Trace) Started(brokers ...string) bool {
	return !slices.ContainsFunc(brokers, func(id string) bool { return t.records[id] == nil || !t.records[id].started })
}

// Skip drops all arrivals before now that were not taken.
func (t *Trace) Skip(now mono.Wall) {
	t.takenUntil = max(t.takenUntil, now)
	t.pending = slices.DeleteFunc(t.pending, func(a stamped) bool { return a.time < t.takenUntil })
	t.holes = slices.DeleteFunc(t.holes, func(s span) bool { return s.to <= t.takenUntil })
}

// TakenUntil returns the time up to which all recorded arrivals were taken.
func (t *Trace) TakenUntil() mono.Time { return mono.Time(t.takenUntil - t.origin) }

// Counts returns the counts so far.
func (t *Trace) Counts() Counts { return t.counts }

// Add adds a piece received now. On an error, a *PieceError, Add ignores the piece and
// ends the broker's record until the next first piece, because the record's numbers are
// no longer reliable. Add ignores pieces of unexpected brokers.
func (t *Trace) Add(broker string, p Piece, now mono.Wall) error {
	f := t.records[broker]
	if f == nil {
		return nil
	}
	if err := f.check(p, now); err != nil {
		t.counts.Refused++
		f.started, f.index = false, nil // from lastPiece on there is a hole
		return err
	}
	if p.First {
		f.started, f.index = true, nil
		t.hole(f.lastPiece, now)
	}
	for _, id := range p.Publishers {
		i, found := t.index(id)
		if !found {
			i = -1
		}
		f.index = append(f.index, int32(i))
	}
	arrival, last := p.Start, now
	unknown, room := uint64(0), MaxPending-len(t.pending)
	for n, gap := range p.Gaps {
		arrival += mono.Wall(gap)
		i := f.index[p.From[n]]
		switch {
		case i < 0:
			unknown++
		case arrival < t.takenUntil:
			t.counts.Late++
		case room == 0:
			p.Lost++
		default:
			room--
			t.pending = append(t.pending, stamped{arrival, i})
		}
		last = max(last, arrival)
	}
	t.counts.Unknown += unknown
	t.counts.Lost += p.Lost
	if p.Lost > 0 || float64(unknown) > unknownPart*float64(len(p.Gaps)) {
		t.hole(f.lastPiece, last+1)
	}
	f.lastPiece = now
	return nil
}

// check validates a piece and changes nothing.
func (f *record) check(p Piece, now mono.Wall) error {
	invalid := func(field, format string, args ...any) error {
		return &PieceError{field, fmt.Sprintf(format, args...)}
	}
	named := len(p.Publishers)
	if !p.First {
		named += len(f.index)
	}
	switch {
	case !p.First && !f.started:
		return invalid("first", "the record has not begun")
	case len(p.Gaps) != len(p.From):
		return invalid("publisher", "%d for %d messages", len(p.From), len(p.Gaps))
	case len(p.Gaps) > MaxMessages:
		return invalid("gap_ns", "%d messages, at most %d", len(p.Gaps), MaxMessages)
	case named > MaxPublishers:
		return invalid("publishers", "%d, at most %d", named, MaxPublishers)
	case p.Lost > 1<<48:
		return invalid("lost", "%d", p.Lost)
	case len(p.Gaps) == 0:
		return nil
	case p.Gaps[0] != 0:
		return invalid("gap_ns[0]", "%d: want 0", p.Gaps[0])
	}
	end := p.Start
	for n, gap := range p.Gaps {
		if gap > uint64(MaxAway) || end > math.MaxInt64-mono.Wall(gap) {
			return invalid(fmt.Sprintf("gap_ns[%d]", n), "%d", gap)
		}
		end += mono.Wall(gap)
		if int64(p.From[n]) >= int64(named) {
			return invalid(fmt.Sprintf("publisher[%d]", n), "%d of %d", p.From[n], named)
		}
	}
	if p.Start <= 0 || distance(p.Start, now) > MaxAway || distance(end, now) > MaxAway {
		return invalid("start_ns", "messages of %v to %v before they came, at most %v away: the clocks differ", span{p.Start, now}, span{end, now}, MaxAway)
	}
	return nil
}

func (s span) String() string { return time.Duration(s.to - s.from).String() }

// distance returns the distance between two times. Requires: now > 0.
func distance(t, now mono.Wall) time.Duration {
	if t <= 0 {
		return math.MaxInt64
	}
	return time.Duration(max(t-now, now-t))
}

func (t *Trace) hole(from, to mono.Wall) {
	if from >= to || to <= t.takenUntil {
		return
	}
	i := slices.IndexFunc(t.holes, func(s span) bool { return from <= s.to && to >= s.from })
	if i >= 0 {
		t.holes[i] = span{min(t.holes[i].from, from), max(t.holes[i].to, to)}
	} else {
		t.holes = append(t.holes, span{from, to})
	}
}

// Take returns the arrivals that are complete and were not taken yet, in order of time.
func (t *Trace) Take(now mono.Wall) []Arrival {
	complete := now
	// order: the minimum of all
	for _, f := range t.records {
		if now-f.lastPiece > mono.Wall(Silence) {
			t.hole(f.lastPiece, now)
			continue
		}
		complete = min(complete, f.lastPiece)
	}
	complete -= mono.Wall(Slack)
	if complete <= t.takenUntil {
		return nil
	}
	slices.SortStableFunc(t.pending, func(a, b stamped) int { return cmp.Compare(a.time, b.time) })
	n, _ := slices.BinarySearchFunc(t.pending, complete, func(a stamped, at mono.Wall) int { return cmp.Compare(a.time, at) })
	slices.SortFunc(t.holes, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	arrivals := make([]Arrival, 0, n)
	h, closed := 0, mono.Wall(0) // arrivals before closed are unknown
	for _, a := range t.pending[:n] {
		for h < len(t.holes) && t.holes[h].from <= a.time {
			closed = max(closed, t.holes[h].to)
			h++
		}
		if a.time < closed {
			t.counts.Holed++
			continue
		}
		arrivals = append(arrivals, Arrival{At: mono.Time(a.time - t.origin), Publisher: a.publisher})
	}
	t.counts.Captured += uint64(len(arrivals))
	t.pending = slices.Delete(t.pending, 0, n)
	t.takenUntil = complete
	t.holes = slices.DeleteFunc(t.holes, func(s span) bool { return s.to <= complete })
	return arrivals
}
