package main

import (
	"context"
	"log/slog"
)

// levelled passes on what is at least as severe as a level that may change.
type levelled struct {
	slog.Handler
	least *slog.LevelVar
}

func (l levelled) Enabled(_ context.Context, level slog.Level) bool { return level >= l.least.Level() }

func (l levelled) WithAttrs(attrs []slog.Attr) slog.Handler {
	return levelled{l.Handler.WithAttrs(attrs), l.least}
}

func (l levelled) WithGroup(name string) slog.Handler {
	return levelled{l.Handler.WithGroup(name), l.least}
}
