package schedule_test

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func spec() schedule.Spec {
	return schedule.Spec{Publishers: 100, Rate: 10, Batch: 1, Process: schedule.Poisson, Size: 100, Seed: 1}
}

func take(s schedule.Stream, n int) []schedule.Event {
	events := make([]schedule.Event, 0, n)
	for len(events) < n {
		e, ok := s.Next()
		if !ok {
			break
		}
		events = append(events, e)
	}
	return events
}

func drawSpec(t *rapid.T) schedule.Spec {
	s := schedule.Spec{
		Publishers: rapid.IntRange(1, 60).Draw(t, "publishers"),
		Rate:       rapid.Float64Range(0.01, 1000).Draw(t, "rate"),
		Batch:      rapid.IntRange(1, 20).Draw(t, "batch"),
		GroupSize:  rapid.IntRange(0, 70).Draw(t, "group size"),
		Process:    rapid.SampledFrom([]schedule.Process{schedule.Poisson, schedule.Periodic}).Draw(t, "process"),
		Size:       rapid.IntRange(0, 500).Draw(t, "size"),
		Seed:       rapid.Uint64().Draw(t, "seed"),
	}
	s.Sync = s.GroupSize >= 2 && rapid.Bool().Draw(t, "sync")
	if s.Sync && rapid.Bool().Draw(t, "noisy") {
		s.Noise = time.Duration(rapid.Int64Range(1, 1e9).Draw(t, "noise"))
	}
	return s
}

func TestTheSameSeedYieldsTheSameEvents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		if !slices.Equal(take(s.Stream(), 300), take(s.Stream(), 300)) {
			t.Fatalf("%+v: two streams differ", s)
		}
	})
	a, b := spec(), spec()
	b.Seed++
	if slices.Equal(take(a.Stream(), 100), take(b.Stream(), 100)) {
		t.Error("two seeds yield the same events")
	}
}

func TestEventsAreInOrderAndComplete(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		var last time.Duration
		for _, e := range take(s.Stream(), 500) {
			if e.At < last {
				t.Fatalf("%v after %v", e.At, last)
			}
			last = e.At
			if e.Source < 0 || int(e.Source) >= s.Publishers || int(e.Count) != s.Batch || int(e.Size) != s.Size {
				t.Fatalf("%+v is not an event of %+v", e, s)
			}
		}
	})
}

// A source's times do not depend on the other sources. The merged stream of n sources has exactly the events of the
// stream of fewer sources.
func TestAFleetHoldsTheSmallerFleet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		s.Sync, s.Noise = false, 0
		small := s
		small.Publishers = rapid.IntRange(1, s.Publishers).Draw(t, "fewer")
		var got []schedule.Event
		for _, e := range take(s.Stream(), 500) {
			if int(e.Source) < small.Publishers {
				got = append(got, e)
			}
		}
		if want := take(small.Stream(), len(got)); !slices.Equal(got, want) {
			t.Fatalf("got %v\nwant %v", got, want)
		}
	})
}

func TestASynchronisedGroupFiresAsOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		s.GroupSize = rapid.IntRange(2, 10).Draw(t, "group")
		s.Sync, s.Noise = true, 0
		groups := s.Groups()
		stream := s.Stream()
		for range 50 {
			first, _ := stream.Next()
			g := int(first.Source) / s.GroupSize
			testkit.MustEqual(t, int(first.Source)%s.GroupSize, 0, "a volley starts with source %d of groups of %d", first.Source, s.GroupSize)
			for i := 1; i < groups[g].Count; i++ {
				e, _ := stream.Next()
				if e.At != first.At || e.Source != first.Source+int32(i) {
					t.Fatalf("member %d of group %d: %+v, the first is %+v", i, g, e, first)
				}
			}
		}
	})
}

func TestWithoutSyncAGroupIsOnlyALabel(t *testing.T) {
	plain, labelled := spec(), spec()
	labelled.GroupSize = 10
	testkit.EqualSlices(t, take(plain.Stream(), 1000), take(labelled.Stream(), 1000), "labels changed the times")
}

