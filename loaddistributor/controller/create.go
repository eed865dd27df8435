package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
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

// placeAttempts bounds how often a plan is made again because brokers left
// between the snapshot and the commit.
const placeAttempts = 8

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
// its key); catalog.ErrTopicExists, ErrKeyReused; placement.FieldErrors,
// *placement.Infeasible; catalog.ErrBrokerUnknown; *BrokerError, *AdaptorError, ErrUnsteady, ErrClosing;
// the context's.
func (c *Controller) Create(ctx context.Context, spec *catalog.Spec, key, on string, tell func(Progress) error) (catalog.Topic, error) {
	if err := c.following(); err != nil {
		return catalog.Topic{}, err
	}
	cr, topic, err := c.begin(spec, key, on)
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

// begin starts a creation or joins the one that the key names; a nil creation
// with a nil error is a topic that is there already.
func (c *Controller) begin(spec *catalog.Spec, key, on string) (*creation, catalog.Topic, error) {
	name := spec.Name()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closing {
		return nil, catalog.Topic{}, ErrClosing
	}
	if key != "" {
		for _, cr := range c.mu.creating {
			if cr.key != key {
				continue
			}
			if !cr.spec.Equal(spec) {
				return nil, catalog.Topic{}, fmt.Errorf("topic %s is being created with the key: %w", cr.spec.Name(), catalog.ErrKeyReused)
			}
			cr.waiters++
			return cr, catalog.Topic{}, nil
		}
		if known, ok := c.mu.next.KeyOf(key); ok {
			topic, _ := c.mu.next.Topic(known)
			if !topic.Ordered.Equal(spec) {
				return nil, catalog.Topic{}, fmt.Errorf("topic %s was created with the key: %w", known, catalog.ErrKeyReused)
			}
			if topic.State != catalog.Deleting {
				return nil, topic, nil
			}
		}
	}
	// One that is being deleted is gone before the creation, which holds the
	// name, begins.
	if t, taken := c.mu.next.Topic(name); taken && t.State != catalog.Deleting || c.mu.creating[name] != nil {
		return nil, catalog.Topic{}, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicExists)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	c.mu.empty = false // it is a new cluster, or somebody sees to it
	cr := &creation{spec: spec, key: key, on: on, cancel: cancel, waiters: 1, changed: make(chan struct{})}
	c.mu.creating[name] = cr
	c.work.Add(1)
	go func() {
		defer c.work.Done()
		defer cancel(nil)
		c.run(ctx, cr)
	}()
	return cr, catalog.Topic{}, nil
}

// abandon takes one who waited away.
func (c *Controller) abandon(cr *creation) {
	c.mu.Lock()
	cr.waiters--
	last := cr.waiters == 0
	c.mu.Unlock()
	if last {
		cr.cancel(errAbandoned) // does nothing to one that has ended
	}
}

// run is the creation's goroutine.
func (c *Controller) run(ctx context.Context, cr *creation) {
	name := cr.spec.Name()
	began := time.Now()
	release, err := c.hold(ctx, name)
	if err == nil {
		err = c.create(ctx, cr)
		release()
	}
	c.mu.Lock()
	cr.err, cr.ended = err, true
	delete(c.mu.creating, name)
	close(cr.changed)
	c.mu.Unlock()
	if err != nil {
		c.cfg.Log.Warn("topic not created", obs.KeyTopic, name, obs.KeyError, err, obs.KeyDuration, time.Since(began))
		return
	}
	c.cfg.Log.Info("topic created", obs.KeyTopic, name, obs.KeyDuration, time.Since(began),
		obs.KeyPolicy, cr.topic.Plan.Policy, "brokers", cr.topic.Plan.K)
}

func (c *Controller) step(cr *creation, p Progress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cr.steps = append(cr.steps, p)
	close(cr.changed)
	cr.changed = make(chan struct{})
}

// create does it, or undoes what it did. Requires: the topic's name is held.
func (c *Controller) create(ctx context.Context, cr *creation) error {
	name := cr.spec.Name()
	plan, err := c.place(ctx, cr)
	if err != nil {
		return err
	}
	brokers := make([]string, 0, plan.K)
	for _, q := range plan.Quotas {
		brokers = append(brokers, q.Broker)
	}
	contracted := false
	err = func() error {
		c.step(cr, Progress{Message: "creating the topic on " + strings.Join(brokers, ", ")})
		if err := c.prepare(ctx, cr.spec, brokers); err != nil {
			return err
		}
		c.step(cr, Progress{Message: "granting the shares"})
		contracted = true
		req, err := c.contractRequest(cr.spec, plan, nil)
		if err != nil {
			return err
		}
		if err := c.contract(ctx, req); err != nil {
			return err
		}
		return c.activate(ctx, cr)
	}()
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrNotCommitted) {
		return err // what has become of it, the next controller finds out
	}
	return errors.Join(err, c.tearDown(name, contracted))
}

