package tokenbucket_test

import (
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// scaled draws an integer of [lo, hi] and spreads its magnitude, not only its value.
func scaled(lo, hi int64) *rapid.Generator[int64] {
	return rapid.Custom(func(t *rapid.T) int64 {
		top := lo
		for range rapid.IntRange(0, 62).Draw(t, "bits") {
			if top > hi/2 {
				top = hi
				break
			}
			top *= 2
		}
		return rapid.Int64Range(lo, top).Draw(t, "value")
	})
}

func drawShare(t *rapid.T) tokenbucket.Share {
	s := tokenbucket.Share{
		Rate:  tokenbucket.Rate(scaled(int64(tokenbucket.MinRate), int64(tokenbucket.MaxRate)).Draw(t, "rate")),
		Burst: scaled(tokenbucket.MinBurst, tokenbucket.MaxBurst).Draw(t, "burst"),
	}
	if rapid.Bool().Draw(t, "small burst") {
		s.Burst = rapid.Int64Range(1, 5).Draw(t, "burst")
	}
	return s
}

// gap draws the time until the next arrival, near a token's time at r so that the limit matters.
func gap(t *rapid.T, r tokenbucket.Rate) int64 {
	step := 1e12 / int64(r)
	switch rapid.IntRange(0, 5).Draw(t, "gap") {
	case 0, 1:
		return 0
	case 2, 3:
		return rapid.Int64Range(0, 2*step).Draw(t, "ns")
	case 4:
		return rapid.Int64Range(0, 20*step).Draw(t, "ns")
	}
	return scaled(1, 1<<60).Draw(t, "ns")
}

// clock draws stamps. The stamps mostly advance. Some come out of order, and a few come from anywhere in the range.
type clock struct{ now int64 }

func (c *clock) draw(t *rapid.T, r tokenbucket.Rate) mono.Time {
	if d := gap(t, r); c.now > math.MaxInt64-d {
		c.now = math.MaxInt64
	} else {
		c.now += d
	}
	at := c.now
	switch rapid.IntRange(0, 9).Draw(t, "order") {
	case 0, 1, 2:
		if back := gap(t, r); at >= math.MinInt64+back {
			at -= back
		}
	case 3:
		at = rapid.Int64().Draw(t, "anywhere")
	}
	return mono.Time(at)
}

func startClock(t *rapid.T) clock {
	return clock{now: rapid.OneOf(rapid.Int64Range(-1e6, 1e6), rapid.Int64()).Draw(t, "start")}
}

// taken is a message that went through: the eligible time, and the number of retunes before.
type taken struct {
	at, e    mono.Time
	interval int
}

// interval is the time from one retune to the next.
type interval struct {
	share             tokenbucket.Share
	from              mono.Time
	granted, released tokenbucket.Tokens
}

// subtokens returns the number of subtokens earned from from to to. A subtoken is 1e-12 of a token, which a
// milli-message per second earns in 1 ns.
func subtokens(r tokenbucket.Rate, from, to mono.Time) *big.Int {
	d := new(big.Int).Sub(big.NewInt(int64(to)), big.NewInt(int64(from)))
	return d.Mul(d, big.NewInt(int64(r)))
}

// checkEnvelope checks the guarantee of Bucket's comment for every pair. Within
// one interval it is j-i+1 <= b + r*(e_j - e_i).
func checkEnvelope(t *rapid.T, intervals []interval, msgs []taken) {
	for i, from := range msgs {
		// budget is the number of subtokens that may be used from msgs[i] to the end of interval n.
		n := from.interval
		budget := new(big.Int).Mul(big.NewInt(intervals[n].share.Burst), big.NewInt(1e12))
		at := from.e
		for j := i + 1; j < len(msgs); j++ {
			to := msgs[j]
			for ; n < to.interval; n++ {
				next := intervals[n+1]
				budget.Add(budget, subtokens(intervals[n].share.Rate, at, next.from))
				moved := big.NewInt(int64(next.granted) - int64(next.released))
				budget.Add(budget, moved.Mul(moved, big.NewInt(1e9)))
				at = next.from
			}
			allowed := new(big.Int).Add(budget, subtokens(intervals[n].share.Rate, at, to.e))
			used := new(big.Int).Mul(big.NewInt(int64(j-i+1)), big.NewInt(1e12))
			if used.Cmp(allowed) > 0 {
				t.Fatalf("messages %d to %d of %v use %v subtokens, the envelope over %v allows %v", i, j, msgs, used, intervals, allowed)
			}
		}
	}
}

func envelopeHolds(t *rapid.T) {
	c := startClock(t)
	first := interval{share: drawShare(t), from: mono.Time(c.now)}
	b := tokenbucket.NewFull(first.share, first.from)
	intervals, msgs := []interval{first}, []taken(nil)
	retunes := rapid.Bool().Draw(t, "retunes")
	for range rapid.IntRange(2, 40).Draw(t, "steps") {
		share := intervals[len(intervals)-1].share
		if retunes && rapid.IntRange(0, 5).Draw(t, "step") == 0 {
			next := interval{from: c.draw(t, max(share.Rate, 1))}
			if rapid.IntRange(0, 7).Draw(t, "to a share") > 0 {
				next.share = drawShare(t)
			}
			if rapid.Bool().Draw(t, "with a grant") {
				next.granted = tokenbucket.Tokens(scaled(1, 1e13).Draw(t, "granted"))
			}
			next.released = b.Retune(next.from, next.share, next.granted)
			intervals = append(intervals, next)
			continue
		}
		at := c.draw(t, max(share.Rate, 1))
		want := b.Eligible(at)
		e := b.Take(at)
		if e != want {
			t.Fatalf("Eligible(%d) said %d, Take says %d", at, want, e)
		}
		if e < at {
			t.Fatalf("a message of %d is eligible at %d", at, e)
		}
		if e != mono.Never {
			msgs = append(msgs, taken{at: at, e: e, interval: len(intervals) - 1})
		}
	}
	checkEnvelope(t, intervals, msgs)
}

func TestEnvelopeHolds(t *testing.T) { rapid.Check(t, envelopeHolds) }

func FuzzEnvelope(f *testing.F) {
	// rapid draws from the bytes, and a run needs a few thousand of them.
	seeds := rand.NewChaCha8([32]byte{'e', 'n', 'v'})
	for range 16 {
		seed := make([]byte, 8192)
		testkit.Result(seeds.Read(seed)).Must(f)
		f.Add(seed)
	}
	f.Fuzz(rapid.MakeFuzz(envelopeHolds))
}

// Bigger runs than rapid draws: messages a few to the token, many reorderings.
func TestEnvelopeHoldsOverLongRuns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := tokenbucket.Share{
			Rate:  tokenbucket.Rate(scaled(1, 1e12).Draw(t, "rate")),
			Burst: rapid.Int64Range(1, 9).Draw(t, "burst"),
		}
		b := tokenbucket.NewFull(s, 0)
		step := 1e12 / int64(s.Rate)
		late := rapid.SliceOfN(rapid.Int64Range(0, 4*step), 300, 300).Draw(t, "late")
		least := new(big.Int) // min over i of i - r*e_i, i counted in subtokens
		for i, d := range late {
			e := b.Take(mono.Time(int64(i)*step*3/4 - d))
			// x is i - r*e_i. By the envelope, x never grows by more than b - 1.
			x := new(big.Int).Mul(big.NewInt(int64(i)), big.NewInt(1e12))
			x.Sub(x, subtokens(s.Rate, 0, e))
			if i == 0 || x.Cmp(least) < 0 {
				least.Set(x)
			}
			over := new(big.Int).Sub(x, least)
			if over.Cmp(big.NewInt((s.Burst-1)*1e12)) > 0 {
				t.Fatalf("message %d breaks the envelope of %v", i, s)
			}
		}
	})
}

