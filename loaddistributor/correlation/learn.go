package correlation

import (
	"cmp"
	"maps"
	"math"
	"math/bits"
	"slices"
	"time"
)

const (
	// minFirings is the minimum number of firings for a comparison.
	minFirings = 8
	// Widths are 2^(4+2w) units for w in 0 .. widths-1. spanWidths is the number of widths
	// that reveals longer common activity.
	widths     = 4
	spanWidths = 8
	reach      = int32(spanWidths) << (4 + 2*(widths-1))
	// together is the minimum share of joint firings beyond chance for a link. locked is
	// the minimum regularity for a link by clocks alone.
	together = 0.2
	locked   = 0.5

	sampled    = 16 // firings per publisher with examined neighbours
	neighbours = 32 // of one firing, on each side
	candidates = 12 // compared with a publisher, beside mates of its group
	mates      = 4
	maxSampled = 8  // members that decide whether a publisher may join
	maxPolled  = 64 // members tried when two clusters may join
	growth     = 8  // members that a group may gain in one learning, if doubling gains fewer
	spreads    = 12 // spreads tried for a group of clocks: 1 unit to 2^11
)

func width(w int) int32 { return 1 << (4 + 2*w) }

// view is the input of a learning: the publishers with enough firings.
type view struct {
	publishers []*publisher
	records    []record
	threshold  float64 // minimum evidence of a link, in nats
	clocks     int     // number of regular publishers

	// busy and firstWindow hold each publisher's windows and its first known window. total and
	// square sum, up to each window, the number of busy publishers and its square.
	busy          []busy
	firstWindow   []int
	total, square []float64
}

// record holds a publisher's firings in units before the latest arrival, ascending.
type record struct {
	times   []int32
	regular [widths]float64
	gap     int32 // median
	// irregular means that the gaps vary at least half as much as random gaps, squared.
	irregular bool
}

// pair is the comparison of two publishers.
type pair struct {
	linked, clocks bool
	share          float64 // of joint firings beyond chance
	evidence       float64 // nats
	firings, joint int
	expected       float64
	width          int
	early, late    float64 // mean lag of b behind a at joint firings, first and second half
}

// Learn finds the groups and returns them as Groups does.
func (l *Learner) Learn() []Group {
	l.learning++
	v := l.view()
	c := &clustering{view: v, learning: l.learning, clusterOf: make([]*cluster, len(v.publishers)), refused: map[uint64]int{}}
	c.run(v.edges())
	return l.label(c)
}

func (l *Learner) view() *view {
	v := &view{}
	type active struct {
		publisher *publisher
		record    record
	}
	var actives []active
	for _, p := range l.publishers {
		if l.now-p.fired > horizon {
			p.n = 0
		}
		if p.n >= minFirings {
			actives = append(actives, active{p, p.record(l.now)})
		}
	}
	// Sorted by behaviour, so names decide only between equals.
	slices.SortFunc(actives, func(a, b active) int {
		return cmp.Or(slices.Compare(a.record.times, b.record.times), cmp.Compare(a.publisher.id, b.publisher.id))
	})
	for _, p := range actives {
		v.publishers, v.records = append(v.publishers, p.publisher), append(v.records, p.record)
		v.clocks += number(p.record.regular[widths-1] >= locked)
	}
	n := float64(len(v.publishers))
	v.threshold = math.Log(max(1, n*(n-1)/2) * (widths + 1) / Significance)
	v.prepareWindows(l.now)
	return v
}

// record returns the record of p. Requires: p has fired within the horizon.
func (p *publisher) record(now int64) record {
	n := min(p.n, Firings)
	times := make([]int32, n)
	age := p.fired - now
	start := 0
	for i := n - 1; i >= 0; i-- {
		times[i] = int32(age)
		slot := p.n - n + i
		if i > 0 {
			age -= int64(p.ring[slot%Firings] - p.ring[(slot-1)%Firings])
		}
		if age < -horizon {
			start = i
			break
		}
	}
	r := record{times: times[start:]}
	gaps := make([]int32, 0, Firings)
	for i := 1; i < len(r.times); i++ {
		gaps = append(gaps, r.times[i]-r.times[i-1])
	}
	for w := range widths {
		equal := 0
		for i := 1; i < len(gaps); i++ {
			for j := max(0, i-3); j < i; j++ {
				if d := gaps[i] - gaps[j]; max(d, -d) <= 2*width(w) {
					equal++
					break
				}
			}
		}
		if len(gaps) > 1 {
			r.regular[w] = float64(equal) / float64(len(gaps)-1)
		}
	}
	slices.Sort(gaps)
	if len(gaps) > 0 {
		r.gap = gaps[len(gaps)/2]
		mean, square := 0.0, 0.0
		for _, g := range gaps {
			mean += float64(g) / float64(len(gaps))
			square += float64(g) * float64(g) / float64(len(gaps))
		}
		r.irregular = square >= 1.5*mean*mean
	}
	return r
}

