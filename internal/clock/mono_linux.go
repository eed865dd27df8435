package clock

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
)

func sysMono() mono.Time { return read(unix.CLOCK_MONOTONIC) }

// Boot returns CLOCK_BOOTTIME, which continues while the machine is suspended, unlike
// Mono. It is not comparable with Mono and costs a system call.
func Boot() mono.Time { return read(unix.CLOCK_BOOTTIME) }

func read(clock int32) mono.Time {
	var ts unix.Timespec
	// These clocks cannot fail on Linux: the id is valid and the pointer ours.
	if err := unix.ClockGettime(clock, &ts); err != nil {
		panic(fmt.Sprintf("clock_gettime(%d): %v", clock, err))
	}
	return mono.Time(ts.Nano())
}
