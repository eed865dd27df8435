package httpapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/wire"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Node is what /info and /stats say about this process. Immutable.
type Node struct {
	Version          string    `json:"version"`
	BroadcastAddress string    `json:"broadcast_address"`
	Hostname         string    `json:"hostname"`
	TCPPort          int       `json:"tcp_port"`
	HTTPPort         int       `json:"http_port"`
	StartTime        time.Time `json:"-"`
	BrokerID         string    `json:"broker_id"`
}

// Config of the API. Immutable.
type Config struct {
	Node   Node
	Limits wire.Limits
	// Managed says that the topics' limits come from the control plane, so that
	// nobody may set one here.
	Managed bool
	// BodyTimeout is how long a client may take to send a body; 0: for ever.
	BodyTimeout time.Duration
	// Agent returns the control-plane session's state; nil without one.
	Agent func() any
}

// API serves HTTP. Make it with New.
type API struct {
	cfg    Config
	broker *broker.Broker
	conns  *conn.Server
	stamps *hook.Stamper
	log    *slog.Logger
}

// New returns the handler of everything nsqd serves over HTTP.
func New(cfg Config, b *broker.Broker, conns *conn.Server, stamps *hook.Stamper, reg *prometheus.Registry, log *slog.Logger) http.Handler {
	a := &API{cfg: cfg, broker: b, conns: conns, stamps: stamps, log: log}
	reg.MustRegister(&collector{api: a})
	mux := http.NewServeMux()
	obs.Mount(mux, reg, a.state, nil)

	mux.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) { writeText(w, "OK") })
	mux.HandleFunc("GET /info", a.info)
	mux.HandleFunc("GET /stats", a.stats)
	mux.HandleFunc("POST /pub", a.do(a.pub))
	mux.HandleFunc("POST /mpub", a.do(a.mpub))
	mux.HandleFunc("POST /topic/create", a.do(a.createTopic))
	mux.HandleFunc("POST /topic/delete", a.do(a.deleteTopic))
	mux.HandleFunc("POST /topic/empty", a.do(onTopic(a, func(t *broker.Topic, _ *http.Request) error { t.Empty(); return nil })))
	mux.HandleFunc("POST /topic/pause", a.do(onTopic(a, func(t *broker.Topic, _ *http.Request) error { t.Pause(); return nil })))
	mux.HandleFunc("POST /topic/unpause", a.do(onTopic(a, func(t *broker.Topic, _ *http.Request) error { t.Unpause(); return nil })))
	mux.HandleFunc("POST /topic/limit", a.do(onTopic(a, a.limit)))
	mux.HandleFunc("POST /channel/create", a.do(onChannel(a, (*broker.Topic).CreateChannel)))
	mux.HandleFunc("POST /channel/delete", a.do(onChannel(a, (*broker.Topic).DeleteChannel)))
	mux.HandleFunc("POST /channel/empty", a.do(onChannel(a, (*broker.Topic).EmptyChannel)))
	mux.HandleFunc("POST /channel/pause", a.do(onChannel(a, (*broker.Topic).PauseChannel)))
	mux.HandleFunc("POST /channel/unpause", a.do(onChannel(a, (*broker.Topic).UnpauseChannel)))
	return mux
}

// fault is a refusal as NSQ's tools expect it: {"message": "CODE"}. Detail is
// ours, for people.
type fault struct {
	Status  int    `json:"-"`
	Message string `json:"message"`
	Detail  string `json:"detail,omitempty"`
}

func (f *fault) Error() string { return f.Message + ": " + f.Detail }

func badRequest(message, format string, args ...any) error {
	return &fault{Status: http.StatusBadRequest, Message: message, Detail: fmt.Sprintf(format, args...)}
}

// handler answers with a body on success; "" for none.
type handler func(*http.Request) (body string, err error)

func (a *API) do(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if a.cfg.BodyTimeout > 0 {
			// What has no such deadline (a recorder, in tests) needs none either.
			// The server sets its own before the next request.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(a.cfg.BodyTimeout))
		}
		body, err := h(r)
		if err != nil {
			writeFault(w, asFault(err))
			return
		}
		writeText(w, body)
	}
}

