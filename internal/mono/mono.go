// Package mono has the two kinds of time that the pure packages take as
// arguments. Package clock reads them.
package mono

import (
	"math"
	"time"
)

// Time is a reading of CLOCK_MONOTONIC in nanoseconds. Readings of different
// processes on one host are comparable; readings of different hosts are not.
type Time int64

// Never lies after every reading. A bucket without a share answers it.
const Never Time = math.MaxInt64

// Sub returns a - b.
func (a Time) Sub(b Time) time.Duration { return time.Duration(a - b) }

// Add returns a + d, and Never where that would pass the end of the range.
func (a Time) Add(d time.Duration) Time {
	s := a + Time(d)
	if d > 0 && s < a {
		return Never
	}
	return s
}

// Before reports whether a lies before b.
func (a Time) Before(b Time) bool { return a < b }

// Wall is a reading of CLOCK_REALTIME in nanoseconds since the Unix epoch. It
// may step; it is only for people and for the NSQ message header.
type Wall int64

// Said is when a process said something. What it said may reach its peer after what the
// process said later on another connection.
type Said struct {
	// Process is the instance; each process has another one.
	Process string
	// At is the process' own time, which no step of a clock sets back. Processes of one host,
	// between two starts of its kernel, count the same time.
	At Time
}
