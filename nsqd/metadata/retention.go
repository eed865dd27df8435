package metadata

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Retention bounds the messages that stay in a topic's log, for a seek, after every channel has
// finished them. The zero value keeps no message. If both fields are set, the stricter bound
// counts.
type Retention struct {
	Age   time.Duration `json:"age_ns,omitempty"`
	Bytes int64         `json:"bytes,omitempty"` // the newest messages, in total
}

// On reports whether the topic retains messages.
func (r Retention) On() bool { return r != (Retention{}) }

var byteUnits = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
}

// ParseRetention is the inverse of String. It accepts a duration (24h), a size (10GB, 512MiB), or
// both with a comma; 0 or the empty string means no retention.
func ParseRetention(s string) (r Retention, err error) {
	if s == "" || s == "0" {
		return r, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		if d, err := time.ParseDuration(part); err == nil && d > 0 && r.Age == 0 {
			r.Age = d
			continue
		}
		if r.Bytes != 0 || !r.parseBytes(part) {
			return Retention{}, fmt.Errorf("%q is neither a positive duration (24h) nor a size (10GB), of each at most one", part)
		}
	}
	return r, nil
}

func (r *Retention) parseBytes(s string) bool {
	for _, u := range byteUnits {
		if number, ok := strings.CutSuffix(s, u.suffix); ok {
			n, err := strconv.ParseInt(number, 10, 64)
			r.Bytes = n * u.bytes
			return err == nil && n > 0 && n <= math.MaxInt64/u.bytes
		}
	}
	return false
}

func (r Retention) String() string {
	switch {
	case !r.On():
		return "0"
	case r.Bytes == 0:
		return r.Age.String()
	case r.Age == 0:
		return strconv.FormatInt(r.Bytes, 10) + "B"
	}
	return r.Age.String() + "," + strconv.FormatInt(r.Bytes, 10) + "B"
}

// Set implements flag.Value.
func (r *Retention) Set(s string) error {
	parsed, err := ParseRetention(s)
	if err == nil {
		*r = parsed
	}
	return err
}

func (r *Retention) validate() error {
	if r != nil && (r.Age < 0 || r.Bytes < 0) {
		return errors.New("less than nothing is retained")
	}
	return nil
}
