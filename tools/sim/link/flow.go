package link

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/pacing/sender"
	"github.com/srtm-io/srtm/tokenbucket"
)

type flow struct {
	// Set once.
	tos, claim uint8 // assigned and claimed ToS
	way        int   // direction of its data
	links      span  // the links that its data crosses, in their order in this direction
	control    string
	window     *window             // for the paper's controls
	publishers []*police.Publisher // entries of the routers of links

	remaining int // packets to send; negative: unlimited
	stopped   bool
	inflight  int
	timer     mono.Time // time of the valid timer event
	last      mono.Time // last send time
	rtt       time.Duration
	bytes     float64 // delivered during the measurement
	ever      float64 // delivered

	// For Level.
	bucket sender.Bucket
	paced  bool
	open   float64 // window while not paced; doubles every round trip
}

// span has the positions of the first and the last link of a path.
type span struct{ first, last int }

// back returns the path of the opposite direction, of n links.
func (s span) back(n int) span { return span{n - 1 - s.last, n - 1 - s.first} }

// next returns the wait before the next packet: 0 to send now, negative to wait for an
// ACK.
func (f *flow) next(now mono.Time) time.Duration {
	switch {
	case f.remaining == 0 || f.stopped:
		return -1
	case f.control == Level && f.paced:
		return f.bucket.Wait(1, now)
	case f.control == Level:
		return f.credit(f.open)
	case f.control == Paced && f.rtt > 0:
		return max(0, f.last.Add(f.window.gap(f.rtt)).Sub(now))
	default:
		return f.credit(f.window.packets())
	}
}

func (f *flow) credit(window float64) time.Duration {
	if float64(f.inflight) < window {
		return 0
	}
	return -1
}

// rate returns the flow's claimed rate, in bytes per second; 0 while unknown.
func (f *flow) rate() float64 {
	if f.rtt == 0 || f.window == nil {
		return 0
	}
	return f.window.rate(f.rtt)
}

func (f *flow) acked(now mono.Time, p packet) {
	f.inflight--
	if sample := now.Sub(p.sent); f.rtt == 0 {
		f.rtt = sample
	} else {
		f.rtt += (sample - f.rtt) / 8
	}
	if f.control != Level {
		h := p.congestion()
		overload := h.FairThroughput == header.Num
		f.window.feedback(now, float64(h.FairThroughput), overload, f.rtt, time.Duration(h.MeanRTT)*time.Microsecond)
		return
	}
	f.paced, f.open = p.paced, f.open+1
	f.bucket.Advise(sender.Advice{
		Paced: p.paced, Rate: tokenbucket.PerSecond(p.fair * float64(f.claim)), Burst: burst, Interval: max(p.interval, f.rtt),
	}, now)
	if p.paced {
		f.open = max(1, p.fair*float64(f.claim)*f.rtt.Seconds())
	}
}

// missed handles the notice of a loss.
func (f *flow) missed(now mono.Time, p packet) {
	f.inflight--
	if f.remaining >= 0 {
		f.remaining++
	}
	if f.control != Level && f.rtt > 0 {
		f.window.feedback(now, 0, true, f.rtt, f.rtt)
	}
	f.open = max(1, f.open/2)
}
