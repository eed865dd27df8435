package share_test

import (
	"errors"
	"math"
	"math/big"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

type (
	load  = share.Load
	part  = share.Assigned
	token = tokenbucket.Share
)

func TestSplit(t *testing.T) {
	total := token{Rate: 1_000_000, Burst: 100}
	for _, c := range []struct {
		name  string
		rule  string
		total token
		loads []load
		want  []part
	}{
		{"static leaves shares as they are", share.Static, total,
			[]load{{Broker: "b", Share: token{Rate: 900_000, Burst: 1}, Rate: 1}, {Broker: "a", Share: token{Rate: 100_000, Burst: 99}, Rate: 500, Publishers: 3}},
			[]part{{"a", token{Rate: 100_000, Burst: 99}}, {"b", token{Rate: 900_000, Burst: 1}}}},
		{"static gives nothing to who has nothing", share.Static, total,
			[]load{{Broker: "a", Share: total}, {Broker: "b", Rate: 7, Publishers: 7}},
			[]part{{"a", total}, {"b", token{}}}},
		{"static scales shares that do not sum to the total", share.Static, total,
			[]load{{Broker: "a", Share: token{Rate: 30, Burst: 3}}, {Broker: "b", Share: token{Rate: 10, Burst: 1}}},
			[]part{{"a", token{Rate: 750_000, Burst: 75}}, {"b", token{Rate: 250_000, Burst: 25}}}},
		{"static without shares is even", share.Static, total,
			[]load{{Broker: "a"}, {Broker: "b"}, {Broker: "c"}},
			[]part{{"a", token{Rate: 333_334, Burst: 34}}, {"b", token{Rate: 333_333, Burst: 33}}, {"c", token{Rate: 333_333, Burst: 33}}}},
		{"rate by rate, burst by backlog", share.Proportional, total,
			[]load{{Broker: "a", Rate: 90, MaxBacklog: 5, Publishers: 1}, {Broker: "b", Rate: 10, MaxBacklog: 15, Publishers: 1}},
			[]part{{"a", token{Rate: 900_000, Burst: 25}}, {"b", token{Rate: 100_000, Burst: 75}}}},
		{"the remainders go to the largest weight, of several to the first", share.Proportional, token{Rate: 1_000_000, Burst: 11},
			[]load{{Broker: "a", Rate: 1, MaxBacklog: 1, Publishers: 1}, {Broker: "b", Rate: 2, MaxBacklog: 2, Publishers: 1}, {Broker: "c", Rate: 4, MaxBacklog: 2, Publishers: 1}},
			[]part{{"a", token{Rate: 142_857, Burst: 2}}, {"b", token{Rate: 285_714, Burst: 5}}, {"c", token{Rate: 571_429, Burst: 4}}}},
		{"a silent broker with a publisher keeps a floor, the others pay", share.Proportional, total,
			[]load{{Broker: "a", Rate: 50, MaxBacklog: 9, Publishers: 1}, {Broker: "b", Publishers: 1}},
			[]part{{"a", token{Rate: 995_000, Burst: 99}}, {"b", token{Rate: 5000, Burst: 1}}}},
		{"so does one that has messages left", share.Proportional, total,
			[]load{{Broker: "a", Rate: 50, MaxBacklog: 9, Publishers: 1}, {Broker: "b", Backlog: 1}},
			[]part{{"a", token{Rate: 995_000, Burst: 99}}, {"b", token{Rate: 5000, Burst: 1}}}},
		{"one that is not used gets nothing, whatever its window says", share.Proportional, total,
			[]load{{Broker: "a", Rate: 50, MaxBacklog: 1, Publishers: 1}, {Broker: "b", MaxBacklog: 80, Share: token{Rate: 500_000, Burst: 50}}},
			[]part{{"a", total}, {"b", token{}}}},
		{"the literal rule lets an overloaded broker take all of b", share.Proportional, total,
			[]load{{Broker: "a", Rate: 10, Publishers: 1}, {Broker: "b", Rate: 10, MaxBacklog: 1, Publishers: 1}},
			[]part{{"a", token{Rate: 500_000, Burst: 1}}, {"b", token{Rate: 500_000, Burst: 99}}}},
		{"without backlogs b stays", share.Proportional, total,
			[]load{{Broker: "a", Rate: 90, Share: token{Rate: 500_000, Burst: 70}}, {Broker: "b", Rate: 10, Share: token{Rate: 500_000, Burst: 30}}},
			[]part{{"a", token{Rate: 900_000, Burst: 70}}, {"b", token{Rate: 100_000, Burst: 30}}}},
		{"without traffic all stays", share.Proportional, total,
			[]load{{Broker: "a", Share: token{Rate: 600_000, Burst: 70}}, {Broker: "b", Share: token{Rate: 400_000, Burst: 30}}, {Broker: "c"}},
			[]part{{"a", token{Rate: 600_000, Burst: 70}}, {"b", token{Rate: 400_000, Burst: 30}}, {"c", token{}}}},
		{"without traffic all stays, with publishers too", share.Sqrt, total,
			[]load{{Broker: "a", Share: token{Rate: 900_000, Burst: 70}, Publishers: 9}, {Broker: "b", Share: token{Rate: 100_000, Burst: 30}, Publishers: 1}},
			[]part{{"a", token{Rate: 900_000, Burst: 70}}, {"b", token{Rate: 100_000, Burst: 30}}}},
		{"nothing known at all: even", share.Proportional, total,
			[]load{{Broker: "a"}, {Broker: "b"}},
			[]part{{"a", token{Rate: 500_000, Burst: 50}}, {"b", token{Rate: 500_000, Burst: 50}}}},
		{"b is just enough", share.Proportional, token{Rate: 3, Burst: 3},
			[]load{{Broker: "a", Rate: 1e300, MaxBacklog: math.MaxInt64, Publishers: 1}, {Broker: "b", Publishers: 1}, {Broker: "c", Rate: 1e-300, MaxBacklog: 1, Publishers: 1}},
			[]part{{"a", token{Rate: 1, Burst: 1}}, {"b", token{Rate: 1, Burst: 1}}, {"c", token{Rate: 1, Burst: 1}}}},
		{"the ends of the ranges", share.Proportional, token{Rate: tokenbucket.MaxRate, Burst: tokenbucket.MaxBurst},
			[]load{{Broker: "a", Rate: math.MaxFloat64, MaxBacklog: math.MaxInt64, Publishers: 1}, {Broker: "b", Rate: math.MaxFloat64, MaxBacklog: math.MaxInt64, Publishers: 1}},
			[]part{{"a", token{Rate: tokenbucket.MaxRate / 2, Burst: tokenbucket.MaxBurst / 2}}, {"b", token{Rate: tokenbucket.MaxRate / 2, Burst: tokenbucket.MaxBurst / 2}}}},
	} {
		got, err := share.Split(c.rule, c.total, c.loads)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\ngot  %v, %v\nwant %v", c.name, got, err, c.want)
		}
	}
}

