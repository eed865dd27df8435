package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Dump is a catalog as a value, for a store. Load restores an equal catalog from it. Dump
// shares immutable specifications and plans with the catalog.
type Dump struct {
	Version   uint64
	Log       uint64
	Ahead     uint64            // epoch minus version
	Brokers   []BrokerDump      // by id
	Topics    []TopicDump       // by name
	Contracts []string          // topics whose contract the adaptor may still hold; sorted
	Removed   map[string]uint64 // version of each broker's removal
	// Unconfirmed is sorted by topic.
	Unconfirmed []SharesUnconfirmed
}

// BrokerDump is a broker of a Dump. Its allocation follows from the topics.
type BrokerDump struct {
	Broker    Broker
	Leftovers []string // sorted
	Kept      []string // the leftovers of failed creations; sorted
	LeftAt    uint64
}

// TopicDump is a topic of a Dump.
type TopicDump struct {
	Spec, Ordered *Spec
	Key           string
	Phase         State  // Preparing, Active or Deleting
	Uncreated     bool   // the topic has never been active
	Created       uint64 // 0: unknown
	Plan          placement.Plan
	Epoch         uint64
	Prepared      []bool // by quota
	Next          *Next  // nil unless the topic moves
	NextPrepared  []bool
	Retiring      []string  // sorted
	Channels      []Channel // by name
}

// kept returns the leftovers of failed creations, sorted.
func (b *broker) kept() (names []string) {
	for _, name := range sorted(b.leftovers) {
		if b.leftovers[name] {
			names = append(names, name)
		}
	}
	return names
}

// Dump returns the state.
func (c *Catalog) Dump() Dump {
	d := Dump{Version: c.version, Log: c.log, Ahead: c.ahead, Contracts: sorted(c.contracts), Removed: map[string]uint64{}}
	maps.Copy(d.Removed, c.removed)
	for _, name := range sorted(c.unconfirmed) {
		d.Unconfirmed = append(d.Unconfirmed, c.unconfirmed[name])
	}
	for _, b := range c.Brokers() {
		broker := c.brokers[b.ID]
		b.Allocated = 0
		d.Brokers = append(d.Brokers, BrokerDump{Broker: b, Leftovers: sorted(broker.leftovers), Kept: broker.kept(), LeftAt: broker.leftAt})
	}
	for name := range c.names.after("") {
		dump, _ := c.DumpTopic(name)
		d.Topics = append(d.Topics, dump)
	}
	return d
}

// DumpTopic returns one topic; false if there is no such topic.
func (c *Catalog) DumpTopic(name string) (d TopicDump, ok bool) {
	t := c.topics[name]
	if t == nil {
		return d, false
	}
	d = TopicDump{
		Spec: t.spec, Ordered: t.ordered, Key: t.key, Phase: t.phase, Uncreated: t.uncreated, Created: t.created, Plan: t.plan,
		Epoch: t.placement.epoch, Prepared: slices.Clone(t.prepared), Retiring: sorted(t.retiring), Channels: t.channels,
	}
	if t.next != nil {
		d.Next, d.NextPrepared = &t.next.Next, slices.Clone(t.next.prepared)
	}
	return d, true
}

// Load returns the catalog of the dump, or an error if no catalog can have produced d.
func Load(d Dump) (*Catalog, error) {
	c := New()
	c.version, c.log, c.ahead = d.Version, d.Log, d.Ahead
	for _, b := range d.Brokers {
		if b.Broker.ID == "" || c.brokers[b.Broker.ID] != nil {
			return nil, fmt.Errorf("load: broker %q is without a name or appears twice", b.Broker.ID)
		}
		broker := c.addBroker(b.Broker.ID)
		broker.Broker, broker.leftAt = b.Broker, b.LeftAt
		broker.Allocated = 0
		for _, name := range b.Leftovers {
			broker.leftovers[name] = slices.Contains(b.Kept, name)
		}
	}
	for _, dump := range d.Topics {
		if err := c.load(dump); err != nil {
			return nil, err
		}
	}
	maps.Copy(c.removed, d.Removed)
	for _, name := range d.Contracts {
		c.contracts[name] = true
	}
	for _, entry := range d.Unconfirmed {
		if _, err := entry.apply(c); err != nil {
			return nil, fmt.Errorf("load: %w", err)
		}
	}
	return c, nil
}

