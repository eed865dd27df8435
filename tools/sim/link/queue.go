package link

import (
	"time"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/header"
)

// packet is data or an ACK.
type packet struct {
	at   mono.Time // arrival at the other end of a link, or the time when the sender learns of the loss
	flow *flow
	ack  bool
	link int       // position of the link in the packet's direction
	sent mono.Time // when the data left its sender

	head [header.PacketSize]byte // the paper's congestion header

	// The brokers' advice, for Level.
	fair     float64       // γ of the router that offers least
	paced    bool          // the flow must keep to γ
	interval time.Duration // t_s of this router
}

// congestion returns the congestion header.
func (p *packet) congestion() header.Packet {
	h, err := header.ParsePacket(p.head[:])
	if err != nil {
		panic(err) // each packet is sent with a header
	}
	return h
}

// setCongestion replaces the congestion header.
func (p *packet) setCongestion(h header.Packet) { header.AppendPacket(p.head[:0], h) }

// due returns the time of the first packet, or mono.Never.
func due(q *container.Queue[packet]) mono.Time {
	if q.Len() == 0 {
		return mono.Never
	}
	return q.Front().at
}

// wire is one direction of the link: a FIFO queue with drop-tail, then the propagation.
// Packets leave in order, so the time when the queue will be empty represents the queue.
type wire struct {
	// Set once.
	capacity float64 // bytes per second
	buffer   float64 // bytes
	half     time.Duration
	notice   time.Duration // delay until a sender knows of a loss
	start    mono.Time     // start of the measurement

	empty   mono.Time // when the queue will be empty
	last    mono.Time // last arrival
	least   float64   // smallest queue in the router's interval, bytes
	peak    float64   // queue since the last sample, bytes
	flying  container.Queue[packet]
	lost    container.Queue[packet]
	area    float64 // integral of the queue over time since from, byte seconds
	longest float64 // queue since from, bytes
	bytes   float64 // bytes that left since from
	total   float64 // bytes accepted
	drops   int     // since from
}

// backlog returns the length of the queue at now, in bytes.
func (w *wire) backlog(now mono.Time) float64 {
	return max(0, w.empty.Sub(now).Seconds()) * w.capacity
}

// observe updates the statistics up to now.
func (w *wire) observe(now mono.Time) {
	w.least = min(w.least, w.backlog(now))
	w.peak = max(w.peak, w.backlog(w.last))
	if start := max(w.last, w.start); now > start {
		a, b := w.backlog(start), w.backlog(now)
		w.longest = max(w.longest, a)
		if b > 0 {
			w.area += (a + b) / 2 * now.Sub(start).Seconds()
		} else {
			w.area += a * a / w.capacity / 2
		}
	}
	w.last = now
}

// send queues a packet of the given size, or drops it.
func (w *wire) send(now mono.Time, p packet, size float64) {
	w.observe(now)
	if w.backlog(now)+size > w.buffer {
		w.drop(now, p)
		return
	}
	w.empty = max(w.empty, now).Add(time.Duration(size / w.capacity * 1e9))
	w.total += size
	if w.empty > w.start {
		w.bytes += size
	}
	p.at = w.empty.Add(w.half)
	w.flying.Push(p)
}

// drop loses a packet. The sender learns of the loss later, as from the ACK of a later
// packet.
func (w *wire) drop(now mono.Time, p packet) {
	if now >= w.start {
		w.drops++
	}
	p.at = now.Add(w.notice)
	w.lost.Push(p)
}
