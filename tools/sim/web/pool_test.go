package web_test

import (
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/srtm-io/srtm/tools/sim/web"
)

const ms = time.Millisecond

// overload returns so many clients in each of three classes of weights 6:3:1, and a client that sends now and then.
func overload(clients int) []web.Clients {
	return []web.Clients{{Weight: 6, Count: clients}, {Weight: 3, Count: clients}, {Weight: 1, Count: clients}, {Weight: 1, Count: 1, Think: 200 * ms}}
}

func two(workers int, service time.Duration) []web.Backend {
	return []web.Backend{{Workers: workers, Service: service}, {Workers: workers, Service: 3 * service}}
}

// spreads are lognormal distributions of the work of one route: none, usual, heavy.
var spreads = []float64{0, .5, 1}

func oneRoute(spread float64) []web.PoolRoute {
	return []web.PoolRoute{{Part: 1, Times: 1, Sigma: spread}}
}

// With a limit at the knee, weights decide who is served, the servers are always busy, and a client that sends little
// does not wait for clients that send much.
func TestWeightsCountWithoutABacklogAtTheServers(t *testing.T) {
	for _, spread := range spreads {
		for seed := range uint64(4) {
			r := web.RunPool(web.Pool{Servers: two(4, 20*ms), Classes: overload(24), Routes: oneRoute(spread), Seconds: 65, Warmup: 5, Seed: seed})
			sum := r.Rate[0] + r.Rate[1] + r.Rate[2]
			for i, weight := range []float64{6, 3, 1} {
				if share := r.Rate[i] / sum / (weight / 10); math.Abs(share-1) > .1 {
					t.Errorf("spread %v, seed %d: class %d has %.2f of its share: %.1f", spread, seed, i, share, r.Rate)
				}
			}
			for i := range r.Busy {
				if r.Busy[i] < .95 || r.Beyond[i] > 4 {
					t.Errorf("spread %v, seed %d: server %d is busy for %.3f of the time, with %.1f requests beyond its workers", spread, seed, i, r.Busy[i], r.Beyond[i])
				}
			}
			if !(r.P50[3] <= 100) { // the class must also get answers
				t.Errorf("spread %v, seed %d: the light class waits %.0f ms for half of its answers", spread, seed, r.P50[3])
			}
		}
	}
}

// The limit works for other numbers of workers and other speeds. A server with many workers, or with long tails, has
// more requests beyond its workers. Some runs miss the knee of a server with long tails, so the test checks the average
// over seeds.
func TestLimitFindsTheKneeOfAnyServer(t *testing.T) {
	for _, c := range []struct {
		workers int
		service time.Duration
		share   bool
	}{
		{1, 20 * ms, false}, {2, 20 * ms, false}, {16, 20 * ms, false}, {64, 20 * ms, false},
		{4, ms, false}, {4, 300 * ms, false}, {4, 2000 * ms, false}, {2, 20 * ms, true}, {8, 20 * ms, true},
	} {
		for _, spread := range spreads {
			servers := two(c.workers, c.service)
			for i := range servers {
				servers[i].Shared = c.share
			}
			batches := c.service.Seconds() * 4000 / 4 // seconds, of the slower server's requests
			seeds := uint64(1)
			if c.share || spread == 1 && c.workers <= 16 { // chance matters in a short run
				seeds = 3
			}
			busy, beyond := make([]float64, len(servers)), make([]float64, len(servers))
			for seed := range seeds {
				r := web.RunPool(web.Pool{Servers: servers, Classes: overload(12 * c.workers), Routes: oneRoute(spread), Seconds: 2 * batches, Warmup: batches, Seed: seed})
				for i := range servers {
					busy[i] += r.Busy[i] / float64(seeds)
					beyond[i] += r.Beyond[i] / float64(seeds)
				}
			}
			name := fmt.Sprintf("%d workers of %v (shared: %v), spread %v", c.workers, c.service, c.share, spread)
			for i := range servers {
				most := max(5, .6*float64(c.workers))
				switch {
				case c.share && spread == .5:
					most = 8
				case c.share && spread == 1:
					most = 25 // a short request does not wait behind a long one, so latencies tell less
				case c.service > time.Second:
					most = 10 // the requests sent before the first answer take a minute
				}
				if busy[i] < .94 || beyond[i] > most {
					t.Errorf("%s: server %d is busy for %.3f of the time, with %.1f requests beyond its workers, more than %.1f", name, i, busy[i], beyond[i], most)
				}
			}
		}
	}
}

