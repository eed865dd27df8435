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
		second, err := Replace(policy, left, first, at, now, rng())
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
		if len(left) == len(brokers) && now.Rate == old.Rate && fmt.Sprint(now) == fmt.Sprint(old) && overfull(first, old, brokers) == 0 && moved > 0 {
			t.Fatalf("%d publishers moved for nothing", moved)
		}
	})
}

// overfull is how many publishers have to leave their brokers for the rates of the
// others to fit: of each as few as can, those of the highest rates. Of a broker that is
// gone, all.
func overfull(p Plan, d Demand, brokers []Broker) (leave int) {
	publishers := d.Expand()
	for _, q := range p.Quotas {
		var rcap, sum float64
		for _, b := range brokers {
			if b.ID == q.Broker {
				rcap = float64(b.rcap())
			}
		}
		var rates []float64
		for _, i := range q.Publishers {
			rates = append(rates, publishers[i].Rate)
			sum += publishers[i].Rate
		}
		slices.Sort(rates)
		for sum > rcap+1e-6 {
			sum -= rates[len(rates)-1]
			rates = rates[:len(rates)-1]
			leave++
		}
	}
	return leave
}

// With tokens and publishers for all brokers, no more move than a broker has to give
// up: whatever becomes of the rate, the burst, other publishers and other brokers.
func TestReplaceMovesTheFewest(t *testing.T) {
	changed := 0
	rapid.Check(t, func(t *rapid.T) {
		var brokers []Broker
		for i := range rapid.IntRange(2, 5).Draw(t, "brokers") {
			brokers = append(brokers, Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(20, 200).Draw(t, "mcap")})
		}
		policy := rapid.SampledFrom(Policies()).Draw(t, "policy")
		rng := rand.New(rand.NewPCG(1, 2))
		d := drawDemand(t, "the")
		d.Burst += 5
		plan, err := Place(policy, brokers, d, rng)
		if err != nil {
			return
		}
		if to := rapid.SampledFrom(append([]string{""}, "b0", "b1")).Draw(t, "move by hand to"); to != "" {
			moved := rapid.SliceOfNDistinct(rapid.IntRange(0, d.count()-1), 0, d.count(), rapid.ID).Draw(t, "moved")
			if shifted, err := Shift(plan, d, moved, to); err == nil {
				plan = shifted
			}
		}
		was, err := wherePlaced(plan, d)
		if err != nil {
			t.Fatal(err)
		}
		// Other rates, publishers and brokers: the same publishers where they were.
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
			now.Groups = append(now.Groups, Group{Key: "new", Count: int(n), Rate: 1})
			now.Rate += n
		}
		others := slices.Clone(brokers)
		for i := range others {
			if rapid.IntRange(0, 3).Draw(t, "changes") == 0 {
				others[i].Mcap = rapid.Int64Range(0, 200).Draw(t, "new mcap")
			}
		}
		others = append(others, Broker{ID: "large", Mcap: rapid.SampledFrom([]int64{1, 500, 5000}).Draw(t, "another broker")})
		if now.count() < len(others) {
			return
		}
		fewest := overfull(byID(present, d, now), now, others)
		next, err := Replace(policy, others, present, func(id string) string { return was[id] }, now, rng)
		if err != nil {
			if _, direct := Place(policy, others, now, rng); direct == nil {
				t.Fatalf("no plan, though Place has one: %v", err)
			}
			return
		}
		is, err := wherePlaced(next, now)
		if err != nil {
			t.Fatal(err)
		}
		moved := 0
		for id, from := range was {
			if is[id] != from {
				moved++
			}
		}
		for _, q := range next.Quotas {
			for _, b := range others {
				if b.ID == q.Broker && q.Rate > b.rcap() {
					t.Fatalf("%s gets %d of %d", b.ID, q.Rate, b.rcap())
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

// byID is the plan with the indices of another demand that has the same publishers.
func byID(p Plan, d, other Demand) Plan {
	index := map[string]int{}
	for i, one := range other.Expand() {
		index[one.ID] = i
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

// What moved hundreds without need.
func TestNobodyMovesWhoNeedNot(t *testing.T) {
	two := []Group{{Key: "a", Count: 200, Rate: 1}, {Key: "b", Count: 200, Rate: 1}}
	even := []Broker{{ID: "x", Mcap: 300}, {ID: "y", Mcap: 300}}
	for name, c := range map[string]struct {
		policy   string
		brokers  []Broker
		before   Demand
		byHand   int // to the second broker
		after    Demand
		brokers2 []Broker
		want     map[string]int
	}{
		"a lower rate that one broker could carry, and a free third": {
			SRTM, even, Demand{Rate: 440, Burst: 40, Groups: two}, 0, Demand{Rate: 400, Burst: 30, Groups: two},
			[]Broker{{ID: "x", Mcap: 400}, {ID: "y", Mcap: 300}, {ID: "z", Mcap: 9000}}, map[string]int{"x": 200, "y": 200},
		},
		"after a move by hand": {
			SRTM, even, Demand{Rate: 400, Burst: 40, Groups: two}, 51, Demand{Rate: 410, Burst: 40, Groups: two},
			even, map[string]int{"x": 149, "y": 251},
		},
		"at random": {
			LoadBalance, even, Demand{Rate: 400, Burst: 40, Groups: two}, 0, Demand{Rate: 420, Burst: 40, Groups: two},
			even, map[string]int{"x": 200, "y": 200},
		},
		"more rate than its brokers carry, and a large third": {
			SRTM, []Broker{{ID: "x", Mcap: 600}, {ID: "y", Mcap: 600}},
			Demand{Rate: 1000, Burst: 40, Groups: []Group{{Key: "a", Count: 1000, Rate: 1}}}, 0,
			Demand{Rate: 1250, Burst: 40, Groups: []Group{{Key: "a", Count: 1000, Rate: 1}, {Key: "c", Count: 250, Rate: 1}}},
			[]Broker{{ID: "x", Mcap: 600}, {ID: "y", Mcap: 600}, {ID: "z", Mcap: 5000}}, map[string]int{"x": 500, "y": 500, "z": 250},
		},
		"more rate alone, and a large third": {
			SRTM, []Broker{{ID: "x", Mcap: 600}, {ID: "y", Mcap: 600}},
			Demand{Rate: 1000, Burst: 40, Groups: []Group{{Key: "a", Count: 1000, Rate: 1}}}, 0,
			Demand{Rate: 1250, Burst: 40, Groups: []Group{{Key: "a", Count: 1000, Rate: 1}}},
			[]Broker{{ID: "x", Mcap: 600}, {ID: "y", Mcap: 600}, {ID: "z", Mcap: 5000}}, map[string]int{"x": 500, "y": 500},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.before.Topic, c.after.Topic = "t", "t"
			rng := rand.New(rand.NewPCG(1, 2))
			plan, err := Place(c.policy, c.brokers, c.before, rng)
			if err != nil {
				t.Fatal(err)
			}
			if c.byHand > 0 {
				if plan, err = Shift(plan, c.before, plan.Quotas[0].Publishers[:c.byHand], "y"); err != nil {
					t.Fatal(err)
				}
			}
			was, err := wherePlaced(plan, c.before)
			if err != nil {
				t.Fatal(err)
			}
			plan, err = Replace(c.policy, c.brokers2, plan, func(id string) string { return was[id] }, c.after, rng)
			if err != nil {
				t.Fatal(err)
			}
			is, err := wherePlaced(plan, c.after)
			if err != nil {
				t.Fatal(err)
			}
			moved, count := 0, map[string]int{}
			for id, b := range is {
				count[b]++
				if was[id] != "" && was[id] != b {
					moved++
				}
			}
			if moved > 0 || fmt.Sprint(count) != fmt.Sprint(c.want) {
				t.Errorf("%d moved, now %v, want %v", moved, count, c.want)
			}
		})
	}
}

// A topic that has declared no publishers keeps its brokers; quotas are what it has.
func TestReplaceWithoutPublishers(t *testing.T) {
	brokers := []Broker{{ID: "x", Mcap: 300}, {ID: "y", Mcap: 300}}
	d := Demand{Topic: "t", Rate: 400, Burst: 10}
	plan, err := Place(SRTM, brokers, d, nil)
	if err != nil {
		t.Fatal(err)
	}
	d.Rate = 500
	for name, others := range map[string][]Broker{
		"[{x 250} {y 250}]": append(slices.Clone(brokers), Broker{ID: "z", Mcap: 9000}),
		"[{x 250} {z 250}]": {brokers[0], {ID: "z", Mcap: 9000}},
	} {
		next, err := Replace(SRTM, others, plan, func(string) string { return "" }, d, nil)
		var got []struct {
			Broker string
			Rate   int64
		}
		for _, q := range next.Quotas {
			got = append(got, struct {
				Broker string
				Rate   int64
			}{q.Broker, q.Rate})
		}
		if err != nil || fmt.Sprint(got) != name {
			t.Errorf("%v %v, want %s", got, err, name)
		}
	}
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
