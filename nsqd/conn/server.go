package conn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Config is the configuration of a Server. Immutable.
type Config struct {
	// Session is the protocol's configuration, shared by all sessions.
	Session *session.Config
	// TLS is the configuration for Session.TLS; nil if sessions offer no TLS.
	TLS *tls.Config
	// Hold calls end when the certificate of a connection's client becomes invalid, unless release
	// is called before; nil: never.
	Hold func(state tls.ConnectionState, remote string, end func()) (release func())
	// Auth authorizes clients if Session.AuthRequired is set; nil otherwise.
	Auth Authoriser
	// MQTT serves MQTT clients; nil: none.
	MQTT *mqtt.Server
	// Forward forwards publishes to topics on other brokers. Nil refuses such publishes.
	Forward *forward.Forwarder
	// StrictBuffering delays a subscriber's messages by its own output_buffer_timeout, as NSQ does.
	// Otherwise the timeout is an upper bound: messages are written as soon as no more are ready.
	// Client libraries request 250 ms by default.
	StrictBuffering bool
	// Region and Zone are where this broker runs. With a region, the broker prefers ready consumers
	// of the same zone, then of the same region.
	Region, Zone string
	// WriteTimeout closes a connection whose peer reads nothing for this long.
	WriteTimeout time.Duration
	// Loops is the number of event loops (Linux only). With 0, each connection has a goroutine.
	// Compressed connections always have a goroutine, and so do subscribers under StrictBuffering.
	Loops int
	// MaxLoops is the maximum number of loops while the load requires more and processors are idle.
	// A value up to Loops fixes the number at Loops.
	MaxLoops int
	// MaxConnections is the maximum number of connections; 0 leaves only the system's limit.
	MaxConnections int
	// MaxBodies is the maximum memory of incomplete commands, in bytes, over all connections. Above
	// it, the connection with the oldest incomplete command is closed. 0 means no limit.
	MaxBodies int64
	// NudgeAfter is how long a consumer must have been connected before NudgeConsumers may close
	// its connection. go-nsq does not look up again in its first LookupdPollInterval x
	// LookupdPollJitter, up to 18 s by default.
	NudgeAfter time.Duration

	clientTimeout   time.Duration // flag; see Complete
	outputBuffering string        // flag; see Complete
}

// Validate reports all problems at once.
func (c Config) Validate() error {
	var errs faults.List
	errs.If(c.Session == nil, "session configuration is missing")
	if c.Session != nil {
		errs.If(c.Session.TLS != (c.TLS != nil), "sessions offer TLS: %v, a TLS configuration is there: %v", c.Session.TLS, c.TLS != nil)
		errs.If(c.Session.AuthRequired != (c.Auth != nil), "sessions require AUTH: %v, there is an auth client: %v", c.Session.AuthRequired, c.Auth != nil)
	}
	errs.If(c.Zone != "" && c.Region == "", "--topology-zone %q needs --topology-region", c.Zone)
	errs.If(c.WriteTimeout <= 0, "--write-timeout %v is not positive", c.WriteTimeout)
	errs.If(c.NudgeAfter < 0, "--nudge-consumers-after %v is negative", c.NudgeAfter)
	errs.Add(faults.Within("io-loops", c.Loops, 0, maxLoops))
	errs.If(c.MaxBodies < 0, "%d bytes of commands at most", c.MaxBodies)
	errs.If(c.MaxConnections < 0, "--max-connections %d is negative", c.MaxConnections)
	return errs.Err()
}

// distance returns how far a client in the given region and zone is.
func (c *Config) distance(region, zone string) queue.Distance {
	switch {
	case c.Region == "", region == c.Region && zone == c.Zone:
		return queue.Near
	case region == c.Region:
		return queue.Neighbour
	}
	return queue.Far
}

// env is what all connections of a server share.
type env struct {
	// Set once.
	cfg    Config
	broker *broker.Broker
	stamps *hook.Stamper
	log    *slog.Logger    // about what clients do
	ctx    context.Context // of requests to other processes for clients; ends at Shutdown

	clients     registry
	slow        slowTurns     // of the loops
	faults      atomic.Uint64 // connections closed for a fatal protocol error
	batches     sync.Pool     // of *pubBatch, empty
	fins        sync.Pool     // of *finBatch, empty
	answers     sync.Pool     // of *session.Op, scratch
	buffers     buffers
	memory      memoryBudget
	unpackSlots chan struct{} // limits concurrent decompressions to all processors but one
}

// enter registers a client, or refuses it (see registry.enter).
func (e *env) enter(c *client) bool {
	return c.reportEntry(e.clients.enter(c, e.cfg.MaxConnections, c.mqtt != nil || e.cfg.Session.TLSRequired || e.cfg.Session.AuthRequired))
}

// withExtraDescriptor runs do, which needs another descriptor. The descriptor counts as a connection
// meanwhile.
func (c *client) withExtraDescriptor(do func() error) error {
	if !c.reportEntry(c.env.clients.addDescriptor(c, c.env.cfg.MaxConnections)) {
		return errDescriptors
	}
	defer c.env.clients.removeDescriptor()
	return do()
}

var errDescriptors = errors.New("the limit of connections is reached, and this connection needs another descriptor")

// reportEntry cuts an evicted client. If c was not entered, reportEntry logs that the connection limit is
// reached.
func (c *client) reportEntry(evicted *client, entered bool) bool {
	if evicted != nil {
		c.env.log.Info("unverified connection closed to make room for a new connection", obs.KeyRemote, evicted.remote)
		evicted.cut()
	}
	if !entered {
		c.env.log.Warn("connection refused: the limit is reached, see --max-connections", obs.KeyRemote, c.remote, obs.KeyCount, c.env.cfg.MaxConnections)
	}
	return entered
}

