package fair_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/fair"
)

// waterLevel is the definition: the rate per weight at which the demands, limited to the level, fill the capacity. If
// the demands do not fill the capacity, the level is infinite.
func waterLevel(capacity float64, publishers []*publisher) float64 {
	sorted := slices.Clone(publishers)
	slices.SortFunc(sorted, func(a, b *publisher) int {
		if a.demand/a.weight < b.demand/b.weight {
			return -1
		}
		return 1
	})
	weights := 0.0
	for _, p := range sorted {
		weights += p.weight
	}
	for _, p := range sorted {
		if p.demand*weights > capacity*p.weight {
			return capacity / weights
		}
		capacity -= p.demand
		weights -= p.weight
	}
	return math.Inf(1)
}

func drawPublishers(t *rapid.T, capacity float64) []*publisher {
	n := rapid.IntRange(1, 20).Draw(t, "publishers")
	delay := rapid.IntRange(0, 3)
	all := make([]*publisher, n)
	for i := range all {
		all[i] = &publisher{
			weight: rapid.Float64Range(1, 255).Draw(t, "weight"),
			demand: 2 * capacity,
			delay:  delay.Draw(t, "delay"),
		}
		if rapid.Bool().Draw(t, "limited") {
			all[i].demand = capacity * rapid.Float64Range(0.001, 3).Draw(t, "demand") / float64(n)
		}
	}
	return all
}

func TestLevelIsTheWaterLevel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const capacity = 1000
		f := newFluid(capacity, drawPublishers(t, capacity)...)
		want := waterLevel(capacity, f.publishers)
		// A backlog of up to 40 s drains at half the capacity. Then the rate may have to rise by 255 times the number of
		// publishers.
		for i, a := 0, f.step(); i < 80 || i < 300 && (f.queue > 0.1*capacity || a.Rate < 0.9*want); i++ {
			a = f.step()
		}
		sum, used, offered := 0.0, 0.0, 0.0
		for range 20 {
			a := f.step()
			sum += a.Rate
			for _, p := range f.publishers {
				used += p.rate
			}
		}
		for _, p := range f.publishers {
			offered += p.demand
		}
		sum, used = sum/20, used/20
		if math.IsInf(want, 1) {
			if used < 0.97*offered {
				t.Fatalf("%v offered of %v, and %v of it taken", offered, capacity, used)
			}
			return
		}
		t.Logf("rate %v, water level %v, used %v, queue %v", sum, want, used/capacity, f.queue)
		if sum > 1.03*want || used < 0.9*capacity || f.queue > 1.5*capacity {
			t.Fatalf("rate %v, water level %v, used %v of %v, backlog %v", sum, want, used, capacity, f.queue)
		}
	})
}

// The sum of the rates advised to greedy publishers is at most the capacity, and in the end not less.
func TestGreedyAreToldTheCapacity(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const capacity = 400
		f := newFluid(capacity)
		for range rapid.IntRange(1, 10).Draw(t, "publishers") {
			f.publishers = append(f.publishers, &publisher{
				weight: rapid.Float64Range(1, 255).Draw(t, "weight"), demand: capacity,
				delay: rapid.IntRange(0, 3).Draw(t, "delay"),
			})
		}
		weights := 0.0
		for _, p := range f.publishers {
			weights += p.weight
		}
		var a fair.Advice
		for range 80 {
			a = f.step()
		}
		for range 20 {
			if a = f.step(); a.RateOf(weights) > 1.02*capacity {
				t.Fatalf("%v advised of %v: %+v", a.RateOf(weights), capacity, a)
			}
		}
		// One greedy publisher may send at the capacity and never above, so the publisher is not paced.
		if len(f.publishers) > 1 && a.RateOf(weights) < 0.95*capacity {
			t.Fatalf("%v advised of %v: %+v", a.RateOf(weights), capacity, a)
		}
	})
}

// The unit of messages makes no difference. A publisher of weight w is equal to w publishers of weight 1.
func TestLevelScales(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		times := rapid.IntRange(2, 5).Draw(t, "times")
		k := float64(times)
		one, many, apart := fair.New(), fair.New(), fair.New()
		now := mono.Time(0)
		for range rapid.IntRange(1, 30).Draw(t, "intervals") {
			for range rapid.IntRange(0, 20).Draw(t, "messages") {
				weight, rate := float64(rapid.IntRange(1, 255).Draw(t, "weight")), rapid.Float64Range(0.1, 100).Draw(t, "rate")
				one.Message(weight, rate)
				apart.Message(1, rate/weight)
				for range times {
					many.Message(weight, rate*k)
				}
			}
			now = now.Add(time.Second)
			queue := float64(rapid.IntRange(0, 20).Draw(t, "queue"))
			a, b, c := one.Interval(now, 10, queue, time.Second), many.Interval(now, 10*k, queue*k, time.Second), apart.Interval(now, 10, queue, time.Second)
			near := func(x, y float64) bool { return math.Abs(x-y) <= 1e-9*math.Abs(x) }
			if a.Paced != b.Paced || !near(a.Rate*k, b.Rate) || !near(a.SumWeights, b.SumWeights) {
				t.Fatalf("%+v, and with %v times the messages %+v", a, times, b)
			}
			if a.Paced != c.Paced || !near(a.Rate, c.Rate) || !near(a.SumWeights, c.SumWeights) {
				t.Fatalf("%+v, and with publishers of weight 1 %+v", a, c)
			}
		}
	})
}

