package ledger

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Ledger is a plain value with one owner; it is not safe for concurrent use.
// Every method either fails and changes nothing, or returns the grants to be
// sent now, in the order of topic, broker. Grants go only to connected brokers,
// and at most one per topic and broker is unacknowledged. What is lost on the
// way within a session can be had again with Outstanding; to send a grant
// twice is harmless.
type Ledger struct {
	leases  Leases // set once
	epoch   uint64 // of the newest grant
	brokers map[string]*broker
	topics  map[string]*topic
	// memberships are the topics that each broker is a member of, awaiting those that
	// await it, so that one of a thousand brokers is not looked for in every topic.
	//
	// Invariant: memberships[b][t.name] == t just if t.member(b) != nil, and
	// awaiting[b][t.name] == t just if b is in t.awaited.
	memberships, awaiting byBroker
	// heard has the brokers that have said what they hold, or were forgotten,
	// since New: what another one holds, an earlier ledger granted.
	heard map[string]bool
}

type broker struct {
	owner     identity.Owner // the process that the id belongs to
	connected bool
	policy    Policy
	// renewed is when its lease was last renewed.
	renewed mono.Time
	// heard is when the newest renewal was sent that this instance is known to have got;
	// 0: none.
	heard mono.Time
	// waning: it said that its lease ended there. It is granted nothing before
	// the next renewal: it would say so again, and again.
	waning bool
	// flexOver: its lease has ended since; it uses its bases at most. So it
	// stays until its next hello.
	flexOver bool
	// baseOver: it was Strict and uses nothing any more, or it is presumed dead.
	baseOver bool
}

// byBroker is topics by broker and name.
type byBroker map[string]map[string]*topic

func (m byBroker) add(id string, t *topic) {
	if m[id] == nil {
		m[id] = map[string]*topic{}
	}
	m[id][t.name] = t
}

func (m byBroker) remove(id string, t *topic) {
	delete(m[id], t.name)
	if len(m[id]) == 0 {
		delete(m, id)
	}
}

// of returns a broker's topics, by name; they may come and go while the caller goes
// through them.
func (m byBroker) of(id string) []*topic {
	return slices.SortedFunc(maps.Values(m[id]), func(a, b *topic) int { return cmp.Compare(a.name, b.name) })
}

type topic struct {
	name     string
	contract tokenbucket.Share // zero: brokers report it, it was not set
	removing bool
	flex     Permille         // of each share
	initial  []share.Assigned // as given to SetContract last, sorted
	pool     tokenbucket.Tokens
	members  []*member // sorted by broker
	// awaited are the brokers that may hold a part of an adopted contract and have
	// not been heard, sorted.
	awaited []string
	// unheard is the most that the awaited brokers together may be using. It is nil as long
	// as no former total is known (Terms.Former): then shares only shrink.
	unheard *tokenbucket.Share
	// keep: shares stay as the brokers report them, if these make up the contract. So
	// nothing shrinks while brokers are awaited, unless the reports exceed the contract.
	keep bool
}

type member struct {
	broker string
	target tokenbucket.Share
	acked  holding
	// Epoch of acked; 0: never held anything.
	ackedEpoch uint64
	// pending is the one grant that is not acknowledged yet; Epoch 0: none.
	// Invariant: pending.Epoch == 0 or pending.Epoch > ackedEpoch.
	pending Grant
}

// holding is a share, and the part of it that does not end with a lease.
//
// Invariant: base <= share, in rate and in burst.
type holding struct{ share, base tokenbucket.Share }

// reserve returns the most that m may be using.
func (l *Ledger) reserve(m *member) tokenbucket.Share {
	held, granted := m.acked.share, m.pending.Share
	if l.flexOver(m.broker) {
		held, granted = m.acked.base, m.pending.Base()
	}
	return larger(held, granted)
}

func (l *Ledger) flexOver(id string) bool {
	b := l.brokers[id]
	return b != nil && b.flexOver
}

func larger(a, b tokenbucket.Share) tokenbucket.Share {
	return tokenbucket.Share{Rate: max(a.Rate, b.Rate), Burst: max(a.Burst, b.Burst)}
}

func smaller(a, b tokenbucket.Share) tokenbucket.Share {
	return tokenbucket.Share{Rate: min(a.Rate, b.Rate), Burst: min(a.Burst, b.Burst)}
}

