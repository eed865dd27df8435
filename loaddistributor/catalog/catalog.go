// Package catalog is the state of the control plane: brokers, topics, the broker of each
// publisher, and allocations. It is pure and event-sourced. Only Apply changes the
// catalog, one event at a time. The same events in the same order give the same state, so
// a store needs to keep only the log of events.
//
// The catalog makes no decisions. Plans come from loaddistributor/placement, and the
// committer, loaddistributor/controller, carries out the effects. The catalog has no
// session, clock or wire format. Read event.go next for the events, then Catalog for the
// invariants.
package catalog

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// MaxGone bounds the number of disconnected brokers that nothing depends on. Beyond
// MaxGone the catalog forgets the broker that left first. Among brokers that left at the
// same version (Restarted), the catalog forgets the first by id.
const MaxGone = 1000

// State is the state of a topic. The wire's PLACING has no counterpart here: a topic
// exists from the moment of its placement.
type State uint8

const (
	// Absent: there is no such topic.
	Absent State = iota
	// Preparing: the topic is placed; brokers are creating it and acknowledging shares.
	Preparing
	// Active: publishers may connect.
	Active
	// Degraded: the topic is active, but a member is disconnected or not ready, or
	// publishers have no place.
	Degraded
	// Deleting: the topic's shares are being withdrawn.
	Deleting
)

var stateNames = [...]string{"absent", "preparing", "active", "degraded", "deleting"}

func (s State) String() string { return stateNames[s] }

// Topic is a reader's view of a topic. Its pointers lead to immutable values.
type Topic struct {
	Spec    *Spec
	Ordered *Spec // as created; Key identifies this specification
	Key     string
	State   State
	Reason  string // explains the state to people; empty when active
	// Created is the version of the topic's creation. It distinguishes successive topics
	// of the same name.
	Created   uint64
	Plan      placement.Plan
	Placement *Placement
	// Next is the target of the current move, or nil.
	Next *Next
	// Retiring lists, by id, former members and brokers of an aborted move. They may still
	// hold messages.
	Retiring []string
	// Unconfirmed lists the shares that brokers may still use beyond the contract (see
	// SharesUnconfirmed).
	Unconfirmed []UnconfirmedShare
	// Raising and Vague: see SharesUnconfirmed.
	Raising, Vague bool
	// Uncreated: the topic is being created, or is being deleted because its creation failed.
	// Brokers may have acknowledged messages of the topic.
	Uncreated bool
	Channels  []Channel // durable channels, by name
}

// Next is the plan of a move in preparation. It is immutable.
type Next struct {
	Spec *Spec
	Plan placement.Plan
}

// Holders returns, by id, all brokers that may hold data of the topic.
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
	ID, Instance              string
	TCPAddress, HTTPAddress   string
	MQTTAddress, MQTTSAddress string // see BrokerJoined
	Hostname, Version         string
	// Folder is the data folder of the process. Lock: see identity.Place.
	Folder, Lock string
	// Mcap is Calibrated, or Configured if Calibrated is 0. Configured comes from the
	// broker's hello.
	Mcap, Configured, Calibrated int64 // msg/s
	Allocated                    int64 // msg/s
	Connected                    bool
	// Forgotten and Strict: see BrokerNoted.
	Forgotten, Strict bool
	// Draining: the broker receives no new topics, and its topics move away. Forced: its
	// topics move even beyond the capacity of the other brokers, and messages that
	// consumers do not read are lost.
	Draining, Forced bool
	// Absorbed is the result of the last fit, or zero. The catalog clears it when the
	// broker's host, version or mcap changes.
	Absorbed Absorption
}

// Absorption is a measured broker capacity: Burst messages at once plus a sustained Rate,
// all within Latency. See tuner.Absorption.
type Absorption struct {
	Latency time.Duration
	Rate    int64 // milli-msg/s
	Burst   int64
}

