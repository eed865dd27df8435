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
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/targets"
)

// Resend says which publishes without an answer are sent again.
type Resend uint8

const (
	// ResendOrderly: those on a connection that the broker ended in order.
	ResendOrderly Resend = iota
	// ResendAlways: all. Each break of a connection may duplicate what was
	// under way.
	ResendAlways
	// ResendNever: none.
	ResendNever
)

// Config is a client's. It is copied; its zero value but for Address or Broker is usable.
type Config struct {
	// Address is the loaddistributor's gRPC host:port, or those of several, with
	// commas: any of them can say where a publisher belongs. Without a port: 4170.
	Address string
	// Broker is the TCP host:port of the one broker to publish to, in place of Address: it
	// need not be in a cluster. Without a port: 4150.
	Broker string
	// DialOptions are added to the default, a connection without TLS: credentials, by
	// grpc.WithTransportCredentials, and a token, by Token or TokenFile.
	DialOptions []grpc.DialOption
	// NSQ is the model for connections to brokers (TLS, timeouts, secrets);
	// ClientID is overwritten with the publisher's id. Where it asks for TLS, a broker
	// that does not grant it is not published to. Nil means DefaultNSQConfig.
	NSQ *nsq.Config
	// MaxOutstanding bounds the unanswered publishes of one publisher; more
	// Publish calls wait. 0 means 256.
	MaxOutstanding int
	// Resend says which publishes without an answer are sent again.
	Resend Resend
	// DrainTimeout bounds the wait for an old broker's last answers; what is
	// unanswered then counts as on a broken connection. 0 means 30 s.
	DrainTimeout time.Duration
	// Pacing says what publishers do with what brokers tell them that they may send, and
	// Weight the weight they ask for; 0 means 1. Brokers are asked where the topic is
	// paced, as the loaddistributor says; with BrokersPace everywhere.
	Pacing      Pacing
	Weight      uint8
	BrokersPace bool
	// Create has a topic that does not exist created by its first publisher, where the
	// loaddistributor does that.
	Create bool
	// Vouch returns the AUTH secret by which a broker shows for whom it publishes: as is what
	// PublisherFor was given. It is called for each connection. Nil: there is no PublisherFor.
	Vouch func(as string) (secret string)
	// Tenant returns the tenant of a topic that is created so, of what PublisherFor was given; nil:
	// the caller's.
	Tenant func(as string) string
	// OnPace is called after a publisher was told something, by a goroutine of this
	// package, which must not wait; nil: it is not wanted.
	OnPace func(*Publisher, Pace)
	// Logger gets changes of state; nil: none.
	Logger *slog.Logger
}

// DefaultNSQConfig returns go-nsq's defaults with a heartbeat of 5 s and a read
// timeout of 11 s.
func DefaultNSQConfig() *nsq.Config {
	cfg := nsq.NewConfig()
	cfg.HeartbeatInterval = 5 * time.Second
	cfg.ReadTimeout = 11 * time.Second
	return cfg
}

// Client is one connection to the loaddistributor, shared by any number of
// publishers, with one Watch stream for each topic.
type Client struct {
	// set once
	cfg    Config
	log    *slog.Logger
	conn   *grpc.ClientConn
	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc
	all    sync.WaitGroup // watches

	mu struct {
		sync.Mutex
		closed     bool
		topics     map[string]*membership
		publishers map[*Publisher]struct{}
	}
}

// membership is the publishers of one topic, and its watch.
type membership struct {
	topic      string
	publishers map[string]map[string]*Publisher // by id, then by for whom each publishes
	changed    chan struct{}                    // closed and replaced when publishers changes
}

// New returns a client. It connects when it is first needed.
func New(cfg Config) (*Client, error) {
	switch {
	case cfg.Address == "" && cfg.Broker == "":
		return nil, errors.New("client: no address of a loaddistributor or broker")
	case cfg.Address != "" && cfg.Broker != "":
		return nil, errors.New("client: addresses of both a loaddistributor and a broker")
	}
	cfg.Address, cfg.Broker = targets.WithPort(cfg.Address, targets.LoaddistributorPort), targets.WithPort(cfg.Broker, targets.NSQPort)
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
	if c.conn, err = targets.Dial(cmp.Or(cfg.Address, cfg.Broker), cfg.DialOptions...); err != nil { // it is not used with Broker
		return nil, fmt.Errorf("client: %w", err)
	}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.mu.topics = map[string]*membership{}
	c.mu.publishers = map[*Publisher]struct{}{}
	return c, nil
}

// Publisher resolves the publisher and connects to its broker. It returns when
// that is done, or with why it cannot be done before ctx ends: ErrUnknown at
// once; a topic that is not active yet, a loaddistributor or a broker that
// cannot be reached, only then. A client has one publisher for a topic and id.
func (c *Client) Publisher(ctx context.Context, topic, id string) (*Publisher, error) {
	return c.PublisherFor(ctx, topic, id, "")
}