// New returns an empty ledger whose grants have epochs above epoch.
//
// Requires: epoch is at least that of every grant that an earlier ledger made
// to the same brokers, e.g. the wall clock in nanoseconds at start. Otherwise a
// broker could take a new grant for an old one and ignore it.
func New(epoch uint64, leases Leases) *Ledger {
	if err := leases.Validate(); err != nil {
		panic("ledger: " + err.Error())
	}
	return &Ledger{leases: leases, epoch: epoch, brokers: map[string]*broker{}, topics: map[string]*topic{}, memberships: byBroker{}, awaiting: byBroker{}, heard: map[string]bool{}}
}

// SetContract puts a contract that is new under the ledger's care, with the shares
// its brokers start with; these may not sum to more than the contract. Brokers need
// not be connected: a grant follows when they say hello. View tells when the
// topic is Settled.
//
// Repeating it with the same arguments does nothing, even if
// the shares were retuned since. With the same contract and other initial
// shares it is Propose. It fails with *Conflict if the topic has another
// contract, with *Busy if brokers still hold shares of a removed one.
func (l *Ledger) SetContract(name string, terms Terms, initial []share.Assigned) ([]Grant, error) {
	_, used := l.topics[name]
	t, target, err := l.enter(name, terms, initial)
	switch {
	case err != nil:
		return nil, err
	case t.contract.IsZero():
		if t.contract = terms.Contract; !used { // else the pool stays empty
			t.pool = tokenbucket.Tokens(terms.Contract.Burst) * tokenbucket.Token
		}
	case t.contract != terms.Contract:
		return nil, &Conflict{Topic: name, Have: t.contract, Got: terms.Contract}
	case t.flex == terms.Flex && slices.Equal(t.initial, target):
		return nil, nil
	}
	return l.replace(t, terms, target), nil
}

// enter returns the topic of a contract, with no contract yet if it is new, and its target
// sorted by broker.
func (l *Ledger) enter(name string, terms Terms, target []share.Assigned) (t *topic, sorted []share.Assigned, err error) {
	if sorted, err = checkContract(name, terms, target); err != nil {
		return nil, nil, err
	}
	if t = l.topics[name]; t == nil {
		t = &topic{name: name}
		l.topics[name] = t
	}
	if t.removing {
		return nil, nil, &Busy{Topic: name, Brokers: l.holders(t)}
	}
	return t, sorted, nil
}

// checkContract returns initial, sorted by broker.
func checkContract(name string, terms Terms, initial []share.Assigned) ([]share.Assigned, error) {
	if name == "" {
		return nil, fmt.Errorf("a contract without a topic")
	}
	if err := terms.Contract.Validate(); err != nil {
		return nil, fmt.Errorf("contract of topic %q: %w", name, err)
	}
	if terms.Contract.IsZero() {
		return nil, fmt.Errorf("contract of topic %q is empty", name)
	}
	if terms.Flex < 0 || terms.Flex > 1000 {
		return nil, fmt.Errorf("%d thousandths of the shares of topic %q are to be flexible: want 0 to 1000", terms.Flex, name)
	}
	target, err := checkTarget(terms.Contract, initial)
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	return target, nil
}

// Propose sets the shares that the topic's brokers are meant to have; a broker
// that is not named is meant to have none. They may not sum to more than the
// contract. Decreases are granted at once, increases as far as decreases were
// acknowledged, the rest by and by as more of them are. While a broker is
// disconnected its part stays reserved, and if that is more than its target,
// others come short: the caller can leave it what TopicView says is
// Reserved. A new proposal replaces the one before. While the topic awaits a
// broker it does nothing: what it holds is not known.
func (l *Ledger) Propose(name string, target []share.Assigned) ([]Grant, error) {
	t := l.topics[name]
	if t == nil || t.removing || t.contract.IsZero() {
		return nil, fmt.Errorf("topic %q: %w", name, ErrUnknownTopic)
	}
	sorted, err := checkTarget(t.contract, target)
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	if len(t.awaited) > 0 {
		return nil, nil
	}
	l.aim(t, sorted)
	return l.advance(t), nil
}

// Remove ends a contract: every broker's share becomes zero. The ledger forgets the topic
// once every broker has acknowledged that. The brokers in others may hold shares that an
// earlier ledger granted: the ledger also waits until each of them was heard, was forgotten,
// or has lost its lease. Harmless if the topic is unknown.
func (l *Ledger) Remove(name string, others []string) []Grant {
	t := l.topics[name]
	if t == nil {
		if t = (&topic{name: name}); !slices.ContainsFunc(others, func(id string) bool { return !l.heard[id] }) {
			return nil
		}
		l.topics[name] = t
	}
	l.await(t, others)
	t.removing = true
	t.initial = nil
	l.aim(t, nil)
	return l.advance(t)
}

