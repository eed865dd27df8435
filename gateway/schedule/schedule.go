package schedule

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/srtm-io/srtm/internal/list"
)

// Limits of a Config and of what requests take.
const (
	MaxResources = 8
	// MaxRatio is the maximum ratio of two classes' weights.
	MaxRatio = 1e4
	// MinCost is the minimum that a request takes of its type's resource, in percent:
	// requests that cost nothing would pass all others for ever.
	MinCost = 0.01
	// MaxMeasured bounds what a request is charged of a resource, in percent, whatever
	// a server says that it used.
	MaxMeasured = 10_000
)

const (
	// one percent in the scheduler's units. Counters are integers, so that all that is
	// taken comes back.
	one = 10_000
	// patience is how often a type is passed over.
	patience = 8
	// window is of how many arrivals, or twice as many, the largest request counts.
	window = 1024
	// most bounds a deficit, and a debt: a hundred million percent.
	most = int64(1e8 * one)
)

// Vector is what is taken of a server, by resource: percent of the capacity of a
// reference server, one with SetCapacity 100. Entries beyond its length are 0.
type Vector []float64

// Mode is what requests are scheduled by.
type Mode int

const (
	// MQoS: by all resources.
	MQoS Mode = 0
	// None: in order of arrival, each at once to any server that takes requests.
	None Mode = -1
)

// Single is deficit round robin over one resource: the paper's sQoS.
func Single(resource int) Mode { return Mode(resource + 1) }

// Class is one of clients.
type Class struct {
	Name string
	// Weight is its part of every resource, above 0, in proportion to the others'.
	Weight float64
	// Queue is how many of its requests may wait, at least 1.
	Queue int
	// QueueBytes bounds their Bytes together; 0: nothing does.
	QueueBytes int64
}

// Config is what New makes a scheduler for.
type Config struct {
	Classes []Class
	// Resources, 1 to MaxResources, and Servers, at least 1, are counts.
	Resources, Servers int
	Mode               Mode
	// Measured has the bit of each resource that no request waits for: what is free of it
	// only decides which type goes next. SetLimit bounds the requests of a server.
	Measured uint
}

// ErrQueueFull refuses a request of a class of which as many wait as may.
var ErrQueueFull = errors.New("queue full")

// Request is one of a client. It may be used again when it has been done or left.
type Request struct {
	// Set before Arrive.
	Class int
	// Cost is the estimate; entries are taken as 0 to 100, the largest as MinCost
	// at least. Arrive and Adopt copy it.
	Cost  Vector
	Bytes int
	// Value is the caller's.
	Value any

	// Owned by the scheduler.
	place   list.Element[*Request] // while it waits
	cost    [MaxResources]int64
	kind    int // its type
	server  int
	waiting bool
	sent    bool // and at its server
	apart   bool // it does not count for the limit of its server
}

// class is the scheduler's side of a Class.
type class struct {
	Class
	ratio    float64 // of its weight and the smallest
	quantum  int64
	queues   [MaxResources]list.List[*Request] // of those that wait, by type
	waiting  int
	bytes    int64
	inFlight int
	granted  int64
	round    uint64 // the last in which quanta were granted to it
	// Invariant: deficit <= quantum + largest, and <= 0 while nothing waits.
	deficit, used, estimated [MaxResources]int64
}

type server struct {
	capacity, free  [MaxResources]int64
	closed          bool // it takes no request
	inFlight, limit int
}

// Scheduler holds the requests that wait and knows of those at the servers. Make it
// with New. It is not safe for concurrent use, and allocates nothing after New but
// what Classes and Server return.
//
// Invariant: of each server and resource, free plus what its requests take is the
// capacity. Next sends no request to a server that has as many as its limit.
type Scheduler struct {
	// Set once.
	cfg Config
	// managed are the resources that are scheduled by, and awaited those of them that
	// requests wait for.
	managed, awaited []int

	classes []class
	servers []server
	fits    []int // of the last request that was looked at
	sum     [MaxResources]int64
	waiting int
	// By type.
	queued, pointer, passed [MaxResources]int
	turn                    int    // the type that wins a tie
	round                   uint64 // how often quanta were granted

	// The smallest quantum, 1 to 2 of the largest request. largest is the maximum entry
	// of this window of arrivals and of that before; recent of this one.
	quantum, largest, recent int64
	arrivals                 int
}

// New returns a scheduler of servers with a capacity of 100 percent each.
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
		classes: make([]class, len(cfg.Classes)), servers: make([]server, cfg.Servers), fits: make([]int, 0, cfg.Servers),
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
	s.setQuantum(10 * one)
	for i := range s.servers {
		s.SetCapacity(i, slices.Repeat(Vector{100}, cfg.Resources))
		s.SetLimit(i, math.MaxInt)
	}
	return s, nil
}

// setQuantum sets the smallest quantum, and with it all.
func (s *Scheduler) setQuantum(smallest int64) {
	s.quantum = smallest
	for i := range s.classes {
		s.classes[i].quantum = int64(math.Round(float64(smallest) * s.classes[i].ratio))
	}
}

