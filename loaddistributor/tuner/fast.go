package tuner

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// FastConfig are the knobs of Fast; zeros mean the defaults.
type FastConfig struct {
	// Alpha is the error of the tests of processing delays, all placements together;
	// 0.1.
	Alpha float64
	// Stall is how long a host may stall, in which what arrives is late together; 0:
	// it does not. No test can tell sooner than after ln(1/Alpha)/budget times that.
	Stall time.Duration
	// Step is how long to observe between two looks; 100 ms. Settle is how long to
	// wait after a change; 100 ms.
	Step, Settle time.Duration
	// Capture is how much of the arrivals has to be there before a forecast, 1 s:
	// with less, publishers that have not sent yet are not in it. Keep is how much is kept,
	// the latest; 30 s.
	Capture, Keep time.Duration
	// Aim is how long a test may take by the forecast for its number of brokers to
	// be tried; 8 s. Cap is how long one placement is tested at the most; 1 min.
	// Where nothing is late and the test takes longer than that, they are as much
	// longer. The nearer a placement is to the budget, the longer it takes to be
	// sure of: with more time, topics are fitted on fewer brokers.
	Aim, Cap time.Duration
	// Absorbed is what earlier fits have learned, by broker: see Outcome.
	Absorbed map[string]Absorption
}

func (c *FastConfig) fill() {
	c.Alpha = cmp.Or(c.Alpha, 0.1)
	c.Step, c.Settle = cmp.Or(c.Step, 100*time.Millisecond), cmp.Or(c.Settle, 100*time.Millisecond)
	c.Capture, c.Keep = cmp.Or(c.Capture, time.Second), cmp.Or(c.Keep, 30*time.Second)
	c.Cap = cmp.Or(c.Cap, time.Minute)
	c.Aim = cmp.Or(c.Aim, min(8*time.Second, c.Cap))
}

// Fast searches over the number of brokers. It places the topic on the fewest that
// its rate, and what is known of the brokers, allows, and captures arrivals, while
// all publishers send. What the brokers absorb is learned from how much was late, and
// every number of brokers is forecast by replay of the captured arrivals. The
// smallest promising one is put in force and tested, all brokers at once; if the
// test does not find the budget kept, it is learned and forecast anew for more.
//
// Access delay is not tested but replayed: it is a function of arrivals and
// shares. Its part of the budget is set aside before the test, and checked with
// all that was captured after it. Processing delays are tested with Sequential, with an
// error of Alpha over all placements that are tried. Its guarantee is for what is left of
// the budget, and for arrivals like the captured ones:
// there have to be a few seconds of them, and where these differ, so many that the
// mean is within the budget by some standard errors.
type Fast struct {
	setup      Setup
	config     FastConfig
	rng        *rand.Rand
	publishers []placement.Publisher
	rate       float64 // of them all, msg/s
	declared   int     // the most messages that send together, by the demand

	trace    recorded
	absorbed []Absorption
	recalled []bool // absorbed is of an earlier fit, by broker
	unloaded time.Duration

	// Of the placement in force.
	plan      placement.Plan
	where     []int
	watched   time.Duration
	counts    []Slice     // by broker
	measured  Slice       // access, where there are no arrivals
	test      *Sequential // nil: arrivals are captured
	allowance float64     // of the budget, for access
	predicted float64     // what part would be late; below 0: it was not forecast

	tried   []trial
	rounds  []Rounds
	outcome *Outcome
}

// trial is a placement that was not found to keep the SLO.
type trial struct {
	plan     placement.Plan
	late     float64 // processing and access
	decision Decision
}

