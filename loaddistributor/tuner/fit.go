package tuner

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// Fitting a topic begins when it is active and its publishers send: until then
// there is nothing to measure. What its brokers have reported goes to the topic's
// search; where that wants another placement, the topic moves, as it would for any
// other reason.
//
// Brokers report histograms, which is enough to test a placement. To forecast
// others the search replays arrivals: those the brokers are asked for while the
// fit lasts (recording). A topic whose brokers do not say them is fitted all the
// same, one broker more at a time.
//
// The paper's search keeps publishers silent while it finds out how many a broker
// holds: they have no place then, and no part of the contract.
//
// A fit lives in memory. The next leader, or an operator who moves the topic
// meanwhile, ends it with the placement as it is; publishers without a place are
// given one by the caller.

// fit is a topic's search.
type fit struct {
	search Search  // nil: waiting for traffic, or over
	rate   float64 // of all publishers, msg/s
	setup  Setup
	epoch  uint64               // of the placement under test
	sum    observed             // of what was reported since the last look
	from   time.Time            // intervals that began earlier do not count
	unread time.Time            // since when a broker has no subscriber; zero: all have
	seen   map[string]time.Time // the newest report that counted, by broker
	record *recording           // nil: none is wanted
	next   *Action              // what the search wants, once nothing else is done about the topic
	moving bool
	again  int // how often a search was begun anew, since its plan could not be had
	done   bool
	step   string
	there  time.Time // when the search had all it needs last
	retry  time.Time // of one that is done: when the topic is fitted anew; zero: it is not

	trials   []Trial   // oldest first, at most maxTrials
	delivery Histogram // of what the last of them delivered; nil: nothing yet

	began, over time.Time // of the search; zero: not yet
	outcome     Outcome   // once it is done; without rounds if it was broken off
}

// running reports whether there is a search that is not over; nil has none.
func (f *fit) running() bool { return f != nil && (f.search != nil || f.moving) }

// records reports whether arrivals are being recorded for the fit.
func (f *fit) records() bool { return f != nil && f.record != nil }

// Status is how the fit of a topic stands.
type Status struct {
	Step          string // for people
	Ended, Fitted bool
	Began         bool
	Took          time.Duration // so far
	Rounds        []Rounds
	Trials        []Trial // the last maxTrials, oldest first
	// Waiting: it is not over, and may not have begun; Running: there is a search.
	Waiting, Running bool
}

// maxTrials is how many a fit remembers.
const maxTrials = 64

// Trial is a placement that a fit has had in force, and what was measured of it.
type Trial struct {
	Began  time.Time
	Quotas []placement.Quota
	// As in Action, of the last one with this plan; Verdict is empty while it goes on.
	Forecast, Confidence float64
	Verdict              string
	// Access delay included; the quantile is the SLO's, of all brokers together.
	Delivered, Exceeded uint64
	Quantile            time.Duration
}

// tried keeps what a search does for Status.
func (f *fit) tried(a Action, now time.Time) {
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
	f.trials = append(slices.Clone(f.trials[max(0, n-maxTrials+1):]), Trial{Began: now, Quotas: a.Plan.Quotas, Forecast: a.Forecast, Confidence: a.Confidence})
	f.delivery = nil
}

// measured adds what was observed to the trial. Requires: one goes on, and quantile is the
// SLO's.
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

// Status returns the zero Status for a topic that is not fitted.
func (t *Tuner) Status(topic string, now time.Time) Status {
	f := t.fits[topic]
	if f == nil {
		return Status{}
	}
	ended := f.done && !f.moving // to what it ended with
	s := Status{Step: f.step, Ended: ended, Fitted: ended && f.outcome.Fitted, Rounds: f.outcome.Rounds, Trials: slices.Clone(f.trials), Waiting: !f.done, Running: f.running()}
	if f.done {
		now = f.over
	}
	if !f.began.IsZero() {
		s.Began, s.Took = true, now.Sub(f.began)
	}
	return s
}

// Searches is how many topics are measured.
func (t *Tuner) Searches() (n int) {
	// order: they are counted
	for _, f := range t.fits {
		if f.search != nil {
			n++
		}
	}
	return n
}