// A publisher that sends more than advised gets no higher rate. During the backlog, the other publishers get at least
// half of their rates.
func TestLiarsGainNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const capacity = 400
		n := rapid.IntRange(2, 10).Draw(t, "publishers")
		f := newFluid(capacity)
		weights := 0.0
		for range n {
			p := &publisher{weight: rapid.Float64Range(1, 20).Draw(t, "weight"), demand: capacity}
			weights += p.weight
			f.publishers = append(f.publishers, p)
		}
		f.publishers[0].excess = rapid.Float64Range(1, 10).Draw(t, "times its advised rate")
		for range 60 {
			f.step()
		}
		for range 20 {
			if a := f.step(); a.Rate > 1.02*capacity/weights || a.Rate < 0.45*capacity/weights {
				t.Fatalf("%+v, want %v per unit of weight at most", a, capacity/weights)
			}
		}
	})
}

// The test works message by message: Poisson sensors that want little, and greedy publishers with buckets' bursts, at
// measured rates.
func TestLevelOfPoissonSensors(t *testing.T) {
	const capacity, ts, seconds = 2000.0, 0.25, 120
	rng := rand.New(rand.NewPCG(1, 2))
	type source struct {
		publisher
		meter fair.Meter
		next  float64
	}
	var all []*source
	var fluids []*publisher
	for i := range 200 {
		all = append(all, &source{publisher: publisher{weight: 1, demand: 0.5 + float64(i%10)}})
	}
	for i := range 20 {
		all = append(all, &source{publisher: publisher{weight: []float64{1, 2, 4, 8, 10}[i%5], demand: capacity}})
	}
	for _, s := range all {
		s.next = rng.ExpFloat64() / s.demand
		fluids = append(fluids, &s.publisher)
	}
	level, want := fair.New(), waterLevel(capacity, fluids)
	var a fair.Advice
	queue, used, sum, intervals := 0.0, 0.0, 0.0, 0
	for end := ts; end < seconds; end += ts {
		sent, least := 0.0, queue
		for _, s := range all {
			for s.next < end {
				level.Message(s.weight, level.Measure(&s.meter, mono.Time(s.next*1e9)))
				sent++
				if s.demand < capacity {
					s.next += rng.ExpFloat64() / s.demand
				} else if a.Paced {
					s.next += 1 / a.RateOf(s.weight)
				} else {
					s.next += 1 / 200.0
				}
			}
		}
		served := min(queue+sent, capacity*ts)
		queue += sent - served
		a = level.Interval(mono.Time(end*1e9), capacity, min(least, queue), time.Duration(ts*1e9))
		if end > seconds/2 {
			used, sum, intervals = used+served, sum+a.Rate, intervals+1
		}
		if end > seconds/2 && queue > capacity*ts {
			t.Fatalf("at %v s a line of %v", end, queue)
		}
	}
	rate, part := sum/float64(intervals), used/float64(intervals)/capacity/ts
	t.Logf("rate %v of %v, %.3f of the capacity used, %v", rate, want, part, level.Span(capacity, 0))
	if math.Abs(rate-want) > 0.05*want || part < 0.95 {
		t.Errorf("rate %v, water level %v, %v of the capacity used", rate, want, part)
	}
}

// Ten thousand publishers join at once, and then half of the capacity is moved away.
func TestLevelOfManyWhoJoin(t *testing.T) {
	const n = 10_000
	f := newFluid(n)
	for range n {
		f.publishers = append(f.publishers, &publisher{weight: 1, demand: 5})
	}
	for range 12 {
		f.step()
	}
	if a := f.step(); a.RateOf(n) > f.capacity || !a.Paced {
		t.Errorf("10,000 are advised %v of %v together", a.RateOf(n), f.capacity)
	}
	for f.queue > 0.1*f.capacity {
		f.step()
	}
	for range 10 {
		f.step()
	}
	f.capacity /= 2
	if a := f.step(); a.RateOf(n) > 1.01*f.capacity {
		t.Errorf("advised %v of %v", a.RateOf(n), f.capacity)
	}
	f.capacity = 0
	if a := f.step(); a.Rate != 0 || a.SumWeights == 0 {
		t.Errorf("without capacity: %+v", a)
	}
	f.capacity = n
	f.step()
	if a := f.step(); a.Rate <= 0 {
		t.Errorf("with it again: %+v", a)
	}
}
