// Package balance chooses the server that will answer soonest, without knowing the size of any server.
// It implements Join the Best Queue (JBQ) with corrections, and handles servers that fail, servers that
// are new, and servers that other gateways use too. The paper's own algorithm is in tools/sim/web. Busy
// and RoundRobin are baselines and fall-backs. The package is pure and knows nothing of HTTP: the
// caller reports when a request is sent, and when and how it ends.
package balance

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Kind is a way to choose a server.
type Kind uint8

// The kinds.
const (
	JBQ        Kind = iota // least (1+Q)*T; random among equals
	Busy                   // least Q, as Apache's bybusyness; among equals the server chosen least
	RoundRobin             // each server in turn
)

var kinds = []string{JBQ: "jbq", Busy: "busy", RoundRobin: "rr"}

// String returns the kind's name.
func (k Kind) String() string { return kinds[k] }

// Set implements flag.Value. The names are jbq, busy and rr.
func (k *Kind) Set(name string) error {
	i := slices.Index(kinds, name)
	if i < 0 {
		return errors.New("there are jbq, busy, rr")
	}
	*k = Kind(i)
	return nil
}

const (
	gamma          = 0.1                    // weight of a new sample, the paper's forgetting factor
	initial        = 100 * time.Millisecond // T before any server has been measured
	minimum        = time.Microsecond       // lower bound of T: with T = 0 one server would get all requests
	idleTrialAfter = 10 * time.Second       // an idle server without a sample for this long gets a trial request
	reporting      = time.Second            // validity of a reported in-flight count
)

// Balancer tracks the requests in flight at each server and the speed of each server. A server is
// identified by a number. The number is reused only after the server was removed and its last request
// ended. Balancer is not safe for concurrent use; now must not go back. Only New and Add allocate.
type Balancer struct {
	kind Kind
	rng  *rand.Rand

	servers []server
	last    int           // server of the last request, for RoundRobin
	guess   time.Duration // T of a server without samples: the median of the others, or initial
	scratch []time.Duration
}

// Counts counts the requests of a server.
//
// Invariant: InFlight == Sent - Departed - Failed - Aborted >= 0.
type Counts struct {
	InFlight int    `json:"in_flight"` // Q
	Sent     uint64 `json:"sent"`
	Departed uint64 `json:"departed"`
	Failed   uint64 `json:"failed"`
	Aborted  uint64 `json:"aborted"`
}

type server struct {
	present bool // false: removed or never added; Pick skips it
	Counts

	// For JBQ.
	refusals  int           // failures and refusals since the last answer
	interval  time.Duration // T; valid while samples > 0
	samples   uint64
	busySince mono.Time // start of the busy period, while InFlight > 0
	departure mono.Time // last departure
	sampled   mono.Time // last departure, addition or trial

	// Requests in flight from other gateways; valid until othersUntil.
	otherGateways int
	othersUntil   mono.Time

	health
	lbstatus int // for Busy: Apache's lbstatus
}

// New returns a balancer with the given number of unmeasured servers. Ties are broken with rng.
func New(kind Kind, servers int, rng *rand.Rand) *Balancer {
	b := &Balancer{kind: kind, rng: rng, guess: initial, last: -1}
	for range servers {
		b.Add(0)
	}
	return b
}

// Add adds a server and returns its number. Until the server is measured, JBQ assumes the median T of
// the others: with T = 0 the server would be flooded, with infinite T it would never be used.
func (b *Balancer) Add(now mono.Time) int {
	i := slices.IndexFunc(b.servers, func(s server) bool { return !s.present && s.InFlight == 0 })
	if i < 0 {
		i = len(b.servers)
		b.servers = append(b.servers, server{})
		b.scratch = make([]time.Duration, 0, len(b.servers))
	}
	b.servers[i] = server{present: true, sampled: now}
	b.reckon()
	return i
}

// Remove stops choosing a server. The caller still reports the end of its requests; then its number may
// be reused.
func (b *Balancer) Remove(server int) {
	b.servers[server].present = false
	b.reckon()
}

// Pick returns the best server in fits for a request. It returns -1 if the request must wait for
// another request to end. Pick changes nothing; call Sent when the request is sent.
func (b *Balancer) Pick(now mono.Time, fits []int) int {
	best, lowest, ties := -1, math.Inf(1), 0
	for _, i := range fits {
		s := &b.servers[i]
		if !s.present {
			continue
		}
		if s.due(now, patience) || b.kind == JBQ && s.needsTrial(now, 2*idleTrialAfter) {
			return i // no idempotent request came for a probe: use this request
		}
		if s.ejected {
			continue
		}
		var cost float64
		switch b.kind {
		case JBQ:
			cost = b.answer(s, now)
		case Busy:
			cost = float64(s.InFlight)
		case RoundRobin:
			n := len(b.servers)
			cost = float64((i - b.last - 1 + n) % n)
		}
		switch {
		case cost < lowest:
			best, lowest, ties = i, cost, 1
		case cost == lowest && b.kind == Busy:
			if s.lbstatus > b.servers[best].lbstatus {
				best = i
			}
		case cost == lowest:
			if ties++; b.rng.IntN(ties) == 0 {
				best = i
			}
		}
	}
	switch {
	case best < 0:
		best = b.firstEjected(fits)
	case b.kind == JBQ && b.preferred(best, fits, now):
		best = -1
	}
	return best
}

