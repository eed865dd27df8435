package controller

import (
	"context"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// probe gathers evidence at a broker that rebalancing suspects: when messages arrived
// there, for some seconds, and what it held of the contract meanwhile. A broker
// that records nothing is judged by its reports. Guarded by Controller.mu.
type probe struct {
	broker   string
	epoch    uint64     // of the placement
	record   *recording // nil: it is over
	from     time.Time  // when the broker began to speak; zero: not yet
	arrivals []tuner.Arrival
	result   *tuner.Evidence // nil: not yet
}

// newProbeLocked requires mu held.
func (c *Controller) newProbeLocked(topic catalog.Topic, broker string, now time.Time) *probe {
	q := &probe{broker: broker, epoch: topic.Placement.Epoch(), record: newRecording(topic, now)}
	c.askArrivalsLocked(q.record, topic.Spec.Name(), []string{broker}, now)
	return q
}

// dropProbeLocked requires mu held.
func (c *Controller) dropProbeLocked(name string) {
	if q := c.mu.probes[name]; q != nil && q.record != nil && !c.mu.fits[name].records() {
		c.endArrivalsLocked(q.record, name)
	}
	delete(c.mu.probes, name)
}

// probeLocked moves a probe on. Requires: mu held.
func (c *Controller) probeLocked(topic catalog.Topic, q *probe, now time.Time) {
	if q.record == nil {
		return // the shares are being asked for, or there is a result
	}
	name := topic.Spec.Name()
	if q.epoch != topic.Placement.Epoch() {
		c.dropProbeLocked(name)
		return
	}
	if q.from.IsZero() && q.record.trace.Begun(q.broker) {
		q.from = now
	}
	switch {
	case q.from.IsZero() && now.Sub(q.record.began) < recordPatience,
		!q.from.IsZero() && now.Sub(q.from) < c.cfg.ReliefRules.Capture:
		c.askArrivalsLocked(q.record, name, []string{q.broker}, now)
		return
	}
	q.arrivals = q.record.trace.Take(wall(now))
	c.endArrivalsLocked(q.record, name)
	q.record = nil
	e := &tuner.Evidence{Broker: q.broker, Arrivals: q.arrivals, Load: c.loadLocked(topic, q.broker, now.Add(-c.cfg.Window))}
	if !q.from.IsZero() {
		// Of the recorded time, if reports come often enough for that.
		if l := c.loadLocked(topic, q.broker, q.from.Add(c.cfg.ReportInterval)); tuner.Enough(l) {
			e.Load = l
		}
	}
	e.Lone = c.loneLocked(name, q.broker, now)
	c.work.Add(1)
	go func() {
		defer c.work.Done()
		share, err := c.shareOf(name, q.broker)
		if e.Share = share; err != nil {
			e.Arrivals = nil // through what would they be replayed?
			c.cfg.Log.Warn("a broker is judged by its reports alone", obs.KeyTopic, name, obs.KeyBroker, q.broker, obs.KeyError, err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		q.result = e
	}()
}

// loneLocked is the processing delay of a message that meets no other: a low
// quantile of those reported. Requires: mu held.
func (c *Controller) loneLocked(topic, broker string, now time.Time) time.Duration {
	all := obs.NewLatency()
	if f := c.reportsLocked(topic, broker); f != nil {
		for _, r := range f.within(now.Add(-c.cfg.Window)) {
			if p, err := obs.LatencyFromProto(r.stats.Processing); err == nil { // they were checked
				all.Merge(p)
			}
		}
	}
	return all.Quantile(0.1)
}

// shareOf asks the adaptor what a broker holds of a topic's contract.
func (c *Controller) shareOf(topic, broker string) (tokenbucket.Share, error) {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.PrepareTimeout)
	defer cancel()
	r, err := c.adaptor.ListShares(ctx, &srtmv1.ListSharesRequest{Topic: topic})
	if err != nil {
		return tokenbucket.Share{}, &AdaptorError{err}
	}
	for _, t := range r.Topics {
		for _, m := range t.Members {
			if m.BrokerId == broker {
				return shareproto.From(m.Acknowledged), nil
			}
		}
	}
	return tokenbucket.Share{}, nil // it holds nothing
}
