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

// Publisher is one publisher of one topic. Its methods are safe for concurrent
// use.
type Publisher struct {
	// set once
	topic, id string
	as        string // for whom it publishes, if it is a broker's
	client    *Client
	own       *Client // closed with the publisher; nil when shared
	cfg       *nsq.Config
	limit     int // of unanswered publishes
	resend    Resend
	drain     time.Duration
	pacer     *pacer
	log       *slog.Logger

	requests chan *request   // unbuffered: what is not taken has not been sent
	notify   chan struct{}   // holds one token: a route or the inbox has something
	dialled  chan dialled    // at most one dial is under way
	isReady  chan struct{}   // closed by run at the first route
	closing  chan struct{}   // closed by Close: take no more requests
	over     chan struct{}   // closed when run has returned
	life     context.Context // of the dial and the connections; ends when they are given up
	giveUp   context.CancelFunc
	conns    sync.WaitGroup // the dial, and what reads connections
	close    sync.Once      // of closing

	broker atomic.Pointer[string] // written by run; a stale address is for people only

	inbox struct {
		sync.Mutex
		assignment *srtmv1.Assignment // the newest, nil when taken
		gone       error              // the topic is gone; a later assignment ends that
		lastError  error              // of dialling, for ready
	}
}

// request is one publish under way.
type request struct {
	// cmd is read by run before it moves state to sent; the caller forgets it once it
	// has moved that to abandoned.
	cmd  *nsq.Command
	done chan error // takes the one result
	// again: it was sent, and not answered. Written by run before it moves state to queued.
	again bool

	// state is queued, sent or abandoned. run moves queued to sent before it
	// writes and back where it is to be sent again; the caller moves either to
	// abandoned when its context ends, and it is not sent again.
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

func newPublisher(c *Client, topic, id, as string) *Publisher {
	cfg := *c.cfg.NSQ // go-nsq means a Config to be copied so
	cfg.ClientID = id
	p := &Publisher{
		topic: topic, id: id, as: as, client: c, cfg: &cfg,
		limit: c.cfg.MaxOutstanding, resend: c.cfg.Resend, drain: c.cfg.DrainTimeout,
		log:      c.log.With("topic", topic, "publisher", id),
		requests: make(chan *request), notify: make(chan struct{}, 1), dialled: make(chan dialled, 1),
		isReady: make(chan struct{}), closing: make(chan struct{}), over: make(chan struct{}),
	}
	p.life, p.giveUp = context.WithCancel(context.Background())
	var notify func(Pace)
	if tell := c.cfg.OnPace; tell != nil {
		notify = func(is Pace) { tell(p, is) }
	}
	p.pacer = newPacer(c.cfg.Pacing, notify)
	return p
}

func (p *Publisher) start() { go p.run() }

// Publish sends one message, which must not be empty, and waits for the broker to
// accept it. The package comment says what the error means. body is copied.
func (p *Publisher) Publish(ctx context.Context, body []byte) error {
	return p.BeginPublish(ctx, body).Wait()
}

// MultiPublish sends messages, at least one and none of them empty, that are accepted all
// or none.
func (p *Publisher) MultiPublish(ctx context.Context, bodies [][]byte) error {
	return p.BeginMultiPublish(ctx, bodies).Wait()
}

// DeferredPublish sends a message that is delivered after the delay, which
// counts in whole milliseconds and must not be negative.
func (p *Publisher) DeferredPublish(ctx context.Context, delay time.Duration, body []byte) error {
	return p.BeginDeferredPublish(ctx, delay, body).Wait()
}

// Broker returns the address of the broker that the publisher sends to, for
// people; it may be the next one by now.
func (p *Publisher) Broker() string {
	if a := p.broker.Load(); a != nil {
		return *a
	}
	return ""
}

// Gone returns why the publisher is of no use any more: it was closed, or its topic does not
// exist; nil: it is of use.
func (p *Publisher) Gone() error {
	select {
	case <-p.closing:
		return ErrClosed
	default:
	}
	p.inbox.Lock()
	defer p.inbox.Unlock()
	return p.inbox.gone
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("client: %w", err)
}

// Close refuses new publishes, waits for the answers to those under way, and
// ends the connection. When ctx ends first it gives up: what was sent fails
// with ErrUnanswered, what was not with ErrClosed, and Close returns the
// context's error. A second Close waits like the first.
func (p *Publisher) Close(ctx context.Context) error {
	p.close.Do(func() { close(p.closing) })
	var err error
	select {
	case <-p.over:
	case <-ctx.Done():
		p.giveUp()
		<-p.over
		err = fmt.Errorf("client: close publisher %q: %w", p.id, ctx.Err())
	}
	if p.own != nil {
		err = errors.Join(err, p.own.Close(ctx))
	}
	return err
}

// abandon closes without draining.
func (p *Publisher) abandon() {
	p.close.Do(func() { close(p.closing) })
	p.giveUp()
	<-p.over
}

// ready waits for the first connection.
func (p *Publisher) ready(ctx context.Context) error {
	select {
	case <-p.isReady:
		return nil
	case <-p.over:
		return fmt.Errorf("client: %w", ErrClosed)
	case <-ctx.Done():
	}
	p.inbox.Lock()
	defer p.inbox.Unlock()
	err := fmt.Errorf("client: publisher %q of topic %q has no broker yet: %w", p.id, p.topic, ctx.Err())
	if p.inbox.lastError != nil {
		err = fmt.Errorf("%w; %v", err, p.inbox.lastError) // a refusal to connect is none of a publish
	}
	return err
}

// assigned takes an assignment, from any goroutine.
func (p *Publisher) assigned(a *srtmv1.Assignment) {
	p.inbox.Lock()
	if old := p.inbox.assignment; old == nil || old.Epoch <= a.Epoch {
		p.inbox.assignment = a
	}
	p.inbox.gone = nil
	p.inbox.Unlock()
	p.wake()
}

// vanished takes the news that the topic, or the publisher in it, is gone.
func (p *Publisher) vanished(err error) {
	p.inbox.Lock()
	p.inbox.assignment, p.inbox.gone = nil, err
	p.inbox.Unlock()
	p.wake()
}

func (p *Publisher) wake() {
	select {
	case p.notify <- struct{}{}:
	default:
	}
}
