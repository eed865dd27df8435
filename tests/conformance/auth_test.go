package conformance

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// guard is an auth server as nsqd's documentation describes it. The secret selects the grant.
type guard struct {
	server *httptest.Server
	mu     struct {
		sync.Mutex
		grants map[string]any // by secret; none: 403
		asked  []url.Values
	}
}

// grant is the answer of an auth server.
type grant struct {
	TTL            int      `json:"ttl"` // seconds
	Identity       string   `json:"identity,omitempty"`
	IdentityURL    string   `json:"identity_url,omitempty"`
	Authorizations []permit `json:"authorizations"`
}

type permit struct {
	Topic       string   `json:"topic"`
	Channels    []string `json:"channels"`
	Permissions []string `json:"permissions"`
}

// allow grants everything that two regular expressions match.
func allow(topic, channel string, permissions ...string) grant {
	return grant{TTL: 3600, Identity: "somebody", IdentityURL: "https://who.example/somebody",
		Authorizations: []permit{{Topic: topic, Channels: []string{channel}, Permissions: permissions}}}
}

func newGuard(t *testing.T, grants map[string]any) *guard {
	t.Helper()
	g := &guard{}
	g.mu.grants = grants
	g.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.mu.asked = append(g.mu.asked, r.Form)
		answer, known := g.mu.grants[r.Form.Get("secret")]
		switch answer := answer.(type) {
		case string:
			fmt.Fprint(w, answer)
		case grant:
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(answer) // fails if the client has left
		default:
			http.Error(w, fmt.Sprintf("known: %t", known), http.StatusForbidden)
		}
	}))
	t.Cleanup(g.server.Close)
	return g
}

// set changes the grant of a secret; nil: no grant.
func (g *guard) set(secret string, answer any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.grants[secret] = answer
}

func (g *guard) asked() []url.Values {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]url.Values(nil), g.mu.asked...)
}

func (g *guard) flag() string {
	return "--auth-http-address=" + strings.TrimPrefix(g.server.URL, "http://")
}

// guarded starts an nsqd with its own guard.
func guarded(t *testing.T, grants map[string]any, flags ...string) (*node, *guard) {
	t.Helper()
	g := newGuard(t, grants)
	return start(t, append([]string{g.flag()}, flags...)...), g
}

// auth sends AUTH and returns the answer.
func (p *peer) auth(secret string) map[string]any {
	p.t.Helper()
	p.raw(sized("AUTH", secret))
	f := p.next()
	if f.kind != response {
		p.t.Fatalf("got %v, want the answer to AUTH", f)
	}
	var answer map[string]any
	if err := json.Unmarshal(f.data, &answer); err != nil {
		p.t.Fatalf("answer to AUTH %q: %v", f.data, err)
	}
	return answer
}

