package tuner

import (
	"fmt"
	"math"
)

// Decision is the result of a sequential test.
type Decision int

const (
	// Undecided: more messages are needed.
	Undecided Decision = iota
	// Within: the budget is kept.
	Within
	// Beyond: the budget is exceeded.
	Beyond
	// Unsettled: the cap was reached, or will clearly be. Acting as if the budget were
	// exceeded is safe.
	Unsettled
)

var decisionNames = [...]string{"undecided", "within", "beyond", "unsettled"}

// String returns the decision's name for progress and logs.
func (d Decision) String() string {
	if d < 0 || int(d) >= len(decisionNames) {
		return fmt.Sprintf("decision %d", int(d))
	}
	return decisionNames[d]
}

// Sequential tests on a stream of messages whether the fraction of late messages keeps a
// budget. The caller may look after every slice; frequent looks do not raise the chance
// of an error.
//
// The guarantee holds if at most Burst messages are late together, and bursts are late
// independently of each other:
//
//	the true fraction is at or above the budget: Within comes with a chance of at most Alpha
//	the true fraction is at or below the budget: Beyond comes with a chance of at most Alpha
//
// Unsettled makes no claim and counts as the safe side. With captured arrivals, Fast sets
// Burst to the burst at one broker: given the arrivals, brokers are late independently of
// one another. The mean of a product is at most the mean of equal factors, so the
// guarantee holds for the mean over the tested bursts.
//
// The method: a burst counts as one trial, with the late fraction y in [0, 1]. Two
// bettors start with 1 each. If the budget is p, then for any z in (0, 1) the mean of
//
//	z^y / (1 - p(1-z))
//
// is at most 1 while the mean of y is at least p (z^y is convex, so at most 1 - y(1-z)).
// By Ville's inequality the product over all bursts reaches 1/Alpha with a chance of at
// most Alpha. If the budget is kept, the product does reach 1/Alpha: the result is
// Within. A z above 1 gives the same bet against the budget. A bettor divides his stake
// over a few z, because the best z depends on the truth. Only sums enter the product, so
// slices may cut through bursts, hold many bursts, or none.
//
// The cost: with nothing late, Within needs about ln(1/Alpha)/p bursts, 312 at 5 % and 1
// %. Any test needs this many if it does not know how late messages cluster (the rule of
// three). Two other designs lost. The first is a normal approximation with a variance
// floor of Burst times the binomial, looked at repeatedly. With almost nothing late, the
// counts are a few bursts and far from normal, and each look costs error. The second bets
// on blocks of at least a burst. A block of many small bursts counts as one burst, and a
// burst late in two blocks breaks the guarantee.
type Sequential struct {
	// Set by NewSequential.
	budget, alpha        float64
	burst                float64
	maxMessages          float64 // messages
	proof                float64 // logarithm of 1/alpha
	staysWithin, exceeds bettor

	delivered, late float64
	decision        Decision
}

// bettor holds the stakes of a bettor, as logarithms: the initial part, and the gains per
// burst in time and per late burst.
type bettor [3]struct{ part, inTime, late float64 }

// newBettor divides a stake of 1 into parts, each with its own z.
func newBettor(budget float64, parts [3][2]float64) (b bettor) {
	for i, p := range parts {
		b[i].part, b[i].inTime, b[i].late = math.Log(p[0]), -math.Log1p(-budget*(1-p[1])), math.Log(p[1])
	}
	return b
}

// wealth returns the logarithm of b's wealth after the given numbers of bursts and late
// bursts.
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

// NewSequential returns a test whether at most the fraction budget, in (0, 1), is late,
// with error alpha, in (0, 1). At most burst messages are late together. The test ends
// after at most maxMessages messages.
func NewSequential(budget, alpha float64, burst int, maxMessages float64) *Sequential {
	if !(budget > 0 && budget < 1) || !(alpha > 0 && alpha < 1) {
		panic(fmt.Sprintf("tuner: a test of %v with error %v", budget, alpha))
	}
	return &Sequential{
		budget: budget, alpha: alpha, burst: float64(max(1, burst)), maxMessages: maxMessages, proof: math.Log(1 / alpha),
		staysWithin: newBettor(budget, [3][2]float64{{0.9, 0.02}, {0.05, 0.15}, {0.05, 0.4}}),
		exceeds:     newBettor(budget, [3][2]float64{{0.3, 2}, {0.3, 6}, {0.4, 40}}),
	}
}

// Needs returns the number of messages until Within if a constant fraction late of them
// is late; infinite if the test never ends so.
func (s *Sequential) Needs(late float64) float64 {
	high := 1.0 // bursts
	for s.staysWithin.wealth(high, late*high) < s.proof {
		if high *= 2; high > 1e9 {
			return math.Inf(1)
		}
	}
	low := high / 2
	for range 20 {
		if mid := (low + high) / 2; s.staysWithin.wealth(mid, late*mid) < s.proof {
			low = mid
		} else {
			high = mid
		}
	}
	return high * s.burst
}

// Add adds delivered messages and late messages among them. After a decision Add does
// nothing.
func (s *Sequential) Add(delivered, late float64) Decision {
	if s.decision != Undecided {
		return s.decision
	}
	s.delivered += delivered
	s.late += min(late, delivered)
	bursts, lateBursts := s.delivered/s.burst, s.late/s.burst
	switch {
	case s.staysWithin.wealth(bursts, lateBursts) >= s.proof:
		s.decision = Within
	case s.late > 0 && s.exceeds.wealth(bursts, lateBursts) >= s.proof:
		s.decision = Beyond
	case s.delivered >= s.maxMessages:
		s.decision = Unsettled
	case s.staysWithin.wealth(s.maxMessages/s.burst, lateBursts+optimisticLate(bursts, lateBursts)*(s.maxMessages-s.delivered)/s.burst) < s.proof:
		// The test would hardly show in time that the budget is kept. Giving up claims
		// nothing, so it costs no error. A later proof that the budget is exceeded would
		// lead to the same next step.
		s.decision = Unsettled
	}
	return s.decision
}

// optimisticLate returns a likely lower bound of the late fraction: 1.3 standard deviations below
// the observed fraction, with four bursts in time added. After a single late burst the
// bound is still 0.
func optimisticLate(bursts, late float64) float64 {
	bursts += 4
	f := late / bursts
	return max(0, f-1.3*math.Sqrt(f*(1-f)/bursts))
}

// Decision returns the result so far.
func (s *Sequential) Decision() Decision { return s.decision }

// Fraction returns the late fraction of the messages so far, 0 without any, and their
// number.
func (s *Sequential) Fraction() (fraction, delivered float64) {
	if s.delivered == 0 {
		return 0, 0
	}
	return s.late / s.delivered, s.delivered
}
