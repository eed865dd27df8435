// Package cost knows the cost of requests and the capacity of servers, in the units of
// gateway/schedule: percent of a reference server. It starts with the policy's costs, and learns from
// servers' load reports (ORCA). Without either it uses a request's service time and bytes. A server's
// report of its own utilization corrects the server's capacity.
//
// The operator chooses the units: a capacity is in units per second, a request's cost in units. A
// request holds its percentage while it is served. 100 percent is the work of Window. A configured
// capacity bounds the work at a server at any time. gateway/limit bounds the number of requests there.
//
// The package is pure, and one lock of the caller guards it. Read Table next, then ParseReport.
package cost

import (
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/gateway/schedule"
)

const (
	// Window is the time in which the reference server does the work of 100 percent.
	Window = 200 * time.Millisecond
	// MaxRoutes is the maximum number of patterns with learned costs. A pattern is forgotten if it is
	// not requested while MaxRoutes/2 other patterns are.
	MaxRoutes = 1024
	// Together is the number of requests that a server is assumed to serve at once without delay, if
	// only their service time is known.
	Together = 16

	// firstSeconds and firstBytes are the assumed cost of a request before the first answer.
	// With them a server gets at most 64 requests at once.
	firstSeconds = 0.05
	firstBytes   = 16 << 10

	gamma       = 0.1         // weight of a new sample
	maxTook     = time.Minute // of one sample, because a long stream is not typical of its route
	maxSegments = 8           // segments of a path in a pattern
)

// Time and Bytes are the scheduled resources if the policy has none. A resource named Bytes or Net
// costs a request the bytes of its body and answer.
const (
	Time  = "time"
	Bytes = "bytes"
	Net   = "net"
)

// bytesPerSecond is the capacity of Bytes: 1 Gbit/s.
const bytesPerSecond = 125e6

// Table knows the cost of requests.
type Table struct {
	// Set once.
	names       []string
	policyIndex []int     // index in the policy
	capacity    []float64 // of the reference server, in units per second
	shares      []schedule.Vector

	routes, old map[string]*Route // requested recently, and before
	all         Route             // learns from every request
	key         []byte            // scratch

	drift []drift // by server
}

// Route is the cost of the requests of a pattern.
type Route struct {
	// Hash distinguishes routes, with few collisions.
	Hash uint32

	key     string
	sampled bool
	seconds float64
	bytes   float64
	// units reported by servers; valid if the bit in learned is set.
	units   [schedule.MaxResources]float64
	learned uint
}

// New returns a table of the policy's resources. It ignores resources that no server has. Capacities
// are units per second by server and resource; 0 means unknown and counts as the largest capacity of
// the other servers. The gateways share the servers in equal parts.
func New(resources []string, capacities [][]float64, gateways int) *Table {
	t := &Table{routes: map[string]*Route{}, drift: make([]drift, len(capacities))}
	t.all.seconds, t.all.bytes = firstSeconds, firstBytes
	for i, name := range resources {
		largest := 0.0
		for _, c := range capacities {
			largest = max(largest, c[i])
		}
		if largest > 0 && len(t.names) < schedule.MaxResources {
			t.names, t.policyIndex, t.capacity = append(t.names, name), append(t.policyIndex, i), append(t.capacity, largest)
		}
	}
	if len(t.names) == 0 {
		t.names, t.policyIndex, t.capacity = []string{Time, Bytes}, []int{-1, -1}, []float64{Together, bytesPerSecond}
	}
	for i, c := range capacities {
		v := slices.Repeat(schedule.Vector{100 / float64(gateways)}, len(t.names))
		for k, from := range t.policyIndex {
			if from >= 0 && c[from] > 0 {
				v[k] *= c[from] / t.capacity[k]
			}
		}
		t.shares = append(t.shares, v)
		t.drift[i].factor = slices.Repeat([]float64{1}, len(t.names))
	}
	return t
}

// Resources returns the names of the scheduled resources.
func (t *Table) Resources() []string { return t.names }

// Measured has the bit of each resource without a configured capacity. The free part of such a resource
// is a guess, so no request should wait for it.
func (t *Table) Measured() (set uint) {
	for k, from := range t.policyIndex {
		if from < 0 {
			set |= 1 << k
		}
	}
	return set
}

