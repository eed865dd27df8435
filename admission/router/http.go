package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
)

const maxBody = 64 << 10 // bytes

// MountHTTP adds /qos, /auth and /v1/check to mux.
func MountHTTP(mux *http.ServeMux, a *Asker) {
	// The paper's interface: 200 with TRUE or FALSE and nothing else.
	mux.HandleFunc("GET /qos", a.handleOne(func(w http.ResponseWriter, _ question, d client.Decision) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		text := "FALSE"
		if d.Admit {
			text = "TRUE"
		}
		_, _ = io.WriteString(w, text) // an error means that the client is gone
	}))
	// For nginx's auth_request, which accepts only 403 as a denial. Other clients may set deny=429.
	mux.HandleFunc("GET /auth", a.handleOne(func(w http.ResponseWriter, q question, d client.Decision) {
		if d.Admit {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		http.Error(w, "denied", q.deny)
	}))
	mux.HandleFunc("POST /v1/check", a.check)
}

// handleOne decides the key and cost of a GET, and writes the decision with respond.
func (a *Asker) handleOne(respond func(http.ResponseWriter, question, client.Decision)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		q, err := readQuery(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		d := a.ask(r.Context(), q)
		h := w.Header()
		h.Set("Cache-Control", "no-store")
		if !d.Unanswered { // without an answer the limits are unknown
			rateLimit(h, d, a.rule(r.Context(), q.key))
		}
		respond(w, q, d)
	}
}

// keyHeader has the key of a request without the parameter key. Use the header for a key made from a
// client's data: in a URL, a client's "&cost=0" would become a parameter.
const keyHeader = "Admission-Key"

func readQuery(r *http.Request) (q question, err error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, err
	}
	for _, name := range []string{"key", "cost", "deny"} {
		if n := len(values[name]); n > 1 {
			return q, fmt.Errorf("%s is given %d times", name, n)
		}
	}
	q = question{key: values.Get("key"), cost: 1, deny: http.StatusForbidden}
	if !values.Has("key") {
		keys := r.Header.Values(keyHeader)
		if len(keys) != 1 {
			return q, fmt.Errorf("key: want the parameter key, or one header %s; there are %d", keyHeader, len(keys))
		}
		q.key = keys[0]
	}
	if err := rule.ValidKey(q.key); err != nil {
		return q, fmt.Errorf("key: %w", err)
	}
	if values.Has("cost") {
		text := values.Get("cost")
		n, err := strconv.ParseUint(text, 10, 32)
		if q.cost = uint32(n); err != nil {
			return q, fmt.Errorf("cost %q: want 0 to %d credits", text, uint32(math.MaxUint32))
		}
	}
	switch text := values.Get("deny"); text {
	case "", "403":
	case "429":
		q.deny = http.StatusTooManyRequests
	default:
		return q, fmt.Errorf("deny %q: want 403 or 429", text)
	}
	return q, nil
}

// rateLimit sets RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-10), and
// Retry-After for a denial. The policy's window is the time that an empty bucket takes to fill, in
// whole seconds. So at most the quota, plus the credits at the start, is admitted in a window.
func rateLimit(h http.Header, d client.Decision, r rule.Rule) {
	if r.Share.Rate > 0 {
		h.Set("RateLimit-Policy", fmt.Sprintf(`"default";q=%d;w=%d`, r.Share.Burst, r.FillTime()))
		d.Left = min(d.Left, r.Share.Burst) // the server may have a newer rule
	}
	client.RateLimit(h, d)
}

type checks struct {
	Checks []struct {
		Key  string  `json:"key"`
		Cost *uint32 `json:"cost"` // nil: 1
	} `json:"checks"`
}

type checked struct {
	Admit   bool     `json:"admit"` // every check was admitted
	Results []result `json:"results"`
}

type result struct {
	Key        string `json:"key"`
	Admit      bool   `json:"admit"`
	Left       int64  `json:"left"`
	RetryAfter int64  `json:"retry_after_ms"` // -1: never
	Reset      int64  `json:"reset_s"`        // see client.Reset
	Default    bool   `json:"default,omitempty"`
	Shadow     bool   `json:"shadow,omitempty"`
	Unanswered bool   `json:"unanswered,omitempty"`
}

// check decides up to maxQuestions keys.
func (a *Asker) check(w http.ResponseWriter, r *http.Request) {
	questions, err := readChecks(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		code := http.StatusBadRequest
		if errors.As(err, new(*http.MaxBytesError)) {
			code = http.StatusRequestEntityTooLarge
		}
		http.Error(w, err.Error(), code)
		return
	}
	reply := checked{Admit: true}
	for i, d := range a.askAll(r.Context(), questions) {
		reply.Admit = reply.Admit && d.Admit
		reply.Results = append(reply.Results, result{
			Key: questions[i].key, Admit: d.Admit, Left: d.Left, RetryAfter: millis(d.RetryAfter), Reset: client.Reset(d),
			Default: d.ByDefault, Shadow: d.Shadow, Unanswered: d.Unanswered,
		})
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(reply) // an error means that the client is gone
}

func readChecks(body io.Reader) ([]question, error) {
	text, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	if !utf8.Valid(text) { // the decoder would replace all invalid bytes by the same character
		return nil, errors.New("not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	var request checks
	if err := d.Decode(&request); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("more than one JSON value")
	}
	if n := len(request.Checks); n < 1 || n > maxQuestions {
		return nil, fmt.Errorf("%d checks: want 1 to %d", n, maxQuestions)
	}
	questions := make([]question, len(request.Checks))
	for i, c := range request.Checks {
		if err := rule.ValidKey(c.Key); err != nil {
			return nil, fmt.Errorf("checks[%d].key: %w", i, err)
		}
		questions[i] = question{key: c.Key, cost: 1}
		if c.Cost != nil {
			questions[i].cost = *c.Cost
		}
	}
	return questions, nil
}

func millis(d time.Duration) int64 {
	if d < 0 {
		return -1
	}
	return d.Milliseconds()
}
