package link

import (
	"time"

	"github.com/srtm-io/srtm/internal/fifo"
	"github.com/srtm-io/srtm/internal/mono"
)

// packet is data or an ACK.
type packet struct {
	at       mono.Time // it is at the other end, or its sender learns of its loss
	flow     *flow
	ack      bool
	overload bool
	sent     mono.Time     // when the data left its sender
	fair     float64       // what the router said: γo or γ
	paced    bool          // of Level: γ is to be kept
	interval time.Duration // the router's t_s
}

// due is when the first packet is, and never if there is none.
func due(q *fifo.Queue[packet]) mono.Time {
	if q.Len() == 0 {
		return mono.Never
	}
	return q.Front().at
}

// wire is one direction of the link: a FIFO queue with drop-tail, then the
// propagation. What is in the queue is when it will be empty, since packets leave
// in the order in which they come.
type wire struct {
	// Set once.
	capacity float64 // bytes per second
	buffer   float64 // bytes
	half     time.Duration
	notice   time.Duration // until a sender knows of a loss
	from     mono.Time     // what is measured begins

	empty   mono.Time // the queue is
	last    mono.Time // a packet came
	least   float64   // queue in the router's interval, bytes
	peak    float64   // queue since the last sample, bytes
	flying  fifo.Queue[packet]
	lost    fifo.Queue[packet]
	area    float64 // of the queue over time since from, byte seconds
	longest float64 // queue since from, bytes
	bytes   float64 // that left since from
	total   float64 // that came and were not dropped
	drops   int     // since from
}

// backlog is the queue at now, in bytes.
func (w *wire) backlog(now mono.Time) float64 {
	return max(0, w.empty.Sub(now).Seconds()) * w.capacity
}

// observe accounts for the time up to now.
func (w *wire) observe(now mono.Time) {
	w.least = min(w.least, w.backlog(now))
	w.peak = max(w.peak, w.backlog(w.last))
	if since := max(w.last, w.from); now > since {
		a, b := w.backlog(since), w.backlog(now)
		w.longest = max(w.longest, a)
		if b > 0 {
			w.area += (a + b) / 2 * now.Sub(since).Seconds()
		} else {
			w.area += a * a / w.capacity / 2
		}
	}
	w.last = now
}

// send queues a packet of a size, or drops it.
func (w *wire) send(now mono.Time, p packet, size float64) {
	w.observe(now)
	if w.backlog(now)+size > w.buffer {
		w.drop(now, p)
		return
	}
	w.empty = max(w.empty, now).Add(time.Duration(size / w.capacity * 1e9))
	w.total += size
	if w.empty > w.from {
		w.bytes += size
	}
	p.at = w.empty.Add(w.half)
	w.flying.Push(p)
}

// drop loses a packet; its sender learns of it, as it would by the ACK of a later
// one.
func (w *wire) drop(now mono.Time, p packet) {
	if now >= w.from {
		w.drops++
	}
	p.at = now.Add(w.notice)
	w.lost.Push(p)
}
