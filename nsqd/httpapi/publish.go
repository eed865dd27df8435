package httpapi

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// delay returns what defer=<ms> asks for; 0 without.
func (a *API) delay(q url.Values) (time.Duration, error) {
	if !q.Has("defer") {
		return 0, nil
	}
	most := a.cfg.Session.Limits.MaxDefer().Milliseconds()
	ms, err := strconv.ParseInt(q.Get("defer"), 10, 64)
	if err != nil || ms < 0 || ms > most {
		return 0, badRequest("INVALID_DEFER", "defer %q is not a number of milliseconds in [0, %d]", q.Get("defer"), most)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// pub takes the body as one message; defer=<ms> defers it.
func (a *API) pub(r *http.Request) (string, error) {
	q := r.URL.Query()
	body, err := readBody(r, a.cfg.Session.Limits.MaxMessageSize, "MSG_TOO_BIG")
	if err != nil {
		return "", err
	}
	if len(body) == 0 {
		return "", badRequest("MSG_EMPTY", "the message has no body")
	}
	name, err := topicArgument(q, "INVALID_TOPIC")
	if err != nil {
		return "", err
	}
	wait, err := a.delay(q)
	if err != nil {
		return "", err
	}
	if err := a.charge(r, 1); err != nil {
		return "", err
	}
	arrival := a.stamps.Now()
	return a.publish(name, func(t *broker.Topic, at *broker.Stored) error {
		return t.Publish(arrival.At, clock.Wall(), broker.Published{Body: body, Arrival: arrival, Defer: wait, Stored: at})
	})
}

// mpub takes one message a line, or with binary=true the body of an MPUB.
func (a *API) mpub(r *http.Request) (string, error) {
	q := r.URL.Query()
	limits := a.cfg.Session.Limits
	body, err := readBody(r, limits.MaxBodySize, "BODY_TOO_BIG")
	if err != nil {
		return "", err
	}
	name, err := topicArgument(q, "INVALID_TOPIC")
	if err != nil {
		return "", err
	}
	wait, err := a.delay(q)
	if err != nil {
		return "", err
	}
	var batch broker.Bodies
	switch binary := q.Get("binary"); binary {
	case "true", "1":
		batch, err = binaryBatch(body, limits)
	case "", "false", "0":
		batch, err = splitLines(body, limits.MaxMessageSize)
	default:
		return "", badRequest("INVALID_BINARY", "binary %q is neither true nor false", binary)
	}
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
	return a.publish(name, func(t *broker.Topic, at *broker.Stored) error {
		return t.PublishBatch(arrival.At, clock.Wall(), broker.Published{Arrival: arrival, Defer: wait, Stored: at}, batch)
	})
}

// publish finds or creates the topic and puts something into it, looking again
// if the topic was deleted in between.
func (a *API) publish(name string, put func(*broker.Topic, *broker.Stored) error) (string, error) {
	var at broker.Stored
	for {
		t, err := a.broker.TopicForClient([]byte(name))
		if err != nil {
			return "", fmt.Errorf("topic %q: %w", name, err)
		}
		err = put(t, &at)
		if err == nil {
			err = t.Sync(at)
		}
		if !errors.Is(err, broker.ErrGone) {
			return "OK", err
		}
	}
}

// readBody reads at most limit bytes of a request's body.
func readBody(r *http.Request, limit int, tooBig string) ([]byte, error) {
	if r.ContentLength > int64(limit) {
		return nil, tooLarge(tooBig, "%d bytes are more than %d", r.ContentLength, limit)
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, int64(limit)+1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, refuse(http.StatusRequestTimeout, "BODY_TIMEOUT", "%d bytes came in time", len(body))
	}
	if errors.Is(err, errBodies) {
		return nil, err
	}
	if err != nil {
		return nil, badRequest("BODY_UNREADABLE", "%v", err)
	}
	if len(body) > limit {
		return nil, tooLarge(tooBig, "more than %d bytes", limit)
	}
	return body, nil
}

// binaryBatch reads the body of an MPUB. The code of a refusal is that in TCP.
func binaryBatch(body []byte, limits wire.Limits) (wire.Batch, error) {
	batch, err := wire.ParseBatch(body, limits)
	var fault *wire.Error
	if errors.As(err, &fault) {
		return batch, tooLarge(strings.TrimPrefix(string(fault.Code), "E_"), "%s", fault.Text)
	}
	return batch, nil
}

// lines are the messages of a text body: a view, since lines of one byte listed
// apart would take many times the body.
type lines struct {
	body  []byte
	n     int // lines that are not empty
	bytes int // of them
}

func (l lines) Len() int { return l.n }

func (l lines) Bytes() int { return l.bytes }

func (l lines) Each(f func(body []byte)) {
	for rest := l.body; len(rest) > 0; {
		var line []byte
		if line, rest, _ = bytes.Cut(rest, newline); len(line) > 0 {
			f(line)
		}
	}
}

var newline = []byte{'\n'}

// splitLines takes each line that is not empty as a message.
func splitLines(body []byte, maxMessage int) (lines, error) {
	l := lines{body: body}
	for rest := body; len(rest) > 0; {
		var line []byte
		if line, rest, _ = bytes.Cut(rest, newline); len(line) > 0 {
			l.n++
			l.bytes += len(line)
		}
		if len(line) > maxMessage {
			return lines{}, tooLarge("MSG_TOO_BIG", "message %d of %d bytes is longer than %d", l.n, len(line), maxMessage)
		}
	}
	return l, nil
}
