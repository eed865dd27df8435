package web

import (
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
)

// The algorithms exactly as in the papers. The gateway's packages have corrected
// versions.

// paperBalancer is Join the Best Queue as in its paper. A server with one request at a time is
// never measured again. If T starts at 0, the first server takes every request until two are in
// flight at once, then the second server.
type paperBalancer []paperServer

type paperServer struct {
	inFlight  int
	interval  time.Duration // T
	departure mono.Time     // last departure, if measured
	measured  bool          // the server was still busy after the last departure
}

// newPaperBalancer returns a balancer that assumes an interval for each unmeasured server.
func newPaperBalancer(servers int, initial time.Duration) paperBalancer {
	b := make(paperBalancer, servers)
	for i := range b {
		b[i].interval = initial
	}
	return b
}

const gamma = 0.1 // the paper's forgetting factor

// Pick is the paper's pickTheBestQueue (Algorithm 1). Sent does the counting.
func (b paperBalancer) Pick(mono.Time, []int) int {
	best, least := -1, math.Inf(1)
	for i, s := range b {
		if cost := float64(1+s.inFlight) * float64(s.interval); cost < least {
			best, least = i, cost
		}
	}
	return best
}

func (b paperBalancer) Probe(mono.Time, []int) (server int, due bool) { return -1, false }

func (b paperBalancer) Sent(server int, _ mono.Time) { b[server].inFlight++ }

// Ended is the paper's handleRequestCompletion.
func (b paperBalancer) Ended(server int, now mono.Time, _ balance.Outcome) {
	s := &b[server]
	s.inFlight--
	if s.measured {
		s.interval = time.Duration((1-gamma)*float64(s.interval) + gamma*float64(now.Sub(s.departure)))
	}
	if s.measured = s.inFlight > 0; s.measured {
		s.departure = now
	}
}

// sedBalancer chooses by the shortest expected delay with known capacities, a reference for
// Join the Best Queue.
type sedBalancer []sedServer

type sedServer struct {
	inFlight int
	capacity float64
}

func newSEDBalancer(servers []Server) sedBalancer {
	b := make(sedBalancer, len(servers))
	for i, s := range servers {
		b[i].capacity = float64(s.Processors) * s.Speed
	}
	return b
}

// Pick returns the server with the least (1+Q)/capacity, the first among equals.
func (b sedBalancer) Pick(mono.Time, []int) int {
	best, least := -1, math.Inf(1)
	for i, s := range b {
		if delay := float64(1+s.inFlight) / s.capacity; delay < least {
			best, least = i, delay
		}
	}
	return best
}

func (b sedBalancer) Probe(mono.Time, []int) (server int, due bool) { return -1, false }

func (b sedBalancer) Sent(server int, _ mono.Time) { b[server].inFlight++ }

func (b sedBalancer) Ended(server int, _ mono.Time, _ balance.Outcome) { b[server].inFlight-- }

// paperScheduler is mQoS as in its paper, for one server. It has four defects:
//
//   - It considers all types, so a type without waiting requests holds up the others.
//   - It skips requests that do not fit and raises deficits in passing, so under load the
//     deficits limit no class.
//   - It raises the deficits of one resource at a time, and stops for ever if the deficit
//     of another resource is missing.
//   - It never serves the type of a resource that all requests use, because that resource
//     never has the most free capacity.
//
// Counters are in the units of package schedule.
type paperScheduler struct {
	weights  []float64 // multiples of the smallest weight
	queues   [][3][]*visit
	deficits [][3]int64
	free     [3]int64
	pointers [3]int
	turn     int

	// As in package schedule: the smallest quantum is 1 to 2 times the largest recent
	// request.
	quantum, largest, recent int64
	arrivals                 int
}

const (
	percent = 10_000
	window  = 1024 // arrivals
)

func newPaperScheduler(classes []schedule.Class) *paperScheduler {
	s := &paperScheduler{quantum: 10 * percent, free: [3]int64{100 * percent, 100 * percent, 100 * percent}}
	for _, c := range classes {
		s.weights = append(s.weights, c.Weight)
	}
	least := slices.Min(s.weights)
	for i := range s.weights {
		s.weights[i] /= least
	}
	s.queues, s.deficits = make([][3][]*visit, len(classes)), make([][3]int64, len(classes))
	for k := range s.free {
		s.grant(k)
	}
	return s
}

func (s *paperScheduler) Arrive(r *schedule.Request) error {
	c := r.Value.(*visit)
	c.kind = 0
	for k, v := range r.Cost {
		c.cost[k] = int64(math.Round(v * percent))
		if c.cost[k] > c.cost[c.kind] {
			c.kind = k
		}
	}
	s.recent = max(s.recent, c.cost[c.kind])
	s.largest = max(s.largest, s.recent)
	if s.arrivals++; s.arrivals == window {
		s.largest, s.recent, s.arrivals = s.recent, 0, 0
	}
	if s.quantum < s.largest || s.arrivals == 0 && s.quantum > 2*s.largest {
		s.quantum = s.largest * 3 / 2
	}
	q := &s.queues[r.Class][c.kind]
	*q = append(*q, c)
	return nil
}

// Next is one trigger of the paper's main scheduler: the sub-scheduler of the freest
// resource visits two rounds of classes and one more. The paper's scheduler visits
// classes until a completion, which interrupts it at any class with equal probability.
// With whole rounds it would always stop at the same class, and the last class would get
// everything.
func (s *paperScheduler) Next(func(*schedule.Request, []int) int) (r *schedule.Request, server int, ok bool) {
	if !slices.ContainsFunc(s.queues, func(q [3][]*visit) bool { return len(q[0])+len(q[1])+len(q[2]) > 0 }) {
		return nil, -1, false
	}
	j := s.turn
	for d := range s.free {
		if k := (s.turn + d) % len(s.free); s.free[k] > s.free[j] {
			j = k
		}
	}
	s.turn = (s.turn + 1) % len(s.free)
	for range 2*len(s.weights) + 1 {
		i := s.pointers[j]
		if q := s.queues[i][j]; len(q) > 0 && s.goes(q[0]) {
			c := q[0]
			s.queues[i][j] = q[1:]
			for k, v := range c.cost {
				s.deficits[i][k] -= v
				s.free[k] -= v
			}
			return &c.Request, 0, true
		}
		if s.pointers[j]++; s.pointers[j] == len(s.weights) {
			s.pointers[j] = 0
			s.grant(j)
		}
	}
	return nil, -1, false
}

// goes reports whether a request fits the server and the deficits of its class cover the
// request.
func (s *paperScheduler) goes(c *visit) bool {
	for k, v := range c.cost {
		if v > s.deficits[c.Class][k] || v > s.free[k] && s.free[k] < 100*percent {
			return false
		}
	}
	return true
}

// grant raises the deficits of a resource, up to a bound as in package schedule.
func (s *paperScheduler) grant(k int) {
	for i, w := range s.weights {
		s.deficits[i][k] = min(s.deficits[i][k]+int64(math.Round(float64(s.quantum)*w)), 1e8*percent)
	}
}

// Done releases the estimated cost: the paper does not correct estimates.
func (s *paperScheduler) Done(r *schedule.Request, _ schedule.Vector) {
	for k, v := range r.Value.(*visit).cost {
		s.free[k] += v
	}
}
