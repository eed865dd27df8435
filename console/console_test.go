package console

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/topics"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// evil is a name that would be dangerous as markup.
const evil = `<script>alert(1)</script>"'&`

// fake is a loaddistributor with a number of topics.
type fake struct {
	srtmv1.UnimplementedAdminServiceServer
	names   []string
	brokers []*srtmv1.Broker // nil: two brokers

	mu      sync.Mutex
	calls   int
	deleted []string
	updates []*srtmv1.UpdateTopicRequest
	drains  []string
}

func (f *fake) UpdateTopic(_ context.Context, req *srtmv1.UpdateTopicRequest) (*srtmv1.UpdateTopicResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.updates = append(f.updates, req)
	return &srtmv1.UpdateTopicResponse{Topic: f.topic(req.Spec.Name)}, nil
}

func (f *fake) ListBrokers(context.Context, *srtmv1.ListBrokersRequest) (*srtmv1.ListBrokersResponse, error) {
	if f.brokers != nil {
		return &srtmv1.ListBrokersResponse{Brokers: f.brokers}, nil
	}
	return &srtmv1.ListBrokersResponse{Brokers: []*srtmv1.Broker{
		{Id: "b1", Mcap: 1000, Allocated: 500, Connected: true, OfferedRate: 777, HttpAddress: "b1.example:4151", Topics: f.names[:1]},
		{Id: "b2" + evil, Mcap: 2000, Draining: true, Connected: true, Version: evil},
	}}, nil
}

func (f *fake) topic(name string) *srtmv1.Topic {
	l := histogram.NewLatency()
	l.RecordMany(3*time.Millisecond, 100)
	stats := &srtmv1.TopicStats{Interval: durationpb.New(10 * time.Second), Offered: 1000, Released: 1000, Delivered: 990, Access: obs.LatencyProto(l), Processing: obs.LatencyProto(l), Delivery: obs.LatencyProto(l)}
	met := true
	return &srtmv1.Topic{
		Spec: &srtmv1.TopicSpec{
			Name: name, Channels: []string{"c" + evil}, PlacementPolicy: evil,
			Contract: &srtmv1.Contract{RateMilli: 1_100_000, Burst: 40, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(20 * time.Millisecond)}},
		},
		State: srtmv1.TopicState_TOPIC_STATE_ACTIVE, Reason: evil,
		Quotas: []*srtmv1.BrokerQuota{{BrokerId: "b1", Publishers: 12}},
		Status: &srtmv1.TopicStatus{
			Pooled: stats, SloMet: &met, Fitting: evil, Fit: &srtmv1.Fit{Rounds: []*srtmv1.FitRounds{{K: 1, Rounds: 2}}, Trials: []*srtmv1.FitTrial{{Quotas: []*srtmv1.BrokerQuota{{BrokerId: evil}}, Delivered: 200, Exceeded: 50, Confidence: 0.9, Verdict: "missed" + evil}}}, Moving: evil,
			Moves:   []*srtmv1.PublisherMove{{PublisherId: evil, From: evil, To: evil, Reason: srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE, Why: evil, By: evil}},
			Brokers: []*srtmv1.BrokerTopicStatus{{BrokerId: "b1", Share: &srtmv1.Share{RateMilli: 1_100_000, Burst: 40}, Window: stats, Last: stats}},
		},
	}
}

func (f *fake) ListTopics(_ context.Context, req *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	from := 0
	_, _ = fmt.Sscan(req.PageToken, &from)
	to := min(from+int(req.PageSize), len(f.names))
	r := &srtmv1.ListTopicsResponse{}
	for _, name := range f.names[from:to] {
		t := f.topic(name)
		t.Status = nil
		r.Topics = append(r.Topics, t)
	}
	if to < len(f.names) {
		r.NextPageToken = fmt.Sprint(to)
	}
	return r, nil
}

func (f *fake) GetTopic(_ context.Context, req *srtmv1.GetTopicRequest) (*srtmv1.GetTopicResponse, error) {
	f.mu.Lock()
	f.calls++
	f.mu.Unlock()
	if !slices.Contains(f.names, req.Name) {
		return nil, status.Errorf(codes.NotFound, "topic %s", req.Name)
	}
	return &srtmv1.GetTopicResponse{Topic: f.topic(req.Name)}, nil
}

