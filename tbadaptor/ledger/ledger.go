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

// Ledger is a plain value with one owner; it is not safe for concurrent use. Every method either fails
// and changes nothing, or returns the grants to send now, ordered by topic and broker. Grants go only
// to connected brokers. Each topic and broker has at most one unacknowledged grant. Sending a grant
// twice is harmless. A grant that was lost with its session is replaced after the next hello.
type Ledger struct {
	leases  Leases // set once
	epoch   uint64 // of the newest grant
	brokers map[string]*broker
	topics  map[string]*topic
	// memberships lists the topics of each broker, as a member. awaiting lists the topics that await
	// each broker. Both avoid a search through every topic for a broker.
	//
	// Invariant: memberships[b][t.name] == t if and only if t.member(b) != nil, and awaiting[b][t.name]
	// == t if and only if b is in t.awaited.
	memberships, awaiting byBroker
	// reported has the brokers that have reported shares, or were forgotten, since New. Shares of other
	// brokers were granted by an earlier ledger.
	reported map[string]bool
}

type broker struct {
	owner     identity.Owner // the process that the id belongs to
	connected bool
	policy    Policy
	// renewed is the time of the last renewal of the lease.
	renewed mono.Time
	// renewalReceived is the sending time of the newest renewal known to have reached this
	// instance; 0: none.
	renewalReceived mono.Time
	// leaseEnded: the broker reported the end of its lease. It gets no grants before the next renewal,
	// because it would report the end of the lease again for each grant.
	leaseEnded bool
	// flexOver: the lease has ended since the last hello; the broker uses at most its bases until its
	// next hello.
	flexOver bool
	// baseOver: the broker was Strict and uses nothing any more, or it is presumed dead or proven dead.
	baseOver bool
}

// byBroker maps a broker and a topic name to the topic.
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

// topicsOf returns a broker's topics, sorted by name. The caller may change m while it ranges over the
// result.
func (m byBroker) topicsOf(id string) []*topic {
	return slices.SortedFunc(maps.Values(m[id]), func(a, b *topic) int { return cmp.Compare(a.name, b.name) })
}

type topic struct {
	name     string
	contract tokenbucket.Share // zero: not set, but brokers report shares of it
	removing bool
	flex     Permille         // flexible part of each share
	initial  []share.Assigned // last argument of SetContract, Adopt or Change, sorted
	pool     tokenbucket.Tokens
	members  []*member
	// awaited has the brokers that may hold a part of an adopted contract and have not reported,
	// sorted.
	awaited []string
	// unreported is the most that the awaited brokers together may be using. It is nil if no former total
	// is known (Terms.Former): then shares only shrink.
	unreported *tokenbucket.Share
	// keepReported: shares stay as the brokers report them, if the reports make up the contract. So
	// no share shrinks while brokers are awaited, unless the reports exceed the contract.
	keepReported bool
}

type member struct {
	broker string
	target tokenbucket.Share
	acked  holding
	// Epoch of acked; 0: the broker never held a share.
	ackedEpoch uint64
	// pending is the unacknowledged grant; Epoch 0: none.
	// Invariant: pending.Epoch == 0 or pending.Epoch > ackedEpoch.
	pending Grant
}

// holding is a share, and its base, which does not end with the flexible lease.
//
// Invariant: base <= share, in rate and in burst.
type holding struct{ share, base tokenbucket.Share }

// reserve returns the most that m may be using.
func (l *Ledger) reserve(m *member) tokenbucket.Share {
	held, granted := m.acked.share, m.pending.Share
	if l.flexOver(m.broker) {
		held, granted = m.acked.base, m.pending.Base()
	}
	return held.Max(granted)
}

func (l *Ledger) flexOver(id string) bool {
	b := l.brokers[id]
	return b != nil && b.flexOver
}

func smaller(a, b tokenbucket.Share) tokenbucket.Share {
	return tokenbucket.Share{Rate: min(a.Rate, b.Rate), Burst: min(a.Burst, b.Burst)}
}

