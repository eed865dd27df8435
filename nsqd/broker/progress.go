package broker

import (
	"log/slog"
	"sync/atomic"
	"time"
)

// progressInterval is how often a broker that stops says how much it has stored.
const progressInterval = 5 * time.Second

// tellProgress logs every progressInterval how many topics are stored, until done is closed: a
// slow disk has no deadline, and the reader of the log sees that the broker does not hang.
func tellProgress(log *slog.Logger, stored *atomic.Int64, topics int, done <-chan struct{}) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			log.Info("the broker is still storing what its topics hold", "stored", stored.Load(), "topics", topics)
		}
	}
}
