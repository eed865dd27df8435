package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/cost"
	"github.com/srtm-io/srtm/gateway/limit"
	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

// ticket is a request's place in the queues and at a server. The dispatcher owns it from enter to
// finish, except for the fields marked as the exchange's.
type ticket struct {
	// Owned by the exchange; set before enter.
	r       *http.Request
	class   class         // at the time of arrival
	granted chan struct{} // capacity 1: receives a token when target or refused is set
	timer   *time.Timer   // of wait; nil until the first one. Like granted, it is used again by the next ticket
	// Owned by the exchange; valid once granted.
	target    *url.URL
	url       string // the server's URL in the policy
	faults    *slog.Logger
	host      string // Host to send; "": the client's
	transport *http.Transport
	sends     int          // connections used; the server may have received the request as often
	status    int          // status of the answer
	head      atomic.Int64 // mono.Time of the answer's head; 0: none yet. tick reads it
	bytes     int64        // bytes of the request's and the answer's body
	reason    string       // reason of the server's failure
	report    string       // the server's load report; "": none
	// Owned by the exchange; valid once refused.
	drain float64 // seconds until the queue is empty at the present rate; at most 60

	// Guarded by dispatcher.mu.
	request          schedule.Request
	arrived, started mono.Time
	server           int
	tried            []int // servers before server that could not be reached
	refused          error // set by a change of the policy
	route            *cost.Route
	sample           limit.Sample
	stream           bool                       // a stream, not counted for the server's limit
	place            container.Element[*ticket] // in tickets
}

// repeatable methods may be sent again by a client after a failure (RFC 9110).
var repeatable = []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete}

// dispatcher holds the queues and the servers' loads. It decides for all requests together.
type dispatcher struct {
	// Set once.
	cfg Config
	// reader parses servers' reports without mu.
	reader atomic.Pointer[cost.Table]

	mu struct {
		sync.Mutex
		policy   *policy.Policy
		schedule *schedule.Scheduler
		balance  *balance.Balancer
		cost     *cost.Table             // also in reader
		servers  []server                // indexed by the server numbers of schedule and balance
		classes  []counts                // indexed by the class numbers of policy and schedule
		byName   map[string]int          // number of each class
		tickets  container.List[*ticket] // all queued or sent requests
		ticked   mono.Time

		badReports uint64          // reports that could not be parsed
		vector     schedule.Vector // scratch
	}
}

type server struct {
	policy.Server           // Target nil: the server has left the policy
	index         int       // index in the policy; -1: not in the policy
	observed      mono.Time // last check of drift
	ejected       bool      // at the last tick
	limit         *limit.Limit
	faults        *slog.Logger // logs the server's faults at a limited rate
	reason        string       // reason of the last failure
	transport     *http.Transport
	resent        uint64 // sends beyond the first of each request
}

// counts has the counters of a class, beyond the scheduler's.
type counts struct {
	Sent   uint64 `json:"sent"`
	Full   uint64 `json:"refused_full"`
	Late   uint64 `json:"refused_late"`
	Denied uint64 `json:"refused_admission"`
	Left   uint64 `json:"left"` // clients that left the queue before their turn

	waits  *histogram.Latency // queue times of sent requests
	ticked uint64             // Sent at the last tick
	rate   float64
}

const (
	tick = 100 * time.Millisecond // ejections end within one tick
	// drift of a server is checked at most this often, even if more answers have reports.
	observeEvery = 100 * time.Millisecond
	// interval of checks whether a waiting HTTP/1 client has hung up
	lookEvery = 500 * time.Millisecond
	// An answer that takes longer than streamAfter after its head is a stream, and does not count for
	// its server's limit.
	streamAfter = time.Second
	// rateWeight is the weight of a tick in a class's rate, which averages over about two seconds.
	rateWeight = 0.05
)

var (
	errLate = errors.New("the request has waited for as long as its class may")
	errGone = errors.New("the client has ended its connection")
)