// NewFast returns the search; rng is for policies that place blindly.
func NewFast(setup Setup, config FastConfig, rng *rand.Rand) (*Fast, error) {
	if err := setup.Validate(); err != nil {
		return nil, err
	}
	config.fill()
	if !(config.Alpha > 0 && config.Alpha < 1) || config.Stall < 0 || config.Step < 0 || config.Settle < 0 || config.Capture < 0 || config.Keep < config.Capture || config.Aim < 0 || config.Cap < config.Aim {
		return nil, fmt.Errorf("fast: %+v", config)
	}
	f := &Fast{setup: setup, config: config, rng: rng, publishers: setup.Demand.Expand()}
	f.absorbed, f.recalled = make([]Absorption, len(setup.Brokers)), make([]bool, len(setup.Brokers))
	for l, b := range setup.Brokers {
		f.absorbed[l] = config.Absorbed[b.ID]
		f.recalled[l] = f.absorbed[l].Burst > 0
	}
	f.declared = together(f.publishers)
	for _, p := range f.publishers {
		f.rate += p.Rate
	}
	return f, nil
}

// together is how many messages the largest group sends at once, as declared.
func together(publishers []placement.Publisher) int {
	most := 1
	byKey := map[string]int{}
	for _, p := range publishers {
		n := max(1, p.Batch)
		if p.Key != "" {
			byKey[p.Key] += n
			n = byKey[p.Key]
		}
		most = max(most, n)
	}
	return most
}

// Next implements Search.
func (f *Fast) Next(o Observation) Action {
	switch {
	case f.outcome != nil:
		return f.final()
	case f.where == nil:
		return f.start()
	}
	f.observe(o)
	if f.test == nil {
		if !f.captured() {
			return f.measure(false)
		}
		f.learn()
		a := f.choose(max(1, f.setup.Demand.AtLeast))
		if a.Changed {
			a.Verdict = "not tested: another is better by the forecast"
		}
		return a
	}
	verdict := "not shown to be kept"
	switch f.test.Decision() {
	case Undecided:
		return f.measure(false)
	case Within:
		late, _ := f.test.Fraction()
		now := f.forecast(f.plan, f.where)
		access := f.access(now)
		if access > f.allowance || !f.parts() {
			verdict = "missed: on one broker"
			if access > f.allowance {
				verdict = "missed: waiting for tokens"
			}
			break
		}
		if f.typical(now, late+access) {
			return f.end(Outcome{Fitted: true, Reason: kept(1-f.config.Alpha, late, access)})
		}
		if f.watched < f.config.Cap {
			return f.measure(false)
		}
	case Beyond:
		verdict = "missed"
	}
	late, _ := f.test.Fraction()
	f.tried = append(f.tried, trial{f.plan, late + f.access(f.forecast(f.plan, f.where)), f.test.Decision()})
	lowest := f.plan.K + 1
	if f.learn() {
		lowest-- // it was held up to a forecast that was wrong from the outset
	}
	a := f.choose(lowest)
	a.Verdict = verdict
	return a
}

// start puts the first placement in force, of which nothing is forecast. One that is
// in force stays until it was measured, whatever is known of the brokers: that was
// learned with other publishers and consumers.
func (f *Fast) start() Action {
	if start := f.setup.Start; start.K > 0 && start.K >= f.setup.Demand.AtLeast {
		return f.adopt(candidate{plan: f.setup.Start, where: f.setup.whereOf(f.setup.Start, len(f.publishers))})
	}
	k := f.guess()
	c, err := f.candidate(k)
	if err != nil && k > 1 {
		c, err = f.candidate(f.setup.Demand.AtLeast)
	}
	if err == nil {
		return f.adopt(c)
	}
	var infeasible *placement.Infeasible
	if errors.As(err, &infeasible) {
		return f.end(Outcome{Infeasible: infeasible, Reason: infeasible.Error()})
	}
	return f.end(Outcome{Reason: err.Error()})
}

// guess is the number of brokers to begin with: as few as can, or what the largest
// burst needs of those that are known.
func (f *Fast) guess() int {
	k := max(1, f.setup.Demand.AtLeast)
	var known []int64
	for _, a := range f.absorbed {
		if a.Burst > 0 {
			known = append(known, a.Burst)
		}
	}
	if len(known) > 0 {
		slices.Sort(known)
		typical := (1 - 2*soft) * float64(known[len(known)/2]) // groups meet at times
		k = max(k, int(math.Ceil(float64(f.declared)/typical)))
	}
	return min(k, len(f.setup.Brokers))
}

