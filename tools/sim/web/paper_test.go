package web

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// These tests show the faults of the papers' own schedulers. The gateway's tests check that its schedulers do not have
// these faults.

func paperOf(weights ...float64) *paperScheduler {
	var classes []schedule.Class
	for _, w := range weights {
		classes = append(classes, schedule.Class{Weight: w})
	}
	return newPaperScheduler(classes)
}

func arrive(t *testing.T, s *paperScheduler, class int, cost ...float64) *visit {
	t.Helper()
	c := &visit{Request: schedule.Request{Class: class, Cost: cost}}
	c.Value = c
	testkit.Must(t, s.Arrive(&c.Request))
	return c
}

func next(s *paperScheduler) *visit {
	if r, _, ok := s.Next(schedule.First); ok {
		return r.Value.(*visit)
	}
	return nil
}

// The paper's figure 6, as in gateway/schedule.
func TestWorkedExample(t *testing.T) {
	g := NewWithT(t)
	s := paperOf(6, 3, 1)
	want := []*visit{arrive(t, s, 0, 6, 5, 3), arrive(t, s, 0, 3, 2, 7), arrive(t, s, 0, 2, 8, 4)}
	for class := range 3 { // no queue is empty
		for range 3 {
			arrive(t, s, class, 6, 5, 3)
			arrive(t, s, class, 2, 8, 4)
			arrive(t, s, class, 3, 2, 7)
		}
	}
	for _, c := range want {
		g.Expect(next(s)).To(BeIdenticalTo(c))
	}
	g.Expect(s.free).To(Equal([3]int64{89 * percent, 85 * percent, 86 * percent}))
	g.Expect(s.deficits[0]).To(Equal([3]int64{49 * percent, 45 * percent, 46 * percent}))
	s.Done(&want[0].Request, nil)
	g.Expect(s.free).To(Equal([3]int64{95 * percent, 90 * percent, 89 * percent}))
}

// While one request is at the server, a request that would fit beside it never goes: no waiting request is of the type
// of the freest resource.
func TestPaperHoldsUpTypes(t *testing.T) {
	g := NewWithT(t)
	s := paperOf(1)
	arrive(t, s, 0, 9, 1, 1)
	sent := 0
	for range 10 { // at a tie each type has its turn
		if next(s) != nil {
			sent++
		}
	}
	g.Expect(sent).To(Equal(1))
	arrive(t, s, 0, 9, 1, 1)
	for range 100 {
		g.Expect(next(s)).To(BeNil())
	}
}

// If the deficits of another resource are used up, no request goes any more.
func TestPaperDeadlock(t *testing.T) {
	g := NewWithT(t)
	s := paperOf(1)
	s.free = [3]int64{100 * percent, 50 * percent, 50 * percent} // the first is most free from now on
	sent := 0
	for range 100 {
		c := arrive(t, s, 0, 6, 5, 0)
		for range 10 {
			if next(s) != nil {
				sent++
				s.Done(&c.Request, nil)
			}
		}
		s.queues[0][0] = nil
	}
	g.Expect(sent).To(Equal(2))
}

// Requests that mainly use a resource used by every request starve.
func TestPaperStarvesType(t *testing.T) {
	g := NewWithT(t)
	s := paperOf(1e4, 1) // the deficits last for the whole test
	var flying []*visit
	for range 3 {
		arrive(t, s, 0, 4, 5, 0)
		arrive(t, s, 0, 4, 0, 5)
	}
	for len(flying) < 5 {
		if c := next(s); c != nil {
			flying = append(flying, c)
		}
	}
	for range 100 {
		arrive(t, s, 0, 5, 0, 0)
	}
	for range 500 {
		arrive(t, s, 0, 4, 5, 0)
		arrive(t, s, 0, 4, 0, 5)
		if c := next(s); c != nil {
			g.Expect(c.kind).NotTo(BeZero())
			flying = append(flying, c)
		}
		s.Done(&flying[0].Request, nil)
		flying = flying[1:]
	}
}

// Under load the classes become equal.
func TestPaperForgetsWeights(t *testing.T) {
	g := NewWithT(t)
	s := paperOf(6, 3, 1)
	var flying []*visit
	var sent [3]float64
	cost := []float64{10, 10, 10}
	for range 10 {
		for class := range 3 {
			arrive(t, s, class, cost...)
		}
	}
	for range 3000 {
		for missed := 0; missed < 3; { // as site.trigger
			c := next(s)
			if c == nil {
				missed++
				continue
			}
			sent[c.Class]++
			flying = append(flying, c)
			arrive(t, s, c.Class, cost...)
		}
		s.Done(&flying[0].Request, nil)
		flying = flying[1:]
	}
	g.Expect(sent[0] / sent[2]).To(BeNumerically("~", 1, .05))
}

// The balancer chooses the first server until the server has two requests at once. A server with one request at a time
// is never measured.
func TestPaperBalancer(t *testing.T) {
	g := NewWithT(t)
	b := newPaperBalancer(2, 0)
	at := func(s int) mono.Time { return mono.Time(0).Add(time.Duration(s) * time.Second) }
	for i := range 3 {
		g.Expect(b.Pick(0, nil)).To(BeZero())
		b.Sent(0, at(i))
		b.Ended(0, at(i+1), balance.Answered)
	}
	g.Expect(b[0].interval).To(BeZero(), "without two at once")
	b.Sent(0, at(10))
	b.Sent(0, at(10))
	b.Ended(0, at(11), balance.Answered)
	b.Ended(0, at(12), balance.Answered)
	g.Expect(b[0].interval).To(Equal(100*time.Millisecond), "0.9*0 + 0.1*1s")
	g.Expect(b.Pick(0, nil)).To(Equal(1), "the one of T = 0")
}

// A server that is not measured keeps the assumed interval.
func TestPaperBalancerWithAnAssumption(t *testing.T) {
	g := NewWithT(t)
	b := newPaperBalancer(2, 100*time.Millisecond)
	g.Expect(b.Pick(0, nil)).To(Equal(0))
	b.Sent(0, 0)
	g.Expect(b.Pick(0, nil)).To(Equal(1), "the idle one")
	b.Sent(0, 0)
	second := mono.Time(0).Add(time.Second)
	b.Ended(0, second, balance.Answered)
	b.Ended(0, second.Add(time.Second), balance.Answered)
	g.Expect(b[0].interval).To(Equal(190*time.Millisecond), "0.9*100ms + 0.1*1s")
}

// Of idle servers the one with the largest capacity is chosen, then by the requests for each capacity.
func TestSEDBalancer(t *testing.T) {
	g := NewWithT(t)
	b := newSEDBalancer([]Server{{Processors: 1, Speed: 1}, {Processors: 4, Speed: 0.5}})
	for _, want := range []int{1, 0, 1} { // 1/1 or 1/2; 1/1 or 2/2, the first; 2/1 or 2/2
		at := b.Pick(0, nil)
		g.Expect(at).To(Equal(want))
		b.Sent(at, 0)
	}
	b.Ended(0, 0, balance.Answered)
	g.Expect(b.Pick(0, nil)).To(Equal(0), "1/1 or 3/2")
}
