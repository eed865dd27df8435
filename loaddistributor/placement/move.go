package placement

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Replace plans a topic that is already placed as old. Requires: the rcap of the brokers
// counts the topic's present rate as free. at returns the broker of a publisher, or ""
// for a new publisher. If a publisher's broker is among brokers and still carries the
// topic, the publisher stays, even if the proportions are off or fewer brokers would do.
// The rules:
//
//   - If the publishers of a broker exceed the broker's rcap, the broker gives up as few
//     publishers as possible, highest rates first. If the rates are too coarse to fit, a
//     broker may exceed its rcap by less than one publisher's rate.
//   - The topic keeps the brokers of the publishers that stay. It adds as few others as
//     its rate (or AtLeast) needs, largest rcap first. If the number of brokers would
//     exceed the burst or the number of publishers, Replace gives up brokers with the
//     fewest publishers, as few as possible.
//   - A publisher that is new or must move goes to the broker furthest behind its
//     proportion of the publisher's group, and then of the rate. The quotas follow the
//     rates of the publishers that stay; the remaining rate makes the quotas as equal as
//     the policy allows. A broker needed only for the rate may have no publisher.
//
// So only the first two rules make publishers move. If the policy differs from old's, or
// these rules find no plan, Replace places the topic anew. It then exchanges publishers
// of the same kind, so that as many as possible keep their broker.
//
// Arguments, result and errors are otherwise as in Place.
func Replace(policy string, brokers []Broker, old Plan, brokerOf func(publisher string) string, d Demand, rng *rand.Rand) (Plan, error) {
	if faults := append(brokerFaults(brokers), d.faults()...); len(faults) > 0 {
		return Plan{}, faults
	}
	publishers := d.Expand()
	homes := make([]string, len(publishers))
	for i, p := range publishers {
		homes[i] = brokerOf(p.ID)
	}
	if policy == old.Policy && slices.Contains(Policies(), policy) && (rng != nil || policy == SRTM) {
		if plan, ok := adjust(policy, brokers, old, homes, d, publishers, rng); ok {
			return plan, nil
		}
	}
	plan, err := anew(policy, brokers, d, rng)
	if err != nil {
		return Plan{}, withFits(err, policy, brokers, d)
	}
	return keepBrokers(plan, publishers, homes), nil
}