// captured reports whether there are arrivals for a forecast, or none are to be
// expected.
func (f *Fast) captured() bool {
	n := len(f.trace.arrivals)
	if n == 0 {
		return f.watched >= 2*f.config.Capture
	}
	// Steps are whole: what is between the last arrival and now counts.
	return f.trace.arrivals[n-1].At.Sub(f.trace.arrivals[0].At)+f.config.Step >= f.config.Capture
}

// observe takes what was measured.
func (f *Fast) observe(o Observation) {
	f.watched += f.config.Step
	f.trace.arrivals = append(f.trace.arrivals, o.Arrivals...)
	if n := len(f.trace.arrivals); n > 0 {
		from := f.trace.arrivals[n-1].At.Add(-f.config.Keep)
		old, _ := slices.BinarySearchFunc(f.trace.arrivals, from, func(a Arrival, at mono.Time) int { return cmp.Compare(a.At, at) })
		if old > n/2 {
			f.trace.arrivals = slices.Delete(f.trace.arrivals, 0, old)
		}
	}
	if o.Unloaded > 0 && (f.unloaded == 0 || o.Unloaded < f.unloaded) {
		f.unloaded = o.Unloaded
	}
	f.measured.Delivered += o.Access.Delivered
	f.measured.Late += o.Access.Late
	var all Slice
	for l, slices := range o.Slices {
		for _, s := range slices {
			f.counts[l].add(s)
			all.add(s)
		}
	}
	if f.test != nil {
		f.test.Add(float64(all.Delivered), float64(all.Late))
	}
}

func (s *Slice) add(o Slice) {
	s.Delivered += o.Delivered
	s.Late += o.Late
	s.HalfLate += o.HalfLate
}

// parts reports whether no broker by itself is far beyond the budget; see Judge.
func (f *Fast) parts() bool {
	for _, s := range f.counts {
		if float64(s.Late) > PartFactor*f.setup.budget()*(1+tolerance)*float64(s.Delivered) {
			return false
		}
	}
	return true
}

// seen is the fraction that processing made late under the plan in force.
func (f *Fast) seen() float64 {
	var all Slice
	for _, s := range f.counts {
		all.add(s)
	}
	return float64(all.Late) / max(1, float64(all.Delivered))
}

// learn takes from what was late what brokers absorb, and reports whether one does
// more than an earlier fit said.
func (f *Fast) learn() (more bool) {
	for l, s := range f.counts {
		n := float64(s.Delivered)
		if n == 0 {
			continue
		}
		known := f.absorbed[l]
		a := f.trace.learn(f.setup, f.where, l, float64(s.Late)/n, float64(s.HalfLate)/n)
		if a.Burst == 0 && s.Late == 0 && f.recalled[l] {
			a = f.trace.absorbed(known, f.where, l)
		}
		if a.Burst > 0 {
			more = more || f.recalled[l] && a.Burst > known.Burst
			f.absorbed[l], f.recalled[l] = a, false
		}
	}
	return more
}

// candidate is a placement that could be tried.
type candidate struct {
	plan     placement.Plan
	where    []int
	forecast forecast
}

func (f *Fast) candidate(k int) (candidate, error) {
	d := f.setup.Demand
	d.AtLeast = k
	plan, err := placement.Place(f.setup.Policy, f.setup.Brokers, d, f.rng)
	if err != nil {
		return candidate{}, err
	}
	where := f.setup.whereOf(plan, len(f.publishers))
	return candidate{plan, where, f.forecast(plan, where)}, nil
}

func (f *Fast) forecast(plan placement.Plan, where []int) forecast {
	return f.trace.replay(f.setup, plan, where, f.assumed(), f.unloaded)
}

