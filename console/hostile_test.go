package console

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

func (f *fake) DeleteTopic(_ context.Context, req *srtmv1.DeleteTopicRequest) (*srtmv1.DeleteTopicResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deleted = append(f.deleted, req.Name)
	return &srtmv1.DeleteTopicResponse{}, nil
}

// post sends a form as a page of the console would.
func post(t *testing.T, browser *http.Client, base, path string, form url.Values) (int, string) {
	t.Helper()
	return read(t, testkit.Result(browser.PostForm(base+path, form)).Must(t))
}

// roles makes a console distinguish a reader and an operator by a test header.
func roles(role *secure.Role) func(*Config) {
	return func(c *Config) {
		c.May = func(_ *http.Request, need secure.Role) (string, bool) {
			if *role >= need {
				return "", true
			}
			return "too little", true
		}
	}
}

// Operators delete a topic with the button on its page, after a confirmation. Other users have no
// button.
func TestDeleteTopic(t *testing.T) {
	f, role := &fake{names: []string{"t"}}, secure.Admin
	_, base, browser := serve(t, f, roles(&role))
	_, page := get(t, browser, base+"/ui/topic?name=t")
	if !strings.Contains(page, `action="/ui/action/delete"`) {
		t.Fatalf("%s", page)
	}
	form := url.Values{"topic": {"t"}}
	if code, _ := post(t, browser, base, "/ui/action/delete", form); code != http.StatusForbidden || f.deleted != nil {
		t.Errorf("without the page's token: %d, %q", code, f.deleted)
	}
	form.Set("csrf", csrfOf.FindStringSubmatch(page)[1])
	if code, body := post(t, browser, base, "/ui/action/delete", form); code != http.StatusOK || f.deleted != nil || !strings.Contains(body, "Delete topic t with all its messages, on all brokers?") || !strings.Contains(body, `name="sure" value="yes"`) {
		t.Errorf("before the confirmation: %d, %q: %s", code, f.deleted, body)
	}
	form.Set("sure", "yes")
	if code, body := post(t, browser, base, "/ui/action/delete", form); code != http.StatusOK || !slices.Equal(f.deleted, []string{"t"}) || !strings.Contains(body, "Topic t was deleted.") || !strings.Contains(body, "<h1>Topics</h1>") {
		t.Errorf("%d, %q: %s", code, f.deleted, body)
	}
	role = secure.ReadOnly
	if _, page = get(t, browser, base+"/ui/topic?name=t"); strings.Contains(page, "/ui/action/") {
		t.Errorf("a reader's page: %s", page)
	}
}

// A reader tries every action, with a valid token of a page: each is refused.
func TestReadersChangeNothing(t *testing.T) {
	role := secure.ReadOnly
	f := &fake{names: []string{"t"}}
	var asked []string
	c, base, browser := serve(t, f, func(c *Config) {
		roles(&role)(c)
		c.Brokers = InProcess(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked = append(asked, r.Method+" "+r.URL.Path) }))
		c.Lookup = c.Brokers
	})
	_, page := get(t, browser, base+"/ui/login")
	form := url.Values{"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "topic": {"t"}, "channel": {"c"}, "broker": {"b1"}, "node": {"n:1"}, "to": {"end"}, "name": {"x"}, "do": {"create"}}
	for what := range c.actions() {
		if code, _ := post(t, browser, base, "/ui/action/"+what, form); code != http.StatusForbidden {
			t.Errorf("%s: %d", what, code)
		}
	}
	for _, path := range []string{"/ui/create", "/ui/action/../action/delete", "/ui/action/%64elete"} {
		if code, _ := post(t, browser, base, path, form); code != http.StatusForbidden && code != http.StatusNotFound && code != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", path, code)
		}
	}
	for _, path := range []string{"/ui/peek?topic=t&channel=c", "/ui/pee%6b?topic=t&channel=c", "/ui/create"} {
		if code, _ := get(t, browser, base+path); code != http.StatusForbidden {
			t.Errorf("%s: %d", path, code)
		}
	}
	if f.deleted != nil || asked != nil {
		t.Errorf("done: %q, %q", f.deleted, asked)
	}
}

