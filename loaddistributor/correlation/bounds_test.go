package correlation

import (
	"encoding/binary"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A message of a known publisher allocates no memory.
func TestAMessageAllocatesNothing(t *testing.T) {
	l := New(Config{})
	names := ids("p", 1000)
	now := mono.Time(0)
	arrive := func() {
		now += mono.Time(time.Millisecond)
		l.Arrive(names[int(now)/1e6%len(names)], now)
	}
	for range 130_000 {
		arrive()
	}
	testkit.Equal(t, testing.AllocsPerRun(10_000, arrive), 0, "allocations a message")
}

// heap returns the heap in use, in bytes.
func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// 100,000 publishers: every tenth belongs to a group of ten, and the others fire rarely. The groups
// are found within the allowed memory. In the benchmark all 100,000 fire.
func TestAHundredThousandPublishers(t *testing.T) {
	const publishers, size = 100_000, 10
	names := ids("publisher", publishers)
	rng := seeded(1)
	before := heap()
	l := New(Config{})
	now := 0.0
	for range 12 * publishers / size / size { // each group fires about 12 times
		now += rng.ExpFloat64() * 5e-3
		g := rng.IntN(publishers / size / size)
		for i := range size {
			l.Arrive(names[g*size+i], mono.Time(now*second))
		}
		for range 34 {
			l.Arrive(names[publishers/size+rng.IntN(publishers-publishers/size)], mono.Time((now+rng.Float64()*1e-3)*second))
		}
	}
	groups := l.Learn()
	bytes := float64(heap()-before) / float64(l.Publishers())
	grouped := 0
	for _, g := range groups {
		grouped += len(g.Members)
		for _, m := range g.Members {
			var n, first int
			if _, err := fmt.Sscanf(g.Members[0].ID+" "+m.ID, "publisher.%d publisher.%d", &first, &n); err != nil || n/size != first/size || n >= publishers/size {
				t.Errorf("%s is with %s (%v)", m.ID, g.Members[0].ID, err)
			}
		}
	}
	t.Logf("%d groups, %d of %d publishers in them, %.0f bytes each", len(groups), grouped, l.Publishers(), bytes)
	if grouped < publishers/size*7/10 || l.Publishers() < publishers*9/10 {
		t.Errorf("%d of %d publishers in groups", grouped, l.Publishers())
	}
	if bytes > BytesPerPublisher {
		t.Errorf("%.0f bytes a publisher", bytes)
	}
	runtime.KeepAlive(l)
}

// check reports faults in a learner's groups.
func (l *Learner) check(t *testing.T) {
	t.Helper()
	seen := map[string]bool{}
	for i, g := range l.Groups() {
		if len(g.Members) < 2 || i > 0 && g.number <= l.Groups()[i-1].number {
			t.Fatalf("group %d: %+v", i, g)
		}
		for _, m := range g.Members {
			if seen[m.ID] || l.Key(m.ID) != g.Label || m.Joined > l.learning {
				t.Fatalf("member %+v of %s, has %s", m, g.Label, l.Key(m.ID))
			}
			seen[m.ID] = true
		}
	}
	if len(l.index) != len(l.publishers) || len(l.publishers) > l.maxPublishers {
		t.Fatalf("%d names of %d publishers", len(l.index), len(l.publishers))
	}
	if again := Restore(Config{Publishers: l.maxPublishers}, l.labels()); !maps.Equal(again.labels(), l.labels()) {
		t.Fatalf("restored: %v of %v", again.labels(), l.labels())
	}
}

// Whatever arrives at any time, groups are sound and the record is bounded.
func FuzzArrivals(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Add(slices.Repeat([]byte{0, 3, 1, 3, 2, 3, 9, 200}, 40))
	f.Add(slices.Repeat([]byte{1, 0xf0, 2, 0xf0, 3, 0xff}, 20))
	f.Fuzz(func(t *testing.T, steps []byte) {
		l := New(Config{Publishers: 12})
		now := mono.Time(0)
		for i := 0; i+1 < len(steps); i += 2 {
			switch gap := steps[i+1]; {
			case gap >= 0xfc: // to anywhere
				if i+10 > len(steps) {
					break
				}
				now = mono.Time(binary.LittleEndian.Uint64(steps[i+2:]))
			case gap >= 0xf0:
				l.Learn()
				l.check(t)
			default:
				now += mono.Time(1) << (gap % 48)
			}
			l.Arrive(fmt.Sprint(steps[i]%20), now)
		}
		l.Learn()
		l.check(t)
	})
}

// Restored groups are as they were, whatever other labels are given.
func FuzzRestore(f *testing.F) {
	f.Add("a learned-2 b learned-2 c learned-8 d learned-8 e learned-9")
	f.Add("a learned-0 b learned-0 c learned- d x")
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		labels := map[string]string{}
		for words := strings.Split(text, " "); len(words) > 1; words = words[2:] {
			labels[words[0]] = words[1]
		}
		l := Restore(Config{}, labels)
		l.check(t)
		for id, label := range l.labels() {
			if labels[id] != label {
				t.Fatalf("%q is in %q, was in %q", id, label, labels[id])
			}
		}
		before := l.labels()
		l.Learn()
		if l.check(t); !maps.Equal(before, l.labels()) {
			t.Fatalf("after a learning of nothing: %v, before: %v", l.labels(), before)
		}
	})
}

// The cost of a message from one of 1,000 publishers at 10,000 msg/s.
func BenchmarkArrive(b *testing.B) {
	for _, publishers := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(publishers), func(b *testing.B) {
			names, l, now, i := ids("publisher", publishers), New(Config{}), mono.Time(0), 0
			arrive := func() {
				now += mono.Time(100 * time.Microsecond)
				l.Arrive(names[i*7919%publishers], now)
				i++
			}
			for range 2 * publishers {
				arrive()
			}
			b.ReportAllocs()
			for b.Loop() {
				arrive()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)*10_000/1e7, "%core@10k/s")
		})
	}
}

// A learning, with all records full.
func BenchmarkLearn(b *testing.B) {
	for _, f := range []fleet{
		{groups: 1000, size: 1, name: "independent"},
		{groups: 40, size: 25, noise: 4 * time.Millisecond, name: "groups"},
		{groups: 1000, size: 1, periodic: true, name: "clocks"},
		{groups: 10_000, size: 1, periodic: true, name: "clocks"},
		{groups: 1, size: 5000, noise: time.Millisecond, name: "one"},
		{groups: 10_000, size: 10, name: "many"},
		{groups: 1, size: 50_000, periodic: true, noise: 2 * time.Millisecond, name: "one of clocks"},
	} {
		b.Run(fmt.Sprintf("%s of %d", f.name, f.groups*f.size), func(b *testing.B) {
			f.lasts = 150 * time.Second
			l := New(Config{})
			l.arriveAll(f.messages(seeded(1)))
			for b.Loop() {
				l.Learn()
			}
			b.ReportMetric(float64(l.counts.Firings)/float64(f.groups*f.size), "firings/publisher")
		})
	}
}
