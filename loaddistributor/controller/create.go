package controller

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Progress is a step of a creation.
type Progress struct {
	// Placing: the topic has no place yet; else it is being prepared.
	Placing bool
	Message string // for people
}

// creation is a topic on its way. All but the first four are guarded by
// Controller.mu.
type creation struct {
	spec   *catalog.Spec
	key    string
	on     string // the broker that is to be measured; empty: as placed
	cancel context.CancelCauseFunc

	waiters int
	steps   []Progress
	changed chan struct{} // closed and made anew with every step and at the end
	ended   bool
	topic   catalog.Topic // as it became active
	err     error
}

// Create places a topic and returns it when it is active. On any failure
// nothing is left: not in the catalog, not on a broker, not at the adaptor
// (what cannot be reached then is cleared when it is back).
//
// With a key, a repetition of a request returns the topic, or waits with the
// first one. A creation belongs to those who wait for it: when the last one's
// context ends, it is rolled back. tell is called with each step; its error
// counts as the end of the context.
//
// With a broker, it is on that one alone and takes nothing of its capacity.
//
// Errors: ErrNotCommitted (it may have been created all the same: repeat it with
// its key); catalog.ErrTopicExists, ErrKeyReused, ErrUnread; placement.FieldErrors,
// *placement.Infeasible; catalog.ErrBrokerUnknown; *BrokerError, *AdaptorError, ErrUnsteady, ErrClosing;
// the context's.
func (c *Controller) Create(ctx context.Context, spec *catalog.Spec, key, on string, tell func(Progress) error) (catalog.Topic, error) {
	if err := c.following(); err != nil {
		return catalog.Topic{}, err
	}
	cr, topic, err := c.begin(ctx, spec, key, on)
	if cr == nil {
		return topic, err
	}
	defer c.abandon(cr)
	told := 0
	for {
		c.mu.RLock()
		steps, changed, ended, topic, err := cr.steps[told:], cr.changed, cr.ended, cr.topic, cr.err
		c.mu.RUnlock()
		for _, step := range steps {
			if err := tell(step); err != nil {
				return catalog.Topic{}, err
			}
		}
		told += len(steps)
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

// Plan returns how Create would place a topic now, but for what its policy draws at
// random, and does nothing. Its errors are Create's.
func (c *Controller) Plan(spec *catalog.Spec) (placement.Plan, error) {
	if err := c.following(); err != nil {
		return placement.Plan{}, err
	}
	c.mu.RLock()
	t, taken := c.mu.next.Topic(spec.Name())
	taken = taken && t.State != catalog.Deleting || c.mu.topics.see(spec.Name()).creating != nil
	brokers := c.mu.next.SnapshotFor(spec.Name())
	c.mu.RUnlock()
	if taken {
		return placement.Plan{}, fmt.Errorf("topic %s: %w", spec.Name(), catalog.ErrTopicExists)
	}
	if err := c.checkTenant(spec); err != nil {
		return placement.Plan{}, err
	}
	return placement.Place(spec.Policy, brokers, spec.Demand, rand.New(rand.NewPCG(1, 1)))
}

// begin starts a creation or joins the one that the key names; a nil creation
// with a nil error is a topic that is there already. Of the context it keeps the values.
func (c *Controller) begin(ctx context.Context, spec *catalog.Spec, key, on string) (*creation, catalog.Topic, error) {
	name := spec.Name()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closing {
		return nil, catalog.Topic{}, ErrClosing
	}
	if key != "" {
		for _, l := range c.mu.topics {
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
		if known, ok := c.mu.next.KeyOf(key); ok {
			topic, _ := c.mu.next.Topic(known)
			if !sameOrder(topic.Ordered, spec) {
				return nil, catalog.Topic{}, fmt.Errorf("topic %s was created with the key: %w", known, catalog.ErrKeyReused)
			}
			if topic.State != catalog.Deleting {
				return nil, topic, nil
			}
		}
	}
	// One that is being deleted is gone before the creation, which holds the
	// name, begins.
	if t, taken := c.mu.next.Topic(name); taken && t.State != catalog.Deleting || c.mu.topics.see(name).creating != nil {
		return nil, catalog.Topic{}, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicExists)
	}
	if id := c.rebuildsLocked(name); id != "" {
		return nil, catalog.Topic{}, fmt.Errorf("topic %s: broker %s keeps it, and it comes back by itself: %w", name, id, catalog.ErrUnread)
	}
	// What asks for nothing gets memory at least: that is not stored, so that 0.1.0 can
	// read it.
	if d := c.mu.durability(); spec.Durability == "" && d != catalog.DurabilityMemory {
		spec = spec.Keeping(d)
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	c.mu.empty = false // it is a new cluster, or an operator restores the topics
	cr := &creation{spec: spec, key: key, on: on, cancel: cancel, waiters: 1, changed: make(chan struct{})}
	c.mu.topics.at(name).creating = cr
	began := time.Now()
	c.wantLocked(operation{
		name: name, creation: cr, ctx: ctx,
		decide: func(_ catalog.Topic, brokers []placement.Broker) (catalog.Event, error) { return c.placed(cr, brokers) },
		end:    func(err error) { c.created(cr, err, began) },
	})
	return cr, catalog.Topic{}, nil
}

// abandon takes one who waited away.
func (c *Controller) abandon(cr *creation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cr.waiters--; cr.waiters == 0 {
		cr.cancel(errAbandoned) // does nothing to one that has ended
	}
}

// created ends a creation.
func (c *Controller) created(cr *creation, err error, began time.Time) {
	name := cr.spec.Name()
	c.mu.Lock()
	cr.err, cr.ended = err, true
	c.mu.topics.at(name).creating = nil
	close(cr.changed)
	c.mu.Unlock()
	cr.cancel(nil)
	if err != nil {
		c.cfg.Log.Warn("topic not created", obs.KeyTopic, name, obs.KeyError, err, obs.KeyDuration, time.Since(began))
		return
	}
	c.cfg.Log.Info("topic created", obs.KeyTopic, name, obs.KeyDuration, time.Since(began),
		obs.KeyPolicy, cr.topic.Plan.Policy, "brokers", cr.topic.Plan.K)
}

// progress tells those who wait for a creation of a step.
func (c *Controller) progress(op operation, p Progress) {
	cr := op.creation
	if cr == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	cr.steps = append(cr.steps, p)
	close(cr.changed)
	cr.changed = make(chan struct{})
}

// placed plans a new topic. Requires: placing held.
func (c *Controller) placed(cr *creation, brokers []placement.Broker) (catalog.Event, error) {
	if err := c.checkTenant(cr.spec); err != nil {
		return nil, err
	}
	demand := cr.spec.Demand
	c.progress(operation{creation: cr}, Progress{Placing: true, Message: fmt.Sprintf("placing %d msg/s on %d brokers", demand.Rate, len(brokers))})
	var plan placement.Plan
	var err error
	if cr.on == "" {
		plan, err = placement.Place(cr.spec.Policy, brokers, demand, c.placing.rng)
	} else {
		c.mu.RLock()
		measured, _ := c.mu.next.Broker(cr.on)
		c.mu.RUnlock()
		if plan = placement.Unreserved(cr.spec.Policy, cr.on, demand); !measured.Connected {
			err = fmt.Errorf("broker %q is away or unknown: %w", cr.on, catalog.ErrBrokerUnknown)
		}
	}
	if err != nil {
		return nil, err
	}
	return catalog.NewTopicPlaced(cr.spec, plan, cr.key)
}

// checkTenant refuses a contract that is too much for its tenant. Unless placing is held,
// that may change at once.
func (c *Controller) checkTenant(spec *catalog.Spec) error {
	limit, limited := c.cfg.TenantRates[spec.Tenant]
	if !limited {
		limit, limited = c.cfg.TenantRates["*"]
	}
	if !limited || spec.Tenant == "" {
		return nil
	}
	c.mu.RLock()
	held := tokenbucket.Rate(c.mu.next.TenantRate(spec.Tenant, spec.Name()))
	c.mu.RUnlock()
	if want := tokenbucket.Rate(spec.Demand.RateMilli); held+want > limit {
		return &QuotaError{Tenant: spec.Tenant, Problem: fmt.Sprintf("%v msg/s beside the %v msg/s of its other topics are more than %v msg/s", want, held, limit)}
	}
	return nil
}

// contractRequest gives brokers that retire a little, to release what they
// have; where tokens are scarce, see turn.go. What a plan leaves unused, for
// publishers without a place, is no part of the contract meanwhile: the adaptor would
// give it to the others.
func (c *Controller) contractRequest(spec *catalog.Spec, plan placement.Plan, retiring []string) (*srtmv1.SetContractRequest, error) {
	waiting := retiring
	if scarce(plan, retiring) {
		c.mu.Lock()
		retiring = c.mu.unspent(spec.Name(), retiring)
		told := strings.Join(retiring, " ")
		c.mu.topics.at(spec.Name()).turns = &told
		c.mu.Unlock()
	}
	waiting = slices.DeleteFunc(slices.Clone(waiting), func(id string) bool { return slices.Contains(retiring, id) })
	shares, rest, err := placement.WithRetiring(plan, len(retiring))
	if err != nil {
		return nil, err
	}
	contract := ContractProto(spec)
	used := usedOf(plan)
	contract.RateMilli, contract.Burst = int64(used.Rate), used.Burst
	req := &srtmv1.SetContractRequest{Topic: spec.Name(), Contract: contract, ShareRule: spec.ShareRule}
	for i, q := range plan.Quotas {
		if shares[i].IsZero() {
			waiting = append(waiting, q.Broker)
			continue
		}
		req.Members = append(req.Members, &srtmv1.Member{
			BrokerId: q.Broker, Share: shareproto.To(shares[i]), Publishers: uint32(len(q.Publishers)),
		})
	}
	for i, id := range retiring {
		if rest[i].IsZero() {
			waiting = append(waiting, id)
			continue
		}
		req.Members = append(req.Members, &srtmv1.Member{BrokerId: id, Share: shareproto.To(rest[i]), Retiring: true})
	}
	req.Awaited = waiting
	ids := waiting
	for _, m := range req.Members {
		ids = append(ids[:len(ids):len(ids)], m.BrokerId)
	}
	req.Strict = c.strictOf(ids)
	return req, nil
}

// usedOf is the part of the contract that a plan divides: all of it, but for the
// part of publishers without a place.
func usedOf(plan placement.Plan) (sum tokenbucket.Share) {
	for _, q := range plan.Quotas {
		sum.Rate += q.Share.Rate
		sum.Burst += q.Share.Burst
	}
	return sum
}

// Delete removes a topic; a creation or another deletion under way ends first. The
// deletion goes on when ctx ends. catalog.ErrTopicUnknown if there is none.
func (c *Controller) Delete(ctx context.Context, name string) error {
	return c.request(ctx, operation{name: name, target: reconcile.Target{Gone: true}})
}

// sameOrder reports whether a creation is ordered again: what is left to the brokers may
// have been resolved.
func sameOrder(was, again *catalog.Spec) bool {
	if again.Durability == "" {
		again = again.Keeping(was.Durability)
	}
	return was.Equal(again)
}

// durability is that of the brokers; "": they differ, or there are none.
func (b *brokers) durability() catalog.Durability {
	var of catalog.Durability
	first := true
	// order: all are to be the same
	for _, s := range b.sessions {
		if !first && s.durability != of {
			return ""
		}
		of, first = s.durability, false
	}
	return of
}
