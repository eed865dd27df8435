package up

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// Poisson loads of any size, with the contract that srtm up derives. One broker has more tokens than theory requires for
// the load. A split has so many fewer that 1 % of its messages wait at least until a token is earned.
func TestOneBrokerHasRoomAndASplitWaits(t *testing.T) {
	for seed := range uint64(4) {
		for _, c := range []struct {
			brokers, publishers int
			rate                float64
		}{{4, 100, 0.5}, {3, 50, 20}, {6, 200, 2}, {12, 400, 5}} {
			// The number of messages is the same for any rate, because 99 % of few messages says little.
			phase := time.Duration(6000 / (float64(c.publishers) * c.rate) * float64(time.Second))
			spec := schedule.Spec{Publishers: c.publishers, Rate: c.rate, Batch: 1, Process: schedule.Poisson, Size: 100, Seed: seed}
			scheduled := func() schedule.Stream { return schedule.Until(spec.Stream(), phase) }
			arrivals := schedule.Arrivals(scheduled())
			offered := max(float64(len(arrivals))/phase.Seconds(), c.rate*float64(c.publishers))
			r := tokenbucket.PerSecond(rateMargin * offered)
			need := testkit.Result(tokenbucket.Profile(arrivals, r, 0.99)).Must(t)
			b := burstFor(need, c.brokers)
			if p := tokenbucket.PDelayed(offered, r.PerSecond(), float64(b)); p > 0.01 {
				t.Errorf("%+v, seed %d: b = %d for a need of %d: %v of the messages wait on one broker", c, seed, b, need, p)
			}
			whole := access(scheduled(), []tokenbucket.Share{{Rate: r, Burst: b}}, func(int32) int { return 0 })
			testkit.Equal(t, whole.Quantile(0.99), 0, "%+v, seed %d: b = %d for a need of %d: one broker waits", c, seed, b, need)
			split := splitWait(scheduled(), r, b, c.brokers, 0.99)
			if tokens := split.Seconds() * r.PerSecond() / float64(c.brokers); tokens < 1 {
				t.Errorf("%+v, seed %d: b = %d for a need of %d: a split waits %v, for %.1f tokens", c, seed, b, need, split, tokens)
			}
		}
	}
}

// The default load behaves as README says: a split waits for tens of milliseconds.
func TestTheDefaultLoadShowsWhatSplittingCosts(t *testing.T) {
	for _, duration := range []time.Duration{20 * time.Second, time.Minute} {
		r := &run{options: defaults()}
		r.load = testkit.Result(r.options.load.Build()).Must(t)
		testkit.Result(r.contract(duration / 2)).Must(t)
		if slo := r.report.slo(); r.report.SplitUs < 50_000 || slo < 5*time.Millisecond || r.report.SplitUs < 4*slo.Microseconds() {
			t.Errorf("%v: SLO %v, a split waits %d us", duration, slo, r.report.SplitUs)
		}
		// The burst leaves room for a machine that sends nothing for a while and then all messages at once.
		stall := time.Duration(float64(r.report.Burst-r.report.ProfiledBurst) / r.load.Rate() * float64(time.Second))
		if stall < 50*time.Millisecond {
			t.Errorf("%v: b = %d bears a stall of %v", duration, r.report.Burst, stall)
		}
	}
}

func TestBurstFor(t *testing.T) {
	for _, c := range []struct {
		need    int64
		brokers int
		want    int64
	}{
		{25, 6, 62},         // 25 * sqrt(6)
		{25, 1, 32},         // nothing to split
		{25, 2, 36},         // hardly any choice
		{1000, 100, 10_000}, //
	} {
		testkit.Equal(t, burstFor(c.need, c.brokers), c.want, "burstFor(%d, %d)", c.need, c.brokers)
	}
}

func TestSLOFor(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct{ machine, split, want time.Duration }{
		{0, 100 * ms, 10 * ms},
		{200 * time.Microsecond, 100 * ms, 10 * ms},
		{4 * ms, 100 * ms, 20 * ms},
		{20 * ms, 100 * ms, 20 * ms}, // not nearer to the split
		{time.Minute, 100 * ms, 20 * ms},
		{0, 300 * ms, 20 * ms},
		{300 * time.Microsecond, 0, 5 * ms}, // nothing to distinguish
		{30 * ms, 0, 100 * ms},
		{30 * ms, 1, ms},
		{0, time.Hour, 2 * time.Second},
	} {
		testkit.Equal(t, sloFor(c.machine, c.split), c.want, "sloFor(%v, %v)", c.machine, c.split)
	}
	rapid.Check(t, func(t *rapid.T) {
		slo := sloFor(time.Duration(rapid.Int64Range(0, math.MaxInt64/8).Draw(t, "machine")), time.Duration(rapid.Int64Range(0, math.MaxInt64/8).Draw(t, "split")))
		digits := slo
		for digits%10 == 0 && digits > 0 {
			digits /= 10
		}
		if slo < quickest || digits != 1 && digits != 2 && digits != 5 {
			t.Errorf("%v is nothing that people write", slo)
		}
	})
}

func TestAtQuantile(t *testing.T) {
	q := report.Quantiles{P50Us: 1, P90Us: 2, P99Us: 3, P999Us: 4, MaxUs: 5}
	for quantile, want := range map[float64]time.Duration{0.01: 1, 0.5: 1, 0.51: 2, 0.9: 2, 0.95: 3, 0.99: 3, 0.995: 4, 0.9999: 5} {
		if got := q.At(quantile); got != want*time.Microsecond {
			t.Errorf("%v: %v, want %v us", quantile, got, int64(want))
		}
	}
}
