package ledger_test

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// world is a ledger, brokers, and a network between them that delays, loses, duplicates and reorders
// messages. Brokers crash and come back, and sessions end without notice on either side.
type world struct {
	ledger *ledger.Ledger
	// twin gets the same calls and must give the same answers: no decision
	// depends on the order of a map.
	twin    *ledger.Ledger
	leases  ledger.Leases
	now     mono.Time
	brokers []*node
	// received is the session of the ledger's last hello.
	received map[string]int
	// process is the process of the hello in received.
	process  map[string]int
	grants   []grantMsg // in flight to brokers
	renewed  []leaseMsg // in flight to brokers: renewed leases
	acks     []ackMsg   // in flight to the ledger
	hellos   []helloMsg // in flight to the ledger
	renewals []leaseMsg // in flight to the ledger: requests for the lease
	// contracts are the current contracts, until the ledger forgets them.
	contracts map[string]tokenbucket.Share
	// lost are contracts of a ledger that has lost its memory; no call has restored them. changing are
	// lost contracts that were changed since then, while the brokers' earlier shares were within the
	// earlier contracts.
	lost, changing map[string]bool
	// lastSession are the newest sessions of brokers at the last loss of memory, and newest is the highest
	// epoch until then.
	lastSession map[string]int
	newest      uint64
	// ended has the sessions whose lease was over at the last loss of memory, by topic and broker. The
	// lease only starts again in the next session.
	ended map[[2]string]int
	void  map[uint64]bool // epochs of grants that the ledger no longer counted on
	// tokens holds the tokens of each topic that existed at the last check. Only time may add tokens.
	tokens map[string]tokenbucket.Tokens
	// tuners are the rules for topics.
	tuners map[string]*share.Tuner
}

// node is a broker's process, or the place of an ended process.
type node struct {
	id       string
	starts   int  // number of processes until now
	running  bool // a process is running
	session  int  // of the node's newest hello, over all processes; 0: none yet
	attached bool // the session has not ended on the broker's side
	policy   ledger.Policy
	topics   map[string]*holding
	// Ends of the node's lease, by a clock that is late by up to the clock bound.
	flexUntil, allUntil mono.Time
	// renewed is when the newest lease arrived, and sent when it was sent; 0: none. alone is on the
	// node's disk: a later process continues with the bases.
	renewed, sent mono.Time
	alone         bool
}

// holding is a topic at a broker. tokens stands for the bucket's level. The bucket may fill up to the
// burst at any time, because time may have passed.
type holding struct {
	share, base tokenbucket.Share
	epoch       uint64
	tokens      tokenbucket.Tokens
}

// lapse ends the parts of h that n's lease no longer covers, and reports whether any part ended.
func (w *world) lapse(n *node, h *holding) bool {
	if w.leases.Flex == 0 {
		return false
	}
	left := h.share
	if w.now >= n.flexUntil {
		left = h.base
	}
	if n.policy == ledger.Strict && w.now >= n.allUntil {
		left = tokenbucket.Share{}
	}
	if left == h.share {
		return false
	}
	h.share, h.base = left, tokenbucket.Share{Rate: min(left.Rate, h.base.Rate), Burst: min(left.Burst, h.base.Burst)}
	h.tokens = min(h.tokens, tokenbucket.Tokens(left.Burst)*tokenbucket.Token)
	return true
}

// crash ends n's process without notice.
func (w *world) crash(n *node) {
	n.running, n.attached, n.flexUntil, n.allUntil, n.renewed, n.sent = false, false, 0, 0, 0, 0
	for _, h := range n.topics {
		h.share, h.tokens = h.base, 0 // the base is on the node's disk
		if n.policy != ledger.Available || w.leases.Flex > 0 && !n.alone {
			h.share, h.base = tokenbucket.Share{}, tokenbucket.Share{}
		}
	}
}

// start starts a process with the data that its predecessor left on disk.
func (n *node) start() {
	n.running = true
	n.starts++
	maps.DeleteFunc(n.topics, func(_ string, h *holding) bool { return h.share.IsZero() })
}

type helloMsg struct {
	ledger.Session
	session int
	process int
	at      mono.Time
}

// leaseMsg is a request for a lease, made at a time, or the answer to the request.
type leaseMsg struct {
	broker  string
	session int
	at      mono.Time
	sent    mono.Time // of the lease; in a request: of the last lease that arrived
}

type grantMsg struct {
	ledger.Grant
	session int
}

type ackMsg struct {
	broker, topic string
	epoch         uint64
	share         tokenbucket.Share
	released      tokenbucket.Tokens
}