// The bounds are six standard deviations of a correct generator.
func TestMeanRate(t *testing.T) {
	for _, c := range []struct {
		process schedule.Process
		batch   int
		group   int
	}{
		{schedule.Poisson, 1, 0}, {schedule.Poisson, 10, 0}, {schedule.Poisson, 1, 25},
		{schedule.Periodic, 1, 0}, {schedule.Periodic, 10, 25},
	} {
		s := spec()
		s.Process, s.Batch, s.GroupSize, s.Sync, s.Seed = c.process, c.batch, c.group, c.group > 0, testkit.Seed(t)
		const span = 100 * time.Second
		n := float64(len(schedule.Arrivals(schedule.Until(s.Stream(), span))))
		want := float64(s.Publishers) * s.Rate * span.Seconds()
		atOnce := float64(c.batch * max(1, c.group))
		if slack := 6 * math.Sqrt(want*atOnce); math.Abs(n-want) > slack {
			t.Errorf("%+v: %v messages in %v, want %v +- %v", c, n, span, want, slack)
		}
	}
}

// The gaps of a Poisson source are exponential: mean and standard deviation are equal, and a fraction 1/e of the gaps
// exceeds the mean.
func TestPoissonGaps(t *testing.T) {
	s := spec()
	s.Publishers, s.Seed = 1, testkit.Seed(t)
	const n = 100_000
	var sum, squares, long, last float64
	for _, e := range take(s.Stream(), n) {
		gap := e.At.Seconds() - last
		last = e.At.Seconds()
		sum += gap
		squares += gap * gap
		if gap > 1/s.Rate {
			long++
		}
	}
	mean := sum / n
	deviation := math.Sqrt(squares/n - mean*mean)
	// 6 standard errors: mean 1/sqrt(n), deviation 2/sqrt(n), fraction sqrt(pq/n).
	if e := 6 / math.Sqrt(n); math.Abs(mean*s.Rate-1) > e || math.Abs(deviation*s.Rate-1) > 2*e || math.Abs(long/n-1/math.E) > 0.5*e {
		t.Errorf("mean %.4f and deviation %.4f of 1/rate, %.4f above the mean; want 1, 1, %.4f",
			mean*s.Rate, deviation*s.Rate, long/n, 1/math.E)
	}
}

func TestPeriodicDoesNotDrift(t *testing.T) {
	s := spec()
	s.Publishers, s.Rate, s.Process = 1, 3, schedule.Periodic // the gap is no whole number of ns
	events := take(s.Stream(), 300_001)
	phase := events[0].At
	if phase < 0 || phase >= time.Second/3+1 {
		t.Errorf("phase %v, want within a period", phase)
	}
	testkit.Equal(t, events[300_000].At-phase, 100_000*time.Second, "300,000 periods of 1/3 s take")
}

func TestPeriodicPhasesAreSpread(t *testing.T) {
	s := spec()
	s.Publishers, s.Process, s.Seed = 10_000, schedule.Periodic, testkit.Seed(t)
	var tenths [10]int
	for _, e := range take(s.Stream(), s.Publishers) {
		tenths[e.At/(10*time.Millisecond)]++
	}
	for i, n := range tenths {
		if n < 820 || n > 1180 { // 6 standard deviations of 30
			t.Errorf("%d of 10,000 phases in tenth %d of the period, want about 1,000", n, i)
		}
	}
}

func TestShardsPartitionTheStream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		of := rapid.IntRange(1, 5).Draw(t, "shards")
		all := take(s.Stream(), 400)
		var merged []schedule.Event
		for shard := range of {
			for _, e := range take(schedule.Shard(schedule.Until(s.Stream(), all[len(all)-1].At), shard, of), 400) {
				testkit.MustEqual(t, int(e.Source)%of, shard, "source %d in shard %d of %d", e.Source, shard, of)
				merged = append(merged, e)
			}
		}
		slices.SortFunc(merged, func(a, b schedule.Event) int {
			if a.At != b.At {
				return int(a.At - b.At)
			}
			return int(a.Source - b.Source)
		})
		var want []schedule.Event
		for _, e := range all {
			if e.At < all[len(all)-1].At {
				want = append(want, e)
			}
		}
		slices.SortStableFunc(want, func(a, b schedule.Event) int {
			if a.At != b.At {
				return int(a.At - b.At)
			}
			return int(a.Source - b.Source)
		})
		if !slices.Equal(merged, want) {
			t.Fatalf("shards hold %d events, the stream %d", len(merged), len(want))
		}
	})
}

