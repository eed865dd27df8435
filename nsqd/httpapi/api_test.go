package httpapi_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/nsqd/lookupd"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type node struct {
	t      *testing.T
	broker *broker.Broker
	conns  *conn.Server
	http   *httpapi.API
	lines  *lineCount
}

// lineCount counts logged lines.
type lineCount struct {
	atomic.Int64
	audits atomic.Int64
}

func (c *lineCount) Write(b []byte) (int, error) {
	c.Add(1)
	if strings.Contains(string(b), "msg=audit who=anonymous remote=") {
		c.audits.Add(1)
	}
	return len(b), nil
}

func start(t *testing.T, managed bool) *node {
	t.Helper()
	return startWith(t, func(c *httpapi.Config) { c.Managed = managed })
}

func startWith(t *testing.T, set func(*httpapi.Config)) *node {
	t.Helper()
	return startOn(t, nil, set)
}

func startOn(t *testing.T, storage *broker.Storage, set func(*httpapi.Config)) *node {
	t.Helper()
	lines := new(lineCount)
	log := slog.New(slog.NewTextHandler(lines, nil))
	sc := session.DefaultConfig()
	web := sc // clients have NSQ's limits, HTTP has small limits
	web.Limits.MaxMessageSize, web.Limits.MaxBodySize = 10, 40
	var limit atomic.Int64
	config := httpapi.Config{
		Node:    httpapi.Node{Version: "test", Release: "SRTM test", BroadcastAddress: "b.example", Hostname: "h", BrokerID: "b1", TCPPort: 4150, HTTPPort: 4151, StartTime: time.Unix(1, 0)},
		Session: &web,

		Percentiles: []float64{1, 0.5},
		Settings: map[string]httpapi.Setting{
			"limit": {
				Get: func() any { return limit.Load() },
				Set: func(value []byte) error {
					n, err := strconv.ParseInt(string(value), 10, 64)
					if err == nil {
						limit.Store(n)
					}
					return err
				},
			},
			"motto": {Get: func() any { return "plain text" }}, // cannot be set
		},
		Auth: func() map[string]uint64 { return map[string]uint64{"granted": 5} },
		Lookupds: func() []lookupd.State {
			return []lookupd.State{{Address: "l:4160", Connected: true, Registered: 3, Failures: 1}}
		},
	}
	set(&config)
	b, err := broker.New(broker.Config{Capacity: 3, MaxMsgTimeout: time.Minute, AutoCreate: !config.Managed, EndToEnd: time.Hour, Storage: storage})
	testkit.Must(t, err)
	t.Cleanup(func() {
		testkit.NoError(t, b.Close())
	})
	stamps := testkit.Result(hook.Open(hook.Off, hook.Config{}, log)).Must(t)
	conns := testkit.Result(conn.New(conn.Config{Session: &sc, WriteTimeout: testkit.Hang}, b, stamps, log)).Must(t)
	return &node{t: t, broker: b, conns: conns, http: httpapi.New(config, b, conns, stamps, prometheus.NewRegistry(), log), lines: lines}
}

func (n *node) do(method, path, body string) (int, string) {
	n.t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, "http://127.0.0.1:4151"+path, strings.NewReader(body))
	r.RemoteAddr = "127.0.0.1:1234"
	n.http.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func (n *node) expect(method, path, body string, status int, part string) {
	n.t.Helper()
	code, got := n.do(method, path, body)
	if code != status || !strings.Contains(got, part) {
		n.t.Errorf("%s %s: %d %s, want %d and %q in it", method, path, code, got, status, part)
	}
}

