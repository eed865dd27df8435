package tuner

import (
	"iter"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Config is how topics are tuned.
type Config struct {
	Mode      string          // ModeFast or ModePaper; empty: they are not fitted
	Round     time.Duration   // of ModePaper
	Rebalance bool            // overloaded brokers are looked for
	Rules     RebalanceConfig // where they are
	Report    time.Duration   // how often brokers report
	Window    time.Duration   // of what they have reported, for rebalancing
	Seed      uint64
}

// Topic is an active topic as it is now. Its functions are called before the Tuner
// returns.
type Topic struct {
	Setup   // without Brokers; Start is the plan in force
	Name    string
	Epoch   uint64          // of its placement
	Holders func() []string // brokers that have it
	Index   func(publisher string) (i int, known bool)

	Changing bool // something is being done about it
	Over     bool // it offers more than its contract
	Missed   bool // its SLO is

	// Reports are what a broker has reported of it lately, in order of time.
	Reports func(broker string) []Report
	// Session identifies a broker's session; nil: it has none.
	Session func(broker string) Session
	// Free are the brokers that may be placed on, as if the topic were not there yet,
	// and Brokers as it is.
	Free, Brokers func() []placement.Broker
	// Absorbed is what was Learned of a broker for the topic's latency.
	Absorbed func(broker string) Absorption
}

// Session is a broker's, of a comparable type that the caller knows.
type Session any

// Report is what a broker says of a topic in an interval that ended At.
type Report struct {
	At                           time.Time
	Took                         time.Duration
	Offered, Delivered, Exceeded uint64
	Subscribers                  uint32
	Latencies
}

func (r Report) perSecond() float64 { return float64(r.Offered) / r.Took.Seconds() }

// Latencies are those of a Report; each call returns one that is the caller's to modify.
type Latencies interface {
	Processing() Histogram
	Access() Histogram
	Delivery() Histogram
}

// Histogram is obs.Latency, which is not pure.
type Histogram interface {
	Count() int64
	CountAbove(time.Duration) int64
	Quantile(float64) time.Duration
	Add(Histogram) // one of the same type
}

// sum adds one, which it keeps if it is the first.
func sum(to *Histogram, h Histogram) {
	if *to == nil {
		*to = h
	} else {
		(*to).Add(h)
	}
}

// Effect is what is to be done: one of the types from Capture to Note.
type Effect any

// Capture asks a broker for the arrivals of a topic, for so long; 0: not any more.
type Capture struct {
	To    Session
	Topic string
	Lasts time.Duration
}

// Relocate has a topic moved to where its fit tries it: Moved.
type Relocate struct {
	Topic string
	Plan  placement.Plan
}

// LookShare asks what a broker holds of a topic's contract: Shared.
type LookShare struct{ Topic, Broker string }

// Learned: that is what a broker absorbs.
type Learned struct {
	Broker  string
	Latency time.Duration
	Absorption
}

// Found is a broker that was suspected: with the Finding Overloaded the Move is due, if
// the topic's placement has the epoch still.
type Found struct {
	Topic string
	Epoch uint64
	Finding
	Move
}

// Ended: the fit of a topic is over, with one of the Outcomes; it took so long, 0: it had not begun.
type Ended struct {
	Topic, How string
	Took       time.Duration
}

// Outcomes of a fit.
const (
	Kept   = "kept"   // the placement was found to keep the SLO
	Missed = "missed" // none was
	Broken = "ended"  // something came between
)

// Recorded: a recording of arrivals for a fit is over.
type Recorded struct{ Counts }

// Note is for the log.
type Note struct {
	Topic, Broker string // of no broker: empty
	Text          string
	Args          []any
	Level         int // of log/slog
}

// Levels of a Note.
const (
	levelDebug = -4
	levelInfo  = 0
	levelWarn  = 4
)

// Tuner tunes the topics of a cluster. It is told what happens, and returns what is to be
// done. Make it with NewTuner.
type Tuner struct {
	cfg     Config
	fits    map[string]*fit   // by topic, until that is gone
	watches map[string]*Watch // by topic
	probes  map[string]*probe // by topic
	effects []Effect
}

// NewTuner returns a Tuner that knows no topic.
func NewTuner(cfg Config) *Tuner {
	return &Tuner{cfg: cfg, fits: map[string]*fit{}, watches: map[string]*Watch{}, probes: map[string]*probe{}}
}

func (t *Tuner) do(effects ...Effect) { t.effects = append(t.effects, effects...) }

// flush returns what is to be done.
func (t *Tuner) flush() []Effect {
	all := t.effects
	t.effects = nil
	return all
}

// Proposal is something to be thought about. Think uses nothing that the Tuner does, so
// that this may go on meanwhile; then it is for Act.
type Proposal struct {
	Topic string

	f        *fit // nil: it is about an overloaded broker
	search   Search
	observed Observation
	next     Action

	epoch   uint64
	watch   *Watch
	rules   RebalanceConfig
	suspect Suspect
	move    Move
	finding Finding
}

// Think may take its time, for it replays arrivals.
func (p *Proposal) Think(now mono.Time) {
	if p.f != nil {
		p.next = p.search.Next(p.observed)
	} else {
		p.move, p.finding = p.watch.Decide(now, p.rules, p.suspect)
	}
}

// Followed returns the topics that Propose is to be given, beside those that miss their SLO.
func (t *Tuner) Followed() (names []string) {
	// order: the caller's
	for name, f := range t.fits {
		if !f.done || !f.retry.IsZero() {
			names = append(names, name)
		}
	}
	// order: the caller's
	for name := range t.watches {
		names = append(names, name)
	}
	// order: the caller's
	for name := range t.probes {
		names = append(names, name)
	}
	return names
}

// Propose looks at active topics, as often as brokers report: all that are Followed or
// miss their SLO. gone reports whether a topic is not active any more.
func (t *Tuner) Propose(now time.Time, topics iter.Seq[Topic], gone func(topic string) bool) ([]*Proposal, []Effect) {
	var proposals []*Proposal
	for topic := range topics {
		if p := t.suspect(topic, now); p != nil {
			proposals = append(proposals, p)
		}
		if f := t.fits[topic.Name]; f != nil {
			if p := t.fit(topic, f, now); p != nil {
				proposals = append(proposals, p)
			}
		}
	}
	// order: each entry on its own
	for name, f := range t.fits {
		if gone(name) {
			t.end(name, f, Broken, "the topic is gone", now)
			delete(t.fits, name)
		}
	}
	// order: each entry on its own
	for name := range t.watches {
		if gone(name) {
			t.forget(name)
		}
	}
	return proposals, t.flush()
}

// Act does what a proposal has come to, with the topic as it is now.
func (t *Tuner) Act(p *Proposal, topic Topic, now time.Time) []Effect {
	if p.f == nil {
		t.found(p, topic, now)
		return t.flush()
	}
	p.f.next = &p.next
	// What may have come between is seen to at the next look.
	if topic.Epoch == p.f.epoch && t.fits[p.Topic] == p.f && !topic.Changing {
		t.follow(topic, p.f, now)
	}
	return t.flush()
}

// Measure takes a piece of a broker's record. What is wrong with it ends the recording
// on that broker, and nothing else.
func (t *Tuner) Measure(from Session, broker, topic string, piece Piece, now time.Time) []Effect {
	var r *recording
	if f := t.fits[topic]; f.records() {
		r = f.record
	} else if q := t.probes[topic]; q != nil {
		r = q.record
	}
	if r == nil || r.asked[from].IsZero() || r.untrusted[from] {
		return nil // it is over
	}
	if err := r.trace.Add(broker, piece, wall(now)); err != nil {
		r.untrusted[from] = true
		t.do(Capture{To: from, Topic: topic},
			Note{Topic: topic, Broker: broker, Text: "a record of arrivals is not to be trusted", Args: []any{"error", err}, Level: levelWarn})
	}
	return t.flush()
}

// Shared answers LookShare.
func (t *Tuner) Shared(topic, broker string, held tokenbucket.Share, err error) []Effect {
	q := t.probes[topic]
	if q == nil || q.broker != broker || q.evidence == nil {
		return nil // it was dropped
	}
	if q.evidence.Share = held; err != nil {
		q.evidence.Arrivals = nil // through what would they be replayed?
		t.do(Note{Topic: topic, Broker: broker, Text: "a broker is judged by its reports alone", Args: []any{"error", err}, Level: levelWarn})
	}
	q.result, q.evidence = q.evidence, nil
	return t.flush()
}
