package controller

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// condition is what the leader finds, of a topic that is active, in what brokers
// report. It is shown with the catalog's state and is not kept: it is of the last
// window, and the next leader measures again.
type condition struct {
	missed string // why the SLO is missed, or will be, for people; empty: it is not known to be
	// over says since when the topic has offered more than its contract, by so many
	// msg/s at present; zero: it does not. Then no SLO is owed, and none is judged.
	over   time.Time
	by     float64
	excess tuner.Excess
	seen   map[string]time.Time // the newest report that excess knows, by broker
	// stranded publishers have no broker since then: theirs is gone, or they are not
	// placed. unaccepted is what they would have sent meanwhile, if all send alike, at
	// the rate that was declared, in the window.
	stranded   int
	since      time.Time
	counted    time.Time // the last look
	unaccepted []unaccepted
	// quiet: the window has nothing, and nothing is wrong. Until a report brings something,
	// a broker goes, or the placement changes, there is nothing to find.
	quiet bool
}

type unaccepted struct {
	at       time.Time
	messages float64
}

// judge gives every active topic the verdict over its window.
func (c *Controller) judge(now time.Time) {
	c.mu.Lock()
	for id := range c.mu.left {
		if _, known := c.mu.cat.Broker(id); !known {
			delete(c.mu.left, id)
		}
	}
	if len(c.mu.topics) > c.mu.cat.Len() { // else there are few that it does not have
		for name, l := range c.mu.topics {
			if _, known := c.mu.cat.Active(name); !known && l.idle() {
				delete(c.mu.topics, name)
			}
		}
	}
	c.mu.Unlock()
	var changes []catalog.StateChanged
	var wanting []string
	c.mu.inTurns(c.mu, func(name string) (work int) {
		work, changed := c.mu.judge(name, now)
		changes = append(changes, changed...)
		if l := c.mu.topics[name]; l != nil && l.wants() {
			wanting = append(wanting, name)
		}
		return work
	})
	logChanges(c.cfg.Log, changes)
	c.mu.Lock()
	c.mu.wanting = wanting
	c.mu.Unlock()
}

// What is done with the lock held in one go: so many topics are looked at, or so many
// times more that are quiet.
const (
	judgeAtOnce   = 100
	quietPerBusy  = 20
	workOfOneTurn = judgeAtOnce * quietPerBusy
)

// inTurns calls f with the name of every topic, sorted, and with the lock held for so much of
// f's work at a time: topics may come and go meanwhile. Requires: the lock is not held.
func (st *state) inTurns(lock sync.Locker, f func(name string) (work int)) {
	for after, more := "", true; more; {
		more = false
		lock.Lock()
		work := 0
		for name := range st.cat.Names(after) {
			if more = work >= workOfOneTurn; more {
				break
			}
			after, work = name, work+f(name)
		}
		lock.Unlock()
	}
}

// judge gives a topic its verdict, and returns how much work it was.
func (st *state) judge(name string, now time.Time) (work int, changes []catalog.StateChanged) {
	l := st.topics[name]
	if active, _ := st.cat.Active(name); !active {
		if l != nil {
			l.condition = nil
		}
		return 1, nil
	}
	if l != nil && l.condition != nil && l.condition.quiet && l.reserved == "" && len(st.left)+len(st.away) == 0 {
		l.condition.counted = now
		return 1, nil
	}
	topic, _ := st.cat.Topic(name)
	l = st.topics.at(name)
	if l.learns = topic.Spec.Demand.Open; l.condition == nil {
		l.condition = &condition{seen: map[string]time.Time{}}
	}
	d := l.condition
	before := *d
	st.offeredBeyond(topic, d, now)
	st.strand(topic, d, now)
	d.missed = complaint(st.verdict(topic, now), l.reserved)
	d.quiet = d.missed == "" && d.over.IsZero() && d.stranded == 0 && len(d.unaccepted) == 0 && d.excess.Empty() && st.silent(topic, now)
	if before.missed != d.missed || before.over != d.over || before.stranded != d.stranded {
		was, is := before.show(topic), d.show(topic)
		changes = []catalog.StateChanged{{Topic: name, From: was.State, To: is.State, Reason: is.Reason}}
	}
	return quietPerBusy, changes
}

