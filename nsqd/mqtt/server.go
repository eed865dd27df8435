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

	refusedOnce prometheus.Counter // publishes with QoS 0
	tooLarge    prometheus.Counter // messages
	ignored     *prometheus.CounterVec
}

// New returns a server. It reads the rules. metrics gets the server's metrics.
func New(cfg Config, metrics prometheus.Registerer) (*Server, error) {
	s := &Server{cfg: cfg, log: cfg.Log, now: clock.Mono}
	s.sessions.store.folder, s.sessions.wake = cfg.Folder, make(chan struct{}, 1)
	s.sessions.mu.byID = map[string]*entry{}
	s.sessions.ctx, s.sessions.cancel = context.WithCancel(context.Background())
	rules, err := cfg.readRules()
	if err != nil {
		return nil, fmt.Errorf("--mqtt-rules: %w", err)
	}
	s.rules.Store(rules)
	s.refusedOnce = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_refused_qos0_total", Help: "Publishes with QoS 0 that the broker refused. The client gets no answer.",
	})
	s.tooLarge = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_too_large_total", Help: "Messages that were not sent because they exceed the client's maximum packet size.",
	})
	s.ignored = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_ignored_total", Help: "Publishes of MQTT clients of which nsqd ignored a part: the wish to retain the message, or properties that are too large.",
	}, []string{"part"})
	metrics.MustRegister(s.refusedOnce, s.tooLarge, s.ignored)
	if err := os.MkdirAll(cfg.Folder, 0o700); err != nil {
		return nil, err
	}
	if faults := s.restore(); faults != nil {
		s.log.Error("cannot read some kept MQTT sessions; their clients get new sessions", obs.KeyError, faults)
	}
	return s, nil
}

// countIgnored counts a publish of which the broker ignores a part.
func (s *Server) countIgnored(of *nsq.Extra) {
	if of.Retain {
		s.ignored.WithLabelValues("retain").Inc()
	}
	if of.Dropped {
		s.ignored.WithLabelValues("properties").Inc()
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
	c.sess = session.New(&s.cfg.Session, c.rules, secure, now)
	return c
}