// A capture identifies an HTTP publisher as a connection without a client_id: by the identity from the auth servers or
// the certificate, or else by its host.
func TestACaptureKnowsWhoPublishesByHTTP(t *testing.T) {
	n := startWith(t, func(c *httpapi.Config) {
		c.Authorise = func(_ context.Context, q auth.Query) (*auth.Grant, error) {
			return auth.ParseAnswer(fmt.Appendf(nil, `{"ttl":1,"identity":%q,"authorizations":[{"permissions":["publish"],"topic":".*","channels":[".*"]}]}`, strings.Trim(q.Secret, "-")))
		}
	})
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	if !n.broker.Node().Capture("t") {
		t.Fatal("not captured")
	}
	post := func(path, secret, from, certificate string) {
		t.Helper()
		r := httptest.NewRequest("POST", path, strings.NewReader("x\ny\n"))
		r.RemoteAddr = from
		r.Header.Set("Authorization", "Bearer "+secret)
		if certificate != "" {
			chain := []*x509.Certificate{{Subject: pkix.Name{CommonName: certificate}}}
			r.TLS = &tls.ConnectionState{PeerCertificates: chain, VerifiedChains: [][]*x509.Certificate{chain}}
		}
		w := httptest.NewRecorder()
		n.http.ServeHTTP(w, r)
		testkit.Equal(t, w.Code, 200, "%s", w.Body)
		n.expect("POST", "/topic/empty?topic=t", "", 200, "")
	}
	post("/pub?topic=t", "ann", "192.0.2.1:1", "sensor")
	post("/mpub?topic=t", "-", "192.0.2.1:2", "sensor")
	post("/pub?topic=t", "-", "192.0.2.1:3", "")
	post("/pub?topic=t", "-", "[2001:db8::1]:4", "")
	post("/pub?topic=t", "-", "@", "") // a Unix socket
	post("/pub?topic=t", "ann", "192.0.2.2:5", "")
	a := n.broker.Node().Arrivals("t")
	counts := map[string]int{}
	for _, i := range a.Publisher {
		counts[a.Publishers[i]]++
	}
	if want := map[string]int{"auth:ann": 2, "cert:sensor": 2, "addr:192.0.2.1": 1, "addr:2001:db8::1": 1, "": 1}; !maps.Equal(counts, want) {
		t.Errorf("messages of %v, want %v", counts, want)
	}
}

