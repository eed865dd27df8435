package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

// world is a scheduler and the test's own records of its requests.
type world struct {
	*Scheduler
	queued, flying []*Request
}

func drawWorld(t *rapid.T, modes ...Mode) *world {
	cfg := Config{
		Resources: rapid.IntRange(1, 4).Draw(t, "resources"), Servers: rapid.IntRange(1, 3).Draw(t, "servers"),
	}
	cfg.Mode = rapid.SampledFrom(append(modes, MQoS, Single(cfg.Resources-1))).Draw(t, "mode")
	for i := range rapid.IntRange(1, 4).Draw(t, "classes") {
		cfg.Classes = append(cfg.Classes, Class{
			Name: fmt.Sprint(i), Weight: rapid.Float64Range(.5, 20).Draw(t, "weight"), Queue: rapid.IntRange(1, 30).Draw(t, "queue"),
		})
	}
	s := testkit.Result(New(cfg)).Must(t)
	return &world{Scheduler: s}
}

func (w *world) vector(t *rapid.T, limit float64) Vector {
	v := make(Vector, rapid.IntRange(0, w.cfg.Resources).Draw(t, "length"))
	for k := range v {
		v[k] = rapid.OneOf(rapid.Float64Range(0, limit), rapid.SampledFrom([]float64{0, -1, 1e300, math.NaN(), math.Inf(1)})).Draw(t, "percent")
	}
	return v
}

func (w *world) arrive(t *rapid.T, class int, cost Vector) {
	r := &Request{Class: class, Cost: cost, Bytes: class}
	if w.Arrive(r) == nil {
		w.queued = append(w.queued, r)
	} else if w.classes[class].waiting < w.classes[class].Queue {
		t.Fatalf("refused, with %d in a queue of %d", w.classes[class].waiting, w.classes[class].Queue)
	}
}

// drain sends requests until none can be sent, and returns their number.
func (w *world) drain(t *rapid.T) (n int) {
	for {
		before := len(w.queued)
		r, server, ok := w.Next(func(_ *Request, fits []int) int { return fits[len(fits)/2] })
		if !ok {
			return n
		}
		if v := &w.servers[server]; slices.ContainsFunc(w.flying, func(f *Request) bool { return f.server == server }) {
			for _, k := range w.managed {
				if v.free[k] < 0 && r.cost[k] > 0 && v.free[k]+r.cost[k] < v.capacity[k] {
					t.Fatalf("%d more of resource %d of server %d than was free", -v.free[k], k, server)
				}
			}
		}
		w.queued = slices.DeleteFunc(w.queued, func(q *Request) bool { return q == r })
		testkit.MustEqual(t, len(w.queued), before-1, "sent a request that did not wait")
		w.flying = append(w.flying, r)
		n++
	}
}

func (w *world) done(i int, measured Vector) {
	r := w.flying[i]
	w.flying = slices.Delete(w.flying, i, i+1)
	w.Done(r, measured)
	w.Done(r, Vector{MaxMeasured}) // does nothing
}

// check compares all counters with the requests that the test has recorded.
func (w *world) check(t *rapid.T) {
	var queued, flying int
	for i := range w.classes {
		c := &w.classes[i]
		queued, flying = queued+c.waiting, flying+c.inFlight
		for _, k := range w.managed {
			if limit := c.quantum + w.largest; c.deficit[k] > limit || c.waiting == 0 && c.deficit[k] > 0 {
				t.Fatalf("class %d with %d waiting: deficit %d of a cap of %d", i, c.waiting, c.deficit[k], limit)
			}
		}
	}
	if queued != len(w.queued) || flying != len(w.flying) || queued != w.waiting {
		t.Fatalf("%d and %d requests wait and are at servers: counted %d, %d", len(w.queued), len(w.flying), queued, flying)
	}
	for k := range w.cfg.Resources {
		var sum int64
		for i := range w.servers {
			taken := int64(0)
			for _, r := range w.flying {
				if r.server == i {
					taken += r.cost[k]
				}
			}
			v := &w.servers[i]
			testkit.MustEqual(t, v.free[k]+taken, v.capacity[k], "server %d, resource %d: %d free and %d taken of %d", i, k, v.free[k], taken, v.capacity[k])
			sum += v.free[k]
		}
		if sum != w.sum[k] {
			t.Fatalf("resource %d: %d free, counted %d", k, sum, w.sum[k])
		}
	}
}

