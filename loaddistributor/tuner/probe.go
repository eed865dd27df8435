package tuner

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// suspect examines a topic with a missed SLO or an earlier suspicion. It skips a topic
// that is being fitted.
func (t *Tuner) suspect(topic Topic, now time.Time) *Proposal {
	f, w := t.fits[topic.Name], t.watches[topic.Name]
	switch {
	case !t.cfg.Rebalance:
		return nil
	case topic.Over: // the excess also delays messages, besides the broker's load
		t.forget(topic.Name)
		return nil
	case !topic.Missed && w == nil || topic.Changing || f.running() || f.records():
		t.dropProbe(topic.Name)
		return nil
	case w == nil:
		w = &Watch{}
		t.watches[topic.Name] = w
	}
	p := &Proposal{Topic: topic.Name, epoch: topic.Epoch, watch: w, rules: t.cfg.Rules, suspect: Suspect{
		Quantile: topic.Quantile, Latency: topic.Latency, Plan: topic.Start, Demand: topic.Demand, Brokers: topic.Brokers(),
	}}
	for _, q := range topic.Start.Quotas {
		p.suspect.Loads = append(p.suspect.Loads, topic.load(q.Broker, now.Add(-t.cfg.Window)))
	}
	if q := t.probes[topic.Name]; q != nil {
		t.probe(topic, q, now)
		p.suspect.Recorded, p.suspect.Evidence = q.broker, q.result
	}
	return p
}

// forget ends the watch and the probe of a topic.
func (t *Tuner) forget(topic string) {
	delete(t.watches, topic)
	t.dropProbe(topic)
}

// apply carries out the decision about a suspect.
func (t *Tuner) apply(p *Proposal, topic Topic, now time.Time) {
	if p.finding == Suspected {
		if q := t.probes[p.Topic]; q == nil || q.broker != p.move.From {
			t.dropProbe(p.Topic)
			q = &probe{broker: p.move.From, epoch: topic.Epoch, record: newRecording(topic, now)}
			t.probes[p.Topic] = q
			t.request(q.record, topic, []string{q.broker}, now)
		}
		return
	}
	t.dropProbe(p.Topic)
	if p.finding != Nothing {
		t.emit(Found{p.Topic, p.epoch, p.finding, p.move})
	}
}

// load sums up the broker's reports since the given time.
func (topic Topic) load(broker string, start time.Time) Load {
	l := Load{Broker: broker}
	for _, r := range topic.reportsSince(broker, start) {
		l.Delivered += r.Delivered
		l.Exceeded += r.Exceeded
		l.Waited += uint64(r.Access().CountAbove(topic.Latency))
	}
	return l
}

// reportsSince returns the broker's reports since the given time.
func (topic Topic) reportsSince(broker string, start time.Time) []Report {
	reports := topic.Reports(broker)
	if i := slices.IndexFunc(reports, func(r Report) bool { return !r.At.Before(start) }); i >= 0 {
		return reports[i:]
	}
	return nil
}

// probe gathers evidence at a suspected broker: some seconds of arrivals, and the
// broker's share of the contract. A broker without a record is judged by its reports.
type probe struct {
	broker   string
	epoch    uint64     // epoch of the placement
	record   *recording // nil: over
	start    time.Time  // time of the broker's first piece; zero: not yet
	evidence *Evidence  // evidence while the share is requested; nil: no request
	result   *Evidence  // nil: not yet
}

func (t *Tuner) dropProbe(topic string) {
	if q := t.probes[topic]; q != nil && q.record != nil && !t.fits[topic].records() {
		t.stop(q.record, topic)
	}
	delete(t.probes, topic)
}

// probe advances a probe.
func (t *Tuner) probe(topic Topic, q *probe, now time.Time) {
	if q.record == nil {
		return // the share is requested, or there is a result
	}
	if q.epoch != topic.Epoch {
		t.dropProbe(topic.Name)
		return
	}
	if q.start.IsZero() && q.record.trace.Started(q.broker) {
		q.start = now
	}
	switch {
	case q.start.IsZero() && now.Sub(q.record.start) < recordPatience,
		!q.start.IsZero() && now.Sub(q.start) < t.cfg.Rules.Capture:
		t.request(q.record, topic, []string{q.broker}, now)
		return
	}
	start := now.Add(-t.cfg.Window)
	q.evidence = &Evidence{Broker: q.broker, Arrivals: q.record.trace.Take(wall(now)), Load: topic.load(q.broker, start)}
	t.stop(q.record, topic.Name)
	q.record = nil
	if !q.start.IsZero() {
		// Load in the recorded time, if reports are frequent enough.
		if l := topic.load(q.broker, q.start.Add(t.cfg.Report)); l.Delivered >= minCount {
			q.evidence.Load = l
		}
	}
	// A low quantile of the reports estimates a message that meets no other message.
	var merged Histogram
	for _, r := range topic.reportsSince(q.broker, start) {
		sum(&merged, r.Processing())
	}
	if merged != nil {
		q.evidence.Unloaded = merged.Quantile(0.1)
	}
	t.emit(LookShare{topic.Name, q.broker})
}

// recording holds the arrivals that brokers send during a topic's fit or a suspicion.
type recording struct {
	start     time.Time
	trace     *Trace
	requested map[Session]time.Time // last request, by session
	// Sessions that sent an invalid piece. The tuner ignores them from then on.
	untrusted map[Session]bool
	delivered bool // the search has received some arrivals
}

func newRecording(topic Topic, now time.Time) *recording {
	return &recording{start: now, trace: NewTrace(wall(now), topic.Index), requested: map[Session]time.Time{}, untrusted: map[Session]bool{}}
}

const (
	// recordFor is the recording time of one request. recordAgain is the interval between
	// requests, and recordBegin the interval while the broker has not started, because it
	// had not created the topic at the last request.
	recordFor   = 20 * time.Second
	recordAgain = 5 * time.Second
	recordBegin = 250 * time.Millisecond
	// recordPatience is the time for brokers to start recording, and then to send
	// arrivals, before the topic is fitted without arrivals.
	recordPatience = 1500 * time.Millisecond
)

// request requests arrivals from brokers and repeats the requests when due.
func (t *Tuner) request(r *recording, topic Topic, brokers []string, now time.Time) {
	r.trace.Expect(brokers, wall(now))
	for _, id := range brokers {
		s := topic.Session(id)
		if s == nil || r.untrusted[s] {
			continue
		}
		interval := recordAgain
		if !r.trace.Started(id) {
			interval = recordBegin
		}
		if requested, found := r.requested[s]; !found || now.Sub(requested) >= interval {
			r.requested[s] = now
			t.emit(Capture{s, topic.Name, recordFor})
		}
	}
}

// stop ends a recording on all brokers.
func (t *Tuner) stop(r *recording, topic string) {
	// order: each entry on its own
	for s := range r.requested {
		t.emit(Capture{Session: s, Topic: topic})
	}
}

func (r *recording) started(topic Topic) bool {
	return !slices.ContainsFunc(topic.Start.Quotas, func(q placement.Quota) bool { return !r.trace.Started(q.Broker) })
}

// wall converts a time to the clock of brokers' stamps.
func wall(t time.Time) mono.Wall { return mono.Wall(t.UnixNano()) }
