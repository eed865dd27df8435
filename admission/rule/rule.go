// Package rule has the rules of admission, the mapping of keys to partitions, and the defaults for keys
// without a rule (defaults.go). It is pure. Read admission/table next, which keeps the
// buckets.
package rule

import (
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"unicode/utf8"

	"github.com/srtm-io/srtm/internal/refill"
	"github.com/srtm-io/srtm/tokenbucket"
)

// MaxKey is the maximum length of a key in bytes; the minimum is 1.
const MaxKey = 256

// Rule is the refill A and the capacity C of a key's bucket. Immutable.
type Rule struct {
	// Key is 1 to MaxKey bytes of UTF-8 without control characters. A key that ends in "*" is a
	// default: its rule applies to each key that has no rule of its own and begins with the text before
	// the "*". Each such key has a bucket of its own.
	Key string
	// Share is the refill in milli-credits per period and the capacity in credits. The zero Share
	// denies everything.
	Share tokenbucket.Share
	// Period of the refill in seconds; 0 means 1.
	Period int64
	// Strict: a server that may have lost the key to another server stops deciding, and a server that
	// takes over starts with an empty bucket. So the rule is never exceeded.
	Strict bool
	// Shadow: decide and count, but admit in any case.
	Shadow bool
	// FailOpen: a router that cannot reach the key's owner admits.
	FailOpen bool
	// Change grows with every edit of any rule.
	Change uint64
}

// Default reports whether the rule applies to keys by prefix.
func (r *Rule) Default() bool { return strings.HasSuffix(r.Key, "*") }

// Validate returns the first fault of the rule.
func (r *Rule) Validate() error {
	if err := ValidKey(r.Key); err != nil {
		return err
	}
	if r.Share.Rate == 0 && r.Share.Burst > 0 {
		return errors.New("refill 0 with a capacity: the bucket would empty once and deny for ever; use 0 and 0 to deny")
	}
	if r.Period < 0 || r.Period > refill.MaxSeconds {
		return fmt.Errorf("refill period %d: want 1 to %d seconds", r.Period, int64(refill.MaxSeconds))
	}
	err := r.Share.Validate()
	if e, ok := errors.AsType[*tokenbucket.ShareError](err); ok { // in the terms of a rule
		if e.Field == "rate" {
			text := func(rate int64) string { return tokenbucket.Rate(rate).Text() }
			return fmt.Errorf("refill %s: want %s to %s credits per second", text(e.Value), text(e.Min), text(e.Max))
		}
		return fmt.Errorf("capacity %d: want %d to %d credits", e.Value, e.Min, e.Max)
	}
	if err != nil || r.Share.IsZero() {
		return err
	}
	_, _, err = r.Refill().Bucket(r.Share.Burst)
	return err
}

// Refill returns the rule's refill.
func (r *Rule) Refill() refill.Refill {
	return refill.Refill{Milli: int64(r.Share.Rate), Seconds: max(1, r.Period)}
}

// Bucket returns the share of the key's bucket, and the number of bucket tokens per credit. For a rule
// that Validate refuses, Bucket returns the zero Share.
func (r *Rule) Bucket() (share tokenbucket.Share, scale int64) {
	if r.Share.Rate <= 0 || r.Share.Burst <= 0 {
		return share, 1
	}
	if r.Period <= 1 {
		return r.Share, 1
	}
	share, scale, err := r.Refill().Bucket(r.Share.Burst)
	if err != nil {
		return tokenbucket.Share{}, 1
	}
	return share, scale
}

// FillTime returns the seconds that an empty bucket takes to fill, rounded up. Requires: the rule is
// valid, and its Share is not zero.
func (r *Rule) FillTime() (seconds int64) {
	share, _ := r.Bucket()
	return (1000*share.Burst-1)/int64(share.Rate) + 1
}

// ValidKey returns an error if key is not a valid key.
func ValidKey(key string) error {
	switch {
	case len(key) < 1 || len(key) > MaxKey:
		return fmt.Errorf("key of %d bytes: want 1 to %d", len(key), MaxKey)
	case !utf8.ValidString(key):
		return errors.New("key is not UTF-8")
	case strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return errors.New("key has a control character")
	}
	return nil
}

// Partitions is the number of partitions in a store; fixed when the store is made.
const Partitions = 4096

// Partition returns CRC-32/IEEE of the key, unsigned, modulo the number of partitions (Janus, section
// II.B). With one partition on each server, Partition is the paper's choice of a server.
func Partition[K string | []byte](key K, partitions int) int {
	return int(crc32.ChecksumIEEE([]byte(key)) % uint32(partitions))
}
