package broker

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Publisher is a connection that publishes to a topic.
type Publisher struct {
	// Set once.
	to     *intake
	visits bool

	// Guarded by to.mu.
	clientID  string
	host      string
	forwarder string // the broker that forwards for the publisher; empty: connected here
	// number is the publisher's number in the capture with the id named; 0: not looked up.
	// The lookup happens once per capture, not per message.
	named  uint64
	number uint32
	// Pacing: identity, requested weight (0: none), and the entry in pacer, if pacer is the
	// topic's current pacer.
	identity police.Identity
	wish     uint8
	pacer    *pacer
	paced    *police.Publisher
	advised  uint64 // interval of the last advice
	wasPaced bool   // whether the last advice was to pace

	// Only the connection's steps write ok, and read it between steps.
	ok []byte // pending advice
}

// Forwarded sets the broker that forwards for the publisher. Requires: nothing is published
// yet.
func (p *Publisher) Forwarded(by string) { p.forwarder = by }

// AddPublisher is intake.AddPublisher.
func (t *Topic) AddPublisher(clientID, host string, as police.Identity) *Publisher {
	return t.intake.AddPublisher(clientID, host, as)
}

// AddPublisher counts a connection as a publisher until Leave, which may be called once.
// clientID is from IDENTIFY and may be empty; host is the connection's address; as is the
// identity for pacing.
func (in *intake) AddPublisher(clientID, host string, as police.Identity) *Publisher {
	in.addPublisher(1)
	return &Publisher{to: in, clientID: clientID, host: host, identity: as}
}

// name is PublisherName. A capture distinguishes owners.
func (p *Publisher) name() string { return PublisherName(p.clientID, p.identity) }

// PublisherName is the control plane's name of a publisher: its client_id, which determines
// its placement. Without a client_id, the name is "auth:", "cert:" or "addr:" plus the
// identity. A client_id with such a prefix gets the prefix "client:". An empty name means
// an unknown publisher.
func PublisherName(clientID string, identity police.Identity) string {
	switch kind, _, found := strings.Cut(clientID, ":"); {
	case found && (kind == "auth" || kind == "cert" || kind == "addr" || kind == "client"):
		return "client:" + clientID
	case clientID != "" || identity.ID == "":
		return clientID
	default:
		return strings.ToValidUTF8(identity.Kind+":"+identity.ID, "?") // a certificate's identity may be invalid UTF-8
	}
}

// owner returns the identity that is responsible for the publisher. Any client can invent
// client_ids, so without authentication the owner is the host.
func (p *Publisher) owner() police.Identity {
	if p.identity.Kind == "auth" || p.identity.Kind == "cert" {
		return p.identity
	}
	return police.Identity{Kind: "addr", ID: p.host}
}

// Visit is intake.Visit.
func (t *Topic) Visit(as police.Identity) *Publisher { return t.intake.Visit(as) }

// Visit is AddPublisher for a publication without a connection, such as HTTP. The publisher
// is paced, but does not count as one of the topic's publishers.
func (in *intake) Visit(as police.Identity) *Publisher {
	return &Publisher{to: in, identity: as, visits: true}
}

// Leave removes the connection from the topic's publishers.
func (p *Publisher) Leave() {
	if !p.visits {
		p.to.addPublisher(-1)
	}
	p.unpace(p.identity)
}

// unpace removes the connection from the pacer, and changes its identity.
func (p *Publisher) unpace(as police.Identity) {
	p.to.runner.mu.Lock()
	defer p.to.runner.mu.Unlock()
	if p.pacer != nil {
		p.pacer.table.Leave(p.paced, p.to.runner.shared.now())
	}
	p.pacer, p.paced, p.identity = nil, nil, as
}

// Rename changes the client_id: IDENTIFY may come late, and more than once.
func (p *Publisher) Rename(clientID string, as police.Identity) {
	p.unpace(as)
	p.to.runner.mu.Lock()
	p.clientID, p.named = clientID, 0
	p.to.runner.mu.Unlock()
}

func (in *intake) addPublisher(n int) {
	in.runner.mu.Lock()
	in.publishers += n
	in.runner.mu.Unlock()
}

// PaceMode is the treatment of publishers that exceed their part of a topic's contract.
type PaceMode string

// The modes. A topic with the zero PaceMode uses Config.Pacing; a Config with the zero
// PaceMode means PaceOff.
const (
	PaceOff    PaceMode = "off"
	PaceAdvise PaceMode = "advise" // publishers that requested advice get their rates
	PacePolice PaceMode = "police" // and the excess of all publishers is refused
)

