package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// A move is made before the present place is given up: what is done, in which order, and
// what is undone when it fails, is in loaddistributor/reconcile. Then brokers are told
// which publishers moved away: they end those connections at a message boundary, which
// brings publishers back that do not watch; and once more a moment later. Those that watch
// have a grace to follow before (disconnect.go). A broker that has no publisher left retires:
// once its consumers have had what it holds, it is told to remove the topic, which it does
// unless something has come meanwhile. After a crash once the topic has moved, a publisher that
// does not watch stays where it is, and is served there.

// decide returns what a topic becomes. Requires: the brokers are those of the
// catalog's SnapshotFor.
type decide func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error)

// Update gives an active topic another specification under its name: what change
// makes of the one it has, which it does not modify and may be asked for repeatedly.
// expected is the epoch that the topic's placement must have, 0: any. Where neither
// the demand nor the policy changes, no publisher moves whose broker is there.
// Errors as Create, and those of change; catalog.ErrTopicUnknown, ErrTopicState,
// *EpochError.
func (c *Controller) Update(ctx context.Context, name string, expected uint64, change func(present *catalog.Spec) (*catalog.Spec, error)) (catalog.Topic, error) {
	return c.relocate(ctx, name, cause{srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE, "update", secure.Caller(ctx)}, func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		if epoch := topic.Placement.Epoch(); expected != 0 && epoch != expected {
			return nil, placement.Plan{}, &EpochError{Topic: name, Expected: expected, Present: epoch}
		}
		spec, err := change(topic.Spec)
		switch {
		case err != nil:
			return nil, placement.Plan{}, err
		case topic.Spec.Equal(spec):
			return nil, placement.Plan{}, reconcile.ErrSettled
		}
		if spec.Demand.RateMilli > topic.Spec.Demand.RateMilli {
			if err := c.checkTenant(spec); err != nil {
				return nil, placement.Plan{}, err
			}
		}
		switch {
		case topic.Spec.PlacedAs(spec) && c.connected(topic.Plan):
			return spec, topic.Plan, nil
		}
		plan, err := c.replace(spec, topic, brokers, nil)
		return spec, plan, err
	})
}

// connected reports whether all brokers of a plan are.
func (c *Controller) connected(plan placement.Plan) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.mu.planned(plan)
}

// planned is connected.
func (p *pipeline) planned(plan placement.Plan) bool {
	return !slices.ContainsFunc(plan.Quotas, func(q placement.Quota) bool {
		b, _ := p.next.Broker(q.Broker)
		return !b.Connected
	})
}

// replace plans the topic anew with little movement. at says where publishers are that it
// does not know. Requires: placing held.
func (c *Controller) replace(spec *catalog.Spec, topic catalog.Topic, brokers []placement.Broker, at map[string]string) (placement.Plan, error) {
	return placement.Replace(spec.Policy, brokers, topic.Plan, func(publisher string) string {
		if i, ok := topic.Placement.Index(publisher); ok {
			return topic.Placement.At(i).Broker
		}
		return at[publisher]
	}, spec.Demand, c.placing.rng)
}

// replaceAsWide is replace for a topic that stays as it is: on as many brokers as
// it has, where that can be, for a fit may have found that it needs them.
// Requires: placing held.
func (c *Controller) replaceAsWide(topic catalog.Topic, brokers []placement.Broker, at map[string]string) (placement.Plan, error) {
	wide := *topic.Spec
	wide.Demand.AtLeast = min(topic.Plan.K, len(brokers))
	plan, err := c.replace(&wide, topic, brokers, at)
	if errors.As(err, new(*placement.Infeasible)) {
		return c.replace(topic.Spec, topic, brokers, at)
	}
	return plan, err
}

// MovePublishers moves publishers of a topic to a broker, which may be new to
// it. Errors: catalog.ErrTopicUnknown, ErrPublisherUnknown, ErrTopicState,
// ErrBrokerUnknown; *placement.Infeasible, *BrokerError, *AdaptorError.
func (c *Controller) MovePublishers(ctx context.Context, name string, ids []string, to string) (catalog.Topic, error) {
	return c.relocate(ctx, name, cause{srtmv1.MoveReason_MOVE_REASON_OPERATOR, "publishers", secure.Caller(ctx)}, func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		at := slices.IndexFunc(brokers, func(b placement.Broker) bool { return b.ID == to })
		if at < 0 {
			return nil, placement.Plan{}, fmt.Errorf("broker %q is away, draining or unknown: %w", to, catalog.ErrBrokerUnknown)
		}
		var moved []int
		for _, id := range ids {
			i, ok := topic.Placement.Index(id)
			if !ok {
				return nil, placement.Plan{}, fmt.Errorf("topic %s, publisher %q: %w", name, id, catalog.ErrPublisherUnknown)
			}
			if topic.Placement.At(i).Broker != to {
				moved = append(moved, i)
			}
		}
		if len(moved) == 0 {
			return nil, placement.Plan{}, reconcile.ErrSettled
		}
		if n := topic.Placement.Unplaced(); n > 0 {
			return nil, placement.Plan{}, fmt.Errorf("topic %s is being fitted, and %d publishers have no place: %w", name, n, catalog.ErrTopicState)
		}
		plan, err := placement.Shift(topic.Plan, topic.Spec.Demand, moved, to)
		if err != nil {
			return nil, placement.Plan{}, err
		}
		// SnapshotFor counts what the topic has there as free.
		if need, have := plan.Quotas[plan.On(to)].Rate, brokers[at].Mcap-brokers[at].Allocated; need > have {
			return nil, placement.Plan{}, &placement.Infeasible{Bound: "rcap", Need: need, Have: have}
		}
		return topic.Spec, plan, nil
	})
}

// relocate moves a topic to what decide says, unless that is where it is, and
// returns it as it is then. It goes on when ctx ends.
func (c *Controller) relocate(ctx context.Context, name string, why cause, decide decide) (now catalog.Topic, err error) {
	op := c.moving(name, why, decide)
	var before catalog.Topic
	first := op.decide
	op.decide = func(topic catalog.Topic, brokers []placement.Broker) (catalog.Event, error) {
		before = topic
		return first(topic, brokers)
	}
	done := make(chan catalog.Topic, 1)
	op.end = func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		topic, _ := c.mu.cat.Topic(name)
		if err == nil && topic.Spec != before.Spec &&
			(!topic.Spec.PlacedAs(before.Spec) || topic.Spec.SLO != before.Spec.SLO || c.mu.tuner.Status(name, time.Now()).Waiting) {
			// What held of the old one is not known of this.
			c.tunedLocked(c.mu.tuner.Begin(name, topic.Spec.Demand, time.Now()))
		}
		done <- topic
	}
	if err := c.request(ctx, op); err != nil {
		return catalog.Topic{}, err
	}
	return <-done, nil
}

// moving is the operation that moves a topic to what decide says.
func (c *Controller) moving(name string, why cause, decide decide) operation {
	return operation{name: name, cause: why, decide: func(topic catalog.Topic, brokers []placement.Broker) (catalog.Event, error) {
		switch {
		case topic.Spec == nil:
			return nil, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
		case !open(topic):
			return nil, fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
		}
		spec, plan, err := decide(topic, brokers)
		if err != nil {
			return nil, err
		}
		// The contract must suffice for the brokers of the plan and those that retire then.
		if _, _, err := placement.WithRetiring(plan, len(reconcile.Retiring(plan, topic))); err != nil {
			return nil, err
		}
		return catalog.NewTopicChanging(topic, spec, plan)
	}}
}