// roam takes random steps of callers, clients and servers.
func (w *world) roam(t *rapid.T, steps int) {
	for range rapid.IntRange(0, steps).Draw(t, "steps") {
		switch rapid.IntRange(0, 6).Draw(t, "do") {
		case 0, 1, 2:
			w.arrive(t, rapid.IntRange(0, len(w.classes)-1).Draw(t, "class"), w.vector(t, 100))
		case 3:
			w.drain(t)
		case 4:
			if n := len(w.flying); n > 0 {
				var measured Vector
				if rapid.Bool().Draw(t, "measured") {
					measured = w.vector(t, 300)
				}
				w.done(rapid.IntRange(0, n-1).Draw(t, "which"), measured)
			}
		case 5:
			if n := len(w.queued); n > 0 {
				i := rapid.IntRange(0, n-1).Draw(t, "which")
				if !w.Leave(w.queued[i]) || w.Leave(w.queued[i]) {
					t.Fatal("a request leaves once")
				}
				w.queued = slices.Delete(w.queued, i, i+1)
			}
		case 6:
			w.SetCapacity(rapid.IntRange(0, w.cfg.Servers-1).Draw(t, "server"), w.vector(t, 200))
		}
		w.check(t)
	}
}

// All capacity that is taken comes back. From any state every waiting request is eventually sent:
// whenever no request is at a server, some request is sent.
func TestConservedAndNoDeadlock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, None)
		w.roam(t, 60)
		w.SetCapacity(0, Vector{rapid.Float64Range(.01, 100).Draw(t, "capacity")})
		for len(w.queued)+len(w.flying) > 0 {
			if w.drain(t) == 0 && len(w.flying) == 0 {
				t.Fatalf("%d requests wait and none goes: %+v", len(w.queued), w.Classes())
			}
			w.check(t)
			if len(w.flying) > 0 {
				w.done(0, nil)
			}
		}
		for i := range w.servers {
			testkit.MustEqual(t, w.servers[i].free, w.servers[i].capacity, "server %d has not all again", i)
		}
	})
}

// From any state, whatever other classes send meanwhile, each request is sent within the rounds that
// its class needs to pay for the request and for the requests before it.
func TestNoStarvation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		w.roam(t, 40)
		w.SetCapacity(0, slices.Repeat(Vector{100}, w.cfg.Resources))
		if len(w.queued) == 0 {
			return
		}
		last := w.queued[len(w.queued)-1]
		c := &w.classes[last.Class]
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		// A round gives every class a quantum, and sends at most the credit of all classes.
		round, debt := int64(0), int64(0)
		for i := range w.classes {
			round += (w.classes[i].quantum + 100*unit) * int64(w.cfg.Resources) / unit
			for _, k := range w.managed {
				debt = max(debt, -w.classes[i].deficit[k]/w.classes[i].quantum)
			}
		}
		limit := (debt + 4 + int64(len(w.queued))*100*unit/c.quantum) * round * patience
		for n := int64(0); last.waiting; n++ {
			if n > limit {
				t.Fatalf("class %d, type %d waits after %d others were sent: %+v", last.Class, last.kind, n, w.Classes())
			}
			for i := range w.classes { // the others' queues are always full
				for i != last.Class && w.classes[i].waiting < w.classes[i].Queue {
					cost := make(Vector, w.cfg.Resources)
					for k := range cost {
						cost[k] = 1 + 20*rng.Float64()
					}
					w.arrive(t, i, cost)
				}
			}
			if r, _, ok := w.Next(First); ok {
				w.flying = append(w.flying, r)
				w.queued = slices.DeleteFunc(w.queued, func(q *Request) bool { return q == r })
			} else {
				w.done(rng.IntN(len(w.flying)), nil)
			}
		}
	})
}

