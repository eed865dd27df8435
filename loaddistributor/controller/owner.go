package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// operation is a change of a topic that is wanted.
type operation struct {
	name     string
	cause    cause
	target   reconcile.Target
	decide   decide    // nil: no plan is wanted
	creation *creation // nil if it is none
	// ctx ends when no caller waits for it any more: it does not begin then, and a creation
	// is undone; nil: it is done in any case.
	ctx context.Context
	// end is called with what has come of it, before the next one begins; nil: it is not.
	end func(error)
}

// owner is the one goroutine that changes a topic, one operation after the other. It has
// the topic's machine (loaddistributor/reconcile), carries out what that wants, and tells
// it what came of it. Guarded by state's lock.
type owner struct {
	wanted   []operation // after the one under way
	retiring string      // the broker that the topic goes from, for display
	waiting  string      // what its move waits for, for display
}

// owners have topics changed: what each of them needs.
type owners struct {
	// Set once.
	cfg     *Config
	mu      *state
	adaptor ledger
	planner *planner
	tracer  trace.Tracer
}

// want has an operation done once those that were wanted before are over. Requires:
// mu held, and the controller is not closing.
func (o *owners) want(op operation) {
	l := o.mu.topics.at(op.name)
	if l.owner != nil {
		l.owner.wanted = append(l.owner.wanted, op)
		return
	}
	own := &owner{wanted: []operation{op}}
	l.owner = own
	o.mu.work.Go(func() { o.own(op.name, own) })
}

// own is the goroutine of an owner, until nothing is wanted any more.
func (o *owners) own(name string, own *owner) {
	for {
		o.mu.Lock()
		if len(own.wanted) == 0 {
			o.mu.topics.at(name).owner = nil
			o.mu.Unlock()
			return
		}
		op := own.wanted[0]
		*own = owner{wanted: own.wanted[1:], retiring: op.target.Retire}
		var err error
		if op.ctx == nil {
			op.ctx = context.Background()
		} else if err = context.Cause(op.ctx); o.mu.closing {
			err = ErrClosing
		}
		o.mu.Unlock()
		if err == nil {
			if op.creation == nil {
				op.ctx = context.WithoutCancel(op.ctx) // once begun
			}
			err = o.changeTraced(own, op)
		}
		if op.end != nil {
			op.end(err)
		}
	}
}

// request has an operation done, and returns what has come of it. Once it has begun it
// goes on when ctx ends.
func (o *owners) request(ctx context.Context, op operation) error {
	if err := o.mu.following(); err != nil {
		return err
	}
	o.mu.Lock()
	if o.mu.closing {
		o.mu.Unlock()
		return ErrClosing
	}
	return o.await(ctx, op)
}

