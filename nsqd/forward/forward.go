// Package forward forwards publishes to topics on other brokers. It publishes at the broker that
// carries the publisher, under the publisher's identity. So a client that knows a single broker can
// publish to every topic of the cluster. The package also relays subscriptions to such topics
// (relay.go): a consumer that knows a single broker gets the messages of all brokers of the topic.
// The package knows nothing of connections, requests, and the topics of this broker. Read Forwarder
// next.
//
// The target broker sees the real publisher or consumer: each connection's origin is authenticated
// with a key that the loaddistributor gives to brokers (nsq/origin). A broker never forwards or
// relays for another broker, so a message has at most one extra hop.
package forward

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nsqio/go-nsq"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
)

const (
	// requestTimeout limits a forwarded publish: the search for its broker, the creation of its
	// topic, and the answer. A connection sends no heartbeats meanwhile, so requestTimeout is less
	// than the clients' default heartbeat interval, 30 s.
	requestTimeout = 10 * time.Second
	// idleTimeout is how long an unused connection to another broker is kept.
	idleTimeout = time.Minute
	// closeTimeout limits the wait for the last answers at the end.
	closeTimeout = time.Second
	// maxTargets is the maximum number of brokers with metrics of their own.
	maxTargets = 64
)

// Config is the configuration of a Forwarder.
type Config struct {
	LoadDistributor string            // gRPC host:port, or several, separated by commas
	DialOptions     []grpc.DialOption // for connections to the loaddistributor
	// TLS is for connections to brokers. Nil: plain text.
	TLS *tls.Config
	// MaxConnections limits the connections to other brokers. Half of them are for publishers, with
	// one connection for each publisher and topic. The other half is for consumers, with one
	// connection for each consumer and broker of its topic.
	MaxConnections int
	// MaxBytes limits, separately, the publishes in progress, with at most a quarter for each
	// broker, and the relayed messages that wait for consumers.
	MaxBytes int64
	Log      *slog.Logger
	Metrics  prometheus.Registerer
}

// Forwarder publishes at other brokers. Create it with New, and call Run.
type Forwarder struct {
	// This broker; set by SetBroker.
	brokerID, address string

	// Set once.
	publishers *pool.Pool
	model      *nsq.Config // template for consumers' connections
	maxSources int64
	maxBytes   int64
	log        *slog.Logger
	endLog     func()
	ctx        context.Context // of relayed subscriptions; Run ends it
	cancel     context.CancelFunc
	all        sync.WaitGroup // relayed subscriptions and their topics; Add requires mu, or a caller counted in all

	mu struct {
		sync.Mutex
		topics map[string]*topic // with relayed subscriptions
	}

	// Atomic: written by the agent. With a stale key another broker refuses the connection, which
	// is then dialed again.
	keys atomic.Pointer[keys]

	// Atomic: written by relayed subscriptions.
	sources      atomic.Int64 // connections to brokers
	waitingBytes atomic.Int64 // of messages that wait for consumers
	metrics
}

// keys are the current secret of the loaddistributor and the previous secret.
type keys struct{ current, previous []byte }

// New returns a Forwarder that connects on first use.
func New(cfg Config) (*Forwarder, error) {
	f := &Forwarder{maxSources: int64(max(1, cfg.MaxConnections/2)), maxBytes: cfg.MaxBytes}
	cfg.Log, f.endLog = obs.Sparse(cfg.Log) // any client can open publishers
	f.log = cfg.Log
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.mu.topics = map[string]*topic{}
	f.keys.Store(&keys{})
	model := client.DefaultNSQConfig()
	model.UserAgent = "srtm-forward/" + program.Release
	model.TlsV1, model.TlsConfig = cfg.TLS != nil, cfg.TLS
	f.model = model
	var err error
	f.publishers, err = pool.New(client.Config{
		Address: cfg.LoadDistributor, DialOptions: cfg.DialOptions, NSQ: model, Pacing: client.PacingOff, Create: true, Logger: cfg.Log,
		Tenant: func(publisherName string) string {
			if o := origin.Of(publisherName); o.Kind == "auth" {
				return url.PathEscape(o.ID)
			}
			return ""
		},
		Vouch: f.secret,
	}, pool.Config{Max: max(1, cfg.MaxConnections/2), Idle: idleTimeout, OpenWithin: requestTimeout, MaxBytes: cfg.MaxBytes, MaxBrokerBytes: cfg.MaxBytes / 4})
	if err != nil {
		return nil, err
	}
	f.metrics = newMetrics(cfg.Metrics, f)
	return f, nil
}

