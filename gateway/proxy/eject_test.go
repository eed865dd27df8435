package proxy

import (
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// warnings is a log of which tests read the warnings.
type warnings struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *warnings) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// count is how many of them have this in them.
func (l *warnings) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

// The log has one line when a server is ejected, however many requests fail meanwhile, and one
// when it answers again.
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
	ejected, again := `msg="server ejected" url=`+ill+"\n", `msg="server answers again" url=`+ill+"\n"
	for range 8 { // 5 eject it, and then it gets one at a time, since there is no other
		g.get(t, "/")
	}
	testkit.WaitFor(t, "the log says that it is ejected", func() bool { return log.count(ejected) > 0 })
	testkit.Equal(t, log.count(again), 0, "lines that it answers")
	well.Store(true)
	g.get(t, "/")
	testkit.WaitFor(t, "the log says that it answers", func() bool { return log.count(again) > 0 })
	testkit.Equal(t, log.count("server"), 2, "lines of it in all")
}
