package correlation

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// sameGroup compares groups with the fleet's true groups. found is the fraction of pairs of one true
// group that share a label. right is the fraction of pairs with one label that are in one true group.
func sameGroup(groups []Group, f fleet) (found, right float64) {
	same, all := 0, 0
	for _, g := range groups {
		byLabel := map[string]int{}
		for _, m := range g.Members {
			name, _, _ := strings.Cut(m.ID, ".")
			byLabel[name]++
		}
		for _, n := range byLabel {
			same += n * (n - 1) / 2
		}
		all += len(g.Members) * (len(g.Members) - 1) / 2
	}
	if all == 0 {
		return 0, 1
	}
	return float64(same) / float64(f.groups*f.size*(f.size-1)/2), float64(same) / float64(all)
}

// The groups of figures 9 to 11: 250 publishers in groups that fire once a second.
func TestGroupsOfTheFiguresAreFound(t *testing.T) {
	for _, c := range []struct {
		size     int
		periodic bool
		noise    time.Duration // ms
		found    float64
		right    float64
	}{
		{5, false, 0, 1, 1},
		{25, false, 0, 1, 1},
		{25, false, 1, 1, 1},
		{25, false, 2, 1, 1},
		{25, false, 4, 1, 1},
		{5, false, 4, 1, 1},
		{5, true, 0, 1, 0.8}, // clocks that meet look like one group
		{25, true, 0, 1, 0.8},
		{25, true, 1, 0.95, 0.7},
		{25, true, 2, 0.95, 0.7},
		{25, true, 4, 0.9, 0.6},
	} {
		f := fleet{groups: 250 / c.size, size: c.size, periodic: c.periodic, noise: c.noise * time.Millisecond, lasts: 30 * time.Second, batch: 2, name: "g"}
		l := New(Config{})
		l.arriveAll(f.messages(seeded(3)))
		found, right := sameGroup(l.Learn(), f)
		if found < c.found || right < c.right {
			t.Errorf("%+v: %.3f of the pairs found, %.3f of those found right", c, found, right)
		}
	}
}

// Independent publishers are in no group: of 20 fleets, the number with a group is within what
// Significance allows, but for a chance of 1 in 1,000.
func TestIndependentPublishersAreInNoGroup(t *testing.T) {
	for _, f := range []fleet{
		{groups: 100, size: 1, name: "poisson"},
		{groups: 100, size: 1, periodic: true, name: "periodic"},
		{groups: 100, size: 1, periodic: true, noise: 30 * time.Millisecond, name: "jittered"},
		{groups: 100, size: 1, periodic: true, noise: 3 * time.Millisecond, name: "blurred"},
		{groups: 100, size: 1, holes: true, name: "recorded a tenth of the time"},
		{groups: 100, size: 1, bursts: 300 * time.Millisecond, name: "in bursts"},
	} {
		wrong := 0
		for seed := range uint64(20) {
			l := New(Config{})
			f := f
			f.lasts = time.Duration(15+seed) * time.Second
			if f.holes {
				f.lasts *= 10
			}
			l.arriveAll(f.messages(seeded(seed)))
			if len(l.Learn()) > 0 {
				wrong++
			}
		}
		t.Logf("%s: groups in %d of 20 fleets", f.name, wrong)
		if wrong > 2 {
			t.Errorf("%s: groups in %d of 20 fleets", f.name, wrong)
		}
	}
}

// Groups that send in the same tenths of a second, but not at the same instants, are found, without
// any other groups. Later groups are found within the time that is kept.
func TestGroupsThatAreBusyTogether(t *testing.T) {
	for seed := range uint64(3) {
		f := fleet{groups: 20, size: 5, noise: 150 * time.Millisecond, lasts: 140 * time.Second, name: "g"}
		l := New(Config{})
		l.arriveAll(f.messages(seeded(seed)))
		if found, right := sameGroup(l.Learn(), f); found < 0.9 || right < 1 {
			t.Errorf("seed %d: %.3f of the pairs found, %.3f of those found right", seed, found, right)
		}
		f.from = 200 * time.Second
		all := f.messages(seeded(100 + seed))
		for i, m := range all { // the i-th publisher of each group joins the i-th publishers of the next i groups
			var group, member int
			testkit.Result(fmt.Sscanf(m.id, "g%d.%d", &group, &member)).Must(t)
			all[i].id = fmt.Sprintf("g%d.%d", (group+member)%f.groups, member)
		}
		l.arriveAll(all)
		if found, _ := sameGroup(l.Learn(), f); found > 0 {
			t.Errorf("seed %d: %.3f of the pairs that were are", seed, found)
		}
		if n := len(l.Groups()); n < 18 {
			t.Errorf("seed %d: %d groups of those that are together now", seed, n)
		}
	}
}

