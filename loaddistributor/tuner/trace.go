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

// Piece is what one broker says at once; srtmv1.Arrivals has the meaning of each
// field.
type Piece struct {
	First      bool
	Publishers []string
	Start      mono.Wall
	Gaps       []uint64
	From       []uint32
	Lost       uint64
}

// Bounds of what a broker may say, and of what is kept. A piece is normally a
// quarter of a second.
const (
	MaxMessages   = 1 << 18          // of one piece
	MaxPublishers = 2 << 20          // that one broker names
	MaxPending    = 1 << 19          // arrivals that have not been taken yet; 8 MB
	MaxAway       = 10 * time.Second // a piece's times from when it came
)

const (
	// Slack is how long after a piece the trace is thought to be complete: a
	// connection that is read late says late when its messages arrived, and clocks
	// differ a little.
	Slack = 500 * time.Millisecond
	// Silence is how long a broker may say nothing before the others do not wait
	// for it any more.
	Silence = 2 * time.Second
	// unknownPart is how much of a piece may be of publishers that the topic does
	// not have.
	unknownPart = 0.01
)

// Trace merges the records of a topic's brokers. Make it with NewTrace.
//
// Invariant: what Take returns is in order of time, over all calls.
type Trace struct {
	// Set once.
	origin mono.Wall
	index  func(id string) (int, bool)

	feeds   map[string]*feed // by broker, those that are expected
	pending []stamped
	holes   []span    // not in order; few, since one that goes on is one
	taken   mono.Wall // nothing before is given out any more
	counts  Counts
}

// feed is one broker's record.
type feed struct {
	begun bool    // its first piece has come
	index []int32 // of the publishers it has named; -1: not one of the topic's
	heard mono.Wall
}

type stamped struct {
	at        mono.Wall
	publisher int32
}

// span is a time [from, to) in which something is missing.
type span struct{ from, to mono.Wall }

// Counts are what became of messages and pieces.
type Counts struct {
	// Captured went into the trace, Unknown are of publishers that the topic does
	// not have, Lost were not recorded or came when there was no room, Late came
	// after their time had been taken, and Holed were left out with a hole.
	Captured, Unknown, Lost, Late, Holed uint64
	// Refused is how many pieces were.
	Refused uint64
}

// PieceError says what is wrong with a piece.
type PieceError struct{ Field, Problem string }

func (e *PieceError) Error() string { return e.Field + ": " + e.Problem }

// NewTrace returns a trace that begins at origin, which is its time 0. index says which
// of the topic's publishers has the id.
func NewTrace(origin mono.Wall, index func(id string) (int, bool)) *Trace {
	return &Trace{origin: origin, taken: origin, index: index, feeds: map[string]*feed{}}
}

// Expect says which brokers receive messages from now on. Until one that is new
// has begun to speak, the trace has a hole.
func (t *Trace) Expect(brokers []string, now mono.Wall) {
	for _, id := range slices.Sorted(maps.Keys(t.feeds)) {
		if !slices.Contains(brokers, id) {
			delete(t.feeds, id)
		}
	}
	for _, id := range brokers {
		if t.feeds[id] == nil {
			t.feeds[id] = &feed{heard: now}
		}
	}
}

// Begun reports whether every one of the brokers has begun to speak.
func (t *Trace) Begun(brokers ...string) bool {
	return !slices.ContainsFunc(brokers, func(id string) bool { return t.feeds[id] == nil || !t.feeds[id].begun })
}

// Skip leaves out what came before now and has not been taken.
func (t *Trace) Skip(now mono.Wall) {
	t.taken = max(t.taken, now)
	t.pending = slices.DeleteFunc(t.pending, func(a stamped) bool { return a.at < t.taken })
	t.holes = slices.DeleteFunc(t.holes, func(s span) bool { return s.to <= t.taken })
}

// Taken returns until when all that was recorded was taken.
func (t *Trace) Taken() mono.Time { return mono.Time(t.taken - t.origin) }

// Counts returns what happened so far.
func (t *Trace) Counts() Counts { return t.counts }

