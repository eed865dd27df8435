package schedule

import (
	"math/rand/v2"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// busy is a scheduler of 10 classes, 3 resources and 50 servers under overload. In a step one request
// ends, and one request arrives and is sent.
func busy(t testing.TB, mode Mode) (step func()) {
	s := schedulerOf(t, Config{Resources: 3, Servers: 50, Mode: mode}, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
	rng := rand.New(rand.NewPCG(1, 1))
	var flying []*Request
	drain := func() {
		for {
			r, _, ok := s.Next(First)
			if !ok {
				return
			}
			flying = append(flying, r)
			if mode == None && len(flying) > 1000 {
				return
			}
		}
	}
	for i := range 9000 {
		arrive(t, s, i%10, 2+8*rng.Float64(), 2+8*rng.Float64(), 2+8*rng.Float64())
	}
	drain()
	flying = append(make([]*Request, 0, 2*len(flying)), flying...)
	measured := Vector{5, 5, 5}
	return func() {
		i := rng.IntN(len(flying))
		r := flying[i]
		flying[i] = flying[len(flying)-1]
		flying = flying[:len(flying)-1]
		s.Done(r, measured)
		testkit.Must(t, s.Arrive(r))
		drain()
	}
}

func TestAllocation(t *testing.T) {
	for _, mode := range []Mode{MQoS, Single(1), None} {
		step := busy(t, mode)
		testkit.Equal(t, testing.AllocsPerRun(2000, step), 0, "mode %d: allocations of a request", mode)
	}
}

func BenchmarkRequest(b *testing.B) {
	step := busy(b, MQoS)
	for b.Loop() {
		step()
	}
}
