package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// world is a topic, "t", with brokers, an adaptor and a journal. All possible failures happen: brokers
// come and go, refuse and do not answer, the adaptor fails, callers leave, and the controller ends at
// any point and restarts.
type world struct {
	*rapid.T
	cat    *catalog.Catalog // durable
	clock  time.Time
	rng    *rand.Rand
	holds  map[string]bool // brokers that hold the topic
	uses   map[string]bool // brokers that refuse to remove the topic unless forced
	shares map[string]bool // brokers to which the adaptor has given shares; nil: no contract
	held   map[string]bool // brokers that have a share, and report it to a restarted adaptor
	torn   bool            // the adaptor or the controller failed, so the adaptor may be behind
	// granted are the brokers with a share from the adaptor. over are the granted brokers that may use
	// more than the contract, because they were disconnected when the contract was lowered or removed.
	// lowered are the brokers that will be over once the topic has moved.
	granted, unfinished, lowered map[string]bool
	// The controller, gone after a crash.
	m       *Topic
	effects []Effect
	pending []question
	// The last catalog state of an open topic.
	observed catalog.Topic
}

// question is a request to a broker. A broker handles its questions one after the other. late: no
// owner waits for the answer any more; lost: the broker's session has ended before.
type question struct {
	broker                     string
	remove, unused, late, lost bool
}

const name = "t"

var brokers = []string{"b1", "b2", "b3", "b4"}

func newWorld(t *rapid.T) *world {
	w := &world{T: t, cat: catalog.New(), clock: time.Unix(1e9, 0), rng: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)),
		holds: map[string]bool{}, uses: map[string]bool{}, held: map[string]bool{},
		granted: map[string]bool{}, unfinished: map[string]bool{}, lowered: map[string]bool{}}
	for _, id := range brokers {
		w.apply(catalog.BrokerJoined{ID: id, Instance: id, TCPAddress: id, HTTPAddress: id, Mcap: 100})
	}
	return w
}

func (w *world) apply(e catalog.Event) {
	w.Helper()
	if _, err := w.cat.Apply(e); err != nil {
		w.Fatalf("%+v: %v", e, err)
	}
	w.check()
}

func (w *world) topic() catalog.Topic { t, _ := w.cat.Topic(name); return t }

func (w *world) connected(id string) bool { b, _ := w.cat.Broker(id); return b.Connected }

// check verifies the invariants after each durable change.
func (w *world) check() {
	w.Helper()
	t := w.topic()
	if before := w.observed; before.Placement != nil && t.Created == before.Created && t.Placement.Epoch() < before.Placement.Epoch() {
		w.Fatalf("epoch %d after %d", t.Placement.Epoch(), before.Placement.Epoch())
	}
	w.observed = t
	if t.Spec == nil || t.State != catalog.Active && t.State != catalog.Degraded {
		if a, err := w.cat.Resolve(name, "g.0"); err == nil {
			w.Fatalf("a publisher is sent to %+v of a topic that is %v", a, t.State)
		}
		return
	}
	for i := range t.Placement.Len() {
		a, err := w.cat.Resolve(name, t.Placement.At(i).Publisher)
		if err != nil || a.Epoch != t.Placement.Epoch() || !slices.Contains(t.Plan.Brokers(), a.Broker) {
			w.Fatalf("publisher %d is at %+v, %v, by the plan %+v", i, a, err, t.Plan)
		}
	}
}

// start makes a machine, as the controller would.
func (w *world) start(target Target) {
	w.m = New(name, w.topic(), target, Limits{Answer: 5 * time.Second, Consumers: 8 * time.Second})
	w.effects = nil
	w.handle(Begun{})
}

func (w *world) handle(e Event) {
	w.Helper()
	w.effects = append(w.effects, w.m.Step(e, w.clock)...)
	if w.m.Over() {
		if w.m.Step(e, w.clock) != nil {
			w.Fatalf("the machine has effects after its end: %+v", e)
		}
		return
	}
	// The topic waits for something: an answer, a time, or the result of an effect.
	if len(w.effects) == 0 && w.m.Due().IsZero() {
		w.Fatalf("it waits for nothing after %+v: %+v", e, w.m)
	}
}

