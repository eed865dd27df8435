package queue

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Lease says how long the parts of a share last. What was eligible at an
// instant is judged by the share of that instant: a lease that ends between two
// steps counts from its end, not from the step after it.
type Lease struct {
	// Base is what is left of the share from FlexUntil on.
	Base      tokenbucket.Share
	FlexUntil mono.Time
	// From Until on there is no share at all; mono.Never: the base is for good.
	Until mono.Time
}

// Forever is the lease of a share that has no end.
func Forever(s tokenbucket.Share) Lease {
	return Lease{Base: s, FlexUntil: mono.Never, Until: mono.Never}
}

// lease is the Lease in force.
//
// Invariant: lapses is the first instant at which the share changes by itself.
type lease struct {
	Lease
	lapses mono.Time
}

func (l *lease) set(to Lease) {
	l.Lease = to
	l.lapses = min(to.FlexUntil, to.Until)
}
