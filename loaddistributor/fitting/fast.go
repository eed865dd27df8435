package fitting

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// FastConfig are the knobs of Fast; zeros mean the defaults.
type FastConfig struct {
	// Alpha is the error of the test of processing delays; 0.1.
	Alpha float64
	// Step is how long to observe between two looks; 100 ms. Settle is how long to
	// wait after a change; 100 ms.
	Step, Settle time.Duration
	// Capture is how much of the arrivals has to be there before a forecast, 1 s:
	// with less, whoever has not sent yet is not in it. Keep is how much is kept,
	// the latest; 30 s.
	Capture, Keep time.Duration
	// Cap is how long one placement is tested at the most, unless that is less
	// than half as much again as the test takes if nothing is late; 10 s. A
	// placement nearer to the budget takes longer to be sure of: with more time,
	// topics are fitted on fewer brokers.
	Cap time.Duration
	// Absorbed is what earlier fits have learned, by broker: see Outcome.
	Absorbed map[string]Absorption
}

func (c *FastConfig) fill() {
	or := func(d *time.Duration, meant time.Duration) {
		if *d == 0 {
			*d = meant
		}
	}
	if c.Alpha == 0 {
		c.Alpha = 0.1
	}
	or(&c.Step, 100*time.Millisecond)
	or(&c.Settle, 100*time.Millisecond)
	or(&c.Capture, time.Second)
	or(&c.Keep, 30*time.Second)
	or(&c.Cap, 10*time.Second)
}

// Fast searches over the number of brokers. It places the topic on the fewest
// that its rate, and what is known of the brokers, allows, captures arrivals, and
// tests processing delays with Sequential, all brokers at once, while everybody
// sends. If the test does not find the budget kept, what the brokers absorb is
// learned from how much was late, every larger number of brokers is forecast by
// replay of the captured arrivals, and the smallest promising one is next.
//
// Access delay is not tested but replayed: it is a function of arrivals and
// shares. Its part of the budget is set aside before the test, and checked with
// all that was captured after it. So the promise of Sequential holds for
// processing delays against what is left; access delays are as sure as the capture
// is typical.
type Fast struct {
	setup      Setup
	config     FastConfig
	rng        *rand.Rand
	publishers []placement.Publisher
	declared   int // the most messages that send together, by the demand

	trace    recorded
	absorbed []Absorption
	lone     time.Duration

	plan      placement.Plan
	where     []int
	allowance float64 // of the budget, for access
	test      *Sequential
	late      []Slice // of the test under way, by broker
	measured  Slice   // of the test under way, access, where there are no arrivals
	tried     []trial
	rounds    []Rounds
	started   bool
	outcome   *Outcome
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
	if !(config.Alpha > 0 && config.Alpha < 1) || config.Step < 0 || config.Settle < 0 || config.Capture < 0 || config.Keep < config.Capture || config.Cap < 0 {
		return nil, fmt.Errorf("fast: %+v", config)
	}
	f := &Fast{setup: setup, config: config, rng: rng, publishers: setup.Demand.Expand()}
	f.absorbed = make([]Absorption, len(setup.Brokers))
	for l, b := range setup.Brokers {
		f.absorbed[l] = config.Absorbed[b.ID]
	}
	f.declared = together(f.publishers)
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
	if f.outcome != nil {
		return f.final()
	}
	if !f.started {
		f.started = true
		if k := f.guess(); f.setup.Start.K < k {
			return f.try(k)
		}
		return f.adopt(candidate{plan: f.setup.Start, where: f.setup.whereOf(f.setup.Start, len(f.publishers))})
	}
	f.observe(o)
	switch f.test.Decision() {
	case Undecided:
		return f.measure(false)
	case Within:
		if access := f.access(); access <= f.allowance {
			late, _ := f.test.Fraction()
			return f.end(Outcome{Fitted: true, Reason: fmt.Sprintf("%.3g %% late by processing, tested with error %g; %.3g %% by access", late*100, f.config.Alpha, access*100)})
		}
	}
	if len(f.trace.arrivals) > 0 && f.captured() < f.config.Capture {
		return f.measure(false)
	}
	return f.next()
}

