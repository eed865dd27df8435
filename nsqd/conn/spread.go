package conn

import "time"

// When there is to be another loop, or one less, and who moves.
const (
	lookEvery = 100 * time.Millisecond // how often loops that are at work are looked at
	// crowded is how much of a processor's time a loop may take before it is relieved:
	// beyond, those who wait for their turn wait for long (M/G/1: three services).
	crowded = 0.75
	// roomy is how much each would take at most if there were one less, when one is
	// ended. Far from crowded, so that a load between them changes nothing.
	roomy = 0.4
	// uneven is by how much two loops differ before connections move between them.
	uneven = 0.25
	// spare is how many processors must have nothing to do for another loop: where
	// there is none, it only takes turns with the others, and messages that go from
	// one to the other wake it.
	spare = 0.5

	crowdedLooks = 3  // in a row, before anything is done about it
	roomyLooks   = 50 // likewise
	settleLooks  = 3  // after a change, before it shows

	// A loop that was started stays if within trialLooks it is worth something: a tenth
	// more is done, or as much and the busiest is less so. Messages of one topic, for
	// one, pass under its lock: two loops do less of them than one. If not, no other is
	// started for holdLooks.
	// It goes on for clearLooks only, if by then less than four fifths is done.
	trialLooks = 30
	clearLooks = 10
	holdLooks  = 1200
)

// loopLoad is what one loop did between two looks.
type loopLoad struct {
	busy        float64 // part of a processor's time, 0 to 1
	largest     float64 // part of its work that came from one connection, 0 to 1
	connections int
	work        float64 // what it did, in any unit
}

// change is what is to be done about the loops. The zero value: nothing.
type change struct {
	kind     changeKind
	from, to int     // loops; of startLoop neither
	part     float64 // of from's work, for moveWork
}

type changeKind uint8

const (
	noChange  changeKind = iota
	startLoop            // one more
	moveWork             // connections that make that part of the work
	endLoop              // from, whose connections go to to
)

// spreader decides about the loops by what it is shown of them, look by look. It is
// pure. It never has fewer than min or more than max of them.
type spreader struct {
	min, max int

	over, under, settle, hold int // looks
	// spare is how many processors had nothing to do, lately. A single look sees ticks
	// of 10 ms, and every look while a loop is crowded is another try.
	spare float64

	pace  float64 // work of all loops at a look, lately
	trial int     // looks until it is known what the last loop to be started is worth; 0: it is
	// Before that, the pace, and how busy the busiest was.
	before, busiest float64
}

// look is shown all loops, and how many processors had nothing to do; < 0: not known.
func (s *spreader) look(loops []loopLoad, idle float64) change {
	high, low, sum, work := 0, 0, 0., 0.
	for i, l := range loops {
		sum, work = sum+l.busy, work+l.work
		if l.busy > loops[high].busy {
			high = i
		}
		if l.busy < loops[low].busy {
			low = i
		}
	}
	n := len(loops)
	if s.pace += (work - s.pace) / 4; s.pace < work/2 { // it begins
		s.pace = work
	}
	s.hold = max(0, s.hold-1)
	s.over = count(s.over, loops[high].busy > crowded)
	if s.spare += (idle - s.spare) / 8; idle < 0 {
		s.spare = 0
	}
	s.under = count(s.under, n > s.min && sum < roomy*float64(n-1))
	if s.settle > 0 {
		s.settle--
		return change{}
	}
	if s.trial > 0 {
		s.trial--
		clear := s.trial <= trialLooks-clearLooks && s.pace < 0.8*s.before
		if clear || s.trial == 0 && s.pace < 1.1*s.before && (s.pace < 0.95*s.before || loops[high].busy > s.busiest-0.1) {
			s.trial = 0
			s.settle, s.over, s.under, s.hold = settleLooks, 0, 0, holdLooks
			return change{kind: endLoop, from: n - 1, to: 0}
		}
	}
	c := change{}
	// What one connection brings cannot be divided.
	divisible := loops[high].busy * (1 - loops[high].largest)
	switch {
	case s.over >= crowdedLooks && divisible > uneven && loops[high].busy-loops[low].busy > uneven:
		c = change{kind: moveWork, from: high, to: low, part: (loops[high].busy - loops[low].busy) / 2 / loops[high].busy}
	case s.over >= crowdedLooks && divisible > uneven && n < s.max && s.spare > spare && s.hold == 0 && s.trial == 0:
		c, s.trial, s.before, s.busiest = change{kind: startLoop}, trialLooks, s.pace, loops[high].busy
	case s.under >= roomyLooks && s.trial == 0:
		c = change{kind: endLoop, from: low}
		for i, l := range loops { // to the least busy of the others
			if i != low && (c.to == low || l.busy < loops[c.to].busy) {
				c.to = i
			}
		}
	}
	switch c.kind {
	case startLoop: // what it is for comes next
	case moveWork, endLoop:
		s.settle, s.over, s.under = settleLooks, 0, 0
	}
	return c
}

func count(n int, holds bool) int {
	if holds {
		return n + 1
	}
	return 0
}
