package web

import (
	"fmt"
	"math/rand/v2"

	"github.com/srtm-io/srtm/gateway/cost"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
)

// The website of the mQoS paper: one server with three resources behind a gateway, three
// classes of clients, and three types of pages, each of which takes most of another
// resource. Clients wait for an answer and ask for a page of the same type at once.
//
// What the paper does not state: pages take 6, 3 and 1 ms of the resources, turned
// round, so that 300 requests/s of equally many of each use all three up, as its figure
// 8 has it. "More CPU-intensive requests than the other types" is twice as many clients
// of each class. What one request takes is uniform within half and one and a half of
// that. A request goes from the processor to the disk to the network; requests at one of
// them share it alike.

// Resources are the server's.
func Resources() []string { return []string{"cpu", "disk", "network"} }

// Pages are their types.
func Pages() []Page {
	return []Page{
		{"cgi", [3]float64{.006, .003, .001}, 200},
		{"photo", [3]float64{.001, .006, .003}, 100},
		{"stream", [3]float64{.003, .001, .006}, 100},
	}
}

// Page is a type of page.
type Page struct {
	Name string
	// Work in seconds of each resource.
	Work [3]float64
	// Clients of each class that ask for it.
	Clients int
}

// Scheduling is a way in which the gateway schedules.
type Scheduling struct {
	Name    string
	Mode    schedule.Mode
	Literal bool // as the paper has it; Mode is not looked at
}

// Schedulings are those that the paper compares, and its own form of mQoS.
func Schedulings() []Scheduling {
	return []Scheduling{
		{Name: "nQoS", Mode: schedule.None}, {Name: "sQoS", Mode: schedule.Single(0)}, {Name: "mQoS"}, {Name: "literal", Literal: true},
	}
}

// Visits is a study of the website.
type Visits struct {
	Scheduling
	// Times multiplies the clients.
	Times float64
	// Warmup and Seconds are virtual; the second is measured.
	Warmup, Seconds float64
	Seed            uint64
}

// VisitsOf is what a class came to.
type VisitsOf struct {
	Weight float64 `json:"weight"`
	// Rate is its answers a second, by page.
	Rate [3]float64 `json:"requests_per_second"`
	// Busy is the part of each resource that it used, 0 to 1.
	Busy [3]float64 `json:"busy"`
	// Queued and Served are the mean times at the gateway and at the server, in ms.
	Queued float64 `json:"queued_ms"`
	Served float64 `json:"served_ms"`
}

// Total is of all pages.
func (v VisitsOf) Total() float64 { return v.Rate[0] + v.Rate[1] + v.Rate[2] }

// visit is a client with its request.
type visit struct {
	schedule.Request
	page      int
	work      [3]float64
	at        int // which resource
	came, got mono.Time

	// Of paperScheduler.
	cost [3]int64
	kind int
}

// site is a simulation under way.
type site struct {
	Visits
	scheduler interface {
		Arrive(r *schedule.Request) error
		Next(pick func(r *schedule.Request, fits []int) int) (r *schedule.Request, server int, ok bool)
		Done(r *schedule.Request, measured schedule.Vector)
	}
	rng      *rand.Rand
	pages    []Page
	stations [3]machine
	result   []VisitsOf
	answers  []float64
	now      mono.Time
}

// RunSite simulates the website. An error says that the scheduler came to a stop, and
// when: requests wait, the server is idle, and nothing goes.
func RunSite(v Visits) ([]VisitsOf, error) {
	s := &site{Visits: v, pages: Pages(), rng: rand.New(rand.NewPCG(v.Seed, 4)), result: make([]VisitsOf, 3), answers: make([]float64, 3)}
	cfg := schedule.Config{Resources: len(s.stations), Servers: 1, Mode: v.Mode}
	var clients []*visit
	for i, w := range []float64{6, 3, 1} {
		cfg.Classes = append(cfg.Classes, schedule.Class{Name: fmt.Sprint(i + 1), Weight: w, Queue: 1 << 30})
		s.result[i].Weight = w
		for j, p := range s.pages {
			for range max(1, int(v.Times*float64(p.Clients))) {
				clients = append(clients, &visit{Request: schedule.Request{Class: i, Cost: make(schedule.Vector, 3)}, page: j})
			}
		}
	}
	var err error
	if s.scheduler, err = schedule.New(cfg); err != nil {
		return nil, err
	}
	if v.Literal {
		s.scheduler = newPaperScheduler(cfg.Classes)
	}
	for k := range s.stations {
		s.stations[k].Server = Server{Processors: 1, Speed: 1}
	}
	s.rng.Shuffle(len(clients), func(i, j int) { clients[i], clients[j] = clients[j], clients[i] })
	for _, c := range clients {
		s.ask(c)
	}
	s.trigger()
	for end := s.time(v.Warmup + v.Seconds); ; {
		first, at := -1, mono.Never
		for k := range s.stations {
			if next := s.stations[k].next(); next < at {
				first, at = k, next
			}
		}
		if first < 0 {
			return nil, fmt.Errorf("stopped after %.3g s", s.now.Sub(0).Seconds())
		}
		if at > end {
			break
		}
		s.now = at
		m := &s.stations[first]
		m.advance(at)
		s.leave(m.jobs.Pop().of)
	}
	for i := range s.result {
		r := &s.result[i]
		r.Queued, r.Served = r.Queued/max(s.answers[i], 1), r.Served/max(s.answers[i], 1)
		for k := range s.stations {
			r.Busy[k], r.Rate[k] = r.Busy[k]/v.Seconds, r.Rate[k]/v.Seconds
		}
	}
	return s.result, nil
}

func (s *site) time(seconds float64) mono.Time { return mono.Time(seconds * 1e9) }

// ask lets a client ask for its page.
func (s *site) ask(c *visit) {
	for k, w := range s.pages[c.page].Work {
		c.Cost[k] = 100 * w / cost.Window.Seconds()
		c.work[k] = w * (.5 + s.rng.Float64())
	}
	c.came, c.at, c.Value = s.now, 0, c
	if err := s.scheduler.Arrive(&c.Request); err != nil {
		panic(err) // the queues are longer than there are clients
	}
}

// trigger sends what goes. A literal trigger that sends nothing is repeated for each
// resource: the paper's scheduler never rests.
func (s *site) trigger() {
	for missed := 0; missed < len(s.stations); {
		r, _, ok := s.scheduler.Next(schedule.First)
		if !ok {
			missed++
			continue
		}
		c := r.Value.(*visit)
		c.got = s.now
		s.enter(c)
	}
}

// enter lets a request join those at its resource.
func (s *site) enter(c *visit) {
	m := &s.stations[c.at]
	m.advance(s.now)
	m.jobs.Push(job{end: m.work + c.work[c.at], of: c})
}

// leave takes a request from a resource to the next, or the answer to its client.
func (s *site) leave(c *visit) {
	measured := s.now > s.time(s.Warmup)
	r := &s.result[c.Class]
	if measured {
		r.Busy[c.at] += c.work[c.at]
	}
	if c.at++; c.at < len(s.stations) {
		s.enter(c)
		return
	}
	var took [3]float64
	for k, w := range c.work {
		took[k] = 100 * w / cost.Window.Seconds()
	}
	s.scheduler.Done(&c.Request, took[:])
	if measured {
		s.answers[c.Class]++
		r.Rate[c.page]++
		r.Queued += c.got.Sub(c.came).Seconds() * 1e3
		r.Served += s.now.Sub(c.got).Seconds() * 1e3
	}
	s.ask(c)
	s.trigger()
}
