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
	// Firings is the number of firings kept per publisher, all from the last Horizon.
	Firings = 128
	Horizon = 8 * time.Hour
	// Settled is the number of firings after which a publisher can lose its group.
	Settled = 32
	// Mature is the number of learnings after which two groups no longer join each other.
	Mature = 8
	// Significance is the probability that one learning finds any group among independent
	// publishers.
	Significance = 0.01
	// MaxPublishers bounds Config.Publishers, and MaxID is the length of an id in bytes.
	MaxPublishers = 1 << 17
	MaxID         = 256
	// BytesPerPublisher bounds the memory of a publisher, without its id.
	BytesPerPublisher = 1024
)

// shift defines the unit of time, 2^shift ns. Times are in units since the first arrival.
const shift = 14

const (
	quiet   = int64(Quiet) >> shift
	horizon = int64(Horizon) >> shift
	// setBack is the backward step of time from which the learner assumes that the clock
	// was set.
	setBack = int64(time.Minute) >> shift
)

// Config bounds a Learner.
type Config struct {
	// Publishers is the maximum number of publishers followed at once, at most
	// MaxPublishers; 0 means MaxPublishers. When the table is full, the learner samples
	// some slots. It evicts the sampled publisher with the fewest firings, of equals the
	// longest silent publisher. It spares members of groups until they are silent for
	// Horizon. If all sampled publishers are spared, the learner does not follow the new
	// publisher.
	Publishers int
}

// Learner learns the groups of one topic. Make it with New. It is not safe for
// concurrent use.
type Learner struct {
	// Set by New.
	maxPublishers int

	started    bool
	origin     mono.Time
	now        int64            // time of the latest arrival, units from origin
	index      map[string]int32 // publishers by id
	publishers []*publisher
	hand       int // where the last search for room ended
	counts     Counts

	learning uint64 // learnings so far
	next     uint64 // number of the next label
	groups   []Group
}

// publisher is one publisher's record. A slot is reused.
type publisher struct {
	id          string
	lastMessage int64 // time of the latest message
	fired       int64 // time of the latest firing, the newest entry of ring
	n           int   // firings so far; ring keeps the last Firings of them
	ring        [Firings]uint32
	// busy ends with window, the latest window with a message. Windows before since are
	// unknown.
	busy          busy
	window, since int64
	// group is the number of the group's label, 0 for none. joined is the learning in
	// which the publisher joined the group.
	group, joined uint64
}

// Counts counts messages and publishers since New.
type Counts struct {
	// Messages arrived and made Firings. Untracked messages came from publishers without a
	// slot. Late messages arrived out of order and count as arrived at the latest time.
	// Evicted publishers made room for another publisher.
	Messages, Firings, Untracked, Late, Evicted uint64
}

// Group is a set of publishers that fire together.
type Group struct {
	// Label is the group's key. It stays the same from one learning to the next, and the
	// Learner never reuses it for another group. At most 28 bytes.
	Label string
	// Since is the learning, from 1, that assigned the label.
	Since uint64
	// Members are sorted by id. There are at least two.
	Members []Member

	number uint64
}

// Member is a publisher in a group, with its evidence. The member's last firings were
// compared with the firings of the group's oldest member, and the oldest member's with
// the next oldest. Firings is the number of comparable firings, at most the constant
// Firings. Joint of them were within Width, where chance predicts Expected, without the
// regularity of clocks. All four are 0 if the member keeps its group only for lack of
// evidence.
type Member struct {
	ID       string
	Joined   uint64 // learning in which the publisher joined the group
	Firings  int
	Joint    int
	Expected float64
	Width    time.Duration
}

// New returns a learner without groups. Requires: cfg.Publishers is within its bounds.
func New(cfg Config) *Learner {
	return &Learner{maxPublishers: cmp.Or(cfg.Publishers, MaxPublishers), index: map[string]int32{}, next: 1}
}

