package tokenbucket_test

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// precision is the reference's precision in bits. The alternating series loses up to 1.3*rho*x powers of e, and the tail
// may be as small as exp(-6.5 x).
const precision = 2400

func flt(x float64) *big.Float { return new(big.Float).SetPrec(precision).SetFloat64(x) }

// exp returns e^x in full precision, by halving the argument and Taylor's series.
func exp(x *big.Float) *big.Float {
	const halvings = 20
	y := new(big.Float).SetMantExp(x, -halvings)
	sum, term := flt(1), flt(1)
	for n := 1; n < precision/16; n++ {
		term.Mul(term, y)
		term.Quo(term, flt(float64(n)))
		sum.Add(sum, term)
	}
	for range halvings {
		sum.Mul(sum, sum)
	}
	return sum
}

// series is the textbook's P(U > x) = 1 - (1-rho) sum_{j<=x} (-z)^j e^z / j!, z = rho (x-j), with enough digits to
// survive the cancellation.
type series struct {
	rho, down *big.Float // rho, e^-rho
}

func newSeries(rho float64) series {
	return series{rho: flt(rho), down: exp(flt(-rho))}
}

func (s series) tail(x float64) *big.Float {
	e := exp(new(big.Float).Mul(s.rho, flt(x)))
	sum, fact := flt(0), flt(1)
	for j := 0; float64(j) <= x; j++ {
		if j > 0 {
			fact.Mul(fact, flt(float64(j)))
		}
		z := new(big.Float).Mul(s.rho, new(big.Float).Sub(flt(x), flt(float64(j))))
		term := new(big.Float).Quo(e, fact)
		for range j {
			term.Mul(term, z)
		}
		if j%2 == 1 {
			term.Neg(term)
		}
		sum.Add(sum, term)
		e.Mul(e, s.down)
	}
	sum.Mul(sum, new(big.Float).Sub(flt(1), s.rho))
	return sum.Sub(flt(1), sum)
}

// relative is (got-want)/want.
func relative(got float64, want *big.Float) float64 {
	d := new(big.Float).Sub(flt(got), want)
	r, _ := d.Quo(d, want).Float64()
	return r
}

func TestTailMD1AgainstTheSeriesInBigNumbers(t *testing.T) {
	const tolerance = 1e-12
	for _, rho := range []float64{0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999} {
		s := newSeries(rho)
		worst, at := 0.0, 0.0
		for _, x := range []float64{0, 0.25, 0.5, 0.999, 1, 1.5, 2, 2.75, 3, 4, 4.5, 5, 7, 7.3, 10, 12.5, 15, 17, 19.5, 20, 21, 22, 23.5, 25, 26, 30, 33.3, 37, 40, 41.5, 45, 50, 55, 60, 66.6, 75, 80, 100} {
			want := s.tail(x)
			if f, _ := want.Float64(); f < 1e-290 {
				continue
			}
			if d := math.Abs(relative(tokenbucket.TailMD1(rho, x), want)); !(d <= worst) {
				worst, at = d, x
			}
		}
		t.Logf("rho %v: largest relative error %.2g at x = %v", rho, worst, at)
		if !(worst < tolerance) {
			t.Errorf("rho %v, x %v: relative error %.3g", rho, at, worst)
		}
	}
}

