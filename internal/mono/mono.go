// Package mono has the two kinds of time that pure packages take as arguments. Package
// clock reads them.
package mono

import (
	"math"
	"time"
)

// Time is a reading of CLOCK_MONOTONIC in nanoseconds. Readings of different
// processes on one host are comparable; readings of different hosts are not.
type Time int64

// Never is after every reading. A bucket without a share returns Never.
const Never Time = math.MaxInt64

// Sub returns a - b.
func (a Time) Sub(b Time) time.Duration { return time.Duration(a - b) }

// Add returns a + d, or Never on overflow.
func (a Time) Add(d time.Duration) Time {
	s := a + Time(d)
	if d > 0 && s < a {
		return Never
	}
	return s
}

// Before reports whether a lies before b.
func (a Time) Before(b Time) bool { return a < b }

// Wall is a reading of CLOCK_REALTIME in nanoseconds since the Unix epoch. It may step.
// Use it only for people and for the NSQ message header.
type Wall int64

// Stamp is the time of a process's message. Messages on several connections may arrive in
// another order than sent.
type Stamp struct {
	// Process is the instance, unique per process.
	Process string
	// At is the process's own time, which clock steps do not set back. Processes of one
	// host share this time between two starts of the kernel.
	At Time
}