func TestManagementAndPublishing(t *testing.T) {
	n := start(t, false)
	n.expect("GET", "/ping", "", 200, "OK")
	n.expect("GET", "/healthz", "", 200, "ok")
	n.expect("GET", "/info", "", 200, `"tcp_port":4150`)
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	n.expect("POST", "/channel/create?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/pub?topic=t", "hello", 200, "OK")
	n.expect("POST", "/pub?topic=t&defer=60000", "later", 200, "OK")
	n.expect("POST", "/mpub?topic=t", "x\n", 200, "OK")
	n.expect("POST", "/channel/pause?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/topic/pause?topic=t", "", 200, "")
	code, body := n.do("GET", "/stats?format=json&topic=t&channel=c", "")
	var stats struct {
		Topics []struct {
			Name     string `json:"topic_name"`
			Count    int    `json:"message_count"`
			Paused   bool
			Channels []struct {
				Name     string `json:"channel_name"`
				Depth    int
				Deferred int `json:"deferred_count"`
				Paused   bool
			}
		}
	}
	if err := json.Unmarshal([]byte(body), &stats); err != nil || code != 200 {
		t.Fatalf("%d %v in %s", code, err, body)
	}
	testkit.Equal(t, fmt.Sprint(stats), "{[{t 3 true [{c 2 1 true}]}]}", "stats")
	n.expect("GET", "/stats", "", 200, "\n*P [t              ] depth: 0     be-depth: 0     msgs: 3 ")
	n.expect("GET", "/metrics", "", 200, `srtm_nsqd_channel_deferred_messages{channel="c",topic="t"} 1`)
	n.expect("GET", "/metrics", "", 200, `srtm_nsqd_arrivals_total{source="read"} 3`)
	n.expect("GET", "/metrics", "", 200, `srtm_nsqd_nsqlookupd_connected{address="l:4160"} 1`)
	n.expect("GET", "/metrics", "", 200, `srtm_nsqd_nsqlookupd_failures_total{address="l:4160"} 1`)
	n.expect("GET", "/metrics", "", 200, `srtm_nsqd_auth_requests_total{result="granted"} 5`)
	n.expect("GET", "/debug/state", "", 200, `"topic_name": "t"`)
	n.expect("POST", "/topic/unpause?topic=t", "", 200, "")
	n.expect("POST", "/channel/unpause?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/channel/empty?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/topic/empty?topic=t", "", 200, "")
	n.expect("POST", "/topic/limit?topic=t&rate=12.5&burst=3&policy=reject", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"limited":true,"rate":12.5,"burst":3`)
	n.expect("POST", "/topic/limit?topic=t&rate=2000000000&burst=3", "", 400, "rate 2000000000 is outside 0.001 to 1000000000 messages per second")
	n.expect("DELETE", "/topic/limit?topic=nope", "", 404, "TOPIC_NOT_FOUND")
	n.expect("DELETE", "/topic/limit?topic=t", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"limited":false`)
	n.expect("DELETE", "/topic/limit?topic=t", "", 200, "")
	n.expect("POST", "/channel/delete?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/topic/delete?topic=t", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"topics":[]`)
}

func TestSettings(t *testing.T) {
	n := start(t, false)
	n.expect("GET", "/config/limit", "", 200, "0\n")
	n.expect("PUT", "/config/limit", "7", 200, "7\n")
	n.expect("PUT", "/config/limit", "x", 400, "INVALID_VALUE")
	n.expect("GET", "/config/limit", "", 200, "7\n")
	n.expect("GET", "/config/motto", "", 200, "plain text")
	n.expect("PUT", "/config/motto", "x", 400, "INVALID_OPTION")
}

func TestWhatEveryAnswerHas(t *testing.T) {
	n := start(t, false)
	for _, c := range []struct {
		method, path, kind, allow string
	}{
		{"GET", "/ping", "text/plain; charset=utf-8", ""},
		{"HEAD", "/ping", "text/plain; charset=utf-8", ""},
		{"GET", "/stats", "text/plain; charset=utf-8", ""},
		{"GET", "/stats?format=json", "application/json; charset=utf-8", ""},
		{"GET", "/info", "application/json; charset=utf-8", ""},
		{"GET", "/nope", "application/json; charset=utf-8", ""},
		{"POST", "/ping", "application/json; charset=utf-8", "GET, OPTIONS"},
		{"OPTIONS", "/pub", "", "POST, OPTIONS"},
		{"OPTIONS", "/config/limit", "", "GET, PUT, OPTIONS"},
		{"POST", "/debug/freememory", "text/plain; charset=utf-8", ""},
		{"PUT", "/debug/setblockrate?rate=0", "text/plain; charset=utf-8", ""},
		{"GET", "/debug/pprof/", "text/html; charset=utf-8", ""},
	} {
		w := httptest.NewRecorder()
		n.http.ServeHTTP(w, httptest.NewRequest(c.method, c.path, nil))
		h := w.Result().Header
		testkit.Equal(t, h.Get("X-NSQ-Content-Type"), "nsq; version=1.0", "%s %s: X-NSQ-Content-Type", c.method, c.path)
		if h.Get("Content-Type") != c.kind || h.Get("Allow") != c.allow {
			t.Errorf("%s %s: %v", c.method, c.path, h)
		}
	}
}

func TestBinaryMultiPublish(t *testing.T) {
	n := start(t, false)
	body := wire.AppendMpub(nil, "t", [][]byte{[]byte("a"), []byte("bc")})
	body = body[strings.IndexByte(string(body), '\n')+1+4:] // without the command line and the body's size
	n.expect("POST", "/mpub?topic=t&binary=true", string(body), 200, "OK")
	n.expect("GET", "/stats?format=json", "", 200, `"message_count":2,"message_bytes":3`)
	for body, message := range map[string]string{
		"":                                  "BAD_BODY",
		"abc":                               "BAD_BODY",
		"\x00\x00\x00\x00":                  "BAD_BODY",
		"nonsense":                          "BAD_BODY",
		"\x00\x00\x00\x01\x00\x00\x00\x00":  "BAD_MESSAGE",
		"\x00\x00\x00\x01\x00\x00\x00\x05a": "BAD_MESSAGE",
	} {
		n.expect("POST", "/mpub?topic=t&binary=true", body, 413, message)
	}
	n.expect("GET", "/stats?format=json", "", 200, `"message_count":2,"message_bytes":3`)
	n.expect("POST", "/mpub?topic=u&binary=true", string(body)+"\n", 200, "OK")
	for i, value := range []string{"1", "TRUE", "yes", "maybe", "", "False"} { // as NSQ's nsqd accepts these values
		n.expect("POST", fmt.Sprintf("/mpub?topic=yes%d&binary=%s", i, value), string(body), 200, "OK")
		n.expect("GET", fmt.Sprintf("/stats?format=json&topic=yes%d", i), "", 200, `"message_count":2,"message_bytes":3`)
	}
	for i, query := range []string{"&binary=false", "&binary=0", ""} {
		n.expect("POST", fmt.Sprintf("/mpub?topic=no%d%s", i, query), "a\nbc\nd", 200, "OK")
		n.expect("GET", fmt.Sprintf("/stats?format=json&topic=no%d", i), "", 200, `"message_count":3,"message_bytes":4`)
	}
	n.expect("GET", "/stats?format=json&topic=u", "", 200, `"message_count":2,"message_bytes":3`)
}

// Consumers get no header with a message, so the broker refuses an encoded body.
func TestEncodedBodiesAreRefused(t *testing.T) {
	n := start(t, false)
	for _, path := range []string{"/pub?topic=t", "/mpub?topic=u", "/mpub?topic=t&binary=true"} {
		for coding, want := range map[string]int{"gzip": 415, "br": 415, "GZIP, identity": 415, "identity": 200, "": 200} {
			if path == "/mpub?topic=t&binary=true" && want == 200 {
				continue // x is no valid binary body
			}
			r := httptest.NewRequest("POST", path, strings.NewReader("x"))
			r.Header.Set("Content-Encoding", coding)
			w := httptest.NewRecorder()
			n.http.ServeHTTP(w, r)
			if w.Code != want || want == 415 && !strings.Contains(w.Body.String(), "without Content-Encoding") {
				t.Errorf("%s, %q: %d %s", path, coding, w.Code, w.Body)
			}
		}
	}
	for _, topic := range []string{"t", "u"} {
		n.expect("GET", "/stats?format=json&topic="+topic, "", 200, `"message_count":2,"message_bytes":2`)
	}
}

func TestBadRequestsChangeNothing(t *testing.T) {
	n := start(t, false)
	for _, c := range []struct {
		method, path, body string
		status             int
		message            string
	}{
		{"POST", "/pub", "x", 400, "MISSING_ARG_TOPIC"},
		{"POST", "/pub?topic=a%20b", "x", 400, "INVALID_TOPIC"},
		{"POST", "/pub?topic=t", "", 400, "MSG_EMPTY"},
		{"POST", "/pub?topic=t", "longer than ten", 413, "MSG_TOO_BIG"},
		{"POST", "/pub?topic=t&defer=-1", "x", 400, "INVALID_DEFER"},
		{"POST", "/mpub?topic=t", "\n\n", 200, "OK"},
		{"POST", "/mpub?topic=t", "short\nlonger than ten\n", 413, "MSG_TOO_BIG"},
		{"POST", "/mpub?topic=t&defer=x", "x", 400, "INVALID_DEFER"},
		{"POST", "/pub?topic=t&defer=", "x", 400, "INVALID_DEFER"},
		{"POST", "/pub?topic=", "x", 400, "INVALID_TOPIC"},
		{"POST", "/topic/delete?topic=", "", 404, "TOPIC_NOT_FOUND"},
		{"POST", "/topic/pause?topic=a*b", "", 404, "TOPIC_NOT_FOUND"},
		{"POST", "/topic/empty?topic=a*b", "", 400, "INVALID_TOPIC"},
		{"POST", "/channel/pause?topic=a*b&channel=c", "", 400, "INVALID_ARG_TOPIC"},
		{"POST", "/channel/pause?topic=t", "", 400, "MISSING_ARG_CHANNEL"},
		{"POST", "/mpub?topic=t", strings.Repeat("x\n", 30), 413, "BODY_TOO_BIG"},
		{"POST", "/topic/delete?topic=t", "", 404, "TOPIC_NOT_FOUND"},
		{"POST", "/topic/create", "", 400, "MISSING_ARG_TOPIC"},
		{"POST", "/channel/create?topic=t&channel=c", "", 404, "TOPIC_NOT_FOUND"},
		{"GET", "/pub?topic=t", "x", 405, "METHOD_NOT_ALLOWED"},
		{"POST", "/stats", "", 405, "METHOD_NOT_ALLOWED"},
		{"DELETE", "/config/limit", "", 405, "METHOD_NOT_ALLOWED"},
		{"GET", "/nope", "", 404, "NOT_FOUND"},
		{"GET", "/config/nope", "", 400, "INVALID_OPTION"},
		{"PUT", "/config/nope", "1", 400, "INVALID_OPTION"},
		{"PUT", "/config/limit", "many", 400, "INVALID_VALUE"},
		{"PUT", "/config/limit", "", 413, "INVALID_VALUE"},
		{"PUT", "/config/limit", strings.Repeat("1", 70_000), 413, "INVALID_VALUE"},
		{"PUT", "/debug/setblockrate?rate=much", "", 400, "INVALID_RATE"},
	} {
		n.expect(c.method, c.path, c.body, c.status, c.message)
	}
	testkit.MustEqual(t, len(n.broker.Topics()), 0, "topics were created on the way")
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	for path, message := range map[string]string{
		"/channel/create?topic=t":                        "MISSING_ARG_CHANNEL",
		"/channel/create?topic=t&channel=a*b":            "INVALID_ARG_CHANNEL",
		"/topic/limit?topic=t&rate=x&burst=1":            "INVALID_RATE",
		"/topic/limit?topic=t&rate=1&burst=":             "INVALID_BURST",
		"/topic/limit?topic=t&rate=-1&burst=1":           "INVALID_LIMIT",
		"/topic/limit?topic=t&rate=0&burst=0":            "INVALID_LIMIT",
		"/topic/limit?topic=t&rate=NaN&burst=1":          "INVALID_LIMIT",
		"/topic/limit?topic=t&rate=1&burst=1&policy=buy": "INVALID_POLICY",
	} {
		n.expect("POST", path, "", 400, message)
	}
	n.expect("POST", "/channel/delete?topic=t&channel=c", "", 404, "CHANNEL_NOT_FOUND")
	n.expect("GET", "/stats?format=json", "", 200, `"channels":[],`)
	n.expect("GET", "/stats?format=json", "", 200, `"limited":false`)
}

func TestAFullTopicRefuses(t *testing.T) {
	n := start(t, false)
	for range 3 {
		n.expect("POST", "/pub?topic=t", "x", 200, "OK")
	}
	n.expect("POST", "/pub?topic=t", "x", 503, "QUEUE_FULL")
	n.expect("POST", "/topic/limit?topic=u&rate=1&burst=1&policy=reject", "", 404, "TOPIC_NOT_FOUND")
	n.expect("POST", "/topic/create?topic=u", "", 200, "")
	n.expect("POST", "/channel/create?topic=u&channel=c", "", 200, "")
	n.expect("POST", "/topic/limit?topic=u&rate=0.001&burst=1&policy=reject", "", 200, "")
	n.expect("POST", "/pub?topic=u", "x", 429, "RATE_LIMITED") // its bucket begins empty
	share := tokenbucket.Share{Rate: 1, Burst: 1}
	testkit.Result(n.broker.Node().Grant("u", share, share, mono.Never, mono.Never, tokenbucket.Token)).Must(t)
	n.expect("POST", "/pub?topic=u", "x", 200, "OK")
	n.expect("POST", "/pub?topic=u", "x", 429, "RATE_LIMITED")
}

func TestAManagedBrokerLeavesTopicsToTheLoadDistributor(t *testing.T) {
	n := start(t, true)
	for _, path := range []string{"/topic/create?topic=t", "/topic/delete?topic=t"} {
		n.expect("POST", path, "", 409, "MANAGED")
	}
	n.expect("POST", "/pub?topic=t", "x", 404, "TOPIC_NOT_FOUND")
	testkit.Result(n.broker.CreateTopic("t")).Must(t)
	for path, instead := range map[string]string{
		"/topic/limit?topic=t&rate=1&burst=1": "srtm topic update t --rate=RATE --burst=BURST",
		"/topic/create?topic=u":               "srtm topic create u --rate=RATE --burst=BURST",
		"/topic/delete?topic=t":               "srtm topic delete t",
	} {
		n.expect("POST", path, "", 409, `"MANAGED"`)
		n.expect("POST", path, "", 409, instead)
	}
	n.expect("POST", "/channel/create?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/topic/pause?topic=t", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"paused":true`)
	n.expect("POST", "/pub?topic=t", "x", 200, "OK")
	n.expect("GET", "/stats?format=json", "", 200, `"depth":1`)
	n.expect("POST", "/topic/empty?topic=t", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"depth":0`)
	n.expect("POST", "/topic/unpause?topic=t", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"paused":false`)
	n.expect("POST", "/topic/pause?topic=u", "", 404, "TOPIC_NOT_FOUND")
}

