package catalog

import (
	"fmt"
	"maps"
	"slices"
)

// A move has three steps, so the new place is ready before the topic gives up the old
// place. TopicMoving reserves, MemberPrepared arrives from each broker of the new plan,
// and TopicMoved changes the placement. Until TopicMoved the old plan is in force, and
// TopicMoveAborted reverts the move.

func (e BrokerDraining) apply(c *Catalog) ([]Effect, error) {
	b, err := c.brokers.must("drain", e.ID)
	if err != nil {
		return nil, err
	}
	b.Draining, b.Forced = e.Draining, e.Draining && e.Forced
	return nil, nil
}

func (e TopicMoving) apply(c *Catalog) ([]Effect, error) {
	name := e.Spec.Name()
	t := c.topics[name]
	switch {
	case t == nil:
		return nil, fmt.Errorf("move topic %s: %w", name, ErrTopicUnknown)
	case t.phase != Active || t.next != nil:
		return nil, fmt.Errorf("move topic %s, which is %v, moving already: %v: %w", name, t.phase, t.next != nil, ErrTopicState)
	}
	if err := c.brokers.checkRoom(e.Plan, t.plan); err != nil {
		return nil, err
	}
	n := &plannedNext{Next: Next{Spec: e.Spec, Plan: e.Plan}, spread: e.spread, prepared: make([]bool, len(e.Plan.Quotas))}
	for i, q := range e.Plan.Quotas {
		b := c.brokers[q.Broker]
		b.Allocated += max(0, q.Rate-rateOn(t.plan, q.Broker))
		b.topics[name] = true
		// A member with the topic must still prepare it if the specification changed for
		// brokers.
		previous := t.member(q.Broker)
		n.prepared[i] = previous >= 0 && t.prepared[previous] && sameForBrokers(e.Spec, t.spec)
	}
	t.next = n
	return nil, nil
}

// sameForBrokers reports whether a PrepareTopic for a equals a PrepareTopic for b.
func sameForBrokers(a, b *Spec) bool {
	return a.SLO == b.SLO && a.OverLimit == b.OverLimit && a.Pacing == b.Pacing && slices.Equal(a.Weighted(), b.Weighted()) &&
		a.Expiry == b.Expiry && maps.Equal(a.ChannelExpiry, b.ChannelExpiry)
}

func (e TopicMoved) apply(c *Catalog) ([]Effect, error) {
	t := c.topics[e.Topic]
	switch {
	case t == nil:
		return nil, fmt.Errorf("move topic %s: %w", e.Topic, ErrTopicUnknown)
	case t.next == nil:
		return nil, fmt.Errorf("move topic %s, which has nowhere to go: %w", e.Topic, ErrTopicState)
	}
	n := t.next
	for i, q := range n.Plan.Quotas {
		if !c.brokers[q.Broker].Connected || !n.prepared[i] {
			return nil, &NotReadyError{e.Topic, c.brokers.unready(n.Plan, n.prepared)}
		}
	}
	before := c.states(only(e.Topic))
	for _, id := range t.holders() {
		b := c.brokers[id]
		b.Allocated += rateOn(n.Plan, id) - t.reserved(id)
		if n.Plan.On(id) >= 0 {
			delete(t.retiring, id)
			delete(b.retiring, e.Topic)
			continue
		}
		delete(b.topics, e.Topic)
		t.retiring[id] = true
		b.retiring[e.Topic] = true
	}
	t.spec, t.plan, t.prepared, t.next = n.Spec, n.Plan, n.prepared, nil
	t.placement = &Placement{epoch: c.epoch(), members: c.brokers.endpoints(n.Plan), spread: n.spread, paced: n.Spec.Pacing.enabled()}
	return append([]Effect{PlacementChanged(e)}, c.changes(before)...), nil
}

func (e TopicMoveAborted) apply(c *Catalog) ([]Effect, error) {
	t := c.topics[e.Topic]
	switch {
	case t == nil:
		return nil, fmt.Errorf("abort the move of topic %s: %w", e.Topic, ErrTopicUnknown)
	case t.next == nil:
		return nil, fmt.Errorf("abort the move of topic %s, which does not move: %w", e.Topic, ErrTopicState)
	}
	for _, id := range e.Left {
		if t.next.Plan.On(id) < 0 || t.member(id) >= 0 {
			return nil, fmt.Errorf("topic %s left on %s, which is not of its next plan alone: %w", e.Topic, id, ErrBrokerUnknown)
		}
	}
	for _, q := range t.next.Plan.Quotas {
		b := c.brokers[q.Broker]
		b.Allocated -= max(0, q.Rate-rateOn(t.plan, q.Broker))
		if t.member(q.Broker) < 0 {
			delete(b.topics, e.Topic)
		}
	}
	for _, id := range e.Left {
		t.retiring[id] = true
		c.brokers[id].retiring[e.Topic] = true
	}
	if from, to := t.spec.Contract(), t.next.Spec.Contract(); to.Rate > from.Rate || to.Burst > from.Burst {
		// The adaptor may have granted shares of the next contract.
		ids := slices.DeleteFunc(append(t.holders(), t.next.Plan.Brokers()...), func(id string) bool { return c.brokers[id].Forgotten })
		c.unconfirmed.add(e.Topic, ids, from.Max(to))
	}
	t.next = nil
	c.forgetGone()
	return nil, nil
}

func (e MemberFound) apply(c *Catalog) ([]Effect, error) {
	t, b := c.topics[e.Topic], c.brokers[e.Broker]
	switch {
	case t == nil:
		return nil, fmt.Errorf("topic %s found on %s: %w", e.Topic, e.Broker, ErrTopicUnknown)
	case t.phase != Active || t.next != nil:
		return nil, fmt.Errorf("topic %s found on %s: %w", e.Topic, e.Broker, ErrTopicState)
	case b == nil || b.topics[e.Topic] || b.retiring[e.Topic] || c.LeftOn(e.Topic, e.Broker) && !c.Keeps(e.Topic, e.Broker):
		return nil, fmt.Errorf("topic %s found on %s, which is no broker, or of which the catalog knows it: %w", e.Topic, e.Broker, ErrBrokerUnknown)
	}
	t.retiring[e.Broker], b.retiring[e.Topic] = true, true
	delete(b.leftovers, e.Topic)
	return nil, nil
}

func (e MemberRetired) apply(c *Catalog) ([]Effect, error) {
	t := c.topics[e.Topic]
	if t == nil {
		return nil, fmt.Errorf("topic %s retired from %s: %w", e.Topic, e.Broker, ErrTopicUnknown)
	}
	if !t.retiring[e.Broker] {
		return nil, fmt.Errorf("topic %s retired from %s, which it has not moved away from: %w", e.Topic, e.Broker, ErrBrokerUnknown)
	}
	b := c.brokers[e.Broker]
	delete(t.retiring, e.Broker)
	delete(b.retiring, e.Topic)
	c.forgetGone()
	return nil, nil
}

func (Restarted) apply(c *Catalog) ([]Effect, error) {
	names := map[string]bool{}
	// order: a set
	for name := range c.topics {
		names[name] = true
	}
	before := c.states(names)
	// order: each broker is changed on its own
	for _, b := range c.brokers {
		if b.Connected {
			b.Connected, b.leftAt = false, c.version
		}
	}
	// order: each topic is changed on its own
	for _, t := range c.topics {
		clear(t.prepared)
		if t.next != nil {
			clear(t.next.prepared)
		}
	}
	c.forgetGone()
	return c.changes(before), nil
}
