package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// A move, make before break:
//
//	1. TopicMoving reserves what the new plan takes beside the old one
//	2. brokers that are new to the topic create it with its channels, and
//	   consumers find them; those there are are made to look again, and until each
//	   channel that is read is read there the move waits (consumers.go)
//	3. the adaptor gets the new shares; those of the new brokers are granted as
//	   far as the old ones have given up theirs
//	4. TopicMoved: from this epoch on, publishers resolve to the new brokers,
//	   and those that watch are told
//	5. brokers are told which publishers moved away: they end those connections
//	   at a message boundary, which brings publishers back that do not watch;
//	   and once more a moment later. Those that watch have a grace to follow
//	   before (dismiss.go)
//	6. a broker that has no publisher left retires: once its consumers have had
//	   what it holds, it is told to remove the topic, which it does unless
//	   something has come meanwhile
//
// Until 4 any failure leaves the topic as it was; brokers that are new to it are
// told to remove it, and one that does not, because something has come there or
// because it is away, retires as in 6. A crash before 4 is taken back by the next
// controller, one after 4 only means that 5 is not done: whoever does not watch
// stays where it is, and is served there.

// decide returns what a topic becomes. Requires: the brokers are those of the
// catalog's SnapshotFor.
type decide func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error)

// errSettled: nothing is to be done.
var errSettled = errors.New("nothing is to be done")

// sharesPause and sharesWait bound how long a move waits for the shares of the
// new brokers: without one a broker accepts messages, and holds them.
const (
	sharesPause = 2 * time.Millisecond
	sharesWait  = time.Second
)

// Update gives an active topic another specification under its name: what change
// makes of the one it has, which it does not modify and may be asked for repeatedly.
// expected is the epoch that the topic's placement must have, 0: any. Where neither
// the demand nor the policy changes, nobody moves whose broker is there.
// Errors as Create, and those of change; catalog.ErrTopicUnknown, ErrTopicState,
// *EpochError.
func (c *Controller) Update(ctx context.Context, name string, expected uint64, change func(present *catalog.Spec) (*catalog.Spec, error)) (catalog.Topic, error) {
	return c.relocate(ctx, name, "update", func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		if epoch := topic.Placement.Epoch(); expected != 0 && epoch != expected {
			return nil, placement.Plan{}, &EpochError{Topic: name, Expected: expected, Present: epoch}
		}
		spec, err := change(topic.Spec)
		switch {
		case err != nil:
			return nil, placement.Plan{}, err
		case topic.Spec.Equal(spec):
			return nil, placement.Plan{}, errSettled
		case topic.Spec.PlacedAs(spec) && c.connected(topic.Plan):
			return spec, topic.Plan, nil
		}
		plan, err := c.replace(spec, topic, brokers)
		return spec, plan, err
	})
}

// connected reports whether all brokers of a plan are.
func (c *Controller) connected(plan placement.Plan) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.plannedLocked(plan)
}

// plannedLocked is connected. Requires: mu held, for reading.
func (c *Controller) plannedLocked(plan placement.Plan) bool {
	return !slices.ContainsFunc(plan.Quotas, func(q placement.Quota) bool {
		b, _ := c.mu.next.Broker(q.Broker)
		return !b.Connected
	})
}

// replace plans the topic anew with little movement. Requires: placing held.
func (c *Controller) replace(spec *catalog.Spec, topic catalog.Topic, brokers []placement.Broker) (placement.Plan, error) {
	return placement.Replace(spec.Policy, brokers, topic.Plan, func(publisher string) string {
		if i, ok := topic.Placement.Index(publisher); ok {
			return topic.Placement.At(i).Broker
		}
		return ""
	}, spec.Demand, c.placing.rng)
}

// replaceAsWide is replace for a topic that stays as it is: on as many brokers as
// it has, where that can be, for a fit may have found that it needs them.
// Requires: placing held.
func (c *Controller) replaceAsWide(topic catalog.Topic, brokers []placement.Broker) (placement.Plan, error) {
	wide := *topic.Spec
	wide.Demand.AtLeast = min(topic.Plan.K, len(brokers))
	plan, err := c.replace(&wide, topic, brokers)
	if errors.As(err, new(*placement.Infeasible)) {
		return c.replace(topic.Spec, topic, brokers)
	}
	return plan, err
}

