// Package adaptor makes the tbadaptor's decisions: which contracts exist, when the rule of a contract
// runs, and which part of its result is granted. The package is pure: events go in, grants come out.
// tbadaptor/share has the rules. tbadaptor/ledger decides who may have which share and when.
// tbadaptor/loop serves a Machine to brokers; tools/sim runs it in virtual time.
package adaptor

import (
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Config configures a Machine.
type Config struct {
	Leases ledger.Leases
	// Flex is the part of shares that ends with the leases. Topics with the static rule have no
	// flexible part.
	Flex ledger.Permille
	// Rules use the loads of the last Window.
	Window time.Duration
}

// Machine is a ledger with topics that are tuned. Machine is a plain value with one owner. The owner
// sets and removes contracts, and begins sessions of brokers, through Machine's methods. The owner
// passes all other reports of brokers to Ledger.
type Machine struct {
	Ledger *ledger.Ledger
	cfg    Config               // set once
	topics map[string]*Contract // topics in the ledger
	// placed holds the topics of each broker, by name. adaptive holds the topics whose rule runs.
	// moving holds the topics whose publishers have just moved: a few of 100,000, so a frequent
	// check of these topics is cheap.
	placed   map[string]map[string]bool
	adaptive map[string]bool
	moving   map[string]bool
}

// Mode is how a contract is put in force.
type Mode uint8

const (
	// Create sets the contract of a new topic, and waits until each member has acknowledged its share.
	Create Mode = iota
	// Update gives a topic another contract or other members. Update does not wait.
	Update
	// Adopt restores a contract whose shares brokers hold already (Restore). Adopt does not wait.
	Adopt
)

// Contract is a topic's contract with its members.
type Contract struct {
	Topic  string
	Total  tokenbucket.Share
	Rule   string         // name in share.Rules
	Placed []share.Placed // members; their quotas are the first shares
	// Awaited lists brokers that are not members, but must report before the contract is adopted.
	// Strict lists the members, awaited brokers and holders with the strict lease policy.
	Awaited, Strict []string
	// Holders lists brokers that may use the contract of a removed topic of this name. Create waits
	// for the holders, because this adaptor may have started after the removal.
	Holders []string
	// Former: see ledger.Terms.
	Former tokenbucket.Share

	tuner *share.Tuner
	// settled: every member has had its first share, so the rule may move shares. Before, the rule
	// would give away the shares of members that are still joining.
	settled bool
}

// New returns a machine without brokers and contracts. Requires: epoch as for ledger.New.
func New(epoch uint64, cfg Config) *Machine {
	return &Machine{Ledger: ledger.New(epoch, cfg.Leases), cfg: cfg, topics: map[string]*Contract{},
		placed: map[string]map[string]bool{}, adaptive: map[string]bool{}, moving: map[string]bool{}}
}

// Contract returns the topic's contract, or nil.
func (m *Machine) Contract(topic string) *Contract { return m.topics[topic] }

func (m *Machine) terms(c *Contract) ledger.Terms {
	terms := ledger.Terms{Contract: c.Total, Flex: m.cfg.Flex, Former: c.Former}
	if c.Rule == share.Static {
		terms.Flex = 0 // a static rule moves nothing
	}
	return terms
}

func (c *Contract) quotas() (first []share.Assigned) {
	for _, p := range c.Placed {
		first = append(first, share.Assigned{Broker: p.Broker, Share: p.Quota})
	}
	return first
}

// place gives c the tuner of the topic's previous contract, with its record of the traffic.
func (m *Machine) place(now mono.Time, c *Contract) {
	var old *share.Tuner
	if current := m.topics[c.Topic]; current != nil {
		old = current.tuner
	}
	c.tuner = old.Place(now, c.Rule, m.cfg.Window, c.Placed)
}

// replace makes c the topic's contract; nil removes the contract.
func (m *Machine) replace(topic string, c *Contract) {
	if old := m.topics[topic]; old != nil {
		for _, p := range old.Placed {
			if delete(m.placed[p.Broker], topic); len(m.placed[p.Broker]) == 0 {
				delete(m.placed, p.Broker)
			}
		}
		delete(m.topics, topic)
	}
	delete(m.adaptive, topic)
	delete(m.moving, topic)
	if c == nil {
		return
	}
	m.topics[topic] = c
	if c.Rule != share.Static {
		m.adaptive[topic] = true
	}
	for _, p := range c.Placed {
		if p.Retiring {
			m.moving[topic] = true
		}
		if m.placed[p.Broker] == nil {
			m.placed[p.Broker] = map[string]bool{}
		}
		m.placed[p.Broker][topic] = true
	}
}

// Set puts a new contract in force. If the topic already has an equal contract, Set returns the old
// contract. Errors: see Ledger.SetContract.
func (m *Machine) Set(now mono.Time, c *Contract) (inForce *Contract, grants []ledger.Grant, err error) {
	if grants, err = m.Ledger.SetContract(c.Topic, m.terms(c), c.quotas()); err != nil {
		return nil, nil, err
	}
	if current := m.topics[c.Topic]; current != nil && current.Rule == c.Rule && slices.Equal(current.quotas(), c.quotas()) {
		return current, grants, nil
	}
	m.place(now, c)
	m.replace(c.Topic, c)
	return c, grants, nil
}

// Update gives a topic another contract or other members. Errors: see Ledger.Change.
func (m *Machine) Update(now mono.Time, c *Contract) ([]ledger.Grant, error) {
	m.Ledger.Strict(c.Strict)
	m.place(now, c)
	first := c.quotas()
	// The loads measured so far stay valid where the publishers move.
	if view, found := m.Ledger.Topic(c.Topic); found && c.Rule != share.Static {
		if target, err := m.propose(now, c, view); err == nil && target != nil {
			first = target
		}
	}
	grants, err := m.Ledger.Change(c.Topic, m.terms(c), first, c.Awaited)
	if err == nil {
		c.settled = true // the rule may tune the members: their shares are on the way
		m.replace(c.Topic, c)
	}
	return grants, err
}

// Restore adopts a contract that may be in use. A known contract stays as it is. Errors: see
// Ledger.Adopt.
func (m *Machine) Restore(now mono.Time, c *Contract) ([]ledger.Grant, error) {
	m.Ledger.Strict(c.Strict)
	adopt := m.Ledger.Adopt // keep the shares that the rule has found
	if c.Rule == share.Static && m.topics[c.Topic] == nil {
		adopt = m.Ledger.Change // the brokers' shares may be from the middle of a move
	}
	grants, err := adopt(c.Topic, m.terms(c), c.quotas(), c.Awaited)
	if err == nil && m.topics[c.Topic] == nil {
		m.place(now, c)
		c.settled = true // it was settled before the restart
		m.replace(c.Topic, c)
	}
	return grants, err
}

// Remove ends a contract. The brokers in awaited may hold shares that an earlier ledger granted. strict
// lists the awaited brokers with the strict lease policy.
func (m *Machine) Remove(topic string, awaited, strict []string) []ledger.Grant {
	m.replace(topic, nil)
	m.Ledger.Strict(strict)
	return m.Ledger.Remove(topic, awaited)
}

// Settled reports whether every member of c has had its first share.
func (m *Machine) Settled(c *Contract) bool {
	if !c.settled {
		view, found := m.Ledger.Topic(c.Topic)
		c.settled = found && view.Settled && m.topics[c.Topic] == c
	}
	return c.settled
}

// Hello begins a session of a broker. Errors: see Ledger.Hello.
func (m *Machine) Hello(now mono.Time, s ledger.Session) ([]ledger.Grant, error) {
	grants, err := m.Ledger.Hello(s, now)
	if err != nil {
		return nil, err
	}
	// order: each by itself
	for topic := range m.placed[s.Broker] {
		m.topics[topic].tuner.Join(now, s.Broker, s.Stamp.Process)
	}
	return grants, nil
}

// Report records a step of a broker's traffic. It ignores topics without a contract.
func (m *Machine) Report(broker, topic string, s share.Step) {
	if c := m.topics[topic]; c != nil {
		c.tuner.Report(broker, s)
	}
}

// PlacedOn returns the topics that the broker is a member of, sorted by name.
func (m *Machine) PlacedOn(broker string) []string {
	return slices.Sorted(maps.Keys(m.placed[broker]))
}

// Adaptive returns the topics whose rule runs, sorted by name. If moving is true, Adaptive returns
// only topics whose publishers have just moved.
func (m *Machine) Adaptive(now mono.Time, moving bool) (topics []string) {
	// order: each by itself
	for topic := range m.moving {
		if !m.topics[topic].tuner.Moving(now) {
			delete(m.moving, topic)
		}
	}
	candidates := m.adaptive
	if moving {
		candidates = m.moving
	}
	// order: sorted below
	for topic := range candidates {
		if m.adaptive[topic] && m.Settled(m.topics[topic]) {
			topics = append(topics, topic)
		}
	}
	slices.Sort(topics)
	return topics
}

// Results of Tune.
const (
	Proposed    = "proposed"
	Removed     = "removed"
	Awaiting    = "awaiting"
	Impossible  = "impossible"
	NothingFree = "nothing_free"
	WithinBand  = "within_band"
)

// Tune runs the topic's rule and proposes its result if the change is worth the grants. Errors: see
// share.Split.
func (m *Machine) Tune(now mono.Time, topic string) (grants []ledger.Grant, result string, err error) {
	c := m.topics[topic]
	if c == nil || !c.settled {
		return nil, Removed, nil
	}
	view, _ := m.Ledger.Topic(topic)
	if len(view.Awaited) > 0 {
		return nil, Awaiting, nil
	}
	if len(c.Placed) == 1 && len(view.Members) == 1 && view.Members[0].Target == c.Total {
		delete(m.adaptive, topic) // nothing to divide until the topic is placed anew
		return nil, WithinBand, nil
	}
	target, err := m.propose(now, c, view)
	switch {
	case err != nil:
		return nil, Impossible, err
	case target == nil:
		return nil, NothingFree, nil
	case !worth(view, target):
		return nil, WithinBand, nil
	}
	grants, err = m.Ledger.Propose(topic, target)
	return grants, Proposed, err
}

// propose runs the rule. nil: no change.
func (m *Machine) propose(now mono.Time, c *Contract, view ledger.TopicView) ([]share.Assigned, error) {
	members := make(map[string]ledger.MemberView, len(view.Members))
	for _, member := range view.Members {
		members[member.Broker] = member
	}
	return c.tuner.Propose(now, c.Total, func(broker string) share.Holding {
		member := members[broker]
		return share.Holding{Disconnected: !m.Ledger.Connected(broker), Target: member.Target, Reserved: member.Reserved}
	})
}

// worth reports whether target differs from the present targets by more than the dead band.
func worth(view ledger.TopicView, target []share.Assigned) bool {
	targets := make([]share.Assigned, len(view.Members))
	for i, member := range view.Members {
		targets[i] = share.Assigned{Broker: member.Broker, Share: member.Target}
	}
	return share.Differs(targets, target)
}