// For large x, and for loads so near 1 that the series above is useless, the tail is C exp(-theta x) with e^theta = 1 +
// theta/rho.
func TestTailMD1FarOut(t *testing.T) {
	for _, rho := range []float64{0.5, 0.9, 0.99, 0.999, 1 - 1e-6, 1 - 1e-9} {
		// Newton's method on rho (e^theta - 1) - theta, from its upper bound.
		r, one := flt(rho), flt(1)
		slack := new(big.Float).Sub(one, r)
		theta := flt(math.Min(2*(1-rho)/rho, 2-2*math.Log(rho)))
		for range 60 {
			e := exp(theta)
			f := new(big.Float).Sub(e, one)
			f.Mul(f, r).Sub(f, theta)
			slope := new(big.Float).Mul(r, e)
			theta.Sub(theta, f.Quo(f, slope.Sub(slope, one)))
		}
		c := new(big.Float).Quo(slack, new(big.Float).Sub(theta, slack))
		th, _ := theta.Float64()
		for _, decays := range []float64{100, 200, 500} {
			x := math.Round(decays / th)
			want := new(big.Float).Quo(c, exp(new(big.Float).Mul(theta, flt(x))))
			if d := relative(tokenbucket.TailMD1(rho, x), want); !(math.Abs(d) < 1e-12) {
				t.Errorf("rho %v, x %v: relative error %.3g", rho, x, d)
			}
		}
	}
}

func TestTailMD1AtTheEdges(t *testing.T) {
	for _, c := range []struct{ rho, x, want float64 }{
		{0.5, -0.001, 1}, {0.5, math.Inf(-1), 1}, {0.5, math.Inf(1), 0}, {0, 0, 0}, {0, -1, 1}, {0, 3, 0},
		{1, 5, 1}, {7, 5, 1}, {0.5, 0, 0.5}, {0.9, 0, 0.9}, {1e-300, 0, 1e-300},
	} {
		testkit.Equal(t, tokenbucket.TailMD1(c.rho, c.x), c.want, "TailMD1(%v, %v)", c.rho, c.x)
	}
	for _, c := range [][2]float64{{-0.1, 1}, {math.NaN(), 1}, {0.5, math.NaN()}} {
		if got := tokenbucket.TailMD1(c[0], c[1]); !math.IsNaN(got) {
			t.Errorf("TailMD1(%v, %v) is %v, want NaN", c[0], c[1], got)
		}
	}
}

// At any load, including loads never used, the tail is a probability that falls with x and rises with the load. There is
// no jump where the method changes.
func TestTailMD1IsATail(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rho := rapid.OneOf(rapid.Float64Range(0, 1), rapid.Custom(func(t *rapid.T) float64 {
			return math.Exp(-rapid.Float64Range(0, 745).Draw(t, "-log rho"))
		}), rapid.Custom(func(t *rapid.T) float64 {
			return 1 - math.Exp(-rapid.Float64Range(0, 36).Draw(t, "-log slack"))
		})).Draw(t, "rho")
		x := rapid.Float64Range(0, 120).Draw(t, "x")
		p := tokenbucket.TailMD1(rho, x)
		further := tokenbucket.TailMD1(rho, x+rapid.Float64Range(0, 2).Draw(t, "step"))
		busier := tokenbucket.TailMD1(rho*(1+1e-9), x)
		const slack = 1 + 1e-12
		if !(p >= 0 && p <= rho*slack) || further > p*slack || p > busier*slack {
			t.Fatalf("P(U > %v) at %v is %v; further out %v, at a higher load %v", x, rho, p, further, busier)
		}
	})
}

func TestExpectedDelaysAtTheEdges(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		lambda, rate, burst float64
		delay, p            float64
	}{
		{0, 10, 1, 0, 0}, {10, 10, 5, inf, 1}, {11, 10, 5, inf, 1}, {1e-320, 1e300, 2, 0, 0},
		{1, 10, math.MaxInt, 0, 0}, {1, 10, math.MaxFloat64, 0, 0}, {1, 10, inf, 0, 0},
		{1, 10, math.Nextafter(1, 0), nan, nan}, {1, 10, nan, nan, nan},
		{-1, 10, 1, nan, nan}, {1, 0, 1, nan, nan}, {1, -3, 1, nan, nan}, {1, 10, 0, nan, nan},
		{nan, 10, 1, nan, nan}, {1, nan, 1, nan, nan}, {inf, inf, 1, nan, nan}, {inf, 10, 1, nan, nan}, {1, inf, 1, nan, nan},
	} {
		same := func(what string, got, want float64) {
			if got != want && !(math.IsNaN(got) && math.IsNaN(want)) {
				t.Errorf("%s(%v, %v, %v) is %v, want %v", what, c.lambda, c.rate, c.burst, got, want)
			}
		}
		same("Eq1", tokenbucket.ExpectedDelayEq1(c.lambda, c.rate, c.burst), c.delay)
		same("Exact", tokenbucket.ExpectedDelayExact(c.lambda, c.rate, c.burst), c.delay)
		same("PDelayed", tokenbucket.PDelayed(c.lambda, c.rate, c.burst), c.p)
	}
}