// plan draws a plan over some of the available brokers.
func (w *world) plan() (catalog.Topic, []string, error) {
	t, placed := w.cat.Topic(name)
	free := w.cat.Snapshot(name)
	w.rng.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	free = free[:w.rng.IntN(len(free)+1)] // occasionally no brokers, so nothing fits
	slices.SortFunc(free, func(a, b placement.Broker) int { return slices.Index(brokers, a.ID) - slices.Index(brokers, b.ID) })
	rate := int64(10 + w.rng.IntN(50+50*len(free)))
	spec := &catalog.Spec{
		Demand: placement.Demand{Topic: name, Rate: rate, RateMilli: rate * 1000, Burst: 100, Groups: []placement.Group{{Key: "g", Count: 8, Rate: 1}}},
		SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Channels: []string{"c"},
	}
	plan, err := placement.Place(spec.Policy, free, spec.Demand, w.rng)
	if err != nil {
		return t, nil, err
	}
	var e catalog.Event
	if placed {
		e, err = catalog.NewTopicMoving(spec, plan)
	} else {
		e, err = catalog.NewTopicPlaced(spec, plan, "")
	}
	if err == nil {
		_, err = w.cat.Apply(e)
	}
	if err != nil {
		return t, nil, err
	}
	w.check()
	t = w.topic()
	if t.Next == nil {
		return t, t.Plan.Brokers(), nil
	}
	return t, w.cat.NextUnprepared(name), nil
}

// perform carries out the next effect. With fail, the effect fails if it can.
func (w *world) perform(fail bool) {
	w.Helper()
	e := w.effects[0]
	w.effects = w.effects[1:]
	var err error
	if fail {
		err = errors.New("injected")
	}
	t := w.topic()
	switch e := e.(type) {
	case Plan:
		adaptorKnows := len(w.cat.LeftoverContracts()) > 0
		t, missing, err := w.plan()
		w.handle(Planned{t, missing, adaptorKnows, err})
	case Prepare:
		w.request(e.Brokers, question{})
	case Remove:
		for _, id := range e.Brokers {
			if slices.Contains(t.Plan.Brokers(), id) && t.State != catalog.Deleting && t.State != catalog.Preparing {
				w.Fatalf("broker %s is to remove a topic that is placed there", id)
			}
		}
		if t.Uncreated && !e.Unused {
			w.Fatalf("messages that %v have acknowledged are to be removed: the topic was never active", e.Brokers)
		}
		w.request(e.Brokers, question{remove: true, unused: e.Unused})
	case Grant:
		shares := map[string]bool{}
		for _, id := range append(e.Plan.Brokers(), e.Retiring...) {
			if !slices.Contains(t.Holders(), id) {
				w.Fatalf("a share for broker %s, which does not hold the topic: %+v", id, t)
			}
			shares[id] = true
		}
		for _, id := range append(t.Plan.Brokers(), t.Retiring...) {
			if !shares[id] {
				w.Fatalf("nothing for broker %s, which may need it", id)
			}
		}
		if t.State == catalog.Preparing && len(w.unfinished) > 0 {
			fail, err = true, errors.New("busy")
		}
		if w.torn = fail; !fail {
			w.lowered = map[string]bool{}
			for _, id := range brokers {
				switch {
				case w.connected(id) && shares[id] && w.holds[id]:
					w.granted[id] = true
				case w.granted[id] && !w.connected(id) && e.Spec.Demand.RateMilli < t.Spec.Demand.RateMilli:
					w.lowered[id] = true
				}
			}
			w.shares = shares
			for id := range shares {
				w.held[id] = w.holds[id] && w.connected(id)
			}
		}
		w.handle(Granted{Members: slices.Sorted(maps.Keys(shares)), Err: err})
	case Drop:
		if t.Spec != nil && t.State != catalog.Deleting && t.State != catalog.Preparing {
			w.Fatalf("the contract of a topic goes that is %v", t.State)
		}
		if !fail {
			for _, id := range brokers {
				if w.granted[id] && w.connected(id) {
					delete(w.granted, id)
				} else if w.granted[id] {
					w.unfinished[id] = true
				}
			}
			w.shares = nil
			maps.DeleteFunc(w.held, func(id string, _ bool) bool { return w.connected(id) })
		}
		w.handle(Granted{Disconnected: slices.ContainsFunc(t.Holders(), func(id string) bool { return !w.connected(id) }), Err: err})
	case LookShares:
		held := []string{}
		if !fail {
			held = slices.Sorted(maps.Keys(w.shares))
		}
		w.handle(Shares{held})
	case LookUnconfirmed:
		if moving := t.Next != nil; moving != !e.Contract.IsZero() {
			w.Fatalf("a contract of %+v of a topic that is %v", e.Contract, t.State)
		}
		var list []catalog.UnconfirmedShare
		for _, id := range brokers {
			if w.unfinished[id] || w.lowered[id] || fail && slices.Contains(e.Holders, id) {
				list = append(list, catalog.UnconfirmedShare{Broker: id, Share: e.Former})
			}
		}
		w.handle(Unconfirmed{list, e.Raised && w.rng.IntN(2) == 0, w.rng.IntN(4) == 0})
	case LookConsumers:
		read := map[string][]string{}
		for _, id := range brokers {
			if w.rng.IntN(2) == 0 {
				read[id] = []string{"c"}
			}
		}
		w.handle(Consumers{read, true, fail})
	case Nudge:
		if slices.Contains(w.m.fresh(), e.Broker) {
			w.Fatalf("broker %s gets consumers that it lacks", e.Broker)
		}
	case Late:
		for channel, missing := range e.Missing {
			for _, id := range missing {
				if !slices.Contains(w.m.fresh(), id) {
					w.Fatalf("consumers of %s are late on broker %s, which is not new", channel, id)
				}
			}
		}
	case Write:
		if _, moved := e.Event.(catalog.TopicMoved); moved {
			for _, q := range t.Next.Plan.Quotas {
				if w.connected(q.Broker) && !w.holds[q.Broker] {
					w.Fatalf("moved to broker %s, which does not have the topic", q.Broker)
				}
			}
		}
		if e.Unconfirmed != nil {
			w.apply(*e.Unconfirmed)
		}
		if _, err = w.cat.Apply(e.Event); err == nil {
			w.check()
			w.confirmed(e.Event)
		}
		if w.m.target.Dead {
			w.disconnect(w.m.target.Retire) // the broker rejoins with nothing, or not at all
		}
		switch e.Event.(type) {
		case catalog.TopicActivated, catalog.TopicMoved, catalog.TopicDeleting:
		default:
			if err != nil {
				w.Fatalf("refused: %+v: %v", e.Event, err)
			}
		}
		w.handle(Written{Topic: w.topic(), Err: err})
	}
}

