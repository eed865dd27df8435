package mqtt

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
)

// Server is what the MQTT clients of a broker share.
type Server struct {
	// Set once.
	cfg Config
	log *slog.Logger
	now func() mono.Time

	rules    atomic.Pointer[names.Rules]
	sessions sessions
	metrics  metrics
}

// New reads the rules and returns a server. registry gets the server's metrics.
func New(cfg Config, registry prometheus.Registerer) (*Server, error) {
	s := &Server{cfg: cfg, log: cfg.Log, now: clock.Mono}
	s.sessions.store, s.sessions.wake = newStore(cfg.Folder), make(chan struct{}, 1)
	s.sessions.publishing, s.sessions.requesting = make(chan struct{}, maxPublishing), make(chan struct{}, maxRequests)
	s.sessions.mu.byID = map[string]*entry{}
	s.sessions.ctx, s.sessions.cancel = context.WithCancel(context.Background())
	rules, err := cfg.readRules()
	if err != nil {
		return nil, fmt.Errorf("--mqtt-rules: %w", err)
	}
	s.rules.Store(rules)
	s.sessions.metrics = &s.metrics
	s.metrics.register(registry, &s.sessions)
	if err := os.MkdirAll(cfg.Folder, 0o700); err != nil {
		return nil, err
	}
	if faults := s.restore(); faults != nil {
		s.log.Error("cannot read some kept MQTT sessions; their clients get new sessions", obs.KeyError, faults)
	}
	return s, nil
}

// countIgnored counts the parts of a publish that the broker ignores.
func (s *Server) countIgnored(of *nsq.Extra) {
	if of.Retain {
		s.metrics.ignored.WithLabelValues("retain").Inc()
	}
	if of.Dropped {
		s.metrics.ignored.WithLabelValues("properties").Inc()
	}
}

// CheckFlags returns all faults of the configuration.
func (c *Config) CheckFlags() error { return c.Session.Validate() }

// readRules reads the rules file.
func (c *Config) readRules() (*names.Rules, error) {
	if c.RulesFile == "" {
		return &names.Rules{}, nil
	}
	text, err := os.ReadFile(c.RulesFile)
	if err != nil {
		return nil, err
	}
	rules, err := names.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.RulesFile, err)
	}
	return rules, nil
}

// Reload reads the rules again. A faulty file changes nothing.
func (s *Server) Reload() {
	if s.cfg.RulesFile == "" {
		return
	}
	rules, err := s.cfg.readRules()
	if err != nil {
		s.log.Error("the MQTT rules are not changed", obs.KeyError, err)
		return
	}
	s.rules.Store(rules)
	s.log.Info("the MQTT rules are read again", "file", s.cfg.RulesFile)
	s.sessions.refreshAll()
}

// NewClient returns the client of a connection that was accepted at now. secure means that the client
// begins with a TLS handshake.
func (s *Server) NewClient(conn Connection, secure bool, now mono.Time) *Client {
	c := &Client{server: s, conn: conn, rules: s.rules.Load()}
	c.Sources.client = c
	c.Session = session.New(&s.cfg.Session, c.rules, secure, now)
	return c
}