// assumed is what each broker absorbs as far as is known; those of which nothing is
// known are taken to absorb what the others do in the mean.
func (f *Fast) assumed() []Absorption {
	var sum Absorption
	known := int64(0)
	for _, a := range f.absorbed {
		if a.Burst > 0 {
			sum.Rate += a.Rate
			sum.Burst += a.Burst
			known++
		}
	}
	all := slices.Clone(f.absorbed)
	for l, a := range all {
		if a.Burst == 0 && known > 0 {
			all[l] = Absorption{max(1, sum.Rate/tokenbucket.Rate(known)), max(1, sum.Burst/known)}
		}
	}
	return all
}

// Parts of the budget: minPart is set aside for access delays in any case, maxPart is
// what they may take.
const (
	minPart = 0.01
	maxPart = 0.5
)

// A placement that is not in force is taken to have caution of the budget more late
// than forecast; of one that is, lenience of what was seen counts: leaving it takes
// more than a second of bad luck.
const (
	caution  = 0.1
	lenience = 0.9
)

// testOf returns the test of a candidate, the part of the budget that it sets aside
// for access, and whether it is promising: by the forecast it would be done in time.
func (f *Fast) testOf(c candidate) (t *Sequential, allowance float64, promising bool) {
	budget := f.setup.budget()
	allowance = min(maxPart*budget, max(minPart*budget, 1.5*c.forecast.access))
	aim, late := f.config.Aim, c.forecast.processing+caution*budget
	if c.plan.K == f.plan.K {
		// It is in force: whatever can be shown, by what was seen of it.
		aim, late = f.config.Cap, lenience*f.seen()
	}
	// The search ends with the first that is found kept: half of what is left of its
	// error goes to each test.
	alpha := f.config.Alpha / math.Exp2(float64(len(f.tried)+1))
	messages := func(d time.Duration, minimum float64) float64 { return max(f.rate*d.Seconds(), minimum) }
	burst := f.declared
	if len(f.trace.arrivals) > 0 {
		burst = min(burst, f.trace.together(f.setup.Latency, c.where, len(f.setup.Brokers)))
	}
	// Brokers may share a host, and then stall together.
	burst = max(burst, int(math.Ceil(f.rate*f.config.Stall.Seconds())))
	s := NewSequential(budget-allowance, alpha, burst, 0)
	s.most = messages(f.config.Cap, 4*s.Needs(0))
	return s, allowance, s.Needs(late) <= messages(aim, 1.5*s.Needs(0))
}

// adopt puts a candidate in force, to capture arrivals.
func (f *Fast) adopt(c candidate) Action {
	f.plan, f.where = c.plan, c.where
	f.watched, f.counts, f.measured, f.test = 0, make([]Slice, len(f.setup.Brokers)), Slice{}, nil
	f.predicted = -1
	f.rounds = append(f.rounds, Rounds{K: c.plan.K, Rounds: 1})
	return f.measure(true)
}

// begin begins the test of a candidate, which it puts in force if it is not.
func (f *Fast) begin(c candidate) Action {
	t, allowance, _ := f.testOf(c)
	stays := c.plan.K == f.plan.K
	if stays {
		for _, n := range f.counts { // its guarantee holds for what was captured as well
			t.Add(float64(n.Delivered), float64(n.Late))
		}
	}
	var a Action
	if stays {
		a = f.measure(false)
	} else {
		a = f.adopt(c)
	}
	f.test, f.allowance, f.predicted = t, allowance, c.forecast.late()
	a.Forecast, a.Confidence = f.predicted, 1-t.alpha
	return a
}

