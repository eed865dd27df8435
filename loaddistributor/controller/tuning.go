package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Rebalance says what becomes of the moves that loaddistributor/tuner proposes.
type Rebalance uint8

const (
	// RebalanceOff: none is looked for.
	RebalanceOff Rebalance = iota
	// RebalanceDryRun: they are logged and counted.
	RebalanceDryRun
	// RebalanceOn: they are carried out.
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

// tune has the tuner look at the topics, and does what it wants.
func (c *Controller) tune(now time.Time) {
	c.mu.Lock()
	names := c.mu.tuner.Followed()
	for _, name := range c.mu.wanting {
		if d := c.mu.topics.see(name).condition; d != nil && d.missed != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	proposals, effects := c.mu.tuner.Propose(now, func(yield func(tuner.Topic) bool) {
		for _, name := range slices.Compact(names) {
			if topic, _ := c.mu.cat.Topic(name); open(topic) && !yield(c.mu.view(topic)) {
				return
			}
		}
	}, func(name string) bool { active, _ := c.mu.cat.Active(name); return !active })
	c.tunedLocked(effects)
	c.mu.Unlock()
	for _, p := range proposals {
		p.Think(clock.Mono())
		c.mu.Lock()
		if topic, ok := c.mu.cat.Topic(p.Topic); ok && open(topic) {
			c.tunedLocked(c.mu.tuner.Act(p, c.mu.view(topic), now))
		}
		c.mu.Unlock()
	}
}

// view is a topic as the tuner sees it, for as long as mu is held.
func (st *state) view(topic catalog.Topic) tuner.Topic {
	name, spec := topic.Spec.Name(), topic.Spec
	return tuner.Topic{
		Setup: tuner.Setup{Policy: spec.Policy, Demand: spec.Demand, Quantile: spec.SLO.Quantile, Latency: spec.SLO.Latency, Start: topic.Plan},
		Name:  name, Epoch: topic.Placement.Epoch(), Holders: topic.Holders, Index: topic.Placement.Index,
		Changing: st.owned(name), Over: st.over(name), Missed: st.missed(name),
		Reports: func(broker string) (all []tuner.Report) {
			if f := st.reports(name, broker); f != nil {
				for _, r := range f.within(time.Time{}) {
					all = append(all, r.report())
				}
			}
			return all
		},
		Session: func(broker string) tuner.Session {
			if s := st.sessions[broker]; s != nil {
				return s
			}
			return nil
		},
		Free:    func() []placement.Broker { return st.cat.SnapshotFor(name) },
		Brokers: st.next.Snapshot,
		Absorbed: func(broker string) (a tuner.Absorption) {
			// Of another latency it says little.
			if b, _ := st.next.Broker(broker); b.Absorbed.Latency == spec.SLO.Latency {
				a = tuner.Absorption{Rate: tokenbucket.Rate(b.Absorbed.Rate), Burst: b.Absorbed.Burst}
			}
			return a
		},
	}
}

// latency is an obs.Latency for the tuner.
type latency struct{ *obs.Latency }

func (l latency) Add(other tuner.Histogram) { l.Merge(other.(latency).Latency) }

func latencyOf(h *srtmv1.Histogram) tuner.Histogram {
	l, err := obs.LatencyFromProto(h)
	if err != nil { // checkStats has refused others
		l = obs.NewLatency()
	}
	return latency{l}
}

func (r received) Processing() tuner.Histogram { return latencyOf(r.stats.Processing) }
func (r received) Access() tuner.Histogram     { return latencyOf(r.stats.Access) }
func (r received) Delivery() tuner.Histogram   { return latencyOf(r.stats.Delivery) }

func (r received) report() tuner.Report {
	return tuner.Report{
		At: r.at, Took: r.stats.Interval.AsDuration(), Latencies: r,
		Offered: r.stats.Offered, Delivered: r.stats.Delivered, Exceeded: r.stats.Exceeded, Subscribers: r.stats.Subscribers,
	}
}

// tunedLocked does what the tuner wants. Requires: mu held.
func (c *Controller) tunedLocked(effects []tuner.Effect) {
	for _, e := range effects {
		switch e := e.(type) {
		case tuner.Capture:
			c.captureLocked(e)
		case tuner.Relocate:
			c.fittedLocked(e)
		case tuner.Found:
			c.foundLocked(e)
		case tuner.LookShare:
			c.mu.work.Go(func() {
				shares, err := c.adaptor.shares(context.Background(), e.Topic, c.cfg.PrepareTimeout)
				held := shareproto.From(shares[e.Broker].GetAcknowledged()) // none, if it is no member
				c.mu.Lock()
				defer c.mu.Unlock()
				c.tunedLocked(c.mu.tuner.Shared(e.Topic, e.Broker, held, err))
			})
		case tuner.Learned:
			learned := catalog.Absorption{Latency: e.Latency, Rate: int64(e.Rate), Burst: e.Burst}
			if known, there := c.mu.next.Broker(e.Broker); there && known.Absorbed != learned {
				_, err := c.mu.stage(catalog.BrokerAbsorbed{ID: e.Broker, Absorption: learned})
				_ = must("remember what "+e.Broker+" absorbs", err) // the next fit learns it
			}
		case tuner.Ended:
			c.metrics.ended.WithLabelValues(e.How).Observe(e.Took.Seconds())
			now := time.Now()
			c.traceFit(e, c.mu.tuner.Status(e.Topic, now).Trials, now)
		case tuner.Recorded:
			c.metrics.count(e.Counts)
		case tuner.Note:
			args := append([]any{obs.KeyTopic, e.Topic}, e.Args...)
			if e.Broker != "" {
				args = append(args, obs.KeyBroker, e.Broker)
			}
			c.cfg.Log.Log(context.Background(), slog.Level(e.Level), e.Text, args...)
		}
	}
}

// fittedLocked moves a topic to where its fit tries it. Requires: mu held.
func (c *Controller) fittedLocked(e tuner.Relocate) {
	why := cause{reason: srtmv1.MoveReason_MOVE_REASON_FIT, why: "fitting: " + c.mu.tuner.Status(e.Topic, time.Now()).Step}
	op := moving(e.Topic, why, func(p planning) (*catalog.Spec, placement.Plan, error) {
		return p.topic.Spec, e.Plan, nil
	})
	op.end = func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if moved, ok := c.mu.cat.Topic(e.Topic); ok {
			anew := errors.Is(err, ErrUnsteady) || errors.As(err, new(*BrokerError))
			c.tunedLocked(c.mu.tuner.Moved(c.mu.view(moved), err, anew, time.Now()))
		}
	}
	c.owners.want(op)
}

// foundLocked moves publishers away from an overloaded broker. Requires: mu held.
func (c *Controller) foundLocked(e tuner.Found) {
	log := c.cfg.Log.With(obs.KeyTopic, e.Topic, obs.KeyBroker, e.From, obs.KeyReason, e.Reason)
	if e.Finding == tuner.BucketLimited {
		c.metrics.bucketLimited()
		log.Warn("the SLO is missed, for want of tokens")
		return
	}
	log.Warn("a broker is overloaded", "to", e.To, "publishers", len(e.Publishers), "dry_run", c.cfg.Rebalance == RebalanceDryRun)
	c.metrics.proposed()
	if c.cfg.Rebalance == RebalanceDryRun || c.mu.owned(e.Topic) {
		return
	}
	why := cause{reason: srtmv1.MoveReason_MOVE_REASON_REBALANCE, why: "overload, " + e.Reason}
	c.owners.want(moving(e.Topic, why, func(p planning) (*catalog.Spec, placement.Plan, error) {
		now := p.topic
		if now.Placement.Epoch() != e.Epoch {
			return nil, placement.Plan{}, reconcile.ErrSettled // it has moved since it was looked at
		}
		plan, err := placement.Shift(now.Plan, now.Spec.Demand, e.Publishers, e.To)
		return now.Spec, plan, err
	}))
}

// arrivals takes a piece of a broker's record.
func (c *Controller) arrivals(s *Session, a *srtmv1.Arrivals, now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.sessions[s.broker] != s {
		return ErrReplaced
	}
	piece := tuner.Piece{
		First: a.First, Publishers: a.Publishers, Start: mono.Wall(a.StartNs), Gaps: a.GapNs, From: a.Publisher, Lost: a.Lost,
	}
	if c.countLocked(s, a, piece, now) {
		c.tunedLocked(c.mu.tuner.Measure(s, s.broker, a.Topic, piece, now))
	}
	return nil
}

// settle gives a place to publishers that a fit has left without one: at its end,
// when something came between, or because another controller led. They go where
// their rates fit, on the brokers that carry the topic if they can: better late
// than silent for ever.
func (c *Controller) settle(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.mu.wanting {
		topic, _ := c.mu.cat.Topic(name)
		d := c.mu.topics.see(name).condition
		if !open(topic) || d == nil || d.stranded == 0 || topic.Placement.Unplaced() == 0 || c.mu.owned(name) || c.mu.tuner.Status(name, now).Running || now.Before(c.mu.topics.see(name).retry) {
			continue
		}
		c.mu.topics.at(name).retry = now.Add(moveRetry)
		why := cause{reason: srtmv1.MoveReason_MOVE_REASON_TAKE_OVER, why: "publishers have no place"}
		if c.mu.tuner.Status(name, now).Step != "" { // the fit was ours
			why.reason = srtmv1.MoveReason_MOVE_REASON_FIT
		}
		c.owners.want(moving(name, why, func(p planning) (*catalog.Spec, placement.Plan, error) {
			if p.topic.Placement.Unplaced() == 0 {
				return nil, placement.Plan{}, reconcile.ErrSettled
			}
			plan, err := p.replaceAsWide(p.topic.Spec, nil)
			return p.topic.Spec, plan, err
		}))
	}
}
