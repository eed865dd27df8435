package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/api/srtm/envoy"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

// daemonEnv makes the test program the daemon, so that a test can kill the daemon.
const daemonEnv = "SRTM_TEST_ADMISSION"

func TestMain(m *testing.M) {
	if os.Getenv(daemonEnv) != "" {
		main()
	}
	testkit.Main(m)
}

func TestFaultsAreNamedTogether(t *testing.T) {
	err := new(options).program().Execute(t.Context(), []string{
		"--role=both", "--udp-loops=0", "--max-keys=-1", "--checkpoint=1h", "--poll=0", "--default-reply=maybe", "--full-reply=never",
		"--database=mysql://x", "--mac-key-file=/nowhere", "--udp-address=192.0.2.1:4193", "--http-address=192.0.2.1:80", "--attempts=0", "--log-format=xml",
	})
	if !errors.As(err, new(program.UsageError)) {
		t.Fatalf("got %v", err)
	}
	for _, part := range []string{"--role", "--udp-loops", "--max-keys", "--checkpoint", "--poll", "--default-reply", "--full-reply", "--database", "--mac-key-file", "--http-address 192.0.2.1:80 is beyond loopback", "--attempts", "xml"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v\ndoes not say %q", err, part)
		}
	}
	good := testkit.File(t, "file", "7 30313233343536373839616263646566 # new\n\n6 30313233343536373839616263646566\n")
	for _, test := range []struct {
		args []string
		want string // "": fine
	}{
		{nil, ""},
		{[]string{"--role=router"}, "needs --server"},
		{[]string{"--server=127.0.0.1:1"}, "--server is for"},
		{[]string{"--role=router", "--server=127.0.0.1:1", "--default-reply-for=open/=admit"}, ""},
		{[]string{"--default-reply-for=open/"}, "want deny or admit"},
		{[]string{"--wait=0s"}, "--wait"},
		{[]string{"--wait=6s", "--lookup-wait=5s"}, "--wait"},
		{[]string{"--lookup-wait=0.5ms"}, "--lookup-wait"},
		{[]string{"--wait=2s"}, "--wait 2s: want at most --lookup-wait (1s)"},
		{[]string{"--wait=2s", "--role=router", "--server=127.0.0.1:1"}, ""},
		{[]string{"--udp-address=192.0.2.1:4193"}, "--udp-address 192.0.2.1:4193 is beyond loopback, which takes --mac-key-file"},
		{[]string{"--udp-address=192.0.2.1:4193", "--mac-key-file=" + good}, ""},
		{[]string{"--mac-key-file=" + testkit.File(t, "file", "# none\n")}, "has no key"},
		{[]string{"--mac-key-file=" + testkit.File(t, "file", "7 00")}, "16"},
		{[]string{"--mac-key-file=" + testkit.File(t, "file", "\n70000 30313233343536373839616263646566")}, "line 2"},
		{[]string{"--mac-key-file=" + testkit.File(t, "file", "7 xy")}, "not hex"},
		{[]string{"--mac-key-file=" + testkit.File(t, "file", "7")}, "line 1"},
	} {
		_, _, err := new(options).program().Parse(test.args, io.Discard)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want %q", test.args, err, test.want)
		}
	}
}

// start runs a daemon until the test ends, and returns its HTTP and gRPC addresses.
func start(t *testing.T, args ...string) (web string, admin srtmv1.AdmissionAdminClient) {
	t.Helper()
	web, admin, _ = dial(t, args...)
	return web, admin
}

// run runs a daemon until the test ends.
func run(t *testing.T, args ...string) {
	testkit.Run(t, func(ctx context.Context) error {
		return new(options).program().Execute(ctx, append([]string{"--attempts=10000", "--wait=5s", "--lookup-wait=5s", "--log-level=error"}, args...))
	})
}

