package controller

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/srtm-io/srtm/internal/obs"
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
	reader  *reader
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
			err = o.change(own, op)
		}
		if op.end != nil {
			op.end(err)
		}
	}
}

// change carries an operation out.
func (o *owners) change(own *owner, op operation) error {
	name, of := op.described()
	ctx, end := o.span(op.ctx, name, of...)
	op.ctx = ctx
	c := &change{owners: o, op: op, own: own, began: time.Now()}
	err := c.run()
	end(err)
	return err
}

// request has an operation done, and returns what has come of it. Once it has begun, the end
// of ctx does not end it.
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

// span begins a span, whose end says what has come of it.
func (o *owners) span(ctx context.Context, name string, of ...attribute.KeyValue) (_ context.Context, end func(error)) {
	ctx, span := o.tracer.Start(ctx, name, trace.WithAttributes(of...))
	return ctx, func(err error) {
		if err != nil && !errors.Is(err, reconcile.ErrSettled) {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// described is an operation as a span has it, which is below that of the request if one asked.
func (op operation) described() (name string, of []attribute.KeyValue) {
	of = []attribute.KeyValue{attribute.String(obs.KeyTopic, op.name)}
	switch {
	case op.creation != nil:
		return "create topic", of
	case op.decide != nil:
		reason := strings.TrimPrefix(op.cause.reason.String(), "MOVE_REASON_")
		return "move publishers", append(of, attribute.String(obs.KeyReason, reason), attribute.String("why", op.cause.why))
	case op.target.Gone:
		return "delete topic", of
	case op.target.Retire != "":
		return "retire broker", append(of, attribute.String(obs.KeyBroker, op.target.Retire))
	}
	return "reconcile topic", of
}
