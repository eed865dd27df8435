package ledger_test

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// world is a ledger, brokers, and a network between them that delays, loses,
// doubles and reorders whatever it likes. Brokers crash and come back, and
// sessions end without either side noticing when.
type world struct {
	ledger *ledger.Ledger
	// twin gets the same calls and must give the same answers: no decision
	// depends on the order of a map.
	twin    *ledger.Ledger
	brokers []*node
	grants  []grantMsg // on their way to brokers
	acks    []ackMsg   // on their way to the ledger
	// contracts are those set, until the ledger forgets them.
	contracts map[string]tokenbucket.Share
	// tokens existed of each topic at the last check. Only time may make more.
	tokens map[string]tokenbucket.Tokens
}

// node is a broker's process, or the place where one was.
type node struct {
	id       string
	starts   int  // how many processes there were
	up       bool // a process is running
	session  int  // of its newest hello, over all processes; 0: none yet
	attached bool // that session has not ended on its side
	topics   map[string]*holding
}

// holding is a topic at a broker. tokens stands for the bucket's level: it may
// be filled up to the burst at any time, because time may have passed.
type holding struct {
	share  tokenbucket.Share
	epoch  uint64
	tokens tokenbucket.Tokens
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

func newWorld(brokers int) *world {
	w := &world{ledger: ledger.New(1000), twin: ledger.New(1000), contracts: map[string]tokenbucket.Share{}, tokens: map[string]tokenbucket.Tokens{}}
	for i := range brokers {
		w.brokers = append(w.brokers, &node{id: fmt.Sprintf("b%d", i), up: true, starts: 1, topics: map[string]*holding{}})
	}
	return w
}

func (w *world) node(id string) *node {
	return w.brokers[slices.IndexFunc(w.brokers, func(n *node) bool { return n.id == id })]
}

// call makes the same call on both ledgers and sends the grants it returns.
func (w *world) call(t *rapid.T, f func(*ledger.Ledger) ([]ledger.Grant, error)) error {
	grants, err := f(w.ledger)
	again, twinErr := f(w.twin)
	if !reflect.DeepEqual(grants, again) || (err == nil) != (twinErr == nil) {
		t.Fatalf("the same calls gave different answers:\n%+v, %v\n%+v, %v", grants, err, again, twinErr)
	}
	for i, g := range grants {
		n := w.node(g.Broker)
		w.grants = append(w.grants, grantMsg{g, n.session})
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

func (w *world) hello(t *rapid.T, n *node) {
	n.session++
	n.attached = true
	// The old session was closed first: what came with it is not read any more.
	w.grants = slices.DeleteFunc(w.grants, func(g grantMsg) bool { return g.Broker == n.id })
	var held []ledger.Held
	for _, name := range slices.Sorted(maps.Keys(n.topics)) {
		h := n.topics[name]
		if !h.share.IsZero() {
			held = append(held, ledger.Held{Topic: name, Share: h.share, Epoch: h.epoch})
		}
	}
	instance := fmt.Sprintf("%s.%d", n.id, n.starts)
	if err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Hello(n.id, instance, held) }); err != nil {
		t.Fatalf("hello: %v", err)
	}
}

// arrives says whether the session of a grant still exists at the broker.
func (w *world) arrives(g grantMsg) bool {
	n := w.node(g.Broker)
	return n.up && n.attached && n.session == g.session
}

// deliver hands a grant to its broker, which does what nsqd's agent does.
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
	if g.Epoch > h.epoch {
		all := h.tokens + g.Tokens
		h.tokens = min(all, tokenbucket.Tokens(g.Share.Burst)*tokenbucket.Token)
		h.share, h.epoch = g.Share, g.Epoch
		ack.released = all - h.tokens
	}
	ack.epoch, ack.share = h.epoch, h.share
	w.acks = append(w.acks, ack)
}

func (w *world) acknowledge(t *rapid.T, a ackMsg) {
	if err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) {
		return l.Ack(a.broker, a.topic, a.epoch, a.share, a.released)
	}); err != nil {
		t.Fatalf("acknowledge %+v: %v", a, err)
	}
}

