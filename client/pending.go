package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nsqio/go-nsq"
)

// Pending is a publish in progress, for callers that do not wait for each answer but need
// an order: publishes are accepted in the order of their Begin calls.
type Pending struct {
	// set once
	ctx     context.Context
	request *request // nil when err is set
	err     error    // why the publish did not begin
}

// BeginPublish starts a publish and does not wait for the answer. It waits while
// MaxOutstanding publishes are unanswered, while there is no broker, and, with PacingWait,
// for its turn. ctx applies to the whole publish.
func (p *Publisher) BeginPublish(ctx context.Context, body []byte) Pending {
	return p.begin(ctx, nsq.Publish(p.topic, slices.Clone(body)), body)
}

// BeginMultiPublish starts a MultiPublish, like BeginPublish.
func (p *Publisher) BeginMultiPublish(ctx context.Context, bodies [][]byte) Pending {
	cmd, err := nsq.MultiPublish(p.topic, bodies)
	if err != nil {
		return Pending{err: fmt.Errorf("client: %w", err)}
	}
	return p.begin(ctx, cmd, bodies...)
}

// BeginDeferredPublish starts a DeferredPublish, like BeginPublish.
func (p *Publisher) BeginDeferredPublish(ctx context.Context, delay time.Duration, body []byte) Pending {
	if delay < 0 {
		return Pending{err: fmt.Errorf("client: not sent: deferred by %v", delay)}
	}
	return p.begin(ctx, nsq.DeferredPublish(p.topic, delay, slices.Clone(body)), body)
}

// begin passes the command to run. It refuses commands for which a broker would hang up,
// which would affect all publishes in progress.
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

// Wait returns the result of Publish. Call it once.
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
	for { // run may change the state concurrently
		if r.state.CompareAndSwap(queued, abandoned) {
			if r.resend {
				break
			}
			return fmt.Errorf("client: not sent: %w", q.ctx.Err())
		}
		if r.state.CompareAndSwap(sent, abandoned) {
			r.cmd = nil // frees the command; a broker may take long to answer
			break
		}
	}
	select {
	case err := <-r.done: // the answer has arrived in the meantime
		return wrap(err)
	default:
	}
	return fmt.Errorf("client: %w: %w", ErrUnanswered, q.ctx.Err())
}