// captured is how much of the arrivals there is. Requires: there are some.
func (f *Fast) captured() time.Duration {
	n := len(f.trace.arrivals)
	// Steps are whole: what is between the last arrival and now counts.
	return f.trace.arrivals[n-1].At.Sub(f.trace.arrivals[0].At) + f.config.Step
}

// observe takes what was measured.
func (f *Fast) observe(o Observation) {
	f.trace.arrivals = append(f.trace.arrivals, o.Arrivals...)
	if n := len(f.trace.arrivals); n > 0 {
		from := f.trace.arrivals[n-1].At.Add(-f.config.Keep)
		old, _ := slices.BinarySearchFunc(f.trace.arrivals, from, func(a Arrival, at stamp.Mono) int { return cmp.Compare(a.At, at) })
		if old > n/2 {
			f.trace.arrivals = slices.Delete(f.trace.arrivals, 0, old)
		}
	}
	if o.Lone > 0 && (f.lone == 0 || o.Lone < f.lone) {
		f.lone = o.Lone
	}
	f.measured.Delivered += o.Access.Delivered
	f.measured.Late += o.Access.Late
	n := 0
	for _, slices := range o.Slices {
		n = max(n, len(slices))
	}
	for i := range n {
		var sum Slice
		for l, slices := range o.Slices {
			if i < len(slices) {
				sum.Delivered += slices[i].Delivered
				sum.Late += slices[i].Late
				f.late[l].Delivered += slices[i].Delivered
				f.late[l].Late += slices[i].Late
				f.late[l].HalfLate += slices[i].HalfLate
			}
		}
		f.test.Add(float64(sum.Delivered), float64(sum.Late))
	}
	if f.test.Decision() == Within && !f.parts() {
		f.test.decision = Unsettled
	}
}

// parts reports whether no broker by itself is far beyond the budget; see Judge.
func (f *Fast) parts() bool {
	for _, s := range f.late {
		if float64(s.Late) > PartFactor*f.setup.budget()*(1+tolerance)*float64(s.Delivered) {
			return false
		}
	}
	return true
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
		typical := known[len(known)/2]
		k = max(k, int((int64(f.declared)+typical-1)/typical))
	}
	return min(k, len(f.setup.Brokers))
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
	c := candidate{plan: plan, where: f.setup.whereOf(plan, len(f.publishers))}
	c.forecast = f.trace.replay(f.setup, plan, c.where, f.assumed(), f.lone)
	return c, nil
}

// try begins with at least k brokers, without a forecast.
func (f *Fast) try(k int) Action {
	c, err := f.candidate(k)
	if err != nil && k > 1 {
		c, err = f.candidate(f.setup.Demand.AtLeast)
	}
	if err != nil {
		return f.refused(err)
	}
	return f.adopt(c)
}

func (f *Fast) refused(err error) Action {
	var infeasible *placement.Infeasible
	if errors.As(err, &infeasible) {
		return f.end(Outcome{Infeasible: infeasible, Reason: infeasible.Error()})
	}
	return f.end(Outcome{Reason: err.Error()})
}

// Parts of the budget: least is set aside for access delays in any case, most is
// what they may take.
const (
	least = 0.03
	most  = 0.5
)

// A forecast from a second of arrivals errs, and trying one placement too many
// costs more than one broker too many: brokers are taken to absorb a part less
// than they did, messages to be late half as often again as forecast, and the test
// is to be done some time before its cap.
const (
	discount = 0.75
	caution  = 1.5
	aim      = 0.85
)

