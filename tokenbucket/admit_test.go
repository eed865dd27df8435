package tokenbucket_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// credit is the definition of Admit in exact fractions: the tokens held at a time.
type credit struct {
	rate, burst, held *big.Rat
	at                int64
}

func (c *credit) admit(n, now int64) (bool, time.Duration) {
	c.held = add(c.held, mul(c.rate, rat(now-c.at)))
	c.at = now
	if c.burst.Cmp(c.held) < 0 {
		c.held = c.burst
	}
	if rat(n).Cmp(c.burst) > 0 {
		return false, math.MaxInt64
	}
	if c.held.Cmp(rat(n)) >= 0 {
		c.held = sub(c.held, rat(n))
		return true, 0
	}
	wait := exact(quo(sub(rat(n), c.held), c.rate))
	return false, time.Duration(min(wait, mono.Never-mono.Time(now)))
}

func TestAdmitIsItsDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawShare(t)
		now := scaled(1, 1<<60).Draw(t, "start")
		b := tokenbucket.NewFull(s, mono.Time(now))
		def := credit{rate: perNano(s.Rate), burst: rat(s.Burst), held: rat(s.Burst), at: now}
		for range rapid.IntRange(1, 60).Draw(t, "asks") {
			now += min(gap(t, s.Rate), math.MaxInt64/2-now)
			n := rapid.OneOf(rapid.Just(int64(1)), rapid.Int64Range(0, 4), scaled(1, 2*s.Burst)).Draw(t, "cost")
			ok, retry := b.Admit(n, mono.Time(now))
			wantOK, wantRetry := def.admit(n, now)
			if ok != wantOK || retry != wantRetry {
				t.Fatalf("at %d, cost %d: %v, retry after %d; want %v, %d", now, n, ok, retry, wantOK, wantRetry)
			}
			if !ok && retry < math.MaxInt64/4 && rapid.Bool().Draw(t, "try then") {
				if early := b; retry > 1 {
					if ok, _ := early.Admit(n, mono.Time(now).Add(retry-1)); ok {
						t.Fatalf("cost %d was said to be there after %d, and was before", n, retry)
					}
				}
				now += int64(retry)
				if ok, _ = b.Admit(n, mono.Time(now)); !ok {
					t.Fatalf("cost %d is not there after the %d that was said", n, retry)
				}
				def.admit(n, now)
			}
		}
	})
}

func BenchmarkAdmit(b *testing.B) {
	bucket := tokenbucket.NewFull(tokenbucket.Share{Rate: 1e9, Burst: 1000}, 0)
	now := mono.Time(0)
	b.ReportAllocs()
	for b.Loop() {
		now += 700
		bucket.Admit(1, now)
	}
}