// New returns an empty ledger whose grants have epochs above epoch.
//
// Requires: epoch is at least the epoch of every grant by earlier ledgers to the same brokers; the wall
// clock at start in nanoseconds will do. Otherwise a broker could take a new grant for an old grant and
// ignore it.
func New(epoch uint64, leases Leases) *Ledger {
	if err := leases.Validate(); err != nil {
		panic("ledger: " + err.Error())
	}
	return &Ledger{leases: leases, epoch: epoch, brokers: map[string]*broker{}, topics: map[string]*topic{}, memberships: byBroker{}, awaiting: byBroker{}, reported: map[string]bool{}}
}

// SetContract adds a new contract with the initial shares of its brokers, which may not sum to more
// than the contract. Brokers need not be connected: a hello brings their grants. View shows whether the
// topic is Settled.
//
// A repeated call with the same arguments does nothing, even if the shares were retuned since. A call
// with the same contract and other initial shares acts like Propose. SetContract fails with *Conflict
// if the topic has another contract, and with *Busy if brokers still hold shares of a removed contract.
func (l *Ledger) SetContract(name string, terms Terms, initial []share.Assigned) ([]Grant, error) {
	_, used := l.topics[name]
	t, target, err := l.enter(name, terms, initial)
	switch {
	case err != nil:
		return nil, err
	case t.contract.IsZero():
		if t.contract = terms.Contract; !used { // brokers report shares: the pool stays empty
			t.pool = tokenbucket.Tokens(terms.Contract.Burst) * tokenbucket.Token
		}
	case t.contract != terms.Contract:
		return nil, &Conflict{Topic: name, Current: t.contract, Requested: terms.Contract}
	case t.flex == terms.Flex && slices.Equal(t.initial, target):
		return nil, nil
	}
	return l.replace(t, terms, target), nil
}

// replace puts new terms in force. Requires: terms are checked; target is sorted.
func (l *Ledger) replace(t *topic, terms Terms, target []share.Assigned) []Grant {
	adopted := t.contract.IsZero() || len(t.awaited) > 0
	t.contract, t.flex, t.initial = terms.Contract, terms.Flex, target
	if adopted && t.unreported == nil && !terms.Former.IsZero() {
		l.bound(t, terms.Former)
	}
	l.aim(t, target)
	if !adopted {
		return l.advance(t)
	}
	for _, a := range target {
		l.await(t, []string{a.Broker})
	}
	return l.resume(t)
}

// enter checks the arguments. It returns the topic, creating a new topic without a contract, and target
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

// checkContract checks the terms and returns initial sorted by broker.
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

// Propose sets the target shares of the topic's brokers; a broker that is not named gets no share. The
// shares may not sum to more than the contract. Decreases are granted at once. Increases follow as
// decreases are acknowledged. A disconnected broker's share stays reserved. If this is more than the
// broker's target, other brokers get less; to avoid this the caller can propose the broker's Reserved
// share (TopicView). A new proposal replaces the previous proposal. While the topic awaits a broker,
// whose share is unknown, Propose does nothing.
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

// Remove ends a contract: every broker's share becomes zero. The ledger forgets the topic once every
// broker has acknowledged this. The brokers in awaited may hold shares that an earlier ledger granted:
// the ledger also waits until each of them has reported, was forgotten, or has lost its lease. Removing an
// unknown topic does nothing.
func (l *Ledger) Remove(name string, awaited []string) []Grant {
	t := l.topics[name]
	if t == nil {
		if t = (&topic{name: name}); !slices.ContainsFunc(awaited, func(id string) bool { return !l.reported[id] }) {
			return nil
		}
		l.topics[name] = t
	}
	l.await(t, awaited)
	t.removing = true
	t.initial = nil
	l.aim(t, nil)
	return l.advance(t)
}