func TestInOrderItIsTheDefinitionByUnfinishedWork(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawShare(t)
		now := rapid.Int64Range(-1e15, 1e15).Draw(t, "start")
		b, w := tokenbucket.NewFull(s, mono.Time(now)), newWork(s, mono.Time(now))
		for i := range rapid.IntRange(1, 60).Draw(t, "messages") {
			now += min(gap(t, s.Rate), 1e15)
			at := mono.Time(now)
			want := w.take(at)
			testkit.MustEqual(t, b.Take(at), want, "message %d at %d under %v is eligible at", i, at, s)
			// Tokens are b - U, rounded down.
			held := mul(sub(w.burst, w.u), rat(1000))
			down := new(big.Int).Neg(ceil(new(big.Rat).Neg(held)))
			if got := b.Tokens(at); !down.IsInt64() || int64(got) != down.Int64() {
				t.Fatalf("after message %d at %d under %v it holds %d, want %v", i, at, s, got, down)
			}
		}
	})
}

func TestInAnyOrderItIsVirtualScheduling(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := startClock(t)
		s := drawShare(t)
		b, v := tokenbucket.NewFull(s, mono.Time(c.now)), newTAT(s, mono.Time(c.now))
		for i := range rapid.IntRange(1, 60).Draw(t, "messages") {
			at := c.draw(t, s.Rate)
			want := v.take(at)
			testkit.MustEqual(t, b.Take(at), want, "message %d at %d under %v is eligible at", i, at, s)
		}
	})
}