// confirmed checks that an acknowledged event keeps the list of brokers that may use more than the
// contract.
func (w *world) confirmed(e catalog.Event) {
	w.Helper()
	switch e.(type) {
	case catalog.TopicMoved:
		maps.Copy(w.unfinished, w.lowered)
	case catalog.TopicRemoved:
	default:
		return
	}
	clear(w.lowered)
	for id := range w.unfinished {
		if !slices.ContainsFunc(w.cat.Unconfirmed(name), func(s catalog.UnconfirmedShare) bool { return s.Broker == id }) {
			w.Fatalf("broker %s may use more than the contract after %T, and that is not kept: %+v", id, e, w.cat.Unconfirmed(name))
		}
	}
}

// disconnect makes a broker give up the topic and its share.
func (w *world) disconnect(id string) {
	for _, shares := range []map[string]bool{w.granted, w.unfinished, w.lowered} {
		delete(shares, id)
	}
	delete(w.holds, id)
	delete(w.held, id)
}

// restart restarts the adaptor. The new adaptor knows only what brokers report.
func (w *world) restart() {
	w.shares, w.torn = nil, true
	for _, id := range brokers {
		if w.held[id] {
			if w.shares == nil {
				w.shares = map[string]bool{}
			}
			w.shares[id] = true
		}
	}
}

func (w *world) request(brokers []string, q question) {
	for i := range w.pending {
		w.pending[i].late = true
	}
	for _, id := range brokers {
		q.broker = id
		w.pending = append(w.pending, q)
	}
}

