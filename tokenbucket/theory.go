package tokenbucket

import (
	"math"
	"math/cmplx"
)

// ExpectedDelayEq1 returns the paper's Eq. (1), in seconds: the mean access delay of Poisson
// arrivals of lambda messages per second in an (r, b) bucket,
//
//	P(U > b-1) / (2r (1-rho)),   rho = lambda/r
//
// where U is the unfinished work of the M/D/1 queue with service time 1/r. The second factor, the
// mean wait of the waiting customers in M/D/1, is exact for b = 1 only. For b > 1, Eq. (1) is an
// upper bound. Use ExpectedDelayExact for decisions, and Eq. (1) for comparisons with the paper.
//
// The result is infinite if lambda >= rate, because there is no stationary delay. It is NaN unless
// lambda >= 0, rate > 0 and burst >= 1; so are the results below. A burst need not be whole,
// because equal shares of a burst are not.
func ExpectedDelayEq1(lambda, rate, burst float64) float64 {
	rho, ok := load(lambda, rate, burst)
	if !ok {
		return math.NaN()
	}
	if rho >= 1 {
		return math.Inf(1)
	}
	return TailMD1(rho, burst-1) / (2 * rate * (1 - rho))
}

// ExpectedDelayExact returns the mean access delay in seconds of Poisson arrivals of lambda
// messages per second in an (r, b) bucket,
//
//	E[(U - (b-1))+] / r = 1/(rho r) * sum over y = b, b+1, .. of P(U > y)
//
// The left side: a message that finds U waits until U+1 has drained to b. The right side: U crosses
// a level y downwards, at rate f(y), as often as upwards. Upward crossings are arrivals that find U
// less than 1 below y, so f(y) = rho P(y-1 < U <= y). So P(U > y) is rho times the integral over
// [y-1, y] of P(U > z), and for y = b, b+1, .. the intervals tile [b-1, inf).
func ExpectedDelayExact(lambda, rate, burst float64) float64 {
	rho, ok := load(lambda, rate, burst)
	switch {
	case !ok:
		return math.NaN()
	case rho >= 1:
		return math.Inf(1)
	case rho == 0:
		return 0
	}
	q := newMD1(rho)
	y, sum := burst, 0.0
	for ; y < float64(len(q.tails)); y++ {
		sum += q.tail(y)
	}
	sum += q.asymptote(y) / -math.Expm1(-q.theta)
	return sum / rho / rate
}

// PDelayed returns the fraction of messages that wait for a token, P(U > b-1).
func PDelayed(lambda, rate, burst float64) float64 {
	rho, ok := load(lambda, rate, burst)
	if !ok {
		return math.NaN()
	}
	return TailMD1(rho, burst-1)
}

func load(lambda, rate, burst float64) (rho float64, ok bool) {
	if !(lambda >= 0 && rate > 0 && burst >= 1) || math.IsInf(lambda, 1) || math.IsInf(rate, 1) {
		return 0, false
	}
	return lambda / rate, true
}

// TailMD1 returns P(U > x) for the stationary unfinished work U of an M/D/1 queue with load rho, in
// units of the service time. It is 1 for x < 0. It is also 1 for rho >= 1, because such a queue has
// no stationary state. It is NaN for rho < 0 or a NaN.
//
// If the result is above 1e-290, its relative error is below 1e-12. Measured against 2400-bit
// arithmetic, for rho from 0.01 to 0.999 and x up to 100, the error is at most 4e-14
// (theory_test.go).
//
// Method: up to a point (20 service times at a load of 0.9, 50 at 0.1) from the number in system,
// by sums of positive terms only. Beyond this point by the asymptote C exp(-theta x), whose next
// term is below 1e-17 of it. The design that lost is the textbook's alternating series up to a
// point. It computes the complement of the tail from terms that grow like exp(rho x) and cancel. In
// float64 all digits are lost at x = 27 for rho = 0.9, 20 for 0.5 and 10 for 0.1. With the best
// switching point, the worst relative error is 3e-11, 2e-8 and 5e-4.
func TailMD1(rho, x float64) float64 {
	switch {
	case math.IsNaN(rho) || math.IsNaN(x) || rho < 0:
		return math.NaN()
	case x < 0 || rho >= 1:
		return 1
	case rho == 0:
		return 0
	}
	return newMD1(rho).tail(x)
}

// md1 is an M/D/1 queue with service time 1 and load rho, 0 < rho < 1.
type md1 struct {
	rho      float64
	theta, c float64   // P(U > x) ~ c exp(-theta x)
	tails    []float64 // P(U > n) = P(more than n in system), up to where the asymptote is exact
}

func newMD1(rho float64) md1 {
	q := md1{rho: rho, theta: decay(rho)}
	q.c = (1 - rho) / (q.theta - (1 - rho)) // (1-rho) / (rho e^theta - 1)
	q.tails = md1Tails(rho, q.horizon())
	return q
}