func TestSplitRefuses(t *testing.T) {
	total := token{Rate: 1000, Burst: 2}
	single := []load{{Broker: "a", Publishers: 1}}
	for _, c := range []struct {
		name  string
		rule  string
		total token
		loads []load
		want  string
	}{
		{"unknown rule", "best", total, single, `unknown share rule "best": the rules are proportional, robust, sqrt, static`},
		{"no rule", "", total, single, "unknown share rule"},
		{"empty total", share.Static, token{}, single, "is empty"},
		{"total out of range", share.Static, token{Rate: -1, Burst: 1}, single, "rate -0.001 is outside"},
		{"no broker", share.Static, total, nil, "no brokers"},
		{"no id", share.Static, total, []load{{}}, "without a broker's id"},
		{"a broker twice", share.Static, total, []load{{Broker: "a"}, {Broker: "b"}, {Broker: "a"}}, `"a" appears twice`},
		{"NaN", share.Proportional, total, []load{{Broker: "a", Rate: math.NaN()}}, "not a finite number"},
		{"infinite", share.Proportional, total, []load{{Broker: "a", Rate: math.Inf(1)}}, "not a finite number"},
		{"negative rate", share.Proportional, total, []load{{Broker: "a", Rate: -1}}, "not a finite number"},
		{"negative backlog", share.Proportional, total, []load{{Broker: "a", Backlog: -1}}, "negative backlog"},
		{"negative maximum", share.Proportional, total, []load{{Broker: "a", MaxBacklog: -1}}, "negative backlog"},
		{"negative publishers", share.Proportional, total, []load{{Broker: "a", Publishers: -1}}, "negative number of publishers"},
		{"an impossible share", share.Static, total, []load{{Broker: "a", Share: token{Rate: 5}}}, "present share: burst 0"},
		{"more brokers in use than b", share.Proportional, total,
			[]load{{Broker: "a", Publishers: 1}, {Broker: "b", Publishers: 1}, {Broker: "c", Publishers: 1}}, "burst 2 is too small to be shared: 3 needed"},
		{"more brokers in use than r", share.Proportional, token{Rate: 1, Burst: 9},
			[]load{{Broker: "a", Publishers: 1}, {Broker: "b", Publishers: 1}}, "rate 1 is too small to be shared: 2 needed"},
	} {
		got, err := share.Split(c.rule, c.total, c.loads)
		if err == nil || got != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want an error that says %q", c.name, got, err, c.want)
		}
	}
	var small *share.TooSmall
	_, err := share.Split(share.Static, total, []load{{Broker: "a"}, {Broker: "b"}, {Broker: "c"}})
	if !errors.As(err, &small) || *small != (share.TooSmall{Bound: "burst", Need: 3, Have: 2}) {
		t.Errorf("b < k: %v is not the *TooSmall it should be", err)
	}
}

