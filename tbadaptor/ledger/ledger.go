package ledger

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"

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
	epoch   uint64 // of the newest grant
	brokers map[string]*broker
	topics  map[string]*topic
}

type broker struct {
	instance  string
	past      []string // instances before it, oldest first, at most maxPast
	connected bool
}

// maxPast bounds how many replaced instances of a broker are remembered, to
// refuse a hello that was overtaken by its successor's.
const maxPast = 8

type topic struct {
	name     string
	contract tokenbucket.Share // zero: brokers report it, nobody set it
	removing bool
	initial  []share.Assigned // as given to SetContract last, sorted
	pool     tokenbucket.Tokens
	members  []*member // sorted by broker
}

type member struct {
	broker string
	target tokenbucket.Share
	acked  tokenbucket.Share
	// Epoch of acked; 0: never held anything.
	ackedEpoch uint64
	// pending is the one grant that is not acknowledged yet; Epoch 0: none.
	// Invariant: pending.Epoch == 0 or pending.Epoch > ackedEpoch.
	pending Grant
}

// reserve returns the most that m may be using.
func (m *member) reserve() tokenbucket.Share {
	if m.pending.Epoch == 0 {
		return m.acked
	}
	return tokenbucket.Share{
		Rate:  max(m.acked.Rate, m.pending.Share.Rate),
		Burst: max(m.acked.Burst, m.pending.Share.Burst),
	}
}

// New returns an empty ledger whose grants have epochs above epoch.
//
// Requires: epoch is at least that of every grant that an earlier ledger made
// to the same brokers, e.g. the wall clock in nanoseconds at start. Otherwise a
// broker could take a new grant for an old one and ignore it.
func New(epoch uint64) *Ledger {
	return &Ledger{epoch: epoch, brokers: map[string]*broker{}, topics: map[string]*topic{}}
}

// SetContract puts a contract under the ledger's care, with the shares its
// brokers start with; these may not sum to more than the contract. Brokers need
// not be connected: a grant follows when they say hello. View tells when the
// topic is Settled.
//
// Repeating it with the same contract and initial shares does nothing, even if
// the shares were retuned since. With the same contract and other initial
// shares it is Propose. It fails with *Conflict if the topic has another
// contract, with *Busy if brokers still hold shares of a removed one.
func (l *Ledger) SetContract(name string, contract tokenbucket.Share, initial []share.Assigned) ([]Grant, error) {
	if name == "" {
		return nil, fmt.Errorf("a contract without a topic")
	}
	if err := contract.Validate(); err != nil {
		return nil, fmt.Errorf("contract of topic %q: %w", name, err)
	}
	if contract.IsZero() {
		return nil, fmt.Errorf("contract of topic %q is empty", name)
	}
	target, err := checkTarget(contract, initial)
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	t := l.topics[name]
	switch {
	case t == nil:
		t = &topic{name: name, contract: contract, pool: tokenbucket.Tokens(contract.Burst) * tokenbucket.Token}
		l.topics[name] = t
	case t.removing:
		return nil, &Busy{Topic: name, Brokers: t.holders()}
	case t.contract.IsZero():
		t.contract = contract // used before: the pool stays empty
	case t.contract != contract:
		return nil, &Conflict{Topic: name, Have: t.contract, Got: contract}
	case slices.Equal(t.initial, target):
		return nil, nil
	}
	t.initial = target
	t.aim(target)
	return l.advance(t), nil
}

// Propose sets the shares that the topic's brokers are meant to have; a broker
// that is not named is meant to have none. They may not sum to more than the
// contract. Decreases are granted at once, increases as far as decreases were
// acknowledged, the rest by and by as more of them are. While a broker is
// disconnected its part stays reserved, and if that is more than its target,
// others come short: whoever proposes can leave it what TopicView says is
// Reserved. A new proposal replaces the one before.
func (l *Ledger) Propose(name string, target []share.Assigned) ([]Grant, error) {
	t := l.topics[name]
	if t == nil || t.removing || t.contract.IsZero() {
		return nil, fmt.Errorf("topic %q: %w", name, ErrUnknownTopic)
	}
	sorted, err := checkTarget(t.contract, target)
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	t.aim(sorted)
	return l.advance(t), nil
}

