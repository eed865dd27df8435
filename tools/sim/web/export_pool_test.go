package web

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/cost"
	"github.com/srtm-io/srtm/gateway/limit"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
)

// Pool simulates servers of unknown size behind the gateway's own scheduler, balancer and
// limit. A client sends its next request after an answer and a pause. Only tests use Pool.
type Pool struct {
	Servers []Backend
	Classes []Clients
	// Routes are drawn at random for each request, weighted by Part.
	Routes []PoolRoute
	// Fixed is a fixed window to compare with the adaptive limit, in percent of Time as
	// in package cost; 0: use the adaptive limit.
	Fixed   float64
	Seconds float64
	// Warmup in seconds is not counted.
	Warmup float64
	// Every is the interval in seconds between calls of Look, if Look is not nil.
	Every float64
	Look  func(at float64, p *PoolState)
	Seed  uint64
}

// Backend is a server of a Pool. Each of the Workers serves one request at a time, in the
// order of arrival. With 0 workers every request is served at once (a pure delay). With
// Shared, all requests share Workers processors equally.
type Backend struct {
	Workers int
	Shared  bool
	Service time.Duration // of a request of a route with Times 1
	// Changes are in the order of their times.
	Changes []Change
}

// Change sets a server's Service, and Workers if above 0.
type Change struct {
	At      float64
	Service time.Duration
	Workers int
}

// Clients are the clients of one class.
type Clients struct {
	Weight float64
	Count  int
	Think  time.Duration // mean pause before the next request
}

// PoolRoute is a pattern of requests.
type PoolRoute struct {
	Part  float64
	Times float64 // multiple of the server's Service
	Sigma float64 // of the lognormal distribution; 0: always the same
	// From is the second at which Times becomes Later; 0: never.
	From, Later float64
}

// PoolResult is the result of a Pool.
type PoolResult struct {
	Rate    []float64 // answers/s, by class
	P50     []float64 // ms, by class, including the wait at the gateway
	Beyond  []float64 // mean number of requests beyond the server's workers, by server
	Busy    []float64 // busy fraction of the workers, by server
	Servers []float64 // answers/s
}

// PoolState is the argument of Look.
type PoolState struct {
	Limits  []*limit.Limit
	Answers []int // since the last look, by server
}

type poolRequest struct {
	schedule.Request
	client, route    int
	arrived, started mono.Time
	work             float64 // s
	sample           limit.Sample
	server           int
}

type poolEvent struct {
	at   mono.Time
	seq  int // orders simultaneous events
	kind poolEventKind
	r    *poolRequest
	n    int // number of the client, the server, or the change
}

type poolEventKind int

const (
	asks poolEventKind = iota
	answers
	changes
	looks
	ticks
	sharedAnswers // end of a request at a shared server, unless a later change has made it invalid
)

func (e poolEvent) Before(o poolEvent) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

type poolServer struct {
	Backend
	queue  []*poolRequest
	busy   int
	shared machine
	share  int // version of the valid sharedAnswers event
}

