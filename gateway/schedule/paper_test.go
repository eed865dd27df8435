package schedule

import (
	"testing"

	. "github.com/onsi/gomega"
)

// The flaws of the paper's form are in tools/sim/web.

// The paper picks the type of the resource with the most free capacity, even if no such request waits.
// With one request at the server, a request that would fit beside it is never sent.
func TestTypeWithoutRequestsHoldsUpNone(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 3}, 1)
	arrive(t, s, 0, 9, 1, 1)
	for range 10 { // at a tie all types get a turn
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

// The paper raises the deficits of one resource. If the deficits of another resource are used up, no
// request is sent any more.
func TestNoDeadlock(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 2}, 1)
	// From now on the first resource has more free capacity.
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

// A resource that every request uses never has the most free capacity. So the paper starves the
// requests that use most of this resource.
func TestNoTypeStarves(t *testing.T) {
	g := NewWithT(t)
	// The class's deficits last for the whole test.
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
		for i := 1; i < 3; i++ { // two of the requests wait at a time
			for s.queued[i] > 2 {
				s.Leave(s.classes[0].queues[i].Front())
			}
		}
	}
	g.Expect(ofFirst).To(BeNumerically("~", 500/(patience+1), 10))
}

// Under load, requests wait for a completion, not for deficits. The paper then passes on to the next
// class and raises deficits, so that classes become equal.
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