// Hello begins a session of a broker and ends its previous session. s.Held lists every share that the
// broker holds. If the instance differs from the broker's last instance, the process is new: the old
// process holds nothing any more, and the new process holds the reported shares (the bases that the old
// process left). Hello renews the broker's lease, except for shares that have already lapsed.
//
// A broker's id belongs to one process at a time (internal/identity). Hello fails
//   - with identity.ErrReplaced if the process has sent a later hello (the two may have crossed)
//   - with *identity.InUse if the id belongs to another process that may live
//   - with *identity.Lost if the id belongs to a later process
//
// A process may live while it has a session, and afterwards until its lease is over: for a Strict
// broker the lease of the base, for other brokers the lease of the flexible parts. The bases of other
// brokers pass to the next process.
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
	process := identity.Process{Stamp: s.Stamp, Place: s.Place}
	if err := b.owner.Check(id, process, l.mayLive(b, now), now.Sub(b.renewed)); err != nil {
		return nil, fmt.Errorf("hello of broker %q, instance %q: %w", id, s.Stamp.Process, err)
	}
	sameProcess := b.owner.Stamp.Process == s.Stamp.Process
	b.owner.Take(process)
	l.brokers[id] = b
	// The report may be older than the end of the lease, which the broker has noticed by now, too.
	// Shares that ended with the lease do not come back.
	flexOver, allOver := sameProcess && b.flexOver, sameProcess && b.baseOver && b.policy == Strict
	b.connected, b.policy = true, s.Policy
	b.renewed, b.leaseEnded, b.flexOver, b.baseOver = now, false, false, false
	if !sameProcess {
		b.renewalReceived = 0
	}

	for _, h := range s.Shares {
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
	for _, t := range l.memberships.topicsOf(id) {
		h, holds := reported[t.name]
		m := t.member(id)
		if p := m.pending; p.Epoch != 0 {
			// The broker has not applied the pending grant and never will, so the grant's tokens return
			// to the pool. If the broker does not report the topic, it may have applied the grant and
			// dropped the topic since: then the tokens are lost. They are also lost if the lease has
			// ended, because another broker may have the room.
			if sameProcess && holds && h.Epoch < p.Epoch && !flexOver {
				t.pool += p.Tokens
			}
			m.pending = Grant{}
		}
		m.acked, m.ackedEpoch = holding{h.Share, h.Share.Less(h.Flex)}, h.Epoch
		if !l.reported[id] {
			t.subtractUnreported(h.Share)
		}
		switch {
		case allOver:
			m.acked = holding{}
		case flexOver:
			m.acked.share = m.acked.base
		}
		grants = append(grants, l.advance(t)...)
	}
	return append(grants, l.markHeard(id)...), nil
}

// mayLive reports whether the process that the broker's id belongs to may live at now, without proof of
// its end.
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

// MaxEpoch is the maximum epoch that a broker may report. It keeps epochs from overflowing to 0, where
// all brokers would take new grants for old grants.
const MaxEpoch = math.MaxInt64

