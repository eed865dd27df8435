package share

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// divisions calls f with every division of total over n, none below least.
func divisions(total, minimum int64, n int, f func([]int64)) {
	parts := make([]int64, n)
	var next func(i int, rest int64)
	next = func(i int, rest int64) {
		if i == n-1 {
			parts[i] = rest
			f(parts)
			return
		}
		for parts[i] = minimum; parts[i] <= rest-minimum*int64(n-1-i); parts[i]++ {
			next(i+1, rest-parts[i])
		}
	}
	next(0, total)
}

// aim returns the values that rate a division of r, in the order of the package comment. The first
// values that differ decide, and more is better.
func aim(loads []Load, root func(Load) float64, r []float64) (values []float64) {
	arrivals, backlogs, kept := make([]float64, len(r)), make([]float64, len(r)), make([]float64, len(r))
	cost := 0.
	unseen := slices.ContainsFunc(loads, func(l Load) bool { return l.Unseen })
	for i, l := range loads {
		grant := func(upTo float64) float64 {
			got := max(0, min(r[i], upTo))
			r[i] -= got
			return got
		}
		quota := l.Quota.Rate.PerSecond()
		had := grant(max(l.Recent*(1+headroom/100.), 0.05*6)) // 5 % of 18 over three
		arrivals[i] = had / quota
		more := grant(l.spread())
		backlogs[i] = more
		if unseen && !l.Retiring {
			kept[i] = grant(quota-had-more) / quota
		}
		if !l.Retiring {
			cost += root(l) * root(l) / max(r[i], 1e-9)
		}
	}
	slices.Sort(arrivals)
	slices.Sort(backlogs)
	slices.Sort(kept)
	return append(append(append(append(values, arrivals...), backlogs...), kept...), -cost)
}

// No division of a small contract is better, by the order of aims in the package comment, than the
// division that Sqrt finds.
func TestSqrtReachesItsAim(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const units = 18
		total := tokenbucket.Share{Rate: units * 1000, Burst: 100}
		weights := rapid.SliceOfN(rapid.Int64Range(1, 6), 3, 3).Draw(t, "quotas")
		quotas := testkit.Result(Proportion(total, weights)).Must(t)
		var loads []Load
		for i := range weights {
			loads = append(loads, Load{
				Broker: string(rune('a' + i)), Publishers: 1, Quota: quotas[i],
				Recent:     float64(rapid.IntRange(0, 12).Draw(t, "arrivals")),
				Backlog:    rapid.Int64Range(0, 30).Draw(t, "backlog"),
				Dispersion: rapid.Float64Range(0, 9).Draw(t, "dispersion"),
				Unseen:     rapid.Bool().Draw(t, "unseen"),
			})
		}
		loads[0].Retiring = rapid.Bool().Draw(t, "retiring")
		loads[0].Unseen = loads[0].Unseen && !loads[0].Retiring
		got := testkit.Result(Split(Sqrt, total, loads)).Must(t)
		root := func(l Load) float64 { return math.Sqrt(max(l.Recent, 0.06) * max(1, l.Dispersion)) }
		r := make([]float64, len(got))
		rest := total.Rate.PerSecond()
		for i, a := range got {
			r[i] = a.Share.Rate.PerSecond()
			rest -= r[i]
		}
		if math.Abs(rest) > 1e-9 {
			t.Fatalf("%+v: %v is left", got, rest)
		}
		optimum := aim(loads, root, slices.Clone(r))
		divisions(units, 0, len(loads), func(parts []int64) {
			alternative := make([]float64, len(parts))
			for i, p := range parts {
				alternative[i] = float64(p)
			}
			for i, v := range aim(loads, root, alternative) {
				slack := 0.0025 // the milli-msg/s of each broker beforehand, and rounding
				if i == len(optimum)-1 {
					slack += 0.01 * math.Abs(optimum[i])
				}
				if v > optimum[i]+slack {
					t.Fatalf("%v is better than %v: %v of its aims is %v, not %v\n%+v", parts, r, i, v, optimum[i], loads)
				}
				if v < optimum[i]-slack {
					break
				}
			}
		})
	})
}

// Each broker gets the part of b for its arrivals, as far as b suffices; exactly, in whole messages.
func TestBurstNeedsAreMetFirst(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := tokenbucket.Share{Rate: 30_000, Burst: 12}
		var loads []Load
		for i := range 3 {
			loads = append(loads, Load{
				Broker: string(rune('a' + i)), Publishers: 1, Quota: tokenbucket.Share{Rate: 10_000, Burst: 4},
				Recent: float64(rapid.IntRange(1, 20).Draw(t, "arrivals")),
				Peak:   rapid.Int64Range(1, 14).Draw(t, "peak"),
			})
		}
		rule := rapid.SampledFrom([]string{Robust, Sqrt}).Draw(t, "rule")
		got := testkit.Result(Split(rule, total, loads)).Must(t)
		met := func(b func(i int) int64) []int64 {
			all := make([]int64, len(loads))
			for i, l := range loads {
				all[i] = min(b(i), l.Peak)
			}
			slices.Sort(all)
			return all
		}
		optimum := met(func(i int) int64 { return got[i].Share.Burst })
		divisions(total.Burst, 1, len(loads), func(parts []int64) {
			if alternative := met(func(i int) int64 { return parts[i] }); slices.Compare(alternative, optimum) > 0 {
				t.Fatalf("%v meets %v, %+v only %v", parts, alternative, got, optimum)
			}
		})
	})
}

