package agent

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Policy is what the broker does when its lease is gone for good.
type Policy string

const (
	// Available goes on with the bases of its shares.
	Available Policy = "available"
	// Strict stops.
	Strict Policy = "strict"
)

// shortestRenewal bounds how often the adaptor is asked, whatever it says.
const shortestRenewal = 5 * time.Millisecond

// lease is until when this process may use what it was granted without a word
// from the adaptor. It counts from when the word was asked for: the adaptor
// counts from when it heard the question, so that its lease ends later. It is
// pure. The zero value is one that never began.
type lease struct {
	strict bool
	// asked is when the last request went out.
	asked mono.Time
	// The ends; flexUntil <= until.
	flexUntil, until mono.Time
	length           time.Duration // of flexible parts; 0: not known yet
	// heard is when the newest word came, and sent what it said of its sending; 0: none
	// that the adaptor may count on.
	heard mono.Time
	sent  uint64
	// noted is what the store says of the process being alone.
	noted bool
}

// alone is when a process after this one may go on with its bases, if it ends without
// another word. The adaptor, which takes those of one that is proven to have ended, does
// so for half of that time.
func (l *lease) alone() mono.Time {
	if l.length == 0 || l.strict {
		return mono.Never
	}
	return l.heard.Add(2 * l.length)
}

// renew takes the answer to a request made at the time of at.
func (l *lease) renew(at mono.Time, flex, session time.Duration) {
	l.flexUntil = max(l.flexUntil, at.Add(flex))
	l.until = max(l.until, at.Add(session))
	l.length = flex
}

// ends are those of a grant: a base of a broker that goes on has none.
func (l *lease) ends() (flexUntil, until mono.Time) {
	if l.strict {
		return l.flexUntil, l.until
	}
	return l.flexUntil, mono.Never
}

// over says what has ended by now.
func (l *lease) over(now mono.Time) (flex, all bool) {
	flexUntil, until := l.ends()
	return !now.Before(flexUntil), !now.Before(until)
}

// request is when the next request is due: four fit into a lease.
func (l *lease) request() mono.Time {
	if l.length == 0 {
		return mono.Never
	}
	return l.asked.Add(max(l.length/4, shortestRenewal))
}