// expireAfter is the number of intervals without a message after which the state of the
// publishers expires, as their advice does.
const expireAfter = 10

// pacer computes the permitted rates of a topic's publishers by weight, so that their sum
// is the topic's share. It covers publishers since its creation; none of its state survives
// it. Guarded by runner.mu.
type pacer struct {
	level *fair.Level
	table *police.Table

	// Current interval.
	began mono.Time
	span  time.Duration
	least int // minimum backlog at arrivals, in messages

	last    fair.Advice
	refused uint64 // messages refused by police
}

// pacing is a topic's pacing configuration, with a pacer while publishers are paced.
// Guarded by runner.mu.
type pacing struct {
	// Set once.
	all  PaceMode // Config.Pacing
	most uint8    // Config.MaxWeight
	core *queue.Topic
	now  func() mono.Time

	mode    PaceMode // the topic's own mode; empty: all
	groups  []police.Group
	running *pacer // nil unless the topic is limited and the mode is not off
}

// pacer returns the topic's pacer, or nil if publishers are not paced.
func (p *pacing) pacer() *pacer {
	switch {
	case !p.core.Contract().Limited() || p.inForce() == PaceOff:
		p.running = nil
	case p.running == nil:
		p.running = &pacer{
			level: fair.New(), table: police.New(p.weights()),
			began: p.now(), span: time.Second, least: math.MaxInt,
		}
	}
	return p.running
}

// inForce returns the effective mode for a limited topic.
func (p *pacing) inForce() PaceMode {
	if p.all == "" || p.all == PaceOff {
		return PaceOff
	}
	return cmp.Or(p.mode, p.all)
}

func (p *pacing) weights() police.Weights { return police.Weights{Groups: p.groups, Max: p.most} }

// of returns the pacer's entry for the connection.
func (pc *pacer) of(p *Publisher) *police.Publisher {
	if p.pacer != pc {
		p.pacer, p.paced, p.advised = pc, pc.table.Enter(p.identity), 0
		if p.wish > 0 {
			pc.table.RequestWeight(p.paced, p.wish)
		}
	}
	return p.paced
}

// police refuses n messages that arrived at the given time, if the mode is police and the
// messages exceed the publisher's part. Error: *queue.OverLimitError.
func (p *pacing) police(from *Publisher, n int, at mono.Time) error {
	if from == nil || !p.policing() {
		return nil
	}
	pc := p.running
	if ok, retry := pc.table.Admit(pc.of(from), n, at); !ok {
		pc.refused += uint64(n)
		return p.core.Backlog().Refuse(&queue.OverLimitError{Delay: retry}, n)
	}
	return nil
}

// policing reports whether police may refuse messages.
func (p *pacing) policing() bool { return p.inForce() == PacePolice && p.pacer() != nil }

// count records the acceptance of n messages.
func (p *pacing) count(from *Publisher, n int, at mono.Time) {
	if pc := p.pacer(); pc != nil && from != nil {
		pc.of(from).Count(pc.level, n, at)
	}
}

// advise stores new advice in the publisher. Requires: all n messages of the step are
// counted.
func (p *pacing) advise(from *Publisher, n int, now mono.Time) {
	pc := p.pacer()
	if pc == nil || from == nil {
		return
	}
	if pc.least > 0 {
		pc.least = min(pc.least, p.backlog(n))
	}
	if now.Sub(pc.began) >= pc.span {
		pc.endInterval(p.core.Contract().Share(), now)
	}
	a, span, number := pc.table.Advice()
	if from.wish == 0 || number == from.advised || !a.Paced && !from.wasPaced {
		return
	}
	publisher := pc.of(from)
	rate, burst := pc.table.Allowance(publisher)
	from.advised, from.wasPaced = number, a.Paced
	from.ok = header.AppendOK(from.ok[:0], header.OK{
		Paced: a.Paced, Overload: a.Overload, Weight: uint8(publisher.Weight()), Interval: span, Rate: rate, Burst: burst,
	})
}

// backlog returns the number of messages that wait for tokens, without the last n messages.
// Messages that wait for other reasons do not count, since the publishers do not cause the
// wait.
func (p *pacing) backlog(n int) int {
	n = max(p.core.Backlog().Waiting()-n, 0)
	if n > 0 && p.core.ReleaseDeadline() == mono.Never {
		return 0
	}
	return n
}

