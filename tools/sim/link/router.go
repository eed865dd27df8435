package link

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/pacing/police"
)

// router controls one direction of the link and sends rates to its flows.
type router struct {
	// Set once.
	wire   *wire
	paper  *paperRouter  // or nil
	level  *fair.Level   // or nil
	table  *police.Table // the ToS that flows may claim
	police bool

	// Current interval.
	began mono.Time
	acks  float64 // bytes
	rtts  float64 // sum over packets, seconds
	count float64 // packets

	// From the previous interval, sent in packets.
	interval time.Duration
	fair     float64
	overload bool
	paced    bool
}

// burst is the burst of a paced flow, in packets.
const burst = 4

// arrive forwards a flow's packet to the queue.
func (r *router) arrive(now mono.Time, p packet, rate float64, rtt time.Duration) {
	if p.ack {
		r.acks += ackSize
		if r.paper != nil {
			r.paper.other(ackSize)
		}
		r.wire.send(now, p, ackSize)
		return
	}
	r.rtts, r.count = r.rtts+rtt.Seconds(), r.count+1
	if r.police {
		if ok, _ := r.table.Admit(p.flow.publisher, 1, now); !ok {
			r.wire.drop(now, p)
			return
		}
	}
	if r.paper != nil {
		r.paper.packet(packetSize, p.flow.publisher.Weight(), rate)
	} else {
		p.flow.publisher.Count(r.level, 1, now)
	}
	p.fair, p.overload, p.paced, p.interval = r.fair, r.overload, r.paced, r.interval
	r.wire.send(now, p, packetSize)
}

// turn ends an interval and returns the end of the next. The paper's intervals are one
// mean round trip long.
func (r *router) turn(now mono.Time) mono.Time {
	r.wire.observe(now)
	rtt := r.interval
	if r.count > 0 && r.rtts > 0 {
		rtt = time.Duration(r.rtts / r.count * 1e9)
	}
	passed := now.Sub(r.began)
	var a fair.Advice
	if r.paper != nil {
		r.fair, r.overload = r.paper.interval(r.wire.capacity, r.wire.least, passed)
		r.interval = rtt
		a = fair.Advice{Paced: r.fair > 0, Rate: r.fair / packetSize}
	} else {
		capacity := (r.wire.capacity - r.acks/passed.Seconds()) / packetSize
		a = r.level.Interval(now, capacity, r.wire.least/packetSize, passed)
		r.fair, r.paced = a.Rate, a.Paced
		r.interval = r.level.Span(capacity, rtt)
	}
	r.table.Advise(a, burst, r.interval, now)
	r.began, r.acks, r.rtts, r.count = now, 0, 0, 0
	r.wire.least = r.wire.backlog(now)
	return now.Add(r.interval)
}
