package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Whoever has no broker has no part of one to take along.
func TestShiftOfAPlanWithUnplacedPublishers(t *testing.T) {
	d := Demand{Topic: "t", Rate: 10, Burst: 5, Publishers: []Publisher{{ID: "a", Rate: 5}, {ID: "b", Rate: 5}}}
	plan, err := Place(SRTM, []Broker{{ID: "x", Mcap: 100}}, d, nil)
	if err != nil {
		t.Fatal(err)
	}
	plan.Unplaced, plan.Quotas[0].Publishers = []int{1}, []int{0}
	if _, err := Shift(plan, d, []int{0}, "y"); !errors.As(err, new(FieldErrors)) {
		t.Errorf("%v", err)
	}
}

// wherePlaced returns the broker of each publisher, or why the plan is none.
func wherePlaced(p Plan, d Demand) (map[string]string, error) {
	publishers := d.Expand()
	at := map[string]string{}
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
		groups := 0
		for n, i := range q.Publishers {
			if n > 0 && q.Publishers[n-1] >= i || at[publishers[i].ID] != "" {
				return nil, fmt.Errorf("publisher %d of %+v", i, q)
			}
			at[publishers[i].ID] = q.Broker
			if publishers[i].Key != "" {
				groups++
			}
		}
		for _, n := range q.Groups {
			groups -= n
		}
		if groups != 0 {
			return nil, fmt.Errorf("groups of %+v", q)
		}
	}
	want := tokenbucket.Share{Rate: tokenbucket.Rate(d.rateMilli()), Burst: d.Burst}
	if rate != d.Rate || total != want || len(at) != len(publishers) || p.K != len(p.Quotas) {
		return nil, fmt.Errorf("rate %d, shares %+v, %d publishers, k %d", rate, total, len(at), p.K)
	}
	return at, nil
}

func drawDemand(t *rapid.T, name string) Demand {
	d := Demand{Topic: "t", Burst: rapid.Int64Range(4, 50).Draw(t, name+" burst")}
	for g := range rapid.IntRange(1, 3).Draw(t, name+" groups") {
		d.Groups = append(d.Groups, Group{Key: fmt.Sprintf("g%d", g), Count: rapid.IntRange(1, 30).Draw(t, "count"), Rate: 1})
	}
	for i := range rapid.IntRange(0, 20).Draw(t, name+" single") {
		d.Publishers = append(d.Publishers, Publisher{ID: fmt.Sprintf("p%d", i), Rate: rapid.SampledFrom([]float64{1, 2, 5}).Draw(t, "rate")})
	}
	total := 0.0
	for _, p := range d.Expand() {
		total += p.Rate
	}
	d.Rate = int64(total) + rapid.Int64Range(0, 50).Draw(t, name+" slack")
	return d
}

// A new plan for a placed topic is a plan, moves nobody who could have stayed,
// and moves nobody at all when nothing changes.
func TestReplace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var brokers []Broker
		for i := range rapid.IntRange(2, 5).Draw(t, "brokers") {
			brokers = append(brokers, Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(20, 200).Draw(t, "mcap")})
		}
		policy := rapid.SampledFrom(Policies()).Draw(t, "policy")
		rng := func() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }
		old := drawDemand(t, "old")
		first, err := Place(policy, brokers, old, rng())
		if err != nil {
			return
		}
		was, err := wherePlaced(first, old)
		if err != nil {
			t.Fatal(err)
		}
		at := func(id string) string { return was[id] }
		now := old
		if rapid.Bool().Draw(t, "another demand") {
			now = drawDemand(t, "new")
		}
		left := brokers
		if rapid.Bool().Draw(t, "a broker goes") {
			left = brokers[1:]
		}
		second, err := Replace(policy, left, at, now, rng())
		if err != nil {
			if _, direct := Place(policy, left, now, rng()); direct == nil {
				t.Fatalf("no plan, though Place has one: %v", err)
			}
			return
		}
		is, err := wherePlaced(second, now)
		if err != nil {
			t.Fatal(err)
		}
		// Nobody moves to a place that one of his kind gave up.
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
			if from := was[p.ID]; from != "" && from != is[p.ID] {
				departed[from][k] = true
				arrived[is[p.ID]][k] = true
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
		if len(left) == len(brokers) && now.Rate == old.Rate && fmt.Sprint(now) == fmt.Sprint(old) && policy == SRTM && moved > 0 {
			t.Fatalf("%d publishers moved for nothing", moved)
		}
	})
}

func TestShift(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var brokers []Broker
		for i := range 4 {
			brokers = append(brokers, Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(20, 200).Draw(t, "mcap")})
		}
		d := drawDemand(t, "the")
		plan, err := Place(SRTM, brokers, d, nil)
		if err != nil {
			return
		}
		was, err := wherePlaced(plan, d)
		if err != nil {
			t.Fatal(err)
		}
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
		shifted, err := Shift(plan, d, moved, to)
		var infeasible *Infeasible
		if errors.As(err, &infeasible) {
			if infeasible.Bound == "burst" && d.Burst > int64(plan.K) {
				t.Fatal(err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		is, err := wherePlaced(shifted, d)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range publishers {
			want := was[p.ID]
			if chosen[p.ID] {
				want = to
			}
			if is[p.ID] != want {
				t.Fatalf("publisher %s is on %s, want %s", p.ID, is[p.ID], want)
			}
		}
	})
}

func TestShiftRefuses(t *testing.T) {
	d := Demand{Topic: "t", Rate: 4, Burst: 1, Groups: []Group{{Count: 4, Rate: 1}}}
	plan, err := Place(SRTM, []Broker{{ID: "a", Mcap: 10}}, d, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		moved []int
		to    string
		want  any
	}{
		"twice":        {[]int{1, 1}, "b", new(FieldErrors)},
		"nobody":       {[]int{4}, "b", new(FieldErrors)},
		"nowhere":      {[]int{1}, "", new(FieldErrors)},
		"a token each": {[]int{1}, "b", new(*Infeasible)},
	} {
		if _, err := Shift(plan, d, c.moved, c.to); !errors.As(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWithRetiring(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var plan Plan
		var want tokenbucket.Share
		for range rapid.IntRange(1, 5).Draw(t, "k") {
			s := tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 1e6).Draw(t, "rate")), Burst: rapid.Int64Range(1, 20).Draw(t, "burst")}
			plan.Quotas = append(plan.Quotas, Quota{Share: s})
			want.Rate += s.Rate
			want.Burst += s.Burst
		}
		n := rapid.IntRange(0, 4).Draw(t, "retiring")
		quotas, rest, err := WithRetiring(plan, n)
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
		// As many as there are tokens; those that go without have the least quotas.
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
