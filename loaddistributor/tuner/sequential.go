package tuner

import (
	"fmt"
	"math"
)

// Decision is what a sequential test has come to.
type Decision int

const (
	// Undecided: more messages are needed.
	Undecided Decision = iota
	// Within: the budget is kept.
	Within
	// Beyond: it is not.
	Beyond
	// Unsettled: the cap was reached, or it is plain that it would be. The safe
	// side is to act as if the budget were not kept.
	Unsettled
)

var decisionNames = [...]string{"undecided", "within", "beyond", "unsettled"}

// String returns the decision's name as it appears in progress and logs.
func (d Decision) String() string {
	if d < 0 || int(d) >= len(decisionNames) {
		return fmt.Sprintf("decision %d", int(d))
	}
	return decisionNames[d]
}

// Sequential tests, while messages come in, whether the fraction of them that is
// late keeps a budget. It may be looked at after every slice: looking often does
// not raise the chance of an error.
//
// What is guaranteed, where at most Burst messages are late together and bursts are
// late or not independently of each other:
//
//	the true fraction is at or above the budget: Within comes with a chance of at most Alpha
//	the true fraction is at or below the budget: Beyond comes with a chance of at most Alpha
//
// Unsettled makes no claim, and counts as the safe side. Fast, where it has captured
// arrivals, takes for Burst what comes to one broker: given the arrivals, brokers are
// late independently of one another, and as the mean of a product is at most that of
// equal factors, the guarantee is for the mean over the bursts tested.
//
// How: a burst counts as one trial, of which the fraction y was late, in [0, 1].
// Two bettors start with 1 each. If the budget is p, then for any z in (0, 1)
//
//	z^y / (1 - p(1-z))
//
// is 1 or less in the mean while the mean of y is p or more (z^y is convex, so
// at most 1 - y(1-z)); the product over all bursts is a stake that by Ville's
// inequality ever reaches 1/Alpha with a chance of at most Alpha. It does if the
// budget is kept: then Within. With z above 1 it is the same against the budget. A
// bettor divides his stake over a few z, since the best one depends on the truth.
// Only sums enter the product, so that slices may cut through bursts, hold many of
// them, or none.
//
// What it takes: with nothing late, Within needs about ln(1/Alpha)/p bursts, 312
// at 5 % and 1 %. That is what any test needs that does not know how late messages
// cluster (the rule of three). What lost: a normal approximation with a variance
// floor of Burst times the binomial, looked at repeatedly: near nothing late, the
// counts are a few bursts and far from normal, and each look costs error. And
// bets on blocks of at least a burst: a block of many small bursts has to be bet on
// as if it were one, and what is late in two blocks at once breaks the guarantee.
type Sequential struct {
	// Set once.
	budget, alpha float64
	burst         float64
	most          float64 // messages
	enough        float64 // logarithm of 1/alpha
	keeps, breaks bettor

	delivered, late float64
	decision        Decision
}

// bettor is the stakes of one, as logarithms: what he begins with, and what they
// gain by a burst in time and by a burst late.
type bettor [3]struct{ part, inTime, late float64 }

// newBettor divides a stake of 1 into parts, each bet with its z.
func newBettor(budget float64, parts [3][2]float64) (b bettor) {
	for i, p := range parts {
		b[i].part, b[i].inTime, b[i].late = math.Log(p[0]), -math.Log1p(-budget*(1-p[1])), math.Log(p[1])
	}
	return b
}

// wealth is the logarithm of what b has after so many bursts, of which so many
// were late.
func (b *bettor) wealth(bursts, late float64) float64 {
	largest := math.Inf(-1)
	var logs [len(b)]float64
	for i, s := range b {
		logs[i] = s.part + late*s.late + bursts*s.inTime
		largest = max(largest, logs[i])
	}
	sum := 0.0
	for _, l := range logs {
		sum += math.Exp(l - largest)
	}
	return largest + math.Log(sum)
}

// NewSequential returns a test of whether at most the fraction budget (over 0,
// below 1) is late, with error alpha (over 0, below 1), where at most burst
// messages are late together, that is settled after most messages at the latest.
func NewSequential(budget, alpha float64, burst int, most float64) *Sequential {
	if !(budget > 0 && budget < 1) || !(alpha > 0 && alpha < 1) {
		panic(fmt.Sprintf("tuner: a test of %v with error %v", budget, alpha))
	}
	return &Sequential{
		budget: budget, alpha: alpha, burst: float64(max(1, burst)), most: most, enough: math.Log(1 / alpha),
		keeps:  newBettor(budget, [3][2]float64{{0.9, 0.02}, {0.05, 0.15}, {0.05, 0.4}}),
		breaks: newBettor(budget, [3][2]float64{{0.3, 2}, {0.3, 6}, {0.4, 40}}),
	}
}

// Needs is how many messages the test takes until Within if the fraction late of
// them is late, evenly; infinite if it would never be.
func (s *Sequential) Needs(late float64) float64 {
	high := 1.0 // bursts
	for s.keeps.wealth(high, late*high) < s.enough {
		if high *= 2; high > 1e9 {
			return math.Inf(1)
		}
	}
	low := high / 2
	for range 20 {
		if mid := (low + high) / 2; s.keeps.wealth(mid, late*mid) < s.enough {
			low = mid
		} else {
			high = mid
		}
	}
	return high * s.burst
}

// Add tells the test that of so many messages so many were late. After a decision
// it does nothing.
func (s *Sequential) Add(delivered, late float64) Decision {
	if s.decision != Undecided {
		return s.decision
	}
	s.delivered += delivered
	s.late += min(late, delivered)
	bursts, lateBursts := s.delivered/s.burst, s.late/s.burst
	switch {
	case s.keeps.wealth(bursts, lateBursts) >= s.enough:
		s.decision = Within
	case s.late > 0 && s.breaks.wealth(bursts, lateBursts) >= s.enough:
		s.decision = Beyond
	case s.delivered >= s.most:
		s.decision = Unsettled
	case s.keeps.wealth(s.most/s.burst, lateBursts+hope(bursts, lateBursts)*(s.most-s.delivered)/s.burst) < s.enough:
		// It would hardly be shown in time that the budget is kept. Giving up
		// claims nothing, so it costs no error; that it may yet be shown that the
		// budget is not kept changes nothing of what is done next.
		s.decision = Unsettled
	}
	return s.decision
}

// hope is a late fraction that the truth is likely not below: 1.3 standard
// deviations less than what was seen, with four bursts in time on top. A single
// late burst leaves all hope.
func hope(bursts, late float64) float64 {
	bursts += 4
	f := late / bursts
	return max(0, f-1.3*math.Sqrt(f*(1-f)/bursts))
}

// Decision returns what the test has come to.
func (s *Sequential) Decision() Decision { return s.decision }

// Fraction returns the late fraction of the messages so far, 0 without any, and
// how many there are.
func (s *Sequential) Fraction() (fraction, delivered float64) {
	if s.delivered == 0 {
		return 0, 0
	}
	return s.late / s.delivered, s.delivered
}
