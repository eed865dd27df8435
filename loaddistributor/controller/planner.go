package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/tokenbucket"
)

// planner makes plans, one at a time, so that plans never conflict. Brokers may join and
// leave meanwhile; the commit detects that.
type planner struct {
	// Set once.
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	tenants *tenants
	fleet   *fleet

	// turn is held from the snapshot until the plan's event is staged: the next snapshot has the event.
	// So one write to the journal serves many plans. Acquire turn before mu.
	turn sync.Mutex
	rng  *rand.Rand // guarded by turn
}

// planning is the input of a plan: the decided state of the topic, the brokers of the
// catalog's Snapshot, and the planner's random source.
type planning struct {
	topic   catalog.Topic // without a Spec: no such topic
	brokers []placement.Broker
	intact  bool // all brokers of the topic's plan are connected
	rng     *rand.Rand
	tenants *tenants
}

// decide returns the event that begins the planned change.
type decide func(planning) (catalog.Event, error)

// placeAttempts limits the attempts to plan if brokers join or leave between the snapshot
// and the commit.
const placeAttempts = 8

// plan decides and commits the placement of a topic. ctx ends when no caller waits.
func (p *planner) plan(ctx context.Context, name string, decide decide) reconcile.Planned {
	for range placeAttempts {
		p.turn.Lock()
		if err := context.Cause(ctx); err != nil {
			p.turn.Unlock()
			return reconcile.Planned{Err: err}
		}
		p.mu.RLock()
		topic, _ := p.cat.next.Topic(name)
		brokers := p.brokers.withoutTakenOver(p.cat.next.Snapshot(name), topic)
		intact := p.cat.planned(topic.Plan)
		adaptorKnows := slices.Contains(p.cat.next.LeftoverContracts(), name)
		p.mu.RUnlock()
		event, err := decide(planning{topic, brokers, intact, p.rng, p.tenants})
		var decided ticket
		if err == nil {
			p.mu.Lock()
			decided, err = p.cat.stage(event)
			p.mu.Unlock()
		}
		p.turn.Unlock()
		if err == nil {
			err = decided.wait()
		}
		if errors.As(err, new(*catalog.PlanError)) {
			continue
		}
		p.fleet.planned(name, topic, event, err)
		if err != nil {
			return reconcile.Planned{Err: err}
		}
		p.mu.RLock()
		defer p.mu.RUnlock()
		topic, _ = p.cat.next.Topic(name)
		if topic.Next == nil {
			return reconcile.Planned{Topic: topic, Missing: topic.Plan.Brokers(), AdaptorKnows: adaptorKnows}
		}
		return reconcile.Planned{Topic: topic, Missing: p.cat.next.NextUnprepared(name)}
	}
	return reconcile.Planned{Err: ErrUnsteady}
}

// afford refuses a contract that exceeds both the present contract and the tenant's
// limit.
func (p planning) afford(spec *catalog.Spec) error {
	if p.topic.Spec != nil && spec.Demand.RateMilli <= p.topic.Spec.Demand.RateMilli {
		return nil
	}
	return p.tenants.check(spec)
}

// replace plans the topic again with few moves. homes has the brokers of publishers that are
// not in the topic's placement.
func (p planning) replace(spec *catalog.Spec, homes map[string]string) (placement.Plan, error) {
	return placement.Replace(spec.Policy, p.brokers, p.topic.Plan, func(publisher string) string {
		if i, ok := p.topic.Placement.Index(publisher); ok {
			return p.topic.Placement.At(i).Broker
		}
		return homes[publisher]
	}, spec.Demand, p.rng)
}

// replaceAsWide is replace on as many brokers as the topic has now, if possible: a fit
// may have found that the topic needs them.
func (p planning) replaceAsWide(spec *catalog.Spec, homes map[string]string) (placement.Plan, error) {
	wide := *spec
	wide.Demand.AtLeast = min(p.topic.Plan.K, len(p.brokers))
	plan, err := p.replace(&wide, homes)
	if errors.As(err, new(*placement.Infeasible)) {
		return p.replace(spec, homes)
	}
	return plan, err
}

