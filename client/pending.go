package client

import (
	"context"
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
	return p.begin(ctx, 1, nsq.Publish(p.topic, slices.Clone(body)))
}

// BeginMultiPublish is the same of MultiPublish.
func (p *Publisher) BeginMultiPublish(ctx context.Context, bodies [][]byte) Pending {
	cmd, err := nsq.MultiPublish(p.topic, bodies)
	if err != nil {
		return Pending{err: fmt.Errorf("client: %w", err)}
	}
	return p.begin(ctx, len(bodies), cmd)
}

// BeginDeferredPublish is the same of DeferredPublish.
func (p *Publisher) BeginDeferredPublish(ctx context.Context, delay time.Duration, body []byte) Pending {
	return p.begin(ctx, 1, nsq.DeferredPublish(p.topic, delay, slices.Clone(body)))
}

// begin hands a command of n messages to run.
func (p *Publisher) begin(ctx context.Context, n int, cmd *nsq.Command) Pending {
	select {
	case <-p.closing:
		return Pending{err: fmt.Errorf("client: %w", ErrClosed)}
	default:
	}
	if err := ctx.Err(); err != nil {
		return Pending{err: fmt.Errorf("client: not sent: %w", err)}
	}
	if err := p.pacer.wait(ctx, n, p.closing); err != nil {
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
