// Package pool publishes on behalf of others: the producers of an agent, the requests of a
// gateway or a broker, and the clients of a broker whose topics are elsewhere. Its
// publishers are shared. The first user opens a publisher, and an idle publisher is closed.
// Read Pool next, then Line.
package pool

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
)

// ErrFull: the maximum number of publishers is in use.
var ErrFull = errors.New("too many publishers")

// Config configures a pool. All fields except the byte bounds are required.
type Config struct {
	Max        int           // maximum number of publishers
	Idle       time.Duration // idle time after which a publisher is closed
	OpenWithin time.Duration // bounds resolving and connecting
	// MaxBytes bounds the bytes of publishes in progress, including Overhead for each.
	// MaxBrokerBytes bounds the bytes to one broker. Further publishes wait. A larger
	// publish waits until it is the only one. 0: unlimited.
	MaxBytes, MaxBrokerBytes int64
}

// Key identifies a publisher: topic, id, and on whose behalf a broker publishes
// (client.PublisherFor).
type Key struct{ Topic, ID, As string }

// Pool is a set of publishers that are opened on first use. Create a Pool with New. A Pool
// is safe for concurrent use.
type Pool struct {
	// Set once.
	client *client.Client
	cfg    Config
	log    *slog.Logger
	ctx    context.Context // for opening and closing publishers
	cancel context.CancelFunc
	all    sync.WaitGroup // goroutines that open and close; Add under mu, while not closed
	memory memoryLimit    // for publishes in progress

	mu struct {
		sync.Mutex
		closed     bool
		publishers map[Key]*Shared
		closing    map[Key]chan struct{} // closed after the close; a client can have one publisher per key
	}
}

// Shared is a publisher, possibly still opening.
type Shared struct {
	opened chan struct{} // closed when publisher or err is set

	// Set before opened is closed.
	publisher *client.Publisher
	err       error

	// Guarded by Pool.mu.
	users int
	idle  time.Time // time of the last Release
}

// New returns a pool with its own client. The client connects on first use.
func New(clientConfig client.Config, cfg Config) (*Pool, error) {
	c, err := client.New(clientConfig)
	if err != nil {
		return nil, err
	}
	p := &Pool{client: c, cfg: cfg, log: clientConfig.Logger, memory: newMemoryLimit(cfg.MaxBytes, cfg.MaxBrokerBytes)}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mu.publishers, p.mu.closing = map[Key]*Shared{}, map[Key]chan struct{}{}
	return p, nil
}

// Use registers the caller as a user of a publisher, until Release. If the pool is full,
// Use closes publishers without users.
// Errors: ErrFull, client.ErrClosed.
func (p *Pool) Use(k Key) (*Shared, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return nil, client.ErrClosed
	}
	shared := p.mu.publishers[k]
	if shared == nil {
		if len(p.mu.publishers) >= p.cfg.Max {
			p.closeIdleLocked(time.Now())
		}
		if len(p.mu.publishers) >= p.cfg.Max {
			return nil, ErrFull
		}
		shared = &Shared{opened: make(chan struct{})}
		p.mu.publishers[k] = shared
		before := p.mu.closing[k]
		p.all.Go(func() { p.open(k, shared, before) })
	}
	shared.users++
	return shared, nil
}

// open opens a publisher, after the previous publisher with the same key is closed. After a
// failure the publisher is removed, and the next Use tries again.
func (p *Pool) open(k Key, shared *Shared, before chan struct{}) {
	ctx, cancel := context.WithTimeout(p.ctx, p.cfg.OpenWithin)
	defer cancel()
	if before != nil {
		select {
		case <-before:
		case <-ctx.Done():
		}
	}
	publisher, err := p.client.PublisherFor(ctx, k.Topic, k.ID, k.As)
	p.mu.Lock()
	defer p.mu.Unlock()
	if shared.publisher, shared.err = publisher, err; err != nil && p.mu.publishers[k] == shared {
		delete(p.mu.publishers, k)
	}
	close(shared.opened)
}