// serve runs a console on a fake cluster, and returns its address and a browser that keeps cookies.
func serve(t *testing.T, f *fake, set func(*Config)) (*Console, string, *http.Client) {
	t.Helper()
	pipe := bufconn.Listen(64 << 10)
	server := grpc.NewServer()
	srtmv1.RegisterAdminServiceServer(server, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(pipe) }()
	t.Cleanup(func() { server.Stop(); <-done })
	conn, err := grpc.NewClient("passthrough:test", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	testkit.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	cfg := Config{API: conn, Log: slog.New(slog.DiscardHandler)}
	if set != nil {
		set(&cfg)
	}
	c := testkit.Result(New(cfg)).Must(t)
	web := httptest.NewServer(c)
	t.Cleanup(web.Close)
	t.Cleanup(c.end)
	jar, _ := cookiejar.New(nil) // has no errors
	browser := &http.Client{Jar: jar, Timeout: testkit.Hang}
	t.Cleanup(browser.CloseIdleConnections)
	c.round(t.Context(), 0)
	return c, web.URL, browser
}

func get(t *testing.T, browser *http.Client, url string) (int, string) {
	t.Helper()
	return read(t, testkit.Result(browser.Get(url)).Must(t))
}

func read(t *testing.T, r *http.Response) (int, string) {
	t.Helper()
	defer r.Body.Close()
	return r.StatusCode, string(testkit.Result(io.ReadAll(r.Body)).Must(t))
}

// No name from outside becomes markup, on any page.
func TestNamesAreText(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"plain", evil}}, nil)
	for _, path := range []string{"/ui/", "/ui/topics?q=" + url.QueryEscape(evil), "/ui/topic?name=" + url.QueryEscape(evil), "/ui/compare?a=plain&b=" + url.QueryEscape(evil), "/ui/topic?name=no" + url.QueryEscape(evil)} {
		_, body := get(t, browser, base+path)
		if !strings.Contains(body, "&lt;script&gt;") || strings.Contains(body, "<script>") || strings.Contains(body, " style=") {
			t.Errorf("%s:\n%s", path, body)
		}
	}
}

// A topic's page shows the moves and their reasons, and what the topic's fit tried. The overview shows
// the load offered to brokers.
func TestWhysAreShown(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"t"}}, nil)
	if _, body := get(t, browser, base+"/ui/topic?name=t"); !strings.Contains(body, "Who was moved, and why") || !strings.Contains(body, "<td>contract change</td>") || !strings.Contains(body, "25.00 %") || !strings.Contains(body, "<td>missed&lt;") {
		t.Errorf("%s", body)
	}
	if _, body := get(t, browser, base+"/ui/"); !strings.Contains(body, `<td class="n">777</td>`) {
		t.Errorf("%s", body)
	}
}

// Ten thousand topics are listed in pages, and few of them have a history.
func TestManyTopics(t *testing.T) {
	f := &fake{}
	for i := range 10_000 {
		f.names = append(f.names, fmt.Sprintf("topic-%05d", i))
	}
	c, base, browser := serve(t, f, nil)
	_, body := get(t, browser, base+"/ui/topics?from=9990")
	if !strings.Contains(body, "9991 to 10000 of 10000") || strings.Count(body, "topic-0") != 2*10 || !strings.Contains(body, "– stands for topics") {
		t.Errorf("%s", body)
	}
	if _, body = get(t, browser, base+"/ui/topics"); len(body) > 50_000 {
		t.Errorf("a page has %d bytes", len(body))
	}
	for i := range 3 * maxTracked {
		get(t, browser, base+"/ui/topic?name="+f.names[9000+i])
	}
	c.watched.mu.Lock()
	defer c.watched.mu.Unlock()
	if n := len(c.watched.topics); n != maxTracked || c.watched.topics[f.names[9000+3*maxTracked-1]] == nil {
		t.Errorf("%d topics have a history", n)
	}
}

