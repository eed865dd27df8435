package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// Relief says what becomes of the moves that loaddistributor/tuner proposes.
type Relief uint8

const (
	// ReliefOff: none is looked for.
	ReliefOff Relief = iota
	// ReliefDryRun: they are logged and counted.
	ReliefDryRun
	// ReliefOn: they are carried out.
	ReliefOn
)

var reliefNames = []string{"off", "dry-run", "on"}

// ParseRelief reads "off", "dry-run" or "on".
func ParseRelief(s string) (Relief, error) {
	i := slices.Index(reliefNames, s)
	if i < 0 {
		return ReliefOff, fmt.Errorf("%q is none of off, dry-run, on", s)
	}
	return Relief(i), nil
}

// Proposed returns how many moves away from overloaded brokers were due so far,
// carried out or not.
func (c *Controller) Proposed() uint64 { return c.proposed.Load() }

// BucketLimited returns how often the bucket was found to be to blame instead.
func (c *Controller) BucketLimited() uint64 { return c.bucketLimited.Load() }

// suspect is a topic that rebalance looks at.
type suspect struct {
	topic catalog.Topic
	watch *tuner.Watch
	of    tuner.Suspect
}

// rebalance looks at every topic whose SLO is missed, and at those that were
// looked at before. One that is being fitted is its fit's.
func (c *Controller) rebalance(now time.Time) {
	if c.cfg.Relief == ReliefOff {
		return
	}
	mono := clock.Mono()
	var suspects []suspect
	c.mu.Lock()
	seen := map[string]bool{}
	for topic := range all(c.mu.cat) {
		name := topic.Spec.Name()
		w := c.watches[name]
		if c.overLocked(name) { // whoever is late, it is not for the broker's load alone
			c.dropProbeLocked(name)
			continue
		}
		if !open(topic) || !c.missedLocked(name) && w == nil || c.ownedLocked(name) || c.mu.fits[name].running() || c.mu.fits[name].records() {
			seen[name] = w != nil
			c.dropProbeLocked(name)
			continue
		}
		seen[name] = true
		if w == nil {
			w = &tuner.Watch{}
			c.watches[name] = w
		}
		of := tuner.Suspect{
			Quantile: topic.Spec.SLO.Quantile, Latency: topic.Spec.SLO.Latency,
			Plan: topic.Plan, Demand: topic.Spec.Demand, Brokers: c.mu.next.Snapshot(),
		}
		for _, q := range topic.Plan.Quotas {
			of.Loads = append(of.Loads, c.loadLocked(topic, q.Broker, now.Add(-c.cfg.Window)))
		}
		if q := c.mu.probes[name]; q != nil {
			c.probeLocked(topic, q, now)
			of.Asked, of.Evidence = q.broker, q.result
		}
		suspects = append(suspects, suspect{topic, w, of})
	}
	for name := range c.watches {
		if !seen[name] {
			delete(c.watches, name)
			c.dropProbeLocked(name)
		}
	}
	c.mu.Unlock()
	for _, s := range suspects {
		m, finding := s.watch.Decide(mono, c.cfg.ReliefRules, s.of) // a replay takes its time
		c.mu.Lock()
		if !c.mu.closing {
			c.actLocked(s.topic, m, finding, now)
		}
		c.mu.Unlock()
	}
}

// actLocked does what the tuner has decided. Requires: mu held.
func (c *Controller) actLocked(topic catalog.Topic, m tuner.Move, finding tuner.Finding, now time.Time) {
	name := topic.Spec.Name()
	if finding == tuner.Suspected {
		if q := c.mu.probes[name]; q == nil || q.broker != m.From {
			c.dropProbeLocked(name)
			c.mu.probes[name] = c.newProbeLocked(topic, m.From, now)
		}
		return
	}
	c.dropProbeLocked(name)
	log := c.cfg.Log.With(obs.KeyTopic, name, obs.KeyBroker, m.From, obs.KeyReason, m.Reason)
	if finding == tuner.BucketLimited {
		c.bucketLimited.Add(1)
		log.Warn("the SLO is missed, for want of tokens")
	}
	if finding != tuner.Overloaded {
		return
	}
	log.Warn("a broker is overloaded", "to", m.To, "publishers", len(m.Publishers), "dry_run", c.cfg.Relief == ReliefDryRun)
	c.proposed.Add(1)
	if c.cfg.Relief == ReliefDryRun || c.ownedLocked(name) {
		return
	}
	c.wantLocked(c.moving(name, "overload, "+m.Reason, func(now catalog.Topic, _ []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		if now.Placement.Epoch() != topic.Placement.Epoch() {
			return nil, placement.Plan{}, reconcile.ErrSettled // it has moved since it was looked at
		}
		plan, err := placement.Shift(now.Plan, now.Spec.Demand, m.Publishers, m.To)
		return now.Spec, plan, err
	}))
}

// loadLocked sums up what a broker has reported since then. Requires: mu held.
func (c *Controller) loadLocked(topic catalog.Topic, broker string, since time.Time) tuner.Load {
	l := tuner.Load{Broker: broker}
	f := c.reportsLocked(topic.Spec.Name(), broker)
	if f == nil {
		return l
	}
	for _, r := range f.within(since) {
		l.Delivered += r.stats.Delivered
		l.Exceeded += r.stats.Exceeded
		if access, err := obs.LatencyFromProto(r.stats.Access); err == nil { // they were checked
			l.Waited += uint64(access.CountAbove(topic.Spec.SLO.Latency))
		}
	}
	return l
}
