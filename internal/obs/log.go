package obs

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
)

// Keys of log attributes. A thing has one name in all logs.
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

var levels = map[string]slog.Level{
	"debug": slog.LevelDebug,
	"info":  slog.LevelInfo,
	"warn":  slog.LevelWarn,
	"error": slog.LevelError,
	"fatal": slog.LevelError + 4, // nothing: what ends a daemon is printed anyway
}

// NewLogger returns a logger that writes to w. level is debug, info, warn or
// error, the least severe that is written, or fatal, at which nothing is, as NSQ
// has it; format is text or json. Both are
// matched without regard to case. If w is a LogWriter, its lines on lines that
// were dropped have that format, too.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	least, ok := levels[strings.ToLower(level)]
	if !ok {
		return nil, fmt.Errorf("log level %q: want debug, info, warn, error or fatal", level)
	}
	handler := func(w io.Writer) slog.Handler {
		return slog.NewTextHandler(w, &slog.HandlerOptions{Level: least})
	}
	switch strings.ToLower(format) {
	case "text":
	case "json":
		handler = func(w io.Writer) slog.Handler {
			return slog.NewJSONHandler(w, &slog.HandlerOptions{Level: least})
		}
	default:
		return nil, fmt.Errorf("log format %q: want text or json", format)
	}
	if w, ok := w.(*LogWriter); ok {
		w.setNotice(func(n uint64) []byte {
			var line bytes.Buffer
			slog.New(handler(&line)).Error("log lines were dropped: they came faster than they were read", KeyCount, n)
			return line.Bytes()
		})
	}
	return slog.New(handler(w)), nil
}
