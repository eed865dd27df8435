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
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// FastConfig configures Fast. Zero fields select the defaults.
type FastConfig struct {
	// Alpha is the total error of the processing delay tests over all placements; 0.1.
	Alpha float64
	// Stall is the longest stall of a host, which makes all messages of the stall late
	// together; 0: none. No test can decide before ln(1/Alpha)/budget times Stall.
	Stall time.Duration
	// Step is the time between two looks; 100 ms. Settle is the wait after a change; 100
	// ms.
	Step, Settle time.Duration
	// Capture is the minimum length of arrivals before a forecast, 1 s. With less,
	// publishers without a message yet would be missing. Keep is the length of arrivals
	// kept, the latest; 30 s.
	Capture, Keep time.Duration
	// Aim is the maximum forecast duration of a test for its number of brokers to be
	// tried; 8 s. Cap is the maximum duration of one test; 1 min. If a test without late
	// messages takes longer than Aim, both grow accordingly. A placement near the budget
	// takes longer to confirm, so larger values fit topics on fewer brokers.
	Aim, Cap time.Duration
	// Absorbed holds the results of earlier fits by broker; see Outcome.
	Absorbed map[string]Absorption
}

func (c *FastConfig) fill() {
	c.Alpha = cmp.Or(c.Alpha, 0.1)
	c.Step, c.Settle = cmp.Or(c.Step, 100*time.Millisecond), cmp.Or(c.Settle, 100*time.Millisecond)
	c.Capture, c.Keep = cmp.Or(c.Capture, time.Second), cmp.Or(c.Keep, 30*time.Second)
	c.Cap = cmp.Or(c.Cap, time.Minute)
	c.Aim = cmp.Or(c.Aim, min(8*time.Second, c.Cap))
}

// Fast searches over the number of brokers. It first places the topic on the fewest
// brokers that the rate and the known brokers allow, and captures arrivals while all
// publishers send. From the late fraction Fast learns what the brokers absorb. It
// forecasts every number of brokers by replay of the captured arrivals. It puts the
// smallest promising number in force and tests all brokers at once. If the test does not
// find the budget kept, Fast learns from the test and forecasts larger numbers.
//
// Access delay is replayed and not tested, because it is a function of arrivals and
// shares. Fast reserves the access delay's part of the budget before the test, and checks
// this part with all captured arrivals after the test. Processing delays are tested with
// Sequential, with a total error of Alpha over all tried placements. The guarantee covers
// the rest of the budget and arrivals like the captured arrivals. The capture must last a
// few seconds. If the captured seconds differ, it must be long enough that the mean is
// below the budget by some standard errors.
type Fast struct {
	setup      Setup
	config     FastConfig
	rng        *rand.Rand
	publishers []placement.Publisher
	rate       float64 // of all publishers, msg/s
	declared   int     // the maximum number of messages sent together, by the demand

	trace    recorded
	absorbed []Absorption
	recalled []bool // by broker: absorbed is from an earlier fit
	unloaded time.Duration

	// For the placement in force.
	plan      placement.Plan
	brokerOf  []int
	watched   time.Duration
	counts    []Slice     // by broker
	measured  Slice       // access delays, if there are no arrivals
	test      *Sequential // nil: still capturing arrivals
	allowance float64     // reserved part of the budget for access delays
	predicted float64     // forecast late fraction; below 0: none

	trials  []trial
	rounds  []Rounds
	outcome *Outcome
}

// trial is a placement without proof that it keeps the SLO.
type trial struct {
	plan     placement.Plan
	late     float64 // processing and access
	decision Decision
}

// NewFast returns the search. rng serves policies that place at random.
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

// together returns the largest number of messages that one group sends at once, by
// declaration.
func together(publishers []placement.Publisher) int {
	largest := 1
	byKey := map[string]int{}
	for _, p := range publishers {
		n := max(1, p.Batch)
		if p.Key != "" {
			byKey[p.Key] += n
			n = byKey[p.Key]
		}
		largest = max(largest, n)
	}
	return largest
}

