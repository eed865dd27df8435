package publish_test

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	admission "github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/gateway/publish"
	"github.com/srtm-io/srtm/internal/testkit"
)

// post sends a request to a service without brokers or placement. Requests that pass the first checks
// find no publisher.
func post(s *publish.Service, path string, body io.Reader, charged admission.Decision) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	s.Serve(w, httptest.NewRequest(http.MethodPost, path, body), "", func(int) admission.Decision { return charged })
	return w
}

func newService(t *testing.T, maxBodies int64, metrics prometheus.Registerer) *publish.Service {
	s, err := publish.New(client.Config{Address: "127.0.0.1:1", Logger: slog.New(slog.DiscardHandler)}, maxBodies, metrics)
	testkit.Must(t, err)
	return s
}

// The memory that all requests in progress hold is bounded, and is released however the requests end.
func TestBodiesTakeOnlySoMuchMemory(t *testing.T) {
	metrics := prometheus.NewRegistry()
	s := newService(t, 8, metrics)
	admit := admission.Decision{Admit: true, Left: -1}
	slow, in := io.Pipe()
	first := make(chan *httptest.ResponseRecorder)
	go func() { first <- post(s, "/pub?topic=t", slow, admit) }()
	for _, part := range []string{"12345", "6", ""} { // reading a part means that the part before is counted
		testkit.Result(io.WriteString(in, part)).Must(t)
	}
	for _, path := range []string{"/pub?topic=t", "/mpub?topic=t"} {
		w := post(s, path, strings.NewReader("1\n3"), admit)
		if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") != "1" || !strings.Contains(w.Body.String(), `"TOO_MANY_REQUESTS"`) {
			t.Errorf("%s: %d %v %s", path, w.Code, w.Header(), w.Body)
		}
	}
	_ = in.Close()
	if w := <-first; !strings.Contains(w.Body.String(), "MISSING_PUBLISHER_ID") {
		t.Errorf("the first: %d %s", w.Code, w.Body)
	}
	if w := post(s, "/pub?topic=t", strings.NewReader("12345678"), admit); !strings.Contains(w.Body.String(), "MISSING_PUBLISHER_ID") {
		t.Errorf("after it: %d %s", w.Code, w.Body)
	}
	families, err := metrics.Gather()
	if err != nil || len(families) != 2 {
		t.Fatal(families, err)
	}
	if held, refused := families[0].Metric[0].GetGauge().GetValue(), families[1].Metric[0].GetCounter().GetValue(); held != 0 || refused != 2 {
		t.Errorf("%v bytes are held, %v requests were refused: want 0, 2", held, refused)
	}
}

// A batch counts with the memory of its parsed form: with lines of one byte each, many times the body.
func TestSmallMessagesTakeMemory(t *testing.T) {
	s := newService(t, 1<<20, prometheus.NewRegistry())
	admit := admission.Decision{Admit: true, Left: -1}
	for message, want := range map[string]string{"x\n": "TOO_MANY_REQUESTS", strings.Repeat("x", 1023) + "\n": "MISSING_PUBLISHER_ID"} {
		body := strings.Repeat(message, 256<<10/len(message))
		if w := post(s, "/mpub?topic=t", strings.NewReader(body), admit); !strings.Contains(w.Body.String(), want) {
			t.Errorf("messages of %d bytes: %d %s", len(message), w.Code, w.Body)
		}
	}
}

// RateLimit states what admission has left, also on a refusal. Without an answer from admission there
// is no header.
func TestRateLimitHeaders(t *testing.T) {
	s := newService(t, 0, prometheus.NewRegistry())
	for _, c := range []struct {
		d                 admission.Decision
		status            int
		limit, retryAfter string
	}{
		{admission.Decision{Admit: true, Left: 41}, http.StatusBadRequest, `"default";r=41;t=1`, ""}, // the publisher has no id
		{admission.Decision{Admit: true, Left: 0}, http.StatusBadRequest, `"default";r=0;t=1`, ""},
		{admission.Decision{Admit: true, Left: -1}, http.StatusBadRequest, "", ""},
		{admission.Decision{Admit: true, Left: 7, Unanswered: true}, http.StatusBadRequest, "", ""},
		{admission.Decision{RetryAfter: 1500 * time.Millisecond}, http.StatusTooManyRequests, `"default";r=0;t=2`, "2"},
		{admission.Decision{}, http.StatusTooManyRequests, "", ""},
	} {
		w := post(s, "/pub?topic=t", strings.NewReader("x"), c.d)
		if got := w.Header(); w.Code != c.status || got.Get("RateLimit") != c.limit || got.Get("Retry-After") != c.retryAfter {
			t.Errorf("%+v: %d %v", c.d, w.Code, got)
		}
	}
}

// An id that no broker accepts would hold a place and dial for 5 s, or count as a fault of the
// gateway.
func TestPublisherIDs(t *testing.T) {
	s := newService(t, 0, prometheus.NewRegistry())
	for _, id := range []string{strings.Repeat("x", 257), "\xff"} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/pub?topic=t", strings.NewReader("x"))
		r.Header.Set("X-Publisher-Id", id)
		s.Serve(w, r, "", func(int) admission.Decision { return admission.Decision{Admit: true, Left: -1} })
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "INVALID_PUBLISHER_ID") {
			t.Errorf("%.10q: %d %s", id, w.Code, w.Body)
		}
	}
}
