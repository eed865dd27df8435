// Package pool publishes for others: for the producers of an agent, the requests of a gateway
// or of a broker, and the clients of a broker whose topics are elsewhere. Its publishers are
// shared: each is opened by the first who uses it, and closed when it was not used for a while.
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

	"github.com/srtm-io/srtm/client"
)

// ErrFull refuses a publisher where as many are in use as there may be.
var ErrFull = errors.New("too many publishers")

// Config is a pool's. All but the bytes is needed.
type Config struct {
	Max        int           // publishers at a time
	Idle       time.Duration // one that was not used for so long is closed
	OpenWithin time.Duration // to find a publisher's broker and to connect
	// MaxBytes bounds the publishes under way, with Overhead for each, and MaxBrokerBytes those
	// to one broker. Others wait. A larger publish waits until it is the only one. 0: no bound.
	MaxBytes, MaxBrokerBytes int64
}

// Key names a publisher: its topic, its id, and for whom it publishes if it is a broker's
// (client.PublisherFor).
type Key struct{ Topic, ID, As string }

// Pool is publishers that are opened by the first who uses them. Make it with New; it is
// safe for concurrent use.
type Pool struct {
	// Set once.
	client *client.Client
	cfg    Config
	log    *slog.Logger
	ctx    context.Context // of openings and closings
	cancel context.CancelFunc
	all    sync.WaitGroup // openings and closings; Add under mu, while not closed
	room   room           // of publishes under way

	mu struct {
		sync.Mutex
		closed     bool
		publishers map[Key]*Shared
		closing    map[Key]chan struct{} // closed when it has been: a client has one publisher of a key
	}
}

// Shared is a publisher, or the attempt to open it.
type Shared struct {
	opened chan struct{} // closed when publisher or err is set

	// Set before opened is closed.
	publisher *client.Publisher
	err       error

	// Guarded by Pool.mu.
	users int
	idle  time.Time // since when there are none
}

// New returns a pool with a client of its own. It connects when it is first needed.
func New(of client.Config, cfg Config) (*Pool, error) {
	c, err := client.New(of)
	if err != nil {
		return nil, err
	}
	p := &Pool{client: c, cfg: cfg, log: of.Logger, room: newRoom(cfg.MaxBytes, cfg.MaxBrokerBytes)}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mu.publishers, p.mu.closing = map[Key]*Shared{}, map[Key]chan struct{}{}
	return p, nil
}

// Use counts the caller among a publisher's users, until Release. Where there are as many
// publishers as there may be, those without users give up their places.
// Errors: ErrFull, client.ErrClosed.
func (p *Pool) Use(k Key) (*Shared, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return nil, client.ErrClosed
	}
	one := p.mu.publishers[k]
	if one == nil {
		if len(p.mu.publishers) >= p.cfg.Max {
			p.closeIdleLocked(time.Now())
		}
		if len(p.mu.publishers) >= p.cfg.Max {
			return nil, ErrFull
		}
		one = &Shared{opened: make(chan struct{})}
		p.mu.publishers[k] = one
		before := p.mu.closing[k]
		p.all.Go(func() { p.open(k, one, before) })
	}
	one.users++
	return one, nil
}

// open opens a publisher, when the one before it with this key has been closed. One that
// cannot be opened is forgotten: the next use tries again.
func (p *Pool) open(k Key, one *Shared, before chan struct{}) {
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
	if one.publisher, one.err = publisher, err; err != nil && p.mu.publishers[k] == one {
		delete(p.mu.publishers, k)
	}
	close(one.opened)
}

// Resolve returns the TCP address of a publisher's broker, as client.Client.
func (p *Pool) Resolve(ctx context.Context, k Key) (address string, err error) {
	return p.client.Resolve(ctx, k.Topic, k.ID, k.As)
}

// Brokers returns the TCP addresses of a topic's brokers, as client.Client.
func (p *Pool) Brokers(ctx context.Context, topic string) (addresses []string, err error) {
	return p.client.Brokers(ctx, topic)
}

// Publisher returns the publisher once it is open, or why it could not be opened, or that
// ctx has ended before. The caller still has to Release it.
func (one *Shared) Publisher(ctx context.Context) (*client.Publisher, error) {
	select {
	case <-one.opened:
		return one.publisher, one.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Release ends a use.
func (p *Pool) Release(one *Shared) {
	p.mu.Lock()
	defer p.mu.Unlock()
	one.users--
	one.idle = time.Now()
}

// Run closes idle publishers, until ctx ends.
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

// closeIdleLocked closes publishers that have no user, and had none since then.
func (p *Pool) closeIdleLocked(since time.Time) {
	for k, one := range p.mu.publishers {
		if p.mu.closed || one.users > 0 || one.idle.After(since) {
			continue
		}
		select {
		case <-one.opened:
			p.closeLocked(k, one)
		default:
		}
	}
}

// closeLocked closes an open publisher. The next use of its key opens another.
func (p *Pool) closeLocked(k Key, one *Shared) {
	delete(p.mu.publishers, k)
	closed := make(chan struct{})
	p.mu.closing[k] = closed
	p.all.Go(func() {
		// The next user of the key waits for this.
		ctx, cancel := context.WithTimeout(p.ctx, p.cfg.OpenWithin/2)
		defer cancel()
		if err := one.publisher.Close(ctx); err != nil {
			p.log.Warn("publisher does not close", "topic", k.Topic, "publisher", k.ID, "error", err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.mu.closing, k)
		close(closed)
	})
}

// discard closes a publisher whose topic is gone: the topic may be created anew for the next.
func (p *Pool) discard(k Key, one *Shared) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.publishers[k] == one && !p.mu.closed {
		p.closeLocked(k, one)
	}
}

// Close gives up what opens and closes just now, and closes the rest, as client.Close.
func (p *Pool) Close(ctx context.Context) error {
	p.mu.Lock()
	p.mu.closed = true
	p.mu.Unlock()
	p.cancel()
	p.all.Wait()
	return p.client.Close(ctx)
}

// Len is how many publishers are in use.
func (p *Pool) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.mu.publishers)
}

// State is a publisher, for people.
type State struct {
	Topic     string `json:"topic"`
	Publisher string `json:"publisher"`
	Broker    string `json:"broker"`
	Users     int    `json:"connections"`
}

// States returns up to 1000 of them, by name.
func (p *Pool) States() []State {
	const most = 1000
	p.mu.Lock()
	all := []State{}
	for k, one := range p.mu.publishers {
		s := State{Topic: k.Topic, Publisher: k.ID, Users: one.users}
		if one.publisher != nil {
			s.Broker = one.publisher.Broker()
		}
		all = append(all, s)
	}
	p.mu.Unlock()
	slices.SortFunc(all, func(a, b State) int {
		return strings.Compare(a.Topic+" "+a.Publisher, b.Topic+" "+b.Publisher)
	})
	return all[:min(len(all), most)]
}
