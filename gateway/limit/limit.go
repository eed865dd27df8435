package limit

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	first    = 8.0     // limit of an unknown server
	maxLimit = 1 << 16 // maximum limit

	// Bases.
	slots        = 64   // routes with a separate base; further routes share slots
	clip         = 3.0  // a latency counts for at most clip times the base
	earlySamples = 8    // latencies that teach when the server is new,
	alone        = 4    // if the request left with at most this many in flight
	surely       = 32   // latencies after which the bases are no longer in doubt
	slower       = 1.4  // latency over base, without waiting, above which all bases grow
	faster       = 0.6  // latency over base, without waiting, below which all bases shrink
	trustPart    = 0.5  // part of the trusted knee in flight without waiting
	trustKept    = 0.8  // part of the trusted knee kept from one probe to the next
	probePart    = 0.75 // part of the knee in flight during a probe
	period       = 32   // batches between two probes
	hurried      = 2    // batches between two probes while the bases are in doubt

	// Rounds.
	longRound = 8    // minimum answers in a round
	fading    = 0.75 // weight of earlier rounds, from one round to the next
	idle      = 1.06 // latency over base below which the server may do more
	busy      = 1.25 // latency over base above which the server is saturated
	growth    = 1.25 // maximum of the knee over the trusted knee
	headMost  = 4.0  // requests beyond the knee, in addition to 1/32 of the knee

	// Without answers.
	stuckAfter = time.Second
	stuckMost  = 32.0
)

// Limit is the number of requests that one server may have in flight. Make a Limit with New. It is not
// safe for concurrent use, and no method allocates.
type Limit struct {
	minimum float64 // set once

	// Invariant: least <= limit <= most, and probing is 0 or in 1 .. limit.
	limit   float64
	knee    float64 // requests being served when the server is saturated
	trusted float64 // the knee when the bases were last known to be right
	opening bool    // the limit doubles until latencies grow
	grew    bool    // latencies grew in the last round

	bases  [slots]base
	taught int // latencies that have taught, up to surely
	// speed is the recent latency over base of requests that did not wait. If speed is far from 1, the
	// whole server has become slower or faster.
	speed float64

	current, earlier round // the present round, and the fading sum of earlier rounds

	// While probing > 0, at most probing requests are in flight. left is the number of requests until a
	// probe begins or ends.
	probing, untilChange int
	fallen               bool // the knee fell by much: the next probe comes early

	answered    mono.Time // time of the last answer, or of the last growth without an answer
	meanSeconds float64   // average seconds until the end of an answer
}

// base is the latency of a route's requests that do not wait.
type base struct {
	seconds float64
	samples int
	// ratio is the recent latency over base, like speed. recent is the recent latency without a bound:
	// the base becomes recent if ratio is far from 1.
	ratio, recent float64
}

// round sums the answers to requests that may have waited. Times are in seconds.
type round struct {
	answers, bound, inFlight float64 // bound: sent while other requests waited
	base, waited, total      float64
}

func (r *round) add(o *round, times float64) {
	r.answers += times * o.answers
	r.bound += times * o.bound
	r.inFlight += times * o.inFlight
	r.base += times * o.base
	r.waited += times * o.waited
	r.total += times * o.total
}

// ratio returns latency over base.
func (r *round) ratio() float64 {
	if r.base == 0 {
		return 1
	}
	return 1 + r.waited/r.base
}

// served returns the number of requests in flight that did not wait.
func (r *round) served() float64 {
	return r.inFlight / r.answers * (1 - max(r.waited, 0)/r.total)
}

// Sample is kept by the sender of a request from Sent to Answered.
type Sample struct {
	inFlight int32
	free     bool // sent with so few in flight that the request does not wait
	bound    bool // sent while other requests waited
}

// New returns the limit of a server that may always have least requests in flight.
func New(minimum int) *Limit {
	l := &Limit{minimum: float64(max(minimum, 1)), knee: 1, opening: true, speed: 1, untilChange: period * int(first)}
	l.set(first)
	return l
}

func (l *Limit) set(to float64) { l.limit = min(max(to, l.minimum), maxLimit) }

// Most returns the number of requests that may be in flight.
func (l *Limit) Most() int {
	if l.probing > 0 {
		return l.probing
	}
	return int(l.limit)
}

// free returns the number of requests that may be in flight without waiting.
func (l *Limit) free() int { return int(max(1, probePart*l.knee, trustPart*l.trusted) + 0.25) }

// doubtful reports whether the bases may be wrong.
func (l *Limit) doubtful() bool {
	ratio := l.earlier.ratio()
	return l.taught < surely || l.speed > 1.3 || l.speed < 0.7 || ratio < 0.85 || ratio > 2.2
}

// Sent records a request to the server. inFlight is the number of requests at the server, including
// this request. waiting reports whether other requests wait that could go to the server.
func (l *Limit) Sent(inFlight int, waiting bool, now mono.Time) Sample {
	if l.answered == 0 {
		l.answered = now
	}
	s := Sample{inFlight: int32(min(inFlight, math.MaxInt32)), free: inFlight <= l.free()}
	if l.probing > 0 {
		s.free = s.free && l.untilChange > l.probing
		if inFlight <= l.probing {
			l.untilChange--
		}
		if l.untilChange <= 0 {
			l.probing, l.untilChange = 0, period*int(l.limit)
		}
		return s
	}
	s.bound = waiting || inFlight >= int(l.limit)
	if l.untilChange--; l.untilChange <= 0 && inFlight >= int(l.limit) && !l.opening {
		l.probe()
	}
	return s
}

