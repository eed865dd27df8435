package link

import (
	"cmp"
	"time"
)

// paperRouter is the router's side of the paper's transport: (6), (2) and (3) of
// Improved EFXCP (Wu, Yang, Zhang, 2014), for packets of size s, rate r and ToS
// w in intervals t_s.
//
//	(6) g   = Σ s / Σ (s w / r)                 mean rate of a virtual flow
//	(2) ρ   = (λ + k_q q) / (C t_s)             q: least queue in t_s
//	(3) γo  = g (C t_s - k_q q) / λ
//
// (3) is printed with ρ C t_s - k_q q below the line, which by (2) is λ. Guards
// that the paper does not have: without a packet, γo stays; a packet without a
// rate stands for one flow; the queue takes at most half of C t_s off.
type paperRouter struct {
	theta float64 // set once

	// Of the interval under way.
	bytes, plain float64 // Σ s, with and without a header
	flows        float64 // Σ (s w / r)
	fresh        float64 // Σ w of packets without a rate

	rate float64
}

const kq = 0.5 // k_q: the part of the standing queue that an interval takes off

// newPaperRouter returns a router that says overload where ρ is above theta, the
// paper's 1 if theta is 0.
func newPaperRouter(theta float64) *paperRouter {
	return &paperRouter{theta: cmp.Or(theta, 1)}
}

// packet counts a packet of size bytes of a flow of a ToS and of the rate that it
// claims, in bytes per second; 0: not known.
func (p *paperRouter) packet(size, tos, rate float64) {
	p.bytes += size
	if rate > 0 {
		p.flows += size * tos / rate
	} else {
		p.fresh += tos
	}
}

// other counts a packet without a header: it is a part of the load λ only.
func (p *paperRouter) other(size float64) { p.plain += size }

// interval ends an interval of length ts and returns γo, in bytes per second and
// unit of ToS, 0 before the first packet, and whether Num_ takes its place: the link
// was overloaded. capacity is in bytes per second, queueMin in bytes.
func (p *paperRouter) interval(capacity, queueMin float64, ts time.Duration) (rate float64, overload bool) {
	room := capacity * ts.Seconds()
	if p.bytes > 0 {
		g := p.bytes / (p.flows + p.fresh*ts.Seconds())
		p.rate = min(capacity, g*max(room/2, room-kq*queueMin)/(p.bytes+p.plain))
	}
	overload = p.bytes+p.plain+kq*queueMin > p.theta*room
	p.bytes, p.plain, p.flows, p.fresh = 0, 0, 0, 0
	return p.rate, overload
}
