package placement

import (
	"cmp"
	"math/rand/v2"
	"slices"
)

// assignment collects who goes where. Brokers are indices into quotas.
type assignment struct {
	demand Demand
	rates  []float64 // of its publishers
	quotas []int64   // all > 0
	rate   int64     // their sum
	where  []int     // broker of each publisher
	// deficit is, for each broker, its proportion of the rates of all
	// publishers looked at so far, less the rates of those it was given.
	deficit []float64

	// Scratch of split and deal.
	counts []int64
	behind []float64
	order  []int
	heap   lacking
}

func newAssignment(d Demand, quotas []int64) *assignment {
	rates := d.rates()
	a := &assignment{
		demand: d, rates: rates, quotas: quotas,
		where: make([]int, len(rates)), deficit: make([]float64, len(quotas)),
		counts: make([]int64, len(quotas)), behind: make([]float64, len(quotas)), order: make([]int, len(quotas)),
	}
	for _, q := range quotas {
		a.rate += q
	}
	return a
}

// blind places publishers whatever their keys: at random, except that the
// brokers' sums of rates come out in proportion to their quotas.
func (a *assignment) blind(rng *rand.Rand) {
	all := indices(len(a.rates))
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	a.expect(all)
	a.deal(all, nil)
}

// correlated places every correlation group in proportion to the quotas: if k
// brokers carry the topic with equal quotas, each gets one k-th of every group,
// and so of the burst that the group sends, as it gets one k-th of the bucket.
// The measure is the number of publishers, as in the paper.
//
// What does not divide is given one each to the brokers that are furthest
// behind, counting all groups before, so that the remainders of many groups go
// round. The pool comes last and evens out what is left.
//
// Postcondition, for a group of n: a broker with quota q of a rate R got
// floor(n*q/R) or ceil(n*q/R) of it.
func (a *assignment) correlated() {
	if len(a.quotas) == 1 {
		return // all are where 0
	}
	groups, pool := a.groups()
	for _, group := range groups {
		a.split(group)
	}
	a.expect(pool)
	a.deal(pool, nil)
}

// groups returns the publishers of each correlation group, and the pool. Groups are in
// the order of their least ids, so that what a key is called, and when it was learned,
// decides nothing.
func (a *assignment) groups() (groups [][]int, pool []int) {
	type group struct {
		key, least string
		members    []int
	}
	var found []group
	index := map[string]int{} // in found, by key
	all := indices(len(a.rates))
	add := func(key, id string, n int) {
		members := all[:n:n]
		all = all[n:]
		i, known := index[key]
		if !known {
			index[key] = len(found)
			found = append(found, group{key, id, members})
			return
		}
		g := &found[i]
		g.least, g.members = min(g.least, id), append(g.members, members...)
	}
	for _, p := range a.demand.Publishers {
		add(p.Key, p.ID, 1)
	}
	for _, g := range a.demand.Groups {
		add(g.Key, g.Name()+".0", g.Count)
	}
	slices.SortFunc(found, func(x, y group) int { return cmp.Compare(x.least, y.least) })
	for _, g := range found {
		if g.key == "" {
			pool = g.members
		} else {
			groups = append(groups, g.members)
		}
	}
	return groups, pool
}

// split places one correlation group.
func (a *assignment) split(group []int) {
	n := int64(len(group))
	counts, behind, owed := a.counts, a.behind, n
	order := a.order[:0] // of those that it does not divide by
	sum := a.expect(group)
	mean := sum / float64(n)
	for l, q := range a.quotas {
		part := n * q // < 2^50: at most MaxPublishers * MaxRate
		if counts[l] = part / a.rate; part%a.rate != 0 {
			order = append(order, l)
		}
		owed -= counts[l]
		// float64() keeps the compiler from fusing, which would make the
		// decision depend on the processor.
		behind[l] = a.deficit[l] - float64(mean*float64(counts[l]))
	}
	first := a.lacking(order, behind)
	if owed == n { // no broker gets more than one, so who lacks most now does so in its turn
		for _, i := range a.descending(group) {
			a.give(i, first.pop())
		}
		return
	}
	for ; owed > 0; owed-- {
		counts[first.pop()]++
	}
	a.deal(group, counts)
}

// descending returns the publishers, those with the highest rates first and otherwise in
// the order given.
func (a *assignment) descending(publishers []int) []int {
	by := func(x, y int) int { return cmp.Compare(a.rates[y], a.rates[x]) }
	if !slices.IsSortedFunc(publishers, by) {
		publishers = slices.Clone(publishers)
		slices.SortStableFunc(publishers, by)
	}
	return publishers
}

// give places a publisher.
func (a *assignment) give(publisher, broker int) {
	a.where[publisher] = broker
	a.deficit[broker] -= a.rates[publisher]
}

// expect adds to every broker's deficit its proportion of the publishers'
// rates, and returns their sum.
func (a *assignment) expect(publishers []int) (sum float64) {
	for _, i := range publishers {
		sum += a.rates[i]
	}
	for l, q := range a.quotas {
		a.deficit[l] += float64(sum * (float64(q) / float64(a.rate)))
	}
	return sum
}

