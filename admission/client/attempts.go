package client

import "time"

// DefaultAttempts is the default number of times that a Client sends a question.
const DefaultAttempts = 5

// The client waits for an answer as long as RFC 6298 says, and doubles the wait with each attempt, up
// to 5 ms. The paper's client always waits 100 us (Janus, section III.B).
const (
	shortest   = 100 * time.Microsecond
	longest    = 5 * time.Millisecond
	firstGuess = time.Millisecond // before the first answer
)

// DefaultWait is how long a decision waits for a server that looks the key up. MaxWait is the longest
// wait that operators may set: a server does not refund an older question.
const (
	DefaultWait = 500 * time.Millisecond
	MaxWait     = 5 * time.Second
)

// A server that looks a key up sends the answer unasked. The client sends the question again after
// shortestRest, and doubles the wait each time: the answer may be lost, or the server had no room for
// the question.
const (
	shortestRest = 10 * time.Millisecond
	longestRest  = 100 * time.Millisecond
)

// roundTrip estimates how long an answer takes (RFC 6298, section 2).
type roundTrip struct{ smoothed, variation time.Duration }

// saw adds a sample: the time to the answer of a question that was sent once. For a question that was
// sent again, the answered copy is unknown.
func (r *roundTrip) saw(d time.Duration) {
	if r.smoothed == 0 {
		r.smoothed, r.variation = d, d/2
		return
	}
	r.variation += ((r.smoothed - d).Abs() - r.variation) / 4
	r.smoothed += (d - r.smoothed) / 8
}

// wait returns how long to wait for an answer after sent copies of the question.
func (r *roundTrip) wait(sent int, paper bool) time.Duration {
	if paper {
		return shortest
	}
	first := firstGuess
	if r.smoothed != 0 {
		first = max(shortest, r.smoothed+4*r.variation)
	}
	return min(longest, first<<min(sent-1, 10))
}