// Streams above the bound, of all callers or of one caller, are refused and counted. Streams that end
// make room.
func TestStreamsAreBounded(t *testing.T) {
	c, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Streams = 6
		c.CallerName = func(r *http.Request) string { return r.Header.Get("X-Who") + r.RemoteAddr }
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := func(who string) *http.Response {
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, base+"/ui/live/topic?name=t", nil)
		req.Header.Set("X-Who", who)
		return testkit.Result(browser.Do(req)).Must(t)
	}
	taken := func(n int, who string) {
		t.Helper()
		for range n {
			r := open(who)
			t.Cleanup(func() { _ = r.Body.Close() })
			lines := bufio.NewScanner(r.Body)
			if !lines.Scan() || lines.Text() != "event: live" {
				t.Fatalf("%d %q", r.StatusCode, lines.Text())
			}
		}
	}
	refused := func(bound, who string) {
		t.Helper()
		for range 20 {
			if r := open(who); r.StatusCode != http.StatusServiceUnavailable || r.Header.Get("Retry-After") == "" {
				t.Fatalf("%d %v", r.StatusCode, r.Header)
			} else {
				_ = r.Body.Close()
			}
		}
		testkit.Equal(t, testutil.ToFloat64(c.refused.WithLabelValues(bound)), 20, "refused for the bound on %s", bound)
	}
	taken(3, "certificate greedy at ") // each from its own port
	refused("caller", "certificate greedy at ")
	taken(2, "certificate other at ")
	taken(1, "") // without a certificate, counted by host
	refused("all", "certificate third at ")
	cancel()
	testkit.WaitFor(t, "streams to end", func() bool { return c.streams.open() == 0 })
	testkit.Equal(t, len(c.streams.byCaller), 0, "callers are remembered: %v", c.streams.byCaller)
}

// The console serves only its own names in clear, and no page may frame another.
func TestHostsAndHeaders(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) { c.Hosts = []string{"console.example"} })
	for host, want := range map[string]int{
		"localhost": 200, "localhost:4161": 200, "127.0.0.1:1": 200, "[::1]:4161": 200, "console.example": 200, "CONSOLE.example.:80": 200,
		"evil.example": 421, "localhost.evil.example:4161": 421, "127.0.0.1.evil.example": 421,
	} {
		req, _ := http.NewRequest(http.MethodGet, base+"/ui/", nil)
		req.Host = host
		r := testkit.Result(browser.Do(req)).Must(t)
		_ = r.Body.Close()
		csp := r.Header.Get("Content-Security-Policy")
		if r.StatusCode != want || !strings.Contains(csp, "default-src 'self'") || !strings.Contains(csp, "frame-ancestors 'none'") || strings.Contains(csp, "unsafe") || r.Header.Get("X-Frame-Options") != "DENY" {
			t.Errorf("%s: %d, %v", host, r.StatusCode, r.Header)
		}
	}
}

var csrfOf = regexp.MustCompile(`name="csrf" value="([0-9a-f]{64})"`)

