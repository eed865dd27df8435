package holder

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// shortestRenewal is the minimum time between requests to the adaptor.
const shortestRenewal = 5 * time.Millisecond

// Lease is the time for which this process may use its grants without contact to the adaptor. The lease
// starts with the request. The adaptor counts from the receipt of the request, so the adaptor's lease
// ends later. The zero Lease never began.
type Lease struct {
	Strict bool
	// Requested is the time of the last request.
	Requested mono.Time
	// Ends of the lease; FlexUntil <= allUntil.
	FlexUntil, allUntil mono.Time
	Length              time.Duration // length of the flexible lease; 0: unknown
	// Received is when the newest answer came. Sent is the adaptor's time of sending it; 0: no answer that
	// the adaptor may count on.
	Received mono.Time
	Sent     uint64
	// Noted: the store has a note that the process is alone (see Alone).
	Noted bool
}

// Alone returns the time from which a later process may use this process's bases, if this process ends
// without another answer. The adaptor accepts proof of this process's end, which frees the bases, only
// for half of this time.
func (l *Lease) Alone() mono.Time {
	if l.Length == 0 || l.Strict {
		return mono.Never
	}
	return l.Received.Add(2 * l.Length)
}

// Renew applies the answer to a request made at sent.
func (l *Lease) Renew(sent mono.Time, flex, session time.Duration) {
	l.FlexUntil = max(l.FlexUntil, sent.Add(flex))
	l.allUntil = max(l.allUntil, sent.Add(session))
	l.Length = flex
}

// Ends returns the ends of flexible parts and bases. The base of a broker that is not Strict never
// ends.
func (l *Lease) Ends() (flexUntil, allUntil mono.Time) {
	if l.Strict {
		return l.FlexUntil, l.allUntil
	}
	return l.FlexUntil, mono.Never
}

// Ended reports which parts have ended by now.
func (l *Lease) Ended(now mono.Time) (flex, all bool) {
	flexUntil, allUntil := l.Ends()
	return !now.Before(flexUntil), !now.Before(allUntil)
}

// Request returns when the next request is due: four requests fit into a lease.
func (l *Lease) Request() mono.Time {
	if l.Length == 0 {
		return mono.Never
	}
	return l.Requested.Add(max(l.Length/4, shortestRenewal))
}