func newDispatcher(cfg Config) *dispatcher {
	d := &dispatcher{cfg: cfg}
	d.mu.policy = &policy.Policy{}
	d.mu.balance = balance.New(cfg.Balance, 0, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())))
	return d
}

// next is a policy prepared by prepare.
type next struct {
	policy   *policy.Policy
	cost     *cost.Table
	schedule *schedule.Scheduler
	classes  []counts
	byName   map[string]int // number of each class
	byURL    map[string]int // index of each server in the policy
}

// prepare prepares a policy; known is the number of servers so far. With thousands of classes this
// takes a while. Requests continue meanwhile, because prepare touches no shared state.
func (d *dispatcher) prepare(changed *policy.Policy, known int) (*next, error) {
	var capacities [][]float64
	n := &next{policy: changed, byName: map[string]int{}, byURL: map[string]int{}}
	for i, s := range changed.Servers {
		capacities = append(capacities, s.Capacity)
		n.byURL[s.URL] = i
	}
	n.cost = cost.New(changed.Resources, capacities, max(d.cfg.Gateways, 1))
	mode, err := modeOf(d.cfg.Scheduler, n.cost.Resources())
	if err != nil {
		return nil, err
	}
	// one number for each server that may need one
	config := schedule.Config{Resources: len(n.cost.Resources()), Mode: mode, Servers: max(known+len(changed.Servers), 1), Measured: n.cost.Measured()}
	for i, c := range changed.Classes {
		config.Classes = append(config.Classes, schedule.Class{Name: c.Name, Weight: float64(c.Weight), Queue: c.Queue, QueueBytes: c.QueueBytes})
		n.classes = append(n.classes, counts{waits: histogram.NewLatency()})
		n.byName[c.Name] = i
	}
	if n.schedule, err = schedule.New(config); err != nil {
		return nil, err
	}
	for i := range config.Servers {
		n.schedule.SetCapacity(i, nil) // until renumberLocked assigns the number
	}
	return n, nil
}

// configure replaces the policy. Waiting requests keep waiting, in their order and under the name of
// their class, and requests at a server stay there. On an error nothing changes. Requires: one call at
// a time, so that the number of servers seen at the start stays valid.
func (d *dispatcher) configure(changed *policy.Policy, transports map[policy.Reach]*http.Transport, now mono.Time) error {
	m := &d.mu
	m.Lock()
	known := len(m.servers)
	m.Unlock()
	n, err := d.prepare(changed, known)
	if err != nil {
		return err
	}
	m.Lock()
	defer m.Unlock()
	for name, i := range n.byName { // order: each by itself
		if was, stays := m.byName[name]; stays {
			n.classes[i] = m.classes[was]
		}
	}
	old := m.schedule
	m.schedule, m.policy, m.cost, m.classes, m.byName = n.schedule, changed, n.cost, n.classes, n.byName
	m.vector = make(schedule.Vector, len(n.cost.Resources()))
	d.reader.Store(n.cost)
	d.renumberLocked(now, n.byURL)
	for n := range m.servers {
		m.servers[n].transport = transports[m.servers[n].Reach]
	}
	for t := range m.tickets.All() {
		waits := old.Leave(&t.request)
		d.fillLocked(t)
		if !waits {
			m.schedule.Adopt(&t.request, t.server)
			if t.stream {
				m.schedule.SetApart(&t.request)
			}
		} else if t.refused = d.arriveLocked(t); t.refused != nil {
			t.place.Remove()
			t.granted <- struct{}{}
		}
	}
	d.sendLocked(now)
	return nil
}

