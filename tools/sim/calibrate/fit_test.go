package calibrate_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/sim/calibrate"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func measure(t *testing.T, p calibrate.Parameters, loads ...calibrate.Load) (measured []calibrate.Measurement) {
	t.Helper()
	for _, l := range loads {
		f := testkit.Result(calibrate.Simulate(l, p)).Must(t)
		measured = append(measured, calibrate.Measurement{Load: l, Figures: f})
	}
	return measured
}

var loads = []calibrate.Load{
	{Publishers: 20, Rate: 2000, Batch: 1, Duration: time.Second, Seed: 1},
	{Publishers: 20, Rate: 10_000, Batch: 10, Duration: time.Second, Seed: 2},
}

// What was simulated is found again.
func TestTheFitRecoversTheParameters(t *testing.T) {
	us := func(n int) time.Duration { return time.Duration(n) * time.Microsecond }
	for _, want := range []calibrate.Parameters{
		{Wake: us(30), Message: us(10), P50: us(50), P99: us(300), P999: us(900)},
		{Wake: us(8), Message: us(25), P50: us(120), P99: us(200), P999: us(2000)},
	} {
		got := testkit.Result(calibrate.Fit(measure(t, want, loads...))).Must(t)
		for _, v := range []struct {
			name      string
			got, want time.Duration
			within    float64
		}{
			{"wake", got.Wake, want.Wake, 0.15}, // the least part of the delay
			{"message", got.Message, want.Message, 0.1},
			{"p50", got.P50, want.P50, 0.1},
			{"p99", got.P99, want.P99, 0.1},
			{"p99.9", got.P999, want.P999, 0.25}, // of a few messages
		} {
			if math.Abs(float64(v.got)/float64(v.want)-1) > v.within {
				t.Errorf("%s: %v, want %v within %v", v.name, v.got, v.want, v.within)
			}
		}
	}
}

func TestTheFitDependsOnTheMeasurementsAlone(t *testing.T) {
	short := slices.Clone(loads)
	for i := range short {
		short[i].Duration /= 10
	}
	measured := measure(t, calibrate.Parameters{Wake: 9000, Message: 9000, P50: 90_000, P99: 400_000, P999: 500_000}, short...)
	a, errA := calibrate.Fit(measured)
	b, errB := calibrate.Fit(measured)
	if a != b || errA != nil || errB != nil {
		t.Errorf("%+v, %v and %+v, %v", a, errA, b, errB)
	}
}

func TestMeasurementsThatCannotBe(t *testing.T) {
	good := calibrate.Measurement{Load: loads[0], Figures: calibrate.Figures{P50: 10_000, P99: 20_000, P999: 30_000, CPU: 5000}}
	for want, change := range map[string]func(*calibrate.Measurement){
		"0 publishers":      func(m *calibrate.Measurement) { m.Publishers = 0 },
		"do not ascend":     func(m *calibrate.Measurement) { m.P99 = 5000 },
		"of processor time": func(m *calibrate.Measurement) { m.CPU = 0 },
		"measurement 1":     func(m *calibrate.Measurement) { m.Rate = math.NaN() },
	} {
		bad := good
		change(&bad)
		_, err := calibrate.Fit([]calibrate.Measurement{good, bad})
		testkit.ErrorHas(t, err, want)
	}
	if _, err := calibrate.Fit([]calibrate.Measurement{good}); err == nil {
		t.Error("one measurement gives five parameters")
	}
}
