package tuner

import "time"

// Excess says whether what a topic offers is beyond its contract (r, b): an SLO is
// owed for the rest only. It is told of all that is offered, in intervals, and fills a
// bucket with it that r empties. The zero value is ready.
type Excess struct {
	level float64       // messages beyond what r has taken
	calm  time.Duration // since level was above b last
	over  bool
}

// Backlog says that so many messages waited for tokens while they were not reported.
func (e *Excess) Backlog(n, burst float64) {
	if n > 0 {
		e.level = max(e.level, n+burst)
	}
}

// Empty reports whether nothing that was offered counts any more.
func (e *Excess) Empty() bool { return e.level == 0 && !e.over }

// Offer tells of n messages that came within d while the contract was (rate, burst),
// in msg/s and messages, and reports whether the topic is over it: from when it has
// offered more than burst + rate·Δt in some Δt up to now, and also more than rate in
// the mean of a longer time, as mean says, which bursts alone do not; until keep after
// the bucket would have been made up for, since what was delivered until then is
// measured for so long.
func (e *Excess) Offer(n float64, d time.Duration, mean, rate, burst float64, keep time.Duration) bool {
	e.level = max(0, e.level+n-rate*d.Seconds())
	e.calm += d
	if e.level > burst {
		e.over, e.calm = e.over || mean > rate, 0
	}
	e.over = e.over && e.calm < keep
	return e.over
}
