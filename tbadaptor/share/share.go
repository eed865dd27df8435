package share

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Load is the known traffic of one broker for one topic.
type Load struct {
	Broker string
	// Share is the broker's last target share; zero: none.
	Share tokenbucket.Share
	// Rate is the mean offered rate over the window, conformant or not, in msg/s; finite
	// and >= 0.
	Rate float64
	// Recent is the mean offered rate since the last jump of the rate, in msg/s; finite
	// and >= 0.
	Recent float64
	// Dispersion is the variance of the messages offered in a step divided by their mean,
	// since the last jump: 1 for Poisson arrivals, more for bursts; finite and >= 0, 0 if
	// unknown.
	Dispersion float64
	// MaxBacklog is the largest number of messages waiting for tokens at any time in the
	// window. Backlog is the present number. Both >= 0.
	MaxBacklog, Backlog int64
	// Publishers is the number of publishers of the topic on the broker, from the broker
	// or else from the placement; >= 0.
	Publishers int
	// Quota is the part of the contract that the placement gave the broker for its
	// publishers. Zero: unknown, then all brokers count as equal.
	Quota tokenbucket.Share
	// Peak is the burst, in messages, with which no message would have waited in the last
	// minute; >= 0, 0 if unknown.
	Peak int64
	// Unseen means that the broker has just started or just got its publishers. Recent is
	// then the expected rate.
	Unseen bool
	// Retiring means that the topic has moved away, and the broker only releases its
	// remaining messages.
	Retiring bool
}

// inUse reports whether the broker has, or will have, messages that need tokens.
func (l Load) inUse() bool {
	return l.Publishers > 0 || l.Backlog > 0 || l.Rate > 0 || l.Unseen || l.Retiring
}

// Assigned is the share that a rule gives to a broker.
type Assigned struct {
	Broker string
	Share  tokenbucket.Share
}

// Names of the rules.
const (
	// Static leaves the shares as they are.
	Static = "static"
	// Proportional is the paper's rule (section 5.4), literal: r_l in proportion to the
	// mean offered rate, b_l in proportion to the maximum backlog. A broker in use keeps
	// at least FloorPercent of an even share of r, and one message of b. Without the
	// floors, a broker silent for a window would get nothing, and its next message would
	// wait for ever. An overloaded broker still takes nearly all of b.
	Proportional = "proportional"
	// Robust meets demands first (package comment). It divides the rest of r in
	// proportion to demand. It divides the rest of b half evenly and half in proportion
	// to the largest backlogs, each counted up to b.
	Robust = "robust"
	// Sqrt meets demands first (package comment). It divides the rest of r and b in
	// proportion to the square roots of rate times dispersion (the capacity assignment
	// that minimises the mean delay of parallel queues; Kleinrock).
	Sqrt = "sqrt"
)

// Drain is the time in which Robust and Sqrt aim to work off a backlog. Drain must be no
// less than the period of proposals: a backlog counted twice makes shares swing.
const Drain = time.Second

// retire is Drain for a retiring broker, whose backlog does not recur.
const retire = 200 * time.Millisecond

const (
	// headroom, percent of the arrival rate, is added to a broker's demand: without
	// headroom, queues grow without bound.
	headroom = 5
	// needFloorPercent is the minimum demand of a broker in use under Robust and Sqrt, in
	// percent of an even share of r: a silent broker may send again.
	needFloorPercent = 5
)

// Default is the rule of topics without a configured rule. It serves moving traffic best
// (BenchmarkTrouble; docs/contracts.md has the results).
const Default = Sqrt

// FloorPercent is the minimum share of r of a broker in use, in percent of an even share.
// The first message after a silence waits at most 100/FloorPercent token intervals of an
// even share.
const FloorPercent = 1

// Rules returns the names of the rules, sorted.
func Rules() []string { return []string{Proportional, Robust, Sqrt, Static} }

// weightBits is the resolution of weights made from floating-point numbers: a rate below
// 2^-41 of the largest counts as zero. weightBits and maxBrokers together keep the sum of
// weights from overflow.
const (
	weightBits = 42
	maxBrokers = 1 << 20
	maxMeasure = 1e100 // no product of two measures overflows
)

