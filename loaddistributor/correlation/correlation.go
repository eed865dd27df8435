package correlation

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	// Quiet is the silence after which a message is a new firing.
	Quiet = 5 * time.Millisecond
	// Firings of a publisher are kept, those of the last Horizon.
	Firings = 128
	Horizon = 8 * time.Hour
	// Settled is how many firings it takes to lose a group.
	Settled = 32
	// Mature groups, of so many learnings, do not join each other.
	Mature = 8
	// Significance is the probability of finding any group among publishers that are
	// independent, in one learning.
	Significance = 0.01
	// MaxPublishers bounds Config.Publishers, and MaxID is the length of an id in bytes.
	MaxPublishers = 1 << 17
	MaxID         = 256
	// BytesPerPublisher bounds what is kept of a publisher, its id apart.
	BytesPerPublisher = 1024
)

// unit is 2^shift ns: times are kept in units since the first arrival.
const shift = 14

const (
	quiet   = int64(Quiet) >> shift
	horizon = int64(Horizon) >> shift
	// setBack is how far time may go back before it is thought to have been set.
	setBack = int64(time.Minute) >> shift
)

// Config says how much is kept.
type Config struct {
	// Publishers that are followed at once, at most MaxPublishers, which 0 means. When there are
	// more, one that is in no group, has fired least and was heard longest ago makes
	// room, of some that are looked at; where all are in groups, the new one is not
	// followed.
	Publishers int
}

// Learner learns the groups of one topic. Make it with New. It is not safe for
// concurrent use.
type Learner struct {
	// Set once.
	most int

	begun      bool
	origin     mono.Time
	now        int64            // latest arrival, units from origin
	index      map[string]int32 // of publishers, by id
	publishers []*publisher
	hand       int // where room was looked for last
	counts     Counts

	turn   uint64 // learnings so far
	next   uint64 // number of the next label
	groups []Group
}

// publisher is one publisher's record. A slot is reused.
type publisher struct {
	id    string
	heard int64 // latest message
	fired int64 // latest firing, the newest of ring
	n     int   // firings so far, those beyond the last Firings forgotten
	ring  [Firings]uint32
	// busy ends with window, the latest with a message; what was before since is not known.
	busy          busy
	window, since int64
	// group is the number of its label, 0 for none; joined is the learning in which
	// it came there.
	group, joined uint64
}

// Counts are what became of messages and publishers, since New.
type Counts struct {
	// Messages arrived, Firings they made; Untracked are messages of publishers for
	// which there was no room, Late came out of order and counted as at the latest
	// time, Evicted is how many publishers made room for another.
	Messages, Firings, Untracked, Late, Evicted uint64
}

// Group is publishers that fire together.
type Group struct {
	// Label is its key, the same from one learning to the next, and not used again
	// for another group of this Learner. At most 28 bytes.
	Label string
	// Since is the learning, from 1, in which the label was given.
	Since uint64
	// Members in order of their ids, at least two.
	Members []Member

	number uint64
}

// Member is a publisher in a group, with the evidence: of its last Firings firings that
// could be compared with those of the group's oldest member (the oldest with those of
// the next), Joint were within Width, where chance would have Expected, the regularity of
// clocks apart. They are 0 where it keeps its group for want of evidence.
type Member struct {
	ID       string
	Joined   uint64 // the learning in which it came to the group
	Firings  int
	Joint    int
	Expected float64
	Width    time.Duration
}

// New returns a learner that knows nothing. Requires: cfg.Publishers is within its bounds.
func New(cfg Config) *Learner {
	return &Learner{most: cmp.Or(cfg.Publishers, MaxPublishers), index: map[string]int32{}, next: 1}
}

// Arrive takes a message of a publisher. Times are in order; one that is not counts
// as the latest before it, but if it is a minute behind, time was set, and all firings
// are forgotten; groups are not. An id longer than MaxID or of invalid UTF-8 is not
// followed.
func (l *Learner) Arrive(id string, at mono.Time) {
	l.counts.Messages++
	if !l.begun {
		l.begun, l.origin = true, at
	}
	t := int64(at-l.origin) >> shift
	if t < l.now {
		if l.now-t > setBack {
			l.forget(at)
		} else {
			l.counts.Late++
		}
		t = l.now
	}
	l.now = t
	slot, known := l.index[id]
	if !known {
		if slot = l.admit(id); slot < 0 {
			l.counts.Untracked++
			return
		}
	}
	p := l.publishers[slot]
	p.send(t)
	fires := p.n == 0 || t-p.heard >= quiet
	p.heard = t
	if !fires {
		return
	}
	if t-p.fired > horizon {
		p.n = 0
	}
	p.ring[p.n%Firings] = uint32(t)
	p.n++
	p.fired = t
	l.counts.Firings++
}