// The exact mean is an integral of the tail. For whole bursts the series gives the mean as well: the sum over n >= b of
// P(U > n) is E[N] without the first b terms.
func TestExpectedDelayExactAgainstTheSeriesInBigNumbers(t *testing.T) {
	for _, rho := range []float64{0.1, 0.5, 0.9, 0.99} {
		s := newSeries(rho)
		// E[N] = rho + rho^2 / (2 (1-rho))
		one := flt(1)
		left := new(big.Float).Mul(s.rho, s.rho)
		left.Quo(left, new(big.Float).Mul(flt(2), new(big.Float).Sub(one, s.rho)))
		left.Add(left, s.rho)
		for n := range 41 {
			if n > 0 { // left is the sum over m >= n
				const rate = 250.0
				want := new(big.Float).Quo(left, new(big.Float).Mul(s.rho, flt(rate)))
				got := tokenbucket.ExpectedDelayExact(rho*rate, rate, float64(n))
				if d := math.Abs(relative(got, want)); !(d < 1e-12) {
					t.Errorf("rho %v, burst %d: %v, relative error %.3g", rho, n, got, d)
				}
			}
			left.Sub(left, s.tail(float64(n)))
		}
	}
}

// The test checks the statements of the paper and of our design about Eq. (1).
func TestEq1IsExactForABurstOfOneAndABoundAbove(t *testing.T) {
	ratio := func(lambda, rate, burst float64) float64 {
		return tokenbucket.ExpectedDelayEq1(lambda, rate, burst) / tokenbucket.ExpectedDelayExact(lambda, rate, burst)
	}
	for _, rho := range []float64{0.01, 0.1, 0.5, 0.9, 0.99} {
		if got := ratio(rho, 1, 1); math.Abs(got-1) > 1e-12 {
			t.Errorf("rho %v, burst 1: Eq. (1) is %v of the exact mean, want 1", rho, got)
		}
		last := 1.0
		for burst := 1.25; burst < 40; burst += 0.25 {
			got := ratio(rho, 1, burst)
			if got <= 1 {
				t.Errorf("rho %v, burst %v: Eq. (1) is %v of the exact mean, want more", rho, burst, got)
			}
			last = got
		}
		// For large bursts both tails are exponential, and the ratio is theta/(2 (1-rho)).
		theta := math.Log(tokenbucket.TailMD1(rho, 38) / tokenbucket.TailMD1(rho, 39))
		if want := theta / (2 * (1 - rho)); math.Abs(last/want-1) > 1e-6 {
			t.Errorf("rho %v: far out Eq. (1) is %v of the exact mean, want %v", rho, last, want)
		}
	}
	for _, c := range []struct {
		lambda, rate, burst float64
		want                float64
	}{{10_000, 11_000, 26, 1.0323}, {1, 10, 26, 2.0083}, {1, 10, 2, 1.4185}} {
		if got := ratio(c.lambda, c.rate, c.burst); math.Abs(got-c.want) > 1e-4 {
			t.Errorf("lambda %v, rate %v, burst %v: Eq. (1) is %v of the exact mean, want %v", c.lambda, c.rate, c.burst, got, c.want)
		}
	}
}

