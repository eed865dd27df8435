package schedule

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/srtm-io/srtm/internal/container"
)

// Limits of a Config and of costs.
const (
	MaxResources = 8
	// MaxRatio is the maximum ratio of two classes' weights.
	MaxRatio = 1e4
	// MinCost is the minimum cost of a request for its type's resource, in percent. Requests without a
	// cost would pass all others for ever.
	MinCost = 0.01
	// MaxMeasured bounds the charge of a request for a resource, in percent, whatever the server
	// reports.
	MaxMeasured = 10_000
)

const (
	// unit is one percent in the scheduler's units. Counters are integers, so that additions and
	// subtractions cancel exactly.
	unit = 10_000
	// patience is the number of times that a type may be passed over.
	patience = 8
	// window is the number of arrivals, up to twice as many, for which the largest request counts.
	window = 1024
	// maxUnits bounds a deficit and a debt: a hundred million percent.
	maxUnits = int64(1e8 * unit)
)

// Vector is a cost or capacity by resource, in percent of the capacity of a reference server
// (SetCapacity 100). Missing entries are 0.
type Vector []float64

// Mode is the algorithm of a scheduler.
type Mode int

const (
	// MQoS considers all resources.
	MQoS Mode = 0
	// None sends requests in order of arrival, at once, to any server that takes requests.
	None Mode = -1
)

// Single returns the mode of deficit round robin over one resource, the paper's sQoS.
func Single(resource int) Mode { return Mode(resource + 1) }

// Class is a class of clients.
type Class struct {
	Name string
	// Weight is the class's part of every resource, in proportion to the other weights; above 0.
	Weight float64
	// Queue is the maximum number of waiting requests, at least 1.
	Queue int
	// QueueBytes bounds the sum of the waiting requests' Bytes; 0: unbounded.
	QueueBytes int64
}

// Config configures New.
type Config struct {
	Classes []Class
	// Resources, 1 to MaxResources, and Servers, at least 1, are counts.
	Resources, Servers int
	Mode               Mode
	// Measured has the bit of each resource that no request waits for. The free part of such a resource
	// only decides which type goes next. SetLimit bounds the requests at a server.
	Measured uint
}

// ErrQueueFull means that the maximum number of requests of the class waits.
var ErrQueueFull = errors.New("queue full")

// Request is a client's request. It may be reused after Done or Leave.
type Request struct {
	// Set before Arrive.
	Class int
	// Cost is the estimate. Entries are limited to 0 to 100, and the largest entry is at least MinCost.
	// Arrive and Adopt copy Cost.
	Cost  Vector
	Bytes int
	// Value belongs to the caller.
	Value any

	// Owned by the scheduler.
	place   container.Element[*Request] // in a queue, while waiting
	cost    [MaxResources]int64
	kind    int // type
	server  int
	waiting bool
	sent    bool // at its server
	stream  bool // does not count for its server's limit
}

// class is the scheduler's state of a Class.
type class struct {
	Class
	ratio    float64 // weight divided by the smallest weight
	quantum  int64
	queues   [MaxResources]container.List[*Request] // waiting requests by type
	waiting  int
	bytes    int64
	inFlight int
	granted  int64
	round    uint64 // last round in which quanta were granted to the class
	// Invariant: deficit <= quantum + largest, and <= 0 while nothing waits.
	deficit, used, estimated [MaxResources]int64
}

type server struct {
	capacity, free  [MaxResources]int64
	closed          bool // takes no requests
	inFlight, limit int
}

// Scheduler holds the waiting requests and tracks the requests at the servers. Make a Scheduler with
// New. It is not safe for concurrent use. After New only Classes and Server allocate.
//
// Invariant: for each server and resource, free plus the cost of its requests is the capacity. Next
// sends no request to a server at its limit.
type Scheduler struct {
	// Set once.
	cfg Config
	// managed has the scheduled resources; awaited has the managed resources that requests wait for.
	managed, awaited []int

	classes    []class
	servers    []server
	candidates []int // servers that fit the last request examined
	sum        [MaxResources]int64
	waiting    int
	// By type.
	queued, pointer, passed [MaxResources]int
	tieWinner               int    // type that wins a tie
	round                   uint64 // number of grants

	// quantum is the smallest quantum, 1 to 2 times the largest request. largest is the maximum entry
	// in the present and the previous window of arrivals; recent is the maximum in the present window.
	quantum, largest, recent int64
	arrivals                 int
}