// Catalog is the state of the control plane. It is not safe for concurrent use; the
// controller guards it. Make it with New.
//
// Invariants, checked by check in tests after every event:
//   - The allocated rate of a broker is the sum of its topics' quotas. A topic in a move
//     counts with the larger of its old and new quota.
//   - When a plan was committed, all its brokers were connected, and allocated including
//     the plan was at most mcap. So allocated <= mcap, unless a broker returns with a
//     smaller mcap or a broker is drained by force.
//   - Every publisher of a topic is assigned to exactly one member, except the publishers
//     that the plan leaves unplaced.
//   - Epochs of placements never repeat and grow with the version.
//   - A refused event changes nothing.
type Catalog struct {
	version uint64            // grows by one with every accepted event
	log     uint64            // see Log
	ahead   uint64            // epoch = version + ahead
	topics  map[string]*topic // by name
	names   names             // of topics
	brokers brokers
	byID    []*broker         // brokers, sorted
	keys    map[string]string // idempotency key -> topic
	// contracts holds the removed topics whose contract the adaptor may still hold.
	contracts map[string]bool
	// unconfirmed holds the open events by topic; see SharesUnconfirmed.open.
	unconfirmed unconfirmed
	// removed maps each removed broker to the version of its removal, until the broker
	// joins again. Beyond MaxGone the catalog forgets the earliest removals.
	removed map[string]uint64
}

type topic struct {
	spec      *Spec
	ordered   *Spec // the first spec
	key       string
	phase     State // Preparing, Active or Deleting; Degraded is derived
	uncreated bool  // the topic has never been active
	created   uint64
	plan      placement.Plan
	placement *Placement
	prepared  []bool       // by member
	next      *plannedNext // nil unless the topic moves
	retiring  map[string]bool
	channels  []Channel // by name; immutable, a change replaces it
}

// plannedNext is the target of a topic's move.
type plannedNext struct {
	Next
	spread   *spread
	prepared []bool // by quota of the plan
}

type broker struct {
	Broker
	topics   map[string]bool // placed on this broker, or moving to it
	retiring map[string]bool // moved away from this broker
	// leftovers are removed topics that the broker may still hold. True: the topic was never
	// active, and the broker keeps the topic's messages.
	leftovers map[string]bool
	leftAt    uint64 // version of its last BrokerLeft
}

// New returns an empty catalog.
func New() *Catalog {
	return &Catalog{
		topics:    map[string]*topic{},
		brokers:   brokers{},
		keys:      map[string]string{},
		contracts: map[string]bool{}, unconfirmed: unconfirmed{},
		removed: map[string]uint64{},
	}
}

// Version returns a counter that grows with every accepted event.
func (c *Catalog) Version() uint64 { return c.version }

// Log returns an identifier of this sequence of versions. Another store, or the store
// before a backup was restored, has another identifier. 0: not named yet.
func (c *Catalog) Log() uint64 { return c.log }

// Name sets the log's identifier. Naming is not an event: the next dump saves the
// identifier, and after a crash without a dump a new identifier replaces it.
func (c *Catalog) Name(log uint64) { c.log = log }

// epoch returns the epoch of a placement made now.
func (c *Catalog) epoch() uint64 { return c.version + c.ahead }

// Apply applies the event and returns its effects in a fixed order, or refuses the event
// and changes nothing.
func (c *Catalog) Apply(e Event) ([]Effect, error) {
	c.version++
	effects, err := e.apply(c)
	if err != nil {
		c.version--
	}
	return effects, err
}

// mustTopic returns the topic of an event. The error names the action.
func (c *Catalog) mustTopic(action, name string) (*topic, error) {
	t := c.topics[name]
	if t == nil {
		return nil, fmt.Errorf("%s topic %s: %w", action, name, ErrTopicUnknown)
	}
	return t, nil
}

// brokers holds brokers by ID. It judges plans by the capacity and the state of their brokers.
type brokers map[string]*broker

// must returns the broker of an event. The error names the action.
func (all brokers) must(action, id string) (*broker, error) {
	b := all[id]
	if b == nil {
		return nil, fmt.Errorf("%s broker %q: %w", action, id, ErrBrokerUnknown)
	}
	return b, nil
}

// only returns the set of a single topic.
func only(topic string) map[string]bool { return map[string]bool{topic: true} }

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
	broker, endpoint := b.Broker, b.endpoint()
	b.Broker = Broker{
		ID: e.ID, Instance: e.Instance, TCPAddress: e.TCPAddress, HTTPAddress: e.HTTPAddress, MQTTAddress: e.MQTTAddress, MQTTSAddress: e.MQTTSAddress,
		Hostname: e.Hostname, Version: e.Version, Folder: e.Folder, Lock: e.Lock, Allocated: b.Allocated, Connected: true, Draining: b.Draining, Forced: b.Forced,
		Mcap: cmp.Or(b.Calibrated, e.Mcap), Configured: e.Mcap, Calibrated: b.Calibrated, Strict: b.Strict,
	}
	if broker.Hostname == e.Hostname && broker.Version == e.Version && broker.Mcap == b.Mcap {
		b.Absorbed = broker.Absorbed
	}
	var effects []Effect
	for _, name := range sorted(b.topics) {
		t := c.topics[name]
		t.setPrepared(e.ID, false)
		if i := t.member(e.ID); b.endpoint() != endpoint && i >= 0 {
			members := slices.Clone(t.placement.members)
			members[i] = b.endpoint()
			t.placement = &Placement{epoch: c.epoch(), members: members, spread: t.placement.spread, paced: t.placement.paced}
			effects = append(effects, PlacementChanged{name})
		}
	}
	return append(effects, c.changes(before)...), nil
}