// PublisherFor is Publisher for a broker that publishes for another: as says for whom, and
// Config.Vouch shows that to brokers. A client has one publisher for a topic, id and as.
func (c *Client) PublisherFor(ctx context.Context, topic, id, as string) (*Publisher, error) {
	if !nsq.IsValidTopicName(topic) {
		return nil, fmt.Errorf("client: topic %q is no valid name", topic)
	}
	a := &srtmv1.Assignment{TcpAddress: c.cfg.Broker}
	if c.cfg.Broker == "" {
		var err error
		if a, err = c.resolve(ctx, topic, id, as); err != nil {
			return nil, fmt.Errorf("client: %w", err)
		}
	}
	p := newPublisher(c, topic, id, as)
	p.assigned(a) // first: what the watch says is newer
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

// Resolve returns the TCP address of a publisher's broker. It returns errors as Publisher.
func (c *Client) Resolve(ctx context.Context, topic, id, as string) (address string, err error) {
	a, err := c.resolve(ctx, topic, id, as)
	if err != nil {
		return "", fmt.Errorf("client: %w", err)
	}
	return a.TcpAddress, nil
}

// Brokers returns the TCP addresses of the brokers from which consumers get a topic's messages.
// There may be none for a while. Error: ErrUnknown, if the topic does not exist or is not
// active yet.
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

func (c *Client) resolve(ctx context.Context, topic, id, as string) (*srtmv1.Assignment, error) {
	req := &srtmv1.ResolveRequest{Topic: topic, PublisherId: id, Create: c.cfg.Create}
	if as != "" && c.cfg.Tenant != nil {
		req.Tenant = c.cfg.Tenant(as)
	}
	return resolve(ctx, c.conn, c.cfg.DialOptions, req)
}

// join makes p a member of its topic, and has the topic watched.
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
	if m.publishers[p.id][p.as] != nil {
		return fmt.Errorf("client: publisher %q of topic %q is open already", p.id, p.topic)
	}
	if m.publishers[p.id] == nil {
		m.publishers[p.id] = map[string]*Publisher{}
	}
	m.publishers[p.id][p.as] = p
	c.mu.publishers[p] = struct{}{}
	m.changedLocked()
	return nil
}

// leave is the end of a membership.
func (c *Client) leave(p *Publisher) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.mu.topics[p.topic]; m != nil && m.publishers[p.id][p.as] == p {
		if delete(m.publishers[p.id], p.as); len(m.publishers[p.id]) == 0 {
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

// members returns the ids, and what tells of the next change. Without any it
// forgets the topic: the next to join starts another watch.
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

// joinPause is how long a watch waits for more publishers to join before it is
// opened anew for them. They have been resolved, so no caller waits for it.
const joinPause = 20 * time.Millisecond

// watch keeps one stream for all publishers of a topic.
func (c *Client) watch(m *membership) {
	wait := newBackoff()
	for c.ctx.Err() == nil {
		ids, changed := c.members(m)
		if len(ids) == 0 {
			return
		}
		if c.cfg.Broker != "" { // they stay there
			select {
			case <-changed:
			case <-c.ctx.Done():
			}
			continue
		}
		ctx, cancel := context.WithCancelCause(c.ctx)
		over := make(chan struct{})
		c.all.Go(func() {
			defer cancel(errMembership)
			select {
			case <-changed:
			case <-over:
				return
			}
			pause := time.NewTimer(joinPause)
			defer pause.Stop()
			select {
			case <-pause.C:
			case <-over:
			case <-c.ctx.Done():
			}
		})
		err := Follow(ctx, c.conn, m.topic, ids, func(assignments []*srtmv1.Assignment) {
			wait.reset()
			c.dispatch(m, assignments)
		})
		close(over)
		switch {
		case errors.Is(err, errMembership), c.ctx.Err() != nil:
			continue
		case errors.Is(err, ErrUnknown):
			c.vanished(m, err)
		}
		c.log.Warn("watching a topic failed", "topic", m.topic, "error", err)
		// It may be created again.
		if wait.sleep(c.ctx) != nil {
			return
		}
	}
}

// dispatch hands assignments to the publishers they are for.
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

// vanished tells the publishers of a topic that it is gone.
func (c *Client) vanished(m *membership, err error) {
	c.mu.Lock()
	var all []*Publisher
	for _, of := range m.publishers {
		all = slices.AppendSeq(all, maps.Values(of))
	}
	c.mu.Unlock()
	for _, p := range all {
		p.vanished(err)
	}
}

// Close closes all publishers as their Close does, then the connection to the
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

// NewPublisher opens one publisher with a client of its own, which is closed
// with it. For many publishers in a process share a Client.
func NewPublisher(ctx context.Context, cfg Config, topic, id string) (*Publisher, error) {
	c, err := New(cfg)
	if err != nil {
		return nil, err
	}
	p, err := c.Publisher(ctx, topic, id)
	if err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	p.own = c
	return p, nil
}
