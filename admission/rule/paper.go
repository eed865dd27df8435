package rule

import "time"

// PaperBucket is the paper's leaky bucket with refill (section II.C), as it is
// written there: f(t) = C + (A-B)*t within [0, C], refilled by a tick, and a request
// is admitted while the credit is greater than zero. Two things follow that
// tokenbucket.Bucket does without: a fraction of a credit admits a whole request, so
// that the credit falls below zero; and what is earned between ticks is not there.
type PaperBucket struct {
	Refill   float64 // A, credits per second
	Capacity float64 // C, credits
	Credit   float64
}

// Tick refills for the time since the tick before.
func (b *PaperBucket) Tick(since time.Duration) {
	b.Credit = min(b.Capacity, b.Credit+b.Refill*since.Seconds())
}

// Take admits a request, and charges it one credit, if the credit is above zero.
func (b *PaperBucket) Take() bool {
	if b.Credit <= 0 {
		return false
	}
	b.Credit--
	return true
}