// A retune moves tokens and never creates tokens. Rounding may lose some.
func TestRetuneConservesTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := startClock(t)
		s := drawShare(t)
		b := tokenbucket.New(s, mono.Time(c.now))
		if rapid.Bool().Draw(t, "full") {
			b = tokenbucket.NewFull(s, mono.Time(c.now))
		}
		for range rapid.IntRange(0, 8).Draw(t, "messages") {
			b.Take(c.draw(t, s.Rate))
		}
		now := c.draw(t, s.Rate)
		before := b.Tokens(now)
		if before > tokenbucket.Tokens(s.Burst)*tokenbucket.Token {
			t.Fatalf("holds %d, more than the burst of %v", before, s)
		}
		next := drawShare(t)
		if rapid.IntRange(0, 5).Draw(t, "lose it") == 0 {
			next = tokenbucket.Share{}
		}
		granted := tokenbucket.Tokens(rapid.OneOf(rapid.Just(int64(0)), scaled(1, 1e13)).Draw(t, "granted"))
		released := b.Retune(now, next, granted)
		after := b.Tokens(now)
		room := tokenbucket.Tokens(next.Burst) * tokenbucket.Token
		if want := min(before+granted, room); after != want && before != math.MinInt64 {
			t.Fatalf("%v to %v at %d: held %d and was granted %d, now holds %d, want %d", s, next, now, before, granted, after, want)
		}
		if released < 0 {
			t.Fatalf("released %d", released)
		}
		if before == math.MinInt64 {
			return // a debt beyond the range of Tokens
		}
		if lost := before + granted - after - released; lost < -1 || lost > 1 {
			t.Fatalf("%v to %v at %d: held %d, granted %d, holds %d, released %d", s, next, now, before, granted, after, released)
		}
		testkit.MustEqual(t, b.Share(), next, "holds")
	})
}

// A debt outlives a share: after the share is lost and returned, the debt is the same.
func TestRetuneThereAndBackChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, via := drawShare(t), drawShare(t)
		via.Burst = max(via.Burst, s.Burst)
		b := tokenbucket.NewFull(s, 0)
		for range rapid.IntRange(0, 8).Draw(t, "messages") {
			b.Take(0)
		}
		if b.Tokens(0) < 0 && rapid.Bool().Draw(t, "via nothing") {
			via = tokenbucket.Share{}
		}
		now := mono.Time(rapid.Int64Range(0, 1e12).Draw(t, "now"))
		if b.Tokens(now) > 0 && via.IsZero() {
			now = 0
		}
		want := b.Eligible(now)
		released := b.Retune(now, via, 0)
		released += b.Retune(now, s, 0)
		if got := b.Eligible(now); got != want || released != 0 {
			t.Fatalf("%v via %v at %d: eligible at %d, was %d; released %d", s, via, now, got, want, released)
		}
	})
}