func TestHealthSaysThatTheControlPlaneDoesNotAnswer(t *testing.T) {
	var lost error
	n := startWith(t, func(c *httpapi.Config) {
		c.Managed, c.Control = true, func() error { return lost }
	})
	n.expect("GET", "/healthz", "", 200, "ok\n")
	lost = obs.Notice("the loaddistributor does not answer")
	n.expect("GET", "/healthz", "", 200, "ok\nthe loaddistributor does not answer\n")
}

// A client that stops in the middle of a body must not keep a handler and the received bytes without a limit of time.
func TestABodyThatDoesNotComeIsGivenUp(t *testing.T) {
	n := start(t, false)
	server := httptest.NewUnstartedServer(n.http)
	server.Config.ReadTimeout = 50 * time.Millisecond
	server.Start()
	defer server.Close()
	for path, want := range map[string]string{"/pub": " 408 ", "/mpub": " 408 ", "/nope": " 404 ", "/topic/limit": " 403 "} {
		c := testkit.Result(net.Dial("tcp", server.Listener.Addr().String())).Must(t)
		defer c.Close()
		testkit.Result(fmt.Fprintf(c, "POST %s?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf", path)).Must(t)
		answer, err := io.ReadAll(c) // the server closes the connection, because the bytes after the body are no request
		if err != nil || !strings.Contains(string(answer), want) || want == " 408 " && !strings.Contains(string(answer), "BODY_TIMEOUT") {
			t.Errorf("%s: %q, %v", path, answer, err)
		}
	}
	testkit.Equal(t, len(n.broker.Topics()), 0, "topics were created on the way")
}