// A server that is slow without a limit of workers gets all requests.
func TestLimitDoesNotHoldBackAServerWithoutWorkers(t *testing.T) {
	for _, service := range []time.Duration{20 * ms, 2000 * ms} {
		for _, spread := range []float64{0, .5} {
			length := service.Seconds() * 100
			r := web.RunPool(web.Pool{Servers: []web.Backend{{Service: service}}, Classes: overload(24)[:3], Routes: oneRoute(spread), Seconds: 3 * length, Warmup: length, Seed: 7})
			if got, want := r.Servers[0], 72/service.Seconds(); got < .95*want {
				t.Errorf("%v, spread %v: %.1f answers a second of %.1f", service, spread, got, want)
			}
		}
	}
}

// From 5 s after a change on, the server is used nearly as fully as before, on average over seeds.
func TestLimitFollowsAServerThatChangesWithinSeconds(t *testing.T) {
	for _, spread := range spreads {
		for _, b := range []web.Backend{
			{Workers: 4, Service: 20 * ms, Changes: []web.Change{{At: 10, Service: 60 * ms}}},
			{Workers: 4, Service: 60 * ms, Changes: []web.Change{{At: 10, Service: 20 * ms}}},
			{Workers: 4, Service: 10 * ms, Changes: []web.Change{{At: 10, Service: 100 * ms}}},
			{Workers: 4, Service: 100 * ms, Changes: []web.Change{{At: 10, Service: 10 * ms}}},
			{Workers: 16, Service: 20 * ms, Changes: []web.Change{{At: 10, Service: 20 * ms, Workers: 4}}},
			{Workers: 4, Service: 20 * ms, Changes: []web.Change{{At: 10, Service: 20 * ms, Workers: 16}}},
		} {
			to := b.Changes[0]
			workers := max(to.Workers, b.Workers)
			if to.Workers > 0 {
				workers = to.Workers
			}
			var answered, limits, looks float64
			for seed := range uint64(5) {
				web.RunPool(web.Pool{Servers: []web.Backend{b}, Classes: overload(24)[:3], Routes: oneRoute(spread), Seconds: 25, Seed: seed, Every: .5, Look: func(at float64, s *web.PoolState) {
					if at > 15 {
						answered += float64(s.Answers[0])
						limits += float64(s.Limits[0].Most())
						looks++
					}
				}})
			}
			rate, possible := answered/looks*2, float64(workers)/to.Service.Seconds()
			if rate < .85*possible || limits/looks > 2*float64(workers)+4 {
				t.Errorf("spread %v, %+v: %.0f answers a second of %.0f, with a limit of %.1f", spread, b, rate, possible, limits/looks)
			}
		}
	}
}

// A route that becomes slow does not take the places of the other routes.
func TestOneSlowRouteDoesNotShrinkTheLimit(t *testing.T) {
	slowLater := func(times float64) []web.PoolRoute {
		return []web.PoolRoute{{Part: .9, Times: 1, Sigma: .3}, {Part: .1, Times: 1, Sigma: .3, From: 10, Later: times}}
	}
	for seed := range uint64(3) {
		// With workers, the slow route has most of the work, and the workers stay busy.
		r := web.RunPool(web.Pool{Servers: two(16, 20*ms), Classes: overload(24), Routes: slowLater(50), Seconds: 70, Warmup: 15, Seed: seed})
		possible := (16/.02 + 16/.06) / (.9 + .1*50)
		if got := r.Servers[0] + r.Servers[1]; got < .85*possible {
			t.Errorf("workers, seed %d: %.1f answers a second of %.1f", seed, got, possible)
		}
		// Without workers, no request delays the other route.
		r = web.RunPool(web.Pool{Servers: []web.Backend{{Service: 20 * ms}}, Classes: overload(24)[:3], Routes: slowLater(100), Seconds: 70, Warmup: 15, Seed: seed})
		possible = 72 / (.02 * (.9 + .1*100))
		if got := r.Servers[0]; got < .9*possible {
			t.Errorf("delay, seed %d: %.1f answers a second of %.1f", seed, got, possible)
		}
	}
}

// The fixed window was used before the limit. It is kept for comparison.
func TestAFixedWindowLeavesTheSharesToTheServers(t *testing.T) {
	r := web.RunPool(web.Pool{Servers: two(4, 20*ms), Classes: overload(24), Routes: oneRoute(0), Fixed: 1, Seconds: 35, Warmup: 5})
	if r.Rate[0] > 1.5*r.Rate[1] || r.Beyond[0]+r.Beyond[1] < 20 {
		t.Errorf("%.1f, %.1f beyond", r.Rate, r.Beyond)
	}
}

func TestPoolIsRepeatable(t *testing.T) {
	p := web.Pool{Servers: two(4, 20*ms), Classes: overload(24), Routes: oneRoute(1), Seconds: 5, Seed: 9}
	if a, b := web.RunPool(p), web.RunPool(p); !reflect.DeepEqual(a, b) {
		t.Errorf("the same seed gave %+v and %+v", a, b)
	}
}
