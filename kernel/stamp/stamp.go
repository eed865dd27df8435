// Package stamp determines when a message arrived and how accurate that time is. An Arrival has a
// time and a Source, because a token bucket judges a message by its arrival. The package is pure
// and reads no clock. Read nsqd/broker next for how an arrival becomes an eligible time.
package stamp

import "github.com/srtm-io/srtm/internal/mono"

// Source is the way in which an arrival time was obtained, best first.
type Source uint8

const (
	// Exact: the kernel stamped the segment that carried the last byte.
	Exact Source = iota
	// Overwritten: the segment's record was lost; the time is of a later segment.
	Overwritten
	// UpperBound: several segments carried the byte, or the time is of a later segment. The true
	// time is not later.
	UpperBound
	// Read: the time after the read call; late by the scheduling delay.
	Read

	// Sources is the number of sources, for arrays indexed by Source.
	Sources = int(Read) + 1
)

var sourceNames = [Sources]string{"exact", "overwritten", "upper_bound", "read"}

// String returns the source's name in metrics and in /info.
func (s Source) String() string {
	if int(s) < Sources {
		return sourceNames[s]
	}
	return "unknown"
}

// Arrival is the time at which a message's last byte reached this host, and the time's source.
type Arrival struct {
	At     mono.Time
	Source Source
}
