package catalog

import (
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// TopicChanging is the short form of TopicMoving for a small change of a topic with many
// publishers. Publishers that TopicChanging does not name stay as they are when the event
// is applied. TopicChanging uses indices, so it fits only the topic it was made from;
// Based checks this.
type TopicChanging struct {
	Spec *Spec // without Demand.Publishers and Since
	// Plan lists only the new publishers, in its quotas and as unplaced.
	Plan placement.Plan
	// Removed holds indices into the old Demand.Publishers, Added holds indices into the
	// new Demand.Publishers. Both ascend. A changed publisher appears in both.
	Removed, Added []int
	// Publishers are the publishers at Added. Since holds their times, if the topic has
	// times.
	Publishers []placement.Publisher
	Since      []int64
}

// wholeBelow is the minimum number of publishers for the short form. The full record of a
// smaller topic is small enough.
const wholeBelow = 1000

// shortest limits the short form: a change names at most 1/shortest of the publishers.
const shortest = 4

// basis is the state that a change was computed from.
type basis struct {
	change *TopicChanging
	spec   *Spec
	plan   placement.Plan
}

// Change returns the short form of the move, or nil if the move is saved in full.
func (e TopicMoving) Change() *TopicChanging {
	if e.basis == nil {
		return nil
	}
	return e.basis.change
}

// Based returns e. If the topic has changed since the short form was computed, Based
// drops the short form, and e is saved in full.
func (c *Catalog) Based(e TopicMoving) TopicMoving {
	if e.basis == nil {
		return e
	}
	t := c.topics[e.Spec.Name()]
	if t == nil || t.spec != e.basis.spec || len(t.plan.Quotas) == 0 || len(e.basis.plan.Quotas) == 0 || &t.plan.Quotas[0] != &e.basis.plan.Quotas[0] {
		e.basis = nil
	}
	return e
}

// NewTopicChanging is NewTopicMoving with the short form computed against the topic's
// present state, if the short form is shorter.
func NewTopicChanging(from Topic, spec *Spec, plan placement.Plan) (TopicMoving, error) {
	e, err := NewTopicMoving(spec, plan)
	if err != nil {
		return e, err
	}
	if change := difference(from, spec, plan); change != nil {
		e.basis = &basis{change, from.Spec, from.Plan}
	}
	return e, nil
}

// difference returns the short form, or nil if the short form is not much shorter.
func difference(from Topic, spec *Spec, plan placement.Plan) *TopicChanging {
	removed, added, short := Edits(from.Spec, spec)
	if !short {
		return nil
	}
	n := spec.Demand.Count()
	ordered := true
	head, brokers := *spec, plan
	head.Demand.Publishers, head.Since = nil, nil
	e := &TopicChanging{Spec: &head, Plan: brokers, Removed: removed, Added: added}
	for _, i := range added {
		e.Publishers = append(e.Publishers, spec.Demand.Publishers[i])
		if len(spec.Since) > 0 {
			e.Since = append(e.Since, spec.Since[i])
		}
	}
	places := e.carry(from.Spec, from.Placement.spread.member, from.Plan, n)
	named := len(removed) + len(added)
	arriving := func(target []int, place int32) (arrived []int) {
		for _, i := range target {
			if places[i] != place {
				arrived = append(arrived, i)
			}
		}
		named += len(arrived)
		ordered = ordered && slices.IsSorted(target)
		return arrived
	}
	e.Plan.Unplaced = arriving(plan.Unplaced, unplaced)
	e.Plan.Quotas = slices.Clone(plan.Quotas)
	for m := range e.Plan.Quotas {
		e.Plan.Quotas[m].Publishers = arriving(plan.Quotas[m].Publishers, int32(m))
	}
	if !ordered || named > n/shortest {
		return nil
	}
	return e
}

// Edits returns the indices of the publishers only in a and of the publishers only in b.
// If short is true, a change from a to b is saved in the short form, as far as Edits
// knows.
func Edits(a, b *Spec) (removed, added []int, short bool) {
	n := b.Demand.Count()
	if n < wholeBelow || len(a.Demand.Groups) != len(b.Demand.Groups) {
		return nil, nil, false
	}
	removed, added, ordered := edits(a, b)
	return removed, added, ordered && len(removed)+len(added) <= n/shortest
}

// edits returns the indices of the publishers only in a and of the publishers only in b.
// ordered means that the common publishers have the same order in a and b.
func edits(a, b *Spec) (removed, added []int, ordered bool) {
	type publisherState struct {
		placement.Publisher
		since int64
	}
	if (len(a.Since) > 0) != (len(b.Since) > 0) && len(a.Demand.Publishers) > 0 && len(b.Demand.Publishers) > 0 {
		return nil, nil, false
	}
	publisherAt := func(s *Spec, i int) publisherState {
		p := publisherState{Publisher: s.Demand.Publishers[i]}
		if len(s.Since) > 0 {
			p.since = s.Since[i]
		}
		return p
	}
	low, endA, endB := 0, len(a.Demand.Publishers), len(b.Demand.Publishers)
	for low < min(endA, endB) && publisherAt(a, low) == publisherAt(b, low) {
		low++
	}
	for endA > low && endB > low && publisherAt(a, endA-1) == publisherAt(b, endB-1) {
		endA, endB = endA-1, endB-1
	}
	inA, inB := map[publisherState]bool{}, map[publisherState]bool{}
	for i := low; i < endA; i++ {
		inA[publisherAt(a, i)] = true
	}
	for j := low; j < endB; j++ {
		inB[publisherAt(b, j)] = true
	}
	for i, j := low, low; i < endA || j < endB; {
		switch {
		case i < endA && !inB[publisherAt(a, i)]:
			removed = append(removed, i)
			i++
		case j < endB && !inA[publisherAt(b, j)]:
			added = append(added, j)
			j++
		case i < endA && j < endB && publisherAt(a, i) == publisherAt(b, j):
			i, j = i+1, j+1
		default:
			return nil, nil, false
		}
	}
	return removed, added, true
}

// carry returns the place of each of the n publishers of the new plan if no publisher
// moves: a quota of the new plan, unplaced, or unknown. Requires: Removed and Added
// ascend and are in range.
func (e *TopicChanging) carry(before *Spec, member []int32, old placement.Plan, n int) []int32 {
	quotaOf := make([]int32, len(old.Quotas)) // by quota of the old plan
	for m, q := range old.Quotas {
		quotaOf[m] = unknown
		if k := e.Plan.On(q.Broker); k >= 0 {
			quotaOf[m] = int32(k)
		}
	}
	places := slices.Repeat([]int32{unknown}, n)
	keepPlace := func(old, now int) {
		if m := member[old]; m >= 0 {
			places[now] = quotaOf[m]
		} else {
			places[now] = m
		}
	}
	removed, added := e.Removed, e.Added
	now := 0
	for i := range before.Demand.Publishers {
		if len(removed) > 0 && removed[0] == i {
			removed = removed[1:]
			continue
		}
		for len(added) > 0 && added[0] == now {
			added, now = added[1:], now+1
		}
		keepPlace(i, now)
		now++
	}
	now += len(added)
	begin := len(before.Demand.Publishers)
	for g, group := range before.Demand.Groups {
		next := e.Spec.Demand.Groups[g]
		for i := range min(group.Count, next.Count) {
			if group.Name() == next.Name() {
				keepPlace(begin+i, now+i)
			}
		}
		begin, now = begin+group.Count, now+next.Count
	}
	return places
}

// whole returns the full form of the change, computed against t.
func (e TopicChanging) whole(t *topic) (TopicMoving, error) {
	old := t.spec
	invalid := func(problem string) (TopicMoving, error) {
		return TopicMoving{}, &PlanError{Problem: "a change of another topic than this: " + problem}
	}
	publishers := len(old.Demand.Publishers) - len(e.Removed) + len(e.Added)
	hasSince := len(old.Since) > 0 || len(e.Since) > 0
	switch {
	case len(e.Spec.Demand.Groups) != len(old.Demand.Groups):
		return invalid("it has other groups")
	case !inRange(e.Removed, len(old.Demand.Publishers)) || !inRange(e.Added, publishers):
		return invalid("it has other publishers")
	case len(e.Publishers) != len(e.Added) || hasSince && len(e.Since) != len(e.Added):
		return invalid("not all publishers are there")
	}
	spec := *e.Spec
	if len(e.Removed)+len(e.Added) == 0 {
		spec.Demand.Publishers, spec.Since = old.Demand.Publishers, old.Since
	} else {
		spec.Demand.Publishers, spec.Since = splice(old.Demand.Publishers, e.Removed, e.Added, e.Publishers), nil
		if hasSince {
			spec.Since = splice(old.Since, e.Removed, e.Added, e.Since)
		}
	}
	next := &spec
	if spec.Equal(old) {
		next = old // shares memory with old
	} else if err := spec.Demand.Validate(); err != nil {
		return TopicMoving{}, err
	}

	n := spec.Demand.Count()
	places := e.carry(old, t.placement.spread.member, t.plan, n)
	for m, q := range e.Plan.Quotas {
		if !inRange(q.Publishers, n) {
			return invalid("a publisher is none of it")
		}
		for _, i := range q.Publishers {
			places[i] = int32(m)
		}
	}
	if !inRange(e.Plan.Unplaced, n) {
		return invalid("a publisher is none of it")
	}
	for _, i := range e.Plan.Unplaced {
		places[i] = unplaced
	}
	plan := e.Plan
	plan.Unplaced, plan.Quotas = nil, slices.Clone(plan.Quotas)
	counts := make([]int, len(plan.Quotas))
	for _, m := range places {
		if m >= 0 {
			counts[m]++
		}
	}
	for m := range plan.Quotas {
		plan.Quotas[m].Publishers = slices.Grow([]int(nil), counts[m])
	}
	for i, m := range places {
		switch {
		case m >= 0:
			plan.Quotas[m].Publishers = append(plan.Quotas[m].Publishers, i)
		case m == unplaced:
			plan.Unplaced = append(plan.Unplaced, i)
		default:
			return invalid("a publisher has no place")
		}
	}
	return NewTopicMoving(next, plan)
}

func (e TopicChanging) apply(c *Catalog) ([]Effect, error) {
	t, err := c.mustTopic("change", e.Spec.Name())
	if err != nil {
		return nil, err
	}
	moving, err := e.whole(t)
	if err != nil {
		return nil, err
	}
	return moving.apply(c)
}

// splice returns s without the elements at removed and with the elements of more at
// added. Requires: the indices fit.
func splice[E any](s []E, removed, added []int, inserted []E) []E {
	result := make([]E, 0, len(s)-len(removed)+len(added))
	insert := func() {
		for len(added) > 0 && added[0] == len(result) {
			result, added, inserted = append(result, inserted[0]), added[1:], inserted[1:]
		}
	}
	for i, element := range s {
		if len(removed) > 0 && removed[0] == i {
			removed = removed[1:]
			continue
		}
		insert()
		result = append(result, element)
	}
	insert()
	return result
}

// inRange reports whether the indices ascend and are below n.
func inRange(indices []int, n int) bool {
	last := -1
	for _, i := range indices {
		if i <= last || i >= n {
			return false
		}
		last = i
	}
	return true
}
