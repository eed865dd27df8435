package placement_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// wherePlaced returns the broker of each publisher, or the fault of the plan.
func wherePlaced(p placement.Plan, d placement.Demand) (map[string]string, error) {
	publishers := d.Expand()
	homes := map[string]string{}
	var rate int64
	var total tokenbucket.Share
	brokers := map[string]bool{}
	for _, q := range p.Quotas {
		if q.Rate < 1 || brokers[q.Broker] {
			return nil, fmt.Errorf("quota %+v", q)
		}
		brokers[q.Broker] = true
		rate += q.Rate
		total.Rate += q.Share.Rate
		total.Burst += q.Share.Burst
		for n, i := range q.Publishers {
			if n > 0 && q.Publishers[n-1] >= i || homes[publishers[i].ID] != "" {
				return nil, fmt.Errorf("publisher %d of %+v", i, q)
			}
			homes[publishers[i].ID] = q.Broker
		}
	}
	want := tokenbucket.Share{Rate: tokenbucket.Rate(cmp.Or(d.RateMilli, 1000*d.Rate)), Burst: d.Burst}
	if rate != d.Rate || total != want || len(homes) != len(publishers) || p.K != len(p.Quotas) {
		return nil, fmt.Errorf("rate %d, shares %+v, %d publishers, k %d", rate, total, len(homes), p.K)
	}
	return homes, nil
}

func drawGroups(t *rapid.T, name string) placement.Demand {
	d := placement.Demand{Topic: "t", Burst: rapid.Int64Range(4, 50).Draw(t, name+" burst")}
	for g := range rapid.IntRange(1, 3).Draw(t, name+" groups") {
		d.Groups = append(d.Groups, placement.Group{Key: fmt.Sprintf("g%d", g), Count: rapid.IntRange(1, 30).Draw(t, "count"), Rate: 1})
	}
	for i := range rapid.IntRange(0, 20).Draw(t, name+" single") {
		d.Publishers = append(d.Publishers, placement.Publisher{ID: fmt.Sprintf("p%d", i), Rate: rapid.SampledFrom([]float64{1, 2, 5}).Draw(t, "rate")})
	}
	total := 0.0
	for _, p := range d.Expand() {
		total += p.Rate
	}
	d.Rate = int64(total) + rapid.Int64Range(0, 50).Draw(t, name+" slack")
	return d
}

// Replace returns a valid plan for a placed topic. Replace moves no publisher without need, and none
// if nothing has changed.
func TestReplace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var brokers []placement.Broker
		for i := range rapid.IntRange(2, 5).Draw(t, "brokers") {
			brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(20, 200).Draw(t, "mcap")})
		}
		policy := rapid.SampledFrom(placement.Policies()).Draw(t, "policy")
		rng := func() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }
		old := drawGroups(t, "old")
		first, err := placement.Place(policy, brokers, old, rng())
		if err != nil {
			return
		}
		before := testkit.Result(wherePlaced(first, old)).Must(t)
		brokerOf := func(id string) string { return before[id] }
		now := old
		if rapid.Bool().Draw(t, "another demand") {
			now = drawGroups(t, "new")
		}
		remaining := brokers
		if rapid.Bool().Draw(t, "a broker goes") {
			remaining = brokers[1:]
		}
		second, err := placement.Replace(policy, remaining, first, brokerOf, now, rng())
		if err != nil {
			if _, direct := placement.Place(policy, remaining, now, rng()); direct == nil {
				t.Fatalf("no plan, though Place has one: %v", err)
			}
			return
		}
		after := testkit.Result(wherePlaced(second, now)).Must(t)
		// No publisher moves to a place that a publisher of the same kind gave up.
		type kind struct {
			key  string
			rate float64
		}
		arrived, departed := map[string]map[kind]bool{}, map[string]map[kind]bool{}
		for _, b := range brokers {
			arrived[b.ID], departed[b.ID] = map[kind]bool{}, map[kind]bool{}
		}
		moved := 0
		for _, p := range now.Expand() {
			k := kind{p.Key, p.Rate}
			if from := before[p.ID]; from != "" && from != after[p.ID] {
				departed[from][k] = true
				arrived[after[p.ID]][k] = true
				moved++
			}
		}
		for b, kinds := range arrived {
			for k := range kinds {
				if departed[b][k] {
					t.Fatalf("publishers %+v moved both to and from %s", k, b)
				}
			}
		}
		if len(remaining) == len(brokers) && now.Rate == old.Rate && fmt.Sprint(now) == fmt.Sprint(old) && overfull(first, old, brokers) == 0 && moved > 0 {
			t.Fatalf("%d publishers moved for nothing", moved)
		}
	})
}