func dial(t *testing.T, args ...string) (web string, admin srtmv1.AdmissionAdminClient, conn *grpc.ClientConn) {
	t.Helper()
	web, rpc := testkit.Address(t), testkit.Address(t)
	run(t, append([]string{"--http-address", web, "--grpc-address", rpc}, args...)...)
	conn, err := grpc.NewClient(rpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testkit.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	limit, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	admin = srtmv1.NewAdmissionAdminClient(conn)
	if _, err := admin.ListRules(limit, &srtmv1.ListRulesRequest{}, grpc.WaitForReady(true)); err != nil && status.Code(err) != codes.Unimplemented {
		t.Fatal(err)
	}
	return web, admin, conn
}

var web = &http.Client{Timeout: testkit.Hang, Transport: &http.Transport{DisableKeepAlives: true}}

// get returns the code, the body, and the headers that a caller acts on.
func get(t *testing.T, url, post string) string {
	t.Helper()
	r, err := http.NewRequest("GET", "http://"+url, nil)
	if post != "" {
		r, err = http.NewRequest("POST", "http://"+url, strings.NewReader(post))
	}
	testkit.Must(t, err)
	reply := testkit.Result(web.Do(r)).Must(t)
	defer reply.Body.Close()
	body := testkit.Result(io.ReadAll(reply.Body)).Must(t)
	text := fmt.Sprintf("%d %s %s %s", reply.StatusCode, strings.TrimSpace(string(body)), reply.Header.Get("RateLimit"), reply.Header.Get("Retry-After"))
	if reply.StatusCode == http.StatusBadRequest {
		return strings.TrimSpace(text)
	}
	return hundreds(t, strings.TrimSpace(text))
}

// hundreds rounds the times at the end of an answer up to hundreds of seconds, because the times are
// in the future.
func hundreds(t *testing.T, text string) string {
	return seconds.ReplaceAllStringFunc(text, func(times string) string {
		return number.ReplaceAllStringFunc(times, func(s string) string {
			n := testkit.Result(strconv.Atoi(s)).Must(t)
			return strconv.Itoa((n + 99) / 100 * 100)
		})
	})
}

var (
	seconds = regexp.MustCompile(`t=\d{3,}|w=\d{3,}| \d{3,}$`)
	number  = regexp.MustCompile(`\d+`)
)

func TestTheDaemon(t *testing.T) {
	at, admin := start(t, "--data-path", t.TempDir(), "--udp-address", "127.0.0.1:0")
	set := func(rules ...*srtmv1.AdmissionRule) error {
		_, err := admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: rules})
		return err
	}
	// The refills take longer than the test.
	testkit.Must(t, set(
		&srtmv1.AdmissionRule{Key: "user/1", RefillMilli: 1, Capacity: 2},
		&srtmv1.AdmissionRule{Key: "user/2", RefillMilli: 1, Capacity: 5},
		&srtmv1.AdmissionRule{Key: "ip/*", RefillMilli: 1, Capacity: 1, Shadow: true},
		&srtmv1.AdmissionRule{Key: "month/&cost=0", RefillMilli: 1000, RefillPeriodS: 30 * 86_400, Capacity: 1},
	))
	long := strings.Repeat("k", 257)
	for _, test := range []struct{ path, post, want string }{
		{"/qos?key=user/1", "", `200 TRUE "default";r=1;t=1000`},
		{"/qos?key=user/1&cost=2", "", `200 FALSE "default";r=1;t=1000 1000`},
		{"/auth?key=user/1", "", `204  "default";r=0;t=2000`},
		{"/auth?key=user/1", "", `403 denied "default";r=0;t=1000 1000`},
		{"/qos?key=nobody", "", `200 FALSE "default";r=0`},
		{"/qos", "", `400 key: want the parameter key, or one header Admission-Key; there are 0`},
		{"/qos?key=", "", `400 key: key of 0 bytes: want 1 to 256`},
		{"/auth?key=user/1&deny=429", "", `429 denied "default";r=0;t=1000 1000`},
		{"/auth?key=user/1&deny=500", "", `400 deny "500": want 403 or 429`},
		{"/auth?cost=1&key=user/1&cost=0", "", `400 cost is given 2 times`},
		{"/qos?key=user/1&key=user/2", "", `400 key is given 2 times`},
		{"/auth?deny=429&deny=403&key=user/1", "", `400 deny is given 2 times`},
		{"/qos?key=user/1&cost=", "", `400 cost "": want 0 to 4294967295 credits`},
		{"/qos?key=user/1&cost=4294967296", "", `400 cost "4294967296": want 0 to 4294967295 credits`},
		{"/qos?key=user/1&cost=1.5", "", `400 cost "1.5": want 0 to 4294967295 credits`},
		{"/qos?key=user/1&cost=5", "", `200 FALSE "default";r=0;t=2000`},
		{"/auth?key=" + long, "", `400 key: key of 257 bytes: want 1 to 256`},
		{"/qos?key=a&cost=-1", "", `400 cost "-1": want 0 to 4294967295 credits`},
		{"/v1/check", `{"checks":[{"key":"user/2","cost":3},{"key":"ip/1"}]}`, `200 {"admit":true,"results":[{"key":"user/2","admit":true,"left":2,"retry_after_ms":0,"reset_s":3000},{"key":"ip/1","admit":true,"left":0,"retry_after_ms":0,"reset_s":1000,"default":true}]}`},
		{"/v1/check", `{"checks":[{"key":"ip/1","cost":1},{"key":"nobody","cost":1}]}`, `200 {"admit":false,"results":[{"key":"ip/1","admit":true,"left":0,"retry_after_ms":0,"reset_s":1000,"default":true,"shadow":true},{"key":"nobody","admit":false,"left":0,"retry_after_ms":-1,"reset_s":-1,"default":true}]}`},
		{"/qos?key=user/2&cost=%zz", "", `400 invalid URL escape "%zz"`},
		{"/qos?key=user/2&cost=4;", "", `400 invalid semicolon separator in query`},
		{"/v1/check", "{\"checks\":[{\"key\":\"ip/\xff\"}]}", `400 not UTF-8`}, // else two keys would become the same key
		{"/v1/check", `{"checks":[{"key":"user/2","cost":-1}]}`, `400 json: cannot unmarshal number -1 into Go struct field .checks.cost of type uint32`},
		{"/v1/check", `{"checks":[{"key":"user/2","cost":1e99}]}`, `400 json: cannot unmarshal number 1e99 into Go struct field .checks.cost of type uint32`},
		{"/v1/check", `null`, `400 0 checks: want 1 to 100`},
		{"/v1/check", `[`, `400 unexpected EOF`},
		{"/v1/check", `{"checks":[]}`, `400 0 checks: want 1 to 100`},
		{"/v1/check", `{"checks":[{"key":"user/2"},{"key":""}]}`, `400 checks[1].key: key of 0 bytes: want 1 to 256`},
		{"/v1/check", `{"checks":[{"key":"user/2"}]}{}`, `400 more than one JSON value`},
		{"/v1/check", `{"checks":[{"key":"user/2"}],"more":1}`, `400 json: unknown field "more"`},
		{"/v1/check", `{"checks":[` + strings.Repeat(`{"key":"user/2"},`, 100) + `{"key":"user/2"}]}`, `400 101 checks: want 1 to 100`},
		{"/v1/check", `{"checks":[{"key":"` + strings.Repeat("k", 70_000) + `"}]}`, `413 http: request body too large`},
		{"/qos?key=user/2&cost=2", "", `200 TRUE "default";r=0;t=5000`}, // the refused request took nothing
		{"/healthz", "", "200 ok"},
	} {
		testkit.Equal(t, get(t, at+test.path, test.post), test.want, "%.60s %.60s", test.path, test.post)
	}
	// The gateway takes the key of a header unchanged, and only if the URL has no key.
	for _, test := range []struct {
		query string
		keys  []string
		want  string
	}{
		{"?cost=1", []string{"month/&cost=0"}, `204 "default";r=0;t=2592000 "default";q=1;w=2592000`},
		{"", []string{"month/&cost=0"}, `429 "default";r=0;t=2592000 "default";q=1;w=2592000 2592000`},
		{"?cost=0&key=user/2", []string{"month/&cost=0"}, `204 "default";r=0;t=5000 "default";q=5;w=5000`},
		{"", []string{"a", "b"}, `400`},
	} {
		r := testkit.Result(http.NewRequest("GET", "http://"+at+"/auth"+test.query, nil)).Must(t)
		r.Header["Admission-Key"] = test.keys
		if test.query == "" {
			r.URL.RawQuery = "deny=429"
		}
		reply := testkit.Result(web.Do(r)).Must(t)
		reply.Body.Close()
		h := reply.Header
		testkit.Equal(t, hundreds(t, strings.TrimSpace(fmt.Sprintf("%d %s %s %s", reply.StatusCode, h.Get("RateLimit"), h.Get("RateLimit-Policy"), h.Get("Retry-After")))), test.want, "%s %s", test.query, test.keys)
	}
	for _, want := range []string{`srtm_admission_decisions_total{reason="rule",verdict="admit"}`, `srtm_admission_router_replies_total{by="server",verdict="deny"}`} {
		if got := get(t, at+"/metrics", ""); !strings.Contains(got, want) {
			t.Errorf("no %s in the metrics", want)
		}
	}

	// The rules' API.
	for i, test := range []struct {
		err  error
		code codes.Code
	}{
		{set(), codes.InvalidArgument},
		{set(&srtmv1.AdmissionRule{Key: "k", Capacity: 1}), codes.InvalidArgument},
		{set(&srtmv1.AdmissionRule{Key: "nothing"}), codes.OK},
		{second(admin.GetRule(t.Context(), &srtmv1.GetRuleRequest{Key: "k"})), codes.NotFound},
		{second(admin.DeleteRule(t.Context(), &srtmv1.DeleteRuleRequest{Key: "k"})), codes.NotFound},
		{second(admin.ListRules(t.Context(), &srtmv1.ListRulesRequest{PageSize: 1001})), codes.InvalidArgument},
		{second(admin.Ask(t.Context(), &srtmv1.AskRequest{})), codes.InvalidArgument},
		{second(admin.MovePartitions(t.Context(), &srtmv1.MovePartitionsRequest{First: 2, Last: 1})), codes.InvalidArgument},
		{second(admin.MovePartitions(t.Context(), &srtmv1.MovePartitionsRequest{Last: 4096})), codes.InvalidArgument},
		{second(admin.MovePartitions(t.Context(), &srtmv1.MovePartitionsRequest{Last: 4095, Server: "nobody"})), codes.FailedPrecondition},
		{second(admin.DeleteRule(t.Context(), &srtmv1.DeleteRuleRequest{Key: "user/2"})), codes.OK},
	} {
		if status.Code(test.err) != test.code {
			t.Errorf("call %d: %v, want %v", i, test.err, test.code)
		}
	}
	var keys []string
	for request := (&srtmv1.ListRulesRequest{PageSize: 1}); ; {
		page := testkit.Result(admin.ListRules(t.Context(), request)).Must(t)
		for _, r := range page.GetRules() {
			keys = append(keys, fmt.Sprintf("%s,%v,%d", r.GetKey(), r.GetShadow(), r.GetChange()))
		}
		if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
			break
		}
	}
	testkit.Equal(t, strings.Join(keys, " "), "ip/*,true,3 month/&cost=0,false,4 nothing,false,5 user/1,false,1", "rules")
	if r, err := admin.Ask(t.Context(), &srtmv1.AskRequest{Key: "ip/2", Cost: 1, Peek: true}); err != nil || !r.GetAdmit() || !r.GetByDefault() || r.GetShadow() {
		t.Errorf("%v, %v", r, err)
	}
}