func drawWorld(t *rapid.T) *world {
	leases := rapid.SampledFrom([]ledger.Leases{{}, {Flex: 30, Session: 100, ClockBound: 5}}).Draw(t, "leases")
	var policies []ledger.Policy
	for range rapid.IntRange(1, 4).Draw(t, "brokers") {
		policies = append(policies, rapid.SampledFrom([]ledger.Policy{ledger.Leaseless, ledger.Available, ledger.Strict}).Draw(t, "policy"))
	}
	return newWorld(leases, policies...)
}

// newWorld returns a world with one running broker for each policy.
func newWorld(leases ledger.Leases, policies ...ledger.Policy) *world {
	w := &world{
		leases:    leases,
		received:  map[string]int{},
		process:   map[string]int{},
		contracts: map[string]tokenbucket.Share{}, tokens: map[string]tokenbucket.Tokens{},
		lost: map[string]bool{}, changing: map[string]bool{}, lastSession: map[string]int{}, newest: 1000,
		ended: map[[2]string]int{}, void: map[uint64]bool{},
		tuners: map[string]*share.Tuner{},
	}
	w.ledger, w.twin = ledger.New(w.newest, w.leases), ledger.New(w.newest, w.leases)
	for i, policy := range policies {
		w.brokers = append(w.brokers, &node{id: fmt.Sprintf("b%d", i), running: true, starts: 1, topics: map[string]*holding{}, policy: policy})
	}
	return w
}

func (w *world) node(id string) *node {
	return w.brokers[slices.IndexFunc(w.brokers, func(n *node) bool { return n.id == id })]
}

// call makes the same call on both ledgers and sends the returned grants.
func (w *world) call(t *rapid.T, f func(*ledger.Ledger) ([]ledger.Grant, error)) error {
	grants, err := f(w.ledger)
	again, twinErr := f(w.twin)
	if !reflect.DeepEqual(grants, again) || (err == nil) != (twinErr == nil) {
		t.Fatalf("the same calls gave different answers:\n%+v, %v\n%+v, %v", grants, err, again, twinErr)
	}
	for i, g := range grants {
		n := w.node(g.Broker)
		w.newest = max(w.newest, g.Epoch)
		w.grants = append(w.grants, grantMsg{g, w.received[g.Broker]})
		if n.policy == ledger.Leaseless && g.Flex != (tokenbucket.Share{}) {
			t.Fatalf("a flexible part for a broker without leases: %+v", g)
		}
		if !w.connected(g) {
			t.Fatalf("a grant to a broker without a session: %+v", g)
		}
		if i > 0 && grants[i-1].Epoch >= g.Epoch {
			t.Fatalf("grants out of order: %+v", grants)
		}
	}
	return err
}

func (w *world) connected(g ledger.Grant) bool {
	v, _ := w.ledger.Topic(g.Topic)
	for _, m := range v.Members {
		if m.Broker == g.Broker {
			return m.Connected
		}
	}
	return false
}

// hello begins a session at the broker. The old session was closed first, so its remaining messages
// are not read any more.
func (w *world) hello(n *node) {
	n.session++
	n.attached, n.sent = true, 0
	var held []ledger.HeldShare
	for _, name := range slices.Sorted(maps.Keys(n.topics)) {
		h := n.topics[name]
		w.lapse(n, h)
		if !h.share.IsZero() {
			flex := tokenbucket.Share{Rate: h.share.Rate - h.base.Rate, Burst: h.share.Burst - h.base.Burst}
			held = append(held, ledger.HeldShare{Topic: name, Share: h.share, Flex: flex, Epoch: h.epoch})
		}
	}
	w.hellos = append(w.hellos, helloMsg{ledger.Session{
		Broker: n.id, Policy: n.policy, Shares: held,
		Stamp: mono.Stamp{Process: fmt.Sprintf("%s.%d", n.id, n.starts), At: mono.Time(n.session)},
		Place: identity.Place{Lock: n.id},
	}, n.session, n.starts, w.now})
}

// deliverHello delivers a hello, perhaps after the broker has given the session up, and perhaps after the
// hello of a later session.
func (w *world) deliverHello(t *rapid.T, h helloMsg) {
	if w.received[h.Broker] > h.session {
		err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Hello(h.Session, w.now) })
		if !errors.Is(err, identity.ErrReplaced) && !errors.As(err, new(*identity.Lost)) {
			t.Fatalf("a hello of session %d after that of %d: %v", h.session, w.received[h.Broker], err)
		}
		return
	}
	w.received[h.Broker], w.process[h.Broker] = h.session, h.process
	if err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Hello(h.Session, w.now) }); err != nil {
		t.Fatalf("hello: %v", err)
	}
	w.renewed = append(w.renewed, leaseMsg{h.Broker, h.session, h.at, w.now})
}

