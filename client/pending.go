package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nsqio/go-nsq"
)

// Pending is a publish that was begun. It is for callers that publish ahead of the
// answers and needs their order: publishes begun one after the other are
// accepted in that order.
type Pending struct {
	// set once
	ctx     context.Context
	request *request // nil when err is set
	err     error    // why it did not begin
}

// BeginPublish is Publish up to the wait for the answer. It waits while as many
// publishes as Config.MaxOutstanding are unanswered, while there is no broker, or, with
// PacingWait, for its turn. ctx is that of the whole publish.
func (p *Publisher) BeginPublish(ctx context.Context, body []byte) Pending {
	return p.begin(ctx, nsq.Publish(p.topic, slices.Clone(body)), body)
}

// BeginMultiPublish is the same of MultiPublish.
func (p *Publisher) BeginMultiPublish(ctx context.Context, bodies [][]byte) Pending {
	cmd, err := nsq.MultiPublish(p.topic, bodies)
	if err != nil {
		return Pending{err: fmt.Errorf("client: %w", err)}
	}
	return p.begin(ctx, cmd, bodies...)
}

// BeginDeferredPublish is the same of DeferredPublish.
func (p *Publisher) BeginDeferredPublish(ctx context.Context, delay time.Duration, body []byte) Pending {
	if delay < 0 {
		return Pending{err: fmt.Errorf("client: not sent: deferred by %v", delay)}
	}
	return p.begin(ctx, nsq.DeferredPublish(p.topic, delay, slices.Clone(body)), body)
}

// begin hands the command of these messages to run, unless a broker would hang up for it, on
// all whose publishes are under way.
func (p *Publisher) begin(ctx context.Context, cmd *nsq.Command, bodies ...[]byte) Pending {
	select {
	case <-p.closing:
		return Pending{err: fmt.Errorf("client: %w", ErrClosed)}
	default:
	}
	switch i := slices.IndexFunc(bodies, func(b []byte) bool { return len(b) == 0 }); {
	case len(bodies) == 0:
		return Pending{err: errors.New("client: not sent: there is no message")}
	case i >= 0 && len(bodies) == 1:
		return Pending{err: errors.New("client: not sent: the message is empty")}
	case i >= 0:
		return Pending{err: fmt.Errorf("client: not sent: message %d of %d is empty", i+1, len(bodies))}
	}
	if err := ctx.Err(); err != nil {
		return Pending{err: fmt.Errorf("client: not sent: %w", err)}
	}
	if err := p.pacer.wait(ctx, len(bodies), p.closing); err != nil {
		return Pending{err: err}
	}
	r := &request{cmd: cmd, done: make(chan error, 1)}
	select {
	case p.requests <- r:
		return Pending{ctx: ctx, request: r}
	case <-ctx.Done():
		return Pending{err: fmt.Errorf("client: not sent: %w", ctx.Err())}
	case <-p.closing:
		return Pending{err: fmt.Errorf("client: %w", ErrClosed)}
	}
}

// Wait returns what Publish returns. Call it once.
func (q Pending) Wait() error {
	if q.err != nil {
		return q.err
	}
	r := q.request
	select {
	case err := <-r.done:
		return wrap(err)
	case <-q.ctx.Done():
	}
	for { // run may change it meanwhile
		if r.state.CompareAndSwap(queued, abandoned) {
			if r.again {
				break
			}
			return fmt.Errorf("client: not sent: %w", q.ctx.Err())
		}
		if r.state.CompareAndSwap(sent, abandoned) {
			r.cmd = nil // a broker may take long to answer
			break
		}
	}
	select {
	case err := <-r.done: // the answer has come meanwhile
		return wrap(err)
	default:
	}
	return fmt.Errorf("client: %w: %w", ErrUnanswered, q.ctx.Err())
}
