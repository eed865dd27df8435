package schedule

import (
	"testing"

	. "github.com/onsi/gomega"
)

// What goes wrong in the paper's form is in tools/sim/web.

// The paper looks at the type of the resource that is most free even if no such request
// waits: with one request at the server, what would fit beside it never goes.
func TestTypeWithoutRequestsHoldsUpNone(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 3}, 1)
	arrive(t, s, 0, 9, 1, 1)
	for range 10 { // at a tie all types have their turn
		s.Next(First)
	}
	g.Expect(s.Classes()[0].InFlight).To(Equal(1))
	arrive(t, s, 0, 9, 1, 1)
	sent := 0
	for range 100 {
		if _, _, ok := s.Next(First); ok {
			sent++
		}
	}
	g.Expect(sent).To(Equal(1))
}

// The paper raises the deficits of one resource: where those of another are used up
// nothing goes any more.
func TestNoDeadlock(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 2}, 1)
	// The first resource is the more free from now on.
	s.SetCapacity(0, Vector{100, 50})
	sent := 0
	for range 100 {
		r := arrive(t, s, 0, 6, 5)
		for range 10 {
			if _, _, ok := s.Next(First); ok {
				sent++
				s.Done(r, nil)
			}
		}
		s.Leave(r)
	}
	g.Expect(sent).To(Equal(100))
}

// Of a resource that every request takes there is never the most: the paper starves
// the requests that take most of it.
func TestNoTypeStarves(t *testing.T) {
	g := NewWithT(t)
	// Its deficits last for the whole test.
	s := schedulerOf(t, Config{Resources: 3}, 1e4, 1)
	var flying []*Request
	ofFirst := 0
	for range 3 {
		arrive(t, s, 0, 4, 5, 0)
		arrive(t, s, 0, 4, 0, 5)
	}
	for len(flying) < 5 {
		if r, _, ok := s.Next(First); ok {
			flying = append(flying, r)
		}
	}
	for range 100 {
		arrive(t, s, 0, 5, 0, 0)
	}
	for range 500 {
		arrive(t, s, 0, 4, 5, 0)
		arrive(t, s, 0, 4, 0, 5)
		if r, _, ok := s.Next(First); ok {
			flying = append(flying, r)
			if r.kind == 0 {
				ofFirst++
			}
		}
		s.Done(flying[0], nil)
		flying = flying[1:]
		for i := 1; i < 3; i++ { // two of them wait at a time
			for s.queued[i] > 2 {
				s.Leave(s.classes[0].queues[i].Front())
			}
		}
	}
	g.Expect(ofFirst).To(BeNumerically("~", 500/(patience+1), 10))
}

// Under load requests wait for a completion, not for deficits. The paper passes on to
// the next class and raises deficits then, so that classes come to be equal.
func TestWeightsUnderLoad(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 1}, 6, 3, 1)
	var flying []*Request
	var sent [3]int
	for range 10 {
		for class := range 3 {
			arrive(t, s, class, 10)
		}
	}
	for range 3000 {
		for {
			r, _, ok := s.Next(First)
			if !ok {
				break
			}
			sent[r.Class]++
			flying = append(flying, r)
			arrive(t, s, r.Class, 10)
		}
		s.Done(flying[0], nil)
		flying = flying[1:]
	}
	g.Expect(float64(sent[0]) / float64(sent[1])).To(BeNumerically("~", 2, .05))
	g.Expect(float64(sent[0]) / float64(sent[2])).To(BeNumerically("~", 6, .15))
}
