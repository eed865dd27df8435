package sizing_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

func source(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

// propose calls Propose when only the times of the messages are known.
func propose(trace []tuner.Arrival, w sizing.Wanted, rng *rand.Rand) (*sizing.Proposal, error) {
	return sizing.Propose(trace, mono.Never, -mono.Never, w, rng)
}

// poisson is a number of publishers with 10 msg/s in total. Each publisher sends batch messages at a
// time.
func poisson(seed uint64, publishers, batch int, span time.Duration) (trace []tuner.Arrival) {
	rng := source(seed)
	rate := float64(publishers) * 10 / float64(batch)
	for t := 0.0; ; {
		t += rng.ExpFloat64() / rate
		if t > span.Seconds() {
			return trace
		}
		p := int32(rng.IntN(publishers))
		for range batch {
			trace = append(trace, tuner.Arrival{At: mono.Time(t * 1e9), Publisher: p})
		}
	}
}

// The example of docs/contracts.md.
func TestExampleOfContractsPage(t *testing.T) {
	p, err := propose(poisson(1, 100, 5, time.Minute), sizing.Wanted{Within: 2 * time.Millisecond}, source(2))
	testkit.Must(t, err)
	text := fmt.Sprintf("r %s msg/s, b %d, needed %d, mean %.1f\n", p.Rate.Text(), p.Burst, p.Needed, p.Mean)
	for _, s := range p.Splits {
		text += fmt.Sprintf("k=%d %.1f %.1f ms, %.2f %% late\n", s.K, ms(s.Mean), ms(s.Quantile), 100*s.Late)
	}
	for _, e := range p.Errors {
		text += fmt.Sprintf("%s %.1f %.1f ms, %.2f %% late, %v\n", e.Change, ms(e.Mean), ms(e.Quantile), 100*e.Late, e.Unbounded)
	}
	const want = "r 1104.898 msg/s, b 141, needed 107, mean 1004.5\n" +
		"k=1 0.0 0.0 ms, 0.00 % late\n" +
		"k=2 5.2 154.8 ms, 8.14 % late\n" +
		"k=3 15.6 304.5 ms, 16.41 % late\n" +
		"k=4 22.5 238.0 ms, 25.17 % late\n" +
		"r -10 % 225.2 609.5 ms, 85.33 % late, true\n" +
		"r -5 % 0.4 17.6 ms, 3.03 % late, false\n" +
		"b -50 % 1.0 34.6 ms, 4.52 % late, false\n" +
		"b -75 % 4.9 66.3 ms, 22.07 % late, false\n" +
		"b +100 % 0.0 0.0 ms, 0.00 % late, false\n"
	testkit.Equal(t, text, want, "it is now")
}

func ms(d time.Duration) float64 { return d.Seconds() * 1000 }

// The burst of the trace equals the burst of tokenbucket.Profile, which computes in integers.
func TestBurstIsThatOfTheBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		trace := poisson(rapid.Uint64().Draw(t, "seed"), 20, rapid.IntRange(1, 40).Draw(t, "batch"), 5*time.Second)
		w := sizing.Wanted{Brokers: 2, Quantile: rapid.SampledFrom([]float64{0.5, 0.9, 0.99, 0.999}).Draw(t, "quantile")}
		p, err := propose(trace, w, source(1))
		if errors.Is(err, sizing.ErrShort) {
			return
		}
		testkit.Must(t, err)
		times := make([]mono.Time, len(trace))
		for i, a := range trace {
			times[i] = a.At
		}
		exact := testkit.Result(tokenbucket.Profile(times, p.Rate, w.Quantile)).Must(t)
		if d := p.Needed - exact; d < -1 || d > 1 {
			t.Fatalf("burst %d, the bucket says %d", p.Needed, exact)
		}
		if p.Burst < p.Needed {
			t.Fatalf("less with confidence: %d, %d", p.Burst, p.Needed)
		}
		for k := 1; k < len(p.Splits); k++ {
			if p.Splits[k].Mean < p.Splits[0].Mean {
				t.Fatalf("splitting helps: %+v", p.Splits)
			}
		}
	})
}

// A contract proposed from minutes of a source keeps its promise over hours of the source, about as
// often as its confidence states.
func TestTheConfidenceIsKept(t *testing.T) {
	long := poisson(1<<20, 20, 8, 15*time.Minute)
	times := make([]mono.Time, len(long))
	for i, a := range long {
		times[i] = a.At
	}
	const trials = 20
	kept := map[float64]int{}
	for seed := range uint64(trials) {
		trace := poisson(seed, 20, 8, time.Minute)
		for _, confidence := range []float64{0.5, 0.9} {
			p := testkit.Result(propose(trace, sizing.Wanted{Confidence: confidence, Brokers: 1}, source(seed))).Must(t)
			b := tokenbucket.NewFull(p.Share, times[0])
			late := 0
			for _, d := range tokenbucket.Replay(times, &b) {
				if d > 0 {
					late++
				}
			}
			if float64(late) <= 0.01*float64(len(times)) {
				kept[confidence]++
			}
		}
	}
	if kept[0.9] <= kept[0.5] || kept[0.9] < trials*6/10 {
		t.Fatalf("kept in %v of %d", kept, trials)
	}
}

func TestWhatIsWrongIsRefused(t *testing.T) {
	trace := poisson(1, 20, 1, time.Minute)
	for _, w := range []sizing.Wanted{{Quantile: 1}, {Quantile: -1}, {Within: -1}, {Confidence: 1}, {Headroom: 1}, {Brokers: 33}} {
		if _, err := propose(trace, w, source(1)); err == nil {
			t.Errorf("%+v is taken", w)
		}
	}
	for _, short := range [][]tuner.Arrival{nil, trace[:10], slices.Repeat(trace[:1], 1000)} {
		_, err := propose(short, sizing.Wanted{}, source(1))
		testkit.ErrorIs(t, err, sizing.ErrShort, "%d messages", len(short))
	}
}

// 500 messages in a day, the longest profile, are 0.006 msg/s: nine tenths of this rate must not round
// to 0.
func TestASlowTopicHasFiniteDelays(t *testing.T) {
	var trace []tuner.Arrival
	for i := range sizing.MinMessages {
		trace = append(trace, tuner.Arrival{At: mono.Time(time.Duration(i) * 172 * time.Second)})
	}
	p := testkit.Result(propose(trace, sizing.Wanted{}, source(1))).Must(t)
	for _, e := range p.Errors {
		if e.Rate <= 0 || e.Mean < 0 || e.Quantile < 0 || e.Mean > e.Quantile+trace[len(trace)-1].At.Sub(trace[0].At) {
			t.Errorf("%s: %+v of %+v", e.Change, e.Delays, e.Share)
		}
	}
}

// A burst in a minute that is fully known, and the same burst with nothing else known.
func TestSilenceBeforeAndAfterABurstCounts(t *testing.T) {
	var trace []tuner.Arrival
	for i := range 600 {
		trace = append(trace, tuner.Arrival{At: mono.Time(20*time.Second + time.Duration(i)*time.Microsecond)})
	}
	minute := testkit.Result(sizing.Propose(trace, 0, mono.Time(time.Minute), sizing.Wanted{}, source(1))).Must(t)
	if minute.Mean > 10 || minute.Rate > tokenbucket.PerSecond(11) || minute.Span != time.Minute || minute.Burst < 590 {
		t.Errorf("%+v", minute)
	}
	if alone := testkit.Result(propose(trace, sizing.Wanted{}, source(1))).Must(t); alone.Mean < 999_999 {
		t.Errorf("alone: %+v", alone)
	}
}
