// Package publish is the gateway's ingest. Posts to /pub and /mpub go through package client to the
// broker on which the publisher is placed. So a sensor with nothing but HTTP is limited and moved like
// any other publisher. Requests and answers have the form of nsqd's HTTP API (nsq/nsqhttp). The
// package knows nothing of classes and servers.
package publish

import (
	"cmp"
	"context"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	admission "github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

const (
	// MaxPublishers is the maximum number of connected publishers: each has its own connection. A
	// further publisher is refused while no publisher is idle.
	MaxPublishers = 10_000
	idle          = 5 * time.Minute // an idle publisher is disconnected after this time
	connectWithin = 5 * time.Second
	answerWithin  = 10 * time.Second
	closeWithin   = time.Second
)

// header is the name of the header with the publisher's id.
const header = "X-Publisher-Id"

// Service publishes for HTTP clients. Make a Service with New.
type Service struct {
	publishers *pool.Pool
	limits     wire.Limits
	bodies     nsqhttp.Bodies
}

// New returns a service, which connects when first needed. The bodies of all requests in progress may
// take maxBodies bytes; 0: unbounded.
func New(cfg client.Config, maxBodies int64, metrics prometheus.Registerer) (*Service, error) {
	cfg.Create = true
	publishers, err := pool.New(cfg, pool.Config{Max: MaxPublishers, Idle: idle, OpenWithin: connectWithin})
	if err != nil {
		return nil, err
	}
	s := &Service{publishers: publishers, limits: wire.DefaultLimits()}
	s.bodies.Limit = maxBodies
	metrics.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_gateway_publish_bodies_bytes", Help: "Bytes of the bodies of requests to /pub and /mpub that are under way."},
			func() float64 { return float64(s.bodies.Held()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "srtm_gateway_publish_bodies_refused_total", Help: "Requests to /pub and /mpub that were refused: the bodies of all take as much memory as they may."},
			func() float64 { return float64(s.bodies.Refused()) }))
	return s, nil
}

// Run disconnects idle publishers, and all publishers when ctx ends.
func (s *Service) Run(ctx context.Context) error {
	s.publishers.Run(ctx)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
	defer cancel()
	return s.publishers.Close(last)
}

// Serve answers a POST to /pub or /mpub. It implements proxy.Publisher.
func (s *Service) Serve(w http.ResponseWriter, r *http.Request, tenant string, charge func(messages int) admission.Decision) {
	w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
	body := s.bodies.Hold(r.Body)
	defer body.Release()
	r.Body = body
	if err := s.publish(w.Header(), r, body, tenant, charge); err != nil {
		pool.Fault(err).Write(w)
		return
	}
	nsqhttp.WriteText(w, "OK")
}

// publish publishes the messages of a request. h is the header of the answer.
func (s *Service) publish(h http.Header, r *http.Request, received *nsqhttp.Body, tenant string, charge func(int) admission.Decision) error {
	var k pool.Key
	var body []byte
	var batch nsqhttp.Messages
	var wait time.Duration
	var err error
	messages := 1
	if r.URL.Path == "/pub" {
		k.Topic, body, wait, err = nsqhttp.ReadPub(r, s.limits)
	} else if k.Topic, batch, wait, err = nsqhttp.ReadMpub(r, s.limits); err == nil {
		messages = batch.Len()
		// The list of messages and the broker's command take many times the size of the body, if the
		// lines have one byte each.
		err = received.Grow(batch.Bytes() + messages*pool.PerMessage)
	}
	switch {
	case err != nil || messages == 0:
		return err
	case batch != nil && wait > 0: // NSQ's protocol has no deferred batch
		return nsqhttp.BadRequest("INVALID_DEFER", "a batch cannot be deferred through the gateway")
	}
	d := charge(messages)
	if d.Admit && d.Left >= 0 && !d.Unanswered || !d.Admit && d.RetryAfter > 0 {
		admission.RateLimit(h, d)
	}
	if !d.Admit {
		return nsqhttp.QuotaExceeded(tenant, messages, d.RetryAfter)
	}
	if k.ID = cmp.Or(r.Header.Get(header), tenant); k.ID == "" {
		return nsqhttp.BadRequest("MISSING_PUBLISHER_ID", "the request has no %s, and the caller no tenant", header)
	}
	if len(k.ID) > session.MaxIdentityText || !utf8.ValidString(k.ID) { // no broker would accept the id
		return nsqhttp.BadRequest("INVALID_PUBLISHER_ID", "a publisher's id is UTF-8 of at most %d bytes", session.MaxIdentityText)
	}
	line := s.publishers.Line()
	defer line.Close()
	// Do not cancel a sent message with the request: the broker's answer would be lost.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), answerWithin)
	defer cancel()
	m := pool.Message{Body: body, Defer: wait}
	if batch != nil {
		m.Batch = batch
	}
	pending := line.Begin(ctx, k, m)
	return pending.Wait()
}
