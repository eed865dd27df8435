package broker

import (
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"

	"github.com/srtm-io/srtm/nsqd/queue"
)

// Trace writes a line for every message that leaves a topic,
//
//	topic,arrival,eligible,released
//
// with times in nanoseconds of CLOCK_MONOTONIC, so that the lines of all brokers of a
// machine can be merged. eligible is the time of the message's token. released is the time
// by which the release was judged, read under the topic's lock. One write contains the
// lines of a step, before subscribers are notified. So a killed broker has written all its
// releases.
type Trace struct {
	// Set once.
	out io.Writer
	log *slog.Logger

	mu struct {
		sync.Mutex
		buf    []byte
		failed bool
	}
}

// NewTrace returns a trace that writes to out. A failed write is logged and ends the trace,
// since a trace with gaps would prove nothing.
func NewTrace(out io.Writer, log *slog.Logger) *Trace { return &Trace{out: out, log: log} }

func (t *Trace) write(topic string, releases []queue.Release) {
	t.mu.Lock()
	if t.mu.failed {
		t.mu.Unlock()
		return
	}
	b := t.mu.buf[:0]
	for _, r := range releases {
		b = append(append(b, topic...), ',')
		b = append(strconv.AppendInt(b, int64(r.Arrival), 10), ',')
		b = append(strconv.AppendInt(b, int64(r.Eligible), 10), ',')
		b = append(strconv.AppendInt(b, int64(r.Released), 10), '\n')
	}
	t.mu.buf = b
	// The lock keeps lines of two topics apart. No other goroutine waits for it.
	_, err := t.out.Write(b)
	t.mu.failed = err != nil
	t.mu.Unlock()
	if err != nil {
		t.log.Error("cannot write the release trace; tracing stopped", "error", fmt.Errorf("write: %w", err))
	}
}