// A broker whose publishers keep to their part has enough rate and burst for its publishers, whatever
// the other brokers receive, have waiting, or are expected to receive.
func TestNobodyPaysForAnothersBacklog(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.IntRange(1, 6).Draw(t, "brokers")
		total := tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.Int64Range(1_000_000, 1e12).Draw(t, "r")),
			Burst: rapid.Int64Range(int64(k), 1e6).Draw(t, "b"),
		}
		weights := rapid.SliceOfN(rapid.Int64Range(1, 1e9), k, k).Draw(t, "quotas")
		quotas := testkit.Result(Proportion(total, weights)).Must(t)
		keeps := make([]bool, k)
		var loads []Load
		for i, q := range quotas {
			l := Load{Broker: string(rune('a' + i)), Publishers: 1, Quota: q}
			if keeps[i] = rapid.Bool().Draw(t, "keeps to its part"); keeps[i] {
				l.Recent = q.Rate.PerSecond() / (1 + headroom/100.) * rapid.Float64Range(0, 1).Draw(t, "part")
				l.Peak = rapid.Int64Range(1, q.Burst).Draw(t, "peak")
			} else {
				l.Recent = rapid.Float64Range(0, 1e18).Draw(t, "rate")
				l.Backlog = rapid.Int64Range(0, math.MaxInt64).Draw(t, "backlog")
				l.Peak = rapid.Int64Range(0, math.MaxInt64).Draw(t, "peak")
				l.Unseen = rapid.Bool().Draw(t, "unseen")
				l.Retiring = !l.Unseen && rapid.Bool().Draw(t, "retiring")
			}
			l.MaxBacklog, l.Rate = l.Backlog, l.Recent
			l.Dispersion = rapid.Float64Range(0, 1e6).Draw(t, "dispersion")
			loads = append(loads, l)
		}
		rule := rapid.SampledFrom([]string{Robust, Sqrt}).Draw(t, "rule")
		got := testkit.Result(Split(rule, total, loads)).Must(t)
		for i, l := range loads {
			if s := got[i].Share; keeps[i] && (int64(s.Rate) < int64(l.Recent*1000) || s.Burst < l.Peak) {
				t.Fatalf("%s: %+v for %v msg/s and a burst of %d, within its quota of %+v\n%+v", rule, s, l.Recent, l.Peak, l.Quota, loads)
			}
		}
	})
}

// A topic has just fallen silent. The rates stay unchanged in every turn, and the next burst finds as
// much burst as the last needed.
func TestSilenceKeepsRatesAndTheBurstsOfTheLastMinute(t *testing.T) {
	total := tokenbucket.Share{Rate: 1_000_000, Burst: 5}
	quota := []tokenbucket.Share{{Rate: 333_333, Burst: 1}, {Rate: 666_667, Burst: 4}}
	for _, rule := range []string{Robust, Sqrt} {
		held := []tokenbucket.Share{{Rate: 200_000, Burst: 3}, {Rate: 800_000, Burst: 2}}
		for range 3 {
			got, err := Split(rule, total, []Load{
				{Broker: "a", Publishers: 1, Quota: quota[0], Share: held[0], Peak: 1},
				{Broker: "b", Publishers: 1, Quota: quota[1], Share: held[1], Peak: 4},
			})
			if err != nil || got[0].Share != (tokenbucket.Share{Rate: 200_000, Burst: 1}) || got[1].Share != (tokenbucket.Share{Rate: 800_000, Burst: 4}) {
				t.Fatalf("%s: %+v, %v", rule, got, err)
			}
			held = []tokenbucket.Share{got[0].Share, got[1].Share}
		}
	}
}

// The return of a broker at a3fd342: the backlog of the broker's publishers cut the other broker from
// 2,000 msg/s to 357, and its burst to 1.
func TestABacklogTakesWhatIsLeftOnly(t *testing.T) {
	total := tokenbucket.Share{Rate: 5_000_000, Burst: 100}
	half := tokenbucket.Share{Rate: 2_500_000, Burst: 50}
	loads := []Load{
		{Broker: "healthy", Publishers: 100, Quota: half, Recent: 2000, Peak: 30},
		{Broker: "returned", Publishers: 100, Quota: half, Recent: 18_000, Backlog: 16_000, MaxBacklog: 16_000},
	}
	for _, rule := range []string{Robust, Sqrt} {
		got, err := Split(rule, total, loads)
		if err != nil || got[0].Share.Rate != 2_100_000 || got[0].Share.Burst <= 30 {
			t.Errorf("%s: %+v, %v; the healthy one needs 2,100 msg/s and a burst of 30", rule, got, err)
		}
	}
}