// Hello begins a session of a broker; a session it had is over. s.Held is
// everything it holds, and what is not in it, it does not hold. An instance that
// differs from the broker's last one is a new process: the old one holds nothing
// any more, the new one what it reports (the bases that the old one left it).
// The broker's lease is renewed, for shares that have not lapsed before.
//
// A broker's id belongs to one process at a time (internal/identity). Hello fails with
// identity.ErrReplaced if the process has said a later hello, which may have overtaken this
// one; with *identity.InUse if the id belongs to another process that may live; with
// *identity.Lost if the id belongs to a later process. A process may live while the process
// has a session, and then until its lease is over: that of a Strict broker's base,
// and that of the flexible parts of any other one, whose bases go to the process after it.
func (l *Ledger) Hello(s Session, now mono.Time) ([]Grant, error) {
	id := s.Broker
	reported, err := checkSession(s)
	if err != nil {
		return nil, err
	}
	b := l.brokers[id]
	if b == nil {
		b = &broker{}
	}
	process := identity.Process{Said: s.Said, Place: s.Place}
	if err := b.owner.Check(id, process, l.mayLive(b, now), now.Sub(b.renewed)); err != nil {
		return nil, fmt.Errorf("hello of broker %q, instance %q: %w", id, s.Said.Process, err)
	}
	same := b.owner.Said.Process == s.Said.Process
	b.owner.Take(process)
	l.brokers[id] = b
	// Its report may be older than the end of its lease, which it has seen, too,
	// by now: what ended with that does not come back.
	flexOver, allOver := same && b.flexOver, same && b.baseOver && b.policy == Strict
	b.connected, b.policy = true, s.Policy
	b.renewed, b.waning, b.flexOver, b.baseOver = now, false, false, false
	if !same {
		b.heard = 0
	}

	for _, h := range s.Held {
		l.epoch = max(l.epoch, h.Epoch)
		t := l.topics[h.Topic]
		if t == nil {
			t = &topic{name: h.Topic}
			l.topics[h.Topic] = t
		}
		if t.member(id) == nil {
			l.insert(t, id)
		}
	}
	var grants []Grant
	for _, t := range l.memberships.of(id) {
		h, holds := reported[t.name]
		m := t.member(id)
		if p := m.pending; p.Epoch != 0 {
			// Not applied, and never will be: its tokens still exist. Where the
			// broker does not say, it may have applied the grant and dropped
			// the topic since: they are given up. So they are where its lease
			// has ended, and their room may be another's.
			if same && holds && h.Epoch < p.Epoch && !flexOver {
				t.pool += p.Tokens
			}
			m.pending = Grant{}
		}
		m.acked, m.ackedEpoch = holding{h.Share, h.Share.Less(h.Flex)}, h.Epoch
		if !l.heard[id] {
			t.found(h.Share)
		}
		switch {
		case allOver:
			m.acked = holding{}
		case flexOver:
			m.acked.share = m.acked.base
		}
		grants = append(grants, l.advance(t)...)
	}
	return append(grants, l.hear(id)...), nil
}

// mayLive reports whether the process that a broker's id belongs to may live at now, if
// nothing proves its end.
func (l *Ledger) mayLive(b *broker, now mono.Time) bool {
	lease := l.leases.Flex
	switch {
	case b.baseOver:
		return false
	case b.policy == Leaseless:
		return b.connected
	case b.policy == Strict:
		lease = l.leases.Session
	}
	return b.connected || now.Sub(b.renewed) <= lease+l.leases.ClockBound
}

// MaxEpoch bounds what a broker may say of its grants, so that no grant's epoch ever begins
// at 0 again: all brokers would take it for an old one.
const MaxEpoch = math.MaxInt64

