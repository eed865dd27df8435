package placement

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Names of the policies.
const (
	// SRTM concentrates the topic on the fewest brokers, keeps the smallest quota as
	// large as possible, and splits every correlation group in proportion to the quotas.
	// Demand.AtLeast can raise the number of brokers.
	SRTM = "srtm"
	// MaxMin is SRTM without correlation keys.
	MaxMin = "maxmin"
	// Conc takes the same brokers as SRTM and equalises their total load, including the
	// load of other topics. Every broker gets a quota, because the fewest brokers are all
	// needed for the rate. Demand.AtLeast is the exception: a broker that already carries
	// more than the common level may get nothing and drop out.
	Conc = "conc"
	// LoadBalance gives every broker the same part of the topic. A broker with too little
	// capacity gets its rcap, and a broker without capacity is left out. The other
	// brokers share the rest evenly. With fewer publishers than brokers, the brokers of
	// largest rcap share the topic, one for each publisher.
	LoadBalance = "loadbalance"
)

// Policies returns the names of the policies, sorted.
func Policies() []string { return []string{Conc, LoadBalance, MaxMin, SRTM} }

// Plan is a placement.
type Plan struct {
	Policy string
	// K is the number of brokers that carry the topic, len(Quotas).
	K int
	// Quotas are in the order of the brokers passed to Place.
	Quotas []Quota
	// Unplaced publishers, ascending, have no broker, and their part of the contract is
	// unused. Only a search of loaddistributor/tuner leaves publishers unplaced.
	Unplaced []int
}

// Brokers returns the brokers that carry the topic, in the order of the quotas.
func (p Plan) Brokers() []string {
	ids := make([]string, len(p.Quotas))
	for i, q := range p.Quotas {
		ids[i] = q.Broker
	}
	return ids
}

// On returns the index of the broker's quota, or -1.
func (p Plan) On(broker string) int {
	for i := range p.Quotas {
		if p.Quotas[i].Broker == broker {
			return i
		}
	}
	return -1
}

// Quota is what one broker of a plan gets.
type Quota struct {
	Broker string
	// Rate is the broker's part of the demand's rate, msg/s: 1 to the broker's rcap, or 0
	// for a plan of Unreserved.
	Rate int64
	// Publishers are indices into Demand.Expand(), ascending. The list is empty if the
	// demand has no publishers, and may be empty if the quota's proportion is less than
	// one publisher.
	Publishers []int
	// Share is the broker's part of the contract, in proportion to Rate. The largest
	// quota (the first, if several are largest) gets the remainder of the division.
	Share tokenbucket.Share
}

// Infeasible says why there is no placement.
type Infeasible struct {
	// Bound is one of
	//	"brokers"     fewer brokers have capacity left than are needed
	//	"rcap"        all brokers together have too little capacity, msg/s
	//	"burst"       b is less than the number of brokers: each needs a token
	//	"publishers"  there are fewer publishers than brokers needed, and a broker
	//	              without a publisher would waste a part of the contract
	//	"rate"        the rate is too small to divide (Shift: msg/s, WithRetiring:
	//	              milli-msg/s)
	Bound      string
	Need, Have int64
	// Fits says which changes to the demand would make a placement possible. Fits is zero
	// if no single change helps, or where it is not computed: in WithRetiring, and in
	// Shift except for "burst".
	Fits Fits
}

// Capacity reports whether more or larger brokers would help.
func (e *Infeasible) Capacity() bool { return e.Bound == "rcap" || e.Bound == "brokers" }

func (e *Infeasible) Error() string {
	text := "infeasible: " + e.bound()
	if fits := e.Fits.String(); fits != "" {
		text += "; what would fit: " + fits
	}
	return text
}

func (e *Infeasible) bound() string {
	switch e.Bound {
	case "brokers":
		if e.Have == 0 {
			return "there are no brokers"
		}
		return fmt.Sprintf("%s needed, and %d have capacity left", plural.Count(e.Need, "broker"), e.Have)
	case "rcap":
		return fmt.Sprintf("%d msg/s requested, the brokers have %d left", e.Need, e.Have)
	default:
		return fmt.Sprintf("%s needed, and %s is %d", plural.Count(e.Need, "broker"), e.Bound, e.Have)
	}
}

// Place plans the brokers of a topic. Only the policies other than SRTM draw from rng, to
// place publishers at random. With publishers such a policy needs a non-nil rng. The same
// arguments with an equal rng give the same plan.
//
// The quotas sum to the demand's rate, and the shares to the demand's contract. Every
// publisher is placed once. The error is FieldErrors (all faults of the policy, the
// brokers and the demand) or *Infeasible. Place never returns a partial plan.
func Place(policy string, brokers []Broker, d Demand, rng *rand.Rand) (Plan, error) {
	plan, err := place(policy, brokers, d, rng)
	return plan, withFits(err, policy, brokers, d)
}

