package tuner

import (
	"math"
	"strconv"
)

// PartFactor is the maximum multiple of the topic's budget for one part, even while the
// pooled fraction keeps the SLO. Without this limit a failing broker could hide behind
// good brokers.
const PartFactor = 3

// Alpha is the error of a verdict; see Judge.
const Alpha = 0.001

// tolerance absorbs the rounding of 1-quantile, which is not a binary fraction: 1 of 10
// must pass at quantile 0.9. It is far below one message in any window.
const tolerance = 1e-9

// Count is the deliveries of one part of a topic, a broker, in the window.
type Count struct {
	Part      string
	Delivered uint64
	// Exceeded counts the deliveries with a latency above the SLO's. A value above
	// Delivered is capped.
	Exceeded uint64
}

// Verdict is the SLO statistic of a topic over one window.
type Verdict struct {
	// Judged: something was delivered. Otherwise the other fields are zero.
	Judged bool
	// Decision: the SLO is met (Within), missed (Beyond), or there are too few messages
	// (Undecided).
	Decision Decision
	// Blamed is the worst part with a proven fraction above PartFactor budgets; empty:
	// none.
	Blamed string
	// Met is the plain count, without statistics: Fraction is within Budget, and no part
	// exceeds PartFactor budgets.
	Met bool
	// Fraction is the pooled fraction of deliveries that exceeded the SLO's latency.
	Fraction float64
	// Budget is the allowed fraction: 1 - quantile.
	Budget float64
	// Worst is the part with the largest fraction, the first such part.
	Worst         string
	WorstFraction float64
}

// Judge pools the counts: the topic's fraction is the sum of its parts' exceed counts
// over the sum of their deliveries. Percentiles of parts are never averaged, because the
// mean of p99s is no p99. quantile lies in (0, 1).
//
// The decision uses exact binomial bounds (Clopper and Pearson, 1934). If each message
// exceeds with its own chance, independently of the others,
//
//	a mean chance at or below the budget, in each part below PartFactor budgets, is found missed
//	a mean chance at or above the budget is found met
//
// with a probability of at most Alpha each. Half of the error of a miss belongs to the
// pooled count, and the parts share the other half (Bonferroni), so the error does not
// grow with the number of brokers. The error holds for one window: a caller that judges
// repeatedly must drop a miss when its window has passed. A stall, which makes many
// messages late together, is a fact about the window; Sequential handles conclusions
// about the time after the window.
func Judge(quantile float64, parts []Count) Verdict {
	var delivered, exceeded, n float64
	v := Verdict{Budget: 1 - quantile, WorstFraction: -1}
	for _, p := range parts {
		if p.Delivered == 0 {
			continue
		}
		d, x := float64(p.Delivered), float64(min(p.Exceeded, p.Delivered))
		n++
		delivered += d
		exceeded += x
		if f := x / d; f > v.WorstFraction {
			v.Worst, v.WorstFraction = p.Part, f
		}
	}
	if delivered == 0 {
		return Verdict{}
	}
	v.Judged = true
	v.Fraction = exceeded / delivered
	v.Met = v.Fraction <= v.Budget*(1+tolerance) && v.WorstFraction <= PartFactor*v.Budget*(1+tolerance)
	blamed := 0.0
	for _, p := range parts {
		d, x := float64(p.Delivered), float64(min(p.Exceeded, p.Delivered))
		if d > 0 && x/d > blamed && above(d, x, PartFactor*v.Budget, Alpha/2/n) {
			v.Blamed, blamed = p.Part, x/d
		}
	}
	switch {
	case v.Blamed != "" || above(delivered, exceeded, v.Budget, Alpha/2):
		v.Decision = Beyond
	case above(delivered, delivered-exceeded, 1-v.Budget, Alpha):
		v.Decision = Within
	}
	return v
}

// above reports whether x of n show a chance above p with error alpha: if the chance is p
// or less, x or more are at most that likely.
func above(n, x, p, alpha float64) bool {
	if p >= 1 || x <= n*p {
		return false
	}
	lgamma := func(x float64) float64 { l, _ := math.Lgamma(x); return l }
	term := math.Exp(lgamma(n+1) - lgamma(x+1) - lgamma(n-x+1) + x*math.Log(p) + (n-x)*math.Log1p(-p))
	// From here on terms fall, and soon geometrically.
	sum := 0.0
	for ; term > alpha*1e-9; x++ {
		if sum += term; sum > alpha {
			return false
		}
		term *= (n - x) / (x + 1) * p / (1 - p)
	}
	return true
}

// Percent formats a fraction for people, with three digits and without an exponent: 0.42
// %.
func Percent(fraction float64) string {
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(100*fraction, 'g', 3, 64), 64)
	switch {
	case rounded > 0 && rounded < 1e-4:
		return "under 0.0001 %"
	case rounded == 100 && fraction < 1:
		return "over 99.9 %"
	}
	return strconv.FormatFloat(rounded, 'f', -1, 64) + " %"
}