const (
	// fitSettle is how long publishers may take to move before measurements count, or
	// an interval of reports if that is less.
	fitSettle = time.Second
	// fitDrain bounds how long a broker without subscribers has to drain what it has
	// gathered, once it has one: as long as it had none.
	fitDrain = 10 * time.Second
	// fitTraffic is how much of its publishers' rates a topic has to offer before it is
	// measured: until they are connected, latencies are those of connecting.
	fitTraffic = 0.8
	// fitStall is how long a broker's host may stall without a fit taking its lateness
	// for independent messages'.
	fitStall = 100 * time.Millisecond
	// In intervals of reports: for how long a fit goes on without the traffic or the
	// subscribers that it began with, and when one that found no placement is made again.
	fitGone  = 30
	fitRetry = 600
	// fitAgain is how often a search is begun anew with the brokers as they are then,
	// because one that it chose was gone or had no room any more.
	fitAgain = 5
	// keptArrivals bounds how many arrivals a search keeps: less of a large topic.
	keptArrivals = 500_000
	// roundGrace is how long after a round a broker's last report of it is waited for.
	roundGrace = 5 * time.Second
)

// Begin begins to fit a new topic.
func (t *Tuner) Begin(topic string, d placement.Demand, now time.Time) []Effect {
	if t.cfg.Mode == "" || len(d.Publishers) == 0 && len(d.Groups) == 0 {
		return nil
	}
	if old := t.fits[topic]; old != nil {
		t.end(topic, old, Broken, "the topic is gone", now)
	}
	f := &fit{step: "waiting for publishers"}
	for _, p := range d.Expand() {
		f.rate += p.Rate
	}
	t.fits[topic] = f
	return t.flush()
}

