// Package publish is the gateway's ingest: what is posted to /pub and /mpub goes through
// package client to the broker that the publisher is placed at, so that a sensor with
// nothing but HTTP is limited and moved like any other. Requests and answers are those
// of nsqd's HTTP API (internal/nsqhttp). It knows nothing of classes and servers.
package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	admission "github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/nsqhttp"
	"github.com/srtm-io/srtm/nsq/wire"
)

const (
	// MaxPublishers is how many are connected at a time, at most: each has a connection
	// of its own. One more is refused while none is idle.
	MaxPublishers = 10_000
	idle          = 5 * time.Minute  // after which one is disconnected
	sweepEvery    = 30 * time.Second // to look for those
	connectWithin = 5 * time.Second
	answerWithin  = 10 * time.Second
	closeWithin   = time.Second
)

// header has the publisher's id.
const header = "X-Publisher-Id"

// Service publishes for those who ask over HTTP. Make it with New.
type Service struct {
	// Set once.
	client *client.Client
	log    *slog.Logger
	limits wire.Limits
	bodies nsqhttp.Bodies

	mu         sync.Mutex
	closed     bool             // guarded by mu
	publishers map[key]*session // guarded by mu
}

type key struct{ topic, id string }

// session is one publisher.
type session struct {
	open func() (*client.Publisher, error) // connects once, and returns the same every time

	// Guarded by Service.mu.
	users int
	used  time.Time
}

// New returns a service. It connects when it is first needed. The bodies of all requests
// under way may take maxBodies bytes; 0: any number.
func New(cfg client.Config, maxBodies int64, metrics prometheus.Registerer) (*Service, error) {
	c, err := client.New(cfg)
	if err != nil {
		return nil, err
	}
	s := &Service{client: c, log: cfg.Logger, limits: wire.DefaultLimits(), publishers: map[key]*session{}}
	s.bodies.Limit = maxBodies
	metrics.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_gateway_publish_bodies_bytes", Help: "Bytes of the bodies of requests to /pub and /mpub that are under way."},
			func() float64 { return float64(s.bodies.Held()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "srtm_gateway_publish_bodies_refused_total", Help: "Requests to /pub and /mpub that were refused: the bodies of all take as much memory as they may."},
			func() float64 { return float64(s.bodies.Refused()) }))
	return s, nil
}

// Run disconnects publishers that are idle, and when ctx ends all of them.
func (s *Service) Run(ctx context.Context) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			s.sweep(time.Now().Add(-idle))
		case <-ctx.Done():
			s.mu.Lock()
			s.closed = true
			s.mu.Unlock()
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
			defer cancel()
			return s.client.Close(last)
		}
	}
}

// sweep disconnects those that nobody uses and nobody has used since then.
func (s *Service) sweep(since time.Time) {
	var done []*session
	s.mu.Lock()
	for k, p := range s.publishers {
		if p.users == 0 && p.used.Before(since) {
			delete(s.publishers, k)
			done = append(done, p)
		}
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeWithin)
	defer cancel()
	for _, p := range done {
		publisher, err := p.open()
		if err == nil {
			err = publisher.Close(ctx)
		}
		if err != nil {
			s.log.Warn("publisher could not be disconnected in order", "error", err)
		}
	}
}

// Serve answers a POST to /pub or /mpub, as proxy.Publisher.
func (s *Service) Serve(w http.ResponseWriter, r *http.Request, tenant string, charge func(messages int) admission.Decision) {
	w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
	charged := func(messages int) error {
		d := charge(messages)
		switch {
		case d.Admit && d.Left >= 0 && !d.Unanswered:
			w.Header().Set("RateLimit", `"default";r=`+strconv.FormatInt(d.Left, 10))
		case !d.Admit && d.RetryAfter > 0:
			w.Header().Set("RateLimit", fmt.Sprintf(`"default";r=0;t=%.0f`, math.Ceil(d.RetryAfter.Seconds())))
		}
		if d.Admit {
			return nil
		}
		return &nsqhttp.Fault{
			Status: http.StatusTooManyRequests, Message: "QUOTA_EXCEEDED", RetryAfter: d.RetryAfter,
			Detail: fmt.Sprintf("tenant %q may not publish %d messages now", tenant, messages),
		}
	}
	body := s.bodies.Hold(r.Body)
	defer body.Release()
	r.Body = body
	if err := s.publish(r, tenant, charged); err != nil {
		asFault(err).Write(w)
		return
	}
	nsqhttp.WriteText(w, "OK")
}