// RunPool simulates a pool.
func RunPool(p Pool) PoolResult {
	rng := rand.New(rand.NewPCG(p.Seed, 11))
	cfg := schedule.Config{Resources: 1, Servers: len(p.Servers), Measured: 1}
	if p.Fixed > 0 {
		cfg.Measured = 0
	}
	var capacities [][]float64
	for range p.Servers {
		capacities = append(capacities, nil)
	}
	table := cost.New(nil, capacities, 1)
	cfg.Resources = len(table.Resources())
	if cfg.Measured != 0 {
		cfg.Measured = 1<<cfg.Resources - 1
	}
	clients := []int{}
	for i, c := range p.Classes {
		cfg.Classes = append(cfg.Classes, schedule.Class{Name: fmt.Sprint(i), Weight: c.Weight, Queue: 1 << 30})
		for range c.Count {
			clients = append(clients, i)
		}
	}
	s, err := schedule.New(cfg)
	if err != nil {
		panic(err)
	}
	b := balance.New(balance.JBQ, len(p.Servers), rand.New(rand.NewPCG(p.Seed, 12)))
	var limits []*limit.Limit
	servers := make([]poolServer, len(p.Servers))
	var events container.Heap[poolEvent]
	seq := 0
	push := func(e poolEvent) { seq++; e.seq = seq; events.Push(e) }
	at := func(seconds float64) mono.Time { return mono.Time(1e9 * (1 + seconds)) }
	for i := range servers {
		servers[i].Backend = p.Servers[i]
		servers[i].shared.Server = Server{Processors: max(p.Servers[i].Workers, 1), Speed: 1}
		limits = append(limits, limit.New(cfg.Resources))
		for j, c := range p.Servers[i].Changes {
			push(poolEvent{at: at(c.At), kind: changes, n: i*1000 + j})
		}
	}
	for i := range clients {
		push(poolEvent{at: at(0), kind: asks, n: i})
	}
	if p.Look != nil {
		push(poolEvent{at: at(p.Every), kind: looks})
	}
	push(poolEvent{at: at(.1), kind: ticks})
	r := PoolResult{Rate: make([]float64, len(p.Classes)), Beyond: make([]float64, len(servers)), Busy: make([]float64, len(servers)), Servers: make([]float64, len(servers))}
	took := make([][]float64, len(p.Classes))
	state := &PoolState{limits, make([]int, len(servers))}
	vector := make(schedule.Vector, cfg.Resources)
	now, last := at(0), at(0)
	route := func() int {
		x := rng.Float64()
		for i := range p.Routes {
			if x -= p.Routes[i].Part; x < 0 {
				return i
			}
		}
		return len(p.Routes) - 1
	}
	sharedNext := func(i int) {
		v := &servers[i]
		v.share++
		if next := v.shared.next(); next < mono.Never {
			push(poolEvent{at: next, kind: sharedAnswers, n: i, r: &poolRequest{server: v.share}})
		}
	}
	start := func(i int) {
		v := &servers[i]
		for len(v.queue) > 0 && (v.Workers == 0 || v.busy < v.Workers) {
			q := v.queue[0]
			v.queue = v.queue[1:]
			v.busy++
			push(poolEvent{at: now.Add(time.Duration(q.work * 1e9)), kind: answers, r: q})
		}
	}
	send := func() {
		for i := range limits {
			if p.Fixed == 0 {
				s.SetLimit(i, limits[i].Most())
			}
		}
		for {
			q, server, ok := s.Next(func(_ *schedule.Request, fits []int) int {
				if i, due := b.Probe(now, fits); due {
					return i
				}
				return b.Pick(now, fits)
			})
			if !ok {
				return
			}
			x := q.Value.(*poolRequest)
			x.server, x.started = server, now
			b.Sent(server, now)
			x.sample = limits[server].Sent(s.InFlight(server), s.Waiting() > 0, now)
			if p.Fixed == 0 {
				s.SetLimit(server, limits[server].Most())
			}
			v := &servers[server]
			of := p.Routes[x.route]
			times := of.Times
			if of.From > 0 && now >= at(of.From) {
				times = of.Later
			}
			x.work = times * v.Service.Seconds()
			if of.Sigma > 0 {
				x.work *= math.Exp(of.Sigma*rng.NormFloat64() - of.Sigma*of.Sigma/2)
			}
			if v.Shared {
				v.shared.advance(now)
				v.shared.jobs.Push(job{end: v.shared.work + x.work, came: now, of: &visit{Request: schedule.Request{Value: x}}})
				sharedNext(server)
				continue
			}
			v.queue = append(v.queue, x)
			start(server)
		}
	}
	ended := func(x *poolRequest) {
		class := clients[x.client]
		lasted := now.Sub(x.started)
		route := table.Route("GET", string(rune('a'+x.route)))
		table.Settle(vector, route, nil, lasted, 0, &cost.Report{}, true)
		s.Done(&x.Request, vector)
		b.Ended(x.server, now, balance.Answered)
		limits[x.server].Answered(x.sample, uint32(x.route), lasted, lasted, now)
		state.Answers[x.server]++
		if now >= at(p.Warmup) {
			r.Rate[class]++
			r.Servers[x.server]++
			took[class] = append(took[class], now.Sub(x.arrived).Seconds()*1e3)
		}
		think := time.Duration(0)
		if of := p.Classes[class].Think; of > 0 {
			think = time.Duration(rng.ExpFloat64() * float64(of))
		}
		push(poolEvent{at: now.Add(think), kind: asks, n: x.client})
	}
	for len(events) > 0 {
		e := events.Pop()
		if e.at > at(p.Seconds) {
			break
		}
		now = e.at
		if since := now.Sub(max(last, at(p.Warmup))).Seconds(); since > 0 {
			for i := range servers {
				n := s.InFlight(i)
				r.Beyond[i] += since * float64(max(n-servers[i].Workers, 0))
				r.Busy[i] += since * float64(min(n, servers[i].Workers)) / float64(max(servers[i].Workers, 1))
			}
		}
		last = now
		switch e.kind {
		case asks:
			x := &poolRequest{client: e.n, route: route(), arrived: now}
			x.Class, x.Value, x.Cost = clients[e.n], x, make(schedule.Vector, cfg.Resources)
			table.Estimate(x.Cost, table.Route("GET", string(rune('a'+x.route))), nil)
			if err := s.Arrive(&x.Request); err != nil {
				panic(err)
			}
		case answers:
			v := &servers[e.r.server]
			v.busy--
			ended(e.r)
			start(e.r.server)
		case changes:
			v := &servers[e.n/1000]
			c := v.Changes[e.n%1000]
			v.shared.advance(now)
			v.Service = c.Service
			if c.Workers > 0 {
				v.Workers = c.Workers
				v.shared.Processors = c.Workers
			}
			if v.Shared {
				sharedNext(e.n / 1000)
			}
			start(e.n / 1000)
		case looks:
			p.Look(now.Sub(at(0)).Seconds(), state)
			clear(state.Answers)
			push(poolEvent{at: now.Add(time.Duration(p.Every * 1e9)), kind: looks})
		case ticks:
			for i := range limits {
				if s.InFlight(i) >= limits[i].Most() {
					limits[i].Tick(now)
				}
			}
			push(poolEvent{at: now.Add(100 * time.Millisecond), kind: ticks})
		case sharedAnswers:
			v := &servers[e.n]
			if e.r.server != v.share {
				continue
			}
			v.shared.advance(now)
			ended(v.shared.jobs.Pop().of.Value.(*poolRequest))
			sharedNext(e.n)
		}
		if len(events) == 0 || events[0].at > now || events[0].kind != asks { // simultaneous requests enter before the scheduler runs
			send()
		}
	}
	length := p.Seconds - p.Warmup
	for i := range r.Rate {
		r.Rate[i] /= length
		slices.Sort(took[i])
		p50 := math.NaN()
		if n := len(took[i]); n > 0 {
			p50 = took[i][n/2]
		}
		r.P50 = append(r.P50, p50)
	}
	for i := range servers {
		r.Beyond[i] /= length
		r.Busy[i] /= length
		r.Servers[i] /= length
	}
	return r
}
