package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Rebalance selects the handling of the moves that loaddistributor/tuner proposes.
type Rebalance uint8

const (
	// RebalanceOff: no search for moves.
	RebalanceOff Rebalance = iota
	// RebalanceDryRun: log and count moves.
	RebalanceDryRun
	// RebalanceOn: carry out moves.
	RebalanceOn
)

var rebalanceNames = []string{"off", "dry-run", "on"}

// ParseRebalance reads "off", "dry-run" or "on".
func ParseRebalance(s string) (Rebalance, error) {
	i := slices.Index(rebalanceNames, s)
	if i < 0 {
		return RebalanceOff, fmt.Errorf("%q is none of off, dry-run, on", s)
	}
	return Rebalance(i), nil
}

// tuning carries out the tuner's effects.
type tuning struct {
	// Set once.
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	topics  *topics
	tuner   *tuner.Tuner
	life    *lifetime
	adaptor grants
	owners  *owners
	metrics metrics
	tracer  trace.Tracer
	fleet   *fleet
}

// run runs the tuner over the topics and carries out its effects.
func (t *tuning) run(now time.Time) {
	t.mu.Lock()
	names := t.tuner.Followed()
	for _, name := range t.topics.busy {
		if t.topics.peek(name).condition.IsMissed() {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	proposals, effects := t.tuner.Propose(now, func(yield func(tuner.Topic) bool) {
		for _, name := range slices.Compact(names) {
			if topic, _ := t.cat.committed.Topic(name); topic.Open() && !yield(t.view(topic)) {
				return
			}
		}
	}, func(name string) bool { active, _ := t.cat.committed.Active(name); return !active })
	t.perform(effects)
	t.mu.Unlock()
	for _, p := range proposals {
		p.Compute(clock.Mono())
		t.mu.Lock()
		if topic, ok := t.cat.committed.Topic(p.Topic); ok && topic.Open() {
			t.perform(t.tuner.Act(p, t.view(topic), now))
		}
		t.mu.Unlock()
	}
}

// view returns the tuner's view of a topic, valid while mu is held.
func (t *tuning) view(topic catalog.Topic) tuner.Topic {
	name, spec := topic.Spec.Name(), topic.Spec
	l := t.topics.peek(name)
	return tuner.Topic{
		Setup: tuner.Setup{Policy: spec.Policy, Demand: spec.Demand, Quantile: spec.SLO.Quantile, Latency: spec.SLO.Latency, Start: topic.Plan},
		Name:  name, Epoch: topic.Placement.Epoch(), Holders: topic.Holders, Index: topic.Placement.Index,
		Changing: l.owner != nil, Over: l.condition.IsOver(), Missed: l.condition.IsMissed(),
		Reports: func(broker string) (all []tuner.Report) {
			if reported := t.brokers.reported(broker).Topic(name); reported != nil {
				for _, r := range reported.Within(time.Time{}) {
					all = append(all, tuner.Report{
						At: r.At, Interval: r.Stats.Interval.AsDuration(), Latencies: latencies{r.Stats},
						Offered: r.Stats.Offered, Delivered: r.Stats.Delivered, Exceeded: r.Stats.Exceeded, Subscribers: r.Stats.Subscribers,
					})
				}
			}
			return all
		},
		Session: func(broker string) tuner.Session {
			if s := t.brokers.sessions[broker]; s != nil {
				return s
			}
			return nil
		},
		Free:    func() []placement.Broker { return t.cat.committed.Snapshot(name) },
		Brokers: func() []placement.Broker { return t.cat.next.Snapshot("") },
		Absorbed: func(broker string) (a tuner.Absorption) {
			// An absorption measured for another latency does not apply.
			if b, _ := t.cat.next.Broker(broker); b.Absorbed.Latency == spec.SLO.Latency {
				a = tuner.Absorption{Rate: tokenbucket.Rate(b.Absorbed.Rate), Burst: b.Absorbed.Burst}
			}
			return a
		},
	}
}

// latency adapts an histogram.Latency for the tuner.
type latency struct{ *histogram.Latency }

func (l latency) Add(other tuner.Histogram) { l.Merge(other.(latency).Latency) }

func latencyOf(h *srtmv1.Histogram) tuner.Histogram {
	l, err := obs.LatencyFromProto(h)
	if err != nil { // reports.Check has refused invalid histograms
		l = histogram.NewLatency()
	}
	return latency{l}
}

// latencies has the latencies of a report.
type latencies struct{ stats *srtmv1.TopicStats }

func (l latencies) Processing() tuner.Histogram { return latencyOf(l.stats.Processing) }
func (l latencies) Access() tuner.Histogram     { return latencyOf(l.stats.Access) }
func (l latencies) Delivery() tuner.Histogram   { return latencyOf(l.stats.Delivery) }

// perform carries out the tuner's effects. Requires: the lock held.
func (t *tuning) perform(effects []tuner.Effect) {
	for _, e := range effects {
		switch e := e.(type) {
		case tuner.Capture:
			t.capture(e)
		case tuner.Relocate:
			t.relocate(e)
		case tuner.Found:
			t.applyFinding(e)
		case tuner.LookShare:
			t.life.work.Go(func() {
				shares, err := t.adaptor.shares(context.Background(), e.Topic, t.cfg.PrepareTimeout)
				share := service.ShareOf(shares[e.Broker].GetAcknowledged()) // none for a broker that is not a member
				t.mu.Lock()
				defer t.mu.Unlock()
				t.perform(t.tuner.Shared(e.Topic, e.Broker, share, err))
			})
		case tuner.Learned:
			learned := catalog.Absorption{Latency: e.Latency, Rate: int64(e.Rate), Burst: e.Burst}
			if broker, found := t.cat.next.Broker(e.Broker); found && broker.Absorbed != learned {
				_, err := t.cat.stage(catalog.BrokerAbsorbed{ID: e.Broker, Absorption: learned})
				_ = mustSucceed("remember what "+e.Broker+" absorbs", err) // the next fit learns it again
			}
		case tuner.Ended:
			t.metrics.ended.WithLabelValues(e.Outcome).Observe(e.Duration.Seconds())
			t.fleet.recordFit(e)
			now := time.Now()
			t.traceFit(e, t.tuner.Status(e.Topic, now).Trials, now)
		case tuner.Recorded:
			t.metrics.count(e.Counts)
		case tuner.Note:
			args := append([]any{obs.KeyTopic, e.Topic}, e.Args...)
			if e.Broker != "" {
				args = append(args, obs.KeyBroker, e.Broker)
			}
			t.cfg.Log.Log(context.Background(), slog.Level(e.Level), e.Text, args...)
		}
	}
}

// relocate moves a topic to the placement that its fit tries. Requires: the lock held.
func (t *tuning) relocate(e tuner.Relocate) {
	cause := cause{reason: srtmv1.MoveReason_MOVE_REASON_FIT, text: "fitting: " + t.tuner.Status(e.Topic, time.Now()).Step}
	op := moving(e.Topic, cause, func(p planning) (*catalog.Spec, placement.Plan, error) {
		return p.topic.Spec, e.Plan, nil
	})
	op.end = func(err error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if moved, ok := t.cat.committed.Topic(e.Topic); ok {
			anew := errors.Is(err, ErrUnsteady) || errors.As(err, new(*BrokerError))
			t.perform(t.tuner.Moved(t.view(moved), err, anew, time.Now()))
		}
	}
	t.owners.enqueue(op)
}

// applyFinding handles a finding of the tuner: it moves publishers away from an overloaded
// broker. Requires: the lock held.
func (t *tuning) applyFinding(e tuner.Found) {
	log := t.cfg.Log.With(obs.KeyTopic, e.Topic, obs.KeyBroker, e.From, obs.KeyReason, e.Reason)
	if e.Finding == tuner.BucketLimited {
		t.metrics.bucketLimited.Inc()
		log.Warn("the SLO is missed, for want of tokens")
		return
	}
	log.Warn("a broker is overloaded", "to", e.To, "publishers", len(e.Publishers), "dry_run", t.cfg.Rebalance == RebalanceDryRun)
	t.metrics.proposed.Inc()
	if t.cfg.Rebalance == RebalanceDryRun || t.topics.owned(e.Topic) {
		return
	}
	cause := cause{reason: srtmv1.MoveReason_MOVE_REASON_REBALANCE, text: "overload, " + e.Reason}
	t.owners.enqueue(moving(e.Topic, cause, func(p planning) (*catalog.Spec, placement.Plan, error) {
		now := p.topic
		if now.Placement.Epoch() != e.Epoch {
			return nil, placement.Plan{}, reconcile.ErrSettled // the topic has moved since the tuner looked
		}
		plan, err := placement.Shift(now.Plan, now.Spec.Demand, e.Publishers, e.To)
		return now.Spec, plan, err
	}))
}

// traceFit records a span for a completed fit, with an event for each placement that the
// tuner still remembers.
func (t *tuning) traceFit(e tuner.Ended, trials []tuner.Trial, now time.Time) {
	_, span := t.tracer.Start(context.Background(), "fit topic", trace.WithTimestamp(now.Add(-e.Duration)),
		trace.WithAttributes(attribute.String(obs.KeyTopic, e.Topic), attribute.String("outcome", e.Outcome)))
	for _, trial := range trials {
		span.AddEvent("trial", trace.WithTimestamp(trial.Start), trace.WithAttributes(attribute.Int("brokers", len(trial.Quotas)), attribute.String("verdict", trial.Verdict)))
	}
	span.End(trace.WithTimestamp(now))
}

// A broker has one record of a topic's arrivals. A fit, the learning of an open topic,
// and a profile share the record.

// recording is a record that the tuner has requested from a broker.
type recording struct {
	started bool // the previous record has ended
	// Publishers named by the broker in the record, their owners, and the forwarding
	// brokers.
	publishers, owners, forwarders []string
}

// maxCaptures is the maximum number of topics in a request for arrivals.
const maxCaptures = 1000

// captureAll requests the arrivals of topics for the given time.
func (s *Session) captureAll(topics []string, lasts time.Duration) {
	for part := range slices.Chunk(topics, maxCaptures) {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{Capture: &srtmv1.CaptureArrivals{
			Topics: part, Lasts: durationpb.New(lasts),
		}}})
	}
}

