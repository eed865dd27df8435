package httpapi

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// pub takes the body as one message.
func (a *API) pub(r *http.Request) (string, error) {
	name, body, wait, err := nsqhttp.ReadPub(r, a.cfg.Session.Limits)
	if err != nil {
		return "", err
	}
	if err := a.charge(r, 1); err != nil {
		return "", err
	}
	arrival := a.stamps.Now()
	return a.publish(r, name, func(t *broker.Topic, from *broker.Publisher, at *broker.Stored) error {
		return t.Publish(arrival.At, clock.Wall(), broker.Published{Body: body, Arrival: arrival, Defer: wait, From: from, Stored: at})
	})
}

// mpub takes the body as a batch.
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
	return a.publish(r, name, func(t *broker.Topic, from *broker.Publisher, at *broker.Stored) error {
		return t.PublishBatch(arrival.At, clock.Wall(), broker.Published{Arrival: arrival, Defer: wait, From: from, Stored: at}, batch)
	})
}

// publish finds or creates the topic and puts something into it, looking again
// if the topic was deleted in between.
func (a *API) publish(r *http.Request, name string, put func(*broker.Topic, *broker.Publisher, *broker.Stored) error) (string, error) {
	var at broker.Stored
	for {
		t, err := a.broker.TopicForClient([]byte(name))
		if err != nil {
			return "", fmt.Errorf("topic %q: %w", name, err)
		}
		from := t.Visit(publisherOf(r))
		err = put(t, from, &at)
		if b, ok := r.Body.(*body); ok {
			b.told = from.Told()
		}
		from.Leave()
		if err == nil {
			err = t.Sync(at)
		}
		if !errors.Is(err, broker.ErrGone) {
			return "OK", err
		}
	}
}
