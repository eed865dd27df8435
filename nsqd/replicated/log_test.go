package replicated

import (
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// While too many bytes of all logs together wait to be stored, a log appends at once only if none of its own bytes wait.
// Otherwise the log first waits until its own bytes are stored.
func TestAllLogsTogetherAreBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
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
		b := l.nextBlock()
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

// The log retains at least the given size, whatever earlier owners have stored.
func TestFromWhereOnSoMuchIsHeld(t *testing.T) {
	// This owner has stored 10 blocks of 100 bytes, from sequence 21 on.
	m := marks{first: 1, claim: 21, size: 1000, all: []mark{{seq: 1}, {seq: 21}}}
	for i := range 10 {
		m.add(mark{seq: uint64(22 + i), size: int64(100 * (i + 1))})
	}
	for _, test := range []struct {
		bytes, all int64
		want       uint64
	}{
		{100, 3000, 31},
		{250, 3000, 29},
		{900, 3000, 23},
		{990, 3000, 20}, // all its own blocks, and a block of 100 before
		{1000, 1020, 20},
		{990, 1001, 20}, // 20 blocks of earlier owners have one byte each
		{1500, 3000, 15},
		{3000, 3000, 1},
		{5000, 3000, 1},
		{1500, 1000, 1}, // the other blocks are deleted
	} {
		testkit.Equal(t, m.holding(test.bytes, test.all), test.want, "%d of %d bytes", test.bytes, test.all)
	}
}