func asFault(err error) *fault {
	var f *fault
	var over *queue.OverLimitError
	switch {
	case errors.As(err, &f):
		return f
	case errors.Is(err, broker.ErrBadName):
		return &fault{http.StatusBadRequest, "INVALID_TOPIC", err.Error()}
	case errors.Is(err, broker.ErrUnknownTopic):
		return &fault{http.StatusNotFound, "TOPIC_NOT_FOUND", err.Error()}
	case errors.Is(err, broker.ErrUnknownChannel):
		return &fault{http.StatusNotFound, "CHANNEL_NOT_FOUND", err.Error()}
	case errors.As(err, &over):
		return &fault{http.StatusTooManyRequests, "RATE_LIMITED", err.Error()}
	case errors.Is(err, queue.ErrFull):
		return &fault{http.StatusServiceUnavailable, "QUEUE_FULL", err.Error()}
	case errors.Is(err, broker.ErrDraining), errors.Is(err, broker.ErrGone):
		return &fault{http.StatusServiceUnavailable, "EXITING", err.Error()}
	}
	return &fault{http.StatusInternalServerError, "INTERNAL_ERROR", err.Error()}
}

func writeFault(w http.ResponseWriter, f *fault) {
	setJSON(w)
	w.WriteHeader(f.Status)
	writeJSONBody(w, f)
}

func writeText(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, body) // the client is gone; there is nobody to tell
}

func writeJSON(w http.ResponseWriter, v any) {
	setJSON(w)
	writeJSONBody(w, v)
}

// setJSON sets the headers of a JSON body. NSQ's tools take the body out of a
// wrapping of before 1.0 unless they are told that there is none.
func setJSON(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
}

func writeJSONBody(w http.ResponseWriter, v any) {
	_ = json.NewEncoder(w).Encode(v) // likewise; the values are ours and encode
}

// topicName returns the request's topic, or the fault that it has none.
func topicName(r *http.Request) (string, error) {
	name := r.URL.Query().Get("topic")
	if name == "" {
		return "", badRequest("MISSING_ARG_TOPIC", "the query has no topic")
	}
	if !wire.ValidTopicName(name) {
		return "", badRequest("INVALID_TOPIC", "topic %q is not a valid name", name)
	}
	return name, nil
}

// onTopic is a handler of one existing topic.
func onTopic(a *API, do func(*broker.Topic, *http.Request) error) handler {
	return func(r *http.Request) (string, error) {
		name, err := topicName(r)
		if err != nil {
			return "", err
		}
		t, err := a.broker.Topic([]byte(name))
		if err != nil {
			return "", fmt.Errorf("topic %q: %w", name, err)
		}
		return "", do(t, r)
	}
}

// onChannel is a handler of one channel of an existing topic.
func onChannel(a *API, do func(*broker.Topic, string) error) handler {
	return onTopic(a, func(t *broker.Topic, r *http.Request) error {
		name := r.URL.Query().Get("channel")
		if name == "" {
			return badRequest("MISSING_ARG_CHANNEL", "the query has no channel")
		}
		if !wire.ValidChannelName(name) {
			return badRequest("INVALID_CHANNEL", "channel %q is not a valid name", name)
		}
		return do(t, name)
	})
}

func (a *API) createTopic(r *http.Request) (string, error) {
	name, err := topicName(r)
	if err != nil {
		return "", err
	}
	if a.cfg.Managed {
		return "", &fault{http.StatusForbidden, "MANAGED", "topics of this broker are created through the loaddistributor"}
	}
	_, err = a.broker.CreateTopic(name)
	return "", err
}

func (a *API) deleteTopic(r *http.Request) (string, error) {
	name, err := topicName(r)
	if err != nil {
		return "", err
	}
	if a.cfg.Managed {
		return "", &fault{http.StatusForbidden, "MANAGED", "topics of this broker are deleted through the loaddistributor"}
	}
	if err := a.broker.DeleteTopic(name); err != nil {
		return "", fmt.Errorf("topic %q: %w", name, err)
	}
	return "", nil
}

// limit sets a standalone broker's contract for a topic: rate (msg/s, up to
// three decimals), burst (messages), policy (delay or reject, default delay).
func (a *API) limit(t *broker.Topic, r *http.Request) error {
	if a.cfg.Managed {
		return &fault{http.StatusForbidden, "MANAGED", "contracts of this broker are given by the loaddistributor"}
	}
	q := r.URL.Query()
	rate, err := strconv.ParseFloat(q.Get("rate"), 64)
	if err != nil {
		return badRequest("INVALID_RATE", "rate %q is not a number of messages per second", q.Get("rate"))
	}
	burst, err := strconv.ParseInt(q.Get("burst"), 10, 64)
	if err != nil {
		return badRequest("INVALID_BURST", "burst %q is not a number of messages", q.Get("burst"))
	}
	policy := q.Get("policy")
	if policy != "" && policy != "delay" && policy != "reject" {
		return badRequest("INVALID_POLICY", "policy %q is neither delay nor reject", policy)
	}
	share := tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: burst}
	if err := share.Validate(); err != nil {
		return badRequest("INVALID_LIMIT", "%v", err)
	}
	if share.IsZero() {
		return badRequest("INVALID_LIMIT", "a rate and a burst of 0 would stop the topic")
	}
	t.Contract(share, policy == "reject")
	return nil
}

