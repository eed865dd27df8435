// Package condition is what the leader finds, of a topic that is active, in what its brokers
// report: whether the SLO is kept, whether the topic keeps to its contract, and which
// publishers have no broker. It is shown with the catalog's state and is not kept: it is of
// the last window, and the next leader measures again. Time is an argument.
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

// Topic is the condition of one. Make it with New. Nil is that of one that is not active, of
// which nothing is known.
type Topic struct {
	Missed string // why the SLO is missed, or will be, for people; empty: it is not known to be
	// Over says since when the topic has offered more than its contract, by so many
	// msg/s at present; zero: it does not. Then no SLO is owed, and none is judged.
	Over time.Time
	By   float64
	// Stranded publishers have no broker since then: theirs is gone, or they are not placed.
	Stranded int
	Since    time.Time
	// Quiet: the window has nothing, and nothing is wrong. Until a report brings something,
	// a broker goes, or the placement changes, there is nothing to find.
	Quiet bool

	excess  tuner.Excess
	seen    map[string]time.Time // the newest report that excess knows, by broker
	counted time.Time            // the last look, or that there was no need of
	passed  time.Time            // the last that there was no need of
	// unaccepted is what the stranded would have sent meanwhile, if all send alike, at the
	// rate that was declared, in the window.
	unaccepted []unaccepted
}

type unaccepted struct {
	at       time.Time
	messages float64
}

// New returns the condition of a topic that has just become active.
func New() *Topic { return &Topic{seen: map[string]time.Time{}} }

// Evidence is what a topic is judged by.
type Evidence struct {
	Reported func(broker string) *reports.Topic // of the topic; nil: nothing
	Gone     func(broker string) bool           // is known to be away
	Window   time.Duration
	// Reserved says, for people, which shares the topic lacks because of brokers that are
	// gone; empty: none.
	Reserved string
}

// Look looks at the topic, and returns how it is shown and was before, if that differs.
func (d *Topic) Look(topic catalog.Topic, by Evidence, now time.Time) []catalog.StateChanged {
	before := *d
	d.offered(topic, by, now)
	d.strand(topic, by, now)
	d.Missed = complaint(d.Verdict(topic, by, now), by.Reserved)
	d.Quiet = d.Missed == "" && d.Over.IsZero() && d.Stranded == 0 && len(d.unaccepted) == 0 && d.excess.Empty() && by.silent(topic, now)
	if before.Missed == d.Missed && before.Over == d.Over && before.Stranded == d.Stranded {
		return nil
	}
	was, is := before.Show(topic), d.Show(topic)
	return []catalog.StateChanged{{Topic: topic.Spec.Name(), From: was.State, To: is.State, Reason: is.Reason}}
}

// Passed notes that there was nothing to look at until now.
func (d *Topic) Passed(now time.Time) { d.counted, d.passed = now, now }

// silent reports whether nothing came, went or waited in the window.
func (by Evidence) silent(topic catalog.Topic, now time.Time) bool {
	return !slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool {
		t := by.Reported(q.Broker)
		return t != nil && slices.ContainsFunc(t.Within(now.Add(-by.Window)), reports.Report.Busy)
	})
}

