package placement_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// drawBrokers makes brokers of any capacity, some full or over-allocated. rapid prefers small numbers,
// which would leave one large broker and k = 1, so mostly the brokers are alike.
func drawBrokers(t *rapid.T, limit int, capacity int64) []placement.Broker {
	equal := rapid.IntRange(0, 3).Draw(t, "alike") < 3
	rng := seeded(rapid.Uint64().Draw(t, "seed of brokers"))
	n := rapid.IntRange(1, limit).Draw(t, "brokers")
	if equal {
		n = 1 + rng.IntN(limit)
	}
	brokers := make([]placement.Broker, n)
	for i := range brokers {
		b := placement.Broker{ID: fmt.Sprintf("b%d", i)}
		if equal {
			b.Allocated = rng.Int64N(capacity)
			b.Mcap = b.Allocated + capacity - rng.Int64N(capacity/2+1)
		} else {
			b.Mcap = rapid.Int64Range(0, capacity).Draw(t, "mcap")
			b.Allocated = rapid.Int64Range(0, capacity).Draw(t, "allocated")
		}
		brokers[i] = b
	}
	return brokers
}

// drawRate draws any rate, a rate near the total capacity, or a slightly larger rate.
func drawRate(t *rapid.T, brokers []placement.Broker, limit int64) int64 {
	all := max(1, min(capacity(brokers), limit))
	switch rapid.SampledFrom([]string{"any", "much", "little or too much"}).Draw(t, "how much") {
	case "any":
		return 1 + rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed of rate"), 1)).Int64N(all)
	case "much":
		return all - rapid.Int64Range(0, all/8).Draw(t, "left")
	default:
		return rapid.Int64Range(1, min(all+2, limit)).Draw(t, "rate")
	}
}

func capacity(brokers []placement.Broker) (sum int64) {
	for _, b := range brokers {
		sum += rcap(b)
	}
	return sum
}

func rcap(b placement.Broker) int64 { return max(0, b.Mcap-b.Allocated) }

func find(brokers []placement.Broker, id string) int {
	return slices.IndexFunc(brokers, func(b placement.Broker) bool { return b.ID == id })
}

// check verifies every guarantee of a plan.
func check(t *rapid.T, policy string, brokers []placement.Broker, d placement.Demand, plan placement.Plan) {
	publishers := d.Expand()
	placed := make([]int, len(publishers))
	var rate int64
	var contract tokenbucket.Share
	last := -1
	largest := 0
	for i, q := range plan.Quotas {
		if q.Rate > plan.Quotas[largest].Rate {
			largest = i
		}
	}
	exact := d.RateMilli
	if exact == 0 {
		exact = d.Rate * 1000
	}
	if plan.Policy != policy || plan.K != len(plan.Quotas) {
		t.Fatalf("policy %s, k %d of %d quotas", plan.Policy, plan.K, len(plan.Quotas))
	}
	for i, q := range plan.Quotas {
		l := find(brokers, q.Broker)
		if l <= last {
			t.Fatalf("broker %s is unknown, or out of order", q.Broker)
		}
		last = l
		if q.Rate < 1 || q.Rate > rcap(brokers[l]) {
			t.Fatalf("broker %s gets %d of %d", q.Broker, q.Rate, rcap(brokers[l]))
		}
		rate += q.Rate
		contract.Rate += q.Share.Rate
		contract.Burst += q.Share.Burst
		if q.Share.Rate < 1 || q.Share.Burst < 1 {
			t.Fatalf("broker %s has a quota and the share %+v", q.Broker, q.Share)
		}
		// Quotas are in proportion, rounded down, unless a floor interferes; the named broker has the
		// remainder.
		if r := float64(exact) * float64(q.Rate) / float64(d.Rate); i != largest && math.Abs(float64(q.Share.Rate)-r) > 1+1e-6*r {
			t.Fatalf("broker %s: r_l = %d, its proportion is %.2f", q.Broker, q.Share.Rate, r)
		}
		groups := map[string]int{}
		for j, p := range q.Publishers {
			if j > 0 && q.Publishers[j-1] >= p {
				t.Fatalf("broker %s: publishers out of order", q.Broker)
			}
			placed[p]++
			if key := publishers[p].Key; key != "" {
				groups[key]++
			}
		}
		if keys := d.Keys(q.Publishers); !reflect.DeepEqual(groups, keys) {
			t.Fatalf("broker %s: groups %v, counted %v", q.Broker, keys, groups)
		}
	}
	testkit.MustEqual(t, rate, d.Rate, "quotas sum to")
	testkit.MustEqual(t, contract, (tokenbucket.Share{Rate: tokenbucket.Rate(exact), Burst: d.Burst}), "shares sum to")
	for i, n := range placed {
		testkit.MustEqual(t, n, 1, "places of publisher %s", publishers[i].ID)
	}
}

