// Package httpapi is nsqd's HTTP API: NSQ's API, SRTM's additions, and stats for operators. The
// package checks requests, and the broker carries them out. Only this package knows the answers
// that NSQ's tools expect.
//
// api.go has the routes, access.go the access checks, publish.go and manage.go the requests that
// change something, stats.go and text.go the stats.
package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/lookupd"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Node describes this process. Immutable.
type Node struct {
	Version          string    `json:"version"` // NSQ version, on which clients and NSQ's tools base decisions
	Release          string    `json:"release"` // SRTM version, for people
	BroadcastAddress string    `json:"broadcast_address"`
	Hostname         string    `json:"hostname"`
	BrokerID         string    `json:"broker_id"`
	StartTime        time.Time `json:"-"`

	// Ports on which this process listens; -1 if it does not listen on a port.
	TCPPort  int `json:"tcp_port"`
	HTTPPort int `json:"http_port"`
	// Ports that other processes dial.
	BroadcastTCPPort  int `json:"-"`
	BroadcastHTTPPort int `json:"-"`
}

// Setting is an option that may change while the process runs.
type Setting struct {
	Get func() any
	// Set parses and applies a value. On an error it changes nothing. Nil: the setting is
	// read-only.
	Set func(value []byte) error
}

// Config is the configuration of the API. Immutable.
type Config struct {
	Node Node
	// Session has the limits for requests and clients.
	Session *session.Config
	// Tokens authenticate administrators (role Admin). With nil, administrative requests need no
	// token, but only callers on this host may change a contract.
	Tokens *secure.Tokens
	// Managed means that the control plane sets the topics' limits, so the API must not.
	Managed bool
	// Forward forwards publishes to topics on other brokers. Nil refuses such publishes.
	Forward *forward.Forwarder
	// ChangeChannel makes the control plane change a durable channel on all brokers of its topic.
	// It returns once the connected brokers have made the change. Nil: no control plane. Errors:
	//   - ErrControl: unknown whether the change was made;
	//   - ErrUnmanaged: the topic is on this broker alone;
	//   - broker.ErrUnknownChannel: the topic has no such channel.
	ChangeChannel func(ctx context.Context, topic, channel string, change ChannelChange) error
	// Agent returns the state of the control-plane session. Nil: no control plane.
	Agent func() any
	// Control returns an obs.Notice while the control plane does not answer. Nil: no control plane.
	Control func() error
	// TopologyAware means that consumers have distances, and deliveries are counted by distance.
	TopologyAware bool
	// Percentiles are the percentiles of end-to-end latency to show, in (0, 1].
	Percentiles []float64
	// Lookupds returns the state of the nsqlookupd connections.
	Lookupds func() []lookupd.State
	// Auth returns the number of auth requests by result. Nil: no auth servers.
	Auth func() map[string]uint64
	// Authorise decides what a publisher may do. Nil: every client may publish.
	Authorise func(context.Context, auth.Query) (*auth.Grant, error)
	// Admission decides on publishes, with the key tenant/T/http for the caller's tenant T. T is
	// empty for a caller without a tenant. Nil: no limit.
	Admission interface {
		Ask(ctx context.Context, key string, cost uint32) client.Decision
	}
	Settings map[string]Setting
	// MaxSeries limits the number of topics and channels with metrics of their own, in the order of
	// names; 0: no limit.
	MaxSeries int
	// MaxBodies limits the memory of all request bodies, in bytes, and separately the memory of
	// answers that list topics or messages; 0: no limit.
	MaxBodies int64
	// Connections returns the numbers of open and of refused HTTP connections.
	Connections func() (open int64, refused uint64)
}

// Flags defines the flag of metrics.
func (c *Config) Flags(fs *flag.FlagSet) {
	fs.IntVar(&c.MaxSeries, "max-series", 5000, "how many `topics` and channels, in the order of their names, have metrics of their own in /metrics, 0: all; a topic has about 90 lines, a channel 11")
}

// CheckFlags returns the problem of the flag's value.
func (c *Config) CheckFlags() error {
	if c.MaxSeries < 0 {
		return fmt.Errorf("--max-series %d is negative", c.MaxSeries)
	}
	return nil
}

// API serves HTTP. Create it with New.
type API struct {
	// Set once.
	cfg      Config
	broker   *broker.Broker
	conns    *conn.Server
	stamps   *hook.Stamper
	log      *slog.Logger
	faults   *slog.Logger // log for events that any client can cause, rate-limited
	audit    *secure.Auditor
	routes   map[string]methods // by path
	operator *http.ServeMux     // endpoints that every SRTM daemon serves

	bodies     nsqhttp.Bodies
	answers    answers
	statistics statistics
}

type methods map[string]http.HandlerFunc