// testOf returns the test of a candidate and the part of the budget that it sets
// aside for access.
func (f *Fast) testOf(c candidate) (test *Sequential, allowance float64) {
	budget := f.setup.budget()
	allowance = min(most*budget, max(least*budget, 1.5*c.forecast.access))
	burst := f.declared
	if len(f.trace.arrivals) > 0 {
		// Groups that are only labelled do not send together.
		burst = min(burst, f.trace.together(f.setup.Latency))
	}
	test = NewSequential(budget-allowance, f.config.Alpha, burst, math.Inf(1))
	rate := 0.0
	for _, p := range f.publishers {
		rate += p.Rate
	}
	test.most = max(rate*f.config.Cap.Seconds(), 1.5*test.Least())
	return test, allowance
}

// adopt puts a candidate in force and begins its test.
func (f *Fast) adopt(c candidate) Action {
	f.plan, f.where = c.plan, c.where
	f.test, f.allowance = f.testOf(c)
	f.late, f.measured = make([]Slice, len(f.setup.Brokers)), Slice{}
	f.rounds = append(f.rounds, Rounds{K: c.plan.K})
	return f.measure(true)
}

func (f *Fast) measure(changed bool) Action {
	a := Action{Plan: f.plan, Changed: changed, Measure: f.config.Step}
	if changed {
		a.Settle = f.config.Settle
		f.rounds[len(f.rounds)-1].Rounds++
	}
	late, n := f.test.Fraction()
	a.Step = fmt.Sprintf("%d brokers: %.3g %% of %.0f messages late by processing", f.plan.K, late*100, n)
	return a
}

// next goes on after a placement that was not found to keep the SLO: to the
// smallest larger number of brokers whose test would be done by its cap if the
// forecast is right, or else to the one with the best forecast.
func (f *Fast) next() Action {
	late, _ := f.test.Fraction()
	f.tried = append(f.tried, trial{f.plan, late + f.access(), f.test.Decision()})
	for l, s := range f.late {
		if n := float64(s.Delivered); n > 0 {
			if a := f.trace.learn(f.setup, f.where, l, float64(s.Late)/n, float64(s.HalfLate)/n); a.Burst > 0 {
				f.absorbed[l] = a
			}
		}
	}
	if len(f.trace.arrivals) == 0 && f.access() > most*f.setup.budget() {
		return f.give() // splitting further delays no less
	}
	var best *candidate
	for k := f.plan.K + 1; k <= len(f.setup.Brokers); k++ {
		c, err := f.candidate(k)
		if err != nil {
			break
		}
		if c.forecast.access > most*f.setup.budget() {
			continue
		}
		if test, _ := f.testOf(c); test.Needs(caution*c.forecast.processing) <= aim*test.most {
			return f.adopt(c)
		}
		if best == nil || c.forecast.late() < best.forecast.late() {
			best = &c
		}
	}
	if best != nil {
		return f.adopt(*best)
	}
	return f.give()
}

// assumed is what each broker absorbs, with caution, as far as is known; those of which nothing
// is known are taken to absorb what the others do in the mean.
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
		if all[l].Burst > 0 {
			all[l].Burst = max(1, int64(discount*float64(all[l].Burst)))
		}
	}
	return all
}

// access is the fraction that tokens made late so far, under the plan in force.
func (f *Fast) access() float64 {
	if len(f.trace.arrivals) == 0 {
		return float64(f.measured.Late) / max(1, float64(f.measured.Delivered))
	}
	return f.trace.replay(f.setup, f.plan, f.where, make([]Absorption, len(f.absorbed)), f.lone).access
}

// give ends without a placement that keeps the SLO: with the best that was tried.
func (f *Fast) give() Action {
	best := f.tried[0]
	for _, t := range f.tried[1:] {
		if t.late < best.late {
			best = t
		}
	}
	f.plan = best.plan
	f.where = f.setup.whereOf(best.plan, len(f.publishers))
	cause := "the brokers' processing"
	if f.access() > most*f.setup.budget() {
		cause = "the contract's token bucket"
	}
	return f.end(Outcome{Reason: fmt.Sprintf("no number of brokers was shown to keep the SLO; the best, %d, has %.3g %% late, mostly by %s (%s)", best.plan.K, best.late*100, cause, best.decision)})
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
