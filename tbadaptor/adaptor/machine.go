// Package adaptor is what the tbadaptor decides: which contracts there are, when the
// rule of each is asked, and what of its answer is granted. It is pure; events go in,
// grants come out. tbadaptor/share has the rules and tbadaptor/ledger says who may have
// what when. tbadaptor/loop serves it to brokers, and tools/sim runs it in virtual time.
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

// Config is what an adaptor works by.
type Config struct {
	Leases ledger.Leases
	// Flex is the part of shares that ends with the leases; of topics whose rule is
	// static nothing does.
	Flex ledger.Permille
	// The loads that a rule goes by are of the last Window.
	Window time.Duration
}

// Machine is a ledger and the topics that are tuned on it. It is a plain value with one
// owner. Contracts are set and removed, and brokers join, by its own methods; all else
// that brokers say goes to the ledger.
type Machine struct {
	*ledger.Ledger
	cfg    Config               // set once
	topics map[string]*Contract // in the ledger
	// placed are the names of topics by the brokers that they are placed on; adaptive those
	// whose rule is to be asked, and following those that are looked at while their
	// publishers move: of 100,000 topics a few.
	placed    map[string]map[string]bool
	adaptive  map[string]bool
	following map[string]bool
}

// Contract is a topic's contract and who is to keep it.
type Contract struct {
	Topic  string
	Total  tokenbucket.Share
	Rule   string         // of share.Rules
	Placed []share.Placed // its members; their quotas are the first shares
	// Awaited brokers are no members, and must be heard before it is adopted; Strict are
	// those of both with that policy.
	Awaited, Strict []string
	// Former is as in ledger.Terms.
	Former tokenbucket.Share

	tuner *share.Tuner
	// Every member has had its first share: from then on the rule may move shares.
	// Before, it would give away those of members on their way.
	settled bool
}

// New returns a machine without brokers and contracts. Requires: epoch is as for
// ledger.New.
func New(epoch uint64, cfg Config) *Machine {
	return &Machine{Ledger: ledger.New(epoch, cfg.Leases), cfg: cfg, topics: map[string]*Contract{},
		placed: map[string]map[string]bool{}, adaptive: map[string]bool{}, following: map[string]bool{}}
}

// Contract returns the topic's, nil if none is set.
func (m *Machine) Contract(topic string) *Contract { return m.topics[topic] }

func (m *Machine) terms(c *Contract) ledger.Terms {
	terms := ledger.Terms{Contract: c.Total, Flex: m.cfg.Flex, Former: c.Former}
	if c.Rule == share.Static {
		terms.Flex = 0 // nothing is to move
	}
	return terms
}

func (c *Contract) quotas() (first []share.Assigned) {
	for _, p := range c.Placed {
		first = append(first, share.Assigned{Broker: p.Broker, Share: p.Quota})
	}
	return first
}

// place has c go on with what is known of the topic's traffic.
func (m *Machine) place(now mono.Time, c *Contract) {
	var old *share.Tuner
	if known := m.topics[c.Topic]; known != nil {
		old = known.tuner
	}
	c.tuner = old.Place(now, c.Rule, m.cfg.Window, c.Placed)
}

// hold has c be the topic's contract; nil: it has none.
func (m *Machine) hold(topic string, c *Contract) {
	if old := m.topics[topic]; old != nil {
		for _, p := range old.Placed {
			if delete(m.placed[p.Broker], topic); len(m.placed[p.Broker]) == 0 {
				delete(m.placed, p.Broker)
			}
		}
		delete(m.topics, topic)
	}
	delete(m.adaptive, topic)
	delete(m.following, topic)
	if c == nil {
		return
	}
	m.topics[topic] = c
	if c.Rule != share.Static {
		m.adaptive[topic] = true
	}
	for _, p := range c.Placed {
		if p.Retiring {
			m.following[topic] = true
		}
		if m.placed[p.Broker] == nil {
			m.placed[p.Broker] = map[string]bool{}
		}
		m.placed[p.Broker][topic] = true
	}
}

// Set puts a contract in force that is new. A repetition of one that is known does
// nothing, and returns that one. Errors: as of Ledger.SetContract.
func (m *Machine) Set(now mono.Time, c *Contract) (inForce *Contract, grants []ledger.Grant, err error) {
	if grants, err = m.SetContract(c.Topic, m.terms(c), c.quotas()); err != nil {
		return nil, nil, err
	}
	if known := m.topics[c.Topic]; known != nil && known.Rule == c.Rule && slices.Equal(known.quotas(), c.quotas()) {
		return known, grants, nil
	}
	m.place(now, c)
	m.hold(c.Topic, c)
	return c, grants, nil
}

// Update gives a topic another contract or other members. Errors: as of Ledger.Change.
func (m *Machine) Update(now mono.Time, c *Contract) ([]ledger.Grant, error) {
	m.Strict(c.Strict)
	m.place(now, c)
	first := c.quotas()
	// What is known of its publishers holds where they go, too.
	if view, known := m.Topic(c.Topic); known && c.Rule != share.Static {
		if target, err := m.propose(now, c, view); err == nil && target != nil {
			first = target
		}
	}
	grants, err := m.Change(c.Topic, m.terms(c), first, c.Awaited)
	if err == nil {
		c.settled = true // its members may be tuned: what they lack is on its way
		m.hold(c.Topic, c)
	}
	return grants, err
}