// pub takes the body as one message; defer=<ms> defers it.
func (a *API) pub(r *http.Request) (string, error) {
	name, err := topicName(r)
	if err != nil {
		return "", err
	}
	var delay time.Duration
	if d := r.URL.Query().Get("defer"); d != "" {
		ms, err := strconv.ParseInt(d, 10, 64)
		most := cmp.Or(a.cfg.Limits.MaxDeferTimeout, a.cfg.Limits.MaxReqTimeout).Milliseconds()
		if err != nil || ms < 0 || ms > most {
			return "", badRequest("INVALID_DEFER", "defer %q is outside [0, %d] ms", d, most)
		}
		delay = time.Duration(ms) * time.Millisecond
	}
	body, err := readBody(r, a.cfg.Limits.MaxMessageSize, "MSG_TOO_BIG")
	if err != nil {
		return "", err
	}
	if len(body) == 0 {
		return "", badRequest("MSG_EMPTY", "the message has no body")
	}
	arrival := stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
	return "OK", a.publish(name, func(t *broker.Topic) error {
		return t.Publish(arrival.At, clock.Wall(), broker.Published{Body: body, Arrival: arrival, Defer: delay})
	})
}

// publish has do publish to the topic of that name; again if it was deleted
// since it was looked up.
func (a *API) publish(name string, do func(*broker.Topic) error) error {
	for {
		t, err := a.broker.TopicForClient([]byte(name))
		if err != nil {
			return fmt.Errorf("topic %q: %w", name, err)
		}
		if err := do(t); !errors.Is(err, broker.ErrGone) {
			return err
		}
	}
}

// mpub takes one message a line, or with binary=true the body of an MPUB.
func (a *API) mpub(r *http.Request) (string, error) {
	name, err := topicName(r)
	if err != nil {
		return "", err
	}
	body, err := readBody(r, a.cfg.Limits.MaxBodySize, "BODY_TOO_BIG")
	if err != nil {
		return "", err
	}
	var batch broker.Bodies
	switch binary := r.URL.Query().Get("binary"); binary {
	case "true", "1":
		batch, err = wire.ParseBatch(body, a.cfg.Limits.MaxMessageSize)
	case "", "false", "0":
		batch, err = splitLines(body, a.cfg.Limits.MaxMessageSize)
	default:
		return "", badRequest("INVALID_BINARY", "binary %q is neither true nor false", binary)
	}
	if err != nil {
		return "", badRequest("INVALID_BODY", "%v", err)
	}
	arrival := stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
	return "OK", a.publish(name, func(t *broker.Topic) error {
		return t.PublishBatch(arrival.At, clock.Wall(), arrival, batch)
	})
}

// readBody reads at most limit bytes of a request's body.
func readBody(r *http.Request, limit int, tooBig string) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, int64(limit)+1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, &fault{http.StatusRequestTimeout, "BODY_TIMEOUT", fmt.Sprintf("%d bytes came in time", len(body))}
	}
	if err != nil {
		return nil, badRequest("BODY_UNREADABLE", "%v", err)
	}
	if len(body) > limit {
		return nil, &fault{http.StatusRequestEntityTooLarge, tooBig, fmt.Sprintf("more than %d bytes", limit)}
	}
	return body, nil
}

// lines are the messages of a text body: a view, since lines of one byte listed
// apart would take many times the body.
type lines struct {
	body []byte
	n    int // lines that are not empty
}

func (l lines) Len() int { return l.n }

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
		}
		if len(line) > maxMessage {
			return lines{}, fmt.Errorf("message %d of %d bytes is longer than %d", l.n, len(line), maxMessage)
		}
	}
	if l.n == 0 {
		return lines{}, errors.New("no message in the body")
	}
	return l, nil
}

// TLSRequired answers every request with 403 and the port to use instead. It
// is served in the clear where that is not allowed.
func TLSRequired(httpsPort int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.WriteHeader(http.StatusForbidden)
		writeJSONBody(w, struct {
			Message string `json:"message"`
			Port    int    `json:"https_port"`
		}{"TLS_REQUIRED", httpsPort})
	})
}
