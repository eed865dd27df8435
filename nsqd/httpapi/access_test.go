package httpapi_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/httpapi"
)

// The number of topics and channels with their own metrics is bounded. The others are only counted.
func TestSeriesAreBounded(t *testing.T) {
	n := startWith(t, func(c *httpapi.Config) { c.MaxSeries = 4 })
	for _, path := range []string{"/topic/create?topic=a", "/channel/create?topic=a&channel=1", "/topic/create?topic=b", "/channel/create?topic=b&channel=1", "/channel/create?topic=b&channel=2", "/topic/create?topic=c"} {
		n.expect("POST", path, "", 200, "")
	}
	for _, has := range []string{`srtm_nsqd_topic_waiting_messages{topic="b"} 0`, `srtm_nsqd_channel_subscribers{channel="1",topic="b"} 0`, `srtm_nsqd_names_without_series{kind="topic"} 1`, `srtm_nsqd_names_without_series{kind="channel"} 1`} {
		n.expect("GET", "/metrics", "", 200, has)
	}
	w := httptest.NewRecorder()
	n.http.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if text := w.Body.String(); strings.Contains(text, `topic="c"`) || strings.Contains(text, `channel="2"`) {
		t.Error("there are more")
	}
}

// The broker logs requests of operators and does not log requests of clients.
func TestOperatorsAreLogged(t *testing.T) {
	n := start(t, false)
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	n.expect("POST", "/topic/create?topic=not%20one", "", 400, "INVALID_TOPIC")
	testkit.Equal(t, n.lines.audits.Load(), 2, "lines for two calls")
	n.expect("POST", "/pub?topic=t", "x", 200, "OK")
	n.expect("GET", "/stats?format=json", "", 200, "")
	n.expect("GET", "/config/limit", "", 200, "0")
	if got := n.lines.audits.Load(); got != 2 {
		t.Errorf("%d lines for what is no operator's", got-2)
	}
}

// Only a program of this host may change a contract. A client that claims to be local may not, nor may a client whose
// request a local program forwards.
func TestWhoMayChangeAContract(t *testing.T) {
	n := start(t, false)
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	unix := &net.UnixAddr{Name: "/run/nsqd.http", Net: "unix"}
	for _, c := range []struct {
		peer, host string
		at         net.Addr
		header     [2]string
		part       string // of the refusal; "" if there is no refusal
	}{
		{peer: "127.0.0.1:5", host: "127.0.0.1:4151"},
		{peer: "127.9.9.9:5", host: "localhost"},
		{peer: "[::1]:5", host: "[::1]:4151"},
		{peer: "[::1]:5", host: "[::1]"},
		{peer: "[::ffff:127.0.0.1]:5", host: "LocalHost:4151"},
		{peer: "@", host: "anything", at: unix},
		{peer: "", host: "", at: unix},
		{peer: "10.0.0.7:5", host: "127.0.0.1:4151", part: "the caller is 10.0.0.7:5"},
		{peer: "[fe80::1%eth0]:5", host: "localhost", part: "the caller is [fe80::1"},
		{peer: "[::ffff:10.0.0.7]:5", host: "localhost", part: "the caller is"},
		{peer: "", host: "localhost", part: "the caller is"},
		{peer: "@", host: "localhost", part: "the caller is"},
		{peer: "10.0.0.7:5", host: "localhost", header: [2]string{"X-Forwarded-For", "127.0.0.1"}, part: "X-Forwarded-For"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"X-Forwarded-For", "127.0.0.1"}, part: "X-Forwarded-For"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"x-forwarded-proto", "http"}, part: "a proxy"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"Forwarded", "for=127.0.0.1"}, part: "a proxy"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"X-Real-IP", "127.0.0.1"}, part: "a proxy"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"Via", "1.1 x"}, part: "a proxy"},
		{peer: "@", host: "localhost", at: unix, header: [2]string{"Via", "1.1 x"}, part: "a proxy"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"Origin", "https://evil.example"}, part: "a browser"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"Origin", "null"}, part: "a browser"},
		{peer: "127.0.0.1:5", host: "localhost", header: [2]string{"Sec-Fetch-Site", "same-origin"}, part: "a browser"},
		{peer: "127.0.0.1:5", host: "evil.example:4151", part: `"evil.example:4151" and not localhost`},
		{peer: "127.0.0.1:5", host: "10.0.0.7:4151", part: "and not localhost"},
		{peer: "127.0.0.1:5", host: "127.0.0.1.evil.example", part: "and not localhost"},
		{peer: "127.0.0.1:5", host: "", part: "and not localhost"},
	} {
		r := httptest.NewRequest("POST", "/topic/limit?topic=t&rate=1&burst=1", nil)
		r.RemoteAddr, r.Host = c.peer, c.host
		if c.header[0] != "" {
			r.Header.Set(c.header[0], c.header[1])
		}
		if c.at != nil {
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, c.at))
		}
		w := httptest.NewRecorder()
		n.http.ServeHTTP(w, r)
		got := w.Body.String()
		if c.part == "" && w.Code != 200 {
			t.Errorf("%+v: %d %s", c, w.Code, got)
		}
		if c.part != "" && (w.Code != 403 || !strings.Contains(got, `"NOT_LOCAL"`) || !strings.Contains(strings.ReplaceAll(got, `\"`, `"`), c.part)) {
			t.Errorf("%+v: %d %s", c, w.Code, got)
		}
	}
}