// activate makes the topic active if somebody still waits for it.
func (c *Controller) activate(ctx context.Context, cr *creation) error {
	c.mu.Lock()
	if cr.waiters == 0 || ctx.Err() != nil {
		c.mu.Unlock()
		return cmp.Or(context.Cause(ctx), errAbandoned)
	}
	activated, err := c.stageLocked(catalog.TopicActivated{Topic: cr.spec.Name()})
	c.mu.Unlock()
	if err == nil {
		err = activated.wait()
	}
	if err != nil {
		return err
	}
	// Now: as soon as the name is let go of, somebody may delete it.
	c.mu.Lock()
	defer c.mu.Unlock()
	cr.topic, _ = c.mu.cat.Topic(cr.spec.Name())
	c.fitLocked(cr.topic)
	return nil
}

// place plans and commits.
func (c *Controller) place(ctx context.Context, cr *creation) (placement.Plan, error) {
	c.placing.Lock()
	defer c.placing.Unlock()
	for range placeAttempts {
		if err := context.Cause(ctx); err != nil {
			return placement.Plan{}, err
		}
		c.mu.RLock()
		snapshot := c.mu.next.Snapshot()
		measured, _ := c.mu.next.Broker(cr.on)
		c.mu.RUnlock()
		c.step(cr, Progress{Placing: true, Message: fmt.Sprintf("placing %d msg/s on %d brokers", cr.spec.Demand.Rate, len(snapshot))})
		var plan placement.Plan
		var err error
		switch {
		case cr.on == "":
			plan, err = placement.Place(cr.spec.Policy, snapshot, cr.spec.Demand, c.placing.rng)
		case measured.Connected:
			plan = placement.Unreserved(cr.spec.Policy, cr.on, cr.spec.Demand)
		default:
			err = fmt.Errorf("broker %q is away or unknown: %w", cr.on, catalog.ErrBrokerUnknown)
		}
		if err != nil {
			return placement.Plan{}, err
		}
		event, err := catalog.NewTopicPlaced(cr.spec, plan, cr.key)
		if err != nil {
			return placement.Plan{}, err
		}
		err = c.commit(event)
		if errors.As(err, new(*catalog.PlanError)) {
			continue
		}
		return plan, err
	}
	return placement.Plan{}, ErrUnsteady
}

// prepare has the brokers create the topic, all at once.
func (c *Controller) prepare(ctx context.Context, spec *catalog.Spec, brokers []string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.PrepareTimeout, ErrNoAnswer)
	defer cancel()
	answers := c.ask(spec.Name(), spec, brokers)
	var errs []error
	for _, broker := range brokers {
		select {
		case err := <-answers[broker]:
			if err != nil {
				errs = append(errs, &BrokerError{broker, err})
			}
		case <-ctx.Done():
			errs = append(errs, &BrokerError{broker, context.Cause(ctx)})
		}
	}
	return errors.Join(errs...)
}

// ask sends the same request to all brokers; nil prepare: remove.
func (c *Controller) ask(topic string, prepare *catalog.Spec, brokers []string) map[string]chan error {
	answers := make(map[string]chan error, len(brokers))
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, broker := range brokers {
		done := make(chan error, 1)
		answers[broker] = done
		if s := c.mu.sessions[broker]; s != nil {
			c.askLocked(s, topic, prepare, done, now)
		} else {
			done <- ErrBrokerGone
		}
	}
	return answers
}

