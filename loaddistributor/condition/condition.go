// Package condition derives the condition of an active topic from its brokers' reports:
// whether the SLO is met, whether the topic keeps to its contract, and which publishers
// have no broker. The leader shows the condition with the catalog's state and does not
// store it. The condition covers the last window, and the next leader measures again.
// Time is an argument.
package condition

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// Topic is the condition of one topic. Make it with New. Nil is the condition of a topic
// that is not active.
type Topic struct {
	Missed string // why the SLO is missed or will be, for people; empty: not known to be missed
	// Over is the time since the topic has offered more than its contract, and ExcessRate the
	// present excess in msg/s. Zero means no excess. While Over is set, no SLO is owed or
	// judged.
	Over       time.Time
	ExcessRate float64
	// Stranded is the number of publishers without a broker since Since. Their broker is
	// disconnected, or they are unplaced.
	Stranded int
	Since    time.Time
	// Quiet: the window is empty and nothing is wrong. Nothing changes until a report
	// brings something, a broker disconnects, or the placement changes.
	Quiet bool

	excess  tuner.Excess
	counted map[string]time.Time // time of the newest report counted by excess, by broker
	judged  time.Time            // time of the last Judge or Passed
	passed  time.Time            // time of the last Passed
	// unaccepted estimates the messages of the stranded publishers in the window from
	// their declared rates, as if all publishers sent alike.
	unaccepted []unaccepted
}

type unaccepted struct {
	time     time.Time
	messages float64
}

// New returns the condition of a topic that has just become active.
func New() *Topic { return &Topic{counted: map[string]time.Time{}} }

// Evidence is the input of a judgement.
type Evidence struct {
	Reported     func(broker string) *reports.Topic // reports of the topic; nil: none
	Disconnected func(broker string) bool           // the broker is known to be disconnected
	Window       time.Duration
	// Reserved explains to people which shares the topic lacks because of disconnected
	// brokers; empty: none.
	Reserved string
}

// Judge judges the topic. If the shown condition changed, Judge returns the change.
func (d *Topic) Judge(topic catalog.Topic, evidence Evidence, now time.Time) []catalog.StateChanged {
	previous := *d
	d.offered(topic, evidence, now)
	d.strand(topic, evidence, now)
	d.Missed = complaint(d.Verdict(topic, evidence, now), evidence.Reserved)
	d.Quiet = d.Missed == "" && d.Over.IsZero() && d.Stranded == 0 && len(d.unaccepted) == 0 && d.excess.Empty() && evidence.silent(topic, now)
	if previous.Missed == d.Missed && previous.Over == d.Over && previous.Stranded == d.Stranded {
		return nil
	}
	before, after := previous.ApplyTo(topic), d.ApplyTo(topic)
	return []catalog.StateChanged{{Topic: topic.Spec.Name(), From: before.State, To: after.State, Reason: after.Reason}}
}

// Passed records that there was nothing to judge until now.
func (d *Topic) Passed(now time.Time) { d.judged, d.passed = now, now }

// silent reports whether no message came, went or waited in the window.
func (e Evidence) silent(topic catalog.Topic, now time.Time) bool {
	return !slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool {
		t := e.Reported(q.Broker)
		return t != nil && slices.ContainsFunc(t.Within(now.Add(-e.Window)), reports.Report.Busy)
	})
}