// The theory and the bucket share no code and must agree.
func TestTheoryAgainstSimulatedPoissonArrivals(t *testing.T) {
	for i, c := range []struct {
		lambda, rate, burst float64
	}{{10_000, 11_000, 1}, {10_000, 11_000, 10}, {10_000, 20_000, 3}, {1_000, 10_000, 1}, {1_000, 10_000, 2}} {
		t.Run(fmt.Sprintf("lambda %v rate %v burst %v", c.lambda, c.rate, c.burst), func(t *testing.T) {
			const batches, perBatch = 100, 20_000
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			b := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(c.rate), Burst: int64(c.burst)}, 0)
			var delays, delayed [batches]float64
			now := 0.0
			for n := range batches * perBatch {
				now += rng.ExpFloat64() * 1e9 / c.lambda
				at := mono.Time(now)
				if d := b.Take(at).Sub(at); d > 0 {
					delays[n/perBatch] += d.Seconds() / perBatch
					delayed[n/perBatch] += 1.0 / perBatch
				}
			}
			exact := tokenbucket.ExpectedDelayExact(c.lambda, c.rate, c.burst)
			mean, se := meanAndError(delays[:])
			t.Logf("seed (1, %d): mean delay %.4g s, standard error %.2g, theory %.4g, Eq. (1) %.4g", i, mean, se, exact, tokenbucket.ExpectedDelayEq1(c.lambda, c.rate, c.burst))
			if math.Abs(mean-exact) > 4*se {
				t.Errorf("mean delay %v s is %.1f standard errors from theory's %v", mean, (mean-exact)/se, exact)
			}
			if se > exact/10 {
				t.Errorf("a standard error of %v shows nothing of a mean of %v", se, exact)
			}
			p := tokenbucket.PDelayed(c.lambda, c.rate, c.burst)
			mean, se = meanAndError(delayed[:])
			if math.Abs(mean-p) > 4*se {
				t.Errorf("%v of messages are delayed, %.1f standard errors from theory's %v", mean, (mean-p)/se, p)
			}
		})
	}
}

// Our buckets hold whole tokens, so the test simulates a fractional burst by its debt: a message that finds U waits
// until U+1 has drained to b.
func TestTheoryOfAFractionalBurst(t *testing.T) {
	for i, c := range []struct{ lambda, rate, burst float64 }{
		{5_000, 10_000, 1.25}, {5_000, 10_000, 26.0 / 12}, {8_000, 10_000, 2.5}, {1_000, 10_000, 1.75}, {10_000, 11_000, 1.01},
	} {
		const batches, perBatch = 100, 20_000
		rng := rand.New(rand.NewPCG(2, uint64(i)))
		var delays, delayed [batches]float64
		debt := 0.0
		for n := range batches * perBatch {
			debt = max(0, debt-rng.ExpFloat64()*c.rate/c.lambda)
			if wait := debt - (c.burst - 1); wait > 0 {
				delays[n/perBatch] += wait / c.rate / perBatch
				delayed[n/perBatch] += 1.0 / perBatch
			}
			debt++
		}
		for _, q := range []struct {
			what    string
			batches []float64
			theory  float64
		}{
			{"mean delay", delays[:], tokenbucket.ExpectedDelayExact(c.lambda, c.rate, c.burst)},
			{"part delayed", delayed[:], tokenbucket.PDelayed(c.lambda, c.rate, c.burst)},
		} {
			mean, se := meanAndError(q.batches)
			if math.Abs(mean-q.theory) > 4*se || se > q.theory/10 {
				t.Errorf("%+v: %s %v with a standard error of %v, theory has %v", c, q.what, mean, se, q.theory)
			}
		}
	}
}

// meanAndError returns the mean of independent batches and its standard error.
func meanAndError(xs []float64) (mean, se float64) {
	for _, x := range xs {
		mean += x / float64(len(xs))
	}
	for _, x := range xs {
		se += (x - mean) * (x - mean)
	}
	n := float64(len(xs))
	return mean, math.Sqrt(se / (n - 1) / n)
}
