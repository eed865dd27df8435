// Command nsqd is SRTM's broker. nsqd speaks the NSQ protocol, so NSQ client libraries work unchanged.
// The broker holds a share (r, b) of each topic's contract.
//
// Package conn reads a message, session and wire decode the message, and kernel/hook determines its
// arrival time. broker and queue hold the message until tokenbucket releases it, and conn writes the
// message to a subscriber. Read docs/ARCHITECTURE.md next.
package main

import (
	"context"
	"log/slog"
	"math"
	"os"
	"runtime/debug"
	"time"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/daemon"
)

func main() { daemon.Main(new(options).program()) }

func (o *options) run(ctx context.Context, log *slog.Logger, level *slog.LevelVar) error {
	if o.pinFor != "" {
		return o.pin()
	}
	if limit := softLimit(o.memoryLimit, os.Getenv("GOMEMLIMIT"), os.DirFS("/")); limit > 0 {
		debug.SetMemoryLimit(limit)
	}
	limit := debug.SetMemoryLimit(-1)
	if o.broker.MaxMemory == 0 && limit < math.MaxInt64 {
		o.broker.MaxMemory = limit / 2
	}
	o.fit(bounded.Descriptors(), limit)
	d, err := open(ctx, o, log, level)
	if err != nil {
		return err
	}
	timer := time.AfterFunc(startTime, func() { _ = forgetProgram("/proc/self/exe") })
	defer timer.Stop()
	return d.run(ctx)
}