// overcommitted is replaceAsWide with increasing excess capacity, by the same factor for
// all brokers, until a plan exists. Requires: an *Infeasible for the real capacity.
func (p planning) overcommitted(spec *catalog.Spec) (placement.Plan, error) {
	p.brokers = slices.Clone(p.brokers)
	for {
		largest := int64(0)
		for i := range p.brokers {
			b := &p.brokers[i]
			b.Mcap += b.Mcap/4 + 1
			largest = max(largest, b.Mcap)
		}
		plan, err := p.replaceAsWide(spec, nil)
		var infeasible *placement.Infeasible
		if !errors.As(err, &infeasible) || !infeasible.Capacity() || largest == 0 || largest > 1<<40 {
			return plan, err
		}
	}
}

// Plan returns the placement that Create would choose now, apart from random choices of
// the policy. It changes nothing. The errors are as in Create.
func (c *Controller) Plan(spec *catalog.Spec) (placement.Plan, error) {
	if err := c.knowledge.following(); err != nil {
		return placement.Plan{}, err
	}
	c.mu.RLock()
	existsErr := c.checkName(spec.Name())
	brokers := c.cat.next.Snapshot(spec.Name())
	c.mu.RUnlock()
	if existsErr != nil {
		return placement.Plan{}, existsErr
	}
	if err := c.tenants.check(spec); err != nil {
		return placement.Plan{}, err
	}
	return placement.Place(spec.Policy, brokers, spec.Demand, rand.New(rand.NewPCG(1, 1)))
}

// checkName returns an error if a topic of the name exists. A topic that is being deleted
// does not count, because its deletion ends before the creation begins.
func (c *Controller) checkName(name string) error {
	if t, found := c.cat.next.Topic(name); found && t.State != catalog.Deleting || c.topics.peek(name).creating != nil {
		return fmt.Errorf("topic %s: %w", name, catalog.ErrTopicExists)
	}
	return nil
}

// tenants limits the sum of each tenant's contracts.
type tenants struct {
	// Set once.
	limits map[string]tokenbucket.Rate // Config.TenantRates
	mu     *sync.RWMutex
	cat    *pipeline
}

// check refuses a contract that exceeds the tenant's limit. Outside a planner's
// turn the result may be outdated at once. Requires: the lock is not held.
func (t *tenants) check(spec *catalog.Spec) error {
	limit, limited := t.limit(spec.Tenant)
	if !limited {
		return nil
	}
	t.mu.RLock()
	reserved := tokenbucket.Rate(t.cat.next.TenantRate(spec.Tenant, spec.Name()))
	t.mu.RUnlock()
	if want := tokenbucket.Rate(spec.Demand.RateMilli); reserved+want > limit {
		return &QuotaError{Tenant: spec.Tenant, Problem: fmt.Sprintf("%s msg/s beside the %s msg/s of its other topics are more than %s msg/s", want.Text(), reserved.Text(), limit.Text())}
	}
	return nil
}

// limit returns the limit of the sum of a tenant's contracts. An operator has no
// limit.
func (t *tenants) limit(tenant string) (limit tokenbucket.Rate, limited bool) {
	if limit, limited = t.limits[tenant]; !limited {
		limit, limited = t.limits["*"]
	}
	return limit, limited && tenant != ""
}

// remaining returns the part of the tenant's limit that the tenant's other topics leave.
// Requires: the lock held, for reading.
func (t *tenants) remaining(spec *catalog.Spec) (remaining tokenbucket.Rate, limited bool) {
	limit, limited := t.limit(spec.Tenant)
	if !limited {
		return 0, false
	}
	return max(0, limit-tokenbucket.Rate(t.cat.next.TenantRate(spec.Tenant, spec.Name()))), true
}

// planned reports whether all brokers of a plan are connected.
func (p *pipeline) planned(plan placement.Plan) bool {
	return !slices.ContainsFunc(plan.Quotas, func(q placement.Quota) bool {
		b, _ := p.next.Broker(q.Broker)
		return !b.Connected
	})
}
