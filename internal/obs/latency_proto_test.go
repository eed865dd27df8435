package obs

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/testkit"
)

const lastBucket = histogram.Buckets - 1

func TestLatencyProtoRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := histogram.NewLatency()
		for _, d := range rapid.SliceOf(rapid.Int64Range(-1e9, 100e9)).Draw(t, "durations") {
			l.Record(time.Duration(d))
		}
		wire := testkit.Result(proto.Marshal(LatencyProto(l))).Must(t)
		var p srtmv1.Histogram
		testkit.Must(t, proto.Unmarshal(wire, &p))
		back := testkit.Result(LatencyFromProto(&p)).Must(t)
		if !proto.Equal(LatencyProto(back), LatencyProto(l)) || back.Count() != l.Count() {
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
		l := histogram.NewLatency()
		l.Record(time.Millisecond)
		l.Record(time.Second)
		p := LatencyProto(l)
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
		"index too large":    {with(func(p *srtmv1.Histogram) { p.Index[1] = lastBucket + 1 }), fmt.Sprintf("index %d", lastBucket+1)},
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
	l := histogram.NewLatency()
	for d := time.Microsecond; d < histogram.MaxLatency; d *= 7 {
		l.Record(d)
	}
	seed, err := proto.Marshal(LatencyProto(l))
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
		again := LatencyProto(l)
		if !slices.Equal(again.Index, p.Index) || !slices.Equal(again.Count, p.Count) {
			t.Fatalf("%v became %v", p, again)
		}
	})
}
