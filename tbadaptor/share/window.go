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

func (w *Window) prune(from mono.Time) {
	old := 0
	for old < len(w.steps) && w.steps[old].At.Before(from) {
		old++
	}
	w.steps = w.steps[old:]
}

// Fill computes l's rates, backlogs and Dispersion from the steps at or after from.
// Without steps they are zero. Peak comes from all steps, except steps that began or
// ended with a backlog: then the burst shows what the share lacked, not what the arrivals
// needed.
//
// A step in which the rate jumps mixes both rates, so the next step replaces it. After a
// jump up, Recent is at least l's Quota until the next step.
func (w *Window) Fill(l *Load, from mono.Time) {
	var all, recent sums
	l.MaxBacklog, l.Backlog, l.Peak = 0, 0, 0
	waiting, mixed, up := false, false, false
	for _, s := range w.steps {
		if !waiting && s.Backlog == 0 {
			l.Peak = max(l.Peak, s.Peak)
		}
		waiting = s.Backlog > 0
		if s.At.Before(from) {
			continue
		}
		all.add(s)
		jumps := recent.jumps(s)
		up = jumps && float64(s.Offered) > recent.rate()*s.Length.Seconds()
		if jumps || mixed {
			recent = sums{}
		}
		mixed = jumps
		recent.add(s)
		l.MaxBacklog = max(l.MaxBacklog, s.MaxBacklog)
		l.Backlog = s.Backlog
	}
	l.Rate, l.Recent, l.Dispersion = all.rate(), recent.rate(), recent.dispersion()
	if up { // only up to the quota
		l.Recent = max(l.Recent, l.Quota.Rate.PerSecond())
	}
}

type sums struct {
	n                        int
	seconds, offered, square float64 // square: sum of offered*offered/seconds over the steps
}

func (s *sums) add(one Step) {
	n, seconds := float64(one.Offered), one.Length.Seconds()
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
func (s *sums) jumps(one Step) bool {
	if s.n == 0 || s.n < 3 && s.offered > 0 {
		return false
	}
	expected := s.rate() * one.Length.Seconds()
	off := math.Abs(float64(one.Offered) - expected)
	return off > expected/5 && off > 4*math.Sqrt(max(1, expected)*max(1, s.dispersion()))
}

// deadBand is the minimum change worth new grants, as a fraction of the present target:
// loads are noisy.
const deadBand = 0.05

// Differs reports whether some part of want differs from have by more than the dead band.
func Differs(have, want []Assigned) bool {
	aimed := make(map[string]tokenbucket.Share, len(have))
	for _, a := range have {
		aimed[a.Broker] = a.Share
	}
	off := func(have, want int64) bool {
		return math.Abs(float64(want-have)) > deadBand*float64(have)
	}
	for _, a := range want {
		was := aimed[a.Broker]
		delete(aimed, a.Broker)
		if off(int64(was.Rate), int64(a.Share.Rate)) || off(was.Burst, a.Share.Burst) {
			return true
		}
	}
	// order: any one of them decides
	for _, was := range aimed {
		if !was.IsZero() {
			return true
		}
	}
	return false
}
