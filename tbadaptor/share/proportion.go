package share

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/srtm-io/srtm/tokenbucket"
)

// TooSmall reports a total that cannot give every broker in use its floor: one
// milli-msg/s of rate, one message of burst.
type TooSmall struct {
	Bound      string // "rate" (milli-msg/s) or "burst" (messages)
	Need, Have int64
}

func (e *TooSmall) Error() string {
	return fmt.Sprintf("%s %d is too small to be shared: %d needed", e.Bound, e.Have, e.Need)
}

// Proportion divides total in proportion to weights. A weight of zero gets the zero
// Share; every other broker gets at least one milli-msg/s and one message. The largest
// weight gets the remainder of the division (among equals, the lowest index). The shares
// sum to total exactly.
//
// Proportion fails and returns nothing if total is not a valid non-zero share, a weight
// is negative, none is positive, or the sum of the weights overflows an int64. It returns
// *TooSmall if total is too small.
func Proportion(total tokenbucket.Share, weights []int64) ([]tokenbucket.Share, error) {
	if err := checkTotal(total); err != nil {
		return nil, err
	}
	if err := checkWeights(weights); err != nil {
		return nil, err
	}
	floors := make([]int64, len(weights))
	for i, w := range weights {
		if w > 0 {
			floors[i] = 1
		}
	}
	return divide(total, weights, weights, floors, floors)
}

// divide is Proportion with separate weights and floors for r and b. Requires: total and
// weights are valid; a broker has positive floors for both r and b or for neither.
func divide(total tokenbucket.Share, rate, burst, rateFloors, burstFloors []int64) ([]tokenbucket.Share, error) {
	if required := sum(burstFloors); required > total.Burst {
		return nil, &TooSmall{Bound: "burst", Need: required, Have: total.Burst}
	}
	if required := sum(rateFloors); required > int64(total.Rate) {
		return nil, &TooSmall{Bound: "rate", Need: required, Have: int64(total.Rate)}
	}
	r := apportion(int64(total.Rate), rate, rateFloors)
	b := apportion(total.Burst, burst, burstFloors)
	shares := make([]tokenbucket.Share, len(r))
	for i := range shares {
		shares[i] = tokenbucket.Share{Rate: tokenbucket.Rate(r[i]), Burst: b[i]}
	}
	return shares, nil
}

// apportion divides total in proportion to weights, with floors. If a proportion is below
// its floor, the index gets the floor. apportion then divides the rest again over the
// others, until no proportion is below its floor.
//
// Requires: weights >= 0 with a positive sum that does not overflow; floors >= 0 with a
// sum of at most total. So one index of positive weight always stays above its floor,
// because the remaining proportions sum to at least their floors. Postcondition: the
// result sums to total.
func apportion(total int64, weights, floors []int64) []int64 {
	parts := make([]int64, len(weights))
	fixed := make([]bool, len(weights))
	rest, sum := total, sum(weights)
	for {
		var fixedRest, fixedSum int64
		for i, w := range weights {
			if fixed[i] {
				continue
			}
			parts[i] = MulDiv(rest, w, sum)
			if parts[i] < floors[i] {
				parts[i], fixed[i] = floors[i], true
				fixedRest, fixedSum = fixedRest+floors[i], fixedSum+w
			}
		}
		if fixedRest == 0 {
			break
		}
		rest, sum = rest-fixedRest, sum-fixedSum
	}
	named := -1
	for i, w := range weights {
		if fixed[i] {
			continue
		}
		rest -= parts[i]
		if named < 0 || w > weights[named] {
			named = i
		}
	}
	parts[named] += rest
	return parts
}

// MulDiv returns floor(a*b/c) without overflow. Requires: 0 <= a, 0 <= b <= c, c > 0.
func MulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(q)
}

func checkTotal(total tokenbucket.Share) error {
	if err := total.Validate(); err != nil {
		return fmt.Errorf("total to be shared: %w", err)
	}
	if total.IsZero() {
		return fmt.Errorf("total to be shared is empty")
	}
	return nil
}

func checkWeights(weights []int64) error {
	var sum int64
	for i, w := range weights {
		if w < 0 {
			return fmt.Errorf("weight %d is negative: %d", i, w)
		}
		if w > math.MaxInt64-sum {
			return fmt.Errorf("weights sum to more than %d", int64(math.MaxInt64))
		}
		sum += w
	}
	if sum == 0 {
		return fmt.Errorf("no weight is positive")
	}
	return nil
}

func sum(values []int64) (s int64) {
	for _, v := range values {
		s += v
	}
	return s
}