// If a topic is deleted after the look-up, publishing looks up the topic again, as over TCP. No caller gets the error
// that the broker is closing.
func TestPublishingWhileATopicComesAndGoes(t *testing.T) {
	n := start(t, false)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	defer wg.Wait()
	defer close(stop)
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = n.broker.DeleteTopic("t") // the topic may not exist
			}
		}
	})
	for range 2000 {
		for _, path := range []string{"/pub?topic=t", "/mpub?topic=t"} {
			if code, body := n.do("POST", path, "x"); code != 200 && !strings.Contains(body, "QUEUE_FULL") {
				t.Fatalf("%s: %d %s", path, code, body)
			}
		}
	}
}

// Clients can create any number of topics. An idle topic has no latencies and must not have the 50 series of latencies.
func TestAnIdleTopicHasNoLatencySeries(t *testing.T) {
	n := start(t, false)
	n.expect("POST", "/topic/create?topic=idle", "", 200, "")
	n.expect("POST", "/pub?topic=busy", "x", 200, "OK")
	n.expect("POST", "/channel/create?topic=busy&channel=c", "", 200, "")
	_, metrics := n.do("GET", "/metrics", "")
	for topic, want := range map[string]bool{"idle": false, "busy": true} {
		series := `srtm_nsqd_topic_latency_seconds_count{part="access",topic="` + topic + `"}`
		testkit.Equal(t, strings.Contains(metrics, series), want, "%s", series)
	}
	n.expect("GET", "/stats?format=json&topic=idle", "", 200, `"access_us":{"count":0,"p50":0`)
}