// answer lets a broker answer. With refuse, the broker refuses if possible.
func (w *world) answer(i int, refuse bool) {
	i = slices.IndexFunc(w.pending, func(q question) bool { return q.broker == w.pending[i].broker })
	q := w.pending[i]
	w.pending = slices.Delete(w.pending, i, i+1)
	var err error
	switch {
	case q.lost || !w.connected(q.broker):
		err = errors.New("gone")
	case refuse && !q.remove, q.unused && w.uses[q.broker]:
		err = errors.New("refused")
	case q.remove:
		w.disconnect(q.broker)
	default:
		if w.cat.LeftOn(name, q.broker) && !w.cat.Keeps(name, q.broker) {
			w.disconnect(q.broker) // the broker had another topic
		}
		if w.holds[q.broker] = true; w.cat.Expects(name, q.broker) {
			w.apply(catalog.MemberPrepared{Topic: name, Broker: q.broker})
		}
	}
	if !q.late {
		w.handle(Answered{q.broker, err})
	}
}

// crash ends the controller; the next controller recovers from the durable state.
func (w *world) crash() {
	before := w.topic()
	w.m, w.effects, w.torn = nil, nil, true
	w.request(nil, question{})
	for len(w.pending) > 0 {
		w.pending[0].lost = rapid.Bool().Draw(w.T, "lost")
		w.answer(0, false)
	}
	w.apply(catalog.Restarted{})
	for _, id := range brokers {
		if rapid.Bool().Draw(w.T, "back "+id) {
			w.toggle(id)
		}
	}
	if after := w.topic(); after.Spec != before.Spec || after.Next != before.Next || !slices.Equal(after.Retiring, before.Retiring) || fmt.Sprint(after.Plan) != fmt.Sprint(before.Plan) {
		w.Fatalf("after a restart it is %+v, not %+v", after, before)
	}
	switch t := w.topic(); {
	case t.State == catalog.Preparing:
		w.apply(catalog.TopicDeleting{Topic: name})
		fallthrough
	case t.State == catalog.Deleting:
		w.start(Target{Gone: true})
	case t.Next != nil:
		w.start(Target{Undo: true})
	}
}

// toggle connects or disconnects a broker.
func (w *world) toggle(id string) {
	if w.connected(id) {
		w.apply(catalog.BrokerLeft{ID: id})
		for i := range w.pending {
			w.pending[i].lost = w.pending[i].lost || w.pending[i].broker == id
		}
		return
	}
	w.apply(catalog.BrokerJoined{ID: id, Instance: id, TCPAddress: id, HTTPAddress: id, Mcap: 100})
	delete(w.unfinished, id) // the broker is granted its target share
	delete(w.lowered, id)
	// The broker's session has work, as the controller assigns it.
	remove, prepare := w.cat.Work(id)
	for range remove {
		if !w.cat.Keeps(name, id) || !w.uses[id] {
			w.disconnect(id)
			w.apply(catalog.LeftoverRemoved{Topic: name, Broker: id})
		}
	}
	for range prepare {
		w.holds[id] = true
		w.apply(catalog.MemberPrepared{Topic: name, Broker: id})
	}
}

func setOf(ids []string) map[string]bool {
	all := map[string]bool{}
	for _, id := range ids {
		all[id] = true
	}
	return all
}

func (w *world) idle() bool { return len(w.effects) == 0 && (w.m == nil || w.m.Over()) }

// quietly lets the current change end without further failures.
func (w *world) quietly() {
	for range 10_000 {
		switch {
		case len(w.effects) > 0:
			w.perform(false)
		case len(w.pending) > 0:
			w.answer(0, false)
		case w.idle():
			return
		default:
			w.clock = w.m.Due()
			w.handle(Tick{})
		}
	}
	w.Fatalf("it does not end: %+v", w.m)
}

