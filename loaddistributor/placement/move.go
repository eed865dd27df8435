package placement

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Replace plans where a topic goes that is placed already, so that little
// moves: on the brokers that carry it now, as long as they can; else on those
// and as few others as needed, those of largest rcap first. Publishers stay
// where they are as far as the plan has room for them there. at returns the
// broker of a publisher, "" for one that is new. The rcap of the brokers counts
// what the topic takes now as free.
//
// Arguments, result and errors are otherwise those of Place.
func Replace(policy string, brokers []Broker, at func(publisher string) string, d Demand, rng *rand.Rand) (Plan, error) {
	if faults := append(brokerFaults(brokers), d.faults()...); len(faults) > 0 {
		return Plan{}, faults
	}
	publishers := d.Expand()
	carries := map[string]bool{}
	for _, p := range publishers {
		carries[at(p.ID)] = true
	}
	var chosen, others []int
	for _, i := range byRcap(brokers) {
		if carries[brokers[i].ID] {
			chosen = append(chosen, i)
		} else {
			others = append(others, i)
		}
	}
	for {
		slices.Sort(chosen) // the order given
		some := make([]Broker, len(chosen))
		for n, i := range chosen {
			some[n] = brokers[i]
		}
		plan, err := place(policy, some, d, rng)
		if err == nil {
			return keep(plan, publishers, at), nil
		}
		var bound *Infeasible
		if !errors.As(err, &bound) {
			return Plan{}, err
		}
		if len(others) == 0 {
			bound.Fits = fitting(policy, some, d, len(publishers))
			return Plan{}, bound
		}
		chosen, others = append(chosen, others[0]), others[1:]
	}
}

// keep exchanges publishers of the same kind, which the plan does not tell
// apart, so that as many as possible are where they were.
func keep(plan Plan, publishers []Publisher, at func(publisher string) string) Plan {
	type kind struct {
		key   string
		rate  float64
		batch int
	}
	of := func(p Publisher) kind { return kind{p.Key, p.Rate, p.Batch} }
	index := map[string]int{}
	room := make([]map[kind]int, len(plan.Quotas))
	for q := range plan.Quotas {
		index[plan.Quotas[q].Broker] = q
		room[q] = map[kind]int{}
		for _, i := range plan.Quotas[q].Publishers {
			room[q][of(publishers[i])]++
		}
	}
	where := make([]int, len(publishers))
	for i, p := range publishers {
		where[i] = -1
		if q, ok := index[at(p.ID)]; ok && room[q][of(p)] > 0 {
			room[q][of(p)]--
			where[i] = q
		}
	}
	next := map[kind]int{} // the first quota that may have room
	for i, p := range publishers {
		if where[i] >= 0 {
			continue
		}
		k := of(p)
		for room[next[k]][k] == 0 {
			next[k]++
		}
		where[i] = next[k]
		room[next[k]][k]--
	}
	kept := Plan{Policy: plan.Policy, K: plan.K, Quotas: slices.Clone(plan.Quotas)}
	for q := range kept.Quotas {
		kept.Quotas[q].Publishers = nil
	}
	for i, q := range where {
		kept.Quotas[q].Publishers = append(kept.Quotas[q].Publishers, i)
	}
	return kept
}