// HTTP and Envoy show a rule. The store may delay the answer.
func TestRulesAreShown(t *testing.T) {
	at, rules, conn := dial(t, "--data-path", t.TempDir(), "--udp-address", "127.0.0.1:0")
	set := func(key string, refill, capacity int64) {
		_, err := rules.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: key, RefillMilli: refill, Capacity: capacity}}})
		testkit.Must(t, err)
	}
	set("user/*", 30, 2)
	set("shop|path=/a%7Cb|user=7", 30, 3)
	set("shop|*", 1, 1)
	for _, test := range []struct{ key, want string }{{"user/1", `"default";q=2;w=67`}, {"nobody", ""}} {
		testkit.WaitFor(t, "the policy of "+test.key, func() bool {
			reply := testkit.Result(web.Get("http://" + at + "/qos?cost=0&key=" + test.key)).Must(t)
			reply.Body.Close()
			return reply.Header.Get("RateLimit-Policy") == test.want
		})
	}
	entry := func(k, v string) *envoy.RateLimitDescriptor_Entry {
		return &envoy.RateLimitDescriptor_Entry{Key: k, Value: v}
	}
	asks := envoy.NewRateLimitServiceClient(conn)
	long := entry("user", strings.Repeat("x", 300))
	for i, test := range []struct {
		request *envoy.RateLimitRequest
		want    string // of all checks and of each: code, left, reset in hundreds of seconds; Retry-After
	}{
		{&envoy.RateLimitRequest{Domain: "shop", HitsAddend: 2, Descriptors: []*envoy.RateLimitDescriptor{
			{Entries: []*envoy.RateLimitDescriptor_Entry{entry("path", "/a|b"), entry("user", "7")}},
			{Entries: []*envoy.RateLimitDescriptor_Entry{long}, HitsAddend: wrapperspb.UInt64(1)},
		}}, "OK OK,1,1 OK,0,10 "},
		{&envoy.RateLimitRequest{Domain: "shop", Descriptors: []*envoy.RateLimitDescriptor{
			{Entries: []*envoy.RateLimitDescriptor_Entry{entry("path", "/a|b"), entry("user", "7")}},
			{Entries: []*envoy.RateLimitDescriptor_Entry{long}},
		}}, "OVER_LIMIT OK,0,1 OVER_LIMIT,0,10 1000"},
		{&envoy.RateLimitRequest{Domain: "shop", Descriptors: []*envoy.RateLimitDescriptor{{HitsAddend: wrapperspb.UInt64(1 << 40)}}}, "OVER_LIMIT OVER_LIMIT,0,0 "},
		{&envoy.RateLimitRequest{Domain: "shop"}, "InvalidArgument"},
		{&envoy.RateLimitRequest{Descriptors: []*envoy.RateLimitDescriptor{{}}}, "InvalidArgument"},
		{&envoy.RateLimitRequest{Domain: "shop", Descriptors: []*envoy.RateLimitDescriptor{{IsNegativeHits: true}}}, "InvalidArgument"},
	} {
		reply, err := asks.ShouldRateLimit(t.Context(), test.request)
		got := status.Code(err).String()
		if err == nil {
			got = reply.GetOverallCode().String()
			for _, s := range reply.GetStatuses() {
				got += fmt.Sprintf(" %v,%d,%d", s.GetCode(), s.GetLimitRemaining(), (s.GetDurationUntilReset().GetSeconds()+99)/100)
			}
			got += " "
			for _, h := range reply.GetResponseHeadersToAdd() {
				got += h.GetValue()
			}
		}
		testkit.Equal(t, got, test.want, "request %d", i)
	}
	testkit.WaitFor(t, "the rule's rate", func() bool {
		reply, err := asks.ShouldRateLimit(t.Context(), &envoy.RateLimitRequest{Domain: "shop", Descriptors: []*envoy.RateLimitDescriptor{{Entries: []*envoy.RateLimitDescriptor_Entry{entry("path", "/a|b"), entry("user", "7")}}}})
		testkit.Must(t, err)
		limit := reply.GetStatuses()[0].GetCurrentLimit()
		return limit.GetRequestsPerUnit() == 108 && limit.GetUnit() == envoy.RateLimitResponse_RateLimit_HOUR
	})
}

