package obs

import (
	"log/slog"
	"sync"
	"time"
)

// tellOutage is how often an Outage says that it goes on, and for how long nothing may fail before the
// Outage is over: what fails now and then is one outage, so there is a line in 10 s at most.
const tellOutage = 10 * time.Second

// Outage is the log of something that is tried again and again: it says that it fails, every 10 s that
// it still does and how often it has, and that it works again. Make it with NewOutage. It is safe for
// concurrent use.
type Outage struct {
	log     *slog.Logger
	message string

	mu struct {
		sync.Mutex
		failures          int       // 0: it works
		since, last, told time.Time // the first failure, the last one, and the last line
	}
}

// NewOutage returns an Outage that works. message is what the log says of a failure.
func NewOutage(log *slog.Logger, message string) *Outage { return &Outage{log: log, message: message} }

// Note takes what came of an attempt.
func (o *Outage) Note(err error) {
	failures, took, tell := o.count(err)
	switch {
	case !tell:
	case err == nil:
		o.log.Info("works again", "after", o.message, KeyCount, failures, KeyDuration, took)
	case failures == 1:
		o.log.Warn(o.message, KeyError, err)
	default:
		o.log.Warn(o.message, KeyError, err, KeyCount, failures, KeyDuration, took)
	}
}

// count returns how often it failed in which time, and whether the log says so now.
func (o *Outage) count(err error) (failures int, took time.Duration, tell bool) {
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
		if tell = o.mu.failures == 1 || now.Sub(o.mu.told) >= tellOutage; tell {
			o.mu.told = now
		}
	case o.mu.failures > 0 && now.Sub(o.mu.last) >= tellOutage:
		defer func() { o.mu.failures = 0 }()
		tell = true
	}
	return o.mu.failures, o.mu.last.Sub(o.mu.since).Round(time.Millisecond), tell
}
