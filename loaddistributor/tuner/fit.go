package tuner

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// The fit of a topic begins when the topic is active and its publishers send, because
// there is nothing to measure before. The topic's search receives the brokers' reports.
// If the search wants another placement, the topic moves as for any other reason.
//
// Brokers report histograms, which suffice to test a placement. To forecast other
// placements the search replays arrivals, which brokers send on request during the fit
// (recording). A topic without arrivals from its brokers is also fitted, one more broker
// at a time.
//
// The paper's search silences publishers while it measures how many publishers a broker
// can hold. Silenced publishers have no place and no part of the contract.
//
// A fit lives in memory. A new leader, or an operator who moves the topic during the fit,
// ends the fit with the present placement. The caller then places the publishers without
// a place.

// fit is the search of one topic.
type fit struct {
	search       Search  // nil: waiting for traffic, or over
	rate         float64 // of all publishers, msg/s
	setup        Setup
	epoch        uint64               // epoch of the placement under test
	sum          observed             // reports since the last observation
	measureStart time.Time            // start of measuring: earlier intervals do not count
	unread       time.Time            // time since which a broker has no subscriber; zero: all have
	counted      map[string]time.Time // newest counted report, by broker
	record       *recording           // nil: no recording
	next         *Action              // next action of the search, once nothing else is in progress for the topic
	moving       bool
	restarts     int // restarts of the search because its plan was not available
	done         bool
	step         string
	complete     time.Time // last time when the search had all it needs
	retry        time.Time // for an ended fit: time of a new fit; zero: none

	trials   []Trial   // oldest first, at most maxTrials
	delivery Histogram // deliveries of the last trial; nil: none yet

	start, end time.Time // of the search; zero: not yet
	outcome    Outcome   // set at the end; without rounds if the fit was broken off
}

// running reports whether the fit has a search in progress. A nil fit has none.
func (f *fit) running() bool { return f != nil && (f.search != nil || f.moving) }

// records reports whether arrivals are being recorded for the fit.
func (f *fit) records() bool { return f != nil && f.record != nil }

// Status is the state of a topic's fit.
type Status struct {
	Step          string // for people
	Ended, Fitted bool
	Started       bool
	Duration      time.Duration // so far
	Rounds        []Rounds
	Trials        []Trial // the last maxTrials, oldest first
	// Waiting: the fit is not over, and may not have begun. Running: there is a search.
	Waiting, Running bool
}

// maxTrials is the number of trials that a fit remembers.
const maxTrials = 64

// Trial is a placement that a fit put in force, with its measurements.
type Trial struct {
	Start  time.Time
	Quotas []placement.Quota
	// Forecast and Confidence are from the last Action with this plan. Verdict is empty
	// during the trial.
	Forecast, Confidence float64
	Verdict              string
	// Delivered and Exceeded include access delay. Quantile is the SLO's quantile over all
	// brokers.
	Delivered, Exceeded uint64
	Quantile            time.Duration
}

// recordTrial records an action of the search for Status.
func (f *fit) recordTrial(a Action, now time.Time) {
	n := len(f.trials)
	if n > 0 && f.trials[n-1].Verdict == "" {
		last := &f.trials[n-1]
		last.Verdict = a.Verdict
		switch {
		case a.Final && a.Outcome.Fitted:
			last.Verdict = "kept"
		case a.Final && last.Verdict == "":
			last.Verdict = "not shown to be kept"
		case !a.Final && !a.Changed:
			last.Forecast, last.Confidence = a.Forecast, a.Confidence
			return
		}
	}
	if a.Final {
		return
	}
	f.trials = append(slices.Clone(f.trials[max(0, n-maxTrials+1):]), Trial{Start: now, Quotas: a.Plan.Quotas, Forecast: a.Forecast, Confidence: a.Confidence})
	f.delivery = nil
}

// measured adds an observation to the current trial. Requires: a trial is in progress,
// and quantile is the SLO's.
func (f *fit) measured(s observed, quantile float64) {
	last := &f.trials[len(f.trials)-1]
	for _, p := range s.parts {
		last.Delivered += p.delivered
		last.Exceeded += p.exceeded
		if p.delivery != nil {
			sum(&f.delivery, p.delivery)
		}
	}
	if f.delivery != nil {
		last.Quantile = f.delivery.Quantile(quantile)
	}
}