// renew delivers a request for a lease. The loop accepts only requests of the session with the last
// hello.
func (w *world) renew(t *rapid.T, r leaseMsg) {
	if w.received[r.broker] == r.session {
		renewed := false
		_ = w.call(t, func(l *ledger.Ledger) (grants []ledger.Grant, _ error) {
			if r.sent > 0 {
				l.RenewalReceived(r.broker, r.sent)
			}
			renewed, grants = l.Renew(r.broker, w.now)
			return grants, nil
		})
		if renewed {
			r.sent = w.now
			w.renewed = append(w.renewed, r)
		}
	}
}

// deliverLease delivers a renewed lease.
func (w *world) deliverLease(t *rapid.T, r leaseMsg) {
	n := w.node(r.broker)
	if !n.running || !n.attached || n.session != r.session || n.policy == ledger.Leaseless {
		return
	}
	for _, h := range n.topics {
		w.lapse(n, h)
	}
	n.renewed, n.sent, n.alone = w.now, r.sent, false
	late := time.Duration(rapid.Int64Range(0, int64(w.leases.ClockBound)).Draw(t, "late clock"))
	n.flexUntil = max(n.flexUntil, r.at.Add(w.leases.Flex+late))
	n.allUntil = max(n.allUntil, r.at.Add(w.leases.Session+late))
}

func (w *world) expire(t *rapid.T) {
	lapses, twinLapses := []ledger.Lapse(nil), []ledger.Lapse(nil)
	if err := w.call(t, func(l *ledger.Ledger) (grants []ledger.Grant, _ error) {
		if l == w.twin {
			twinLapses, grants = l.Expire(w.now)
		} else {
			lapses, grants = l.Expire(w.now)
		}
		return grants, nil
	}); err != nil || !slices.Equal(lapses, twinLapses) {
		t.Fatalf("expire: %v, %v and %v", err, lapses, twinLapses)
	}
}

// arrives reports whether the session of a grant still exists at the broker.
func (w *world) arrives(g grantMsg) bool {
	n := w.node(g.Broker)
	return n.running && n.attached && n.session == g.session
}

// deliver hands a grant to its broker. The broker acts as nsqd's agent does.
func (w *world) deliver(g grantMsg) {
	if !w.arrives(g) {
		return
	}
	n := w.node(g.Broker)
	h := n.topics[g.Topic]
	if h == nil {
		h = &holding{}
		n.topics[g.Topic] = h
	}
	ack := ackMsg{broker: n.id, topic: g.Topic}
	w.lapse(n, h)
	if g.Epoch > h.epoch {
		all := h.tokens + g.Tokens
		h.tokens = min(all, tokenbucket.Tokens(g.Share.Burst)*tokenbucket.Token)
		h.share, h.base, h.epoch = g.Share, g.Base(), g.Epoch
		ack.released = all - h.tokens
		w.lapse(n, h)
	}
	ack.epoch, ack.share = h.epoch, h.share
	w.answer(n, ack)
}

// answer sends an acknowledgement in n's session if the other end of the session still has a peer.
func (w *world) answer(n *node, a ackMsg) {
	if n.session > w.lastSession[n.id] {
		w.acks = append(w.acks, a)
	}
}

func (w *world) acknowledge(t *rapid.T, a ackMsg) {
	if err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		return l.Ack(a.broker, a.topic, a.epoch, a.share, a.released)
	}); err != nil {
		t.Fatalf("acknowledge %+v: %v", a, err)
	}
}

