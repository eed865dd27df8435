package share

import (
	"cmp"
	"math"
	"slices"

	"github.com/srtm-io/srtm/tokenbucket"
)

// demandFirst divides total over the used brokers by the objectives of the package
// comment, and the rest by the weights rate and burst.
func demandFirst(total tokenbucket.Share, loads []Load, used []bool, rate, burst []int64) ([]tokenbucket.Share, error) {
	silent, peaks, unseen := true, false, false
	for _, l := range loads {
		silent = silent && l.Recent == 0 && l.Backlog == 0 && !l.Retiring && !l.Unseen
		peaks, unseen = peaks || l.Peak > 0, unseen || l.Unseen
	}
	var current []tokenbucket.Share
	if silent { // only the bursts of the last minute are known
		rate, burst = presentWeights(loads, used, rateOf), presentWeights(loads, used, burstOf)
		var err error
		current, err = weigh(total, used, floor(total, used, needFloorPercent), rate, burst)
		if err != nil || !peaks {
			return current, err
		}
	}
	n := count(used)
	if n > total.Burst {
		return nil, &TooSmall{Bound: "burst", Need: n, Have: total.Burst}
	}
	if n > int64(total.Rate) {
		return nil, &TooSmall{Bound: "rate", Need: n, Have: int64(total.Rate)}
	}
	r := newFilling(int64(total.Rate), len(used))
	b := newFilling(total.Burst, len(used))
	atLeast := floor(total, used, needFloorPercent)
	r.fill(quotas(loads, used, rateOf), func(i int) int64 {
		return max(atLeast, milli(loads[i].Recent*(1+headroom/100.)))
	})
	r.oneEach(used)
	served := slices.Clone(r.parts)
	r.fill(evenly(used), func(i int) int64 {
		return served[i] + milli(loads[i].spread())
	})
	if unseen {
		r.fill(quotas(loads, used, rateOf), func(i int) int64 {
			if loads[i].Retiring {
				return 0
			}
			return int64(loads[i].Quota.Rate)
		})
	}
	b.fill(quotas(loads, used, burstOf), func(i int) int64 {
		l := loads[i]
		switch {
		case l.Retiring || l.Unseen || l.Peak == 0:
			return l.Quota.Burst
		}
		return l.Peak
	})
	b.oneEach(used)
	staying := slices.Clone(used)
	for i, l := range loads {
		staying[i] = used[i] && !l.Retiring
	}
	r.rest(rate, staying)
	b.rest(burst, staying)
	shares := make([]tokenbucket.Share, len(loads))
	for i := range shares {
		shares[i] = tokenbucket.Share{Rate: tokenbucket.Rate(r.parts[i]), Burst: b.parts[i]}
		if silent {
			shares[i].Rate = current[i].Rate
		}
	}
	return shares, nil
}

// spread returns the rate, in msg/s, to work off l's backlog in time.
func (l Load) spread() float64 {
	if l.Retiring {
		return float64(l.Backlog) / retire.Seconds()
	}
	return float64(l.Backlog) / Drain.Seconds()
}

// filling is a total on its way to brokers.
//
// Invariant: remaining and the sum of parts are the total.
type filling struct {
	parts     []int64
	remaining int64
}

func newFilling(total int64, brokers int) *filling {
	return &filling{parts: make([]int64, brokers), remaining: total}
}

// oneEach raises every broker in use to at least 1: quotas that sum to more than the
// total can round a small quota down to 0. The unit comes from remaining, or else from the
// broker that has most.
func (f *filling) oneEach(used []bool) {
	for i := range used {
		if !used[i] || f.parts[i] > 0 {
			continue
		}
		f.parts[i] = 1
		if f.remaining > 0 {
			f.remaining--
			continue
		}
		largest := 0
		for j, part := range f.parts {
			if part > f.parts[largest] {
				largest = j
			}
		}
		f.parts[largest]--
	}
}

// fill divides remaining max-min fairly by weights. No broker exceeds its limit upTo. A
// broker could get more only at the expense of a broker that has no more per weight. Only
// brokers of positive weight take part. The rounding remainder, less than one unit per
// broker, goes to the brokers below their limits, the largest weight first.
func (f *filling) fill(weights []int64, upTo func(i int) int64) {
	want := make([]int64, len(weights))
	open := make([]int, 0, len(weights))
	var sum int64
	for i, w := range weights {
		if want[i] = upTo(i) - f.parts[i]; w > 0 && want[i] > 0 {
			open = append(open, i)
			sum += w
		}
	}
	for more := true; more && len(open) > 0; {
		more = false
		rest, before := f.remaining, sum
		open = slices.DeleteFunc(open, func(i int) bool {
			if want[i] > MulDiv(rest, weights[i], before) {
				return false
			}
			f.parts[i] += want[i]
			f.remaining -= want[i]
			sum -= weights[i]
			more = true
			return true
		})
	}
	rest := f.remaining
	slices.SortStableFunc(open, func(i, j int) int { return cmp.Compare(weights[j], weights[i]) })
	for _, i := range open {
		part := MulDiv(rest, weights[i], sum)
		f.parts[i] += part
		f.remaining -= part
	}
	for _, i := range open[:min(f.remaining, int64(len(open)))] {
		f.parts[i]++
		f.remaining--
	}
}

// rest divides remaining by weights over the brokers that stay. If none of them has weight,
// rest divides evenly over all brokers that have something.
func (f *filling) rest(weights []int64, staying []bool) {
	if f.remaining == 0 {
		return
	}
	weighed := slices.Clone(weights)
	for i := range weighed {
		if !staying[i] {
			weighed[i] = 0
		}
	}
	if sum(weighed) == 0 {
		for i, part := range f.parts {
			weighed[i] = min(part, 1)
		}
	}
	for i, part := range apportion(f.remaining, weighed, make([]int64, len(weighed))) {
		f.parts[i] += part
	}
	f.remaining = 0
}

// quotas weighs the used brokers by their quotas, or evenly if a quota is unknown.
func quotas(loads []Load, used []bool, part func(tokenbucket.Share) int64) []int64 {
	weights := make([]int64, len(loads))
	for i, l := range loads {
		if !used[i] {
			continue
		}
		if l.Quota.IsZero() {
			return evenly(used)
		}
		weights[i] = max(1, part(l.Quota))
	}
	return weights
}

func evenly(used []bool) []int64 {
	weights := make([]int64, len(used))
	for i := range used {
		if used[i] {
			weights[i] = 1
		}
	}
	return weights
}

// milli converts to milli-msg/s, capped so that the sum of two rates does not overflow.
func milli(perSecond float64) int64 {
	return int64(min(math.Ceil(perSecond*1000), math.MaxInt64/4))
}
