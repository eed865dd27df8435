package link

import (
	"cmp"
	"time"
)

// paperRouter is the router's side of the paper's transport: (6), (2) and (3) of Improved
// EFXCP (Wu, Yang, Zhang, 2014), for packets of size s, rate r and ToS w in intervals
// t_s.
//
//	(6) g   = Σ s / Σ (s w / r)                 mean rate of a virtual flow
//	(2) ρ   = (λ + k_q q) / (C t_s)             q: least queue in t_s
//	(3) γo  = g (C t_s - k_q q) / λ
//
// The paper prints (3) with the denominator ρ C t_s - k_q q, which by (2) is λ. The paper
// lacks three guards: without a packet, γo stays; a packet without a rate counts as one
// flow; the queue takes at most half of C t_s.
type paperRouter struct {
	theta float64 // set once

	// Current interval.
	bytes, plain float64 // Σ s, with and without a header
	flows        float64 // Σ (s w / r)
	fresh        float64 // Σ w of packets without a rate

	rate float64
}

const kq = 0.5 // k_q: the fraction of the standing queue to remove per interval

// newPaperRouter returns a router that signals overload if ρ exceeds theta; 0: 1. The paper
// only says that an overloaded link signals.
func newPaperRouter(theta float64) *paperRouter {
	return &paperRouter{theta: cmp.Or(theta, 1)}
}

// packet counts a packet of size bytes from a flow of the given ToS and claimed rate, in
// bytes per second; 0: unknown.
func (p *paperRouter) packet(size, tos, rate float64) {
	p.bytes += size
	if rate > 0 {
		p.flows += size * tos / rate
	} else {
		p.fresh += tos
	}
}

// unmarked counts a packet without a header, which only adds to the load λ.
func (p *paperRouter) unmarked(size float64) { p.plain += size }

// interval ends an interval of length ts. It returns γo, in bytes per second and unit of
// ToS (0 before the first packet), and whether the link was overloaded; then the router
// sends Num_ instead of γo. capacity is in bytes per second, queueMin in bytes.
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