// Next implements Search.
func (f *Fast) Next(o Observation) Action {
	switch {
	case f.outcome != nil:
		return f.final()
	case f.brokerOf == nil:
		return f.start()
	}
	f.observe(o)
	if f.test == nil {
		if !f.captured() {
			return f.measure(false)
		}
		f.raiseAbsorption()
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
		now := f.forecast(f.plan, f.brokerOf)
		access := f.access(now)
		if access > f.allowance || !f.parts() {
			verdict = "missed: on one broker"
			if access > f.allowance {
				verdict = "missed: waiting for tokens"
			}
			break
		}
		if f.typical(now, late+access) {
			return f.end(Outcome{Fitted: true, Reason: keptVerdict(1-f.config.Alpha, late, access)})
		}
		if f.watched < f.config.Cap {
			return f.measure(false)
		}
	case Beyond:
		verdict = "missed"
	}
	late, _ := f.test.Fraction()
	f.trials = append(f.trials, trial{f.plan, late + f.access(f.forecast(f.plan, f.brokerOf)), f.test.Decision()})
	lowest := f.plan.K + 1
	if f.raiseAbsorption() {
		lowest-- // the forecast was wrong from the start
	}
	a := f.choose(lowest)
	a.Verdict = verdict
	return a
}

// start puts the first placement in force, without a forecast. A placement already in
// force stays until it has been measured, because knowledge of the brokers comes from
// other publishers and consumers.
func (f *Fast) start() Action {
	if start := f.setup.Start; start.K > 0 && start.K >= f.setup.Demand.AtLeast {
		return f.adopt(candidate{plan: f.setup.Start, brokerOf: f.setup.whereOf(f.setup.Start, len(f.publishers))})
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
		return f.end(Outcome{Infeasible: infeasible, Lacking: infeasible.Capacity(), Reason: infeasible.Error()})
	}
	return f.end(Outcome{Reason: err.Error()})
}

// guess returns the initial number of brokers: the minimum, or the number that the
// largest burst needs on typical known brokers.
func (f *Fast) guess() int {
	k := max(1, f.setup.Demand.AtLeast)
	var rates []int64
	for _, a := range f.absorbed {
		if a.Burst > 0 {
			rates = append(rates, a.Burst)
		}
	}
	if len(rates) > 0 {
		slices.Sort(rates)
		typical := (1 - 2*soft) * float64(rates[len(rates)/2]) // groups sometimes coincide
		k = max(k, int(math.Ceil(float64(f.declared)/typical)))
	}
	return min(k, len(f.setup.Brokers))
}

// captured reports whether there are enough arrivals for a forecast, or none are to be
// expected.
func (f *Fast) captured() bool {
	n := len(f.trace.arrivals)
	if n == 0 {
		return f.watched >= 2*f.config.Capture
	}
	// Steps are whole, so the time since the last arrival counts.
	return f.trace.arrivals[n-1].At.Sub(f.trace.arrivals[0].At)+f.config.Step >= f.config.Capture
}

// observe records the measurements.
func (f *Fast) observe(o Observation) {
	f.watched += f.config.Step
	f.trace.arrivals = append(f.trace.arrivals, o.Arrivals...)
	if n := len(f.trace.arrivals); n > 0 {
		start := f.trace.arrivals[n-1].At.Add(-f.config.Keep)
		old, _ := slices.BinarySearchFunc(f.trace.arrivals, start, func(a Arrival, at mono.Time) int { return cmp.Compare(a.At, at) })
		if old > n/2 {
			f.trace.arrivals = slices.Delete(f.trace.arrivals, 0, old)
		}
	}
	if o.Unloaded > 0 && (f.unloaded == 0 || o.Unloaded < f.unloaded) {
		f.unloaded = o.Unloaded
	}
	f.measured.Delivered += o.Access.Delivered
	f.measured.Late += o.Access.Late
	var processing Slice
	for l, slices := range o.Slices {
		for _, s := range slices {
			f.counts[l].add(s)
			processing.add(s)
		}
	}
	if f.test != nil {
		f.test.Add(float64(processing.Delivered), float64(processing.Late))
	}
}

func (s *Slice) add(o Slice) {
	s.Delivered += o.Delivered
	s.Late += o.Late
	s.HalfLate += o.HalfLate
}

// parts reports whether no single broker is far beyond the budget; see Judge.
func (f *Fast) parts() bool {
	for _, s := range f.counts {
		if float64(s.Late) > PartFactor*f.setup.budget()*(1+tolerance)*float64(s.Delivered) {
			return false
		}
	}
	return true
}