// contract sets a contract at the adaptor; while the adaptor is away it tries
// again.
func (c *Controller) contract(ctx context.Context, req *srtmv1.SetContractRequest) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.PrepareTimeout, ErrNoAnswer)
	defer cancel()
	for delay := 50 * time.Millisecond; ; delay *= 2 {
		_, err := c.adaptor.SetContract(ctx, req)
		if err == nil {
			return nil
		}
		// A status without details is of gRPC itself: the connection broke. With
		// details the adaptor has decided, and will not decide otherwise.
		if s := status.Convert(err); s.Code() != codes.Unavailable || len(s.Details()) > 0 {
			return &AdaptorError{err}
		}
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return &AdaptorError{err}
		}
	}
}

// contractRequest gives brokers that retire a little, to release what they
// have; where tokens are scarce, see turn.go. What a plan leaves unused, for
// publishers without a place, is no part of the contract meanwhile: the adaptor would
// give it to the others.
func (c *Controller) contractRequest(spec *catalog.Spec, plan placement.Plan, retiring []string) (*srtmv1.SetContractRequest, error) {
	waiting := retiring
	if scarce(plan, retiring) {
		c.mu.Lock()
		retiring = c.unspentLocked(spec.Name(), retiring)
		c.mu.turns[spec.Name()] = strings.Join(retiring, " ")
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
			BrokerId: q.Broker, Share: ShareProto(shares[i]), Publishers: uint32(len(q.Publishers)),
		})
	}
	for i, id := range retiring {
		if rest[i].IsZero() {
			waiting = append(waiting, id)
			continue
		}
		req.Members = append(req.Members, &srtmv1.Member{BrokerId: id, Share: ShareProto(rest[i]), Retiring: true})
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

// tearDown removes a topic from the brokers, the adaptor and the catalog. It
// takes no longer than two timeouts; what could not be reached in that time is
// remembered in the catalog and cleared later. contracted: the adaptor may
// have its contract. Requires: the topic's name is held.
func (c *Controller) tearDown(name string, contracted bool) error {
	contractLeft := false
	if contracted {
		ctx, cancel := context.WithTimeout(context.Background(), c.cfg.PrepareTimeout)
		_, err := c.adaptor.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: name})
		cancel()
		if err != nil {
			contractLeft = true
			c.cfg.Log.Warn("contract left behind for now", obs.KeyTopic, name, obs.KeyError, err)
		}
	}
	c.mu.RLock()
	topic, _ := c.mu.next.Topic(name)
	c.mu.RUnlock()
	brokers := topic.Holders()
	var left []string
	timer := time.NewTimer(c.cfg.PrepareTimeout)
	defer timer.Stop()
	answers := c.ask(name, nil, brokers)
	expired := false
	for _, broker := range brokers {
		var err error
		switch {
		case expired:
			select {
			case err = <-answers[broker]:
			default:
				err = ErrNoAnswer
			}
		default:
			select {
			case err = <-answers[broker]:
			case <-timer.C:
				expired, err = true, ErrNoAnswer
			}
		}
		if err != nil {
			left = append(left, broker)
			c.cfg.Log.Warn("topic left behind for now", obs.KeyTopic, name, obs.KeyBroker, broker, obs.KeyError, err)
		}
	}
	err := must("tear down "+name, c.commit(catalog.TopicRemoved{Topic: name, Left: left, ContractLeft: contractLeft}))
	if err != nil {
		return err // the next controller does it
	}
	c.mu.Lock()
	for _, broker := range brokers {
		// A name that is used again starts with figures of its own.
		if s := c.mu.sessions[broker]; s != nil && !slices.Contains(left, broker) {
			delete(s.topics, name)
		}
	}
	for _, s := range c.mu.sessions {
		delete(s.kept, name)
		delete(s.unknown, name) // what it may hold of that name has been deleted, too
	}
	c.mu.Unlock()
	return nil
}

// Delete removes a topic; a creation or another deletion under way ends first.
// The deletion goes on when ctx ends. catalog.ErrTopicUnknown if there is none.
func (c *Controller) Delete(ctx context.Context, name string) error {
	if err := c.following(); err != nil {
		return err
	}
	release, err := c.hold(ctx, name)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if c.mu.closing {
		c.mu.Unlock()
		release()
		return ErrClosing
	}
	deleting, err := c.stageLocked(catalog.TopicDeleting{Topic: name})
	if err != nil {
		c.mu.Unlock()
		release()
		return err
	}
	c.work.Add(1)
	c.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		defer c.work.Done()
		defer release()
		err := deleting.wait()
		if err == nil {
			err = c.tearDown(name, true)
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
