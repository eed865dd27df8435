// Package clock reads clocks, including processor time, and sleeps. Pure packages must
// not import it: the edge reads a time once and passes it on as a mono.Time or mono.Wall.
package clock

import (
	"context"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// anchor pairs Go's monotonic reading with CLOCK_MONOTONIC, both set once. Go's reading
// is cheap (about 25 ns) but cannot be printed or compared between processes.
// CLOCK_MONOTONIC can, but costs a system call here.
var anchor = func() (a struct {
	go0  time.Time
	mono mono.Time
}) {
	best := time.Duration(1<<63 - 1)
	for range 64 {
		before := time.Now()
		m := sysMono()
		after := time.Now()
		if d := after.Sub(before); d < best {
			best = d
			a.go0, a.mono = before.Add(d/2), m
		}
	}
	return a
}()

// Mono returns CLOCK_MONOTONIC, exact to the calibration made at start (well
// under a microsecond on an idle machine).
func Mono() mono.Time { return anchor.mono.Add(time.Since(anchor.go0)) }

// Wall returns CLOCK_REALTIME.
func Wall() mono.Wall { return mono.Wall(time.Now().UnixNano()) }

// Sleep waits for d or the end of ctx. It reports whether ctx is still active.
func Sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