func TestProportion(t *testing.T) {
	for _, c := range []struct {
		name    string
		total   token
		weights []int64
		want    []token
	}{
		{"the design's example", token{Rate: 80_000_000, Burst: 100}, []int64{42_000, 24_000, 14_000},
			[]token{{Rate: 42_000_000, Burst: 53}, {Rate: 24_000_000, Burst: 30}, {Rate: 14_000_000, Burst: 17}}},
		{"remainder to the largest weight", token{Rate: 100, Burst: 10}, []int64{1, 1, 1, 3}, []token{{Rate: 16, Burst: 1}, {Rate: 16, Burst: 1}, {Rate: 16, Burst: 1}, {Rate: 52, Burst: 7}}},
		{"floors are paid by the others", token{Rate: 1000, Burst: 3}, []int64{998, 1, 1}, []token{{Rate: 998, Burst: 1}, {Rate: 1, Burst: 1}, {Rate: 1, Burst: 1}}},
		{"no weight, no share", token{Rate: 10, Burst: 10}, []int64{0, 5, 0}, []token{{}, {Rate: 10, Burst: 10}, {}}},
		{"large weights", token{Rate: 9, Burst: 9}, []int64{math.MaxInt64 / 3, math.MaxInt64 / 3, math.MaxInt64 / 3}, []token{{Rate: 3, Burst: 3}, {Rate: 3, Burst: 3}, {Rate: 3, Burst: 3}}},
		// After the floor of the last broker, the second broker falls below its own floor.
		{"a floor pushes another below", token{Rate: 100, Burst: 12}, []int64{10_000, 1000, 1}, []token{{Rate: 90, Burst: 10}, {Rate: 9, Burst: 1}, {Rate: 1, Burst: 1}}},
	} {
		got, err := share.Proportion(c.total, c.weights)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v; want %v", c.name, got, err, c.want)
		}
	}
	for _, c := range []struct {
		name    string
		total   token
		weights []int64
		want    string
	}{
		{"no broker", token{Rate: 1, Burst: 1}, nil, "no weight is positive"},
		{"only zeros", token{Rate: 1, Burst: 1}, []int64{0, 0}, "no weight is positive"},
		{"negative", token{Rate: 1, Burst: 1}, []int64{2, -1}, "weight 1 is negative"},
		{"overflow", token{Rate: 1, Burst: 1}, []int64{math.MaxInt64, 1}, "sum to more than"},
		{"empty", token{}, []int64{1}, "is empty"},
		{"too small", token{Rate: 9, Burst: 2}, []int64{1, 1, 1}, "burst 2 is too small"},
	} {
		got, err := share.Proportion(c.total, c.weights)
		if err == nil || got != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want an error that says %q", c.name, got, err, c.want)
		}
	}
}