func TestBodiesTakeOnlySoMuchMemory(t *testing.T) {
	n := startWith(t, func(c *httpapi.Config) { c.MaxBodies = 8 })
	slow, in := io.Pipe()
	answer := httptest.NewRecorder()
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.http.ServeHTTP(answer, httptest.NewRequest("POST", "/pub?topic=t", slow))
	}()
	for _, part := range []string{"12345", "6", ""} { // the part before counts when the next part is read
		testkit.Result(io.WriteString(in, part)).Must(t)
	}
	n.expect("POST", "/pub?topic=t", "1234", 503, "TOO_MANY_REQUESTS")
	n.expect("POST", "/mpub?topic=t", "1\n23", 503, "TOO_MANY_REQUESTS")
	_ = in.Close()
	<-done
	testkit.Equal(t, answer.Code, 200, "the first: %s", answer.Body)
	n.expect("POST", "/pub?topic=t", "12345678", 200, "OK")
	n.expect("POST", "/pub?topic=t", "123456789", 503, "TOO_MANY_REQUESTS")
	n.expect("GET", "/metrics", "", 200, "srtm_nsqd_http_bodies_refused_total 3")
}

// unread is a client that reads nothing of the answer until the end.
type unread struct {
	*httptest.ResponseRecorder
	writes chan<- int
	end    <-chan struct{}
}

func (u unread) Write(p []byte) (int, error) {
	u.writes <- len(p)
	<-u.end
	return u.ResponseRecorder.Write(p)
}

