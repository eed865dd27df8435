package tuner

import (
	"math"
	"testing"
)

// The same fraction may be late in the mean. If it is late in each second, the measurement is
// believed. If seconds differ much, the observed seconds say too little about later seconds.
func TestWhichArrivalsAreTypical(t *testing.T) {
	f := &Fast{setup: Setup{Quantile: 0.99}}
	f.trace.arrivals = make([]Arrival, 1)
	for _, c := range []struct {
		late []float64 // of 1,000 messages, by second
		want bool
	}{
		{[]float64{0, 0}, false}, // too few
		{[]float64{0, 0, 0}, true},
		{[]float64{8, 8, 8, 8}, true},
		{[]float64{0, 0, 0, 32}, false},
		{[]float64{4, 4, 4, 4, 4, 4, 4, 12}, true},
	} {
		var seconds []tally
		sum := 0.0
		for _, late := range c.late {
			seconds = append(seconds, tally{1000, late})
			sum += late
		}
		var now forecast
		now.seconds, now.deviation = deviation(append(seconds, tally{})) // a gap does not count
		if got := f.typical(now, sum/1000/float64(len(c.late))); got != c.want || now.seconds != len(c.late) {
			t.Errorf("%v late: typical %v, standard error %v of %d seconds", c.late, got, now.deviation, now.seconds)
		}
	}
	if _, err := deviation(make([]tally, 1)); !math.IsInf(err, 1) {
		t.Errorf("the standard error of one second is %v", err)
	}
}
