package tokenbucket_test

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func quantileOf(arrivals []mono.Time, rate tokenbucket.Rate, burst int64, q float64) time.Duration {
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: rate, Burst: burst}, slices.Min(arrivals))
	delays := tokenbucket.Replay(arrivals, &b)
	slices.Sort(delays)
	return delays[tokenbucket.Rank(len(delays), q)]
}

func TestProfileIsTheSmallestBurst(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := tokenbucket.Rate(scaled(1, 1e12).Draw(t, "rate"))
		var arrivals []mono.Time
		c := clock{now: rapid.Int64Range(-1e6, 1e6).Draw(t, "start")}
		for range rapid.IntRange(1, 120).Draw(t, "arrivals") {
			c.now += min(gap(t, rate), 1e15)
			late := int64(0)
			if rapid.IntRange(0, 4).Draw(t, "late") == 0 {
				late = rapid.Int64Range(0, 20e12/int64(rate)).Draw(t, "ns")
			}
			arrivals = append(arrivals, mono.Time(c.now-late))
		}
		q := rapid.SampledFrom([]float64{0.5, 0.9, 0.99, 1}).Draw(t, "quantile")
		burst := testkit.Result(tokenbucket.Profile(arrivals, rate, q)).Must(t)
		testkit.MustEqual(t, quantileOf(arrivals, rate, burst, q), 0, "at %d and burst %d the quantile %v", rate, burst, q)
		if burst > 1 {
			if d := quantileOf(arrivals, rate, burst-1, q); d == 0 {
				t.Fatalf("at %d the quantile %v is 0 with a burst of %d already, not only of %d", rate, q, burst-1, burst)
			}
		}
	})
}

func TestProfileOfABurst(t *testing.T) {
	// 100 messages: 97 well apart, then 3 at once.
	var arrivals []mono.Time
	for i := range 97 {
		arrivals = append(arrivals, mono.Time(i)*second)
	}
	for range 3 {
		arrivals = append(arrivals, 97*second)
	}
	for q, want := range map[float64]int64{1: 3, 0.99: 2, 0.98: 1, 0.5: 1} {
		testkit.Result(tokenbucket.Profile(arrivals, tokenbucket.PerSecond(1000), q)).Equal(t, want, "quantile %v: burst", q)
	}
}

// With a token every 1.5 ns, a bucket of one token rounds 1.5 up to 2 and delays the third message. By the definition
// the third message does not wait.
func TestProfileCountsWhatABucketOfOneTokenLoses(t *testing.T) {
	arrivals, rate := []mono.Time{0, 1, 3}, tokenbucket.Rate(666_666_666_667)
	if got, err := tokenbucket.Profile(arrivals, rate, 0.6); err != nil || got != 2 {
		t.Errorf("burst %d (%v), want 2", got, err)
	}
	testkit.Equal(t, quantileOf(arrivals, rate, 1, 0.6), 1, "with a burst of 1 the quantile, where this test needs 1 ns")
}

func TestProfileRefuses(t *testing.T) {
	some := []mono.Time{1, 2, 3}
	for _, q := range []float64{0, -1, 1.01, math.NaN()} {
		if _, err := tokenbucket.Profile(some, 1000, q); err == nil {
			t.Errorf("a quantile of %v was accepted", q)
		}
	}
	var se *tokenbucket.ShareError
	for _, r := range []tokenbucket.Rate{0, -5, tokenbucket.MaxRate + 1} {
		if _, err := tokenbucket.Profile(some, r, 0.99); !errors.As(err, &se) || se.Field != "rate" {
			t.Errorf("a rate of %d gave %v", r, err)
		}
	}
	_, err := tokenbucket.Profile(nil, 1000, 0.99)
	testkit.ErrorIs(t, err, tokenbucket.ErrNoArrivals, "an empty trace")
	// The clock's whole range between two stamps out of order, at the top rate.
	if _, err := tokenbucket.Profile([]mono.Time{math.MaxInt64, math.MinInt64}, tokenbucket.MaxRate, 1); !errors.As(err, &se) || se.Field != "burst" {
		t.Errorf("a burst beyond the range gave %v", err)
	}
}

func TestReplay(t *testing.T) {
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 2}, 0)
	got := tokenbucket.Replay([]mono.Time{0, 0, 0, 500_000, 1e9}, &b)
	want := []time.Duration{0, 0, time.Millisecond, 1500 * time.Microsecond, 0}
	testkit.EqualSlices(t, got, want, "delays")
	var none tokenbucket.Bucket
	for i, d := range tokenbucket.Replay([]mono.Time{math.MinInt64, -5, 5}, &none) {
		testkit.Equal(t, d, math.MaxInt64, "message %d waits for a token that never comes", i)
	}
	// A wait of nearly the whole range.
	far := tokenbucket.New(tokenbucket.Share{Rate: tokenbucket.MaxRate, Burst: 1}, math.MaxInt64-10)
	if got := tokenbucket.Replay([]mono.Time{math.MinInt64}, &far)[0]; got != math.MaxInt64 {
		t.Errorf("delay %d, want the longest", got)
	}
}

func TestRank(t *testing.T) {
	for _, c := range []struct {
		n    int
		q    float64
		want int
	}{
		{1, 0.5, 0}, {1, 1, 0}, {4, 0.5, 1}, {5, 0.5, 2}, {100, 0.99, 98}, {101, 0.99, 99}, {1000, 0.999, 998},
		{100, 0.07, 6}, {100, 0.55, 54}, {100, 0.29, 28}, {10, 0, 0}, {10, 1, 9}, {3, 7, 2}, {200_000, 0.999, 199_799},
	} {
		testkit.Equal(t, tokenbucket.Rank(c.n, c.q), c.want, "Rank(%d, %v)", c.n, c.q)
	}
	// Compare with whole numbers: q = p/1000 of n is rank ceil(p*n/1000).
	for n := 1; n < 3000; n += 7 {
		for p := 1; p <= 1000; p++ {
			testkit.MustEqual(t, tokenbucket.Rank(n, float64(p)/1000), (p*n+999)/1000-1, "Rank(%d, %d/1000)", n, p)
		}
	}
}
