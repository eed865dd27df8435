package link

import (
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/fifo"
	"github.com/srtm-io/srtm/internal/heap"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/fair"
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
	at   mono.Time
	seq  int // orders events of one instant
	kind int
	way  int
	flow *flow
}

// Before orders events by time, then as they were added.
func (e event) Before(o event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

type simulation struct {
	// Set once.
	cfg    Config
	from   mono.Time
	rng    *rand.Rand
	routes [2]*router // 0 is forward
	shown  []*flow    // first flow of each ToS

	now    mono.Time
	seq    int
	short  int // number of short flows so far
	heap   heap.Heap[event]
	series []Sample
	before sampled
}

// sampled holds the counters at the last sample.
type sampled struct {
	total, backlog float64
	ever           []float64
}

// Run simulates c. Requires: Validate accepts c.
func Run(c Config) Result {
	s := &simulation{cfg: c, from: mono.Time(c.Duration / 2), rng: rand.New(rand.NewPCG(c.Seed, 0))}
	for way := range s.routes {
		w := &wire{capacity: c.bytesPerSecond(), buffer: c.buffer(), half: c.RTT / 2, notice: c.RTT, from: s.from}
		r := &router{wire: w, table: police.New(c.weights()), police: c.Police && way == 0, interval: c.RTT}
		if c.Control == Level {
			r.level = fair.New()
		} else {
			r.paper = newPaperRouter(c.Theta)
		}
		s.routes[way] = r
		s.at(mono.Time(c.RTT), event{kind: turns, way: way})
	}
	var forward []*flow
	for way := range s.routes {
		for i := range c.Flows {
			claim := uint8(c.ToS[i%len(c.ToS)])
			if way == 0 && i < c.Greedy {
				claim = claimed
			}
			f := s.flow(i, claim, way, -1)
			s.at(mono.Time(s.rng.Int64N(int64(c.RTT))), event{kind: starts, flow: f})
			if way == 0 {
				forward = append(forward, f)
			}
		}
	}
	for i := range c.Join {
		f := s.flow(c.Flows+i, uint8(c.ToS[i%len(c.ToS)]), 0, -1)
		s.at(mono.Time(c.From), event{kind: starts, flow: f})
		s.at(mono.Time(c.To), event{kind: stops, flow: f})
	}
	if c.Web > 0 {
		s.at(s.gap(), event{kind: arrivals})
	}
	if c.Sample > 0 {
		s.shown = forward[:min(len(c.ToS), len(forward))]
		s.before.ever = make([]float64, len(s.shown))
		s.at(mono.Time(c.Sample), event{kind: samples})
	}
	s.run(mono.Time(c.Duration))
	return s.result(forward)
}

func (s *simulation) at(at mono.Time, e event) {
	s.seq++
	e.at, e.seq = at, s.seq
	s.heap.Push(e)
}

func (s *simulation) run(end mono.Time) {
	for {
		queues := [4]*fifo.Queue[packet]{&s.routes[0].wire.flying, &s.routes[1].wire.flying, &s.routes[0].wire.lost, &s.routes[1].wire.lost}
		first, which := s.heap[0].at, -1 // a router's turn is always in the heap
		for i, q := range queues {
			if at := due(q); at < first {
				first, which = at, i
			}
		}
		if first >= end {
			break
		}
		s.now = first
		switch which {
		case -1:
			s.happen(s.heap.Pop())
		case 0, 1:
			s.arrived(which, queues[which].Pop())
		default:
			if p := queues[which].Pop(); !p.ack {
				p.flow.missed(s.now, p)
				s.pump(p.flow)
			}
		}
	}
	s.now = end
	for _, r := range s.routes {
		r.wire.observe(end)
	}
}

func (s *simulation) happen(e event) {
	switch e.kind {
	case sends:
		if e.flow.timer == e.at {
			e.flow.timer = 0
			s.pump(e.flow)
		}
	case starts:
		s.pump(e.flow)
	case stops:
		e.flow.stopped = true
	case turns:
		s.at(s.routes[e.way].turn(s.now), e)
	case arrivals:
		s.short++
		s.pump(s.flow(-s.short, 1, 0, s.size()))
		s.at(s.now+s.gap(), e)
	case samples:
		s.sample()
		s.at(s.now.Add(s.cfg.Sample), e)
	}
}

// flow creates the i-th flow in a direction. i is negative for short flows.
func (s *simulation) flow(i int, claim uint8, way, left int) *flow {
	id := police.Identity{Kind: "short", ID: strconv.Itoa(-i)}
	f := &flow{tos: claim, claim: claim, way: way, control: s.cfg.Control, left: left, open: 1}
	if i >= 0 {
		f.tos = uint8(s.cfg.ToS[i%len(s.cfg.ToS)])
		id = police.Identity{Kind: "flow", ID: group(f.tos) + "." + strconv.Itoa(i)}
	}
	if s.cfg.Control != Level {
		c := windowConfig{alpha: s.cfg.Alpha, packet: packetSize, whole: s.cfg.Control == Paper}
		f.window = newWindow(c, float64(claim))
	}
	table := s.routes[way].table
	f.publisher = table.Enter(id)
	table.Wish(f.publisher, claim)
	return f
}

// gap draws the time between two short flows; size draws the number of packets of a short
// flow.
func (s *simulation) gap() mono.Time { return mono.Time(s.rng.ExpFloat64() / s.cfg.Web * 1e9) }

func (s *simulation) size() int {
	const shape, mean = 1.35, 30.0
	return int(math.Ceil(mean * (shape - 1) / shape * math.Pow(1-s.rng.Float64(), -1/shape)))
}

// arrived handles a packet at the end of its path.
func (s *simulation) arrived(way int, p packet) {
	if p.ack {
		p.flow.acked(s.now, p)
		s.pump(p.flow)
		return
	}
	p.flow.ever += packetSize
	if s.now >= s.from {
		p.flow.bytes += packetSize
	}
	p.ack = true
	s.routes[1-way].arrive(s.now, p, 0, 0)
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
				s.at(at, event{kind: sends, flow: f})
			}
			return
		}
		f.inflight++
		f.left = max(-1, f.left-1)
		f.last = s.now
		s.routes[f.way].arrive(s.now, packet{flow: f, sent: s.now}, f.rate(), f.rtt)
	}
}

func (s *simulation) sample() {
	w := s.routes[0].wire
	w.observe(s.now)
	period, backlog := s.cfg.Sample.Seconds(), w.backlog(s.now)
	left := w.total - s.before.total + s.before.backlog - backlog
	sample := Sample{At: time.Duration(s.now), Queue: w.peak / w.buffer, Utilization: left / period / w.capacity}
	w.peak = backlog
	s.before.total, s.before.backlog = w.total, backlog
	for i, f := range s.shown {
		sample.Throughput = append(sample.Throughput, 8*(f.ever-s.before.ever[i])/period)
		s.before.ever[i] = f.ever
	}
	s.series = append(s.series, sample)
}

func (s *simulation) result(forward []*flow) Result {
	w, seconds := s.routes[0].wire, s.now.Sub(s.from).Seconds()
	r := Result{
		Utilization: min(1, (w.bytes-w.backlog(s.now))/seconds/w.capacity),
		QueueMean:   w.area / seconds / w.buffer, QueueMax: w.longest / w.buffer,
		Drops: w.drops, Series: s.series,
	}
	for i, f := range forward {
		r.Flows = append(r.Flows, Flow{ToS: int(f.tos), Throughput: 8 * f.bytes / seconds, Greedy: i < s.cfg.Greedy})
	}
	return r
}