// Status returns the state of a topic's fit, or the zero Status without a fit.
func (t *Tuner) Status(topic string, now time.Time) Status {
	f := t.fits[topic]
	if f == nil {
		return Status{}
	}
	ended := f.done && !f.moving // ended, and the final placement is in force
	s := Status{Step: f.step, Ended: ended, Fitted: ended && f.outcome.Fitted, Rounds: f.outcome.Rounds, Trials: slices.Clone(f.trials), Waiting: !f.done, Running: f.running()}
	if f.done {
		now = f.end
	}
	if !f.start.IsZero() {
		s.Started, s.Duration = true, now.Sub(f.start)
	}
	return s
}

// Searches returns the number of topics with a search.
func (t *Tuner) Searches() (n int) {
	// order: they are counted
	for _, f := range t.fits {
		if f.search != nil {
			n++
		}
	}
	return n
}

// DefaultStall is the longest stall of a broker's host that a fit tolerates without taking
// its late messages for independent.
const DefaultStall = 100 * time.Millisecond

const (
	// fitSettle is the time for publishers to move before measurements count. If the
	// report interval is shorter, the report interval counts.
	fitSettle = time.Second
	// fitDrain bounds the time for a broker whose first subscribers have arrived to drain
	// its backlog. The broker gets as long as it had no subscribers.
	fitDrain = 10 * time.Second
	// fitTraffic is the part of the publishers' rates that a topic must offer before it is
	// measured. Earlier latencies would be latencies of connecting.
	fitTraffic = 0.8
	// Both in report intervals. fitGone is how long a fit continues without its traffic or
	// subscribers. fitRetry is the time until a fit without a result is repeated.
	fitGone  = 30
	fitRetry = 600
	// fitAgain bounds the restarts of a search with new brokers because a chosen broker
	// was gone or full.
	fitAgain = 5
	// keptArrivals bounds the arrivals that a search keeps, so it keeps a shorter time of
	// a large topic.
	keptArrivals = 500_000
	// roundGrace is the wait after a round for a broker's last report of the round.
	roundGrace = 5 * time.Second
)

// Begin begins to fit a new topic.
func (t *Tuner) Begin(topic string, d placement.Demand, now time.Time) []Effect {
	if t.cfg.Mode == "" || len(d.Publishers) == 0 && len(d.Groups) == 0 {
		return nil
	}
	if old := t.fits[topic]; old != nil {
		t.end(topic, old, OutcomeEnded, "the topic is gone", now)
	}
	f := &fit{step: "waiting for publishers"}
	for _, p := range d.Expand() {
		f.rate += p.Rate
	}
	t.fits[topic] = f
	return t.flush()
}

// advance advances a fit.
func (t *Tuner) advance(topic Topic, f *fit, now time.Time) *Proposal {
	idle := !f.moving && !topic.Changing
	switch {
	case f.done:
		if idle && !f.retry.IsZero() && !now.Before(f.retry) {
			t.emit(t.Begin(topic.Name, topic.Demand, now)...)
		}
		return nil
	case f.search != nil && idle && topic.Epoch != f.epoch:
		t.end(topic.Name, f, OutcomeEnded, "another placement came between", now)
		return nil
	}
	ready := f.search != nil || !topic.Over && topic.offered() >= fitTraffic*f.rate && !t.unread(topic, f, now)
	if f.search != nil && idle {
		if reason := t.brokenOff(topic, f, now); reason != "" {
			t.end(topic.Name, f, OutcomeEnded, reason, now)
			f.retry = now
			return nil
		}
	}
	if f.search == nil && topic.Over {
		f.step = "waiting until the topic keeps to its contract"
	}
	if f.record != nil || t.cfg.Mode == ModeFast && ready {
		t.record(topic, f, now)
	}
	observed := Observation{}
	switch {
	case !idle:
		return nil
	case f.next != nil:
		t.act(topic, f, now)
		return nil
	case !ready:
		return nil
	case f.search == nil:
		if !t.beginSearch(topic, f, now) {
			return nil
		}
	case t.unread(topic, f, now):
		if f.record != nil {
			f.record.trace.Skip(wall(now)) // arrivals are not taken in the meantime, however long the wait
		}
		return nil
	case t.observe(topic, f, now):
		observed = f.take()
	default:
		return nil
	}
	return &Proposal{Topic: topic.Name, f: f, search: f.search, observed: observed}
}