func TestATopicUnderControl(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		broker := rapid.SampledFrom(brokers)
		if rapid.Bool().Draw(t, "there is a topic") {
			w.start(Target{Plan: true})
			w.quietly()
		}
		t.Repeat(map[string]func(*rapid.T){
			"start": func(t *rapid.T) {
				if !w.idle() {
					t.Skip()
				}
				after := w.topic()
				targets := []Target{{Plan: true}}
				if after.Spec != nil {
					targets = append(targets, Target{Shared: true}, Target{Shared: true, Adopt: true}, Target{Gone: true})
					for _, id := range after.Retiring {
						targets = append(targets, Target{Retire: id}, Target{Retire: id, Forced: true}, Target{Retire: id, Dead: !w.connected(id)})
					}
				}
				if len(w.cat.LeftoverContracts()) > 0 {
					held := slices.ContainsFunc(brokers, func(id string) bool { return w.cat.LeftOn(name, id) })
					targets = append(targets, Target{Forget: true, OnBrokers: held})
				}
				w.start(rapid.SampledFrom(targets).Draw(t, "target"))
			},
			"perform": func(t *rapid.T) {
				if len(w.effects) == 0 {
					t.Skip()
				}
				for range rapid.IntRange(1, 4).Draw(t, "effects") {
					if len(w.effects) > 0 {
						w.perform(rapid.IntRange(0, 6).Draw(t, "fails") == 0)
					}
				}
			},
			"answer": func(t *rapid.T) {
				if len(w.pending) == 0 || len(w.effects) > 0 {
					t.Skip()
				}
				w.answer(rapid.IntRange(0, len(w.pending)-1).Draw(t, "which"), rapid.IntRange(0, 6).Draw(t, "refused") == 0)
			},
			"tick": func(t *rapid.T) {
				if w.m == nil || w.m.Due().IsZero() || len(w.effects) > 0 {
					t.Skip()
				}
				w.clock = w.m.Due()
				w.handle(Tick{})
			},
			"all goes well": func(t *rapid.T) {
				if w.idle() {
					t.Skip()
				}
				w.quietly()
			},
			"broker": func(t *rapid.T) { w.toggle(broker.Draw(t, "broker")) },
			"use": func(t *rapid.T) {
				id := broker.Draw(t, "broker")
				w.uses[id] = !w.uses[id]
			},
			"cancel": func(t *rapid.T) {
				if w.idle() || len(w.effects) > 0 {
					t.Skip()
				}
				w.handle(Cancelled{errors.New("gone")})
			},
			"close": func(t *rapid.T) {
				if w.idle() || len(w.effects) > 0 {
					t.Skip()
				}
				w.handle(Closing{NoAnswers: w.rng.IntN(2) == 0})
			},
			"stray": func(t *rapid.T) { // an answer to something that was given up
				if w.idle() || len(w.effects) > 0 {
					t.Skip()
				}
				w.handle(Answered{"b9", errors.New("late")})
			},
			"crash":   func(*rapid.T) { w.crash() },
			"adaptor": func(*rapid.T) { w.restart() },
		})

		// The failures end and the current change completes. Then the topic is at its target, or where
		// it was.
		w.quietly()
		clear(w.uses)
		for _, id := range brokers {
			if !w.connected(id) {
				w.toggle(id)
			}
		}
		for range 20 {
			after := w.topic()
			if after.Spec == nil || len(after.Retiring) == 0 {
				break
			}
			w.start(Target{Retire: after.Retiring[0]})
			w.quietly()
		}
		after := w.topic()
		if after.Spec == nil {
			if w.shares != nil && len(w.cat.LeftoverContracts()) == 0 {
				t.Fatalf("the adaptor has the contract of a topic that is gone: %v", w.shares)
			}
			for id := range w.holds {
				if !w.cat.LeftOn(name, id) {
					t.Fatalf("broker %s has a topic that is gone, and it is not known", id)
				}
			}
			return
		}
		if after.Next != nil || len(after.Retiring) > 0 || after.State == catalog.Preparing || after.State == catalog.Deleting {
			t.Fatalf("it is not settled: %+v", after)
		}
		if !w.torn && !maps.Equal(w.shares, setOf(after.Plan.Brokers())) {
			t.Fatalf("shares of %v for %+v", w.shares, after.Plan)
		}
		// The controller informs the adaptor when the two differ.
		w.start(Target{Shared: true})
		w.quietly()
		for _, id := range brokers {
			member := slices.Contains(after.Plan.Brokers(), id)
			if w.shares[id] != member || member && !w.holds[id] || !member && w.holds[id] && !w.cat.LeftOn(name, id) {
				t.Fatalf("broker %s: member %v, share %v, topic %v", id, member, w.shares[id], w.holds[id])
			}
		}
		if w.m.Err() != nil {
			t.Fatal(w.m.Err())
		}
	})
}
