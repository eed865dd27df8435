package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/forward"
)

func (a *API) pub(r *http.Request) (string, error) {
	name, body, wait, err := nsqhttp.ReadPub(r, a.cfg.Session.Limits)
	if err != nil {
		return "", err
	}
	if err := a.charge(r, 1); err != nil {
		return "", err
	}
	arrival := a.stamps.Now()
	return a.publish(r, name, pool.Message{Body: body, Defer: wait}, func(t *broker.Topic, from *broker.Publisher, at *broker.Stored) error {
		return t.Publish(arrival.At, clock.Wall(), broker.Published{Body: body, Arrival: arrival, Defer: wait, From: from, Stored: at})
	})
}

func (a *API) mpub(r *http.Request) (string, error) {
	name, batch, wait, err := nsqhttp.ReadMpub(r, a.cfg.Session.Limits)
	if err != nil {
		return "", err
	}
	if batch.Len() == 0 {
		return "OK", nil
	}
	if err := a.charge(r, batch.Len()); err != nil {
		return "", err
	}
	arrival := a.stamps.Now()
	return a.publish(r, name, pool.Message{Batch: batch, Defer: wait}, func(t *broker.Topic, from *broker.Publisher, at *broker.Stored) error {
		return t.PublishBatch(arrival.At, clock.Wall(), broker.Published{Arrival: arrival, Defer: wait, From: from, Stored: at}, batch)
	})
}

// publish finds or creates the topic and calls put. It repeats this if the topic is deleted
// meanwhile. If the topic is on another broker, publish forwards the message.
func (a *API) publish(r *http.Request, name string, m pool.Message, publish func(*broker.Topic, *broker.Publisher, *broker.Stored) error) (string, error) {
	var at broker.Stored
	for {
		t, err := a.broker.TopicForClient([]byte(name))
		if errors.Is(err, broker.ErrUnknownTopic) && a.cfg.Forward != nil {
			return a.forward(r, name, m)
		}
		if err != nil {
			return "", fmt.Errorf("topic %q: %w", name, err)
		}
		from := t.Visit(publisherOf(r))
		err = publish(t, from, &at)
		if b, ok := r.Body.(*body); ok {
			b.advice = from.Advised()
		}
		from.Leave()
		if err == nil {
			err = t.Sync(at)
		}
		switch {
		case errors.Is(err, broker.ErrRetired):
			return a.forward(r, name, m)
		case !errors.Is(err, broker.ErrGone):
			return "OK", err
		}
	}
}

// forward publishes through the broker that has the topic.
func (a *API) forward(r *http.Request, name string, m pool.Message) (string, error) {
	if m.Batch != nil && m.Defer > 0 { // NSQ's protocol has no deferred batch
		return "", nsqhttp.BadRequest("INVALID_DEFER", "a batch for a topic on another broker cannot be deferred")
	}
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	line := a.cfg.Forward.Line(forward.Publisher{Identity: publisherOf(r), Host: host, Visits: true})
	defer line.Close()
	// The end of the request must not cancel a publish that was sent, because the answer would be
	// lost.
	if err := line.Begin(context.WithoutCancel(r.Context()), name, m).Wait(); err != nil {
		return "", pool.Fault(err)
	}
	return "OK", nil
}
