// Package link simulates the transport of the Improved EFXCP paper, packet by packet.
// Flows of different ToS send in both directions over one bottleneck link. The link has a
// FIFO queue with drop-tail, an ACK path, and a router at each end that sends rates to the
// flows.
// paper.go and window.go have the paper's rules. The rules of production, for comparison,
// are pacing/fair and pacing/police. The package is pure: the same Config gives the same
// Result. Start with Run; tools/drlsim is the command.
package link

import (
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/pacing/police"
)

// The kinds of events in the heap. Packets in flight are in the queues of their wires
// instead, because they arrive in the order of sending.
const (
	sends    = iota // timer of a paced flow
	starts          // a flow begins
	stops           // a flow ends
	turns           // a router ends an interval
	arrivals        // a short flow begins
	samples
)

type event struct {
	time   mono.Time
	seq    int // orders events of one instant
	kind   int
	flow   *flow
	router *router
}

// Before orders events by time, then as they were added.
func (e event) Before(o event) bool { return e.time < o.time || e.time == o.time && e.seq < o.seq }

type simulation struct {
	// Set once.
	cfg    Config
	start  mono.Time
	rng    *rand.Rand
	routes [2][]*router               // 0 is forward; in the order of the path
	direct []*container.Queue[packet] // ACKs that bypass the queues, by the number of further links
	queues []source                   // of all packets in flight
	traced []*flow                    // first flow of each ToS

	now         mono.Time
	seq         int
	short       int // number of short flows so far
	heap        container.Heap[event]
	series      []Sample
	lastSampled sampled
}

// sampled holds the counters at the last sample.
type sampled struct {
	total, backlog float64
	ever           []float64
}

// source is a queue of packets, and what happens to the first one when it is due.
type source struct {
	packets *container.Queue[packet]
	due     func(packet)
}

// Run simulates c. Requires: Validate accepts c.
func Run(c Config) Result {
	s := &simulation{cfg: c, start: mono.Time(c.Duration / 2), rng: rand.New(rand.NewPCG(c.Seed, 0))}
	n := c.routers()
	for way := range s.routes {
		for range n {
			s.link(way)
		}
	}
	for range n {
		q := new(container.Queue[packet])
		s.direct = append(s.direct, q)
		s.queues = append(s.queues, source{q, s.acked})
	}
	whole := span{0, n - 1}
	var forward, crossing []*flow
	for way := range s.routes {
		for i := range c.Flows {
			claim := uint8(c.ToS[i%len(c.ToS)])
			if way == 0 && i < c.Greedy {
				claim = claimed
			}
			f := s.flow(i, claim, way, whole, -1)
			s.schedule(mono.Time(s.rng.Int64N(int64(c.RTT))), event{kind: starts, flow: f})
			if way == 0 {
				forward = append(forward, f)
			}
		}
	}
	for i := range c.Join {
		f := s.flow(c.Flows+i, uint8(c.ToS[i%len(c.ToS)]), 0, whole, -1)
		s.schedule(mono.Time(c.From), event{kind: starts, flow: f})
		s.schedule(mono.Time(c.To), event{kind: stops, flow: f})
	}
	for link := range n {
		for i := range c.Cross * link {
			f := s.flow(c.Flows+c.Join+len(crossing), uint8(c.ToS[i%len(c.ToS)]), 0, span{link, link}, -1)
			s.schedule(mono.Time(s.rng.Int64N(int64(c.RTT))), event{kind: starts, flow: f})
			crossing = append(crossing, f)
		}
	}
	if c.Web > 0 {
		s.schedule(s.gap(), event{kind: arrivals})
	}
	if c.Sample > 0 {
		s.traced = forward[:min(len(c.ToS), len(forward))]
		s.lastSampled.ever = make([]float64, len(s.traced))
		s.schedule(mono.Time(c.Sample), event{kind: samples})
	}
	s.run(mono.Time(c.Duration))
	return s.result(forward, crossing)
}