// every route, and whether it is administrative.
var everyRoute = []struct {
	method, path   string
	administrative bool
}{
	{"GET", "/ping", false}, {"HEAD", "/ping", false}, {"GET", "/info", false}, {"GET", "/stats", false},
	{"GET", "/metrics", false}, {"GET", "/healthz", false}, {"OPTIONS", "/topic/limit", false},
	{"POST", "/pub?topic=t", false}, {"POST", "/mpub?topic=t", false},
	{"GET", "/config/limit", false}, {"GET", "/nope", false},
	{"PUT", "/config/limit", true}, {"PUT", "/config/nope", true},
	{"POST", "/topic/create?topic=u", true}, {"POST", "/topic/delete?topic=u", true}, {"POST", "/topic/empty?topic=u", true},
	{"POST", "/topic/pause?topic=u", true}, {"POST", "/topic/unpause?topic=u", true}, {"POST", "/topic/limit?topic=u", true},
	{"POST", "/channel/create?topic=u&channel=c", true}, {"POST", "/channel/delete?topic=u&channel=c", true}, {"POST", "/channel/empty?topic=u&channel=c", true},
	{"POST", "/channel/pause?topic=u&channel=c", true}, {"POST", "/channel/unpause?topic=u&channel=c", true},
	{"POST", "/topic/retain?topic=u", true}, {"POST", "/channel/seek?topic=u&channel=c", true}, {"GET", "/channel/peek?topic=u&channel=c", true},
	{"POST", "/debug/freememory", true}, {"PUT", "/debug/setblockrate?rate=0", true},
	{"GET", "/debug/state", true}, {"GET", "/debug/pprof/", true}, {"GET", "/debug/pprof/cmdline", true}, {"GET", "/%64ebug/state", true},
}

// quotas admits up to so many messages at once.
type quotas struct{ asked []string }

func (q *quotas) Ask(_ context.Context, key string, cost uint32) client.Decision {
	q.asked = append(q.asked, fmt.Sprint(key, " ", cost))
	return client.Decision{Admit: cost <= 2, RetryAfter: 1500 * time.Millisecond}
}