// MovePublishers moves publishers of a topic to a broker, which may be new to
// it. Errors: catalog.ErrTopicUnknown, ErrPublisherUnknown, ErrTopicState,
// ErrBrokerUnknown; *placement.Infeasible, *BrokerError, *AdaptorError.
func (c *Controller) MovePublishers(ctx context.Context, name string, ids []string, to string) (catalog.Topic, error) {
	return c.relocate(ctx, name, "publishers", func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error) {
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
			return nil, placement.Plan{}, errSettled
		}
		if n := topic.Placement.Unplaced(); n > 0 {
			return nil, placement.Plan{}, fmt.Errorf("topic %s is being fitted, and %d publishers have no place: %w", name, n, catalog.ErrTopicState)
		}
		plan, err := placement.Shift(topic.Plan, topic.Spec.Demand, moved, to)
		if err != nil {
			return nil, placement.Plan{}, err
		}
		// SnapshotFor counts what the topic has there as free.
		for _, q := range plan.Quotas {
			if q.Broker == to && q.Rate > brokers[at].Mcap-brokers[at].Allocated {
				return nil, placement.Plan{}, &placement.Infeasible{Bound: "rcap", Need: q.Rate, Have: brokers[at].Mcap - brokers[at].Allocated}
			}
		}
		return topic.Spec, plan, nil
	})
}

// relocate moves a topic to what decide says, unless that is where it is, and
// returns it as it is then. It goes on when ctx ends.
func (c *Controller) relocate(ctx context.Context, name, why string, decide decide) (catalog.Topic, error) {
	if err := c.following(); err != nil {
		return catalog.Topic{}, err
	}
	release, err := c.hold(ctx, name)
	if err != nil {
		return catalog.Topic{}, err
	}
	c.mu.Lock()
	if c.mu.closing {
		c.mu.Unlock()
		release()
		return catalog.Topic{}, ErrClosing
	}
	before, _ := c.mu.next.Topic(name)
	c.work.Add(1)
	c.mu.Unlock()
	type result struct {
		topic catalog.Topic
		err   error
	}
	done := make(chan result, 1)
	go func() {
		defer c.work.Done()
		defer release()
		err := c.move(name, why, decide)
		c.mu.Lock()
		topic, _ := c.mu.cat.Topic(name)
		f := c.mu.fits[name]
		if err == nil && topic.Spec != before.Spec &&
			(!topic.Spec.PlacedAs(before.Spec) || topic.Spec.SLO != before.Spec.SLO || f != nil && !f.done) {
			c.fitLocked(topic) // what held of the old one is not known of this
		}
		c.mu.Unlock()
		done <- result{topic, err}
	}()
	select {
	case r := <-done:
		return r.topic, r.err
	case <-ctx.Done():
		return catalog.Topic{}, context.Cause(ctx)
	}
}

// move does it, or takes it back. Requires: the topic's name is held, and the
// caller counts in c.work.
func (c *Controller) move(name, why string, decide decide) error {
	began := c.now()
	old, next, err := c.reserve(name, decide)
	if errors.Is(err, errSettled) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx := context.Background() // each step has a timeout of its own
	contracted := false
	err = func() error {
		if err := c.prepare(ctx, next.Next.Spec, c.unprepared(name)); err != nil {
			return err
		}
		c.consumersFirst(name, next)
		contracted = true
		if err := c.shift(ctx, next); err != nil {
			return err
		}
		return c.commit(catalog.TopicMoved{Topic: name})
	}()
	if err != nil {
		if !errors.Is(err, ErrNotCommitted) {
			err = errors.Join(err, c.takeBack(ctx, name, contracted))
		}
		c.cfg.Log.Warn("topic not moved", obs.KeyTopic, name, obs.KeyReason, why, obs.KeyError, err)
		return err
	}
	c.mu.RLock()
	now, _ := c.mu.cat.Topic(name)
	c.mu.RUnlock()
	moved := c.dismiss(name, old.Placement, now.Placement)
	c.cfg.Log.Info("topic moved", obs.KeyTopic, name, obs.KeyReason, why, "publishers", moved, obs.KeyEpoch, now.Placement.Epoch(),
		"brokers", now.Plan.K, "retiring", len(now.Retiring), obs.KeyDuration, c.now().Sub(began))
	return nil
}

// reserve decides and commits TopicMoving. It returns the topic before and
// after.
func (c *Controller) reserve(name string, decide decide) (old, next catalog.Topic, err error) {
	c.placing.Lock()
	defer c.placing.Unlock()
	for range placeAttempts {
		c.mu.RLock()
		topic, ok := c.mu.next.Topic(name)
		brokers := c.mu.next.SnapshotFor(name)
		c.mu.RUnlock()
		switch {
		case !ok:
			return old, next, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
		case topic.State != catalog.Active && topic.State != catalog.Degraded:
			return old, next, fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
		}
		spec, plan, err := decide(topic, brokers)
		if err != nil {
			return old, next, err
		}
		if err := enough(plan, topic); err != nil {
			return old, next, err
		}
		event, err := catalog.NewTopicMoving(spec, plan)
		if err != nil {
			return old, next, err
		}
		err = c.commit(event)
		if errors.As(err, new(*catalog.PlanError)) {
			continue
		}
		if err != nil {
			return old, next, err
		}
		c.mu.RLock()
		next, _ = c.mu.next.Topic(name)
		c.mu.RUnlock()
		return topic, next, nil
	}
	return old, next, ErrUnsteady
}