// Add takes a piece that came now. On an error, an *PieceError, nothing of it counts,
// and the broker's record is over until another first piece: its numbers cannot be
// trusted any more. A piece of a broker that is not expected is ignored.
func (t *Trace) Add(broker string, p Piece, now mono.Wall) error {
	f := t.feeds[broker]
	if f == nil {
		return nil
	}
	if err := f.check(p, now); err != nil {
		t.counts.Refused++
		f.begun, f.index = false, nil // and from heard on there is a hole
		return err
	}
	if p.First {
		f.begun, f.index = true, nil
		t.hole(f.heard, now)
	}
	for _, id := range p.Publishers {
		i, known := t.index(id)
		if !known {
			i = -1
		}
		f.index = append(f.index, int32(i))
	}
	at, last := p.Start, now
	unknown, room := uint64(0), MaxPending-len(t.pending)
	for n, gap := range p.Gaps {
		at += mono.Wall(gap)
		i := f.index[p.From[n]]
		switch {
		case i < 0:
			unknown++
		case at < t.taken:
			t.counts.Late++
		case room == 0:
			p.Lost++
		default:
			room--
			t.pending = append(t.pending, stamped{at, i})
		}
		last = max(last, at)
	}
	t.counts.Unknown += unknown
	t.counts.Lost += p.Lost
	if p.Lost > 0 || float64(unknown) > unknownPart*float64(len(p.Gaps)) {
		t.hole(f.heard, last+1)
	}
	f.heard = now
	return nil
}

// check changes nothing.
func (f *feed) check(p Piece, now mono.Wall) error {
	bad := func(field, format string, args ...any) error {
		return &PieceError{field, fmt.Sprintf(format, args...)}
	}
	named := len(p.Publishers)
	if !p.First {
		named += len(f.index)
	}
	switch {
	case !p.First && !f.begun:
		return bad("first", "the record has not begun")
	case len(p.Gaps) != len(p.From):
		return bad("publisher", "%d for %d messages", len(p.From), len(p.Gaps))
	case len(p.Gaps) > MaxMessages:
		return bad("gap_ns", "%d messages, at most %d", len(p.Gaps), MaxMessages)
	case named > MaxPublishers:
		return bad("publishers", "%d, at most %d", named, MaxPublishers)
	case p.Lost > 1<<48:
		return bad("lost", "%d", p.Lost)
	case len(p.Gaps) == 0:
		return nil
	case p.Gaps[0] != 0:
		return bad("gap_ns[0]", "%d: want 0", p.Gaps[0])
	}
	end := p.Start
	for n, gap := range p.Gaps {
		if gap > uint64(MaxAway) || end > math.MaxInt64-mono.Wall(gap) {
			return bad(fmt.Sprintf("gap_ns[%d]", n), "%d", gap)
		}
		end += mono.Wall(gap)
		if int64(p.From[n]) >= int64(named) {
			return bad(fmt.Sprintf("publisher[%d]", n), "%d of %d", p.From[n], named)
		}
	}
	if p.Start <= 0 || away(p.Start, now) > MaxAway || away(end, now) > MaxAway {
		return bad("start_ns", "messages of %v to %v before they came, at most %v away: the clocks differ", span{p.Start, now}, span{end, now}, MaxAway)
	}
	return nil
}

func (s span) String() string { return time.Duration(s.to - s.from).String() }

// away is how far apart two times are. Requires: now > 0.
func away(at, now mono.Wall) time.Duration {
	if at <= 0 {
		return math.MaxInt64
	}
	return time.Duration(max(at-now, now-at))
}

func (t *Trace) hole(from, to mono.Wall) {
	if from >= to || to <= t.taken {
		return
	}
	i := slices.IndexFunc(t.holes, func(s span) bool { return from <= s.to && to >= s.from })
	if i >= 0 {
		t.holes[i] = span{min(t.holes[i].from, from), max(t.holes[i].to, to)}
	} else {
		t.holes = append(t.holes, span{from, to})
	}
}

// Take returns what is known to be complete and has not been taken yet, in order of
// time.
func (t *Trace) Take(now mono.Wall) []Arrival {
	until := now
	// order: the least of all
	for _, f := range t.feeds {
		if now-f.heard > mono.Wall(Silence) {
			t.hole(f.heard, now)
			continue
		}
		until = min(until, f.heard)
	}
	until -= mono.Wall(Slack)
	if until <= t.taken {
		return nil
	}
	slices.SortStableFunc(t.pending, func(a, b stamped) int { return cmp.Compare(a.at, b.at) })
	n, _ := slices.BinarySearchFunc(t.pending, until, func(a stamped, at mono.Wall) int { return cmp.Compare(a.at, at) })
	slices.SortFunc(t.holes, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	taken := make([]Arrival, 0, n)
	h, closed := 0, mono.Wall(0) // nothing before closed is known
	for _, a := range t.pending[:n] {
		for h < len(t.holes) && t.holes[h].from <= a.at {
			closed = max(closed, t.holes[h].to)
			h++
		}
		if a.at < closed {
			t.counts.Holed++
			continue
		}
		taken = append(taken, Arrival{At: mono.Time(a.at - t.origin), Publisher: a.publisher})
	}
	t.counts.Captured += uint64(len(taken))
	t.pending = slices.Delete(t.pending, 0, n)
	t.taken = until
	t.holes = slices.DeleteFunc(t.holes, func(s span) bool { return s.to <= until })
	return taken
}