func second[A any](_ A, err error) error { return err }

// A router process sends questions to a server process. Both have the same MAC key. The server ignores a router with
// another MAC key.
func TestRouterAsksServerWithItsMACKey(t *testing.T) {
	data, key, other := t.TempDir(), testkit.File(t, "file", "7 30313233343536373839616263646566"), testkit.File(t, "file", "7 40313233343536373839616263646566")
	udp := testkit.Address(t) // a free TCP port; the test uses the same number for UDP
	serverWeb, _ := start(t, "--role=server", "--data-path", data, "--udp-address", udp, "--mac-key-file", key)
	testkit.Equal(t, get(t, serverWeb+"/qos?key=k", ""), "404 404 page not found", "a server routes")
	routerWeb, admin := start(t, "--role=router", "--data-path", data, "--server", udp, "--mac-key-file", key)
	_, err := admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: "k", RefillMilli: 1, Capacity: 2}}})
	testkit.Must(t, err)
	testkit.Equal(t, get(t, routerWeb+"/qos?key=k", ""), `200 TRUE "default";r=1;t=1000`)
	strangerWeb, _ := start(t, "--role=router", "--data-path", data, "--server", udp, "--mac-key-file", other, "--attempts=2", "--default-reply-for=k=admit")
	_, err = admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: "open", FailOpen: true}}})
	testkit.Must(t, err)
	testkit.WaitFor(t, "fail_open", func() bool { return get(t, strangerWeb+"/qos?key=open", "") == "200 TRUE" }) // from its rule
	testkit.Equal(t, get(t, strangerWeb+"/qos?key=other", ""), "200 FALSE", "with another key")
	if got := get(t, strangerWeb+"/qos?key=k", ""); got != "200 TRUE" { // from the default reply, which knows no limit
		t.Errorf("with another key: %s", got)
	}
	testkit.WaitFor(t, "datagrams with the other key", func() bool {
		return !strings.Contains(get(t, serverWeb+"/metrics", ""), `datagrams_total{reason="mac"} 0`)
	})
	if got := get(t, serverWeb+"/metrics", ""); !strings.Contains(got, `{reason="rule",verdict="admit"} 1`+"\n") {
		t.Errorf("the server decided more than one question:\n%s", got)
	}
}