// adjust applies the rules of Replace. It returns false if they find no plan. Requires: the
// arguments are valid.
func adjust(policy string, brokers []Broker, old Plan, homes []string, d Demand, publishers []Publisher, rng *rand.Rand) (Plan, bool) {
	index := map[string]int{}
	for l, b := range brokers {
		if b.rcap() > 0 {
			index[b.ID] = l
		}
	}
	home := make([]int, len(publishers))        // index into brokers, or -1
	publishersOf := make([][]int, len(brokers)) // publishers
	weight := make([]float64, len(brokers))
	total := 0.0
	for i, p := range publishers {
		total += p.Rate
		l, ok := index[homes[i]]
		if home[i] = l; !ok {
			home[i] = -1
			continue
		}
		publishersOf[l] = append(publishersOf[l], i)
		weight[l] += p.Rate
	}
	// Without declared publishers, the old quotas select the brokers to keep. An open
	// topic may have undeclared publishers on any of its brokers, so it keeps all of
	// them.
	mustKeep := map[int]bool{}
	for _, q := range old.Quotas {
		l, ok := index[q.Broker]
		if len(publishers) == 0 {
			total += float64(q.Rate)
			if ok {
				weight[l] = float64(q.Rate)
			}
		}
		mustKeep[l] = mustKeep[l] || ok && d.Open
	}
	room := func(l int) float64 { return float64(brokers[l].rcap())*(1+1e-9) - weight[l] } // sums of fractions are rounded
	var carriers []int
	for l := range brokers {
		if room(l) < 0 && len(publishers) > 0 {
			slices.SortStableFunc(publishersOf[l], func(i, j int) int { return cmp.Compare(publishers[i].Rate, publishers[j].Rate) })
			for n := len(publishersOf[l]) - 1; room(l) < 0 && n >= 0; n-- {
				weight[l] -= publishers[publishersOf[l][n]].Rate
				publishersOf[l] = publishersOf[l][:n]
			}
		}
		if len(publishersOf[l]) > 0 || mustKeep[l] || len(publishers) == 0 && weight[l] > 0 {
			carriers = append(carriers, l)
		}
	}
	slices.SortStableFunc(carriers, func(l, m int) int {
		return cmp.Or(cmp.Compare(len(publishersOf[l]), len(publishersOf[m])), cmp.Compare(weight[l], weight[m]))
	})
	chosen := enlarge(brokers, carriers, d, d.bound())
	if chosen == nil {
		return Plan{}, false
	}

	// From here on, indices are into chosen.
	slices.Sort(chosen)
	n := len(chosen)
	loads, floors, caps := make([]int64, n), make([]int64, n), make([]int64, n)
	rooms := make([]float64, n)
	position := make([]int, len(brokers))
	for l := range position {
		position[l] = -1
	}
	for c, l := range chosen {
		position[l] = c
		caps[c], rooms[c] = min(brokers[l].rcap(), d.Rate), room(l)
		floors[c] = min(caps[c], int64(weight[l]*float64(d.Rate)/total))
		if policy == Conc {
			loads[c] = brokers[l].Allocated
		}
	}
	quotas := equalLoad(loads, floors, caps, d.Rate)
	for c := range quotas { // at least 1 each; d.Rate is no less than n
		if quotas[c] == 0 {
			quotas[c] = 1
			quotas[slices.Index(quotas, slices.Max(quotas))]--
		}
	}
	a := newAssignment(d, quotas)
	unplaced := indices(len(publishers))
	for i := range publishers {
		a.brokerOf[i] = -1
		if home[i] >= 0 {
			home[i] = position[home[i]]
		}
	}
	a.expect(unplaced)
	for c, l := range chosen {
		for _, i := range publishersOf[l] {
			a.brokerOf[i] = c
		}
		a.deficit[c] -= weight[l]
	}
	if policy == SRTM {
		groups, pool := a.groups()
		for _, group := range groups {
			a.join(group, true, home, rooms)
		}
		unplaced = pool
	} else {
		rng.Shuffle(len(unplaced), func(i, j int) { unplaced[i], unplaced[j] = unplaced[j], unplaced[i] })
	}
	a.join(unplaced, false, home, rooms)
	return compose(policy, brokers, chosen, quotas, d, a.brokerOf), true
}

// enlarge chooses the brokers of Replace: carriers, and as few others as needed. carriers
// are sorted by the order in which they are given up. enlarge returns nil if no choice
// works.
func enlarge(brokers []Broker, carriers []int, d Demand, publishers int) []int {
	limit := min(d.Burst, d.Rate)
	if publishers > 0 {
		limit = min(limit, int64(publishers))
	}
	var order []int
	for h := byRcap(brokers); len(h) > 0; {
		order = append(order, h.Pop().broker)
	}
	for dropped := range carriers {
		chosen := slices.Clone(carriers[dropped:])
		var capacity int64
		for _, l := range chosen {
			capacity += min(brokers[l].rcap(), d.Rate) // no overflow: a rate is at most MaxRate
		}
		for _, l := range order {
			if capacity >= d.Rate && len(chosen) >= d.AtLeast || brokers[l].rcap() == 0 {
				break
			}
			if !slices.Contains(chosen, l) {
				chosen = append(chosen, l)
				capacity += min(brokers[l].rcap(), d.Rate)
			}
		}
		if capacity >= d.Rate && len(chosen) >= d.AtLeast && int64(len(chosen)) <= limit {
			return chosen
		}
	}
	return nil
}