// SetBroker sets the id of this broker and the TCP address that other brokers dial. It must be called before
// the first publish.
func (f *Forwarder) SetBroker(brokerID, address string) { f.brokerID, f.address = brokerID, address }

// Run closes idle connections until ctx ends. Then it closes all connections and ends relayed
// subscriptions.
func (f *Forwarder) Run(ctx context.Context) error {
	defer f.endLog()
	f.publishers.Run(ctx)
	f.mu.Lock()
	f.cancel()
	f.mu.Unlock()
	f.all.Wait()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err := f.publishers.Close(last); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// SetKey replaces the secret with which brokers authenticate each other. The previous secret
// remains valid.
func (f *Forwarder) SetKey(key []byte) {
	if old := f.keys.Load(); string(old.current) != string(key) {
		f.keys.Store(&keys{current: key, previous: old.current})
	}
}

// secret returns a secret that proves to other brokers: this broker acts for as.
func (f *Forwarder) secret(principal string) string {
	return origin.Secret(f.keys.Load().current, principal)
}

// Origin returns the publisher for whom another broker publishes, from that broker's secret.
func (f *Forwarder) Origin(secret []byte) (origin.Origin, error) {
	k := f.keys.Load()
	return origin.Parse(secret, k.current, k.previous)
}

// State returns the open connections, for people.
func (f *Forwarder) State() []pool.State { return f.publishers.States() }

// Publisher is a publisher that is connected to this broker.
type Publisher struct {
	ClientID string          // from IDENTIFY
	Identity police.Identity // identity for pacing
	Host     string
	Visits   bool // no connection: each publish is a separate request
}

// Name is the control plane's name of the publisher.
func (p Publisher) Name() string { return broker.PublisherName(p.ClientID, p.Identity) }

// Create creates a topic to which a client subscribes, unless the topic exists. The error is nil if
// the topic exists afterwards.
func (f *Forwarder) Create(ctx context.Context, topic string, p Publisher) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := f.publishers.Resolve(ctx, pool.Key{Topic: topic, As: f.origin(p, false)})
	return err
}

// MQTTServer returns the address at which MQTT clients reach the broker of a publisher, with TLS if secure is
// set. The address is empty if this broker is the publisher's broker, or if that broker has no such address.
func (f *Forwarder) MQTTServer(ctx context.Context, topic string, p Publisher, secure bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	a, err := f.publishers.Resolve(ctx, pool.Key{Topic: topic, ID: p.Name(), As: f.origin(p, false)})
	switch {
	case err != nil || a.BrokerId == f.brokerID:
		return "", err
	case secure:
		return a.MqttsAddress, nil
	}
	return a.MqttAddress, nil
}

// Line forwards the publishes of one publisher, in order. Create it with Forwarder.Line.
type Line struct {
	// Set once.
	forwarder  *Forwarder
	line       *pool.Line
	name       string
	principal  string // for messages without attributes
	attributed string // for messages with attributes
}

// Line returns a line for a publisher. Its methods must not be called concurrently; only
// Pending.Wait may run at the same time.
func (f *Forwarder) Line(p Publisher) *Line {
	return &Line{forwarder: f, line: f.publishers.Line(), name: p.Name(), principal: f.origin(p, false), attributed: f.origin(p, true)}
}

func (f *Forwarder) origin(p Publisher, attributes bool) string {
	return origin.Origin{ClientID: p.ClientID, Kind: p.Identity.Kind, ID: p.Identity.ID, Host: p.Host, Broker: f.brokerID, Visits: p.Visits, Attributes: attributes}.String()
}

