package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
)

// Resend selects which unanswered publishes are sent again.
type Resend uint8

const (
	// ResendOrderly: publishes on a connection that the broker ended in an orderly way.
	ResendOrderly Resend = iota
	// ResendAlways: all publishes. Each broken connection may duplicate its unanswered
	// publishes.
	ResendAlways
	// ResendNever: no publishes.
	ResendNever
)

// Config configures a client. New copies it. Only Address or Broker is required.
type Config struct {
	// Address is the loaddistributor's gRPC host:port, or a comma-separated list of
	// several. Any loaddistributor can resolve publishers. The default port is 4170.
	Address string
	// Broker is the TCP host:port of a single broker, in place of Address. The broker need
	// not be in a cluster. The default port is 4150.
	Broker string
	// DialOptions are gRPC options in addition to the defaults. The default connection has no
	// TLS. Set TLS with grpc.WithTransportCredentials, and a token with Token or TokenFile.
	DialOptions []grpc.DialOption
	// NSQ is the model for connections to brokers (TLS, timeouts, secrets). ClientID is
	// replaced by the publisher's id. If NSQ requires TLS, the client does not publish to a
	// broker without TLS. Nil means DefaultNSQConfig.
	NSQ *nsq.Config
	// MaxOutstanding bounds the unanswered publishes of a publisher. Further calls of
	// Publish wait. 0 means 256.
	MaxOutstanding int
	// Resend selects which unanswered publishes are sent again.
	Resend Resend
	// DrainTimeout bounds the wait for the last answers of a former broker. Afterwards,
	// unanswered publishes count as lost with the connection. 0 means 30 s.
	DrainTimeout time.Duration
	// Pacing selects how publishers react to the rate that their broker advises. Weight is
	// the requested weight; 0 means 1. Publishers request advice if the loaddistributor
	// reports that the topic is paced, or always with BrokersPace.
	Pacing      Pacing
	Weight      uint8
	BrokersPace bool
	// Create makes the first publisher create a missing topic, if the loaddistributor
	// permits.
	Create bool
	// Vouch returns the AUTH secret with which a broker proves on whose behalf it
	// publishes. principal is the argument of PublisherFor. Vouch is called for each connection.
	// Nil: PublisherFor is not used.
	Vouch func(principal string) (secret string)
	// Tenant returns the tenant of a topic that Create creates, from PublisherFor's
	// argument principal; nil: the caller's tenant.
	Tenant func(principal string) string
	// OnPace is called after a publisher received advice, by a goroutine of this package.
	// OnPace must not block. May be nil.
	OnPace func(*Publisher, Pace)
	// Logger receives state changes; may be nil.
	Logger *slog.Logger
}

// DefaultNSQConfig returns go-nsq's defaults with a heartbeat of 5 s and a read timeout of
// 11 s.
func DefaultNSQConfig() *nsq.Config {
	cfg := nsq.NewConfig()
	cfg.HeartbeatInterval = 5 * time.Second
	cfg.ReadTimeout = 11 * time.Second
	return cfg
}

// Client is a connection to the loaddistributor, shared by any number of publishers. It has
// one Watch stream per topic.
type Client struct {
	// set once
	cfg    Config
	log    *slog.Logger
	conn   *grpc.ClientConn
	ctx    context.Context // cancelled by Close
	cancel context.CancelCauseFunc
	all    sync.WaitGroup // watches and their helpers

	mu struct {
		sync.Mutex
		closed     bool
		topics     map[string]*membership
		publishers map[*Publisher]struct{}
	}
}

// membership holds the publishers of a topic. Each membership has a watch.
type membership struct {
	topic      string
	publishers map[string]map[string]*Publisher // by id, then by principal
	changed    chan struct{}                    // closed and replaced when publishers changes
}

