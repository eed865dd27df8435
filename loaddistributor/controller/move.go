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

// A move prepares the new placement before it gives up the old one.
// loaddistributor/reconcile defines the steps, their order, and the roll-back. Afterwards
// the old brokers learn which publishers have moved, and end these connections at a
// message boundary, so that publishers that do not watch reconnect. A reminder follows.
// Publishers that watch get a grace period first (moves.go). A broker without publishers
// of the topic retires. After consumers have taken its messages, the broker is told to
// remove the topic, and does so unless new messages have arrived. If this process crashes
// after the move, publishers that do not watch stay on the old broker, which serves them.

// become returns the new specification and plan of a topic.
type become func(planning) (*catalog.Spec, placement.Plan, error)

// Update replaces the specification of an active topic by the result of change. change
// must not modify its argument, and may be called repeatedly. expected is the required
// epoch of the placement, 0: any. If neither the demand nor the policy changes, no
// publisher moves unless its broker is disconnected. Errors: as in Create, and the errors
// of change; catalog.ErrTopicUnknown, ErrTopicState, *EpochError.
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
		if topic.Spec.PlacedAs(spec) && p.intact {
			return spec, topic.Plan, nil
		}
		plan, err := p.replace(spec, nil)
		return spec, plan, err
	})
}

// Publishers selects publishers of a topic: by IDs, or without IDs by Group and From
// together.
type Publishers struct {
	IDs   []string
	Group *string // correlation key; nil: any
	From  string  // present broker; "": any
}

// of returns the indices of the selected publishers. Error: catalog.ErrPublisherUnknown,
// also for an empty selection.
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

// MovePublishers moves publishers of a topic to a broker, which may be new to the topic.
// Errors: catalog.ErrTopicUnknown, ErrPublisherUnknown, ErrTopicState, ErrBrokerUnknown;
// *placement.Infeasible, *BrokerError, *AdaptorError.
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
		// SnapshotFor counts the topic's present rate there as free.
		if need, have := plan.Quotas[plan.On(to)].Rate, brokers[at].Mcap-brokers[at].Allocated; need > have {
			return nil, placement.Plan{}, &placement.Infeasible{Bound: "rcap", Need: need, Have: have}
		}
		return topic.Spec, plan, nil
	})
}

// relocate moves a topic to the result of become and returns the topic. If become returns
// reconcile.ErrSettled, the topic stays. The move continues when ctx ends.
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
		topic, _ := c.cat.shown.Topic(name)
		if err == nil && topic.Spec != before.Spec &&
			(!topic.Spec.PlacedAs(before.Spec) || topic.Spec.SLO != before.Spec.SLO || c.tuner.Status(name, time.Now()).Waiting) {
			// Earlier results do not apply to the new specification.
			c.tuning.do(c.tuner.Begin(name, topic.Spec.Demand, time.Now()))
		}
		done <- topic
	}
	if err := c.owners.request(ctx, op); err != nil {
		return catalog.Topic{}, err
	}
	return <-done, nil
}

// moving returns the operation that moves a topic to the result of become.
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
		// The contract must suffice for the brokers of the plan and the retiring brokers.
		if _, _, err := placement.WithRetiring(plan, len(reconcile.Retiring(plan, p.topic))); err != nil {
			return nil, err
		}
		return catalog.NewTopicChanging(p.topic, spec, plan)
	}}
}