// renumberLocked adds the servers of the policy and removes all others. A server that stays keeps its
// number and its state.
func (d *dispatcher) renumberLocked(now mono.Time, byURL map[string]int) {
	m := &d.mu
	numbers := slices.Repeat([]int{-1}, len(m.policy.Servers))
	for n := range m.servers {
		s := &m.servers[n]
		if i, stays := byURL[s.URL]; stays {
			s.index, s.Server, numbers[i] = i, m.policy.Servers[i], n
		} else if s.Target != nil {
			m.balance.Remove(n)
			*s = server{index: -1, limit: s.limit, faults: s.faults} // the server's last requests still use these fields
		}
	}
	for i, entry := range m.policy.Servers {
		n := numbers[i]
		if n < 0 {
			if n = m.balance.Add(now); n == len(m.servers) {
				m.servers = append(m.servers, server{})
			}
			m.servers[n] = server{Server: entry, index: i, limit: limit.New(len(m.cost.Resources()))}
			m.servers[n].faults, _ = obs.Sparse(d.cfg.Log)
		}
		m.schedule.SetCapacity(n, m.cost.Capacity(i))
		m.schedule.SetLimit(n, m.servers[n].limit.Most())
	}
}

// fillLocked sets the scheduler's fields of a request.
func (d *dispatcher) fillLocked(t *ticket) {
	m := &d.mu
	class, known := m.byName[t.class.Name]
	if !known { // the policy has changed since the request was classified
		class = len(m.policy.Classes) - 1
	}
	t.route = m.cost.Route(t.r.Method, t.r.URL.Path)
	m.cost.Estimate(m.vector, t.route, m.policy.CostOf(t.r.URL.Path))
	t.request.Class, t.request.Cost, t.request.Value = class, m.vector, t
}

// arriveLocked queues a request, or counts it as refused because the queue is full.
func (d *dispatcher) arriveLocked(t *ticket) error {
	err := d.mu.schedule.Arrive(&t.request)
	if err != nil {
		d.refusedLocked(t).Full++
	}
	return err
}

// refusedLocked sets when a refused request should come again, and returns the counts of the request's
// class.
func (d *dispatcher) refusedLocked(t *ticket) *counts {
	c := &d.mu.classes[t.request.Class]
	t.drain = min(float64(d.mu.schedule.Queued(t.request.Class))/max(c.rate, 1e-9), 60)
	return c
}

// modeOf parses the name of a scheduler.
func modeOf(name string, resources []string) (schedule.Mode, error) {
	modes := map[string]schedule.Mode{"mqos": schedule.MQoS, "none": schedule.None}
	for k, resource := range resources {
		modes["single:"+resource] = schedule.Single(k)
	}
	mode, known := modes[name]
	if !known {
		return 0, fmt.Errorf("scheduler %q: want mqos, none, or single: and one of %s", name, strings.Join(resources, ", "))
	}
	return mode, nil
}

// enter queues a request and waits for its turn, at most as long as its class allows. If enter returns
// nil, the caller must call finish.
func (d *dispatcher) enter(t *ticket, now mono.Time) error {
	d.mu.Lock()
	m := &d.mu
	t.arrived = now
	d.fillLocked(t)
	err := d.arriveLocked(t)
	if err == nil {
		m.tickets.Push(&t.place, t)
		d.sendLocked(now)
	}
	d.mu.Unlock()
	if err != nil {
		return err
	}
	if err = t.wait(); err == nil {
		return t.refused
	}
	d.mu.Lock()
	if !m.schedule.Leave(&t.request) {
		// The turn came at the same moment. A request that waited for its maximum takes the turn; a
		// request whose client is gone gives the turn back.
		d.mu.Unlock()
		<-t.granted
		if t.refused != nil || err == errLate {
			return t.refused
		}
		d.finish(t, balance.Aborted, clock.Mono())
		return err
	}
	defer d.mu.Unlock()
	if c := d.refusedLocked(t); err == errLate {
		c.Late++
	} else {
		c.Left++
	}
	t.place.Remove()
	d.sendLocked(clock.Mono())
	return err
}

