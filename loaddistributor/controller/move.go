package controller

import (
	"context"
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
// have a grace to follow before (moves.go). A broker that has no publisher left retires:
// once its consumers have had what it holds, it is told to remove the topic, which it does
// unless something has come meanwhile. After a crash once the topic has moved, a publisher that
// does not watch stays where it is, and is served there.

// become returns what a topic becomes.
type become func(planning) (*catalog.Spec, placement.Plan, error)

// Update gives an active topic another specification under its name: what change
// makes of the one it has, which it does not modify and may be asked for repeatedly.
// expected is the epoch that the topic's placement must have, 0: any. Where neither
// the demand nor the policy changes, no publisher moves whose broker is there.
// Errors as Create, and those of change; catalog.ErrTopicUnknown, ErrTopicState,
// *EpochError.
func (c *Controller) Update(ctx context.Context, name string, expected uint64, change func(present *catalog.Spec) (*catalog.Spec, error)) (catalog.Topic, error) {
	return c.relocate(ctx, name, cause{srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE, "update", secure.Caller(ctx)}, func(p planning) (*catalog.Spec, placement.Plan, error) {
		topic := p.topic
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
		if err := p.afford(spec); err != nil {
			return nil, placement.Plan{}, err
		}
		if topic.Spec.PlacedAs(spec) && p.connected() {
			return spec, topic.Plan, nil
		}
		plan, err := p.replace(spec, nil)
		return spec, plan, err
	})
}

// Publishers selects publishers of a topic: those with the IDs, or, without IDs, all that
// Group and From do not exclude.
type Publishers struct {
	IDs   []string
	Group *string // the correlation key; nil: of any
	From  string  // the broker that has them; "": any
}

// of returns the indices of the selected publishers. Errors: catalog.ErrPublisherUnknown, also
// if there are none.
func (w Publishers) of(topic catalog.Topic) (selected []int, err error) {
	name := topic.Spec.Name()
	for _, id := range w.IDs {
		i, ok := topic.Placement.Index(id)
		if !ok {
			return nil, fmt.Errorf("topic %s, publisher %q: %w", name, id, catalog.ErrPublisherUnknown)
		}
		selected = append(selected, i)
	}
	if len(w.IDs) > 0 {
		return selected, nil
	}
	for i, p := range topic.Spec.Demand.Expand() {
		if (w.Group == nil || p.Key == *w.Group) && (w.From == "" || topic.Placement.At(i).Broker == w.From) {
			selected = append(selected, i)
		}
	}
	if len(selected) > 0 {
		return selected, nil
	}
	which := "topic " + name
	if w.Group != nil {
		which += fmt.Sprintf(", group %q", *w.Group)
	}
	if w.From != "" {
		which += fmt.Sprintf(", broker %q", w.From)
	}
	return nil, fmt.Errorf("%s: there are no publishers: %w", which, catalog.ErrPublisherUnknown)
}

// MovePublishers moves publishers of a topic to a broker, which may be new to
// it. Errors: catalog.ErrTopicUnknown, ErrPublisherUnknown, ErrTopicState,
// ErrBrokerUnknown; *placement.Infeasible, *BrokerError, *AdaptorError.
func (c *Controller) MovePublishers(ctx context.Context, name string, which Publishers, to string) (catalog.Topic, error) {
	return c.relocate(ctx, name, cause{srtmv1.MoveReason_MOVE_REASON_OPERATOR, "publishers", secure.Caller(ctx)}, func(p planning) (*catalog.Spec, placement.Plan, error) {
		topic, brokers := p.topic, p.brokers
		at := slices.IndexFunc(brokers, func(b placement.Broker) bool { return b.ID == to })
		if at < 0 {
			return nil, placement.Plan{}, fmt.Errorf("broker %q is disconnected, draining or unknown: %w", to, catalog.ErrBrokerUnknown)
		}
		moved, err := which.of(topic)
		if err != nil {
			return nil, placement.Plan{}, err
		}
		moved = slices.DeleteFunc(moved, func(i int) bool { return topic.Placement.At(i).Broker == to })
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

// relocate moves a topic to what it is to become, unless that is where it is, and
// returns it as it is then. It goes on when ctx ends.
func (c *Controller) relocate(ctx context.Context, name string, why cause, become become) (now catalog.Topic, err error) {
	var before catalog.Topic
	op := moving(name, why, func(p planning) (*catalog.Spec, placement.Plan, error) {
		before = p.topic
		return become(p)
	})
	done := make(chan catalog.Topic, 1)
	op.end = func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		topic, _ := c.mu.cat.Topic(name)
		if err == nil && topic.Spec != before.Spec &&
			(!topic.Spec.PlacedAs(before.Spec) || topic.Spec.SLO != before.Spec.SLO || c.mu.tuner.Status(name, time.Now()).Waiting) {
			// What held of the old one is not known of this.
			c.tuning.do(c.mu.tuner.Begin(name, topic.Spec.Demand, time.Now()))
		}
		done <- topic
	}
	if err := c.owners.request(ctx, op); err != nil {
		return catalog.Topic{}, err
	}
	return <-done, nil
}

// moving is the operation that moves a topic to what it is to become.
func moving(name string, why cause, become become) operation {
	return operation{name: name, cause: why, decide: func(p planning) (catalog.Event, error) {
		switch topic := p.topic; {
		case topic.Spec == nil:
			return nil, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
		case !topic.Open():
			return nil, fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
		}
		spec, plan, err := become(p)
		if err != nil {
			return nil, err
		}
		// The contract must suffice for the brokers of the plan and those that retire then.
		if _, _, err := placement.WithRetiring(plan, len(reconcile.Retiring(plan, p.topic))); err != nil {
			return nil, err
		}
		return catalog.NewTopicChanging(p.topic, spec, plan)
	}}
}
