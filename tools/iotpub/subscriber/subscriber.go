// Package subscriber receives the messages of a fleet with the unmodified go-nsq library,
// like any NSQ user. The subscriber finds brokers by lookup, finishes every message, and
// records how often and how late each message arrives. tools/iotpub/verify compares the
// record with the fleet's record.
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
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

// Config describes a subscription.
type Config struct {
	Topic, Channel string
	// Lookupd are the HTTP addresses of lookup services. Nsqd are brokers for direct
	// connections. At least one address is required.
	Lookupd, Nsqd []string
	// LookupInterval is the polling interval of Lookupd; 0 means 250 ms.
	LookupInterval time.Duration
	// Run and Sources are the fleet's values.
	Run     uint32
	Sources int
	// Logger receives go-nsq's warnings; nil discards them.
	Logger *slog.Logger
}

// maxInFlight is divided among the brokers. With NSQ's default limit of 2,500 per
// connection, maxInFlight suffices for 1,000 brokers, so each broker gets its full limit.
// If the first brokers could use up the value, the next broker would starve: go-nsq may
// assign the new share before lowering the others, finds nothing left, and retries only
// after 5 s.
const maxInFlight = 2_500_000

// Subscriber is one consumer. Its methods are safe for concurrent use.
type Subscriber struct {
	cfg Config

	mu struct {
		sync.Mutex
		consumer   *nsq.Consumer // nil outside Run
		deliveries *verify.Deliveries
		late       *histogram.Latency
	}
}

// New returns a subscriber that has not started.
func New(cfg Config) (*Subscriber, error) {
	if len(cfg.Lookupd)+len(cfg.Nsqd) == 0 {
		return nil, errors.New("a subscriber without an address of a lookupd or of a broker")
	}
	cfg.LookupInterval = cmp.Or(cfg.LookupInterval, 250*time.Millisecond)
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	s := &Subscriber{cfg: cfg}
	s.mu.deliveries = verify.NewDeliveries(cfg.Sources)
	s.mu.late = histogram.NewLatency()
	return s, nil
}

// Run subscribes until ctx ends, and returns after the consumer has stopped.
func (s *Subscriber) Run(ctx context.Context) (err error) {
	cfg := nsq.NewConfig()
	cfg.LookupdPollInterval = s.cfg.LookupInterval
	cfg.LookupdPollJitter = 0
	cfg.MaxInFlight = maxInFlight
	cfg.MaxAttempts = 0 // no limit: repeated deliveries are counted
	cfg.ClientID, cfg.UserAgent = "iotpub-subscriber", "iotpub"
	consumer, err := nsq.NewConsumer(s.cfg.Topic, s.cfg.Channel, cfg)
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	// A separate client, so that Run can close the idle connections.
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

// HandleMessage implements nsq.Handler. It always returns nil, so go-nsq finishes every
// message.
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

// Connections returns the number of connected brokers.
func (s *Subscriber) Connections() int {
	s.mu.Lock()
	consumer := s.mu.consumer
	s.mu.Unlock()
	if consumer == nil {
		return 0
	}
	return consumer.Stats().Connections
}

// Stats are the counts so far.
type Stats struct {
	Delivered, Duplicated, Foreign uint64
	// EndToEnd is the latency of each message's first delivery, from the intended send time
	// to the handler.
	EndToEnd *histogram.Latency
}

// Stats returns a copy of the counts.
func (s *Subscriber) Stats() Stats {
	late := histogram.NewLatency()
	s.mu.Lock()
	defer s.mu.Unlock()
	late.Merge(s.mu.late)
	d := s.mu.deliveries
	return Stats{Delivered: d.Once.Len(), Duplicated: d.Duplicates, Foreign: d.Foreign, EndToEnd: late}
}

// Compare compares the deliveries with the accepted messages, and returns up to limit
// missing messages.
func (s *Subscriber) Compare(accepted *verify.Set, limit int) (verify.Result, []verify.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return verify.Compare(accepted, s.mu.deliveries), verify.Missing(accepted, s.mu.deliveries, limit)
}

// lines forwards go-nsq's log to a structured logger.
type lines struct{ log *slog.Logger }

func (l lines) Output(_ int, line string) error {
	l.log.Warn("go-nsq", "line", line)
	return nil
}
