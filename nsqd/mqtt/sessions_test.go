package mqtt

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	nsq "github.com/srtm-io/srtm/nsq/session"
)

// server returns a server without kept sessions. Its clock does not run.
func server(t *testing.T) *Server {
	t.Helper()
	s := testkit.Result(New(Config{
		Folder: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		Publish: func(context.Context, string, string, *nsq.Will) error { return nil },
	}, prometheus.NewRegistry())).Must(t)
	t.Cleanup(s.Close)
	return s
}

// The time of a session may change with each connection. The session ends at its last time, and the work
// does not grow with the number of connections.
func TestSessionsEndAtTheirLastTime(t *testing.T) {
	s := server(t)
	start := s.now()
	at := func(after time.Duration) mono.Time { return start.Add(after) }
	connectFor := func(id string, expiry time.Duration) {
		t.Helper()
		e := testkit.Result(s.sessions.hold(t.Context(), id, "", nil)).Must(t)
		testkit.Must(t, s.sessions.save(e, &record{ClientID: id, Expiry: expiry}))
		s.sessions.leave(e, at(expiry), nil, 0)
	}
	ends := func(now mono.Time) int {
		s.due(now)
		s.sessions.wg.Wait()
		s.sessions.mu.Lock()
		defer s.sessions.mu.Unlock()
		return s.sessions.mu.kept
	}
	for i := range 10 {
		connectFor(fmt.Sprint("c", i), time.Minute)
	}
	for range 1000 {
		connectFor("c0", 2*time.Minute)
	}
	connectFor("c1", time.Second)
	testkit.Equal(t, len(s.sessions.mu.deadlines), 11, "deadlines")
	testkit.Equal(t, ends(at(time.Second-1)), 10, "before the first time")
	testkit.Equal(t, ends(at(time.Second)), 9, "after the session that was shortened")
	testkit.Equal(t, ends(at(2*time.Minute-1)), 1, "after the others")
	testkit.Equal(t, ends(at(2*time.Minute)), 0, "after the session that was prolonged")
	testkit.Equal(t, len(s.sessions.mu.byID), 0, "entries")
}

// The writes of many sessions wait for one another. Each write occupies a thread.
func TestFewWritesAtOnce(t *testing.T) {
	folder := t.TempDir()
	testkit.Bubble(t, func(t *testing.T) {
		st := newStore(folder)
		for range maxWriting {
			st.begin()
		}
		done := make(chan error, 1)
		go func() { done <- st.save(&record{ClientID: "c"}) }()
		synctest.Wait()
		testkit.Equal(t, len(done), 0, "a write more than allowed")
		<-st.writing
		testkit.Must(t, <-done)
	})
}

// A client that two brokers send to each other stays at the second of them.
func TestRedirectsAtMostOnceInThePause(t *testing.T) {
	ss := &server(t).sessions
	at := func(after time.Duration) mono.Time { return mono.Time(0).Add(time.Hour + after) }
	testkit.Equal(t, ss.mayRedirect("a", at(0)), true)
	testkit.Equal(t, ss.mayRedirect("a", at(time.Second)), false)
	testkit.Equal(t, ss.mayRedirect("b", at(redirectPause-1)), true)
	testkit.Equal(t, ss.mayRedirect("b", at(2*redirectPause-2)), false)
	testkit.Equal(t, ss.mayRedirect("b", at(3*redirectPause)), true)
	for i := range maxRedirected - 1 {
		ss.mayRedirect(fmt.Sprint(i), at(3*redirectPause))
	}
	testkit.Equal(t, ss.mayRedirect("c", at(3*redirectPause)), false, "over the maximum")
	testkit.Equal(t, ss.mayRedirect("c", at(5*redirectPause)), true)
}
