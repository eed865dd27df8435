package client

import "time"

// DefaultAttempts is how often a question is sent at most.
const DefaultAttempts = 5

// A question is sent again first after what an answer takes by RFC 6298, then after
// twice as long each time, 5 ms at most. The paper's client waits 100 us each time
// (Janus, section III.B).
const (
	shortest   = 100 * time.Microsecond
	longest    = 5 * time.Millisecond
	firstGuess = time.Millisecond // before the first answer
)

// DefaultWait is how long a decision waits for a server that looks the key up. MaxWait is the longest
// wait that operators may set: a server refunds no question that is older than that.
const (
	DefaultWait = 500 * time.Millisecond
	MaxWait     = 5 * time.Second
)

// A server that looks a key up answers by itself. The client sends the question again after shortestRest,
// then after twice as long each time: the answer may be lost, or the server had no room for the question.
const (
	shortestRest = 10 * time.Millisecond
	longestRest  = 100 * time.Millisecond
)

// roundTrip estimates how long an answer takes (RFC 6298, section 2).
type roundTrip struct{ smoothed, variation time.Duration }

// saw takes the time of a question that was sent once: of others it is not known which
// one was answered.
func (r *roundTrip) saw(d time.Duration) {
	if r.smoothed == 0 {
		r.smoothed, r.variation = d, d/2
		return
	}
	r.variation += ((r.smoothed - d).Abs() - r.variation) / 4
	r.smoothed += (d - r.smoothed) / 8
}

// wait is how long to wait for an answer to the question when it was sent so often.
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