// record requests arrivals from the brokers that publishers send to, now or soon.
func (t *Tuner) record(topic Topic, f *fit, now time.Time) {
	if f.record == nil {
		f.record = newRecording(topic, now)
	}
	t.request(f.record, topic, topic.Holders(), now)
	if f.search == nil {
		f.record.trace.Skip(wall(now)) // arrivals are not taken yet
	}
}

// end ends a fit and keeps its result for Status.
func (t *Tuner) end(topic string, f *fit, outcome, step string, now time.Time) {
	if f.done {
		return
	}
	f.done, f.step, f.end = true, step, now
	if !f.start.IsZero() {
		t.emit(Ended{topic, outcome, now.Sub(f.start), outcome == OutcomeMissed && f.outcome.Lacking})
	}
	if f.record != nil {
		t.stop(f.record, topic)
		t.emit(Recorded{f.record.trace.Counts()})
	}
	if n := len(f.trials); n > 0 && f.trials[n-1].Verdict == "" {
		f.trials[n-1].Verdict = "ended: " + step
	}
	f.record, f.search, f.next, f.setup, f.sum, f.counted, f.delivery = nil, nil, nil, Setup{}, observed{}, nil, nil
}

// brokenOff returns what the search has lacked for too long, or "". Without it the
// measurements are missing or not typical. Requires: there is a search.
func (t *Tuner) brokenOff(topic Topic, f *fit, now time.Time) string {
	// The paper's search silences publishers.
	minimum := fitTraffic * f.rate
	if t.cfg.Mode == ModePaper {
		minimum = 0
	}
	offered := topic.offered()
	quiet := offered < minimum || offered == 0
	if !topic.Over && !quiet && f.unread.IsZero() {
		f.complete = now
	}
	switch {
	case topic.Over:
		return "the topic offers more than its contract"
	case now.Sub(f.complete) < fitGone*t.cfg.Report:
		return ""
	case quiet:
		return "the publishers have gone"
	default:
		return "the subscribers have gone"
	}
}

// unread reports whether consumers have not come yet, so measurements would not be
// typical. Consumers look up a topic's brokers only from time to time.
func (t *Tuner) unread(topic Topic, f *fit, now time.Time) bool {
	var unread []string
	for _, q := range topic.Start.Quotas {
		reports := topic.Reports(q.Broker)
		if n := len(reports); n == 0 || reports[n-1].Subscribers == 0 {
			unread = append(unread, q.Broker)
		}
	}
	switch {
	case len(unread) == 0 && f.unread.IsZero():
		return false
	case len(unread) == 0:
		f.measureFrom(f.epoch, now.Add(max(t.settle(), min(now.Sub(f.unread), fitDrain))))
		f.unread = time.Time{}
		return false
	case f.unread.IsZero():
		f.unread = now
	}
	f.step = "waiting for subscribers on " + strings.Join(unread, ", ")
	return true
}

func (t *Tuner) settle() time.Duration { return min(fitSettle, t.cfg.Report) }

// offered returns the offered rate in msg/s: the larger of the newest reports and all
// kept reports, because publishers may send less often than brokers report.
func (topic Topic) offered() float64 {
	newest, window := 0.0, 0.0
	for _, q := range topic.Start.Quotas {
		all, last := Report{}, Report{}
		for _, r := range topic.Reports(q.Broker) {
			all.Offered, all.Interval, last = all.Offered+r.Offered, all.Interval+r.Interval, r
		}
		if all.Interval > 0 {
			window += all.perSecond()
			newest += last.perSecond()
		}
	}
	return max(newest, window)
}