// decay returns the theta > 0 with e^theta = 1 + theta/rho, the exponent of the tail. It solves
// g(theta) = (e^theta - 1)/theta - 1 = (1-rho)/rho, which loses no digits as rho approaches 1 and
// theta approaches 0.
func decay(rho float64) float64 {
	target := min((1-rho)/rho, math.MaxFloat64)
	// g is convex and increasing, so Newton's method from the right descends to the root. Both
	// starting points are to the right of the root: g(x) >= x/2 and g(2 + 2 log(1+s)) >= s.
	x := min(2*target, 2+2*math.Log1p(target))
	for {
		var g, slope float64
		if x < 1 {
			term := 1.0 // x^n / (n+1)!
			for n := 1; n < 20; n++ {
				slope += float64(n) * term / float64(n+1)
				term *= x / float64(n+1)
				g += term
			}
		} else {
			g = math.Expm1(x)/x - 1
			slope = (math.Exp(x)*(x-1) + 1) / (x * x)
		}
		next := x - (g-target)/slope
		if !(next < x) {
			return x
		}
		x = next
	}
}

// horizon returns the n from which the asymptote is exact in float64, or the tail underflows. This
// is the required length of the table of tails.
func (q md1) horizon() int {
	// The next exponents are complex roots of e^z = 1 + z/rho. The nearest pair has an imaginary
	// part of slightly more than 2 pi. The iteration contracts by 1/|rho+z| < 1/6.
	z := complex(q.theta, 2*math.Pi)
	for range 40 {
		z = cmplx.Log(1+z/complex(q.rho, 0)) + complex(0, 2*math.Pi)
	}
	c := complex(1-q.rho, 0) / (z + complex(q.rho-1, 0))
	const digits = 40 // in powers of e: 4e-18
	exact := (digits + math.Log(2*cmplx.Abs(c)/q.c)) / (real(z) - q.theta)
	negligible := 740 / q.theta
	if exact < negligible {
		return 2 + max(0, int(exact))
	}
	return 2 + int(negligible) // also if 1/rho overflowed
}

// md1Tails returns P(N > n) for n < count, where N is the number in system. U is the work of N
// customers, one of them in service, so N is U rounded up.
//
// With h(m) = P(A > m) and H(m) = E[(A-m)+] for A arrivals in a service time, p(n) = P(N = n) and
// p(0) = 1-rho,
//
//	p(n) (1 - h(0))    = p(0) h(n-1) + sum over 0 < k < n of p(k) h(n-k)
//	P(N > n) (1 - rho) = p(0) H(n)   + sum over 0 < k <= n of p(k) H(n+1-k)
//
// The first equation is the balance of a service time's start and end (Tijms, A First Course in
// Stochastic Models, 9.2). The second equation is the sum of the first over all larger n. Neither
// has a subtraction, so no digits are lost.
func md1Tails(rho float64, count int) []float64 {
	// Start from the far end, where both vanish: h(m-1) = h(m) + P(A = m), and H(m-1) = H(m) +
	// h(m-1).
	size := count + 40
	h, survival := make([]float64, size+1), make([]float64, size+1)
	for m := size; m > 0; m-- {
		logFact, _ := math.Lgamma(float64(m + 1))
		h[m-1] = h[m] + math.Exp(float64(m)*math.Log(rho)-rho-logFact)
		survival[m-1] = survival[m] + h[m-1]
	}
	p, tails := make([]float64, count), make([]float64, count)
	p[0], tails[0] = 1-rho, rho
	for n := 1; n < count; n++ {
		sum := p[0] * h[n-1]
		for k := 1; k < n; k++ {
			sum += p[k] * h[n-k]
		}
		p[n] = sum * math.Exp(rho)
		sum = p[0] * survival[n]
		for k := 1; k <= n; k++ {
			sum += p[k] * survival[n+1-k]
		}
		tails[n] = sum / (1 - rho)
	}
	return tails
}

func (q md1) asymptote(x float64) float64 { return q.c * math.Exp(-q.theta*x) }

// tail returns P(U > x) for x >= 0. Let x = n - u, 0 <= u < 1. In n units of time the server
// completes the service in progress and n-1 more. So a message that comes now waits longer than x
// if and only if n or more customers are ahead of it: the customers in queue a time u ago, without
// the customer in service, and the customers that came since. With Poisson arrivals A of mean rho*u
// since,
//
//	P(U > n-u) = P(A >= n) + sum over j < n of P(A = j) P(N > n-j)
func (q md1) tail(x float64) float64 {
	if x >= float64(len(q.tails)-1) {
		return q.asymptote(x)
	}
	up := math.Ceil(x)
	n, mean := int(up), q.rho*(up-x)
	sum, pj := 0.0, math.Exp(-mean)
	for j := range n {
		sum += pj * q.tails[n-j]
		pj *= mean / float64(j+1)
	}
	if n == 0 {
		return q.rho
	}
	for j := n; pj > sum*1e-18; j++ { // P(A >= n)
		sum += pj
		pj *= mean / float64(j+1)
	}
	return sum
}