// New returns the handler for all of nsqd's HTTP requests.
func New(cfg Config, b *broker.Broker, conns *conn.Server, stamps *hook.Stamper, reg *prometheus.Registry, log *slog.Logger) *API {
	a := &API{cfg: cfg, broker: b, conns: conns, stamps: stamps, log: log, operator: http.NewServeMux()}
	a.statistics = statistics{&a.cfg, b, conns}
	a.bodies.Limit = cfg.MaxBodies
	a.answers.limit, a.answers.slots = cfg.MaxBodies, make(chan struct{}, maxListings)
	a.faults, _ = obs.Sparse(log)
	a.audit = secure.NewAuditor(log, cfg.Tokens != nil)
	reg.MustRegister(&collector{cfg: &a.cfg, broker: b, conns: conns, stamps: stamps, bodies: &a.bodies, answers: &a.answers})
	obs.Mount(a.operator, reg, a.state, a.healthz)
	get := func(h http.HandlerFunc) methods { return methods{http.MethodGet: h} }
	post := func(h handler) methods { return methods{http.MethodPost: a.do(h)} }
	a.routes = map[string]methods{
		"/ping":  get(a.ping),
		"/info":  get(a.info),
		"/stats": get(a.answers.bounded(a.stats)),

		"/pub":  post(a.permitted(a.pub)),
		"/mpub": post(a.permitted(a.mpub)),

		"/topic/create":  post(a.createTopic),
		"/topic/delete":  post(a.deleteTopic),
		"/topic/empty":   post(a.emptyTopic),
		"/topic/pause":   post(a.onTopic((*broker.Topic).Pause)),
		"/topic/unpause": post(a.onTopic((*broker.Topic).Unpause)),
		"/topic/limit":   {http.MethodPost: a.do(a.limitTopic), http.MethodDelete: a.do(a.unlimitTopic)},

		"/topic/retain": {http.MethodPost: a.do(a.retainTopic), http.MethodDelete: a.do(a.unretainTopic)},

		"/topic/expiry":   {http.MethodPost: a.do(a.expireTopic), http.MethodDelete: a.do(a.unexpireTopic)},
		"/channel/expiry": {http.MethodPost: a.do(a.expireChannel), http.MethodDelete: a.do(a.unexpireChannel)},

		"/channel/create":  post(a.onChannel((*broker.Topic).CreateChannel)),
		"/channel/delete":  post(a.onChannels(DeleteChannel, (*broker.Topic).DeleteChannel)),
		"/channel/empty":   post(a.onChannel((*broker.Topic).EmptyChannel)),
		"/channel/pause":   post(a.onChannels(PauseChannel, (*broker.Topic).PauseChannel)),
		"/channel/unpause": post(a.onChannels(UnpauseChannel, (*broker.Topic).UnpauseChannel)),

		"/channel/seek": post(a.seekChannel),
		"/channel/peek": get(a.answers.bounded(a.do(a.peekChannel))),

		"/debug/freememory":   post(freeMemory),
		"/debug/setblockrate": {http.MethodPut: a.do(setBlockRate)},
	}
	for name := range maps.Keys(cfg.Settings) {
		a.routes["/config/"+name] = methods{http.MethodGet: a.getSetting(name), http.MethodPut: a.putSetting(name)}
	}
	return a
}

// ServeHTTP implements http.Handler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.serve(w, r, false) }

// serve answers a request. public means that there is another listener for administrators.
func (a *API) serve(w http.ResponseWriter, r *http.Request, public bool) {
	w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
	if !administrative(r) {
		a.route(w, r)
		return
	}
	answer := http.HandlerFunc(a.route)
	f := a.forbidden(r, public)
	if f != nil {
		answer = func(w http.ResponseWriter, _ *http.Request) { f.Write(w) }
	}
	if strings.HasPrefix(r.URL.Path, "/debug/") {
		answer(w, r)
		return
	}
	a.audit.HTTP(w, r, f != nil, answer)
}

// route answers a request after the access check.
func (a *API) route(w http.ResponseWriter, r *http.Request) {
	route, ok := a.routes[r.URL.Path]
	if !ok && strings.HasPrefix(r.URL.Path, "/config/") {
		route = methods{http.MethodGet: unknownOption, http.MethodPut: unknownOption}
		ok = true
	}
	if !ok {
		if _, pattern := a.operator.Handler(r); pattern != "" {
			h := http.HandlerFunc(a.operator.ServeHTTP)
			if r.URL.Path == "/metrics" || r.URL.Path == "/debug/state" {
				h = a.answers.bounded(h)
			}
			h(w, r)
			return
		}
		(&fault{Status: http.StatusNotFound, Message: "NOT_FOUND"}).Write(w)
		return
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	if h := route[method]; h != nil {
		h(w, r)
		return
	}
	w.Header().Set("Allow", strings.Join(append(slices.Sorted(maps.Keys(route)), http.MethodOptions), ", "))
	if method != http.MethodOptions {
		(&fault{Status: http.StatusMethodNotAllowed, Message: "METHOD_NOT_ALLOWED"}).Write(w)
	}
}

type fault = nsqhttp.Fault

// handler returns the body of a successful answer; "" for none.
type handler func(*http.Request) (body string, err error)

func (a *API) do(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		counted := &body{Body: a.bodies.Hold(r.Body)}
		defer counted.Release()
		r.Body = counted
		body, err := h(r)
		setAdvice(w.Header(), counted.advice)
		if err != nil {
			asFault(err).Write(w)
			return
		}
		nsqhttp.WriteText(w, body)
	}
}

