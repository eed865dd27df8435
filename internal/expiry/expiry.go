// Package expiry has the settings for giving up messages that no consumer finished. The
// package is pure: brokers store the settings, the control plane stores them with the
// topic, and nsqd/queue applies them.
package expiry

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// MaxTTL is the longest life of a message that Settings can bound.
const MaxTTL = 10 * 365 * 24 * time.Hour

// Settings determine when a message of a topic or a channel is given up. A zero field
// sets nothing.
type Settings struct {
	TTL         time.Duration `json:"ttl_ns,omitempty"`       // from publication
	MaxAttempts int           `json:"max_attempts,omitempty"` // deliveries in one channel, up to 65535
	DeadLetter  string        `json:"dead_letter,omitempty"`  // topic that receives messages after MaxAttempts deliveries
}

// On reports whether anything is set.
func (e Settings) On() bool { return e != (Settings{}) }

// Within returns the settings in force in a channel with settings e of a topic with
// settings t. A channel can shorten the topic's TTL but not lengthen it. The channel's
// other settings replace the topic's.
func (e Settings) Within(t Settings) Settings {
	if e.TTL == 0 || t.TTL > 0 && t.TTL < e.TTL {
		e.TTL = t.TTL
	}
	return Settings{e.TTL, cmp.Or(e.MaxAttempts, t.MaxAttempts), cmp.Or(e.DeadLetter, t.DeadLetter)}
}

// Validate reports all problems of the settings of a topic, or of one of its channels.
func (e Settings) Validate(topic string) error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(e.TTL == 0 || e.TTL >= time.Millisecond && e.TTL <= MaxTTL, "ttl %v is outside [1ms, %v]; for example 1h", e.TTL, MaxTTL)
	check(e.MaxAttempts >= 0 && e.MaxAttempts <= math.MaxUint16, "max_attempts %d is outside [1, %d]; for example 5", e.MaxAttempts, math.MaxUint16)
	if e.DeadLetter != "" {
		check(wire.ValidTopicName(e.DeadLetter) && !wire.Ephemeral(e.DeadLetter), "dead_letter %q is not the name of a topic that is kept; for example %s.dead", e.DeadLetter, topic)
		check(e.DeadLetter != topic, "dead_letter %q is the topic itself: its messages would never end", e.DeadLetter)
	}
	return errors.Join(errs...)
}

// ErrNoAttempts: a dead letter topic is set without a number of attempts.
var ErrNoAttempts = errors.New("dead_letter needs max_attempts, which says when a message has failed")