// Arrive records a message of a publisher. Times should ascend. A late message counts as
// arrived at the latest time. If the message is a minute or more late, the clock was set:
// the learner forgets all firings but keeps the groups. The learner ignores an id longer
// than MaxID or with invalid UTF-8.
func (l *Learner) Arrive(id string, now mono.Time) {
	l.counts.Messages++
	if !l.started {
		l.started, l.origin = true, now
	}
	t := int64(now-l.origin) >> shift
	if t < l.now {
		if l.now-t > setBack {
			l.forget(now)
		} else {
			l.counts.Late++
		}
		t = l.now
	}
	l.now = t
	slot, found := l.index[id]
	if !found {
		if slot = l.admit(id); slot < 0 {
			l.counts.Untracked++
			return
		}
	}
	p := l.publishers[slot]
	p.send(t)
	fires := p.n == 0 || t-p.lastMessage >= quiet
	p.lastMessage = t
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

// forget drops all firings and keeps the groups. Time restarts at now.
func (l *Learner) forget(now mono.Time) {
	l.origin, l.now = now, 0
	for _, p := range l.publishers {
		p.n, p.lastMessage, p.fired = 0, 0, 0
	}
}

// sound reports whether the id is valid for a publisher.
func sound(id string) bool { return len(id) > 0 && len(id) <= MaxID && utf8.ValidString(id) }

// sampledSlots is the number of slots sampled to make room for a publisher.
const sampledSlots = 16

// admit returns a slot for a new publisher, or -1.
func (l *Learner) admit(id string) int32 {
	if !sound(id) {
		return -1
	}
	slot := int32(len(l.publishers))
	if len(l.publishers) < l.maxPublishers {
		l.publishers = append(l.publishers, &publisher{})
	} else {
		slot = -1
		var worst *publisher
		for range min(sampledSlots, l.maxPublishers) {
			l.hand = (l.hand + 1) % l.maxPublishers
			p := l.publishers[l.hand]
			if p.group != 0 && l.now-p.lastMessage <= horizon {
				continue
			}
			if worst == nil || cmp.Or(cmp.Compare(min(p.group, 1), min(worst.group, 1)), cmp.Compare(min(p.n, Settled), min(worst.n, Settled)), cmp.Compare(p.lastMessage, worst.lastMessage)) < 0 {
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

// Counts returns the counts so far.
func (l *Learner) Counts() Counts { return l.counts }

// Publishers returns the number of followed publishers.
func (l *Learner) Publishers() int { return len(l.publishers) }

// Groups returns the groups of the latest learning or Restore, the oldest first. The
// caller must not change the slice. A later learning does not change it either.
func (l *Learner) Groups() []Group { return l.groups }

// Key returns the label of a publisher's group, or "".
func (l *Learner) Key(id string) string {
	if slot, found := l.index[id]; found && l.publishers[slot].group != 0 {
		return label(l.publishers[slot].group)
	}
	return ""
}

// prefix is the beginning of each label.
const prefix = "learned-"

func label(number uint64) string { return prefix + strconv.FormatUint(number, 10) }

// Restore returns a learner that starts with known groups. labels maps each publisher id
// to the label that Key returned. The groups count as one learning old, and members keep
// their groups until they have fired Settled times. Restore ignores invalid labels and
// groups of one. If there are more than cfg.Publishers publishers, Restore drops the
// youngest groups.
func Restore(cfg Config, labels map[string]string) *Learner {
	l := New(cfg)
	l.learning = 1
	byNumber := map[uint64][]string{}
	for _, id := range slices.Sorted(maps.Keys(labels)) {
		number, err := strconv.ParseUint(strings.TrimPrefix(labels[id], prefix), 10, 32)
		if err == nil && number > 0 && labels[id] == label(number) && sound(id) {
			byNumber[number] = append(byNumber[number], id)
			l.next = max(l.next, number+1)
		}
	}
	for _, number := range slices.Sorted(maps.Keys(byNumber)) {
		if len(byNumber[number]) < 2 {
			continue
		}
		if len(l.publishers)+len(byNumber[number]) > l.maxPublishers {
			break
		}
		for _, id := range byNumber[number] {
			p := l.publishers[l.admit(id)]
			p.group, p.joined = number, l.learning
		}
	}
	since := map[uint64]uint64{}
	// order: each by itself
	for number := range byNumber {
		since[number] = l.learning
	}
	l.settle(since)
	return l
}

// byAge orders groups by label, the oldest first.
func byAge(a, b Group) int { return cmp.Compare(a.number, b.number) }

// settle builds groups from the publishers' labels, without evidence.
func (l *Learner) settle(since map[uint64]uint64) {
	byNumber := map[uint64]*Group{}
	var groups []Group
	for _, p := range l.publishers {
		if p.group == 0 {
			continue
		}
		g := byNumber[p.group]
		if g == nil {
			g = &Group{Label: label(p.group), Since: since[p.group], number: p.group}
			byNumber[p.group] = g
		}
		g.Members = append(g.Members, Member{ID: p.id, Joined: p.joined})
	}
	// order: sorted below
	for _, g := range byNumber {
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