func checkSession(s Session) (map[string]Held, error) {
	if s.Broker == "" || s.Said.Process == "" {
		return nil, fmt.Errorf("hello of broker %q, instance %q: both are required", s.Broker, s.Said.Process)
	}
	reported := make(map[string]Held, len(s.Held))
	for _, h := range s.Held {
		if _, twice := reported[h.Topic]; twice {
			return nil, fmt.Errorf("hello of broker %q: topic %q appears twice", s.Broker, h.Topic)
		}
		if h.Topic == "" {
			return nil, fmt.Errorf("hello of broker %q: a share without a topic", s.Broker)
		}
		if err := h.Share.Validate(); err != nil {
			return nil, fmt.Errorf("hello of broker %q: topic %q: %w", s.Broker, h.Topic, err)
		}
		if h.Flex.Rate < 0 || h.Flex.Burst < 0 || h.Share.Less(h.Flex).Validate() != nil {
			return nil, fmt.Errorf("hello of broker %q: topic %q: %+v of %+v cannot be its flexible part", s.Broker, h.Topic, h.Flex, h.Share)
		}
		if s.Policy == Leaseless && !(h.Flex == tokenbucket.Share{}) {
			return nil, fmt.Errorf("hello of broker %q: topic %q: a flexible part, and no leases", s.Broker, h.Topic)
		}
		if h.Epoch == 0 || h.Epoch > MaxEpoch {
			return nil, fmt.Errorf("hello of broker %q: topic %q: epoch %d is of no grant", s.Broker, h.Topic, h.Epoch)
		}
		reported[h.Topic] = h
	}
	return reported, nil
}

// Renew renews the lease of a broker, of which a request was heard at now, and
// reports whether it has: not without a session, or with one that has ended with
// its lease. Only then may the broker be told so, before it is sent the grants.
// Requires: the request came in the session that said hello last.
func (l *Ledger) Renew(id string, now mono.Time) (renewed bool, grants []Grant) {
	b := l.brokers[id]
	if b == nil || !b.connected {
		return false, nil
	}
	b.renewed = max(b.renewed, now)
	if b.waning {
		b.waning = false
		grants = l.advanceAll(id)
	}
	return true, grants
}

// Expire ends the leases that are over at now, and says whose. What they had
// reserved goes to others. A broker that is awaited has been silent at least since
// the first call.
func (l *Ledger) Expire(now mono.Time) (lapses []Lapse, grants []Grant) {
	// order: each by itself
	for id := range l.awaiting {
		if b := l.brokers[id]; b == nil {
			l.brokers[id] = &broker{policy: Available, renewed: now}
		} else if b.owner.Said.Process == "" && b.renewed == 0 {
			b.renewed = now
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.brokers)) {
		b := l.brokers[id]
		if b.owner.Said.Process == "" && b.renewed == 0 {
			continue // it has not been heard, and Strict is all that was said of it
		}
		past := func(lease time.Duration) bool {
			return lease > 0 && now.Sub(b.renewed) > lease+l.leases.ClockBound
		}
		lapse := Lapse{Broker: id}
		if b.policy != Leaseless && !b.flexOver && past(l.leases.Flex) {
			lapse.Flex, lapse.Session = true, b.connected
			b.flexOver, b.connected = true, false
		}
		last := l.leases.Session
		if b.policy == Available {
			last = l.leases.PresumeDead
		}
		if b.flexOver && !b.baseOver && past(last) {
			lapse.Base, b.baseOver = true, true
			l.clear(id)
		}
		if lapse.Flex || lapse.Base {
			lapses = append(lapses, lapse)
		}
	}
	for _, lapse := range lapses { // not before: one of them must not get what another had
		grants = append(grants, l.advanceAll(lapse.Broker)...)
		if lapse.Base {
			grants = append(grants, l.hear(lapse.Broker)...)
		}
	}
	return lapses, grants
}

// clear says that a broker holds nothing.
func (l *Ledger) clear(id string) {
	// order: each topic is cleared by itself
	for _, t := range l.memberships[id] {
		m := t.member(id)
		m.acked, m.pending = holding{}, Grant{}
	}
}

// advanceAll is advance for all topics of a broker.
func (l *Ledger) advanceAll(id string) (grants []Grant) {
	for _, t := range l.memberships.of(id) {
		grants = append(grants, l.advance(t)...)
	}
	return grants
}

// Disconnect ends a broker's session. It keeps what it holds and what it was
// granted. Requires: the session is the one that said hello last; one that was
// replaced before has ended already. Harmless if unknown.
func (l *Ledger) Disconnect(id string) []Grant {
	b := l.brokers[id]
	if b == nil || !b.connected {
		return nil
	}
	b.connected = false
	return l.advanceAll(id)
}