// Capacity returns a server's capacity for the scheduler, corrected by drift.
func (t *Table) Capacity(server int) schedule.Vector {
	v := slices.Clone(t.shares[server])
	for k := range v {
		v[k] /= t.drift[server].factor[k]
	}
	return v
}

// Route returns the route of a request. It allocates if the pattern is new or was not requested
// recently.
func (t *Table) Route(method, path string) *Route {
	t.key = appendPattern(t.key[:0], method, path)
	r := t.routes[string(t.key)]
	if r != nil {
		return r
	}
	if r = t.old[string(t.key)]; r == nil {
		r = &Route{Hash: hash(t.key), key: string(t.key)}
	}
	if len(t.routes) == MaxRoutes/2 {
		t.routes, t.old = map[string]*Route{}, t.routes
	}
	t.routes[r.key] = r
	return r
}

// hash returns the FNV-1a hash of key.
func hash(key []byte) uint32 {
	h := uint32(2166136261)
	for _, c := range key {
		h = (h ^ uint32(c)) * 16777619
	}
	return h
}

// appendPattern writes the method and the path. It writes * for each segment that looks like an
// identifier, and for all segments after the eighth.
func appendPattern(key []byte, method, path string) []byte {
	key = append(key, method[:min(len(method), 16)]...)
	key = append(key, ' ')
	rest := strings.TrimPrefix(path, "/")
	for n, more := 0, true; more; n++ {
		var segment string
		segment, rest, more = strings.Cut(rest, "/")
		key = append(key, '/')
		if n == maxSegments {
			return append(key, '*')
		}
		if len(segment) > 32 || strings.ContainsAny(segment, "0123456789%=@") {
			segment = "*"
		}
		key = append(key, segment...)
	}
	return key
}

// Estimate fills v, as long as Resources, with the expected cost of a request. known has the policy's
// units by the policy's resources; nil: none.
func (t *Table) Estimate(v schedule.Vector, r *Route, known []float64) {
	by := t.taught(r)
	t.vector(v, r, known, by.seconds, by.bytes, &Report{})
}

// Expected returns the expected time of a request at its server.
func (t *Table) Expected(r *Route) time.Duration {
	return time.Duration(t.taught(r).seconds * float64(time.Second))
}

// taught returns r, or the average of all requests if no request of r has been answered.
func (t *Table) taught(r *Route) *Route {
	if r.sampled {
		return r
	}
	return &t.all
}

// vector fills v from the request's report, else from earlier reports, else from known, else from
// seconds and bytes.
func (t *Table) vector(v schedule.Vector, r *Route, known []float64, seconds, bytes float64, report *Report) {
	for k := range v {
		var u float64
		switch i, bit := t.policyIndex[k], uint(1)<<k; {
		case report.fields&bit != 0:
			u = report.cost[k]
		case r.learned&bit != 0:
			u = r.units[k]
		case known != nil && i >= 0:
			u = known[i]
		case t.names[k] == Bytes || t.names[k] == Net:
			u = bytes
		default:
			u = seconds / Together * t.capacity[k]
		}
		v[k] = 100 * u / (t.capacity[k] * Window.Seconds())
	}
}

// Settle fills v with the cost of a finished request, for the scheduler's Done. elapsed is the
// request's time at the server. bytes counts its body and answer. report is the server's report. Only a properly
// answered request teaches: a fast failure is not cheap.
func (t *Table) Settle(v schedule.Vector, r *Route, known []float64, elapsed time.Duration, bytes int64, report *Report, teaches bool) {
	t.vector(v, r, known, elapsed.Seconds(), float64(bytes), report)
	if !teaches {
		return
	}
	seconds, size := min(elapsed, maxTook).Seconds(), float64(bytes)
	for _, route := range []*Route{r, &t.all} {
		if !route.sampled {
			route.sampled, route.seconds, route.bytes = true, seconds, size
		}
		route.seconds += gamma * (seconds - route.seconds)
		route.bytes += gamma * (size - route.bytes)
	}
	for k := range t.names {
		if bit := uint(1) << k; report.fields&bit != 0 {
			u := min(report.cost[k], schedule.MaxMeasured/100*t.capacity[k]*Window.Seconds())
			if r.learned&bit == 0 {
				r.units[k], r.learned = u, r.learned|bit
			}
			r.units[k] += gamma * (u - r.units[k])
		}
	}
}