// probe lowers the number in flight until two batches have been sent. The first batch teaches: most of
// its answers arrive before more requests are in flight again.
func (l *Limit) probe() {
	if free := l.free(); free < int(l.limit) {
		l.probing, l.untilChange = free, 2*free+1
	} else { // all requests are sent like a probe
		l.untilChange = period * int(l.limit)
		l.trusted *= trustKept
	}
	if !l.doubtful() && !l.fallen {
		l.trusted = max(l.knee, trustKept*l.trusted)
	}
	l.fallen = false
}

// Answered records the answer to a request. slot distinguishes routes. latency is the time until the
// head of the answer, took the time until its end.
func (l *Limit) Answered(s Sample, slot uint32, latency, total time.Duration, now mono.Time) {
	l.answered = now
	seconds := max(latency.Seconds(), 1e-7)
	whole := max(total.Seconds(), seconds)
	if l.meanSeconds == 0 {
		l.meanSeconds = whole
	}
	l.meanSeconds += (whole - l.meanSeconds) / 16
	b := &l.bases[slot%slots]
	teaches := s.free || l.opening && l.taught < earlySamples && s.inFlight <= alone
	if b.samples == 0 {
		if teaches {
			*b = base{seconds, 1, 1, seconds}
		}
		return
	}
	raw := seconds
	seconds = min(seconds, clip*b.seconds)
	if !s.free {
		r := &l.current
		r.answers++
		r.inFlight += float64(s.inFlight)
		if s.bound {
			r.bound++
		}
		r.base += b.seconds
		r.waited += seconds - b.seconds
		r.total += whole
	}
	if teaches {
		l.teach(b, raw, seconds)
	}
	if l.current.answers >= max(longRound, l.limit) {
		l.endRound()
	}
}

// teach learns from a latency without waiting: whole is unbounded, seconds is bounded by clip. A server
// of many workers teaches more often, so each latency counts less.
func (l *Limit) teach(b *base, whole, seconds float64) {
	free, ratio := float64(l.free()), seconds/b.seconds
	b.samples++
	l.taught = min(l.taught+1, surely)
	b.seconds += max(1/min(max(4*free, 16), 512), 1/float64(b.samples)) * (seconds - b.seconds)
	b.recent += (whole - b.recent) / 4
	memory := min(max(free, 12), 64)
	b.ratio += (ratio - b.ratio) / memory
	l.speed += (ratio - l.speed) / memory
	if changed(l.speed) {
		for i := range l.bases {
			l.bases[i].seconds *= l.speed
			l.bases[i].ratio = 1
		}
		l.speed = 1
		b.begin()
	} else if changed(b.ratio) {
		b.begin()
	}
}

// begin makes a base learn quickly again, starting from its recent latency.
func (b *base) begin() { b.seconds, b.ratio, b.samples = b.recent, 1, 2 }

// changed reports whether latencies and bases differ by more than chance.
func changed(ratio float64) bool { return ratio > slower || ratio < faster }

// endRound ends a round and sets the limit from its results.
func (l *Limit) endRound() {
	last := l.current
	l.current = round{}
	if l.opening {
		l.open(&last)
		return
	}
	last.add(&l.earlier, fading)
	l.earlier = last
	served, ratio := last.served(), last.ratio()
	bound := last.bound > last.answers/2
	switch {
	case bound && ratio >= 0.85 && ratio < idle && l.speed > 0.92:
		served = max(served, l.knee) * (1 + (growth-1)/2)
	case ratio < 0.85 || !bound && (served > l.knee || ratio < 1.1):
		served = l.knee // the bases are wrong, or the load was too low
	case served < 0.6*l.knee:
		l.fallen = true
	}
	if l.trusted > 0 {
		served = min(served, max(growth*l.trusted, l.trusted+1))
	}
	l.knee = max(1, served)
	if l.fallen || l.doubtful() || l.knee > 1.1*l.trusted {
		l.untilChange = min(l.untilChange, hurried*int(l.limit))
	}
	l.set(l.knee + min(max(1, math.Sqrt(l.knee)), headMost) + l.knee/32)
}

// open doubles the limit while latencies stay the same. Two rounds of longer latencies end the
// doubling: one round may be chance.
func (l *Limit) open(last *round) {
	ratio, served := last.ratio(), last.served()
	switch {
	case ratio < busy:
		l.grew = false
		if l.knee = max(l.knee, served); last.bound > last.answers/2 {
			l.set(2 * l.limit)
		}
	case !l.grew:
		l.grew = true
	default:
		l.opening, l.knee = false, max(1, served)
		l.set(l.knee + 1)
	}
}

// Tick raises the limit slowly while requests wait for the server and the server answers none: its
// requests may take long without being work, as streams do.
func (l *Limit) Tick(now mono.Time) {
	patience := max(stuckAfter, time.Duration(2*l.meanSeconds*float64(time.Second)))
	if l.answered == 0 || now.Sub(l.answered) < patience || l.limit >= stuckMost {
		return
	}
	l.answered = now
	l.set(min(1.5*l.limit, stuckMost))
}
