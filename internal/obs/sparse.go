package obs

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// LinesPerSecond is the number of lines of a kind per second that a sparse logger passes.
const LinesPerSecond = 10

// maxKinds bounds the distinct kinds in a second; further kinds share one count.
const maxKinds = 64

// Sparse returns a logger for events that others can cause at any rate. A kind is a
// message with its KeyReason. Of each kind, Sparse passes LinesPerSecond lines per
// second, and then reports the number of suppressed lines. Reasons must be constants of
// the program, or a client could hide other lines. end reports the recent suppressed
// lines at once; call it after the last line.
func Sparse(log *slog.Logger) (_ *slog.Logger, end func()) {
	s := &sparse{out: log.Handler()}
	s.mu.lines = make(map[kind]*volume)
	return slog.New(sparseHandler{s.out, s}), s.reportSuppressed
}

type kind struct{ message, reason string }

// volume counts the lines of a kind.
type volume struct {
	n     int
	level slog.Level // the most severe
}

// sparse counts lines for a second from the first line on.
type sparse struct {
	out slog.Handler // set by Sparse

	reporting sync.Mutex // held during reportSuppressed; taken before mu
	mu        struct {
		sync.Mutex
		since time.Time
		lines map[kind]*volume
		timer *time.Timer // of reportSuppressed; nil: nothing was suppressed
	}
}

// allows counts a line of the kind and reports whether to pass it.
func (s *sparse) allows(now time.Time, level slog.Level, k kind) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if age := now.Sub(s.mu.since); s.mu.timer == nil && (age >= time.Second || age < 0) {
		clear(s.mu.lines)
		s.mu.since = now
	}
	v := s.mu.lines[k]
	if v == nil {
		if len(s.mu.lines) >= maxKinds {
			k = kind{}
		}
		if v = s.mu.lines[k]; v == nil {
			v = new(volume)
			s.mu.lines[k] = v
		}
	}
	v.n++
	v.level = max(v.level, level)
	if v.n <= LinesPerSecond {
		return true
	}
	if s.mu.timer == nil {
		s.mu.timer = time.AfterFunc(time.Second-now.Sub(s.mu.since), s.reportSuppressed)
	}
	return false
}

// reportSuppressed reports the suppressed lines.
func (s *sparse) reportSuppressed() {
	s.reporting.Lock()
	defer s.reporting.Unlock()
	s.mu.Lock()
	lines := s.mu.lines
	s.mu.lines = make(map[kind]*volume)
	if s.mu.timer != nil {
		s.mu.timer.Stop()
		s.mu.timer = nil
	}
	s.mu.Unlock()
	kinds := slices.SortedFunc(maps.Keys(lines), func(a, b kind) int {
		return cmp.Or(cmp.Compare(a.message, b.message), cmp.Compare(a.reason, b.reason))
	})
	log := slog.New(s.out)
	for _, k := range kinds {
		if v := lines[k]; v.n > LinesPerSecond {
			log.Log(context.Background(), v.level, "lines left out: too many of a kind", "of", k.message, KeyReason, k.reason, KeyCount, v.n-LinesPerSecond)
		}
	}
}

type sparseHandler struct {
	slog.Handler
	sparse *sparse
}

func (h sparseHandler) Handle(ctx context.Context, r slog.Record) error {
	k := kind{message: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == KeyReason {
			k.reason = a.Value.String()
		}
		return k.reason == ""
	})
	if !h.sparse.allows(r.Time, r.Level, k) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h sparseHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return sparseHandler{h.Handler.WithAttrs(attrs), h.sparse}
}

func (h sparseHandler) WithGroup(name string) slog.Handler {
	return sparseHandler{h.Handler.WithGroup(name), h.sparse}
}
