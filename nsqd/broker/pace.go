package broker

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// PaceMode is what a topic with a contract does about publishers that send more than
// their part.
type PaceMode string

// The modes. The zero PaceMode of a topic is Config.Pacing; that of a Config is PaceOff.
const (
	PaceOff    PaceMode = "off"
	PaceAdvise PaceMode = "advise" // those that asked are told their rates
	PacePolice PaceMode = "police" // and what exceeds them is refused, of all publishers
)

// voidAfter is how many intervals without a message end what was known of the
// publishers: their advice is void by then.
const voidAfter = 10

// pacer says what a topic's publishers may send, each by its weight, so that together
// they send its share and no more. It is of the publishers that came since it was made,
// and has nothing that outlives it. Guarded by runner.mu.
type pacer struct {
	level *fair.Level
	table *police.Table

	// Of the interval under way.
	began mono.Time
	span  time.Duration
	least int // backlog, in messages, when something arrived

	last    fair.Advice
	refused uint64 // messages, by police
}

// pacing is what a topic does about its publishers, and the pacer while it has one. Guarded by
// runner.mu.
type pacing struct {
	// Set once.
	all  PaceMode // Config.Pacing
	most uint8    // Config.MaxWeight
	core *queue.Topic
	now  func() mono.Time

	mode    PaceMode // the topic's own; "": that of all
	groups  []police.Group
	running *pacer // of the mode, while the topic is limited; else nil
}

// pacer returns that of the topic, nil where no publisher is paced.
func (p *pacing) pacer() *pacer {
	switch {
	case !p.core.Limited() || p.inForce() == PaceOff:
		p.running = nil
	case p.running == nil:
		p.running = &pacer{
			level: fair.New(), table: police.New(p.weights()),
			began: p.now(), span: time.Second, least: math.MaxInt,
		}
	}
	return p.running
}

// inForce returns the mode for the topic while it is limited.
func (p *pacing) inForce() PaceMode {
	if p.all == "" || p.all == PaceOff {
		return PaceOff
	}
	return cmp.Or(p.mode, p.all)
}

func (p *pacing) weights() police.Weights { return police.Weights{Groups: p.groups, Most: p.most} }

// of returns who the connection is.
func (pc *pacer) of(p *Publisher) *police.Publisher {
	if p.pacer != pc {
		p.pacer, p.paced, p.told = pc, pc.table.Enter(p.identity), 0
		if p.wish > 0 {
			pc.table.Wish(p.paced, p.wish)
		}
	}
	return p.paced
}

// police refuses n messages that arrived at at if that is what is to become of what
// exceeds the publisher's part. Error: *queue.OverLimitError.
func (p *pacing) police(from *Publisher, n int, at mono.Time) error {
	if from == nil || !p.policing() {
		return nil
	}
	pc := p.running
	if ok, retry := pc.table.Admit(pc.of(from), n, at); !ok {
		pc.refused += uint64(n)
		return p.core.Refuse(&queue.OverLimitError{Delay: retry}, n)
	}
	return nil
}

// policing reports whether police may refuse.
func (p *pacing) policing() bool { return p.inForce() == PacePolice && p.pacer() != nil }

// counted says that n messages were accepted.
func (p *pacing) counted(from *Publisher, n int, at mono.Time) {
	if pc := p.pacer(); pc != nil && from != nil {
		pc.of(from).Count(pc.level, n, at)
	}
}

// tell follows the counting of all n messages of a step, and leaves with the publisher
// what it is to be told.
func (p *pacing) tell(from *Publisher, n int, now mono.Time) {
	pc := p.pacer()
	if pc == nil || from == nil {
		return
	}
	if pc.least > 0 {
		pc.least = min(pc.least, p.backlog(n))
	}
	if now.Sub(pc.began) >= pc.span {
		pc.endInterval(p.core.Share(), now)
	}
	a, span, number := pc.table.Advice()
	if from.wish == 0 || number == from.told || !a.Paced && !from.wasPaced {
		return
	}
	who := pc.of(from)
	rate, burst := pc.table.Told(who)
	from.told, from.wasPaced = number, a.Paced
	from.ok = header.AppendOK(from.ok[:0], header.OK{
		Paced: a.Paced, Overload: a.Overload, Weight: uint8(who.Weight()), Interval: span, Rate: rate, Burst: burst,
	})
}

