package broker

import (
	"bytes"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A broker with a slow disk logs at intervals how many topics it has stored, and nothing after the last topic.
func TestABrokerThatStoresTellsItsProgress(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var said bytes.Buffer
		var stored atomic.Int64
		done := make(chan struct{})
		go logProgress(slog.New(slog.NewTextHandler(&said, nil)), &stored, 3, done)
		clock.Sleep(t.Context(), progressInterval+time.Second) // of the bubble's clock
		stored.Add(2)
		clock.Sleep(t.Context(), progressInterval)
		close(done)
		synctest.Wait()
		clock.Sleep(t.Context(), 2*progressInterval)
		if text := said.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "stored=0 topics=3") || !strings.Contains(text, "stored=2 topics=3") {
			t.Errorf("the log says:\n%s", text)
		}
	})
}