// endInterval ends the interval at now, and begins the next.
func (pc *pacer) endInterval(share tokenbucket.Share, now mono.Time) {
	if pc.expired(now) || share.Rate == 0 {
		pc.level, pc.last = fair.New(), fair.Advice{}
	} else {
		pc.last = pc.level.Interval(now, share.Rate.PerSecond(), float64(pc.least), pc.span)
	}
	if share.Rate > 0 {
		// Round trips are not measured: advice may be four intervals old, at least 200 ms.
		pc.span = pc.level.Span(share.Rate.PerSecond(), 0)
	}
	pc.table.Advise(pc.last, share.Burst, pc.span, now)
	pc.began, pc.least = now, math.MaxInt
}

// expired reports whether the state of the publishers is too old.
func (pc *pacer) expired(now mono.Time) bool { return now.Sub(pc.began) > expireAfter*pc.span }

// Pace requests advice for the connection, as a publisher of the given weight, 1 to 255.
func (p *Publisher) Pace(weight uint8) {
	p.to.runner.mu.Lock()
	defer p.to.runner.mu.Unlock()
	if p.wish = weight; p.pacer != nil {
		p.pacer.table.RequestWeight(p.paced, weight)
	}
}

// Advised is the current advice for a publisher.
type Advised struct {
	Paced    bool
	Rate     float64 // messages per second
	Burst    int64   // messages
	Measured float64 // measured rate, messages per second
}

// Advised returns the current advice. Requires: the publisher has published.
func (p *Publisher) Advised() Advised {
	p.to.runner.mu.Lock()
	defer p.to.runner.mu.Unlock()
	if p.pacer == nil || !p.pacer.last.Paced {
		return Advised{}
	}
	rate, burst := p.pacer.table.Allowance(p.paced)
	return Advised{Paced: true, Rate: rate.PerSecond(), Burst: burst, Measured: p.paced.Rate()}
}

// Advice returns the advice from the last publish, an OK of pacing/header, or nil. It
// returns each advice once. The result is valid until the next publish. Only the publishing
// goroutine may call Advice.
func (p *Publisher) Advice() []byte {
	ok := p.ok
	p.ok = p.ok[:0]
	if len(ok) == 0 {
		return nil
	}
	return ok
}

// Paced is the state of a topic's pacing.
type Paced struct {
	Mode PaceMode
	fair.Advice
	Span       time.Duration // length of the interval
	Refused    uint64        // messages refused by police
	Publishers []PacedPublisher
}

// PacedPublisher is the pacing state of one identity.
type PacedPublisher struct {
	Identity      police.Identity
	Rate, Advised float64 // messages per second, measured and permitted; Advised is 0 if not paced
	Weight        float64
}

// Paced is intake.Paced.
func (t *Topic) Paced(publishers bool) Paced { return t.intake.Paced(publishers) }

// Paced returns the current state, with publishers if requested, sorted by identity.
func (in *intake) Paced(publishers bool) Paced {
	in.runner.mu.Lock()
	defer in.runner.mu.Unlock()
	s := Paced{Mode: in.pacing.inForce()}
	pc := in.pacing.pacer()
	if pc == nil {
		return s
	}
	if now := in.runner.shared.now(); pc.expired(now) {
		pc.endInterval(in.runner.mu.core.Contract().Share(), now)
	}
	s.Advice, s.Span, s.Refused = pc.last, pc.span, pc.refused
	if publishers {
		pc.table.Each(func(is police.Identity, p *police.Publisher) {
			publisher := PacedPublisher{Identity: is, Rate: p.Rate(), Weight: p.Weight()}
			if s.Advice.Paced {
				publisher.Advised = s.RateOf(p.Weight())
			}
			s.Publishers = append(s.Publishers, publisher)
		})
		slices.SortFunc(s.Publishers, func(a, b PacedPublisher) int {
			return cmp.Or(cmp.Compare(a.Identity.ID, b.Identity.ID), cmp.Compare(a.Identity.Kind, b.Identity.Kind))
		})
	}
	return s
}

// SetPacing is intake.SetPacing.
func (t *Topic) SetPacing(mode PaceMode, weights []police.Group) { t.intake.SetPacing(mode, weights) }

// SetPacing replaces the topic's mode and the weights of its publishers.
func (in *intake) SetPacing(mode PaceMode, weights []police.Group) {
	in.runner.mu.Lock()
	defer in.runner.mu.Unlock()
	p := &in.pacing
	if p.mode, p.groups = mode, weights; p.running != nil {
		p.running.table.SetWeights(p.weights())
	}
}
