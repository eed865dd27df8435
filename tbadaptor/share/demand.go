package share

import (
	"cmp"
	"math"
	"slices"

	"github.com/srtm-io/srtm/tokenbucket"
)

// demandFirst divides total over the brokers that are in by the objectives of the package
// comment, and the rest by the weights rate and burst.
func demandFirst(total tokenbucket.Share, loads []Load, in []bool, rate, burst []int64) ([]tokenbucket.Share, error) {
	silent, peaks, unseen := true, false, false
	for _, l := range loads {
		silent = silent && l.Recent == 0 && l.Backlog == 0 && !l.Retiring && !l.Unseen
		peaks, unseen = peaks || l.Peak > 0, unseen || l.Unseen
	}
	var kept []tokenbucket.Share
	if silent { // only the bursts of the last minute are known
		rate, burst = present(loads, in, rateOf), present(loads, in, burstOf)
		var err error
		kept, err = weigh(total, in, floor(total, in, needFloorPercent), rate, burst)
		if err != nil || !peaks {
			return kept, err
		}
	}
	n := count(in)
	if n > total.Burst {
		return nil, &TooSmall{Bound: "burst", Need: n, Have: total.Burst}
	}
	if n > int64(total.Rate) {
		return nil, &TooSmall{Bound: "rate", Need: n, Have: int64(total.Rate)}
	}
	r := newFilling(int64(total.Rate), len(in))
	b := newFilling(total.Burst, len(in))
	atLeast := floor(total, in, needFloorPercent)
	r.fill(quotas(loads, in, rateOf), func(i int) int64 {
		return max(atLeast, milli(loads[i].Recent*(1+headroom/100.)))
	})
	r.oneEach(in)
	served := slices.Clone(r.has)
	r.fill(evenly(in), func(i int) int64 {
		return served[i] + milli(loads[i].spread())
	})
	if unseen {
		r.fill(quotas(loads, in, rateOf), func(i int) int64 {
			if loads[i].Retiring {
				return 0
			}
			return int64(loads[i].Quota.Rate)
		})
	}
	b.fill(quotas(loads, in, burstOf), func(i int) int64 {
		l := loads[i]
		switch {
		case l.Retiring || l.Unseen || l.Peak == 0:
			return l.Quota.Burst
		}
		return l.Peak
	})
	b.oneEach(in)
	staying := slices.Clone(in)
	for i, l := range loads {
		staying[i] = in[i] && !l.Retiring
	}
	r.rest(rate, staying)
	b.rest(burst, staying)
	out := make([]tokenbucket.Share, len(loads))
	for i := range out {
		out[i] = tokenbucket.Share{Rate: tokenbucket.Rate(r.has[i]), Burst: b.has[i]}
		if silent {
			out[i].Rate = kept[i].Rate
		}
	}
	return out, nil
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
// Invariant: left and the sum of has are the total.
type filling struct {
	has  []int64
	left int64
}

func newFilling(total int64, brokers int) *filling {
	return &filling{has: make([]int64, brokers), left: total}
}

// oneEach raises every broker in use to at least 1: quotas that sum to more than the
// total can round a small quota down to 0. The unit comes from left, or else from the
// broker that has most.
func (f *filling) oneEach(in []bool) {
	for i := range in {
		if !in[i] || f.has[i] > 0 {
			continue
		}
		f.has[i] = 1
		if f.left > 0 {
			f.left--
			continue
		}
		most := 0
		for j, has := range f.has {
			if has > f.has[most] {
				most = j
			}
		}
		f.has[most]--
	}
}

// fill divides left max-min fairly by weights. No broker exceeds its limit upTo. No
// broker could get more except at the expense of a broker with no more per weight. Only
// brokers of positive weight take part. The rounding remainder, less than one unit per
// broker, goes to the brokers below their limits, the largest weight first.
func (f *filling) fill(weights []int64, upTo func(i int) int64) {
	want := make([]int64, len(weights))
	open := make([]int, 0, len(weights))
	var sum int64
	for i, w := range weights {
		if want[i] = upTo(i) - f.has[i]; w > 0 && want[i] > 0 {
			open = append(open, i)
			sum += w
		}
	}
	for again := true; again && len(open) > 0; {
		again = false
		rest, before := f.left, sum
		open = slices.DeleteFunc(open, func(i int) bool {
			if want[i] > MulDiv(rest, weights[i], before) {
				return false
			}
			f.has[i] += want[i]
			f.left -= want[i]
			sum -= weights[i]
			again = true
			return true
		})
	}
	rest := f.left
	slices.SortStableFunc(open, func(i, j int) int { return cmp.Compare(weights[j], weights[i]) })
	for _, i := range open {
		part := MulDiv(rest, weights[i], sum)
		f.has[i] += part
		f.left -= part
	}
	for _, i := range open[:min(f.left, int64(len(open)))] {
		f.has[i]++
		f.left--
	}
}

// rest divides left by weights over the brokers that stay. If none of them has weight,
// rest divides evenly over all brokers that have something.
func (f *filling) rest(weights []int64, staying []bool) {
	if f.left == 0 {
		return
	}
	among := slices.Clone(weights)
	for i := range among {
		if !staying[i] {
			among[i] = 0
		}
	}
	if sum(among) == 0 {
		for i, has := range f.has {
			among[i] = min(has, 1)
		}
	}
	for i, part := range apportion(f.left, among, make([]int64, len(among))) {
		f.has[i] += part
	}
	f.left = 0
}

// quotas weighs the brokers that are in by their quotas, or evenly if a quota is unknown.
func quotas(loads []Load, in []bool, part func(tokenbucket.Share) int64) []int64 {
	weights := make([]int64, len(loads))
	for i, l := range loads {
		if !in[i] {
			continue
		}
		if l.Quota.IsZero() {
			return evenly(in)
		}
		weights[i] = max(1, part(l.Quota))
	}
	return weights
}

func evenly(in []bool) []int64 {
	weights := make([]int64, len(in))
	for i := range in {
		if in[i] {
			weights[i] = 1
		}
	}
	return weights
}

// milli converts to milli-msg/s, capped so that the sum of two rates does not overflow.
func milli(perSecond float64) int64 {
	return int64(min(math.Ceil(perSecond*1000), math.MaxInt64/4))
}