// beginSearch creates the search of a topic whose publishers send, once its brokers
// record. It reports success.
func (t *Tuner) beginSearch(topic Topic, f *fit, now time.Time) bool {
	if r := f.record; r != nil && now.Sub(r.start) < recordPatience && !r.started(topic) {
		return false // brokers may still start recording
	}
	f.setup = topic.Setup
	f.setup.Brokers = topic.Free()
	rng := rand.New(rand.NewPCG(t.cfg.Seed, topic.Epoch))
	var err error
	if t.cfg.Mode == ModePaper {
		f.search, err = NewPaper(f.setup, t.cfg.Round, rng)
	} else {
		cfg := FastConfig{Stall: DefaultStall, Step: t.cfg.Report, Capture: time.Second, Absorbed: map[string]Absorption{}}
		cfg.Keep = min(30*time.Second, max(cfg.Capture, time.Duration(keptArrivals/f.rate*float64(time.Second))))
		for _, b := range f.setup.Brokers {
			cfg.Absorbed[b.ID] = topic.Absorbed(b.ID)
		}
		f.search, err = NewFast(f.setup, cfg, rng)
	}
	if err != nil {
		f.search = nil
		t.end(topic.Name, f, OutcomeEnded, err.Error(), now)
		return false
	}
	if f.start.IsZero() {
		f.start = now
	}
	f.complete = now
	if f.record != nil {
		f.record.trace.Skip(wall(now)) // skips the time of connecting
	}
	start := now
	if f.measureStart.After(now) { // subscribers have just come
		start = f.measureStart
	}
	f.measureFrom(topic.Epoch, start)
	return true
}

// act carries out the next action of the search. Requires: nothing else is in progress
// for the topic.
func (t *Tuner) act(topic Topic, f *fit, now time.Time) {
	a := *f.next
	f.next = nil
	f.recordTrial(a, now)
	if a.Step != f.step {
		f.step = a.Step
		t.emit(Note{Topic: topic.Name, Text: "fitting", Args: []any{"step", a.Step}, Level: levelDebug})
	}
	samePlan := samePlan(a.Plan, topic.Start) || len(a.Plan.Quotas) == 0
	if a.Final {
		t.emit(Note{Topic: topic.Name, Text: "topic fitted", Level: levelInfo, Args: []any{
			"kept", a.Outcome.Fitted, "reason", a.Outcome.Reason, "brokers", a.Plan.K, "duration", now.Sub(f.start),
		}})
		f.outcome = a.Outcome
		for _, id := range slices.Sorted(maps.Keys(f.outcome.Absorbed)) {
			t.emit(Learned{id, f.setup.Latency, f.outcome.Absorbed[id]})
		}
		outcome := OutcomeMissed
		if a.Outcome.Fitted {
			outcome = OutcomeKept
		}
		t.end(topic.Name, f, outcome, a.Outcome.Reason, now)
		if !a.Outcome.Fitted {
			f.retry = now.Add(fitRetry * t.cfg.Report)
		}
		if samePlan || len(a.Plan.Unplaced) > 0 {
			return // the caller places the publishers without a place
		}
	}
	if samePlan {
		if a.Changed && f.measureStart.Before(now) {
			f.measureFrom(topic.Epoch, now)
		}
		return
	}
	f.moving = true
	t.emit(Relocate{topic.Name, a.Plan})
}

// Moved answers Relocate, with the topic after the move. anew means that the plan was not
// available and another plan may be.
func (t *Tuner) Moved(topic Topic, err error, anew bool, now time.Time) []Effect {
	f := t.fits[topic.Name]
	if f == nil || !f.moving {
		return nil
	}
	f.moving = false
	switch {
	case err != nil && anew && !f.done && f.restarts < fitAgain:
		f.restarts++
		f.search, f.step = nil, "begins anew: "+err.Error()
		t.emit(Note{Topic: topic.Name, Text: "fitting begins anew", Args: []any{"error", err}, Level: levelInfo})
	case err != nil:
		f.outcome.Fitted, f.step = false, "not moved: "+err.Error()
		t.end(topic.Name, f, OutcomeEnded, f.step, now)
	case !f.done:
		f.measureFrom(topic.Epoch, now.Add(t.settle()))
		if f.record != nil {
			t.record(topic, f, now) // at once, on new brokers too
		}
	}
	return t.flush()
}