// offered looks whether the topic keeps to its contract.
func (d *Topic) offered(topic catalog.Topic, by Evidence, now time.Time) {
	var n, mean, waiting float64 // since the last look; msg/s in the window; when first seen
	var took time.Duration
	rate, burst := float64(topic.Spec.Demand.RateMilli)/1000, float64(topic.Spec.Demand.Burst)
	k, first := 0, len(d.seen) == 0
	for _, q := range topic.Plan.Quotas {
		t := by.Reported(q.Broker)
		if t == nil {
			continue
		}
		var offered float64
		var span time.Duration
		for _, r := range t.Within(now.Add(-by.Window)) {
			offered += float64(r.Stats.Offered + r.Stats.Refused)
			span += r.Stats.Interval.AsDuration()
			if r.At.After(d.seen[q.Broker]) {
				if r.Stats.Offered > 0 || r.At.After(d.passed) { // else it was quiet then: a full bucket gets no fuller
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
		d.Over = time.Time{}
		return
	}
	switch over := d.excess.Offer(n, took/time.Duration(k), mean, rate, burst, by.Window); {
	case !over:
		d.Over = time.Time{}
	case d.Over.IsZero():
		d.Over = now
	}
	d.By = max(0, mean-rate)
}

// strand looks who has no broker.
func (d *Topic) strand(topic catalog.Topic, by Evidence, now time.Time) {
	n := topic.Placement.Unplaced()
	for _, q := range topic.Plan.Quotas {
		if by.Gone(q.Broker) {
			n += len(q.Publishers)
		}
	}
	d.unaccepted = slices.DeleteFunc(d.unaccepted, func(u unaccepted) bool { return u.at.Before(now.Add(-by.Window)) })
	switch {
	case n == 0:
		d.Since = time.Time{}
	case d.Stranded == 0:
		if d.Since = now; d.counted.IsZero() {
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
	d.Stranded, d.counted = n, now
}

// Refused is how many messages could not be accepted in the window; nil knows none.
func (d *Topic) Refused() uint64 {
	sum := 0.0
	if d != nil {
		for _, u := range d.unaccepted {
			sum += u.messages
		}
	}
	return uint64(sum)
}

// Show adds the condition to what the catalog says; nil adds nothing.
func (d *Topic) Show(topic catalog.Topic) catalog.Topic {
	if d == nil || !topic.Open() {
		return topic
	}
	reasons := []string{topic.Reason}
	if d.Stranded > 0 {
		reasons = append(reasons, fmt.Sprintf("%d of %d publishers have no broker, since %s",
			d.Stranded, topic.Placement.Len(), d.Since.UTC().Format("2006-01-02 15:04:05 UTC")))
	}
	if !d.Over.IsZero() {
		over := "over contract since " + Moment(d.Over)
		if d.By >= 1 {
			over += ", by " + thousands(d.By) + " msg/s"
		} else {
			over += "; what was too much is still being caught up with"
		}
		reasons = append(reasons, over)
	}
	reasons = slices.DeleteFunc(append(reasons, d.Missed), func(s string) bool { return s == "" })
	if topic.Reason = strings.Join(reasons, "; "); topic.Reason != "" {
		topic.State = catalog.Degraded
	}
	return topic
}

// Moment is a time for people.
func Moment(at time.Time) string { return at.UTC().Format("2006-01-02 15:04 UTC") }

// thousands is a number for people, rounded: 1,475.
func thousands(x float64) string {
	s := strconv.FormatFloat(x, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// IsMissed reports whether the topic's SLO is known to be missed, or to be about to be.
func (d *Topic) IsMissed() bool { return d != nil && d.Missed != "" }

// IsOver reports whether the topic offers more than its contract.
func (d *Topic) IsOver() bool { return d != nil && !d.Over.IsZero() }

// Verdict is that over the window.
func (d *Topic) Verdict(topic catalog.Topic, by Evidence, now time.Time) tuner.Verdict {
	var counts []tuner.Count
	for _, q := range topic.Plan.Quotas {
		if t := by.Reported(q.Broker); t != nil {
			delivered, exceeded := t.Counts(now.Add(-by.Window))
			counts = append(counts, tuner.Count{Part: q.Broker, Delivered: delivered, Exceeded: exceeded})
		}
	}
	return d.Judge(topic, counts)
}

// Judge is the verdict on counts and on what could not be accepted, which is not in time;
// undecided where no SLO is owed.
func (d *Topic) Judge(topic catalog.Topic, counts []tuner.Count) tuner.Verdict {
	if n := d.Refused(); n > 0 {
		counts = append(counts, tuner.Count{Delivered: n, Exceeded: n}) // of no broker, which none is blamed for
	}
	v := tuner.Judge(topic.Spec.SLO.Quantile, counts)
	if d.IsOver() {
		v.Decision, v.Blamed = tuner.Undecided, ""
	}
	return v
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