// rate returns firings per unit.
func (r *record) rate() float64 {
	return float64(len(r.times)) / float64(r.times[len(r.times)-1]-r.times[0]+1)
}

// firingsFrom returns the firings from start on.
func (r *record) firingsFrom(start int32) []int32 {
	i, _ := slices.BinarySearch(r.times, start)
	return r.times[i:]
}

// compare runs the test of the package comment.
func (v *view) compare(i, j int32) (best pair) {
	ra, rb, sign := &v.records[i], &v.records[j], 1.0
	start := max(ra.times[0], rb.times[0])
	a, b := ra.firingsFrom(start), rb.firingsFrom(start)
	if len(a) > len(b) {
		ra, rb, a, b, sign = rb, ra, b, a, -1
	}
	if len(a) < minFirings {
		return pair{}
	}
	var nearest, all [widths*2 + 6]int // by bit length of the distance
	var chained [widths]int            // trials after a joint trial
	var lags [Firings]int32
	previous, low := 31, 0
	for k, t := range a {
		for low < len(b) && b[low] <= t-reach {
			low++
		}
		closest := reach
		lags[k] = reach
		for _, u := range b[low:] {
			if u >= t+reach {
				break
			}
			d := max(u-t, t-u)
			all[bits.Len32(uint32(d))]++
			if d < closest {
				closest, lags[k] = d, u-t
			}
		}
		for w := range widths {
			if previous <= 4+2*w {
				chained[w]++
			}
		}
		if previous = bits.Len32(uint32(closest)); closest < reach {
			nearest[previous]++
		}
	}
	threshold := v.threshold
	if g := v.publishers[i].group; g != 0 && g == v.publishers[j].group {
		threshold /= 2 // a known pair, unlike all other pairs
	}
	n, duration := float64(len(a)), float64(max(a[len(a)-1], b[len(b)-1])-start)
	joint, common, next := 0, 0, 0
	for w := range widths {
		for ; next <= 4+2*w; next++ {
			joint += nearest[next]
		}
		common = all[next] + all[next+1] + all[next+2]
		chance := min(1, max(2*float64(width(w))*float64(len(b))/duration, float64(common)/((spanWidths-1)*n)))
		regular := min(ra.regular[w], rb.regular[w])
		plain := n * chance
		expected := plain + float64(chained[w])*max(0, regular-chance)
		share := (float64(joint) - plain) / float64(len(b))
		if share < together {
			continue
		}
		p := pair{share: share, firings: len(a), joint: joint, expected: expected, width: w}
		p.evidence = chernoff(joint, expected)
		p.linked = p.evidence >= threshold
		if !p.linked && regular >= locked && chernoff(joint, plain) >= threshold {
			p.linked, p.clocks, p.evidence, p.expected = true, true, chernoff(joint, plain), plain
		}
		if p.linked && (!best.linked || best.clocks && !p.clocks || best.clocks == p.clocks && p.evidence > best.evidence) {
			best = p
		}
	}
	if !best.linked {
		return v.windows(i, j, threshold)
	}
	best.early, best.late = offsets(lags[:len(a)], width(best.width), best.joint, sign)
	return best
}

// offsets returns the mean lags of the first and the second half of the joint firings.
func offsets(lags []int32, width int32, joint int, sign float64) (early, late float64) {
	counted := 0
	for _, d := range lags {
		if max(d, -d) >= width {
			continue
		}
		if counted < joint/2 {
			early += float64(d)
		} else {
			late += float64(d)
		}
		counted++
	}
	half := joint / 2
	return sign * early / float64(half), sign * late / float64(joint-half)
}