// deal places the publishers, those with the highest rates first and otherwise
// in the order given, each at the broker that lacks most; where counts is not
// nil, broker l gets exactly counts[l] of them. Requires: they are expected.
//
// Without counts, and starting from no deficit, this leaves every broker's sum
// less than one publisher's rate away from its proportion: a broker that is
// given more than it lacked was the one that lacked most, so none lacked more
// than that publisher's rate. A closer match exists at times and is NP-hard to
// find; it would not matter beside the publishers' own variations.
func (a *assignment) deal(publishers []int, counts []int64) {
	open := a.order[:0]
	for l := range a.quotas {
		if counts == nil || counts[l] > 0 {
			open = append(open, l)
		}
	}
	lacking := a.lacking(open, a.deficit)
	for _, i := range a.descending(publishers) {
		l := lacking[0].broker
		a.give(i, l)
		lacking[0].lacks = a.deficit[l]
		if counts != nil {
			if counts[l]--; counts[l] == 0 {
				lacking.pop()
				continue
			}
		}
		lacking.down(0)
	}
}

// lack is what a broker lacks.
type lack struct {
	lacks  float64
	broker int
}

// before has the one first that lacks most, ties to the lower index.
func (l lack) before(m lack) bool {
	return l.lacks > m.lacks || l.lacks == m.lacks && l.broker < m.broker
}

// lacking is a heap as that in quota.go, but its comparison is no call: that took most of the
// time that a topic of a million publishers is placed in.
type lacking []lack

// lacking has brokers by what they have of it. It is valid until the next one.
func (a *assignment) lacking(brokers []int, of []float64) lacking {
	h := a.heap[:0]
	for _, l := range brokers {
		h = append(h, lack{of[l], l})
	}
	a.heap = h
	for at := len(h)/2 - 1; at >= 0; at-- {
		h.down(at)
	}
	return h
}

// down puts h[at], which may come too late for its place, into the right one.
func (h lacking) down(at int) {
	if at >= len(h) {
		return
	}
	moved := h[at]
	for first := 2*at + 1; first < len(h); first = 2*at + 1 {
		if second := first + 1; second < len(h) && h[second].before(h[first]) {
			first = second
		}
		if !h[first].before(moved) {
			break
		}
		h[at] = h[first]
		at = first
	}
	h[at] = moved
}

// pop removes the first, and returns its broker. Requires: there is one.
func (h *lacking) pop() int {
	all, last := *h, len(*h)-1
	first := all[0].broker
	all[0] = all[last]
	*h = all[:last]
	h.down(0)
	return first
}

// join places those of a group, highest rates first, who are nowhere: where is -1.
// room is what each broker can carry beside those it has, msg/s. Of the brokers that
// lack a publisher's rate it gets one that has too little of the group, if this is one
// of correlation (see split), and of these the one that lacks most. Where none does,
// it gets one with room; and where none has that, the one with most, home if that is
// one of them: there it is over by less than the publisher's rate, as after Place.
func (a *assignment) join(group []int, correlated bool, home []int, room []float64) {
	n, have := int64(len(group)), make([]int64, len(a.quotas))
	var free []int
	for _, i := range group {
		if a.where[i] < 0 {
			free = append(free, i)
		} else {
			have[a.where[i]]++
		}
	}
	slices.SortStableFunc(free, func(x, y int) int { return cmp.Compare(a.rates[y], a.rates[x]) })
	// owed is 1 where l has fewer of the group than its proportion rounded down, 0
	// where it may have one more, else -1.
	owed := func(l int) int {
		if !correlated {
			return 0
		}
		part := n * a.quotas[l]
		if part/a.rate == have[l] && part%a.rate == 0 {
			return -1
		}
		return cmp.Compare(part/a.rate, have[l])
	}
	rate := 0.0
	fit := func(l int) int { return bit(rate <= a.deficit[l]) + bit(rate <= room[l]) }
	better := func(l, m int) bool {
		c := fit(l)
		switch d := c - fit(m); {
		case d != 0:
			return d > 0
		case c == 0:
			return room[l] > room[m]
		case c == 2 && correlated:
			if x, y := owed(l), owed(m); x != y {
				return x > y
			}
		}
		return a.deficit[l] > a.deficit[m]
	}
	first := func(l, m int) bool { return better(l, m) || l < m && !better(m, l) }
	give := func(i, l int) {
		a.give(i, l)
		room[l] -= rate
		have[l]++
	}
	for len(free) > 0 {
		rate = a.rates[free[0]]
		n := 1
		for n < len(free) && a.rates[free[n]] == rate {
			n++
		}
		alike := free[:n]
		free = free[n:]
		if n < manyAlike {
			for _, i := range alike {
				best := home[i]
				for l := range a.quotas {
					if best < 0 || better(l, best) {
						best = l
					}
				}
				give(i, best)
			}
			continue
		}
		// At one rate, a broker that gets one is no better than before, and the others are
		// as they were.
		order := a.order[:len(a.quotas)]
		for l := range order {
			order[l] = l
		}
		h := newHeap(order, first)
		for _, i := range alike {
			best := h.of[0]
			if at := home[i]; at >= 0 && at != best && !better(best, at) {
				give(i, at)
				h = newHeap(order, first)
				continue
			}
			give(i, best)
			h.down(0)
		}
	}
}

// manyAlike is from how many publishers of one rate on a heap is faster than a search.
const manyAlike = 4

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}
