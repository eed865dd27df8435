package obs

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
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
		d, n := time.Duration(rng.Int64N(int64(2*MaxLatency)))-time.Second, rng.IntN(5)
		part := time.Duration(rng.Int64N(int64(MaxLatency)))
		many.RecordMany(d, n)
		manyParts.RecordMany(d, part, n)
		for range n {
			each.Record(d)
			eachParts.Record(d, part)
		}
	}
	if m, e := many.Proto(), each.Proto(); !slices.Equal(m.Index, e.Index) || !slices.Equal(m.Count, e.Count) || many.Clamped() != each.Clamped() || many.Clamped() == 0 {
		t.Errorf("%v and %d clamped, want %v and %d", m, many.Clamped(), e, each.Clamped())
	}
	for i, sum := range eachParts.sums.all() {
		if got := manyParts.sums.get(i); math.Abs(got-sum) > 1e-9 {
			t.Errorf("bucket %d: parts of %v, want %v", i, got, sum)
		}
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
		l, h := NewLatency(), hdrhistogram.New(lowestMicros, highestMicros, digits)
		for _, micros := range rapid.SliceOf(rapid.OneOf(rapid.Int64Range(0, highestMicros), rapid.Int64Range(0, 2000))).Draw(t, "micros") {
			l.Record(time.Duration(micros) * time.Microsecond)
			testkit.Must(t, h.RecordValue(micros))
		}
		for _, q := range []float64{0, 0.001, 0.5, 0.9, 0.99, 0.999, 1, rapid.Float64Range(0, 1).Draw(t, "q")} {
			testkit.MustEqual(t, l.Quantile(q), min(time.Duration(h.ValueAtPercentile(q*100))*time.Microsecond, MaxLatency), "quantile %v", q)
		}
		for _, bar := range h.Distribution() {
			if low, high := bucketRange(bucketOf(time.Duration(bar.From) * time.Microsecond)); low != bar.From || high != bar.To {
				t.Fatalf("bucket of %d us: %d..%d, want %d..%d", bar.From, low, high, bar.From, bar.To)
			}
			if got := *l.counts.at(bucketOf(time.Duration(bar.From) * time.Microsecond)); got != bar.Count {
				t.Fatalf("%d from %d us on, want %d", got, bar.From, bar.Count)
			}
		}
		var m dto.Metric
		testkit.Must(t, l.Metric(prometheus.NewDesc("x", "help", nil, nil)).Write(&m))
		if got, want := m.GetHistogram().GetSampleSum(), h.Mean()*float64(h.TotalCount())/1e6; math.Abs(got-want) > 1e-9*(want+1) {
			t.Fatalf("sum %v, want %v", got, want)
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
	if p := l.Proto(); len(p.Index) != 1 || p.Index[0] != lastIndex {
		t.Errorf("the maximum is counted at %v, want at %d", p.Index, lastIndex)
	}
}

func TestLatencyProtoRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := NewLatency()
		for _, d := range rapid.SliceOf(rapid.Int64Range(-1e9, 100e9)).Draw(t, "durations") {
			l.Record(time.Duration(d))
		}
		wire := testkit.Result(proto.Marshal(l.Proto())).Must(t)
		var p srtmv1.Histogram
		testkit.Must(t, proto.Unmarshal(wire, &p))
		back := testkit.Result(LatencyFromProto(&p)).Must(t)
		if !proto.Equal(back.Proto(), l.Proto()) || back.Count() != l.Count() {
			t.Fatalf("%d samples came back as %d, or elsewhere", l.Count(), back.Count())
		}
		// The decoded histogram remains usable.
		back.Record(time.Second)
		back.Merge(l)
		testkit.MustEqual(t, back.Count(), 2*l.Count()+1, "count")
	})
}

func TestLatencyFromProtoNilIsEmpty(t *testing.T) {
	l, err := LatencyFromProto(nil)
	if err != nil || l.Count() != 0 {
		t.Errorf("%v, %v; want an empty one", l, err)
	}
}

