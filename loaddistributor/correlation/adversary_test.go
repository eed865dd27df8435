package correlation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// town is a group of publishers. A test makes them fire, second by second.
type town struct {
	*Learner
	now mono.Time
	all []message
}

// fire makes publishers send within a millisecond of at.
func (w *town) fire(at float64, ids ...string) {
	for i, id := range ids {
		w.all = append(w.all, message{w.now + mono.Time(at*second) + mono.Time(i%8)*mono.Time(100*time.Microsecond), id})
	}
}

// learn plays seconds of firing publishers, and then learns.
func (w *town) learn(seconds int, play func(second int)) {
	for s := range seconds {
		play(s)
		w.arriveAll(sorted(w.all))
		w.all = w.all[:0]
		w.now += mono.Time(time.Second)
	}
	w.Learn()
}

func ids(name string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(name, ".", i))
	}
	return all
}

// labels returns the labels of publishers, each label once.
func (w *town) labels(ids ...string) (all []string) {
	for _, id := range ids {
		all = append(all, w.Key(id))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func TestGroupsThatShareAPublisherDoNotJoin(t *testing.T) {
	rng := seeded(1)
	w := &town{Learner: New(Config{})}
	a, b, both := ids("a", 10), ids("b", 10), ids("both", 3)
	w.learn(100, func(int) {
		at, also := rng.Float64(), rng.Float64()
		w.fire(at, append(both, a...)...)
		w.fire(also, append(both, b...)...)
	})
	if la, lb := w.labels(a...), w.labels(b...); len(la) != 1 || len(lb) != 1 || la[0] == lb[0] || la[0] == "" {
		t.Errorf("labels %q and %q", la, lb)
	}
	if l := w.labels(both...); l[0] == "" {
		t.Errorf("who fires with both is in %q", l)
	}
}

// Old groups are forgotten, and new groups known, when members have fired Firings times.
func TestGroupsFollowWhoFiresTogether(t *testing.T) {
	rng := seeded(1)
	w := &town{Learner: New(Config{})}
	all := ids("p", 40)
	before := func(int) {
		for g := range 4 {
			w.fire(rng.Float64(), all[10*g:10*g+10]...)
		}
	}
	after := func(int) {
		for g := range 4 {
			var members []string
			for i := g; i < 40; i += 4 {
				members = append(members, all[i])
			}
			w.fire(rng.Float64(), members...)
		}
	}
	w.learn(Firings, before)
	testkit.MustEqual(t, len(w.Groups()), 4, "groups")
	first := w.Groups()[0].Label
	w.learn(20, before)
	if l := w.Groups()[0].Label; l != first {
		t.Errorf("label %s, was %s", l, first)
	}
	for range Firings / 8 {
		w.learn(8, after)
	}
	if got := partition(w.Groups(), nil); len(got) != 4 || !strings.HasPrefix(got[0], "p.0 p.12 p.16") {
		t.Errorf("groups %q", got)
	}
	for range Firings / 8 {
		w.learn(8, func(int) {
			for _, id := range all {
				w.fire(rng.Float64(), id)
			}
		})
	}
	testkit.Equal(t, len(w.Groups()), 0, "groups of publishers that fire each on its own")
}

// A publisher that pretends to belong to groups moves only itself.
func TestFeigningMovesNobodyElse(t *testing.T) {
	const victims = 4
	honest := func(rng interface{ Float64() float64 }, w *town, with map[int][]string) {
		for v := range victims {
			w.fire(rng.Float64(), append(ids(fmt.Sprint("honest", v), 8), with[v]...)...)
		}
	}
	feign := ids("feign", 60)
	for name, c := range map[string]struct {
		// rounds is how many learnings of 20 s the honest publishers have for themselves. before is
		// what the feigners do until then, and later what they do afterwards.
		rounds        int
		before, later map[int][]string
		alone         bool // before: the feigners fire together, without the honest publishers
	}{
		"one victim":            {rounds: 5, later: map[int][]string{0: feign}},
		"two victims":           {rounds: 5, later: map[int][]string{0: feign, 1: feign}},
		"all victims":           {rounds: 5, later: map[int][]string{0: feign, 1: feign, 2: feign, 3: feign, 4: feign, 5: feign}},
		"in turns":              {rounds: 8, before: map[int][]string{0: feign}, later: map[int][]string{1: feign}},
		"from the start":        {rounds: 0, later: map[int][]string{0: feign, 1: feign}},
		"a group of their own":  {rounds: 12, alone: true, later: map[int][]string{0: feign}},
		"their own, then two":   {rounds: 12, alone: true, later: map[int][]string{0: feign[:30], 1: feign}},
		"different ones at two": {rounds: 5, later: map[int][]string{0: feign[:40], 1: feign[20:]}},
	} {
		rng := seeded(7)
		w := &town{Learner: New(Config{})}
		before := make([]string, victims)
		check := func(when string, round int) {
			t.Helper()
			seen := map[string]bool{}
			for v := range before {
				l := w.labels(ids(fmt.Sprint("honest", v), 8)...)
				if len(l) != 1 || l[0] == "" || seen[l[0]] || before[v] != "" && l[0] != before[v] {
					t.Fatalf("%s, %s, learning %d: victim %d is in %q, was in %q", name, when, round, v, l, before[v])
				}
				before[v] = l[0]
				seen[l[0]] = true
			}
		}
		for round := range c.rounds {
			w.learn(20, func(int) {
				if round < 3 { // honest publishers are known before others feign
					honest(rng, w, nil)
				} else {
					honest(rng, w, c.before)
				}
				if c.alone {
					w.fire(rng.Float64(), feign...)
				}
			})
			if round > 0 {
				check("before", round)
			}
		}
		sizes := map[string]int{}
		for round := range 5 {
			w.learn(20, func(int) { honest(rng, w, c.later) })
			if c.rounds > 0 || round > 0 {
				check("feigned", round)
			}
			for _, g := range w.Groups() {
				n := len(g.Members)
				if before := sizes[g.Label]; before > 0 && n > before+max(growth, before) {
					t.Errorf("%s: %s grew from %d to %d", name, g.Label, before, n)
				}
				sizes[g.Label] = n
			}
		}
		l := w.labels(feign...)
		t.Logf("%s: feigners are in %q, honest ones in %q", name, l, before)
	}
}

// Publishers that change their identity cost no memory, and break up no group of others.
func TestNewIdentitiesAreBounded(t *testing.T) {
	const room = 200
	rng := seeded(3)
	w := &town{Learner: New(Config{Publishers: room})}
	a := ids("honest", 10)
	w.learn(60, func(int) { w.fire(rng.Float64(), a...) })
	before := w.labels(a...)
	for round := range 20 {
		w.learn(10, func(s int) {
			w.fire(rng.Float64(), a...)
			w.fire(rng.Float64(), ids(fmt.Sprint("new", round, ".", s), 150)...)
		})
		if l := w.labels(a...); len(l) != 1 || l[0] == "" || l[0] != before[0] {
			t.Fatalf("the honest ones are in %q, were in %q", l, before)
		}
		if w.Publishers() > room || len(w.index) > room {
			t.Fatalf("%d publishers, %d names", w.Publishers(), len(w.index))
		}
	}
	if c := w.Counts(); c.Evicted < 10_000 {
		t.Errorf("counts: %+v", c)
	}
}

// Many regular publishers do not make known groups of clocks doubtful.
func TestClocksStayThoughOthersComeInNumbers(t *testing.T) {
	rng := seeded(3)
	w := &town{Learner: New(Config{})}
	a := ids("clock", 6)
	phase := make([]float64, 800)
	for i := range phase {
		phase[i] = rng.Float64()
	}
	w.learn(40, func(int) { w.fire(0.5, a...) })
	before := w.labels(a...)
	for range 2 {
		w.learn(20, func(int) {
			w.fire(0.5, a...)
			for i, at := range phase {
				w.fire(at, fmt.Sprint("other", i))
			}
		})
	}
	if l := w.labels(a...); before[0] == "" || len(l) != 1 || l[0] != before[0] {
		t.Errorf("the clocks are in %q, were in %q", l, before)
	}
}