// check compares the ledger with the true state. The shares that processes hold, and the shares that
// could still reach them, must be within the contract.
func (w *world) check(t *rapid.T) {
	views := map[string]ledger.TopicView{}
	for _, v := range w.ledger.View() {
		views[v.Topic] = v
		if w.changing[v.Topic] && v.Settled {
			delete(w.changing, v.Topic)
			w.contracts[v.Topic] = v.Contract
		}
	}
	for name := range w.contracts {
		if _, ok := views[name]; !ok && !w.lost[name] {
			delete(w.contracts, name)
			delete(w.changing, name)
		}
	}
	check := w.ledger.CheckInvariants
	if len(w.changing) > 0 { // more may be reserved than the new contract
		check = w.ledger.CheckForm
	}
	testkit.Must(t, check())
	for _, name := range topicNames {
		var using tokenbucket.Share
		for _, n := range w.brokers {
			h := n.topics[name]
			if h == nil {
				continue
			}
			if w.lapse(n, h) {
				delete(w.tokens, name)
			}
			if h.share.IsZero() {
				continue
			}
			using.Rate += h.share.Rate
			using.Burst += h.share.Burst
			var reserved tokenbucket.Share
			for _, m := range views[name].Members {
				if m.Broker == n.id {
					reserved = m.Reserved
				}
			}
			if _, found := w.received[n.id]; found && (h.share.Rate > reserved.Rate || h.share.Burst > reserved.Burst) {
				t.Fatalf("broker %s uses %+v of topic %s, reserved is %+v", n.id, h.share, name, reserved)
			}
		}
		contract, ok := w.contracts[name]
		if !ok {
			if !using.IsZero() {
				t.Fatalf("topic %s is forgotten, brokers still use %+v", name, using)
			}
			delete(w.tokens, name)
			continue
		}
		if using.Rate > contract.Rate || using.Burst > contract.Burst {
			t.Fatalf("topic %s: brokers use %+v of %+v", name, using, contract)
		}
		tokens := w.existing(name)
		if tokens > tokenbucket.Tokens(contract.Burst)*tokenbucket.Token {
			t.Fatalf("topic %s: %d thousandths of a token exist, the contract has %d tokens", name, tokens, contract.Burst)
		}
		if before, ok := w.tokens[name]; ok && tokens > before {
			t.Fatalf("topic %s: %d thousandths of a token existed, now it is %d", name, before, tokens)
		}
		w.tokens[name] = tokens
	}
}

// existing counts the tokens of a topic: in buckets, in the pool, and in messages in flight that may
// still count, each message once.
func (w *world) existing(topic string) (tokens tokenbucket.Tokens) {
	v, _ := w.ledger.Topic(topic)
	tokens = v.Pool
	seen := map[uint64]bool{}
	for _, n := range w.brokers {
		h := n.topics[topic]
		if h == nil {
			h = &holding{}
		}
		tokens += h.tokens
		for _, g := range w.ledger.Outstanding(n.id) {
			switch {
			case g.Topic != topic:
			case w.process[n.id] != n.starts:
				if w.comesBack(n.id, g) {
					tokens += g.Tokens
				}
			case g.Epoch > h.epoch:
				tokens += tokensAfter(g, h, w.lapsed(topic, n.id))
				seen[g.Epoch] = true
			}
		}
		for _, g := range w.grants { // from a ledger that has lost its memory
			if w.received[n.id] != g.session && g.Broker == n.id && g.Topic == topic && g.Epoch > h.epoch && !seen[g.Epoch] && !w.void[g.Epoch] && w.arrives(g) {
				tokens += tokensAfter(g.Grant, h, w.ended[[2]string{topic, n.id}] == g.session)
				seen[g.Epoch] = true
			}
		}
		for _, a := range w.acks {
			heeded := slices.ContainsFunc(w.ledger.Outstanding(n.id), func(g ledger.Grant) bool { return g.Epoch == a.epoch })
			if heeded && a.topic == topic && a.broker == n.id && !seen[a.epoch] && a.released > 0 {
				tokens += a.released
				seen[a.epoch] = true
			}
		}
	}
	return tokens
}

// comesBack reports whether the tokens of an outstanding grant to a dead process may return to the pool: a late hello
// of the process may report that the process never applied the grant.
func (w *world) comesBack(broker string, g ledger.Grant) bool {
	return !w.lapsed(g.Topic, broker) && slices.ContainsFunc(w.hellos, func(h helloMsg) bool {
		return h.Broker == broker && h.process == w.process[broker] && h.session > w.received[broker] &&
			slices.ContainsFunc(h.Shares, func(s ledger.HeldShare) bool { return s.Topic == g.Topic && s.Epoch < g.Epoch })
	})
}

// tokensAfter returns how many of a grant's tokens the bucket keeps when the grant arrives. Once the lease is
// over, the bucket keeps what the base has room for.
func tokensAfter(g ledger.Grant, h *holding, lapsed bool) tokenbucket.Tokens {
	if !lapsed {
		return g.Tokens
	}
	return min(g.Tokens, max(0, tokenbucket.Tokens(g.Base().Burst)*tokenbucket.Token-h.tokens))
}

func (w *world) lapsed(topic, broker string) bool {
	v, _ := w.ledger.Topic(topic)
	i := slices.IndexFunc(v.Members, func(m ledger.MemberView) bool { return m.Broker == broker })
	return i >= 0 && v.Members[i].Lapsed
}