// samePlan reports whether both plans have the same publishers at the same brokers.
func samePlan(a, b placement.Plan) bool {
	return slices.Equal(a.Unplaced, b.Unplaced) && slices.EqualFunc(a.Quotas, b.Quotas, func(p, q placement.Quota) bool {
		return p.Broker == q.Broker && slices.Equal(p.Publishers, q.Publishers)
	})
}

func (f *fit) measureFrom(epoch uint64, start time.Time) {
	f.epoch, f.measureStart, f.counted = epoch, start, map[string]time.Time{}
	f.sum = observed{parts: make([]part, len(f.setup.Brokers))}
}

// observed holds the reports of a topic since the search last received some.
type observed struct {
	received           bool
	processing, access Histogram
	arrivals           []Arrival
	parts              []part // by broker of the setup
}

// part is the deliveries of one broker.
type part struct {
	slices              []Slice
	delivered, exceeded uint64
	delivery            Histogram
}

// observe gathers new reports and reports whether the search should receive them: after
// each round, or with every report if there are no rounds.
func (t *Tuner) observe(topic Topic, f *fit, now time.Time) bool {
	r := f.record
	if r != nil {
		f.sum.arrivals = append(f.sum.arrivals, r.trace.Take(wall(now))...)
	}
	end := f.measureStart
	if t.cfg.Mode == ModePaper {
		end = end.Add(t.cfg.Round)
	}
	complete := true // brokers have reported the whole round
	for _, q := range topic.Start.Quotas {
		l := slices.IndexFunc(f.setup.Brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		if l < 0 {
			complete = false
			continue
		}
		for _, r := range topic.Reports(q.Broker) {
			if r.At.After(f.counted[q.Broker]) && !r.At.Add(-r.Interval).Before(f.measureStart) {
				f.counted[q.Broker] = r.At
				f.sum.add(l, r, f.setup.Latency)
			}
		}
		complete = complete && !f.counted[q.Broker].Before(end)
	}
	if t.cfg.Mode == ModePaper {
		return f.sum.received && (complete || now.Sub(end) > roundGrace)
	}
	// Without arrivals a search assumes that there are none, so wait while arrivals are
	// expected.
	return f.sum.received && (len(f.sum.arrivals) > 0 || r == nil || r.delivered || !r.started(topic) || now.Sub(f.start) > recordPatience)
}

// add counts a report of broker l.
func (o *observed) add(l int, r Report, latency time.Duration) {
	p, processing := &o.parts[l], r.Processing()
	p.slices = append(p.slices, Slice{
		Delivered: uint64(processing.Count()), Late: uint64(processing.CountAbove(latency)), HalfLate: uint64(processing.CountAbove(latency / 2)),
	})
	p.delivered += r.Delivered
	p.exceeded += r.Exceeded
	sum(&p.delivery, r.Delivery())
	sum(&o.processing, processing)
	sum(&o.access, r.Access())
	o.received = true
}

// take returns the gathered observation and starts a new one. Requires: there are
// reports.
func (f *fit) take() Observation {
	s := f.sum
	f.sum = observed{parts: make([]part, len(f.setup.Brokers))}
	o := Observation{Arrivals: s.arrivals, Unloaded: s.processing.Quantile(0.1)}
	o.Access = Slice{Delivered: uint64(s.access.Count()), Late: uint64(s.access.CountAbove(longestWait(f.setup.Latency, o.Unloaded)))}
	for l, p := range s.parts {
		part := Part{Count: Count{Part: f.setup.Brokers[l].ID, Delivered: p.delivered, Exceeded: p.exceeded}}
		if p.delivery != nil {
			part.Quantile = p.delivery.Quantile(f.setup.Quantile)
		}
		o.Parts, o.Slices = append(o.Parts, part), append(o.Slices, p.slices)
	}
	f.measured(s, f.setup.Quantile)
	if f.record != nil {
		f.record.delivered = f.record.delivered || len(s.arrivals) > 0
	}
	return o
}
