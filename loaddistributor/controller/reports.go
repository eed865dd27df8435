package controller

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
)

// maxReports bounds the reports kept of one topic of one broker, whatever the
// pace at which they come; the oldest is dropped, and the window is shorter.
const maxReports = 1024

// maxChannels bounds the channels that a report names for one topic.
const maxChannels = 10_000

// reportWindow holds the reports of one topic of one broker in the sliding window,
// oldest first, all of them checked. Of one that has been still for the whole window
// there are none: what its broker said last is so until it says otherwise.
type reportWindow struct {
	reports  []received
	last     *srtmv1.TopicStats // nil: nothing was said of it
	quiet    time.Time          // since then nothing came, went or waited; zero: something does
	untaken  time.Time          // since then no client published and no consumer was given any; zero: one does
	heard    *time.Time         // of the session: when the last report came
	channels []string
	read     []string // those of them with subscribers
	used     bool     // by its last report something is connected to it or held
}

type received struct {
	at    time.Time
	stats *srtmv1.TopicStats
}

// checkReport refuses a report as a whole.
func checkReport(r *srtmv1.BrokerReport) error {
	seen := make(map[string]bool, len(r.Topics))
	for i, t := range r.Topics {
		at := fmt.Sprintf("report.topics[%d]", i)
		if t.Topic == "" || seen[t.Topic] {
			return &BadMessage{at + ".topic", fmt.Sprintf("%q is empty or appears twice", t.Topic)}
		}
		seen[t.Topic] = true
		if err := checkStats(at, t); err != nil {
			return err
		}
	}
	return nil
}

// report takes a broker's report, which was checked, as a whole or not at all.
func (st *state) report(s *Session, r *srtmv1.BrokerReport, now time.Time) error {
	seen := make(map[string]bool, len(r.Topics))
	for _, t := range r.Topics {
		seen[t.Topic] = true
	}
	for name, f := range s.lively {
		if r.Changes && !seen[name] && f.quiet.IsZero() && s.topics[name] == f { // else it was removed
			return &BadMessage{"report.changes", fmt.Sprintf("topic %q is left out, and had messages in the report before", name)}
		}
	}
	for name := range s.topics {
		if !seen[name] && !r.Changes {
			delete(s.topics, name)
			if delete(s.unprepared, name); st.next.Expects(name, s.broker) {
				s.unprepared[name] = true
			}
		}
	}
	s.reports++
	s.heard = now
	s.offered = 0
	from := now.Add(-st.cfg.Window)
	for name, f := range s.lively {
		switch {
		case seen[name]:
		case s.topics[name] != f:
			delete(s.lively, name)
		case f.quiet.Before(from):
			f.reports = nil
			delete(s.lively, name)
		default:
			f.add(received{now, f.still(st.cfg.ReportInterval)}, from)
		}
	}
	for _, t := range r.Topics {
		f := s.topics[t.Topic]
		if f == nil {
			f = &reportWindow{}
			s.topics[t.Topic] = f
		}
		if len(f.reports) == 0 && !f.quiet.IsZero() { // it has been still: so was each interval since
			for i := min(st.cfg.Window/st.cfg.ReportInterval, maxReports); i > 0; i-- {
				if at := now.Add(-i * st.cfg.ReportInterval); !at.Before(f.quiet) {
					f.add(received{at, f.still(st.cfg.ReportInterval)}, from)
				}
			}
		}
		f.last, f.heard = t, &s.heard
		f.channels, f.read = t.Channels, nil
		for i, n := range t.ChannelSubscribers {
			if n > 0 {
				f.read = append(f.read, t.Channels[i])
			}
		}
		if t.Unprepared && st.next.Holds(t.Topic, s.broker) {
			s.unprepared[t.Topic] = true // deleted at the broker's own API, and created there anew
		}
		f.used = t.Publishers+t.Subscribers > 0 || t.Offered+t.Backlog+t.Depth > 0
		s.offered += float64(t.Offered) / t.Interval.AsDuration().Seconds()
		r := received{now, t}
		switch {
		case r.busy():
			f.quiet = time.Time{}
			st.wakeTopic(t.Topic)
		case f.quiet.IsZero():
			f.quiet = now
		}
		switch {
		case t.Offered+t.Delivered > 0:
			f.untaken = time.Time{}
		case f.untaken.IsZero():
			f.untaken = now
		}
		if !st.next.Holds(t.Topic, s.broker) { // of others nothing else is asked
			f.reports = nil
			delete(s.lively, t.Topic)
			continue
		}
		f.add(r, from)
		s.lively[t.Topic] = f
	}
	return nil
}

