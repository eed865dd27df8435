// Package agent is the broker's side of the control plane. The agent registers the broker with the
// loaddistributor, creates and removes topics on request, applies the adaptor's grants in epoch order,
// and sends reports. Sockets, queues and messages are hidden behind Node. The data path never waits for
// the agent: without a control plane the broker keeps its shares.
//
// owner.go has the goroutine that calls the Node; only orders.go calls the Node beside the owner, to
// change channels. keep.go renews the lease and stores bases, capture.go sends recorded arrivals, and
// link.go keeps a session open. tbadaptor/holder computes which shares the broker holds, and for how
// long. The peers are loaddistributor/rpc and tbadaptor/loop.
package agent

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
)

// DefaultReportInterval is the report interval until the loaddistributor sets another.
const DefaultReportInterval = time.Second

// Range of the report interval that a loaddistributor may set.
const (
	minReportInterval = 10 * time.Millisecond
	maxReportInterval = time.Minute
)

// Config is fixed at start.
type Config struct {
	LoadDistributor string // gRPC host:port; several are separated by commas, and one of them leads
	BrokerID        string // stable across restarts; 1 to 64 of [.a-zA-Z0-9_-]
	Instance        string // new at every start of the process; empty: random
	TCPAddress      string // host:port that publishers and subscribers dial
	HTTPAddress     string // host:port
	MQTTAddress     string // host:port that MQTT clients dial; empty: none
	MQTTSAddress    string // as MQTTAddress, for MQTT over TLS
	Hostname        string // for display; empty: the machine's hostname
	DataPath        string // for display
	Lock            string // identity.Place.Lock
	Mcap            int64  // maximum rate within the SLO, msg/s; > 0
	Version         string
	// DrainPublishers closes the connections of publishers that moved to other brokers, and returns
	// their number. DrainPublishers does not wait. nil: no publishers to move.
	DrainPublishers func(topic string, clientIDs map[string]bool) int
	// TakeOver imports another broker's messages of a topic (broker.TakeOver). TakeOver may take long.
	// nil: this broker has no replicated topics.
	TakeOver func(*srtmv1.TakeOver) (messages int, err error)
	// Durability is the guarantee that an OK gives.
	Durability srtmv1.Durability
	// NudgeConsumers makes the consumers of these channels look up the topic again, and returns their
	// number. NudgeConsumers does not wait. nil: no consumers to nudge.
	NudgeConsumers func(topic string, channels map[string]bool) int
	// ForwardKey receives the secret by which brokers authenticate each other. ForwardKey does not
	// wait. nil: this broker does not forward, and still accepts messages of retiring topics.
	ForwardKey func(key []byte)
	Policy     Policy // empty: Available
	Fresh      bool   // the broker has never been in a cluster
	Store      Store  // nil: bases are lost when the process ends
	// DialOptions are the credentials for the loaddistributor and the tbadaptor. nil: no TLS.
	DialOptions []grpc.DialOption
	Log         *slog.Logger
	Metrics     prometheus.Registerer // nil: not exported
}

// Flags defines the flags of a broker in a cluster.
func (c *Config) Flags(fs *flag.FlagSet) {
	fs.StringVar(&c.LoadDistributor, "loaddistributor-address", "", "gRPC `host:port` of the loaddistributor to join, or of several with commas (default none: a standalone broker)")
	fs.StringVar(&c.BrokerID, "broker-id", "", "`id` of this broker in its cluster, stable across restarts (default broadcast address and TCP port)")
	fs.Int64Var(&c.Mcap, "mcap", 20_000, "maximum rate, in `msg/s`, that this broker carries within the SLO")
	fs.StringVar((*string)(&c.Policy), "policy", string(Available), "what to do when the lease on shares has ended: available (continue with the bases) or strict (stop)")
}

// CheckFlags returns all problems of the flags' values.
func (c *Config) CheckFlags() error {
	var errs faults.List
	errs.Add(faults.OneOf("policy", string(c.Policy), string(Available), string(Strict)))
	errs.If(c.LoadDistributor != "" && c.Mcap <= 0, "--mcap %d is not a positive rate", c.Mcap)
	return errs.Err()
}