// Remove ends a contract: every broker's share becomes zero. The ledger forgets
// the topic when the last of them has acknowledged that. Harmless if unknown.
func (l *Ledger) Remove(name string) []Grant {
	t := l.topics[name]
	if t == nil {
		return nil
	}
	t.removing = true
	t.initial = nil
	t.aim(nil)
	return l.advance(t)
}

// Hello begins a session of a broker; a session it had is over. held is
// everything it holds, and what is not in it, it does not hold. An instance
// that differs from the broker's last one is a new process, which starts with
// nothing; whatever it reports all the same (the ledger's memory may have been
// lost in between) is believed.
//
// It fails with ErrReplaced if a later instance has already said hello.
func (l *Ledger) Hello(id, instance string, held []Held) ([]Grant, error) {
	if id == "" || instance == "" {
		return nil, fmt.Errorf("hello of broker %q, instance %q: both are required", id, instance)
	}
	reported := make(map[string]Held, len(held))
	for _, h := range held {
		if _, twice := reported[h.Topic]; twice {
			return nil, fmt.Errorf("hello of broker %q: topic %q appears twice", id, h.Topic)
		}
		if h.Topic == "" {
			return nil, fmt.Errorf("hello of broker %q: a share without a topic", id)
		}
		if err := h.Share.Validate(); err != nil {
			return nil, fmt.Errorf("hello of broker %q: topic %q: %w", id, h.Topic, err)
		}
		if h.Epoch == 0 {
			return nil, fmt.Errorf("hello of broker %q: topic %q: a share without an epoch", id, h.Topic)
		}
		reported[h.Topic] = h
	}
	b := l.brokers[id]
	if b == nil {
		b = &broker{}
		l.brokers[id] = b
	}
	if slices.Contains(b.past, instance) {
		return nil, fmt.Errorf("hello of broker %q, instance %q: %w", id, instance, ErrReplaced)
	}
	same := b.instance == instance
	if !same && b.instance != "" {
		b.past = append(b.past, b.instance)
		b.past = b.past[max(0, len(b.past)-maxPast):]
	}
	b.instance, b.connected = instance, true

	for _, h := range held {
		l.epoch = max(l.epoch, h.Epoch)
		if l.topics[h.Topic] == nil {
			l.topics[h.Topic] = &topic{name: h.Topic}
		}
	}
	var grants []Grant
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		t := l.topics[name]
		h, holds := reported[name]
		m := t.member(id)
		if m == nil {
			if !holds {
				continue
			}
			m = t.insert(id)
		}
		if p := m.pending; p.Epoch != 0 {
			// Not applied, and never will be: its tokens still exist. Where the
			// broker does not say, it may have applied the grant and dropped
			// the topic since: they are given up.
			if same && holds && h.Epoch < p.Epoch {
				t.pool += p.Tokens
			}
			m.pending = Grant{}
		}
		m.acked, m.ackedEpoch = h.Share, h.Epoch
		grants = append(grants, l.advance(t)...)
	}
	return grants, nil
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
	var grants []Grant
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		if t := l.topics[name]; t.member(id) != nil {
			grants = append(grants, l.advance(t)...)
		}
	}
	return grants
}

// Forget takes the word of somebody who knows that the broker's process has
// ended and will not come back as the same instance: what it held is free
// again. It fails with ErrConnected while the broker has a session.
func (l *Ledger) Forget(id string) ([]Grant, error) {
	b := l.brokers[id]
	if b != nil && b.connected {
		return nil, fmt.Errorf("forget broker %q: %w", id, ErrConnected)
	}
	delete(l.brokers, id)
	var grants []Grant
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		t := l.topics[name]
		if m := t.member(id); m != nil {
			m.acked, m.pending = tokenbucket.Share{}, Grant{}
			grants = append(grants, l.advance(t)...)
		}
	}
	return grants, nil
}