// Restore takes back a contract that may be in use; one that is known it leaves as it is.
// Errors: as of Ledger.Adopt.
func (m *Machine) Restore(now mono.Time, c *Contract) ([]ledger.Grant, error) {
	m.Strict(c.Strict)
	adopt := m.Adopt // what its rule has found stays
	if c.Rule == share.Static && m.topics[c.Topic] == nil {
		adopt = m.Change // what brokers hold may be from the middle of a move
	}
	grants, err := adopt(c.Topic, m.terms(c), c.quotas(), c.Awaited)
	if err == nil && m.topics[c.Topic] == nil {
		m.place(now, c)
		c.settled = true // it was before the restart
		m.hold(c.Topic, c)
	}
	return grants, err
}

// Remove ends a contract. The brokers in awaited may hold shares that an earlier ledger
// granted; those in strict have that policy.
func (m *Machine) Remove(topic string, awaited, strict []string) []ledger.Grant {
	m.hold(topic, nil)
	m.Strict(strict)
	return m.Ledger.Remove(topic, awaited)
}

// Settled reports whether every member of c has had its first share.
func (m *Machine) Settled(c *Contract) bool {
	if !c.settled {
		view, known := m.Topic(c.Topic)
		c.settled = known && view.Settled && m.topics[c.Topic] == c
	}
	return c.settled
}

// Hello begins a session of a broker. Errors: as of Ledger.Hello.
func (m *Machine) Hello(now mono.Time, s ledger.Session) ([]ledger.Grant, error) {
	grants, err := m.Ledger.Hello(s, now)
	if err != nil {
		return nil, err
	}
	// order: each by itself
	for topic := range m.placed[s.Broker] {
		m.topics[topic].tuner.Join(now, s.Broker, s.Said.Process)
	}
	return grants, nil
}

// Report takes a step of a broker's traffic; none of a topic without a contract.
func (m *Machine) Report(broker, topic string, s share.Step) {
	if c := m.topics[topic]; c != nil {
		c.tuner.Report(broker, s)
	}
}

// PlacedOn returns the topics that the broker is a member of, by name.
func (m *Machine) PlacedOn(broker string) []string {
	return slices.Sorted(maps.Keys(m.placed[broker]))
}

// Adaptive returns the topics whose rule is to be asked, by name; following: only
// those whose publishers have just moved.
func (m *Machine) Adaptive(now mono.Time, following bool) (topics []string) {
	// order: each by itself
	for topic := range m.following {
		if !m.topics[topic].tuner.Following(now) {
			delete(m.following, topic)
		}
	}
	among := m.adaptive
	if following {
		among = m.following
	}
	// order: sorted below
	for topic := range among {
		if m.adaptive[topic] && m.Settled(m.topics[topic]) {
			topics = append(topics, topic)
		}
	}
	slices.Sort(topics)
	return topics
}

// What became of a proposal.
const (
	Proposed    = "proposed"
	Removed     = "removed"
	Awaiting    = "awaiting"
	Impossible  = "impossible"
	NothingFree = "nothing_free"
	WithinBand  = "within_band"
)

// Tune asks the topic's rule, and proposes what it says where that is worth its grants.
// Errors: as of share.Split.
func (m *Machine) Tune(now mono.Time, topic string) (grants []ledger.Grant, result string, err error) {
	c := m.topics[topic]
	if c == nil || !c.settled {
		return nil, Removed, nil
	}
	view, _ := m.Topic(topic)
	if len(view.Awaited) > 0 {
		return nil, Awaiting, nil
	}
	if len(c.Placed) == 1 && len(view.Members) == 1 && view.Members[0].Target == c.Total {
		delete(m.adaptive, topic) // there is nothing to divide until it is placed anew
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
	grants, err = m.Propose(topic, target)
	return grants, Proposed, err
}

// propose asks the rule. nil: nothing is to change.
func (m *Machine) propose(now mono.Time, c *Contract, view ledger.TopicView) ([]share.Assigned, error) {
	known := make(map[string]ledger.MemberView, len(view.Members))
	for _, one := range view.Members {
		known[one.Broker] = one
	}
	return c.tuner.Propose(now, c.Total, func(broker string) share.Holding {
		one := known[broker]
		return share.Holding{Away: !m.Connected(broker), Target: one.Target, Reserved: one.Reserved}
	})
}

// worth reports whether target differs from what is aimed at by more than the dead
// band.
func worth(view ledger.TopicView, target []share.Assigned) bool {
	aimed := make([]share.Assigned, len(view.Members))
	for i, one := range view.Members {
		aimed[i] = share.Assigned{Broker: one.Broker, Share: one.Target}
	}
	return share.Differs(aimed, target)
}
