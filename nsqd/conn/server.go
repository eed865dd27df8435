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
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Config of the driver. Immutable.
type Config struct {
	// Session is the protocol's configuration, shared by all sessions.
	Session *session.Config
	// TLS is what Session.TLS offers; nil where it offers none.
	TLS *tls.Config
	// Auth gives the authorization that Session.AuthRequired asks for; nil where it does
	// not.
	Auth Authoriser
	// Forward publishes what clients publish to topics that are elsewhere; nil: that is refused.
	Forward *forward.Forwarder
	// StrictBuffering delays a subscriber's messages by its own
	// output_buffer_timeout, as NSQ does. Otherwise that timeout is an upper
	// bound and messages are written as soon as no more are ready: client
	// libraries ask for 250 ms without being told to.
	StrictBuffering bool
	// Region and Zone are where this broker runs. With a region, messages go to
	// the nearest consumers that take some: those of the same zone, then those
	// of the same region.
	Region, Zone string
	// WriteTimeout closes a connection whose peer takes nothing for so long.
	WriteTimeout time.Duration
	// Loops is how many event loops serve connections; 0: each has a goroutine. Linux
	// alone has them. Connections that are compressed have a goroutine in any case, and
	// with StrictBuffering so have subscribers.
	Loops int
	// MaxLoops is how many there may be while the load asks for them and processors
	// have nothing to do; no more than Loops: there are always as many.
	MaxLoops int
	// MaxConnections refuses further connections; 0 means no limit but the
	// system's.
	MaxConnections int
	// MaxBodies is how many bytes commands that have not come whole may take, of
	// all connections together, before the one ends that is at it for longest; 0
	// means no limit.
	MaxBodies int64
	// NudgeAfter is how long a consumer must have been connected for NudgeConsumers to
	// end its connection. go-nsq does not look again in its first
	// LookupdPollInterval x LookupdPollJitter, up to 18 s by default.
	NudgeAfter time.Duration
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
	errs.If(c.Loops < 0, "--io-loops %d is negative", c.Loops)
	errs.If(c.MaxBodies < 0, "%d bytes of commands at most", c.MaxBodies)
	errs.If(c.MaxConnections < 0, "--max-connections %d is negative", c.MaxConnections)
	return errs.Err()
}

// distance of a client that says it runs there.
func (c *Config) distance(region, zone string) queue.Distance {
	switch {
	case c.Region == "", region == c.Region && zone == c.Zone:
		return queue.Near
	case region == c.Region:
		return queue.Neighbour
	}
	return queue.Far
}

// env is what all connections of a server stand on, whatever drives them.
type env struct {
	// Set once.
	cfg    Config
	broker *broker.Broker
	stamps *hook.Stamper
	log    *slog.Logger    // of what clients do
	ctx    context.Context // of what clients ask others; until Shutdown

	clients registry
	slow    slowTurns     // of the loops
	faults  atomic.Uint64 // connections closed for a fatal protocol error
	batches sync.Pool     // of *pubBatch, empty
	fins    sync.Pool     // of *finBatch, empty
	buffers buffers
	room    room
	unpacks chan struct{} // as many as may be decompressing at a time: all processors but one
}

// enter lists a client, or refuses it: as for registry.
func (e *env) enter(c *client) bool {
	return c.told(e.clients.enter(c, e.cfg.MaxConnections, e.cfg.Session.TLSRequired || e.cfg.Session.AuthRequired))
}

// withAnother does what takes another descriptor, which counts as a connection meanwhile.
func (c *client) withAnother(do func() error) error {
	if !c.told(c.env.clients.expand(c, c.env.cfg.MaxConnections)) {
		return errDescriptors
	}
	defer c.env.clients.shrink()
	return do()
}

var errDescriptors = errors.New("there are as many connections as there may be, and this one needs another")

// told cuts who is out for a client, or logs that there is no place for it.
func (c *client) told(out *client, entered bool) bool {
	if out != nil {
		c.env.log.Info("connection closed for another: it has not shown yet what is required", obs.KeyRemote, out.remote)
		out.cut()
	}
	if !entered {
		c.env.log.Warn("connection refused: there are as many as there may be", obs.KeyRemote, c.remote, obs.KeyCount, c.env.cfg.MaxConnections)
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
	s.room.most = cfg.MaxBodies
	s.unpacks = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1))
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.batches.New = func() any { return new(pubBatch) }
	s.fins.New = func() any { return new(finBatch) }
	return s, nil
}

// Listen opens the listening socket at a host:port, prepared for arrival
// stamps, or at the path of a Unix socket, whose bytes arrive when they are
// read.
func (s *Server) Listen(ctx context.Context, address string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
		return errors.Join(s.stamps.Control(network, address, c), inherited(c))
	}}
	lc.SetMultipathTCP(false) // the kernel takes no socket filter on MPTCP
	return ListenAt(ctx, lc, address)
}

// Serve accepts from ln, which is Listen's, until ctx ends; then it closes ln and returns, while
// the connections go on until Shutdown, which must follow.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	defer ln.Close()
	accept := func() error { return s.accept(ln) }
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
					loops.take(fd, remote)
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
		// Out of descriptors, or a peer that left at once: both pass.
		s.clients.refused.Add(1)
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		s.log.Warn("accept failed", obs.KeyAddress, ln.Addr().String(), obs.KeyError, err, "retry_in", pause)
		clock.Sleep(ctx, pause)
	}
}

// accept takes a connection that a goroutine is to serve.
func (s *Server) accept(ln net.Listener) error {
	nc, err := ln.Accept()
	if err != nil {
		return err
	}
	c := newClient(&s.env, nc.RemoteAddr().String())
	g := newGoroutine(c, nc)
	if !s.enter(c) {
		nc.Close()
		return nil
	}
	go func() {
		defer s.clients.left(c)
		g.run()
	}()
	return nil
}

// startLoops starts the loops, once.
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

// loops returns the loops; nil before there are some.
func (s *Server) loops() *loops {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.loops
}

// StopReading makes every connection that is not a subscriber end at the next
// message boundary: what was read whole is answered, nothing more is read.
func (s *Server) StopReading() {
	s.clients.each((*client).stop)
}

// Shutdown ends all connections and waits for them, at most until ctx ends;
// then they are cut.
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
		if g := s.loops(); g != nil { // none are started once it is closing
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
	Evicted     uint64 // strangers, for others
	Faults      uint64 // closed for a fatal protocol error
	Crowded     uint64 // of those, over MaxBodies
	// SlowTurns counts the parts of event loops' turns that took longer than 5 ms,
	// by Cause.
	SlowTurns [causes]uint64
	Loops     []LoopStats
}

// LoopStats are an event loop's counters.
type LoopStats struct {
	Number      int           // below MaxLoops; a loop's that ended is another's
	Busy        time.Duration // processor time it took; of the clock, its utilisation
	Connections int           // open now
}

// Stats returns the server's counters.
func (s *Server) Stats() Stats {
	st := Stats{Connections: s.clients.len(), Accepted: s.clients.accepted.Load(), Refused: s.clients.refused.Load(), Evicted: s.clients.evicted.Load(), Faults: s.faults.Load(), Crowded: s.room.refused.Load()}
	for c := range s.slow {
		st.SlowTurns[c] = s.slow[c].Load()
	}
	if g := s.loops(); g != nil {
		st.Loops = g.stats()
	}
	return st
}
