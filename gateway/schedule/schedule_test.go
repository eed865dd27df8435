package schedule

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
)

// schedulerOf returns a scheduler of classes with the weights, or fails the test.
func schedulerOf(t testing.TB, cfg Config, weights ...float64) *Scheduler {
	t.Helper()
	for i, w := range weights {
		cfg.Classes = append(cfg.Classes, Class{Name: fmt.Sprint("c", i+1), Weight: w, Queue: 1000})
	}
	cfg.Servers = max(cfg.Servers, 1)
	return testkit.Result(New(cfg)).Must(t)
}

func arrive(t testing.TB, s *Scheduler, class int, cost ...float64) *Request {
	t.Helper()
	r := &Request{Class: class, Cost: cost}
	testkit.Must(t, s.Arrive(r))
	return r
}

// The paper's figure 6: three resources, weights 6:3:1, quanta 60, 30 and 10. The text gives the first
// request, the order of the types, and says that the first response returns at the end. The vectors of
// the second and third request are chosen to produce this order.
func TestWorkedExample(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 3}, 6, 3, 1)
	cpu := arrive(t, s, 0, 6, 5, 3)
	network := arrive(t, s, 0, 3, 2, 7)
	disk := arrive(t, s, 0, 2, 8, 4)
	for class := range 3 { // no queue is empty
		for range 3 {
			arrive(t, s, class, 6, 5, 3)
			arrive(t, s, class, 2, 8, 4)
			arrive(t, s, class, 3, 2, 7)
		}
	}
	for _, step := range []struct {
		want     *Request
		rac, dcs Vector
	}{
		{cpu, Vector{94, 95, 97}, Vector{54, 55, 57}},
		{network, Vector{91, 93, 90}, Vector{51, 53, 50}},
		{disk, Vector{89, 85, 86}, Vector{49, 45, 46}},
	} {
		got, server, ok := s.Next(First)
		g.Expect(ok).To(BeTrue())
		g.Expect(server).To(Equal(0))
		g.Expect(got).To(BeIdenticalTo(step.want))
		g.Expect(s.Server(0).Free).To(Equal(step.rac))
		g.Expect(s.Classes()[0].Deficit).To(Equal(step.dcs))
	}
	s.Done(cpu, nil)
	g.Expect(s.Server(0).Free).To(Equal(Vector{95, 90, 89}))
	g.Expect(s.Classes()[0].Deficit).To(Equal(Vector{49, 45, 46}))
	g.Expect(s.Classes()[1].Deficit).To(Equal(Vector{30, 30, 30}))
	g.Expect(s.Classes()[2].Deficit).To(Equal(Vector{10, 10, 10}))
}

func TestQueueBounds(t *testing.T) {
	g := NewWithT(t)
	s, err := New(Config{Classes: []Class{{Weight: 1, Queue: 2, QueueBytes: 100}}, Resources: 1, Servers: 1})
	g.Expect(err).NotTo(HaveOccurred())
	a := &Request{Cost: Vector{1}, Bytes: 60}
	g.Expect(s.Arrive(a)).To(Succeed())
	g.Expect(s.Arrive(&Request{Cost: Vector{1}, Bytes: 60})).To(MatchError(ErrQueueFull))
	g.Expect(s.Arrive(&Request{Cost: Vector{1}, Bytes: 40})).To(Succeed())
	before, free := s.Classes(), s.Server(0)
	g.Expect(s.Arrive(&Request{Cost: Vector{90}})).To(MatchError(ErrQueueFull))
	g.Expect(s.Classes()).To(Equal(before))
	g.Expect(s.Server(0)).To(Equal(free))
	g.Expect(s.Leave(a)).To(BeTrue())
	g.Expect(s.Leave(a)).To(BeFalse())
	g.Expect(s.Arrive(a)).To(Succeed())
}

func TestConfigFaultsAreAllTold(t *testing.T) {
	g := NewWithT(t)
	_, err := New(Config{Classes: []Class{{Weight: -1}, {Weight: 1, Queue: 1, QueueBytes: -1}}, Resources: 9, Mode: Single(9)})
	for _, part := range []string{"weight -1, queue of 0", "1 requests and -1 bytes", "9 resources", "0 servers", "mode 10"} {
		g.Expect(err).To(MatchError(ContainSubstring(part)))
	}
	_, err = New(Config{Classes: []Class{{Weight: 1e5, Queue: 1}, {Weight: 1, Queue: 1}}, Resources: 1, Servers: 1})
	g.Expect(err).To(MatchError(ContainSubstring("ratio")))
}

