package fitting_test

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/loaddistributor/fitting"
)

func TestJudge(t *testing.T) {
	type counts = []fitting.Count
	for _, test := range []struct {
		name     string
		quantile float64
		parts    counts
		want     fitting.Verdict // Budget is checked apart
	}{
		{"nothing at all", 0.99, nil, fitting.Verdict{}},
		{"nothing delivered", 0.99, counts{{"b1", 0, 0}}, fitting.Verdict{}},
		{"exceeded without deliveries is not believed", 0.99, counts{{"b1", 0, 7}}, fitting.Verdict{}},
		{"exactly on the budget", 0.99, counts{{"b1", 100, 1}},
			fitting.Verdict{Judged: true, Met: true, Fraction: 0.01, Worst: "b1", WorstFraction: 0.01}},
		{"exactly on a budget that rounds down", 0.9, counts{{"b1", 10, 1}},
			fitting.Verdict{Judged: true, Met: true, Fraction: 0.1, Worst: "b1", WorstFraction: 0.1}},
		{"one message over", 0.99, counts{{"b1", 100, 2}},
			fitting.Verdict{Judged: true, Met: false, Fraction: 0.02, Worst: "b1", WorstFraction: 0.02}},
		{"pooled by messages, not by brokers", 0.99, counts{{"b1", 10_000, 50}, {"b2", 1000, 20}},
			fitting.Verdict{Judged: true, Met: true, Fraction: 70.0 / 11_000, Worst: "b2", WorstFraction: 0.02}},
		{"a part exactly at three budgets", 0.99, counts{{"b1", 10_000, 0}, {"b2", 1000, 30}},
			fitting.Verdict{Judged: true, Met: true, Fraction: 30.0 / 11_000, Worst: "b2", WorstFraction: 0.03}},
		{"a part above three budgets fails a topic that is fine pooled", 0.99, counts{{"b1", 10_000, 0}, {"b2", 1000, 31}},
			fitting.Verdict{Judged: true, Met: false, Fraction: 31.0 / 11_000, Worst: "b2", WorstFraction: 0.031}},
		{"a silent part says nothing", 0.99, counts{{"b1", 0, 0}, {"b2", 200, 0}},
			fitting.Verdict{Judged: true, Met: true, Fraction: 0, Worst: "b2", WorstFraction: 0}},
		{"more exceeded than delivered is all exceeded", 0.5, counts{{"b1", 4, 9}},
			fitting.Verdict{Judged: true, Met: false, Fraction: 1, Worst: "b1", WorstFraction: 1}},
		{"the first of equals is the worst", 0.5, counts{{"b2", 4, 1}, {"b1", 4, 1}},
			fitting.Verdict{Judged: true, Met: true, Fraction: 0.25, Worst: "b2", WorstFraction: 0.25}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := fitting.Judge(test.quantile, test.parts)
			if got.Judged && math.Abs(got.Budget-(1-test.quantile)) > 1e-12 {
				t.Errorf("budget %v for quantile %v", got.Budget, test.quantile)
			}
			got.Budget = 0
			if got != test.want {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

// However a topic's deliveries are spread over its parts, the pooled fraction
// is the same, and a split never turns a topic that misses into one that
// meets: the parts' rule only adds strictness.
func TestJudgePooledFractionIsIndependentOfTheSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		quantile := rapid.Float64Range(0.5, 0.9999).Draw(t, "quantile")
		var whole fitting.Count
		var parts []fitting.Count
		for range rapid.IntRange(1, 8).Draw(t, "parts") {
			d := rapid.Uint64Range(0, 1000).Draw(t, "delivered")
			p := fitting.Count{Delivered: d, Exceeded: rapid.Uint64Range(0, d).Draw(t, "exceeded")}
			whole.Delivered += p.Delivered
			whole.Exceeded += p.Exceeded
			parts = append(parts, p)
		}
		one, split := fitting.Judge(quantile, []fitting.Count{whole}), fitting.Judge(quantile, parts)
		if one.Judged != split.Judged || one.Fraction != split.Fraction {
			t.Fatalf("whole %+v, split %+v", one, split)
		}
		if split.Met && !one.Met {
			t.Fatalf("the split topic meets its SLO and the whole one does not: %+v, %+v", split, one)
		}
		if split.Judged && split.WorstFraction < split.Fraction-1e-12 {
			t.Fatalf("the worst part %v is better than the whole %v", split.WorstFraction, split.Fraction)
		}
	})
}