// fit moves a fit on.
func (t *Tuner) fit(topic Topic, f *fit, now time.Time) *Proposal {
	idle := !f.moving && !topic.Changing
	switch {
	case f.done:
		if idle && !f.retry.IsZero() && !now.Before(f.retry) {
			t.do(t.Begin(topic.Name, topic.Demand, now)...)
		}
		return nil
	case f.search != nil && idle && topic.Epoch != f.epoch:
		t.end(topic.Name, f, Broken, "another placement came between", now)
		return nil
	}
	ready := f.search != nil || !topic.Over && topic.offered() >= fitTraffic*f.rate && !t.unread(topic, f, now)
	if f.search != nil && idle {
		if why := t.brokenOff(topic, f, now); why != "" {
			t.end(topic.Name, f, Broken, why, now)
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
		t.follow(topic, f, now)
		return nil
	case !ready:
		return nil
	case f.search == nil:
		if !t.beginSearch(topic, f, now) {
			return nil
		}
	case t.unread(topic, f, now):
		if f.record != nil {
			f.record.trace.Skip(wall(now)) // it is not taken meanwhile, however long
		}
		return nil
	case t.observe(topic, f, now):
		observed = f.take()
	default:
		return nil
	}
	return &Proposal{Topic: topic.Name, f: f, search: f.search, observed: observed}
}

// record asks the brokers that the topic's publishers send to, or may soon, for arrivals.
func (t *Tuner) record(topic Topic, f *fit, now time.Time) {
	if f.record == nil {
		f.record = newRecording(topic, now)
	}
	t.ask(f.record, topic, topic.Holders(), now)
	if f.search == nil {
		f.record.trace.Skip(wall(now)) // it is not taken yet
	}
}

// end ends a fit that is not over yet, and keeps of it what is asked for later: how it
// ended.
func (t *Tuner) end(topic string, f *fit, how, step string, now time.Time) {
	if f.done {
		return
	}
	f.done, f.step, f.over = true, step, now
	if !f.began.IsZero() {
		t.do(Ended{topic, how, now.Sub(f.began)})
	}
	if f.record != nil {
		t.stop(f.record, topic)
		t.do(Recorded{f.record.trace.Counts()})
	}
	if n := len(f.trials); n > 0 && f.trials[n-1].Verdict == "" {
		f.trials[n-1].Verdict = "ended: " + step
	}
	f.record, f.search, f.next, f.setup, f.sum, f.seen, f.delivery = nil, nil, nil, Setup{}, observed{}, nil, nil
}

// brokenOff says what the search lacks, if that has lasted: nothing is measured then,
// or what will not be so. Requires: there is a search.
func (t *Tuner) brokenOff(topic Topic, f *fit, now time.Time) string {
	// In the paper's way publishers are silenced.
	minimum := fitTraffic * f.rate
	if t.cfg.Mode == ModePaper {
		minimum = 0
	}
	offered := topic.offered()
	quiet := offered < minimum || offered == 0
	if !topic.Over && !quiet && f.unread.IsZero() {
		f.there = now
	}
	switch {
	case topic.Over:
		return "the topic offers more than its contract"
	case now.Sub(f.there) < fitGone*t.cfg.Report:
		return ""
	case quiet:
		return "the publishers have gone"
	default:
		return "the subscribers have gone"
	}
}

// unread reports whether measurements would be of subscribers that have not come: they
// look for a topic's brokers from time to time only.
func (t *Tuner) unread(topic Topic, f *fit, now time.Time) bool {
	var without []string
	for _, q := range topic.Start.Quotas {
		reports := topic.Reports(q.Broker)
		if n := len(reports); n == 0 || reports[n-1].Subscribers == 0 {
			without = append(without, q.Broker)
		}
	}
	switch {
	case len(without) == 0 && f.unread.IsZero():
		return false
	case len(without) == 0:
		f.measureFrom(f.epoch, now.Add(max(t.settle(), min(now.Sub(f.unread), fitDrain))))
		f.unread = time.Time{}
		return false
	case f.unread.IsZero():
		f.unread = now
	}
	f.step = "waiting for subscribers on " + strings.Join(without, ", ")
	return true
}

func (t *Tuner) settle() time.Duration { return min(fitSettle, t.cfg.Report) }

// offered is the rate, in msg/s, of the newest reports, or of all that are kept where
// that is more: publishers may send more rarely than brokers report.
func (topic Topic) offered() float64 {
	newest, window := 0.0, 0.0
	for _, q := range topic.Start.Quotas {
		all, last := Report{}, Report{}
		for _, r := range topic.Reports(q.Broker) {
			all.Offered, all.Took, last = all.Offered+r.Offered, all.Took+r.Took, r
		}
		if all.Took > 0 {
			window += all.perSecond()
			newest += last.perSecond()
		}
	}
	return max(newest, window)
}

// beginSearch makes the search of a topic whose publishers send, once its brokers
// record, and reports whether it has.
func (t *Tuner) beginSearch(topic Topic, f *fit, now time.Time) bool {
	if r := f.record; r != nil && now.Sub(r.began) < recordPatience && !r.begun(topic) {
		return false // they may still begin to speak
	}
	f.setup = topic.Setup
	f.setup.Brokers = topic.Free()
	rng := rand.New(rand.NewPCG(t.cfg.Seed, topic.Epoch))
	var err error
	if t.cfg.Mode == ModePaper {
		f.search, err = NewPaper(f.setup, t.cfg.Round, rng)
	} else {
		cfg := FastConfig{Stall: fitStall, Step: t.cfg.Report, Capture: time.Second, Absorbed: map[string]Absorption{}}
		cfg.Keep = min(30*time.Second, max(cfg.Capture, time.Duration(keptArrivals/f.rate*float64(time.Second))))
		for _, b := range f.setup.Brokers {
			cfg.Absorbed[b.ID] = topic.Absorbed(b.ID)
		}
		f.search, err = NewFast(f.setup, cfg, rng)
	}
	if err != nil {
		f.search = nil
		t.end(topic.Name, f, Broken, err.Error(), now)
		return false
	}
	if f.began.IsZero() {
		f.began = now
	}
	f.there = now
	if f.record != nil {
		f.record.trace.Skip(wall(now)) // of while they connected
	}
	from := now
	if f.from.After(now) { // subscribers have just come
		from = f.from
	}
	f.measureFrom(topic.Epoch, from)
	return true
}

// follow does what the search wants next. Requires: nothing else is done about the topic.
func (t *Tuner) follow(topic Topic, f *fit, now time.Time) {
	a := *f.next
	f.next = nil
	f.tried(a, now)
	if a.Step != f.step {
		f.step = a.Step
		t.do(Note{Topic: topic.Name, Text: "fitting", Args: []any{"step", a.Step}, Level: levelDebug})
	}
	stays := samePlan(a.Plan, topic.Start) || len(a.Plan.Quotas) == 0
	if a.Final {
		t.do(Note{Topic: topic.Name, Text: "topic fitted", Level: levelInfo, Args: []any{
			"kept", a.Outcome.Fitted, "reason", a.Outcome.Reason, "brokers", a.Plan.K, "duration", now.Sub(f.began),
		}})
		f.outcome = a.Outcome
		for _, id := range slices.Sorted(maps.Keys(f.outcome.Absorbed)) {
			t.do(Learned{id, f.setup.Latency, f.outcome.Absorbed[id]})
		}
		how := Missed
		if a.Outcome.Fitted {
			how = Kept
		}
		t.end(topic.Name, f, how, a.Outcome.Reason, now)
		if !a.Outcome.Fitted {
			f.retry = now.Add(fitRetry * t.cfg.Report)
		}
		if stays || len(a.Plan.Unplaced) > 0 {
			return // who has no place gets one from the caller
		}
	}
	if stays {
		if a.Changed && f.from.Before(now) {
			f.measureFrom(topic.Epoch, now)
		}
		return
	}
	f.moving = true
	t.do(Relocate{topic.Name, a.Plan})
}

// Moved answers Relocate, with the topic as it is then. Anew: the plan could not be had,
// and another one may be.
func (t *Tuner) Moved(topic Topic, err error, anew bool, now time.Time) []Effect {
	f := t.fits[topic.Name]
	if f == nil || !f.moving {
		return nil
	}
	f.moving = false
	switch {
	case err != nil && anew && !f.done && f.again < fitAgain:
		f.again++
		f.search, f.step = nil, "begins anew: "+err.Error()
		t.do(Note{Topic: topic.Name, Text: "fitting begins anew", Args: []any{"error", err}, Level: levelInfo})
	case err != nil:
		f.outcome.Fitted, f.step = false, "not moved: "+err.Error()
		t.end(topic.Name, f, Broken, f.step, now)
	case !f.done:
		f.measureFrom(topic.Epoch, now.Add(t.settle()))
		if f.record != nil {
			t.record(topic, f, now) // at once, on those that are new
		}
	}
	return t.flush()
}

// samePlan: the same publishers at the same brokers.
func samePlan(a, b placement.Plan) bool {
	return slices.Equal(a.Unplaced, b.Unplaced) && slices.EqualFunc(a.Quotas, b.Quotas, func(p, q placement.Quota) bool {
		return p.Broker == q.Broker && slices.Equal(p.Publishers, q.Publishers)
	})
}

func (f *fit) measureFrom(epoch uint64, from time.Time) {
	f.epoch, f.from, f.seen = epoch, from, map[string]time.Time{}
	f.sum = observed{parts: make([]part, len(f.setup.Brokers))}
}

// observed is what was reported of a topic since a search was told last.
type observed struct {
	any                bool
	processing, access Histogram
	arrivals           []Arrival
	parts              []part // by broker of the setup
}

// part is what one broker delivered.
type part struct {
	slices              []Slice
	delivered, exceeded uint64
	delivery            Histogram
}

// observe gathers the reports since the last time, and reports whether it is time to tell
// the search: after a round, or where there are none, with every report.
func (t *Tuner) observe(topic Topic, f *fit, now time.Time) bool {
	r := f.record
	if r != nil {
		f.sum.arrivals = append(f.sum.arrivals, r.trace.Take(wall(now))...)
	}
	over := f.from
	if t.cfg.Mode == ModePaper {
		over = over.Add(t.cfg.Round)
	}
	all := true // brokers have reported all of the round
	for _, q := range topic.Start.Quotas {
		l := slices.IndexFunc(f.setup.Brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		if l < 0 {
			all = false
			continue
		}
		for _, r := range topic.Reports(q.Broker) {
			if r.At.After(f.seen[q.Broker]) && !r.At.Add(-r.Took).Before(f.from) {
				f.seen[q.Broker] = r.At
				f.sum.add(l, r, f.setup.Latency)
			}
		}
		all = all && !f.seen[q.Broker].Before(over)
	}
	if t.cfg.Mode == ModePaper {
		return f.sum.any && (all || now.Sub(over) > roundGrace)
	}
	// A search that has no arrivals takes it that there are none, unless some are to be
	// expected.
	return f.sum.any && (len(f.sum.arrivals) > 0 || r == nil || r.told || !r.begun(topic) || now.Sub(f.began) > recordPatience)
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
	o.any = true
}

// take returns what was gathered, which is something, and begins anew.
func (f *fit) take() Observation {
	s := f.sum
	f.sum = observed{parts: make([]part, len(f.setup.Brokers))}
	o := Observation{Arrivals: s.arrivals, Unloaded: s.processing.Quantile(0.1)}
	o.Access = Slice{Delivered: uint64(s.access.Count()), Late: uint64(s.access.CountAbove(longestWait(f.setup.Latency, o.Unloaded)))}
	for l, p := range s.parts {
		one := Part{Count: Count{Part: f.setup.Brokers[l].ID, Delivered: p.delivered, Exceeded: p.exceeded}}
		if p.delivery != nil {
			one.Quantile = p.delivery.Quantile(f.setup.Quantile)
		}
		o.Parts, o.Slices = append(o.Parts, one), append(o.Slices, p.slices)
	}
	f.measured(s, f.setup.Quantile)
	if f.record != nil {
		f.record.told = f.record.told || len(s.arrivals) > 0
	}
	return o
}