// lateFraction returns the fraction made late by processing under the plan in force.
func (f *Fast) lateFraction() float64 {
	var processing Slice
	for _, s := range f.counts {
		processing.add(s)
	}
	return float64(processing.Late) / max(1, float64(processing.Delivered))
}

// raiseAbsorption updates what brokers absorb from the late fractions. It reports whether a broker
// absorbs more than an earlier fit found.
func (f *Fast) raiseAbsorption() (raised bool) {
	for l, s := range f.counts {
		n := float64(s.Delivered)
		if n == 0 {
			continue
		}
		previous := f.absorbed[l]
		a := f.trace.absorption(f.setup, f.brokerOf, l, float64(s.Late)/n, float64(s.HalfLate)/n)
		if a.Burst == 0 && s.Late == 0 && f.recalled[l] {
			a = f.trace.raisedAbsorption(previous, f.brokerOf, l)
		}
		if a.Burst > 0 {
			raised = raised || f.recalled[l] && a.Burst > previous.Burst
			f.absorbed[l], f.recalled[l] = a, false
		}
	}
	return raised
}

// candidate is a placement to consider.
type candidate struct {
	plan     placement.Plan
	brokerOf []int
	forecast forecast
}

func (f *Fast) candidate(k int) (candidate, error) {
	d := f.setup.Demand
	d.AtLeast = k
	plan, err := placement.Place(f.setup.Policy, f.setup.Brokers, d, f.rng)
	if err != nil {
		return candidate{}, err
	}
	brokerOf := f.setup.whereOf(plan, len(f.publishers))
	return candidate{plan, brokerOf, f.forecast(plan, brokerOf)}, nil
}

func (f *Fast) forecast(plan placement.Plan, brokerOf []int) forecast {
	return f.trace.replay(f.setup, plan, brokerOf, f.assumed(), f.unloaded)
}

// assumed returns what each broker absorbs. Unknown brokers count with the mean of the
// known brokers.
func (f *Fast) assumed() []Absorption {
	var sum Absorption
	knownRate := int64(0)
	for _, a := range f.absorbed {
		if a.Burst > 0 {
			sum.Rate += a.Rate
			sum.Burst += a.Burst
			knownRate++
		}
	}
	all := slices.Clone(f.absorbed)
	for l, a := range all {
		if a.Burst == 0 && knownRate > 0 {
			all[l] = Absorption{max(1, sum.Rate/tokenbucket.Rate(knownRate)), max(1, sum.Burst/knownRate)}
		}
	}
	return all
}

// Parts of the budget: at least minPart and at most maxPart are reserved for access
// delays.
const (
	minPart = 0.01
	maxPart = 0.5
)

// caution and lenience favour the placement in force. Another placement counts with
// caution of the budget added to its forecast. The placement in force counts with
// lenience of the observed late fraction, so one second of bad luck does not end it.
const (
	caution  = 0.1
	lenience = 0.9
)

// testOf returns the test of a candidate and the part of the budget reserved for access
// delays. promising means that the test would, by the forecast, finish in time.
func (f *Fast) testOf(c candidate) (t *Sequential, allowance float64, promising bool) {
	budget := f.setup.budget()
	allowance = min(maxPart*budget, max(minPart*budget, 1.5*c.forecast.access))
	aim, late := f.config.Aim, c.forecast.processing+caution*budget
	if c.plan.K == f.plan.K {
		// In force: anything that can be shown, by the observed late fraction.
		aim, late = f.config.Cap, lenience*f.lateFraction()
	}
	// The search ends with the first placement that is found kept, so each test takes half
	// of the remaining error.
	alpha := f.config.Alpha / math.Exp2(float64(len(f.trials)+1))
	messages := func(d time.Duration, minimum float64) float64 { return max(f.rate*d.Seconds(), minimum) }
	burst := f.declared
	if len(f.trace.arrivals) > 0 {
		burst = min(burst, f.trace.coincidence(f.setup.Latency, c.brokerOf, len(f.setup.Brokers)))
	}
	// Brokers may share a host, and then stall together.
	burst = max(burst, int(math.Ceil(f.rate*f.config.Stall.Seconds())))
	s := NewSequential(budget-allowance, alpha, burst, 0)
	s.maxMessages = messages(f.config.Cap, 4*s.Needs(0))
	return s, allowance, s.Needs(late) <= messages(aim, 1.5*s.Needs(0))
}

