package tokenbucket_test

import (
	"errors"
	"math"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

const second = mono.Time(1e9)

func TestShareValidate(t *testing.T) {
	ok := []tokenbucket.Share{{}, {Rate: 1, Burst: 1}, {Rate: tokenbucket.MaxRate, Burst: tokenbucket.MaxBurst}}
	for _, s := range ok {
		if err := s.Validate(); err != nil {
			t.Errorf("%v: %v", s, err)
		}
	}
	for s, field := range map[tokenbucket.Share]string{
		{Rate: 0, Burst: 1}:                           "rate",
		{Rate: -1, Burst: 1}:                          "rate",
		{Rate: tokenbucket.MaxRate + 1, Burst: 1}:     "rate",
		{Rate: 1, Burst: 0}:                           "burst",
		{Rate: 1, Burst: -1}:                          "burst",
		{Rate: 1000, Burst: tokenbucket.MaxBurst + 1}: "burst",
	} {
		err := s.Validate()
		var se *tokenbucket.ShareError
		if !errors.As(err, &se) || se.Field != field {
			t.Errorf("%v: %v, want an error about its %s", s, err, field)
			continue
		}
		// A bucket treats an invalid share as no share, and releases the tokens of the share before.
		bad := tokenbucket.NewFull(s, 0)
		if got := bad.Eligible(0); got != mono.Never || !bad.Share().IsZero() {
			t.Errorf("%v admits a message at %d", s, got)
		}
		good := tokenbucket.NewFull(tokenbucket.Share{Rate: 1000, Burst: 7}, 0)
		if released := good.Retune(0, s, 0); released != 7*tokenbucket.Token || good.Eligible(0) != mono.Never {
			t.Errorf("retuned to %v it released %d and admits at %d", s, released, good.Eligible(0))
		}
	}
	testkit.Equal(t, (&tokenbucket.ShareError{Field: "burst", Value: 0, Min: 1, Max: 9}).Error(), "burst 0 is outside 1 to 9 messages")
	testkit.Equal(t, (&tokenbucket.ShareError{Field: "rate", Value: -1, Min: 1, Max: 9}).Error(), "rate -0.001 is outside 0.001 to 0.009 messages per second")
}

func TestPerSecond(t *testing.T) {
	for msgs, want := range map[float64]tokenbucket.Rate{
		0: 0, 0.001: 1, 0.0014: 1, 0.3: 300, 1.1: 1100, 11000: 11_000_000, 1e9: tokenbucket.MaxRate, -2: -2000,
		math.Inf(1): math.MaxInt64, math.Inf(-1): math.MinInt64, 1e300: math.MaxInt64,
	} {
		testkit.Equal(t, tokenbucket.PerSecond(msgs), want, "PerSecond(%v)", msgs)
	}
	testkit.Equal(t, tokenbucket.PerSecond(math.NaN()), 0, "PerSecond(NaN)")
	testkit.Equal(t, tokenbucket.Rate(1500).PerSecond(), 1.5, "1500 milli-messages per second, in messages")
}

func TestNothingIsAllocated(t *testing.T) {
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(10_000), Burst: 2}, 0)
	at := mono.Time(0)
	testkit.Equal(t, testing.AllocsPerRun(1000, func() {
		at += 70_000
		b.Eligible(at)
		b.Take(at)
		b.Tokens(at)
	}), 0, "allocations per message")
}

// sink keeps the compiler from removing the measured code.
var sink mono.Time

// BenchmarkMessage measures a message's cost to the broker: one Eligible and one Take.
func BenchmarkMessage(b *testing.B) {
	for _, bench := range []struct {
		name string
		gap  mono.Time
	}{{"conforming", 130_000}, {"waiting", 70_000}} {
		b.Run(bench.name, func(b *testing.B) {
			bkt := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(9_999), Burst: 26}, 0)
			var at mono.Time
			b.ReportAllocs()
			for b.Loop() {
				at += bench.gap
				sink = bkt.Eligible(at)
				sink = bkt.Take(at)
			}
		})
	}
}

// A retune with an older clock follows a grant with a newer clock. The eligible times may come late, but no instant may
// get more than the burst.
func TestARetuneWithAnOlderClock(t *testing.T) {
	const ms = mono.Time(1e6)
	slow := tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 3}
	b := tokenbucket.New(slow, 100*ms)
	for range 50 {
		b.Take(100 * ms) // a debt, so that the grant can be larger than the burst
	}
	b.Retune(100*ms, slow, 53*tokenbucket.Token)
	b.Retune(50*ms, tokenbucket.Share{Rate: tokenbucket.PerSecond(4000), Burst: 3}, 0)
	at := map[mono.Time]int{}
	for range 500 {
		e := b.Take(20 * ms)
		if at[e]++; at[e] > 3 {
			t.Fatalf("%d messages are eligible at %d with a burst of 3", at[e], e)
		}
	}
}
