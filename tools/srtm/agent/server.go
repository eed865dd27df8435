package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nsqio/go-nsq"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/session"
)

// Config is an agent's. The zero value of a field but Loaddistributor stands
// for the default.
type Config struct {
	// Loaddistributor is its gRPC host:port, or those of several, with commas.
	Loaddistributor string
	// DialOptions are for the connection to it; nil: without TLS.
	DialOptions []grpc.DialOption
	// NSQ is the model of connections to brokers; nil: client's default.
	NSQ *nsq.Config
	// PublisherID is the id of whatever is published here; "": each producer's
	// client_id.
	PublisherID string
	// PublishTimeout bounds a publish: the wait for a broker, retries and the
	// answer. It is refused then. 0: DefaultPublishTimeout.
	PublishTimeout time.Duration
	// Resend says which publishes without an answer are sent again.
	Resend client.Resend
	// MaxConnections bounds the producers. 0: DefaultMaxConnections.
	MaxConnections int
	// MaxPublishers bounds the topics and ids in use. 0: DefaultMaxPublishers.
	MaxPublishers int
	// MaxOutstanding bounds the unanswered publishes of a connection, and of a
	// publisher; more are not read. 0: DefaultMaxOutstanding.
	MaxOutstanding int
	// MaxBuffer bounds the bytes of all publishes under way; producers wait
	// beyond. 0: DefaultMaxBuffer.
	MaxBuffer int64
	// IdleTimeout is how long a publisher that no connection uses is kept. 0:
	// DefaultIdleTimeout.
	IdleTimeout time.Duration
	// DrainTimeout bounds the wait for answers when the agent is stopped; what
	// has none then is refused. 0: DefaultDrainTimeout.
	DrainTimeout time.Duration
	// Log gets changes of state. Metrics may be nil.
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Defaults of a Config.
const (
	DefaultPublishTimeout = 20 * time.Second
	DefaultMaxConnections = 1000
	DefaultMaxPublishers  = 10_000
	DefaultMaxOutstanding = 256
	DefaultMaxBuffer      = 64 << 20 // bytes
	DefaultIdleTimeout    = 5 * time.Minute
	DefaultDrainTimeout   = 10 * time.Second
)

// version is told to producers.
const version = "srtm-agent/" + obs.Release

// withDefaults fills in what is 0, or returns everything that is wrong.
func (c Config) withDefaults() (Config, error) {
	var f faults.List
	duration := func(d *time.Duration, name string, otherwise time.Duration) {
		f.If(*d < 0, "%s %v is negative", name, *d)
		*d = cmp.Or(*d, otherwise)
	}
	duration(&c.PublishTimeout, "publish timeout", DefaultPublishTimeout)
	duration(&c.IdleTimeout, "idle timeout", DefaultIdleTimeout)
	duration(&c.DrainTimeout, "drain timeout", DefaultDrainTimeout)
	count := func(n *int, name string, otherwise int) {
		f.If(*n < 0, "most %s %d is negative", name, *n)
		*n = cmp.Or(*n, otherwise)
	}
	count(&c.MaxConnections, "connections", DefaultMaxConnections)
	count(&c.MaxPublishers, "publishers", DefaultMaxPublishers)
	count(&c.MaxOutstanding, "outstanding publishes", DefaultMaxOutstanding)
	c.MaxBuffer = cmp.Or(c.MaxBuffer, DefaultMaxBuffer)
	least := int64(protocol().Limits.MaxBodySize)
	f.If(c.MaxBuffer < least, "buffer of %d bytes is smaller than the largest publish, %d", c.MaxBuffer, least)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c, f.Err()
}

// protocol is what producers may say: plain V2, since it stays on the host.
func protocol() session.Config {
	p := session.DefaultConfig()
	p.Snappy, p.Deflate, p.Version = false, false, version
	return p
}

// Agent is a running agent's parts. Make it with New and Run it once.
type Agent struct {
	// set once
	cfg        Config
	protocol   session.Config
	publishers *pool.Pool
	buffer     *semaphore.Weighted
	log        *slog.Logger // of what producers do
	endLog     func()
	all        sync.WaitGroup // connections; Add under mu, while not closed

	// Atomic: counted by connections, read for metrics.
	accepted, refused, unanswered, unsent, turnedAway atomic.Uint64

	mu struct {
		sync.Mutex
		closed bool
		conns  map[*conn]bool
	}
}

// New returns an agent that has not begun.
func New(cfg Config) (*Agent, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	publishers, err := pool.New(client.Config{
		Address: cfg.Loaddistributor, DialOptions: cfg.DialOptions, NSQ: cfg.NSQ,
		MaxOutstanding: cfg.MaxOutstanding, Resend: cfg.Resend, Logger: cfg.Log,
	}, pool.Config{Max: cfg.MaxPublishers, Idle: cfg.IdleTimeout, OpenWithin: cfg.PublishTimeout})
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	a := &Agent{cfg: cfg, protocol: protocol(), publishers: publishers, buffer: semaphore.NewWeighted(cfg.MaxBuffer)}
	a.log, a.endLog = obs.Sparse(cfg.Log)
	a.mu.conns = map[*conn]bool{}
	if cfg.Metrics != nil {
		cfg.Metrics.MustRegister(collector{a})
	}
	return a, nil
}

// Run serves ln until ctx ends. Then it reads no more publishes, answers those
// it has read, and closes. It closes ln. Call it once, whatever New returned is
// closed with it.
func (a *Agent) Run(ctx context.Context, ln net.Listener) error {
	// Publishes under way outlive ctx, by at most the drain timeout.
	base, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	defer a.endLog()
	var janitor sync.WaitGroup
	janitor.Go(func() { a.publishers.Run(ctx) })
	stop := context.AfterFunc(ctx, func() { a.stop(ln) })
	defer stop()

	err := a.accept(ctx, base, ln)
	a.stop(ln)
	limit := time.AfterFunc(a.cfg.DrainTimeout, giveUp)
	a.all.Wait()
	limit.Stop()
	janitor.Wait()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.cfg.DrainTimeout)
	defer cancel()
	return errors.Join(err, a.publishers.Close(closing))
}