// withFits fills in the field Fits if err is an *Infeasible.
func withFits(err error, policy string, brokers []Broker, d Demand) error {
	var bound *Infeasible
	if errors.As(err, &bound) {
		bound.Fits = fitting(policy, brokers, d, d.bound())
	}
	return err
}

// place is Place without computing Fits.
func place(policy string, brokers []Broker, d Demand, rng *rand.Rand) (Plan, error) {
	var faults FieldErrors
	if !slices.Contains(Policies(), policy) {
		faults = unknown(policy)
	}
	faults = append(faults, brokerFaults(brokers)...)
	faults = append(faults, d.faults()...)
	if len(faults) > 0 {
		return Plan{}, faults
	}
	return anew(policy, brokers, d, rng)
}

// anew is place without validation. Requires: the brokers and the demand are valid.
func anew(policy string, brokers []Broker, d Demand, rng *rand.Rand) (Plan, error) {
	if !slices.Contains(Policies(), policy) {
		return Plan{}, unknown(policy)
	}
	if rng == nil && policy != SRTM && d.Count() > 0 {
		return Plan{}, FieldErrors{{Field: "rng", Problem: "policy " + policy + " needs a source of randomness"}}
	}

	chosen, quotas, err := divide(policy, brokers, d, d.bound())
	if err != nil {
		return Plan{}, err
	}
	a := newAssignment(d, quotas)
	if policy == SRTM {
		a.correlated()
	} else {
		a.blind(rng)
	}
	return compose(policy, brokers, chosen, quotas, d, a.brokerOf), nil
}

func unknown(policy string) (faults FieldErrors) {
	faults.add("policy", "%q is not one of %s", policy, strings.Join(Policies(), ", "))
	return faults
}

// compose builds the plan in which brokers[chosen[l]] has quotas[l] and the publishers i
// with brokerOf[i] == l. Requires: chosen is ascending, the quotas are above 0 and sum to
// d.Rate, and the burst has a token for each quota.
func compose(policy string, brokers []Broker, chosen []int, quotas []int64, d Demand, brokerOf []int) Plan {
	shares, err := share.Proportion(tokenbucket.Share{Rate: tokenbucket.Rate(d.rateMilli()), Burst: d.Burst}, quotas)
	if err != nil {
		// Cannot happen: the contract was validated and has room for every broker.
		panic(fmt.Sprintf("placement: contract %d milli-msg/s, burst %d over quotas %v: %v", d.rateMilli(), d.Burst, quotas, err))
	}
	plan := Plan{Policy: policy, K: len(chosen), Quotas: make([]Quota, len(chosen))}
	for i, l := range chosen {
		plan.Quotas[i] = Quota{Broker: brokers[l].ID, Rate: quotas[i], Share: shares[i]}
	}
	sizes := make([]int, len(chosen))
	for _, l := range brokerOf {
		sizes[l]++
	}
	for l, n := range sizes {
		if n > 0 {
			plan.Quotas[l].Publishers = make([]int, 0, n)
		}
	}
	for i, l := range brokerOf {
		q := &plan.Quotas[l]
		q.Publishers = append(q.Publishers, i)
	}
	return plan
}

// Unreserved puts a demand without publishers on one broker. The quota is 0, so the
// broker's allocation does not change. Requires: d is valid.
func Unreserved(policy, broker string, d Demand) Plan {
	return Plan{Policy: policy, K: 1, Quotas: []Quota{{
		Broker: broker, Share: tokenbucket.Share{Rate: tokenbucket.Rate(d.rateMilli()), Burst: d.Burst},
	}}}
}