// Two servers share one store. The second server has the credits of the first after the move, and
// after the first has gone.
func TestPartitionsMove(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	at, admin := start(t, "--data-path", data, "--udp-address", "127.0.0.1:0")
	_, err := admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: "k", RefillMilli: 1, Capacity: 3, Strict: true}}})
	testkit.Must(t, err)
	testkit.MustEqual(t, get(t, at+"/qos?key=k", ""), `200 TRUE "default";r=2;t=1000`)
	name := testkit.Address(t)
	other, _ := start(t, "--data-path", data, "--udp-address", name)
	first := int32(rule.Partition([]byte("k"), rule.Partitions)) / 16 * 16
	testkit.Result(admin.MovePartitions(t.Context(), &srtmv1.MovePartitionsRequest{First: first, Last: first + 15, Server: name})).Must(t)
	testkit.WaitFor(t, "the move", func() bool {
		reply := testkit.Result(admin.ListPartitions(t.Context(), &srtmv1.ListPartitionsRequest{})).Must(t)
		return slices.ContainsFunc(reply.GetPartitions(), func(p *srtmv1.AdmissionPartitions) bool {
			return p.GetServer() == name && p.GetTarget() == "" && p.GetFirst() == first && p.GetLast() == first+15
		})
	})
	for i, web := range []string{other, at} { // the client still sends questions to the first server, which redirects the client
		testkit.WaitFor(t, "an answer", func() bool { return strings.Contains(get(t, web+"/qos?key=k&cost=0", ""), "r=") })
		testkit.Equal(t, get(t, web+"/qos?key=k", ""), fmt.Sprintf(`200 TRUE "default";r=%d;t=%d`, 1-i, 2000+1000*i))
	}
}

