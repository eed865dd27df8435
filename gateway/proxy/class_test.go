package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/internal/testkit"
)

// asker is an admission service.
type asker func(key string, cost uint32) client.Decision

func (a asker) Ask(_ context.Context, key string, cost uint32) client.Decision {
	return a(key, cost)
}

func TestClassAsksAdmission(t *testing.T) {
	url := backend(t, func(http.ResponseWriter, *http.Request) {})
	class := func(name, failure string) string {
		return fmt.Sprintf("[[class]]\nname = %[1]q\nmatch = [{ path = \"/%[1]s\" }]\nadmission = \"tenant/{tenant}/{class}\"\non_admission_failure = %[2]q", name, failure)
	}
	var asked []string
	g := serve(t, one(url, class("open", "open"), class("closed", "closed")), func(c *Config) {
		c.Admission = asker(func(key string, cost uint32) client.Decision {
			asked = append(asked, fmt.Sprint(key, " ", cost))
			switch len(asked) {
			case 1:
				return client.Decision{Admit: true, Left: 7}
			case 2:
				return client.Decision{RetryAfter: 1500 * time.Millisecond}
			}
			return client.Decision{Unanswered: true, Admit: len(asked)%2 == 0} // for either default reply
		})
	})
	for i, c := range []struct {
		path, want, retry string
	}{
		{"/open", "200", ""}, {"/open", "429", "2"},
		{"/open", "200", ""}, {"/open", "200", ""}, {"/closed", "429", "1"}, {"/closed", "429", "1"},
		{"/other", "200", ""},
	} {
		res, _ := g.get(t, c.path)
		if !strings.HasPrefix(res.Status, c.want) || c.retry != "" && res.Header.Get("Srtm-Class") != strings.Trim(c.path, "/") || res.Header.Get("Retry-After") != c.retry {
			t.Errorf("%d, %s: %s, %v", i, c.path, res.Status, res.Header)
		}
	}
	if got := strings.Join(asked, ", "); !strings.HasPrefix(got, "tenant//open 1, tenant//open 1") || strings.Contains(got, "other") || len(asked) != 6 {
		t.Errorf("asked %s", got)
	}
	if s := g.Status().Classes; s[0].Denied != 1 || s[1].Denied != 2 || s[0].Sent != 3 || s[1].Sent != 0 {
		t.Errorf("%+v", s)
	}
}

// HTTP/2 clients send many requests on one connection, and cancel some requests.
func TestHTTP2(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/hold" {
			<-r.Context().Done()
		}
		w.Header().Set(http.TrailerPrefix+"X-Sum", fmt.Sprint(len(body)))
		_, _ = w.Write(body)
	})
	g := serve(t, fmt.Sprintf("[[class]]\nname = \"c\"\nwait = \"10m\"\n[[server]]\nurl = %q", url), nil)
	protocols := &http.Protocols{}
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols}
	defer transport.CloseIdleConnections()
	c := &http.Client{Transport: transport}
	errs := make(chan error)
	const n = 40
	for i := range n {
		go func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			path := "/echo"
			if i%4 == 0 {
				path = "/hold"
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.at+path, strings.NewReader(strings.Repeat("x", 100_000)))
			if err != nil {
				errs <- err
				return
			}
			if path == "/hold" {
				go func() {
					eventuallyTrue(func() bool { return g.Status().Servers[0].InFlight > 0 })
					cancel()
				}()
			}
			res, err := c.Do(req)
			if path == "/hold" && errors.Is(err, context.Canceled) {
				errs <- nil
				return
			}
			if err != nil {
				errs <- err
				return
			}
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if err == nil && (res.ProtoMajor != 2 || len(body) != 100_000 || res.Trailer.Get("X-Sum") != "100000" || res.Header.Get("Srtm-Class") != "c") {
				err = fmt.Errorf("%v: %d bytes, %v", res, len(body), res.Trailer)
			}
			errs <- err
		}()
	}
	for range n {
		testkit.NoError(t, <-errs)
	}
	g.idle(t)
	if s := g.Status().Servers[0]; s.Departed != n*3/4 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
}

func eventuallyTrue(there func() bool) {
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for !there() {
		<-ticker.C
	}
}

// Servers that fail fast, die or lie get fewer requests than a working server.
func TestFaultyServers(t *testing.T) {
	good := backend(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "good") })
	fast := backend(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusServiceUnavailable) })
	half := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		fmt.Fprint(w, "half")
	})
	overclaiming := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Endpoint-Load-Metrics", "TEXT request_cost.time=1e300, utilization.time=0, named_metrics.inflight=1e300")
		panic(http.ErrAbortHandler)
	})
	for _, kind := range []balance.Kind{balance.JBQ, balance.Busy, balance.RoundRobin} {
		text := "[[class]]\nname = \"c\"\nwait = \"10m\"\n"
		for _, url := range []string{good, fast, half, overclaiming, closedAt(t)} {
			text += fmt.Sprintf("[[server]]\nurl = %q\n", url)
		}
		g := serve(t, text, func(c *Config) { c.Balance = kind })
		answered := 0
		for range 200 {
			c, r := g.dial(t)
			write(t, c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
			if res, err := http.ReadResponse(r, nil); err == nil {
				if body, _ := io.ReadAll(res.Body); string(body) == "good" {
					answered++
				}
			}
			c.Close()
		}
		g.idle(t)
		s := g.Status().Servers
		if answered < 150 || s[0].Failed != 0 || s[0].Departed != uint64(answered) {
			t.Errorf("%v: %d of 200 answered; %+v", kind, answered, s)
		}
		for _, v := range s[1:] {
			if !v.Ejected || v.Departed != 0 || v.Failed > 20 {
				t.Errorf("%v: %+v", kind, v)
			}
		}
	}
}

// A path that a lenient server would serve as another class does not reach a server.
func TestAmbiguousPathIsRefused(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RequestURI) })
	g := serve(t, "[[class]]\nname = \"paid\"\nmatch = [{ path = \"/paid/\" }]\n"+fmt.Sprintf("[[server]]\nurl = %q", url+"/app"), nil)
	for path, want := range map[string]int{"/../app/paid/x": 400, "/x/%2e%2e/../app/paid/x": 400, "/paid/..;/free": 400, "/paid/..%5cfree": 400, "/paid/..\\free": 400, "/paid/x;y=1": 200, "/paid/../free": 200} {
		if res, body := g.get(t, path); res.StatusCode != want || want == 200 && body != "/app"+path {
			t.Errorf("%s: %s %q", path, res.Status, body)
		}
	}
	testkit.Equal(t, g.Status().Servers[0].Sent, 2, "requests got to the server")
}