// Validate returns all problems at once.
func (c Config) Validate() error {
	var errs faults.List
	for _, address := range c.loadDistributors() {
		err := checkAddress(address)
		errs.If(err != nil, "loaddistributor address %q: %w", address, err)
	}
	for _, a := range []struct{ name, value string }{
		{"TCP address", c.TCPAddress},
		{"HTTP address", c.HTTPAddress},
	} {
		err := checkAddress(a.value)
		errs.If(err != nil, "%s %q: %w", a.name, a.value, err)
	}
	errs.If(!validID(c.BrokerID), "broker id %q: want 1 to 64 of [.a-zA-Z0-9_-]", c.BrokerID)
	errs.If(c.Mcap <= 0, "mcap %d: want a rate above 0, in msg/s", c.Mcap)
	errs.If(c.Policy != "" && c.Policy != Available && c.Policy != Strict, "policy %q: want %s or %s", c.Policy, Available, Strict)
	errs.If(c.Log == nil, "no logger")
	return errs.Err()
}

func (c Config) loadDistributors() []string { return service.SplitAddresses(c.LoadDistributor) }

func checkAddress(a string) error {
	host, port, err := net.SplitHostPort(a)
	if err != nil {
		return errors.New("want host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || host == "" {
		return errors.New("want host:port, with a port of 1 to 65535")
	}
	return nil
}

func validID(s string) bool {
	for _, r := range []byte(s) {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '_', r == '-':
		default:
			return false
		}
	}
	return len(s) >= 1 && len(s) <= 64
}

// Agent connects a Node to the control plane. Create an Agent with New.
type Agent struct {
	core
	started atomic.Bool // set by Run, which runs once
}

// core has the data that the owner shares with the sessions and with callers of the Agent.
type core struct {
	// Set once.
	cfg     Config
	node    Node
	metrics *metrics
	seed    uint64
	bases   []Base // saved by the previous process
	alone   bool   // the previous process had lost the adaptor when it ended
	// Work for the owner, from the sessions. The channel has no buffer: while the owner is busy, a
	// session stops reading and so pushes back on the sender.
	events chan func(*owner)
	pulse  *pulse // nil: the policy is Strict
	// Written by the owner once per report and at each change of a session. A stale State is only
	// displayed.
	state atomic.Pointer[State]
	// connected reports whether this broker has a session with the control plane. Written by the owner.
	// A stale true makes a caller wait until its time limit.
	connected atomic.Bool
}

// State is the agent's part of /debug/state.
type State struct {
	BrokerID  string         `json:"broker_id"`
	Instance  string         `json:"instance"`
	Control   SessionState   `json:"control"`
	Grants    SessionState   `json:"grants"`
	Held      []HoldingState `json:"held"`
	Kept      int            `json:"shares_without_topic"`
	Reporting time.Duration  `json:"report_interval_ns"`
	Policy    Policy         `json:"policy"`
	// LeaseLeft is the remaining time of the flexible parts of shares; 0: expired.
	LeaseLeft time.Duration `json:"lease_left_ns"`
	// Capturing lists the topics whose arrivals are recorded.
	Capturing []string `json:"capturing,omitempty"`
}

// SessionState describes one of the two sessions.
type SessionState struct {
	Address   string `json:"address"`
	Connected bool   `json:"connected"`
	// LastError says why the last session ended; empty: none has ended.
	LastError string `json:"last_error,omitempty"`
}

// HoldingState is a share in force.
type HoldingState struct {
	Topic     string `json:"topic"`
	Epoch     uint64 `json:"epoch"`
	RateMilli int64  `json:"rate_milli"`
	Burst     int64  `json:"burst"`
	// The part that remains when the lease ends.
	BaseRateMilli int64 `json:"base_rate_milli"`
	BaseBurst     int64 `json:"base_burst"`
}

// New validates cfg and loads the Store. New opens no connection.
func New(cfg Config, node Node) (*Agent, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	var random [16]byte
	_, _ = crand.Read(random[:]) // never fails
	if cfg.Instance == "" {
		cfg.Instance = fmt.Sprintf("%x", random[:])
	}
	if cfg.Hostname == "" {
		cfg.Hostname, _ = os.Hostname() // for display; empty: unknown
	}
	a := &Agent{core: core{
		cfg:     cfg,
		node:    node,
		metrics: newMetrics(cfg.Metrics),
		seed:    binary.LittleEndian.Uint64(random[:]),
		events:  make(chan func(*owner)),
	}}
	if cfg.Policy == "" {
		a.cfg.Policy = Available
	}
	if a.cfg.Policy != Strict {
		a.pulse = &pulse{holdFrom: node.HoldFrom, kick: make(chan struct{}, 1), woke: func(ctx context.Context, now mono.Time) {
			a.do(ctx, func(o *owner) { o.handleWake(now) })
		}}
	}
	if cfg.Store != nil {
		var err error
		if a.bases, err = cfg.Store.Load(); err == nil {
			a.alone, err = cfg.Store.Alone()
		}
		if err != nil {
			return nil, fmt.Errorf("agent: %w", err)
		}
	}
	a.state.Store(&State{BrokerID: cfg.BrokerID, Instance: cfg.Instance, Reporting: DefaultReportInterval})
	return a, nil
}

