package share

import (
	"cmp"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Placed is what a placement says of a broker.
type Placed struct {
	Broker     string
	Publishers int
	// Quota is the part of the contract that comes with them.
	Quota tokenbucket.Share
	// Retiring: they have moved away.
	Retiring bool
}

// Holding is what a broker has now.
type Holding struct {
	// Away: it cannot be told anything, and may be using Reserved.
	Away             bool
	Target, Reserved tokenbucket.Share
}

const (
	// handover is for how long publishers go on sending to a broker that they move
	// away from, as far as can be told beforehand.
	handover = 100 * time.Millisecond
	// stragglers is the part of them that may follow only once their connection ends.
	stragglers = 0.15
	// maxComing bounds the messages that are expected, so that whatever brokers report
	// the sum over all of them, and of what waits, is a number.
	maxComing = 1 << 40
	// seenAfter is how many steps of a broker's own must have been seen, with half of
	// what is expected in them, before it is judged by them; or a window without.
	seenAfter = 3
)

// Tuner follows the loads of a topic's brokers and finds the shares they should
// have. Windows belong to a placement epoch: what was seen of a broker before its
// publishers changed says nothing of it, but what those who moved have sent is known
// to have gone with them. It is a plain value with one owner.
type Tuner struct {
	rule    string
	window  time.Duration
	members []*tuned // sorted by broker
}

type tuned struct {
	Placed
	instance string
	since    mono.Time // of the placement, or of its process
	expected float64   // msg/s, until it has been seen; while it retires, of stragglers
	first    bool      // nothing is known of what was before: what it holds was found right
	seen     bool
	backlog  int64 // as of its last report
	// coming is what those that move away are expected to leave there yet, as of asked.
	coming int64
	asked  mono.Time
	window Window
}

// Place begins a placement epoch of a topic: it returns the tuner of that, and leaves
// t, which followed the topic before, as it is; t may be nil. A broker whose
// publishers do not change keeps its window; the others are expected to get what was
// sent where they come from, and their quotas where that is not known. Loads are of
// the last window. Requires: no broker appears twice.
func (t *Tuner) Place(now mono.Time, rule string, window time.Duration, placed []Placed) *Tuner {
	next := &Tuner{rule: rule, window: window}
	if t == nil {
		t = &Tuner{}
	}
	var fresh []*tuned
	var quotas float64 // of them
	left := map[string]bool{}
	for _, old := range t.members {
		left[old.Broker] = true
	}
	for _, p := range placed {
		m := &tuned{Placed: p, since: now}
		switch old := t.find(p.Broker); {
		case old == nil:
		case old.Publishers == p.Publishers && old.Retiring == p.Retiring:
			*m = *old
			m.Quota = p.Quota
			delete(left, p.Broker)
		default:
			m.instance, m.backlog = old.instance, old.backlog
			if p.Retiring {
				m.coming, m.asked = int64(min(t.recent(old, now)*handover.Seconds(), maxComing)), now
				m.expected = t.recent(old, now) * stragglers
			}
		}
		if m.since == now && !p.Retiring {
			fresh = append(fresh, m)
			quotas += p.Quota.Rate.PerSecond()
		}
		next.members = append(next.members, m)
	}
	known, moving := len(t.members) > 0, 0.
	for _, old := range t.members { // in order, for the sum's sake
		if left[old.Broker] {
			known, moving = known && (old.seen || old.Retiring), moving+t.recent(old, now)
		}
	}
	for _, m := range fresh {
		m.expected, m.first = m.Quota.Rate.PerSecond(), len(t.members) == 0
		if known {
			m.expected *= moving / quotas
		}
	}
	slices.SortFunc(next.members, func(a, b *tuned) int { return cmp.Compare(a.Broker, b.Broker) })
	return next
}

func (t *Tuner) find(broker string) *tuned {
	i, found := slices.BinarySearchFunc(t.members, broker, func(m *tuned, id string) int { return cmp.Compare(m.Broker, id) })
	if !found {
		return nil
	}
	return t.members[i]
}

// recent is what m sends, in msg/s, as far as is known.
func (t *Tuner) recent(m *tuned, now mono.Time) float64 {
	if !m.seen {
		return m.expected
	}
	var l Load
	m.window.Fill(&l, now.Add(-t.window))
	return l.Recent
}

// Following reports whether publishers have just moved: shares change within fractions
// of a second then, and Propose is to be asked as often.
func (t *Tuner) Following(now mono.Time) bool {
	return slices.ContainsFunc(t.members, func(m *tuned) bool { return m.Retiring && now.Sub(m.since) < Drain })
}

// Join says that a broker is there, and which process. What was seen of another
// process of its id does not tell what this one will have.
func (t *Tuner) Join(now mono.Time, broker, instance string) {
	m := t.find(broker)
	if m == nil {
		return
	}
	if m.instance != "" && m.instance != instance {
		m.window, m.since, m.seen, m.first, m.backlog = Window{}, now, false, false, 0
		m.expected = m.Quota.Rate.PerSecond()
	}
	m.instance = instance
}

// Report takes a step of a broker's traffic. One that began in an earlier epoch
// counts for its backlog only.
func (t *Tuner) Report(broker string, s Step) {
	m := t.find(broker)
	if m == nil {
		return
	}
	m.backlog = s.Backlog
	if !s.At.Before(m.since.Add(handover)) {
		m.coming = 0
	}
	if s.At.Add(-s.Length).Before(m.since) {
		return
	}
	if m.Retiring {
		m.expected = 0
	}
	m.window.Add(s)
	if m.seen {
		return
	}
	var l Load
	m.window.Fill(&l, m.since)
	m.seen = len(m.window.steps) >= seenAfter && l.Recent >= m.expected/2 || s.At.Sub(m.since) >= t.window
}

// Propose asks the rule for the shares that sum to total. Brokers that are away
// keep what is reserved for them, for they may be using it. nil: there is nothing to
// divide, or no broker to divide among, or nothing to go by. Errors: as of Split.
func (t *Tuner) Propose(now mono.Time, total tokenbucket.Share, holding func(broker string) Holding) ([]Assigned, error) {
	var target []Assigned
	var loads []Load
	var since []mono.Time
	stays, following := true, false
	for _, m := range t.members {
		h := holding(m.Broker)
		if h.Away {
			stays, m.coming = false, 0 // no publisher can send to it, or it will say what came
			total = total.Less(h.Reserved)
			target = append(target, Assigned{Broker: m.Broker, Share: h.Reserved})
			continue
		}
		if m.first && !m.seen && h.Target.Rate > 0 {
			m.expected = h.Target.Rate.PerSecond()
		}
		l := Load{Broker: m.Broker, Share: h.Target, Publishers: m.Publishers, Quota: m.Quota, Retiring: m.Retiring}
		m.window.Fill(&l, now.Add(-t.window))
		// What it could release meanwhile has come.
		m.coming = max(0, m.coming-int64(h.Target.Rate.PerSecond()*now.Sub(m.asked).Seconds()))
		m.asked = now
		l.Backlog = m.backlog + m.coming
		following = following || m.coming > 0
		l.MaxBacklog = max(l.MaxBacklog, l.Backlog)
		if !m.seen && !m.Retiring {
			l.Unseen = true
			l.Rate = m.expected
		}
		if !m.seen {
			l.Recent = max(m.expected, l.Recent)
		}
		stays = stays && l.Unseen
		loads, since = append(loads, l), append(since, m.since)
	}
	if len(loads) == 0 || stays || total.Rate <= 0 || total.Burst <= 0 {
		return nil, nil
	}
	if following {
		t.handOver(loads)
	}
	lessQuota(loads, since, int64(total.Rate), func(s *tokenbucket.Share) *int64 { return (*int64)(&s.Rate) })
	lessQuota(loads, since, total.Burst, func(s *tokenbucket.Share) *int64 { return &s.Burst })
	shares, err := Split(t.rule, total, loads)
	if err != nil {
		return nil, err
	}
	return append(target, shares...), nil
}

// handOver lends brokers that publishers are leaving half of the burst of those that
// they go to: each of the two has them for a while.
func (t *Tuner) handOver(loads []Load) {
	var pool, coming int64
	for i := range loads {
		if l := &loads[i]; l.Unseen {
			lent := l.Quota.Burst / 2
			l.Quota.Burst -= lent
			pool += lent
		}
		coming += t.find(loads[i].Broker).coming
	}
	for i := range loads {
		if c := t.find(loads[i].Broker).coming; c > 0 {
			part := MulDiv(pool, c, coming)
			loads[i].Quota.Burst += part
			pool, coming = pool-part, coming-c
		}
	}
}

// lessQuota takes what the quotas are more than there is, as long as brokers that are
// away hold on to theirs, from those that were placed last: these have the publishers
// that moved away from there, and those that stayed are not to pay for it.
func lessQuota(loads []Load, since []mono.Time, there int64, part func(*tokenbucket.Share) *int64) {
	short := -there
	for i := range loads {
		short += *part(&loads[i].Quota)
	}
	for _, epoch := range slices.Backward(slices.Compact(slices.Sorted(slices.Values(since)))) {
		var sum int64 // beyond the one that each keeps
		for i := range loads {
			if since[i] == epoch {
				sum += max(0, *part(&loads[i].Quota)-1)
			}
		}
		take := min(short, sum)
		if take <= 0 {
			continue
		}
		for i := range loads {
			if q := part(&loads[i].Quota); since[i] == epoch && *q > 1 {
				*q -= MulDiv(take, *q-1, sum)
			}
		}
		short -= take
	}
}