// Forget takes an operator's word that the broker's process has
// ended and will not come back as the same instance: what it held, which it
// returns by topic, is free again. It fails with ErrConnected while the broker has a
// session, with ErrUnknownBroker if it is no topic's member and not awaited.
func (l *Ledger) Forget(id string) ([]Freed, []Grant, error) {
	b := l.brokers[id]
	if b != nil && b.connected {
		return nil, nil, fmt.Errorf("forget broker %q: %w", id, ErrConnected)
	}
	freed, known := l.freeing(id)
	if b == nil && !l.heard[id] && !known {
		return nil, nil, fmt.Errorf("forget broker %q: %w", id, ErrUnknownBroker)
	}
	delete(l.brokers, id)
	l.clear(id)
	return freed, append(l.advanceAll(id), l.hear(id)...), nil
}

// freeing returns what is reserved for a broker, by topic, and whether a topic knows it.
func (l *Ledger) freeing(id string) (freed []Freed, known bool) {
	for _, t := range l.memberships.of(id) {
		if reserved := l.reserve(t.member(id)); !reserved.IsZero() && l.awaiting[id][t.name] == nil {
			freed = append(freed, Freed{Topic: t.name, Share: reserved})
		}
	}
	for _, t := range l.awaiting.of(id) {
		freed = append(freed, Freed{Topic: t.name, Unknown: true})
	}
	slices.SortFunc(freed, func(a, b Freed) int { return cmp.Compare(a.Topic, b.Topic) })
	return freed, len(l.memberships[id])+len(l.awaiting[id]) > 0
}

// Heard says that the broker has got the renewal that was sent then, and that a process
// after this one would not go on with its bases if it ended just after that.
func (l *Ledger) Heard(id string, sent mono.Time) {
	if b := l.brokers[id]; b != nil && b.connected {
		b.heard = max(b.heard, sent)
	}
}

// Ended takes the evidence that the broker's process of this instance has ended: what it
// held, which it returns by topic, is free. A process after it must not use that. It
// does not before it has been granted it anew, unless the one that ended had been
// without a renewal for 2 * Leases.Flex, and noted that on its disk: so the evidence
// counts only for half that time since one that it has got. It fails with
// ErrUnknownBroker if this is not the broker's latest instance, with ErrConnected while
// it has a session, with ErrMayGoOn.
func (l *Ledger) Ended(id, instance string, now mono.Time) ([]Freed, []Grant, error) {
	b := l.brokers[id]
	var err error
	switch {
	case b == nil || b.owner.Said.Process != instance:
		err = ErrUnknownBroker
	case b.connected:
		err = ErrConnected
	case b.policy == Strict:
	case b.policy == Leaseless || b.heard == 0 || now.Sub(b.heard) >= l.leases.Flex:
		err = ErrMayGoOn
	}
	if err != nil {
		return nil, nil, fmt.Errorf("end of broker %q, instance %q: %w", id, instance, err)
	}
	freed, _ := l.freeing(id)
	b.owner.End(instance)
	b.flexOver, b.baseOver = true, true
	l.clear(id)
	return freed, l.advanceAll(id), nil
}

// Strict says that these brokers were Strict when they were heard last, by an earlier
// ledger: nothing that one of them holds outlives its lease.
func (l *Ledger) Strict(ids []string) {
	for _, id := range ids {
		switch b := l.brokers[id]; {
		case l.heard[id]:
		case b == nil:
			l.brokers[id] = &broker{policy: Strict}
		case b.owner.Said.Process == "":
			b.policy = Strict
		}
	}
}

// Freed returns the brokers that have no session and hold nothing, because their
// leases are over or they were forgotten, by id.
func (l *Ledger) Freed() []string {
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(l.heard)) {
		if b := l.brokers[id]; b == nil || b.baseOver {
			ids = append(ids, id)
		}
	}
	return ids
}

