// Package refill parses the refill of an admission rule as people write it: "2.5" (per
// second), "100/day", "1/hour", "5/10m". It is exact: no refill is rounded. It is pure.
package refill

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Refill is Milli thousandths of a credit per period.
type Refill struct {
	Milli   int64
	Seconds int64 // of the period, 1 or more
}

const (
	// MaxSeconds is the longest period: a leap year.
	MaxSeconds = 366 * 86_400
	// MaxScale bounds the tokens per credit of a bucket; see Bucket.
	MaxScale = math.MaxUint16
)

var units = []struct {
	name    string
	seconds int64
}{{"week", 7 * 86_400}, {"day", 86_400}, {"hour", 3600}, {"minute", 60}, {"second", 1}}

// Parse parses a number of credits, optionally followed by "/" and a period: second,
// minute, hour, day, week, their first letters, or a duration of whole seconds, such as
// 90s or 36h. The default period is a second.
func Parse(text string) (Refill, error) {
	amount, period, given := strings.Cut(text, "/")
	seconds := int64(1)
	if given {
		var ok bool
		if seconds, ok = parsePeriod(period); !ok {
			return Refill{}, fmt.Errorf("refill %q: want a period of 1s to 366 days after the /: second, minute, hour, day, week or a duration as 36h", text)
		}
	}
	whole, fraction, _ := strings.Cut(amount, ".")
	fraction = strings.TrimRight(fraction, "0")
	// Digits beyond thousandths lengthen the period: 0.0015 is 15 thousandths in 10 s.
	for len(fraction) < 3 {
		fraction += "0"
	}
	scale := int64(1)
	for range len(fraction) - 3 {
		if scale > MaxSeconds {
			break
		}
		scale *= 10
	}
	milli, err := strconv.ParseUint(whole+fraction, 10, 63)
	if err != nil || whole == "" && strings.Trim(fraction, "0") == "" && !strings.HasPrefix(amount, ".0") {
		return Refill{}, fmt.Errorf("refill %q: want a number of credits, and a period if that is not a second: 2.5, 100/day, 1/hour", text)
	}
	r := Refill{Milli: int64(milli), Seconds: seconds * scale}
	for r.Milli%10 == 0 && r.Seconds%10 == 0 && scale > 1 {
		r.Milli, r.Seconds, scale = r.Milli/10, r.Seconds/10, scale/10
	}
	if r.Milli == 0 {
		r.Seconds = 1
	}
	if r.Seconds > MaxSeconds {
		return Refill{}, fmt.Errorf("refill %q has too many digits: write it by its period, as 100/day", text)
	}
	return r, nil
}

func parsePeriod(text string) (seconds int64, ok bool) {
	for _, u := range units {
		if text == u.name || text == u.name[:1] {
			return u.seconds, true
		}
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > MaxSeconds*time.Second || d%time.Second != 0 {
		return 0, false
	}
	return int64(d / time.Second), true
}

// String returns a text that Parse reads as r. A period that is a power of ten gives a
// decimal number of credits per second.
func (r Refill) String() string {
	digits := 3
	period := r.Seconds
	for period >= 10 && period%10 == 0 {
		period /= 10
		digits++
	}
	if period == 1 {
		return decimal(r.Milli, digits)
	}
	text := decimal(r.Milli, 3)
	for _, u := range units {
		if r.Seconds == u.seconds {
			return text + "/" + u.name
		}
	}
	return text + "/" + strconv.FormatInt(r.Seconds, 10) + "s"
}

// decimal formats n divided by 10 to the power of digits.
func decimal(n int64, digits int) string {
	text := fmt.Sprintf("%0*d", digits+1, n)
	whole, fraction := text[:len(text)-digits], strings.TrimRight(text[len(text)-digits:], "0")
	if fraction == "" {
		return whole
	}
	return whole + "." + fraction
}

// Bucket returns the share of a bucket with exactly this refill and a capacity in
// credits. scale is the number of the bucket's tokens per credit: 1000/86400 thousandths
// a second are 5 a second of a credit's 432nd. Bucket returns an error if the bucket
// would exceed a share's range; the error names the step. Requires: r.Milli > 0,
// r.Seconds > 0, capacity > 0.
func (r Refill) Bucket(capacity int64) (share tokenbucket.Share, scale int64, err error) {
	divisor := gcd(r.Milli, r.Seconds)
	scale = r.Seconds / divisor
	limit := min(MaxScale, tokenbucket.MaxBurst/capacity)
	if scale > limit {
		digits := 3
		for step := int64(10); step <= limit; step *= 10 {
			digits++
		}
		return share, 0, fmt.Errorf("refill %s cannot be kept exactly: at a capacity of %d its step is %s credits per second", r, capacity, decimal(1, digits))
	}
	return tokenbucket.Share{Rate: tokenbucket.Rate(r.Milli / divisor), Burst: capacity * scale}, scale, nil
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