// keepBrokers exchanges publishers of the same kind, between which the plan does not
// distinguish, so that as many as possible keep their broker.
func keepBrokers(plan Plan, publishers []Publisher, homes []string) Plan {
	type kind struct {
		key   string
		rate  float64
		batch int
	}
	number, last := map[kind]int32{}, kind{}
	kindOf := make([]int32, len(publishers)) // kind number of each publisher
	for i, p := range publishers {
		k := kind{p.Key, p.Rate, p.Batch}
		if i > 0 && k == last { // publishers of a group are adjacent
			kindOf[i] = kindOf[i-1]
			continue
		}
		last = k
		n, found := number[k]
		if !found {
			n = int32(len(number))
			number[k] = n
		}
		kindOf[i] = n
	}
	index := map[string]int{}
	room := make([]map[int32]int, len(plan.Quotas))
	for q := range plan.Quotas {
		index[plan.Quotas[q].Broker] = q
		room[q] = map[int32]int{}
		for _, i := range plan.Quotas[q].Publishers {
			room[q][kindOf[i]]++
		}
	}
	quotaOf := make([]int, len(publishers))
	for i, k := range kindOf {
		quotaOf[i] = -1
		if q, ok := index[homes[i]]; ok && room[q][k] > 0 {
			room[q][k]--
			quotaOf[i] = q
		}
	}
	next := make([]int, len(number)) // first quota that may have room, by kind
	for i, k := range kindOf {
		if quotaOf[i] >= 0 {
			continue
		}
		for room[next[k]][k] == 0 {
			next[k]++
		}
		quotaOf[i] = next[k]
		room[next[k]][k]--
	}
	shrunk := Plan{Policy: plan.Policy, K: plan.K, Quotas: slices.Clone(plan.Quotas)}
	for q := range shrunk.Quotas {
		shrunk.Quotas[q].Publishers = nil
	}
	for i, q := range quotaOf {
		shrunk.Quotas[q].Publishers = append(shrunk.Quotas[q].Publishers, i)
	}
	return shrunk
}

// Shift moves publishers, given as indices into d.Expand(), to a broker. Each source
// broker gives the same fraction of its quota as of its publishers' rates. A broker
// without remaining publishers leaves the plan. The shares are in proportion to the new
// quotas.
//
// The error is FieldErrors, or *Infeasible if the burst has no token for one more broker
// or the rate cannot be divided.
func Shift(plan Plan, d Demand, moved []int, broker string) (Plan, error) {
	rates := d.rates()
	isMoved := map[int]bool{}
	var faults FieldErrors
	if n := len(plan.Unplaced); n > 0 {
		faults.add("plan", "%s without a broker", plural.Count(n, "publisher"))
	}
	for n, i := range moved {
		if i < 0 || i >= len(rates) || isMoved[i] {
			faults.add(fmt.Sprintf("moved[%d]", n), "publisher %d of %d, or named twice", i, len(rates))
		}
		isMoved[i] = true
	}
	if broker == "" {
		faults.add("to", "is empty")
	}
	if len(faults) > 0 {
		return Plan{}, faults
	}
	shifted := Plan{Policy: plan.Policy}
	var arriving []int
	var rate int64
	target := -1
	for _, q := range plan.Quotas {
		if q.Broker == broker {
			target = len(shifted.Quotas)
			shifted.Quotas = append(shifted.Quotas, q)
			continue
		}
		var staying, leaving []int
		var totalRate, movedRate float64
		for _, i := range q.Publishers {
			totalRate += rates[i]
			if isMoved[i] {
				movedRate += rates[i]
				leaving = append(leaving, i)
			} else {
				staying = append(staying, i)
			}
		}
		arriving = append(arriving, leaving...)
		switch {
		case len(leaving) == 0:
			shifted.Quotas = append(shifted.Quotas, q)
		case len(staying) == 0:
			rate += q.Rate
		default:
			part := min(q.Rate-1, int64(math.Round(float64(q.Rate)*movedRate/totalRate)))
			rate += part
			q.Rate -= part
			q.Publishers = staying
			shifted.Quotas = append(shifted.Quotas, q)
		}
	}
	if len(arriving) > 0 {
		if target < 0 {
			target = len(shifted.Quotas)
			shifted.Quotas = append(shifted.Quotas, Quota{Broker: broker})
		}
		q := &shifted.Quotas[target]
		q.Rate += rate
		q.Publishers = slices.Sorted(slices.Values(append(slices.Clone(q.Publishers), arriving...)))
	}
	shifted.K = len(shifted.Quotas)
	quotas := make([]int64, shifted.K)
	for n, q := range shifted.Quotas {
		quotas[n] = q.Rate
	}
	for n := range quotas {
		// A few publishers of a low rate may round to 0, but a quota is at least 1: the
		// largest quota gives it.
		if quotas[n] > 0 {
			continue
		}
		largest := slices.Index(quotas, slices.Max(quotas))
		if quotas[largest] < 2 {
			return Plan{}, &Infeasible{Bound: "rate", Need: int64(shifted.K), Have: d.Rate}
		}
		quotas[largest]--
		quotas[n] = 1
	}
	if int64(shifted.K) > d.Burst {
		return Plan{}, &Infeasible{Bound: "burst", Need: int64(shifted.K), Have: d.Burst, Fits: Fits{Burst: int64(shifted.K)}}
	}
	shares, err := share.Proportion(tokenbucket.Share{Rate: tokenbucket.Rate(d.rateMilli()), Burst: d.Burst}, quotas)
	if err != nil {
		return Plan{}, fmt.Errorf("divide the contract: %w", err)
	}
	for n := range shifted.Quotas {
		shifted.Quotas[n].Rate, shifted.Quotas[n].Share = quotas[n], shares[n]
	}
	return shifted, nil
}

