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
	every  time.Duration // interval between two reports
	window time.Duration

	// topics holds all topics of the newest report, or of the hello before the first
	// report, including topics unknown to the catalog.
	topics map[string]*Topic
	// lively holds the topics that the catalog has on the broker and that were active in
	// the window.
	lively  map[string]*Topic
	count   uint64
	heard   time.Time // time of the last report
	offered float64
}

// NewBroker returns a Broker without reports. topics are the topics of the hello.
func NewBroker(every, window time.Duration, topics ...string) *Broker {
	b := &Broker{every: every, window: window, topics: map[string]*Topic{}, lively: map[string]*Topic{}}
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

// Take accepts a checked report completely or refuses it with a *Fault. held reports
// whether the catalog has a topic on the broker; Take keeps little of other topics.
func (b *Broker) Take(r *srtmv1.BrokerReport, now time.Time, held func(topic string) bool) (news News, err error) {
	said := make(map[string]bool, len(r.Topics))
	for _, s := range r.Topics {
		said[s.Topic] = true
	}
	for name, t := range b.lively {
		if r.Changes && !said[name] && t.quiet.IsZero() && b.topics[name] == t { // else the topic was removed
			return News{}, &Fault{"report.changes", fmt.Sprintf("topic %q is left out, and had messages in the report before", name)}
		}
	}
	for name := range b.topics {
		if !said[name] && !r.Changes {
			delete(b.topics, name)
			news.Gone = append(news.Gone, name)
		}
	}
	b.count++
	b.heard, b.offered = now, 0
	from := now.Add(-b.window)
	for name, t := range b.lively {
		switch {
		case said[name]:
		case b.topics[name] != t:
			delete(b.lively, name)
		case t.quiet.Before(from):
			t.reports = nil
			delete(b.lively, name)
		default:
			t.add(Report{now, t.still(b.every)}, from)
		}
	}
	for _, s := range r.Topics {
		b.offered += float64(s.Offered) / s.Interval.AsDuration().Seconds()
		t := b.topics[s.Topic]
		if t == nil {
			t = &Topic{}
			b.topics[s.Topic] = t
		}
		b.catchUp(t, now, from)
		report := Report{now, s}
		t.hear(report, &b.heard)
		if report.Busy() {
			news.Busy = append(news.Busy, s.Topic)
		}
		if !held(s.Topic) {
			t.reports = nil
			delete(b.lively, s.Topic)
			continue
		}
		if s.Unprepared {
			news.Unprepared = append(news.Unprepared, s.Topic)
		}
		t.add(report, from)
		b.lively[s.Topic] = t
	}
	return news, nil
}

// catchUp restores the reports of a topic that was still for the whole window: each
// interval since was still.
func (b *Broker) catchUp(t *Topic, now, from time.Time) {
	if len(t.reports) > 0 || t.quiet.IsZero() {
		return
	}
	for i := min(b.window/b.every, maxReports); i > 0; i-- {
		if at := now.Add(-i * b.every); !at.Before(t.quiet) {
			t.add(Report{at, t.still(b.every)}, from)
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
// A topic that was still for the whole window has no reports: its last report holds until
// the broker reports a change.
type Topic struct {
	// From the last report.
	Channels []string
	Read     []string // channels with subscribers
	Used     bool     // the topic has connections or messages
	// Untaken is the time since which no client published and no consumer received a
	// message; zero: one did in the last report.
	Untaken time.Time

	reports []Report
	last    *srtmv1.TopicStats // nil: no report
	quiet   time.Time          // time since which nothing came, went or waited; zero: something does
	heard   *time.Time         // time of the broker's last report
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

// hear records the newest report.
func (t *Topic) hear(r Report, heard *time.Time) {
	s := r.Stats
	t.last, t.heard = s, heard
	t.Channels, t.Read = s.Channels, nil
	for i, n := range s.ChannelSubscribers {
		if n > 0 {
			t.Read = append(t.Read, s.Channels[i])
		}
	}
	t.Used = s.Publishers+s.Subscribers > 0 || s.Offered+s.Backlog+s.Depth > 0
	since(&t.quiet, r.At, !r.Busy())
	since(&t.Untaken, r.At, s.Offered+s.Delivered == 0)
}

// since records the time since which is holds; zero: is does not hold.
func since(at *time.Time, now time.Time, is bool) {
	switch {
	case !is:
		*at = time.Time{}
	case at.IsZero():
		*at = now
	}
}

// Heard returns the time of the broker's last report, whether or not the report named the
// topic.
func (t *Topic) Heard() time.Time { return *t.heard }

// still returns the report of an interval that was left out: the last report with
// interval took. The last report's own interval may differ, if it began with the topic or
// came late. Requires: no message came, went or waited in the last report.
func (t *Topic) still(took time.Duration) *srtmv1.TopicStats {
	if was := t.last; was.Interval.AsDuration() != took {
		t.last = &srtmv1.TopicStats{
			Topic: was.Topic, Interval: durationpb.New(took), Depth: was.Depth,
			Publishers: was.Publishers, Subscribers: was.Subscribers,
			Channels: was.Channels, ChannelSubscribers: was.ChannelSubscribers,
		}
	}
	return t.last
}

// add appends a report and drops reports before from.
func (t *Topic) add(r Report, from time.Time) {
	t.reports = t.since(from)
	if len(t.reports) == maxReports {
		t.reports = t.reports[1:]
	}
	t.reports = append(t.reports, r)
}

func (t *Topic) since(from time.Time) []Report {
	old := 0
	for old < len(t.reports) && t.reports[old].At.Before(from) {
		old++
	}
	return t.reports[old:]
}

// Newest returns the newest report. Requires: there was a report of the topic.
func (t *Topic) Newest() Report {
	if n := len(t.reports); n > 0 {
		return t.reports[n-1]
	}
	return Report{*t.heard, t.last}
}

// Within returns the reports since from. It does not modify t.
func (t *Topic) Within(from time.Time) []Report {
	if len(t.reports) == 0 && t.last != nil && !t.heard.Before(from) {
		return []Report{t.Newest()}
	}
	return t.since(from)
}

// Counts returns the number of messages delivered since from, and the number of late
// messages among them.
func (t *Topic) Counts(from time.Time) (delivered, exceeded uint64) {
	for _, r := range t.Within(from) {
		delivered += r.Stats.Delivered
		exceeded += r.Stats.Exceeded
	}
	return delivered, exceeded
}
