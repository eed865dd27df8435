package subscriber

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

// Config says what to receive and from where.
type Config struct {
	Topic, Channel string
	// Lookupd are HTTP addresses that say where the topic is, Nsqd are brokers
	// to connect to without asking. One of them is needed.
	Lookupd, Nsqd []string
	// LookupInterval is how often Lookupd are asked; 0 means 250 ms.
	LookupInterval time.Duration
	// Run and Sources are those of the fleet.
	Run     uint32
	Sources int
	// Logger gets go-nsq's warnings; nil: they are discarded.
	Logger *slog.Logger
}

// maxInFlight is shared out among the brokers: more than 1,000 of them allow with NSQ's
// default limit of 2,500, so that each gets what it allows one connection. A value that
// the first brokers can use up starves the next one: go-nsq may ask for its share before
// it has lowered theirs, finds nothing left, and tries again 5 s later.
const maxInFlight = 2_500_000

// Subscriber is one consumer. Its methods are safe for concurrent use.
type Subscriber struct {
	cfg Config

	mu struct {
		sync.Mutex
		consumer   *nsq.Consumer // nil outside Run
		deliveries *verify.Deliveries
		late       *obs.Latency
	}
}

// New returns a subscriber that does nothing yet.
func New(cfg Config) (*Subscriber, error) {
	if len(cfg.Lookupd)+len(cfg.Nsqd) == 0 {
		return nil, errors.New("a subscriber without an address of a lookupd or of a broker")
	}
	cfg.LookupInterval = cmp.Or(cfg.LookupInterval, 250*time.Millisecond)
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	s := &Subscriber{cfg: cfg}
	s.mu.deliveries = verify.NewDeliveries(cfg.Sources)
	s.mu.late = obs.NewLatency()
	return s, nil
}

// Run subscribes until ctx ends, and returns when the consumer has stopped.
func (s *Subscriber) Run(ctx context.Context) (err error) {
	cfg := nsq.NewConfig()
	cfg.LookupdPollInterval = s.cfg.LookupInterval
	cfg.LookupdPollJitter = 0
	cfg.MaxInFlight = maxInFlight
	cfg.MaxAttempts = 0 // a message that comes often is to be counted so
	cfg.ClientID, cfg.UserAgent = "iotpub-subscriber", "iotpub"
	consumer, err := nsq.NewConsumer(s.cfg.Topic, s.cfg.Channel, cfg)
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	// A client of its own, so that its idle connections can be ended.
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	consumer.SetLookupdHttpClient(&http.Client{Transport: transport, Timeout: 5 * time.Second})
	consumer.SetLogger(lines{s.cfg.Logger}, nsq.LogLevelWarning)
	consumer.AddHandler(s)
	defer func() {
		s.mu.Lock()
		s.mu.consumer = nil
		s.mu.Unlock()
		consumer.Stop()
		<-consumer.StopChan
	}()
	s.mu.Lock()
	s.mu.consumer = consumer
	s.mu.Unlock()

	if err := consumer.ConnectToNSQDs(s.cfg.Nsqd); err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	if err := consumer.ConnectToNSQLookupds(s.cfg.Lookupd); err != nil {
		return fmt.Errorf("subscribe: lookupd: %w", err)
	}
	<-ctx.Done()
	return nil
}

// HandleMessage implements nsq.Handler. It never fails, so go-nsq finishes
// every message.
func (s *Subscriber) HandleMessage(m *nsq.Message) error {
	now := clock.Mono()
	p, ok := payload.Parse(m.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !ok || p.Run != s.cfg.Run {
		s.mu.deliveries.Foreign++
		return nil
	}
	if s.mu.deliveries.Deliver(p.Source, p.Seq) == verify.Added {
		s.mu.late.Record(now.Sub(p.Intended))
	}
	return nil
}

// Connections is how many brokers the consumer is connected to.
func (s *Subscriber) Connections() int {
	s.mu.Lock()
	consumer := s.mu.consumer
	s.mu.Unlock()
	if consumer == nil {
		return 0
	}
	return consumer.Stats().Connections
}

// Stats are counts up to now.
type Stats struct {
	Delivered, Duplicated, Foreign uint64
	// EndToEnd is the time from the intended send time to the handler, of each
	// message's first delivery.
	EndToEnd *obs.Latency
}

// Stats returns a copy of the counts.
func (s *Subscriber) Stats() Stats {
	late := obs.NewLatency()
	s.mu.Lock()
	defer s.mu.Unlock()
	late.Merge(s.mu.late)
	d := s.mu.deliveries
	return Stats{Delivered: d.Once.Len(), Duplicated: d.Duplicates, Foreign: d.Foreign, EndToEnd: late}
}

// Compare draws up the account against what was accepted, and names up to limit
// messages that are missing.
func (s *Subscriber) Compare(accepted *verify.Set, limit int) (verify.Result, []verify.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return verify.Compare(accepted, s.mu.deliveries), verify.Missing(accepted, s.mu.deliveries, limit)
}

// lines gives go-nsq's log to a structured logger.
type lines struct{ log *slog.Logger }

func (l lines) Output(_ int, line string) error {
	l.log.Warn("go-nsq", "line", line)
	return nil
}
