package pool

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Line publishes for one producer, in order. Create a Line with Pool.Line. Only Wait may be
// called concurrently with other methods.
type Line struct {
	pool    *Pool
	targets map[Key]*Shared
}

// Line returns a line without publishers.
func (p *Pool) Line() *Line { return &Line{pool: p, targets: map[Key]*Shared{}} }

// Message is the content of a publish: a body, or a Batch of messages that are all accepted
// or all refused.
type Message struct {
	Body  []byte
	Batch Bodies        // nil: a single message
	Defer time.Duration // delay of the delivery; 0 with Batch
	// Attribute travels with the message, or with each message of Batch. At most wire.MaxAttribute
	// bytes. Requires: the publisher's Key.As is an origin with Attributes (nsq/origin).
	Attribute []byte
}

// Bodies is a batch of messages, such as an MPUB.
type Bodies interface {
	Len() int
	Bytes() int // total bytes
	Each(func(body []byte))
}

const (
	// Overhead is the memory of a publish in progress, in addition to its messages, in
	// bytes.
	Overhead = 512
	// PerMessage is the memory of a batched message in addition to its body, in bytes: the
	// slice header, and the length in the command.
	PerMessage = 24 + 4
)

func (m Message) size() int64 {
	if m.Batch == nil {
		return Overhead + int64(len(m.Attribute)+len(m.Body))
	}
	return Overhead + int64(m.Batch.Bytes()) + int64(PerMessage+len(m.Attribute))*int64(m.Batch.Len())
}

// content returns a body as it is sent: behind the attribute, if there is one.
func (m Message) content(body []byte) []byte {
	if len(m.Attribute) == 0 {
		return body
	}
	return append(wire.AppendAttribute(make([]byte, 0, 1+len(m.Attribute)+len(body)), m.Attribute), body...)
}

// Pending is a publish in progress.
type Pending struct {
	pending client.Pending
	err     error // why the publish did not begin
	release func()
	target  string
}

// Target is the address of the publish's broker; empty if the publish did not begin.
func (p *Pending) Target() string { return p.target }

// Failed reports whether the publish did not begin. Then Wait returns the reason
// immediately.
func (p *Pending) Failed() bool { return p.err != nil }

// Wait returns the result, like client.Publisher.Publish. Call it once.
func (p *Pending) Wait() error {
	if p.err != nil {
		return p.err
	}
	defer p.release()
	return p.pending.Wait()
}

// Begin starts a publish for the publisher with the given key, and does not wait for the
// answer. It waits for a broker and for room. ctx applies to the whole publish. After Begin
// the caller may reuse the message.
func (l *Line) Begin(ctx context.Context, k Key, m Message) Pending {
	publisher, err := l.publisher(ctx, k)
	if err != nil {
		return Pending{err: fmt.Errorf("not sent: %w", err)}
	}
	target := publisher.Broker()
	release, err := l.pool.memory.acquire(ctx, target, m.size())
	if err != nil {
		return Pending{err: fmt.Errorf("not sent: no room among the publishes under way to broker %s: %w", target, err)}
	}
	pending := Pending{release: release, target: target}
	switch {
	case m.Batch != nil:
		bodies := make([][]byte, 0, m.Batch.Len())
		m.Batch.Each(func(body []byte) { bodies = append(bodies, m.content(body)) })
		pending.pending = publisher.BeginMultiPublish(ctx, bodies)
	case m.Defer > 0:
		pending.pending = publisher.BeginDeferredPublish(ctx, m.Defer, m.content(m.Body))
	default:
		pending.pending = publisher.BeginPublish(ctx, m.content(m.Body))
	}
	return pending
}

// publisher returns the publisher of a key. If the topic of an existing publisher is gone,
// the publisher is reopened: the topic may exist again, or reopening may create it.
func (l *Line) publisher(ctx context.Context, k Key) (*client.Publisher, error) {
	shared := l.targets[k]
	for retry := shared != nil; ; retry = false {
		if shared == nil {
			var err error
			if shared, err = l.pool.Use(k); err != nil {
				return nil, err
			}
			l.targets[k] = shared
		}
		publisher, err := shared.Publisher(ctx)
		if err == nil && (publisher.Gone() == nil || !retry) {
			return publisher, nil
		}
		if err == nil {
			l.pool.discard(k, shared)
		}
		delete(l.targets, k)
		l.pool.Release(shared)
		if err != nil {
			return nil, err
		}
		shared = nil
	}
}

// Close releases the line's publishers. Pending publishes continue.
func (l *Line) Close() {
	for _, shared := range l.targets {
		l.pool.Release(shared)
	}
	clear(l.targets)
}

// Results of a publish, as metric labels.
const (
	Accepted   = "accepted"
	Refused    = "refused"
	Unanswered = "unanswered"
	Unsent     = "unsent"
)

// Results lists all results.
var Results = []string{Accepted, Refused, Unanswered, Unsent}

// Result returns the result of a publish.
func Result(err error) string {
	switch {
	case err == nil:
		return Accepted
	case errors.As(err, new(*client.RefusedError)):
		return Refused
	case errors.Is(err, client.ErrUnanswered):
		return Unanswered
	}
	return Unsent
}

// Verdict returns the answer to an NSQ client: nil, the broker's refusal, or a failure of
// the command.
func Verdict(failed wire.ErrorCode, err error) error {
	switch Result(err) {
	case Accepted:
		return nil
	case Refused:
		answer, _ := errors.AsType[*client.RefusedError](err)
		return wire.NewError(wire.ErrorCode(answer.Code), answer.Text)
	case Unanswered:
		return wire.Wrap(failed, "sent but not answered: it may have been accepted", err)
	}
	text := "not accepted"
	switch {
	case errors.Is(err, client.ErrUnknown):
		text += ": topic or publisher is unknown"
	case errors.Is(err, context.DeadlineExceeded):
		text += " in time"
	case errors.Is(err, ErrFull), errors.Is(err, client.ErrNotCreated):
		text += ": " + err.Error()
	}
	return wire.Wrap(failed, text, err)
}

// Fault returns the answer to an HTTP client after a failed publish.
func Fault(err error) *nsqhttp.Fault {
	if f, ok := errors.AsType[*nsqhttp.Fault](err); ok {
		return f
	}
	fault := &nsqhttp.Fault{Status: http.StatusServiceUnavailable, Detail: err.Error()}
	refused, _ := errors.AsType[*client.RefusedError](err)
	switch {
	case refused != nil:
		return nsqhttp.Refused(wire.ErrorCode(refused.Code), refused.Error())
	case errors.Is(err, client.ErrUnknown):
		fault.Status, fault.Message = http.StatusNotFound, "TOPIC_NOT_FOUND"
	case errors.Is(err, client.ErrUnanswered):
		fault.Status, fault.Message = http.StatusGatewayTimeout, "UNANSWERED"
		fault.Detail += ": it may have been accepted, or not"
	case errors.Is(err, ErrFull):
		fault.Message = "TOO_MANY_PUBLISHERS"
	case errors.Is(err, client.ErrNotCreated):
		fault.Message = "TOPIC_NOT_CREATED"
	case errors.Is(err, client.ErrClosed):
		fault.Message = "EXITING"
	case errors.Is(err, context.DeadlineExceeded):
		fault.Message, fault.RetryAfter = "NO_BROKER", time.Second
	default:
		fault.Status, fault.Message = http.StatusInternalServerError, "INTERNAL_ERROR"
	}
	return fault
}