// wait returns nil when the turn of t has come, errLate after the maximum wait, and errGone if the
// client is gone.
func (t *ticket) wait() error {
	select {
	case <-t.granted:
		return nil
	default: // avoids a timer
	}
	client, end := connection(t.r), time.Now().Add(t.class.Wait)
	for {
		next := time.Until(end)
		if client != nil {
			next = min(next, lookEvery)
		}
		if t.timer == nil {
			t.timer = time.NewTimer(next)
		} else {
			t.timer.Reset(next)
		}
		select {
		case <-t.granted:
			t.timer.Stop()
			return nil
		case <-t.r.Context().Done():
			t.timer.Stop()
			return errGone
		case <-t.timer.C:
			if client != nil && client.HungUp() {
				return errGone
			}
			if time.Until(end) <= 0 {
				return errLate
			}
		}
	}
}

// finish settles a request that enter has let through, once. The class is charged for what the request
// took, however it ended. If the client aborted the request before an answer, the charge is at least
// the expected cost.
func (d *dispatcher) finish(t *ticket, outcome balance.Outcome, now mono.Time) {
	reader := d.reader.Load()
	report, err := cost.Report{InFlight: -1}, error(nil)
	if t.report != "" {
		report, err = reader.ParseReport(t.report)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &d.mu
	switch {
	case err != nil:
		m.badReports++
	case reader != m.cost: // the report was parsed for another policy's resources
		report = cost.Report{InFlight: -1}
	}
	served := now.Sub(t.started)
	elapsed := served
	if outcome == balance.Aborted && t.status == 0 {
		elapsed = max(elapsed, m.cost.Expected(t.route)) // few servers stop working when the client leaves
	}
	teaches := outcome == balance.Answered
	m.cost.Settle(m.vector, t.route, m.policy.CostOf(t.r.URL.Path), elapsed, t.bytes, &report, teaches)
	if t.sends == 0 {
		clear(m.vector) // no server received the request
	}
	m.schedule.Done(&t.request, m.vector)
	if t.report != "" {
		d.observeLocked(t.server, &report, now)
	}
	m.balance.Ended(t.server, now, outcome)
	if outcome == balance.Failed {
		m.servers[t.server].reason = t.reason
	}
	d.learnLimitLocked(t, outcome, served, now)
	m.servers[t.server].resent += uint64(max(t.sends-1, 0))
	t.place.Remove()
	d.sendLocked(now)
}

// retry sends a request whose server could not be reached to the best other server, each server once,
// and reports whether there is one. The request does not wait again, even if all other servers are
// busy. The excess over their capacity is at most the load of the lost server.
func (d *dispatcher) retry(t *ticket, now mono.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &d.mu
	t.tried = append(t.tried, t.server)
	var alternatives []int
	for n := range m.servers {
		if !slices.Contains(t.tried, n) {
			alternatives = append(alternatives, n)
		}
	}
	number := m.balance.Pick(now, alternatives)
	if number < 0 {
		return false
	}
	m.balance.Ended(t.server, now, balance.Failed)
	m.servers[t.server].reason = t.reason
	m.schedule.Move(&t.request, number)
	d.sentLocked(t, number, now)
	d.sendLocked(now)
	return true
}

// observeLocked applies a server's load report.
func (d *dispatcher) observeLocked(number int, report *cost.Report, now mono.Time) {
	m := &d.mu
	s := &m.servers[number]
	if s.index < 0 {
		return
	}
	if report.InFlight >= 0 {
		m.balance.Reported(number, int(min(report.InFlight, 1e6)), now)
	}
	if now.Sub(s.observed) < observeEvery {
		return
	}
	s.observed = now
	state := m.schedule.Server(number)
	if m.cost.Observe(s.index, report, state.Free, state.Capacity, now) {
		m.schedule.SetCapacity(number, m.cost.Capacity(s.index))
	}
}

// sendLocked sends all requests that may go, and wakes their goroutines.
func (d *dispatcher) sendLocked(now mono.Time) {
	m := &d.mu
	for {
		r, number, ok := m.schedule.Next(func(r *schedule.Request, fits []int) int {
			if slices.Contains(repeatable, r.Value.(*ticket).r.Method) {
				if server, due := m.balance.Probe(now, fits); due {
					return server
				}
			}
			return m.balance.Pick(now, fits)
		})
		if !ok {
			return
		}
		t := r.Value.(*ticket)
		d.sentLocked(t, number, now)
		m.classes[r.Class].Sent++
		m.classes[r.Class].waits.Record(now.Sub(t.arrived))
		t.granted <- struct{}{} // never blocks; from here on the exchange owns its fields
	}
}

// sentLocked records a request as sent to a server.
func (d *dispatcher) sentLocked(t *ticket, number int, now mono.Time) {
	m := &d.mu
	s := &m.servers[number]
	t.server, t.target, t.host, t.transport, t.started = number, s.Target, s.Reach.Host, s.transport, now
	t.url, t.faults = s.URL, s.faults
	m.balance.Sent(number, now)
	t.sample = s.limit.Sent(m.schedule.InFlight(number), m.schedule.Waiting() > 0, now)
	m.schedule.SetLimit(number, s.limit.Most())
}

// learnLimitLocked passes to a server's limit how long a request took. Refusals have a latency of their
// own, so they count as a separate route.
func (d *dispatcher) learnLimitLocked(t *ticket, outcome balance.Outcome, elapsed time.Duration, now mono.Time) {
	s := &d.mu.servers[t.server]
	head := mono.Time(t.head.Load())
	if outcome != balance.Answered && outcome != balance.Refused || head == 0 || t.stream {
		return
	}
	slot := t.route.Hash
	if outcome == balance.Refused {
		slot++
	}
	s.limit.Answered(t.sample, slot, head.Sub(t.started), elapsed, now)
	d.mu.schedule.SetLimit(t.server, s.limit.Most())
}

// stream stops counting t, whose answer is a stream, for its server's limit.
func (d *dispatcher) stream(t *ticket) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setApartLocked(t)
	d.sendLocked(clock.Mono())
}