// chernoff returns -ln of Chernoff's bound on the probability of n or more where fewer
// are expected.
func chernoff(n int, expected float64) float64 {
	x := float64(n)
	if x <= expected {
		return 0
	}
	return x*math.Log(x/expected) - x + expected
}

// edge is a link between two publishers.
type edge struct {
	a, b int32
	pair
}

// edges compares each publisher with the publishers most often near its firings, and with
// some members of its group.
func (v *view) edges() []edge {
	ties := append(v.nearPairs(), v.windowPairs()...)
	byGroup := map[uint64][]int32{}
	for i, p := range v.publishers {
		if p.group != 0 {
			byGroup[p.group] = append(byGroup[p.group], int32(i))
		}
	}
	for i, p := range v.publishers {
		group := byGroup[p.group]
		index, _ := slices.BinarySearch(group, int32(i))
		for k := 1; k <= min(mates, len(group)-1); k++ {
			ties = append(ties, tie(int32(i), group[(index+k)%len(group)]))
		}
	}
	slices.Sort(ties)
	var edges []edge
	for _, t := range slices.Compact(ties) {
		a, b := int32(t>>32), int32(uint32(t))
		if p := v.compare(a, b); p.linked {
			edges = append(edges, edge{a, b, p})
		}
	}
	return edges
}

// tie encodes an unordered pair as a number.
func tie(a, b int32) uint64 { return uint64(min(a, b))<<32 | uint64(max(a, b)) }

// nearPairs returns the pairs worth comparing by firings.
func (v *view) nearPairs() (ties []uint64) {
	events := v.events()
	const publisherMask = 1<<32 - 1
	sampledAt := make([][]int32, len(v.records)) // sampled firings, by index in events
	seen := make([]int32, len(v.records))
	for k, e := range events {
		i := uint32(e & publisherMask)
		n := int32(len(v.records[i].times))
		// order of firings: sampled evenly
		if s := min(n, sampled); seen[i]*s/n != (seen[i]+1)*s/n {
			sampledAt[i] = append(sampledAt[i], int32(k))
		}
		seen[i]++
	}
	times, weight := make([]int32, len(v.records)), make([]int32, len(v.records))
	type scored struct {
		publisher int32
		score     float64
	}
	var found []int32
	var scores []scored
	const wide = 4 + 2*(widths-1)
	const reachTime = int64(1) << wide
	timeOf := func(k int) int64 { return int64(events[k] >> 32) }
	for i := range v.records {
		found = found[:0]
		count := func(k int, offset int64) {
			j := int32(events[k] & publisherMask)
			if j == int32(i) {
				return
			}
			if weight[j] == 0 {
				found = append(found, j)
			}
			times[j]++
			weight[j] += int32(wide + 2 - bits.Len64(uint64(offset)))
		}
		for _, k := range sampledAt[i] {
			t := timeOf(int(k))
			for n := int(k) + 1; n < len(events) && n <= int(k)+neighbours && timeOf(n) < t+reachTime; n++ {
				count(n, timeOf(n)-t)
			}
			for n := int(k) - 1; n >= 0 && n >= int(k)-neighbours && timeOf(n) > t-reachTime; n-- {
				count(n, t-timeOf(n))
			}
		}
		// Frequent publishers are near all others, so only the excess over chance counts.
		scores = scores[:0]
		for _, j := range found {
			if times[j] > 1 {
				usual := 2 * float64(len(sampledAt[i])) * min(1, 2*float64(reachTime)*v.records[j].rate())
				scores = append(scores, scored{j, float64(weight[j]) - usual})
			}
		}
		slices.SortFunc(scores, func(a, b scored) int {
			return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.publisher, b.publisher))
		})
		for _, m := range scores[:min(candidates, len(scores))] {
			ties = append(ties, tie(int32(i), m.publisher))
		}
		for _, j := range found {
			times[j], weight[j] = 0, 0
		}
	}
	return ties
}

