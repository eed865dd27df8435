package schedule

// Stats is a scheduler's state. Vectors are in percent of the reference server; used
// and granted are sums over requests since New.
type Stats struct {
	Classes []ClassStats
	Servers []ServerStats
	// Quanta counts those granted to every class that had requests waiting.
	Quanta uint64
}

// ClassStats is the state of a class.
type ClassStats struct {
	Name string
	// Queued requests, QueuedBytes of them, and by type.
	Queued       int
	QueuedBytes  int64
	QueuedByType []int
	// InFlight are at servers; Sent counts all that went there.
	InFlight int
	Sent     uint64
	// Used is what requests were charged: measured where it is known, else estimated.
	Used Vector
	// Deficit is what the class may take before quanta are granted; below 0 it is in
	// debt.
	Deficit Vector
	// Quantum is what one is of each resource now, Granted the sum of all.
	Quantum, Granted float64
}

// ServerStats is the state of a server.
type ServerStats struct {
	InFlight int
	// Free is the resource availability counters.
	Capacity, Free Vector
}

// Queued is the number of requests of a class that wait.
func (s *Scheduler) Queued(class int) int { return s.classes[class].waiting }

// Stats returns the state.
func (s *Scheduler) Stats() Stats {
	all := Stats{Quanta: s.quanta}
	for i := range s.classes {
		c := &s.classes[i]
		all.Classes = append(all.Classes, ClassStats{
			Name: c.Name, Queued: c.waiting, QueuedBytes: c.bytes, QueuedByType: append([]int(nil), c.queued[:s.cfg.Resources]...),
			InFlight: c.inFlight, Sent: c.sent, Used: s.vector(&c.used), Deficit: s.vector(&c.deficit),
			Quantum: float64(c.quantum) / one, Granted: float64(c.granted) / one,
		})
	}
	for i := range s.servers {
		v := &s.servers[i]
		all.Servers = append(all.Servers, ServerStats{InFlight: v.inFlight, Capacity: s.vector(&v.capacity), Free: s.vector(&v.free)})
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
