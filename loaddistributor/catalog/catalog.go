package catalog

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// MaxGone bounds the brokers that are remembered although they are away and
// nothing depends on them; beyond it the one that left first is forgotten, of those that
// left at once (Restarted) the first by id.
const MaxGone = 1000

// State of a topic. The wire's PLACING has no counterpart here: a topic exists
// from the moment it is placed.
type State uint8

const (
	// Absent: there is no such topic.
	Absent State = iota
	// Preparing: placed; brokers are creating it and acknowledging shares.
	Preparing
	// Active: publishers may connect.
	Active
	// Degraded: active, but a member is away or not ready, or publishers are not
	// placed.
	Degraded
	// Deleting: its shares are being withdrawn.
	Deleting
)

var stateNames = [...]string{"absent", "preparing", "active", "degraded", "deleting"}

func (s State) String() string { return stateNames[s] }

// Topic is a reader's view of a topic. What it points to is immutable.
type Topic struct {
	Spec    *Spec
	Ordered *Spec // as it was created: what Key stands for
	Key     string
	State   State
	Reason  string // why it is in that state, for people; empty when active
	// Created is the version that the topic came with, so it tells topics of one name
	// apart.
	Created   uint64
	Plan      placement.Plan
	Placement *Placement
	// Next is what a move under way leads to; nil when there is none.
	Next *Next
	// Retiring brokers were members, or were to be, and may still hold messages;
	// by id.
	Retiring []string
	// Unconfirmed is what brokers may still use beyond the contract (SharesUnconfirmed).
	Unconfirmed []UnconfirmedShare
	// Raising, Vague: as of SharesUnconfirmed.
	Raising, Vague bool
	Channels       []Channel // durable ones, by name
}

// Next is the plan of a move that is being prepared. It is immutable.
type Next struct {
	Spec *Spec
	Plan placement.Plan
}

// Holders returns all brokers that may have something of the topic, by id.
func (t *Topic) Holders() []string { return holders(t.Plan, t.Next, t.Retiring) }

// Open reports whether consumers can read the topic.
func (t *Topic) Open() bool { return t.State == Active || t.State == Degraded }