func (e BrokerCalibrated) apply(c *Catalog) ([]Effect, error) {
	b, err := c.brokers.must("capacity of", e.ID)
	if err != nil {
		return nil, err
	}
	if e.Mcap < 0 {
		return nil, fmt.Errorf("capacity of broker %q: %d msg/s is negative", e.ID, e.Mcap)
	}
	before := c.states(b.topics)
	previous := b.Mcap
	if b.Calibrated, b.Mcap = e.Mcap, cmp.Or(e.Mcap, b.Configured); b.Mcap != previous {
		b.Absorbed = Absorption{}
	}
	return c.changes(before), nil
}

func (e BrokerAbsorbed) apply(c *Catalog) ([]Effect, error) {
	b, err := c.brokers.must("what is absorbed by", e.ID)
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
	b, err := c.brokers.must("note on", e.ID)
	if err != nil {
		return nil, err
	}
	b.Forgotten, b.Strict = e.Forgotten, e.Strict
	if e.Forgotten {
		c.unconfirmed.confirm(e.ID)
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
		if _, err := c.mustTopic("keep what is not confirmed of", e.Topic); err != nil {
			return nil, err
		}
	}
	if c.unconfirmed.set(e); !e.open() {
		c.forgetGone()
	}
	return nil, nil
}

// open reports whether anything is unconfirmed.
func (e SharesUnconfirmed) open() bool { return len(e.Shares) > 0 || e.Raising || e.Vague }

// unconfirmed holds, by topic, the shares that brokers may use and that the adaptor has not confirmed.
type unconfirmed map[string]SharesUnconfirmed

// set replaces the entry of the event's topic, or removes an entry that is not open.
func (all unconfirmed) set(e SharesUnconfirmed) {
	if e.open() {
		all[e.Topic] = e
	} else {
		delete(all, e.Topic)
	}
}

// add records that each of the brokers may use a share.
func (all unconfirmed) add(topic string, brokers []string, share tokenbucket.Share) {
	byBroker := map[string]tokenbucket.Share{}
	for _, s := range all[topic].Shares {
		byBroker[s.Broker] = s.Share
	}
	for _, id := range brokers {
		byBroker[id] = byBroker[id].Max(share)
	}
	e := all[topic]
	e.Topic, e.Shares = topic, nil
	for _, id := range sorted(byBroker) {
		e.Shares = append(e.Shares, UnconfirmedShare{id, byBroker[id]})
	}
	all.set(e)
}

// markVague records that brokers may use more of a topic than its contract.
func (all unconfirmed) markVague(topic string) {
	e := all[topic]
	e.Topic, e.Vague = topic, true
	all[topic] = e
}

