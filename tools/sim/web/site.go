package web

import (
	"fmt"
	"math/rand/v2"

	"github.com/srtm-io/srtm/gateway/cost"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
)

// The website of the mQoS paper: one server with three resources behind a gateway, three
// classes of clients, and three types of pages. Each type uses mainly one resource. A
// client waits for an answer and then requests a page of the same type at once.
//
// Assumptions that the paper does not state: pages take 6, 3 and 1 ms of the resources,
// in rotation. So 300 requests/s, spread evenly over the types, use up all three
// resources, as in the paper's figure 8. "More CPU-intensive requests than the other
// types" means twice as many clients of each class. The work of a request is uniform
// between half and one and a half of the page's work. A request visits the processor, the
// disk and the network in turn; the requests at a resource share it equally.

// Resources returns the server's resources.
func Resources() []string { return []string{"cpu", "disk", "network"} }

// Pages returns the page types.
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
	// Clients is the number of clients of each class for the page.
	Clients int
}

// Scheduling is a scheduling method of the gateway.
type Scheduling struct {
	Name    string
	Mode    schedule.Mode
	Literal bool // the paper's form; Mode is ignored
}

// Schedulings returns the methods that the paper compares, and its own form of mQoS.
func Schedulings() []Scheduling {
	return []Scheduling{
		{Name: "nQoS", Mode: schedule.None}, {Name: "sQoS", Mode: schedule.Single(0)}, {Name: "mQoS"}, {Name: "literal", Literal: true},
	}
}

// Visits is a study of the website.
type Visits struct {
	Scheduling
	// Times multiplies the number of clients.
	Times float64
	// Warmup and Seconds are virtual times; only Seconds is measured.
	Warmup, Seconds float64
	Seed            uint64
}

// VisitsOf is the result of a class.
type VisitsOf struct {
	Weight float64 `json:"weight"`
	// Rate is the number of answers per second, by page.
	Rate [3]float64 `json:"requests_per_second"`
	// Busy is the fraction of each resource used by the class, 0 to 1.
	Busy [3]float64 `json:"busy"`
	// Queued and Served are the mean times at the gateway and at the server, in ms.
	Queued float64 `json:"queued_ms"`
	Served float64 `json:"served_ms"`
}

// Total is the rate over all pages.
func (v VisitsOf) Total() float64 { return v.Rate[0] + v.Rate[1] + v.Rate[2] }

// visit is a client and its request.
type visit struct {
	schedule.Request
	page      int
	work      [3]float64
	at        int // present resource
	came, got mono.Time

	// For paperScheduler.
	cost [3]int64
	kind int
}

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

// RunSite simulates the website. It returns an error if the scheduler deadlocks: requests
// wait, the server is idle, and none starts.
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

// ask makes a client request its page.
func (s *site) ask(c *visit) {
	for k, w := range s.pages[c.page].Work {
		c.Cost[k] = 100 * w / cost.Window.Seconds()
		c.work[k] = w * (.5 + s.rng.Float64())
	}
	c.came, c.at, c.Value = s.now, 0, c
	if err := s.scheduler.Arrive(&c.Request); err != nil {
		panic(err) // the queues are longer than the number of clients
	}
}

// trigger starts all requests that the scheduler allows. For a literal scheduler it
// repeats a trigger without a start once for each resource, because the paper's scheduler
// never rests.
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

// enter adds a request to its resource.
func (s *site) enter(c *visit) {
	m := &s.stations[c.at]
	m.advance(s.now)
	m.jobs.Push(job{end: m.work + c.work[c.at], of: c})
}

// leave moves a request from a resource to the next, or returns the answer to its client.
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
	var used [3]float64
	for k, w := range c.work {
		used[k] = 100 * w / cost.Window.Seconds()
	}
	s.scheduler.Done(&c.Request, used[:])
	if measured {
		s.answers[c.Class]++
		r.Rate[c.page]++
		r.Queued += c.got.Sub(c.came).Seconds() * 1e3
		r.Served += s.now.Sub(c.got).Seconds() * 1e3
	}
	s.ask(c)
	s.trigger()
}