// deviations returns, for each quota, the sum of the publishers' rates less the quota's proportion of
// all rates, in units of the largest rate.
func deviations(d placement.Demand, plan placement.Plan) []float64 {
	publishers := d.Expand()
	var sum, largest float64
	for _, p := range publishers {
		sum += p.Rate
		largest = max(largest, p.Rate)
	}
	deviations := make([]float64, len(plan.Quotas))
	for i, q := range plan.Quotas {
		deviations[i] = -sum * float64(q.Rate) / float64(d.Rate)
		for _, p := range q.Publishers {
			deviations[i] += publishers[p].Rate
		}
		deviations[i] /= largest
	}
	return deviations
}

// drawDemand draws a demand for as much as the brokers can carry, or a little more.
func drawDemand(t *rapid.T, brokers []placement.Broker, equal bool) placement.Demand {
	d := placement.Demand{Topic: "t", Rate: drawRate(t, brokers, placement.MaxRate), Burst: rapid.Int64Range(1, 20).Draw(t, "burst")}
	if rapid.Bool().Draw(t, "b is ample") {
		d.Burst = 1000
	}
	if rapid.Bool().Draw(t, "fractional") {
		d.RateMilli = d.Rate*1000 - rapid.Int64Range(0, 999).Draw(t, "less")
	}
	// The rates are too small to exceed the contract.
	rate := func() float64 {
		if equal {
			return 1e-6
		}
		return rapid.Float64Range(1e-9, 1e-6).Draw(t, "publisher's rate")
	}
	for g := range rapid.IntRange(0, 4).Draw(t, "groups") {
		d.Groups = append(d.Groups, placement.Group{Key: fmt.Sprintf("g%d", g), Count: rapid.IntRange(1, 30).Draw(t, "count"), Rate: rate()})
	}
	if rapid.Bool().Draw(t, "pool") {
		d.Groups = append(d.Groups, placement.Group{Count: rapid.IntRange(1, 30).Draw(t, "count"), Rate: rate()})
	}
	for p := range rapid.IntRange(0, 10).Draw(t, "publishers") {
		d.Publishers = append(d.Publishers, placement.Publisher{
			ID: fmt.Sprintf("p%d", p), Key: rapid.SampledFrom([]string{"", "g0", "g1", "h"}).Draw(t, "key"), Rate: rate(),
		})
	}
	return d
}

// The names of correlation keys decide nothing: learned keys serve as declared keys do.
func TestNamesOfKeysDecideNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		brokers := drawBrokers(t, 6, 1e9)
		d := drawDemand(t, brokers, rapid.Bool().Draw(t, "equal rates"))
		d.Publishers, d.Groups = d.Expand(), nil
		renamed := d
		renamed.Publishers = slices.Clone(d.Publishers)
		rng, names := seeded(rapid.Uint64().Draw(t, "seed")), map[string]string{"": ""}
		for i, p := range d.Publishers {
			if _, found := names[p.Key]; !found {
				names[p.Key] = fmt.Sprintf("learned-%d", rng.Uint64())
			}
			renamed.Publishers[i].Key = names[p.Key]
		}
		plan, err := placement.Place(placement.SRTM, brokers, d, nil)
		other, err2 := placement.Place(placement.SRTM, brokers, renamed, nil)
		testkit.MustEqual(t, fmt.Sprint(err), fmt.Sprint(err2), "%v, renamed %v", err, err2)
		for i, q := range plan.Quotas {
			if !slices.Equal(q.Publishers, other.Quotas[i].Publishers) {
				t.Fatalf("broker %s: publishers %v, renamed %v", q.Broker, q.Publishers, other.Quotas[i].Publishers)
			}
		}
	})
}

func TestEveryPlanKeepsItsPromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		brokers := drawBrokers(t, 6, rapid.SampledFrom([]int64{5, 1000, 1e9}).Draw(t, "size"))
		equal := rapid.Bool().Draw(t, "equal rates")
		d := drawDemand(t, brokers, equal)
		policy := rapid.SampledFrom(placement.Policies()).Draw(t, "policy")
		seed := rapid.Uint64().Draw(t, "seed")
		plan, err := placement.Place(policy, brokers, d, seeded(seed))
		again, err2 := placement.Place(policy, brokers, d, seeded(seed))
		if !reflect.DeepEqual(plan, again) || fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Fatalf("twice the same question, two answers:\n%+v, %v\n%+v, %v", plan, err, again, err2)
		}
		n := len(d.Expand())
		var bound *placement.Infeasible
		if errors.As(err, &bound) {
			ok := bound.Need > bound.Have
			switch bound.Bound {
			case "rcap":
				ok = ok && bound.Need == d.Rate && bound.Have == capacity(brokers)
			case "burst":
				ok = ok && bound.Have == d.Burst && bound.Need <= int64(len(brokers))
			case "publishers":
				ok = ok && bound.Have == int64(n) && n > 0 && bound.Need <= int64(len(brokers))
			default:
				ok = false
			}
			if !ok {
				t.Fatalf("%+v is not so", bound)
			}
			return
		}
		testkit.Must(t, err)
		check(t, policy, brokers, d, plan)
		if n == 0 {
			return
		}
		for i, deviation := range deviations(d, plan) {
			// Blind policies, and a demand with only a pool: the proof is in assign.go. With groups,
			// each group has its own remainders; 1.1 is the maximum over 20,000 random demands of up
			// to 60 groups.
			limit := 1.0
			if policy == placement.SRTM {
				limit = 2
			}
			if math.Abs(deviation) >= limit+1e-6 {
				t.Fatalf("%s: broker %s is %.3f publishers off its proportion", policy, plan.Quotas[i].Broker, deviation)
			}
		}
	})
}

func TestGroupsAreSplitInProportion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		brokers := drawBrokers(t, 6, 1000)
		d := drawDemand(t, brokers, rapid.Bool().Draw(t, "equal rates"))
		plan, err := placement.Place(placement.SRTM, brokers, d, nil)
		if err != nil {
			t.Skip(err)
		}
		sizes := map[string]int{}
		for _, p := range d.Expand() {
			if p.Key != "" {
				sizes[p.Key]++
			}
		}
		for key, size := range sizes {
			for _, q := range plan.Quotas {
				exact := float64(size) * float64(q.Rate) / float64(d.Rate)
				if math.Abs(float64(d.Keys(q.Publishers)[key])-exact) >= 1 {
					t.Fatalf("broker %s gets %d of the %d of group %s, its proportion is %.3f", q.Broker, d.Keys(q.Publishers)[key], size, key, exact)
				}
			}
		}
	})
}

// Many groups have a size that equal quotas do not divide. Each broker gets the extra publisher
// equally often.
func TestRemaindersGoRound(t *testing.T) {
	for _, c := range []struct{ k, size, groups int }{{3, 10, 90}, {3, 11, 90}, {4, 25, 80}, {6, 25, 60}, {6, 7, 31}, {7, 1, 100}} {
		var brokers []placement.Broker
		for i := range c.k {
			brokers = append(brokers, placement.Broker{ID: fmt.Sprint(i), Mcap: 1000})
		}
		d := placement.Demand{Topic: "t", Rate: int64(c.k) * 1000, Burst: 100}
		for g := range c.groups {
			d.Groups = append(d.Groups, placement.Group{Key: fmt.Sprint(g), Count: c.size, Rate: 0.1})
		}
		plan := testkit.Result(placement.Place(placement.SRTM, brokers, d, nil)).Must(t)
		more := make([]int, c.k)
		for l, q := range plan.Quotas {
			for _, n := range d.Keys(q.Publishers) {
				if n > c.size/c.k {
					more[l]++
				}
			}
		}
		if slices.Max(more)-slices.Min(more) > 1 {
			t.Errorf("%d groups of %d over %d brokers: remainders went %v", c.groups, c.size, c.k, more)
		}
	}
}

// A single group: its remainders go to the largest fractions, not to the first brokers.
func TestLargestRemainder(t *testing.T) {
	brokers := []placement.Broker{{ID: "a", Mcap: 11}, {ID: "b", Mcap: 17}, {ID: "c", Mcap: 72}}
	d := placement.Demand{Topic: "t", Rate: 100, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 10, Rate: 1}}}
	plan := testkit.Result(placement.Place(placement.SRTM, brokers, d, nil)).Must(t)
	for i, want := range []int{1, 2, 7} { // of 1.1, 1.7, 7.2
		if got := d.Keys(plan.Quotas[i].Publishers)["g"]; got != want {
			t.Errorf("broker %s gets %d of the group, want %d", plan.Quotas[i].Broker, got, want)
		}
	}
}