func (c *Catalog) load(d TopicDump) error {
	if d.Spec == nil || d.Ordered == nil {
		return errors.New("load: a topic without a specification")
	}
	name := d.Spec.Name()
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("load topic %s: %s", name, fmt.Sprintf(format, args...))
	}
	switch {
	case c.topics[name] != nil:
		return wrong("it appears twice")
	case d.Phase != Preparing && d.Phase != Active && d.Phase != Deleting:
		return wrong("state %d", d.Phase)
	case d.Epoch == 0 || d.Epoch > c.epoch():
		return wrong("epoch %d at version %d", d.Epoch, c.version)
	case d.Created > d.Epoch:
		return wrong("created at %d, epoch %d", d.Created, d.Epoch)
	case len(d.Prepared) != len(d.Plan.Quotas):
		return wrong("%d members, %d prepared", len(d.Plan.Quotas), len(d.Prepared))
	case d.Key != "" && c.keys[d.Key] != "":
		return wrong("its key is that of %s too", c.keys[d.Key])
	}
	for i, channel := range d.Channels {
		if channel.Name == "" || channel.Created == 0 || channel.Created > c.version || i > 0 && d.Channels[i-1].Name >= channel.Name {
			return wrong("channel %q, created at %d, at version %d, is not after %q", channel.Name, channel.Created, c.version, d.Channels[max(0, i-1)].Name)
		}
	}
	spread, err := newSpread(d.Spec, d.Plan)
	if err != nil {
		return fmt.Errorf("load topic %s: %w", name, err)
	}
	t := &topic{
		spec: d.Spec, ordered: d.Ordered, key: d.Key, phase: d.Phase, uncreated: d.Uncreated || d.Phase == Preparing, created: d.Created, plan: d.Plan,
		prepared: slices.Clone(d.Prepared), retiring: map[string]bool{}, channels: d.Channels,
	}
	if d.Next != nil {
		if d.Next.Spec == nil || d.Next.Spec.Name() != name || len(d.NextPrepared) != len(d.Next.Plan.Quotas) {
			return wrong("it moves to another topic, or %d members with %d prepared", len(d.Next.Plan.Quotas), len(d.NextPrepared))
		}
		s, err := newSpread(d.Next.Spec, d.Next.Plan)
		if err != nil {
			return fmt.Errorf("load the move of topic %s: %w", name, err)
		}
		t.next = &plannedNext{Next: *d.Next, spread: s, prepared: slices.Clone(d.NextPrepared)}
	}
	for _, id := range d.Retiring {
		t.retiring[id] = true
	}
	t.placement = &Placement{epoch: d.Epoch, spread: spread, paced: d.Spec.Pacing.enabled()}
	for _, id := range t.holders() {
		if c.brokers[id] == nil {
			return wrong("it is on broker %q, which is not known", id)
		}
	}
	t.placement.members = c.brokers.endpoints(d.Plan)
	c.insert(t)
	return nil
}

// epochGap is the lead of a restored topic's epochs over its epochs in the backup. It
// exceeds the number of placement changes possible since the backup.
const epochGap = 1 << 20

func (e TopicRestored) apply(c *Catalog) ([]Effect, error) {
	d := e.TopicDump
	if d.Spec == nil || d.Ordered == nil {
		return nil, errors.New("restore: a topic without a specification")
	}
	name := d.Spec.Name()
	if c.topics[name] != nil {
		return nil, fmt.Errorf("restore topic %s: %w", name, ErrTopicExists)
	}
	if d.Next != nil {
		for _, q := range d.Next.Plan.Quotas {
			if d.Plan.On(q.Broker) < 0 {
				d.Retiring = append(d.Retiring, q.Broker)
			}
		}
		d.Next, d.NextPrepared = nil, nil
	}
	d.Retiring = slices.Compact(slices.Sorted(slices.Values(slices.DeleteFunc(slices.Clone(d.Retiring), func(id string) bool { return d.Plan.On(id) >= 0 }))))
	if d.Epoch > 1<<62 {
		return nil, fmt.Errorf("restore topic %s: epoch %d", name, d.Epoch)
	}
	ahead := c.ahead
	c.ahead = max(c.ahead, d.Epoch+epochGap)
	if c.keys[d.Key] != "" {
		d.Key = ""
	}
	d.Channels = slices.Clone(d.Channels)
	for i := range d.Channels {
		d.Channels[i].Created = c.version // of this log
	}
	d.Phase, d.Uncreated, d.Created, d.Epoch, d.Prepared = Active, false, c.version, c.epoch(), make([]bool, len(d.Plan.Quotas))
	if err := c.load(d); err != nil {
		c.ahead = ahead
		return nil, err
	}
	delete(c.contracts, name)
	c.unconfirmed.markVague(name)
	state, reason := c.brokers.state(c.topics[name])
	return []Effect{PlacementChanged{name}, StateChanged{name, Absent, state, reason}}, nil
}

func (e BrokerRestored) apply(c *Catalog) ([]Effect, error) {
	from := e.Broker
	if from.ID == "" || from.Configured <= 0 || from.Calibrated < 0 {
		return nil, fmt.Errorf("restore broker %q of %d msg/s, calibrated %d", from.ID, from.Configured, from.Calibrated)
	}
	delete(c.removed, from.ID)
	b := c.brokers[from.ID]
	if b == nil {
		b = c.addBroker(from.ID)
		b.Broker, b.leftAt = from, c.version
		b.Connected, b.Allocated, b.Forgotten, b.Strict = false, 0, false, false // values of the other log's adaptor
	}
	before := c.states(b.topics)
	b.Calibrated, b.Draining, b.Forced = cmp.Or(b.Calibrated, from.Calibrated), b.Draining || from.Draining, b.Forced || from.Forced
	b.Mcap = cmp.Or(b.Calibrated, b.Configured)
	for _, name := range e.Leftovers {
		if _, known := b.leftovers[name]; !known && c.topics[name] == nil {
			b.leftovers[name] = slices.Contains(e.Kept, name)
		}
	}
	c.forgetGone()
	return c.changes(before), nil
}
