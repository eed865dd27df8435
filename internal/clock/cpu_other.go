//go:build !unix

package clock

import "time"

// CPU is not known on this system.
func CPU() time.Duration { return 0 }