// capture requests the arrivals of a topic for the given time.
func (s *Session) capture(topic string, lasts time.Duration) {
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{Capture: &srtmv1.CaptureArrivals{
		Topic: topic, Lasts: durationpb.New(lasts),
	}}})
}

// record requests a record for learning. If a fit is recording already, both share the
// record: learning that begins again starts with the names that the broker has sent. If
// record returns true, the caller extends the present record.
func (t *learning) record(s *Session, live *learned.Topic, topic string, o learned.Order, now time.Time) (extend bool) {
	f := s.recordings[topic]
	switch {
	case f == nil && o.Anew:
		s.capture(topic, 0)
	case f != nil && o.Anew:
		if f.started {
			countPiece(t.cfg.Log, s, live, topic, tuner.Piece{First: true, Publishers: slices.Clone(f.publishers)}, f.owners, f.forwarders, 0, now)
		}
		return false
	case f != nil && o.Lasts == 0:
		return false
	case !o.Anew && o.Lasts > 0:
		return true
	}
	s.capture(topic, o.Lasts)
	return false
}

// countPiece passes a piece of a record to learning.
func countPiece(log *slog.Logger, s *Session, live *learned.Topic, topic string, piece tuner.Piece, owners, forwarders []string, others uint64, now time.Time) {
	if err := live.Count(s.broker, piece, owners, forwarders, others, now); err != nil {
		log.Warn("a record of arrivals is not to be trusted", obs.KeyTopic, topic, obs.KeyBroker, s.broker, obs.KeyError, err)
	}
}

