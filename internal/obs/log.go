// Package obs has what every daemon shows of itself: the logger and its attribute keys,
// the metrics registry, the debug routes, the version, and the latency histogram that all
// daemons can merge. Each metric belongs to the package that counts it.
// docs/metrics.md lists all of them.
package obs

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
)

// Keys of log attributes. A thing has the same name in all logs.
const (
	KeyAddress   = "address"
	KeyBroker    = "broker"
	KeyBurst     = "burst"
	KeyChannel   = "channel"
	KeyCount     = "count"
	KeyDuration  = "duration"
	KeyEpoch     = "epoch"
	KeyError     = "error"
	KeyInstance  = "instance"
	KeyName      = "name"
	KeyPolicy    = "policy"
	KeyPublisher = "publisher"
	KeyRate      = "rate"
	KeyReason    = "reason"
	KeyRemote    = "remote"
	KeyState     = "state"
	KeyTopic     = "topic"
	KeyVersion   = "version"
)

// levels are in the order of NSQ's numbers, which begin with 1.
var levels = [...]struct {
	name  string
	level slog.Level
}{
	{"debug", slog.LevelDebug},
	{"info", slog.LevelInfo},
	{"warn", slog.LevelWarn},
	{"error", slog.LevelError},
	{"fatal", slog.LevelError + 4}, // logs nothing; the error that ends a daemon is printed anyway
}

// ParseLevel returns the minimum level for a name: debug, info, warn, error, or fatal
// (nothing), without regard to case.
func ParseLevel(name string) (slog.Level, error) {
	for _, l := range levels {
		if strings.EqualFold(l.name, name) {
			return l.level, nil
		}
	}
	return 0, fmt.Errorf("log level %q: want debug, info, warn, error or fatal", name)
}

// LevelNumber returns the number of a level in NSQ's HTTP API: 1 (debug) to 5 (fatal); 0
// if it has none.
func LevelNumber(level slog.Level) int {
	for i, l := range levels {
		if l.level == level {
			return i + 1
		}
	}
	return 0
}

// NewLogger returns a logger that writes to w, and its level, which the caller may
// change. format is text or json, without regard to case. If w is a LogWriter, its lines
// about dropped lines have the same format.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, *slog.LevelVar, error) {
	minimum, err := ParseLevel(level)
	if err != nil {
		return nil, nil, err
	}
	variable := new(slog.LevelVar)
	variable.Set(minimum)
	options := &slog.HandlerOptions{Level: variable}
	handler := func(w io.Writer) slog.Handler {
		return slog.NewTextHandler(w, options)
	}
	switch strings.ToLower(format) {
	case "text":
	case "json":
		handler = func(w io.Writer) slog.Handler {
			return slog.NewJSONHandler(w, options)
		}
	default:
		return nil, nil, fmt.Errorf("log format %q: want text or json", format)
	}
	if w, ok := w.(*LogWriter); ok {
		w.setNotice(func(n uint64) []byte {
			var line bytes.Buffer
			slog.New(handler(&line)).Error("log lines were dropped: they came faster than they were read", KeyCount, n)
			return line.Bytes()
		})
	}
	return slog.New(handler(w)), variable, nil
}
