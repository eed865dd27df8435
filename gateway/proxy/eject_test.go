package proxy

import (
	"bytes"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// lines is a log that tests read.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// with returns the lines that have this in them.
func (l *lines) with(text string) (some []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, text) {
			some = append(some, line)
		}
	}
	return some
}

// The log has one line when a server is ejected, whatever fails meanwhile, and one when it
// answers again: which it is, why, and for how long.
func TestEjectionsAreLogged(t *testing.T) {
	var well atomic.Bool
	ill := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		if !well.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	broken := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write([]byte("half"))
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	gone := closedAt(t)
	for _, test := range []struct{ url, reason string }{{ill, `reason="status 503"`}, {gone, `connection refused`}, {broken, `unexpected EOF`}} {
		var log lines
		g := serve(t, several(test.url), func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
		ask := func() {
			c, r := g.dial(t)
			defer c.Close()
			write(t, c, "GET / HTTP/1.1\r\nHost: shop.example\r\n\r\n")
			_, _ = http.ReadResponse(r, nil) // or half of one
			g.idle(t)
		}
		for range 8 { // 5 eject it; and then it gets one at a time, since there is no other
			ask()
		}
		ejected := log.with("server ejected")
		if len(ejected) != 1 || !strings.Contains(ejected[0], "level=WARN") || !strings.Contains(ejected[0], "url="+test.url+" ") || !strings.Contains(ejected[0], test.reason) || !strings.Contains(ejected[0], "probe_after=1s") {
			t.Errorf("%q, want one of %s with %s", ejected, test.url, test.reason)
		}
		if test.url != ill {
			continue
		}
		if back := log.with("again"); back != nil {
			t.Errorf("while it fails: %q", back)
		}
		well.Store(true)
		ask()
		ask()
		if back := log.with("server answers again"); len(back) != 1 || !regexp.MustCompile(`url=`+ill+` ejected_for=[1-9]`).MatchString(back[0]) {
			t.Errorf("%q", back)
		}
	}
}

// One of several is passed over while it is ejected, which is said once as well.
func TestAnEjectionBesideOthersIsLogged(t *testing.T) {
	var log lines
	gone := closedAt(t)
	well := backend(t, func(http.ResponseWriter, *http.Request) {})
	g := serve(t, several(gone, well), func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	for range 40 {
		if res, _ := g.get(t, "/"); res.StatusCode != http.StatusOK {
			t.Fatal(res.Status)
		}
	}
	if got := log.with("server ejected"); len(got) != 1 || !strings.Contains(got[0], "url="+gone+" ") || !strings.Contains(got[0], "refused") {
		t.Errorf("%q", got)
	}
}
