package share

import (
	"cmp"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Placed is a broker of a placement.
type Placed struct {
	Broker     string
	Publishers int
	// Quota is the part of the contract for these publishers.
	Quota tokenbucket.Share
	// Retiring means that the publishers have moved away.
	Retiring bool
}

// Holding is the present state of a broker's share.
type Holding struct {
	// Disconnected means that the broker is disconnected and may be using Reserved.
	Disconnected     bool
	Target, Reserved tokenbucket.Share
}

const (
	// handover is the expected time for which publishers keep sending to a broker after
	// they start to move away.
	handover = 100 * time.Millisecond
	// stragglers is the fraction of the traffic that may move only when its connection
	// ends.
	stragglers = 0.15
	// maxComing bounds the expected messages, so that sums with the backlogs do not
	// overflow, whatever brokers report.
	maxComing = 1 << 40
	// A broker is seen after seenAfter steps of its own with at least half of the
	// expected rate, or after a full window.
	seenAfter = 3
)

// Tuner follows the loads of a topic's brokers and proposes their shares. Windows belong
// to a placement epoch. When the publishers of a broker change, the Tuner drops the
// broker's window. The Tuner assumes that publishers take their traffic along. Tuner is a
// plain value with one owner.
type Tuner struct {
	rule    string
	window  time.Duration
	members []*tuned // sorted by broker
}

type tuned struct {
	Placed
	instance string
	since    mono.Time // start of the placement epoch or of the broker's process
	expected float64   // msg/s, until the broker is seen; for a retiring broker the rate of stragglers
	first    bool      // first placement of the topic: the present target share replaces expected
	seen     bool
	backlog  int64 // messages, as of the last report
	// coming is the expected number of messages, as of comingAt, still to come from
	// departing publishers.
	coming   int64
	comingAt mono.Time
	window   Window
}

// Place begins a placement epoch and returns its tuner. Place does not change t, the
// tuner of the previous epoch, which may be nil. A broker whose publishers do not change
// keeps its window. The other brokers are expected to receive the rate of the publishers
// that moved, or their quotas if that rate is unknown. window is the period over which
// loads are computed. Requires: no broker appears twice.
func (t *Tuner) Place(now mono.Time, rule string, window time.Duration, placed []Placed) *Tuner {
	next := &Tuner{rule: rule, window: window}
	if t == nil {
		t = &Tuner{}
	}
	var fresh []*tuned
	var quotas float64 // of fresh, msg/s
	changed := map[string]bool{}
	for _, old := range t.members {
		changed[old.Broker] = true
	}
	for _, p := range placed {
		m := &tuned{Placed: p, since: now}
		switch old := t.find(p.Broker); {
		case old == nil:
		case old.Publishers == p.Publishers && old.Retiring == p.Retiring:
			*m = *old
			m.Quota = p.Quota
			delete(changed, p.Broker)
		default:
			m.instance, m.backlog = old.instance, old.backlog
			if p.Retiring {
				m.coming, m.comingAt = int64(min(t.recent(old, now)*handover.Seconds(), maxComing)), now
				m.expected = t.recent(old, now) * stragglers
			}
		}
		if m.since == now && !p.Retiring {
			fresh = append(fresh, m)
			quotas += p.Quota.Rate.PerSecond()
		}
		next.members = append(next.members, m)
	}
	measured, moving := len(t.members) > 0, 0.
	for _, old := range t.members { // in slice order: the sum of floats depends on the order
		if changed[old.Broker] {
			measured, moving = measured && (old.seen || old.Retiring), moving+t.recent(old, now)
		}
	}
	for _, m := range fresh {
		m.expected, m.first = m.Quota.Rate.PerSecond(), len(t.members) == 0
		if measured {
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

// recent returns the known or expected rate of m, msg/s.
func (t *Tuner) recent(m *tuned, now mono.Time) float64 {
	if !m.seen {
		return m.expected
	}
	var l Load
	m.window.Fill(&l, now.Add(-t.window))
	return l.Recent
}

// Moving reports whether publishers have just moved. Shares then change within
// fractions of a second, and Propose should be called as often.
func (t *Tuner) Moving(now mono.Time) bool {
	return slices.ContainsFunc(t.members, func(m *tuned) bool { return m.Retiring && now.Sub(m.since) < Drain })
}

// Join records that the given process of a broker is connected. If the process is new,
// Join drops the window of the previous process.
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

// Report adds a step of a broker's traffic. A step that began in an earlier epoch only
// updates the backlog.
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

// Propose applies the rule and returns shares that sum to total. A disconnected broker
// may be using its reserved share, and keeps the share. Propose returns nil if there is
// nothing to divide, no connected broker, or no seen load. Errors are as in Split.
func (t *Tuner) Propose(now mono.Time, total tokenbucket.Share, holding func(broker string) Holding) ([]Assigned, error) {
	var target []Assigned
	var loads []Load
	var since []mono.Time
	unseen, moving := true, false
	for _, m := range t.members {
		h := holding(m.Broker)
		if h.Disconnected {
			unseen, m.coming = false, 0 // no publisher can send to the broker, or the broker will report the messages
			total = total.Less(h.Reserved)
			target = append(target, Assigned{Broker: m.Broker, Share: h.Reserved})
			continue
		}
		if m.first && !m.seen && h.Target.Rate > 0 {
			m.expected = h.Target.Rate.PerSecond()
		}
		l := Load{Broker: m.Broker, Share: h.Target, Publishers: m.Publishers, Quota: m.Quota, Retiring: m.Retiring}
		m.window.Fill(&l, now.Add(-t.window))
		// The broker could release this many messages since comingAt, so they have arrived.
		m.coming = max(0, m.coming-int64(h.Target.Rate.PerSecond()*now.Sub(m.comingAt).Seconds()))
		m.comingAt = now
		l.Backlog = m.backlog + m.coming
		moving = moving || m.coming > 0
		l.MaxBacklog = max(l.MaxBacklog, l.Backlog)
		if !m.seen && !m.Retiring {
			l.Unseen = true
			l.Rate = m.expected
		}
		if !m.seen {
			l.Recent = max(m.expected, l.Recent)
		}
		unseen = unseen && l.Unseen
		loads, since = append(loads, l), append(since, m.since)
	}
	if len(loads) == 0 || unseen || total.Rate <= 0 || total.Burst <= 0 {
		return nil, nil
	}
	if moving {
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

// handOver lends half of the burst of the new brokers to the brokers that publishers are
// leaving: for a while both have publishers.
func (t *Tuner) handOver(loads []Load) {
	var pool, coming int64
	for i := range loads {
		if l := &loads[i]; l.Unseen {
			loan := l.Quota.Burst / 2
			l.Quota.Burst -= loan
			pool += loan
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

// lessQuota reduces the quotas if disconnected brokers hold shares and the quotas sum to
// more than the rest. The reduction starts with the brokers placed last: they have the
// publishers from the disconnected brokers. Brokers whose publishers stayed do not pay.
func lessQuota(loads []Load, since []mono.Time, available int64, part func(*tokenbucket.Share) *int64) {
	short := -available
	for i := range loads {
		short += *part(&loads[i].Quota)
	}
	for _, epoch := range slices.Backward(slices.Compact(slices.Sorted(slices.Values(since)))) {
		var sum int64 // part of the quotas beyond the minimum of 1
		for i := range loads {
			if since[i] == epoch {
				sum += max(0, *part(&loads[i].Quota)-1)
			}
		}
		cut := min(short, sum)
		if cut <= 0 {
			continue
		}
		for i := range loads {
			if q := part(&loads[i].Quota); since[i] == epoch && *q > 1 {
				*q -= MulDiv(cut, *q-1, sum)
			}
		}
		short -= cut
	}
}