func TestUntilEndsForGood(t *testing.T) {
	s := spec()
	u := schedule.Until(s.Stream(), time.Second)
	n := 0
	for {
		e, ok := u.Next()
		if !ok {
			break
		}
		if e.At >= time.Second {
			t.Fatalf("an event at %v", e.At)
		}
		n++
	}
	if n == 0 {
		t.Error("no event in the first second")
	}
	if e, ok := u.Next(); ok {
		t.Errorf("%+v after the end", e)
	}
}

func TestArrivalsCountEachMessageOfABatch(t *testing.T) {
	s := spec()
	s.Publishers, s.Batch = 1, 3
	got := schedule.Arrivals(schedule.Until(s.Stream(), time.Minute))
	if len(got) == 0 || len(got)%3 != 0 {
		t.Fatalf("%d arrivals, want a multiple of 3", len(got))
	}
	for i := 0; i < len(got); i += 3 {
		if got[i] != got[i+1] || got[i] != got[i+2] {
			t.Errorf("batch %d at %v", i/3, got[i:i+3])
		}
	}
}

func TestSourcesAndGroups(t *testing.T) {
	s := spec()
	s.Publishers, s.GroupSize = 7, 3
	wantGroups := []schedule.Group{{"g0", 3}, {"g1", 3}, {"g2", 1}}
	if got := s.Groups(); !reflect.DeepEqual(got, wantGroups) {
		t.Errorf("groups %v, want %v", got, wantGroups)
	}
	var ids []string
	for _, source := range s.Sources() {
		ids = append(ids, source.Key+"="+source.ID)
		if source.Rate != 10 || source.Batch != 1 {
			t.Errorf("%+v, want rate 10 and batch 1", source)
		}
	}
	if want := "g0=g0.0 g0=g0.1 g0=g0.2 g1=g1.0 g1=g1.1 g1=g1.2 g2=g2.0"; strings.Join(ids, " ") != want {
		t.Errorf("sources %v, want %v", ids, want)
	}
	for _, size := range []int{0, 1} {
		s.GroupSize = size
		if got := s.Groups(); !reflect.DeepEqual(got, []schedule.Group{{"", 7}}) {
			t.Errorf("group size %d: %v, want one pool of 7", size, got)
		}
		if got := s.Sources()[6]; got.ID != "pool.6" || got.Key != "" {
			t.Errorf("group size %d: the last source is %+v", size, got)
		}
	}
}

func TestValidate(t *testing.T) {
	if err := spec().Validate(); err != nil {
		t.Errorf("a valid spec: %v", err)
	}
	for name, c := range map[string]struct {
		change func(*schedule.Spec)
		want   string
	}{
		"no publishers":   {func(s *schedule.Spec) { s.Publishers = 0 }, "publishers: 0, want 1 .. 1000000"},
		"too many":        {func(s *schedule.Spec) { s.Publishers = 1_000_001 }, "publishers: 1000001"},
		"no rate":         {func(s *schedule.Spec) { s.Rate = 0 }, "rate: 0 msg/s, want above 0"},
		"NaN":             {func(s *schedule.Spec) { s.Rate = math.NaN() }, "rate: NaN"},
		"infinite":        {func(s *schedule.Spec) { s.Rate = math.Inf(1) }, "rate: +Inf"},
		"hardly ever":     {func(s *schedule.Spec) { s.Rate = 1e-9 }, "less than one batch a day"},
		"no batch":        {func(s *schedule.Spec) { s.Batch = 0 }, "batch: 0 messages"},
		"negative group":  {func(s *schedule.Spec) { s.GroupSize = -1 }, "group size: -1"},
		"sync alone":      {func(s *schedule.Spec) { s.Sync = true }, "sync: needs groups of at least 2"},
		"noise alone":     {func(s *schedule.Spec) { s.Noise = 1 }, "noise: blurs the instants of synchronised groups, and sync is off"},
		"negative noise":  {func(s *schedule.Spec) { s.Noise = -1 }, "noise: -1ns"},
		"unknown process": {func(s *schedule.Spec) { s.Process = "bursty" }, `process: "bursty", want poisson or periodic`},
		"sizes reversed":  {func(s *schedule.Spec) { s.SizeTo = s.Size - 1 }, "maximum size: 99 bytes, want 100 .. "},
		"negative size":   {func(s *schedule.Spec) { s.Size = -1 }, "size: -1 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			s := spec()
			c.change(&s)
			if err := s.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an error with %q", err, c.want)
			}
		})
	}
	all := schedule.Spec{GroupSize: -1, Size: -1, Sync: true}
	if err := all.Validate(); err == nil || len(strings.Split(err.Error(), "\n")) != 7 {
		t.Errorf("want seven faults, one a line, got: %v", err)
	}
}

