package auth_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/auth"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const all = `{"ttl":60,"identity":"me","identity_url":"http://id","authorizations":[{"permissions":["publish","subscribe"],"topic":".*","channels":[".*"]}]}`

func rules(r string) string { return `{"ttl":1,"authorizations":[` + r + `]}` }

func TestPermissions(t *testing.T) {
	for _, c := range []struct {
		rules          string
		p              auth.Permission
		topic, channel string
		want           bool
	}{
		{`{"permissions":["publish"],"topic":".*","channels":[".*"]}`, auth.Publish, "t", "", true},
		{`{"permissions":["publish"],"topic":".*","channels":[".*"]}`, auth.Subscribe, "t", "c", false},
		{`{"permissions":["subscribe"],"topic":".*","channels":[".*"]}`, auth.Subscribe, "t", "c", true},
		{`{"permissions":["subscribe"],"topic":".*","channels":[".*"]}`, auth.Publish, "t", "", false},
		{`{"permissions":["publish","subscribe"],"topic":"a","channels":[".*"]}`, auth.Subscribe, "b", "c", false},
		{`{"permissions":[],"topic":".*","channels":[".*"]}`, auth.Publish, "t", "", false},
		{`{"topic":".*","channels":[".*"]}`, auth.Publish, "t", "", false},
		// Patterns are not anchored.
		{`{"permissions":["subscribe"],"topic":"log","channels":["arch"]}`, auth.Subscribe, "catalog", "archive", true},
		{`{"permissions":["subscribe"],"topic":"^log$","channels":["^arch$"]}`, auth.Subscribe, "catalog", "arch", false},
		{`{"permissions":["subscribe"],"topic":"^log$","channels":["^arch$"]}`, auth.Subscribe, "log", "archive", false},
		{`{"permissions":["subscribe"],"topic":"^log$","channels":["^arch$"]}`, auth.Subscribe, "log", "arch", true},
		// The channel of a publish is empty, and has to match.
		{`{"permissions":["publish"],"topic":".*","channels":["c"]}`, auth.Publish, "t", "", false},
		{`{"permissions":["publish"],"topic":".*","channels":["c","^$"]}`, auth.Publish, "t", "", true},
		{`{"permissions":["publish"],"topic":".*","channels":[]}`, auth.Publish, "t", "", false},
		{`{"permissions":["publish"],"topic":".*"}`, auth.Publish, "t", "", false},
		// A missing pattern matches everything, as an empty pattern does.
		{`{"permissions":["publish"],"channels":[""]}`, auth.Publish, "t", "", true},
		// One rule is enough, and permissions do not add up over rules.
		{`{"permissions":["publish"],"topic":"a","channels":[".*"]},{"permissions":["subscribe"],"topic":"b","channels":[".*"]}`, auth.Subscribe, "b", "c", true},
		{`{"permissions":["publish"],"topic":"a","channels":[".*"]},{"permissions":["subscribe"],"topic":"b","channels":[".*"]}`, auth.Publish, "b", "", false},
		{``, auth.Publish, "t", "", false},
	} {
		g, err := auth.ParseAnswer([]byte(rules(c.rules)))
		if err != nil {
			t.Errorf("%s: %v", c.rules, err)
			continue
		}
		testkit.Equal(t, g.Allows(c.p, c.topic, c.channel), c.want, "%s: %d on %q %q", c.rules, c.p, c.topic, c.channel)
	}
}

func TestParseAnswerReportsFaults(t *testing.T) {
	g, err := auth.ParseAnswer([]byte(all))
	testkit.Must(t, err)
	if g.Identity != "me" || g.IdentityURL != "http://id" || g.TTL != time.Minute || g.Rules() != 1 {
		t.Errorf("%+v", g)
	}
	if g, err = auth.ParseAnswer([]byte(`{"ttl":9223372036854775807,"new":1}`)); err != nil || g.TTL < 365*24*time.Hour || g.Rules() != 0 {
		t.Errorf("%+v %v", g, err)
	}
	for answer, want := range map[string][]string{
		``:                             {"unexpected end"},
		`null`:                         {"ttl of 0"},
		`[]`:                           {"cannot unmarshal"},
		`{"ttl":-5}`:                   {"ttl of -5"},
		`{"ttl":1.5}`:                  {"cannot unmarshal"},
		`{"ttl":"1"}`:                  {"cannot unmarshal"},
		`{"ttl":99999999999999999999}`: {"cannot unmarshal"},
		rules(`{"permissions":["dance"],"topic":"(","channels":["a","*"]}`): {`"dance"`, "topic: error parsing", "channel: error parsing"},
		`{"status_code":200,"data":` + all + `}`:                            {"ttl of 0"},
	} {
		g, err := auth.ParseAnswer([]byte(answer))
		if err == nil || g != nil {
			t.Errorf("%s: %+v", answer, g)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not say %s", answer, err, w)
			}
		}
	}
}