// events returns all firings, ordered by time and then by publisher, as time<<32 |
// publisher. Times count from the earliest possible time.
func (v *view) events() []uint64 {
	n := 0
	for i := range v.records {
		n += len(v.records[i].times)
	}
	events := make([]uint64, 0, n)
	for i := range v.records {
		for _, t := range v.records[i].times {
			events = append(events, uint64(uint32(int64(t)+horizon))<<32|uint64(i))
		}
	}
	if n < 1<<16 {
		slices.Sort(events)
		return events
	}
	sorted := make([]uint64, n)
	for digit := 32; digit < 64; digit += 16 { // radix sort: linear
		var first [1<<16 + 1]int
		for _, e := range events {
			first[e>>digit&(1<<16-1)+1]++
		}
		for d := range 1 << 16 {
			first[d+1] += first[d]
		}
		for _, e := range events {
			d := e >> digit & (1<<16 - 1)
			sorted[first[d]] = e
			first[d]++
		}
		events, sorted = sorted, events
	}
	return events
}

// cluster is a group in formation.
type cluster struct {
	number  int32
	members []int32
	label   uint64 // 0: none; in a cluster with a label the oldest members come first
	core    int    // initial members of a cluster with a label
}

type clustering struct {
	view      *view
	learning  uint64
	clusterOf []*cluster
	all       []*cluster // the initial clusters; a cluster without members is gone
	// refused maps a pair of clusters to their joint size when they did not agree. The
	// pair is tried again once its size has grown by half.
	refused map[uint64]int
}

// run joins publishers along the edges, edges inside present groups first.
func (c *clustering) run(edges []edge) {
	for i := range c.view.publishers {
		c.clusterOf[i] = &cluster{number: int32(i), members: []int32{int32(i)}}
		c.all = append(c.all, c.clusterOf[i])
	}
	sameGroup := func(e edge) bool {
		g := c.view.publishers[e.a].group
		return g != 0 && g == c.view.publishers[e.b].group
	}
	slices.SortFunc(edges, func(x, y edge) int {
		if sameGroup(x) != sameGroup(y) {
			if sameGroup(x) {
				return -1
			}
			return 1
		}
		// Shares in steps of 1/16, so noise does not decide; then evidence.
		return cmp.Or(cmp.Compare(int(16*y.share), int(16*x.share)), cmp.Compare(y.evidence, x.evidence), cmp.Compare(x.a, y.a), cmp.Compare(x.b, y.b))
	})
	inside := true
	for _, e := range edges {
		if inside && !sameGroup(e) {
			inside = false
			c.inherit(c.all)
		}
		c.join(c.clusterOf[e.a], c.clusterOf[e.b], e.clocks)
	}
	if inside {
		c.inherit(c.all)
	}
}

// inherit gives each label to the cluster with most of the group's oldest members. A
// cluster with several claims gets the oldest label.
func (c *clustering) inherit(all []*cluster) {
	oldest := map[uint64]uint64{} // by label, the learning in which the oldest member joined
	for _, p := range c.view.publishers {
		if joined, found := oldest[p.group]; !found || p.joined < joined {
			oldest[p.group] = p.joined
		}
	}
	heir := map[uint64]*cluster{}
	votes := map[uint64]int{}
	for _, k := range all {
		k.label = 0
		if len(k.members) < 2 {
			continue
		}
		claims := map[uint64]int{}
		for _, m := range k.members {
			if p := c.view.publishers[m]; p.group != 0 && p.joined == oldest[p.group] {
				claims[p.group]++
				if n := claims[p.group]; n > votes[p.group] {
					heir[p.group], votes[p.group] = k, n
				}
			}
		}
	}
	for _, label := range slices.Sorted(maps.Keys(heir)) {
		if k := heir[label]; k.label == 0 {
			k.label, k.core = label, len(k.members)
			slices.SortStableFunc(k.members, func(a, b int32) int {
				p, q := c.view.publishers[a], c.view.publishers[b]
				return cmp.Or(-cmp.Compare(number(p.group == label), number(q.group == label)), cmp.Compare(p.joined, q.joined))
			})
		}
	}
}