// enough says whether the contract can be shared out among the brokers of the plan
// and those that retire then.
func enough(plan placement.Plan, topic catalog.Topic) error {
	_, _, err := placement.WithRetiring(plan, len(retiring(plan, topic)))
	return err
}

// retiring returns the brokers that may have messages of the topic and are not
// in the plan, by id.
func retiring(plan placement.Plan, topic catalog.Topic) []string {
	var ids []string
	for _, q := range topic.Plan.Quotas {
		ids = append(ids, q.Broker)
	}
	ids = append(ids, topic.Retiring...)
	ids = slices.DeleteFunc(ids, func(id string) bool {
		return slices.ContainsFunc(plan.Quotas, func(q placement.Quota) bool { return q.Broker == id })
	})
	slices.Sort(ids)
	return slices.Compact(ids)
}

// unprepared returns the brokers of the next plan that have not said that they
// have the topic as it will be.
func (c *Controller) unprepared(name string) []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.mu.next.NextUnprepared(name)
}

// shift gives the adaptor the shares of the next plan, and waits a moment for
// those of brokers that had none.
func (c *Controller) shift(ctx context.Context, topic catalog.Topic) error {
	plan := topic.Next.Plan
	req, err := c.contractRequest(topic.Next.Spec, plan, retiring(plan, topic))
	if err != nil {
		return err
	}
	req.Update = true
	if err := c.contract(ctx, req); err != nil {
		return err
	}
	fresh := map[string]bool{}
	for _, q := range plan.Quotas {
		if !slices.ContainsFunc(topic.Plan.Quotas, func(o placement.Quota) bool { return o.Broker == q.Broker }) &&
			slices.ContainsFunc(req.Members, func(m *srtmv1.Member) bool { return m.BrokerId == q.Broker }) {
			fresh[q.Broker] = true
		}
	}
	ctx, cancel := context.WithTimeout(ctx, sharesWait)
	defer cancel()
	for len(fresh) > 0 {
		shares, err := c.adaptor.ListShares(ctx, &srtmv1.ListSharesRequest{Topic: topic.Spec.Name()})
		if err == nil {
			for _, t := range shares.Topics {
				for _, m := range t.Members {
					if m.Acknowledged.GetRateMilli() > 0 {
						delete(fresh, m.BrokerId)
					}
				}
			}
		}
		if len(fresh) == 0 {
			break
		}
		timer := time.NewTimer(sharesPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			// A broker that is gone holds its part until its lease ends: better to
			// move without than to stay with it.
			c.cfg.Log.Warn("moving before all shares are granted", obs.KeyTopic, topic.Spec.Name(), "without", len(fresh))
			return nil
		}
	}
	return nil
}

// takeBack leaves the topic where it was. contracted: the adaptor has been told of
// the move in this process. Requires: the topic's name is held.
func (c *Controller) takeBack(ctx context.Context, name string, contracted bool) error {
	c.mu.RLock()
	topic, ok := c.mu.next.Topic(name)
	c.mu.RUnlock()
	if !ok || topic.Next == nil {
		return nil
	}
	var fresh []string
	for _, q := range topic.Next.Plan.Quotas {
		if !slices.Contains(topic.Retiring, q.Broker) &&
			!slices.ContainsFunc(topic.Plan.Quotas, func(o placement.Quota) bool { return o.Broker == q.Broker }) {
			fresh = append(fresh, q.Broker)
		}
	}
	// Somebody may have published there already, over HTTP say.
	used := c.remove(name, true, fresh...)
	left := slices.Sorted(maps.Keys(used))
	for _, id := range left {
		c.cfg.Log.Info("topic stays for now on a broker that it has not moved to", obs.KeyTopic, name, obs.KeyBroker, id, obs.KeyError, used[id])
	}
	if err := must("take back the move of "+name, c.commit(catalog.TopicMoveAborted{Topic: name, Left: left})); err != nil {
		return err
	}
	if contracted {
		return c.reshare(name)
	}
	c.mu.Lock()
	c.mu.untold[name] = true // for compareContracts
	c.mu.Unlock()
	return nil
}