var topicNames = []string{"t", "u"}

func drawTarget(t *rapid.T, w *world, contract tokenbucket.Share) []share.Assigned {
	var target []share.Assigned
	free := contract
	for _, n := range w.brokers {
		if free.Rate == 0 || free.Burst == 0 || rapid.IntRange(0, 4).Draw(t, "left out") == 0 {
			continue
		}
		s := tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.Int64Range(1, int64(free.Rate)).Draw(t, "rate")),
			Burst: rapid.Int64Range(1, free.Burst).Draw(t, "burst"),
		}
		free.Rate -= s.Rate
		free.Burst -= s.Burst
		target = append(target, share.Assigned{Broker: n.id, Share: s})
	}
	return target
}

func drawTerms(t *rapid.T) ledger.Terms {
	return ledger.Terms{
		Contract: tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.Int64Range(1, 100).Draw(t, "r")),
			Burst: rapid.Int64Range(1, 20).Draw(t, "b"),
		},
		Flex: ledger.Permille(rapid.SampledFrom([]int64{0, 200, 500, 1000}).Draw(t, "flexible")),
	}
}

// restart loses the ledger's memory. Sessions end, and messages to the ledger are lost. Messages to
// brokers may still arrive until the brokers send another hello.
func (w *world) restart() {
	for name := range w.contracts {
		w.lost[name] = true
		for _, n := range w.brokers {
			if w.lapsed(name, n.id) { // the ledger has forgotten the topic; the broker has not
				w.ended[[2]string{name, n.id}] = n.session
			}
		}
	}
	for _, g := range w.grants {
		counts := slices.ContainsFunc(w.ledger.Outstanding(g.Broker), func(o ledger.Grant) bool { return o.Epoch == g.Epoch })
		if w.received[g.Broker] == g.session && !counts { // the grant was given up: a strict broker stops before the grant arrives
			w.void[g.Epoch] = true
		}
	}
	w.ledger, w.twin = ledger.New(w.newest, w.leases), ledger.New(w.newest, w.leases)
	for _, n := range w.brokers {
		w.lastSession[n.id] = n.session
	}
	w.acks, w.renewals, w.hellos = nil, nil, nil
	w.received, w.process = map[string]int{}, map[string]int{}
}

// everyone returns all brokers, because any broker may hold a part of any contract.
func (w *world) everyone() (ids []string) {
	for _, n := range w.brokers {
		ids = append(ids, n.id)
	}
	return ids
}

// bringBack does what the owner of a contract does when the adaptor does not know the contract.
func (w *world) bringBack(t *rapid.T) {
	lost := slices.Sorted(maps.Keys(w.lost))
	if len(lost) == 0 {
		t.Skip("none is lost")
	}
	name := rapid.SampledFrom(lost).Draw(t, "topic")
	if w.changing[name] {
		w.change(t)
		return
	}
	contract := w.contracts[name]
	target := drawTarget(t, w, contract)
	terms := ledger.Terms{Contract: contract, Flex: 200}
	if rapid.Bool().Draw(t, "the former total is known") {
		terms.Former = contract
	}
	testkit.Must(t, w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		return l.Adopt(name, terms, target, w.everyone())
	}))
	delete(w.lost, name)
}

// change changes the terms of a contract, whether or not the adaptor knows the contract.
func (w *world) change(t *rapid.T) {
	known := slices.Sorted(maps.Keys(w.contracts))
	if len(known) == 0 {
		t.Skip("none is set")
	}
	name := rapid.SampledFrom(known).Draw(t, "topic")
	if v, _ := w.ledger.Topic(name); v.Removing {
		t.Skip("it is being removed")
	}
	terms := drawTerms(t)
	target := drawTarget(t, w, terms.Contract)
	if rapid.Bool().Draw(t, "the former total is known") {
		terms.Former = w.contracts[name]
	}
	testkit.Must(t, w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		return l.Change(name, terms, target, w.everyone())
	}))
	delete(w.lost, name)
	before := w.contracts[name]
	w.contracts[name] = before.Max(terms.Contract)
	w.changing[name] = true
}