// publish publishes what a request has, as its publisher.
func (s *Service) publish(r *http.Request, tenant string, charge func(int) error) error {
	var k key
	var body []byte
	var batch nsqhttp.Messages
	var wait time.Duration
	var err error
	messages := 1
	if r.URL.Path == "/pub" {
		k.topic, body, wait, err = nsqhttp.ReadPub(r, s.limits)
	} else if k.topic, batch, wait, err = nsqhttp.ReadMpub(r, s.limits); err == nil {
		messages = batch.Len()
	}
	switch {
	case err != nil || messages == 0:
		return err
	case batch != nil && wait > 0: // NSQ's protocol has no such command
		return nsqhttp.BadRequest("INVALID_DEFER", "a batch cannot be deferred through the gateway")
	}
	if err := charge(messages); err != nil {
		return err
	}
	if k.id = cmp.Or(r.Header.Get(header), tenant); k.id == "" {
		return nsqhttp.BadRequest("MISSING_PUBLISHER_ID", "the request has no %s, and the caller no tenant", header)
	}
	p, err := s.take(k)
	if err != nil {
		return err
	}
	defer s.leave(p)
	publisher, err := p.open()
	if err != nil {
		return err
	}
	// What was sent is not given up with the request: its answer would be lost.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), answerWithin)
	defer cancel()
	switch {
	case batch != nil:
		bodies := make([][]byte, 0, messages)
		batch.Each(func(body []byte) { bodies = append(bodies, body) })
		return publisher.MultiPublish(ctx, bodies)
	case wait > 0:
		return publisher.DeferredPublish(ctx, wait, body)
	}
	return publisher.Publish(ctx, body)
}

// take returns the session of a publisher, which stays there until leave.
func (s *Service) take(k key) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.publishers[k] == nil && len(s.publishers) >= MaxPublishers {
		s.mu.Unlock()
		s.sweep(time.Now())
		s.mu.Lock()
	}
	p := s.publishers[k]
	switch {
	case p != nil:
	case s.closed:
		return nil, client.ErrClosed
	case len(s.publishers) >= MaxPublishers:
		return nil, nsqhttp.Refuse(http.StatusServiceUnavailable, "TOO_MANY_PUBLISHERS", "%d are connected", MaxPublishers)
	default:
		p = &session{open: sync.OnceValues(func() (*client.Publisher, error) { return s.connect(k) })}
		s.publishers[k] = p
	}
	p.users++
	return p, nil
}

// connect is for all who ask for a publisher, and so no matter of any one's context.
func (s *Service) connect(k key) (*client.Publisher, error) {
	ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
	defer cancel()
	publisher, err := s.client.Publisher(ctx, k.topic, k.id)
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.publishers, k) // the next request tries again
	}
	return publisher, err
}

func (s *Service) leave(p *session) {
	s.mu.Lock()
	p.users--
	p.used = time.Now()
	s.mu.Unlock()
}

// faults are the answers of nsqd's HTTP API to what it refuses over TCP by these codes.
var faults = map[wire.ErrorCode]nsqhttp.Fault{
	wire.CodeRateLimited:  {Status: http.StatusTooManyRequests, Message: "RATE_LIMITED"},
	wire.CodeQueueFull:    {Status: http.StatusServiceUnavailable, Message: "QUEUE_FULL"},
	wire.CodeBadTopic:     {Status: http.StatusBadRequest, Message: "INVALID_TOPIC"},
	wire.CodeBadMessage:   {Status: http.StatusRequestEntityTooLarge, Message: "MSG_TOO_BIG"},
	wire.CodeBadBody:      {Status: http.StatusRequestEntityTooLarge, Message: "BODY_TOO_BIG"},
	wire.CodeAuthFirst:    {Status: http.StatusUnauthorized, Message: "AUTH_FIRST"},
	wire.CodeAuthFailed:   {Status: http.StatusServiceUnavailable, Message: "AUTH_FAILED"},
	wire.CodeUnauthorized: {Status: http.StatusForbidden, Message: "UNAUTHORIZED"},
}

func asFault(err error) *nsqhttp.Fault {
	if f, ok := errors.AsType[*nsqhttp.Fault](err); ok {
		return f
	}
	is := &nsqhttp.Fault{Status: http.StatusServiceUnavailable, Detail: err.Error()}
	refused, _ := errors.AsType[*client.RefusedError](err)
	switch {
	case refused != nil:
		is.Message, is.Detail = "PUB_FAILED", refused.Error()
		if as, known := faults[wire.ErrorCode(refused.Code)]; known {
			is.Status, is.Message = as.Status, as.Message
		}
	case errors.Is(err, client.ErrUnknown):
		is.Status, is.Message = http.StatusNotFound, "TOPIC_NOT_FOUND"
	case errors.Is(err, client.ErrUnanswered):
		is.Status, is.Message = http.StatusGatewayTimeout, "UNANSWERED"
		is.Detail += ": it may have been accepted, or not"
	case errors.Is(err, client.ErrClosed):
		is.Message = "EXITING"
	case errors.Is(err, context.DeadlineExceeded):
		is.Message, is.RetryAfter = "NO_BROKER", time.Second
	default:
		is.Status, is.Message = http.StatusInternalServerError, "INTERNAL_ERROR"
	}
	return is
}