// capture carries out the tuner's request for a record. It restarts a record for
// learning, so that the broker names the publishers again.
func (t *tuning) capture(e tuner.Capture) {
	s := e.Session.(*Session)
	if e.Lasts == 0 {
		delete(s.recordings, e.Topic)
		if live := t.topics.peek(e.Topic).learned; live != nil && t.brokers.sessions[s.broker] == s {
			live.Ended(s.broker)
		}
	} else if s.recordings[e.Topic] == nil {
		s.recordings[e.Topic] = new(recording)
		s.capture(e.Topic, 0)
	}
	s.capture(e.Topic, e.Lasts)
}

// measure passes a piece of a broker's record to learning, and to the tuner if the tuner
// requested the record. Requires: the lock held.
func (t *tuning) measure(s *Session, a *srtmv1.Arrivals, now time.Time) {
	piece := tuner.Piece{
		First: a.First, Publishers: a.Publishers, Start: mono.Wall(a.StartNs), Gaps: a.GapNs, From: a.Publisher, Lost: a.Lost,
	}
	f := s.recordings[a.Topic]
	if f != nil && a.First {
		*f = recording{started: true}
	}
	if f != nil && f.started {
		f.publishers, f.owners = append(f.publishers, a.Publishers...), append(f.owners, a.Owners...)
		f.forwarders = append(f.forwarders, a.Forwarders...)
	}
	if live := t.topics.peek(a.Topic).learned; live != nil {
		countPiece(t.cfg.Log, s, live, a.Topic, piece, a.Owners, a.Forwarders, a.Others, now)
	}
	if f == nil || f.started {
		t.perform(t.tuner.Measure(s, s.broker, a.Topic, piece, now))
	}
}
