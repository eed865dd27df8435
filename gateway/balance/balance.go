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

// Kind is how a server is chosen.
type Kind uint8

// The kinds.
const (
	JBQ        Kind = iota // the least (1+Q)*T, ties at random
	Busy                   // Apache's bybusyness: the least Q, ties to the one chosen least
	RoundRobin             // each in turn
)

var kinds = []string{JBQ: "jbq", Busy: "busy", RoundRobin: "rr"}

// String returns the kind's name.
func (k Kind) String() string { return kinds[k] }

// Set takes the kind of a name, jbq, busy or rr, as a flag.Value.
func (k *Kind) Set(name string) error {
	i := slices.Index(kinds, name)
	if i < 0 {
		return errors.New("there are jbq, busy, rr")
	}
	*k = Kind(i)
	return nil
}

const (
	gamma     = 0.1                    // weight of a sample, the paper's forgetting factor
	initial   = 100 * time.Millisecond // T while no server has been measured
	minimum   = time.Microsecond       // T is no less: at 0 a server would take everything
	stale     = 10 * time.Second       // without a sample for so long, a server is tried
	reporting = time.Second            // for so long a reported in-flight count is believed
)

// Balancer knows the requests in flight at each server, and how fast each answers.
// Servers are numbers, which stay theirs until they are removed and their last request
// has ended. It is not safe for concurrent use; now must not go back. No method but
// Add allocates.
type Balancer struct {
	kind Kind
	rng  *rand.Rand

	servers []server
	last    int           // the server of the last request, for RoundRobin
	guess   time.Duration // T of a server without a sample: the median of the others, else initial
	scratch []time.Duration
}

// Counts are of the requests of a server.
//
// Invariant: InFlight == Sent - Departed - Failed - Aborted >= 0.
type Counts struct {
	InFlight int    `json:"in_flight"` // Q
	Sent     uint64 `json:"sent"`
	Departed uint64 `json:"departed"`
	Failed   uint64 `json:"failed"`
	Aborted  uint64 `json:"aborted"`
}

// server is what is known of one.
type server struct {
	present bool // false: removed, or never there; it is chosen no more
	Counts

	// JBQ.
	refusals  int           // failures and refusals since the last answer
	interval  time.Duration // T, while samples > 0
	samples   uint64
	began     mono.Time // start of the busy period, while InFlight > 0
	departure mono.Time // the last
	sampled   mono.Time // the last departure, or when it was added or tried

	// Requests in flight from other gateways, believed until then.
	others      int
	othersUntil mono.Time

	health
	turns int // Busy: Apache's lbstatus
}

// New returns a balancer of so many servers, of which nothing is known. Its chance comes
// from rng.
func New(kind Kind, servers int, rng *rand.Rand) *Balancer {
	b := &Balancer{kind: kind, rng: rng, guess: initial, last: -1}
	for range servers {
		b.Add(0)
	}
	return b
}

// Add adds a server and returns its number. JBQ takes it to be as fast as the median of
// the others until it has been measured: at 0 it would be flooded, at infinity never used.
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

// Remove ends the choosing of a server. Its number is reused once its requests have
// ended, which are to be told as before.
func (b *Balancer) Remove(server int) {
	b.servers[server].present = false
	b.reckon()
}