// drawLoads makes loads of all sizes, many of them zero, in the order of ids.
func drawLoads(t *rapid.T) []load {
	amount := func(label string) int64 {
		return rapid.OneOf(rapid.Just[int64](0), rapid.Int64Range(0, 20), rapid.Int64Range(0, math.MaxInt64)).Draw(t, label)
	}
	loads := make([]load, rapid.IntRange(1, 8).Draw(t, "brokers"))
	for i := range loads {
		loads[i] = load{
			Broker:     string(rune('a' + i)),
			Rate:       rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(0, 1e6), rapid.Float64Range(0, math.MaxFloat64)).Draw(t, "rate"),
			MaxBacklog: amount("max backlog"),
			Backlog:    amount("backlog"),
			Publishers: rapid.IntRange(0, 2).Draw(t, "publishers"),
		}
		if rapid.Bool().Draw(t, "holds") {
			loads[i].Share = token{Rate: tokenbucket.Rate(rapid.Int64Range(1, int64(tokenbucket.MaxRate)).Draw(t, "r_l")), Burst: rapid.Int64Range(1, tokenbucket.MaxBurst).Draw(t, "b_l")}
		}
	}
	return loads
}

func drawTotal(t *rapid.T, minimum int) token {
	return token{
		Rate:  tokenbucket.Rate(rapid.OneOf(rapid.Int64Range(int64(minimum), int64(minimum)+50), rapid.Int64Range(int64(minimum), int64(tokenbucket.MaxRate))).Draw(t, "r")),
		Burst: rapid.OneOf(rapid.Int64Range(int64(minimum), int64(minimum)+50), rapid.Int64Range(int64(minimum), tokenbucket.MaxBurst)).Draw(t, "b"),
	}
}

func TestSplitProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		loads := drawLoads(t)
		total := drawTotal(t, len(loads))
		rule := rapid.SampledFrom(share.Rules()).Draw(t, "rule")
		got, err := share.Split(rule, total, loads)
		testkit.Must(t, err)
		var sum token
		for i, a := range got {
			l := loads[i]
			testkit.MustEqual(t, a.Broker, l.Broker, "broker %d", i)
			if err := a.Share.Validate(); err != nil {
				t.Fatalf("broker %s: %v", a.Broker, err)
			}
			sum.Rate += a.Share.Rate
			sum.Burst += a.Share.Burst
			if rule == share.Proportional && (l.Publishers > 0 || l.Backlog > 0 || l.Rate > 0) {
				floor := max(1, total.Rate/tokenbucket.Rate(len(loads))*share.FloorPercent/100)
				if a.Share.Rate < floor || a.Share.Burst < 1 {
					t.Fatalf("broker %s is in use and gets %+v of %+v", a.Broker, a.Share, total)
				}
			}
		}
		testkit.MustEqual(t, sum, total, "the shares sum to")

		shuffled := rapid.Permutation(loads).Draw(t, "order")
		shuffledShares, err := share.Split(rule, total, shuffled)
		if err != nil || !slices.Equal(got, shuffledShares) {
			t.Fatalf("in another order: %v, %v\nwas %v", shuffledShares, err, got)
		}
	})
}

func TestStaticKeepsSharesThatSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		loads := drawLoads(t)
		var total token
		for i := range loads {
			s := &loads[i].Share
			s.Rate, s.Burst = s.Rate/8, s.Burst/8
			if s.Validate() != nil {
				*s = token{}
			}
			total.Rate += s.Rate
			total.Burst += s.Burst
		}
		if total.IsZero() {
			t.Skip("no broker holds anything")
		}
		got := testkit.Result(share.Split(share.Static, total, loads)).Must(t)
		for i, a := range got {
			if a.Share != loads[i].Share {
				t.Fatalf("broker %s: %+v became %+v", a.Broker, loads[i].Share, a.Share)
			}
		}
	})
}

