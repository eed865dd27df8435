package controller

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// Progress is a step of a creation.
type Progress struct {
	// Placing means that the topic has no placement yet; otherwise brokers are preparing
	// it.
	Placing bool
	Message string // for people
}

// creation is a topic being created.
type creation struct {
	// Set once.
	mu     *sync.RWMutex
	cat    *pipeline
	spec   *catalog.Spec
	key    string
	broker string // broker to measure; empty: placed normally
	cancel context.CancelCauseFunc

	// Guarded by mu.
	waiters int
	steps   []Progress
	changed chan struct{} // closed and replaced at every step and at the end
	ended   bool
	topic   catalog.Topic // when it became active
	err     error
}

// Create places a topic and returns it when it is active. A failed creation leaves
// no topic in the catalog, no contract at the adaptor, and on brokers only messages that they
// have acknowledged meanwhile: the next topic of this name has them. Brokers that are
// unreachable are cleaned up later.
//
// With a key, a repeated request returns the topic or joins the running creation. When
// the contexts of all callers that wait for a creation have ended, the creation is rolled
// back. Create calls report with each step; an error of report counts as the end of the
// context.
//
// With a broker (on), the topic is placed on that broker alone and uses none of its
// capacity.
//
// Errors: ErrNotCommitted (the topic may exist: repeat the request with its key);
// catalog.ErrTopicExists, ErrKeyReused, ErrUnread; placement.FieldErrors,
// *placement.Infeasible; catalog.ErrBrokerUnknown; *BrokerError, *AdaptorError,
// ErrUnsteady, ErrClosing; the context's error.
func (c *Controller) Create(ctx context.Context, spec *catalog.Spec, key, broker string, report func(Progress) error) (catalog.Topic, error) {
	if err := c.knowledge.following(); err != nil {
		return catalog.Topic{}, err
	}
	cr, topic, err := c.begin(ctx, spec, key, broker)
	if cr == nil {
		return topic, err
	}
	defer cr.abandon()
	return cr.wait(ctx, report)
}