// forget begins anew at a time, with the groups known.
func (l *Learner) forget(at mono.Time) {
	l.origin, l.now = at, 0
	for _, p := range l.publishers {
		p.n, p.heard, p.fired = 0, 0, 0
	}
}

// sound reports whether a publisher of that id can be followed.
func sound(id string) bool { return len(id) > 0 && len(id) <= MaxID && utf8.ValidString(id) }

// looked is how many slots are looked at to make room for one.
const looked = 16

// admit returns a slot for a new publisher, or -1.
func (l *Learner) admit(id string) int32 {
	if !sound(id) {
		return -1
	}
	slot := int32(len(l.publishers))
	if len(l.publishers) < l.most {
		l.publishers = append(l.publishers, &publisher{})
	} else {
		slot = -1
		var worst *publisher
		for range min(looked, l.most) {
			l.hand = (l.hand + 1) % l.most
			p := l.publishers[l.hand]
			if p.group != 0 && l.now-p.heard <= horizon {
				continue
			}
			if worst == nil || cmp.Or(cmp.Compare(min(p.group, 1), min(worst.group, 1)), cmp.Compare(min(p.n, Settled), min(worst.n, Settled)), cmp.Compare(p.heard, worst.heard)) < 0 {
				slot, worst = int32(l.hand), p
			}
		}
		if slot < 0 {
			return -1
		}
		delete(l.index, worst.id)
		*worst = publisher{}
		l.counts.Evicted++
	}
	l.publishers[slot].id = id
	l.index[id] = slot
	return slot
}

// Counts returns what happened so far.
func (l *Learner) Counts() Counts { return l.counts }

// Publishers returns how many are followed.
func (l *Learner) Publishers() int { return len(l.publishers) }

// Groups returns what the latest learning, or Restore, came to, the oldest first. The
// caller must not change it; the next learning does not either.
func (l *Learner) Groups() []Group { return l.groups }

// Key returns the label of a publisher's group, or "".
func (l *Learner) Key(id string) string {
	if slot, known := l.index[id]; known && l.publishers[slot].group != 0 {
		return label(l.publishers[slot].group)
	}
	return ""
}

// prefix begins labels.
const prefix = "learned-"

func label(number uint64) string { return prefix + strconv.FormatUint(number, 10) }

// Restore returns a learner that goes on with groups: labels has that of each publisher, by
// id, as Key returned it. They have one learning behind them, and members keep them until
// they have fired Settled times. What is no label, nor of a group of two, is left out, and
// where there are more than cfg.Publishers, the youngest groups are.
func Restore(cfg Config, labels map[string]string) *Learner {
	l := New(cfg)
	l.turn = 1
	by := map[uint64][]string{}
	for _, id := range slices.Sorted(maps.Keys(labels)) {
		number, err := strconv.ParseUint(strings.TrimPrefix(labels[id], prefix), 10, 32)
		if err == nil && number > 0 && labels[id] == label(number) && sound(id) {
			by[number] = append(by[number], id)
			l.next = max(l.next, number+1)
		}
	}
	for _, number := range slices.Sorted(maps.Keys(by)) {
		if len(by[number]) < 2 {
			continue
		}
		if len(l.publishers)+len(by[number]) > l.most {
			break
		}
		for _, id := range by[number] {
			p := l.publishers[l.admit(id)]
			p.group, p.joined = number, l.turn
		}
	}
	since := map[uint64]uint64{}
	// order: each by itself
	for number := range by {
		since[number] = l.turn
	}
	l.settle(since)
	return l
}

// byAge: the oldest label first.
func byAge(a, b Group) int { return cmp.Compare(a.number, b.number) }

// settle makes groups of the publishers' labels; evidence is put in by the caller.
func (l *Learner) settle(since map[uint64]uint64) {
	by := map[uint64]*Group{}
	var groups []Group
	for _, p := range l.publishers {
		if p.group == 0 {
			continue
		}
		g := by[p.group]
		if g == nil {
			g = &Group{Label: label(p.group), Since: since[p.group], number: p.group}
			by[p.group] = g
		}
		g.Members = append(g.Members, Member{ID: p.id, Joined: p.joined})
	}
	// order: sorted below
	for _, g := range by {
		if len(g.Members) < 2 {
			p := l.publishers[l.index[g.Members[0].ID]]
			p.group, p.joined = 0, 0
			continue
		}
		slices.SortFunc(g.Members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
		groups = append(groups, *g)
	}
	slices.SortFunc(groups, byAge)
	l.groups = groups
}
