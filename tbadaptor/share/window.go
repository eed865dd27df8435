package share

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxSteps bounds the steps that a window keeps, whatever the pace of reports.
const maxSteps = 256

// Step is one interval of one broker's traffic of one topic.
type Step struct {
	At         mono.Time // when the report came
	Length     time.Duration
	Offered    uint64 // messages
	MaxBacklog int64
	Backlog    int64 // at its end
	// Peak is the burst with which none of them would have waited; 0: not known.
	Peak int64
}

// profiled is how far back a window says what burst arrivals need.
const profiled = time.Minute

// Window is the traffic of one broker for one topic over the last minute. The
// zero value is empty.
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

// Fill sets what the steps from then on say of a load: nothing, without any. Its
// Peak is of all steps, but for those that began or ended with a backlog: what is
// used then is not what arrivals need, but what the share lacked. A step in which the
// rate jumps has some of either, and is forgotten with the next; until then one that
// has jumped up is expected to send l's Quota, if that is more.
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
	if up { // as far as it is entitled to it
		l.Recent = max(l.Recent, l.Quota.Rate.PerSecond())
	}
}

// sums are of steps.
type sums struct {
	n                        int
	seconds, offered, square float64 // square: of offered, over seconds
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

// dispersion is the variance of what is offered in a step over its mean; 0 with
// fewer than three steps.
func (s *sums) dispersion() float64 {
	if s.n < 3 || s.offered == 0 {
		return 0
	}
	spread := s.square - s.offered*s.offered/s.seconds
	return max(0, spread/float64(s.n-1)/s.rate())
}

// jumps reports whether a step cannot be of the traffic before: off by more than
// a fifth, and by more than four standard deviations of what was seen, or of
// Poisson arrivals if that is more. Before three steps nothing is known of them, but
// that nothing was sent.
func (s *sums) jumps(one Step) bool {
	if s.n == 0 || s.n < 3 && s.offered > 0 {
		return false
	}
	expected := s.rate() * one.Length.Seconds()
	off := math.Abs(float64(one.Offered) - expected)
	return off > expected/5 && off > 4*math.Sqrt(max(1, expected)*max(1, s.dispersion()))
}

// deadBand: a proposal in which no part differs by more than this fraction from
// what is aimed at already is not worth its grants; loads are noisy.
const deadBand = 0.05

// Differs reports whether some part of two assignments differs by more than the
// dead band of what have has.
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
