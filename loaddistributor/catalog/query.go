package catalog

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Snapshot returns the brokers that something may be placed on, by id.
func (c *Catalog) Snapshot() []placement.Broker {
	var s []placement.Broker
	// order: sorted below
	for _, b := range c.brokers {
		if b.Connected {
			s = append(s, placement.Broker{ID: b.ID, Mcap: b.Mcap, Allocated: b.Allocated})
		}
	}
	slices.SortFunc(s, func(a, b placement.Broker) int { return cmp.Compare(a.ID, b.ID) })
	return s
}

// Topic returns the topic of that name.
func (c *Catalog) Topic(name string) (Topic, bool) {
	t := c.topics[name]
	if t == nil {
		return Topic{}, false
	}
	state, reason := c.state(t)
	return Topic{
		Spec: t.spec, Key: t.key, State: state, Reason: reason, Missed: t.missed, Plan: t.plan, Placement: t.placement,
	}, true
}

// Topics returns up to limit topics whose names come after the given one, by
// name.
func (c *Catalog) Topics(after string, limit int) []Topic {
	i, found := slices.BinarySearch(c.names, after)
	if found {
		i++
	}
	names := c.names[i:]
	if len(names) > limit {
		names = names[:limit]
	}
	list := make([]Topic, 0, len(names))
	for _, name := range names {
		t, _ := c.Topic(name)
		list = append(list, t)
	}
	return list
}

// Len returns the number of topics.
func (c *Catalog) Len() int { return len(c.topics) }

// KeyOf returns the topic that was created with the idempotency key.
func (c *Catalog) KeyOf(key string) (topic string, ok bool) {
	topic, ok = c.keys[key]
	return topic, ok
}

// Broker returns the broker of that id.
func (c *Catalog) Broker(id string) (Broker, bool) {
	b := c.brokers[id]
	if b == nil {
		return Broker{}, false
	}
	return b.Broker, true
}

// Placed returns the topics that are placed on the broker, by name.
func (c *Catalog) Placed(id string) []string {
	b := c.brokers[id]
	if b == nil {
		return nil
	}
	return sorted(b.topics)
}

// Brokers returns all known brokers, by id.
func (c *Catalog) Brokers() []Broker {
	list := make([]Broker, 0, len(c.brokers))
	// order: sorted below
	for _, b := range c.brokers {
		list = append(list, b.Broker)
	}
	slices.SortFunc(list, func(a, b Broker) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// Resolve returns where the publisher belongs: ErrTopicUnknown,
// ErrPublisherUnknown, or ErrNotActive when it is not to connect yet, or no
// more.
func (c *Catalog) Resolve(topic, publisher string) (Assignment, error) {
	t := c.topics[topic]
	if t == nil {
		return Assignment{}, fmt.Errorf("topic %s: %w", topic, ErrTopicUnknown)
	}
	i, ok := t.placement.Index(publisher)
	if !ok {
		return Assignment{}, fmt.Errorf("topic %s, publisher %q: %w", topic, publisher, ErrPublisherUnknown)
	}
	if t.phase != Active {
		return Assignment{}, fmt.Errorf("topic %s is %v: %w", topic, t.phase, ErrNotActive)
	}
	return t.placement.At(i), nil
}

// Work returns what a connected broker is to be told for topics that are
// established: those to remove, which come first, and those to prepare, each
// by name. Topics that are being created or deleted are their creator's care.
func (c *Catalog) Work(id string) (remove, prepare []string) {
	b := c.brokers[id]
	if b == nil || !b.Connected {
		return nil, nil
	}
	for _, name := range sorted(b.leftovers) {
		// A topic created again under the name is not to be removed: it took the
		// leftover's place.
		if !b.topics[name] {
			remove = append(remove, name)
		}
	}
	for _, name := range sorted(b.topics) {
		if t := c.topics[name]; t.phase == Active && !t.prepared[t.member(id)] {
			prepare = append(prepare, name)
		}
	}
	return remove, prepare
}

// LeftoverContracts returns the removed topics whose contract the adaptor may
// still hold, by name.
func (c *Catalog) LeftoverContracts() []string { return sorted(c.contracts) }