// Offered is what a broker's newest report says that clients sent to it, msg/s.
func (r *reader) Offered(broker string) float64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if s := r.mu.sessions[broker]; s != nil {
		return s.offered
	}
	return 0
}

func checkStats(at string, t *srtmv1.TopicStats) error {
	if d := t.Interval.AsDuration(); d <= 0 || d > time.Hour {
		return &BadMessage{at + ".interval", fmt.Sprintf("%v: want above 0, up to 1h", d)}
	}
	if t.Exceeded > t.Delivered {
		return &BadMessage{at + ".exceeded", fmt.Sprintf("%d of %d delivered", t.Exceeded, t.Delivered)}
	}
	for _, n := range []uint64{t.Offered, t.Released, t.Delivered, t.Refused, t.MaxBacklog, t.Backlog, t.Depth} {
		if n > 1<<48 {
			return &BadMessage{at, fmt.Sprintf("a count of %d", n)}
		}
	}
	if len(t.Channels) > maxChannels {
		return &BadMessage{at + ".channels", fmt.Sprintf("%d, at most %d", len(t.Channels), maxChannels)}
	}
	if n := len(t.ChannelSubscribers); n > 0 && n != len(t.Channels) {
		return &BadMessage{at + ".channel_subscribers", fmt.Sprintf("%d for %d channels", n, len(t.Channels))}
	}
	for _, h := range []struct {
		field string
		value *srtmv1.Histogram
	}{{"access", t.Access}, {"processing", t.Processing}, {"delivery", t.Delivery}, {"consumer", t.Consumer}} {
		if _, err := obs.LatencyFromProto(h.value); err != nil {
			return &BadMessage{at + "." + h.field, err.Error()}
		}
	}
	if n := len(t.DeliveryAccess); n > 0 && n != len(t.Delivery.GetCount()) {
		return &BadMessage{at + ".delivery_access", fmt.Sprintf("%d sums for %d buckets", n, len(t.Delivery.GetCount()))}
	}
	for i, sum := range t.DeliveryAccess {
		// Sums of many fractions may be off by their rounding.
		if most := float64(t.Delivery.Count[i]); !(sum >= 0 && sum <= most*(1+1e-6)) {
			return &BadMessage{fmt.Sprintf("%s.delivery_access[%d]", at, i), fmt.Sprintf("%v for %v deliveries", sum, most)}
		}
	}
	return nil
}

// still returns what is so of an interval that was left out: what the last report said, but
// for how long that took, which began with the topic or came late. Requires: no message
// came, went or waited in that.
func (f *reportWindow) still(took time.Duration) *srtmv1.TopicStats {
	if was := f.last; was.Interval.AsDuration() != took {
		f.last = &srtmv1.TopicStats{
			Topic: was.Topic, Interval: durationpb.New(took), Depth: was.Depth,
			Publishers: was.Publishers, Subscribers: was.Subscribers,
			Channels: was.Channels, ChannelSubscribers: was.ChannelSubscribers,
		}
	}
	return f.last
}

func (f *reportWindow) add(r received, from time.Time) {
	f.prune(from)
	if len(f.reports) == maxReports {
		f.reports = f.reports[1:]
	}
	f.reports = append(f.reports, r)
}

// prune drops those of before then.
func (f *reportWindow) prune(from time.Time) { f.reports = f.since(from) }

func (f *reportWindow) since(from time.Time) []received {
	old := 0
	for old < len(f.reports) && f.reports[old].at.Before(from) {
		old++
	}
	return f.reports[old:]
}

// newest requires that something was said of the topic.
func (f *reportWindow) newest() received {
	if n := len(f.reports); n > 0 {
		return f.reports[n-1]
	}
	return received{*f.heard, f.last}
}

// within returns the reports from then on. It does not modify f.
func (f *reportWindow) within(from time.Time) []received {
	if len(f.reports) == 0 && f.last != nil && !f.heard.Before(from) {
		return []received{f.newest()}
	}
	return f.since(from)
}

func (f *reportWindow) counts(from time.Time) (delivered, exceeded uint64) {
	for _, r := range f.within(from) {
		delivered += r.stats.Delivered
		exceeded += r.stats.Exceeded
	}
	return delivered, exceeded
}

