package link

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/pacing/header"
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
	start mono.Time
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

// arrive forwards a packet to the queue, with the router's feedback. publisher is the
// router's entry of the packet's flow.
func (r *router) arrive(now mono.Time, p packet, publisher *police.Publisher) {
	if p.ack {
		r.acks += ackSize
		if r.paper != nil {
			r.paper.unmarked(ackSize)
		}
		r.wire.send(now, p, ackSize)
		return
	}
	h := p.congestion()
	r.rtts, r.count = r.rtts+float64(h.RTT)/1e6, r.count+1
	if r.police {
		if ok, _ := r.table.Admit(publisher, 1, now); !ok {
			r.wire.drop(now, p)
			return
		}
	}
	if r.paper != nil {
		r.paper.packet(packetSize, publisher.Weight(), float64(h.Throughput))
		h.Lower(r.feedback(), uint32(r.interval/time.Microsecond))
		p.setCongestion(h)
	} else {
		publisher.Count(r.level, 1, now)
		if p.interval == 0 || r.paced && (!p.paced || r.fair < p.fair) {
			p.fair, p.paced, p.interval = r.fair, r.paced, r.interval
		}
	}
	r.wire.send(now, p, packetSize)
}

// feedback returns the throughput for the congestion header.
func (r *router) feedback() uint64 {
	if r.overload {
		return header.Num
	}
	return uint64(r.fair)
}

// turn ends an interval and returns the end of the next. The paper's intervals are one
// mean round trip long.
func (r *router) turn(now mono.Time) mono.Time {
	r.wire.observe(now)
	rtt := r.interval
	if r.count > 0 && r.rtts > 0 {
		rtt = time.Duration(r.rtts / r.count * 1e9)
	}
	passed := now.Sub(r.start)
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
	r.start, r.acks, r.rtts, r.count = now, 0, 0, 0
	r.wire.least = r.wire.backlog(now)
	return now.Add(r.interval)
}