// Split divides total over the brokers of loads by the named rule. The result is sorted
// by broker, does not depend on the order of loads, and sums to total exactly. Every
// share is either zero or has both r_l > 0 and b_l >= 1.
//
// Without traffic and backlog a rule keeps the proportions of the present shares. If
// there are no shares either, it divides evenly.
//
// Split fails and returns nothing for an unknown rule, an empty or invalid total, no
// loads, a repeated broker, or a load with numbers out of range. It returns *TooSmall if
// total is too small.
func Split(rule string, total tokenbucket.Share, loads []Load) ([]Assigned, error) {
	if err := checkTotal(total); err != nil {
		return nil, err
	}
	sorted := slices.SortedStableFunc(slices.Values(loads), func(a, b Load) int {
		return cmp.Compare(a.Broker, b.Broker)
	})
	if err := checkLoads(sorted); err != nil {
		return nil, err
	}
	var shares []tokenbucket.Share
	var err error
	switch rule {
	case Static:
		shares, err = static(total, sorted)
	case Proportional:
		shares, err = proportional(total, sorted)
	case Robust:
		shares, err = robust(total, sorted)
	case Sqrt:
		shares, err = sqrt(total, sorted)
	default:
		return nil, fmt.Errorf("unknown share rule %q: the rules are %s", rule, strings.Join(Rules(), ", "))
	}
	if err != nil {
		return nil, err
	}
	out := make([]Assigned, len(sorted))
	for i, l := range sorted {
		out[i] = Assigned{Broker: l.Broker, Share: shares[i]}
	}
	return out, nil
}

// static keeps every share. If the shares do not sum to total, static scales them.
func static(total tokenbucket.Share, loads []Load) ([]tokenbucket.Share, error) {
	used := brokersWithShare(loads)
	return weigh(total, used, 1, presentWeights(loads, used, rateOf), presentWeights(loads, used, burstOf))
}

func proportional(total tokenbucket.Share, loads []Load) ([]tokenbucket.Share, error) {
	used := brokersInUse(loads)
	rate := integers(loads, used, func(l Load) float64 { return l.Rate })
	if sum(rate) == 0 {
		rate = presentWeights(loads, used, rateOf)
	}
	burst := integers(loads, used, func(l Load) float64 { return float64(l.MaxBacklog) })
	if sum(burst) == 0 {
		burst = presentWeights(loads, used, burstOf)
	}
	return weigh(total, used, floor(total, used, FloorPercent), rate, burst)
}

// count returns the number of used brokers.
func count(used []bool) (n int64) {
	for _, u := range used {
		if u {
			n++
		}
	}
	return n
}

// floor returns percent of an even part of total's rate, in the units of Rate, at least 1.
func floor(total tokenbucket.Share, used []bool, percent int64) int64 {
	return max(1, int64(total.Rate)/count(used)*percent/100)
}

func robust(total tokenbucket.Share, loads []Load) ([]tokenbucket.Share, error) {
	used := brokersInUse(loads)
	var backlogs float64
	backlog := func(l Load) float64 { return float64(min(l.MaxBacklog, total.Burst)) }
	for i, l := range loads {
		if used[i] {
			backlogs += backlog(l) // whole numbers: the sum does not depend on the order
		}
	}
	even := 1 / float64(count(used))
	burst := integers(loads, used, func(l Load) float64 {
		if backlogs == 0 {
			return even
		}
		return even/2 + backlog(l)/backlogs/2
	})
	return demandFirst(total, loads, used, integers(loads, used, func(l Load) float64 { return l.Recent + l.spread() }), burst)
}

func sqrt(total tokenbucket.Share, loads []Load) ([]tokenbucket.Share, error) {
	used := brokersInUse(loads)
	minimum := total.Rate.PerSecond() / float64(count(used)) / 100
	roots := integers(loads, used, func(l Load) float64 { return math.Sqrt(max(l.Recent, minimum) * max(1, l.Dispersion)) })
	return demandFirst(total, loads, used, roots, roots)
}

// weigh divides total by weights. Each used broker has a floor.
func weigh(total tokenbucket.Share, used []bool, rateFloor int64, rate, burst []int64) ([]tokenbucket.Share, error) {
	rateFloors := make([]int64, len(used))
	burstFloors := make([]int64, len(used))
	for i := range used {
		if used[i] {
			rateFloors[i], burstFloors[i] = rateFloor, 1
		}
	}
	return divide(total, rate, burst, rateFloors, burstFloors)
}