func checkSession(s Session) (map[string]HeldShare, error) {
	if s.Broker == "" || s.Stamp.Process == "" {
		return nil, fmt.Errorf("hello of broker %q, instance %q: both are required", s.Broker, s.Stamp.Process)
	}
	reported := make(map[string]HeldShare, len(s.Shares))
	for _, h := range s.Shares {
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

// Renew renews the lease of a broker that sent a request at now. It returns false if the broker has no
// session, or the session has ended with its lease. The caller must send the renewal to the broker
// before it sends the grants. Requires: the request came in the session of the last hello.
func (l *Ledger) Renew(id string, now mono.Time) (renewed bool, grants []Grant) {
	b := l.brokers[id]
	if b == nil || !b.connected {
		return false, nil
	}
	b.renewed = max(b.renewed, now)
	if b.leaseEnded {
		b.leaseEnded = false
		grants = l.advanceAll(id)
	}
	return true, grants
}

// Expire ends the leases that are over at now and returns them. Their reserved shares go to other
// brokers. An awaited broker counts as silent since the first call of Expire.
func (l *Ledger) Expire(now mono.Time) (lapses []Lapse, grants []Grant) {
	// order: each by itself
	for id := range l.awaiting {
		if b := l.brokers[id]; b == nil {
			l.brokers[id] = &broker{policy: Available, renewed: now}
		} else if b.owner.Stamp.Process == "" && b.renewed == 0 {
			b.renewed = now
		}
	}
	for _, id := range slices.Sorted(maps.Keys(l.brokers)) {
		b := l.brokers[id]
		if b.owner.Stamp.Process == "" && b.renewed == 0 {
			continue // no report; only its Strict policy is known
		}
		expired := func(lease time.Duration) bool {
			return lease > 0 && now.Sub(b.renewed) > lease+l.leases.ClockBound
		}
		lapse := Lapse{Broker: id}
		if b.policy != Leaseless && !b.flexOver && expired(l.leases.Flex) {
			lapse.Flex, lapse.Session = true, b.connected
			b.flexOver, b.connected = true, false
		}
		last := l.leases.Session
		if b.policy == Available {
			last = l.leases.PresumeDead
		}
		if b.flexOver && !b.baseOver && expired(last) {
			lapse.Base, b.baseOver = true, true
			l.clear(id)
		}
		if lapse.Flex || lapse.Base {
			lapses = append(lapses, lapse)
		}
	}
	for _, lapse := range lapses { // after all leases ended: no lapsed broker may get another's share
		grants = append(grants, l.advanceAll(lapse.Broker)...)
		if lapse.Base {
			grants = append(grants, l.markHeard(lapse.Broker)...)
		}
	}
	return lapses, grants
}

// clear sets all shares of a broker to zero.
func (l *Ledger) clear(id string) {
	// order: each topic is cleared by itself
	for _, t := range l.memberships[id] {
		m := t.member(id)
		m.acked, m.pending = holding{}, Grant{}
	}
}

// advanceAll calls advance for all topics of a broker.
func (l *Ledger) advanceAll(id string) (grants []Grant) {
	for _, t := range l.memberships.topicsOf(id) {
		grants = append(grants, l.advance(t)...)
	}
	return grants
}

// Disconnect ends a broker's session. The broker keeps its shares and its pending grants. Requires: the
// session is the session of the last hello. Harmless if the broker is unknown.
func (l *Ledger) Disconnect(id string) []Grant {
	b := l.brokers[id]
	if b == nil || !b.connected {
		return nil
	}
	b.connected = false
	return l.advanceAll(id)
}

// Forget records an operator's statement that the broker's process has ended and will not return as the
// same instance. Forget frees the broker's shares and returns them by topic. It fails with ErrConnected
// while the broker has a session, and with ErrUnknownBroker if no topic has or awaits the broker.
func (l *Ledger) Forget(id string) ([]Freed, []Grant, error) {
	b := l.brokers[id]
	if b != nil && b.connected {
		return nil, nil, fmt.Errorf("forget broker %q: %w", id, ErrConnected)
	}
	freed, found := l.freeing(id)
	if b == nil && !l.reported[id] && !found {
		return nil, nil, fmt.Errorf("forget broker %q: %w", id, ErrUnknownBroker)
	}
	delete(l.brokers, id)
	l.clear(id)
	return freed, append(l.advanceAll(id), l.markHeard(id)...), nil
}

// freeing returns the shares reserved for a broker, by topic, and whether any topic has or awaits the
// broker.
func (l *Ledger) freeing(id string) (freed []Freed, found bool) {
	for _, t := range l.memberships.topicsOf(id) {
		if reserved := l.reserve(t.member(id)); !reserved.IsZero() && l.awaiting[id][t.name] == nil {
			freed = append(freed, Freed{Topic: t.name, Share: reserved})
		}
	}
	for _, t := range l.awaiting.topicsOf(id) {
		freed = append(freed, Freed{Topic: t.name, Unknown: true})
	}
	slices.SortFunc(freed, func(a, b Freed) int { return cmp.Compare(a.Topic, b.Topic) })
	return freed, len(l.memberships[id])+len(l.awaiting[id]) > 0
}

// RenewalReceived records that the broker received the renewal sent at sent. Requires: if the
// broker's process ended right afterwards, the next process would not use its bases.
func (l *Ledger) RenewalReceived(id string, sent mono.Time) {
	if b := l.brokers[id]; b != nil && b.connected {
		b.renewalReceived = max(b.renewalReceived, sent)
	}
}

// Ended records that the given instance of a broker's process has exited. The ledger frees the shares
// that the process held and returns them by topic. A restarted process must not use a freed share until
// the ledger grants the share again. The restarted process uses the old bases only if the old process
// had no renewal for 2 * Leases.Flex and noted this on disk. So Ended is valid only within Flex after a
// renewal that the process received. Ended fails with ErrUnknownBroker if the instance is not the
// broker's latest, with ErrConnected while the broker has a session, and with ErrMayGoOn if a restarted
// process may use the bases.
func (l *Ledger) Ended(id, instance string, now mono.Time) ([]Freed, []Grant, error) {
	b := l.brokers[id]
	var err error
	switch {
	case b == nil || b.owner.Stamp.Process != instance:
		err = ErrUnknownBroker
	case b.connected:
		err = ErrConnected
	case b.policy == Strict:
	case b.policy == Leaseless || b.renewalReceived == 0 || now.Sub(b.renewalReceived) >= l.leases.Flex:
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

// Strict records that the given brokers were Strict at their last report to an earlier ledger: no share of
// these brokers outlives the lease.
func (l *Ledger) Strict(ids []string) {
	for _, id := range ids {
		switch b := l.brokers[id]; {
		case l.reported[id]:
		case b == nil:
			l.brokers[id] = &broker{policy: Strict}
		case b.owner.Stamp.Process == "":
			b.policy = Strict
		}
	}
}

// Freed returns the ids of the brokers without a session and without shares, because of an ended lease
// or a Forget. Sorted.
func (l *Ledger) Freed() []string {
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(l.reported)) {
		if b := l.brokers[id]; b == nil || b.baseOver {
			ids = append(ids, id)
		}
	}
	return ids
}

// Ack records that a grant is in force at the broker, and that the broker's bucket released the given
// tokens. got is the granted share. If a lease has ended meanwhile, got is the base, or zero. When a
// lease ends, the broker may also send such an Ack for a grant that it has already acknowledged.
//
// Any other Ack is late or a duplicate and does nothing. Ack fails if its values contradict the grant.
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
		limit := tokenbucket.Tokens(max(0, m.acked.share.Burst-p.Share.Burst)) * tokenbucket.Token
		if released < 0 || released > limit {
			return nil, fmt.Errorf("broker %q gave up %d thousandths of a token at epoch %d of topic %q, outside 0 to %d",
				id, released, epoch, name, limit)
		}
		l.noteEarlyEnd(id, got != p.Share)
		m.acked, m.ackedEpoch, m.pending = holding{got, smaller(got, p.Base())}, epoch, Grant{}
		t.pool += released
	case m.ackedEpoch == epoch && got != m.acked.share && (got == m.acked.base || got.IsZero()):
		l.noteEarlyEnd(id, true)
		m.acked = holding{got, got}
	default:
		return nil, nil
	}
	return l.advance(t), nil
}

// Settle applies grants, and the grants that follow from them, at once, as brokers without network
// delay would. apply returns the tokens that the bucket released, or false if the broker does not
// receive the grant.
func (l *Ledger) Settle(grants []Grant, apply func(Grant) (tokenbucket.Tokens, bool)) error {
	for len(grants) > 0 {
		g := grants[0]
		grants = grants[1:]
		released, received := apply(g)
		if !received {
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

func (l *Ledger) noteEarlyEnd(id string, ended bool) {
	if b := l.brokers[id]; b != nil && ended {
		b.leaseEnded = true
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

// Topic returns a copy of a topic, and whether the ledger knows the topic.
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

// Ends returns when everything that a Strict broker holds is over, unless its lease is renewed before.
// found is false if the broker is not Strict, or if its lease has not begun: an awaited broker before
// Expire.
func (l *Ledger) Ends(id string) (end mono.Time, found bool) {
	b := l.brokers[id]
	if b == nil || b.policy != Strict || b.baseOver || l.leases.Session == 0 || b.owner.Stamp.Process == "" && b.renewed == 0 {
		return 0, false
	}
	return b.renewed.Add(l.leases.Session + l.leases.ClockBound), true
}

// Connected reports whether the broker has a session.
func (l *Ledger) Connected(id string) bool {
	b := l.brokers[id]
	return b != nil && b.connected
}

// advance makes all grants that are possible now. It removes members without a share and without a
// target, and in the end the topic.
//
// While a broker is awaited, its share is unknown. Members fall to their targets at once. Members grow
// by the share that is free even if the awaited brokers hold their maximum (topic.unreported).
func (l *Ledger) advance(t *topic) []Grant {
	adopting := len(t.awaited) > 0 && !t.removing
	if adopting && t.keepReported {
		if !l.exceeded(t) {
			return nil
		}
		t.keepReported = false // the shares exceed the contract, whatever the awaited brokers hold
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
		return nil // not set: brokers keep their shares
	}

	// Each connected member without a pending grant falls to its target if above the target, and gets
	// the difference if below.
	var moves []*move
	decreasing := false // a decrease is pending or about to be granted
	for _, m := range t.members {
		if !l.Connected(m.broker) || l.brokers[m.broker].leaseEnded {
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
	// Keeps invariant (3) if a broker reported more than the ledger knew.
	t.pool = min(t.pool, tokenbucket.Tokens(free.Burst)*tokenbucket.Token)
	if adopting && t.unreported == nil {
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
			continue // a share needs both a rate and a burst: wait for the other
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

// base returns the part of m's next share that does not end with the flexible lease. Changing the base
// costs the broker a disk write, so a base that is near enough stays. A broker then loses at most twice
// the flexible part with its lease.
func (l *Ledger) base(t *topic, m *member, next tokenbucket.Share) tokenbucket.Share {
	b := l.brokers[m.broker]
	if next.IsZero() || t.flex == 0 || l.leases.Flex == 0 || b == nil || b.policy == Leaseless {
		return next
	}
	part := func(n int64) int64 { return max(1, n-share.MulDiv(n, int64(t.flex), 1000)) }
	want := tokenbucket.Share{Rate: tokenbucket.Rate(part(int64(next.Rate))), Burst: part(next.Burst)}
	closeTo := func(current, want, limit int64) bool {
		return current <= limit && current >= want-share.MulDiv(want, int64(t.flex), 1000) && current <= want+want/5
	}
	if current := m.acked.base; closeTo(int64(current.Rate), int64(want.Rate), int64(next.Rate)) && closeTo(current.Burst, want.Burst, next.Burst) {
		return current
	}
	return want
}

// move is a step of a member from its present share towards its target.
type move struct {
	member *member
	next   tokenbucket.Share // share after the decreases of this step
}

// allot divides free among the moves. If free is not enough and no more will come (last), each move
// gets a proportional part, and the remainder goes to the first members that hold a share. If more will
// come, each move in turn gets all it needs, members without a share first. A proportional division
// would take a grant to each member for each acknowledgement.
// Postcondition: no move gets more than it needs, and the sum is at most free.
func allot(free int64, last bool, moves []*move, demand func(*move) int64) []int64 {
	got := make([]int64, len(moves))
	var sum int64
	for _, v := range moves {
		sum += demand(v)
	}
	if sum > free && last {
		rest := free
		for i, v := range moves {
			got[i] = share.MulDiv(free, demand(v), sum)
			rest -= got[i]
		}
		for i, v := range moves { // rest < len(moves): each division rounds down by less than 1
			if rest > 0 && got[i] < demand(v) && !v.member.acked.share.IsZero() {
				got[i]++
				rest--
			}
		}
		return got
	}
	for _, empty := range []bool{true, false} {
		for i, v := range moves {
			if v.member.acked.share.IsZero() == empty {
				got[i] = min(demand(v), free)
				free -= got[i]
			}
		}
	}
	return got
}

// free returns the part of the contract that is reserved for no member and that no awaited broker can
// be using; never negative. If the part of the awaited brokers is unknown, it is not subtracted.
func (l *Ledger) free(t *topic) tokenbucket.Share {
	rest := l.unallocated(t)
	if t.unreported != nil {
		rest = rest.Less(*t.unreported)
	}
	return tokenbucket.Share{Rate: max(0, rest.Rate), Burst: max(0, rest.Burst)}
}

// unallocated returns the contract minus the shares reserved for members. If the reserved shares exceed the
// contract, the result is negative.
func (l *Ledger) unallocated(t *topic) tokenbucket.Share {
	rest := t.contract
	for _, m := range t.members {
		rest = rest.Less(l.reserve(m))
	}
	return rest
}

// exceeded reports whether brokers may be using more than the contract.
func (l *Ledger) exceeded(t *topic) bool {
	rest := l.unallocated(t)
	return rest.Rate < 0 || rest.Burst < 0
}

// aim sets the members' targets. Requires: target is sorted and checked.
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

// insert makes a broker a member. Requires: the broker is not a member.
func (l *Ledger) insert(t *topic, id string) *member {
	i, _ := t.find(id)
	m := &member{broker: id}
	t.members = slices.Insert(t.members, i, m)
	l.memberships.add(id, t)
	return m
}

// holders returns the brokers that may hold a share of t, sorted.
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

// checkTarget checks target and returns it sorted by broker.
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