func TestNextDoesNotAllocate(t *testing.T) {
	for _, process := range []schedule.Process{schedule.Poisson, schedule.Periodic} {
		s := spec()
		s.Process = process
		stream := s.Stream()
		testkit.Equal(t, testing.AllocsPerRun(1000, func() { stream.Next() }), 0, "%s: allocations an event", process)
	}
}

// Sizes are uniform from the smallest to the largest, and change nothing else.
func TestSizes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		same := take(s.Stream(), 300)
		s.SizeTo = s.Size + rapid.IntRange(1, 100).Draw(t, "sizes")
		again := take(s.Stream(), 300)
		for i, e := range take(s.Stream(), 300) {
			if e != again[i] {
				t.Fatalf("event %d: %+v, and then %+v", i, e, again[i])
			}
			if int(e.Size) < s.Size || int(e.Size) > s.SizeTo {
				t.Fatalf("%d bytes, want %d to %d", e.Size, s.Size, s.SizeTo)
			}
			e.Size = same[i].Size
			if e != same[i] {
				t.Fatalf("event %d: %+v, of one size %+v", i, e, same[i])
			}
		}
	})
	s := spec()
	s.Size, s.SizeTo = 100, 109
	counts := map[int32]int{}
	for _, e := range take(s.Stream(), 100_000) {
		counts[e.Size]++
	}
	for size := int32(100); size <= 109; size++ {
		if n := counts[size]; n < 9_500 || n > 10_500 { // 5 standard errors
			t.Errorf("%d of 100,000 events have %d bytes", n, size)
		}
	}
}

func BenchmarkNext(b *testing.B) {
	s := spec()
	s.Publishers = 1000
	stream := s.Stream()
	b.ReportAllocs()
	for b.Loop() {
		stream.Next()
	}
}

// Noise moves each event of a volley separately, by less than the noise. The volleys stay at their times.
func TestNoiseBlursVolleysAndMovesNone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		s.GroupSize, s.Sync = rapid.IntRange(2, 10).Draw(t, "group"), true
		s.Noise = time.Duration(rapid.Int64Range(1, 1e9).Draw(t, "noise"))
		noisy := map[int32][]time.Duration{}
		for _, e := range take(s.Stream(), 400) {
			noisy[e.Source] = append(noisy[e.Source], e.At)
		}
		blur := s.Noise
		s.Noise = 0
		sharp := map[int32][]time.Duration{}
		for _, e := range take(s.Stream(), 1000) {
			sharp[e.Source] = append(sharp[e.Source], e.At)
		}
		for source, times := range noisy {
			// Volleys closer than the noise may overtake each other. In order, each event is within the noise of an
			// event with the same number.
			for i, at := range times {
				if i < len(sharp[source]) && (at < sharp[source][i] || at >= sharp[source][i]+blur) {
					t.Fatalf("event %d of source %d is at %v, its volley at %v, the noise is %v", i, source, at, sharp[source][i], blur)
				}
			}
		}
	})
}

func TestNoiseIsUniform(t *testing.T) {
	s := schedule.Spec{Publishers: 100, Rate: 1, Batch: 1, GroupSize: 100, Sync: true, Noise: 16 * time.Millisecond, Process: schedule.Periodic, Seed: 3}
	events := take(s.Stream(), 20_000) // 200 volleys a second apart
	var sum, squares float64
	for i := 0; i < len(events); i += 100 {
		volley := events[i : i+100]
		if spread := volley[99].At - volley[0].At; spread < 12*time.Millisecond || spread >= 16*time.Millisecond {
			t.Errorf("volley %d is spread over %v", i/100, spread)
		}
	}
	sharp := s
	sharp.Noise = 0
	first, _ := sharp.Stream().Next()
	for _, e := range events {
		x := (e.At - first.At) % time.Second
		sum += x.Seconds()
		squares += x.Seconds() * x.Seconds()
	}
	n := float64(len(events))
	mean, variance := sum/n, squares/n-sum/n*sum/n
	// The mean of 20,000 has a standard error of 33 us.
	if math.Abs(mean-0.008) > 4*33e-6 || math.Abs(variance-0.016*0.016/12) > 1e-6 {
		t.Errorf("mean %v s, variance %v s2 of uniform [0, 16 ms)", mean, variance)
	}
}
