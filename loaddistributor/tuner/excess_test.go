package tuner_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// Offered messages in seconds, against the contract of 100 msg/s and a burst of 50.
func TestExcessNeedsOffersAboveTheContract(t *testing.T) {
	var e tuner.Excess
	var history []float64
	offer := func(n float64) bool {
		history = append(history, n)
		last := history[max(0, len(history)-10):]
		mean := 0.0
		for _, x := range last {
			mean += x / float64(len(last))
		}
		return e.Offer(n, time.Second, mean, 100, 50, 10*time.Second)
	}
	steps := []struct {
		seconds int
		n       float64
		over    bool // at the end
	}{
		{60, 100, false}, // the whole rate
		{1, 150, false},  // and the burst
		{1, 50, false},
		{60, 95, false},
		{20, 101, false},
		{40, 101, true}, // a little more, for any length of time
		{1, 0, true},    // the excess is not made up for yet
		{10, 99, false},
		{1, 159, true}, // 59 % over
		{10, 159, true},
		{5, 0, true}, // 590 too many
		{4, 0, true}, // still measured
		{6, 0, false},
	}
	for i, s := range steps {
		over := false
		for range s.seconds {
			over = offer(s.n)
		}
		testkit.Equal(t, over, s.over, "step %d: over", i)
	}
	// A controller that starts during the excess.
	e = tuner.Excess{}
	if e.Backlog(400, 50); !e.Offer(159, time.Second, 159, 100, 50, 10*time.Second) {
		t.Error("400 wait, more than the contract is offered, and it is within it")
	}
	e = tuner.Excess{}
	if e.Backlog(400, 50); e.Offer(90, time.Second, 90, 100, 50, 10*time.Second) {
		t.Error("400 wait since tokens lack, and it is said to be over its contract")
	}
}

// A topic within its rate does not exceed its contract by bursts, however small the contract's burst.
func TestBurstsAreNotExcess(t *testing.T) {
	rng := rand.New(rand.NewPCG(testkit.Seed(t), 1))
	var e tuner.Excess
	var window []float64
	for range 3600 {
		n := float64(draw(rng, 100_000, 0.0085)) // 850 +- 29
		window = append(window, n)
		window = window[max(0, len(window)-10):]
		mean := 0.0
		for _, x := range window {
			mean += x / float64(len(window))
		}
		if e.Offer(n, time.Second, mean, 1000, 1, 10*time.Second) {
			t.Fatal("over")
		}
	}
}
