package conn

import "time"

// Thresholds for adding a loop, removing a loop and moving connections.
const (
	lookInterval = 100 * time.Millisecond // interval between looks under load
	// crowded is the utilization above which a loop is overloaded. At 0.75, connections already
	// wait long for their turn (M/G/1: three service times).
	crowded = 0.75
	// roomy is the utilization below which the remaining loops must stay when a loop is removed. It
	// is far from crowded, so that a load between the two changes nothing.
	roomy = 0.4
	// uneven is the difference of utilization above which connections move from one loop to
	// another.
	uneven = 0.25
	// spare is the number of idle processors that another loop requires. Without an idle processor,
	// loops only take turns, and each message between two loops causes a wake-up.
	spare = 0.5

	crowdedLooks = 3  // consecutive looks before a change
	roomyLooks   = 50 // consecutive looks before a loop is removed
	settleLooks  = 3  // looks after a change before it takes effect

	// A new loop is on trial for trialLooks. It stays if the loops do a tenth more work, or as much
	// work with a lower utilization of the busiest loop. Two loops can do less work than one: for
	// example, all messages of one topic take its lock. If less than four fifths of the work is
	// done after clearLooks, the trial fails at once. After a failed trial no loop is started for
	// holdLooks.
	trialLooks = 30
	clearLooks = 10
	holdLooks  = 1200
)

// loopLoad is one loop's work between two looks.
type loopLoad struct {
	busy        float64 // utilization, 0 to 1
	largest     float64 // largest share of the work of one connection, 0 to 1
	connections int
	work        float64 // in any unit
}

// change is a decision about the loops. The zero value changes nothing.
type change struct {
	kind     changeKind
	from, to int     // indices of loops; unused by startLoop
	share    float64 // share of from's work, for moveWork
}

type changeKind uint8

const (
	noChange  changeKind = iota
	startLoop            // add a loop
	moveWork             // move connections with that share of the work
	endLoop              // move from's connections to to, then end from
)

// spreader decides how many loops there are and which connections move, look by look. It is pure.
// It keeps the number of loops between min and max.
type spreader struct {
	min, max int

	overLooks, underLooks, settleLeft, holdLeft int // counted in looks
	// spare is the recent number of idle processors, smoothed. A single look is imprecise: the
	// system counts in ticks of 10 ms.
	spare float64

	pace      float64 // work of all loops at a look, smoothed
	trialLeft int     // looks left in the trial of the newest loop; 0: no trial
	// pace and utilization of the busiest loop, before the trial.
	paceBefore, busiestBefore float64
}

// look takes the loads of all loops and the number of idle processors (< 0: unknown).
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
	if s.pace += (work - s.pace) / 4; s.pace < work/2 { // the load begins
		s.pace = work
	}
	s.holdLeft = max(0, s.holdLeft-1)
	s.overLooks = count(s.overLooks, loops[high].busy > crowded)
	if s.spare += (idle - s.spare) / 8; idle < 0 {
		s.spare = 0
	}
	s.underLooks = count(s.underLooks, n > s.min && sum < roomy*float64(n-1))
	if s.settleLeft > 0 {
		s.settleLeft--
		return change{}
	}
	if s.trialLeft > 0 {
		s.trialLeft--
		clear := s.trialLeft <= trialLooks-clearLooks && s.pace < 0.8*s.paceBefore
		if clear || s.trialLeft == 0 && s.pace < 1.1*s.paceBefore && (s.pace < 0.95*s.paceBefore || loops[high].busy > s.busiestBefore-0.1) {
			s.trialLeft = 0
			s.settleLeft, s.overLooks, s.underLooks, s.holdLeft = settleLooks, 0, 0, holdLooks
			return change{kind: endLoop, from: n - 1, to: 0}
		}
	}
	c := change{}
	// The work of one connection cannot be divided.
	divisible := loops[high].busy * (1 - loops[high].largest)
	switch {
	case s.overLooks >= crowdedLooks && divisible > uneven && loops[high].busy-loops[low].busy > uneven:
		c = change{kind: moveWork, from: high, to: low, share: (loops[high].busy - loops[low].busy) / 2 / loops[high].busy}
	case s.overLooks >= crowdedLooks && divisible > uneven && n < s.max && s.spare > spare && s.holdLeft == 0 && s.trialLeft == 0:
		c, s.trialLeft, s.paceBefore, s.busiestBefore = change{kind: startLoop}, trialLooks, s.pace, loops[high].busy
	case s.underLooks >= roomyLooks && s.trialLeft == 0:
		c = change{kind: endLoop, from: low}
		for i, l := range loops { // choose the least busy of the other loops
			if i != low && (c.to == low || l.busy < loops[c.to].busy) {
				c.to = i
			}
		}
	}
	switch c.kind {
	case startLoop: // moveWork follows
	case moveWork, endLoop:
		s.settleLeft, s.overLooks, s.underLooks = settleLooks, 0, 0
	}
	return c
}

func count(n int, holds bool) int {
	if holds {
		return n + 1
	}
	return 0
}
