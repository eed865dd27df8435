//go:build !linux

package clock

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// sysMono replaces CLOCK_MONOTONIC on systems without it. Readings of different processes
// are comparable only as far as their wall clocks agree.
func sysMono() mono.Time { return mono.Time(time.Now().UnixNano()) }

// Boot replaces CLOCK_BOOTTIME.
func Boot() mono.Time { return sysMono() }