// checkLedger lets a rule propose shares, as the loop does, after publishers have moved, come, or fallen
// silent, or after brokers retire or have more waiting than they can release.
func (w *world) checkLedger(t *rapid.T) {
	name := rapid.SampledFrom(topicNames).Draw(t, "topic")
	v, found := w.ledger.Topic(name)
	if !found || v.Removing || v.Contract.IsZero() {
		t.Skip("not set")
	}
	if tuner := w.tuners[name]; tuner == nil || rapid.IntRange(0, 3).Draw(t, "publishers move") == 0 {
		var placed []share.Placed
		for _, n := range w.brokers {
			if publishers := rapid.IntRange(-1, 3).Draw(t, "publishers"); publishers >= 0 && int64(len(placed)) < min(v.Contract.Burst, int64(v.Contract.Rate)) {
				placed = append(placed, share.Placed{Broker: n.id, Publishers: max(1, publishers), Retiring: publishers == 0})
			}
		}
		quotas, err := share.Proportion(v.Contract, slices.Repeat([]int64{1}, len(placed)))
		if err != nil {
			t.Skip("nowhere to go")
		}
		for i, s := range quotas {
			placed[i].Quota = s
		}
		rule := rapid.SampledFrom([]string{share.Proportional, share.Robust, share.Sqrt}).Draw(t, "rule")
		w.tuners[name] = tuner.Place(w.now, rule, 50, placed)
	}
	for _, n := range w.brokers {
		w.tuners[name].Join(w.now, n.id, fmt.Sprint(n.starts))
		if rapid.Bool().Draw(t, "reports") {
			w.tuners[name].Report(n.id, share.Step{
				At: w.now, Length: time.Duration(rapid.IntRange(1, 20).Draw(t, "step")),
				Offered: rapid.Uint64Range(0, 100).Draw(t, "offered"), Backlog: rapid.Int64Range(0, 1000).Draw(t, "backlog"),
				Peak: rapid.Int64Range(0, 30).Draw(t, "peak"),
			})
		}
	}
	target, err := w.tuners[name].Propose(w.now, v.Contract, func(id string) share.Holding {
		h := share.Holding{Disconnected: true}
		for _, m := range v.Members {
			if m.Broker == id {
				h = share.Holding{Disconnected: !m.Connected, Target: m.Target, Reserved: m.Reserved}
			}
		}
		return h
	})
	if errors.As(err, new(*share.TooSmall)) {
		return // not enough for all that are there. The tuner has changed, so the action is not skipped.
	}
	testkit.Must(t, err)
	if target != nil {
		testkit.Must(t, w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Propose(name, target) }))
	}
}