// backlog is how many messages wait for tokens, but for the last n. What is held up
// otherwise is no fault of the publishers'.
func (p *pacing) backlog(n int) int {
	n = max(p.core.Waiting()-n, 0)
	if n > 0 && p.core.ReleaseDeadline() == mono.Never {
		return 0
	}
	return n
}

// endInterval ends the interval at now, and begins the next.
func (pc *pacer) endInterval(share tokenbucket.Share, now mono.Time) {
	if pc.void(now) || share.Rate == 0 {
		pc.level, pc.last = fair.New(), fair.Advice{}
	} else {
		pc.last = pc.level.Interval(now, share.Rate.PerSecond(), float64(pc.least), pc.span)
	}
	if share.Rate > 0 {
		// Round trips are not measured: advice may be four intervals old, 200 ms at least.
		pc.span = pc.level.Span(share.Rate.PerSecond(), 0)
	}
	pc.table.Advise(pc.last, share.Burst, pc.span, now)
	pc.began, pc.least = now, math.MaxInt
}

// void reports whether what was known of the publishers has no meaning any more.
func (pc *pacer) void(now mono.Time) bool { return now.Sub(pc.began) > voidAfter*pc.span }

// Pace says that the connection wants to be told what it may send, as a publisher of
// that weight, 1 to 255.
func (p *Publisher) Pace(weight uint8) {
	p.to.mu.Lock()
	defer p.to.mu.Unlock()
	if p.wish = weight; p.pacer != nil {
		p.pacer.table.Wish(p.paced, weight)
	}
}

// Told is what a publisher may send, where it is paced.
type Told struct {
	Paced    bool
	Rate     float64 // messages per second
	Burst    int64   // messages
	Measured float64 // what it sends, messages per second
}

// Told returns it as it is now, of a publisher that has published.
func (p *Publisher) Told() Told {
	p.to.mu.Lock()
	defer p.to.mu.Unlock()
	if p.pacer == nil || !p.pacer.last.Paced {
		return Told{}
	}
	rate, burst := p.pacer.table.Told(p.paced)
	return Told{Paced: true, Rate: rate.PerSecond(), Burst: burst, Measured: p.paced.Rate()}
}

// Advice returns what the publish before left for the publisher, an OK of pacing/header,
// once; else nil. It holds until the next publish. Only who publishes may call it.
func (p *Publisher) Advice() []byte {
	ok := p.ok
	p.ok = p.ok[:0]
	if len(ok) == 0 {
		return nil
	}
	return ok
}

// Paced is what a topic tells its publishers.
type Paced struct {
	Mode PaceMode
	fair.Advice
	Span       time.Duration // of the interval
	Refused    uint64        // messages, by police
	Publishers []PacedPublisher
}

// PacedPublisher is one identity.
type PacedPublisher struct {
	Identity   police.Identity
	Rate, Told float64 // messages per second: as measured; what it may send, 0: it is not paced
	Weight     float64
}

// Paced returns it as it is now, with the publishers, by identity, if they are asked for.
func (in *intake) Paced(publishers bool) Paced {
	in.mu.Lock()
	defer in.mu.Unlock()
	s := Paced{Mode: in.pacing.inForce()}
	pc := in.pacing.pacer()
	if pc == nil {
		return s
	}
	if now := in.shared.now(); pc.void(now) {
		pc.endInterval(in.mu.core.Share(), now)
	}
	s.Advice, s.Span, s.Refused = pc.last, pc.span, pc.refused
	if publishers {
		pc.table.Each(func(is police.Identity, p *police.Publisher) {
			one := PacedPublisher{Identity: is, Rate: p.Rate(), Weight: p.Weight()}
			if s.Advice.Paced {
				one.Told = s.RateOf(p.Weight())
			}
			s.Publishers = append(s.Publishers, one)
		})
		slices.SortFunc(s.Publishers, func(a, b PacedPublisher) int {
			return cmp.Or(cmp.Compare(a.Identity.ID, b.Identity.ID), cmp.Compare(a.Identity.Kind, b.Identity.Kind))
		})
	}
	return s
}

// SetPacing replaces the topic's mode and what its publishers are entitled to.
func (in *intake) SetPacing(mode PaceMode, weights []police.Group) {
	in.mu.Lock()
	defer in.mu.Unlock()
	p := &in.pacing
	if p.mode, p.groups = mode, weights; p.running != nil {
		p.running.table.SetWeights(p.weights())
	}
}
