package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Publisher is a publisher of a topic. The methods are safe for concurrent use.
type Publisher struct {
	// set once
	topic, id string
	principal string // on whose behalf a broker publishes
	client    *Client
	ownClient *Client // closed with the publisher; nil if the client is shared
	cfg       *nsq.Config
	limit     int // maximum number of unanswered publishes
	resend    Resend
	drain     time.Duration
	pacer     *pacer
	log       *slog.Logger

	requests chan *request   // unbuffered: a request that run has not taken is not sent
	notify   chan struct{}   // holds one token: a route or the inbox has news
	dialled  chan dialled    // at most one dial is in progress
	isReady  chan struct{}   // closed by run on the first route
	closing  chan struct{}   // closed by Close: no more requests
	finished chan struct{}   // closed when run has returned
	ctx      context.Context // context of dials and connections; cancelled by giveUp
	giveUp   context.CancelFunc
	conns    sync.WaitGroup // dials and connection readers
	close    sync.Once      // closes closing

	broker atomic.Pointer[string] // written by run; a stale address only misinforms people

	inbox struct {
		sync.Mutex
		assignment *srtmv1.Assignment // newest assignment; nil after run has read it
		unknown    error              // the topic is gone; reset by a later assignment
		lastError  error              // of dialling, for ready
	}
}

// request is a publish in progress.
type request struct {
	// cmd is read by run before it sets state to sent. The caller sets cmd to nil after it
	// has changed state from sent to abandoned.
	cmd  *nsq.Command
	done chan error // receives the result
	// resend: the request was sent but not answered. Written by run before it sets state to
	// queued.
	resend bool

	// state is queued, sent or abandoned. run changes queued to sent before a write, and
	// back if the request must be sent again. When the context ends, the caller changes
	// either to abandoned; then the request is not sent again.
	state atomic.Int32
}

const (
	queued int32 = iota
	sent
	abandoned
)

type dialled struct {
	route *route
	err   error
}

func newPublisher(c *Client, topic, id, principal string) *Publisher {
	cfg := *c.cfg.NSQ // go-nsq permits copies of a Config
	cfg.ClientID = id
	p := &Publisher{
		topic: topic, id: id, principal: principal, client: c, cfg: &cfg,
		limit: c.cfg.MaxOutstanding, resend: c.cfg.Resend, drain: c.cfg.DrainTimeout,
		log:      c.log.With("topic", topic, "publisher", id),
		requests: make(chan *request), notify: make(chan struct{}, 1), dialled: make(chan dialled, 1),
		isReady: make(chan struct{}), closing: make(chan struct{}), finished: make(chan struct{}),
	}
	p.ctx, p.giveUp = context.WithCancel(context.Background())
	var notify func(Pace)
	if onPace := c.cfg.OnPace; onPace != nil {
		notify = func(is Pace) { onPace(p, is) }
	}
	p.pacer = newPacer(c.cfg.Pacing, notify)
	return p
}

func (p *Publisher) start() { go p.run() }

// Publish sends a message, which must not be empty, and waits until the broker has accepted
// it. The package comment explains the errors. Publish copies body.
func (p *Publisher) Publish(ctx context.Context, body []byte) error {
	return p.BeginPublish(ctx, body).Wait()
}

// MultiPublish sends one or more messages, which must not be empty. The broker accepts all
// or none.
func (p *Publisher) MultiPublish(ctx context.Context, bodies [][]byte) error {
	return p.BeginMultiPublish(ctx, bodies).Wait()
}

// DeferredPublish sends a message that is delivered after delay. delay has millisecond
// precision and must not be negative.
func (p *Publisher) DeferredPublish(ctx context.Context, delay time.Duration, body []byte) error {
	return p.BeginDeferredPublish(ctx, delay, body).Wait()
}

// Broker returns the address of the publisher's broker, for people. The address may be out
// of date.
func (p *Publisher) Broker() string {
	if a := p.broker.Load(); a != nil {
		return *a
	}
	return ""
}

// Gone returns the reason if the publisher is no longer usable: it was closed, or its topic
// does not exist.
func (p *Publisher) Gone() error {
	select {
	case <-p.closing:
		return ErrClosed
	default:
	}
	p.inbox.Lock()
	defer p.inbox.Unlock()
	return p.inbox.unknown
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("client: %w", err)
}

// Close refuses new publishes, waits for the answers to publishes in progress, and closes
// the connection. If ctx ends first, sent publishes fail with ErrUnanswered, other
// publishes with ErrClosed, and Close returns the context's error. Further calls of Close
// wait, too.
func (p *Publisher) Close(ctx context.Context) error {
	p.close.Do(func() { close(p.closing) })
	var err error
	select {
	case <-p.finished:
	case <-ctx.Done():
		p.giveUp()
		<-p.finished
		err = fmt.Errorf("client: close publisher %q: %w", p.id, ctx.Err())
	}
	if p.ownClient != nil {
		err = errors.Join(err, p.ownClient.Close(ctx))
	}
	return err
}

// abandon closes without draining.
func (p *Publisher) abandon() {
	p.close.Do(func() { close(p.closing) })
	p.giveUp()
	<-p.finished
}

// ready waits for the first connection.
func (p *Publisher) ready(ctx context.Context) error {
	select {
	case <-p.isReady:
		return nil
	case <-p.finished:
		return fmt.Errorf("client: %w", ErrClosed)
	case <-ctx.Done():
	}
	p.inbox.Lock()
	defer p.inbox.Unlock()
	err := fmt.Errorf("client: publisher %q of topic %q has no broker yet: %w", p.id, p.topic, ctx.Err())
	if p.inbox.lastError != nil {
		err = fmt.Errorf("%w; %v", err, p.inbox.lastError) // not wrapped: a refused connection is no refusal of a publish
	}
	return err
}

// assigned stores a new assignment. Any goroutine may call assigned.
func (p *Publisher) assigned(a *srtmv1.Assignment) {
	p.inbox.Lock()
	if old := p.inbox.assignment; old == nil || old.Epoch <= a.Epoch {
		p.inbox.assignment = a
	}
	p.inbox.unknown = nil
	p.inbox.Unlock()
	p.wake()
}

// vanished records that the topic, or the publisher in the topic, is gone.
func (p *Publisher) vanished(err error) {
	p.inbox.Lock()
	p.inbox.assignment, p.inbox.unknown = nil, err
	p.inbox.Unlock()
	p.wake()
}

func (p *Publisher) wake() {
	select {
	case p.notify <- struct{}{}:
	default:
	}
}