// New returns a scheduler whose servers each have a capacity of 100 percent.
func New(cfg Config) (*Scheduler, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if len(cfg.Classes) < 1 || cfg.Servers < 1 || cfg.Resources < 1 || cfg.Resources > MaxResources {
		fault("%d classes, %d servers, %d resources: want at least 1 of each, and at most %d resources", len(cfg.Classes), cfg.Servers, cfg.Resources, MaxResources)
	}
	if cfg.Mode < None || int(cfg.Mode) > cfg.Resources {
		fault("mode %d: there are none, mqos, and single of %d resources", cfg.Mode, cfg.Resources)
	}
	minimum, maximum := math.Inf(1), 0.0
	for i, c := range cfg.Classes {
		if !(c.Weight > 0) || c.Queue < 1 || c.QueueBytes < 0 {
			fault("class %d, %q: weight %v, queue of %d requests and %d bytes: want above 0, at least 1, 0", i, c.Name, c.Weight, c.Queue, c.QueueBytes)
		}
		minimum, maximum = min(minimum, c.Weight), max(maximum, c.Weight)
	}
	if !(maximum/minimum <= MaxRatio) {
		fault("weights from %v to %v: the ratio is above %v", minimum, maximum, MaxRatio)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	s := &Scheduler{
		cfg:     cfg,
		classes: make([]class, len(cfg.Classes)), servers: make([]server, cfg.Servers), candidates: make([]int, 0, cfg.Servers),
	}
	for k := range cfg.Resources {
		if cfg.Mode == MQoS || cfg.Mode == Single(k) {
			s.managed = append(s.managed, k)
			if cfg.Measured&(1<<k) == 0 {
				s.awaited = append(s.awaited, k)
			}
		}
	}
	for i, c := range cfg.Classes {
		s.classes[i].Class, s.classes[i].ratio = c, c.Weight/minimum
	}
	s.setQuantum(10 * unit)
	for i := range s.servers {
		s.SetCapacity(i, slices.Repeat(Vector{100}, cfg.Resources))
		s.SetLimit(i, math.MaxInt)
	}
	return s, nil
}

// setQuantum sets the smallest quantum, and with it all quanta.
func (s *Scheduler) setQuantum(smallest int64) {
	s.quantum = smallest
	for i := range s.classes {
		s.classes[i].quantum = int64(math.Round(float64(smallest) * s.classes[i].ratio))
	}
}

// units returns the percentage of resource k in the scheduler's units, within [0, limit].
func (v Vector) units(k int, limit float64) int64 {
	if k >= len(v) || !(v[k] > 0) { // also if v[k] is NaN
		return 0
	}
	return int64(math.Round(min(v[k], limit) * unit))
}

// toUnits copies a cost vector and returns the request's type.
func (s *Scheduler) toUnits(v Vector, limit float64, into *[MaxResources]int64) (kind int) {
	if len(s.managed) > 0 {
		kind = s.managed[0]
	}
	for k := range s.cfg.Resources {
		into[k] = v.units(k, limit)
	}
	for _, k := range s.managed {
		if into[k] > into[kind] {
			kind = k
		}
	}
	into[kind] = max(into[kind], int64(MinCost*unit))
	return kind
}

// Arrive queues r. Requires: r.Class is in the Config; r is neither waiting nor at a server. On
// ErrQueueFull nothing changes.
func (s *Scheduler) Arrive(r *Request) error {
	if r.waiting || r.sent {
		panic(fmt.Sprintf("schedule: a request of class %d arrives that is waiting or at server %d", r.Class, r.server))
	}
	c := &s.classes[r.Class]
	if c.waiting >= c.Queue || c.QueueBytes > 0 && c.bytes+int64(r.Bytes) > c.QueueBytes {
		return ErrQueueFull
	}
	r.kind = s.toUnits(r.Cost, 100, &r.cost)
	r.waiting = true
	s.queue(r).Push(&r.place, r)
	s.count(r, 1)
	s.measure(r)
	if c.waiting == 1 && c.round != s.round {
		s.catchUp(r)
	}
	return nil
}

// catchUp grants a class that has begun to wait the quantum of this round, as the other classes got
// before, and lets the class go next. So a class with few requests need not wait until the other
// classes have used up their quanta.
func (s *Scheduler) catchUp(r *Request) {
	c := &s.classes[r.Class]
	c.round = s.round
	c.granted += c.quantum
	for _, k := range s.managed {
		c.deficit[k] += c.quantum
	}
	s.limit(c)
	s.pointer[r.kind] = r.Class
}

// measure keeps the smallest quantum 1 to 2 times as large as the largest request.
func (s *Scheduler) measure(r *Request) {
	for _, k := range s.managed {
		s.recent = max(s.recent, r.cost[k])
	}
	s.largest = max(s.largest, s.recent)
	if s.arrivals++; s.arrivals == window {
		s.largest, s.recent, s.arrivals = s.recent, 0, 0
	}
	if s.quantum < s.largest || s.arrivals == 0 {
		if s.quantum < s.largest || s.quantum > 2*s.largest {
			s.setQuantum(max(s.largest*3/2, 1))
		}
		for i := range s.classes {
			s.limit(&s.classes[i])
		}
	}
}

// count updates the counts of waiting requests; by is 1 or -1.
func (s *Scheduler) count(r *Request, delta int) {
	c := &s.classes[r.Class]
	s.waiting += delta
	s.queued[r.kind] += delta
	c.waiting += delta
	c.bytes += int64(delta) * int64(r.Bytes)
}

// queue returns the queue of r. In mode None all requests share one queue.
func (s *Scheduler) queue(r *Request) *container.List[*Request] {
	if s.cfg.Mode == None {
		return &s.classes[0].queues[0]
	}
	return &s.classes[r.Class].queues[r.kind]
}

// Leave removes r from its queue: its client has gone or the wait was too long. It reports whether r
// was waiting. If not, nothing changes; r may be at a server, and Done must still come.
func (s *Scheduler) Leave(r *Request) bool {
	if !r.waiting {
		return false
	}
	r.waiting = false
	r.place.Remove()
	s.count(r, -1)
	if s.queued[r.kind] == 0 {
		s.passed[r.kind] = 0
	}
	s.limit(&s.classes[r.Class])
	return true
}

// limit restores the invariant of deficits.
func (s *Scheduler) limit(c *class) {
	limit := c.quantum + s.largest
	if c.waiting == 0 {
		limit = 0
	}
	for _, k := range s.managed {
		c.deficit[k] = max(min(c.deficit[k], limit), -maxUnits)
	}
}

// Next sends one request. pick chooses the request's server in fits, or returns -1 to choose none; pick
// must neither keep fits nor change the request. Call Next after every arrival, Leave, Done, change of
// capacity, and change of pick's answers, until ok is false. Then no request goes before the next such
// event.
func (s *Scheduler) Next(pick func(r *Request, fits []int) int) (r *Request, server int, ok bool) {
	if s.waiting == 0 {
		return nil, -1, false
	}
	if r = s.covered(); r == nil {
		s.raise()
		r = s.covered()
	}
	if r == nil || !s.fit(r) {
		return nil, -1, false
	}
	if server = pick(r, s.candidates); server < 0 {
		return nil, -1, false
	}
	s.send(r, server)
	return r, server, true
}

// First is a pick function that takes the first server in fits.
func First(_ *Request, fits []int) int { return fits[0] }

// covered returns the next head of a queue that the deficits of its class cover, or nil.
func (s *Scheduler) covered() *Request {
	tried := 0
	for j := s.nextType(tried); j >= 0; j = s.nextType(tried) {
		for range s.classes {
			c := &s.classes[s.pointer[j]]
			if h := c.queues[j].Front(); h != nil && s.lack(h) == 0 {
				return h
			}
			s.pointer[j] = (s.pointer[j] + 1) % len(s.classes)
		}
		tried |= 1 << j
	}
	return nil
}

// nextType returns the next type that is not in tried, a set of bits, or -1. It prefers a type that was
// passed over too often, then the type with the largest free amount.
func (s *Scheduler) nextType(tried int) int {
	best, starved := -1, 0
	for d := range s.cfg.Resources {
		j := (s.tieWinner + d) % s.cfg.Resources
		if s.queued[j] == 0 || tried&(1<<j) != 0 {
			continue
		}
		excess := max(s.passed[j]-patience+1, 0)
		if best < 0 || excess > starved || excess == starved && s.sum[j] > s.sum[best] {
			best, starved = j, excess
		}
	}
	return best
}

// lack returns the number of quanta that h's class needs before h may go. A request larger than all
// later requests only needs deficits at their cap.
func (s *Scheduler) lack(h *Request) (quanta int64) {
	c := &s.classes[h.Class]
	for _, k := range s.managed {
		if lack := min(h.cost[k], c.quantum+s.largest) - c.deficit[k]; lack > quanta*c.quantum {
			quanta = (lack + c.quantum - 1) / c.quantum
		}
	}
	return quanta
}

// raise grants the fewest quanta after which a head is covered.
func (s *Scheduler) raise() {
	fewest := int64(math.MaxInt64)
	for i := range s.classes {
		for _, j := range s.managed {
			if h := s.classes[i].queues[j].Front(); h != nil {
				fewest = min(fewest, s.lack(h))
			}
		}
	}
	s.round++
	for i := range s.classes {
		c := &s.classes[i]
		if c.waiting == 0 {
			continue
		}
		c.round = s.round
		c.granted += fewest * c.quantum
		for _, k := range s.managed {
			c.deficit[k] += fewest * c.quantum
		}
		s.limit(c)
	}
}

// fit sets candidates to the servers with room for r, and reports whether there are any. A request larger
// than a server's capacity fits when no other request uses the resource there.
func (s *Scheduler) fit(r *Request) bool {
	s.candidates = s.candidates[:0]
next:
	for i := range s.servers {
		v := &s.servers[i]
		for _, k := range s.awaited {
			if v.free[k] < r.cost[k] && v.free[k] < v.capacity[k] {
				continue next
			}
		}
		if !v.closed && (v.inFlight < v.limit || s.cfg.Mode == None) {
			s.candidates = append(s.candidates, i)
		}
	}
	return len(s.candidates) > 0
}

// send moves r from its queue to a server.
func (s *Scheduler) send(r *Request, server int) {
	for _, j := range s.managed {
		if s.queued[j] > 0 {
			s.passed[j]++
		}
	}
	s.passed[r.kind] = 0
	s.tieWinner = (r.kind + 1) % s.cfg.Resources
	for _, k := range s.managed {
		s.classes[r.Class].deficit[k] -= r.cost[k]
	}
	s.Leave(r)
	s.occupy(r, server)
}

// occupy counts r at a server.
func (s *Scheduler) occupy(r *Request, server int) {
	r.sent, r.stream, r.server = true, false, server
	c := &s.classes[r.Class]
	c.inFlight++
	s.addUsage(r, 1)
	for k := range s.cfg.Resources {
		c.used[k] += r.cost[k]
		c.estimated[k] += r.cost[k]
	}
}

// addUsage takes r's cost from its server; with times -1 hold gives the cost back.
func (s *Scheduler) addUsage(r *Request, times int64) {
	if !r.stream {
		s.servers[r.server].inFlight += int(times)
	}
	for k := range s.cfg.Resources {
		s.servers[r.server].free[k] -= times * r.cost[k]
		s.sum[k] -= times * r.cost[k]
	}
}

// Move moves r from its server to another server, even if r does not fit there. The class is charged
// only once.
func (s *Scheduler) Move(r *Request, server int) {
	s.addUsage(r, -1)
	r.server = server
	s.addUsage(r, 1)
}

// Adopt counts r, which another scheduler has sent, as at a server here. Its class is charged only the
// correction by Done. Adopt keeps requests through a change of configuration; do not call Done on the
// other scheduler. Requires: r.Class and server are in this Config.
func (s *Scheduler) Adopt(r *Request, server int) {
	r.kind = s.toUnits(r.Cost, 100, &r.cost)
	s.occupy(r, server)
}

// SetApart stops counting r for its server's limit. r is a stream, which may take hours and use little
// of the server.
func (s *Scheduler) SetApart(r *Request) {
	if r.sent && !r.stream {
		r.stream = true
		s.servers[r.server].inFlight--
	}
}

// Done ends the stay of r at its server; repeated calls do nothing. measured is the measured cost, at
// most MaxMeasured, and corrects the charge of the class; nil: the estimate stands.
func (s *Scheduler) Done(r *Request, measured Vector) {
	if !r.sent {
		return
	}
	r.sent = false
	c := &s.classes[r.Class]
	c.inFlight--
	s.addUsage(r, -1)
	cost := r.cost
	if measured != nil {
		s.toUnits(measured, MaxMeasured, &cost)
	}
	for k := range s.cfg.Resources {
		c.used[k] += cost[k] - r.cost[k]
	}
	for _, k := range s.managed {
		c.deficit[k] -= cost[k] - r.cost[k]
	}
	s.limit(c)
}

// SetCapacity sets the capacity of a server in percent of the reference server, 0 to 1e6; missing
// entries are 0. A server with no capacity takes no requests. The present requests of a server stay,
// even beyond a lower capacity.
func (s *Scheduler) SetCapacity(server int, percent Vector) {
	v := &s.servers[server]
	for k := range s.cfg.Resources {
		to := percent.units(k, 1e6)
		v.free[k] += to - v.capacity[k]
		s.sum[k] += to - v.capacity[k]
		v.capacity[k] = to
	}
	v.closed = v.capacity == [MaxResources]int64{}
}

// SetLimit sets the maximum number of requests at a server. Requests beyond a lower limit stay.
func (s *Scheduler) SetLimit(server, limit int) { s.servers[server].limit = limit }

// InFlight returns the number of requests at a server that count for its limit.
func (s *Scheduler) InFlight(server int) int { return s.servers[server].inFlight }

// ClassStats is the state of a class. Vectors are in percent of the reference server.
type ClassStats struct {
	Name     string `json:"name"`
	Queued   int    `json:"queued"`
	InFlight int    `json:"in_flight"`
	// Used is the charge of all requests since New: measured where known, otherwise estimated.
	Used Vector `json:"-"`
	// Estimated is Used without the corrections by measurement.
	Estimated Vector `json:"-"`
	// Deficit is the amount that the class may take before quanta are granted; below 0 the class is in
	// debt.
	Deficit Vector `json:"-"`
}

// ServerStats is the state of a server, in percent of the reference server. Free is the server's
// resource availability counters.
type ServerStats struct{ Capacity, Free Vector }

// Queued returns the number of waiting requests of a class.
func (s *Scheduler) Queued(class int) int { return s.classes[class].waiting }

// Waiting returns the number of waiting requests.
func (s *Scheduler) Waiting() int { return s.waiting }

// Server returns the state of a server.
func (s *Scheduler) Server(i int) ServerStats {
	return ServerStats{s.vector(&s.servers[i].capacity), s.vector(&s.servers[i].free)}
}

// Classes returns the states of all classes.
func (s *Scheduler) Classes() (all []ClassStats) {
	for i := range s.classes {
		c := &s.classes[i]
		all = append(all, ClassStats{c.Name, c.waiting, c.inFlight, s.vector(&c.used), s.vector(&c.estimated), s.vector(&c.deficit)})
	}
	return all
}

func (s *Scheduler) vector(units *[MaxResources]int64) Vector {
	v := make(Vector, s.cfg.Resources)
	for k := range v {
		v[k] = float64(units[k]) / unit
	}
	return v
}