// With tokens, only logged-in users see pages. A session is tied to its cookie. A change requires the
// role, and must come from a page of the console.
func TestPagesNeedALogin(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.May = func(r *http.Request, need secure.Role) (string, bool) {
			role := map[string]secure.Role{"reader": secure.ReadOnly, "boss": secure.Admin}[secure.TokenOf(r.Header.Get("Authorization"))]
			if role >= need {
				return "", true
			}
			return "too little", role > 0
		}
	})
	post := func(path, csrf, origin string, form url.Values) int {
		form.Set("csrf", csrf)
		req, _ := http.NewRequest(http.MethodPost, base+path, strings.NewReader(form.Encode()))
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if origin != "" {
			req.Header.Set("Origin", origin)
		}
		r := testkit.Result(browser.Do(req)).Must(t)
		_ = r.Body.Close()
		return r.StatusCode
	}
	code, page := get(t, browser, base+"/ui/")
	if code != 200 || !strings.Contains(page, "Log in") || strings.Contains(page, "Brokers") {
		t.Fatalf("%d %s", code, page)
	}
	csrf := csrfOf.FindStringSubmatch(page)[1]
	if code, _ := get(t, browser, base+"/ui/live/"); code != http.StatusUnauthorized {
		t.Errorf("a stream without a token: %d", code)
	}
	testkit.Equal(t, post("/ui/login", csrf, "", url.Values{"token": {"guess"}}), http.StatusUnauthorized, "a wrong token")
	testkit.Equal(t, post("/ui/login", strings.Repeat("0", 64), "", url.Values{"token": {"boss"}}), http.StatusForbidden, "without the page's CSRF token")
	testkit.Equal(t, post("/ui/login", csrf, "http://evil.example", url.Values{"token": {"boss"}}), http.StatusForbidden, "from another origin")
	testkit.Equal(t, post("/ui/login", csrf, base, url.Values{"token": {"reader"}}), http.StatusOK, "a good token")
	code, page = get(t, browser, base+"/ui/")
	if code != 200 || !strings.Contains(page, "Brokers") || strings.Contains(page, "Create topic") || strings.Contains(page, csrf) {
		t.Errorf("a reader: %d, %s", code, page)
	}
	if code, page = get(t, browser, base+"/ui/create"); code != http.StatusForbidden {
		t.Errorf("a reader's form: %d", code)
	}
	if code, _ := get(t, browser, base+"/ui/peek?topic=t&channel=c"); code != http.StatusForbidden {
		t.Errorf("a reader's look at messages: %d", code)
	}
	csrf = csrfOf.FindStringSubmatch(page)[1]
	testkit.Equal(t, post("/ui/action/drain", csrf, base, url.Values{}), http.StatusForbidden, "a reader's change")
	testkit.Equal(t, post("/ui/logout", csrf, base, url.Values{}), http.StatusOK, "logout")
	if _, page = get(t, browser, base+"/ui/"); strings.Contains(page, "Brokers") {
		t.Error("logged in after the end")
	}
}

// If no browser shows a page, the console queries for it seldom.
func TestSeldomAsked(t *testing.T) {
	f := &fake{names: []string{"t"}}
	c, base, browser := serve(t, f, nil)
	asked := func(n int) int {
		before := f.calls
		c.round(t.Context(), n)
		return f.calls - before
	}
	testkit.Equal(t, asked(1), 0, "times asked while no browser looks")
	testkit.Equal(t, asked(seldom), 1, "times asked for the history")
	get(t, browser, base+"/ui/topic?name=t")
	testkit.Equal(t, asked(1), 1, "times asked for a page")
}

// Actions go to each broker that has the topic, and are logged with the user's name. Looks at messages
// are logged, too, and message bodies are shown as text.
func TestActionsReachEachBrokerAndAreLogged(t *testing.T) {
	var mu sync.Mutex
	var asked []string
	var out bytes.Buffer
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(&out, nil))
		c.CallerName = func(*http.Request) string { return "somebody" }
		c.Tenant = func(*http.Request) string { return "Müller" }
		c.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, r.Method+" "+r.URL.Host+r.URL.Path)
			switch r.URL.Path {
			case "/channel/peek":
				_ = json.NewEncoder(w).Encode(map[string]any{"messages": []peeked{{ID: evil, Body: []byte(evil)}, {Body: []byte{0xff, 0}}, {Body: bytes.Repeat([]byte("ä"), maxPeeked)}}})
			case "/channel/empty":
				http.Error(w, evil, http.StatusInternalServerError)
			default:
				_, _ = w.Write([]byte(`{}`))
			}
		}))
	})
	_, page := get(t, browser, base+"/ui/peek?topic=t&channel=c")
	if !strings.Contains(page, "&lt;script&gt;") || strings.Contains(page, "<script>") || !strings.Contains(page, "ff 00") || !strings.Contains(page, "… (8192 bytes in all)") {
		t.Errorf("%s", page)
	}
	_, page = get(t, browser, base+"/ui/create")
	form := url.Values{"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "topic": {"t"}, "channel": {"c"}}
	form.Set("sure", "yes")
	for what, want := range map[string]int{"pause": 200, "empty": 502, "seek": 400, "nothing": 404, "publish": 400} {
		r := testkit.Result(browser.PostForm(base+"/ui/action/"+what, form)).Must(t)
		body, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if r.StatusCode != want || bytes.Contains(body, []byte("<script>")) {
			t.Errorf("%s: %d %s", what, r.StatusCode, body)
		}
	}
	if !slices.Contains(asked, "POST b1.example:4151/channel/pause") {
		t.Errorf("asked: %q", asked)
	}
	for _, want := range []string{`msg="console action" action=pause by=somebody topic=t channel=c`, `msg="console action failed" action=empty by=somebody`, "action=peek by=somebody"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log does not say %s:\n%s", want, out.String())
		}
	}
	form.Del("csrf")
	r := testkit.Result(browser.PostForm(base+"/ui/action/pause", form)).Must(t)
	if _ = r.Body.Close(); r.StatusCode != http.StatusForbidden {
		t.Errorf("without a token: %d", r.StatusCode)
	}
}

