package obs

import (
	"bytes"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Stderr is the process's standard error for writers that must not wait for its reader:
// the daemons' loggers. lifecycle.Main flushes it at the end.
var Stderr = NewLogWriter(os.Stderr, 1<<20)

// LogWriter passes lines to a writer that may be slow or stuck, and never waits for the
// writer. A goroutine, which exists only while there are lines, writes the lines. Lines
// without room are dropped and counted, and a line reports them when writing resumes.
// Safe for concurrent use.
type LogWriter struct {
	// Set by NewLogWriter.
	out   io.Writer
	limit int

	dropped atomic.Uint64 // written under mu; read for display

	mu struct {
		sync.Mutex
		lines      []byte // not taken by the goroutine yet
		unreported uint64 // lines dropped since the last report
		notice     func(n uint64) []byte
		idle       chan struct{} // closed when the goroutine ends; nil: no goroutine
	}
}

// NewLogWriter returns a writer to out. It keeps most bytes of lines, and as much again
// while lines are being written.
func NewLogWriter(out io.Writer, limit int) *LogWriter {
	return &LogWriter{out: out, limit: limit}
}

// Write keeps or drops a line. It returns len(line) and nil in any case.
func (w *LogWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.mu.lines)+len(line) > w.limit {
		w.dropLocked(1)
	} else {
		w.mu.lines = append(w.mu.lines, line...)
	}
	w.startLocked()
	return len(line), nil
}

// Dropped returns the number of lines not written, for lack of room or after a failed
// write.
func (w *LogWriter) Dropped() uint64 { return w.dropped.Load() }

// Flush waits at most limit until all lines are written, and reports whether they are.
func (w *LogWriter) Flush(limit time.Duration) bool {
	w.mu.Lock()
	w.startLocked()
	idle := w.mu.idle
	w.mu.Unlock()
	if idle == nil {
		return true
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-idle:
		return true
	case <-timer.C:
		return false
	}
}

func (w *LogWriter) dropLocked(n int) {
	w.dropped.Add(uint64(n))
	w.mu.unreported += uint64(n)
}

func (w *LogWriter) startLocked() {
	if w.mu.idle == nil && len(w.mu.lines) > 0 {
		w.mu.idle = make(chan struct{})
		go w.run()
	}
}

// maxIdleLog bounds the memory kept for later lines.
const maxIdleLog = 64 << 10

func (w *LogWriter) run() {
	w.mu.Lock()
	defer w.mu.Unlock()
	var spare []byte
	for len(w.mu.lines) > 0 {
		chunk := w.mu.lines
		w.mu.lines = spare[:0]
		if w.mu.unreported > 0 && w.mu.notice != nil {
			chunk = append(chunk, w.mu.notice(w.mu.unreported)...)
			w.mu.unreported = 0
		}
		w.mu.Unlock()
		n, err := w.out.Write(chunk)
		w.mu.Lock()
		if err != nil {
			w.dropLocked(bytes.Count(chunk[n:], []byte{'\n'}))
		}
		if spare = chunk; cap(spare) > maxIdleLog {
			spare = nil
		}
	}
	w.mu.lines = spare[:0]
	close(w.mu.idle)
	w.mu.idle = nil
}

// setNotice sets the function that formats a report about n dropped lines.
func (w *LogWriter) setNotice(notice func(n uint64) []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.notice = notice
}