// The cookie is hidden from scripts and goes only to the console's pages, from the same site. Behind a
// proxy with TLS the cookie is never sent in clear.
func TestCookieIsHiddenAndSameSite(t *testing.T) {
	_, base, _ := serve(t, &fake{names: []string{"t"}}, nil)
	for forwarded, secret := range map[string]bool{"": false, "http": false, "https": true} {
		req, _ := http.NewRequest(http.MethodGet, base+"/ui/", nil)
		req.Header.Set("X-Forwarded-Proto", forwarded)
		r := testkit.Result(http.DefaultTransport.RoundTrip(req)).Must(t)
		_ = r.Body.Close()
		if c := r.Cookies(); len(c) != 1 || !c[0].HttpOnly || c[0].SameSite != http.SameSiteStrictMode || c[0].Path != Prefix || c[0].Secure != secret {
			t.Errorf("%q: %v", forwarded, c)
		}
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// The console serves only its own files, and redirects no client elsewhere.
func TestPathsStayInside(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"t"}}, nil)
	browser.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for _, path := range []string{
		"/ui/assets/../templates/layout.html", "/ui/assets/%2e%2e/templates/layout.html", "/ui/assets/..%2ftemplates%2flayout.html", "/ui/assets/..%5ctemplates",
		"/ui/assets//etc/passwd", "/ui/assets/%2fetc/passwd", "/ui/assets/ui.js%00", "/ui/templates/layout.html", "/ui/assets/",
		"/ui//evil.example", "/ui/..//evil.example/ui/", "/ui/login?next=https://evil.example/", "/ui/%0d%0aLocation:%20https://evil.example",
	} {
		r := testkit.Result(browser.Get(base + path)).Must(t)
		body, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		to, _ := url.Parse(r.Header.Get("Location"))
		if bytes.Contains(body, []byte("{{")) || bytes.Contains(body, []byte("root:")) || bytes.Contains(body, []byte("<pre>")) || to.Host != "" || strings.HasPrefix(to.Path, "//") {
			t.Errorf("%s: %d to %q: %.200s", path, r.StatusCode, to, body)
		}
	}
}

// Names that are long, run from right to left or look like a script are text in the page, and links go
// only to the console's pages.
func TestHostileNames(t *testing.T) {
	for what, name := range map[string]string{
		"long": strings.Repeat("x", 10_000), "right to left": "\u202egnp.exe\u2066", "a link": "javascript:alert(1)", "an end of a line": "a\r\nevent: live\r\ndata: <u>",
		"no letters": "\xff\xfe", "an attribute": `x" onmouseover="alert(1)`, "a template": "{{.User.CSRF}}",
	} {
		c, base, browser := serve(t, &fake{names: []string{name}}, nil)
		for _, path := range []string{"/ui/topic?name=", "/ui/channel?topic=", "/ui/compare?b=x&a=", "/ui/topics?q=", "/ui/broker?id="} {
			_, body := get(t, browser, base+path+url.QueryEscape(name))
			for _, bad := range []string{`href="javascript:`, ` onmouseover="`, "<u>", `href="http`} {
				if strings.Contains(body, bad) {
					t.Errorf("%s, %s: has %s", what, path, bad)
				}
			}
			if n := len(body); n > 400_000 {
				t.Errorf("%s, %s: a page of %d bytes", what, path, n)
			}
		}
		if n := len(c.watched.topics); n > 3 {
			t.Errorf("%s: %d topics are followed", what, n)
		}
	}
}