// silent reports whether nothing came, went or waited in the window.
func (st *state) silent(topic catalog.Topic, now time.Time) bool {
	return !slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool {
		t := st.reported(q.Broker).Topic(topic.Spec.Name())
		return t != nil && slices.ContainsFunc(t.Within(now.Add(-st.cfg.Window)), reports.Report.Busy)
	})
}

// wakeTopic has a topic looked at that was quiet.
func (st *state) wakeTopic(name string) {
	if l := st.topics[name]; l != nil && l.condition != nil {
		l.condition.quiet = false
	}
}

// offeredBeyond looks whether the topic keeps to its contract.
func (st *state) offeredBeyond(topic catalog.Topic, d *condition, now time.Time) {
	var n, mean, waiting float64 // since the last look; msg/s in the window; when first seen
	var took time.Duration
	rate, burst := float64(topic.Spec.Demand.RateMilli)/1000, float64(topic.Spec.Demand.Burst)
	k, first := 0, len(d.seen) == 0
	for _, q := range topic.Plan.Quotas {
		t := st.reported(q.Broker).Topic(topic.Spec.Name())
		if t == nil {
			continue
		}
		var offered float64
		var span time.Duration
		for _, r := range t.Within(now.Add(-st.cfg.Window)) {
			offered += float64(r.Stats.Offered + r.Stats.Refused)
			span += r.Stats.Interval.AsDuration()
			if r.At.After(d.seen[q.Broker]) {
				if r.Stats.Offered > 0 || r.At.After(d.counted) { // else it was quiet then: a full bucket gets no fuller
					n += float64(r.Stats.Offered) // what was refused waits for nothing
					took += r.Stats.Interval.AsDuration()
				}
				d.seen[q.Broker] = r.At
			}
		}
		if last := t.Newest().Stats; first {
			waiting += float64(last.Backlog)
		}
		if span > 0 {
			mean += offered / span.Seconds()
			k++
		}
	}
	d.excess.Backlog(waiting, burst)
	if k == 0 {
		d.over = time.Time{}
		return
	}
	switch over := d.excess.Offer(n, took/time.Duration(k), mean, rate, burst, st.cfg.Window); {
	case !over:
		d.over = time.Time{}
	case d.over.IsZero():
		d.over = now
	}
	d.by = max(0, mean-rate)
}

// strand looks who has no broker.
func (st *state) strand(topic catalog.Topic, d *condition, now time.Time) {
	n := topic.Placement.Unplaced()
	for _, q := range topic.Plan.Quotas {
		if st.gone(q.Broker, now) {
			n += len(q.Publishers)
		}
	}
	d.unaccepted = slices.DeleteFunc(d.unaccepted, func(u unaccepted) bool { return u.at.Before(now.Add(-st.cfg.Window)) })
	switch {
	case n == 0:
		d.since = time.Time{}
	case d.stranded == 0:
		if d.since = now; d.counted.IsZero() {
			d.counted = now
		}
		fallthrough
	default:
		rate := 0.0 // of all
		for _, p := range topic.Spec.Demand.Publishers {
			rate += p.Rate
		}
		for _, g := range topic.Spec.Demand.Groups {
			rate += float64(g.Count) * g.Rate
		}
		part := float64(n) / float64(topic.Placement.Len())
		d.unaccepted = append(d.unaccepted, unaccepted{now, rate * part * now.Sub(d.counted).Seconds()})
	}
	d.stranded, d.counted = n, now
}

// gone reports whether a broker is known to be away: it has left this process, or has not
// come to it within the time after which its publishers are placed elsewhere, for all
// brokers have to come back to a controller that has just begun.
func (st *state) gone(id string, now time.Time) bool {
	b, _ := st.cat.Broker(id)
	since, away := st.away[id]
	return !b.Connected && (st.left[id] || away && now.Sub(since) >= st.cfg.EvacuateAfter)
}