// reports returns nil when the broker has reported nothing of the topic.
func (b *brokers) reports(topic, broker string) *reportWindow {
	if s := b.sessions[broker]; s != nil {
		if f := s.topics[topic]; f != nil && f.last != nil {
			return f
		}
	}
	return nil
}

// merge is a TopicStats being summed up. Histograms are added bucket by
// bucket; quantiles are left to the reader of the sum.
type merge struct {
	sum                          srtmv1.TopicStats
	interval                     time.Duration
	access, processing, consumer []uint64 // by bucket
	tail                         tail
}

// tail is what is needed to say what fraction of the p99 is access delay.
type tail struct {
	delivery []uint64  // by bucket
	access   []float64 // by bucket of delivery; as long
	unknown  bool      // for some of delivery
}

// add requires that t was checked.
func (l *tail) add(t *srtmv1.TopicStats) {
	l.delivery = addBuckets(l.delivery, t.Delivery)
	l.access = append(l.access, make([]float64, len(l.delivery)-len(l.access))...)
	if len(t.DeliveryAccess) == 0 && len(t.Delivery.GetIndex()) > 0 {
		l.unknown = true
		return
	}
	for i, sum := range t.DeliveryAccess {
		l.access[t.Delivery.Index[i]] += sum
	}
}

// fraction is TopicStatus.p99_access_fraction.
func (l *tail) fraction() *float64 {
	if l.unknown {
		return nil
	}
	mean, ok := obs.MeanInTail(0.99, l.delivery, l.access)
	if !ok {
		return nil
	}
	return &mean
}

// inTime adds the next interval of one broker: levels are the newest.
func (m *merge) inTime(t *srtmv1.TopicStats) {
	m.counts(t)
	m.interval += t.Interval.AsDuration()
	m.sum.Backlog, m.sum.Depth = t.Backlog, t.Depth
	m.sum.Publishers, m.sum.Subscribers = t.Publishers, t.Subscribers
	m.sum.Channels = t.Channels
}

// beside adds what another broker did in the same time: levels add up. The
// largest backlog is that of one broker, for backlogs of different moments
// have no sum.
func (m *merge) beside(t *srtmv1.TopicStats) {
	m.counts(t)
	m.interval = max(m.interval, t.Interval.AsDuration())
	m.sum.Backlog += t.Backlog
	m.sum.Depth += t.Depth
	m.sum.Publishers += t.Publishers
	m.sum.Subscribers += t.Subscribers
}

func (m *merge) counts(t *srtmv1.TopicStats) {
	m.sum.Topic = t.Topic
	m.sum.Offered += t.Offered
	m.sum.Released += t.Released
	m.sum.Delivered += t.Delivered
	m.sum.Exceeded += t.Exceeded
	m.sum.Refused += t.Refused
	m.sum.MaxBacklog = max(m.sum.MaxBacklog, t.MaxBacklog)
	m.access = addBuckets(m.access, t.Access)
	m.processing = addBuckets(m.processing, t.Processing)
	m.consumer = addBuckets(m.consumer, t.Consumer)
	m.tail.add(t)
}

// addBuckets requires that h was checked: its indices are those of the layout.
func addBuckets(sum []uint64, h *srtmv1.Histogram) []uint64 {
	if n := len(h.GetIndex()); n > 0 {
		if last := int(h.Index[n-1]); last >= len(sum) {
			sum = append(sum, make([]uint64, last+1-len(sum))...)
		}
	}
	for i, index := range h.GetIndex() {
		sum[index] += h.Count[i]
	}
	return sum
}

func buckets(sum []uint64) *srtmv1.Histogram {
	h := obs.NewLatency().Proto() // for the layout
	for i, n := range sum {
		if n > 0 {
			h.Index = append(h.Index, uint32(i))
			h.Count = append(h.Count, n)
		}
	}
	return h
}

func (m *merge) stats() *srtmv1.TopicStats {
	m.sum.Interval = durationpb.New(m.interval)
	m.sum.Access, m.sum.Processing, m.sum.Delivery = buckets(m.access), buckets(m.processing), buckets(m.tail.delivery)
	m.sum.Consumer = buckets(m.consumer)
	if !m.tail.unknown {
		m.sum.DeliveryAccess = m.sum.DeliveryAccess[:0]
		for _, index := range m.sum.Delivery.Index {
			m.sum.DeliveryAccess = append(m.sum.DeliveryAccess, m.tail.access[index])
		}
	}
	return &m.sum
}