// join moves members of the cluster with the younger label, or without a label, into the
// other cluster, if the rules allow. It moves at most as many members as the other
// cluster may gain in one learning. Clocks are separated later, by offset. Only single
// members join a labelled group of clocks, so no other group of clocks is torn apart.
func (c *clustering) join(a, b *cluster, clocks bool) {
	if b.label != 0 && (a.label == 0 || b.label < a.label) {
		a, b = b, a
	}
	room := len(b.members)
	if a.label != 0 {
		room = min(room, a.core+max(growth, a.core)-len(a.members))
	}
	if a == b || room <= 0 || b.label != 0 && c.mature(a) && c.mature(b) || clocks && a.label != 0 && len(b.members) > 1 {
		return
	}
	clusterPair, size := tie(a.number, b.number), len(a.members)+len(b.members)
	if n, refused := c.refused[clusterPair]; refused && 2*size < 3*n {
		return
	}
	if !c.agree(a, b) {
		c.refused[clusterPair] = size
		return
	}
	for _, m := range b.members[:room] {
		c.clusterOf[m] = a
	}
	a.members = append(a.members, b.members[:room]...)
	b.members = slices.Clone(b.members[room:])
}

// mature reports whether the cluster's oldest member joined at least Mature learnings
// ago.
func (c *clustering) mature(k *cluster) bool {
	oldest := c.learning
	for _, m := range k.members {
		if p := c.view.publishers[m]; p.group == k.label {
			oldest = min(oldest, p.joined)
		}
	}
	return c.learning-oldest >= Mature
}

// agree counts the links of members of both clusters; see the package comment.
func (c *clustering) agree(a, b *cluster) bool {
	half := func(a, b *cluster) bool {
		n, refused := min(maxPolled, len(a.members)), 0
		for s := range n {
			if !c.fits(a.members[s*len(a.members)/n], b) {
				if refused++; refused > n/16 {
					return false
				}
			}
		}
		return true
	}
	return (len(b.members) == 1 || half(a, b)) && (len(a.members) == 1 && len(b.members) > 1 || half(b, a))
}

// fits reports whether i is linked to at least half of the sampled members. In a labelled
// cluster these are the oldest members, which newer members cannot outnumber. In another
// cluster they are spread over it.
func (c *clustering) fits(i int32, k *cluster) bool {
	n := min(maxSampled, len(k.members))
	links := 0
	for s := range n {
		m := s
		if k.label == 0 {
			m = s * len(k.members) / n
		}
		links += number(c.view.compare(i, k.members[m]).linked)
	}
	return 2*links >= n
}

// label turns the clusters into groups and labels the publishers.
func (l *Learner) label(c *clustering) []Group {
	since := map[uint64]uint64{}
	for _, g := range l.groups {
		since[g.number] = g.Since
	}
	var parts []*cluster
	for _, k := range c.all {
		if len(k.members) > 1 {
			for _, members := range c.confirm(k.members) {
				parts = append(parts, &cluster{members: members})
			}
		}
	}
	c.inherit(parts)
	clusterOf := make([]*cluster, len(c.view.publishers))
	for _, k := range parts {
		if k.label == 0 {
			k.label = l.next
			since[k.label] = l.learning
			l.next++
		}
		for _, m := range k.members {
			clusterOf[m] = k
		}
	}
	for i, p := range c.view.publishers {
		switch k := clusterOf[i]; {
		case k != nil && p.group != k.label:
			p.group, p.joined = k.label, l.learning
		case k == nil && p.n >= Settled:
			p.group, p.joined = 0, 0
		}
	}
	l.settle(since)
	c.evidence(l.groups)
	return l.groups
}

// evidence fills in the evidence of each member.
func (c *clustering) evidence(groups []Group) {
	place := make(map[string]int32, len(c.view.publishers))
	for i, p := range c.view.publishers {
		place[p.id] = int32(i)
	}
	for _, g := range groups {
		byAge := slices.Clone(g.Members)
		slices.SortStableFunc(byAge, func(a, b Member) int { return cmp.Compare(a.Joined, b.Joined) })
		for i := range g.Members {
			m, other := &g.Members[i], byAge[0].ID
			if m.ID == other {
				other = byAge[1].ID
			}
			indexA, foundA := place[m.ID]
			indexB, foundB := place[other]
			if foundA && foundB {
				p := c.view.compare(indexA, indexB)
				m.Firings, m.Joint, m.Expected, m.Width = p.firings, p.joint, p.expected, time.Duration(width(p.width))<<shift
			}
		}
	}
}