// The form of a topic's page changes the topic's settings alone, and lists all faults of the input.
// The page adds up the messages that all answering brokers have given up.
func TestExpiryIsShownAndChanged(t *testing.T) {
	f := &fake{names: []string{"t"}, brokers: []*srtmv1.Broker{
		{Id: "b1", Connected: true, HttpAddress: "b1", Topics: []string{"t"}}, {Id: "b2", Connected: true, HttpAddress: "b2", Topics: []string{"t"}}, {Id: "b3", Connected: true, HttpAddress: "b3", Topics: []string{"t"}},
	}}
	_, base, browser := serve(t, f, func(c *Config) {
		c.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Host == "b3" {
				http.Error(w, evil, http.StatusInternalServerError)
				return
			}
			_, _ = io.WriteString(w, `{"topics":[{"topic_name":"t","srtm":{"expired":2},"channels":[{"channel_name":"c","srtm":{"expired":3,"given_up":4,"dead_lettered":500,"expiry":{"ttl_seconds":60}}}]}]}`)
		}))
	})
	_, page := get(t, browser, base+"/ui/topic?name=t")
	for _, want := range []string{
		"stay until consumers finish them", `<th scope="row">none: before their token</th><td class="n">4</td>`,
		"<th scope=\"row\">c</th><td class=\"n\">6</td><td class=\"n\">8</td><td class=\"n\">1\u202f000</td>", "The counts lack a broker: b3: ",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %s:\n%s", want, page)
		}
	}
	if _, page := get(t, browser, base+"/ui/channel?topic=t&channel=c"); !strings.Contains(page, "Messages are discarded after 1m0s.") {
		t.Errorf("the page of the channel does not say when messages expire:\n%s", page)
	}
	change := func(ttl, attempts, dead, channels string) (int, string) {
		return read(t, testkit.Result(browser.PostForm(base+"/ui/action/expiry", url.Values{
			"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "topic": {"t"}, "ttl": {ttl}, "attempts": {attempts}, "dead": {dead}, "channels": {channels},
		})).Must(t))
	}
	code, text := change("soon", "0", "", "c:ttl=x")
	for _, want := range []string{"TTL:", "such as 1h", "deliveries:", "such as 5", "is not CHANNEL:ttl=10m"} {
		if code != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%d, want 400 with %s:\n%s", code, want, text)
		}
	}
	testkit.Equal(t, len(f.updates), 0, "updates after what cannot be")
	code, text = change(" 1h ", "5", "t.dead", "c:ttl=1m\r\nd:max-attempts=2\r\n")
	if code != http.StatusOK || !strings.Contains(text, "discarded after 1h0m0s, given up after 5 deliveries, then sent to t.dead") || len(f.updates) != 1 {
		t.Fatalf("%d, %d updates: %s", code, len(f.updates), text)
	}
	testkit.Equal(t, strings.Join(f.updates[0].UpdateMask.Paths, " "), "expiry.ttl expiry.max_attempts expiry.dead_letter_topic channel_expiry")
	spec := f.updates[0].Spec
	testkit.Equal(t, topics.ExpiryText(spec.Expiry), "discarded after 1h0m0s, given up after 5 deliveries, then sent to t.dead")
	testkit.Equal(t, channelExpiryLines(spec.ChannelExpiry), "c:ttl=1m0s\nd:max-attempts=2")
	if code, text = change("", "", "", ""); code != http.StatusOK || !strings.Contains(text, "stay until consumers finish them") {
		t.Errorf("%d: %s", code, text)
	}
}