// The broker requests admission only for the messages of a valid request.
func TestTenantsArePaced(t *testing.T) {
	const acme = "acme-0123456789abcdef"
	file := testkit.File(t, "tokens", "read-only "+acme+" acme\n")
	tokens := testkit.Result(secure.LoadTokens("--http-token-file", file)).Must(t)
	var q quotas
	n := startWith(t, func(c *httpapi.Config) { c.Tokens, c.Admission = tokens, &q })
	for _, c := range []struct {
		path, body, token string
		code              int
	}{
		{"/pub?topic=t", "m", acme, 200}, {"/mpub?topic=t", "a\nb\n", acme, 200}, {"/mpub?topic=t", "a\nb\nc\n", acme, 429},
		{"/pub?topic=u", "m", "", 200}, {"/pub?topic=bad name", "m", acme, 400}, {"/mpub?topic=t", "\n", acme, 200},
	} {
		r := httptest.NewRequest("POST", strings.ReplaceAll(c.path, " ", "%20"), strings.NewReader(c.body))
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		w := httptest.NewRecorder()
		n.http.ServeHTTP(w, r)
		if after := w.Header().Get("Retry-After"); w.Code != c.code || (after == "2") != (c.code == 429) || c.code == 429 && !strings.Contains(w.Body.String(), `"QUOTA_EXCEEDED"`) {
			t.Errorf("%+v: %d, Retry-After %q, %s", c, w.Code, after, w.Body)
		}
	}
	testkit.Equal(t, fmt.Sprint(q.asked), "[tenant/acme/http 1 tenant/acme/http 2 tenant/acme/http 3 tenant//http 1]", "asked")
}