func (a *Agent) accept(ctx, base context.Context, ln net.Listener) error {
	for {
		nc, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = nc.Close() // too late
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("agent: serve producers on %v: %w", ln.Addr(), err)
		case err != nil:
			// Such as too many open files: some may be closed meanwhile.
			a.log.Warn("a producer's connection is not accepted", obs.KeyError, err)
			clock.Sleep(ctx, 100*time.Millisecond)
		default:
			a.start(base, nc)
		}
	}
}

func (a *Agent) start(base context.Context, nc net.Conn) {
	c := newConn(a, nc)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.mu.closed:
	case len(a.mu.conns) >= a.cfg.MaxConnections:
		a.turnedAway.Add(1)
		a.log.Warn("too many producers", obs.KeyRemote, nc.RemoteAddr().String(), obs.KeyCount, len(a.mu.conns))
	default:
		a.mu.conns[c] = true
		a.all.Go(func() {
			c.run(base)
			a.mu.Lock()
			defer a.mu.Unlock()
			delete(a.mu.conns, c)
		})
		return
	}
	_ = nc.Close() // nothing was said
}

// stop ends the listener, and has all connections read no more.
func (a *Agent) stop(ln net.Listener) {
	_ = ln.Close() // nothing is lost
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.closed = true
	for c := range a.mu.conns {
		c.stop()
	}
}

// State is what /debug/state shows.
func (a *Agent) State() any {
	a.mu.Lock()
	n := len(a.mu.conns)
	a.mu.Unlock()
	return struct {
		Connections int          `json:"connections"`
		Publishers  []pool.State `json:"publishers"`
	}{n, a.publishers.States()}
}