// Ack says that the grant of this epoch is in force at the broker, with share,
// and that its bucket gave up released tokens for it. An acknowledgement that
// is not of the one grant that waits for it is late or a duplicate, and does
// nothing. It fails if it contradicts that grant.
func (l *Ledger) Ack(id, name string, epoch uint64, got tokenbucket.Share, released tokenbucket.Tokens) ([]Grant, error) {
	if epoch > l.epoch {
		return nil, fmt.Errorf("broker %q acknowledges epoch %d of topic %q, the newest is %d", id, epoch, name, l.epoch)
	}
	t := l.topics[name]
	if t == nil {
		return nil, nil
	}
	m := t.member(id)
	if m == nil || m.pending.Epoch == 0 || m.pending.Epoch != epoch {
		return nil, nil
	}
	if got != m.pending.Share {
		return nil, fmt.Errorf("broker %q acknowledges epoch %d of topic %q with share %+v, granted was %+v",
			id, epoch, name, got, m.pending.Share)
	}
	most := tokenbucket.Tokens(max(0, m.acked.Burst-got.Burst)) * tokenbucket.Token
	if released < 0 || released > most {
		return nil, fmt.Errorf("broker %q gave up %d thousandths of a token at epoch %d of topic %q, outside 0 to %d",
			id, released, epoch, name, most)
	}
	m.acked, m.ackedEpoch, m.pending = got, epoch, Grant{}
	t.pool += released
	return l.advance(t), nil
}

// Outstanding returns the grants that the broker has not acknowledged.
func (l *Ledger) Outstanding(id string) []Grant {
	var grants []Grant
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		if m := l.topics[name].member(id); m != nil && m.pending.Epoch != 0 {
			grants = append(grants, m.pending)
		}
	}
	return grants
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
	v := TopicView{Topic: t.name, Contract: t.contract, Removing: t.removing, Settled: true, Pool: t.pool}
	for _, m := range t.members {
		mv := MemberView{
			Broker: m.broker, Target: m.target,
			Granted: m.acked, GrantedEpoch: m.ackedEpoch,
			Acknowledged: m.acked, AcknowledgedEpoch: m.ackedEpoch,
			Reserved: m.reserve(), Connected: l.connected(m.broker),
		}
		if m.pending.Epoch != 0 {
			mv.Granted, mv.GrantedEpoch = m.pending.Share, m.pending.Epoch
		}
		if m.pending.Epoch != 0 || m.acked != m.target {
			v.Settled = false
		}
		v.Members = append(v.Members, mv)
	}
	return v
}

func (l *Ledger) connected(id string) bool {
	b := l.brokers[id]
	return b != nil && b.connected
}

