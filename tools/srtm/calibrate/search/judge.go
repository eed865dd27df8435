package search

import (
	"fmt"
	"math"
	"time"
)

// SLO: a fraction Quantile of messages is delivered within Latency.
type SLO struct {
	Quantile float64
	Latency  time.Duration
}

// Evidence is what a step counted.
type Evidence struct {
	// By the generator: messages that it refused to hold back any longer, had to
	// hold back because a connection took no more, got no answer to or an error;
	// connections lost; what was accepted and never delivered.
	Skipped, Held, Unanswered, Refused, Lost, Undelivered uint64
	// Late is how late messages were sent, at the SLO's quantile.
	Late time.Duration
	// By the broker: first deliveries, and those of them above the SLO's latency.
	Delivered, Exceeded int64
}

// MaxLate is the part of the SLO's latency by which the generator may be late, at
// the SLO's quantile: what is sent later comes in other bursts than was asked for.
const MaxLate = 0.5

// MinDeliveries returns how many deliveries a judgement takes: so many that ten of them
// may exceed.
func (s SLO) MinDeliveries() int64 { return int64(math.Round(10 / (1 - s.Quantile))) }

// Judge says what became of a rate, and why it was not kept. A generator that was
// late while every connection took what it had is said to be late, whatever the
// broker made of that. If connections did not take what it had, it is the broker
// that was too slow, as with refusals, lost connections and lost messages.
func (s SLO) Judge(e Evidence) (Outcome, string) {
	budget := (1 - s.Quantile) * float64(e.Delivered) * (1 + 1e-9) // 1-0.9 is less than 0.1
	switch {
	case e.Held == 0 && e.Late > time.Duration(MaxLate*float64(s.Latency)):
		return Unoffered, fmt.Sprintf("the generator was up to %v late", e.Late)
	case e.Lost > 0:
		return Missed, fmt.Sprintf("%d connections were lost", e.Lost)
	case e.Refused > 0:
		return Missed, fmt.Sprintf("%d messages were refused", e.Refused)
	case e.Skipped > 0 || e.Held > 0:
		return Missed, fmt.Sprintf("connections did not take %d messages at once", e.Held+e.Skipped)
	case e.Unanswered > 0:
		return Missed, fmt.Sprintf("%d messages were not answered", e.Unanswered)
	case e.Undelivered > 0:
		return Missed, fmt.Sprintf("%d messages were not delivered", e.Undelivered)
	case float64(e.Exceeded) > budget:
		return Missed, fmt.Sprintf("%d of %d deliveries took more than %v", e.Exceeded, e.Delivered, s.Latency)
	case e.Delivered < s.MinDeliveries():
		return Unoffered, fmt.Sprintf("%d deliveries are too few to judge, want %d", e.Delivered, s.MinDeliveries())
	}
	return Kept, ""
}
