package agent

import (
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
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/nsq/session"
)

// Config configures an agent. Begin with DefaultConfig.
type Config struct {
	// Loaddistributor is the gRPC host:port of the loaddistributor; several are separated
	// by commas.
	Loaddistributor string
	// DialOptions are for the connection to the loaddistributor; nil: without TLS.
	DialOptions []grpc.DialOption
	// NSQ is the template for connections to brokers; nil: client's default.
	NSQ *nsq.Config
	// PublisherID is the publisher id for all producers; "": each producer's client_id.
	PublisherID string
	// PublishTimeout limits a publish: arrival of a large message, wait for a broker,
	// retries and answer. After it the agent refuses the publish.
	PublishTimeout time.Duration
	// Resend selects which unanswered publishes are sent again.
	Resend client.Resend
	// MaxConnections limits the producers.
	MaxConnections int
	// MaxPublishers limits the topics and ids in use.
	MaxPublishers int
	// MaxOutstanding limits the unanswered publishes of a connection, and of a publisher.
	// At the limit the agent stops reading.
	MaxOutstanding int
	// MaxBuffer limits the bytes of all publishes in progress, and separately of all
	// large commands being received. At the limit producers wait.
	MaxBuffer int64
	// IdleTimeout is how long the agent keeps a publisher without connections.
	IdleTimeout time.Duration
	// DrainTimeout limits the wait for answers when the agent stops. Unanswered publishes
	// are then refused.
	DrainTimeout time.Duration
	// Log receives state changes. Metrics may be nil.
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// DefaultConfig returns the default configuration.
func DefaultConfig() Config {
	return Config{
		PublishTimeout: 20 * time.Second, IdleTimeout: 5 * time.Minute, DrainTimeout: 10 * time.Second,
		MaxConnections: 1000, MaxPublishers: 10_000, MaxOutstanding: 256, MaxBuffer: 64 << 20,
		Log: slog.New(slog.DiscardHandler),
	}
}

// version is sent to producers.
const version = "srtm-agent/" + program.Release

// Validate returns all faults, by the names of the flags.
func (c Config) Validate() error {
	var f faults.List
	f.If(c.PublishTimeout <= 0, "--publish-timeout %v is not positive", c.PublishTimeout)
	f.If(c.IdleTimeout <= 0, "--idle-timeout %v is not positive", c.IdleTimeout)
	f.If(c.DrainTimeout <= 0, "--drain-timeout %v is not positive", c.DrainTimeout)
	f.If(c.MaxConnections <= 0, "--max-connections %d is not positive", c.MaxConnections)
	f.If(c.MaxPublishers <= 0, "--max-publishers %d is not positive", c.MaxPublishers)
	f.If(c.MaxOutstanding <= 0, "--max-outstanding %d is not positive", c.MaxOutstanding)
	minimum := int64(protocol().Limits.MaxBodySize)
	f.If(c.MaxBuffer < minimum, "--max-buffer: %d bytes are fewer than the largest publish has, %d", c.MaxBuffer, minimum)
	return f.Err()
}

// protocol is plain V2, because the connection stays on the host.
func protocol() session.Config {
	p := session.DefaultConfig()
	p.Snappy, p.Deflate, p.Version = false, false, version
	return p
}

// Agent is a running agent. Make it with New and Run it once.
type Agent struct {
	// set once
	cfg        Config
	protocol   session.Config
	publishers *pool.Pool
	receiving  *semaphore.Weighted // bytes of large commands that are incomplete or wait for room in the pool
	log        *slog.Logger        // about producers
	endLog     func()

	// Atomic: producers, including those being refused; counted by their goroutines, read
	// for metrics.
	conns atomic.Int64
	metrics
}

// New returns an agent that has not started.
func New(cfg Config) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	publishers, err := pool.New(client.Config{
		Address: cfg.Loaddistributor, DialOptions: cfg.DialOptions, NSQ: cfg.NSQ,
		MaxOutstanding: cfg.MaxOutstanding, Resend: cfg.Resend, Create: true, Logger: cfg.Log,
	}, pool.Config{Max: cfg.MaxPublishers, Idle: cfg.IdleTimeout, OpenWithin: cfg.PublishTimeout, MaxBytes: cfg.MaxBuffer})
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	a := &Agent{cfg: cfg, protocol: protocol(), publishers: publishers}
	a.receiving = semaphore.NewWeighted(cfg.MaxBuffer)
	a.log, a.endLog = obs.Sparse(cfg.Log)
	a.metrics = newMetrics(cfg.Metrics, func() int { return int(a.conns.Load()) }, publishers.Len)
	return a, nil
}

// Run serves ln until ctx ends. Then Run stops reading publishes, answers those already
// read, and closes ln and all parts of the agent. Call Run once.
func (a *Agent) Run(ctx context.Context, ln net.Listener) error {
	// Publishes under way outlive ctx, by at most the drain timeout.
	base, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	defer a.endLog()
	var janitors sync.WaitGroup
	serving, end := context.WithCancel(ctx)
	defer end()
	janitors.Go(func() { a.publishers.Run(serving) })
	a.publishers.Connected() // connects, so Health knows
	draining := make(chan struct{})
	drain := sync.OnceFunc(func() { close(draining) })
	janitors.Go(func() {
		select {
		case <-draining:
			clock.Sleep(base, a.cfg.DrainTimeout)
		case <-base.Done():
		}
		giveUp()
	})
	err := lifecycle.ServeConns(ctx, "producers", ln, func(err error) {
		a.log.Warn("a producer's connection is not accepted", obs.KeyError, err)
	}, func(ctx context.Context, nc net.Conn) {
		n := a.conns.Add(1)
		defer a.conns.Add(-1)
		if n > int64(a.cfg.MaxConnections) {
			a.turnedAway.Inc()
			a.log.Warn("too many producers", obs.KeyRemote, nc.RemoteAddr().String(), obs.KeyCount, n-1)
			return // without an answer
		}
		c := newConn(a, nc)
		defer context.AfterFunc(ctx, func() {
			c.stop()
			drain()
		})()
		c.run(base)
	})
	end()
	giveUp()
	janitors.Wait()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.cfg.DrainTimeout)
	defer cancel()
	return errors.Join(err, a.publishers.Close(closing))
}

// Health returns nil while the loaddistributor answers. Otherwise Health returns an obs.Notice with the
// consequences: the agent still serves its producers, and a restart would not help.
func (a *Agent) Health() error {
	if a.publishers.Connected() {
		return nil
	}
	return obs.Notice("the loaddistributor does not answer at " + a.cfg.Loaddistributor + ": publishers that have a broker continue, " +
		"publishes of other publishers fail, and no publisher follows a move; start the loaddistributor, or correct --loaddistributor-address")
}

// State is the agent's part of /debug/state.
func (a *Agent) State() any {
	return struct {
		Connections int64        `json:"connections"`
		Publishers  []pool.State `json:"publishers"`
	}{a.conns.Load(), a.publishers.States()}
}