// Pick returns the server for a request among those of fits; -1 if there is none, and
// the request has to wait for one that ends. It changes nothing: Sent says that it goes.
func (b *Balancer) Pick(now mono.Time, fits []int) int {
	best, least, ties := -1, math.Inf(1), 0
	for _, i := range fits {
		s := &b.servers[i]
		if !s.present {
			continue
		}
		if s.due(now, patience) || b.kind == JBQ && s.stale(now, 2*stale) {
			return i // no idempotent request came by: any
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
		case cost < least:
			best, least, ties = i, cost, 1
		case cost == least && b.kind == Busy:
			if s.turns > b.servers[best].turns {
				best = i
			}
		case cost == least:
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

// Probe returns a server of fits that wants one request which may be repeated elsewhere
// if it fails: one whose ejection is over, or which JBQ has not measured for 10 s. It
// changes nothing. Where no such request comes by, Pick sends another after a while.
func (b *Balancer) Probe(now mono.Time, fits []int) (server int, due bool) {
	for _, i := range fits {
		s := &b.servers[i]
		if s.present && (s.due(now, 0) || b.kind == JBQ && s.stale(now, stale)) {
			return i, true
		}
	}
	return -1, false
}

// Sent says that a request goes to the server.
func (b *Balancer) Sent(server int, now mono.Time) {
	s := &b.servers[server]
	if s.InFlight == 0 {
		s.began = now
		if s.stale(now, stale) {
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
				b.servers[i].turns++
				s.turns--
			}
		}
	}
}

// Outcome is how a request ended.
type Outcome uint8

// The outcomes.
const (
	Answered Outcome = iota
	Refused          // by an answer that may take less than what was asked for
	Failed           // by the server
	Aborted          // by its client, which says nothing of the server
)

// Ended says that a request has ended. A failure is no departure: a server is not fast by
// refusing. What counts as one is the caller's to say: no connection, no answer in time,
// half an answer, and a status that means that another server might have done better. A
// refusal (as one that says that there is no such page, or no permission) teaches nothing of
// the speed either, but the server is well.
func (b *Balancer) Ended(server int, now mono.Time, how Outcome) {
	s := &b.servers[server]
	s.end(server)
	t := b.intervalOf(s) // as it was while the request was on its way
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
		took := now.Sub(max(s.departure, s.began))
		s.refuse(now, took, t)
		s.departure, s.sampled = now, now
		b.reckon()
	default:
		s.Departed++
		s.refusals = 0
		took := now.Sub(max(s.departure, s.began))
		s.succeed(now, took, t)
		s.learn(took)
		s.departure, s.sampled = now, now
		b.reckon()
	}
}

// Reported says that the server had inFlight requests when it answered one, which has
// not been told as Ended yet. For a second, what is beyond our own counts as of
// other gateways, so that several do not all choose the server that they left alone.
func (b *Balancer) Reported(server, inFlight int, now mono.Time) {
	s := &b.servers[server]
	s.others = max(inFlight-s.InFlight, 0)
	s.othersUntil = now.Add(reporting)
}

// Stat is what is known of a server.
type Stat struct {
	Server int `json:"-"`
	Counts
	Others   int           `json:"in_flight_elsewhere"` // of other gateways
	Interval time.Duration `json:"-"`                   // T: between departures while it is busy
	Answer   time.Duration `json:"-"`                   // R = (1+Q)*T: when a request would be answered
	Ejected  bool          `json:"ejected"`
}

// Stats appends what is known of each server to dst.
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

// answer is R in nanoseconds.
func (b *Balancer) answer(s *server, now mono.Time) float64 {
	t := b.intervalOf(s)
	return (1 + float64(s.InFlight+s.elsewhere(now)) + s.owed(now, 0, t)) * float64(t)
}

// intervalOf is T. A server that does nothing but refuse is taken to be no faster than the
// median of the others: what it was fast at is another thing.
func (b *Balancer) intervalOf(s *server) time.Duration {
	switch {
	case s.samples == 0:
		return b.guess
	case s.refusals >= tolerated:
		return max(s.interval, b.guess)
	}
	return s.interval
}

// preferred reports whether a server that is not among those that fit, since it has as many
// requests as it may, would answer sooner than one that is owed for refusals. To wait for it
// keeps the one that refuses from getting all that the others have no room for.
func (b *Balancer) preferred(to int, fits []int, now mono.Time) bool {
	s := &b.servers[to]
	if s.owed(now, 0, b.intervalOf(s)) == 0 {
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
		return s.others
	}
	return 0
}

// learn takes a sample: T <- 0.9*T + 0.1*t. The first ten are averaged, or what was
// guessed would outlive them: from 100 ms it takes 44 samples to reach 1 ms, which the
// servers that are measured later would not get.
func (s *server) learn(t time.Duration) {
	s.samples++
	weight := max(gamma, 1/float64(s.samples))
	s.interval = max(time.Duration((1-weight)*float64(s.interval)+weight*float64(t)), minimum)
}

// stale reports whether an idle server has had no sample, and no request that should
// have become one, for so long.
func (s *server) stale(now mono.Time, long time.Duration) bool {
	return s.InFlight == 0 && !s.ejected && now.Sub(s.sampled) >= long
}

func (s *server) end(server int) {
	if s.InFlight == 0 {
		panic(fmt.Sprintf("balance: server %d ended a request and has none: %d sent, %d departed, %d failed, %d aborted",
			server, s.Sent, s.Departed, s.Failed, s.Aborted))
	}
	s.InFlight--
}

// reckon sets guess, while there is a server that has no sample, or refuses.
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
