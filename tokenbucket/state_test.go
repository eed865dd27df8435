package tokenbucket_test

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// A bucket restored from its share and State before each call behaves like the original bucket. Only granted tokens may
// be later for Take.
func TestABucketIsItsShareAndState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b, c tokenbucket.Bucket
		now := mono.Time(scaled(1, 1<<60).Draw(t, "start"))
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now += mono.Time(min(gap(t, max(1, b.Share().Rate)), math.MaxInt64/2-int64(now)))
			c = tokenbucket.Restore(c.Share(), c.State())
			if early, late := b.Eligible(now), c.Eligible(now); late < early {
				t.Fatalf("a token at %d, before %d", late, early)
			}
			if rapid.Bool().Draw(t, "retune") {
				s, granted := drawShare(t), tokenbucket.Tokens(scaled(1, 1e12).Draw(t, "granted"))
				at := now.Add(time.Duration(rapid.IntRange(0, 1).Draw(t, "later")) * time.Second)
				if got, want := c.Retune(at, s, granted), b.Retune(at, s, granted); got != want {
					t.Fatalf("%d given up, want %d", got, want)
				}
			} else {
				n := scaled(1, 2*max(1, b.Share().Burst)).Draw(t, "cost")
				ok, retry := c.Admit(n, now)
				if wantOK, wantRetry := b.Admit(n, now); ok != wantOK || retry != wantRetry {
					t.Fatalf("%v, retry after %v; want %v, %v", ok, retry, wantOK, wantRetry)
				}
			}
			if got, want := c.Tokens(now), b.Tokens(now); got != want || c.Share() != b.Share() {
				t.Fatalf("%d tokens, want %d", got, want)
			}
		}
	})
}