func TestStateOutlivesARestart(t *testing.T) {
	f := fleet{groups: 20, size: 8, lasts: time.Minute, name: "g"}
	l := New(Config{})
	l.arriveAll(f.messages(seeded(1)))
	before := l.Learn()
	restored := Restore(Config{}, l.labels())
	if restored.next != l.next {
		t.Errorf("the next label is %d, was %d", restored.next, l.next)
	}
	same := func(when string) {
		t.Helper()
		if !slices.EqualFunc(before, restored.Groups(), func(a, b Group) bool { return a.Label == b.Label && len(a.Members) == len(b.Members) }) {
			t.Errorf("%s: other groups", when)
		}
		for _, g := range before {
			for _, m := range g.Members {
				if got := restored.Key(m.ID); got != g.Label {
					t.Errorf("%s: %s is in %q, was in %q", when, m.ID, got, g.Label)
				}
			}
		}
	}
	same("restored")
	restored.Learn()
	same("nothing received")
	f.lasts, f.from = 10*time.Second, time.Hour
	restored.arriveAll(f.messages(seeded(2)))
	restored.Learn()
	same("little received")
	f.lasts, f.from = time.Minute, 2*time.Hour
	restored.arriveAll(f.messages(seeded(3)))
	restored.Learn()
	same("learned again")
}

// labels returns the argument of Restore.
func (l *Learner) labels() map[string]string {
	labels := map[string]string{}
	for _, g := range l.Groups() {
		for _, m := range g.Members {
			labels[m.ID] = g.Label
		}
	}
	return labels
}

func TestRestoreLeavesOutNonsense(t *testing.T) {
	labels := map[string]string{
		"a": "learned-2", "b": "learned-2", "c": "learned-8", "d": "learned-8",
		"alone": "learned-9", "e": "learned-0", "f": "learned-0", "g": "learned-02", "h": "declared", "i": "",
		"j": "learned-99999999999999999999", "k": "learned--3", "": "learned-2", "\xff": "learned-2", strings.Repeat("x", MaxID+1): "learned-2",
	}
	l := Restore(Config{}, labels)
	if got := l.labels(); len(got) != 4 || got["a"] != "learned-2" || got["b"] != "learned-2" || got["c"] != "learned-8" || got["d"] != "learned-8" {
		t.Errorf("restored %v", got)
	}
	testkit.Equal(t, l.next, 10, "the next label: one of before would come again")
	l = Restore(Config{Publishers: 3}, labels)
	if len(l.Groups()) != 1 || l.Publishers() != 2 || l.Key("a") != "learned-2" {
		t.Errorf("with less room: %v", l.Groups())
	}
}

// The result does not depend on the start time, on names, or on the order of simultaneous messages.
func TestOnlyTimesOfPublishersCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := fleet{
			groups: rapid.IntRange(1, 8).Draw(t, "groups"), size: rapid.IntRange(1, 6).Draw(t, "size"), name: "g",
			periodic: rapid.Bool().Draw(t, "periodic"), lasts: time.Duration(rapid.IntRange(1, 60).Draw(t, "lasts")) * time.Second,
			noise: time.Duration(rapid.IntRange(0, 5).Draw(t, "noise")) * time.Millisecond,
		}
		rng := seeded(rapid.Uint64().Draw(t, "seed"))
		all := f.messages(rng)
		l := New(Config{})
		l.arriveAll(all)
		want := l.Learn()

		shift := mono.Time(rapid.Int64Range(0, 1<<60).Draw(t, "shift"))
		moved := make([]message, len(all))
		for i, j := range rng.Perm(len(all)) {
			moved[i] = message{all[j].at + shift, all[j].id}
		}
		l = New(Config{})
		l.arriveAll(sorted(moved))
		if got := l.Learn(); !reflect.DeepEqual(got, want) {
			t.Fatalf("later, and in another order: %v, want %v", got, want)
		}

		name := map[string]string{}
		for i, j := range rng.Perm(f.groups * f.size) {
			name[fmt.Sprintf("g%d.%d", i/f.size, i%f.size)] = fmt.Sprint("p", j)
		}
		l = New(Config{})
		for _, m := range all {
			l.Arrive(name[m.id], m.at)
		}
		if got, want := partition(l.Learn(), nil), partition(want, name); !slices.Equal(got, want) {
			t.Fatalf("with other names: %v, want %v", got, want)
		}
	})
}

// partition returns the members of each group, with new names if name is given.
func partition(groups []Group, name map[string]string) (all []string) {
	for _, g := range groups {
		var ids []string
		for _, m := range g.Members {
			if name != nil {
				m.ID = name[m.ID]
			}
			ids = append(ids, m.ID)
		}
		slices.Sort(ids)
		all = append(all, strings.Join(ids, " "))
	}
	slices.Sort(all)
	return all
}

// Groups of clocks that are within a width of each other stay whole, and keep their labels over
// several learnings.
func TestGroupsOfClocksStayWhole(t *testing.T) {
	f := fleet{groups: 100, size: 5, periodic: true, lasts: 40 * time.Second, name: "g"}
	l := New(Config{})
	before := map[string]string{}
	due := 15 * time.Second
	for _, m := range f.messages(seeded(3)) {
		if time.Duration(m.at) > due {
			due += 10 * time.Second
			l.Learn()
			for g := range f.groups {
				key := l.Key(fmt.Sprintf("g%d.0", g))
				for i := range f.size {
					id := fmt.Sprintf("g%d.%d", g, i)
					if got := l.Key(id); got != key || before[id] != "" && got != before[id] {
						t.Fatalf("%v: %s is in %q, was in %q; the first of its group is in %q", m.at, id, got, before[id], key)
					}
					before[id] = key
				}
			}
		}
		l.Arrive(m.id, m.at)
	}
	if n := len(l.Groups()); n < 90 {
		t.Errorf("%d groups", n)
	}
}