// confirm records that a broker uses no share of any topic.
func (all unconfirmed) confirm(id string) {
	// order: each topic is changed on its own
	for _, e := range all {
		e.Shares = slices.DeleteFunc(slices.Clone(e.Shares), func(s UnconfirmedShare) bool { return s.Broker == id })
		all.set(e)
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
	c.unconfirmed.confirm(e.ID)
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

// forgetGone keeps at most MaxGone disconnected brokers that nothing depends on.
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
	if owner := c.keys[e.Key]; e.Key != "" && owner != "" {
		return nil, fmt.Errorf("topic %s has the key already: %w", owner, ErrKeyReused)
	}
	t := &topic{spec: e.Spec, ordered: e.Spec, key: e.Key, phase: Preparing, uncreated: true, plan: e.Plan, retiring: map[string]bool{}}
	if err := c.brokers.checkRoom(e.Plan, placement.Plan{}); err != nil {
		return nil, err
	}
	members := c.brokers.endpoints(e.Plan)
	t.created = c.version
	for _, name := range e.Spec.Channels {
		t.channels = append(t.channels, Channel{Name: name, Created: c.version})
	}
	slices.SortFunc(t.channels, func(a, b Channel) int { return cmp.Compare(a.Name, b.Name) })
	t.channels = slices.Compact(t.channels)
	t.prepared = make([]bool, len(members))
	t.placement = &Placement{epoch: c.epoch(), members: members, spread: e.spread, paced: e.Spec.Pacing.enabled()}
	c.insert(t)
	delete(c.contracts, name) // the new contract replaces the old one
	return []Effect{PlacementChanged{name}, StateChanged{name, Absent, Preparing, ""}}, nil
}

// checkRoom returns an error if the plan does not fit the brokers. The quotas of the old plan
// count as free for this topic. A plan may exceed the free capacity if it leaves a broker
// that is drained by force.
func (all brokers) checkRoom(plan, old placement.Plan) error {
	forced := slices.ContainsFunc(old.Quotas, func(q placement.Quota) bool {
		return all[q.Broker].Forced && plan.On(q.Broker) < 0
	})
	planned := map[string]bool{}
	for _, q := range plan.Quotas {
		b := all[q.Broker]
		increase := q.Rate - rateOn(old, q.Broker)
		switch {
		case b == nil || !b.Connected:
			return &PlanError{q.Broker, "it is not connected"}
		case planned[q.Broker]:
			return &PlanError{q.Broker, "it has two quotas"}
		case q.Rate < 0:
			return &PlanError{q.Broker, fmt.Sprintf("a quota of %d msg/s", q.Rate)}
		case increase <= 0:
		case b.Draining:
			return &PlanError{q.Broker, "it is draining"}
		case increase > b.Mcap-b.Allocated && !forced: // no overflow: all are >= 0
			return &PlanError{q.Broker, fmt.Sprintf("%d msg/s on top of %d, with mcap %d", increase, b.Allocated, b.Mcap)}
		}
		planned[q.Broker] = true
	}
	return nil
}

func (all brokers) endpoints(plan placement.Plan) []Endpoint {
	var members []Endpoint
	for _, q := range plan.Quotas {
		members = append(members, all[q.Broker].endpoint())
	}
	return members
}

// insert adds t to the indexes and reserves its quotas. Requires: the topic's name and
// key are free, and its brokers are known.
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

// reserved returns the topic's reservation on a broker, in msg/s.
func (t *topic) reserved(id string) int64 {
	rate := rateOn(t.plan, id)
	if t.next != nil {
		rate = max(rate, rateOn(t.next.Plan, id))
	}
	return rate
}

func rateOn(plan placement.Plan, id string) int64 {
	if i := plan.On(id); i >= 0 {
		return plan.Quotas[i].Rate
	}
	return 0
}

func (e MemberPrepared) apply(c *Catalog) ([]Effect, error) {
	t := c.topics[e.Topic]
	if t == nil {
		return nil, fmt.Errorf("topic %s prepared: %w", e.Topic, ErrTopicUnknown)
	}
	if b := c.brokers[e.Broker]; b == nil || !b.Connected || !b.topics[e.Topic] {
		return nil, fmt.Errorf("topic %s prepared on %s, which is not a member or is disconnected: %w", e.Topic, e.Broker, ErrBrokerUnknown)
	}
	before := c.states(only(e.Topic))
	t.setPrepared(e.Broker, true)
	delete(c.brokers[e.Broker].leftovers, e.Topic) // the new topic replaced the leftover
	return c.changes(before), nil
}

// setPrepared sets the broker's prepared flag in the present plan and in the next plan.
func (t *topic) setPrepared(id string, prepared bool) {
	if i := t.member(id); i >= 0 {
		t.prepared[i] = prepared
	}
	if t.next != nil {
		if i := t.next.Plan.On(id); i >= 0 {
			t.next.prepared[i] = prepared
		}
	}
}

func (e TopicActivated) apply(c *Catalog) ([]Effect, error) {
	t, err := c.mustTopic("activate", e.Topic)
	if err != nil {
		return nil, err
	}
	if t.phase != Preparing {
		return nil, fmt.Errorf("activate topic %s, which is %v: %w", e.Topic, t.phase, ErrTopicState)
	}
	if reason := c.brokers.unready(t.plan, t.prepared); reason != "" {
		return nil, &NotReadyError{e.Topic, reason}
	}
	before := c.states(only(e.Topic))
	t.phase, t.uncreated = Active, false
	delete(c.unconfirmed, e.Topic) // the adaptor grants a new contract only after the old shares have ended
	return c.changes(before), nil
}

// SLOJudged exists only because old journals contain it. Verdicts are no longer state.
func (e SLOJudged) apply(c *Catalog) ([]Effect, error) {
	if c.topics[e.Topic] == nil {
		return nil, fmt.Errorf("judge topic %s: %w", e.Topic, ErrTopicUnknown)
	}
	return nil, nil
}

func (e TopicDeleting) apply(c *Catalog) ([]Effect, error) {
	t, err := c.mustTopic("delete", e.Topic)
	if err != nil {
		return nil, err
	}
	if t.phase == Deleting {
		return nil, fmt.Errorf("delete topic %s, which is %v: %w", e.Topic, t.phase, ErrTopicState)
	}
	before := c.states(only(e.Topic))
	t.phase = Deleting
	return c.changes(before), nil
}

func (e TopicRemoved) apply(c *Catalog) ([]Effect, error) {
	t, err := c.mustTopic("remove", e.Topic)
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
	c.unconfirmed.set(unconfirmed)
	from, _ := c.brokers.state(t)
	for _, id := range t.holders() {
		b := c.brokers[id]
		b.Allocated -= t.reserved(id)
		delete(b.topics, e.Topic)
		delete(b.retiring, e.Topic)
		kept, left := b.leftovers[e.Topic]
		if delete(b.leftovers, e.Topic); slices.Contains(e.Left, id) { // this removal covers any earlier one
			// A broker that has not prepared the topic may still have an earlier topic, which was deleted.
			b.leftovers[e.Topic] = t.uncreated && (kept || !left)
		}
	}
	// A broker with an earlier topic of this name may also report its contract to the
	// adaptor. The deletion of a topic includes messages of earlier creations that failed.
	for _, b := range c.byID {
		if kept, left := b.leftovers[e.Topic]; left {
			b.leftovers[e.Topic] = kept && t.uncreated
			e.ContractLeft = true
		}
	}
	if e.ContractLeft {
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

// displayed is the part of a topic's state that readers see.
type displayed struct {
	state  State
	reason string
}

// states returns the shown state of the named topics, as input of changes.
func (c *Catalog) states(names map[string]bool) map[string]displayed {
	before := make(map[string]displayed, len(names))
	// order: from one set into another
	for name := range names {
		s, reason := c.brokers.state(c.topics[name])
		before[name] = displayed{s, reason}
	}
	return before
}

// changes returns an effect for each topic whose shown state differs from before, by
// name.
func (c *Catalog) changes(before map[string]displayed) []Effect {
	var effects []Effect
	for _, name := range slices.Sorted(maps.Keys(before)) {
		s, reason := c.brokers.state(c.topics[name])
		if previous := before[name]; (previous != displayed{s, reason}) {
			effects = append(effects, StateChanged{name, previous.state, s, reason})
		}
	}
	return effects
}

func (all brokers) state(t *topic) (State, string) {
	if t.phase != Active {
		return t.phase, ""
	}
	reasons := all.unready(t.plan, t.prepared)
	if n := t.placement.Unplaced(); n > 0 {
		if reasons != "" {
			reasons += "; "
		}
		reasons += plural.Count(n, "publisher") + " not placed yet"
	}
	if reasons != "" {
		return Degraded, reasons
	}
	return Active, ""
}

// unready explains which members are unfit, in the order of the plan; "" if all are fit.
func (all brokers) unready(plan placement.Plan, prepared []bool) string {
	var reasons []string
	for i, q := range plan.Quotas {
		b := all[q.Broker]
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

// addBroker adds a broker. Requires: the catalog has no broker of this id.
func (c *Catalog) addBroker(id string) *broker {
	b := &broker{topics: map[string]bool{}, retiring: map[string]bool{}, leftovers: map[string]bool{}}
	b.ID = id
	c.brokers[id] = b
	c.byID = slices.Insert(c.byID, brokerIndex(c.byID, id), b)
	return b
}

func (c *Catalog) dropBroker(id string) {
	delete(c.brokers, id)
	i := brokerIndex(c.byID, id)
	c.byID = slices.Delete(c.byID, i, i+1)
}

// brokerIndex returns the index of a broker, or of the place where the broker belongs.
func brokerIndex(sorted []*broker, id string) int {
	i, _ := slices.BinarySearchFunc(sorted, id, func(b *broker, id string) int { return cmp.Compare(b.ID, id) })
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
	return Endpoint{Broker: b.ID, TCPAddress: b.TCPAddress, HTTPAddress: b.HTTPAddress, MQTTAddress: b.MQTTAddress, MQTTSAddress: b.MQTTSAddress}
}

func sorted[V any](set map[string]V) []string { return slices.Sorted(maps.Keys(set)) }
