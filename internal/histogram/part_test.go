package histogram

import (
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A Part counts samples in the same buckets as the Latency does, at every edge, and anywhere.
func TestPartCountsWhereTheLatencyDoes(t *testing.T) {
	rng := testkit.Rand(t)
	durations := []time.Duration{1, time.Microsecond, time.Microsecond + 1, MaxLatency - 1, MaxLatency, MaxLatency + 1, math.MaxInt64}
	for edge := 128 * time.Microsecond; edge < MaxLatency; edge *= 2 {
		durations = append(durations, edge-time.Microsecond, edge-1, edge, edge+1, edge+time.Microsecond)
	}
	for range 1000 {
		durations = append(durations, time.Duration(1+math.Exp(rng.Float64()*math.Log(float64(MaxLatency)))))
	}
	l := NewLatency()
	for _, d := range durations {
		l.Reset()
		l.Record(d)
		testkit.Equal(t, maps.Collect(l.All())[bucketOf(d)], 1, "%v counts in the bucket", d)
	}
}

// Compares with the slow way: sort, and take the mean from the quantile on. Wholes are exact in their
// buckets, so that a tail begins with its bucket.
func TestMeanInTailAgainstSortedSamples(t *testing.T) {
	rng := testkit.Rand(t)
	type sample struct{ whole, part time.Duration }
	for range 200 {
		samples := make([]sample, 1+rng.IntN(400))
		var p Part
		l := NewLatency()
		for i := range samples {
			whole := time.Duration(1+rng.IntN(255)) * time.Microsecond
			samples[i] = sample{whole, time.Duration(rng.Int64N(int64(whole) + 1))}
			l.Record(whole)
			p.Record(whole, samples[i].part)
		}
		slices.SortFunc(samples, func(a, b sample) int { return int(a.whole - b.whole) })
		counts, sums := byBucket(l, &p)
		for _, q := range []float64{0, 0.5, 0.9, 0.99, 1} {
			rank := max(1, int(math.Ceil(q*float64(len(samples)))))
			from := samples[rank-1].whole
			var n, sum float64
			for _, s := range samples {
				if s.whole >= from {
					n++
					sum += float64(s.part) / float64(s.whole)
				}
			}
			got, ok := MeanInTail(q, counts, sums)
			if !ok || math.Abs(got-sum/n) > 1e-9 {
				t.Fatalf("quantile %v of %d: %v, %v, want %v", q, len(samples), got, ok, sum/n)
			}
		}
	}
}

func byBucket(l *Latency, p *Part) (counts []uint64, sums []float64) {
	counts, sums = make([]uint64, Buckets), make([]float64, Buckets)
	for i, n := range l.All() {
		counts[i], sums[i] = uint64(n), p.Of([]uint32{uint32(i)})[0]
	}
	return counts, sums
}

func TestPartAtItsLimits(t *testing.T) {
	if mean, ok := MeanInTail(0.99, nil, nil); ok || mean != 0 {
		t.Errorf("of nothing: %v, %v", mean, ok)
	}
	var p Part
	l := NewLatency()
	for _, c := range []struct{ whole, part time.Duration }{{0, 0}, {0, time.Second}, {time.Second, -1}, {time.Second, time.Hour}} {
		l.Record(c.whole)
		p.Record(c.whole, c.part)
	}
	counts, sums := byBucket(l, &p)
	if mean, ok := MeanInTail(1, counts, sums); !ok || mean != 0.5 {
		t.Errorf("the second that is all part, and the one without: %v, %v", mean, ok)
	}
	p.Reset()
	if _, sums := byBucket(l, &p); slices.Max(sums) != 0 {
		t.Errorf("after Reset: %v", sums)
	}
	testkit.Equal(t, testing.AllocsPerRun(100, func() { p.Record(time.Millisecond, time.Microsecond) }), 0, "allocations")
}

func BenchmarkPartRecord(b *testing.B) {
	var p Part
	for i := 0; b.Loop(); i++ {
		p.Record(time.Duration(1000+i%1000)*time.Microsecond, time.Duration(i%1000)*time.Microsecond)
	}
}