// Close releases the line. Pending publishes continue.
func (l *Line) Close() { l.line.Close() }

// Begin publishes a message without waiting for the answer. It may wait for the topic's broker, and
// for room among the publishes in progress. If ctx ends, it is unknown whether the message is
// accepted. The caller may reuse the message when Begin returns.
func (l *Line) Begin(ctx context.Context, topic string, m pool.Message) *Pending {
	start := clock.Mono()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	as := l.principal
	if len(m.Attribute) > 0 {
		as = l.attributed
	}
	return &Pending{
		Pending:   l.line.Begin(ctx, pool.Key{Topic: topic, ID: l.name, As: as}, m),
		forwarder: l.forwarder, topic: topic, start: start, cancel: cancel,
	}
}

// Pending is a publish in progress.
type Pending struct {
	pool.Pending
	forwarder *Forwarder
	topic     string
	start     mono.Time
	cancel    context.CancelFunc
}

// Returned reports whether the publish goes back to this broker.
func (p *Pending) Returned() bool { return p.Target() != "" && p.Target() == p.forwarder.address }

// Wait returns the outcome of the publish, as pool.Pending. Call Wait once.
func (p *Pending) Wait() error {
	err := p.Pending.Wait()
	p.cancel()
	p.forwarder.record(p.Target(), pool.Result(err), clock.Mono().Sub(p.start))
	return err
}

// Verdict waits and returns the error for an NSQ client. failed is the code of the client's
// command.
func (p *Pending) Verdict(failed wire.ErrorCode) error {
	err := p.Wait()
	if errors.Is(err, client.ErrUnknown) {
		return wire.Wrap(wire.CodeBadTopic, fmt.Sprintf("topic %q does not exist in the cluster, or has a list of publishers without this one: see srtm topic create and srtm topic describe", p.topic), err)
	}
	return pool.Verdict(failed, err)
}

// Abandon gives up on the publish, which may be accepted or not. Call Abandon instead of Wait.
func (p *Pending) Abandon() {
	p.cancel()
	_ = p.Wait() // returns at once
}

type metrics struct {
	forwarded *prometheus.CounterVec
	latency   prometheus.Histogram
	targets   *targets
	relayed   *prometheus.CounterVec
	consumers prometheus.Gauge
}

func newMetrics(r prometheus.Registerer, f *Forwarder) metrics {
	auto := promauto.With(r)
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_nsqd_relay_connections", Help: "Connections to brokers on which messages come for consumers that are connected here."},
		func() float64 { return float64(f.sources.Load()) })
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_nsqd_relay_waiting_bytes", Help: "Messages that came from other brokers and wait for their consumers to read."},
		func() float64 { return float64(f.waitingBytes.Load()) })
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_nsqd_forward_publishers", Help: "Connections to other brokers on which publishes are forwarded."},
		func() float64 { return float64(f.publishers.Len()) })
	return metrics{
		forwarded: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "srtm_nsqd_forwarded_total",
			Help: "Publishes that were forwarded to another broker (target, its address; none: no broker was found; other: one of many), by what became of them: accepted; refused; unanswered, so that they may have been accepted; unsent.",
		}, []string{"target", "result"}),
		latency: auto.NewHistogram(prometheus.HistogramOpts{
			Name: "srtm_nsqd_forward_seconds", Help: "What forwarding adds to a publish: from its arrival here to the other broker's answer.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 18),
		}),
		targets: newTargets(),
		relayed: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "srtm_nsqd_relayed_messages_total", Help: "Messages that came from another broker (target, its address; other: one of many) for consumers that are connected here.",
		}, []string{"target"}),
		consumers: auto.NewGauge(prometheus.GaugeOpts{Name: "srtm_nsqd_relayed_subscriptions", Help: "Consumers that are connected here and get the messages of a topic of other brokers."}),
	}
}

func (m *metrics) record(target, result string, latency time.Duration) {
	m.forwarded.WithLabelValues(m.targets.label(target), result).Inc()
	m.latency.Observe(latency.Seconds())
}