// Shift moves publishers, as indices into d.Expand(), to a broker, and the part
// of the rate with them that they are of their broker's publishers. A broker
// that is left without one is out of the plan. The shares are in proportion to
// the new quotas.
//
// The error is FieldErrors, or *Infeasible where the burst has no token for one
// more broker.
func Shift(plan Plan, d Demand, moved []int, to string) (Plan, error) {
	publishers := d.Expand()
	moves := map[int]bool{}
	var faults FieldErrors
	if n := len(plan.Unplaced); n > 0 {
		faults.add("plan", "%d publishers have no broker", n)
	}
	for n, i := range moved {
		if i < 0 || i >= len(publishers) || moves[i] {
			faults.add(fmt.Sprintf("moved[%d]", n), "publisher %d of %d, or named twice", i, len(publishers))
		}
		moves[i] = true
	}
	if to == "" {
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
		if q.Broker == to {
			target = len(shifted.Quotas)
			shifted.Quotas = append(shifted.Quotas, q)
			continue
		}
		var stay, leave []int
		var all, left float64
		for _, i := range q.Publishers {
			all += publishers[i].Rate
			if moves[i] {
				left += publishers[i].Rate
				leave = append(leave, i)
			} else {
				stay = append(stay, i)
			}
		}
		arriving = append(arriving, leave...)
		switch {
		case len(leave) == 0:
			shifted.Quotas = append(shifted.Quotas, q)
		case len(stay) == 0:
			rate += q.Rate
		default:
			part := min(q.Rate-1, int64(math.Round(float64(q.Rate)*left/all)))
			rate += part
			q.Rate -= part
			q.Publishers = stay
			shifted.Quotas = append(shifted.Quotas, q)
		}
	}
	if len(arriving) > 0 && target < 0 {
		target = len(shifted.Quotas)
		shifted.Quotas = append(shifted.Quotas, Quota{Broker: to})
	}
	if len(arriving) > 0 {
		q := &shifted.Quotas[target]
		q.Rate += rate
		q.Publishers = slices.Sorted(slices.Values(append(slices.Clone(q.Publishers), arriving...)))
	}
	shifted.K = len(shifted.Quotas)
	rates := make([]int64, shifted.K)
	for n := range shifted.Quotas {
		q := &shifted.Quotas[n]
		// A few publishers of a low rate may round to nothing, and a quota is at
		// least 1: the largest has it to give.
		if q.Rate == 0 {
			largest := 0
			for m := range shifted.Quotas {
				if shifted.Quotas[m].Rate > shifted.Quotas[largest].Rate {
					largest = m
				}
			}
			if shifted.Quotas[largest].Rate < 2 {
				return Plan{}, &Infeasible{Bound: "rate", Need: int64(shifted.K), Have: d.Rate}
			}
			shifted.Quotas[largest].Rate--
			q.Rate = 1
		}
		q.Groups = map[string]int{}
		for _, i := range q.Publishers {
			if key := publishers[i].Key; key != "" {
				q.Groups[key]++
			}
		}
	}
	for n, q := range shifted.Quotas {
		rates[n] = q.Rate
	}
	if int64(shifted.K) > d.Burst {
		return Plan{}, &Infeasible{Bound: "burst", Need: int64(shifted.K), Have: d.Burst, Fits: Fits{Burst: int64(shifted.K)}}
	}
	shares, err := share.Proportion(tokenbucket.Share{Rate: tokenbucket.Rate(d.rateMilli()), Burst: d.Burst}, rates)
	if err != nil {
		return Plan{}, fmt.Errorf("divide the contract: %w", err)
	}
	for n := range shifted.Quotas {
		shifted.Quotas[n].Share = shares[n]
	}
	return shifted, nil
}

// WithRetiring returns the shares of a plan's quotas, and of brokers that have
// only messages left to release: those get little each, taken from the largest
// shares; together they are the contract.
//
// Where the burst has no token for each of them, the brokers that retire come
// first, with the rate of those that go without: whoever has none is empty, its
// share zero, until they have released what they have. Quotas of the least rate go
// without first, brokers that retire if there are more of them than tokens.
//
// *Infeasible where the rate does not divide.
func WithRetiring(plan Plan, retiring int) (quotas, rest []tokenbucket.Share, err error) {
	var r tokenbucket.Rate
	var b int64
	for _, q := range plan.Quotas {
		quotas = append(quotas, q.Share)
		r += q.Share.Rate
		b += q.Share.Burst
	}
	if all := int64(len(quotas) + retiring); b < all {
		return inTurn(quotas, retiring, tokenbucket.Share{Rate: r, Burst: b})
	}
	for range retiring {
		// A twentieth of a fair part: what is left is little, or it would not have
		// been moved away from.
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
	members := int(contract.Burst) - first // fewer than there are
	order := make([]int, len(shares))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(shares[b].Rate, shares[a].Rate) })
	weights := make([]int64, 0, contract.Burst)
	var without tokenbucket.Rate
	for _, i := range order[members:] {
		without += shares[i].Rate
	}
	for range first {
		weights = append(weights, max(1, int64(without)/int64(first)))
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
