// Package web simulates web servers behind the gateway's pure packages, in virtual time.
// web.go and cluster.go have the balanced machines of the JBQ paper, and the assumptions
// about its clusters. site.go has the website of the mQoS paper, several resources behind
// a scheduler. The package is pure: the same study and seed give the same result.
package web

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
)

// Study is a cluster with a balancing method.
type Study struct {
	Cluster
	Way
	Seed uint64
}

// Result is the result of a Study.
type Result struct {
	Overall   Summary
	ByServer  []Summary
	PerSecond []int    // arrivals
	Answers   []Answer // in the order of their ends
}

// Answer is the answer to a request.
type Answer struct {
	At     time.Duration // end of the request
	Took   time.Duration
	Server int
}

// Summary summarizes response times, in ms.
type Summary struct {
	Requests int     `json:"requests"`
	Mean     float64 `json:"mean_ms"`
	Sd       float64 `json:"sd_ms"`
	P95      float64 `json:"p95_ms"`
	P97      float64 `json:"p97_ms"`
	P99      float64 `json:"p99_ms"`
}

// machine serves by processor sharing. work is the service that a request present from
// the beginning would have received. A request ends when work has grown by the request's
// demand since its arrival.
type machine struct {
	Server
	work  float64 // s
	since mono.Time
	jobs  container.Heap[job]
}

// job is a request at a machine. end is the value of the machine's work at which the
// request ends. of is the visit, for a site.
type job struct {
	end  float64
	came mono.Time
	of   *visit
}

// Before orders requests by their ends.
func (j job) Before(o job) bool { return j.end < o.end }

// rate is the service rate of each request, s/s.
func (m *machine) rate() float64 {
	return m.Speed * min(1, float64(m.Processors)/float64(len(m.jobs)))
}

func (m *machine) advance(now mono.Time) {
	if len(m.jobs) > 0 {
		m.work += now.Sub(m.since).Seconds() * m.rate()
	}
	m.since = now
}

// next returns the end of the first request.
func (m *machine) next() mono.Time {
	if len(m.jobs) == 0 {
		return mono.Never
	}
	left := max(m.jobs[0].end-m.work, 0) / m.rate()
	return m.since.Add(time.Duration(math.Ceil(left * 1e9)))
}

// Run simulates a study.
func Run(s Study) Result {
	var b interface {
		Pick(now mono.Time, fits []int) int
		Probe(now mono.Time, fits []int) (server int, due bool)
		Sent(server int, now mono.Time)
		Ended(server int, now mono.Time, how balance.Outcome)
	} = balance.New(s.Balance, len(s.Servers), rand.New(rand.NewPCG(s.Seed, 2)))
	switch {
	case s.Literal:
		b = newPaperBalancer(len(s.Servers), s.Initial)
	case s.SED:
		b = newSEDBalancer(s.Servers)
	}
	// The load is the same for every balancing method.
	load := s.NewLoad(s.Seed)
	machines, all := make([]machine, len(s.Servers)), make([]int, len(s.Servers))
	for i := range machines {
		machines[i].Server, all[i] = s.Servers[i], i
	}
	var r Result
	arrival, demand := load.Next()
	for sent := 0; len(r.Answers) < s.Requests; {
		first, now := -1, mono.Never
		for i := range machines {
			if at := machines[i].next(); at < now {
				first, now = i, at
			}
		}
		if sent < s.Requests && arrival < now {
			at := b.Pick(arrival, all)
			if server, due := b.Probe(arrival, all); due {
				at = server
			}
			b.Sent(at, arrival)
			m := &machines[at]
			m.advance(arrival)
			m.jobs.Push(job{end: m.work + demand.Seconds(), came: arrival})
			second := int(arrival / mono.Time(time.Second))
			for len(r.PerSecond) <= second {
				r.PerSecond = append(r.PerSecond, 0)
			}
			r.PerSecond[second]++
			sent++
			arrival, demand = load.Next()
			continue
		}
		m := &machines[first]
		m.advance(now)
		done := m.jobs.Pop()
		b.Ended(first, now, balance.Answered)
		r.Answers = append(r.Answers, Answer{At: time.Duration(now), Took: now.Sub(done.came), Server: first})
	}
	responses := make([][]float64, len(machines)+1)
	for _, a := range r.Answers {
		ms := a.Took.Seconds() * 1e3
		responses[a.Server] = append(responses[a.Server], ms)
		responses[len(machines)] = append(responses[len(machines)], ms)
	}
	for _, v := range responses {
		r.ByServer = append(r.ByServer, Summarize(v))
	}
	r.Overall, r.ByServer = r.ByServer[len(machines)], r.ByServer[:len(machines)]
	return r
}

// Load generates the requests of a cluster: Poisson arrivals, with a rate that changes
// every second, and lognormal demands.
type Load struct {
	rng         *rand.Rand
	mean, burst float64
	until       mono.Time // end of the current second
	rate        float64   // requests/s in the current second
	last        mono.Time
}

// NewLoad returns the cluster's load for a seed.
func (c Cluster) NewLoad(seed uint64) *Load {
	return &Load{rng: rand.New(rand.NewPCG(seed, 3)), mean: c.Rate, burst: c.Burst}
}

// Next returns the time of the next request and its processor demand.
func (l *Load) Next() (at mono.Time, demand time.Duration) {
	for {
		if l.rate > 0 {
			at = l.last.Add(time.Duration(l.rng.ExpFloat64() / l.rate * 1e9))
		}
		if l.rate > 0 && at < l.until {
			break
		}
		l.last, l.until = l.until, l.until.Add(time.Second)
		l.rate = l.mean * (1 - l.burst + 2*l.burst*l.rng.Float64())
	}
	l.last = at
	sigma := math.Sqrt(math.Log(1 + variation*variation))
	return at, time.Duration(float64(Demand) * math.Exp(sigma*l.rng.NormFloat64()-sigma*sigma/2))
}

// Summarize summarizes response times in ms. It sorts v.
func Summarize(v []float64) Summary {
	s := Summary{Requests: len(v)}
	if len(v) == 0 {
		return s
	}
	slices.Sort(v)
	for _, x := range v {
		s.Mean += x / float64(len(v))
	}
	for _, x := range v {
		s.Sd += (x - s.Mean) * (x - s.Mean) / float64(len(v))
	}
	s.Sd = math.Sqrt(s.Sd)
	at := func(q float64) float64 { return v[min(int(q*float64(len(v))), len(v)-1)] }
	s.P95, s.P97, s.P99 = at(.95), at(.97), at(.99)
	return s
}