// A grant does not count for the past. A message is eligible before the grant only if the message would have been
// eligible without the grant.
func TestAGrantIsNotForThePast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, next := drawShare(t), drawShare(t)
		granting := tokenbucket.New(s, 0)
		if rapid.Bool().Draw(t, "full") {
			granting = tokenbucket.NewFull(s, 0)
		}
		plain := granting
		now := mono.Time(min(gap(t, s.Rate), 1e15))
		plain.Retune(now, next, 0)
		granting.Retune(now, next, tokenbucket.Tokens(scaled(1, 1e13).Draw(t, "granted")))
		for range rapid.IntRange(1, 12).Draw(t, "messages") {
			at := now - mono.Time(min(gap(t, next.Rate), 1e15))
			with, without := granting.Take(at), plain.Take(at)
			if with > without {
				t.Fatalf("a grant made a message of %d wait from %d to %d", at, without, with)
			}
			if with < now && with != without {
				t.Fatalf("a message of %d is eligible at %d by tokens granted at %d; without them at %d", at, with, now, without)
			}
		}
	})
}

// Proposition 1 of the paper: for any split of a contract and any spread of its messages, at every time the sum of the
// delays so far is at least the sum without a split.
func TestASplitNeverHelps(t *testing.T) {
	// Rates whose tokens take whole nanoseconds, so that nothing is rounded: each rate, and each sum of a split, divides
	// 1e12.
	splits := [][]int64{{1, 1}, {4, 1}, {1, 1, 2}, {5, 5}, {8, 2}, {2, 2, 1}, {4, 4, 2}, {10, 5, 1}, {1, 1, 1, 1}, {16, 2, 2}, {5, 5, 5, 5, 5}, {20, 4, 1}}
	rapid.Check(t, func(t *rapid.T) {
		rates := rapid.SampledFrom(splits).Draw(t, "rates")
		scale := rapid.SampledFrom([]int64{1, 1000, 1e6, 1e9}).Draw(t, "scale")
		var whole tokenbucket.Share
		parts := make([]tokenbucket.Bucket, len(rates))
		for i, r := range rates {
			s := tokenbucket.Share{Rate: tokenbucket.Rate(r * scale), Burst: rapid.Int64Range(1, 6).Draw(t, "burst")}
			whole.Rate += s.Rate
			whole.Burst += s.Burst
			parts[i] = tokenbucket.NewFull(s, 0)
		}
		one := tokenbucket.NewFull(whole, 0)
		step := 1e12 / int64(whole.Rate)
		var at int64
		var alone, split []taken
		var times []mono.Time
		for range rapid.IntRange(1, 60).Draw(t, "messages") {
			if rapid.IntRange(0, 2).Draw(t, "in a burst") > 0 {
				at += rapid.Int64Range(0, 3*step).Draw(t, "gap")
			}
			a := mono.Time(at)
			e := one.Take(a)
			f := parts[rapid.IntRange(0, len(parts)-1).Draw(t, "part")].Take(a)
			alone, split = append(alone, taken{at: a, e: e}), append(split, taken{at: a, e: f})
			times = append(times, a, e, f)
		}
		// Both sums are piecewise linear between these times, so these times are enough.
		for _, now := range times {
			if s1, sk := accrued(alone, now), accrued(split, now); sk < s1 {
				t.Fatalf("by %d the split %v of %v delayed %d ns, one bucket %d ns", now, rates, whole, sk, s1)
			}
		}
	})
}

// accrued sums the delays so far at now.
func accrued(msgs []taken, now mono.Time) (sum int64) {
	for _, m := range msgs {
		if m.at < now {
			sum += int64(min(m.e, now) - m.at)
		}
	}
	return sum
}

func TestASplitCanHelpOneMessage(t *testing.T) {
	// The proposition is about sums. A single message with its own bucket may well wait less than behind the others. If
	// this check ever fails, the test above has become stricter than its comment.
	one := tokenbucket.NewFull(tokenbucket.Share{Rate: 2000, Burst: 2}, 0)
	a := tokenbucket.NewFull(tokenbucket.Share{Rate: 1000, Burst: 1}, 0)
	b := a
	var alone, split []mono.Time
	for range 4 {
		alone, split = append(alone, one.Take(0)), append(split, a.Take(0))
	}
	alone, split = append(alone, one.Take(0)), append(split, b.Take(0))
	if last := len(alone) - 1; split[last] >= alone[last] {
		t.Errorf("the last message waits until %d with a bucket of its own, %d behind the others", split[last], alone[last])
	}
	if slices.Max(split) <= slices.Max(alone) {
		t.Errorf("one of them has to pay: %v against %v", split, alone)
	}
}
