package fitting

import (
	"fmt"
	"math"
	"slices"
)

// Explained tests, like Sequential, whether the late fraction of messages keeps a
// budget, where a forecast says from the arrivals alone which of them will be late.
// What the forecast explains needs no proof by many bursts; only what is later than
// forecast does. So a placement close to its budget is settled many times sooner.
//
// It is told of busy periods: what a broker gets until it is idle again. What is
// promised, given the arrivals, where periods are late beyond their arrivals
// independently of one another (brokers share nothing, and an idle broker has
// forgotten what it did):
//
//	if the chance of being late, averaged over all messages so far, is at or
//	above the budget, Within comes with a chance of at most Alpha
//
// whatever the forecast is worth and whenever it is looked at; a bad forecast costs
// time. Other than with Sequential, the arrivals seen have to be typical of those to
// come, which no test of delays can show. It never says Beyond.
//
// How: period i has n messages, of which late were late and m in the forecast; let
// m0 be the fraction that the forecast has in the long run and p the budget. While
// the promise's condition holds, for any t in (0, 1/max(n-m)),
//
//	product of (1 - t(late - m - (p-m0)n)) · e^(-t(m - m0·n))
//
// is at most a nonnegative martingale that begins with 1: what is independent may be
// multiplied, 1-x is at most e^-x, and the sum of what is expected late is at least
// p times that of messages; the second factor takes back what the tested arrivals
// differ from m0. By Ville's inequality it reaches 1/Alpha with a chance of at most
// Alpha.
//
// With late = m it grows by about t(p-m0) with every message: it takes about
// max(n-m)·ln(1/Alpha)/(p-m0) of them. Where few periods have so many that are
// unlikely to be late, their m is raised, since any m that arrivals decide will do,
// and t is bolder.
type Explained struct {
	// Set once.
	budget, most float64 // most: messages
	enough       float64 // logarithm of 1/alpha
	unit         float64 // the most messages that may be late unexpectedly
	typical      float64 // fraction forecast in the long run, with what is raised
	growth       float64 // of the boldest bet by a message, if late as forecast

	bets     [3]bet
	sum      Period
	square   float64 // of late less forecast, summed over periods
	decision Decision
}

// Period is a busy period of a broker: its messages, how many were late, and how
// many were forecast to be, of which fractions count.
type Period struct{ Messages, Late, Forecast float64 }

// bet is a part of the stake, as logarithms, and how boldly it is played: the
// fraction of what it could be.
type bet struct{ part, boldness, gained float64 }

// NewExplained returns a test of whether at most the fraction budget (over 0, below
// 1) is late, with error alpha (over 0, below 1), that is settled after most messages
// at the latest. captured are periods as they come, but for what was late in them:
// by them it is decided how to bet.
func NewExplained(budget, alpha float64, captured []Period, most float64) *Explained {
	if !(budget > 0 && budget < 1) || !(alpha > 0 && alpha < 1) {
		panic(fmt.Sprintf("fitting: a test of %v with error %v", budget, alpha))
	}
	e := &Explained{
		budget: budget, most: most, enough: math.Log(1 / alpha), growth: math.Inf(-1),
		bets: [3]bet{{part: math.Log(0.8), boldness: 0.97}, {part: math.Log(0.1), boldness: 0.5}, {part: math.Log(0.1), boldness: 0.15}},
	}
	slack := []float64{1}
	for _, p := range captured {
		slack = append(slack, p.Messages-p.Forecast)
	}
	slices.Sort(slack)
	for i := 1; i <= 20; i++ {
		try := *e
		try.dare(slack[(len(slack)-1)*i/20], captured)
		if try.growth > e.growth {
			*e = try
		}
	}
	return e
}

// dare sets the unit, and what follows from it by what was captured.
func (e *Explained) dare(unit float64, captured []Period) {
	e.unit, e.typical, e.growth = max(1, unit), 0, 0
	var messages, forecast float64
	for _, p := range captured {
		messages += p.Messages
		forecast += e.raised(p)
	}
	if messages == 0 {
		return
	}
	e.typical = min(e.budget, forecast/messages)
	for _, p := range captured {
		p.Late = p.Forecast
		e.growth += e.gain(p, e.bets[0].boldness) / messages
	}
}

// raised is p's forecast, or more, so that no more than a unit may be late beyond it.
func (e *Explained) raised(p Period) float64 { return max(p.Forecast, p.Messages-e.unit) }

// gain is what a bet gains by p.
func (e *Explained) gain(p Period, boldness float64) float64 {
	t := boldness / e.unit
	m := e.raised(p)
	return math.Log1p(-t*(p.Late-m-(e.budget-e.typical)*p.Messages)) - t*(m-e.typical*p.Messages)
}

// Needs is how many messages the test takes until Within if a fraction more than
// was forecast of those captured is late; infinite if it would never be.
func (e *Explained) Needs(more float64) float64 {
	growth := e.growth - e.bets[0].boldness/e.unit*more
	if growth <= 0 {
		return math.Inf(1)
	}
	return (e.enough - e.bets[0].part) / growth
}

// Add tells the test of a busy period. After a decision it does nothing.
func (e *Explained) Add(p Period) Decision {
	if e.decision != Undecided {
		return e.decision
	}
	p.Late, p.Forecast = min(p.Late, p.Messages), max(0, min(p.Forecast, p.Messages))
	e.sum.Messages += p.Messages
	e.sum.Late += p.Late
	e.sum.Forecast += p.Forecast
	e.square += (p.Late - p.Forecast) * (p.Late - p.Forecast)
	wealth := math.Inf(-1)
	for i := range e.bets {
		b := &e.bets[i]
		b.gained += e.gain(p, b.boldness)
		wealth = max(wealth, b.part+b.gained) // the sum of the parts is more
	}
	switch left := e.most - e.sum.Messages; {
	case wealth >= e.enough:
		e.decision = Within
	case left <= 0 || wealth+left*max(0, e.growth-e.bets[0].boldness/e.unit*e.least()) < e.enough:
		// See Sequential: giving up claims nothing.
		e.decision = Unsettled
	}
	return e.decision
}

// least is a fraction that is likely late more than forecast: what was, less 1.3
// standard deviations, with a fifth of a unit for what few periods do not show.
func (e *Explained) least() float64 {
	return (e.sum.Late - e.sum.Forecast - 1.3*math.Sqrt(e.square+e.unit*e.unit/25)) / e.sum.Messages
}

// Decision returns what the test has come to.
func (e *Explained) Decision() Decision { return e.decision }

// Fraction returns the late fraction of the messages so far, 0 without any, and how
// many there are.
func (e *Explained) Fraction() (fraction, delivered float64) {
	return e.sum.Late / max(1, e.sum.Messages), e.sum.Messages
}