func TestLatencyFromProtoRefuses(t *testing.T) {
	with := func(change func(*srtmv1.Histogram)) *srtmv1.Histogram {
		l := NewLatency()
		l.Record(time.Millisecond)
		l.Record(time.Second)
		p := l.Proto()
		change(p)
		return p
	}
	for name, c := range map[string]struct {
		p    *srtmv1.Histogram
		want string
	}{
		"no layout":          {&srtmv1.Histogram{}, "0..0 us with 0 digits: want 1..60000000 us"},
		"another lowest":     {with(func(p *srtmv1.Histogram) { p.LowestUs = 2 }), "2..60000000 us"},
		"another highest":    {with(func(p *srtmv1.Histogram) { p.HighestUs++ }), "1..60000001 us"},
		"other digits":       {with(func(p *srtmv1.Histogram) { p.SignificantDigits = 3 }), "with 3 digits"},
		"fewer counts":       {with(func(p *srtmv1.Histogram) { p.Count = p.Count[:1] }), "2 indices and 1 counts"},
		"fewer indices":      {with(func(p *srtmv1.Histogram) { p.Index = nil }), "0 indices and 2 counts"},
		"index too large":    {with(func(p *srtmv1.Histogram) { p.Index[1] = lastIndex + 1 }), fmt.Sprintf("index %d", lastIndex+1)},
		"index far off":      {with(func(p *srtmv1.Histogram) { p.Index[1] = math.MaxUint32 }), "index 4294967295"},
		"descending":         {with(func(p *srtmv1.Histogram) { slices.Reverse(p.Index) }), "want ascending"},
		"twice the same":     {with(func(p *srtmv1.Histogram) { p.Index[1] = p.Index[0] }), "want ascending"},
		"empty bucket":       {with(func(p *srtmv1.Histogram) { p.Count[0] = 0 }), "has no samples"},
		"huge count":         {with(func(p *srtmv1.Histogram) { p.Count[0] = math.MaxUint64 }), "more than"},
		"huge sum":           {with(func(p *srtmv1.Histogram) { p.Count[0], p.Count[1] = maxSamples/2+1, maxSamples/2 }), "more than"},
		"more than it holds": {with(func(p *srtmv1.Histogram) { p.Index, p.Count = make([]uint32, 5000), make([]uint64, 5000) }), "5000 buckets"},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := LatencyFromProto(c.p)
			if err == nil || l != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, %v; want an error with %q", l, err, c.want)
			}
		})
	}
	full := with(func(p *srtmv1.Histogram) { p.Count[0], p.Count[1] = maxSamples/2, maxSamples/2 })
	if l, err := LatencyFromProto(full); err != nil || l.Count() != maxSamples {
		t.Errorf("%d samples: %v; want them accepted", int64(maxSamples), err)
	}
}

// Any message of a peer is refused or becomes a histogram that encodes to the same message.
func FuzzLatencyFromProto(f *testing.F) {
	l := NewLatency()
	for d := time.Microsecond; d < MaxLatency; d *= 7 {
		l.Record(d)
	}
	seed, err := proto.Marshal(l.Proto())
	testkit.Must(f, err)
	f.Add(seed)
	f.Add([]byte{})
	f.Add(seed[:len(seed)-1])
	f.Fuzz(func(t *testing.T, wire []byte) {
		p := new(srtmv1.Histogram)
		if proto.Unmarshal(wire, p) != nil {
			return
		}
		l, err := LatencyFromProto(p)
		if err != nil {
			if l != nil {
				t.Fatal("an error and a histogram")
			}
			return
		}
		again := l.Proto()
		if !slices.Equal(again.Index, p.Index) || !slices.Equal(again.Count, p.Count) {
			t.Fatalf("%v became %v", p, again)
		}
	})
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
