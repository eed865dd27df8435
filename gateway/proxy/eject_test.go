package proxy

import (
	"bufio"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// warnings is a log. Tests can read its warnings.
type warnings struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *warnings) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// count returns how many warnings contain text.
func (l *warnings) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

func (l *warnings) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// The log has one line when a server is ejected, however many requests fail meanwhile, and one line
// when the server answers again.
func TestEjectionsAreLogged(t *testing.T) {
	var well atomic.Bool
	ill := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		if !well.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	var log warnings
	g := serve(t, several(ill), func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	ejected, again := `msg="server ejected after several failed requests in a row; it gets no requests until a trial succeeds" url=`+ill+` reason="answered with status 503"`+"\n", `msg="server answers again" url=`+ill+"\n"
	for range 8 { // 5 failures eject the server; then the only server gets one request at a time
		g.get(t, "/")
	}
	testkit.WaitFor(t, "the log says that it is ejected", func() bool { return log.count(ejected) > 0 })
	testkit.Equal(t, log.count(again), 0, "lines that it answers")
	well.Store(true)
	g.get(t, "/")
	testkit.WaitFor(t, "the log says that it answers", func() bool { return log.count(again) > 0 })
	testkit.Equal(t, log.count("server ejected")+log.count("server answers"), 2, "lines of it in all")
}

// The log line of a failure names the failed server and the cause, in words that suggest a remedy.
func TestCausesOfFailuresAreLogged(t *testing.T) {
	var log warnings
	serveLogged := func(urls ...string) *gateway {
		return serve(t, several(urls...), func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		})
	}
	refusedURL := closedAt(t)
	answers := func(text string) string {
		return rawServer(t, func(c net.Conn, r *bufio.Reader) {
			if readHead(r) != "" {
				_, _ = io.WriteString(c, text)
			}
		})
	}
	secured := httptest.NewTLSServer(http.NotFoundHandler())
	secured.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	t.Cleanup(secured.Close)
	for reason, url := range map[string]string{
		"connection refused: nothing listens there":             refusedURL,
		"its answer is no HTTP/1.1: is the URL's scheme right?": answers("220 smtp ready\r\n"),
		"ended the connection without an answer":                answers(""),
		"ended the connection in the middle of its answer":      answers("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"),
		"the header of its answer is too large":                 answers("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 300<<10) + "\r\n\r\n"),
		"its certificate is not trusted: see ca_file and host":  secured.URL,
		"HTTP/2 failed: does the server speak it?":              "h2c" + strings.TrimPrefix(answers("HTTP/1.1 400 Bad Request\r\n\r\n"), "http"),
	} {
		g := serveLogged(url)
		for range 3 {
			c, r := g.dial(t)
			write(t, c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
			_, _ = io.Copy(io.Discard, io.LimitReader(r, 1)) // a part of the body, or the end
		}
		g.idle(t)
		line := `msg="a server failed a request" url=` + url + ` reason="` + reason + `"`
		if !strings.Contains(reason, ":") && !strings.Contains(reason, " ") {
			line = strings.ReplaceAll(line, `"`, "")
		}
		if log.count(line) != 3 {
			t.Errorf("%d lines of %s:\n%s", log.count(line), line, log.all())
		}
	}
	// The lines are rate-limited, whatever the number of requests.
	g := serveLogged(refusedURL)
	for range 100 {
		g.get(t, "/")
	}
	if n := log.count("connection refused: nothing listens there"); n > 3+40 {
		t.Errorf("%d lines", n)
	}
}
