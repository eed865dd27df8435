package tokenbucket_test

import (
	"errors"
	"math"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

const second = mono.Time(1e9)

func TestABurstPassesAndTheRestIsPaced(t *testing.T) {
	// 1000 msg/s, so a token each millisecond.
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 3}, 0)
	for i, want := range []mono.Time{0, 0, 0, 1e6, 2e6, 3e6} {
		if got := b.Eligible(0); got != want {
			t.Fatalf("message %d would be eligible at %d, want %d", i, got, want)
		}
		if got := b.Take(0); got != want {
			t.Fatalf("message %d is eligible at %d, want %d", i, got, want)
		}
	}
	if got := b.Tokens(0); got != -3*tokenbucket.Token {
		t.Errorf("holds %d at 0, want a debt of 3 tokens", got)
	}
	if got := b.Tokens(3e6 + 500_000); got != 500 {
		t.Errorf("holds %d half a token time after the last, want 500", got)
	}
	if got := b.Tokens(10 * second); got != 3000 {
		t.Errorf("holds %d after a long pause, want its burst", got)
	}
}

func TestANewBucketIsEmpty(t *testing.T) {
	b := tokenbucket.New(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 3}, 5*second)
	if got := b.Tokens(5 * second); got != 0 {
		t.Errorf("holds %d, want none", got)
	}
	if got, want := b.Take(4*second), 5*second+1e6; got != want {
		t.Errorf("first message is eligible at %d, want %d", got, want)
	}
}

func TestTheZeroBucketAdmitsNothing(t *testing.T) {
	var b tokenbucket.Bucket
	if got := b.Eligible(7); got != mono.Never {
		t.Errorf("eligible at %d, want Never", got)
	}
	if got := b.Take(7); got != mono.Never {
		t.Errorf("taken at %d, want Never", got)
	}
	if got := b.Tokens(second); got != 0 {
		t.Errorf("holds %d, want none", got)
	}
	if got := b.Share(); !got.IsZero() {
		t.Errorf("share %v, want the zero share", got)
	}
}

func TestRetuneKeepsWhatFitsAndReturnsTheRest(t *testing.T) {
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 10}, 0)
	b.Take(0)
	half := tokenbucket.Share{Rate: tokenbucket.PerSecond(500), Burst: 4}
	if got := b.Retune(500_000, half, 0); got != 5500 {
		t.Errorf("gave up %d, want 5500 of 9500", got)
	}
	if got := b.Tokens(500_000); got != 4000 {
		t.Errorf("kept %d, want 4000", got)
	}
	if got := b.Retune(500_000, tokenbucket.Share{Rate: tokenbucket.PerSecond(500), Burst: 6}, 3000); got != 1000 {
		t.Errorf("gave back %d of a grant of 3000 with room for 2000, want 1000", got)
	}
	if got := b.Retune(500_000, tokenbucket.Share{}, 0); got != 6000 {
		t.Errorf("gave up %d on losing the share, want 6000", got)
	}
	if got := b.Eligible(second); got != mono.Never {
		t.Errorf("eligible at %d without a share, want Never", got)
	}
}

// The adaptor sends the same share again and again; that must not cost an idle
// bucket what it holds for a message read late.
func TestTheSameShareAgainChangesNothing(t *testing.T) {
	s := tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 1}
	b := tokenbucket.NewFull(s, 0)
	before := b
	if got := b.Retune(second, s, 0); got != 0 || b != before {
		t.Errorf("released %d, bucket %v, was %v", got, b, before)
	}
	if got := b.Retune(second, s, 700); got != 700 || b != before {
		t.Errorf("released %d of a grant that a full bucket cannot hold, want all 700", got)
	}
	if got := b.Take(second - 5); got != second-5 {
		t.Errorf("a message of just before the retune is eligible at %d", got)
	}
}

// A topic exists, and messages wait, before its first share arrives. What comes
// with the share is there from then on.
func TestMessagesThatWaitedForTheFirstGrant(t *testing.T) {
	var b tokenbucket.Bucket
	arrived, granted := second, 3*second
	if got := b.Eligible(arrived); got != mono.Never {
		t.Fatalf("eligible at %d without a share", got)
	}
	b.Retune(granted, tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 10}, 2*tokenbucket.Token)
	for i, want := range []mono.Time{granted, granted, granted + 1e6, granted + 2e6} {
		if got := b.Take(arrived); got != want {
			t.Errorf("message %d is eligible at %d, want %d", i, got, want)
		}
	}
	// Nor does the next retune, soon after, hand the rest of a grant to the past.
	b.Retune(granted+3e6, tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 20}, 20*tokenbucket.Token)
	b.Retune(granted+4e6, tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 19}, 0)
	if got, want := b.Take(arrived), granted+3e6; got != want {
		t.Errorf("a message that waited for the second grant is eligible at %d, want %d", got, want)
	}
	if got, want := b.Take(granted+3500), granted+3e6; got != want {
		t.Errorf("a message of before the second grant is eligible at %d, want %d", got, want)
	}
}

