package broker

import (
	"log/slog"
	"sync/atomic"
	"time"
)

// progressInterval is the interval of progress messages during the shutdown.
const progressInterval = 5 * time.Second

// tellProgress logs the number of stored topics every progressInterval, until done is
// closed. There is no deadline for a slow disk; the log shows that the broker does not
// hang.
func tellProgress(log *slog.Logger, stored *atomic.Int64, topics int, done <-chan struct{}) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			log.Info("storing the messages of the topics before the exit", "stored", stored.Load(), "topics", topics)
		}
	}
}