// divide chooses brokers, as ascending indices, and their quotas, all > 0. publishers is
// the number of publishers to place, or 0 to plan only rates. Requires: policy, brokers
// and d are valid.
func divide(policy string, brokers []Broker, d Demand, publishers int) (chosen []int, quotas []int64, err error) {
	if len(brokers) == 0 {
		return nil, nil, &Infeasible{Bound: "brokers", Need: 1, Have: 0}
	}
	order := byRcap(brokers)
	var capacity int64 // rcap of the chosen brokers, msg/s
	choose := func() {
		next := order.Pop()
		chosen = append(chosen, next.broker)
		capacity += next.rcap // no overflow: below the rate until the last
	}
	for capacity < d.Rate {
		if len(order) == 0 {
			return nil, nil, &Infeasible{Bound: "rcap", Need: d.Rate, Have: capacity}
		}
		choose()
	}
	n := max(len(chosen), d.AtLeast)
	if usable := usable(brokers); n > usable {
		return nil, nil, &Infeasible{Bound: "brokers", Need: int64(n), Have: int64(usable)}
	}
	if policy == LoadBalance {
		spread := len(brokers)
		if publishers > 0 {
			spread = min(spread, publishers)
		}
		n = max(n, spread)
	}
	for len(chosen) < n {
		choose()
	}
	slices.Sort(chosen)
	caps := make([]int64, n)
	loads := make([]int64, n)
	for i, l := range chosen {
		caps[i], loads[i] = brokers[l].rcap(), brokers[l].Allocated
	}
	if policy == Conc {
		quotas = equalLoad(loads, make([]int64, n), caps, d.Rate)
	} else {
		quotas = maxmin(caps, d.Rate)
	}
	for i := len(quotas) - 1; i >= 0; i-- {
		if quotas[i] == 0 {
			quotas, chosen = slices.Delete(quotas, i, i+1), slices.Delete(chosen, i, i+1)
		}
	}
	n = len(quotas)
	if int64(n) > d.Burst {
		return nil, nil, &Infeasible{Bound: "burst", Need: int64(n), Have: d.Burst}
	}
	if publishers > 0 && n > publishers {
		return nil, nil, &Infeasible{Bound: "publishers", Need: int64(n), Have: int64(publishers)}
	}
	return chosen, quotas, nil
}

// byRcap returns a heap of brokers, largest rcap first, ties to the lower index. A heap is cheaper than
// a sorted list: most topics need one broker of a thousand.
func byRcap(brokers []Broker) container.Heap[capable] {
	h := make(container.Heap[capable], len(brokers))
	for i, b := range brokers {
		h[i] = capable{b.rcap(), i}
	}
	h.Init()
	return h
}

// capable is a broker with the capacity that it has left.
type capable struct {
	rcap   int64 // msg/s
	broker int
}

// Before implements the order of byRcap.
func (c capable) Before(other capable) bool {
	return c.rcap > other.rcap || c.rcap == other.rcap && c.broker < other.broker
}

// indices returns 0 to n-1.
func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// usable returns how many brokers have capacity left.
func usable(brokers []Broker) (n int) {
	for _, b := range brokers {
		if b.rcap() > 0 {
			n++
		}
	}
	return n
}

// maxmin divides rate over brokers by water-filling: each broker gets min(cap, fair
// share), and the others share what the capped brokers cannot take. No other division of
// rate under these caps has a larger smallest quota, nor, with the same smallest quota, a
// larger second smallest, and so on. The remainder goes to the lowest indices, one msg/s
// each.
//
// Requires: the caps sum to at least rate.
func maxmin(caps []int64, rate int64) []int64 {
	order := indices(len(caps))
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(caps[a], caps[b]) })
	quotas := make([]int64, len(caps))
	for i, l := range order {
		fair := rate / int64(len(order)-i)
		if caps[l] <= fair {
			quotas[l] = caps[l]
			rate -= caps[l]
			continue
		}
		equal := slices.Sorted(slices.Values(order[i:]))
		remainder := rate % int64(len(equal))
		for j, l := range equal {
			quotas[l] = fair // < caps[l]
			if int64(j) < remainder {
				quotas[l]++
			}
		}
		break
	}
	return quotas
}

// equalLoad raises the total load of each broker to a common level, within the broker's
// cap. A broker above the level gets its floor. The remainder goes to the lowest indices.
//
// Requires: the caps sum to at least rate, and neither their sum nor load plus cap
// overflows. The floors, each at most its cap, sum to at most rate.
func equalLoad(loads, floors, caps []int64, rate int64) []int64 {
	quota := func(l int, level int64) int64 { return min(max(floors[l], level-loads[l]), caps[l]) }
	total := func(level int64) (sum int64) {
		for l := range loads {
			sum += quota(l, level)
		}
		return sum
	}
	lowest, highest := slices.Min(loads), int64(0)
	for l := range loads {
		highest = max(highest, loads[l]+caps[l])
	}
	// The highest level that does not give out more than rate.
	level := lowest + int64(sort.Search(int(highest-lowest), func(i int) bool { return total(lowest+int64(i)+1) > rate }))
	quotas := make([]int64, len(loads))
	rest := rate
	for l := range loads {
		quotas[l] = quota(l, level)
		rest -= quotas[l]
	}
	for l := range loads {
		if rest > 0 && quota(l, level+1) > quotas[l] {
			quotas[l]++
			rest--
		}
	}
	return quotas
}
