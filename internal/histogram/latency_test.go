package histogram

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/HdrHistogram/hdrhistogram-go"
	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestLatencyRangeAndRounding(t *testing.T) {
	for _, c := range []struct {
		d, want time.Duration
		clamped int64
	}{
		{0, 0, 0},
		{1, time.Microsecond, 0},
		{time.Microsecond, time.Microsecond, 0},
		{time.Microsecond + 1, 2 * time.Microsecond, 0},
		{255 * time.Microsecond, 255 * time.Microsecond, 0},
		{MaxLatency, MaxLatency, 0},
		{MaxLatency + 1, MaxLatency, 1},
		{math.MaxInt64, MaxLatency, 1},
		{-1, 0, 1},
		{math.MinInt64, 0, 1},
	} {
		l := NewLatency()
		l.Record(c.d)
		if got := l.Quantile(1); got != c.want || l.Clamped() != c.clamped || l.Count() != 1 {
			t.Errorf("%v: quantile %v, clamped %d, count %d; want %v, %d, 1",
				c.d, got, l.Clamped(), l.Count(), c.want, c.clamped)
		}
	}
}

func TestRecordingManyIsRecordingEachSoOften(t *testing.T) {
	rng := testkit.Rand(t)
	many, each := NewLatency(), NewLatency()
	var manyParts, eachParts Part
	for range 1000 {
		d, n := time.Duration(rng.Int64N(int64(2*MaxLatency)))-time.Second, rng.Int64N(5)
		part := time.Duration(rng.Int64N(int64(MaxLatency)))
		many.RecordMany(d, n)
		manyParts.RecordMany(d, part, n)
		for range n {
			each.Record(d)
			eachParts.Record(d, part)
		}
	}
	if m, e := maps.Collect(many.All()), maps.Collect(each.All()); !maps.Equal(m, e) || many.Clamped() != each.Clamped() || many.Clamped() == 0 {
		t.Errorf("%v and %d clamped, want %v and %d", m, many.Clamped(), e, each.Clamped())
	}
	for i, sum := range eachParts.sums.all() {
		if got := manyParts.sums.get(i); math.Abs(got-sum) > 1e-9 {
			t.Errorf("bucket %d: parts of %v, want %v", i, got, sum)
		}
	}
}

func TestLatencyCountsMoreThan32BitsHold(t *testing.T) {
	const count int64 = 1 << 40
	l, parts := NewLatency(), new(Part)
	l.RecordMany(time.Second, count)
	parts.RecordMany(time.Second, time.Second, count)
	if sum := parts.sums.get(bucketOf(time.Second)); l.Count() != count || sum != float64(count) {
		t.Errorf("count %d, parts of %v; want %d each", l.Count(), sum, count)
	}
}

func TestLatencyEmpty(t *testing.T) {
	l := NewLatency()
	if l.Quantile(0.99) != 0 || l.Count() != 0 {
		t.Errorf("quantile %v, count %d; want zeros", l.Quantile(0.99), l.Count())
	}
	l.Record(time.Second)
	l.Record(time.Hour)
	l.Reset()
	if l.Quantile(0.99) != 0 || l.Count() != 0 || l.Clamped() != 0 {
		t.Errorf("after Reset: quantile %v, count %d, clamped %d; want zeros", l.Quantile(0.99), l.Count(), l.Clamped())
	}
}

// The quantile is never below the quantile of the sorted samples, and exceeds it by less than 1 % plus
// the rounding to a microsecond. Half the samples pass through a second histogram, so the test covers
// merging, too.
func TestLatencyQuantilesAgainstSortedSamples(t *testing.T) {
	rng := testkit.Rand(t)
	var samples []time.Duration
	l, part := NewLatency(), NewLatency()
	for i := range 20_000 {
		d := time.Duration(math.Exp(rng.Float64() * math.Log(float64(MaxLatency))))
		samples = append(samples, d)
		if i%2 == 0 {
			l.Record(d)
		} else {
			part.Record(d)
		}
	}
	l.Merge(part)
	testkit.Equal(t, part.Count(), 10_000, "Merge changed its argument: samples")
	slices.Sort(samples)
	for _, q := range []float64{0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 1} {
		want := samples[int(math.Ceil(q*float64(len(samples))))-1]
		got := l.Quantile(q)
		if got < want || float64(got) > 1.01*float64(want)+float64(time.Microsecond) {
			t.Errorf("quantile %v: %v, want %v to +1 %%", q, got, want)
		}
	}
}