// WithRetiring returns the shares of a plan's quotas (quotas) and of brokers that only
// have messages left to release (rest). Each retiring broker gets a small share, taken
// from the largest shares. All shares together are the contract.
//
// If the burst has fewer tokens than there are brokers, retiring brokers come first, and
// quotas of the lowest rate get the zero share until the retiring brokers are empty. The
// retiring brokers get the rate of these quotas. If there are more retiring brokers than
// tokens, some retiring brokers get the zero share, too.
//
// The error is *Infeasible if the rate cannot be divided.
func WithRetiring(plan Plan, retiring int) (quotas, rest []tokenbucket.Share, err error) {
	var r tokenbucket.Rate
	var b int64
	for _, q := range plan.Quotas {
		quotas = append(quotas, q.Share)
		r += q.Share.Rate
		b += q.Share.Burst
	}
	if total := int64(len(quotas) + retiring); b < total {
		return inTurn(quotas, retiring, tokenbucket.Share{Rate: r, Burst: b})
	}
	for range retiring {
		// A twentieth of an even part: a retiring broker has few messages, else the topic
		// would not have moved away from it.
		part := max(1, r/tokenbucket.Rate(retiringPart*(len(quotas)+retiring)))
		rate, burst := 0, 0
		for i, q := range quotas {
			if q.Rate > quotas[rate].Rate {
				rate = i
			}
			if q.Burst > quotas[burst].Burst {
				burst = i
			}
		}
		part = min(part, quotas[rate].Rate-1)
		if part < 1 {
			return nil, nil, &Infeasible{Bound: "rate", Need: int64(len(quotas) + retiring), Have: int64(r)}
		}
		quotas[rate].Rate -= part
		quotas[burst].Burst--
		rest = append(rest, tokenbucket.Share{Rate: part, Burst: 1})
	}
	return quotas, rest, nil
}

const retiringPart = 20

// inTurn divides a contract with fewer tokens than brokers.
func inTurn(shares []tokenbucket.Share, retiring int, contract tokenbucket.Share) (quotas, rest []tokenbucket.Share, err error) {
	first := int(min(int64(retiring), contract.Burst))
	members := int(contract.Burst) - first // less than the number of shares
	order := indices(len(shares))
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(shares[b].Rate, shares[a].Rate) })
	weights := make([]int64, 0, contract.Burst)
	var unservedRate tokenbucket.Rate
	for _, i := range order[members:] {
		unservedRate += shares[i].Rate
	}
	for range first {
		weights = append(weights, max(1, int64(unservedRate)/int64(first)))
	}
	for _, i := range order[:members] {
		weights = append(weights, int64(shares[i].Rate))
	}
	if int64(contract.Rate) < int64(len(weights)) {
		return nil, nil, &Infeasible{Bound: "rate", Need: int64(len(weights)), Have: int64(contract.Rate)}
	}
	divided, err := share.Proportion(contract, weights)
	if err != nil {
		return nil, nil, fmt.Errorf("divide the contract: %w", err)
	}
	quotas, rest = make([]tokenbucket.Share, len(shares)), make([]tokenbucket.Share, retiring)
	copy(rest, divided[:first])
	for n, i := range order[:members] {
		quotas[i] = divided[first+n]
	}
	return quotas, rest, nil
}
