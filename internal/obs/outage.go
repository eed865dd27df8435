package obs

import (
	"log/slog"
	"sync"
	"time"
)

// tellOutage is the interval between the reports of a lasting outage. An outage is over
// only after tellOutage without a failure, so intermittent failures are one outage, with
// one line per interval.
const tellOutage = 10 * time.Second

// Outage logs a repeated operation: its failure, every 10 s of further failures their
// number, and its recovery. Make it with NewOutage. It is safe for concurrent use.
type Outage struct {
	log     *slog.Logger
	message string

	mu struct {
		sync.Mutex
		failures                int       // 0: working
		since, last, lastLogged time.Time // times of the first failure, the last failure, and the last line
	}
}

// NewOutage returns an Outage in the working state. message is the log text of a failure.
func NewOutage(log *slog.Logger, message string) *Outage { return &Outage{log: log, message: message} }

// Note records the result of an attempt.
func (o *Outage) Note(err error) {
	failures, duration, logNow := o.count(err)
	switch {
	case !logNow:
	case err == nil:
		o.log.Info("works again", "after", o.message, KeyCount, failures, KeyDuration, duration)
	case failures == 1:
		o.log.Warn(o.message, KeyError, err)
	default:
		o.log.Warn(o.message, KeyError, err, KeyCount, failures, KeyDuration, duration)
	}
}

// count returns the number and duration of failures, and whether to log now.
func (o *Outage) count(err error) (failures int, duration time.Duration, logNow bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	switch {
	case err != nil:
		if o.mu.failures == 0 {
			o.mu.since = now
		}
		o.mu.failures++
		o.mu.last = now
		if logNow = o.mu.failures == 1 || now.Sub(o.mu.lastLogged) >= tellOutage; logNow {
			o.mu.lastLogged = now
		}
	case o.mu.failures > 0 && now.Sub(o.mu.last) >= tellOutage:
		defer func() { o.mu.failures = 0 }()
		logNow = true
	}
	return o.mu.failures, o.mu.last.Sub(o.mu.since).Round(time.Millisecond), logNow
}
