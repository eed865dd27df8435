package share

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxSteps limits the steps of a window, however often brokers report.
const maxSteps = 256

// Step is one interval of a broker's traffic for a topic.
type Step struct {
	At         mono.Time // arrival time of the report
	Length     time.Duration
	Offered    uint64 // messages
	MaxBacklog int64
	Backlog    int64 // messages at the end of the step
	// Peak is the burst with which no message would have waited; 0 if unknown.
	Peak int64
}

// profiled is the period over which Fill computes Peak.
const profiled = time.Minute

// Window is the traffic of one broker for one topic over the last minute. The zero value
// is empty.
type Window struct{ steps []Step }

// Add appends a step.
func (w *Window) Add(s Step) {
	w.prune(s.At.Add(-profiled))
	if len(w.steps) == maxSteps {
		w.steps = w.steps[1:]
	}
	w.steps = append(w.steps, s)
}

func (w *Window) prune(start mono.Time) {
	old := 0
	for old < len(w.steps) && w.steps[old].At.Before(start) {
		old++
	}
	w.steps = w.steps[old:]
}

// Fill computes l's rates, backlogs and Dispersion from the steps at or after start.
// Without steps they are zero. Peak comes from all steps, except steps that began or
// ended with a backlog: then the burst shows what the share lacked, not what the arrivals
// needed.
//
// A step in which the rate jumps mixes both rates, so the next step replaces it. After a
// jump up, Recent is at least l's Quota until the next step.
func (w *Window) Fill(l *Load, start mono.Time) {
	var all, recent sums
	l.MaxBacklog, l.Backlog, l.Peak = 0, 0, 0
	waiting, mixed, jumpsUp := false, false, false
	for _, s := range w.steps {
		if !waiting && s.Backlog == 0 {
			l.Peak = max(l.Peak, s.Peak)
		}
		waiting = s.Backlog > 0
		if s.At.Before(start) {
			continue
		}
		all.add(s)
		jumps := recent.jumps(s)
		jumpsUp = jumps && float64(s.Offered) > recent.rate()*s.Length.Seconds()
		if jumps || mixed {
			recent = sums{}
		}
		mixed = jumps
		recent.add(s)
		l.MaxBacklog = max(l.MaxBacklog, s.MaxBacklog)
		l.Backlog = s.Backlog
	}
	l.Rate, l.Recent, l.Dispersion = all.rate(), recent.rate(), recent.dispersion()
	if jumpsUp { // only up to the quota
		l.Recent = max(l.Recent, l.Quota.Rate.PerSecond())
	}
}

type sums struct {
	n                        int
	seconds, offered, square float64 // square: sum of offered*offered/seconds over the steps
}

func (s *sums) add(step Step) {
	n, seconds := float64(step.Offered), step.Length.Seconds()
	s.n++
	s.seconds += seconds
	s.offered += n
	s.square += n * n / seconds
}

func (s *sums) rate() float64 {
	if s.seconds <= 0 {
		return 0
	}
	return s.offered / s.seconds
}

// dispersion returns Load.Dispersion of the steps; 0 with fewer than three steps.
func (s *sums) dispersion() float64 {
	if s.n < 3 || s.offered == 0 {
		return 0
	}
	spread := s.square - s.offered*s.offered/s.seconds
	return max(0, spread/float64(s.n-1)/s.rate())
}

// jumps reports whether a step does not fit the steps before: the number of messages
// differs by more than a fifth, and by more than four standard deviations. The deviation
// is the observed one, but at least that for Poisson arrivals. With fewer than three
// steps, only traffic after silence counts as a jump.
func (s *sums) jumps(step Step) bool {
	if s.n == 0 || s.n < 3 && s.offered > 0 {
		return false
	}
	expected := s.rate() * step.Length.Seconds()
	difference := math.Abs(float64(step.Offered) - expected)
	return difference > expected/5 && difference > 4*math.Sqrt(max(1, expected)*max(1, s.dispersion()))
}

// deadBand is the minimum change worth new grants, as a fraction of the present target:
// loads are noisy.
const deadBand = 0.05

// Differs reports whether some part of want differs from current by more than the dead band.
func Differs(current, want []Assigned) bool {
	targets := make(map[string]tokenbucket.Share, len(current))
	for _, a := range current {
		targets[a.Broker] = a.Share
	}
	differs := func(current, want int64) bool {
		return math.Abs(float64(want-current)) > deadBand*float64(current)
	}
	for _, a := range want {
		target := targets[a.Broker]
		delete(targets, a.Broker)
		if differs(int64(target.Rate), int64(a.Share.Rate)) || differs(target.Burst, a.Share.Burst) {
			return true
		}
	}
	// order: any one of them decides
	for _, target := range targets {
		if !target.IsZero() {
			return true
		}
	}
	return false
}
