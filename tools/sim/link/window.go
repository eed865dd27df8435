package link

import (
	"cmp"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

type windowConfig struct {
	// alpha is the paper's gain α, 0 to 1, which the paper does not state; 0: 0.5.
	alpha float64
	// packet is the size of a packet in bytes.
	packet float64
	// whole means that the window is a whole number of packets, at least one, as in the
	// paper. Otherwise the window is a real number, and its owner paces packets by gap.
	whole bool
}

// window is the congestion window of a flow: (4), (5) and (7) of Improved EFXCP, per
// round trip.
//
//	(7) target = γo rtt w / s
//	(5) cwnd += α (target - cwnd) rtt / t_s     overload: cwnd *= β
type window struct {
	// Set once.
	cfg windowConfig
	tos float64

	cwnd float64   // packets
	next mono.Time // when the next overload counts
}

const (
	beta    = 0.875 // factor of an overload on the window
	minimum = 0.01  // minimum real window, in packets: a flow keeps probing
)

// newWindow returns a window of one packet for a flow of a ToS.
func newWindow(c windowConfig, tos float64) *window {
	c.alpha = cmp.Or(c.alpha, 0.5)
	return &window{cfg: c, tos: tos, cwnd: 1}
}

// feedback applies the feedback of an ACK at now: γo in bytes per second (0: unknown) or
// an overload, and the mean round trip t_s. rtt is the flow's own round trip. Each ACK
// moves the window by a fraction of (5), so the ACKs of a round trip together apply (5)
// once, and packets leave between ACKs. An overload counts once per round trip.
func (w *window) feedback(now mono.Time, fair float64, overload bool, rtt, ts time.Duration) {
	switch {
	case rtt <= 0 || ts <= 0 || now < w.next && overload:
	case overload:
		w.next = now.Add(rtt)
		w.cwnd = max(minimum, w.cwnd*beta)
	case fair > 0:
		target := fair * rtt.Seconds() * w.tos / w.cfg.packet
		// A step beyond the distance would overshoot if rtt is above t_s.
		step := min(1, w.cfg.alpha*rtt.Seconds()/ts.Seconds()) / max(1, w.cwnd)
		w.cwnd = max(minimum, w.cwnd+step*(target-w.cwnd))
	}
}

// packets returns the maximum number of packets in flight.
func (w *window) packets() float64 {
	if w.cfg.whole {
		return max(1, math.Floor(w.cwnd))
	}
	return w.cwnd
}

// gap returns the time between two packets of a paced flow.
func (w *window) gap(rtt time.Duration) time.Duration {
	return time.Duration(float64(rtt) / w.packets())
}

// rate returns the throughput that the flow claims in its header, in bytes per
// second.
func (w *window) rate(rtt time.Duration) float64 {
	return w.packets() * w.cfg.packet / rtt.Seconds()
}