func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte(all))
	f.Add([]byte(rules(`{"permissions":["publish"],"topic":"a{1000}{1000}","channels":["\\C","(?i)x"]}`)))
	f.Add([]byte(`{"ttl":9223372036854775807,"authorizations":[{}]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 1<<12 {
			return
		}
		g, err := auth.ParseAnswer(in)
		if (g == nil) == (err == nil) {
			t.Fatalf("%v and %v", g, err)
		}
		if err != nil {
			return
		}
		if g.TTL <= 0 {
			t.Fatalf("ttl %v", g.TTL)
		}
		if g.Rules() == 0 && g.Allows(auth.Publish|auth.Subscribe, "t", "c") {
			t.Fatal("no rule permits something")
		}
		// The answer of a grant does not change when a caller checks again.
		for _, topic := range []string{"", "t", "catalog#ephemeral"} {
			testkit.MustEqual(t, g.Allows(auth.Subscribe, topic, "c"), g.Allows(auth.Subscribe, topic, "c"), "two answers")
		}
	})
}

// server gives a configurable answer and keeps the last request.
type server struct {
	*httptest.Server
	asked  atomic.Int32
	last   atomic.Pointer[request]
	answer func(w http.ResponseWriter)
}

type request struct {
	method, path, kind string
	query, form        url.Values
}

func serve(t *testing.T, start func(http.Handler) *httptest.Server, answer func(w http.ResponseWriter)) *server {
	t.Helper()
	s := &server{answer: answer}
	s.Server = start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		testkit.NoError(t, err)
		form, err := url.ParseQuery(string(body))
		testkit.NoError(t, err)
		s.last.Store(&request{r.Method, r.URL.Path, r.Header.Get("Content-Type"), r.URL.Query(), form})
		s.asked.Add(1)
		s.answer(w)
	}))
	t.Cleanup(s.Close)
	return s
}

func text(status int, body string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

func config(addresses ...string) auth.Config {
	return auth.Config{Addresses: addresses, Method: http.MethodGet, ConnectTimeout: testkit.Hang, RequestTimeout: testkit.Hang}
}

func servers(t *testing.T, c auth.Config) *auth.Servers {
	t.Helper()
	s := testkit.Result(auth.New(c)).Must(t)
	t.Cleanup(s.Close)
	return s
}

var query = auth.Query{RemoteIP: "10.0.0.7", TLS: true, CommonName: "sensor7", Secret: "a&b=c d"}

func TestTheQuestion(t *testing.T) {
	s := serve(t, httptest.NewServer, text(200, all))
	want := "map[common_name:[sensor7] remote_ip:[10.0.0.7] secret:[a&b=c d] tls:[true]]"
	for _, c := range []struct {
		address, method, path string
	}{
		{s.Listener.Addr().String(), "GET", "/auth"},
		{s.URL, "GET", "/auth"},
		{s.URL + "/my/path", "GET", "/my/path"},
		{s.URL + "/", "POST", "/"},
		{s.Listener.Addr().String(), "POST", "/auth"},
	} {
		cfg := config(c.address)
		cfg.Method = c.method
		g, err := servers(t, cfg).Ask(t.Context(), query)
		if err != nil || g.Identity != "me" {
			t.Errorf("%+v: %v %v", c, g, err)
			continue
		}
		r := s.last.Load()
		got, other := r.query, r.form
		if c.method == "POST" {
			got, other = r.form, r.query
			testkit.Equal(t, r.kind, "application/x-www-form-urlencoded", "%+v: content type", c)
		}
		if r.method != c.method || r.path != c.path || fmt.Sprint(got) != want || len(other) != 0 {
			t.Errorf("%+v: %+v", c, r)
		}
	}
	testkit.Result(servers(t, config(s.URL+"/x?tenant=7&secret=mine")).Ask(t.Context(), query)).Must(t)
	if got := s.last.Load().query; got.Get("tenant") != "7" || got.Get("secret") != query.Secret {
		t.Errorf("a URL with a query of its own: %v", got)
	}
}

func TestServersTakeTurnsAndStandIn(t *testing.T) {
	a, b := serve(t, httptest.NewServer, text(200, all)), serve(t, httptest.NewServer, text(200, all))
	s := servers(t, config(a.URL, testkit.Address(t), b.URL))
	for range 30 {
		testkit.Result(s.Ask(t.Context(), query)).Must(t)
	}
	if a.asked.Load() < 10 || b.asked.Load() < 10 || a.asked.Load()+b.asked.Load() != 30 {
		t.Errorf("%d and %d were asked", a.asked.Load(), b.asked.Load())
	}
	a.answer = text(500, "broken")
	b.answer = text(200, "nonsense")
	_, err := s.Ask(t.Context(), query)
	if err == nil {
		t.Fatal("an answer, though none was given")
	}
	for _, want := range []string{"500 Internal Server Error", "refused", "invalid character", a.Listener.Addr().String()} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "a%26b") {
		t.Errorf("the secret is in %v", err)
	}
	if errors.Is(err, auth.ErrRefused) {
		t.Errorf("%v: no server refuses the secret", err)
	}
	for _, status := range []int{401, 403} {
		b.answer = text(status, all)
		if _, err = s.Ask(t.Context(), query); !errors.Is(err, auth.ErrRefused) {
			t.Errorf("%d: %v", status, err)
		}
	}
	a.answer = text(200, `{"ttl":1}`)
	if g, err := s.Ask(t.Context(), query); err != nil || g.Rules() != 0 {
		t.Errorf("%v %v", g, err)
	}
	testkit.Equal(t, fmt.Sprint(s.Counts()), "map[failed:1 granted:30 nothing:3]", "counted")
}

func TestAnswersThatAreNone(t *testing.T) {
	for name, answer := range map[string]func(http.ResponseWriter){
		"204":         text(204, ""),
		"403":         text(403, all),
		"201":         text(201, all),
		"more than":   text(200, all+strings.Repeat(" ", 1<<20)),
		"entries":     text(200, rules(strings.Repeat("{},", 300_000)+"{}")),
		"EOF":         func(w http.ResponseWriter) { panic(http.ErrAbortHandler) },
		"unexpected ": text(200, all[:20]),
	} {
		s := serve(t, httptest.NewServer, answer)
		if g, err := servers(t, config(s.URL)).Ask(t.Context(), query); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v %v", name, g, err)
		}
	}
}

// The client sends the secret in its request and must not follow a redirect to a server that is not configured.
func TestAuthDoesNotFollowRedirects(t *testing.T) {
	elsewhere := serve(t, httptest.NewServer, text(200, all))
	for _, status := range []int{301, 302, 303, 307, 308} {
		for _, method := range []string{"GET", "POST"} {
			s := serve(t, httptest.NewServer, func(w http.ResponseWriter) {
				w.Header().Set("Location", elsewhere.URL+"/auth")
				w.WriteHeader(status)
			})
			cfg := config(s.URL)
			cfg.Method = method
			_, err := servers(t, cfg).Ask(t.Context(), query)
			testkit.ErrorHas(t, err, "redirects", "%s %d", method, status)
		}
	}
	testkit.Equal(t, elsewhere.asked.Load(), 0, "questions to another server")

	// A redirect within the same server is permitted.
	mux := http.NewServeMux()
	mux.Handle("/auth", http.RedirectHandler("/auth/", http.StatusTemporaryRedirect))
	mux.HandleFunc("/auth/", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, all) })
	s := httptest.NewServer(mux)
	defer s.Close()
	testkit.Result(servers(t, config(s.URL)).Ask(t.Context(), query)).Must(t)
}

func TestHTTPSIsVerified(t *testing.T) {
	s := serve(t, httptest.NewTLSServer, text(200, all))
	cfg := config(s.URL)
	if _, err := servers(t, cfg).Ask(t.Context(), query); err == nil {
		t.Error("an unknown authority is trusted")
	}
	cfg.TLS = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	_, err := servers(t, cfg).Ask(t.Context(), query)
	testkit.NoError(t, err)
}

func TestAskingEndsWithItsContext(t *testing.T) {
	// The server accepts connections and never answers.
	ln := testkit.Listen(t)
	accepted := make(chan net.Conn, 2)
	go func() {
		defer close(accepted)
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			accepted <- nc
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	s := servers(t, config(ln.Addr().String(), ln.Addr().String()))
	go func() {
		_, err := s.Ask(ctx, query)
		failed <- err
	}()
	nc := <-accepted
	cancel()
	testkit.ErrorHas(t, <-failed, "canceled")
	nc.Close()
	ln.Close()
	for nc := range accepted {
		nc.Close()
		t.Error("the other server was asked though no caller waits any more")
	}
}

func TestConfigFaults(t *testing.T) {
	_, err := auth.New(auth.Config{})
	testkit.ErrorHas(t, err, "no auth server")
	_, err = auth.New(auth.Config{Addresses: []string{"host:1"}, Method: "put"})
	for _, want := range []string{`"PUT"`, "--http-client-connect-timeout", "--http-client-request-timeout"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
	for _, address := range []string{"", "host", "host:", "ftp://host/", "http://", "http://[", "unix:///x"} {
		testkit.ErrorHas(t, config(address).Validate(), fmt.Sprintf("--auth-http-address %q", address), "%q", address)
		if _, err := auth.New(config(address)); err == nil {
			t.Errorf("%q is taken", address)
		}
	}
}

func TestTheAnswerIsWhatTheDocumentationShows(t *testing.T) {
	documented := `{
      "ttl": 3600,
      "identity": "username",
      "identity_url": "https://....",
      "authorizations": [
        {
          "permissions": [
            "subscribe",
            "publish"
          ],
          "topic": ".*",
          "channels": [
            ".*"
          ]
        }
      ]
    }`
	if !json.Valid([]byte(documented)) {
		t.Fatal("not JSON")
	}
	g, err := auth.ParseAnswer([]byte(documented))
	if err != nil || g.TTL != time.Hour || g.Identity != "username" || !g.Allows(auth.Publish, "t", "") || !g.Allows(auth.Subscribe, "t", "c") {
		t.Errorf("%+v %v", g, err)
	}
}
