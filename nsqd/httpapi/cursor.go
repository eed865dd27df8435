package httpapi

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// retainTopic sets a topic's own retention. ?retain= has the format of --retain.
func (a *API) retainTopic(r *http.Request) (string, error) {
	q := r.URL.Query()
	text, err := nsqhttp.Argument(q, "retain", "MISSING_ARG_RETAIN")
	if err != nil {
		return "", err
	}
	retain, err := metadata.ParseRetention(text)
	if err != nil {
		return "", nsqhttp.BadRequest("INVALID_RETAIN", "%v", err)
	}
	return "", a.setRetention(q, &retain)
}

// unretainTopic makes a topic use the broker's retention again.
func (a *API) unretainTopic(r *http.Request) (string, error) {
	return "", a.setRetention(r.URL.Query(), nil)
}

func (a *API) setRetention(q url.Values, r *metadata.Retention) error {
	t, err := a.named(q)
	if err != nil {
		return err
	}
	return t.Retain(r)
}

// place parses the target of a seek.
func place(q url.Values) (p broker.Place, err error) {
	text, err := nsqhttp.Argument(q, "to", "MISSING_ARG_TO")
	if err != nil {
		return p, err
	}
	switch text {
	case "begin":
		p.Begin = true
		return p, nil
	case "end":
		p.End = true
		return p, nil
	}
	if p.Offset, err = strconv.ParseUint(text, 10, 64); err == nil {
		return p, nil
	}
	since, err := time.Parse(time.RFC3339Nano, text)
	if err != nil || since.Year() < 1970 || since.Year() > 2200 {
		return p, nsqhttp.BadRequest("INVALID_TO", "to=%.100q is none of begin, end, an offset, and a time such as 2026-01-02T15:04:05Z", text)
	}
	p.Time = max(1, mono.Wall(since.UnixNano()))
	return p, nil
}

// seekChannel moves a channel's cursor and returns the new offset.
func (a *API) seekChannel(r *http.Request) (string, error) {
	target, err := place(r.URL.Query())
	if err != nil {
		return "", err
	}
	var at uint64
	_, err = a.onChannel(func(t *broker.Topic, channel string) (err error) {
		at, err = t.Seek(channel, target)
		return err
	})(r)
	if err != nil {
		return "", err
	}
	return `{"offset":` + strconv.FormatUint(at, 10) + "}\n", nil
}

type peekedJSON struct {
	ID        string `json:"id"`
	Offset    uint64 `json:"offset"`
	Timestamp int64  `json:"timestamp"` // time of publication, Unix ns
	Attempts  uint16 `json:"attempts"`  // deliveries so far
	Body      []byte `json:"body"`      // base64
}

// peekChannel returns the next messages of a channel without delivering them.
func (a *API) peekChannel(r *http.Request) (string, error) {
	count := 10
	if text := r.URL.Query().Get("count"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > broker.MaxPeek {
			return "", nsqhttp.BadRequest("INVALID_COUNT", "count=%.100q is not a number in 1 to %d", text, broker.MaxPeek)
		}
		count = n
	}
	peeked := []peekedJSON{}
	_, err := a.onChannel(func(t *broker.Topic, channel string) error {
		messages, err := t.Peek(channel, count)
		for _, m := range messages {
			peeked = append(peeked, peekedJSON{string(m.ID[:]), m.Offset, int64(m.Timestamp), m.Attempts, m.Body})
		}
		return err
	})(r)
	if err != nil {
		return "", err
	}
	b, err := json.Marshal(map[string]any{"messages": peeked})
	return string(b) + "\n", err
}