// State returns the newest state, at most one report interval old.
func (a *Agent) State() State { return *a.state.Load() }

// Health returns nil while the loaddistributor and the share adaptor answer. Otherwise Health returns
// an obs.Notice that lists the consequences. The broker keeps serving its clients in either case.
func (a *Agent) Health() error {
	s := a.state.Load()
	var lost []string
	if !s.Control.Connected {
		lost = append(lost, s.Control.silent("loaddistributor")+": topics, channels and moves stay as they are")
	}
	if !s.Grants.Connected || s.LeaseLeft == 0 {
		shares := "messages leave by the bases of shares"
		if s.Policy == Strict {
			shares = "no message of a topic with a contract leaves after the end of the lease"
		}
		lost = append(lost, s.Grants.silent("share adaptor")+": "+shares)
	}
	if lost == nil {
		return nil
	}
	return obs.Notice(strings.Join(lost, "; "))
}

// silent returns a text: the other side of the session does not answer.
func (s SessionState) silent(name string) string {
	text := "the " + name + " does not answer"
	if s.Address != "" { // "": the loaddistributor has not sent the address yet
		text += " at " + s.Address
	}
	if s.LastError != "" {
		text += " (" + strings.ReplaceAll(s.LastError, "\n", " ") + ")"
	}
	return text
}

// Run keeps the sessions open until ctx ends, and then returns nil. Run calls the node only until Run
// returns; the granted shares stay in force after. If the broker's id belongs to another process, Run
// gives up all shares and returns *TakenError. Run may be called once.
func (a *Agent) Run(ctx context.Context) error {
	if a.started.Swap(true) {
		return errors.New("agent: Run was called twice")
	}
	ctx, cancel := context.WithCancel(ctx)
	var sessions sync.WaitGroup
	defer sessions.Wait()
	defer cancel()

	o := newOwner(&a.core, ctx, &sessions)
	sessions.Go(func() { a.controlReconnector(ctx).run(ctx) })
	if a.pulse != nil {
		sessions.Go(func() { a.pulse.run(ctx) })
	}
	return o.run(ctx)
}

// do passes f to the owner. If ctx ends first, do drops f.
func (c *core) do(ctx context.Context, f func(*owner)) {
	select {
	case c.events <- f:
	case <-ctx.Done():
	}
}

// rng returns the random generator number n, for jitter only.
func (c *core) rng(n uint64) *rand.Rand { return rand.New(rand.NewPCG(c.seed, n)) }

type metrics struct {
	connected *prometheus.GaugeVec   // by session
	dropped   *prometheus.CounterVec // by session
	grants    *prometheus.CounterVec // by result
	lapses    prometheus.Counter
	captures  prometheus.Gauge
	captured  *prometheus.CounterVec // messages, by result
	channels  *prometheus.CounterVec // reported to the control plane, by result
}

// newMetrics registers the metrics with reg, which may be nil.
func newMetrics(reg prometheus.Registerer) *metrics {
	auto := promauto.With(reg)
	counters := func(name, help, label string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: "srtm_agent_" + name, Help: help}, []string{label})
	}
	return &metrics{
		connected: auto.NewGaugeVec(prometheus.GaugeOpts{Name: "srtm_agent_connected", Help: "1 while the session is up."}, []string{"session"}),
		dropped:   counters("reports_dropped_total", "Reports dropped: the session was down or behind.", "session"),
		grants:    counters("grants_total", "Grants received, by what became of them.", "result"),
		lapses:    auto.NewCounter(prometheus.CounterOpts{Name: "srtm_agent_lapses_total", Help: "Shares of which a part, or all, ended with the lease."}),
		captures:  auto.NewGauge(prometheus.GaugeOpts{Name: "srtm_agent_captures", Help: "Topics whose arrivals are recorded for the control plane."}),
		channels:  counters("channels_reported_total", "Channels that clients created here and that the broker reported to the control plane, by result: settled (all connected brokers of the topic have the channel), unsettled (no answer in time) or refused.", "result"),
		captured:  counters("captured_messages_total", "Messages whose arrivals were to be recorded, by what became of the record: sent or lost.", "result"),
	}
}
