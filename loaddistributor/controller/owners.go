package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
)

// operation is a requested change of a topic.
type operation struct {
	name     string
	cause    cause
	target   reconcile.Target
	decide   decide    // nil: no plan
	creation *creation // nil: not a creation
	// ctx ends when no caller waits any more. Then an operation does not begin, and a
	// creation is rolled back. nil: unconditional.
	ctx context.Context
	// end receives the result before the next operation begins; may be nil.
	end func(error)
}

// owner is the only goroutine that changes a topic, one operation after the other. It
// runs the topic's state machine (loaddistributor/reconcile): it carries out the
// machine's effects and reports the results. Guarded by the controller's lock.
type owner struct {
	queued   []operation // operations after the present one
	retiring string      // broker that retires from the topic, for display
	waiting  string      // what the move waits for, for display
}

// owners starts owners and holds their dependencies.
type owners struct {
	// Set once.
	mu        *sync.RWMutex
	topics    *topics
	knowledge *knowledge
	life      *lifetime
	changes   changes
	tracer    trace.Tracer
}

// enqueue queues an operation behind the earlier operations of the topic. Requires: the lock held,
// and the controller is not closing.
func (o *owners) enqueue(op operation) {
	l := o.topics.entry(op.name)
	if l.owner != nil {
		l.owner.queued = append(l.owner.queued, op)
		return
	}
	current := &owner{queued: []operation{op}}
	l.owner = current
	o.life.work.Go(func() { o.run(op.name, current) })
}

// run is the goroutine of an owner. It ends when no operation is queued.
func (o *owners) run(name string, current *owner) {
	for {
		o.mu.Lock()
		if len(current.queued) == 0 {
			o.topics.entry(name).owner = nil
			o.mu.Unlock()
			return
		}
		op := current.queued[0]
		*current = owner{queued: current.queued[1:], retiring: op.target.Retire}
		var err error
		if op.ctx == nil {
			op.ctx = context.Background()
		} else if err = context.Cause(op.ctx); o.life.closing {
			err = ErrClosing
		}
		o.mu.Unlock()
		if err == nil {
			if op.creation == nil {
				op.ctx = context.WithoutCancel(op.ctx) // once begun, it continues
			}
			err = o.change(current, op)
		}
		if op.end != nil {
			op.end(err)
		}
	}
}

func (o *owners) change(current *owner, op operation) error {
	name, attributes := op.described()
	ctx, end := startSpan(op.ctx, o.tracer, name, attributes...)
	op.ctx = ctx
	c := &change{changes: o.changes, op: op, owner: current, start: time.Now()}
	err := c.run()
	end(err)
	return err
}

// request runs an operation and returns its result. After the beginning, the end of ctx
// does not stop the operation.
func (o *owners) request(ctx context.Context, op operation) error {
	if err := o.knowledge.following(); err != nil {
		return err
	}
	o.mu.Lock()
	if o.life.closing {
		o.mu.Unlock()
		return ErrClosing
	}
	return o.await(ctx, op)
}

