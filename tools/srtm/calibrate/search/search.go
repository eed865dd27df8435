// Package search finds the maximum rate that keeps an SLO: first by doubling, then by
// bisection, and finally by a second try of the result. The caller tries the rate that
// Next returns and reports the outcome to Record. Judge derives the outcome from counts.
//
// The package is pure. Read tools/srtm/calibrate next, which sends the load.
package search

import "github.com/srtm-io/srtm/internal/faults"

// Outcome is the result of trying a rate.
type Outcome uint8

const (
	// Untried means that there is no outcome.
	Untried Outcome = iota
	// Kept means that the rate was offered and the SLO was kept.
	Kept
	// Missed means that the rate was offered and the SLO was missed.
	Missed
	// Unoffered means that the generator could not send the rate, so the try says
	// nothing.
	Unoffered
)

var names = [...]string{"untried", "kept", "missed", "not offered"}

func (o Outcome) String() string { return names[o] }

// MarshalText makes an Outcome readable in JSON.
func (o Outcome) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// Config bounds a search. Rates are in msg/s.
type Config struct {
	// First is the first rate to try. Least and Most are the bounds.
	First, Least, Most int64
	// Tolerance is the maximum distance between the highest kept rate and the lowest
	// failed rate at the end, as a fraction of the failed rate; at least 1 msg/s.
	Tolerance float64
	// Again is how often an unoffered rate is tried again before it counts: another
	// process may have delayed the generator.
	Again int
	// Steps is the maximum number of tries.
	Steps int
}

// Validate returns all faults of c.
func (c Config) Validate() error {
	var f faults.List
	f.If(c.Least < 1 || c.First < c.Least || c.Most < c.First, "rates: least %d, first %d, most %d: want 1 <= least <= first <= most", c.Least, c.First, c.Most)
	f.If(!(c.Tolerance > 0 && c.Tolerance < 1), "tolerance %v: want above 0 and below 1", c.Tolerance)
	f.If(c.Steps < 1 || c.Again < 0, "%d steps, again %d times: want 1 or more, and 0 or more", c.Steps, c.Again)
	return f.Err()
}

// Search is a plain value with one owner. Make it with New.
//
// Invariant: kept is ascending. If over is not 0, all rates in kept are below over.
type Search struct {
	cfg           Config
	kept          []int64
	lowestRefused int64   // lowest rate that was not kept; 0: none
	outcome       Outcome // outcome of lowestRefused
	confirmed     bool    // the highest rate in kept was kept twice
	steps         int
	// again is the unoffered rate to try again, after `tries` tries; 0: none.
	again int64
	tries int
}

// New returns a search that has tried nothing. Requires: cfg is valid.
func New(cfg Config) *Search { return &Search{cfg: cfg} }

// Kept returns the maximum kept rate (0: none) and whether the rate was kept twice.
func (s *Search) Kept() (rate int64, confirmed bool) {
	if len(s.kept) == 0 {
		return 0, false
	}
	return s.kept[len(s.kept)-1], s.confirmed
}

// Over returns the lowest rate that was not kept and its outcome; 0 and Untried if there
// is none.
func (s *Search) Over() (rate int64, outcome Outcome) { return s.lowestRefused, s.outcome }

// Next returns the rate to try next, or false if the search is over. The search also ends
// after Config.Steps tries, or if Config.Least was not kept.
func (s *Search) Next() (rate int64, more bool) {
	top, confirmed := s.Kept()
	switch {
	case s.steps >= s.cfg.Steps, confirmed && s.ends(top):
		return 0, false
	case s.again != 0:
		return s.again, true
	case s.steps == 0:
		return s.cfg.First, true
	case s.lowestRefused == 0 && top < s.cfg.Most:
		return min(2*top, s.cfg.Most), true
	case top == 0 && s.lowestRefused <= s.cfg.Least:
		return 0, false
	case top == 0:
		return max(s.lowestRefused/2, s.cfg.Least), true
	case s.ends(top):
		return top, true
	}
	return top + (s.lowestRefused-top)/2, true
}

// ends reports whether top is close enough to the lowest rate not kept, or is the upper
// bound.
func (s *Search) ends(top int64) bool {
	if s.lowestRefused == 0 {
		return top == s.cfg.Most
	}
	return s.lowestRefused-top <= max(1, int64(s.cfg.Tolerance*float64(s.lowestRefused)))
}

// Record adds the outcome of a rate from Next. A rate that is not kept withdraws earlier
// results of the same and of higher rates: a rate kept once and then missed is not kept.
func (s *Search) Record(rate int64, o Outcome) {
	s.steps++
	if o == Unoffered && s.tries < s.cfg.Again {
		s.again = rate
		s.tries++
		return
	}
	s.again, s.tries = 0, 0
	if o == Kept {
		if top, _ := s.Kept(); top == rate {
			s.confirmed = true
			return
		}
		s.kept, s.confirmed = append(s.kept, rate), false
		return
	}
	s.lowestRefused, s.outcome, s.confirmed = rate, o, false
	for len(s.kept) > 0 && s.kept[len(s.kept)-1] >= rate {
		s.kept = s.kept[:len(s.kept)-1]
	}
}
