package stamp

import (
	"math"
	"time"
)

// Mono is a reading of CLOCK_MONOTONIC in nanoseconds. Readings of different
// processes on one host are comparable; readings of different hosts are not.
type Mono int64

// Never lies after every reading. A bucket without a share answers it.
const Never Mono = math.MaxInt64

// Sub returns a - b.
func (a Mono) Sub(b Mono) time.Duration { return time.Duration(a - b) }

// Add returns a + d, and Never where that would pass the end of the range.
func (a Mono) Add(d time.Duration) Mono {
	s := a + Mono(d)
	if d > 0 && s < a {
		return Never
	}
	return s
}

// Before reports whether a lies before b.
func (a Mono) Before(b Mono) bool { return a < b }

// Wall is a reading of CLOCK_REALTIME in nanoseconds since the Unix epoch. It
// may step; it is only for people and for the NSQ message header.
type Wall int64

// Source says how an arrival time was obtained, best first.
type Source uint8

const (
	// Exact: the kernel stamped the segment that carried the last byte.
	Exact Source = iota
	// Overwritten: that record was lost, and one that came after it stands in.
	Overwritten
	// UpperBound: several segments carried it, or one that came after is stamped;
	// the true time is not later.
	UpperBound
	// Read: the time after the read call returned; late by scheduling delay.
	Read

	// Sources is how many sources there are, for arrays indexed by Source.
	Sources = int(Read) + 1
)

var sourceNames = [Sources]string{"exact", "overwritten", "upper_bound", "read"}

// String returns the source's name as it appears in metrics and in /info.
func (s Source) String() string {
	if int(s) < Sources {
		return sourceNames[s]
	}
	return "unknown"
}

// Arrival is when a message's last byte reached this host, and how we know.
type Arrival struct {
	At     Mono
	Source Source
}
