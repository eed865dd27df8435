package fitting_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/fitting"
)

// world is brokers whose busy periods come in a fixed order, each with its chance of
// being late, all of it or none, and a forecast of that, right or wrong.
type world []struct {
	messages, chance, forecast float64
	// scatter: messages are late each by itself, and not the period as one.
	scatter bool
}

// fraction is how much is late in the long run.
func (w world) fraction() float64 {
	late, messages := 0.0, 0.0
	for _, p := range w {
		late += p.chance * p.messages
		messages += p.messages
	}
	return late / messages
}

func (w world) captured() (all []fitting.Period) {
	for _, p := range w {
		all = append(all, fitting.Period{Messages: p.messages, Forecast: p.forecast * p.messages})
	}
	return all
}

// explained runs the test, of a budget of 1 %, in a world, to its end.
func explained(w world, most float64, seed, run uint64) *fitting.Explained {
	rng := rand.New(rand.NewPCG(seed, run))
	e := fitting.NewExplained(0.01, alpha, w.captured(), most)
	for i := 0; e.Decision() == fitting.Undecided; i++ {
		p := w[i%len(w)]
		period := fitting.Period{Messages: p.messages, Forecast: p.forecast * p.messages}
		if p.scatter {
			for range int(p.messages) {
				if rng.Float64() < p.chance {
					period.Late++
				}
			}
		} else if rng.Float64() < p.chance {
			period.Late = p.messages
		}
		e.Add(period)
	}
	return e
}

// worlds of which the fraction late is scale percent: at 1, on the budget.
func worlds(scale float64) map[string]world {
	return map[string]world{
		"right forecast":   {{50, 0, 0, false}, {60, 0, 0, false}, {100, 0.03 * scale, 0.03 * scale, true}, {90, 0, 0, true}},
		"no forecast":      {{50, 0.01 * scale, 0, false}, {20, 0.01 * scale, 0, false}},
		"wrong periods":    {{50, 0.02 * scale, 0, true}, {50, 0, 0.02 * scale, true}},
		"too much":         {{50, 0.01 * scale, 0.04, false}},
		"too little":       {{100, 0.01 * scale, 0.001, false}, {30, 0.01 * scale, 0, true}},
		"rare large ones":  {{20, 0.01 * scale, 0, false}, {20, 0.01 * scale, 0.01, false}, {20, 0.01 * scale, 0, true}, {20, 0.01 * scale, 0, true}, {400, 0.01 * scale, 0.005, false}},
		"nothing but late": {{50, 0.04 * scale, 0.04 * scale, false}, {50, 0, 0, false}, {50, 0, 0, false}, {50, 0, 0, false}},
	}
}

// The promise of Explained: where the budget is not kept, it is found kept within
// alpha, whatever the forecast is worth. The allowance is as in
// TestVerdictsErrWithinAlpha.
func TestExplainedErrsWithinAlpha(t *testing.T) {
	n := runs(t, 400)
	allowed := alpha*float64(n) + 3*math.Sqrt(alpha*(1-alpha)*float64(n))
	for _, scale := range []float64{1, 1.2, 2} {
		for name, w := range worlds(scale) {
			if f := w.fraction(); f < 0.01*scale*(1-1e-9) {
				t.Fatalf("%s: %v late, meant are %v", name, f, 0.01*scale)
			}
			wrong := 0
			for run := range n {
				if explained(w, 200_000, testkit.Seed(t), uint64(run)).Decision() == fitting.Within {
					wrong++
				}
			}
			t.Logf("%s, %v %%: %d of %d found kept", name, scale, wrong, n)
			if float64(wrong) > allowed {
				t.Errorf("%s, %v %% late: %d of %d verdicts are wrong, allowed %.0f", name, scale, wrong, n, allowed)
			}
		}
	}
}

// Where the forecast is right, what is near the budget is settled many times sooner
// than without it; and nothing is found kept by a test that was not told anything.
func TestExplainedSettlesNearTheBudget(t *testing.T) {
	const late = 0.008
	w := worlds(late * 100)["right forecast"]
	needs := fitting.NewExplained(0.01, alpha, w.captured(), 1e6).Needs(0)
	without := fitting.NewSequential(0.01, alpha, 100, 1e9).Needs(late)
	if needs > without/10 {
		t.Errorf("it takes %.0f messages with a forecast and %.0f without", needs, without)
	}
	within, messages := 0, 0.0
	for run := range 200 {
		e := explained(w, 4*needs, testkit.Seed(t), uint64(run))
		if e.Decision() == fitting.Within {
			within++
		}
		_, n := e.Fraction()
		messages += n / 200
	}
	if within < 180 || messages > 2*needs {
		t.Errorf("%d of 200 are found kept, after %.0f messages; it was to take %.0f", within, messages, needs)
	}
	if e := fitting.NewExplained(0.01, alpha, nil, 1e6); e.Decision() != fitting.Undecided || !math.IsInf(e.Needs(0.02), 1) {
		t.Errorf("told of nothing: %v, needs %v", e.Decision(), e.Needs(0.02))
	}
}

// What is plainly not kept is given up soon, and the cap holds.
func TestExplainedGivesUp(t *testing.T) {
	w := world{{50, 0.05, 0, false}}
	e := explained(w, 1e6, 1, 1)
	if _, n := e.Fraction(); e.Decision() != fitting.Unsettled || n > 50_000 {
		t.Errorf("%v after %.0f messages", e.Decision(), n)
	}
	e = explained(world{{50, 0, 0, false}}, 1000, 1, 1)
	if _, n := e.Fraction(); e.Decision() != fitting.Unsettled || n > 1000 {
		t.Errorf("%v after %.0f messages, the cap is 1000", e.Decision(), n)
	}
	if d := e.Add(fitting.Period{Messages: 1e9}); d != fitting.Unsettled {
		t.Errorf("then %v", d)
	}
}