// TestProportionIsTheDefinition compares with the definition in rational numbers. A part above its
// floor differs by less than one from the exact proportion of the remainder after the floors. The
// named part differs by the losses of the others.
func TestProportionIsTheDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weights := rapid.SliceOfN(rapid.OneOf(rapid.Int64Range(0, 10), rapid.Int64Range(0, math.MaxInt64/8)), 1, 8).Draw(t, "weights")
		if slices.Max(weights) == 0 {
			weights[0] = 1
		}
		total := drawTotal(t, len(weights))
		got := testkit.Result(share.Proportion(total, weights)).Must(t)
		burst := make([]int64, len(got))
		rate := make([]int64, len(got))
		for i, s := range got {
			burst[i], rate[i] = s.Burst, int64(s.Rate)
		}
		checkProportion(t, total.Burst, weights, burst)
		checkProportion(t, int64(total.Rate), weights, rate)
	})
}

func checkProportion(t *rapid.T, total int64, weights, got []int64) {
	// The floors, by the slow obvious way: raise one part at a time, the worst first, until every
	// part's proportion of the rest is at least 1.
	floored := make([]bool, len(weights))
	proportion := func(i int) *big.Rat {
		rest, sum := big.NewInt(total), new(big.Int)
		for j, w := range weights {
			if floored[j] {
				rest.Sub(rest, big.NewInt(1))
			} else {
				sum.Add(sum, big.NewInt(w))
			}
		}
		return new(big.Rat).SetFrac(rest.Mul(rest, big.NewInt(weights[i])), sum)
	}
	for {
		worst := -1
		for i, w := range weights {
			if w > 0 && !floored[i] && proportion(i).Cmp(big.NewRat(1, 1)) < 0 && (worst < 0 || w < weights[worst]) {
				worst = i
			}
		}
		if worst < 0 {
			break
		}
		floored[worst] = true
	}
	named, sum := slices.Index(weights, slices.Max(weights)), int64(0)
	for i, w := range weights {
		sum += got[i]
		if w == 0 {
			testkit.MustEqual(t, got[i], 0, "weight 0 gets")
			continue
		}
		if floored[i] {
			testkit.MustEqual(t, got[i], 1, "broker %d, whose floor is 1: %v of %d over %v", i, got, total, weights)
			continue
		}
		exact := proportion(i)
		low := new(big.Int).Quo(exact.Num(), exact.Denom()).Int64()
		if i == named {
			if got[i] < low || got[i] >= low+int64(len(weights)) {
				t.Fatalf("the named broker %d gets %d, its proportion is %s", i, got[i], exact.FloatString(3))
			}
		} else if got[i] != low {
			t.Fatalf("broker %d gets %d, its proportion is %s: %v of %d over %v", i, got[i], exact.FloatString(3), got, total, weights)
		}
	}
	testkit.MustEqual(t, sum, total, "%v sums to", got)
}

// More traffic never gives a broker a smaller share, nor does less traffic give it a larger share.
func TestMoreLoadNeverMeansLess(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		loads := drawLoads(t)
		for i := range loads {
			loads[i].Publishers = 1
			loads[i].Rate = rapid.Float64Range(1, 1e6).Draw(t, "rate")
			loads[i].MaxBacklog = rapid.Int64Range(1, 1000).Draw(t, "max backlog")
		}
		total := drawTotal(t, len(loads))
		i := rapid.IntRange(0, len(loads)-1).Draw(t, "broker")
		before := testkit.Result(share.Split(share.Proportional, total, loads)).Must(t)
		loads[i].Rate *= rapid.Float64Range(1, 10).Draw(t, "times")
		loads[i].MaxBacklog += rapid.Int64Range(0, 1000).Draw(t, "more")
		after := testkit.Result(share.Split(share.Proportional, total, loads)).Must(t)
		// Rounding: the remainder may move to another named broker.
		slack := int64(len(loads))
		if after[i].Share.Rate < before[i].Share.Rate-tokenbucket.Rate(slack) || after[i].Share.Burst < before[i].Share.Burst-slack {
			t.Fatalf("broker %d had %+v, with more load it has %+v", i, before[i].Share, after[i].Share)
		}
	})
}
