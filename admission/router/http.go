package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
)

const (
	maxChecks = 100      // of one /v1/check
	maxBody   = 64 << 10 // bytes
)

// HTTP answers /qos, /auth and /v1/check.
type HTTP struct {
	asker   *client.Client
	replies *prometheus.CounterVec
}

// NewHTTP adds the routes to mux. reg may be nil.
func NewHTTP(mux *http.ServeMux, asker *client.Client, reg prometheus.Registerer) *HTTP {
	h := &HTTP{asker: asker, replies: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_admission_router_replies_total",
		Help: "Keys decided for HTTP, by verdict (admit, deny) and by whom: server, or fallback where no server answered in time.",
	}, []string{"verdict", "by"})}
	if reg != nil {
		reg.MustRegister(h.replies)
	}
	mux.HandleFunc("GET /qos", h.qos)
	mux.HandleFunc("GET /auth", h.auth)
	mux.HandleFunc("POST /v1/check", h.check)
	return h
}

func (h *HTTP) ask(r *http.Request, key string, cost uint32) client.Decision {
	d := h.asker.Ask(r.Context(), key, cost)
	verdict, by := "deny", "server"
	if d.Admit {
		verdict = "admit"
	}
	if d.Unanswered {
		by = "fallback"
	}
	h.replies.WithLabelValues(verdict, by).Inc()
	return d
}

// question reads key and cost of a GET.
func question(r *http.Request) (key string, cost uint32, err error) {
	values := r.URL.Query()
	if key = values.Get("key"); rule.ValidKey(key) != nil {
		return "", 0, fmt.Errorf("key: %w", rule.ValidKey(key))
	}
	cost = 1
	if text := values.Get("cost"); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return "", 0, fmt.Errorf("cost %q: want 0 to %d credits", text, uint32(math.MaxUint32))
		}
		cost = uint32(n)
	}
	return key, cost, nil
}

// qos is the paper's: 200 with TRUE or FALSE and nothing else.
func (h *HTTP) qos(w http.ResponseWriter, r *http.Request) {
	key, cost, err := question(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	d := h.ask(r, key, cost)
	headers(w.Header(), d)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	text := "FALSE"
	if d.Admit {
		text = "TRUE"
	}
	_, _ = io.WriteString(w, text) // the client may be gone
}

// auth is for nginx's auth_request: 204, or 403.
func (h *HTTP) auth(w http.ResponseWriter, r *http.Request) {
	key, cost, err := question(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	d := h.ask(r, key, cost)
	headers(w.Header(), d)
	if d.Admit {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	http.Error(w, "denied", http.StatusForbidden)
}

// headers sets RateLimit (draft-ietf-httpapi-ratelimit-headers-10) and, of a denial,
// Retry-After. What nobody decided has neither.
func headers(h http.Header, d client.Decision) {
	h.Set("Cache-Control", "no-store")
	switch {
	case d.Unanswered:
	case d.Admit:
		h.Set("RateLimit", fmt.Sprintf(`"default";r=%d`, d.Left))
	case d.RetryAfter < 0:
		h.Set("RateLimit", `"default";r=0`)
	default:
		client.RetryAfter(h, d)
		h.Set("RateLimit", fmt.Sprintf(`"default";r=0;t=%d`, int64(math.Ceil(d.RetryAfter.Seconds()))))
	}
}

type checks struct {
	Checks []check `json:"checks"`
}

type check struct {
	Key  string  `json:"key"`
	Cost *uint32 `json:"cost"` // nil: 1
}

type checked struct {
	Admit   bool     `json:"admit"` // all of them
	Results []result `json:"results"`
}

type result struct {
	Key        string `json:"key"`
	Admit      bool   `json:"admit"`
	Left       int64  `json:"left"`
	RetryAfter int64  `json:"retry_after_ms"` // -1: never
	Default    bool   `json:"default,omitempty"`
	Shadow     bool   `json:"shadow,omitempty"`
	Unanswered bool   `json:"unanswered,omitempty"`
}

// check decides up to maxChecks keys, each by itself: what one is admitted stays
// taken if another is denied.
func (h *HTTP) check(w http.ResponseWriter, r *http.Request) {
	request, err := readChecks(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		code := http.StatusBadRequest
		if errors.As(err, new(*http.MaxBytesError)) {
			code = http.StatusRequestEntityTooLarge
		}
		http.Error(w, err.Error(), code)
		return
	}
	reply := checked{Admit: true, Results: make([]result, len(request.Checks))}
	var asking sync.WaitGroup
	for i, c := range request.Checks {
		asking.Go(func() {
			cost := uint32(1)
			if c.Cost != nil {
				cost = *c.Cost
			}
			d := h.ask(r, c.Key, cost)
			reply.Results[i] = result{
				Key: c.Key, Admit: d.Admit, Left: d.Left, RetryAfter: millis(d.RetryAfter),
				Default: d.ByDefault, Shadow: d.Shadow, Unanswered: d.Unanswered,
			}
		})
	}
	asking.Wait()
	for i := range reply.Results {
		reply.Admit = reply.Admit && reply.Results[i].Admit
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(reply) // the client may be gone
}

func readChecks(body io.Reader) (c checks, err error) {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, err
	}
	if _, err := d.Token(); err != io.EOF {
		return c, errors.New("more than one JSON value")
	}
	if n := len(c.Checks); n < 1 || n > maxChecks {
		return c, fmt.Errorf("%d checks: want 1 to %d", n, maxChecks)
	}
	for i := range c.Checks {
		if err := rule.ValidKey(c.Checks[i].Key); err != nil {
			return c, fmt.Errorf("checks[%d].key: %w", i, err)
		}
	}
	return c, nil
}

func millis(d time.Duration) int64 {
	if d < 0 {
		return -1
	}
	return d.Milliseconds()
}