type body struct {
	*nsqhttp.Body

	// Of a publish: the publisher's identity from the auth servers, and its advised rate.
	identity string
	advice   broker.Advised
}

// refusals translate the broker's errors to HTTP. The first match applies.
var refusals = []struct {
	err    error
	status int
	code   string
}{
	{broker.ErrBadName, http.StatusBadRequest, "INVALID_TOPIC"},
	{broker.ErrUnknownTopic, http.StatusNotFound, "TOPIC_NOT_FOUND"},
	{broker.ErrGone, http.StatusNotFound, "TOPIC_NOT_FOUND"},
	{broker.ErrUnknownChannel, http.StatusNotFound, "CHANNEL_NOT_FOUND"},
	{queue.ErrNoCursor, http.StatusBadRequest, "NO_CURSOR"},
	{broker.ErrSeek, http.StatusBadRequest, "INVALID_TO"},
	{broker.ErrTooManyTopics, http.StatusServiceUnavailable, "TOO_MANY_TOPICS"},
	{broker.ErrTooManyChannels, http.StatusServiceUnavailable, "TOO_MANY_CHANNELS"},
	{broker.ErrStorage, http.StatusServiceUnavailable, "STORAGE_FAILED"},
	{queue.ErrFull, http.StatusServiceUnavailable, "QUEUE_FULL"},
	{broker.ErrDraining, http.StatusServiceUnavailable, "EXITING"},
	{ErrControl, http.StatusServiceUnavailable, "CONTROL_PLANE_FAILED"},
}

// hints say what to do about a refusal, by code.
var hints = map[string]string{
	"TOPIC_NOT_FOUND":   "GET /stats lists the topics here; POST /topic/create?topic=NAME creates one on a broker of no cluster, srtm topic create in a cluster",
	"CHANNEL_NOT_FOUND": "GET /stats lists the channels; POST /channel/create?topic=NAME&channel=NAME creates one",
}

func asFault(err error) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	if _, ok := errors.AsType[*queue.OverLimitError](err); ok {
		return &fault{Status: http.StatusTooManyRequests, Message: "RATE_LIMITED", Detail: err.Error()}
	}
	for _, r := range refusals {
		if errors.Is(err, r.err) {
			detail := err.Error()
			if hint := hints[r.code]; hint != "" {
				detail += "; " + hint
			}
			return &fault{Status: r.status, Message: r.code, Detail: detail}
		}
	}
	return &fault{Status: http.StatusInternalServerError, Message: "INTERNAL_ERROR", Detail: err.Error()}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	writeJSONBody(w, v)
}

func writeJSONBody(w http.ResponseWriter, v any) {
	_ = json.NewEncoder(w).Encode(v) // an error means that the client is gone; our values always encode
}

// TLSRequired answers every request with 403 and the HTTPS port. It serves the plain-text port of a
// broker that requires TLS.
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

func (a *API) getSetting(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { writeSetting(w, a.cfg.Settings[name].Get()) }
}

// maxSetting limits a setting's value, in bytes.
const maxSetting = 64 << 10

func (a *API) putSetting(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := nsqhttp.ReadBody(r, maxSetting, "INVALID_VALUE")
		set := a.cfg.Settings[name].Set
		if set == nil {
			err = nsqhttp.BadRequest("INVALID_OPTION", "%s cannot be changed", name)
		}
		if err == nil && len(body) == 0 {
			err = nsqhttp.TooLarge("INVALID_VALUE", "%s: there is no value", name) // the same code as in NSQ
		}
		if err == nil {
			if err = set(body); err != nil {
				err = nsqhttp.BadRequest("INVALID_VALUE", "%s: %v", name, err)
			}
		}
		if err != nil {
			asFault(err).Write(w)
			return
		}
		a.log.Info("setting changed", obs.KeyName, name, "value", string(body))
		writeSetting(w, a.cfg.Settings[name].Get())
	}
}

// writeSetting writes a string as text and other values as JSON.
func writeSetting(w http.ResponseWriter, v any) {
	if text, ok := v.(string); ok {
		nsqhttp.WriteText(w, text)
		return
	}
	writeJSON(w, v)
}

func unknownOption(w http.ResponseWriter, r *http.Request) {
	asFault(nsqhttp.BadRequest("INVALID_OPTION", "%q is not an option that can be looked at here", strings.TrimPrefix(r.URL.Path, "/config/"))).Write(w)
}

// freeMemory returns unused memory to the system.
func freeMemory(*http.Request) (string, error) {
	debug.FreeOSMemory()
	return "OK", nil
}

// setBlockRate sets the sampling rate of the block profile.
func setBlockRate(r *http.Request) (string, error) {
	rate, err := strconv.Atoi(r.URL.Query().Get("rate"))
	if err != nil {
		return "", nsqhttp.BadRequest("INVALID_RATE", "rate %q is not a number", r.URL.Query().Get("rate"))
	}
	runtime.SetBlockProfileRate(rate)
	return "OK", nil
}