// check compares the ledger with the truth. What processes hold, and what
// could still reach them, must be within the contract.
func (w *world) check(t *rapid.T) {
	if err := w.ledger.CheckInvariants(); err != nil {
		t.Fatal(err)
	}
	views := map[string]ledger.TopicView{}
	for _, v := range w.ledger.View() {
		views[v.Topic] = v
	}
	for name := range w.contracts {
		if _, ok := views[name]; !ok {
			delete(w.contracts, name)
		}
	}
	for _, name := range topicNames {
		var using tokenbucket.Share
		for _, n := range w.brokers {
			h := n.topics[name]
			if h == nil || h.share.IsZero() {
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
			if h.share.Rate > reserved.Rate || h.share.Burst > reserved.Burst {
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

// existing counts the tokens of a topic: in buckets, in the pool, and on the
// existing counts the tokens of a topic: in buckets, in the pool, and on the
// way in messages that may still be heeded, each message once.
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
			if g.Topic == topic && g.Epoch > h.epoch && n.up {
				tokens += g.Tokens
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

func TestTheContractHoldsUnderEverySchedule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.IntRange(1, 4).Draw(t, "brokers"))
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
				if v, known := w.ledger.Topic(name); known && !v.Removing {
					t.Skip("set already")
				}
				contract := tokenbucket.Share{
					Rate:  tokenbucket.Rate(rapid.Int64Range(1, 100).Draw(t, "r")),
					Burst: rapid.Int64Range(1, 20).Draw(t, "b"),
				}
				target := drawTarget(t, w, contract)
				err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.SetContract(name, contract, target) })
				if err == nil {
					w.contracts[name] = contract
				} else if v, _ := w.ledger.Topic(name); !v.Removing {
					t.Fatal(err)
				}
			},
			"propose": func(t *rapid.T) {
				name := rapid.SampledFrom(topicNames).Draw(t, "topic")
				v, known := w.ledger.Topic(name)
				if !known || v.Removing {
					t.Skip("not set")
				}
				target := drawTarget(t, w, v.Contract)
				if err := w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Propose(name, target) }); err != nil {
					t.Fatal(err)
				}
			},
			"remove": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "seldom") > 0 {
					t.Skip("not now")
				}
				name := rapid.SampledFrom(topicNames).Draw(t, "topic")
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Remove(name), nil })
			},
			"hello": func(t *rapid.T) {
				n := broker(t)
				if !n.up {
					n.up, n.starts = true, n.starts+1
				}
				w.hello(t, n)
			},
			"the broker's side of a session ends": func(t *rapid.T) { broker(t).attached = false },
			"the ledger's side of a session ends": func(t *rapid.T) {
				n := broker(t)
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Disconnect(n.id), nil })
			},
			"crash": func(t *rapid.T) {
				n := broker(t)
				n.up, n.attached, n.topics = false, false, map[string]*holding{}
			},
			"the process is known to have ended": func(t *rapid.T) {
				n := broker(t)
				if n.up {
					t.Skip("it runs")
				}
				_ = w.call(t, func(l *ledger.Ledger) ([]ledger.Grant, error) { return l.Forget(n.id) })
			},
			"the broker drops a topic": func(t *rapid.T) {
				n := broker(t)
				h := n.topics[rapid.SampledFrom(topicNames).Draw(t, "topic")]
				if h == nil || n.attached {
					t.Skip("only while away: else it would acknowledge")
				}
				h.share, h.tokens = tokenbucket.Share{}, 0
			},
			"time passes": func(t *rapid.T) {
				n := broker(t)
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
					w.grants = append(w.grants, grantMsg{g, n.session})
				}
			},
		}
		for range 5 { // long schedules find more than many
			t.Repeat(actions)
		}
		w.settle(t)
	})
}

// exchange delivers all that is on the way, until nothing more is.
func (w *world) exchange(t *rapid.T) {
	for range 1000 {
		if len(w.grants) == 0 && len(w.acks) == 0 {
			return
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

// settle lets everybody connect and everything arrive, and checks that what
// was asked for is what comes out: the ledger is not only safe.
func (w *world) settle(t *rapid.T) {
	w.grants, w.acks = nil, nil
	for _, n := range w.brokers {
		if !n.up {
			n.up, n.starts = true, n.starts+1
		}
		w.hello(t, n)
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
