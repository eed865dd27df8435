package tuner_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

func TestJudge(t *testing.T) {
	type counts = []tuner.Count
	for _, test := range []struct {
		name     string
		quantile float64
		parts    counts
		want     tuner.Verdict // Budget is checked apart
	}{
		{"nothing at all", 0.99, nil, tuner.Verdict{}},
		{"nothing delivered", 0.99, counts{{"b1", 0, 0}}, tuner.Verdict{}},
		{"exceeded without deliveries is not believed", 0.99, counts{{"b1", 0, 7}}, tuner.Verdict{}},
		{"exactly on the budget", 0.99, counts{{"b1", 100, 1}},
			tuner.Verdict{Judged: true, Met: true, Fraction: 0.01, Worst: "b1", WorstFraction: 0.01}},
		{"exactly on a budget that rounds down", 0.9, counts{{"b1", 10, 1}},
			tuner.Verdict{Judged: true, Met: true, Fraction: 0.1, Worst: "b1", WorstFraction: 0.1}},
		{"one message over", 0.99, counts{{"b1", 100, 2}},
			tuner.Verdict{Judged: true, Met: false, Fraction: 0.02, Worst: "b1", WorstFraction: 0.02}},
		{"pooled by messages, not by brokers", 0.99, counts{{"b1", 10_000, 50}, {"b2", 1000, 20}},
			tuner.Verdict{Judged: true, Met: true, Fraction: 70.0 / 11_000, Worst: "b2", WorstFraction: 0.02}},
		{"a part exactly at three budgets", 0.99, counts{{"b1", 10_000, 0}, {"b2", 1000, 30}},
			tuner.Verdict{Judged: true, Met: true, Fraction: 30.0 / 11_000, Worst: "b2", WorstFraction: 0.03}},
		{"a part above three budgets fails a topic that is fine pooled", 0.99, counts{{"b1", 10_000, 0}, {"b2", 1000, 31}},
			tuner.Verdict{Judged: true, Met: false, Fraction: 31.0 / 11_000, Worst: "b2", WorstFraction: 0.031}},
		{"a silent part says nothing", 0.99, counts{{"b1", 0, 0}, {"b2", 200, 0}},
			tuner.Verdict{Judged: true, Met: true, Fraction: 0, Worst: "b2", WorstFraction: 0}},
		{"more exceeded than delivered is all exceeded", 0.5, counts{{"b1", 4, 9}},
			tuner.Verdict{Judged: true, Met: false, Fraction: 1, Worst: "b1", WorstFraction: 1}},
		{"the first of equals is the worst", 0.5, counts{{"b2", 4, 1}, {"b1", 4, 1}},
			tuner.Verdict{Judged: true, Met: true, Fraction: 0.25, Worst: "b2", WorstFraction: 0.25}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := tuner.Judge(test.quantile, test.parts)
			if got.Judged && math.Abs(got.Budget-(1-test.quantile)) > 1e-12 {
				t.Errorf("budget %v for quantile %v", got.Budget, test.quantile)
			}
			got.Budget, got.Decision, got.Blamed = 0, 0, "" // see below
			if got != test.want {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

// However a topic's deliveries are spread over its parts, the pooled fraction is the same. A split
// never turns a topic that misses its SLO into a topic that meets it: the parts' rule only adds
// strictness.
func TestJudgePooledFractionIsIndependentOfTheSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		quantile := rapid.Float64Range(0.5, 0.9999).Draw(t, "quantile")
		var whole tuner.Count
		var parts []tuner.Count
		for range rapid.IntRange(1, 8).Draw(t, "parts") {
			d := rapid.Uint64Range(0, 1000).Draw(t, "delivered")
			p := tuner.Count{Delivered: d, Exceeded: rapid.Uint64Range(0, d).Draw(t, "exceeded")}
			whole.Delivered += p.Delivered
			whole.Exceeded += p.Exceeded
			parts = append(parts, p)
		}
		joint, split := tuner.Judge(quantile, []tuner.Count{whole}), tuner.Judge(quantile, parts)
		if joint.Judged != split.Judged || joint.Fraction != split.Fraction {
			t.Fatalf("whole %+v, split %+v", joint, split)
		}
		if split.Met && !joint.Met {
			t.Fatalf("the split topic meets its SLO and the whole one does not: %+v, %+v", split, joint)
		}
		if split.Judged && split.WorstFraction < split.Fraction-1e-12 {
			t.Fatalf("the worst part %v is better than the whole %v", split.WorstFraction, split.Fraction)
		}
	})
}

func TestAVerdictNeedsEvidence(t *testing.T) {
	type counts = []tuner.Count
	for _, test := range []struct {
		name     string
		quantile float64
		parts    counts
		want     tuner.Decision
		blamed   string
	}{
		{"nothing", 0.99, nil, tuner.Undecided, ""},
		{"three late before there was a subscriber", 0.99, counts{{"b1", 3, 3}}, tuner.Beyond, "b1"}, // 3 % thrice in a row is no chance
		{"one of three", 0.99, counts{{"b1", 3, 1}}, tuner.Undecided, ""},
		{"two of fifty, though four budgets", 0.99, counts{{"b1", 50, 2}}, tuner.Undecided, ""},
		{"on the budget, however long", 0.99, counts{{"b1", 1e9, 1e7}}, tuner.Undecided, ""},
		{"just below what shows it", 0.99, counts{{"b1", 687, 0}}, tuner.Undecided, ""},
		{"enough in time", 0.99, counts{{"b1", 688, 0}}, tuner.Within, ""},
		{"pooled over brokers", 0.99, counts{{"b1", 344, 0}, {"b2", 344, 0}}, tuner.Within, ""},
		{"two budgets", 0.99, counts{{"b1", 10_000, 200}}, tuner.Beyond, ""},
		{"one of many brokers", 0.99, counts{{"b1", 100_000, 0}, {"b2", 1000, 80}}, tuner.Beyond, "b2"},
		{"the worst of two", 0.99, counts{{"b1", 1000, 80}, {"b2", 1000, 90}}, tuner.Beyond, "b2"},
		{"a fraction by chance worse is not blamed", 0.99, counts{{"b1", 10_000, 900}, {"b2", 2, 1}}, tuner.Beyond, "b1"},
		{"everything may be late", 0.5, counts{{"b1", 1000, 1000}}, tuner.Beyond, ""},
		{"many", 0.999, counts{{"b1", 1e12, 1.001e9}}, tuner.Beyond, ""},
	} {
		v := tuner.Judge(test.quantile, test.parts)
		if v.Decision != test.want || v.Blamed != test.blamed {
			t.Errorf("%s: %v, blamed %q, want %v, %q", test.name, v.Decision, v.Blamed, test.want, test.blamed)
		}
	}
}

// The guarantee of Judge, over many windows: the error of its verdicts is within Alpha, whatever the
// number of messages and brokers. A topic that is ten times better than its SLO is never judged to
// miss it. The allowance is as in TestVerdictsErrWithinAlpha.
func TestJudgeErrsWithinAlpha(t *testing.T) {
	n := runs(t, 4000)
	allowed := tuner.Alpha*float64(n) + 3*math.Sqrt(tuner.Alpha*float64(n))
	const budget = 0.01
	for _, factor := range []float64{1, 10} {
		for _, brokers := range []int{1, 5} {
			for _, messages := range []int{3, 10, 50, 100, 1000, 10_000} {
				rng := rand.New(rand.NewPCG(testkit.Seed(t), uint64(messages)))
				missed, met := 0, 0
				for range n {
					parts := make([]tuner.Count, brokers)
					for i := range parts {
						parts[i] = tuner.Count{Part: fmt.Sprint(i), Delivered: uint64(messages), Exceeded: draw(rng, messages, budget/factor)}
					}
					switch tuner.Judge(1-budget, parts).Decision {
					case tuner.Beyond:
						missed++
					case tuner.Within:
						met++
					}
				}
				t.Logf("%v of the budget, %d messages by each of %d: %d of %d found missed, %d met", 1/factor, messages, brokers, missed, n, met)
				if float64(missed) > allowed || factor == 10 && float64(missed) > allowed/10 {
					t.Errorf("%v of the budget, %d messages by each of %d: %d of %d found missed, allowed %.0f", 1/factor, messages, brokers, missed, n, allowed)
				}
				if factor == 1 && float64(met) > allowed {
					t.Errorf("on the budget, %d messages by each of %d: %d of %d found met, allowed %.0f", messages, brokers, met, n, allowed)
				}
				if factor == 10 && messages == 10_000 && met < n*9/10 {
					t.Errorf("ten times better, %d messages by each of %d: only %d of %d found met", messages, brokers, met, n)
				}
			}
		}
	}
}

// draw returns how many of n messages are late, each with chance p.
func draw(rng *rand.Rand, n int, p float64) (late uint64) {
	for i := 0.0; ; late++ {
		// Geometric steps from one late message to the next.
		if i += 1 + math.Floor(math.Log(1-rng.Float64())/math.Log1p(-p)); i > float64(n) {
			return late
		}
	}
}

func TestPercent(t *testing.T) {
	for fraction, want := range map[float64]string{
		0: "0 %", 1: "100 %", 0.9999: "over 99.9 %", 0.0042: "0.42 %", 0.12345: "12.3 %", 0.00001: "0.001 %", 1e-9: "under 0.0001 %",
	} {
		testkit.Equal(t, tuner.Percent(fraction), want, "%v", fraction)
	}
}