// units is the percentage of resource k in the scheduler's units, within [0, limit].
func (v Vector) units(k int, limit float64) int64 {
	if k >= len(v) || !(v[k] > 0) { // nor a number
		return 0
	}
	return int64(math.Round(min(v[k], limit) * one))
}

// take copies the vector of a request, and says what type it is.
func (s *Scheduler) take(v Vector, limit float64, into *[MaxResources]int64) (kind int) {
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
	into[kind] = max(into[kind], int64(MinCost*one))
	return kind
}

// Arrive lets r wait. Requires: its class is one of the Config; it does not wait and is
// at no server.
// Errors: ErrQueueFull, and nothing has changed.
func (s *Scheduler) Arrive(r *Request) error {
	if r.waiting || r.sent {
		panic(fmt.Sprintf("schedule: a request of class %d arrives that is waiting or at server %d", r.Class, r.server))
	}
	c := &s.classes[r.Class]
	if c.waiting >= c.Queue || c.QueueBytes > 0 && c.bytes+int64(r.Bytes) > c.QueueBytes {
		return ErrQueueFull
	}
	r.kind = s.take(r.Cost, 100, &r.cost)
	r.waiting = true
	s.queue(r).Push(&r.place, r)
	s.count(r, 1)
	s.measure(r)
	if c.waiting == 1 && c.round != s.round {
		s.catchUp(r)
	}
	return nil
}

// catchUp grants a class that has begun to wait the quantum of this round, which the
// others got before, and lets it go next: a class that asks for little need not wait
// until the others have used up theirs.
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

// measure keeps the quanta 1 to 2 times as large as the largest request.
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

// count keeps the numbers of what waits, by being 1 or -1 request.
func (s *Scheduler) count(r *Request, by int) {
	c := &s.classes[r.Class]
	s.waiting += by
	s.queued[r.kind] += by
	c.waiting += by
	c.bytes += int64(by) * int64(r.Bytes)
}

// queue is that of r: all of None wait in one.
func (s *Scheduler) queue(r *Request) *list.List[*Request] {
	if s.cfg.Mode == None {
		return &s.classes[0].queues[0]
	}
	return &s.classes[r.Class].queues[r.kind]
}

// Leave takes r out of its queue: its client has gone or has waited long enough.
// It reports whether r waited; if not, nothing has changed, and r may be at a server,
// for Done to come.
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

// limit keeps the invariant of deficits.
func (s *Scheduler) limit(c *class) {
	limit := c.quantum + s.largest
	if c.waiting == 0 {
		limit = 0
	}
	for _, k := range s.managed {
		c.deficit[k] = max(min(c.deficit[k], limit), -most)
	}
}

// Next sends one request. pick chooses its server among those that it fits, or returns
// -1 for none; it may not keep fits, nor change the request. Call it after every arrival,
// leaving, completion, change of capacity, and change of what pick would answer, until
// it is not ok: then nothing goes before the next of these.
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
	if server = pick(r, s.fits); server < 0 {
		return nil, -1, false
	}
	s.send(r, server)
	return r, server, true
}

// First is a pick of the first server that a request fits.
func First(_ *Request, fits []int) int { return fits[0] }

// covered looks for a head that the deficits of its class cover, by type.
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

// nextType returns the type to look at after those tried, a set of bits, or -1: the one
// that was passed over too often, else the one of which most is free.
func (s *Scheduler) nextType(tried int) int {
	best, late := -1, 0
	for d := range s.cfg.Resources {
		j := (s.turn + d) % s.cfg.Resources
		if s.queued[j] == 0 || tried&(1<<j) != 0 {
			continue
		}
		over := max(s.passed[j]-patience+1, 0)
		if best < 0 || over > late || over == late && s.sum[j] > s.sum[best] {
			best, late = j, over
		}
	}
	return best
}

// lack is how many quanta its class lacks for h to go. One that is larger than all that
// came after it need only find deficits at their cap.
func (s *Scheduler) lack(h *Request) (quanta int64) {
	c := &s.classes[h.Class]
	for _, k := range s.managed {
		if lack := min(h.cost[k], c.quantum+s.largest) - c.deficit[k]; lack > quanta*c.quantum {
			quanta = (lack + c.quantum - 1) / c.quantum
		}
	}
	return quanta
}

// raise grants quanta: the fewest after which a head is covered.
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

// fit sets fits to the servers that r fits, and reports whether there are any. What takes
// more than a server has fits when nothing else takes of it.
func (s *Scheduler) fit(r *Request) bool {
	s.fits = s.fits[:0]
next:
	for i := range s.servers {
		v := &s.servers[i]
		for _, k := range s.awaited {
			if v.free[k] < r.cost[k] && v.free[k] < v.capacity[k] {
				continue next
			}
		}
		if !v.closed && (v.inFlight < v.limit || s.cfg.Mode == None) {
			s.fits = append(s.fits, i)
		}
	}
	return len(s.fits) > 0
}