// offered judges whether the topic keeps to its contract.
func (d *Topic) offered(topic catalog.Topic, evidence Evidence, now time.Time) {
	var n, mean, waiting float64 // messages since the last Judge; msg/s over the window; backlog at the first report
	var elapsed time.Duration
	rate, burst := float64(topic.Spec.Demand.RateMilli)/1000, float64(topic.Spec.Demand.Burst)
	k, first := 0, len(d.counted) == 0
	for _, q := range topic.Plan.Quotas {
		t := evidence.Reported(q.Broker)
		if t == nil {
			continue
		}
		var offered float64
		var span time.Duration
		for _, r := range t.Within(now.Add(-evidence.Window)) {
			offered += float64(r.Stats.Offered + r.Stats.Refused)
			span += r.Stats.Interval.AsDuration()
			if r.At.After(d.counted[q.Broker]) {
				if r.Stats.Offered > 0 || r.At.After(d.passed) { // otherwise the topic was quiet, and its bucket stayed full
					n += float64(r.Stats.Offered) // refused messages wait for nothing
					elapsed += r.Stats.Interval.AsDuration()
				}
				d.counted[q.Broker] = r.At
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
		d.Over = time.Time{}
		return
	}
	switch exceeds := d.excess.Offer(n, elapsed/time.Duration(k), mean, rate, burst, evidence.Window); {
	case !exceeds:
		d.Over = time.Time{}
	case d.Over.IsZero():
		d.Over = now
	}
	d.ExcessRate = max(0, mean-rate)
}

// strand counts the publishers without a broker.
func (d *Topic) strand(topic catalog.Topic, evidence Evidence, now time.Time) {
	n := topic.Placement.Unplaced()
	for _, q := range topic.Plan.Quotas {
		if evidence.Disconnected(q.Broker) {
			n += len(q.Publishers)
		}
	}
	d.unaccepted = slices.DeleteFunc(d.unaccepted, func(u unaccepted) bool { return u.time.Before(now.Add(-evidence.Window)) })
	switch {
	case n == 0:
		d.Since = time.Time{}
	case d.Stranded == 0:
		if d.Since = now; d.judged.IsZero() {
			d.judged = now
		}
		fallthrough
	default:
		rate := 0.0 // of all publishers
		for _, p := range topic.Spec.Demand.Publishers {
			rate += p.Rate
		}
		for _, g := range topic.Spec.Demand.Groups {
			rate += float64(g.Count) * g.Rate
		}
		part := float64(n) / float64(topic.Placement.Len())
		d.unaccepted = append(d.unaccepted, unaccepted{now, rate * part * now.Sub(d.judged).Seconds()})
	}
	d.Stranded, d.judged = n, now
}

// Refused returns the number of messages that could not be accepted in the window.
func (d *Topic) Refused() uint64 {
	sum := 0.0
	if d != nil {
		for _, u := range d.unaccepted {
			sum += u.messages
		}
	}
	return uint64(sum)
}

// ApplyTo adds the condition to the catalog's view of the topic. A nil condition adds
// nothing.
func (d *Topic) ApplyTo(topic catalog.Topic) catalog.Topic {
	if d == nil || !topic.Open() {
		return topic
	}
	reasons := []string{topic.Reason}
	if d.Stranded > 0 {
		reasons = append(reasons, fmt.Sprintf("%d of %d publishers have no broker, since %s",
			d.Stranded, topic.Placement.Len(), d.Since.UTC().Format("2006-01-02 15:04:05 UTC")))
	}
	if !d.Over.IsZero() {
		reason := "over contract since " + Moment(d.Over)
		if d.ExcessRate >= 1 {
			reason += ", by " + thousands(d.ExcessRate) + " msg/s"
		} else {
			reason += "; the excess is still being delivered"
		}
		reasons = append(reasons, reason)
	}
	reasons = slices.DeleteFunc(append(reasons, d.Missed), func(s string) bool { return s == "" })
	if topic.Reason = strings.Join(reasons, "; "); topic.Reason != "" {
		topic.State = catalog.Degraded
	}
	return topic
}

// Moment formats a time for people.
func Moment(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// thousands formats a rounded number for people, such as 1,475.
func thousands(x float64) string {
	s := strconv.FormatFloat(x, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// IsMissed reports whether the topic's SLO is known to be missed or about to be missed.
func (d *Topic) IsMissed() bool { return d != nil && d.Missed != "" }

// IsOver reports whether the topic offers more than its contract.
func (d *Topic) IsOver() bool { return d != nil && !d.Over.IsZero() }

// Verdict returns the SLO verdict over the window.
func (d *Topic) Verdict(topic catalog.Topic, evidence Evidence, now time.Time) tuner.Verdict {
	var counts []tuner.Count
	for _, q := range topic.Plan.Quotas {
		if t := evidence.Reported(q.Broker); t != nil {
			delivered, exceeded := t.Counts(now.Add(-evidence.Window))
			counts = append(counts, tuner.Count{Part: q.Broker, Delivered: delivered, Exceeded: exceeded})
		}
	}
	return d.VerdictOn(topic, counts)
}

// VerdictOn returns the SLO verdict on the counts plus the messages that could not be
// accepted, which count as late. If no SLO is owed, the verdict is undecided.
func (d *Topic) VerdictOn(topic catalog.Topic, counts []tuner.Count) tuner.Verdict {
	if n := d.Refused(); n > 0 {
		counts = append(counts, tuner.Count{Delivered: n, Exceeded: n}) // without a broker, so no broker is blamed
	}
	v := tuner.Judge(topic.Spec.SLO.Quantile, counts)
	if d.IsOver() {
		v.Decision, v.Blamed = tuner.Undecided, ""
	}
	return v
}

// complaint explains a verdict to people. It contains no numbers that change with every
// report, because each change is logged. If shares are reserved for disconnected brokers,
// complaint blames no other broker for missing them.
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
