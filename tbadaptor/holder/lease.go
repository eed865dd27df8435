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
	// Asked is the time of the last request.
	Asked mono.Time
	// Ends of the lease; FlexUntil <= until.
	FlexUntil, until mono.Time
	Length           time.Duration // length of the flexible lease; 0: unknown
	// Heard is when the newest answer came. Sent is the adaptor's time of sending it; 0: no answer that
	// the adaptor may count on.
	Heard mono.Time
	Sent  uint64
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
	return l.Heard.Add(2 * l.Length)
}

// Renew applies the answer to a request made at at.
func (l *Lease) Renew(at mono.Time, flex, session time.Duration) {
	l.FlexUntil = max(l.FlexUntil, at.Add(flex))
	l.until = max(l.until, at.Add(session))
	l.Length = flex
}

// Ends returns the ends of flexible parts and bases. The base of a broker that is not Strict never
// ends.
func (l *Lease) Ends() (flexUntil, until mono.Time) {
	if l.Strict {
		return l.FlexUntil, l.until
	}
	return l.FlexUntil, mono.Never
}

// Over reports which parts have ended by now.
func (l *Lease) Over(now mono.Time) (flex, all bool) {
	flexUntil, until := l.Ends()
	return !now.Before(flexUntil), !now.Before(until)
}

// Request returns when the next request is due: four requests fit into a lease.
func (l *Lease) Request() mono.Time {
	if l.Length == 0 {
		return mono.Never
	}
	return l.Asked.Add(max(l.Length/4, shortestRenewal))
}