// advance grants what can be granted now, and forgets members, and in the end
// the topic, that hold nothing and are meant to hold nothing.
func (l *Ledger) advance(t *topic) []Grant {
	t.members = slices.DeleteFunc(t.members, func(m *member) bool {
		return m.target.IsZero() && m.acked.IsZero() && m.pending.Epoch == 0
	})
	if len(t.members) == 0 && (t.removing || t.contract.IsZero()) {
		delete(l.topics, t.name)
		return nil
	}
	if t.contract.IsZero() && !t.removing {
		return nil // nobody set it: brokers keep what they hold
	}

	// Every connected member that owes no acknowledgement falls to its target
	// where it is above, and asks for the rest where it is below.
	var moves []*move
	awaited := false // a decrease is, or is about to be, on its way
	for _, m := range t.members {
		if !l.connected(m.broker) {
			continue
		}
		if p := m.pending; p.Epoch != 0 {
			awaited = awaited || p.Share.Rate < m.acked.Rate || p.Share.Burst < m.acked.Burst
			continue
		}
		if m.acked == m.target {
			continue
		}
		v := &move{member: m, next: tokenbucket.Share{
			Rate:  min(m.acked.Rate, m.target.Rate),
			Burst: min(m.acked.Burst, m.target.Burst),
		}}
		awaited = awaited || v.next != m.acked
		moves = append(moves, v)
	}
	free := t.free()
	// Invariant (3), where a broker reported more than we knew of.
	t.pool = min(t.pool, tokenbucket.Tokens(free.Burst)*tokenbucket.Token)
	rates := allot(int64(free.Rate), !awaited, moves, func(v *move) int64 { return int64(v.member.target.Rate - v.next.Rate) })
	bursts := allot(free.Burst, !awaited, moves, func(v *move) int64 { return v.member.target.Burst - v.next.Burst })

	var grants []Grant
	for i, v := range moves {
		next := v.next
		next.Rate += tokenbucket.Rate(rates[i])
		next.Burst += bursts[i]
		if next.Validate() != nil {
			continue // half a share is none: it waits for the other half
		}
		if next == v.member.acked {
			continue
		}
		var tokens tokenbucket.Tokens
		if grown := next.Burst - v.member.acked.Burst; grown > 0 {
			tokens = tokenbucket.Tokens(mulDiv(int64(t.pool), grown, free.Burst))
			t.pool -= tokens
			free.Burst -= grown
		}
		l.epoch++
		v.member.pending = Grant{Broker: v.member.broker, Topic: t.name, Epoch: l.epoch, Share: next, Tokens: tokens}
		grants = append(grants, v.member.pending)
	}
	return grants
}

// move is a member's way from what it holds towards its target.
type move struct {
	member *member
	next   tokenbucket.Share // its share once it has given up what it is to give up
}

// allot divides free over what the moves need. If there is not enough and this
// is all there will be, everybody gets his proportion. If more is to come, one
// after the other gets all he needs, first those that hold nothing: in
// proportion it would take a grant to everybody for each acknowledgement.
// Postcondition: no move gets more than it needs, the sum is at most free.
func allot(free int64, last bool, moves []*move, need func(*move) int64) []int64 {
	got := make([]int64, len(moves))
	var sum int64
	for _, v := range moves {
		sum += need(v)
	}
	if sum > free && last {
		for i, v := range moves {
			got[i] = mulDiv(free, need(v), sum)
		}
		return got
	}
	for _, empty := range []bool{true, false} {
		for i, v := range moves {
			if v.member.acked.IsZero() == empty {
				got[i] = min(need(v), free)
				free -= got[i]
			}
		}
	}
	return got
}

// free returns what of the contract is reserved for nobody; never negative.
func (t *topic) free() tokenbucket.Share {
	free := t.contract
	for _, m := range t.members {
		r := m.reserve()
		free.Rate -= r.Rate
		free.Burst -= r.Burst
	}
	return tokenbucket.Share{Rate: max(0, free.Rate), Burst: max(0, free.Burst)}
}

// aim sets the members' targets. Requires: target sorted and checked.
func (t *topic) aim(target []share.Assigned) {
	for _, m := range t.members {
		m.target = tokenbucket.Share{}
	}
	for _, a := range target {
		m := t.member(a.Broker)
		if m == nil {
			m = t.insert(a.Broker)
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

func (t *topic) insert(id string) *member {
	i, _ := t.find(id)
	m := &member{broker: id}
	t.members = slices.Insert(t.members, i, m)
	return m
}

// holders returns the brokers that may be using something of t.
func (t *topic) holders() []string {
	var ids []string
	for _, m := range t.members {
		if !m.reserve().IsZero() {
			ids = append(ids, m.broker)
		}
	}
	return ids
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
		free.Rate -= a.Share.Rate
		free.Burst -= a.Share.Burst
		if free.Rate < 0 || free.Burst < 0 {
			return nil, fmt.Errorf("the shares sum to more than the contract of %d milli-msg/s, burst %d",
				contract.Rate, contract.Burst)
		}
	}
	return sorted, nil
}

// mulDiv returns floor(a*b/c) without overflow. Requires: 0 <= a, 0 <= b <= c, c > 0.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(q)
}