// The guarantee, over any interval of any history: see the package comment.
func TestGuaranteeHoldsOverAnyInterval(t *testing.T) {
	held := 0
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		w.roam(t, 20)
		w.SetCapacity(0, slices.Repeat(Vector{100}, w.cfg.Resources))
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		settle := rapid.Bool().Draw(t, "measured")
		m, n := len(w.classes), w.cfg.Resources
		type counters struct{ granted, used, deficit [MaxResources]int64 }
		begin := make([]counters, m)
		backlogged, back := make([]bool, m), make([][MaxResources]bool, m)
		restart := func() {
			for i := range w.classes {
				c := &w.classes[i]
				backlogged[i] = c.waiting > 0
				begin[i] = counters{used: c.used, deficit: c.deficit}
				for k := range n {
					begin[i].granted[k], back[i][k] = c.granted, true
				}
			}
		}
		// holds reports whether resource k still delays class i after quanta more quanta.
		holds := func(i, k int, quanta int64) bool {
			c := &w.classes[i]
			for j := range n {
				if h := c.queues[j].Front(); h != nil && c.deficit[k]+quanta*c.quantum < min(h.cost[k], c.quantum+w.largest) {
					return true
				}
			}
			return false
		}
		restart()
		for range rapid.IntRange(1, 300).Draw(t, "decisions") {
			for i := range w.classes {
				for w.classes[i].waiting < w.classes[i].Queue && (w.classes[i].waiting < 2 || rng.IntN(4) > 0) {
					cost := make(Vector, n)
					for k := range cost {
						cost[k] = rng.Float64() * float64(1+8*((i+k)%2))
					}
					w.arrive(t, i, cost)
				}
			}
			before := slices.Clone(w.classes)
			r, _, ok := w.Next(First)
			if granted := (w.classes[0].granted - before[0].granted) / before[0].quantum; granted > 0 { // equally many quanta of each resource, while it has requests
				after := w.classes
				w.classes = before
				for i := range before {
					for k := range n {
						back[i][k] = back[i][k] && holds(i, k, granted-1)
					}
				}
				w.classes = after
			}
			if ok {
				w.flying = append(w.flying, r)
				w.queued = slices.DeleteFunc(w.queued, func(q *Request) bool { return q == r })
				for _, k := range w.managed {
					if c := &w.classes[r.Class]; c.deficit[k] < min(r.cost[k], c.quantum+w.largest)-r.cost[k] {
						t.Fatalf("class %d took %d of resource %d, and is left with %d", r.Class, r.cost[k], k, c.deficit[k])
					}
				}
			} else {
				var measured Vector
				if settle && rng.IntN(2) == 0 {
					measured = make(Vector, n)
					for k := range measured {
						measured[k] = rng.Float64() * 12
					}
				}
				w.done(rng.IntN(len(w.flying)), measured)
			}
			for i := range w.classes {
				c := &w.classes[i]
				if c.waiting == 0 {
					backlogged[i] = false
				}
				for _, k := range w.managed {
					used, granted := c.used[k]-begin[i].used[k], c.granted-begin[i].granted[k]
					if most := granted + c.quantum + 100*unit + max(0, -c.deficit[k]); used > most {
						t.Fatalf("class %d took %d of resource %d, and was granted %d: at most %d", i, used, k, granted, most)
					}
					if !settle && backlogged[i] && back[i][k] && holds(i, k, 0) {
						held++
						least := granted - w.largest + min(0, begin[i].deficit[k])
						if used < least {
							t.Fatalf("class %d took %d of resource %d, which holds it back, and was granted %d: at least %d", i, used, k, granted, least)
						}
					}
				}
			}
			if rng.IntN(100) == 0 {
				restart()
			}
		}
	})
	if held == 0 {
		t.Error("nothing ever held a class back")
	}
}

// The order of resources changes nothing.
func TestPermutation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 4).Draw(t, "resources")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		order := rng.Perm(n)
		permute := func(v Vector) Vector {
			p := make(Vector, n)
			for k := range v {
				p[order[k]] = v[k]
			}
			return p
		}
		draw := func(low, high float64) Vector {
			v := make(Vector, n)
			for k := range v {
				v[k] = low + (high-low)*rng.Float64()
			}
			return v
		}
		var one, two *Scheduler
		for _, s := range []**Scheduler{&one, &two} {
			var err error
			*s, err = New(Config{Classes: []Class{{Weight: 3, Queue: 99}, {Weight: 1, Queue: 99}}, Resources: n, Servers: 2})
			testkit.Must(t, err)
		}
		for server := range 2 {
			v := draw(90, 110)
			one.SetCapacity(server, v)
			two.SetCapacity(server, permute(v))
		}
		var flying [2][]*Request
		for i := range 300 {
			class, cost := rng.IntN(2), draw(0, 20)
			a, b := one.Arrive(&Request{Class: class, Cost: cost, Value: i}), two.Arrive(&Request{Class: class, Cost: permute(cost), Value: i})
			if a != b {
				t.Fatalf("%v, %v", a, b)
			}
			for {
				if sums := one.sum[:n]; len(slices.Compact(slices.Sorted(slices.Values(sums)))) < n {
					return // a tie: turns are by number
				}
				a, at, okA := one.Next(First)
				b, bt, okB := two.Next(First)
				if okA != okB || at != bt || okA && a.Value != b.Value {
					t.Fatalf("request %d: %v at %d (%v), permuted %v at %d (%v)", i, a, at, okA, b, bt, okB)
				}
				if !okA {
					break
				}
				flying[0], flying[1] = append(flying[0], a), append(flying[1], b)
			}
			if len(flying[0]) > 0 {
				at, used := rng.IntN(len(flying[0])), draw(0, 30)
				one.Done(flying[0][at], used)
				two.Done(flying[1][at], permute(used))
				flying[0], flying[1] = slices.Delete(flying[0], at, at+1), slices.Delete(flying[1], at, at+1)
			}
		}
	})
}