func holders(plan placement.Plan, next *Next, retiring []string) []string {
	ids := slices.Concat(retiring, plan.Brokers())
	if next != nil {
		ids = append(ids, next.Plan.Brokers()...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// Broker is a reader's view of a broker.
type Broker struct {
	ID, Instance            string
	TCPAddress, HTTPAddress string
	Hostname, Version       string
	// Folder is the data folder of the process, Lock as of identity.Place.
	Folder, Lock string
	// Mcap is Calibrated, or Configured where that is 0: what it said hello with.
	Mcap, Configured, Calibrated int64 // msg/s
	Allocated                    int64 // msg/s
	Connected                    bool
	// Forgotten, Strict: as BrokerNoted says.
	Forgotten, Strict bool
	// Draining: nothing new is placed on it, and what it has moves away. Forced:
	// beyond the capacity of the others, too, and what consumers do not take is lost.
	Draining, Forced bool
	// Absorbed is what the last fit learned of it, until it is another broker:
	// with another host, version or mcap. Zero: nothing.
	Absorbed Absorption
}

// Absorption is what a broker got through within Latency: Burst messages at once,
// and Rate beside them; see tuner.Absorption.
type Absorption struct {
	Latency time.Duration
	Rate    int64 // milli-msg/s
	Burst   int64
}

// Catalog is the state. It is not safe for concurrent use: its owner, the
// controller, guards it. Make it with New.
//
// Invariants, checked by check in tests after every event:
//   - allocated of a broker == sum of the quotas that topics have on it, of a
//     topic that moves the greater of the old and the new one;
//   - a plan was committed only if, at that moment, every broker of it was
//     connected and allocated, the plan included, was at most its mcap: so
//     allocated <= mcap, as long as a broker does not come back with less, and
//     none is drained by force;
//   - every publisher of a topic is assigned to exactly one member, but for those
//     that the plan leaves without one;
//   - epochs of placements never repeat and grow with the version;
//   - a refused event changes nothing.
type Catalog struct {
	version uint64            // grows by one with every accepted event
	log     uint64            // see Log
	ahead   uint64            // epochs are versions and this
	topics  map[string]*topic // by name
	names   names             // of topics
	brokers map[string]*broker
	byID    []*broker         // brokers, sorted
	keys    map[string]string // idempotency key -> topic
	// Contracts of removed topics that the adaptor may still hold.
	contracts map[string]bool
	// unconfirmed has what is not confirmed, by topic; see SharesUnconfirmed.open.
	unconfirmed map[string]SharesUnconfirmed
	// removed brokers that have not joined anew, with the version of the removal; of
	// more than MaxGone the first are not known any more.
	removed map[string]uint64
}

type topic struct {
	spec      *Spec
	ordered   *Spec // first
	key       string
	phase     State // Preparing, Active or Deleting; Degraded is derived
	created   uint64
	plan      placement.Plan
	placement *Placement
	prepared  []bool // by member
	next      *next  // nil unless it moves
	retiring  map[string]bool
	channels  []Channel // by name; immutable, a change replaces it
}

// next is where a topic moves to.
type next struct {
	Next
	spread   *spread
	prepared []bool // by quota of the plan
}

type broker struct {
	Broker
	topics    map[string]bool // placed here, or moving here
	retiring  map[string]bool // moved away from here
	leftovers map[string]bool // removed topics it may still hold
	leftAt    uint64          // version of its last BrokerLeft
}

// New returns an empty catalog.
func New() *Catalog {
	return &Catalog{
		topics:    map[string]*topic{},
		brokers:   map[string]*broker{},
		keys:      map[string]string{},
		contracts: map[string]bool{}, unconfirmed: map[string]SharesUnconfirmed{},
		removed: map[string]uint64{},
	}
}

// Version grows with every accepted event.
func (c *Catalog) Version() uint64 { return c.version }

// Log tells this sequence of versions from all others, those of another store or of
// before a backup was taken back; 0: it has no name yet.
func (c *Catalog) Log() uint64 { return c.log }

// Name gives the log that number, which is no event: it is kept with the next dump, and
// one that was lost in a crash is replaced.
func (c *Catalog) Name(log uint64) { c.log = log }

// epoch is that of a placement which is made now.
func (c *Catalog) epoch() uint64 { return c.version + c.ahead }

// Apply makes the event so and returns what follows, in a fixed order, or
// refuses it and changes nothing.
func (c *Catalog) Apply(e Event) ([]Effect, error) {
	c.version++
	effects, err := e.apply(c)
	if err != nil {
		c.version--
	}
	return effects, err
}

// known returns the topic of an event, which does that with it.
func (c *Catalog) known(doing, name string) (*topic, error) {
	t := c.topics[name]
	if t == nil {
		return nil, fmt.Errorf("%s topic %s: %w", doing, name, ErrTopicUnknown)
	}
	return t, nil
}

// knownBroker returns the broker of an event, which does that with it.
func (c *Catalog) knownBroker(doing, id string) (*broker, error) {
	b := c.brokers[id]
	if b == nil {
		return nil, fmt.Errorf("%s broker %q: %w", doing, id, ErrBrokerUnknown)
	}
	return b, nil
}

// one is a set of a topic.
func one(topic string) map[string]bool { return map[string]bool{topic: true} }

func (e BrokerJoined) apply(c *Catalog) ([]Effect, error) {
	if e.ID == "" || e.Mcap <= 0 {
		return nil, fmt.Errorf("broker %q with mcap %d: want a name and a positive mcap", e.ID, e.Mcap)
	}
	delete(c.removed, e.ID)
	b := c.brokers[e.ID]
	if b == nil {
		b = c.addBroker(e.ID)
	}
	before := c.states(b.topics)
	known := b.Broker
	moved := b.TCPAddress != e.TCPAddress || b.HTTPAddress != e.HTTPAddress
	b.Broker = Broker{
		ID: e.ID, Instance: e.Instance, TCPAddress: e.TCPAddress, HTTPAddress: e.HTTPAddress,
		Hostname: e.Hostname, Version: e.Version, Folder: e.Folder, Lock: e.Lock, Allocated: b.Allocated, Connected: true, Draining: b.Draining, Forced: b.Forced,
		Mcap: cmp.Or(b.Calibrated, e.Mcap), Configured: e.Mcap, Calibrated: b.Calibrated, Strict: b.Strict,
	}
	if known.Hostname == e.Hostname && known.Version == e.Version && known.Mcap == b.Mcap {
		b.Absorbed = known.Absorbed
	}
	var effects []Effect
	for _, name := range sorted(b.topics) {
		t := c.topics[name]
		t.setPrepared(e.ID, false)
		if i := t.member(e.ID); moved && i >= 0 {
			members := slices.Clone(t.placement.members)
			members[i] = b.endpoint()
			t.placement = &Placement{epoch: c.epoch(), members: members, spread: t.placement.spread, paced: t.placement.paced}
			effects = append(effects, PlacementChanged{name})
		}
	}
	return append(effects, c.changes(before)...), nil
}

func (e BrokerCalibrated) apply(c *Catalog) ([]Effect, error) {
	b, err := c.knownBroker("capacity of", e.ID)
	if err != nil {
		return nil, err
	}
	if e.Mcap < 0 {
		return nil, fmt.Errorf("capacity of broker %q: %d msg/s is negative", e.ID, e.Mcap)
	}
	before := c.states(b.topics)
	was := b.Mcap
	if b.Calibrated, b.Mcap = e.Mcap, cmp.Or(e.Mcap, b.Configured); b.Mcap != was {
		b.Absorbed = Absorption{}
	}
	return c.changes(before), nil
}

func (e BrokerAbsorbed) apply(c *Catalog) ([]Effect, error) {
	b, err := c.knownBroker("what is absorbed by", e.ID)
	if err != nil {
		return nil, err
	}
	if a := e.Absorption; a.Latency <= 0 || a.Rate <= 0 || a.Burst <= 0 {
		return nil, fmt.Errorf("what broker %q absorbs: %+v, want positive numbers", e.ID, a)
	}
	b.Absorbed = e.Absorption
	return nil, nil
}

func (e BrokerNoted) apply(c *Catalog) ([]Effect, error) {
	b, err := c.knownBroker("note on", e.ID)
	if err != nil {
		return nil, err
	}
	b.Forgotten, b.Strict = e.Forgotten, e.Strict
	if e.Forgotten {
		c.confirm(e.ID)
	}
	return nil, nil
}

func (e SharesUnconfirmed) apply(c *Catalog) ([]Effect, error) {
	for i, s := range e.Shares {
		if s.Broker == "" || i > 0 && e.Shares[i-1].Broker >= s.Broker {
			return nil, fmt.Errorf("unconfirmed shares of topic %s: broker %q is without a name, or out of order", e.Topic, s.Broker)
		}
		if err := s.Share.Validate(); err != nil {
			return nil, fmt.Errorf("unconfirmed share of topic %s on broker %s: %w", e.Topic, s.Broker, err)
		}
	}
	if e.Raising || e.Vague {
		if _, err := c.known("keep what is not confirmed of", e.Topic); err != nil {
			return nil, err
		}
	}
	if c.keepUnconfirmed(e); !e.open() {
		c.forgetGone()
	}
	return nil, nil
}

// open reports whether something is not confirmed.
func (e SharesUnconfirmed) open() bool { return len(e.Shares) > 0 || e.Raising || e.Vague }

func (c *Catalog) keepUnconfirmed(e SharesUnconfirmed) {
	if e.open() {
		c.unconfirmed[e.Topic] = e
	} else {
		delete(c.unconfirmed, e.Topic)
	}
}

// vague notes that brokers may use more of a topic than its contract.
func (c *Catalog) vague(topic string) {
	e := c.unconfirmed[topic]
	e.Topic, e.Vague = topic, true
	c.unconfirmed[topic] = e
}

// confirm notes that a broker uses no share of any topic.
func (c *Catalog) confirm(id string) {
	// order: each topic is changed on its own
	for _, e := range c.unconfirmed {
		e.Shares = slices.DeleteFunc(slices.Clone(e.Shares), func(s UnconfirmedShare) bool { return s.Broker == id })
		c.keepUnconfirmed(e)
	}
}

func (e BrokerRemoved) apply(c *Catalog) ([]Effect, error) {
	b := c.brokers[e.ID]
	switch {
	case b == nil:
		return nil, fmt.Errorf("remove broker %q: %w", e.ID, ErrBrokerUnknown)
	case b.Connected:
		return nil, fmt.Errorf("remove broker %q: %w", e.ID, ErrBrokerConnected)
	case len(b.topics)+len(b.retiring) > 0:
		return nil, fmt.Errorf("remove broker %q: %w: %s", e.ID, ErrBrokerInUse, strings.Join(append(sorted(b.topics), sorted(b.retiring)...), ", "))
	}
	c.confirm(e.ID)
	c.dropBroker(e.ID)
	c.removed[e.ID] = c.version
	if len(c.removed) > MaxGone {
		delete(c.removed, slices.MinFunc(sorted(c.removed), func(a, b string) int { return cmp.Compare(c.removed[a], c.removed[b]) }))
	}
	return nil, nil
}

func (e BrokerLeft) apply(c *Catalog) ([]Effect, error) {
	b := c.brokers[e.ID]
	if b == nil || !b.Connected {
		return nil, fmt.Errorf("broker %q left: %w", e.ID, ErrBrokerUnknown)
	}
	before := c.states(b.topics)
	b.Connected, b.leftAt = false, c.version
	// order: each topic is changed on its own
	for name := range b.topics {
		c.topics[name].setPrepared(e.ID, false)
	}
	c.forgetGone()
	return c.changes(before), nil
}

// forgetGone keeps at most MaxGone brokers that are away and that nothing
// depends on.
func (c *Catalog) forgetGone() {
	uses := map[string]bool{}
	// order: a set
	for _, e := range c.unconfirmed {
		for _, s := range e.Shares {
			uses[s.Broker] = true
		}
	}
	var gone []*broker
	// order: sorted below
	for _, b := range c.brokers {
		if !b.Connected && !uses[b.ID] && len(b.topics)+len(b.retiring)+len(b.leftovers) == 0 {
			gone = append(gone, b)
		}
	}
	if len(gone) <= MaxGone {
		return
	}
	slices.SortFunc(gone, func(a, b *broker) int { return cmp.Or(cmp.Compare(a.leftAt, b.leftAt), cmp.Compare(a.ID, b.ID)) })
	for _, b := range gone[:len(gone)-MaxGone] {
		c.dropBroker(b.ID)
	}
}

func (e TopicPlaced) apply(c *Catalog) ([]Effect, error) {
	name := e.Spec.Name()
	if c.topics[name] != nil {
		return nil, fmt.Errorf("topic %s: %w", name, ErrTopicExists)
	}
	if other := c.keys[e.Key]; e.Key != "" && other != "" {
		return nil, fmt.Errorf("topic %s has the key already: %w", other, ErrKeyReused)
	}
	t := &topic{spec: e.Spec, ordered: e.Spec, key: e.Key, phase: Preparing, plan: e.Plan, retiring: map[string]bool{}}
	if err := c.fits(e.Plan, placement.Plan{}); err != nil {
		return nil, err
	}
	members := c.endpoints(e.Plan)
	t.created = c.version
	for _, name := range e.Spec.Channels {
		t.channels = append(t.channels, Channel{Name: name, Created: c.version})
	}
	slices.SortFunc(t.channels, func(a, b Channel) int { return cmp.Compare(a.Name, b.Name) })
	t.channels = slices.Compact(t.channels)
	t.prepared = make([]bool, len(members))
	t.placement = &Placement{epoch: c.epoch(), members: members, spread: e.spread, paced: e.Spec.Pacing.on()}
	c.insert(t)
	delete(c.contracts, name) // the new contract replaces the old one
	return []Effect{PlacementChanged{name}, StateChanged{name, Absent, Preparing, ""}}, nil
}

// insert makes t known, and reserves what it takes. Requires: its name and key are free,
// its brokers known.
func (c *Catalog) insert(t *topic) {
	name := t.spec.Name()
	c.topics[name] = t
	c.names.insert(name)
	if t.key != "" {
		c.keys[t.key] = name
	}
	for _, id := range t.holders() {
		b := c.brokers[id]
		if t.retiring[id] {
			b.retiring[name] = true
		}
		if t.plan.On(id) >= 0 || t.next != nil && t.next.Plan.On(id) >= 0 {
			b.topics[name] = true
			b.Allocated += t.reserved(id)
		}
	}
}

func (e MemberPrepared) apply(c *Catalog) ([]Effect, error) {
	t := c.topics[e.Topic]
	if t == nil {
		return nil, fmt.Errorf("topic %s prepared: %w", e.Topic, ErrTopicUnknown)
	}
	if b := c.brokers[e.Broker]; b == nil || !b.Connected || !b.topics[e.Topic] {
		return nil, fmt.Errorf("topic %s prepared on %s, which is no member or away: %w", e.Topic, e.Broker, ErrBrokerUnknown)
	}
	before := c.states(one(e.Topic))
	t.setPrepared(e.Broker, true)
	delete(c.brokers[e.Broker].leftovers, e.Topic) // it has been told with this one
	return c.changes(before), nil
}

func (e TopicActivated) apply(c *Catalog) ([]Effect, error) {
	t, err := c.known("activate", e.Topic)
	if err != nil {
		return nil, err
	}
	if t.phase != Preparing {
		return nil, fmt.Errorf("activate topic %s, which is %v: %w", e.Topic, t.phase, ErrTopicState)
	}
	if reason := c.unready(t.plan, t.prepared); reason != "" {
		return nil, &NotReadyError{e.Topic, reason}
	}
	before := c.states(one(e.Topic))
	t.phase = Active
	delete(c.unconfirmed, e.Topic) // the adaptor gives a new contract to none before that
	return c.changes(before), nil
}

// sloJudged changes nothing: verdicts are not state any more, and journals have them.
func (e SLOJudged) apply(c *Catalog) ([]Effect, error) {
	if c.topics[e.Topic] == nil {
		return nil, fmt.Errorf("judge topic %s: %w", e.Topic, ErrTopicUnknown)
	}
	return nil, nil
}

func (e TopicDeleting) apply(c *Catalog) ([]Effect, error) {
	t, err := c.known("delete", e.Topic)
	if err != nil {
		return nil, err
	}
	if t.phase == Deleting {
		return nil, fmt.Errorf("delete topic %s, which is %v: %w", e.Topic, t.phase, ErrTopicState)
	}
	before := c.states(one(e.Topic))
	t.phase = Deleting
	return c.changes(before), nil
}

func (e TopicRemoved) apply(c *Catalog) ([]Effect, error) {
	t, err := c.known("remove", e.Topic)
	if err != nil {
		return nil, err
	}
	for _, id := range e.Left {
		if !slices.Contains(t.holders(), id) {
			return nil, fmt.Errorf("topic %s left on %s, which is no member: %w", e.Topic, id, ErrBrokerUnknown)
		}
	}
	unconfirmed := c.unconfirmed[e.Topic]
	unconfirmed.Raising, unconfirmed.Vague = false, false
	c.keepUnconfirmed(unconfirmed)
	from, _ := c.state(t)
	for _, id := range t.holders() {
		b := c.brokers[id]
		b.Allocated -= t.reserved(id)
		delete(b.topics, e.Topic)
		delete(b.retiring, e.Topic)
		delete(b.leftovers, e.Topic) // this removal covers any earlier one
	}
	for _, id := range e.Left {
		c.brokers[id].leftovers[e.Topic] = true
	}
	// A broker that holds a former topic of the name may tell the adaptor of that, too.
	if e.ContractLeft || slices.ContainsFunc(c.byID, func(b *broker) bool { return b.leftovers[e.Topic] }) {
		c.contracts[e.Topic] = true
	}
	delete(c.topics, e.Topic)
	c.names.remove(e.Topic)
	if t.key != "" {
		delete(c.keys, t.key)
	}
	c.forgetGone()
	return []Effect{PlacementChanged{e.Topic}, StateChanged{e.Topic, from, Absent, ""}}, nil
}

func (e LeftoverRemoved) apply(c *Catalog) ([]Effect, error) {
	b := c.brokers[e.Broker]
	if b == nil {
		return nil, fmt.Errorf("leftover of topic %s on %s: %w", e.Topic, e.Broker, ErrBrokerUnknown)
	}
	delete(b.leftovers, e.Topic)
	return nil, nil
}

func (e LeftoverContractRemoved) apply(c *Catalog) ([]Effect, error) {
	delete(c.contracts, e.Topic)
	return nil, nil
}

// shown is what of a topic's state readers see.
type shown struct {
	state  State
	reason string
}

// states returns what is shown of the named topics, for changes.
func (c *Catalog) states(names map[string]bool) map[string]shown {
	before := make(map[string]shown, len(names))
	// order: from one set into another
	for name := range names {
		s, reason := c.state(c.topics[name])
		before[name] = shown{s, reason}
	}
	return before
}

// changes returns an effect for each topic that is not as before, by name.
func (c *Catalog) changes(before map[string]shown) []Effect {
	var effects []Effect
	for _, name := range slices.Sorted(maps.Keys(before)) {
		s, reason := c.state(c.topics[name])
		if was := before[name]; (was != shown{s, reason}) {
			effects = append(effects, StateChanged{name, was.state, s, reason})
		}
	}
	return effects
}

func (c *Catalog) state(t *topic) (State, string) {
	if t.phase != Active {
		return t.phase, ""
	}
	reasons := c.unready(t.plan, t.prepared)
	if n := t.placement.Unplaced(); n > 0 {
		if reasons != "" {
			reasons += "; "
		}
		reasons += fmt.Sprintf("%d publishers are not placed yet", n)
	}
	if reasons != "" {
		return Degraded, reasons
	}
	return Active, ""
}

// unready says what the members lack, in the plan's order; "" when all are fit.
func (c *Catalog) unready(plan placement.Plan, prepared []bool) string {
	var reasons []string
	for i, q := range plan.Quotas {
		b := c.brokers[q.Broker]
		switch {
		case !b.Connected:
			reasons = append(reasons, fmt.Sprintf("broker %s is gone", b.ID))
		case !prepared[i]:
			reasons = append(reasons, fmt.Sprintf("broker %s has not prepared the topic", b.ID))
		case b.Allocated > b.Mcap:
			reasons = append(reasons, fmt.Sprintf("broker %s carries %d msg/s, less than the %d promised", b.ID, b.Mcap, b.Allocated))
		}
	}
	return strings.Join(reasons, "; ")
}

// addBroker makes a broker known. Requires: it is not.
func (c *Catalog) addBroker(id string) *broker {
	b := &broker{topics: map[string]bool{}, retiring: map[string]bool{}, leftovers: map[string]bool{}}
	b.ID = id
	c.brokers[id] = b
	c.byID = slices.Insert(c.byID, c.position(id), b)
	return b
}

func (c *Catalog) dropBroker(id string) {
	delete(c.brokers, id)
	i := c.position(id)
	c.byID = slices.Delete(c.byID, i, i+1)
}

func (c *Catalog) position(id string) int {
	i, _ := slices.BinarySearchFunc(c.byID, id, func(b *broker, id string) int { return cmp.Compare(b.ID, id) })
	return i
}

func (t *topic) holders() []string {
	var to *Next
	if t.next != nil {
		to = &t.next.Next
	}
	return holders(t.plan, to, sorted(t.retiring))
}

func (t *topic) member(id string) int {
	return slices.IndexFunc(t.placement.members, func(m Endpoint) bool { return m.Broker == id })
}

func (b *broker) endpoint() Endpoint {
	return Endpoint{Broker: b.ID, TCPAddress: b.TCPAddress, HTTPAddress: b.HTTPAddress}
}

func sorted[V any](set map[string]V) []string { return slices.Sorted(maps.Keys(set)) }