// Ten thousand brokers, nodes and topics of a broker are listed in pages.
func TestListsComeInPages(t *testing.T) {
	f := &fake{names: []string{"t"}}
	for i := range 10_000 {
		f.brokers = append(f.brokers, &srtmv1.Broker{Id: fmt.Sprintf("broker-%05d", i), HttpAddress: "b:1", Connected: true})
	}
	many := func(field, one string) http.RoundTripper {
		var all []string
		for i := range 10_000 {
			all = append(all, fmt.Sprintf(one, i))
		}
		text := []byte(`{"` + field + `": [` + strings.Join(all, ",") + `]}`)
		return InProcess(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(text) }))
	}
	_, base, browser := serve(t, f, func(c *Config) {
		c.Lookup = many("producers", `{"hostname": "node-%05d", "topics": ["t"], "tombstones": [false]}`)
		c.Brokers = many("topics", `{"topic_name": "topic-%05d"}`)
	})
	for path, want := range map[string]string{
		"/ui/brokers?from=": "broker-%05d</a>", "/ui/nodes?from=": "node-%05d<", "/ui/broker?id=broker-00007&from=": "topic-%05d</a>",
	} {
		for _, from := range []int{0, 9990} {
			code, body := get(t, browser, base+path+fmt.Sprint(from))
			if first := fmt.Sprintf(want, from); code != 200 || !strings.Contains(body, first) || len(body) > 100_000 || !strings.Contains(body, fmt.Sprintf("%d to %d of 10000", from+1, min(from+perPage, 10_000))) {
				t.Errorf("%s%d: %d, %d bytes, perhaps without %s", path, from, code, len(body), first)
			}
			if back, forward := strings.Contains(body, ">Back</a>"), strings.Contains(body, ">Forward</a>"); back != (from > 0) || forward != (from == 0) {
				t.Errorf("%s%d: back %v, forward %v", path, from, back, forward)
			}
		}
	}
	for from, want := range map[string]int{"-1": perPage, "x": perPage, "99999999999999999999": 0, "200": 0, "": perPage, "99": 1} {
		if part, p := paged(make([]int, 100), "/", url.Values{"from": {from}}, "from"); len(part) != want || p.To-p.From > perPage {
			t.Errorf("from %s: %d, %+v", from, len(part), p)
		}
	}
}

// The console drops and counts a stream reader that reads nothing, and frees its slot. Until then the
// console keeps no more for the reader than one write.
func TestSlowReaderIsDropped(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		c, err := New(Config{Self: "x", Streams: 1, Metrics: reg, Log: slog.New(slog.DiscardHandler), Brokers: InProcess(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{}`)
		}))})
		testkit.Must(t, err)
		ln := testkit.NewPiped()
		server := &http.Server{Handler: c}
		served := make(chan struct{})
		go func() { defer close(served); _ = server.Serve(ln) }()
		mine, theirs := net.Pipe()
		ln.Conns <- theirs
		testkit.Result(io.WriteString(mine, "GET /ui/live/ HTTP/1.1\r\nHost: localhost\r\n\r\n")).Must(t)
		synctest.Wait()
		testkit.Equal(t, c.streams.open(), 1, "the stream has not begun")
		<-time.After(slowReader + time.Millisecond) // virtual
		synctest.Wait()
		if c.streams.open() != 0 || testutil.ToFloat64(c.dropped) != 1 {
			t.Errorf("%d streams, %v dropped", c.streams.open(), testutil.ToFloat64(c.dropped))
		}
		_ = mine.Close()
		_ = server.Close()
		<-served
		c.end()
	})
}

// A broker's page shows the load of each event loop between two looks.
func TestLoopsAreShown(t *testing.T) {
	var l loops
	r, _ := metrics("b", []byte("# TYPE "+busyMetric+" counter\n"+busyMetric+"{loop=\"10\"} 7\n"+busyMetric+"{loop=\"2\"} 1.5\nsrtm_nsqd_loop_connections{loop=\"2\"} 3\n"), time.Time{})
	busy := r.busy
	if busy["10"] != 7 || busy["2"] != 1.5 || len(busy) != 2 {
		t.Fatalf("%v", busy)
	}
	now := time.Unix(1e9, 0)
	if got := l.update("b", busy, now); got != nil {
		t.Errorf("at the first look: %v", got)
	}
	next := map[string]float64{"2": 2.25, "10": 6, "11": 1} // loop 10 restarted its counter
	want := []utilised{{"2", 0.75}}
	testkit.EqualSlices(t, l.update("b", next, now.Add(time.Second)), want)
	testkit.EqualSlices(t, l.update("b", next, now.Add(1100*time.Millisecond)), want, "of what was remembered")
	for i := range 10 * maxRemembered {
		l.update(fmt.Sprint(i), busy, now)
	}
	if len(l.samples) > maxRemembered {
		t.Errorf("%d brokers are known", len(l.samples))
	}
}
