package replicated

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// answering is the time to wait for an answer before a retry.
const answering = time.Second

// ask repeats a request about a stream until JetStream answers or ctx is done. While a stream is
// being created or deleted, or has no leader, JetStream may never answer a request. Requires: the
// request is idempotent.
func ask[T any](ctx context.Context, request func(context.Context) (T, error)) (T, error) {
	for {
		attempt, cancel := context.WithTimeout(ctx, answering)
		answer, err := request(attempt)
		unanswered := err != nil && attempt.Err() != nil
		cancel()
		switch {
		case unanswered && ctx.Err() != nil:
			return answer, context.Cause(ctx)
		case !unanswered:
			return answer, err
		}
	}
}

func infoOf(ctx context.Context, s jetstream.Stream) (*jetstream.StreamInfo, error) {
	return ask(ctx, func(ctx context.Context) (*jetstream.StreamInfo, error) { return s.Info(ctx) })
}

func message(ctx context.Context, s jetstream.Stream, seq uint64, opts ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	return ask(ctx, func(ctx context.Context) (*jetstream.RawStreamMsg, error) { return s.GetMsg(ctx, seq, opts...) })
}

func newest(ctx context.Context, s jetstream.Stream, subject string) (*jetstream.RawStreamMsg, error) {
	return ask(ctx, func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		return s.GetLastMsgForSubject(ctx, subject)
	})
}

func purge(ctx context.Context, s jetstream.Stream, opts ...jetstream.StreamPurgeOpt) error {
	_, err := ask(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.Purge(ctx, opts...) })
	return err
}

func (c *Cluster) stream(ctx context.Context, name string) (jetstream.Stream, error) {
	return ask(ctx, func(ctx context.Context) (jetstream.Stream, error) { return c.js.Stream(ctx, name) })
}

// claimed publishes a claim. If an answer was lost, the retry finds that JetStream stored the
// claim.
func (c *Cluster) claimed(ctx context.Context, subject string, claim []byte, after jetstream.PublishOpt) (*jetstream.PubAck, error) {
	return ask(ctx, func(ctx context.Context) (*jetstream.PubAck, error) {
		return c.js.Publish(ctx, subject, claim, after)
	})
}