// await is request. Requires: the lock held. await releases mu.
func (o *owners) await(ctx context.Context, op operation) error {
	done := make(chan error, 1)
	end := op.end
	op.ctx, op.end = ctx, func(err error) {
		if end != nil {
			end(err)
		}
		done <- err
	}
	o.enqueue(op)
	o.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// startSpan begins a span. end ends the span with the result.
func startSpan(ctx context.Context, tracer trace.Tracer, name string, attributes ...attribute.KeyValue) (_ context.Context, end func(error)) {
	ctx, span := tracer.Start(ctx, name, trace.WithAttributes(attributes...))
	return ctx, func(err error) {
		if err != nil && !errors.Is(err, reconcile.ErrSettled) {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// described returns the name and the attributes of an operation's span. The span is a
// child of the request's span, if any.
func (op operation) described() (name string, attributes []attribute.KeyValue) {
	attributes = []attribute.KeyValue{attribute.String(obs.KeyTopic, op.name)}
	switch {
	case op.creation != nil:
		return "create topic", attributes
	case op.decide != nil:
		reason := strings.TrimPrefix(op.cause.reason.String(), "MOVE_REASON_")
		return "move publishers", append(attributes, attribute.String(obs.KeyReason, reason), attribute.String("why", op.cause.text))
	case op.target.Gone:
		return "delete topic", attributes
	case op.target.Retire != "":
		return "retire broker", append(attributes, attribute.String(obs.KeyBroker, op.target.Retire))
	}
	return "reconcile topic", attributes
}

// changes has what every change needs.
type changes struct {
	// Set once.
	cfg      *Config
	mu       *sync.RWMutex
	cat      *pipeline
	brokers  *brokers
	topics   *topics
	requests *requests
	terms    *terms
	life     *lifetime
	adaptor  grants
	planner  *planner
	lowering func(ctx context.Context, topic string) *srtmv1.Lowering
	tracer   trace.Tracer
}

// change is a running operation.
type change struct {
	changes
	op    operation
	owner *owner
	start time.Time

	planned bool                    // the plan succeeded
	answers chan reconcile.Answered // from the brokers of the last request
}

// run passes events to the topic's state machine and carries out the machine's effects,
// until the change is over.
func (c *change) run() error {
	c.mu.Lock()
	topic, _ := c.cat.next.Topic(c.op.name)
	ending, stopWaiting := (<-chan struct{})(c.life.ending), c.life.stopWaiting
	c.mu.Unlock()
	c.op.target.Plan = c.op.decide != nil
	cancelled := c.op.ctx.Done()
	m := reconcile.New(c.op.name, topic, c.op.target, reconcile.Limits{Answer: c.cfg.PrepareTimeout, Consumers: c.cfg.ConsumerWait})
	timer := time.NewTimer(0)
	defer timer.Stop()
	events := []reconcile.Event{reconcile.Begun{}}
	for {
		for len(events) > 0 {
			effects := m.Step(events[0], time.Now())
			events = events[1:]
			for _, effect := range effects {
				if event := c.perform(effect); event != nil {
					events = append(events, event)
				}
			}
		}
		if m.Over() {
			err := m.Err()
			if err != nil && c.planned && c.op.creation == nil {
				c.cfg.Log.Warn("topic not moved", obs.KeyTopic, c.op.name, obs.KeyReason, c.op.cause.text, obs.KeyError, err)
			}
			return err
		}
		c.mu.Lock()
		c.owner.waiting = m.Waiting()
		c.mu.Unlock()
		if due := m.Due(); !due.IsZero() {
			timer.Reset(time.Until(due))
		}
		select {
		case a := <-c.answers: // an answer counts even if it is late
			events = append(events, a)
			continue
		default:
		}
		select {
		case a := <-c.answers:
			events = append(events, a)
		case <-timer.C:
			events = append(events, reconcile.Tick{})
		case <-cancelled:
			cancelled = nil
			events = append(events, reconcile.Cancelled{Cause: context.Cause(c.op.ctx)})
		case <-ending:
			ending = nil
			events = append(events, reconcile.Closing{})
		case <-stopWaiting:
			stopWaiting = nil
			events = append(events, reconcile.Closing{NoAnswers: true})
		}
	}
}

// perform carries out an effect and returns the resulting event. It returns nil if brokers
// will answer or the effect has no result.
func (c *change) perform(effect reconcile.Effect) reconcile.Event {
	name := c.op.name
	switch effect := effect.(type) {
	case reconcile.Plan:
		_, end := startSpan(c.op.ctx, c.tracer, "plan")
		p := c.planner.plan(c.op.ctx, name, c.op.decide)
		end(p.Err)
		c.planned = p.Err == nil
		return p
	case reconcile.Prepare:
		c.op.creation.progress(Progress{Message: "creating the topic on " + strings.Join(effect.Brokers, ", ")})
		c.request(effect.Brokers, func(s *Session, r request) { c.requests.prepare(s, r, effect.Spec) })
	case reconcile.Remove:
		c.request(effect.Brokers, func(s *Session, r request) { c.requests.remove(s, r, effect.Unused) })
	case reconcile.TakeOver:
		c.request([]string{effect.Broker}, func(s *Session, r request) { c.requests.takeOver(s, r, effect.From) })
	case reconcile.Grant:
		c.op.creation.progress(Progress{Message: "granting the shares"})
		_, end := startSpan(c.op.ctx, c.tracer, "grant shares")
		granted := c.grant(effect)
		end(granted.Err)
		return granted
	case reconcile.Drop:
		c.mu.RLock()
		t, _ := c.cat.committed.Topic(name)
		disconnected := slices.ContainsFunc(t.Holders(), func(id string) bool { return c.brokers.sessions[id] == nil })
		awaited, strict := c.cat.mayHold(name)
		c.mu.RUnlock()
		_, err := c.adaptor.drop(name, awaited, strict)
		return reconcile.Granted{Disconnected: disconnected, Err: err}
	case reconcile.LookShares:
		shares, _ := c.adaptor.shares(context.Background(), name, sharesTimeout) // none if the adaptor does not answer
		maps.DeleteFunc(shares, func(_ string, m *srtmv1.MemberShare) bool { return m.Acknowledged.GetRateMilli() == 0 })
		return reconcile.Shares{Acknowledged: slices.Collect(maps.Keys(shares))}
	case reconcile.LookUnconfirmed:
		return c.unconfirmed(effect)
	case reconcile.LookConsumers:
		return c.consumers(effect)
	case reconcile.Nudge:
		c.nudge(effect)
	case reconcile.Late:
		c.awaitLate(effect)
	case reconcile.Write:
		return c.write(effect)
	case reconcile.Moved:
		c.afterMove(effect.From, effect.To)
	case reconcile.Note:
		c.note(effect)
	}
	return nil
}

// request sends the same request to several brokers.
func (c *change) request(brokers []string, send func(*Session, request)) {
	c.answers = make(chan reconcile.Answered, len(brokers))
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range brokers {
		if s := c.brokers.sessions[id]; s != nil {
			send(s, request{topic: c.op.name, sent: now, done: c.answers})
		} else {
			c.answers <- reconcile.Answered{Broker: id, Err: ErrBrokerGone}
		}
	}
}

// grant sets a contract at the adaptor.
func (c *change) grant(g reconcile.Grant) reconcile.Granted {
	c.mu.Lock()
	contract, err := c.terms.contract(g.Spec, g.Plan, g.Retiring)
	var holders []string // of the contract of a deleted topic of the same name
	for _, s := range c.cat.next.Unconfirmed(c.op.name) {
		holders = append(holders, s.Broker)
	}
	c.mu.Unlock()
	if err != nil {
		return reconcile.Granted{Err: err}
	}
	var members []string
	for _, p := range contract.Placed {
		members = append(members, p.Broker)
	}
	mode := adaptor.Create
	switch {
	case g.Adopt:
		mode = adaptor.Adopt
	case g.Update:
		mode = adaptor.Update
	default:
		// The adaptor may have restarted since the deletion, and may restart before it gets the contract.
		contract.Holders = holders
	}
	err = c.adaptor.set(c.op.ctx, contract, mode)
	if service.Reason(err) == reasonBusy {
		err = &BusyError{Topic: c.op.name, Lowering: c.lowering(context.Background(), c.op.name)}
	}
	c.mu.Lock()
	if l := c.topics.entry(c.op.name); err != nil {
		l.sentTurn = nil // send the turns again
	} else if !g.Adopt { // with Adopt, brokers keep their present shares
		l.unsynced = false
	}
	c.mu.Unlock()
	return reconcile.Granted{Members: members, Err: err}
}

// consumers returns the consumers' state on the brokers of a moving topic.
func (c *change) consumers(query reconcile.LookConsumers) reconcile.Consumers {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return reconcile.Consumers{
		Read:         c.brokers.read(c.op.name, slices.Concat(query.Plan.Brokers(), query.Fresh, query.Former)),
		Listed:       !slices.ContainsFunc(query.Fresh, func(id string) bool { return !c.cat.committed.IsListed(c.op.name, id) }),
		Disconnected: !c.cat.planned(query.Plan),
	}
}

// nudge makes consumers look up the topic again.
func (c *change) nudge(n reconcile.Nudge) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	c.brokers.nudge(c.op.name, n)
}

// awaitLate arranges nudges after the change for consumers that have not come to new brokers.
func (c *change) awaitLate(late reconcile.Late) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.topics.entry(c.op.name)
	l.late = reconcile.NewLatecomers(l.late, late, c.cfg.ConsumerWait/2, time.Now())
}

func (c *change) write(w reconcile.Write) reconcile.Written {
	e := w.Event
	c.mu.Lock()
	var t ticket
	var err error
	before, _ := c.cat.next.Topic(c.op.name)
	_, activates := e.(catalog.TopicActivated)
	if err = context.Cause(c.op.ctx); err == nil || !activates { // an activation without a waiting caller is not written
		err = nil
		if w.Unconfirmed != nil {
			_, err = c.cat.stage(*w.Unconfirmed)
			err = mustSucceed("the unconfirmed shares of "+c.op.name, err)
		}
		if err == nil {
			t, err = c.cat.stage(e)
		}
	}
	c.mu.Unlock()
	if err == nil {
		err = t.wait()
	}
	switch e.(type) {
	case catalog.TopicRemoved, catalog.TopicMoveAborted, catalog.MemberRetired:
		err = mustSucceed("what has been done about "+c.op.name, err)
	}
	if err != nil {
		return reconcile.Written{Err: err, Halted: errors.Is(err, ErrNotCommitted)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e := e.(type) {
	case catalog.TopicMoveAborted:
		c.topics.entry(c.op.name).unsynced = true // until the adaptor has the former shares again
		if topic, found := c.cat.next.Topic(c.op.name); found {
			c.requests.announce(c.op.name, topic.Spec, topic.Retiring, time.Now())
		}
	case catalog.MemberRetired:
		c.cfg.Log.Info("topic gone from broker", obs.KeyTopic, c.op.name, obs.KeyBroker, e.Broker)
	case catalog.TopicRemoved:
		c.forgetTopic(before, e.Left)
	}
	topic, _ := c.cat.next.Topic(c.op.name)
	return reconcile.Written{Topic: topic}
}

// forgetTopic deletes the data about a topic from state and from the sessions of its brokers,
// except the remaining brokers, which still have the topic. A new topic of the same name starts
// with new reports.
func (c *change) forgetTopic(topic catalog.Topic, remaining []string) {
	name, holders := topic.Spec.Name(), topic.Holders()
	l := c.topics.entry(name)
	if l.profile != nil {
		close(l.profile.deleted)
	}
	*l = liveTopic{owner: l.owner, creating: l.creating, watchers: l.watchers}
	for id, s := range c.brokers.sessions {
		if slices.Contains(holders, id) && !slices.Contains(remaining, id) {
			s.reports.Forget(name)
		}
		delete(s.copies, name)
		delete(s.unknown, name) // the broker's unknown copy has been deleted, too
	}
}

// afterMove informs the brokers and logs the move.
func (c *change) afterMove(from, to catalog.Topic) {
	c.mu.Lock() // before publishers learn of the move, so that old brokers forward their messages
	c.requests.announce(c.op.name, to.Spec, to.Retiring, time.Now())
	c.requests.announce(c.op.name, to.Spec, slices.DeleteFunc(slices.Clone(from.Retiring), func(id string) bool { return to.Plan.On(id) < 0 }), time.Now())
	c.mu.Unlock()
	publishers := c.disconnect(from.Placement, to.Placement)
	trace.SpanFromContext(c.op.ctx).SetAttributes(attribute.Int("publishers", publishers), attribute.Int64(obs.KeyEpoch, int64(to.Placement.Epoch())))
	c.cfg.Log.Info("topic moved", obs.KeyTopic, c.op.name, obs.KeyReason, c.op.cause.text, "publishers", publishers, obs.KeyEpoch, to.Placement.Epoch(),
		"brokers", to.Plan.K, "retiring", len(to.Retiring), obs.KeyDuration, time.Since(c.start))
}

func (c *change) note(n reconcile.Note) {
	args := []any{obs.KeyTopic, c.op.name}
	if n.Broker != "" {
		args = append(args, obs.KeyBroker, n.Broker)
	}
	if n.Names != nil {
		args = append(args, "names", n.Names)
	}
	if n.Err != nil {
		args = append(args, obs.KeyError, n.Err)
	}
	if n.Warn {
		c.cfg.Log.Warn(n.Text, args...)
	} else {
		c.cfg.Log.Info(n.Text, args...)
	}
}
