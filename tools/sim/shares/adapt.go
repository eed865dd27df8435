package shares

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/holder"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Figures are the 99th percentiles of access delays in a phase; 0 without
// messages.
type Figures struct {
	Phase   string          `json:"phase"`
	Pooled  time.Duration   `json:"pooled_p99_ns"`
	Brokers []time.Duration `json:"broker_p99_ns"`
}

// Outcome is how a scenario of trouble went.
type Outcome struct {
	// P99 is the 99th percentile of access delays of publishers that keep to their
	// part, in the worst ten seconds; All of all publishers.
	P99 time.Duration `json:"p99_ns"`
	All time.Duration `json:"all_p99_ns"`
	// NoBroker is the longest that a publisher had none; Unaccepted the fraction of
	// messages that had none when they were made.
	NoBroker   time.Duration `json:"no_broker_ns"`
	Unaccepted float64       `json:"unaccepted"`
	// Healed is when, after the trouble began, the last second ended in which more
	// than 1 % of all messages waited for longer than the SLO; 0: there was none.
	Healed time.Duration `json:"healed_ns"`
}

// Step and Window are those of the adaptor by default, beat how often leases are
// renewed and looked after.
const (
	Step   = time.Second
	Window = 10 * time.Second
	beat   = 250 * time.Millisecond
)

var leases = ledger.Leases{Flex: 3 * time.Second, Session: 30 * time.Second, ClockBound: 200 * time.Millisecond}

// node is a broker.
type node struct {
	id      string
	bucket  tokenbucket.Hindsight
	queue   []int // arrivals that wait
	offered uint64
	most    int64

	starts  int
	up, cut bool
	held    *holder.Holdings
	lease   holder.Lease
}

func (n *node) heard() bool { return n.up && !n.cut }

type world struct {
	sc      Scenario
	rule    string
	machine *adaptor.Machine
	nodes   []*node
	delays  []time.Duration // by arrival; -1: lost
}

const topic = "t"

// Run has the rule follow the scenario and returns the access delays of its
// arrivals, -1 of those that were lost with a broker. flex is the part of shares that
// is on a lease.
func Run(sc Scenario, rule string, flex ledger.Permille) ([]time.Duration, error) {
	w := &world{
		sc: sc, rule: rule, machine: adaptor.New(0, adaptor.Config{Leases: leases, Flex: flex, Window: Window}),
		delays: make([]time.Duration, len(sc.Arrivals)),
	}
	brokers := len(sc.Start)
	for _, e := range sc.Events {
		for _, p := range e.Place {
			brokers = max(brokers, number(p.Broker)+1)
		}
	}
	for i := range brokers {
		w.nodes = append(w.nodes, &node{id: broker(i), held: holder.New()})
		if err := w.start(0, w.nodes[i]); err != nil {
			return nil, err
		}
	}
	_, grants, err := w.machine.Set(0, w.contract(sc.Start))
	if err := w.apply(0, grants, err); err != nil {
		return nil, err
	}
	events, next := sc.Events, mono.Time(beat)
	until := func(at mono.Time) error {
		for {
			switch {
			case len(events) > 0 && events[0].At <= min(next, at):
				if err := w.happen(events[0]); err != nil {
					return err
				}
				events = events[1:]
			case next <= at:
				if err := w.tick(next); err != nil {
					return err
				}
				next = next.Add(beat)
			default:
				return nil
			}
		}
	}
	for i, a := range sc.Arrivals {
		if err := until(a.At); err != nil {
			return nil, err
		}
		n := w.nodes[a.Broker]
		n.offered++
		n.queue = append(n.queue, i)
		w.release(n, a.At)
		n.most = max(n.most, int64(len(n.queue)))
	}
	for range 3600 * int(time.Second/beat) { // what still waits
		if !slices.ContainsFunc(w.nodes, func(n *node) bool { return len(n.queue) > 0 }) {
			break
		}
		if err := until(next); err != nil {
			return nil, err
		}
	}
	return w.delays, nil
}

func (w *world) contract(placed []share.Placed) *adaptor.Contract {
	return &adaptor.Contract{Topic: topic, Total: w.sc.Contract, Rule: w.rule, Placed: placed}
}

// start begins a process, which has what its predecessor left on the disk.
func (w *world) start(now mono.Time, n *node) error {
	n.up, n.starts = true, n.starts+1
	return w.hello(now, n)
}

func (w *world) hello(now mono.Time, n *node) error {
	s := ledger.Session{Broker: n.id, Said: mono.Said{Process: fmt.Sprint(n.starts)}, Place: identity.Place{Lock: n.id}, Policy: ledger.Available, Held: n.held.Reconcile([]string{topic})}
	n.lease.Renew(now, leases.Flex, leases.Session)
	grants, err := w.machine.Hello(now, s)
	return w.apply(now, grants, err)
}

// lapse ends the flexible part of n's share.
func (n *node) lapse(now mono.Time) {
	n.held.LapseOne(topic, true, false)
	n.bucket.Retune(now, n.held.Of(topic).Share, 0)
}

// apply has grants in force at once: they take milliseconds, and this is about
// seconds.
func (w *world) apply(now mono.Time, grants []ledger.Grant, err error) error {
	if err != nil {
		return err
	}
	return w.machine.Settle(grants, func(g ledger.Grant) (tokenbucket.Tokens, bool) {
		n := w.nodes[number(g.Broker)]
		if !n.heard() {
			return 0, false
		}
		w.release(n, now)
		n.held.Applied(g)
		return n.bucket.Retune(now, g.Share, g.Tokens), true
	})
}