func TestLatencyQuantileOutsideTheUnitInterval(t *testing.T) {
	l := NewLatency()
	for i := range 100 {
		l.Record(time.Duration(i+1) * time.Microsecond)
	}
	for q, want := range map[float64]time.Duration{-1: 1, 2: 100} {
		testkit.Equal(t, l.Quantile(q), want*time.Microsecond, "quantile %v", q)
	}
	if got := l.Quantile(math.NaN()); got != 100*time.Microsecond {
		t.Errorf("quantile NaN: %v, want the largest", got)
	}
}

func TestLatencyMergeAddsClamped(t *testing.T) {
	a, b := NewLatency(), NewLatency()
	a.Record(time.Hour)
	b.Record(-time.Second)
	a.Merge(b)
	if a.Clamped() != 2 || a.Count() != 2 {
		t.Errorf("clamped %d of %d, want 2 of 2", a.Clamped(), a.Count())
	}
}

func TestLatencyRecordDoesNotAllocate(t *testing.T) {
	l := NewLatency()
	d := time.Duration(1)
	testkit.Equal(t, testing.AllocsPerRun(1000, func() { l.Record(d); d *= 3 }), 0, "allocations a record")
}

// The buckets, the quantiles and the mean are HdrHistogram's.
func TestLatencyIsAnHdrHistogram(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, h := NewLatency(), hdrhistogram.New(LowestMicros, HighestMicros, Digits)
		for _, micros := range rapid.SliceOf(rapid.OneOf(rapid.Int64Range(0, HighestMicros), rapid.Int64Range(0, 2000))).Draw(t, "micros") {
			l.Record(time.Duration(micros) * time.Microsecond)
			testkit.Must(t, h.RecordValue(micros))
		}
		for _, q := range []float64{0, 0.001, 0.5, 0.9, 0.99, 0.999, 1, rapid.Float64Range(0, 1).Draw(t, "q")} {
			testkit.MustEqual(t, l.Quantile(q), min(time.Duration(h.ValueAtPercentile(q*100))*time.Microsecond, MaxLatency), "quantile %v", q)
		}
		for _, bar := range h.Distribution() {
			if low, high := BucketRange(bucketOf(time.Duration(bar.From) * time.Microsecond)); low != bar.From || high != bar.To {
				t.Fatalf("bucket of %d us: %d..%d, want %d..%d", bar.From, low, high, bar.From, bar.To)
			}
			if got := *l.counts.at(bucketOf(time.Duration(bar.From) * time.Microsecond)); got != bar.Count {
				t.Fatalf("%d from %d us on, want %d", got, bar.From, bar.Count)
			}
		}
	})
}

func TestLatencyIsSmall(t *testing.T) {
	size := func(l *Latency) uintptr {
		n := unsafe.Sizeof(*l)
		for _, b := range l.counts.blocks {
			if b != nil {
				n += unsafe.Sizeof(*b)
			}
		}
		return n
	}
	l := NewLatency()
	for d := time.Microsecond; d < 200*time.Microsecond; d += time.Microsecond {
		l.Record(d)
	}
	if n := size(l); n > 3<<10 {
		t.Errorf("%d bytes for latencies below 200 us, want at most 3 KiB: every topic holds several", n)
	}
	l.Reset() // the next samples need its memory again
	l.Record(time.Microsecond)
	l.Reset()
	if l.Reset(); size(l) != size(NewLatency()) {
		t.Errorf("%d bytes while nothing is recorded, want %d", size(l), size(NewLatency()))
	}
}

func TestLastIndexIsThatOfTheMaximum(t *testing.T) {
	l := NewLatency()
	l.Record(MaxLatency)
	if all := maps.Collect(l.All()); len(all) != 1 || all[lastIndex] != 1 {
		t.Errorf("the maximum is counted at %v, want at %d", all, lastIndex)
	}
}

func BenchmarkLatencyRecord(b *testing.B) {
	l := NewLatency()
	rng := rand.New(rand.NewPCG(1, 2))
	var d [1024]time.Duration
	for i := range d {
		d[i] = time.Duration(rng.Int64N(int64(MaxLatency)))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l.Record(d[i%len(d)])
	}
}

func TestCountAbove(t *testing.T) {
	l := NewLatency()
	for _, d := range []time.Duration{0, time.Millisecond, time.Millisecond, 20 * time.Millisecond, time.Second} {
		l.Record(d)
	}
	for d, want := range map[time.Duration]int64{0: 4, time.Millisecond: 2, 10 * time.Millisecond: 2, 100 * time.Millisecond: 1, time.Minute: 0} {
		testkit.Equal(t, l.CountAbove(d), want, "above %v", d)
	}
}
