package tuner

import (
	"iter"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Config configures the tuning of topics.
type Config struct {
	Mode      string          // ModeFast or ModePaper; empty: no fits
	Round     time.Duration   // round length of ModePaper
	Rebalance bool            // look for overloaded brokers
	Rules     RebalanceConfig // rules of rebalancing
	Report    time.Duration   // interval of brokers' reports
	Window    time.Duration   // reports that rebalancing considers
	Seed      uint64
}

// Topic is the present state of an active topic. The Tuner calls its functions only
// before it returns.
type Topic struct {
	Setup   // without Brokers; Start is the plan in force
	Name    string
	Epoch   uint64          // epoch of the placement
	Holders func() []string // brokers that have the topic
	Index   func(publisher string) (i int, found bool)

	Changing bool // a change of the topic is in progress
	Over     bool // the topic offers more than its contract
	Missed   bool // the SLO is missed

	// Reports returns a broker's recent reports of the topic, in order of time.
	Reports func(broker string) []Report
	// Session identifies a broker's session; nil: none.
	Session func(broker string) Session
	// Free returns the brokers that may take publishers, without the topic's reservation.
	// Brokers includes the reservation.
	Free, Brokers func() []placement.Broker
	// Absorbed returns the Learned absorption of a broker for the topic's latency.
	Absorbed func(broker string) Absorption
}

// Session is a broker's session, of a comparable type of the caller.
type Session any

// Report is a broker's report of a topic over an interval that ended At.
type Report struct {
	At                           time.Time
	Interval                     time.Duration
	Offered, Delivered, Exceeded uint64
	Subscribers                  uint32
	Latencies
}

func (r Report) perSecond() float64 { return float64(r.Offered) / r.Interval.Seconds() }

// Latencies returns the histograms of a Report. Each call returns a histogram that the
// caller may modify.
type Latencies interface {
	Processing() Histogram
	Access() Histogram
	Delivery() Histogram
}

// Histogram is histogram.Latency, which is not pure.
type Histogram interface {
	Count() int64
	CountAbove(time.Duration) int64
	Quantile(float64) time.Duration
	Add(Histogram) // Add adds a histogram of the same type
}

// sum adds h to *to, or stores h if *to is nil.
func sum(target *Histogram, h Histogram) {
	if *target == nil {
		*target = h
	} else {
		(*target).Add(h)
	}
}

// Effect is a request to the caller: one of the types from Capture to Note.
type Effect any

// Capture requests the arrivals of a topic from a broker for Lasts; 0 ends the recording.
type Capture struct {
	Session Session
	Topic   string
	Lasts   time.Duration
}

// Relocate requests a move of a topic to a plan of its fit. Moved answers.
type Relocate struct {
	Topic string
	Plan  placement.Plan
}

// LookShare requests a broker's share of a topic's contract. Shared answers.
type LookShare struct{ Topic, Broker string }

// Learned reports what a broker absorbs.
type Learned struct {
	Broker  string
	Latency time.Duration
	Absorption
}

// Found reports the finding about a suspected broker. With the Finding Overloaded the
// Move is due, if the topic's placement still has the epoch.
type Found struct {
	Topic string
	Epoch uint64
	Finding
	Move
}

// Ended: the fit of a topic is over, with one of the Outcomes, after Took; 0: the fit had
// not begun.
type Ended struct {
	Topic, Outcome string
	Duration       time.Duration
	Lacking        bool // see type Outcome
}

// Outcomes of a fit.
const (
	OutcomeKept   = "kept"   // the placement was found to keep the SLO
	OutcomeMissed = "missed" // no placement was found to keep the SLO
	OutcomeEnded  = "ended"  // the fit was interrupted
)

// Recorded: a recording of arrivals for a fit is over.
type Recorded struct{ Counts }

// Note is a log line.
type Note struct {
	Topic, Broker string // Broker is empty if the note concerns no broker
	Text          string
	Args          []any
	Level         int // level of log/slog
}

// Levels of a Note.
const (
	levelDebug = -4
	levelInfo  = 0
	levelWarn  = 4
)

// Tuner tunes the topics of a cluster. It receives events and returns effects. Make it
// with NewTuner.
type Tuner struct {
	cfg     Config
	fits    map[string]*fit   // by topic, until the topic is gone
	watches map[string]*Watch // by topic
	probes  map[string]*probe // by topic
	effects []Effect
}

// NewTuner returns a Tuner without topics.
func NewTuner(cfg Config) *Tuner {
	return &Tuner{cfg: cfg, fits: map[string]*fit{}, watches: map[string]*Watch{}, probes: map[string]*probe{}}
}

func (t *Tuner) emit(effects ...Effect) { t.effects = append(t.effects, effects...) }

// flush returns and clears the effects.
func (t *Tuner) flush() []Effect {
	effects := t.effects
	t.effects = nil
	return effects
}

// Proposal is a computation about a topic. Think uses no data that the Tuner uses, so
// both may run concurrently. Afterwards the caller passes the Proposal to Act.
type Proposal struct {
	Topic string

	f        *fit // nil: the proposal concerns an overloaded broker
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

// Compute replays arrivals, which may take long.
func (p *Proposal) Compute(now mono.Time) {
	if p.f != nil {
		p.next = p.search.Next(p.observed)
	} else {
		p.move, p.finding = p.watch.Decide(now, p.rules, p.suspect)
	}
}

// Followed returns the topics that Propose needs besides the topics that miss their SLO.
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

// Propose examines active topics, once per report interval: all topics that are Followed
// or miss their SLO. gone reports whether a topic is no longer active.
func (t *Tuner) Propose(now time.Time, topics iter.Seq[Topic], inactive func(topic string) bool) ([]*Proposal, []Effect) {
	var proposals []*Proposal
	for topic := range topics {
		if p := t.suspect(topic, now); p != nil {
			proposals = append(proposals, p)
		}
		if f := t.fits[topic.Name]; f != nil {
			if p := t.advance(topic, f, now); p != nil {
				proposals = append(proposals, p)
			}
		}
	}
	// order: each entry on its own
	for name, f := range t.fits {
		if inactive(name) {
			t.end(name, f, OutcomeEnded, "the topic is gone", now)
			delete(t.fits, name)
		}
	}
	// order: each entry on its own
	for name := range t.watches {
		if inactive(name) {
			t.forget(name)
		}
	}
	return proposals, t.flush()
}

// Act carries out the result of a proposal, with the topic as it is now.
func (t *Tuner) Act(p *Proposal, topic Topic, now time.Time) []Effect {
	if p.f == nil {
		t.apply(p, topic, now)
		return t.flush()
	}
	p.f.next = &p.next
	// The next look handles any change in between.
	if topic.Epoch == p.f.epoch && t.fits[p.Topic] == p.f && !topic.Changing {
		t.act(topic, p.f, now)
	}
	return t.flush()
}

// Measure adds a piece of a broker's record. An invalid piece ends the recording on this
// broker and has no other effect.
func (t *Tuner) Measure(from Session, broker, topic string, piece Piece, now time.Time) []Effect {
	var r *recording
	if f := t.fits[topic]; f.records() {
		r = f.record
	} else if q := t.probes[topic]; q != nil {
		r = q.record
	}
	if r == nil || r.requested[from].IsZero() || r.untrusted[from] {
		return nil // the recording is over
	}
	if err := r.trace.Add(broker, piece, wall(now)); err != nil {
		r.untrusted[from] = true
		t.emit(Capture{Session: from, Topic: topic},
			Note{Topic: topic, Broker: broker, Text: "a record of arrivals is not to be trusted", Args: []any{"error", err}, Level: levelWarn})
	}
	return t.flush()
}

// Shared answers LookShare.
func (t *Tuner) Shared(topic, broker string, share tokenbucket.Share, err error) []Effect {
	q := t.probes[topic]
	if q == nil || q.broker != broker || q.evidence == nil {
		return nil // the probe was dropped
	}
	if q.evidence.Share = share; err != nil {
		q.evidence.Arrivals = nil // without the share there is no replay
		t.emit(Note{Topic: topic, Broker: broker, Text: "a broker is judged by its reports alone", Args: []any{"error", err}, Level: levelWarn})
	}
	q.result, q.evidence = q.evidence, nil
	return t.flush()
}