// New returns a client. The client connects on first use.
func New(cfg Config) (*Client, error) {
	switch {
	case cfg.Address == "" && cfg.Broker == "":
		return nil, errors.New("client: no address of a loaddistributor or broker")
	case cfg.Address != "" && cfg.Broker != "":
		return nil, errors.New("client: addresses of both a loaddistributor and a broker")
	}
	cfg.Address, cfg.Broker = service.WithPort(cfg.Address, service.LoaddistributorPort), service.WithPort(cfg.Broker, service.NSQPort)
	if cfg.MaxOutstanding < 0 || cfg.DrainTimeout < 0 || cfg.Resend > ResendNever || cfg.Pacing > PacingOff {
		return nil, fmt.Errorf("client: max outstanding %d and drain timeout %v must not be negative, resend %d must be 0 .. %d, pacing %d 0 .. %d",
			cfg.MaxOutstanding, cfg.DrainTimeout, cfg.Resend, ResendNever, cfg.Pacing, PacingOff)
	}
	if cfg.MaxOutstanding == 0 {
		cfg.MaxOutstanding = 256
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 30 * time.Second
	}
	if cfg.NSQ == nil {
		cfg.NSQ = DefaultNSQConfig()
	}
	if err := cfg.NSQ.Validate(); err != nil {
		return nil, fmt.Errorf("client: NSQ configuration: %w", err)
	}
	params := grpc.ConnectParams{Backoff: grpcbackoff.DefaultConfig, MinConnectTimeout: 5 * time.Second}
	params.Backoff.BaseDelay, params.Backoff.MaxDelay = 5*firstBackoff, lastBackoff
	cfg.DialOptions = append([]grpc.DialOption{
		grpc.WithTransportCredentials(secure.Plain()), grpc.WithConnectParams(params),
	}, cfg.DialOptions...)
	c := &Client{cfg: cfg, log: cfg.Logger}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if c.conn, err = service.Dial(cmp.Or(cfg.Address, cfg.Broker), cfg.DialOptions...); err != nil { // unused with Broker
		return nil, fmt.Errorf("client: %w", err)
	}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.mu.topics = map[string]*membership{}
	c.mu.publishers = map[*Publisher]struct{}{}
	return c, nil
}

// Connected reports whether the loaddistributor answers, and connects if there is no
// connection. Connected returns true during the first attempt, and always with
// Config.Broker.
func (c *Client) Connected() bool {
	if c.cfg.Broker != "" {
		return true
	}
	state := c.conn.GetState()
	if state == connectivity.Idle {
		c.conn.Connect()
	}
	return state != connectivity.TransientFailure
}

// Publisher resolves a publisher and connects to its broker. Publisher returns ErrUnknown
// immediately. If the topic is not active yet, or a loaddistributor or broker is
// unreachable, Publisher retries until ctx ends. A client can have only one publisher per topic
// and id.
func (c *Client) Publisher(ctx context.Context, topic, id string) (*Publisher, error) {
	return c.PublisherFor(ctx, topic, id, "")
}

// PublisherFor is Publisher for a broker that publishes on behalf of a client. principal
// identifies the client, and Config.Vouch proves principal to brokers. A Client can have
// only one publisher per topic, id and principal.
func (c *Client) PublisherFor(ctx context.Context, topic, id, principal string) (*Publisher, error) {
	if !nsq.IsValidTopicName(topic) {
		return nil, fmt.Errorf("client: topic %q is no valid name", topic)
	}
	a := &srtmv1.Assignment{TcpAddress: c.cfg.Broker}
	if c.cfg.Broker == "" {
		var err error
		if a, err = c.Resolve(ctx, topic, id, principal); err != nil {
			return nil, err
		}
	}
	p := newPublisher(c, topic, id, principal)
	p.assigned(a) // first, since the watch's assignments are newer
	if err := c.join(p); err != nil {
		return nil, err
	}
	p.start()
	if err := p.ready(ctx); err != nil {
		p.abandon()
		return nil, err
	}
	return p, nil
}

// Resolve returns the assignment of a publisher to a broker. Errors: as Publisher.
func (c *Client) Resolve(ctx context.Context, topic, id, principal string) (*srtmv1.Assignment, error) {
	a, err := c.resolve(ctx, topic, id, principal)
	return a, wrap(err)
}

// Brokers returns the TCP addresses of the brokers from which consumers get a topic's
// messages. The list may be empty for a while. Error: ErrUnknown, if the topic does not
// exist or is not active yet.
func (c *Client) Brokers(ctx context.Context, topic string) (addresses []string, err error) {
	resp, err := srtmv1.NewPlacementServiceClient(c.conn).FindBrokers(ctx, &srtmv1.FindBrokersRequest{Topic: topic})
	if status.Code(err) == codes.NotFound {
		err = fmt.Errorf("%w: %s", ErrUnknown, status.Convert(err).Message())
	}
	if err != nil {
		return nil, fmt.Errorf("client: find the brokers of topic %q: %w", topic, err)
	}
	return resp.TcpAddresses, nil
}

func (c *Client) resolve(ctx context.Context, topic, id, principal string) (*srtmv1.Assignment, error) {
	req := &srtmv1.ResolveRequest{Topic: topic, PublisherId: id, Create: c.cfg.Create}
	if principal != "" && c.cfg.Tenant != nil {
		req.Tenant = c.cfg.Tenant(principal)
	}
	return resolve(ctx, c.conn, c.cfg.DialOptions, req)
}

