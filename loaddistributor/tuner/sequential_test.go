package tuner_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// verdicts runs the test, with a budget of 1 %, on messages whose true late fraction is p. Messages
// are late in bursts: all messages of a burst are late, or none. Slices of 100 messages cut through
// bursts, or hold many bursts.
func verdicts(p float64, burst, runs int, maxMessages float64, seed uint64) (counts map[tuner.Decision]int, messages float64) {
	counts = map[tuner.Decision]int{}
	for run := range runs {
		rng := rand.New(rand.NewPCG(seed, uint64(run)))
		s := tuner.NewSequential(0.01, alpha, burst, maxMessages)
		left, late := rng.IntN(burst)+1, rng.Float64() < p
		for s.Decision() == tuner.Undecided {
			const slice = 100
			sum := 0
			for n := slice; n > 0; {
				if left == 0 {
					left, late = burst, rng.Float64() < p
				}
				step := min(n, left)
				if late {
					sum += step
				}
				left -= step
				n -= step
			}
			s.Add(slice, float64(sum))
		}
		_, n := s.Fraction()
		messages += n / float64(runs)
		counts[s.Decision()]++
	}
	return counts, messages
}

const alpha = 0.05

// runs returns the number of runs for each case; SRTM_FITTING_RUNS raises it.
func runs(t *testing.T, usual int) int {
	t.Helper()
	text := os.Getenv("SRTM_FITTING_RUNS")
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("SRTM_FITTING_RUNS=%q is no number of runs", text)
	}
	return n
}

// The guarantee of Sequential, over many runs with known true fractions: the error rate of its
// verdicts is within alpha. The allowance is 4.5 standard deviations of a count whose error rate
// equals alpha, as at p=0.01. With 3 standard deviations, about one in some hundred runs of this test
// failed by chance.
func TestVerdictsErrWithinAlpha(t *testing.T) {
	n := runs(t, 400)
	allowed := alpha*float64(n) + 4.5*math.Sqrt(alpha*(1-alpha)*float64(n))
	for _, burst := range []int{1, 10, 50, 250} {
		for _, p := range []float64{0.005, 0.008, 0.01, 0.012, 0.02, 0.1} {
			t.Run(fmt.Sprintf("p=%v,burst=%d", p, burst), func(t *testing.T) {
				counts, messages := verdicts(p, burst, n, float64(4000*burst), testkit.Seed(t))
				t.Logf("after %.0f bursts: %v", messages/float64(burst), counts)
				wrong := 0
				if p >= 0.01 {
					wrong = counts[tuner.Within]
				}
				if p <= 0.01 {
					wrong = max(wrong, counts[tuner.Beyond])
				}
				if float64(wrong) > allowed {
					t.Errorf("%d of %d verdicts are wrong, allowed %.0f", wrong, n, allowed)
				}
				testkit.Equal(t, counts[tuner.Undecided], 0, "runs ended without a verdict")
			})
		}
	}
}

// The guarantee also covers bursts of any size up to the bound that are late in part.
func TestVerdictsOnBurstsLateInPart(t *testing.T) {
	n := runs(t, 400)
	wrong := 0
	for run := range n {
		rng := rand.New(rand.NewPCG(testkit.Seed(t), uint64(run)))
		s := tuner.NewSequential(0.01, alpha, 250, 500_000)
		for s.Decision() == tuner.Undecided {
			// 2.4 % of bursts are late, on average by half their messages, and larger bursts no more
			// often than smaller bursts: 1.2 %.
			size := 1 + rng.IntN(250)
			late := 0.0
			if rng.Float64() < 0.024 {
				late = float64(size) * rng.Float64()
			}
			s.Add(float64(size), late)
		}
		if s.Decision() == tuner.Within {
			wrong++
		}
	}
	if float64(wrong) > alpha*float64(n)+4.5*math.Sqrt(alpha*float64(n)) {
		t.Errorf("%d of %d verdicts are wrong", wrong, n)
	}
}

// A fraction far from the budget is settled soon. Above the budget, the test ends as soon as it is
// clear that the SLO would not be shown to be kept.
func TestTheClearIsSettledSoon(t *testing.T) {
	for _, c := range []struct {
		p           float64
		within      bool
		maxMessages float64 // bursts, in the mean
	}{{0, true, 330}, {0.0005, true, 400}, {0.1, false, 40}, {0.5, false, 6}} {
		counts, messages := verdicts(c.p, 250, 400, 2000*250, testkit.Seed(t))
		if messages > c.maxMessages*250 || c.within && counts[tuner.Within] < 360 || !c.within && counts[tuner.Within] > 0 {
			t.Errorf("p=%v: %v after %.0f bursts", c.p, counts, messages/250)
		}
	}
	s := tuner.NewSequential(0.01, alpha, 250, 500_000)
	if needed := s.Needs(0); needed < 77_000 || needed > 79_000 {
		t.Errorf("at least %v messages in bursts of 250", needed)
	}
}

// Nearer the budget the test needs more messages, up to the cap, and then takes the safe side.
func TestNearTheBudgetItAsksForMore(t *testing.T) {
	_, nothingLate := verdicts(0, 10, 300, 20_000, testkit.Seed(t))
	counts, fewLate := verdicts(0.002, 10, 300, 20_000, testkit.Seed(t))
	if fewLate < 1.5*nothingLate || counts[tuner.Within] < 200 {
		t.Errorf("p=0.002 took %.0f messages, 0 took %.0f: %v", fewLate, nothingLate, counts)
	}
	for _, p := range []float64{0.0095, 0.0105} {
		if counts, _ := verdicts(p, 10, 300, 20_000, testkit.Seed(t)); counts[tuner.Unsettled] < 250 {
			t.Errorf("p=%v: %v", p, counts)
		}
	}
	// Only the number of messages runs out here: the test ends at the cap.
	s := tuner.NewSequential(0.01, 0.05, 10, 3000)
	for s.Decision() == tuner.Undecided {
		s.Add(10, 0)
	}
	if _, n := s.Fraction(); s.Decision() != tuner.Unsettled || n > 3000 {
		t.Errorf("%v after %v messages, the cap is 3000", s.Decision(), n)
	}
	if d := s.Decision(); s.Add(1e6, 1e6) != d || d == tuner.Undecided {
		t.Errorf("%v, then %v", d, s.Decision())
	}
	// Far too many late messages: the test gives up long before the cap.
	s = tuner.NewSequential(0.01, 0.05, 10, 1e9)
	for s.Decision() == tuner.Undecided {
		s.Add(10, 0.1)
	}
	if _, n := s.Fraction(); s.Decision() != tuner.Unsettled || n > 1e6 {
		t.Errorf("just on the budget: %v after %v messages", s.Decision(), n)
	}
}

func TestDecisionNames(t *testing.T) {
	for d, want := range map[tuner.Decision]string{tuner.Within: "within", tuner.Unsettled: "unsettled", 9: "decision 9"} {
		if d.String() != want {
			t.Errorf("%d is %q", int(d), d)
		}
	}
}