// overfull returns how many publishers have to leave their brokers so that the other publishers' rates
// fit. A broker loses as few publishers as possible, the fastest first. A missing broker loses all
// publishers.
func overfull(p placement.Plan, d placement.Demand, brokers []placement.Broker) (leaving int) {
	publishers := d.Expand()
	for _, q := range p.Quotas {
		var room, sum float64
		for _, b := range brokers {
			if b.ID == q.Broker {
				room = float64(rcap(b))
			}
		}
		var rates []float64
		for _, i := range q.Publishers {
			rates = append(rates, publishers[i].Rate)
			sum += publishers[i].Rate
		}
		slices.Sort(rates)
		for sum > room+1e-6 {
			sum -= rates[len(rates)-1]
			rates = rates[:len(rates)-1]
			leaving++
		}
	}
	return leaving
}

// With tokens and publishers for all brokers, no more publishers move than the brokers have to give
// up, however the rate, the burst, other publishers and other brokers change.
func TestReplaceMovesTheFewest(t *testing.T) {
	changed := 0
	rapid.Check(t, func(t *rapid.T) {
		var brokers []placement.Broker
		for i := range rapid.IntRange(2, 5).Draw(t, "brokers") {
			brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(20, 200).Draw(t, "mcap")})
		}
		policy := rapid.SampledFrom(placement.Policies()).Draw(t, "policy")
		rng := rand.New(rand.NewPCG(1, 2))
		d := drawGroups(t, "the")
		d.Burst += 5
		plan, err := placement.Place(policy, brokers, d, rng)
		if err != nil {
			return
		}
		if to := rapid.SampledFrom(append([]string{""}, "b0", "b1")).Draw(t, "move by hand to"); to != "" {
			moved := rapid.SliceOfNDistinct(rapid.IntRange(0, len(d.Expand())-1), 0, len(d.Expand()), rapid.ID).Draw(t, "moved")
			if shifted, err := placement.Shift(plan, d, moved, to); err == nil {
				plan = shifted
			}
		}
		before := testkit.Result(wherePlaced(plan, d)).Must(t)
		// Rates, publishers and brokers change; the remaining publishers are where they were.
		faster := rapid.SampledFrom([]float64{0.5, 1, 1, 1.25, 2}).Draw(t, "faster")
		now, present := d, plan
		now.Groups, now.Publishers = slices.Clone(d.Groups), slices.Clone(d.Publishers)
		for i := range now.Groups {
			now.Groups[i].Rate *= faster
		}
		for i := range now.Publishers {
			now.Publishers[i].Rate *= faster
		}
		now.Burst = rapid.Int64Range(6, 50).Draw(t, "new burst")
		now.Rate = int64(float64(d.Rate)*faster) + 1 + rapid.Int64Range(0, 20).Draw(t, "more slack")
		if n := rapid.Int64Range(0, 30).Draw(t, "new publishers"); n > 0 {
			now.Groups = append(now.Groups, placement.Group{Key: "new", Count: int(n), Rate: 1})
			now.Rate += n
		}
		others := slices.Clone(brokers)
		for i := range others {
			if rapid.IntRange(0, 3).Draw(t, "changes") == 0 {
				others[i].Mcap = rapid.Int64Range(0, 200).Draw(t, "new mcap")
			}
		}
		others = append(others, placement.Broker{ID: "large", Mcap: rapid.SampledFrom([]int64{1, 500, 5000}).Draw(t, "another broker")})
		if len(now.Expand()) < len(others) {
			return
		}
		fewest := overfull(byID(present, d, now), now, others)
		next, err := placement.Replace(policy, others, present, func(id string) string { return before[id] }, now, rng)
		if err != nil {
			if _, direct := placement.Place(policy, others, now, rng); direct == nil {
				t.Fatalf("no plan, though Place has one: %v", err)
			}
			return
		}
		after := testkit.Result(wherePlaced(next, now)).Must(t)
		moved := 0
		for id, from := range before {
			if after[id] != from {
				moved++
			}
		}
		for _, q := range next.Quotas {
			for _, b := range others {
				if b.ID == q.Broker && q.Rate > rcap(b) {
					t.Fatalf("%s gets %d of %d", b.ID, q.Rate, rcap(b))
				}
			}
		}
		if moved > fewest {
			t.Fatalf("%d moved, %d had to", moved, fewest)
		}
		changed++
	})
	if changed == 0 {
		t.Error("nothing was planned")
	}
}