// send takes r out of its queue and to a server.
func (s *Scheduler) send(r *Request, to int) {
	for _, j := range s.managed {
		if s.queued[j] > 0 {
			s.passed[j]++
		}
	}
	s.passed[r.kind] = 0
	s.turn = (r.kind + 1) % s.cfg.Resources
	for _, k := range s.managed {
		s.classes[r.Class].deficit[k] -= r.cost[k]
	}
	s.Leave(r)
	s.occupy(r, to)
}

// occupy counts r at a server.
func (s *Scheduler) occupy(r *Request, at int) {
	r.sent, r.apart, r.server = true, false, at
	c := &s.classes[r.Class]
	c.inFlight++
	s.hold(r, 1)
	for k := range s.cfg.Resources {
		c.used[k] += r.cost[k]
		c.estimated[k] += r.cost[k]
	}
}

// hold takes what r takes from its server, or with times -1 gives it back.
func (s *Scheduler) hold(r *Request, times int64) {
	if !r.apart {
		s.servers[r.server].inFlight += int(times)
	}
	for k := range s.cfg.Resources {
		s.servers[r.server].free[k] -= times * r.cost[k]
		s.sum[k] -= times * r.cost[k]
	}
}

// Move takes r, which is at a server, to another, also where it does not fit. Its class is
// charged once.
func (s *Scheduler) Move(r *Request, server int) {
	s.hold(r, -1)
	r.server = server
	s.hold(r, 1)
}

// Adopt counts r, which another scheduler has sent, as at a server here. Its class owes
// nothing for it but what Done finds out. It is how requests outlive a change of
// configuration: the other scheduler is not told that it is done.
// Requires: r.Class and server are of this Config.
func (s *Scheduler) Adopt(r *Request, server int) {
	r.kind = s.take(r.Cost, 100, &r.cost)
	s.occupy(r, server)
}

// SetApart makes room for another request at the server of r, where r stays: it is a
// stream, which may take hours and little of the server.
func (s *Scheduler) SetApart(r *Request) {
	if r.sent && !r.apart {
		r.apart = true
		s.servers[r.server].inFlight--
	}
}

// Done ends the stay of r at its server, once; any more does nothing. measured is what
// it used, at most MaxMeasured, and corrects what its class was charged; nil: as it was
// estimated.
func (s *Scheduler) Done(r *Request, measured Vector) {
	if !r.sent {
		return
	}
	r.sent = false
	c := &s.classes[r.Class]
	c.inFlight--
	s.hold(r, -1)
	cost := r.cost
	if measured != nil {
		s.take(measured, MaxMeasured, &cost)
	}
	for k := range s.cfg.Resources {
		c.used[k] += cost[k] - r.cost[k]
	}
	for _, k := range s.managed {
		c.deficit[k] -= cost[k] - r.cost[k]
	}
	s.limit(c)
}

// SetCapacity sets what a server has, in percent of the reference server, 0 to 1e6;
// entries beyond the length of percent are 0. One that has nothing of any resource
// takes no request; requests that it has may take more than it has left.
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

// SetLimit sets how many requests a server may have. Requests beyond a lower limit stay.
func (s *Scheduler) SetLimit(server, most int) { s.servers[server].limit = most }

// InFlight is the number of requests at a server that count for its limit.
func (s *Scheduler) InFlight(server int) int { return s.servers[server].inFlight }

// ClassStats is the state of a class. Vectors are in percent of the reference server.
type ClassStats struct {
	Name     string `json:"name"`
	Queued   int    `json:"queued"`
	InFlight int    `json:"in_flight"`
	// Used is what requests since New were charged: measured where it is known, else
	// estimated.
	Used Vector `json:"-"`
	// Estimated is what Used would be without measuring.
	Estimated Vector `json:"-"`
	// Deficit is what the class may take before quanta are granted; below 0 it is in
	// debt.
	Deficit Vector `json:"-"`
}

// ServerStats is the state of a server, in the same. Free is its resource availability counters.
type ServerStats struct{ Capacity, Free Vector }

// Queued is the number of requests of a class that wait.
func (s *Scheduler) Queued(class int) int { return s.classes[class].waiting }

// Waiting is the number of requests that wait.
func (s *Scheduler) Waiting() int { return s.waiting }

// Server returns the state of one.
func (s *Scheduler) Server(i int) ServerStats {
	return ServerStats{s.vector(&s.servers[i].capacity), s.vector(&s.servers[i].free)}
}

// Classes returns the states of all.
func (s *Scheduler) Classes() (all []ClassStats) {
	for i := range s.classes {
		c := &s.classes[i]
		all = append(all, ClassStats{c.Name, c.waiting, c.inFlight, s.vector(&c.used), s.vector(&c.estimated), s.vector(&c.deficit)})
	}
	return all
}

func (s *Scheduler) vector(of *[MaxResources]int64) Vector {
	v := make(Vector, s.cfg.Resources)
	for k := range v {
		v[k] = float64(of[k]) / one
	}
	return v
}