// link adds a link to the path of a direction.
func (s *simulation) link(way int) {
	c := s.cfg
	half := c.RTT / 2 / time.Duration(c.routers())
	w := &wire{capacity: c.bytesPerSecond(), buffer: c.buffer(), half: half, notice: c.RTT, start: s.start}
	r := &router{wire: w, table: police.New(c.weights()), police: c.Police && way == 0, interval: c.RTT}
	if c.Control == Level {
		r.level = fair.New()
	} else {
		r.paper = newPaperRouter(c.Theta)
	}
	s.routes[way] = append(s.routes[way], r)
	s.schedule(mono.Time(c.RTT), event{kind: turns, router: r})
	s.queues = append(s.queues,
		source{&w.flying, func(p packet) { s.crossed(way, p) }},
		source{&w.lost, s.missed})
}

func (s *simulation) schedule(time mono.Time, e event) {
	s.seq++
	e.time, e.seq = time, s.seq
	s.heap.Push(e)
}

func (s *simulation) run(end mono.Time) {
	for {
		first, source := s.heap[0].time, -1 // a router's turn is always in the heap
		for i, q := range s.queues {
			if at := due(q.packets); at < first {
				first, source = at, i
			}
		}
		if first >= end {
			break
		}
		s.now = first
		if source < 0 {
			s.happen(s.heap.Pop())
		} else {
			s.queues[source].due(s.queues[source].packets.Pop())
		}
	}
	s.now = end
	for _, routers := range s.routes {
		for _, r := range routers {
			r.wire.observe(end)
		}
	}
}

func (s *simulation) happen(e event) {
	switch e.kind {
	case sends:
		if e.flow.timer == e.time {
			e.flow.timer = 0
			s.pump(e.flow)
		}
	case starts:
		s.pump(e.flow)
	case stops:
		e.flow.stopped = true
	case turns:
		s.schedule(e.router.turn(s.now), e)
	case arrivals:
		s.short++
		s.pump(s.flow(-s.short, 1, 0, span{0, s.cfg.routers() - 1}, s.size()))
		s.schedule(s.now+s.gap(), e)
	case samples:
		s.sample()
		s.schedule(s.now.Add(s.cfg.Sample), e)
	}
}

// flow creates the i-th flow in a direction. i is negative for short flows.
func (s *simulation) flow(i int, claim uint8, way int, links span, left int) *flow {
	id := police.Identity{Kind: "short", ID: strconv.Itoa(-i)}
	f := &flow{tos: claim, claim: claim, way: way, links: links, control: s.cfg.Control, remaining: left, open: 1}
	if i >= 0 {
		f.tos = uint8(s.cfg.ToS[i%len(s.cfg.ToS)])
		id = police.Identity{Kind: "flow", ID: group(f.tos) + "." + strconv.Itoa(i)}
	}
	if s.cfg.Control != Level {
		c := windowConfig{alpha: s.cfg.Alpha, packet: packetSize, whole: s.cfg.Control == Paper}
		f.window = newWindow(c, float64(claim))
	}
	for _, r := range s.routes[way][links.first : links.last+1] {
		p := r.table.Enter(id)
		r.table.RequestWeight(p, claim)
		f.publishers = append(f.publishers, p)
	}
	return f
}

// gap draws the time between two short flows; size draws the number of packets of a short
// flow.
func (s *simulation) gap() mono.Time { return mono.Time(s.rng.ExpFloat64() / s.cfg.Web * 1e9) }

func (s *simulation) size() int {
	const shape, mean = 1.35, 30.0
	return int(math.Ceil(mean * (shape - 1) / shape * math.Pow(1-s.rng.Float64(), -1/shape)))
}