// byID returns the plan with the indices of another demand that has the same publishers.
func byID(p placement.Plan, d, other placement.Demand) placement.Plan {
	index := map[string]int{}
	for i, publisher := range other.Expand() {
		index[publisher.ID] = i
	}
	publishers := d.Expand()
	p.Quotas = slices.Clone(p.Quotas)
	for n := range p.Quotas {
		var list []int
		for _, i := range p.Quotas[n].Publishers {
			list = append(list, index[publishers[i].ID])
		}
		p.Quotas[n].Publishers = list
	}
	return p
}

func TestShift(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var brokers []placement.Broker
		for i := range 4 {
			brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(20, 200).Draw(t, "mcap")})
		}
		d := drawGroups(t, "the")
		plan, err := placement.Place(placement.SRTM, brokers, d, nil)
		if err != nil {
			return
		}
		before := testkit.Result(wherePlaced(plan, d)).Must(t)
		publishers := d.Expand()
		var moved []int
		chosen := map[string]bool{}
		for i, p := range publishers {
			if rapid.IntRange(0, 3).Draw(t, "moves") == 0 {
				moved = append(moved, i)
				chosen[p.ID] = true
			}
		}
		to := rapid.SampledFrom([]string{"b0", "b3", "new"}).Draw(t, "to")
		shifted, err := placement.Shift(plan, d, moved, to)
		var infeasible *placement.Infeasible
		if errors.As(err, &infeasible) {
			if infeasible.Bound == "burst" && d.Burst > int64(plan.K) {
				t.Fatal(err)
			}
			return
		}
		testkit.Must(t, err)
		after := testkit.Result(wherePlaced(shifted, d)).Must(t)
		for _, p := range publishers {
			want := before[p.ID]
			if chosen[p.ID] {
				want = to
			}
			testkit.MustEqual(t, after[p.ID], want, "broker of publisher %s", p.ID)
		}
	})
}

func TestWithRetiring(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var plan placement.Plan
		var want tokenbucket.Share
		for range rapid.IntRange(1, 5).Draw(t, "k") {
			s := tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 1e6).Draw(t, "rate")), Burst: rapid.Int64Range(1, 20).Draw(t, "burst")}
			plan.Quotas = append(plan.Quotas, placement.Quota{Share: s})
			want.Rate += s.Rate
			want.Burst += s.Burst
		}
		n := rapid.IntRange(0, 4).Draw(t, "retiring")
		quotas, rest, err := placement.WithRetiring(plan, n)
		if err != nil {
			if want.Rate > 1000 {
				t.Fatal(err)
			}
			return
		}
		var sum tokenbucket.Share
		empty := 0
		for i, s := range append(slices.Clone(rest), quotas...) {
			sum.Rate += s.Rate
			sum.Burst += s.Burst
			switch {
			case s.IsZero():
				empty++
				if i < n && int64(i) < want.Burst {
					t.Fatalf("a broker that retires has nothing of %+v", want)
				}
			case s.Rate < 1 || s.Burst < 1:
				t.Fatalf("share %+v", s)
			}
		}
		// The number of quotas with tokens is the burst; the smallest quotas are empty.
		if want := max(0, len(plan.Quotas)+n-int(want.Burst)); empty != want {
			t.Fatalf("%d are empty, want %d", empty, want)
		}
		for i, s := range quotas {
			for j, o := range quotas {
				if s.IsZero() && !o.IsZero() && plan.Quotas[i].Share.Rate > plan.Quotas[j].Share.Rate {
					t.Fatalf("quota %d of %+v is empty, and %d is not", i, plan.Quotas, j)
				}
			}
		}
		if sum != want || len(rest) != n || len(quotas) != len(plan.Quotas) {
			t.Fatalf("%+v and %+v sum to %+v, want %+v", quotas, rest, sum, want)
		}
	})
}
