// Package reports checks and stores the brokers' reports about their topics. Check
// refuses impossible reports. A Broker keeps the reports of one session in the sliding
// window. A Sum adds reports. Counts and histograms are added; percentiles are never
// averaged.
//
// A report may leave out an unchanged topic without messages that came, went or waited.
// The result is the same as if the report had listed the topic.
package reports

import (
	"fmt"
	"iter"
	"maps"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// maxReports bounds the reports kept of one topic of one broker at any reporting rate.
// The oldest report is dropped, which shortens the window.
const maxReports = 1024

// Broker holds the reports of one session of a broker. Make it with NewBroker.
type Broker struct {
	// Set by NewBroker.
	interval time.Duration // interval between two reports
	window   time.Duration

	// topics holds all topics of the newest report, or of the hello before the first
	// report, including topics unknown to the catalog.
	topics map[string]*Topic
	// active holds the topics that the catalog has on the broker and that were active in
	// the window.
	active   map[string]*Topic
	count    uint64
	reported time.Time // time of the last report
	offered  float64
}

// NewBroker returns a Broker without reports. topics are the topics of the hello.
func NewBroker(interval, window time.Duration, topics ...string) *Broker {
	b := &Broker{interval: interval, window: window, topics: map[string]*Topic{}, active: map[string]*Topic{}}
	for _, name := range topics {
		b.topics[name] = &Topic{}
	}
	return b
}

// News lists the changes in a report.
type News struct {
	Gone       []string // topics no longer listed
	Busy       []string // topics with messages that came, went or wait
	Unprepared []string // topics deleted and created again through the broker's own API
}

// Apply accepts a checked report completely or refuses it with a *Fault. placed reports
// whether the catalog has a topic on the broker; Apply keeps little of other topics.
func (b *Broker) Apply(r *srtmv1.BrokerReport, now time.Time, placed func(topic string) bool) (news News, err error) {
	listed := make(map[string]bool, len(r.Topics))
	for _, s := range r.Topics {
		listed[s.Topic] = true
	}
	for name, t := range b.active {
		if r.Changes && !listed[name] && t.quiet.IsZero() && b.topics[name] == t { // else the topic was removed
			return News{}, &Fault{"report.changes", fmt.Sprintf("topic %q is left out, and had messages in the report before", name)}
		}
	}
	for name := range b.topics {
		if !listed[name] && !r.Changes {
			delete(b.topics, name)
			news.Gone = append(news.Gone, name)
		}
	}
	b.count++
	b.reported, b.offered = now, 0
	start := now.Add(-b.window)
	for name, t := range b.active {
		switch {
		case listed[name]:
		case b.topics[name] != t:
			delete(b.active, name)
		case t.quiet.Before(start):
			t.reports = nil
			delete(b.active, name)
		default:
			t.add(Report{now, t.idleStats(b.interval)}, start)
		}
	}
	for _, s := range r.Topics {
		b.offered += float64(s.Offered) / s.Interval.AsDuration().Seconds()
		t := b.topics[s.Topic]
		if t == nil {
			t = &Topic{}
			b.topics[s.Topic] = t
		}
		b.catchUp(t, now, start)
		report := Report{now, s}
		t.update(report, &b.reported)
		if report.Busy() {
			news.Busy = append(news.Busy, s.Topic)
		}
		if !placed(s.Topic) {
			t.reports = nil
			delete(b.active, s.Topic)
			continue
		}
		if s.Unprepared {
			news.Unprepared = append(news.Unprepared, s.Topic)
		}
		t.add(report, start)
		b.active[s.Topic] = t
	}
	return news, nil
}

// catchUp restores the reports of a topic that was idle for the whole window: each
// interval since was still.
func (b *Broker) catchUp(t *Topic, now, start time.Time) {
	if len(t.reports) > 0 || t.quiet.IsZero() {
		return
	}
	for i := min(b.window/b.interval, maxReports); i > 0; i-- {
		if time := now.Add(-i * b.interval); !time.Before(t.quiet) {
			t.add(Report{time, t.idleStats(b.interval)}, start)
		}
	}
}

// Count returns the number of reports.
func (b *Broker) Count() uint64 { return b.count }

// Offered returns the rate in msg/s that clients sent to the broker, from the newest
// report.
func (b *Broker) Offered() float64 { return b.offered }

// Has reports whether the broker listed the topic in its last report or its hello.
func (b *Broker) Has(topic string) bool { return b.topics[topic] != nil }

// Topics yields the broker's topics in no order.
func (b *Broker) Topics() iter.Seq2[string, *Topic] { return maps.All(b.topics) }

// Topic returns the reports of a topic, or nil without any report.
func (b *Broker) Topic(name string) *Topic {
	if t := b.topics[name]; t != nil && t.last != nil {
		return t
	}
	return nil
}

// Forget drops a topic, so a later topic of the same name starts with no reports.
func (b *Broker) Forget(topic string) { delete(b.topics, topic) }

// Topic holds the reports of one topic of one broker in the sliding window, oldest first.
// A topic that was idle for the whole window has no reports: its last report holds until
// the broker reports a change.
type Topic struct {
	// From the last report.
	Channels []string
	Read     []string // channels with subscribers
	Used     bool     // the topic has connections or messages
	// Untaken is the time since which no client published and no consumer received a
	// message; zero: one did in the last report.
	Untaken time.Time

	reports  []Report
	last     *srtmv1.TopicStats // nil: no report
	quiet    time.Time          // time since which nothing came, went or waited; zero: something does
	reported *time.Time         // time of the broker's last report
}

// Report is one report of a topic.
type Report struct {
	At    time.Time
	Stats *srtmv1.TopicStats
}

// Busy reports whether messages came, went or waited.
func (r Report) Busy() bool {
	return r.Stats.Offered+r.Stats.Refused+r.Stats.Delivered+r.Stats.Backlog > 0
}

// update records the newest report.
func (t *Topic) update(r Report, reported *time.Time) {
	s := r.Stats
	t.last, t.reported = s, reported
	t.Channels, t.Read = s.Channels, nil
	for i, n := range s.ChannelSubscribers {
		if n > 0 {
			t.Read = append(t.Read, s.Channels[i])
		}
	}
	t.Used = s.Publishers+s.Subscribers > 0 || s.Offered+s.Backlog+s.Depth > 0
	setSince(&t.quiet, r.At, !r.Busy())
	setSince(&t.Untaken, r.At, s.Offered+s.Delivered == 0)
}

// setSince records in start the time since which the condition holds, or zero if it does not hold.
func setSince(start *time.Time, now time.Time, holds bool) {
	switch {
	case !holds:
		*start = time.Time{}
	case start.IsZero():
		*start = now
	}
}

// LastReport returns the time of the broker's last report, whether or not the report named the
// topic.
func (t *Topic) LastReport() time.Time { return *t.reported }

// idleStats returns the report of an interval that was left out: the last report with
// the given interval. The last report's own interval may differ, if it began with the topic or
// came late. Requires: no message came, went or waited in the last report.
func (t *Topic) idleStats(interval time.Duration) *srtmv1.TopicStats {
	if previous := t.last; previous.Interval.AsDuration() != interval {
		t.last = &srtmv1.TopicStats{
			Topic: previous.Topic, Interval: durationpb.New(interval), Depth: previous.Depth,
			Publishers: previous.Publishers, Subscribers: previous.Subscribers,
			Channels: previous.Channels, ChannelSubscribers: previous.ChannelSubscribers,
		}
	}
	return t.last
}

// add appends a report and drops reports before start.
func (t *Topic) add(r Report, start time.Time) {
	t.reports = t.reportsFrom(start)
	if len(t.reports) == maxReports {
		t.reports = t.reports[1:]
	}
	t.reports = append(t.reports, r)
}

func (t *Topic) reportsFrom(start time.Time) []Report {
	old := 0
	for old < len(t.reports) && t.reports[old].At.Before(start) {
		old++
	}
	return t.reports[old:]
}

// Newest returns the newest report. Requires: there was a report of the topic.
func (t *Topic) Newest() Report {
	if n := len(t.reports); n > 0 {
		return t.reports[n-1]
	}
	return Report{*t.reported, t.last}
}

// Within returns the reports since start. It does not modify t.
func (t *Topic) Within(start time.Time) []Report {
	if len(t.reports) == 0 && t.last != nil && !t.reported.Before(start) {
		return []Report{t.Newest()}
	}
	return t.reportsFrom(start)
}

// Counts returns the number of messages delivered since start, and the number of late
// messages among them.
func (t *Topic) Counts(start time.Time) (delivered, exceeded uint64) {
	for _, r := range t.Within(start) {
		delivered += r.Stats.Delivered
		exceeded += r.Stats.Exceeded
	}
	return delivered, exceeded
}