// Probe returns a server in fits that needs a request which can be repeated elsewhere after a failure.
// Such a server's ejection is over, or JBQ has not measured it for 10 s. Probe changes nothing. If no
// repeatable request comes, Pick sends another request after a while.
func (b *Balancer) Probe(now mono.Time, fits []int) (server int, due bool) {
	for _, i := range fits {
		s := &b.servers[i]
		if s.present && (s.due(now, 0) || b.kind == JBQ && s.needsTrial(now, idleTrialAfter)) {
			return i, true
		}
	}
	return -1, false
}

// Sent records that a request was sent to the server.
func (b *Balancer) Sent(server int, now mono.Time) {
	s := &b.servers[server]
	if s.InFlight == 0 {
		s.busySince = now
		if s.needsTrial(now, idleTrialAfter) {
			s.sampled = now
		}
	}
	s.trying = s.trying || s.ejected
	s.InFlight++
	s.Sent++
	b.last = server
	if b.kind == Busy {
		for i := range b.servers {
			if b.servers[i].present {
				b.servers[i].lbstatus++
				s.lbstatus--
			}
		}
	}
}

// Outcome is the end of a request.
type Outcome uint8

// The outcomes.
const (
	Answered Outcome = iota
	Refused          // an answer that may have cost less work than the request needs
	Failed           // the server failed
	Aborted          // the client gave up; no measure of the server
)

// Ended records that a request has ended. A failure is not a departure: a server that refuses is not
// fast. The caller decides what counts as a failure: no connection, no answer in time, half an answer,
// or a status that another server might have avoided. A refusal (such as "no such page" or "no
// permission") shows that the server is healthy but not how fast it is.
func (b *Balancer) Ended(server int, now mono.Time, how Outcome) {
	s := &b.servers[server]
	s.end(server)
	t := b.intervalOf(s) // as it was while the request was in flight
	switch how {
	case Aborted:
		s.Aborted++
		s.trying = false
	case Failed:
		s.Failed++
		s.refusals++
		s.fail(now, t)
		b.reckon()
	case Refused:
		s.Departed++
		s.refusals++
		served := now.Sub(max(s.departure, s.busySince))
		s.refuse(now, served, t)
		s.departure, s.sampled = now, now
		b.reckon()
	default:
		s.Departed++
		s.refusals = 0
		served := now.Sub(max(s.departure, s.busySince))
		s.succeed(now, served, t)
		s.learn(served)
		s.departure, s.sampled = now, now
		b.reckon()
	}
}

// Reported records that a server had inFlight requests when it answered a request, before Ended is
// called for the request. For one second the requests beyond our own count as sent by other gateways.
// Otherwise several gateways would all choose the same idle server.
func (b *Balancer) Reported(server, inFlight int, now mono.Time) {
	s := &b.servers[server]
	s.otherGateways = max(inFlight-s.InFlight, 0)
	s.othersUntil = now.Add(reporting)
}

// Stat is the state of a server.
type Stat struct {
	Server int `json:"-"`
	Counts
	Others   int           `json:"in_flight_elsewhere"` // requests of other gateways
	Interval time.Duration `json:"-"`                   // T: mean time between departures while busy
	Answer   time.Duration `json:"-"`                   // R = (1+Q)*T: expected time until an answer
	Ejected  bool          `json:"ejected"`
}

// Stats appends the state of each server to dst.
func (b *Balancer) Stats(now mono.Time, dst []Stat) []Stat {
	for i := range b.servers {
		s := &b.servers[i]
		if !s.present {
			continue
		}
		dst = append(dst, Stat{
			Server: i, Counts: s.Counts, Others: s.elsewhere(now), Interval: b.intervalOf(s),
			Answer: time.Duration(min(b.answer(s, now), math.MaxInt64/2)), Ejected: s.ejected,
		})
	}
	return dst
}

// answer returns R in nanoseconds.
func (b *Balancer) answer(s *server, now mono.Time) float64 {
	t := b.intervalOf(s)
	return (1 + float64(s.InFlight+s.elsewhere(now)) + s.remaining(now, 0, t)) * float64(t)
}

// intervalOf returns T. A server that only refuses is assumed to be no faster than the median of the
// others, because refusing fast does not mean answering fast.
func (b *Balancer) intervalOf(s *server) time.Duration {
	switch {
	case s.samples == 0:
		return b.guess
	case s.refusals >= tolerated:
		return max(s.interval, b.guess)
	}
	return s.interval
}

// preferred reports whether a full server would answer sooner than server to, which has a debt of
// refusals (owed). Then the request waits for the full server. Otherwise the refusing server would get
// every request for which the others have no room.
func (b *Balancer) preferred(to int, fits []int, now mono.Time) bool {
	s := &b.servers[to]
	if s.remaining(now, 0, b.intervalOf(s)) == 0 {
		return false
	}
	answer := b.answer(s, now)
	for i := range b.servers {
		if o := &b.servers[i]; o.present && !o.ejected && o.InFlight > 0 && b.answer(o, now) < answer && !slices.Contains(fits, i) {
			return true
		}
	}
	return false
}