// kill -9 of an owner: another server takes over. Saved charges are not admitted again, and strict
// keys begin empty.
func TestAnOwnerIsKilled(t *testing.T) {
	t.Parallel()
	data, at, name := t.TempDir(), testkit.Address(t), testkit.Address(t)
	owner := exec.Command(os.Args[0], "--data-path", data, "--http-address", at, "--grpc-address", testkit.Address(t), "--udp-address", name, "--checkpoint=10ms", "--attempts=10000", "--wait=5s", "--lookup-wait=5s", "--log-level=error")
	owner.Env = append(os.Environ(), daemonEnv+"=1")
	owner.Stderr = os.Stderr
	testkit.Must(t, owner.Start())
	kill := sync.OnceFunc(func() { owner.Process.Kill(); owner.Wait() })
	t.Cleanup(kill)
	testkit.WaitFor(t, "the owner", func() bool {
		reply, err := web.Get("http://" + at + "/healthz")
		if err == nil {
			reply.Body.Close()
		}
		return err == nil && reply.StatusCode == http.StatusOK
	})
	other, admin := start(t, "--data-path", data, "--udp-address", "127.0.0.1:0")
	_, err := admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{
		{Key: "k", RefillMilli: 1, Capacity: 10}, {Key: "strict", RefillMilli: 1, Capacity: 10, Strict: true},
	}})
	testkit.Must(t, err)
	for _, key := range []string{"k", "strict"} {
		testkit.MustEqual(t, get(t, at+"/qos?cost=7&key="+key, ""), `200 TRUE "default";r=3;t=7000`)
	}
	testkit.WaitFor(t, "check-points", func() bool {
		_, after, _ := strings.Cut(get(t, at+"/metrics", ""), "\nsrtm_admission_checkpoint_keys_total ")
		return strings.HasPrefix(after, "2\n")
	})
	kill()
	for _, test := range []struct{ ask, want string }{
		{"k&cost=0", `200 TRUE "default";r=3;t=7000`}, {"k&cost=4", "200 FALSE"}, {"k&cost=3", `200 TRUE "default";r=0;t=10000`},
		{"strict&cost=0", `200 TRUE "default";r=0;t=10000`}, {"strict", "200 FALSE"},
	} {
		var got string
		testkit.WaitFor(t, "another server", func() bool {
			got = get(t, other+"/qos?key="+test.ask, "")
			return strings.Contains(got, "r=")
		})
		if !strings.HasPrefix(got, test.want) {
			t.Errorf("%s: %s, want %s", test.ask, got, test.want)
		}
	}
}