// begin starts a creation, or joins the creation with the same key. If both results are
// nil, the topic exists already. The creation keeps the values of ctx, not its end.
func (c *Controller) begin(ctx context.Context, spec *catalog.Spec, key, broker string) (*creation, catalog.Topic, error) {
	name := spec.Name()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.closing {
		return nil, catalog.Topic{}, ErrClosing
	}
	if key != "" {
		for _, l := range c.topics.byName {
			cr := l.creating
			if cr == nil || cr.key != key {
				continue
			}
			if !sameOrder(cr.spec, spec) {
				return nil, catalog.Topic{}, fmt.Errorf("topic %s is being created with the key: %w", cr.spec.Name(), catalog.ErrKeyReused)
			}
			cr.waiters++
			return cr, catalog.Topic{}, nil
		}
		if existing, ok := c.cat.next.KeyOf(key); ok {
			topic, _ := c.cat.next.Topic(existing)
			if !sameOrder(topic.Ordered, spec) {
				return nil, catalog.Topic{}, fmt.Errorf("topic %s was created with the key: %w", existing, catalog.ErrKeyReused)
			}
			if topic.State != catalog.Deleting {
				return nil, topic, nil
			}
		}
	}
	if err := c.checkName(name); err != nil {
		return nil, catalog.Topic{}, err
	}
	if id := c.copies.holder(name); id != "" {
		return nil, catalog.Topic{}, fmt.Errorf("topic %s: broker %s keeps it, and it comes back by itself: %w", name, id, catalog.ErrUnread)
	}
	// A topic without a durability gets the durability of the brokers. Memory is the zero
	// value.
	if d := c.brokers.durability(); spec.Durability == "" && d != catalog.DurabilityMemory {
		spec = spec.Keeping(d)
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	c.knowledge.empty = false // the cluster is new, or an operator restores the topics
	cr := &creation{mu: &c.mu, cat: c.cat, spec: spec, key: key, broker: broker, cancel: cancel, waiters: 1, changed: make(chan struct{})}
	c.topics.entry(name).creating = cr
	start := time.Now()
	c.owners.enqueue(operation{
		name: name, creation: cr, ctx: ctx, decide: cr.place,
		end: func(err error) { c.created(cr, err, start) },
	})
	return cr, catalog.Topic{}, nil
}

// created ends a creation. After the name is released, another request may delete the
// topic.
func (c *Controller) created(cr *creation, err error, start time.Time) {
	name := cr.spec.Name()
	c.mu.Lock()
	if err == nil {
		cr.topic, _ = c.cat.committed.Topic(name)
		c.tuning.perform(c.tuner.Begin(name, cr.topic.Spec.Demand, time.Now()))
	}
	cr.err, cr.ended = err, true
	c.topics.entry(name).creating = nil
	close(cr.changed)
	c.mu.Unlock()
	cr.cancel(nil)
	if err != nil {
		c.cfg.Log.Warn("topic not created", obs.KeyTopic, name, obs.KeyError, err, obs.KeyDuration, time.Since(start))
		return
	}
	c.cfg.Log.Info("topic created", obs.KeyTopic, name, obs.KeyDuration, time.Since(start),
		obs.KeyPolicy, cr.topic.Plan.Policy, "brokers", cr.topic.Plan.K)
}

func (cr *creation) place(p planning) (catalog.Event, error) {
	if err := p.afford(cr.spec); err != nil {
		return nil, err
	}
	demand := cr.spec.Demand
	cr.progress(Progress{Placing: true, Message: fmt.Sprintf("placing %d msg/s (brokers to choose from: %d)", demand.Rate, len(p.brokers))})
	var plan placement.Plan
	var err error
	if cr.broker == "" {
		plan, err = placement.Place(cr.spec.Policy, p.brokers, demand, p.rng)
	} else {
		cr.mu.RLock()
		measured, _ := cr.cat.next.Broker(cr.broker)
		cr.mu.RUnlock()
		if plan = placement.Unreserved(cr.spec.Policy, cr.broker, demand); !measured.Connected {
			err = fmt.Errorf("broker %q is disconnected or unknown: %w", cr.broker, catalog.ErrBrokerUnknown)
		}
	}
	if err != nil {
		return nil, err
	}
	return catalog.NewTopicPlaced(cr.spec, plan, cr.key)
}

// progress reports a step to the waiting callers. A nil creation ignores it.
func (cr *creation) progress(p Progress) {
	if cr == nil {
		return
	}
	cr.mu.Lock()
	defer cr.mu.Unlock()
	cr.steps = append(cr.steps, p)
	close(cr.changed)
	cr.changed = make(chan struct{})
}

// wait reports each step and returns the result of the creation.
func (cr *creation) wait(ctx context.Context, report func(Progress) error) (catalog.Topic, error) {
	reported := 0
	for {
		cr.mu.RLock()
		steps, changed, ended, topic, err := cr.steps[reported:], cr.changed, cr.ended, cr.topic, cr.err
		cr.mu.RUnlock()
		for _, step := range steps {
			if err := report(step); err != nil {
				return catalog.Topic{}, err
			}
		}
		reported += len(steps)
		if ended {
			return topic, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return catalog.Topic{}, context.Cause(ctx)
		}
	}
}

// abandon removes a waiting caller.
func (cr *creation) abandon() {
	cr.mu.Lock()
	defer cr.mu.Unlock()
	if cr.waiters--; cr.waiters == 0 {
		cr.cancel(errAbandoned) // no effect after the end
	}
}

// Delete removes a topic, after a running creation or deletion. The deletion continues
// when ctx ends. Error: catalog.ErrTopicUnknown.
func (c *Controller) Delete(ctx context.Context, name string) error {
	return c.owners.request(ctx, operation{name: name, target: reconcile.Target{Gone: true}})
}

// sameOrder reports whether a request repeats a creation. The first request's durability
// may have been filled in from the brokers.
func sameOrder(before, after *catalog.Spec) bool {
	if after.Durability == "" {
		after = after.Keeping(before.Durability)
	}
	return before.Equal(after)
}
