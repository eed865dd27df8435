// Package reports is what brokers say of their topics: Check refuses what cannot be, a
// Broker keeps what one session has reported in the sliding window, and a Sum puts reports
// together. Counts and histograms are added up; percentiles are never averaged.
//
// A report may leave out a topic of which nothing has changed and nothing came, went or
// waited; what is known of it is the same as if the report had said so.
package reports

import (
	"fmt"
	"iter"
	"maps"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// maxReports bounds the reports kept of one topic of one broker, whatever the
// pace at which they come; the oldest is dropped, and the window is shorter.
const maxReports = 1024

// Broker is what one session of a broker has reported. Make it with NewBroker.
type Broker struct {
	// Set once.
	every  time.Duration // between two reports
	window time.Duration

	// Its topics, ours or not: those of its newest report, or before the first
	// one of its hello.
	topics map[string]*Topic
	// Those of them that are ours and have not been still for the whole window.
	lively  map[string]*Topic
	count   uint64
	heard   time.Time // when the last one came
	offered float64
}

// NewBroker returns a Broker that has reported nothing yet; its hello had these topics.
func NewBroker(every, window time.Duration, topics ...string) *Broker {
	b := &Broker{every: every, window: window, topics: map[string]*Topic{}, lively: map[string]*Topic{}}
	for _, name := range topics {
		b.topics[name] = &Topic{}
	}
	return b
}

// News is what a report says that was not so before.
type News struct {
	Gone       []string // topics that are not there any more
	Busy       []string // of which messages came, went or wait
	Unprepared []string // deleted at the broker's own API, and created there anew
}

// Take takes a report that was checked, as a whole or not at all; the error is a *Fault. held
// reports whether the catalog has a topic on the broker: of others little is kept.
func (b *Broker) Take(r *srtmv1.BrokerReport, now time.Time, held func(topic string) bool) (news News, err error) {
	said := make(map[string]bool, len(r.Topics))
	for _, s := range r.Topics {
		said[s.Topic] = true
	}
	for name, t := range b.lively {
		if r.Changes && !said[name] && t.quiet.IsZero() && b.topics[name] == t { // else it was removed
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

// catchUp has a topic that has been still for the whole window have the reports of that
// again: each interval since was still.
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

// Count is how many reports have come.
func (b *Broker) Count() uint64 { return b.count }

// Offered is what the newest report says that clients sent to the broker, msg/s.
func (b *Broker) Offered() float64 { return b.offered }

// Has reports whether the broker has listed the topic in its last report, or in its hello.
func (b *Broker) Has(topic string) bool { return b.topics[topic] != nil }

// Topics are those that it has, in no order.
func (b *Broker) Topics() iter.Seq2[string, *Topic] { return maps.All(b.topics) }

// Topic returns nil when nothing was reported of the topic.
func (b *Broker) Topic(name string) *Topic {
	if t := b.topics[name]; t != nil && t.last != nil {
		return t
	}
	return nil
}

// Forget has a topic begin anew: one that comes under its name has reports of its own.
func (b *Broker) Forget(topic string) { delete(b.topics, topic) }

// Topic holds the reports of one topic of one broker in the sliding window, oldest first. Of
// one that has been still for the whole window there are none: what its broker said last is
// so until it says otherwise.
type Topic struct {
	// By the last report.
	Channels []string
	Read     []string // those of them with subscribers
	Used     bool     // something is connected to it or held
	// Since then no client published and no consumer was given any; zero: one does.
	Untaken time.Time

	reports []Report
	last    *srtmv1.TopicStats // nil: nothing was said of it
	quiet   time.Time          // since then nothing came, went or waited; zero: something does
	heard   *time.Time         // of the broker: when the last report came
}

// Report is what was said of a topic.
type Report struct {
	At    time.Time
	Stats *srtmv1.TopicStats
}

// Busy reports whether messages came, went or waited.
func (r Report) Busy() bool {
	return r.Stats.Offered+r.Stats.Refused+r.Stats.Delivered+r.Stats.Backlog > 0
}

// hear takes what is said now.
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

// since notes since when something is so; zero: it is not.
func since(at *time.Time, now time.Time, is bool) {
	switch {
	case !is:
		*at = time.Time{}
	case at.IsZero():
		*at = now
	}
}

// Heard is when the broker's last report came, whether or not it named the topic.
func (t *Topic) Heard() time.Time { return *t.heard }

// still returns what is so of an interval that was left out: what the last report said, but
// for how long that took, which began with the topic or came late. Requires: no message
// came, went or waited in that.
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

// add drops those of before from.
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

// Newest requires that something was said of the topic.
func (t *Topic) Newest() Report {
	if n := len(t.reports); n > 0 {
		return t.reports[n-1]
	}
	return Report{*t.heard, t.last}
}

// Within returns the reports from then on. It does not modify t.
func (t *Topic) Within(from time.Time) []Report {
	if len(t.reports) == 0 && t.last != nil && !t.heard.Before(from) {
		return []Report{t.Newest()}
	}
	return t.since(from)
}

// Counts is how many messages were delivered from then on, and how many of them too late.
func (t *Topic) Counts(from time.Time) (delivered, exceeded uint64) {
	for _, r := range t.Within(from) {
		delivered += r.Stats.Delivered
		exceeded += r.Stats.Exceeded
	}
	return delivered, exceeded
}