// await is request. It releases mu, which it requires to be held.
func (o *owners) await(ctx context.Context, op operation) error {
	done := make(chan error, 1)
	end := op.end
	op.ctx, op.end = ctx, func(err error) {
		if end != nil {
			end(err)
		}
		done <- err
	}
	o.want(op)
	o.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// change carries an operation out.
func (o *owners) change(own *owner, op operation) error {
	began := time.Now()
	o.mu.Lock()
	is, _ := o.mu.next.Topic(op.name)
	ending := o.mu.ending
	o.mu.Unlock()
	op.target.Plan = op.decide != nil
	cancelled := op.ctx.Done()
	m := reconcile.New(op.name, is, op.target, reconcile.Limits{Answer: o.cfg.PrepareTimeout, Consumers: o.cfg.ConsumerWait})
	timer := time.NewTimer(0)
	defer timer.Stop()
	var answers chan reconcile.Answered
	planned := false
	events := []reconcile.Event{reconcile.Begun{}}
	for {
		for len(events) > 0 {
			effects := m.Step(events[0], time.Now())
			events = events[1:]
			for _, effect := range effects {
				var event reconcile.Event
				switch effect := effect.(type) {
				case reconcile.Plan:
					_, end := o.span(op.ctx, "plan")
					p := o.planner.plan(op.ctx, op.name, op.decide)
					end(p.Err)
					planned, event = p.Err == nil, p
				case reconcile.Prepare:
					op.creation.progress(Progress{Message: "creating the topic on " + strings.Join(effect.Brokers, ", ")})
					answers = o.ask(op.name, effect.Spec, false, effect.Brokers)
				case reconcile.Remove:
					answers = o.ask(op.name, nil, effect.Unused, effect.Brokers)
				case reconcile.TakeOver:
					answers = o.askTakeOver(op.name, effect)
				case reconcile.Grant:
					op.creation.progress(Progress{Message: "granting the shares"})
					_, end := o.span(op.ctx, "grant shares")
					granted := o.grant(op, effect)
					end(granted.Err)
					event = granted
				case reconcile.Drop:
					event = reconcile.Granted{Err: o.adaptor.drop(op.name)}
				case reconcile.LookShares:
					shares, _ := o.adaptor.shares(context.Background(), op.name, sharesTimeout) // none, if it does not answer
					maps.DeleteFunc(shares, func(_ string, m *srtmv1.MemberShare) bool { return m.Acknowledged.GetRateMilli() == 0 })
					event = reconcile.Shares{Held: slices.Collect(maps.Keys(shares))}
				case reconcile.LookConsumers:
					event = o.consumers(op.name, effect)
				case reconcile.Nudge:
					o.nudge(op.name, effect)
				case reconcile.Write:
					event = o.write(op, effect.Event)
				case reconcile.Moved:
					moved := o.disconnect(op, effect.From.Placement, effect.To.Placement)
					trace.SpanFromContext(op.ctx).SetAttributes(attribute.Int("publishers", moved), attribute.Int64(obs.KeyEpoch, int64(effect.To.Placement.Epoch())))
					o.cfg.Log.Info("topic moved", obs.KeyTopic, op.name, obs.KeyReason, op.cause.why, "publishers", moved, obs.KeyEpoch, effect.To.Placement.Epoch(),
						"brokers", effect.To.Plan.K, "retiring", len(effect.To.Retiring), obs.KeyDuration, time.Since(began))
				case reconcile.Note:
					o.note(op.name, effect)
				}
				if event != nil {
					events = append(events, event)
				}
			}
		}
		if m.Over() {
			err := m.Err()
			if err != nil && planned && op.creation == nil {
				o.cfg.Log.Warn("topic not moved", obs.KeyTopic, op.name, obs.KeyReason, op.cause.why, obs.KeyError, err)
			}
			return err
		}
		o.mu.Lock()
		own.waiting = m.Waiting()
		o.mu.Unlock()
		if due := m.Due(); !due.IsZero() {
			timer.Reset(time.Until(due))
		}
		select {
		case a := <-answers: // what has been answered counts, however late it is
			events = append(events, a)
			continue
		default:
		}
		select {
		case a := <-answers:
			events = append(events, a)
		case <-timer.C:
			events = append(events, reconcile.Tick{})
		case <-cancelled:
			cancelled = nil
			events = append(events, reconcile.Cancelled{Cause: context.Cause(op.ctx)})
		case <-ending:
			ending = nil
			events = append(events, reconcile.Closing{})
		}
	}
}

// ask sends the same request to all brokers: to create a topic, or to remove it where
// there is no specification.
func (o *owners) ask(topic string, prepare *catalog.Spec, unused bool, brokers []string) chan reconcile.Answered {
	answers := make(chan reconcile.Answered, len(brokers))
	now := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, id := range brokers {
		switch s := o.mu.sessions[id]; {
		case s == nil:
			answers <- reconcile.Answered{Broker: id, Err: ErrBrokerGone}
		case prepare != nil:
			o.mu.ask(s, topic, prepare, answers, now)
		default:
			o.mu.remove(s, topic, unused, answers, now)
		}
	}
	return answers
}

// askTakeOver has a broker take over what another had of a topic.
func (o *owners) askTakeOver(topic string, t reconcile.TakeOver) chan reconcile.Answered {
	answers := make(chan reconcile.Answered, 1)
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.mu.sessions[t.Broker]
	if s == nil {
		answers <- reconcile.Answered{Broker: t.Broker, Err: ErrBrokerGone}
		return answers
	}
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_TakeOver{TakeOver: &srtmv1.TakeOver{
		Request: o.mu.expect(s, request{topic: topic, owners: true, sent: time.Now(), done: answers}), Topic: topic, FromBrokerId: t.From,
	}}})
	return answers
}

