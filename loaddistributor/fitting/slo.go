package fitting

// PartFactor is how many times the topic's budget one part of it may exceed
// while the pooled fraction keeps the SLO: beyond that the topic would hide a
// broker that fails behind others that do well.
const PartFactor = 3

// tolerance absorbs the rounding of 1-quantile, which is not a binary
// fraction: 1 of 10 must pass at quantile 0.9. It is far below one message in
// any window.
const tolerance = 1e-9

// Count is what one part of a topic, a broker, delivered in the window.
type Count struct {
	Part      string
	Delivered uint64
	// Those of Delivered whose latency was above the SLO's; what passes
	// Delivered is not believed.
	Exceeded uint64
}

// Verdict is the SLO statistic of a topic over one window.
type Verdict struct {
	// Judged: something was delivered. Without it the rest is zero, and
	// nothing can be said.
	Judged bool
	// Met: Fraction is within Budget, and no part is above PartFactor budgets.
	Met bool
	// Fraction of all deliveries that exceeded the SLO's latency, pooled.
	Fraction float64
	// Budget is the fraction that may: 1 - quantile.
	Budget float64
	// Worst is the part with the greatest fraction, the first such of parts.
	Worst         string
	WorstFraction float64
}

// Judge pools the counts: the fraction of a topic is the sum of its parts'
// exceed counts over the sum of their deliveries. Percentiles of parts are
// never averaged: the mean of p99s is no p99 of anything. quantile lies in
// (0, 1).
func Judge(quantile float64, parts []Count) Verdict {
	var delivered, exceeded float64
	v := Verdict{Budget: 1 - quantile, WorstFraction: -1}
	for _, p := range parts {
		if p.Delivered == 0 {
			continue
		}
		d, x := float64(p.Delivered), float64(min(p.Exceeded, p.Delivered))
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
	return v
}