func TestTheContractHoldsUnderEverySchedule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		broker := func(t *rapid.T) *node { return rapid.SampledFrom(w.brokers).Draw(t, "broker") }
		pick := func(t *rapid.T, n int) int {
			if n == 0 {
				t.Skip("nothing on the way")
			}
			return rapid.IntRange(0, n-1).Draw(t, "which")
		}
		actions := map[string]func(*rapid.T){
			"":            w.check,
			"all arrives": func(t *rapid.T) { w.exchange(t) },
			"set": func(t *rapid.T) {
				name := rapid.SampledFrom(topicNames).Draw(t, "topic")
				if v, found := w.ledger.Topic(name); w.lost[name] || found && !v.Removing && !v.Contract.IsZero() {
					t.Skip("set already")
				}
				terms := drawTerms(t)
				target := drawTarget(t, w, terms.Contract)
				err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.SetContract(name, terms, target) })
				if err == nil {
					w.contracts[name] = terms.Contract
				} else if v, _ := w.ledger.Topic(name); !v.Removing {
					t.Fatal(err)
				}
			},
			"change":          w.change,
			"is brought back": w.bringBack,
			"a rule follows":  w.checkLedger,
			"the adaptor restarts": func(t *rapid.T) {
				if rapid.IntRange(0, 2).Draw(t, "seldom") > 0 {
					t.Skip("not now")
				}
				w.restart()
			},
			"propose": func(t *rapid.T) {
				name := rapid.SampledFrom(topicNames).Draw(t, "topic")
				v, found := w.ledger.Topic(name)
				if !found || v.Removing || v.Contract.IsZero() {
					t.Skip("not set")
				}
				target := drawTarget(t, w, v.Contract)
				testkit.Must(t, w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Propose(name, target) }))
			},
			"remove": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "seldom") > 0 {
					t.Skip("not now")
				}
				name := rapid.SampledFrom(topicNames).Draw(t, "topic")
				if _, set := w.contracts[name]; !set {
					t.Skip("not set")
				}
				delete(w.lost, name)
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Remove(name, w.everyone()), nil })
			},
			"hello": func(t *rapid.T) {
				n := broker(t)
				if !n.running {
					n.start()
				}
				w.hello(n)
			},
			"a hello arrives": func(t *rapid.T) {
				i := pick(t, len(w.hellos))
				h := w.hellos[i]
				w.hellos = slices.Delete(w.hellos, i, i+1)
				w.deliverHello(t, h)
			},
			"ask for the lease": func(t *rapid.T) {
				n := broker(t)
				if !n.running || !n.attached {
					t.Skip("no session")
				}
				w.renewals = append(w.renewals, leaseMsg{n.id, n.session, w.now, n.sent})
			},
			"the broker is alone": func(t *rapid.T) {
				// The node's clock may be fast.
				if n := broker(t); n.running && n.renewed > 0 && w.now >= n.renewed.Add(2*w.leases.Flex-w.leases.ClockBound) {
					n.alone = true
				}
			},
			"it is proven that a process has ended": func(t *rapid.T) {
				n := broker(t)
				last := n.starts
				if n.running {
					last--
				}
				if last == 0 {
					t.Skip("none has")
				}
				instance := fmt.Sprintf("%s.%d", n.id, rapid.IntRange(1, last).Draw(t, "process"))
				w.hellos = slices.DeleteFunc(w.hellos, func(h helloMsg) bool { return h.Stamp.Process == instance })
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
					_, grants, err := l.Ended(n.id, instance, w.now)
					return grants, err
				})
			},
			"a request for the lease arrives": func(t *rapid.T) {
				i := pick(t, len(w.renewals))
				r := w.renewals[i]
				w.renewals = slices.Delete(w.renewals, i, i+1)
				w.renew(t, r)
			},
			"a lease arrives": func(t *rapid.T) {
				i := pick(t, len(w.renewed))
				r := w.renewed[i]
				w.renewed = slices.Delete(w.renewed, i, i+1)
				w.deliverLease(t, r)
			},
			"the lease ends at the broker": func(t *rapid.T) {
				n := broker(t)
				for _, name := range slices.Sorted(maps.Keys(n.topics)) {
					if h := n.topics[name]; n.attached && n.policy != ledger.Leaseless && h.epoch > 0 {
						w.lapse(n, h)
						w.answer(n, ackMsg{broker: n.id, topic: name, epoch: h.epoch, share: h.share})
					}
				}
			},
			"the ledger looks at the clock":       w.expire,
			"a moment":                            func(t *rapid.T) { w.now += mono.Time(rapid.Int64Range(1, 20).Draw(t, "moment")) },
			"a while":                             func(t *rapid.T) { w.now += mono.Time(rapid.Int64Range(20, 150).Draw(t, "while")) },
			"the broker's side of a session ends": func(t *rapid.T) { broker(t).attached = false },
			"the ledger's side of a session ends": func(t *rapid.T) {
				n := broker(t)
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Disconnect(n.id), nil })
			},
			"crash": func(t *rapid.T) { w.crash(broker(t)) },
			"the process is known to have ended": func(t *rapid.T) {
				n := broker(t)
				if n.running {
					t.Skip("it runs")
				}
				w.hellos = slices.DeleteFunc(w.hellos, func(h helloMsg) bool { return h.Broker == n.id })
				for _, h := range n.topics { // the node's disk is lost, too
					h.share, h.base = tokenbucket.Share{}, tokenbucket.Share{}
				}
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
					_, grants, err := l.Forget(n.id)
					return grants, err
				})
			},
			"the broker drops a topic": func(t *rapid.T) {
				n := broker(t)
				h := n.topics[rapid.SampledFrom(topicNames).Draw(t, "topic")]
				if h == nil || n.attached {
					t.Skip("only while disconnected: else it would acknowledge")
				}
				h.share, h.base, h.tokens = tokenbucket.Share{}, tokenbucket.Share{}, 0
			},
			"time passes": func(t *rapid.T) {
				n := broker(t)
				if !n.running {
					t.Skip("no bucket")
				}
				for _, name := range slices.Sorted(maps.Keys(n.topics)) {
					h := n.topics[name]
					h.tokens = tokenbucket.Tokens(rapid.Int64Range(0, h.share.Burst*1000).Draw(t, "tokens"))
					delete(w.tokens, name)
				}
			},
			"deliver a grant": func(t *rapid.T) {
				i := pick(t, len(w.grants))
				g := w.grants[i]
				w.grants = slices.Delete(w.grants, i, i+1)
				w.deliver(g)
			},
			"deliver a copy": func(t *rapid.T) { w.deliver(w.grants[pick(t, len(w.grants))]) },
			"lose a grant":   func(t *rapid.T) { i := pick(t, len(w.grants)); w.grants = slices.Delete(w.grants, i, i+1) },
			"acknowledge": func(t *rapid.T) {
				i := pick(t, len(w.acks))
				a := w.acks[i]
				w.acks = slices.Delete(w.acks, i, i+1)
				w.acknowledge(t, a)
			},
			"acknowledge 2x": func(t *rapid.T) { w.acknowledge(t, w.acks[pick(t, len(w.acks))]) },
			"lose an ack":    func(t *rapid.T) { i := pick(t, len(w.acks)); w.acks = slices.Delete(w.acks, i, i+1) },
			"send once more": func(t *rapid.T) {
				n := broker(t)
				for _, g := range w.ledger.Outstanding(n.id) {
					w.grants = append(w.grants, grantMsg{g, w.received[n.id]})
				}
			},
		}
		for range 5 { // long schedules find more than many
			t.Repeat(actions)
		}
		w.settle(t)
	})
}