// Connected reports whether the loaddistributor answers, like client.Client.
func (p *Pool) Connected() bool { return p.client.Connected() }

// Resolve returns the assignment of a publisher, like client.Client.
func (p *Pool) Resolve(ctx context.Context, k Key) (*srtmv1.Assignment, error) {
	return p.client.Resolve(ctx, k.Topic, k.ID, k.As)
}

// Brokers returns the TCP addresses of a topic's brokers, like client.Client.
func (p *Pool) Brokers(ctx context.Context, topic string) (addresses []string, err error) {
	return p.client.Brokers(ctx, topic)
}

// Publisher waits until the publisher is open and returns it, or the error. The caller must
// still call Release.
func (s *Shared) Publisher(ctx context.Context) (*client.Publisher, error) {
	select {
	case <-s.opened:
		return s.publisher, s.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Release ends a use.
func (p *Pool) Release(shared *Shared) {
	p.mu.Lock()
	defer p.mu.Unlock()
	shared.users--
	shared.idle = time.Now()
}

// Run closes idle publishers until ctx ends.
func (p *Pool) Run(ctx context.Context) {
	tick := time.NewTicker(max(p.cfg.Idle/4, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			p.mu.Lock()
			p.closeIdleLocked(now.Add(-p.cfg.Idle))
			p.mu.Unlock()
		}
	}
}

// closeIdleLocked closes publishers that have had no user since the given time.
func (p *Pool) closeIdleLocked(since time.Time) {
	for k, shared := range p.mu.publishers {
		if p.mu.closed || shared.users > 0 || shared.idle.After(since) {
			continue
		}
		select {
		case <-shared.opened:
			p.closeLocked(k, shared)
		default:
		}
	}
}

// closeLocked closes an open publisher. The next Use of the key opens a new publisher.
func (p *Pool) closeLocked(k Key, shared *Shared) {
	delete(p.mu.publishers, k)
	closed := make(chan struct{})
	p.mu.closing[k] = closed
	p.all.Go(func() {
		// The next user of the key waits for this goroutine.
		ctx, cancel := context.WithTimeout(p.ctx, p.cfg.OpenWithin/2)
		defer cancel()
		if err := shared.publisher.Close(ctx); err != nil {
			p.log.Warn("cannot close the publisher", "topic", k.Topic, "publisher", k.ID, "error", err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.mu.closing, k)
		close(closed)
	})
}

// discard closes a publisher whose topic is gone. The next publisher may create the topic
// again.
func (p *Pool) discard(k Key, shared *Shared) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.publishers[k] == shared && !p.mu.closed {
		p.closeLocked(k, shared)
	}
}

// Close cancels current openings and closings, and closes the other publishers, like
// client.Close.
func (p *Pool) Close(ctx context.Context) error {
	p.mu.Lock()
	p.mu.closed = true
	p.mu.Unlock()
	p.cancel()
	p.all.Wait()
	return p.client.Close(ctx)
}

// Len returns the number of publishers.
func (p *Pool) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.mu.publishers)
}

// State describes a publisher, for people.
type State struct {
	Topic     string `json:"topic"`
	Publisher string `json:"publisher"`
	Broker    string `json:"broker"`
	Users     int    `json:"connections"`
}

// States returns the states of up to 1000 publishers, sorted by name.
func (p *Pool) States() []State {
	const maxStates = 1000
	p.mu.Lock()
	all := []State{}
	for k, shared := range p.mu.publishers {
		s := State{Topic: k.Topic, Publisher: k.ID, Users: shared.users}
		if shared.publisher != nil {
			s.Broker = shared.publisher.Broker()
		}
		all = append(all, s)
	}
	p.mu.Unlock()
	slices.SortFunc(all, func(a, b State) int {
		return strings.Compare(a.Topic+" "+a.Publisher, b.Topic+" "+b.Publisher)
	})
	return all[:min(len(all), maxStates)]
}
