package search

import (
	"fmt"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/plural"
)

// SLO: a fraction Quantile of messages is delivered within Latency.
type SLO struct {
	Quantile float64
	Latency  time.Duration
}

// Evidence holds the counts of a step.
type Evidence struct {
	// Counted by the generator, in messages except Lost:
	//   - Skipped: not sent, because they were held back for too long;
	//   - Held: held back, because a connection took no more;
	//   - Unanswered: without an answer;
	//   - Refused: answered with an error;
	//   - Lost: connections that were lost;
	//   - Undelivered: accepted but never delivered.
	Skipped, Held, Unanswered, Refused, Lost, Undelivered uint64
	// Late is the generator's send delay, at the SLO's quantile.
	Late time.Duration
	// Counted by the broker: first deliveries, and how many exceeded the SLO's latency.
	Delivered, Exceeded int64
}

// MaxLate is the part of the SLO's latency by which the generator may be late, at the
// SLO's quantile. Later messages would form other bursts than requested.
const MaxLate = 0.5

// MinDeliveries returns the number of deliveries for a judgement: ten of them may exceed
// the latency.
func (s SLO) MinDeliveries() int64 { return int64(math.Round(10 / (1 - s.Quantile))) }

// Judge returns the outcome of a rate, and why the rate was not kept. If the generator
// was late although every connection took its messages, the outcome is Unoffered,
// whatever the broker did. If connections did not take the messages, the broker was too
// slow. The same holds for refusals, lost connections and lost messages.
func (s SLO) Judge(e Evidence) (Outcome, string) {
	budget := (1 - s.Quantile) * float64(e.Delivered) * (1 + 1e-9) // 1-0.9 is less than 0.1
	switch {
	case e.Held == 0 && e.Late > time.Duration(MaxLate*float64(s.Latency)):
		return Unoffered, fmt.Sprintf("the generator was up to %v late", e.Late)
	case e.Lost > 0:
		return Missed, "lost " + plural.Count(e.Lost, "connection")
	case e.Refused > 0:
		return Missed, plural.Count(e.Refused, "message") + " refused"
	case e.Skipped > 0 || e.Held > 0:
		return Missed, "connections did not take " + plural.Count(e.Held+e.Skipped, "message") + " at once"
	case e.Unanswered > 0:
		return Missed, plural.Count(e.Unanswered, "message") + " not answered"
	case e.Undelivered > 0:
		return Missed, plural.Count(e.Undelivered, "message") + " not delivered"
	case float64(e.Exceeded) > budget:
		return Missed, fmt.Sprintf("%d of %d deliveries took more than %v", e.Exceeded, e.Delivered, s.Latency)
	case e.Delivered < s.MinDeliveries():
		return Unoffered, fmt.Sprintf("too few to judge: %s, want %d", plural.Count(e.Delivered, "delivery"), s.MinDeliveries())
	}
	return Kept, ""
}
