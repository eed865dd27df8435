package rule

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/srtm-io/srtm/tokenbucket"
)

// MaxKey is the maximum length of a key in bytes; the minimum is 1.
const MaxKey = 256

// Mode says who decides for a key.
type Mode uint8

const (
	// Central: the server that owns the key's partition decides each request.
	Central Mode = iota
	// Lease: holders decide by shares of the rule that the owner leases to them.
	Lease
)

// String returns the mode's name as it is in the API and in the store.
func (m Mode) String() string {
	if m == Lease {
		return "lease"
	}
	return "central"
}

// ParseMode is the inverse of String. "" is Central.
func ParseMode(s string) (Mode, error) {
	switch s {
	case "", "central":
		return Central, nil
	case "lease":
		return Lease, nil
	}
	return 0, fmt.Errorf("mode %q: want central or lease", s)
}

// Rule is what a key may do: refill A and capacity C of its bucket. Immutable.
type Rule struct {
	// Key is 1 to MaxKey bytes of UTF-8 without control characters. One that ends
	// in "*" is a default: it stands for each key without a rule of its own that
	// begins with what precedes the "*", and each such key has a bucket of its own.
	Key string
	// Share is the refill in milli-credits per second and the capacity in credits.
	// The zero Share denies everything.
	Share tokenbucket.Share
	Mode  Mode
	// Strict: a server that may have lost the key to another stops deciding for it,
	// and one that takes over starts with an empty bucket, so that nothing is ever
	// admitted above the rule.
	Strict bool
	// Shadow: decide and count, and admit whatever the decision.
	Shadow bool
	// FailOpen: a router or program that cannot reach the owner admits.
	FailOpen bool
	// Change grows with every edit of any rule.
	Change uint64
}

// Default reports whether the rule stands for keys by their prefix.
func (r *Rule) Default() bool { return strings.HasSuffix(r.Key, "*") }

// Errors of Validate that have no values.
var (
	errNoRefill = errors.New("refill 0 with a capacity: the bucket would empty once and deny for ever; use 0 and 0 to deny")
	errControl  = errors.New("key has a control character")
	errUTF8     = errors.New("key is not UTF-8")
)

// Validate says what is wrong with the rule.
// Errors: of a *tokenbucket.ShareError, or one that has no values.
func (r *Rule) Validate() error {
	if err := ValidKey(r.Key); err != nil {
		return err
	}
	if r.Share.Rate == 0 && r.Share.Burst > 0 {
		return errNoRefill
	}
	if r.Mode > Lease {
		return fmt.Errorf("mode %d: want central or lease", r.Mode)
	}
	err := r.Share.Validate()
	if share, ok := errors.AsType[*tokenbucket.ShareError](err); ok {
		return shareError{share}
	}
	return err
}

// shareError says it in a rule's words.
type shareError struct{ *tokenbucket.ShareError }

func (e shareError) Unwrap() error { return e.ShareError }

func (e shareError) Error() string {
	if e.Field == "rate" {
		return fmt.Sprintf("refill %s: want %s to %s credits per second", tokenbucket.Rate(e.Value).Text(), tokenbucket.Rate(e.Min).Text(), tokenbucket.Rate(e.Max).Text())
	}
	return fmt.Sprintf("capacity %d: want %d to %d credits", e.Value, e.Min, e.Max)
}

// ValidKey says what is wrong with a key.
func ValidKey(key string) error {
	switch {
	case len(key) < 1 || len(key) > MaxKey:
		return fmt.Errorf("key of %d bytes: want 1 to %d", len(key), MaxKey)
	case !utf8.ValidString(key):
		return errUTF8
	case strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return errControl
	}
	return nil
}