// A process dies while a hello of its next session is on the way. The hello reports that the process never applied its last
// grant, so the tokens of the grant return to the pool.
func TestLateHelloOfADeadProcessReturnsTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { // draws nothing
		const topic = "t"
		w := newWorld(ledger.Leases{}, ledger.Leaseless)
		n := w.brokers[0]
		share := func(rate tokenbucket.Rate, burst int64) []share.Assigned {
			return []share.Assigned{{Broker: n.id, Share: tokenbucket.Share{Rate: rate, Burst: burst}}}
		}
		propose := func(rate tokenbucket.Rate, burst int64) {
			testkit.Must(t, w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Propose(topic, share(rate, burst)) }))
			w.check(t)
		}
		w.contracts[topic] = tokenbucket.Share{Rate: 8, Burst: 20}
		testkit.Must(t, w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
			return l.SetContract(topic, ledger.Terms{Contract: w.contracts[topic]}, share(2, 1))
		}))
		w.hello(n)
		w.exchange(t)
		propose(4, 17) // the grant does not arrive
		propose(1, 2)
		w.hello(n)
		w.crash(n)
		n.start()
		w.hello(n)
		w.check(t)
		late := w.hellos[0]
		w.hellos = w.hellos[1:]
		w.deliverHello(t, late)
		w.check(t)
		if v, _ := w.ledger.Topic(topic); v.Pool != 18*tokenbucket.Token {
			t.Fatalf("the pool has %d thousandths of a token", v.Pool)
		}
		w.settle(t)
	})
}

// exchange delivers all messages in flight, until no message remains.
func (w *world) exchange(t *rapid.T) {
	for range 1000 {
		if len(w.grants)+len(w.acks)+len(w.hellos)+len(w.renewals)+len(w.renewed) == 0 {
			return
		}
		hellos, renewals := w.hellos, w.renewals
		w.hellos, w.renewals = nil, nil
		for _, h := range hellos {
			w.deliverHello(t, h)
		}
		for _, r := range renewals {
			w.renew(t, r)
		}
		renewed := w.renewed
		w.renewed = nil
		for _, r := range renewed {
			w.deliverLease(t, r)
		}
		grants, acks := w.grants, w.acks
		w.grants, w.acks = nil, nil
		for _, g := range grants {
			w.deliver(g)
		}
		for _, a := range acks {
			w.acknowledge(t, a)
		}
		w.check(t)
	}
	t.Fatal("it does not come to rest")
}

// settle lets all brokers connect and every message arrive, and checks that the result is as
// requested: the ledger is not only safe.
func (w *world) settle(t *rapid.T) {
	w.expire(t)
	for len(w.lost) > 0 {
		w.bringBack(t)
	}
	w.grants, w.acks, w.hellos, w.renewals, w.renewed = nil, nil, nil, nil, nil
	for _, n := range w.brokers {
		if !n.running {
			n.start()
		}
		w.hello(n)
	}
	w.exchange(t)
	for _, n := range w.brokers {
		w.renewals = append(w.renewals, leaseMsg{n.id, n.session, w.now, n.sent})
	}
	w.exchange(t)
	for _, v := range w.ledger.View() {
		if !v.Settled || v.Removing {
			t.Fatalf("at rest, but not settled: %+v", v)
		}
		for _, m := range v.Members {
			var using tokenbucket.Share
			if h := w.node(m.Broker).topics[v.Topic]; h != nil {
				using = h.share
			}
			if using != m.Target {
				t.Fatalf("topic %s: broker %s uses %+v, meant was %+v", v.Topic, m.Broker, using, m.Target)
			}
		}
	}
}
