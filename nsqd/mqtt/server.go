package mqtt

import (
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
)

// Server is what the MQTT clients of a broker share.
type Server struct {
	// Set once.
	cfg Config
	log *slog.Logger
	now func() mono.Time

	rules atomic.Pointer[names.Rules]
	clients

	refusedOnce prometheus.Counter // publishes with QoS 0
	tooLarge    prometheus.Counter // messages
}

// New returns a server. It reads the rules. metrics gets the server's metrics.
func New(cfg Config, metrics prometheus.Registerer) (*Server, error) {
	s := &Server{cfg: cfg, log: cfg.Log, now: clock.Mono}
	s.clients.init()
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
	metrics.MustRegister(s.refusedOnce, s.tooLarge)
	return s, nil
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
	s.clients.refreshAll()
}

// NewClient returns the client of a connection that was accepted at now. secure means that the client
// begins with a TLS handshake.
func (s *Server) NewClient(conn Connection, secure bool, now mono.Time) *Client {
	c := &Client{server: s, conn: conn, rules: s.rules.Load()}
	c.Sources.client = c
	c.sess = session.New(&s.cfg.Session, c.rules, secure, now)
	return c
}
