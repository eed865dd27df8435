package obs

import (
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
}

// NewLogger returns a logger that writes to w. level is debug, info, warn or
// error, the least severe that is written; format is text or json. Both are
// matched without regard to case.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	least, ok := levels[strings.ToLower(level)]
	if !ok {
		return nil, fmt.Errorf("log level %q: want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: least}
	switch strings.ToLower(format) {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("log format %q: want text or json", format)
}
