package tokenbucket_test

import (
	"math/big"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Slow, obvious versions to compare the bucket with. They count in exact fractions: times in nanoseconds, work in
// tokens.

func rat(x int64) *big.Rat { return new(big.Rat).SetInt64(x) }

func add(a, b *big.Rat) *big.Rat { return new(big.Rat).Add(a, b) }
func sub(a, b *big.Rat) *big.Rat { return new(big.Rat).Sub(a, b) }
func mul(a, b *big.Rat) *big.Rat { return new(big.Rat).Mul(a, b) }
func quo(a, b *big.Rat) *big.Rat { return new(big.Rat).Quo(a, b) }

func most(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) < 0 {
		return b
	}
	return a
}

// perNano is a rate in tokens per nanosecond.
func perNano(r tokenbucket.Rate) *big.Rat { return big.NewRat(int64(r), 1e12) }

// ceil rounds up to an integer.
func ceil(x *big.Rat) *big.Int {
	q, m := new(big.Int).DivMod(x.Num(), x.Denom(), new(big.Int)) // Euclidean: m >= 0
	if m.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q
}

// exact returns x as a bucket returns a time: rounded up, and Never past the end.
func exact(x *big.Rat) mono.Time {
	c := ceil(x)
	if !c.IsInt64() {
		return mono.Never
	}
	return mono.Time(c.Int64())
}

// work is the definition in Appendix A of the paper: unfinished work drains at rate, and a message waits until at most
// burst of the work is left.
type work struct {
	rate  *big.Rat // tokens per nanosecond
	burst *big.Rat
	u     *big.Rat // at the instant at
	at    int64
}

func newWork(s tokenbucket.Share, now mono.Time) *work {
	return &work{rate: perNano(s.Rate), burst: rat(s.Burst), u: new(big.Rat), at: int64(now)}
}

// take handles arrivals in order. It differs from the definition as the bucket does: a release is at a whole nanosecond,
// and a bucket of one token cannot start to earn the next token before the release.
func (w *work) take(at mono.Time) mono.Time {
	drained := mul(w.rate, sub(rat(int64(at)), rat(w.at)))
	w.u = add(most(new(big.Rat), sub(w.u, drained)), rat(1))
	w.at = int64(at)
	delay := quo(most(new(big.Rat), sub(w.u, w.burst)), w.rate)
	e := exact(add(rat(int64(at)), delay))
	if delay.Sign() > 0 && w.burst.Cmp(rat(1)) == 0 {
		w.u = add(rat(1), mul(w.rate, sub(rat(int64(e)), rat(int64(at)))))
	}
	return e
}

// tat is virtual scheduling in its usual form, for arrivals in any order.
type tat struct {
	step, burst, tat *big.Rat
	one              bool
}

func newTAT(s tokenbucket.Share, now mono.Time) *tat {
	step := quo(rat(1), perNano(s.Rate))
	return &tat{step: step, burst: mul(step, rat(s.Burst)), tat: rat(int64(now)), one: s.Burst == 1}
}

func (v *tat) take(at mono.Time) mono.Time {
	a := rat(int64(at))
	next := add(most(v.tat, a), v.step)
	e := exact(most(a, sub(next, v.burst)))
	if e == mono.Never {
		return e
	}
	v.tat = next
	if v.one {
		v.tat = most(v.tat, add(rat(int64(e)), v.step))
	}
	return e
}
