package replicated

import (
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// While too much waits to be stored of all logs together, one appends when nothing of its
// own waits, and else when it is stored.
func TestAllLogsTogetherAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{cfg: Config{MaxBody: 100, Log: slog.New(slog.DiscardHandler)}, closes: make(chan struct{})}
		c.pending.Store(maxPendingAll)
		l := &Log{cluster: c, wake: make(chan struct{}, 1)}
		l.changed = sync.NewCond(&l.mu)
		appended := 0
		go func() {
			for range 2 {
				_, err := l.Append([]commitlog.Record{{Body: []byte("a message")}})
				testkit.NoError(t, err)
				appended++
			}
		}()
		synctest.Wait()
		if appended != 1 {
			t.Fatalf("%d batches are taken, want one", appended)
		}
		b := l.take()
		l.stored(b, 1)
		synctest.Wait()
		if appended != 2 {
			t.Errorf("%d batches are taken, want both", appended)
		}
		l.cluster.closed(l)
		if n := c.pending.Load(); n != maxPendingAll {
			t.Errorf("%d bytes are left of a log that is closed", n-maxPendingAll)
		}
	})
}