// adopt puts a candidate in force to capture arrivals.
func (f *Fast) adopt(c candidate) Action {
	f.plan, f.brokerOf = c.plan, c.brokerOf
	f.watched, f.counts, f.measured, f.test = 0, make([]Slice, len(f.setup.Brokers)), Slice{}, nil
	f.predicted = -1
	f.rounds = append(f.rounds, Rounds{K: c.plan.K, Rounds: 1})
	return f.measure(true)
}

// begin starts the test of a candidate and puts the candidate in force.
func (f *Fast) begin(c candidate) Action {
	t, allowance, _ := f.testOf(c)
	samePlan := c.plan.K == f.plan.K
	if samePlan {
		for _, n := range f.counts { // the guarantee covers the captured messages too
			t.Add(float64(n.Delivered), float64(n.Late))
		}
	}
	var a Action
	if samePlan {
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
	a.Step = plural.Count(f.plan.K, "broker") + ": capturing arrivals"
	if f.test != nil {
		late, n := f.test.Fraction()
		a.Confidence = 1 - f.test.alpha
		a.Step = fmt.Sprintf("%s: %s of %.0f messages late in processing", plural.Count(f.plan.K, "broker"), Percent(late), n)
	}
	return a
}

// choose starts the test of the smallest promising number of brokers, at least lowest.
// Without a promising number, choose takes the number with the best forecast.
func (f *Fast) choose(lowest int) Action {
	if len(f.trace.arrivals) == 0 && len(f.trials) > 0 && f.access(forecast{}) > maxPart*f.setup.budget() {
		return f.giveUp() // more splitting does not shorten the delays
	}
	var best *candidate
	for k := lowest; k <= len(f.setup.Brokers); k++ {
		c, err := f.candidate(k)
		if err != nil {
			break
		}
		if c.plan.K == f.plan.K {
			c = candidate{f.plan, f.brokerOf, f.forecast(f.plan, f.brokerOf)}
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
	return f.giveUp()
}

// access returns the fraction made late by tokens so far, under the plan in force and its
// forecast.
func (f *Fast) access(now forecast) float64 {
	if len(f.trace.arrivals) == 0 {
		return float64(f.measured.Late) / max(1, float64(f.measured.Delivered))
	}
	return now.access
}

// Minimum knowledge of arrivals before they count as typical: a number of seconds, and a
// margin to the budget in standard errors of the seconds.
const (
	typicalSeconds = 3
	typicalErrors  = 1.3
)

// typical reports whether the arrivals suffice to say that the fraction late is within
// the budget.
func (f *Fast) typical(now forecast, late float64) bool {
	if len(f.trace.arrivals) == 0 {
		return true
	}
	return now.seconds >= typicalSeconds && late+typicalErrors*now.deviation <= f.setup.budget()
}

// giveUp ends the search without a placement that keeps the SLO, with the best tried
// placement.
func (f *Fast) giveUp() Action {
	if len(f.trials) == 0 {
		f.trials = append(f.trials, trial{plan: f.plan, late: f.forecast(f.plan, f.brokerOf).late()})
	}
	best := f.trials[0]
	for _, t := range f.trials[1:] {
		if t.late < best.late {
			best = t
		}
	}
	cause := "the brokers' processing"
	bucket := f.access(f.forecast(f.plan, f.brokerOf)) > maxPart*f.setup.budget()
	if bucket {
		cause = "the contract's token bucket"
	}
	f.plan = best.plan
	f.brokerOf = f.setup.whereOf(best.plan, len(f.publishers))
	return f.end(Outcome{Lacking: !bucket, Reason: fmt.Sprintf("no number of brokers was shown to keep the SLO; the best, %d, has %s late, mostly by %s (%s)", best.plan.K, Percent(best.late), cause, best.decision)})
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

// keptVerdict describes a kept SLO: the confidence and the late fractions.
func keptVerdict(confidence, processing, access float64) string {
	lateness := "nothing late"
	if processing > 0 || access > 0 {
		lateness = fmt.Sprintf("%s late in processing, %s waiting for tokens", Percent(processing), Percent(access))
	}
	return fmt.Sprintf("SLO kept (%g %% confidence), %s", 100*confidence, lateness)
}