// Ack says that the grant of this epoch is in force at the broker, and that its
// bucket gave up released tokens for it. got is the share granted, or what is
// left of it where a lease has ended meanwhile: its base, or nothing. A broker
// says the latter also of a grant it has acknowledged, when the lease ends.
//
// What is neither of the one grant that is waited for, nor says less of the one
// acknowledged last, is late or a duplicate, and does nothing. It fails if it
// contradicts the grant.
func (l *Ledger) Ack(id, name string, epoch uint64, got tokenbucket.Share, released tokenbucket.Tokens) ([]Grant, error) {
	if epoch > l.epoch {
		return nil, fmt.Errorf("broker %q acknowledges epoch %d of topic %q, the newest is %d", id, epoch, name, l.epoch)
	}
	t := l.topics[name]
	if t == nil {
		return nil, nil
	}
	m := t.member(id)
	switch {
	case m == nil:
		return nil, nil
	case m.pending.Epoch != 0 && m.pending.Epoch == epoch:
		p := m.pending
		if got != p.Share && got != p.Base() && !got.IsZero() {
			return nil, fmt.Errorf("broker %q acknowledges epoch %d of topic %q with share %+v, granted was %+v",
				id, epoch, name, got, p.Share)
		}
		most := tokenbucket.Tokens(max(0, m.acked.share.Burst-p.Share.Burst)) * tokenbucket.Token
		if released < 0 || released > most {
			return nil, fmt.Errorf("broker %q gave up %d thousandths of a token at epoch %d of topic %q, outside 0 to %d",
				id, released, epoch, name, most)
		}
		l.wanes(id, got != p.Share)
		m.acked, m.ackedEpoch, m.pending = holding{got, smaller(got, p.Base())}, epoch, Grant{}
		t.pool += released
	case m.ackedEpoch == epoch && got != m.acked.share && (got == m.acked.base || got.IsZero()):
		l.wanes(id, true)
		m.acked = holding{got, got}
	default:
		return nil, nil
	}
	return l.advance(t), nil
}

// Settle has grants, and those that follow from them, in force at once, as brokers that
// are near would. apply returns what the bucket gave up; false: the broker does not hear
// of it.
func (l *Ledger) Settle(grants []Grant, apply func(Grant) (tokenbucket.Tokens, bool)) error {
	for len(grants) > 0 {
		g := grants[0]
		grants = grants[1:]
		released, heard := apply(g)
		if !heard {
			continue
		}
		more, err := l.Ack(g.Broker, g.Topic, g.Epoch, g.Share, released)
		if err != nil {
			return err
		}
		grants = append(grants, more...)
	}
	return nil
}

func (l *Ledger) wanes(id string, does bool) {
	if b := l.brokers[id]; b != nil && does {
		b.waning = true
	}
}

// View returns a copy of all topics, sorted by name.
func (l *Ledger) View() []TopicView {
	var views []TopicView
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		views = append(views, l.view(l.topics[name]))
	}
	return views
}

// Topic returns a copy of one topic, and whether the ledger knows it.
func (l *Ledger) Topic(name string) (TopicView, bool) {
	t := l.topics[name]
	if t == nil {
		return TopicView{}, false
	}
	return l.view(t), true
}

func (l *Ledger) view(t *topic) TopicView {
	v := TopicView{Topic: t.name, Contract: t.contract, Removing: t.removing, Settled: len(t.awaited) == 0, Awaited: slices.Clone(t.awaited), Pool: t.pool}
	for _, m := range t.members {
		mv := MemberView{
			Broker: m.broker, Target: m.target,
			Granted: m.acked.share, GrantedEpoch: m.ackedEpoch,
			Acknowledged: m.acked.share, AcknowledgedEpoch: m.ackedEpoch, Base: m.acked.base,
			Reserved: l.reserve(m), Connected: l.Connected(m.broker),
		}
		if b := l.brokers[m.broker]; b != nil {
			mv.Policy, mv.Lapsed = b.policy, b.flexOver
		}
		if m.pending.Epoch != 0 {
			mv.Granted, mv.GrantedEpoch = m.pending.Share, m.pending.Epoch
		}
		if m.pending.Epoch != 0 || m.acked.share != m.target {
			v.Settled = false
		}
		v.Members = append(v.Members, mv)
	}
	return v
}

// Ends returns when everything that a Strict broker holds is over, unless its lease is
// renewed before. known is false for a broker that goes on, and for one whose lease has not
// begun: an awaited one before Expire.
func (l *Ledger) Ends(id string) (at mono.Time, known bool) {
	b := l.brokers[id]
	if b == nil || b.policy != Strict || b.baseOver || l.leases.Session == 0 || b.owner.Said.Process == "" && b.renewed == 0 {
		return 0, false
	}
	return b.renewed.Add(l.leases.Session + l.leases.ClockBound), true
}

// Connected reports whether the broker has a session.
func (l *Ledger) Connected(id string) bool {
	b := l.brokers[id]
	return b != nil && b.connected
}