func TestAuth(t *testing.T) {
	group(t)
	check(t, "required", func(t *testing.T) {
		n, _ := guarded(t, map[string]any{})
		p := n.open(t)
		testkit.Equal(t, p.identify(nil)["auth_required"], true, "auth_required")
		for _, command := range []string{"SUB t ch\n", string(sized("PUB t", "x")), string(sized("MPUB t", batch("x"))), string(sized("DPUB t 0", "x"))} {
			p := n.open(t)
			p.send("%s", command)
			p.fatal("E_AUTH_FIRST")
		}
	})
	check(t, "granted", func(t *testing.T) {
		n, g := guarded(t, map[string]any{"s3cret": allow(".*", ".*", "subscribe", "publish")})
		p := n.open(t)
		p.identify(nil)
		answer := p.auth("s3cret")
		if answer["identity"] != "somebody" || answer["identity_url"] != "https://who.example/somebody" || answer["permission_count"] != 1.0 {
			t.Errorf("got %v", answer)
		}
		p.round(n)
		asked := g.asked()
		testkit.MustEqual(t, len(asked), 1, "times asked: %v", asked)
		if q := asked[0]; q.Get("remote_ip") != "127.0.0.1" || q.Get("tls") != "false" || q.Get("secret") != "s3cret" {
			t.Errorf("asked %v", q)
		}
	})
	check(t, "without IDENTIFY", func(t *testing.T) {
		n, _ := guarded(t, map[string]any{"s": allow(".*", ".*", "subscribe", "publish")})
		p := n.open(t)
		p.auth("s")
		p.round(n)
	})
	check(t, "over TLS", func(t *testing.T) {
		g := newGuard(t, map[string]any{"s": allow(".*", ".*", "subscribe", "publish")})
		n, a := secured(t, g.flag())
		p := n.open(t)
		p.encrypt(trusting(a))
		p.auth("s")
		p.round(n)
		if q := g.asked()[0]; q.Get("tls") != "true" {
			t.Errorf("asked %v", q)
		}
	})
	for name, c := range map[string]struct {
		answer any
		code   string
	}{
		"refused by the server":  {nil, "E_AUTH_FAILED"},
		"an answer that is none": {"{", "E_AUTH_FAILED"},
		"nothing granted":        {grant{TTL: 3600}, "E_UNAUTHORIZED"},
		"an unknown permission":  {allow(".*", ".*", "fly"), "E_AUTH_FAILED"},
		"a pattern that is none": {allow("(", ".*", "publish"), "E_AUTH_FAILED"},
	} {
		check(t, name, func(t *testing.T) {
			n, _ := guarded(t, map[string]any{"s": c.answer})
			p := n.open(t)
			p.raw(sized("AUTH", "s"))
			p.fatal(c.code)
		})
	}
	check(t, "no server there", func(t *testing.T) {
		unused := localtest.Ports(t, 1)
		n := start(t, "--auth-http-address="+unused[0])
		p := n.open(t)
		p.raw(sized("AUTH", "s"))
		p.fatal("E_AUTH_FAILED")
	})
	check(t, "a second server stands in", func(t *testing.T) {
		unused := localtest.Ports(t, 1)
		g := newGuard(t, map[string]any{"s": allow(".*", ".*", "subscribe", "publish")})
		n := start(t, "--auth-http-address="+unused[0], g.flag())
		for range 5 {
			p := n.open(t)
			p.auth("s")
			p.alive(n)
		}
	})
	check(t, "by permission, topic and channel", func(t *testing.T) {
		n, _ := guarded(t, map[string]any{
			"reader": allow("^open$", "^(left|right)$", "subscribe"),
			"writer": allow("^open$", ".*", "publish"),
		})
		as := func(secret string) *peer {
			p := n.open(t)
			p.auth(secret)
			return p
		}
		as("writer").pub("open", "x")
		as("writer").mpub("open", "x")
		as("writer").dpub("open", 0, "x")
		as("reader").sub("open", "left")
		for secret, commands := range map[string][]string{
			"writer": {"SUB open left\n", string(sized("PUB shut", "x")), string(sized("MPUB shut", batch("x"))), string(sized("DPUB shut 0", "x"))},
			"reader": {string(sized("PUB open", "x")), "SUB open middle\n", "SUB shut left\n"},
		} {
			for _, command := range commands {
				p := as(secret)
				p.send("%s", command)
				p.fatal("E_UNAUTHORIZED")
			}
		}
		if _, exists := n.lookup(t, "shut"); exists {
			t.Error("a topic was created by who must not")
		}
	})
	check(t, "twice", func(t *testing.T) {
		n, _ := guarded(t, map[string]any{"s": allow(".*", ".*", "publish")})
		p := n.open(t)
		p.auth("s")
		p.raw(sized("AUTH", "s"))
		p.fatal("E_INVALID")
	})
	check(t, "after the time to live it gets another query", func(t *testing.T) {
		short := allow(".*", ".*", "subscribe", "publish")
		short.TTL = 1
		n, g := guarded(t, map[string]any{"s": short})
		p := n.open(t)
		p.auth("s")
		p.pub("t", "x")
		testkit.WaitUntil(t, func() string {
			p.pub("t", "x")
			if asked := len(g.asked()); asked < 2 {
				return fmt.Sprintf("asked %d times", asked)
			}
			return ""
		})
		g.set("s", allow("^other$", ".*", "publish"))
		var last frame
		for range ticks(patience) {
			p.raw(sized("PUB t", "x"))
			if last = p.next(); last.kind == fault {
				break
			}
		}
		if !strings.HasPrefix(string(last.data), "E_UNAUTHORIZED") {
			t.Fatalf("got %v", last)
		}
		p.closed()
	})
	check(t, "a time to live is waited for", func(t *testing.T) {
		n, g := guarded(t, map[string]any{"s": allow(".*", ".*", "publish")})
		p := n.open(t)
		p.auth("s")
		for range 20 {
			p.pub("t", "x")
		}
		testkit.Equal(t, len(g.asked()), 1, "times asked")
	})
	for name, size := range map[string]int32{"0": 0, "-1": -1, "max body size + 1": maxBody + 1} {
		check(t, "secret of size "+name, func(t *testing.T) {
			n, _ := guarded(t, map[string]any{})
			p := n.open(t)
			p.raw(claimed("AUTH", size, ""))
			p.fatal("E_BAD_BODY")
		})
	}
	check(t, "a secret of any bytes", func(t *testing.T) {
		const secret = "a b&c=d%\x00\xff?ü"
		n, _ := guarded(t, map[string]any{secret: allow(".*", ".*", "publish")})
		p := n.open(t)
		p.auth(secret)
		p.alive(n)
	})
	check(t, "publishing over HTTP", func(t *testing.T) {
		n, g := guarded(t, map[string]any{"s": allow("^mine$", ".*", "publish")})
		ours := unlike(t, "http-auth")
		for _, path := range []string{"/pub", "/mpub"} {
			for _, c := range []struct {
				topic, secret string
				status        int // expected status
			}{
				{"mine", "", 401}, {"mine", "guess", 401}, {"other", "s", 403}, {"mine", "s", 200}, {"mine", "s", 200},
			} {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+n.http+path+"?topic="+c.topic, strings.NewReader("x"))
				testkit.Must(t, err)
				if c.secret != "" {
					r.Header.Set("Authorization", "Bearer "+c.secret)
				}
				answer := testkit.Result(http.DefaultClient.Do(r)).Must(t)
				answer.Body.Close()
				testkit.Equal(t, answer.StatusCode, map[bool]int{true: c.status, false: 200}[ours], "%s with %+v", path, c)
			}
		}
		// nsqd remembers the grant, and queries again for secrets without a grant.
		if asked := len(g.asked()); ours && asked != 3 || !ours && asked != 0 {
			t.Errorf("asked %d times", asked)
		}
	})
	check(t, "full URL with a path", func(t *testing.T) {
		g := newGuard(t, map[string]any{"s": allow(".*", ".*", "publish")})
		n := start(t, "--auth-http-address="+g.server.URL+"/some/path")
		p := n.open(t)
		p.auth("s")
		p.alive(n)
	})
}