func (d *dispatcher) setApartLocked(t *ticket) {
	t.stream = true
	d.mu.schedule.SetApart(&t.request)
}

// relieveLocked lets servers have more requests if their present requests are streams or have had no
// answer for long.
func (d *dispatcher) relieveLocked(now mono.Time) {
	m := &d.mu
	for t := range m.tickets.All() {
		if head := mono.Time(t.head.Load()); head != 0 && !t.stream && now.Sub(head) >= streamAfter {
			d.setApartLocked(t)
		}
	}
	for n := range m.servers {
		if s := &m.servers[n]; s.index >= 0 && m.schedule.Waiting() > 0 && m.schedule.InFlight(n) >= s.limit.Most() {
			s.limit.Tick(now)
			m.schedule.SetLimit(n, s.limit.Most())
		}
	}
}

// tick does the periodic work. It returns the servers that were ejected or readmitted since the last
// tick.
func (d *dispatcher) tick(now mono.Time) (changed []server) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &d.mu
	if past := now.Sub(m.ticked).Seconds(); m.ticked != 0 && past > 0 {
		for i := range m.classes {
			c := &m.classes[i]
			c.rate += rateWeight * (float64(c.Sent-c.ticked)/past - c.rate)
			c.ticked = c.Sent
		}
	}
	m.ticked = now
	d.relieveLocked(now)
	d.sendLocked(now) // an ejection may have ended
	for _, b := range m.balance.Stats(now, nil) {
		if s := &m.servers[b.Server]; s.ejected != b.Ejected {
			s.ejected = b.Ejected
			changed = append(changed, *s)
		}
	}
	return changed
}

// denied counts a request that admission refused.
func (d *dispatcher) denied(class string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i, known := d.mu.byName[class]; known {
		d.mu.classes[i].Denied++
	}
}