func TestBaselines(t *testing.T) {
	order := func(mode Mode) (got []int) {
		s := schedulerOf(t, Config{Resources: 2, Mode: mode}, 3, 1)
		for range 100 { // the second resource runs out
			arrive(t, s, 0, 6, 50)
			arrive(t, s, 1, 6, 50)
		}
		for range 50 {
			r, _, ok := s.Next(First)
			if !ok {
				break
			}
			got = append(got, r.Class)
		}
		return got
	}
	g := NewWithT(t)
	g.Expect(order(None)).To(Equal(slices.Repeat([]int{0, 1}, 25)), "in order of arrival, without limit")
	g.Expect(order(Single(0))).To(HaveLen(16), "what 100 percent of the first resource allow")
	g.Expect(order(MQoS)).To(HaveLen(2), "what 100 percent of the second allow")
}

// The scheduler chooses among the servers that fit. A closed server never fits, and pick may decline.
func TestSchedulerChoosesAmongFittingServers(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 2, Servers: 3}, 1)
	s.SetCapacity(1, nil)
	s.SetCapacity(2, Vector{200, 200})
	var seen [][]int
	pick := func(_ *Request, fits []int) int {
		seen = append(seen, slices.Clone(fits))
		return fits[len(fits)-1]
	}
	for range 5 {
		arrive(t, s, 0, 80, 10)
	}
	_, _, ok := s.Next(func(*Request, []int) int { return -1 })
	g.Expect(ok).To(BeFalse())
	var to []int
	for {
		_, server, ok := s.Next(pick)
		if !ok {
			break
		}
		to = append(to, server)
	}
	g.Expect(to).To(Equal([]int{2, 2, 0}))
	g.Expect(seen).To(Equal([][]int{{0, 2}, {0, 2}, {0}}))
	// A request that never fits is sent alone.
	s = schedulerOf(t, Config{Resources: 1}, 1)
	s.SetCapacity(0, Vector{20})
	early := arrive(t, s, 0, 70)
	arrive(t, s, 0, 70)
	_, _, ok = s.Next(First)
	g.Expect(ok).To(BeTrue())
	_, _, ok = s.Next(First)
	g.Expect(ok).To(BeFalse())
	s.Done(early, nil)
	_, _, ok = s.Next(First)
	g.Expect(ok).To(BeTrue())
}

// Checks what the package comment says about classes that want different resources.
func TestClassesAdvanceTogether(t *testing.T) {
	g := NewWithT(t)
	s := schedulerOf(t, Config{Resources: 2}, 6, 1)
	for range 50 {
		arrive(t, s, 0, 5, 0)
		arrive(t, s, 1, 0, 5)
	}
	var flying []*Request
	for range 5000 {
		for r, _, ok := s.Next(First); ok; r, _, ok = s.Next(First) {
			flying = append(flying, r)
			arrive(t, s, r.Class, r.Cost...)
		}
		s.Done(flying[0], nil)
		flying = flying[1:]
	}
	of := s.Classes()
	g.Expect(of[0].Used[0] / of[1].Used[1]).To(BeNumerically("~", 6, .1))
}

// Requests outlive their scheduler.
func TestRequestsOutliveTheirScheduler(t *testing.T) {
	g := NewWithT(t)
	old := schedulerOf(t, Config{Resources: 1}, 1)
	r := arrive(t, old, 0, 30)
	_, _, ok := old.Next(First)
	g.Expect(ok).To(BeTrue())
	s := schedulerOf(t, Config{Resources: 1, Servers: 2}, 1, 1)
	r.Class = 1
	s.Adopt(r, 1)
	g.Expect(s.Server(1).Free).To(Equal(Vector{70}))
	s.Done(r, Vector{50})
	s.Done(r, Vector{50})
	g.Expect(s.Server(1).Free).To(Equal(Vector{100}))
	g.Expect(s.Classes()[1].Used).To(Equal(Vector{50}))
	g.Expect(errors.Is(s.Arrive(r), nil)).To(BeTrue())
}