// join adds p to its topic's membership, and starts a watch if necessary.
func (c *Client) join(p *Publisher) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return fmt.Errorf("client: %w", ErrClosed)
	}
	m := c.mu.topics[p.topic]
	if m == nil {
		m = &membership{topic: p.topic, publishers: map[string]map[string]*Publisher{}, changed: make(chan struct{})}
		c.mu.topics[p.topic] = m
		c.all.Go(func() { c.watch(m) })
	}
	if m.publishers[p.id][p.principal] != nil {
		return fmt.Errorf("client: publisher %q of topic %q is open already", p.id, p.topic)
	}
	if m.publishers[p.id] == nil {
		m.publishers[p.id] = map[string]*Publisher{}
	}
	m.publishers[p.id][p.principal] = p
	c.mu.publishers[p] = struct{}{}
	m.changedLocked()
	return nil
}

// leave removes p from its topic's membership.
func (c *Client) leave(p *Publisher) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.mu.topics[p.topic]; m != nil && m.publishers[p.id][p.principal] == p {
		if delete(m.publishers[p.id], p.principal); len(m.publishers[p.id]) == 0 {
			delete(m.publishers, p.id)
			m.changedLocked()
		}
	}
	delete(c.mu.publishers, p)
}

func (m *membership) changedLocked() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// members returns the publisher ids, and a channel that is closed on the next change. If
// there are no publishers, members removes the topic; the next join starts a new watch.
func (c *Client) members(m *membership) (ids []string, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range m.publishers {
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		delete(c.mu.topics, m.topic)
	}
	return ids, m.changed
}

// joinPause is the time that a watch waits for further publishers before it is reopened.
// The new publishers have been resolved, so no caller waits.
const joinPause = 20 * time.Millisecond

// watch maintains one stream for all publishers of a topic.
func (c *Client) watch(m *membership) {
	wait := newBackoff()
	for c.ctx.Err() == nil {
		ids, changed := c.members(m)
		if len(ids) == 0 {
			return
		}
		if c.cfg.Broker != "" { // publishers stay on this broker
			select {
			case <-changed:
			case <-c.ctx.Done():
			}
			continue
		}
		ctx, cancel := context.WithCancelCause(c.ctx)
		done := make(chan struct{})
		c.all.Go(func() {
			defer cancel(errMembership)
			select {
			case <-changed:
			case <-done:
				return
			}
			pause := time.NewTimer(joinPause)
			defer pause.Stop()
			select {
			case <-pause.C:
			case <-done:
			case <-c.ctx.Done():
			}
		})
		err := Follow(ctx, c.conn, m.topic, ids, func(assignments []*srtmv1.Assignment) {
			wait.reset()
			c.dispatch(m, assignments)
		})
		close(done)
		switch {
		case errors.Is(err, errMembership), c.ctx.Err() != nil:
			continue
		case errors.Is(err, ErrUnknown):
			c.vanished(m, err)
		}
		c.log.Warn("watching a topic failed", "topic", m.topic, "error", err)
		// The topic may be created again.
		if wait.sleep(c.ctx) != nil {
			return
		}
	}
}

// dispatch passes assignments to their publishers.
func (c *Client) dispatch(m *membership, assignments []*srtmv1.Assignment) {
	for _, a := range assignments {
		c.mu.Lock()
		all := slices.Collect(maps.Values(m.publishers[a.PublisherId]))
		c.mu.Unlock()
		for _, p := range all {
			if a.Unknown {
				p.vanished(fmt.Errorf("%w: topic %s has no publisher %q", ErrUnknown, p.topic, p.id))
			} else {
				p.assigned(a)
			}
		}
	}
}

// vanished notifies the publishers of a deleted topic.
func (c *Client) vanished(m *membership, err error) {
	c.mu.Lock()
	var all []*Publisher
	for _, publisher := range m.publishers {
		all = slices.AppendSeq(all, maps.Values(publisher))
	}
	c.mu.Unlock()
	for _, p := range all {
		p.vanished(err)
	}
}

// Close closes all publishers, like Publisher.Close, and the connection to the
// loaddistributor, and waits for every goroutine.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	c.mu.closed = true
	var open []*Publisher
	for p := range c.mu.publishers {
		open = append(open, p)
	}
	c.mu.Unlock()
	errs := make([]error, len(open))
	var closing sync.WaitGroup
	for i, p := range open {
		closing.Go(func() { errs[i] = p.Close(ctx) })
	}
	closing.Wait()
	c.cancel(ErrClosed)
	c.all.Wait()
	return errors.Join(errors.Join(errs...), c.conn.Close())
}

// NewPublisher opens a publisher with its own client, which is closed with the publisher.
// Many publishers in a process should share a Client.
func NewPublisher(ctx context.Context, cfg Config, topic, id string) (*Publisher, error) {
	c, err := New(cfg)
	if err != nil {
		return nil, err
	}
	p, err := c.Publisher(ctx, topic, id)
	if err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	p.ownClient = c
	return p, nil
}
