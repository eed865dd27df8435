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

// LinesPerSecond is how many lines of a kind a sparse logger lets through.
const LinesPerSecond = 10

// maxKinds bounds the kinds told apart in a second; the others count as one.
const maxKinds = 64

// Sparse returns a logger for what others can cause as often as they like: of a
// kind, which is a message with its KeyReason, it passes LinesPerSecond lines on
// in a second, and then the number of those that it left out. Reasons must be
// the program's own: a client that can cause them hides other lines. end says at once
// what was left out lately; call it when nothing more is logged.
func Sparse(log *slog.Logger) (_ *slog.Logger, end func()) {
	s := &sparse{out: log.Handler()}
	s.mu.lines = make(map[kind]*volume)
	return slog.New(sparseHandler{s.out, s}), s.tell
}

type kind struct{ message, reason string }

// volume is what came of a kind.
type volume struct {
	n     int
	level slog.Level // the most severe
}

// sparse counts lines from the first one on, for a second.
type sparse struct {
	out slog.Handler // set once

	telling sync.Mutex // one tell at a time; taken before mu
	mu      struct {
		sync.Mutex
		since time.Time
		lines map[kind]*volume
		timer *time.Timer // of tell; nil: nothing was left out
	}
}

// allows counts a line of the kind.
func (s *sparse) allows(at time.Time, level slog.Level, k kind) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if age := at.Sub(s.mu.since); s.mu.timer == nil && (age >= time.Second || age < 0) {
		clear(s.mu.lines)
		s.mu.since = at
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
		s.mu.timer = time.AfterFunc(time.Second-at.Sub(s.mu.since), s.tell)
	}
	return false
}

// tell says what was left out.
func (s *sparse) tell() {
	s.telling.Lock()
	defer s.telling.Unlock()
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
	*sparse
}

func (h sparseHandler) Handle(ctx context.Context, r slog.Record) error {
	k := kind{message: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == KeyReason {
			k.reason = a.Value.String()
		}
		return k.reason == ""
	})
	if !h.allows(r.Time, r.Level, k) {
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