func TestTokens(t *testing.T) {
	const admin, look = "admin-0123456789abcdef", "look-0123456789abcdef"
	file := testkit.File(t, "tokens", "admin "+admin+"\nread-only "+look+"\n")
	tokens := testkit.Result(secure.LoadTokens("--http-token-file", file)).Must(t)
	n := startWith(t, func(c *httpapi.Config) { c.Tokens = tokens })
	for _, route := range everyRoute {
		for _, c := range []struct {
			header, message string
			status          int
		}{
			{"", "UNAUTHENTICATED", 401},
			{"Bearer guess-0123456789abcdef", "UNAUTHENTICATED", 401},
			{"Basic " + admin, "UNAUTHENTICATED", 401},
			{"Bearer " + look, "PERMISSION_DENIED", 403},
			{"Bearer " + admin, "", 0},
		} {
			r := httptest.NewRequest(route.method, route.path, strings.NewReader("7"))
			r.RemoteAddr, r.Host = "127.0.0.1:5", "localhost" // has no effect here
			r.Header.Set("Authorization", c.header)
			w := httptest.NewRecorder()
			n.http.ServeHTTP(w, r)
			if refused := w.Code == 401 || w.Code == 403; refused != (route.administrative && c.status != 0) ||
				refused && (w.Code != c.status || !strings.Contains(w.Body.String(), c.message) || (w.Code == 401) != (w.Header().Get("WWW-Authenticate") == "Bearer")) {
				t.Errorf("%s %s with %q: %d %s", route.method, route.path, c.header, w.Code, w.Body)
			}
			if strings.Contains(w.Body.String(), "0123456789") {
				t.Errorf("it contains a token: %s", w.Body)
			}
		}
	}
	// A token permits changes of contracts from any host.
	r := httptest.NewRequest("POST", "/topic/limit?topic=t&rate=1&burst=1", nil)
	r.Header.Set("Authorization", "Bearer "+admin)
	w := httptest.NewRecorder()
	if n.http.ServeHTTP(w, r); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestThePublicSideOfAnAdminAddress(t *testing.T) {
	n := start(t, false)
	for _, route := range everyRoute {
		for side, h := range map[string]http.Handler{"public": n.http.Public(), "admin": n.http} {
			r := httptest.NewRequest(route.method, route.path, strings.NewReader("7"))
			r.RemoteAddr, r.Host = "127.0.0.1:5", "localhost"
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			refused := w.Code == 403 && strings.Contains(w.Body.String(), "ADMIN_ADDRESS")
			if refused != (route.administrative && side == "public") {
				t.Errorf("%s %s %s: %d %s", side, route.method, route.path, w.Code, fmt.Sprintf("%.200s", w.Body))
			}
		}
	}
}

// Publishing over HTTP needs the same authorization as over TCP. Before the authorization is known, the broker reads no
// body and does nothing.
func TestPublishingTakesAuthorisation(t *testing.T) {
	var asked []auth.Query
	failure := error(nil)
	n := startWith(t, func(c *httpapi.Config) {
		c.Authorise = func(_ context.Context, q auth.Query) (*auth.Grant, error) {
			asked = append(asked, q)
			if failure != nil {
				return nil, failure
			}
			return auth.ParseAnswer([]byte(`{"ttl":1,"authorizations":[{"permissions":["publish"],"topic":"^t$","channels":[".*"]},{"permissions":["subscribe"],"topic":".*","channels":[".*"]}]}`))
		}
	})
	publish := func(path, header string, status int, message string) {
		t.Helper()
		r := httptest.NewRequest("POST", path, strings.NewReader("x"))
		r.RemoteAddr = "192.0.2.9:5"
		r.Header.Set("Authorization", header)
		r.Header.Set("X-Forwarded-For", "127.0.0.1")
		r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Subject: pkix.Name{CommonName: "sensor7"}}}}
		w := httptest.NewRecorder()
		n.http.ServeHTTP(w, r)
		if w.Code != status || !strings.Contains(w.Body.String(), message) || strings.Contains(w.Body.String(), "sesame") || strings.Contains(w.Body.String(), "authserver") {
			t.Errorf("%s with %.40q: %d %s", path, header, w.Code, w.Body)
		}
	}
	for _, path := range []string{"/pub", "/mpub", "/mpub?binary=true"} {
		for _, header := range []string{"", "Bearer", "Bearer  ", "Basic sesame", "Bearer " + strings.Repeat("x", 5000)} {
			publish(path, header, 401, "AUTH_FIRST")
		}
	}
	if len(asked) > 0 {
		t.Errorf("asked %+v", asked)
	}
	for _, path := range []string{"/pub", "/mpub"} {
		publish(path+"?topic=t", "Bearer sesame", 200, "OK")
		publish(path+"?topic=other", "Bearer sesame", 403, "UNAUTHORIZED")
		publish(path+"?topic=other&topic=t", "Bearer sesame", 403, "UNAUTHORIZED")
		publish(path, "Bearer sesame", 403, "UNAUTHORIZED")
	}
	testkit.Equal(t, asked[0], (auth.Query{RemoteIP: "192.0.2.9", TLS: true, CommonName: "sensor7", Secret: "sesame"}), "asked")
	failure = errors.New("authserver.internal: connection refused")
	before := n.lines.Load()
	for range 10 * obs.LinesPerSecond {
		publish("/pub?topic=t", "Bearer sesame", 503, "AUTH_FAILED")
	}
	if lines := n.lines.Load() - before; lines == 0 || lines > 5*obs.LinesPerSecond {
		t.Errorf("%d lines were logged of %d failures", lines, 10*obs.LinesPerSecond)
	}
	failure = fmt.Errorf("auth server authserver.internal: %w: answers 403 Forbidden", auth.ErrRefused)
	for _, path := range []string{"/pub", "/mpub"} {
		publish(path+"?topic=t", "Bearer sesame", 401, "AUTH_FAILED")
	}
	failure = auth.ErrBusy
	publish("/pub?topic=t", "Bearer sesame", 503, "AUTH_BUSY")
	testkit.Equal(t, len(n.broker.Topics()), 1, "topics were created on the way")
	n.expect("POST", "/topic/create?topic=u", "", 200, "") // the same as NSQ's API
}
