package catalog

import (
	"fmt"
	"iter"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Snapshot returns, by id, the brokers that can receive a new topic or, if moving is a
// topic's name, this topic: its present reservation counts as free.
func (c *Catalog) Snapshot(moving string) []placement.Broker {
	s := make([]placement.Broker, 0, len(c.byID))
	t := c.topics[moving]
	for _, b := range c.byID {
		if b.Connected && !b.Draining {
			broker := placement.Broker{ID: b.ID, Mcap: b.Mcap, Allocated: b.Allocated}
			if t != nil {
				broker.Allocated -= t.reserved(b.ID)
			}
			s = append(s, broker)
		}
	}
	return s
}

// Topic returns the topic of the given name.
func (c *Catalog) Topic(name string) (Topic, bool) {
	t := c.topics[name]
	if t == nil {
		return Topic{}, false
	}
	return *c.view(t), true
}

func (c *Catalog) view(t *topic) *Topic {
	state, reason := c.brokers.state(t)
	unconfirmed := c.unconfirmed[t.spec.Name()]
	v := &Topic{
		Spec: t.spec, Ordered: t.ordered, Key: t.key, State: state, Reason: reason, Created: t.created,
		Plan: t.plan, Placement: t.placement, Retiring: sorted(t.retiring), Channels: t.channels,
		Unconfirmed: unconfirmed.Shares, Raising: unconfirmed.Raising, Vague: unconfirmed.Vague, Uncreated: t.uncreated,
	}
	if t.next != nil {
		v.Next = &t.next.Next
	}
	return v
}

// Active reports whether the topic is active, Degraded included, and whether the topic is
// known.
func (c *Catalog) Active(name string) (active, found bool) {
	t := c.topics[name]
	return t != nil && t.phase == Active, t != nil
}

// Names returns the sorted topic names after the given name; "": all names. The sequence
// is invalid after the next event.
func (c *Catalog) Names(after string) iter.Seq[string] { return c.names.after(after) }

// Topics returns up to limit topics with names after the given name, by name.
func (c *Catalog) Topics(after string, limit int) []Topic {
	list := make([]Topic, 0, min(limit, len(c.topics)))
	for name := range c.names.after(after) {
		if len(list) == limit {
			break
		}
		t, _ := c.Topic(name)
		list = append(list, t)
	}
	return list
}

// TenantTopics returns the number of a tenant's topics.
func (c *Catalog) TenantTopics(tenant string) (n int) {
	// order: a count
	for _, t := range c.topics {
		if t.spec.Tenant == tenant {
			n++
		}
	}
	return n
}

// TenantRate returns the total rate of a tenant's topics without the topic except, in
// messages per 1000 s.
func (c *Catalog) TenantRate(tenant, except string) (sum int64) {
	// order: a sum
	for name, t := range c.topics {
		if t.spec.Tenant == tenant && name != except {
			rate := t.spec.Demand.RateMilli
			if t.next != nil {
				rate = max(rate, t.next.Spec.Demand.RateMilli)
			}
			sum += rate
		}
	}
	return sum
}

// Len returns the number of topics.
func (c *Catalog) Len() int { return len(c.topics) }

// KeyOf returns the topic created with the idempotency key.
func (c *Catalog) KeyOf(key string) (topic string, ok bool) {
	topic, ok = c.keys[key]
	return topic, ok
}

// Broker returns the broker of the given id.
func (c *Catalog) Broker(id string) (Broker, bool) {
	b := c.brokers[id]
	if b == nil {
		return Broker{}, false
	}
	return b.Broker, true
}

// Removed reports whether the broker was removed and has not joined again.
func (c *Catalog) Removed(id string) bool { return c.removed[id] > 0 }

// Placed returns, by name, the topics that consumers may find on the broker: topics
// placed on the broker, and topics that moved away and may have left messages.
func (c *Catalog) Placed(id string) []string {
	b := c.brokers[id]
	if b == nil {
		return nil
	}
	var names []string
	for _, name := range sorted(b.topics) {
		if c.topics[name].member(id) >= 0 {
			names = append(names, name)
		}
	}
	return slices.Sorted(slices.Values(append(names, c.Retiring(id)...)))
}

// Retiring returns, by name, the topics that moved away from the broker and may have left
// messages.
func (c *Catalog) Retiring(id string) []string {
	if b := c.brokers[id]; b != nil {
		return sorted(b.retiring)
	}
	return nil
}

// Expects reports whether the connected broker must prepare the topic, as a member or as
// a member of the next plan.
func (c *Catalog) Expects(topic, id string) bool {
	b := c.brokers[id]
	return b != nil && b.Connected && b.topics[topic]
}

// NextUnprepared returns the brokers of the topic's next plan that have not prepared the
// topic, in the order of the plan.
func (c *Catalog) NextUnprepared(topic string) []string {
	t := c.topics[topic]
	if t == nil || t.next == nil {
		return nil
	}
	var ids []string
	for i, q := range t.next.Plan.Quotas {
		if !t.next.prepared[i] {
			ids = append(ids, q.Broker)
		}
	}
	return ids
}

// Holds reports whether the broker may hold data of the topic.
func (c *Catalog) Holds(topic, id string) bool {
	b := c.brokers[id]
	return b != nil && (b.topics[topic] || b.retiring[topic])
}

// LeftOn reports whether the broker may hold a removed topic of the given name.
func (c *Catalog) LeftOn(topic, id string) bool {
	b := c.brokers[id]
	if b == nil {
		return false
	}
	_, left := b.leftovers[topic]
	return left
}

// Keeps reports whether the broker may hold messages of a topic of the given name whose
// creation failed. The broker has acknowledged these messages and keeps them.
func (c *Catalog) Keeps(topic, id string) bool {
	b := c.brokers[id]
	return b != nil && b.leftovers[topic]
}

// IsListed reports whether consumers may find the topic on the broker (see Placed), or must
// find it there before publishers do.
func (c *Catalog) IsListed(topic, id string) bool {
	t, b := c.topics[topic], c.brokers[id]
	return t != nil && b != nil && (t.member(id) >= 0 || b.retiring[topic] || t.awaits(id))
}

// awaits reports whether the topic moves to the broker and the broker has prepared it.
func (t *topic) awaits(id string) bool {
	if t.next == nil {
		return false
	}
	i := t.next.Plan.On(id)
	return i >= 0 && t.next.prepared[i]
}

// Empty reports whether the catalog knows of no data on the broker.
func (c *Catalog) Empty(id string) bool {
	b := c.brokers[id]
	return b == nil || len(b.topics)+len(b.retiring)+len(b.leftovers) == 0
}

// Brokers returns all known brokers, by id.
func (c *Catalog) Brokers() []Broker {
	list := make([]Broker, 0, len(c.byID))
	for _, b := range c.byID {
		list = append(list, b.Broker)
	}
	return list
}

// Resolve returns the assignment of the publisher. It returns ErrTopicUnknown,
// ErrPublisherUnknown, ErrNotActive if the topic is not active yet or any more, or
// ErrUnplaced.
func (c *Catalog) Resolve(topic, publisher string) (Assignment, error) {
	t := c.topics[topic]
	if t == nil {
		return Assignment{}, fmt.Errorf("topic %s: %w", topic, ErrTopicUnknown)
	}
	a := t.placement.Of(publisher)
	if a.Unknown {
		return Assignment{}, fmt.Errorf("topic %s, publisher %q: %w", topic, publisher, ErrPublisherUnknown)
	}
	if t.phase != Active {
		return Assignment{}, fmt.Errorf("topic %s is %v: %w", topic, t.phase, ErrNotActive)
	}
	if a.Broker == "" {
		return Assignment{}, fmt.Errorf("topic %s, publisher %q: %w", topic, publisher, ErrUnplaced)
	}
	return a, nil
}

// Work returns the pending requests to a connected broker: first the topics to remove,
// then the active topics to prepare, each by name. A topic in creation or deletion is
// handled by the change itself.
func (c *Catalog) Work(id string) (remove, prepare []string) {
	b := c.brokers[id]
	if b == nil || !b.Connected {
		return nil, nil
	}
	// order: sorted below
	for name := range b.leftovers {
		// A new topic of the same name replaced the leftover, so the topic is not removed.
		if !b.topics[name] && !b.retiring[name] {
			remove = append(remove, name)
		}
	}
	// order: sorted below
	for name := range b.topics {
		t := c.topics[name]
		if i := t.member(id); t.phase == Active && i >= 0 && !t.prepared[i] {
			prepare = append(prepare, name)
		}
	}
	slices.Sort(remove)
	slices.Sort(prepare)
	return remove, prepare
}

// Unconfirmed returns, by broker, the shares that brokers may still use beyond the
// contract of a topic, alive or deleted.
func (c *Catalog) Unconfirmed(topic string) []UnconfirmedShare { return c.unconfirmed[topic].Shares }

// UnconfirmedTopics returns, by name, the topics with unconfirmed shares or raises.
func (c *Catalog) UnconfirmedTopics() []string { return sorted(c.unconfirmed) }

// LeftoverContracts returns, by name, the removed topics whose contract the adaptor may
// still hold.
func (c *Catalog) LeftoverContracts() []string { return sorted(c.contracts) }
