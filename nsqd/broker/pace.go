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
// and has nothing that outlives it. Guarded by Topic.mu.
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

// pacer returns that of the topic, nil where no publisher is paced. Requires: mu held.
func (t *Topic) pacer() *pacer {
	switch {
	case !t.mu.core.Limited() || t.paceMode() == PaceOff:
		t.mu.pacer = nil
	case t.mu.pacer == nil:
		t.mu.pacer = &pacer{
			level: fair.New(), table: police.New(t.weights()),
			began: t.shared.now(), span: time.Second, least: math.MaxInt,
		}
	}
	return t.mu.pacer
}

// paceMode returns the mode in force for the topic while it is limited. Requires: mu held.
func (t *Topic) paceMode() PaceMode {
	if all := t.shared.cfg.Pacing; all == "" || all == PaceOff {
		return PaceOff
	}
	return cmp.Or(t.mu.pacing, t.shared.cfg.Pacing)
}

func (t *Topic) weights() police.Weights {
	return police.Weights{Groups: t.mu.weights, Most: t.shared.cfg.MaxWeight}
}

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
// exceeds the publisher's part. Error: *queue.OverLimitError. Requires: mu held.
func (t *Topic) police(p *Publisher, n int, at mono.Time) error {
	if p == nil || !t.policing() {
		return nil
	}
	pc := t.mu.pacer
	if ok, retry := pc.table.Admit(pc.of(p), n, at); !ok {
		pc.refused += uint64(n)
		return t.mu.core.Refuse(&queue.OverLimitError{Delay: retry}, n)
	}
	return nil
}

// policing reports whether police may refuse. Requires: mu held.
func (t *Topic) policing() bool {
	return t.paceMode() == PacePolice && t.pacer() != nil
}

// counted says that n messages were accepted. Requires: mu held.
func (t *Topic) counted(p *Publisher, n int, at mono.Time) {
	t.captureLocked(p, at, n)
	if pc := t.pacer(); pc != nil && p != nil {
		pc.of(p).Count(pc.level, n, at)
	}
}

// pace follows the counting of all n messages of a step, and leaves with the publisher
// what it is to be told. Requires: mu held.
func (t *Topic) pace(p *Publisher, n int, now mono.Time) {
	pc := t.pacer()
	if pc == nil || p == nil {
		return
	}
	if pc.least > 0 {
		pc.least = min(pc.least, t.backlog(n))
	}
	if now.Sub(pc.began) >= pc.span {
		t.endInterval(pc, now)
	}
	a, span, number := pc.table.Advice()
	if p.wish == 0 || number == p.told || !a.Paced && !p.wasPaced {
		return
	}
	who := pc.of(p)
	rate, burst := pc.table.Told(who)
	p.told, p.wasPaced = number, a.Paced
	p.ok = header.AppendOK(p.ok[:0], header.OK{
		Paced: a.Paced, Overload: a.Overload, Weight: uint8(who.Weight()), Interval: span, Rate: rate, Burst: burst,
	})
}

// backlog is how many messages wait for tokens, but for the last n. What is held up
// otherwise is no fault of the publishers'. Requires: mu held.
func (t *Topic) backlog(n int) int {
	n = max(t.mu.core.Waiting()-n, 0)
	if n > 0 && t.mu.core.ReleaseDeadline() == mono.Never {
		return 0
	}
	return n
}

// endInterval ends the pacer's interval at now, and begins the next.
func (t *Topic) endInterval(pc *pacer, now mono.Time) {
	share := t.mu.core.Share()
	if now.Sub(pc.began) > voidAfter*pc.span || share.Rate == 0 {
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

// Pace says that the connection wants to be told what it may send, as a publisher of
// that weight, 1 to 255.
func (p *Publisher) Pace(weight uint8) {
	p.topic.mu.Lock()
	defer p.topic.mu.Unlock()
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
	p.topic.mu.Lock()
	defer p.topic.mu.Unlock()
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
func (t *Topic) Paced(publishers bool) Paced {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := Paced{Mode: t.paceMode()}
	pc := t.pacer()
	if pc == nil {
		return s
	}
	if now := t.shared.now(); now.Sub(pc.began) > voidAfter*pc.span {
		t.endInterval(pc, now)
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
func (t *Topic) SetPacing(mode PaceMode, weights []police.Group) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.pacing, t.mu.weights = mode, weights
	if t.mu.pacer != nil {
		t.mu.pacer.table.SetWeights(t.weights())
	}
}
