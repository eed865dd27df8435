package clock

import (
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
)

func sysMono() mono.Time {
	var ts unix.Timespec
	// CLOCK_MONOTONIC cannot fail on Linux: the id is valid and the pointer ours.
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("clock_gettime(CLOCK_MONOTONIC): " + err.Error())
	}
	return mono.Time(ts.Nano())
}