// brokersInUse selects the brokers in use, or else the brokers that hold a share.
func brokersInUse(loads []Load) []bool {
	used := make([]bool, len(loads))
	for i, l := range loads {
		used[i] = l.inUse()
	}
	if !slices.Contains(used, true) {
		return brokersWithShare(loads)
	}
	return used
}

// brokersWithShare selects the brokers that hold a share, or else all brokers.
func brokersWithShare(loads []Load) []bool {
	used := make([]bool, len(loads))
	for i, l := range loads {
		used[i] = !l.Share.IsZero()
	}
	if !slices.Contains(used, true) {
		for i := range used {
			used[i] = true
		}
	}
	return used
}

func rateOf(s tokenbucket.Share) int64  { return int64(s.Rate) }
func burstOf(s tokenbucket.Share) int64 { return s.Burst }

// presentWeights weighs the used brokers by their present shares, or evenly if none has a
// share.
func presentWeights(loads []Load, used []bool, part func(tokenbucket.Share) int64) []int64 {
	weights := make([]int64, len(loads))
	for i, l := range loads {
		if used[i] {
			weights[i] = part(l.Share)
		}
	}
	if sum(weights) == 0 {
		for i := range weights {
			if used[i] {
				weights[i] = 1
			}
		}
	}
	return weights
}

// integers turns measurements into integer weights, so that no sum depends on the order
// of floating-point additions. All weights are scaled by the same power of two, so 9 and
// 1 stay at exactly nine to one.
func integers(loads []Load, used []bool, measure func(Load) float64) []int64 {
	var largest float64
	for i, l := range loads {
		if used[i] {
			largest = max(largest, measure(l))
		}
	}
	weights := make([]int64, len(loads))
	if largest == 0 {
		return weights
	}
	_, exponent := math.Frexp(largest)
	for i, l := range loads {
		if used[i] {
			weights[i] = int64(math.Ldexp(measure(l), weightBits-exponent))
		}
	}
	return weights
}

// checkLoads validates loads. Requires: loads is sorted by broker.
func checkLoads(loads []Load) error {
	if len(loads) == 0 {
		return fmt.Errorf("no brokers to share between")
	}
	if len(loads) > maxBrokers {
		return fmt.Errorf("%d brokers to share between, at most %d", len(loads), maxBrokers)
	}
	var rate, burst int64
	for i, l := range loads {
		if l.Broker == "" {
			return fmt.Errorf("a load without a broker's id")
		}
		if i > 0 && loads[i-1].Broker == l.Broker {
			return fmt.Errorf("broker %q appears twice", l.Broker)
		}
		for _, m := range []struct {
			name       string
			value, max float64
		}{{"rate", l.Rate, math.MaxFloat64}, {"recent rate", l.Recent, maxMeasure}, {"dispersion", l.Dispersion, maxMeasure}} {
			if math.IsNaN(m.value) || m.value < 0 || m.value > m.max {
				return fmt.Errorf("broker %q: %s %v is not a finite number >= 0", l.Broker, m.name, m.value)
			}
		}
		if l.MaxBacklog < 0 || l.Backlog < 0 {
			return fmt.Errorf("broker %q: negative backlog (max %d, now %d)", l.Broker, l.MaxBacklog, l.Backlog)
		}
		if l.Peak < 0 {
			return fmt.Errorf("broker %q: negative peak %d", l.Broker, l.Peak)
		}
		if err := l.Quota.Validate(); err != nil {
			return fmt.Errorf("broker %q: quota: %w", l.Broker, err)
		}
		if l.Publishers < 0 {
			return fmt.Errorf("broker %q: negative number of publishers %d", l.Broker, l.Publishers)
		}
		if err := l.Share.Validate(); err != nil {
			return fmt.Errorf("broker %q: present share: %w", l.Broker, err)
		}
		if int64(l.Share.Rate) > math.MaxInt64-rate || l.Share.Burst > math.MaxInt64-burst {
			return fmt.Errorf("present shares sum to more than %d", int64(math.MaxInt64))
		}
		rate, burst = rate+int64(l.Share.Rate), burst+l.Share.Burst
	}
	return nil
}