// Server accepts connections and owns their goroutines and event loops.
type Server struct {
	env

	// Set once.
	endLog func()
	cancel context.CancelFunc

	mu struct {
		sync.Mutex
		loops *loops // started by the first Serve; nil before
	}
}

// New returns a server that is not listening yet.
func New(cfg Config, b *broker.Broker, stamps *hook.Stamper, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("conn: %w", err)
	}
	s := &Server{env: env{cfg: cfg, broker: b, stamps: stamps}}
	s.log, s.endLog = obs.Sparse(log)
	s.memory.limit = cfg.MaxBodies
	s.unpackSlots = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.batches.New = func() any { return new(pubBatch) }
	s.fins.New = func() any { return new(finBatch) }
	s.answers.New = func() any { return new(session.Op) }
	return s, nil
}

// Listen opens the listening socket, at a host:port or at the path of a Unix socket. A TCP socket
// is prepared for arrival stamps. Bytes on a Unix socket count as arrived when they are read.
func (s *Server) Listen(ctx context.Context, address string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
		return errors.Join(s.stamps.Control(network, address, c), inherited(c))
	}}
	lc.SetMultipathTCP(false) // the kernel accepts no socket filter on MPTCP
	return ListenAt(ctx, lc, address)
}

// Serve accepts connections of NSQ clients, as ServeProtocol.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	return s.ServeProtocol(ctx, ln, NSQ)
}

// ServeProtocol accepts connections until ctx ends, then closes ln and returns. The connections live until
// Shutdown, which must follow. Requires: Listen returned ln.
func (s *Server) ServeProtocol(ctx context.Context, ln net.Listener, p Protocol) error {
	defer ln.Close()
	accept := func() error { return s.accept(ln, p) }
	closeAll := ln.Close
	if s.cfg.Loops > 0 {
		if err := s.startLoops(); err != nil {
			return err
		}
		a, err := newAcceptor(ln)
		if err != nil {
			return err
		}
		if a != nil {
			defer a.close()
			loops := s.loops()
			accept = func() error {
				fd, remote, err := a.accept()
				if err == nil {
					loops.serve(fd, remote, p)
				}
				return err
			}
			closeAll = func() error { a.close(); return ln.Close() }
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = closeAll() })
	defer stop()
	pause := time.Duration(0)
	for {
		err := accept()
		if err == nil {
			pause = 0
			continue
		}
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("accept on %s: %w", ln.Addr(), err)
		}
		// No descriptors, or the peer left at once. Both are temporary.
		s.clients.refused.Add(1)
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		s.log.Warn("accept failed", obs.KeyAddress, ln.Addr().String(), obs.KeyError, err, "retry_in", pause)
		clock.Sleep(ctx, pause)
	}
}

// accept accepts a connection and serves it with a goroutine.
func (s *Server) accept(ln net.Listener, p Protocol) error {
	nc, err := ln.Accept()
	if err != nil {
		return err
	}
	c := newClient(&s.env, nc.RemoteAddr().String(), p)
	g := newGoroutine(c, nc)
	if !s.enter(c) {
		nc.Close()
		return nil
	}
	go func() {
		defer s.clients.remove(c)
		g.run()
	}()
	return nil
}

// startLoops starts the loops at the first call.
func (s *Server) startLoops() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.loops != nil || s.ctx.Err() != nil {
		return nil
	}
	var err error
	s.mu.loops, err = newLoops(s.ctx, &s.env, s.cfg.Loops, max(s.cfg.Loops, s.cfg.MaxLoops))
	return err
}

// loops returns the loops; nil before startLoops.
func (s *Server) loops() *loops {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.loops
}

// StopReading ends every connection without a subscription at its next message boundary. Commands
// that were read completely are answered.
func (s *Server) StopReading() {
	s.clients.each((*client).stop)
}

// Shutdown ends all connections and waits for them. When ctx ends, it cuts the remaining
// connections.
func (s *Server) Shutdown(ctx context.Context) error {
	s.clients.close()
	s.mu.Lock()
	s.cancel()
	s.mu.Unlock()
	s.clients.each((*client).quit)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.clients.wg.Wait()
		if g := s.loops(); g != nil { // no loops are started after close
			g.stop()
		}
		s.endLog()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		s.clients.each((*client).cut)
		<-done
		return fmt.Errorf("connections cut: %w", context.Cause(ctx))
	}
}

// Stats are the server's counters.
type Stats struct {
	Connections int    // open now
	Accepted    uint64 // since the start
	Refused     uint64 // over the limit, or accept failed
	Evicted     uint64 // unverified clients, replaced by new connections
	Faults      uint64 // closed for a fatal protocol error
	MemoryShort uint64 // the part of Faults over MaxBodies
	// SlowTurns counts the parts of event loops' turns that took longer than 5 ms, by Cause.
	SlowTurns [causes]uint64
	Loops     []LoopStats
}

// LoopStats are an event loop's counters.
type LoopStats struct {
	Number      int           // below MaxLoops; reused after a loop ends
	Busy        time.Duration // total processor time
	Connections int           // open now
}

// Stats returns the server's counters.
func (s *Server) Stats() Stats {
	st := Stats{Connections: s.clients.len(), Accepted: s.clients.accepted.Load(), Refused: s.clients.refused.Load(), Evicted: s.clients.evicted.Load(), Faults: s.faults.Load(), MemoryShort: s.memory.ended.Load()}
	for c := range s.slow {
		st.SlowTurns[c] = s.slow[c].Load()
	}
	if g := s.loops(); g != nil {
		st.Loops = g.stats()
	}
	return st
}