func (s *server) elsewhere(now mono.Time) int {
	if now < s.othersUntil {
		return s.otherGateways
	}
	return 0
}

// learn adds a sample: T <- 0.9*T + 0.1*t. The first ten samples are averaged, because the initial
// guess would fade too slowly: from 100 ms T needs 44 samples to reach 1 ms, and servers measured later
// would not get so many.
func (s *server) learn(t time.Duration) {
	s.samples++
	weight := max(gamma, 1/float64(s.samples))
	s.interval = max(time.Duration((1-weight)*float64(s.interval)+weight*float64(t)), minimum)
}

// needsTrial reports whether an idle server has had neither a sample nor a trial request for so long.
func (s *server) needsTrial(now mono.Time, after time.Duration) bool {
	return s.InFlight == 0 && !s.ejected && now.Sub(s.sampled) >= after
}

func (s *server) end(server int) {
	if s.InFlight == 0 {
		panic(fmt.Sprintf("balance: server %d ended a request and has none: %d sent, %d departed, %d failed, %d aborted",
			server, s.Sent, s.Departed, s.Failed, s.Aborted))
	}
	s.InFlight--
}

// reckon updates guess if a server has no samples, or if a server refuses requests.
func (b *Balancer) reckon() {
	b.scratch = b.scratch[:0]
	some := false
	for i := range b.servers {
		switch s := &b.servers[i]; {
		case !s.present:
		case s.samples == 0 || s.refusals >= tolerated:
			some = true
		default:
			b.scratch = append(b.scratch, s.interval)
		}
	}
	if !some {
		return
	}
	b.guess = initial
	if n := len(b.scratch); n > 0 {
		slices.Sort(b.scratch)
		b.guess = (b.scratch[(n-1)/2] + b.scratch[n/2]) / 2
	}
}

const (
	tolerated   = 5                // failures in a row before ejection
	firstPeriod = time.Second      // first ejection
	longestOf   = 30 * time.Second // longest ejection; each is twice as long as the previous
	patience    = time.Second      // wait for a repeatable request before any request may probe
)

// health ejects a server that fails. After 5 failures in a row the server is ejected. When the ejection
// period is over, the server gets one request as a probe. The first request that ends while the probe
// is in flight decides: an answer ends the ejection, a failure doubles the period.
type health struct {
	failures int // in a row
	ejected  bool
	since    mono.Time     // start of the ejection, if ejected
	period   time.Duration // length of the ejection
	trying   bool          // a probe is in flight

	// A failed request leaves Q but stays as a debt for the time that an answer would have taken.
	// Otherwise a server that refuses at once would always be idle, and would get more requests the
	// more it fails, as long as it answers one in five.
	debt   float64 // requests, at debtAt
	debtAt mono.Time
}

// due reports whether the ejection ended at least since ago and no probe is in flight.
func (h *health) due(now mono.Time, since time.Duration) bool {
	return h.ejected && !h.trying && now.Sub(h.since) >= h.period+since
}

// fail counts a failure of a server with interval t.
func (h *health) fail(now mono.Time, t time.Duration) {
	h.debt, h.debtAt = h.remaining(now, 0, t)+1, now
	h.failures++
	if h.ejected && !h.trying || !h.ejected && h.failures < tolerated {
		return // sent before the ejection, or too few failures
	}
	h.period = min(max(2*h.period, firstPeriod), longestOf)
	h.ejected, h.since, h.trying = true, now, false
}

// refuse counts a refusal after worked time. The rest of the time of an answer becomes debt. The server
// is healthy.
func (h *health) refuse(now mono.Time, worked, t time.Duration) {
	h.succeed(now, worked, t)
	h.debt, h.debtAt = h.debt+max(1-float64(worked)/float64(t), 0), now
}

// succeed counts an answer after worked time.
func (h *health) succeed(now mono.Time, worked, t time.Duration) {
	h.failures = 0
	h.debt, h.debtAt = h.remaining(now, worked, t), now
	if h.ejected && h.trying {
		*h = health{}
	}
}

// remaining returns the failed requests that an equal server would still be busy with. The debt
// falls by one each t, except during the time worked on other requests.
func (h *health) remaining(now mono.Time, worked, t time.Duration) float64 {
	if h.debt == 0 {
		return 0
	}
	idle := max(now.Sub(h.debtAt)-worked, 0)
	return max(h.debt-float64(idle)/float64(t), 0)
}

// firstEjected returns the server in fits that was ejected first, if all servers are ejected and no
// probe is in flight. Otherwise it returns -1.
func (b *Balancer) firstEjected(fits []int) int {
	if slices.ContainsFunc(b.servers, func(s server) bool { return s.present && (!s.ejected || s.trying) }) {
		return -1
	}
	first := -1
	for _, i := range fits {
		if s := &b.servers[i]; s.present && (first < 0 || s.since < b.servers[first].since) {
			first = i
		}
	}
	return first
}