// Unread answers take a bounded amount of memory, and a single answer is always served.
func TestAnswersTakeOnlySoMuchMemory(t *testing.T) {
	n := startWith(t, func(c *httpapi.Config) { c.MaxBodies = 8 })
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	n.expect("POST", "/channel/create?topic=t&channel=c", "", 200, "")
	for i, path := range []string{"/stats?format=json", "/stats", "/metrics", "/debug/state", "/channel/peek?topic=t&channel=c"} {
		writes, end, done := make(chan int), make(chan struct{}), make(chan struct{})
		slow := unread{httptest.NewRecorder(), writes, end}
		go func() {
			defer close(done)
			n.http.ServeHTTP(slow, httptest.NewRequest("GET", path, nil))
		}()
		if size := <-writes; size <= 8 {
			t.Fatalf("%s: an answer of %d bytes", path, size)
		}
		n.expect("GET", path, "", 503, "TOO_MANY_REQUESTS")
		n.expect("GET", "/ping", "", 200, "OK")
		close(end)
		<-done
		testkit.Equal(t, slow.Code, 200, "%s", path)
		n.expect("GET", "/metrics", "", 200, fmt.Sprint("srtm_nsqd_http_answers_refused_total ", i+1))
	}
}

func TestCursorsOverHTTP(t *testing.T) {
	path := t.TempDir()
	storage, err := broker.OpenStorage(broker.StorageConfig{
		Path: path, Metadata: filepath.Join(path, "metadata.json"), MaxRecord: 1 << 20, Overflow: 100, WriteThrough: true, Log: slog.New(slog.DiscardHandler),
	})
	testkit.Must(t, err)
	t.Cleanup(func() { // after the broker is closed
		testkit.NoError(t, storage.Close())
	})
	n := startOn(t, storage, func(*httpapi.Config) {})
	n.expect("POST", "/topic/create?topic=t", "", 200, "")
	n.expect("POST", "/topic/retain?topic=t&retain=24h,10GB", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"retain":"24h0m0s,10000000000B"`)
	n.expect("POST", "/channel/create?topic=t&channel=c", "", 200, "")
	n.expect("POST", "/pub?topic=t", "\x00\xff", 200, "OK")
	n.expect("POST", "/pub?topic=t", "two", 200, "OK")
	n.expect("GET", "/channel/peek?topic=t&channel=c", "", 200, `"body":"AP8="`)
	n.expect("GET", "/channel/peek?topic=t&channel=c&count=1", "", 200, `"offset":0,`)
	n.expect("POST", "/channel/seek?topic=t&channel=c&to=1", "", 200, `{"offset":1}`)
	n.expect("GET", "/channel/peek?topic=t&channel=c&count=1", "", 200, `"body":"dHdv"`)
	n.expect("POST", "/channel/seek?topic=t&channel=c&to=end", "", 200, `{"offset":2}`)
	n.expect("GET", "/channel/peek?topic=t&channel=c", "", 200, `{"messages":[]}`)
	n.expect("POST", "/channel/seek?topic=t&channel=c&to=2026-01-02T15:04:05Z", "", 200, `{"offset":0}`)
	n.expect("POST", "/channel/seek?topic=t&channel=c&to=begin", "", 200, `{"offset":0}`)
	n.expect("POST", "/topic/expiry?topic=t&ttl=1h&max_attempts=5&dead_letter=t.dead", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"expiry":{"ttl_seconds":3600,"max_attempts":5,"dead_letter":"t.dead"}`)
	n.expect("POST", "/channel/expiry?topic=t&channel=c&ttl=90s", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"expiry":{"ttl_seconds":90,"max_attempts":5,"dead_letter":"t.dead"}`)
	n.expect("DELETE", "/channel/expiry?topic=t&channel=c", "", 200, "")
	n.expect("DELETE", "/topic/expiry?topic=t", "", 200, "")
	n.expect("DELETE", "/topic/retain?topic=t", "", 200, "")
	n.expect("GET", "/stats?format=json", "", 200, `"retain":"0"`)
	for path, code := range map[string]string{
		"POST /channel/seek?topic=t&channel=c&to=3":          "400 INVALID_TO",
		"POST /channel/seek?topic=t&channel=c&to=yesterday":  "400 INVALID_TO",
		"POST /channel/seek?topic=t&channel=c":               "400 MISSING_ARG_TO",
		"POST /channel/seek?topic=t&channel=d&to=end":        "404 CHANNEL_NOT_FOUND",
		"POST /channel/seek?topic=u&channel=c&to=end":        "404 TOPIC_NOT_FOUND",
		"POST /topic/retain?topic=t":                         "400 MISSING_ARG_RETAIN",
		"POST /topic/retain?topic=t&retain=-1h":              "400 INVALID_RETAIN",
		"POST /topic/retain?topic=t&retain=1h,2h":            "400 INVALID_RETAIN",
		"POST /topic/retain?topic=t&retain=99999999999999TB": "400 INVALID_RETAIN",
		"POST /topic/retain?topic=u&retain=1h":               "404 TOPIC_NOT_FOUND",
		"POST /topic/expiry?topic=t":                         "400 MISSING_ARG_EXPIRY",
		"POST /topic/expiry?topic=t&ttl=soon":                "400 INVALID_TTL",
		"POST /topic/expiry?topic=t&ttl=1ns":                 "400 INVALID_EXPIRY",
		"POST /topic/expiry?topic=t&max_attempts=0":          "400 INVALID_MAX_ATTEMPTS",
		"POST /topic/expiry?topic=t&dead_letter=d":           "400 INVALID_EXPIRY",
		"POST /topic/expiry?topic=u&ttl=1h":                  "404 TOPIC_NOT_FOUND",
		"POST /channel/expiry?topic=t&channel=d&ttl=1h":      "404 CHANNEL_NOT_FOUND",
		"GET /channel/peek?topic=t&channel=c&count=0":        "400 INVALID_COUNT",
		"GET /channel/peek?topic=t&channel=c&count=1001":     "400 INVALID_COUNT",
		"GET /channel/peek?topic=t&channel=d":                "404 CHANNEL_NOT_FOUND",
	} {
		method, path, _ := strings.Cut(path, " ")
		status, text, _ := strings.Cut(code, " ")
		want, _ := strconv.Atoi(status)
		n.expect(method, path, "", want, text)
	}
	n.expect("POST", "/channel/create?topic=t&channel=e%23ephemeral", "", 200, "")
	n.expect("POST", "/channel/seek?topic=t&channel=e%23ephemeral&to=end", "", 400, "NO_CURSOR")
}

// In a cluster the control plane changes a channel on all brokers of its topic. An ephemeral channel, or a channel that
// the control plane does not have, is changed on this broker only.
func TestAManagedBrokerHasChannelsChangedByTheControlPlane(t *testing.T) {
	var asked []string
	var answer error
	n := startWith(t, func(c *httpapi.Config) {
		c.Managed = true
		c.ChangeChannel = func(_ context.Context, topic, channel string, change httpapi.ChannelChange) error {
			asked = append(asked, fmt.Sprint(topic, " ", channel, " ", change))
			return answer
		}
	})
	topic := testkit.Result(n.broker.CreateTopic("t")).Must(t)
	for _, channel := range []string{"c", "e#ephemeral"} {
		testkit.Must(t, topic.CreateChannel(channel))
	}
	paths := []string{"/channel/pause", "/channel/unpause", "/channel/delete"}
	for _, path := range paths {
		n.expect("POST", path+"?topic=t&channel=c", "", 200, "")
	}
	testkit.EqualSlices(t, asked, []string{"t c 0", "t c 1", "t c 2"}, "what the control plane was asked")
	testkit.EqualSlices(t, topic.ChannelNames(), []string{"c", "e#ephemeral"}, "channels that only the control plane deletes")
	for _, refusal := range []struct {
		err    error
		status int
		code   string
	}{
		{fmt.Errorf("channel: %w", httpapi.ErrControl), 503, "CONTROL_PLANE_FAILED"},
		{broker.ErrUnknownChannel, 404, "CHANNEL_NOT_FOUND"},
	} {
		answer = refusal.err
		for _, path := range paths {
			n.expect("POST", path+"?topic=t&channel=c", "", refusal.status, refusal.code)
		}
	}
	asked = nil
	for _, path := range paths {
		n.expect("POST", path+"?topic=t&channel=e%23ephemeral", "", 200, "")
	}
	testkit.Equal(t, len(asked), 0, "questions about an ephemeral channel")
	answer = httpapi.ErrUnmanaged
	for _, path := range paths {
		n.expect("POST", path+"?topic=t&channel=c", "", 200, "")
	}
	testkit.Equal(t, len(topic.ChannelNames()), 0, "channels")
}
