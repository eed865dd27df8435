package tokenbucket

import (
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

func (a int128) big() *big.Int {
	x := new(big.Int).Lsh(big.NewInt(a.hi), 64)
	return x.Add(x, new(big.Int).SetUint64(a.lo))
}

// drawInt128 draws numbers a quarter inside the range, as the bucket uses them.
func drawInt128(t *rapid.T) int128 {
	a := int128{hi: rapid.Int64Range(math.MinInt64/2, math.MaxInt64/2).Draw(t, "hi"), lo: rapid.Uint64().Draw(t, "lo")}
	switch rapid.IntRange(0, 2).Draw(t, "size") {
	case 0:
		return from64(int64(a.lo))
	case 1:
		a.hi = rapid.Int64Range(-1, 0).Draw(t, "hi")
	}
	return a
}

func clampInt64(x *big.Int) int64 {
	switch {
	case x.IsInt64():
		return x.Int64()
	case x.Sign() < 0:
		return math.MinInt64
	}
	return math.MaxInt64
}

func TestInt128IsInteger(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawInt128(t), drawInt128(t)
		x, y := rapid.Int64().Draw(t, "x"), rapid.Int64Range(0, math.MaxInt64).Draw(t, "y")
		d := scaledDivisor(t)
		D := big.NewInt(d)
		is := func(what string, got int128, want *big.Int) {
			if got.big().Cmp(want) != 0 {
				t.Fatalf("%s: a=%v b=%v x=%d y=%d: got %v, want %v", what, a.big(), b.big(), x, y, got.big(), want)
			}
		}
		is("add", a.add(b), new(big.Int).Add(a.big(), b.big()))
		is("sub", a.sub(b), new(big.Int).Sub(a.big(), b.big()))
		is("mul", mul(x, y), new(big.Int).Mul(big.NewInt(x), big.NewInt(y)))
		is("from64", from64(x), big.NewInt(x))
		if got, want := a.clamp(), max(-1<<62, min(1<<62, clampInt64(a.big()))); got != want {
			t.Fatalf("clamp: a=%v: got %d, want %d", a.big(), got, want)
		}
		if got, want := a.less(b), a.big().Cmp(b.big()) < 0; got != want {
			t.Fatalf("%v < %v is %t", a.big(), b.big(), got)
		}
		if got, want := a.sign(), a.big().Sign(); got != want {
			t.Fatalf("sign of %v is %d", a.big(), got)
		}
		floor := new(big.Int).Div(a.big(), D) // Euclidean, so floored for d > 0
		if got, want := a.floorDiv(d), clampInt64(floor); got != want {
			t.Fatalf("floor(%v / %d) is %d, want %d", a.big(), d, got, want)
		}
		ceil := new(big.Int).Neg(a.big())
		ceil.Div(ceil, D).Neg(ceil)
		if got, want := a.ceilDiv(d), clampInt64(ceil); got != want {
			t.Fatalf("ceil(%v / %d) is %d, want %d", a.big(), d, got, want)
		}
	})
}

func scaledDivisor(t *rapid.T) int64 {
	return rapid.Int64Range(1, 1<<rapid.IntRange(1, 62).Draw(t, "divisor bits")).Draw(t, "divisor")
}

// If a clock jumps from one end of its range to the other, together with the rate, each retune can deepen a debt. A debt
// must never wrap around into tokens.
func TestADebtCannotWrapAround(t *testing.T) {
	b := New(Share{Rate: MinRate, Burst: 1}, 0)
	b.zero = deepest.sub(from64(subtoken))
	for i := range 10 {
		if i%2 == 0 {
			b.Retune(math.MaxInt64, Share{Rate: MaxRate, Burst: 1}, 0)
		} else {
			b.Retune(math.MinInt64, Share{Rate: MinRate, Burst: 1}, 0)
		}
		if b.zero.sign() < 0 || deepest.less(b.zero) {
			t.Fatalf("retune %d left zero at %v", i, b.zero.big())
		}
		testkit.MustEqual(t, b.Eligible(0), mono.Never, "retune %d made a message eligible at", i)
	}
}
