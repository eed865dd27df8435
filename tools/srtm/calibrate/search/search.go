package search

import "github.com/srtm-io/srtm/internal/faults"

// Outcome is what became of a rate.
type Outcome uint8

const (
	// Untried is no outcome.
	Untried Outcome = iota
	// Kept: it was offered, and the SLO kept.
	Kept
	// Missed: it was offered, and the SLO missed.
	Missed
	// Unoffered: the generator could not offer it, so that nothing is known.
	Unoffered
)

var names = [...]string{"untried", "kept", "missed", "not offered"}

func (o Outcome) String() string { return names[o] }

// MarshalText makes it readable in JSON.
func (o Outcome) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// Config bounds a search. Rates are in msg/s.
type Config struct {
	// First is the rate that is tried first, Least and Most the bounds.
	First, Least, Most int64
	// Tolerance is how far below the lowest rate that failed the highest one that
	// was kept may be in the end, as a part of the former; at least 1 msg/s.
	Tolerance float64
	// Again is how often a rate that was not offered is tried again before that
	// counts: what made the generator late may have been nothing of its own.
	Again int
	// Steps bounds how many tries there are.
	Steps int
}

// Validate returns all that is wrong with c.
func (c Config) Validate() error {
	var f faults.List
	f.If(c.Least < 1 || c.First < c.Least || c.Most < c.First, "rates: least %d, first %d, most %d: want 1 <= least <= first <= most", c.Least, c.First, c.Most)
	f.If(!(c.Tolerance > 0 && c.Tolerance < 1), "tolerance %v: want above 0 and below 1", c.Tolerance)
	f.If(c.Steps < 1 || c.Again < 0, "%d steps, again %d times: want 1 or more, and 0 or more", c.Steps, c.Again)
	return f.Err()
}

// Search is a plain value with one owner. Make it with New.
//
// Invariant: kept is ascending, and below over where that is not 0.
type Search struct {
	cfg   Config
	kept  []int64
	over  int64   // the lowest rate that was not kept; 0: none
	why   Outcome // what became of it
	sure  bool    // the last of kept was kept twice
	steps int
	// again is the rate that was not offered in the last `tries` tries; 0: none.
	again int64
	tries int
}

// New returns a search that has tried nothing. Requires: cfg is valid.
func New(cfg Config) *Search { return &Search{cfg: cfg} }

// Kept returns the maximum rate that was kept, 0 if none was, and whether it was
// kept when asked again.
func (s *Search) Kept() (rate int64, sure bool) {
	if len(s.kept) == 0 {
		return 0, false
	}
	return s.kept[len(s.kept)-1], s.sure
}

// Over returns the lowest rate that was not kept, and what became of it; 0 and
// Untried if there is none.
func (s *Search) Over() (rate int64, why Outcome) { return s.over, s.why }

// Next returns the rate to try next; false: the search is over. Once it has
// Config.Steps behind it, or not even Config.Least was kept, it is over as well.
func (s *Search) Next() (rate int64, more bool) {
	top, sure := s.Kept()
	switch {
	case s.steps >= s.cfg.Steps, sure && s.ends(top):
		return 0, false
	case s.again != 0:
		return s.again, true
	case s.steps == 0:
		return s.cfg.First, true
	case s.over == 0 && top < s.cfg.Most:
		return min(2*top, s.cfg.Most), true
	case top == 0 && s.over <= s.cfg.Least:
		return 0, false
	case top == 0:
		return max(s.over/2, s.cfg.Least), true
	case s.ends(top):
		return top, true
	}
	return top + (s.over-top)/2, true
}

// ends reports whether top is near enough to what is not kept, or all there is.
func (s *Search) ends(top int64) bool {
	if s.over == 0 {
		return top == s.cfg.Most
	}
	return s.over-top <= max(1, int64(s.cfg.Tolerance*float64(s.over)))
}

// Record says what became of a rate that Next returned. One that is not kept
// takes back what was said of it and of greater ones: a rate that was kept once
// and not again is not kept.
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
			s.sure = true
			return
		}
		s.kept, s.sure = append(s.kept, rate), false
		return
	}
	s.over, s.why, s.sure = rate, o, false
	for len(s.kept) > 0 && s.kept[len(s.kept)-1] >= rate {
		s.kept = s.kept[:len(s.kept)-1]
	}
}