// advance grants what can be granted now, and forgets members, and in the end
// the topic, that hold nothing and are meant to hold nothing.
//
// While a broker is awaited, its share is unknown. Members fall to their targets at once. They
// grow by what is free if the awaited brokers hold as much as they can (topic.unheard).
func (l *Ledger) advance(t *topic) []Grant {
	adopting := len(t.awaited) > 0 && !t.removing
	if adopting && t.keep {
		if !l.exceeded(t) {
			return nil
		}
		t.keep = false // whatever the awaited brokers hold, the shares do not make up the contract
	}
	t.members = slices.DeleteFunc(t.members, func(m *member) bool {
		gone := m.target.IsZero() && m.acked.share.IsZero() && m.pending.Epoch == 0
		if gone {
			l.memberships.remove(m.broker, t)
		}
		return gone
	})
	if len(t.members)+len(t.awaited) == 0 && (t.removing || t.contract.IsZero()) {
		delete(l.topics, t.name)
		return nil
	}
	if t.contract.IsZero() && !t.removing {
		return nil // not set: brokers keep what they hold
	}

	// Every connected member that owes no acknowledgement falls to its target
	// where it is above, and asks for the rest where it is below.
	var moves []*move
	decreasing := false // a decrease is, or is about to be, on its way
	for _, m := range t.members {
		if !l.Connected(m.broker) || l.brokers[m.broker].waning {
			continue
		}
		if p := m.pending; p.Epoch != 0 {
			decreasing = decreasing || p.Share.Rate < m.acked.share.Rate || p.Share.Burst < m.acked.share.Burst
			continue
		}
		if m.acked.share == m.target && m.acked.base == l.base(t, m, m.target) {
			continue
		}
		v := &move{member: m, next: smaller(m.acked.share, m.target)}
		decreasing = decreasing || v.next != m.acked.share
		moves = append(moves, v)
	}
	free := l.free(t)
	// Invariant (3), where a broker reported more than we knew of.
	t.pool = min(t.pool, tokenbucket.Tokens(free.Burst)*tokenbucket.Token)
	if adopting && t.unheard == nil {
		free = tokenbucket.Share{}
	}
	rates := allot(int64(free.Rate), !decreasing, moves, func(v *move) int64 { return int64(v.member.target.Rate - v.next.Rate) })
	bursts := allot(free.Burst, !decreasing, moves, func(v *move) int64 { return v.member.target.Burst - v.next.Burst })

	var grants []Grant
	for i, v := range moves {
		next := v.next
		next.Rate += tokenbucket.Rate(rates[i])
		next.Burst += bursts[i]
		if next.Validate() != nil {
			continue // half a share is none: it waits for the other half
		}
		base := l.base(t, v.member, next)
		if (holding{next, base}) == v.member.acked {
			continue
		}
		var tokens tokenbucket.Tokens
		if grown := next.Burst - v.member.acked.share.Burst; grown > 0 {
			tokens = tokenbucket.Tokens(share.MulDiv(int64(t.pool), grown, free.Burst))
			t.pool -= tokens
			free.Burst -= grown
		}
		l.epoch++
		v.member.pending = Grant{Broker: v.member.broker, Topic: t.name, Epoch: l.epoch, Share: next, Flex: next.Less(base), Tokens: tokens}
		grants = append(grants, v.member.pending)
	}
	return grants
}

// base returns the part of m's next share that is not to end with its lease. To
// change it costs the broker a write to its disk, so that one which is near
// enough stays: what a broker loses with its lease is twice the flexible part at most.
func (l *Ledger) base(t *topic, m *member, next tokenbucket.Share) tokenbucket.Share {
	b := l.brokers[m.broker]
	if next.IsZero() || t.flex == 0 || l.leases.Flex == 0 || b == nil || b.policy == Leaseless {
		return next
	}
	part := func(n int64) int64 { return max(1, n-share.MulDiv(n, int64(t.flex), 1000)) }
	want := tokenbucket.Share{Rate: tokenbucket.Rate(part(int64(next.Rate))), Burst: part(next.Burst)}
	near := func(have, want, most int64) bool {
		return have <= most && have >= want-share.MulDiv(want, int64(t.flex), 1000) && have <= want+want/5
	}
	if have := m.acked.base; near(int64(have.Rate), int64(want.Rate), int64(next.Rate)) && near(have.Burst, want.Burst, next.Burst) {
		return have
	}
	return want
}