// A broker's part of a divisible group is exact, even if the broker is behind from earlier groups. The
// next group that does not divide makes up for it.
func TestNoRemainderWhereItDivides(t *testing.T) {
	brokers := []placement.Broker{{ID: "a", Mcap: 50}, {ID: "b", Mcap: 30}, {ID: "c", Mcap: 20}}
	d := placement.Demand{Topic: "t", Rate: 100, Burst: 10}
	for i, size := range []int{1, 1, 1, 4} {
		d.Groups = append(d.Groups, placement.Group{Key: fmt.Sprint("g", i), Count: size, Rate: 1})
	}
	plan := testkit.Result(placement.Place(placement.SRTM, brokers, d, nil)).Must(t)
	// After three groups of one publisher, a is half a publisher behind, and c 0.4 ahead. Of four
	// publishers, the exact parts are 2, 1.2 and 0.8.
	for i, want := range []map[string]int{{"g0": 1, "g3": 2}, {"g1": 1, "g3": 1}, {"g2": 1, "g3": 1}} {
		if got := d.Keys(plan.Quotas[i].Publishers); !reflect.DeepEqual(got, want) {
			t.Errorf("broker %s gets %v, want %v", plan.Quotas[i].Broker, got, want)
		}
	}
}

// Blind policies place at random. They almost never split each of 100 groups of 25 evenly over 3
// brokers, as srtm does.
func TestBlindIsBlind(t *testing.T) {
	d := sensors(2500)
	brokers := []placement.Broker{{ID: "a", Mcap: 9000}, {ID: "b", Mcap: 9000}, {ID: "c", Mcap: 9000}}
	for _, policy := range placement.Policies() {
		plan, err := placement.Place(policy, brokers, d, seeded(3))
		testkit.Must(t, err)
		uneven := 0
		for _, g := range d.Groups {
			for _, q := range plan.Quotas {
				if n := d.Keys(q.Publishers)[g.Key]; n < 8 || n > 9 {
					uneven++
				}
			}
		}
		if policy == placement.SRTM && uneven > 0 {
			t.Errorf("srtm: %d uneven parts", uneven)
		}
		if policy != placement.SRTM && uneven < 100 {
			t.Errorf("%s: only %d of 300 parts are uneven", policy, uneven)
		}
		if again, err := placement.Place(policy, brokers, d, seeded(4)); err != nil || reflect.DeepEqual(plan, again) != (policy == placement.SRTM) {
			t.Errorf("%s with another seed: the same plan is %t", policy, reflect.DeepEqual(plan, again))
		}
	}
}

// bruteForce tries every division of rate over every set of brokers of the smallest sufficient size.
// It considers the sets that keep accepts, and returns the best quota vector by better.
func bruteForce(brokers []placement.Broker, rate int64, size int, keep func([]int64) bool, better func(a, b []int64) bool) (best []int64) {
	quotas := make([]int64, len(brokers))
	var search func(i int, rest int64)
	search = func(i int, rest int64) {
		if i == len(brokers) {
			used := 0
			for _, q := range quotas {
				if q > 0 {
					used++
				}
			}
			if rest == 0 && used <= size && keep(quotas) && (best == nil || better(quotas, best)) {
				best = slices.Clone(quotas)
			}
			return
		}
		for q := int64(0); q <= min(rest, rcap(brokers[i])); q++ {
			quotas[i] = q
			search(i+1, rest-q)
		}
		quotas[i] = 0
	}
	search(0, rate)
	return best
}

// smallestK returns the size of the smallest set of brokers that can carry rate.
func smallestK(brokers []placement.Broker, rate int64) int {
	best := math.MaxInt
	for set := range 1 << len(brokers) {
		var sum int64
		size := 0
		for i, b := range brokers {
			if set&(1<<i) != 0 {
				sum += rcap(b)
				size++
			}
		}
		if sum >= rate {
			best = min(best, size)
		}
	}
	return best
}

// fairer compares two divisions in ascending order: the larger smallest part is better, then the
// larger second part, and so on.
func fairer(a, b []int64) bool {
	return slices.Compare(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))) > 0
}

func positive(quotas []int64) []int64 {
	return slices.DeleteFunc(slices.Clone(quotas), func(q int64) bool { return q == 0 })
}

