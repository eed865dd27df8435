package controller

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
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
	wanted   []operation // operations after the present one
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

// want queues an operation behind the earlier operations of the topic. Requires: the lock held,
// and the controller is not closing.
func (o *owners) want(op operation) {
	l := o.topics.entry(op.name)
	if l.owner != nil {
		l.owner.wanted = append(l.owner.wanted, op)
		return
	}
	own := &owner{wanted: []operation{op}}
	l.owner = own
	o.life.work.Go(func() { o.own(op.name, own) })
}

// own is the goroutine of an owner. It ends when no operation is queued.
func (o *owners) own(name string, own *owner) {
	for {
		o.mu.Lock()
		if len(own.wanted) == 0 {
			o.topics.entry(name).owner = nil
			o.mu.Unlock()
			return
		}
		op := own.wanted[0]
		*own = owner{wanted: own.wanted[1:], retiring: op.target.Retire}
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
			err = o.change(own, op)
		}
		if op.end != nil {
			op.end(err)
		}
	}
}

func (o *owners) change(own *owner, op operation) error {
	name, of := op.described()
	ctx, end := startSpan(op.ctx, o.tracer, name, of...)
	op.ctx = ctx
	c := &change{changes: o.changes, op: op, own: own, began: time.Now()}
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
	o.want(op)
	o.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// startSpan begins a span. end ends the span with the result.
func startSpan(ctx context.Context, tracer trace.Tracer, name string, of ...attribute.KeyValue) (_ context.Context, end func(error)) {
	ctx, span := tracer.Start(ctx, name, trace.WithAttributes(of...))
	return ctx, func(err error) {
		if err != nil && !errors.Is(err, reconcile.ErrSettled) {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// described returns the name and the attributes of an operation's span. The span is a
// child of the request's span, if any.
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