// crossed handles a packet at the end of a link.
func (s *simulation) crossed(way int, p packet) {
	f := p.flow
	links := f.links
	if p.ack {
		links = links.back(s.cfg.routers())
	}
	switch {
	case p.link < links.last:
		p.link++
		s.forward(way, p)
	case p.ack:
		s.acked(p)
	default:
		f.ever += packetSize
		if s.now >= s.start {
			f.bytes += packetSize
		}
		s.acknowledge(1-way, p)
	}
}

// acknowledge sends the ACK of a packet in a direction.
func (s *simulation) acknowledge(way int, p packet) {
	n := s.cfg.routers()
	links := p.flow.links.back(n)
	p.ack, p.link = true, links.first
	if s.cfg.Bypass {
		further := links.last - links.first
		p.at = s.now.Add(s.cfg.RTT / 2 / time.Duration(n) * time.Duration(further+1))
		s.direct[further].Push(p)
		return
	}
	s.forward(way, p)
}

// forward hands a packet to the router of its link.
func (s *simulation) forward(way int, p packet) {
	var publisher *police.Publisher
	if !p.ack {
		publisher = p.flow.publishers[p.link-p.flow.links.first]
	}
	s.routes[way][p.link].arrive(s.now, p, publisher)
}

func (s *simulation) acked(p packet) {
	p.flow.acked(s.now, p)
	s.pump(p.flow)
}

// missed handles the notice of a loss.
func (s *simulation) missed(p packet) {
	if !p.ack {
		p.flow.missed(s.now, p)
		s.pump(p.flow)
	}
}

// pump sends the packets that a flow may send now, and sets the flow's timer.
func (s *simulation) pump(f *flow) {
	for {
		wait := f.next(s.now)
		switch {
		case wait < 0:
			return
		case wait > 0:
			if at := s.now.Add(wait); f.timer == 0 || f.timer <= s.now || at < f.timer {
				f.timer = at
				s.schedule(at, event{kind: sends, flow: f})
			}
			return
		}
		f.inflight++
		f.remaining = max(-1, f.remaining-1)
		f.last = s.now
		p := packet{flow: f, link: f.links.first, sent: s.now}
		p.setCongestion(header.Packet{ToS: f.claim, RTT: uint32(f.rtt / time.Microsecond), Throughput: uint64(f.rate())})
		s.forward(f.way, p)
	}
}

func (s *simulation) sample() {
	w := s.routes[0][s.cfg.routers()-1].wire
	w.observe(s.now)
	period, backlog := s.cfg.Sample.Seconds(), w.backlog(s.now)
	delivered := w.total - s.lastSampled.total + s.lastSampled.backlog - backlog
	sample := Sample{At: time.Duration(s.now), Queue: w.peak / w.buffer, Utilization: delivered / period / w.capacity}
	w.peak = backlog
	s.lastSampled.total, s.lastSampled.backlog = w.total, backlog
	for i, f := range s.traced {
		sample.Throughput = append(sample.Throughput, 8*(f.ever-s.lastSampled.ever[i])/period)
		s.lastSampled.ever[i] = f.ever
	}
	s.series = append(s.series, sample)
}

func (s *simulation) result(forward, crossing []*flow) Result {
	seconds := s.now.Sub(s.start).Seconds()
	r := Result{Series: s.series}
	for _, route := range s.routes[0] {
		w := route.wire
		r.Link = Link{
			Utilization: min(1, (w.bytes-w.backlog(s.now))/seconds/w.capacity),
			QueueMean:   w.area / seconds / w.buffer, QueueMax: w.longest / w.buffer, Drops: w.drops,
		}
		r.Links = append(r.Links, r.Link)
	}
	if len(r.Links) == 1 {
		r.Links = nil
	}
	for i, f := range forward {
		r.Flows = append(r.Flows, Flow{ToS: int(f.tos), Throughput: 8 * f.bytes / seconds, Greedy: i < s.cfg.Greedy})
	}
	for _, f := range crossing {
		r.Crossing = append(r.Crossing, Flow{ToS: int(f.tos), Throughput: 8 * f.bytes / seconds})
	}
	return r
}
