package httpapi

import (
	"context"
	"encoding/json"
	"errors"
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
	"github.com/srtm-io/srtm/internal/nsqhttp"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/lookupd"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Node is what this process says of itself. Immutable.
type Node struct {
	Version          string    `json:"version"` // that clients and NSQ's tools decide by
	Release          string    `json:"release"` // SRTM's own, for people
	BroadcastAddress string    `json:"broadcast_address"`
	Hostname         string    `json:"hostname"`
	BrokerID         string    `json:"broker_id"`
	StartTime        time.Time `json:"-"`

	// Where it listens; -1 where that is no port.
	TCPPort  int `json:"tcp_port"`
	HTTPPort int `json:"http_port"`
	// What others are told to dial.
	BroadcastTCPPort  int `json:"-"`
	BroadcastHTTPPort int `json:"-"`
}

// Setting is an option that may change while the process runs.
type Setting struct {
	Get func() any
	// Set takes the value as it is in the request, or says what is wrong with it
	// and changes nothing. Nil: it can only be looked at.
	Set func(value []byte) error
}

// Config of the API. Immutable.
type Config struct {
	Node Node
	// Session has the limits that requests and clients are held to.
	Session *session.Config
	// Tokens: callers of what is administrative must show one with the role Admin.
	// Nil: not needed, but what changes a contract takes a caller on this host.
	Tokens *secure.Tokens
	// Managed says that the topics' limits come from the control plane, so that
	// none may be set here.
	Managed bool
	// Forward publishes what is for topics on other brokers; nil: that is refused.
	Forward *forward.Forwarder
	// ChangeChannel has the control plane change a durable channel on all brokers of its topic,
	// and returns when the connected ones have. ErrControl: that is not known. ErrUnmanaged: the
	// topic is this broker's alone. broker.ErrUnknownChannel: the topic has no such channel.
	// Nil: without a control plane.
	ChangeChannel func(ctx context.Context, topic, channel string, change ChannelChange) error
	// Agent returns the control-plane session's state; nil without one.
	Agent func() any
	// TopologyAware says that consumers have distances, so that deliveries are counted by them.
	TopologyAware bool
	// Percentiles of the end-to-end latencies to show, in (0, 1].
	Percentiles []float64
	// Lookupds returns the nsqlookupd daemons that are kept informed.
	Lookupds func() []lookupd.State
	// Auth returns how questions to auth servers ended, by name; nil without any.
	Auth func() map[string]uint64
	// Authorise says what a publisher may do; nil: every client may.
	Authorise func(context.Context, auth.Query) (*auth.Grant, error)
	// Admission is asked for tenant/T/http before what the caller's tenant T publishes,
	// with T empty for a caller without; nil: no caller is limited.
	Admission interface {
		Ask(ctx context.Context, key string, cost uint32) client.Decision
	}
	// Settings by name.
	Settings map[string]Setting
	// MaxSeries is how many topics and channels, together and by name, have metrics of
	// their own; 0: all.
	MaxSeries int
	// MaxBodies is how many bytes the bodies of all requests may take in memory, and how
	// many the answers that list all topics, or messages; 0: there is no bound.
	MaxBodies int64
	// Connections returns how many there are for HTTP, and how many were refused.
	Connections func() (open int64, refused uint64)
}

// API serves HTTP. Make it with New.
type API struct {
	// Set once.
	cfg      Config
	broker   *broker.Broker
	conns    *conn.Server
	stamps   *hook.Stamper
	log      *slog.Logger
	faults   *slog.Logger // log, of what any client can cause
	audit    *secure.Auditor
	routes   map[string]methods // by path
	operator *http.ServeMux     // what every daemon of ours serves

	bodies  nsqhttp.Bodies
	answers answers
}

type methods map[string]http.HandlerFunc

// New returns the handler of everything nsqd serves over HTTP.
func New(cfg Config, b *broker.Broker, conns *conn.Server, stamps *hook.Stamper, reg *prometheus.Registry, log *slog.Logger) *API {
	a := &API{cfg: cfg, broker: b, conns: conns, stamps: stamps, log: log, operator: http.NewServeMux()}
	a.bodies.Limit = cfg.MaxBodies
	a.answers.limit, a.answers.slots = cfg.MaxBodies, make(chan struct{}, making)
	a.faults, _ = obs.Sparse(log)
	a.audit = secure.NewAuditor(log, cfg.Tokens != nil)
	reg.MustRegister(&collector{cfg: &a.cfg, broker: b, conns: conns, stamps: stamps, bodies: &a.bodies, answers: &a.answers})
	obs.Mount(a.operator, reg, a.state, b.Health)
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
		"/topic/pause":   post(a.unmanaged(pauseChannels, a.onTopic((*broker.Topic).Pause))),
		"/topic/unpause": post(a.unmanaged(pauseChannels, a.onTopic((*broker.Topic).Unpause))),
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

// serve answers at an address that is public, beside one for administrators, or not.
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

// route answers a request that the caller may make.
func (a *API) route(w http.ResponseWriter, r *http.Request) {
	known, ok := a.routes[r.URL.Path]
	if !ok && strings.HasPrefix(r.URL.Path, "/config/") {
		known = methods{http.MethodGet: unknownOption, http.MethodPut: unknownOption}
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
	if h := known[method]; h != nil {
		h(w, r)
		return
	}
	w.Header().Set("Allow", strings.Join(append(slices.Sorted(maps.Keys(known)), http.MethodOptions), ", "))
	if method != http.MethodOptions {
		(&fault{Status: http.StatusMethodNotAllowed, Message: "METHOD_NOT_ALLOWED"}).Write(w)
	}
}

type fault = nsqhttp.Fault

// handler answers with a body on success; "" for none.
type handler func(*http.Request) (body string, err error)

func (a *API) do(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		counted := &body{Body: a.bodies.Hold(r.Body)}
		defer counted.Release()
		r.Body = counted
		body, err := h(r)
		tell(w.Header(), counted.told)
		if err != nil {
			asFault(err).Write(w)
			return
		}
		nsqhttp.WriteText(w, body)
	}
}

// body is a request's.
type body struct {
	*nsqhttp.Body

	// Of a publish: whom auth servers say the publisher is, and what it is told.
	identity string
	told     broker.Told
}

// refusals are what the broker's errors are over HTTP; the first that fits stands.
var refusals = []struct {
	is     error
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

// hints are what to do about refusals, by their code.
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
		if errors.Is(err, r.is) {
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
	_ = json.NewEncoder(w).Encode(v) // likewise; the values are ours and encode
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

func (a *API) getSetting(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { writeSetting(w, a.cfg.Settings[name].Get()) }
}

// maxSetting bounds a setting's value, in bytes.
const maxSetting = 64 << 10

func (a *API) putSetting(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := nsqhttp.ReadBody(r, maxSetting, "INVALID_VALUE")
		set := a.cfg.Settings[name].Set
		if set == nil {
			err = nsqhttp.BadRequest("INVALID_OPTION", "%s cannot be changed", name)
		}
		if err == nil && len(body) == 0 {
			err = nsqhttp.TooLarge("INVALID_VALUE", "%s: there is no value", name) // as NSQ has it
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

// writeSetting writes text as it is and everything else as JSON.
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

// freeMemory gives back to the system what the process does not need.
func freeMemory(*http.Request) (string, error) {
	debug.FreeOSMemory()
	return "OK", nil
}

// setBlockRate sets how much the profile of blocking sees.
func setBlockRate(r *http.Request) (string, error) {
	rate, err := strconv.Atoi(r.URL.Query().Get("rate"))
	if err != nil {
		return "", nsqhttp.BadRequest("INVALID_RATE", "rate %q is not a number", r.URL.Query().Get("rate"))
	}
	runtime.SetBlockProfileRate(rate)
	return "OK", nil
}