// confirm splits a cluster into groups. A cluster that is not mainly clocks is one group.
// A cluster of clocks is split into known groups and into sets with offsets closer than
// chance explains.
func (c *clustering) confirm(members []int32) (groups [][]int32) {
	slices.SortStableFunc(members, func(a, b int32) int { // members of groups first
		p, q := c.view.publishers[a], c.view.publishers[b]
		return cmp.Or(cmp.Compare(p.group-1, q.group-1), cmp.Compare(p.joined, q.joined), cmp.Compare(a, b))
	})
	for len(members) > 1 {
		pairs := make([]pair, len(members))
		links, clocks := 0, 0
		for i, m := range members[1:] {
			p := c.view.compare(members[0], m)
			pairs[i+1] = p
			links += number(p.linked)
			clocks += number(p.clocks)
		}
		if 2*clocks < links {
			return append(groups, members)
		}
		pairs[0] = pair{linked: true} // with itself
		for keepGroup := true; ; keepGroup = false {
			close := c.closest(members, pairs, keepGroup)
			if len(close) < 2 && !keepGroup {
				break
			}
			var group []int32
			for _, i := range close {
				group = append(group, members[i])
				pairs[i].linked, pairs[i].clocks = false, true // placed
			}
			if group != nil {
				groups = append(groups, group)
			}
		}
		// A publisher without a group after all its neighbours were seen stays without a
		// group. Continue with the others.
		var rest []int32
		for i, p := range pairs {
			isNear := 2*max(p.early, -p.early, p.late, -p.late) < float64(width(p.width))
			if i > 0 && !(p.linked && isNear) && !(p.clocks && !p.linked) {
				rest = append(rest, members[i])
			}
		}
		members = rest
	}
	return groups
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// closest returns the indices of the clocks whose offsets from the first member are
// improbably close. If keepGroup is true, closest instead returns the clocks within the
// spread of the first member's group, if two members of the group are left.
func (c *clustering) closest(members []int32, pairs []pair, keepGroup bool) []int {
	type clock struct {
		place     int
		low, high float64
	}
	var clocks []clock
	period := int32(math.MaxInt32)
	for i, p := range pairs {
		if p.linked {
			clocks = append(clocks, clock{i, min(p.early, p.late), max(p.early, p.late)})
			period = min(period, c.view.records[members[i]].gap)
		}
	}
	var low, high float64
	inRange := func() (places []int) {
		for _, k := range clocks {
			if k.low >= low && k.high < high {
				places = append(places, k.place)
			}
		}
		return places
	}
	if keepGroup {
		mates, group := 0, c.view.publishers[members[0]].group
		for _, k := range clocks {
			if group != 0 && c.view.publishers[members[k.place]].group == group {
				low, high = min(low, k.low), max(high, k.high+1)
				mates++
			}
		}
		if mates < 2 {
			return nil
		}
		return inRange()
	}
	// Intervals of a width, by their middles: linear for each width.
	middle := func(k clock) float64 { return (k.low + k.high) / 2 }
	slices.SortFunc(clocks, func(a, b clock) int { return cmp.Compare(middle(a), middle(b)) })
	lowest := math.Log(Significance / float64(max(1, c.view.clocks)) / spreads)
	found := false
	var narrow []clock
	for s := range spreads {
		wide := float64(int(1) << s)
		// With a drift within the spread three times as many clocks meet.
		mean := 3 * wide * float64(c.view.clocks) / float64(period)
		narrow = narrow[:0]
		for _, k := range clocks {
			if k.high-k.low < wide {
				narrow = append(narrow, k)
			}
		}
		end := 0
		for i, k := range narrow {
			for end < len(narrow) && middle(narrow[end])-middle(k) < wide {
				end++
			}
			if p := poissonTail(end-i-1, mean); p < lowest {
				lowest, found = p, true
				low, high = middle(k)-1.5*wide, middle(k)+2.5*wide
			}
		}
	}
	if !found {
		return nil
	}
	// low and high surround the densest part; clocks as near to it again belong to it.
	return inRange()
}

// poissonTail bounds the logarithm of the probability of n or more where mean are
// expected.
func poissonTail(n int, mean float64) float64 {
	if float64(n) <= mean {
		return 0
	}
	lg, _ := math.Lgamma(float64(n) + 1)
	return float64(n)*math.Log(mean) - mean - lg - math.Log(1-mean/float64(n+1))
}
