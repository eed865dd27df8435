package share_test

import (
	"fmt"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/holder"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// The scenarios take the adaptor's rules, ledger and leases and the brokers' buckets through trouble:
// brokers die and come back, placements change, and publishers follow.

// outcome is the result of a scenario.
type outcome struct {
	p99        time.Duration // 99th percentile of access delays in the worst ten seconds, for publishers within their part
	all        time.Duration // the same for all publishers
	noBroker   time.Duration // the longest time that a publisher had no broker
	unaccepted float64       // fraction of the messages without a broker when they were made
	healed     time.Duration // from the trouble to the end of the last second in which more than 1 % of all messages missed the SLO
}

// step and window are the adaptor's defaults. At every heartbeat, leases are renewed and expire.
const (
	step        = time.Second
	window      = 10 * time.Second
	renewPeriod = 250 * time.Millisecond
)

var leases = ledger.Leases{Flex: 3 * time.Second, Session: 30 * time.Second, ClockBound: 200 * time.Millisecond}

// node is a broker.
type node struct {
	id       string
	bucket   tokenbucket.Hindsight
	queue    []int // waiting arrivals
	offered  uint64
	maxQueue int64

	starts       int
	running, cut bool
	held         *holder.Holdings
	lease        holder.Lease
}

func (n *node) reachable() bool { return n.running && !n.cut }

type world struct {
	testing.TB
	sc      scenario
	rule    string
	machine *adaptor.Machine
	nodes   []*node
	delays  []time.Duration // by arrival; -1: lost
}

const topic = "t"

// simulate runs the scenario under a rule and returns the access delays of the arrivals, -1 for an
// arrival lost with a broker. flex is the flexible part of the shares.
func simulate(t testing.TB, sc scenario, rule string, flex ledger.Permille) []time.Duration {
	t.Helper()
	w := &world{
		TB: t, sc: sc, rule: rule, machine: adaptor.New(0, adaptor.Config{Leases: leases, Flex: flex, Window: window}),
		delays: make([]time.Duration, len(sc.arrivals)),
	}
	brokers := len(sc.start)
	for _, e := range sc.events {
		for _, p := range e.place {
			brokers = max(brokers, number(p.Broker)+1)
		}
	}
	for i := range brokers {
		w.nodes = append(w.nodes, &node{id: broker(i), held: holder.New()})
		w.start(0, w.nodes[i])
	}
	_, grants, err := w.machine.Set(0, w.contract(sc.start))
	w.apply(0, grants, err)
	events, next := sc.events, mono.Time(renewPeriod)
	advance := func(t mono.Time) {
		for len(events) > 0 && events[0].at <= t || next <= t {
			if len(events) > 0 && events[0].at <= min(next, t) {
				w.happen(events[0])
				events = events[1:]
				continue
			}
			w.tick(next)
			next = next.Add(renewPeriod)
		}
	}
	for i, a := range sc.arrivals {
		advance(a.at)
		n := w.nodes[a.broker]
		n.offered++
		n.queue = append(n.queue, i)
		w.release(n, a.at)
		n.maxQueue = max(n.maxQueue, int64(len(n.queue)))
	}
	hasQueue := func(n *node) bool { return len(n.queue) > 0 }
	for range 3600 * int(time.Second/renewPeriod) { // waiting messages
		if !slices.ContainsFunc(w.nodes, hasQueue) {
			break
		}
		advance(next)
	}
	return w.delays
}

func (w *world) contract(placed []share.Placed) *adaptor.Contract {
	return &adaptor.Contract{Topic: topic, Total: w.sc.contract, Rule: w.rule, Placed: placed}
}

// start starts a process with the predecessor's shares from disk.
func (w *world) start(now mono.Time, n *node) {
	n.running, n.starts = true, n.starts+1
	w.hello(now, n)
}

func (w *world) hello(now mono.Time, n *node) {
	s := ledger.Session{Broker: n.id, Stamp: mono.Stamp{Process: fmt.Sprint(n.starts)}, Place: identity.Place{Lock: n.id}, Policy: ledger.Available, Shares: n.held.Reconcile([]string{topic})}
	n.lease.Renew(now, leases.Flex, leases.Session)
	grants, err := w.machine.Hello(now, s)
	w.apply(now, grants, err)
}

// lapse ends the flexible part of n's share.
func (n *node) lapse(now mono.Time) {
	n.held.LapseOne(topic, true, false)
	n.bucket.Retune(now, n.held.Of(topic).Share, 0)
}

// apply puts grants into force at once: a grant takes milliseconds, and the scenarios last seconds.
func (w *world) apply(now mono.Time, grants []ledger.Grant, err error) {
	w.Helper()
	testkit.Must(w, err)
	testkit.Must(w, w.machine.Ledger.Settle(grants, func(g ledger.Grant) (tokenbucket.Tokens, bool) {
		n := w.nodes[number(g.Broker)]
		if !n.reachable() {
			return 0, false
		}
		w.release(n, now)
		n.held.Applied(g)
		return n.bucket.Retune(now, g.Share, g.Tokens), true
	}))
}

// release delivers n's messages with tokens.
func (w *world) release(n *node, now mono.Time) {
	for n.running && len(n.queue) > 0 {
		i := n.queue[0]
		at := w.sc.arrivals[i].at
		e, ok := n.bucket.Take(at, now)
		if !ok {
			return
		}
		w.delays[i] = e.Sub(at)
		n.queue = n.queue[1:]
	}
}

func (w *world) happen(e event) {
	for _, i := range e.down {
		n := w.nodes[i]
		for _, lost := range n.queue {
			w.delays[lost] = -1
		}
		n.queue, n.running, n.offered, n.maxQueue = nil, false, 0, 0
		n.lapse(e.at)
		n.bucket = tokenbucket.Hindsight{}
		w.apply(e.at, w.machine.Ledger.Disconnect(n.id), nil)
	}
	for _, i := range e.dead {
		_, grants, err := w.machine.Ledger.Forget(w.nodes[i].id)
		w.apply(e.at, grants, err)
	}
	for _, i := range e.cut {
		w.nodes[i].cut = true
	}
	for _, i := range e.frozen {
		w.nodes[i].cut, w.nodes[i].running = true, false
	}
	for _, i := range e.whole {
		if w.nodes[i].cut, w.nodes[i].running = false, true; e.at >= w.nodes[i].lease.FlexUntil {
			w.nodes[i].lapse(e.at)
		}
		w.hello(e.at, w.nodes[i])
	}
	for _, i := range e.up {
		n := w.nodes[i]
		n.bucket.Retune(e.at, n.held.Of(topic).Share, 0)
		w.start(e.at, n)
	}
	if e.place != nil {
		grants, err := w.machine.Update(e.at, w.contract(e.place))
		w.apply(e.at, grants, err)
	}
}

func (w *world) tick(now mono.Time) {
	for _, n := range w.nodes {
		if n.reachable() {
			renewed, grants := w.machine.Ledger.Renew(n.id, now)
			if renewed {
				n.lease.Renew(now, leases.Flex, leases.Session)
			}
			w.apply(now, grants, nil)
		} else if n.running && now >= n.lease.FlexUntil && n.held.Of(topic).Flex != (tokenbucket.Share{}) {
			w.release(n, now)
			n.lapse(now)
		}
		w.release(n, now)
	}
	_, grants := w.machine.Ledger.Expire(now)
	w.apply(now, grants, nil)
	report := now%mono.Time(step) == 0
	for _, n := range w.nodes {
		if !report {
			break
		}
		if n.reachable() {
			peak, short := n.bucket.Used()
			if short {
				peak += n.maxQueue
			}
			w.machine.Report(n.id, topic, share.Step{
				At: now, Length: step, Offered: n.offered, MaxBacklog: n.maxQueue, Backlog: int64(len(n.queue)), Peak: peak,
			})
		}
		n.offered, n.maxQueue = 0, int64(len(n.queue))
	}
	for range w.machine.Adaptive(now, !report) {
		grants, _, err := w.machine.Tune(now, topic)
		w.apply(now, grants, err)
	}
}

// outcome judges the delays from follow.
func (sc scenario) outcome(delays []time.Duration) outcome {
	o := outcome{noBroker: sc.noBroker, unaccepted: float64(sc.unaccepted) / float64(max(1, sc.created))}
	last := sc.arrivals[len(sc.arrivals)-1].at
	worst := func(keep bool) (most time.Duration) {
		for from := sc.trouble; from.Add(window) <= last; from = from.Add(step) {
			var windowDelays []time.Duration
			for i := sc.firstAfter(from); i < sc.firstAfter(from.Add(window)); i++ {
				if delays[i] >= 0 && !(keep && sc.arrivals[i].excess) {
					windowDelays = append(windowDelays, delays[i])
				}
			}
			most = max(most, p99(windowDelays))
		}
		return most
	}
	o.p99, o.all = worst(true), worst(false)
	for from := sc.trouble; from < last; from = from.Add(step) {
		all, late := 0, 0
		for i := sc.firstAfter(from); i < sc.firstAfter(from.Add(step)); i++ {
			all++
			if delays[i] > slo {
				late++
			}
		}
		if late*100 > all {
			o.healed = from.Add(step).Sub(sc.trouble)
		}
	}
	return o
}

// firstAfter returns the index of the first arrival at or after from.
func (sc scenario) firstAfter(from mono.Time) int {
	return sort.Search(len(sc.arrivals), func(i int) bool { return sc.arrivals[i].at >= from })
}

func p99(delays []time.Duration) time.Duration {
	if len(delays) == 0 {
		return 0
	}
	slices.Sort(delays)
	return delays[tokenbucket.Rank(len(delays), 0.99)]
}

// The guarantee that a seller of contracts expects from the default rule: publishers within their part
// do not notice the trouble of others, and no publisher notices a move.
func TestTheSLOHoldsThroughTrouble(t *testing.T) {
	for _, sc := range scenarios(1, 0.8, "move", "return") {
		delays := simulate(t, sc, share.Default, defaultFlex)
		o := sc.outcome(delays)
		if o.p99 > 2*slo || sc.name == "move" && (o.all > 2*slo || o.unaccepted > 0.001) {
			t.Errorf("%s: %+v", sc.name, o)
		}
		if sc.name == "move" && !slices.Equal(delays, simulate(t, sc, share.Default, defaultFlex)) {
			t.Error("a second run differs")
		}
	}
}

// After a shift of the traffic, rules that follow the traffic serve within the contract again. Static
// shares never do.
func TestSharesFollowAShift(t *testing.T) {
	for _, sc := range scenarios(7, 0.8, "90/10") {
		for rule, follows := range map[string]bool{share.Static: false, share.Sqrt: true} {
			if o := sc.outcome(simulate(t, sc, rule, defaultFlex)); (o.healed < 10*time.Second) != follows {
				t.Errorf("%s: %+v", rule, o)
			}
		}
	}
}

// With -benchtime=20x, BenchmarkTrouble gives the figures of docs/evaluation/trouble.md: the median and
// the worst of seeds 1 to 20.
func BenchmarkTrouble(b *testing.B) {
	for _, of := range scenes(contractAt(0.8)) {
		for _, rule := range share.Rules() {
			b.Run(of.name+"/"+rule, func(b *testing.B) { trouble(b, of.name, rule, 0.8, defaultFlex) })
		}
	}
}

// With -benchtime=20x, BenchmarkLoaded gives the same for the default rule, drains and moves at 90 % load.
func BenchmarkLoaded(b *testing.B) {
	for _, name := range []string{"drain", "move"} {
		b.Run(name, func(b *testing.B) { trouble(b, name, share.Default, 0.9, defaultFlex) })
	}
}

// With -benchtime=2x, BenchmarkFlexible reports the cost and the benefit of flexible shares, by the
// flexible part in percent.
func BenchmarkFlexible(b *testing.B) {
	for _, load := range []float64{0.8, 0.9} {
		for _, name := range []string{"control plane away", "frozen host"} {
			for _, percent := range []int64{0, 5, 10, 15, 20, 30, 50} {
				b.Run(fmt.Sprintf("%s/load=%v/flex=%d", name, load, percent), func(b *testing.B) {
					trouble(b, name, share.Default, load, ledger.Permille(10*percent))
				})
			}
		}
	}
}

// trouble reports the result of a scenario, with the next seed in each iteration.
func trouble(b *testing.B, name, rule string, load float64, flex ledger.Permille) {
	var all []outcome
	for b.Loop() {
		for _, sc := range scenarios(uint64(len(all)+1), load, name) {
			all = append(all, sc.outcome(simulate(b, sc, rule, flex)))
		}
	}
	report := func(unit string, value func(outcome) float64) {
		values := make([]float64, len(all))
		for i, o := range all {
			values[i] = value(o)
		}
		slices.Sort(values)
		b.ReportMetric(values[(len(values)-1)/2], "median-"+unit)
		b.ReportMetric(values[len(values)-1], "worst-"+unit)
	}
	report("p99-ms", func(o outcome) float64 { return float64(o.p99) / 1e6 })
	report("all-p99-ms", func(o outcome) float64 { return float64(o.all) / 1e6 })
	report("no-broker-s", func(o outcome) float64 { return o.noBroker.Seconds() })
	report("unaccepted-%", func(o outcome) float64 { return 100 * o.unaccepted })
	report("healed-s", func(o outcome) float64 { return o.healed.Seconds() })
}
