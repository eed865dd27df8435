package stamp

import "github.com/srtm-io/srtm/internal/mono"

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
	At     mono.Time
	Source Source
}
