package controller

import (
	"fmt"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/relief"
)

// Relief says what becomes of the moves that loaddistributor/relief proposes.
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

// relieve looks at every topic whose SLO is missed, and at those that were
// looked at before.
func (c *Controller) relieve(now time.Time) {
	if c.cfg.Relief == ReliefOff {
		return
	}
	mono := clock.Mono()
	type proposal struct {
		topic catalog.Topic
		move  relief.Move
	}
	var proposals []proposal
	c.mu.Lock()
	seen := map[string]bool{}
	for _, topic := range c.mu.cat.Topics("", c.mu.cat.Len()) {
		name := topic.Spec.Name()
		w := c.watches[name]
		if !open(topic) || topic.Missed == "" && w == nil || c.mu.names[name] != nil || c.mu.fits[name].running() {
			seen[name] = w != nil
			continue
		}
		seen[name] = true
		if w == nil {
			w = &relief.Watch{}
			c.watches[name] = w
		}
		of := relief.Topic{
			Quantile: topic.Spec.SLO.Quantile, Plan: topic.Plan, Demand: topic.Spec.Demand, Brokers: c.mu.next.Snapshot(),
		}
		for _, q := range topic.Plan.Quotas {
			of.Loads = append(of.Loads, c.loadLocked(topic, q.Broker, now))
		}
		if m, ok := w.Decide(mono, c.cfg.ReliefRules, of); ok {
			proposals = append(proposals, proposal{topic, m})
		}
	}
	for name := range c.watches {
		if !seen[name] {
			delete(c.watches, name)
		}
	}
	if c.mu.closing {
		proposals = nil
	}
	for _, p := range proposals {
		name := p.topic.Spec.Name()
		c.cfg.Log.Warn("a broker is overloaded", obs.KeyTopic, name, obs.KeyBroker, p.move.From, "to", p.move.To,
			"publishers", len(p.move.Publishers), "dry_run", c.cfg.Relief == ReliefDryRun)
		c.proposed.Add(1)
		if c.cfg.Relief == ReliefDryRun || c.mu.names[name] != nil {
			continue
		}
		release := c.holdLocked(name)
		c.work.Add(1)
		go func() {
			defer c.work.Done()
			defer release()
			_ = c.move(name, "overload", func(topic catalog.Topic, _ []placement.Broker) (*catalog.Spec, placement.Plan, error) {
				if topic.Placement.Epoch() != p.topic.Placement.Epoch() {
					return nil, placement.Plan{}, errSettled // it has moved since it was looked at
				}
				plan, err := placement.Shift(topic.Plan, topic.Spec.Demand, p.move.Publishers, p.move.To)
				return topic.Spec, plan, err
			}) // logged there
		}()
	}
	c.mu.Unlock()
}

// loadLocked sums up a broker's window. Requires: mu held.
func (c *Controller) loadLocked(topic catalog.Topic, broker string, now time.Time) relief.Load {
	l := relief.Load{Broker: broker}
	f := c.figuresLocked(topic.Spec.Name(), broker)
	if f == nil {
		return l
	}
	for _, r := range f.within(now.Add(-c.cfg.Window)) {
		l.Delivered += r.stats.Delivered
		l.Exceeded += r.stats.Exceeded
		if access, err := obs.LatencyFromProto(r.stats.Access); err == nil { // they were checked
			l.Waited += uint64(access.CountAbove(topic.Spec.SLO.Latency))
		}
	}
	return l
}
