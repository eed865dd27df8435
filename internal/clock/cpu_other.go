//go:build !unix

package clock

import "time"

// CPU is unknown on this system.
func CPU() time.Duration { return 0 }
