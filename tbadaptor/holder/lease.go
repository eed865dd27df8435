package holder

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// shortestRenewal bounds how often the adaptor is asked, whatever it says.
const shortestRenewal = 5 * time.Millisecond

// Lease is until when this process may use what it was granted without a word
// from the adaptor. It counts from when the word was asked for: the adaptor
// counts from when it heard the question, so that its lease ends later. The
// zero value is one that never began.
type Lease struct {
	Strict bool
	// Asked is when the last request went out.
	Asked mono.Time
	// The ends; FlexUntil <= until.
	FlexUntil, until mono.Time
	Length           time.Duration // of flexible parts; 0: not known yet
	// Heard is when the newest word came, and Sent what it said of its sending; 0: none
	// that the adaptor may count on.
	Heard mono.Time
	Sent  uint64
	// Noted is what the store says of the process being alone.
	Noted bool
}

// Alone is when a process after this one may go on with its bases, if it ends without
// another word. The adaptor, which takes those of one that is proven to have ended, does
// so for half of that time.
func (l *Lease) Alone() mono.Time {
	if l.Length == 0 || l.Strict {
		return mono.Never
	}
	return l.Heard.Add(2 * l.Length)
}

// Renew takes the answer to a request made at the time of at.
func (l *Lease) Renew(at mono.Time, flex, session time.Duration) {
	l.FlexUntil = max(l.FlexUntil, at.Add(flex))
	l.until = max(l.until, at.Add(session))
	l.Length = flex
}

// Ends are those of a grant: a base of a broker that goes on has none.
func (l *Lease) Ends() (flexUntil, until mono.Time) {
	if l.Strict {
		return l.FlexUntil, l.until
	}
	return l.FlexUntil, mono.Never
}

// Over says what has ended by now.
func (l *Lease) Over(now mono.Time) (flex, all bool) {
	flexUntil, until := l.Ends()
	return !now.Before(flexUntil), !now.Before(until)
}

// Request is when the next request is due: four fit into a lease.
func (l *Lease) Request() mono.Time {
	if l.Length == 0 {
		return mono.Never
	}
	return l.Asked.Add(max(l.Length/4, shortestRenewal))
}
