package pool

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/nsqhttp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Line publishes what one producer publishes, in its order. Make it with Pool.Line. Only Wait
// may be called beside its other methods.
type Line struct {
	pool    *Pool
	targets map[Key]*Shared
}

// Line returns a line without publishers.
func (p *Pool) Line() *Line { return &Line{pool: p, targets: map[Key]*Shared{}} }

// Message is what is published at once: a body, or with Batch several messages, of which all
// are accepted or none.
type Message struct {
	Body  []byte
	Batch Bodies        // nil: there is one message
	Defer time.Duration // until the message is delivered; 0 with Batch
}

// Bodies is a batch of messages, such as an MPUB's.
type Bodies interface {
	Len() int
	Bytes() int // of all together
	Each(func(body []byte))
}

const (
	// Overhead is what a publish under way takes beside its messages, in bytes.
	Overhead = 512
	// PerMessage is what each message of a batch takes beside its body, in bytes: in the list
	// of them, and for its length in the command.
	PerMessage = 24 + 4
)

func (m Message) size() int64 {
	if m.Batch == nil {
		return Overhead + int64(len(m.Body))
	}
	return Overhead + int64(m.Batch.Bytes()) + PerMessage*int64(m.Batch.Len())
}

// Pending is a publish that was begun.
type Pending struct {
	pending client.Pending
	err     error // why it was not begun
	release func()
	target  string
}

// Target is the address of the broker that the publish was begun for; "": it was not begun.
func (p *Pending) Target() string { return p.target }

// Failed reports whether the publish was not begun: Wait says at once why.
func (p *Pending) Failed() bool { return p.err != nil }

// Wait returns what client.Publisher.Publish returns. Call it once.
func (p *Pending) Wait() error {
	if p.err != nil {
		return p.err
	}
	defer p.release()
	return p.pending.Wait()
}

// Begin publishes a message as the publisher of that key, up to the wait for the answer. It
// waits for a broker and for room; ctx is that of the whole publish. The message is the
// caller's again when Begin returns.
func (l *Line) Begin(ctx context.Context, k Key, m Message) Pending {
	publisher, err := l.publisher(ctx, k)
	if err != nil {
		return Pending{err: fmt.Errorf("not sent: %w", err)}
	}
	target := publisher.Broker()
	release, err := l.pool.room.acquire(ctx, target, m.size())
	if err != nil {
		return Pending{err: fmt.Errorf("not sent: no room among the publishes under way to broker %s: %w", target, err)}
	}
	is := Pending{release: release, target: target}
	switch {
	case m.Batch != nil:
		bodies := make([][]byte, 0, m.Batch.Len())
		m.Batch.Each(func(body []byte) { bodies = append(bodies, body) })
		is.pending = publisher.BeginMultiPublish(ctx, bodies)
	case m.Defer > 0:
		is.pending = publisher.BeginDeferredPublish(ctx, m.Defer, m.Body)
	default:
		is.pending = publisher.BeginPublish(ctx, m.Body)
	}
	return is
}

// publisher returns the publisher of a key. If the topic of the one in use is gone, it is
// opened anew: the topic may have been created again, or be created by that.
func (l *Line) publisher(ctx context.Context, k Key) (*client.Publisher, error) {
	one := l.targets[k]
	for again := one != nil; ; again = false {
		if one == nil {
			var err error
			if one, err = l.pool.Use(k); err != nil {
				return nil, err
			}
			l.targets[k] = one
		}
		publisher, err := one.Publisher(ctx)
		if err == nil && (publisher.Gone() == nil || !again) {
			return publisher, nil
		}
		if err == nil {
			l.pool.discard(k, one)
		}
		delete(l.targets, k)
		l.pool.Release(one)
		if err != nil {
			return nil, err
		}
		one = nil
	}
}

// Close gives back the line's publishers. What is pending goes on.
func (l *Line) Close() {
	for _, one := range l.targets {
		l.pool.Release(one)
	}
	clear(l.targets)
}

// What becomes of a publish, as labels of metrics.
const (
	Accepted   = "accepted"
	Refused    = "refused"
	Unanswered = "unanswered"
	Unsent     = "unsent"
)

// Results are all of them.
var Results = []string{Accepted, Refused, Unanswered, Unsent}

// Result says what has become of a publish.
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

// Verdict returns what an NSQ client is told of a publish: nil, the broker's refusal as it is,
// or the command's own failure.
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

// Fault returns what an HTTP client is told of a publish that failed.
func Fault(err error) *nsqhttp.Fault {
	if f, ok := errors.AsType[*nsqhttp.Fault](err); ok {
		return f
	}
	is := &nsqhttp.Fault{Status: http.StatusServiceUnavailable, Detail: err.Error()}
	refused, _ := errors.AsType[*client.RefusedError](err)
	switch {
	case refused != nil:
		return nsqhttp.Refused(wire.ErrorCode(refused.Code), refused.Error())
	case errors.Is(err, client.ErrUnknown):
		is.Status, is.Message = http.StatusNotFound, "TOPIC_NOT_FOUND"
	case errors.Is(err, client.ErrUnanswered):
		is.Status, is.Message = http.StatusGatewayTimeout, "UNANSWERED"
		is.Detail += ": it may have been accepted, or not"
	case errors.Is(err, ErrFull):
		is.Message = "TOO_MANY_PUBLISHERS"
	case errors.Is(err, client.ErrNotCreated):
		is.Message = "TOPIC_NOT_CREATED"
	case errors.Is(err, client.ErrClosed):
		is.Message = "EXITING"
	case errors.Is(err, context.DeadlineExceeded):
		is.Message, is.RetryAfter = "NO_BROKER", time.Second
	default:
		is.Status, is.Message = http.StatusInternalServerError, "INTERNAL_ERROR"
	}
	return is
}