// refused is how many messages could not be accepted in the window; nil knows none.
func (d *condition) refused() uint64 {
	sum := 0.0
	if d != nil {
		for _, u := range d.unaccepted {
			sum += u.messages
		}
	}
	return uint64(sum)
}

// show adds the condition to what the catalog says; nil adds nothing.
func (d *condition) show(topic catalog.Topic) catalog.Topic {
	if d == nil || !open(topic) {
		return topic
	}
	reasons := []string{topic.Reason}
	if d.stranded > 0 {
		reasons = append(reasons, fmt.Sprintf("%d of %d publishers have no broker, since %s",
			d.stranded, topic.Placement.Len(), d.since.UTC().Format("2006-01-02 15:04:05 UTC")))
	}
	if !d.over.IsZero() {
		over := "over contract since " + moment(d.over)
		if d.by >= 1 {
			over += ", by " + thousands(d.by) + " msg/s"
		} else {
			over += "; what was too much is still being caught up with"
		}
		reasons = append(reasons, over)
	}
	reasons = slices.DeleteFunc(append(reasons, d.missed), func(s string) bool { return s == "" })
	if topic.Reason = strings.Join(reasons, "; "); topic.Reason != "" {
		topic.State = catalog.Degraded
	}
	return topic
}

// moment is a time for people.
func moment(at time.Time) string { return at.UTC().Format("2006-01-02 15:04 UTC") }

// thousands is a number for people, rounded: 1,475.
func thousands(x float64) string {
	s := strconv.FormatFloat(x, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// missed reports whether the topic's SLO is known to be missed, or to be about to be.
func (st *state) missed(name string) bool {
	d := st.topics.see(name).condition
	return d != nil && d.missed != ""
}

// shown returns topics of the catalog as readers see them.
func (st *state) shown(topics []catalog.Topic) []catalog.Topic {
	for i, topic := range topics {
		topics[i] = st.topics.see(topic.Spec.Name()).condition.show(topic)
	}
	return topics
}

func (st *state) verdict(topic catalog.Topic, now time.Time) tuner.Verdict {
	var counts []tuner.Count
	for _, q := range topic.Plan.Quotas {
		if t := st.reported(q.Broker).Topic(topic.Spec.Name()); t != nil {
			delivered, exceeded := t.Counts(now.Add(-st.cfg.Window))
			counts = append(counts, tuner.Count{Part: q.Broker, Delivered: delivered, Exceeded: exceeded})
		}
	}
	return st.judged(topic, counts)
}

// judged is the verdict on counts and on what could not be accepted, which is not in time;
// undecided where no SLO is owed.
func (st *state) judged(topic catalog.Topic, counts []tuner.Count) tuner.Verdict {
	if n := st.topics.see(topic.Spec.Name()).condition.refused(); n > 0 {
		counts = append(counts, tuner.Count{Delivered: n, Exceeded: n}) // of no broker, which none is blamed for
	}
	v := tuner.Judge(topic.Spec.SLO.Quantile, counts)
	if st.over(topic.Spec.Name()) {
		v.Decision, v.Blamed = tuner.Undecided, ""
	}
	return v
}

// over reports whether the topic offers more than its contract.
func (st *state) over(name string) bool {
	d := st.topics.see(name).condition
	return d != nil && !d.over.IsZero()
}

// complaint has no numbers in it that change with every report: a change of it is
// logged. Where shares are reserved for brokers that are gone, the others are not to
// blame for what those lack.
func complaint(v tuner.Verdict, reserved string) string {
	switch {
	case reserved != "" && v.Decision == tuner.Beyond:
		return "the SLO is missed; " + reserved
	case reserved != "" || v.Decision != tuner.Beyond:
		return reserved
	case v.Blamed != "":
		return "the SLO is missed, most on broker " + v.Blamed
	default:
		return "the SLO is missed"
	}
}