// move is a member's way from what it holds towards its target.
type move struct {
	member *member
	next   tokenbucket.Share // its share once it has given up what it is to give up
}

// allot divides free over what the moves need. If there is not enough and this
// is all there will be, each gets its proportion, and the remainder goes to the first
// that hold something. If more is to come, one
// after the other gets all it needs, first those that hold nothing: in
// proportion it would take a grant to each for each acknowledgement.
// Postcondition: no move gets more than it needs, the sum is at most free.
func allot(free int64, last bool, moves []*move, need func(*move) int64) []int64 {
	got := make([]int64, len(moves))
	var sum int64
	for _, v := range moves {
		sum += need(v)
	}
	if sum > free && last {
		rest := free
		for i, v := range moves {
			got[i] = share.MulDiv(free, need(v), sum)
			rest -= got[i]
		}
		for i, v := range moves { // rest < len(moves): of each proportion less than 1 was cut off
			if rest > 0 && got[i] < need(v) && !v.member.acked.share.IsZero() {
				got[i]++
				rest--
			}
		}
		return got
	}
	for _, empty := range []bool{true, false} {
		for i, v := range moves {
			if v.member.acked.share.IsZero() == empty {
				got[i] = min(need(v), free)
				free -= got[i]
			}
		}
	}
	return got
}

// free returns the part of the contract that is reserved for no member, and that no awaited
// broker can be using; never negative. An unknown part of awaited brokers is not subtracted.
func (l *Ledger) free(t *topic) tokenbucket.Share {
	left := l.left(t)
	if t.unheard != nil {
		left = left.Less(*t.unheard)
	}
	return tokenbucket.Share{Rate: max(0, left.Rate), Burst: max(0, left.Burst)}
}

// left is the contract without what is reserved for members. It is negative where more is reserved than the contract.
func (l *Ledger) left(t *topic) tokenbucket.Share {
	left := t.contract
	for _, m := range t.members {
		left = left.Less(l.reserve(m))
	}
	return left
}

// exceeded reports whether brokers may be using more than the contract.
func (l *Ledger) exceeded(t *topic) bool {
	left := l.left(t)
	return left.Rate < 0 || left.Burst < 0
}

// aim sets the members' targets. Requires: target sorted and checked.
func (l *Ledger) aim(t *topic, target []share.Assigned) {
	for _, m := range t.members {
		m.target = tokenbucket.Share{}
	}
	for _, a := range target {
		m := t.member(a.Broker)
		if m == nil {
			m = l.insert(t, a.Broker)
		}
		m.target = a.Share
	}
}

func (t *topic) find(id string) (int, bool) {
	return slices.BinarySearchFunc(t.members, id, func(m *member, id string) int { return cmp.Compare(m.broker, id) })
}

func (t *topic) member(id string) *member {
	if i, ok := t.find(id); ok {
		return t.members[i]
	}
	return nil
}

// insert makes a broker a member. Requires: it is none.
func (l *Ledger) insert(t *topic, id string) *member {
	i, _ := t.find(id)
	m := &member{broker: id}
	t.members = slices.Insert(t.members, i, m)
	l.memberships.add(id, t)
	return m
}

// holders returns the brokers that may be using something of t, sorted.
func (l *Ledger) holders(t *topic) []string {
	ids := slices.Clone(t.awaited)
	for _, m := range t.members {
		if !l.reserve(m).IsZero() {
			ids = append(ids, m.broker)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// checkTarget returns target sorted by broker.
func checkTarget(contract tokenbucket.Share, target []share.Assigned) ([]share.Assigned, error) {
	sorted := slices.SortedStableFunc(slices.Values(target), func(a, b share.Assigned) int {
		return cmp.Compare(a.Broker, b.Broker)
	})
	free := contract
	for i, a := range sorted {
		if a.Broker == "" {
			return nil, fmt.Errorf("a share without a broker")
		}
		if i > 0 && sorted[i-1].Broker == a.Broker {
			return nil, fmt.Errorf("broker %q appears twice", a.Broker)
		}
		if err := a.Share.Validate(); err != nil {
			return nil, fmt.Errorf("share of broker %q: %w", a.Broker, err)
		}
		if free = free.Less(a.Share); free.Rate < 0 || free.Burst < 0 {
			return nil, fmt.Errorf("the shares sum to more than the contract of %d milli-msg/s, burst %d",
				contract.Rate, contract.Burst)
		}
	}
	return sorted, nil
}