func TestQuotasAgainstBruteForce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		brokers := drawBrokers(t, 4, 6)
		all := capacity(brokers)
		if all == 0 {
			t.Skip("no capacity")
		}
		d := placement.Demand{Topic: "t", Rate: min(drawRate(t, brokers, 14), all), Burst: 10}
		place := func(policy string) (placement.Plan, []int64) {
			plan := testkit.Result(placement.Place(policy, brokers, d, nil)).Must(t)
			check(t, policy, brokers, d, plan)
			quotas := make([]int64, len(brokers))
			for _, q := range plan.Quotas {
				quotas[find(brokers, q.Broker)] = q.Rate
			}
			return plan, quotas
		}
		k := smallestK(brokers, d.Rate)
		always := func([]int64) bool { return true }

		srtm, quotas := place(placement.SRTM)
		if srtm.K != k {
			t.Fatalf("k = %d, %d brokers are enough", srtm.K, k)
		}
		// Among all sets of k brokers and all divisions over each set.
		best := bruteForce(brokers, d.Rate, k, always, func(a, b []int64) bool { return fairer(positive(a), positive(b)) })
		if fairer(positive(best), positive(quotas)) || fairer(positive(quotas), positive(best)) {
			t.Fatalf("quotas %v, %v would be fairer", quotas, best)
		}
		if _, maxmin := place(placement.MaxMin); !slices.Equal(maxmin, quotas) {
			t.Fatalf("maxmin has other quotas than srtm: %v and %v", maxmin, quotas)
		}

		// Conc: the most equal loads over the same brokers.
		conc, concQuotas := place(placement.Conc)
		testkit.MustEqual(t, conc.K, k, "conc: k")
		loads := func(q []int64) (l []int64) {
			for i, b := range brokers {
				if quotas[i] > 0 {
					l = append(l, b.Allocated+q[i])
				}
			}
			return l
		}
		sameLoads := func(q []int64) bool {
			for i := range q {
				if q[i] > 0 && quotas[i] == 0 {
					return false
				}
			}
			return true
		}
		equal := bruteForce(brokers, d.Rate, k, sameLoads, func(a, b []int64) bool { return fairer(loads(a), loads(b)) })
		if fairer(loads(equal), loads(concQuotas)) {
			t.Fatalf("conc: quotas %v make loads %v, %v would make %v", concQuotas, loads(concQuotas), equal, loads(equal))
		}

		// Load balance: over all brokers, including brokers without capacity.
		_, spread := place(placement.LoadBalance)
		even := bruteForce(brokers, d.Rate, len(brokers), always, fairer)
		if fairer(even, spread) {
			t.Fatalf("loadbalance: %v, %v is more even", spread, even)
		}
	})
}

// Place does not change the caller's arguments.
func TestPlaceOnlyReads(t *testing.T) {
	brokers, d := paper(), sensors(8000)
	d.Publishers = []placement.Publisher{{ID: "z", Key: "g1", Rate: 0.5}, {ID: "a", Rate: 0.25}}
	d.Rate++
	before := fmt.Sprint(brokers, d)
	for _, policy := range placement.Policies() {
		testkit.Result(placement.Place(policy, brokers, d, seeded(1))).Must(t)
	}
	testkit.Equal(t, fmt.Sprint(brokers, d), before, "the arguments were changed")
}

// The design's budget is 50 ms for 10,000 publishers on 100 brokers.
func BenchmarkPlace(b *testing.B) {
	var brokers []placement.Broker
	for i := range 100 {
		brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%03d", i), Mcap: 64_000, Allocated: 63_000 - int64(i)})
	}
	different := sensors(10_000)
	different.Groups = nil
	for i := range 10_000 {
		different.Publishers = append(different.Publishers, placement.Publisher{
			ID: fmt.Sprintf("p%d", i), Key: fmt.Sprintf("g%d", i%400), Rate: float64(1+i%97) / 10,
		})
	}
	for _, c := range []struct {
		name   string
		demand placement.Demand
	}{{"groups", sensors(10_000)}, {"publishers", different}} {
		c.demand.Rate, c.demand.Burst = 100_000, 1000
		for _, policy := range placement.Policies() {
			b.Run(c.name+"/"+policy, func(b *testing.B) {
				rng := seeded(1)
				var k int
				for b.Loop() {
					plan := testkit.Result(placement.Place(policy, brokers, c.demand, rng)).Must(b)
					k = plan.K
				}
				b.ReportMetric(float64(k), "brokers")
			})
		}
	}
}