// A withdrawal, should a ledger ever send one, may leave a debt but no tokens.
func TestANegativeGrantTakesAway(t *testing.T) {
	s := tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 4}
	b := tokenbucket.NewFull(s, 0)
	if got := b.Retune(0, s, -5*tokenbucket.Token); got != 0 {
		t.Errorf("released %d", got)
	}
	if got := b.Tokens(0); got != -tokenbucket.Token {
		t.Errorf("holds %d, want a debt of one token", got)
	}
}

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
		// Held as nothing, and what a good share held is given up.
		bad := tokenbucket.NewFull(s, 0)
		if got := bad.Eligible(0); got != mono.Never || !bad.Share().IsZero() {
			t.Errorf("%v admits a message at %d", s, got)
		}
		good := tokenbucket.NewFull(tokenbucket.Share{Rate: 1000, Burst: 7}, 0)
		if released := good.Retune(0, s, 0); released != 7*tokenbucket.Token || good.Eligible(0) != mono.Never {
			t.Errorf("retuned to %v it released %d and admits at %d", s, released, good.Eligible(0))
		}
	}
	if got, want := (&tokenbucket.ShareError{Field: "burst", Value: 0, Min: 1, Max: 9}).Error(), "burst 0 is outside 1 to 9 messages"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := (&tokenbucket.ShareError{Field: "rate", Value: -1, Min: 1, Max: 9}).Error(), "rate -0.001 is outside 0.001 to 0.009 messages per second"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestPerSecond(t *testing.T) {
	for msgs, want := range map[float64]tokenbucket.Rate{
		0: 0, 0.001: 1, 0.0014: 1, 0.3: 300, 1.1: 1100, 11000: 11_000_000, 1e9: tokenbucket.MaxRate, -2: -2000,
		math.Inf(1): math.MaxInt64, math.Inf(-1): math.MinInt64, 1e300: math.MaxInt64,
	} {
		if got := tokenbucket.PerSecond(msgs); got != want {
			t.Errorf("PerSecond(%v) is %d, want %d", msgs, got, want)
		}
	}
	if got := tokenbucket.PerSecond(math.NaN()); got != 0 {
		t.Errorf("PerSecond(NaN) is %d, want 0", got)
	}
	if got := tokenbucket.Rate(1500).PerSecond(); got != 1.5 {
		t.Errorf("1500 milli-messages per second are %v messages per second", got)
	}
}

// The ends of every range at once.
func TestExtremes(t *testing.T) {
	slow := tokenbucket.Share{Rate: tokenbucket.MinRate, Burst: tokenbucket.MaxBurst} // b*T is 1e21 ns
	b := tokenbucket.NewFull(slow, 0)
	if got, want := b.Tokens(0), tokenbucket.Tokens(tokenbucket.MaxBurst)*tokenbucket.Token; got != want {
		t.Errorf("the largest bucket holds %d, want %d", got, want)
	}
	if got := b.Take(math.MinInt64); got != math.MinInt64 {
		t.Errorf("a message of the first instant is eligible at %d", got)
	}
	if got := b.Take(mono.Never); got != mono.Never {
		t.Errorf("a message of never is eligible at %d", got)
	}
	if got, want := b.Tokens(0), tokenbucket.Tokens(tokenbucket.MaxBurst-1)*tokenbucket.Token; got != want {
		t.Errorf("holds %d after one message, want %d", got, want)
	}
	empty := tokenbucket.New(tokenbucket.Share{Rate: tokenbucket.MinRate, Burst: 1}, mono.Never-1)
	if got := empty.Take(0); got != mono.Never {
		t.Errorf("eligible at %d, beyond the end of the clock", got)
	}
	if got := empty.Tokens(math.MinInt64); got >= 0 {
		t.Errorf("holds %d long before it was made", got)
	}
	fast := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.MaxRate, Burst: 1}, math.MaxInt64-3)
	for i, want := range []mono.Time{math.MaxInt64 - 3, math.MaxInt64 - 2, math.MaxInt64 - 1, mono.Never, mono.Never} {
		if got := fast.Take(math.MaxInt64 - 3); got != want {
			t.Errorf("message %d is eligible at %d, want %d", i, got, want)
		}
	}
	if got := fast.Tokens(math.MaxInt64 - 1); got != 0 {
		t.Errorf("a message that was refused for ever cost %d", -got)
	}
}

func TestNothingIsAllocated(t *testing.T) {
	b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(10_000), Burst: 2}, 0)
	at := mono.Time(0)
	if n := testing.AllocsPerRun(1000, func() {
		at += 70_000
		b.Eligible(at)
		b.Take(at)
		b.Tokens(at)
	}); n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}

// sink keeps the compiler from dropping what is measured.
var sink mono.Time

// A message costs the broker one Eligible and one Take.
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

// A retune with an older clock after a grant with a newer one: however late the
// eligible times come out, no instant may get more than the burst.
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