// release lets go what has its token.
func (w *world) release(n *node, now mono.Time) {
	for n.up && len(n.queue) > 0 {
		i := n.queue[0]
		at := w.sc.Arrivals[i].At
		e, ok := n.bucket.Take(at, now)
		if !ok {
			return
		}
		w.delays[i] = e.Sub(at)
		n.queue = n.queue[1:]
	}
}

func (w *world) happen(e Event) error {
	for _, i := range e.Down {
		n := w.nodes[i]
		for _, lost := range n.queue {
			w.delays[lost] = -1
		}
		n.queue, n.up, n.offered, n.most = nil, false, 0, 0
		n.lapse(e.At)
		n.bucket = tokenbucket.Hindsight{}
		if err := w.apply(e.At, w.machine.Disconnect(n.id), nil); err != nil {
			return err
		}
	}
	for _, i := range e.Dead {
		_, grants, err := w.machine.Forget(w.nodes[i].id)
		if err := w.apply(e.At, grants, err); err != nil {
			return err
		}
	}
	for _, i := range e.Cut {
		w.nodes[i].cut = true
	}
	for _, i := range e.Frozen {
		w.nodes[i].cut, w.nodes[i].up = true, false
	}
	for _, i := range e.Whole {
		if w.nodes[i].cut, w.nodes[i].up = false, true; e.At >= w.nodes[i].lease.FlexUntil {
			w.nodes[i].lapse(e.At)
		}
		if err := w.hello(e.At, w.nodes[i]); err != nil {
			return err
		}
	}
	for _, i := range e.Up {
		n := w.nodes[i]
		n.bucket.Retune(e.At, n.held.Of(topic).Share, 0)
		if err := w.start(e.At, n); err != nil {
			return err
		}
	}
	if e.Place == nil {
		return nil
	}
	grants, err := w.machine.Update(e.At, w.contract(e.Place))
	return w.apply(e.At, grants, err)
}

func (w *world) tick(now mono.Time) error {
	for _, n := range w.nodes {
		if n.heard() {
			renewed, grants := w.machine.Renew(n.id, now)
			if renewed {
				n.lease.Renew(now, leases.Flex, leases.Session)
			}
			if err := w.apply(now, grants, nil); err != nil {
				return err
			}
		} else if n.up && now >= n.lease.FlexUntil && n.held.Of(topic).Flex != (tokenbucket.Share{}) {
			w.release(n, now)
			n.lapse(now)
		}
		w.release(n, now)
	}
	_, grants := w.machine.Expire(now)
	if err := w.apply(now, grants, nil); err != nil {
		return err
	}
	report := now%mono.Time(Step) == 0
	for _, n := range w.nodes {
		if !report {
			break
		}
		if n.heard() {
			peak, short := n.bucket.Used()
			if short {
				peak += n.most
			}
			w.machine.Report(n.id, topic, share.Step{
				At: now, Length: Step, Offered: n.offered, MaxBacklog: n.most, Backlog: int64(len(n.queue)), Peak: peak,
			})
		}
		n.offered, n.most = 0, int64(len(n.queue))
	}
	for range w.machine.Adaptive(now, !report) {
		grants, _, err := w.machine.Tune(now, topic)
		if err := w.apply(now, grants, err); err != nil {
			return err
		}
	}
	return nil
}

// Outcome judges the delays that Run returned.
func (sc Scenario) Outcome(delays []time.Duration) Outcome {
	o := Outcome{NoBroker: sc.NoBroker, Unaccepted: float64(sc.Unaccepted) / float64(max(1, sc.Made))}
	last := sc.Arrivals[len(sc.Arrivals)-1].At
	worst := func(keep bool) (most time.Duration) {
		for from := sc.Trouble; from.Add(Window) <= last; from = from.Add(Step) {
			var in []time.Duration
			for i := sc.first(from); i < sc.first(from.Add(Window)); i++ {
				if delays[i] >= 0 && !(keep && sc.Arrivals[i].Excess) {
					in = append(in, delays[i])
				}
			}
			most = max(most, p99(in))
		}
		return most
	}
	o.P99, o.All = worst(true), worst(false)
	for from := sc.Trouble; from < last; from = from.Add(Step) {
		all, late := 0, 0
		for i := sc.first(from); i < sc.first(from.Add(Step)); i++ {
			all++
			if delays[i] > SLO {
				late++
			}
		}
		if late*100 > all {
			o.Healed = from.Add(Step).Sub(sc.Trouble)
		}
	}
	return o
}

// first returns the first arrival from then on.
func (sc Scenario) first(from mono.Time) int {
	return sort.Search(len(sc.Arrivals), func(i int) bool { return sc.Arrivals[i].At >= from })
}

// Figures returns those of the scenario's phases.
func (sc Scenario) Figures(delays []time.Duration) (all []Figures) {
	for _, p := range sc.Phases {
		per := make([][]time.Duration, len(sc.Start))
		var pooled []time.Duration
		for i := sc.first(p.From); i < sc.first(p.To); i++ {
			b := sc.Arrivals[i].Broker
			per[b] = append(per[b], delays[i])
			pooled = append(pooled, delays[i])
		}
		f := Figures{Phase: p.Name, Pooled: p99(pooled)}
		for _, d := range per {
			f.Brokers = append(f.Brokers, p99(d))
		}
		all = append(all, f)
	}
	return all
}

func p99(delays []time.Duration) time.Duration {
	if len(delays) == 0 {
		return 0
	}
	slices.Sort(delays)
	return delays[tokenbucket.Rank(len(delays), 0.99)]
}
