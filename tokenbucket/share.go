package tokenbucket

import (
	"fmt"
	"math"
	"strconv"
)

// Rate is a token rate in milli-messages per second.
type Rate int64

// Tokens is a number of tokens in thousandths. A negative value is a debt.
type Tokens int64

// Ranges of a share. MaxRate is one token per nanosecond: the bucket's answers are whole
// nanoseconds, and the proof in bucket.go requires that a token takes at least one nanosecond.
const (
	MinRate  Rate  = 1
	MaxRate  Rate  = 1e12
	MinBurst int64 = 1
	MaxBurst int64 = 1e9

	// Token is the cost of one message.
	Token Tokens = 1000
)

// PerSecond returns the rate of msgs messages per second, rounded to a milli-message. It returns 0
// for NaN and the end of the range on overflow; Share.Validate refuses both.
func PerSecond(msgs float64) Rate {
	m := math.Round(msgs * 1000)
	switch {
	case math.IsNaN(m):
		return 0
	case m >= math.MaxInt64:
		return math.MaxInt64
	case m <= math.MinInt64:
		return math.MinInt64
	}
	return Rate(m)
}

// PerSecond returns r in messages per second.
func (r Rate) PerSecond() float64 { return float64(r) / 1000 }

// Text returns r in messages per second, without an exponent or a unit.
func (r Rate) Text() string { return strconv.FormatFloat(r.PerSecond(), 'f', -1, 64) }

// Share is a contract (r, b), or a broker's part of a contract. The zero Share holds nothing and
// admits nothing.
type Share struct {
	Rate  Rate  // MinRate to MaxRate
	Burst int64 // MinBurst to MaxBurst, in messages
}

// IsZero reports whether s is the zero Share.
func (s Share) IsZero() bool { return s == Share{} }

// Less returns s - o, whose parts may be negative.
func (s Share) Less(o Share) Share { return Share{s.Rate - o.Rate, s.Burst - o.Burst} }

// Max returns the larger rate and the larger burst of s and o.
func (s Share) Max(o Share) Share { return Share{max(s.Rate, o.Rate), max(s.Burst, o.Burst)} }

// Validate returns a *ShareError if s is neither the zero Share nor within the ranges. A caller
// that requires a nonzero share also checks IsZero.
func (s Share) Validate() error {
	if s.IsZero() {
		return nil
	}
	if s.Rate < MinRate || s.Rate > MaxRate {
		return &ShareError{Field: "rate", Value: int64(s.Rate), Min: int64(MinRate), Max: int64(MaxRate)}
	}
	if s.Burst < MinBurst || s.Burst > MaxBurst {
		return &ShareError{Field: "burst", Value: s.Burst, Min: MinBurst, Max: MaxBurst}
	}
	return nil
}

// ShareError reports the field of a share that is out of range.
type ShareError struct {
	Field    string // "rate" (milli-messages per second) or "burst" (messages)
	Value    int64
	Min, Max int64
}

func (e *ShareError) Error() string {
	if e.Field == "rate" { // in messages per second, for people
		return fmt.Sprintf("rate %s is outside %s to %s messages per second", Rate(e.Value).Text(), Rate(e.Min).Text(), Rate(e.Max).Text())
	}
	return fmt.Sprintf("%s %d is outside %d to %d messages", e.Field, e.Value, e.Min, e.Max)
}
