package tuner

import "time"

// Excess judges whether a topic offers more than its contract (r, b). No SLO is owed for
// the excess. Excess receives all offered messages, in intervals, and fills a bucket that
// drains at r. The zero value is ready.
type Excess struct {
	level   float64       // messages beyond what r has drained
	calm    time.Duration // time since level was last above b
	exceeds bool
}

// Backlog adds n messages that already waited for tokens when the first report arrived.
func (e *Excess) Backlog(n, burst float64) {
	if n > 0 {
		e.level = max(e.level, n+burst)
	}
}

// Empty reports whether no offered message counts any more.
func (e *Excess) Empty() bool { return e.level == 0 && !e.exceeds }

// Offer adds n messages of an interval d under the contract (rate, burst), in msg/s and
// messages, and reports whether the topic exceeds its contract. An excess begins under
// two conditions. The topic has offered more than burst + rate·Δt in some Δt up to now.
// The mean rate over a longer time, mean, also exceeds rate, which bursts alone do not
// cause. The excess ends window after the level last exceeded burst, because deliveries
// stay in the measurements for window.
func (e *Excess) Offer(n float64, d time.Duration, mean, rate, burst float64, window time.Duration) bool {
	e.level = max(0, e.level+n-rate*d.Seconds())
	e.calm += d
	if e.level > burst {
		e.exceeds, e.calm = e.exceeds || mean > rate, 0
	}
	e.exceeds = e.exceeds && e.calm < window
	return e.exceeds
}