func (f *Fast) measure(changed bool) Action {
	a := Action{Plan: f.plan, Changed: changed, Measure: f.config.Step, Forecast: f.predicted}
	if changed {
		a.Settle = f.config.Settle
	}
	a.Step = fmt.Sprintf("%d brokers: capturing arrivals", f.plan.K)
	if f.test != nil {
		late, n := f.test.Fraction()
		a.Confidence = 1 - f.test.alpha
		a.Step = fmt.Sprintf("%d brokers: %s of %.0f messages late in processing", f.plan.K, Percent(late), n)
	}
	return a
}

// choose begins to test the smallest promising number of brokers, which is lowest or
// more, or else the one with the best forecast.
func (f *Fast) choose(lowest int) Action {
	if len(f.trace.arrivals) == 0 && len(f.tried) > 0 && f.access(forecast{}) > maxPart*f.setup.budget() {
		return f.give() // splitting further delays no less
	}
	var best *candidate
	for k := lowest; k <= len(f.setup.Brokers); k++ {
		c, err := f.candidate(k)
		if err != nil {
			break
		}
		if c.plan.K == f.plan.K {
			c = candidate{f.plan, f.where, f.forecast(f.plan, f.where)}
		}
		if c.forecast.access > maxPart*f.setup.budget() {
			continue
		}
		if _, _, promising := f.testOf(c); promising {
			return f.begin(c)
		}
		if best == nil || c.forecast.late() < best.forecast.late() {
			best = &c
		}
	}
	if best != nil {
		return f.begin(*best)
	}
	return f.give()
}

// access is the fraction that tokens made late so far, under the plan in force and
// its forecast.
func (f *Fast) access(now forecast) float64 {
	if len(f.trace.arrivals) == 0 {
		return float64(f.measured.Late) / max(1, float64(f.measured.Delivered))
	}
	return now.access
}

// What arrivals have to be for those to come to be like them: so many seconds, and
// so many standard errors, by how they differ, within the budget.
const (
	typicalSeconds = 3
	typicalErrors  = 1.3
)

// typical reports whether arrivals are known for long enough to say that a fraction
// late is within the budget.
func (f *Fast) typical(now forecast, late float64) bool {
	if len(f.trace.arrivals) == 0 {
		return true
	}
	return now.seconds >= typicalSeconds && late+typicalErrors*now.deviation <= f.setup.budget()
}

// give ends without a placement that keeps the SLO: with the best that was tried.
func (f *Fast) give() Action {
	if len(f.tried) == 0 {
		f.tried = append(f.tried, trial{plan: f.plan, late: f.forecast(f.plan, f.where).late()})
	}
	best := f.tried[0]
	for _, t := range f.tried[1:] {
		if t.late < best.late {
			best = t
		}
	}
	cause := "the brokers' processing"
	if f.access(f.forecast(f.plan, f.where)) > maxPart*f.setup.budget() {
		cause = "the contract's token bucket"
	}
	f.plan = best.plan
	f.where = f.setup.whereOf(best.plan, len(f.publishers))
	return f.end(Outcome{Reason: fmt.Sprintf("no number of brokers was shown to keep the SLO; the best, %d, has %s late, mostly by %s (%s)", best.plan.K, Percent(best.late), cause, best.decision)})
}

func (f *Fast) end(o Outcome) Action {
	o.Rounds = f.rounds
	o.Absorbed = map[string]Absorption{}
	for l, a := range f.absorbed {
		if a.Burst > 0 {
			o.Absorbed[f.setup.Brokers[l].ID] = a
		}
	}
	f.outcome = &o
	return f.final()
}

func (f *Fast) final() Action {
	return Action{Plan: f.plan, Step: f.outcome.Reason, Changed: true, Final: true, Outcome: *f.outcome}
}

// kept says that the SLO is, with what confidence, and what fractions were late.
func kept(confidence, processing, access float64) string {
	late := "nothing late"
	if processing > 0 || access > 0 {
		late = fmt.Sprintf("%s late in processing, %s waiting for tokens", Percent(processing), Percent(access))
	}
	return fmt.Sprintf("SLO kept (%g %% confidence), %s", 100*confidence, late)
}
