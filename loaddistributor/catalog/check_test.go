package catalog

import (
	"cmp"
	"fmt"
	"slices"
)

// check panics when an invariant is broken.
func (c *Catalog) check() {
	allocated := map[string]int64{}
	keys := 0
	for name, t := range c.topics {
		if t.spec.Name() != name || t.placement.epoch > c.epoch() || t.placement.epoch == 0 {
			panic(fmt.Sprintf("topic %s: spec of %s, epoch %d at version %d", name, t.spec.Name(), t.placement.epoch, c.version))
		}
		if t.key != "" {
			keys++
			if c.keys[t.key] != name {
				panic(fmt.Sprintf("topic %s has key %q, which belongs to %q", name, t.key, c.keys[t.key]))
			}
		}
		if len(t.prepared) != len(t.plan.Quotas) || len(t.placement.members) != len(t.plan.Quotas) {
			panic(fmt.Sprintf("topic %s: %d prepared, %d members, %d quotas", name, len(t.prepared), len(t.placement.members), len(t.plan.Quotas)))
		}
		for i, q := range t.plan.Quotas {
			b := c.brokers[q.Broker]
			if b == nil || !b.topics[name] || t.placement.members[i] != b.endpoint() {
				panic(fmt.Sprintf("topic %s: member %d is %+v, the broker %+v", name, i, t.placement.members[i], b))
			}
			if t.prepared[i] && !b.Connected {
				panic(fmt.Sprintf("topic %s is prepared on %s, which is gone", name, q.Broker))
			}
		}
		for i, one := range t.channels {
			if one.Name == "" || one.Created == 0 || one.Created > c.version || i > 0 && t.channels[i-1].Name >= one.Name {
				panic(fmt.Sprintf("topic %s at version %d: channels %v", name, c.version, t.channels))
			}
		}
		for _, id := range t.holders() {
			allocated[id] += t.reserved(id)
			b := c.brokers[id]
			moving := t.next != nil && t.next.Plan.On(id) >= 0
			if b.retiring[name] != t.retiring[id] || b.topics[name] != (t.member(id) >= 0 || moving) {
				panic(fmt.Sprintf("topic %s and broker %s disagree: %+v, %+v", name, id, c.view(t), b))
			}
			if moving && t.next.prepared[t.next.Plan.On(id)] && !b.Connected {
				panic(fmt.Sprintf("topic %s is prepared on %s, which is gone", name, id))
			}
			if t.retiring[id] && t.member(id) >= 0 {
				panic(fmt.Sprintf("topic %s retires from its member %s", name, id))
			}
		}
		seen := map[string]bool{}
		for i := range t.placement.Len() {
			a := t.placement.At(i)
			if j, ok := t.placement.Index(a.Publisher); !ok || j != i || seen[a.Publisher] {
				panic(fmt.Sprintf("topic %s: publisher %q is not placed exactly once", name, a.Publisher))
			}
			seen[a.Publisher] = true
			if at := slices.Contains(t.plan.Unplaced, i); at != (a.Broker == "") {
				panic(fmt.Sprintf("topic %s: publisher %q is at %q, left out: %v", name, a.Publisher, a.Broker, at))
			}
		}
	}
	if keys != len(c.keys) {
		panic(fmt.Sprintf("%d topics have keys, %d keys are known", keys, len(c.keys)))
	}
	if names := slices.Collect(c.names.after("")); !slices.IsSorted(names) || len(names) != len(c.topics) {
		panic(fmt.Sprintf("names %v for %d topics", names, len(c.topics)))
	}
	if !slices.IsSortedFunc(c.byID, func(a, b *broker) int { return cmp.Compare(a.ID, b.ID) }) || len(c.byID) != len(c.brokers) {
		panic(fmt.Sprintf("%d brokers, by id %v", len(c.brokers), c.byID))
	}
	for name, e := range c.unconfirmed {
		for _, s := range e.Shares {
			if b := c.brokers[s.Broker]; b != nil && b.Forgotten {
				panic(fmt.Sprintf("topic %s: broker %s holds nothing, and %+v is unconfirmed", name, s.Broker, s.Share))
			}
		}
		if !e.open() || e.Topic != name {
			panic(fmt.Sprintf("topic %s: nothing of it is unconfirmed in %+v", name, e))
		}
		if t := c.topics[name]; t == nil && (e.Raising || e.Vague) {
			panic(fmt.Sprintf("topic %s is gone, and its contract is raised", name))
		}
	}
	for id, b := range c.brokers {
		if b.Allocated != allocated[id] || b.ID != id {
			panic(fmt.Sprintf("broker %s: allocated %d, its quotas sum to %d", id, b.Allocated, allocated[id]))
		}
		if b.Mcap != cmp.Or(b.Calibrated, b.Configured) || b.Configured <= 0 || b.Calibrated < 0 {
			panic(fmt.Sprintf("broker %s: mcap %d of %d configured, %d calibrated", id, b.Mcap, b.Configured, b.Calibrated))
		}
		for name := range b.topics {
			if t := c.topics[name]; t == nil || !slices.Contains(t.holders(), id) {
				panic(fmt.Sprintf("broker %s believes it has topic %s", id, name))
			}
		}
	}
}
