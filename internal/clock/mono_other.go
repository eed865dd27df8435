//go:build !linux

package clock

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// sysMono stands in for CLOCK_MONOTONIC where this package has no system call
// for it. Readings of different processes are comparable only as far as their
// wall clocks agree.
func sysMono() mono.Time { return mono.Time(time.Now().UnixNano()) }

// Boot stands in for CLOCK_BOOTTIME.
func Boot() mono.Time { return sysMono() }
