package share

import (
	"cmp"
	"math"
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

// maxSteps limits the steps of a window, however often brokers report.
const maxSteps = 256

// Step is one interval of a broker's traffic for a topic.
type Step struct {
	At         mono.Time // arrival time of the report
	Length     time.Duration
	Offered    uint64 // messages
	MaxBacklog int64
	Backlog    int64 // messages at the end of the step
	// Peak is the burst with which no message would have waited; 0 if unknown.
	Peak int64
}

// profiled is the period over which Fill computes Peak.
const profiled = time.Minute

// Window is the traffic of one broker for one topic over the last minute. The zero value
// is empty.
type Window struct{ steps []Step }

// Add appends a step.
func (w *Window) Add(s Step) {
	w.prune(s.At.Add(-profiled))
	if len(w.steps) == maxSteps {
		w.steps = w.steps[1:]
	}
	w.steps = append(w.steps, s)
}

func (w *Window) prune(start mono.Time) {
	old := 0
	for old < len(w.steps) && w.steps[old].At.Before(start) {
		old++
	}
	w.steps = w.steps[old:]
}

// Fill computes l's rates, backlogs and Dispersion from the steps at or after start.
// Without steps they are zero. Peak comes from all steps, except steps that began or
// ended with a backlog: then the burst shows what the share lacked, not what the arrivals
// needed.
//
// A step in which the rate jumps mixes both rates, so the next step replaces it. After a
// jump up, Recent is at least l's Quota until the next step.
func (w *Window) Fill(l *Load, start mono.Time) {
	var all, recent sums
	l.MaxBacklog, l.Backlog, l.Peak = 0, 0, 0
	waiting, mixed, jumpsUp := false, false, false
	for _, s := range w.steps {
		if !waiting && s.Backlog == 0 {
			l.Peak = max(l.Peak, s.Peak)
		}
		waiting = s.Backlog > 0
		if s.At.Before(start) {
			continue
		}
		all.add(s)
		jumps := recent.jumps(s)
		jumpsUp = jumps && float64(s.Offered) > recent.rate()*s.Length.Seconds()
		if jumps || mixed {
			recent = sums{}
		}
		mixed = jumps
		recent.add(s)
		l.MaxBacklog = max(l.MaxBacklog, s.MaxBacklog)
		l.Backlog = s.Backlog
	}
	l.Rate, l.Recent, l.Dispersion = all.rate(), recent.rate(), recent.dispersion()
	if jumpsUp { // only up to the quota
		l.Recent = max(l.Recent, l.Quota.Rate.PerSecond())
	}
}

type sums struct {
	n                        int
	seconds, offered, square float64 // square: sum of offered*offered/seconds over the steps
}

func (s *sums) add(step Step) {
	n, seconds := float64(step.Offered), step.Length.Seconds()
	s.n++
	s.seconds += seconds
	s.offered += n
	s.square += n * n / seconds
}

func (s *sums) rate() float64 {
	if s.seconds <= 0 {
		return 0
	}
	return s.offered / s.seconds
}

// dispersion returns Load.Dispersion of the steps; 0 with fewer than three steps.
func (s *sums) dispersion() float64 {
	if s.n < 3 || s.offered == 0 {
		return 0
	}
	spread := s.square - s.offered*s.offered/s.seconds
	return max(0, spread/float64(s.n-1)/s.rate())
}

// jumps reports whether a step does not fit the steps before: the number of messages
// differs by more than a fifth, and by more than four standard deviations. The deviation
// is the observed one, but at least that for Poisson arrivals. With fewer than three
// steps, only traffic after silence counts as a jump.
func (s *sums) jumps(step Step) bool {
	if s.n == 0 || s.n < 3 && s.offered > 0 {
		return false
	}
	expected := s.rate() * step.Length.Seconds()
	difference := math.Abs(float64(step.Offered) - expected)
	return difference > expected/5 && difference > 4*math.Sqrt(max(1, expected)*max(1, s.dispersion()))
}

// deadBand is the minimum change worth new grants, as a fraction of the present target:
// loads are noisy.
const deadBand = 0.05

// Differs reports whether some part of want differs from current by more than the dead band.
func Differs(current, want []Assigned) bool {
	targets := make(map[string]tokenbucket.Share, len(current))
	for _, a := range current {
		targets[a.Broker] = a.Share
	}
	differs := func(current, want int64) bool {
		return math.Abs(float64(want-current)) > deadBand*float64(current)
	}
	for _, a := range want {
		target := targets[a.Broker]
		delete(targets, a.Broker)
		if differs(int64(target.Rate), int64(a.Share.Rate)) || differs(target.Burst, a.Share.Burst) {
			return true
		}
	}
	// order: any one of them decides
	for _, target := range targets {
		if !target.IsZero() {
			return true
		}
	}
	return false
}