// grant sets a contract at the adaptor; while the adaptor is away it tries again.
func (o *owners) grant(op operation, g reconcile.Grant) reconcile.Granted {
	o.mu.Lock()
	req, err := o.mu.contractRequest(g.Spec, g.Plan, g.Retiring)
	o.mu.Unlock()
	if err != nil {
		return reconcile.Granted{Err: err}
	}
	req.Update, req.Adopt = g.Update, g.Adopt
	err = o.adaptor.set(op.ctx, req)
	o.mu.Lock()
	if l := o.mu.topics.at(op.name); err != nil {
		l.turns = nil // to be told again
	} else if !g.Adopt { // by which brokers keep what they hold
		l.unsynced = false
	}
	o.mu.Unlock()
	granted := reconcile.Granted{Err: err}
	for _, m := range req.Members {
		granted.Members = append(granted.Members, m.BrokerId)
	}
	return granted
}

// consumers looks who reads a topic that moves.
func (o *owners) consumers(name string, look reconcile.LookConsumers) reconcile.Consumers {
	o.mu.RLock()
	defer o.mu.RUnlock()
	read := map[string][]string{}
	for _, id := range slices.Concat(look.Plan.Brokers(), look.Fresh, look.Other) {
		if t := o.mu.reported(id).Topic(name); t != nil {
			read[id] = t.Read
		}
	}
	return reconcile.Consumers{
		Read:  read,
		Shown: !slices.ContainsFunc(look.Fresh, func(id string) bool { return !o.mu.cat.Shows(name, id) }),
		Away:  !o.mu.planned(look.Plan),
	}
}

func (o *owners) nudge(name string, n reconcile.Nudge) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if s := o.mu.sessions[n.Broker]; s != nil {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Nudge{
			Nudge: &srtmv1.NudgeConsumers{Topic: name, Channels: n.Channels},
		}})
	}
}

// write makes an event durable.
func (o *owners) write(op operation, e catalog.Event) reconcile.Written {
	o.mu.Lock()
	var t ticket
	var err error
	before, _ := o.mu.next.Topic(op.name)
	_, activates := e.(catalog.TopicActivated)
	if err = context.Cause(op.ctx); err == nil || !activates { // no caller waits for it any more
		t, err = o.mu.stage(e)
	}
	o.mu.Unlock()
	if err == nil {
		err = t.wait()
	}
	switch e.(type) {
	case catalog.TopicRemoved, catalog.TopicMoveAborted, catalog.MemberRetired:
		err = must("what has been done about "+op.name, err)
	}
	if err != nil {
		return reconcile.Written{Err: err, Halted: errors.Is(err, ErrNotCommitted)}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e := e.(type) {
	case catalog.TopicMoveAborted:
		o.mu.topics.at(op.name).unsynced = true // until the adaptor is told
	case catalog.MemberRetired:
		o.cfg.Log.Info("topic gone from broker", obs.KeyTopic, op.name, obs.KeyBroker, e.Broker)
	case catalog.TopicRemoved:
		o.removed(before, e.Left)
	}
	topic, _ := o.mu.next.Topic(op.name)
	return reconcile.Written{Topic: topic}
}

// removed forgets what is known of a topic, and what sessions have, but for brokers that it
// was left on: a name that is used again starts with reports of its own.
func (o *owners) removed(topic catalog.Topic, left []string) {
	name, holders := topic.Spec.Name(), topic.Holders()
	l := o.mu.topics.at(name)
	if l.profile != nil {
		close(l.profile.gone)
	}
	*l = live{owner: l.owner, creating: l.creating, watchers: l.watchers}
	for id, s := range o.mu.sessions {
		if slices.Contains(holders, id) && !slices.Contains(left, id) {
			s.reports.Forget(name)
		}
		delete(s.kept, name)
		delete(s.unknown, name) // what it may hold of that name has been deleted, too
	}
}

func (o *owners) note(topic string, n reconcile.Note) {
	args := []any{obs.KeyTopic, topic}
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
		o.cfg.Log.Warn(n.Text, args...)
	} else {
		o.cfg.Log.Info(n.Text, args...)
	}
}
