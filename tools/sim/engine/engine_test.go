package engine_test

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// events is a stream of recorded events.
type events []schedule.Event

func (e *events) Next() (schedule.Event, bool) {
	if len(*e) == 0 {
		return schedule.Event{}, false
	}
	first := (*e)[0]
	*e = (*e)[1:]
	return first, true
}

func poisson(publishers int, rate float64, seed uint64) schedule.Stream {
	return schedule.Spec{Publishers: publishers, Rate: rate, Batch: 1, Process: schedule.Poisson, Seed: seed}.Stream()
}

// dealt places source i at broker i modulo k.
func dealt(sources, k int) []int {
	where := make([]int, sources)
	for i := range where {
		where[i] = i % k
	}
	return where
}

func even(t testing.TB, contract tokenbucket.Share, k int) []tokenbucket.Share {
	t.Helper()
	weights := make([]int64, k)
	for i := range weights {
		weights[i] = 1
	}
	return testkit.Result(share.Proportion(contract, weights)).Must(t)
}

func build(t testing.TB, models []engine.Model, topics []engine.Topic, seed uint64, observe func(engine.Delivery)) *engine.Cluster {
	t.Helper()
	return testkit.Result(engine.New(models, topics, seed, observe)).Must(t)
}

func models(m engine.Model, k int) []engine.Model { return slices.Repeat([]engine.Model{m}, k) }

// instant is a broker that takes no time, so that only the access delay is left.
var instant = engine.Model{Servers: 1}

// Poisson arrivals at a broker of constant work are an M/D/1 queue, whose waits have a known distribution.
func TestAQueueOfPoissonArrivalsIsMD1(t *testing.T) {
	const work = 100 * time.Microsecond
	for _, rho := range []float64{0.3, 0.7, 0.9} {
		levels := []float64{0, 0.5, 1, 2, 4, 8, 16}
		above := make([]int, len(levels))
		n := 0
		c := build(t, []engine.Model{{Servers: 1, Message: engine.Constant(work)}},
			[]engine.Topic{{Stream: poisson(50, rho/work.Seconds()/50, 1), Where: dealt(50, 1)}}, 1,
			func(d engine.Delivery) {
				n++
				for i, x := range levels {
					if d.Latency()-work > time.Duration(x*float64(work)) {
						above[i]++
					}
				}
			})
		c.Advance(mono.Time(60 * time.Second)) // 0.2 to 0.5 million messages
		for i, x := range levels {
			got, want := float64(above[i])/float64(n), tokenbucket.TailMD1(rho, x)
			// Waits come in busy periods. At a load of 0.9 a period is a few hundred messages long, so half a million
			// messages are worth a thousand samples.
			if math.Abs(got-want) > 0.1*want+1e-4 {
				t.Errorf("rho %v: P(wait > %v works) = %v, M/D/1 has %v", rho, x, got, want)
			}
		}
		if busy := c.Busy(0).Seconds() / 60; math.Abs(busy-rho) > 0.01 {
			t.Errorf("rho %v: busy for %v of the time", rho, busy)
		}
	}
}

// Eq. (1), in its exact form, for one bucket and for equal splits of the bucket. (At the paper's own load with one
// bucket of 26, busy periods are so long that the mean of a million messages is a quarter off.)
func TestAccessDelayOfPoissonArrivalsIsEq1(t *testing.T) {
	for _, test := range []struct {
		lambda, rate float64
		burst, k     int
	}{{8_000, 10_000, 6, 1}, {8_000, 10_000, 6, 2}, {10_000, 11_000, 12, 6}, {5_000, 10_000, 4, 1}, {8_000, 10_000, 1, 1}} {
		const publishers = 600 // random enough: each publisher sends independently
		var sum time.Duration
		delayed, n := 0, 0
		contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(test.rate), Burst: int64(test.burst)}
		c := build(t, models(instant, test.k), []engine.Topic{{
			Stream: poisson(publishers, test.lambda/publishers, 2), Where: dealt(publishers, test.k),
			Limited: true, Shares: even(t, contract, test.k),
		}}, 1, func(d engine.Delivery) {
			n++
			sum += d.Access()
			if d.Access() > 0 {
				delayed++
			}
		})
		c.Advance(mono.Time(40 * time.Second))
		k := float64(test.k)
		want := tokenbucket.ExpectedDelayExact(test.lambda/k, test.rate/k, float64(test.burst)/k)
		wantDelayed := tokenbucket.PDelayed(test.lambda/k, test.rate/k, float64(test.burst)/k)
		got, gotDelayed := sum.Seconds()/float64(n), float64(delayed)/float64(n)
		if math.Abs(got-want) > 0.1*want || math.Abs(gotDelayed-wantDelayed) > 0.1*wantDelayed {
			t.Errorf("%+v: mean %v s, delayed %v; theory has %v s, %v", test, got, gotDelayed, want, wantDelayed)
		}
	}
}

// drawTrace draws events in order of time, of the given sources.
func drawTrace(t *rapid.T, sources int) []schedule.Event {
	var trace []schedule.Event
	at := time.Duration(0)
	for range rapid.IntRange(1, 120).Draw(t, "events") {
		if rapid.Bool().Draw(t, "later") {
			at += time.Duration(rapid.IntRange(0, 5_000_000).Draw(t, "gap"))
		}
		trace = append(trace, schedule.Event{
			At: at, Source: int32(rapid.IntRange(0, sources-1).Draw(t, "source")), Count: int32(rapid.IntRange(1, 12).Draw(t, "count")),
		})
	}
	return trace
}

func drawModel(t *rapid.T) engine.Model {
	spread := testkit.Result(engine.NewDist([]engine.Point{{0, 0}, {0.9, 100 * time.Microsecond}, {1, 5 * time.Millisecond}})).Must(t)
	return engine.Model{
		Servers: rapid.IntRange(1, 3).Draw(t, "servers"),
		Wake:    engine.Constant(time.Duration(rapid.IntRange(0, 200_000).Draw(t, "wake"))),
		Message: rapid.SampledFrom([]engine.Dist{engine.Constant(30 * time.Microsecond), spread}).Draw(t, "message"),
	}
}

const forEver = mono.Time(1000 * time.Hour)

// The obvious version judges each topic's trace by its bucket, merges the messages by time of eligibility, and serves in
// this order.
func TestAgainstTheObviousVersion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const sources = 4
		model := drawModel(t)
		model.Message = engine.Constant(time.Duration(rapid.IntRange(0, 300_000).Draw(t, "work")))
		a, b := drawTrace(t, sources), drawTrace(t, sources)
		contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(rapid.Float64Range(100, 20_000).Draw(t, "rate")), Burst: int64(rapid.IntRange(1, 40).Draw(t, "burst"))}

		type job struct {
			topic        int
			at, eligible mono.Time
			first        bool
			done         mono.Time
		}
		var jobs []job
		bucket := tokenbucket.NewFull(contract, 0)
		for topic, trace := range [][]schedule.Event{a, b} {
			for _, e := range trace {
				for i := range e.Count {
					j := job{topic, mono.Time(e.At), mono.Time(e.At), i == 0, 0}
					if topic == 0 {
						j.eligible = bucket.Take(j.at)
					}
					jobs = append(jobs, j)
				}
			}
		}
		// At equal times, a waiting message goes before an arriving message, and the lower topic before the higher.
		slices.SortStableFunc(jobs, func(x, y job) int {
			return cmp.Or(cmp.Compare(x.eligible, y.eligible), cmp.Compare(x.at, y.at), cmp.Compare(x.topic, y.topic))
		})
		free := make([]mono.Time, model.Servers)
		for i := range jobs {
			j := &jobs[i]
			work := model.Message.Draw(nil) // constant
			if j.first {
				work += model.Wake.Draw(nil)
			}
			slices.Sort(free)
			free[0] = max(free[0], j.eligible).Add(work)
			j.done = free[0]
		}

		var got []job
		streamA, streamB := events(a), events(b)
		c, err := engine.New([]engine.Model{model}, []engine.Topic{
			{Stream: &streamA, Where: make([]int, sources), Limited: true, Shares: []tokenbucket.Share{contract}},
			{Stream: &streamB, Where: make([]int, sources)},
		}, 1, func(d engine.Delivery) { got = append(got, job{d.Topic, d.At, d.Eligible, false, d.Done}) })
		testkit.Must(t, err)
		for c.Now() < mono.Time(time.Hour) {
			c.Advance(c.Now() + mono.Time(rapid.Int64Range(1, 1e13).Draw(t, "step")))
		}
		if len(got) != len(jobs) {
			t.Fatalf("%d deliveries, want %d", len(got), len(jobs))
		}
		for i, want := range jobs {
			want.first = false
			testkit.MustEqual(t, got[i], want, "delivery %d", i)
		}
	})
}

// The same seed gives the same deliveries for any steps of time.
func TestTheSameSeedGivesTheSameDeliveries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		model := drawModel(t)
		spec := schedule.Spec{Publishers: 30, Rate: 200, Batch: 3, GroupSize: 5, Sync: true, Process: schedule.Poisson, Seed: rapid.Uint64().Draw(t, "seed")}
		contract := []tokenbucket.Share{{Rate: tokenbucket.PerSecond(3300), Burst: 20}, {Rate: tokenbucket.PerSecond(3300), Burst: 20}}
		run := func(step mono.Time) (all []engine.Delivery) {
			c, err := engine.New(models(model, 2), []engine.Topic{{Stream: spec.Stream(), Where: dealt(30, 2), Limited: true, Shares: contract}}, 9,
				func(d engine.Delivery) { all = append(all, d) })
			testkit.Must(t, err)
			for c.Now() < 1e9 {
				c.Advance(min(1e9, c.Now()+step))
			}
			return all
		}
		order := func(d, e engine.Delivery) int {
			return cmp.Or(cmp.Compare(d.Broker, e.Broker), cmp.Compare(d.Eligible, e.Eligible), cmp.Compare(d.Done, e.Done))
		}
		whole, parts := run(1e9), run(mono.Time(rapid.Int64Range(1e6, 1e9).Draw(t, "step")))
		slices.SortStableFunc(whole, order)
		slices.SortStableFunc(parts, order)
		if !slices.Equal(whole, parts) {
			t.Fatalf("%d deliveries at once, %d in steps, or others", len(whole), len(parts))
		}
	})
}

// For any changes of shares and any arrivals, the messages that all brokers release together stay within the contract.
func TestRetunesKeepToTheContract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const k = 3
		contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(1000), Burst: 30}
		shares := testkit.Result(share.Proportion(contract, []int64{1, 1, 1})).Must(t)
		trace := drawTrace(t, 9)
		stream := events(slices.Clone(trace))
		var left []mono.Time
		c, err := engine.New(models(instant, k), []engine.Topic{{Stream: &stream, Where: dealt(9, k), Limited: true, Shares: shares}}, 1,
			func(d engine.Delivery) { left = append(left, d.Eligible) })
		testkit.Must(t, err)
		for range 200 {
			c.Advance(c.Now() + mono.Time(10*time.Millisecond))
			weights := rapid.SliceOfN(rapid.Int64Range(1, 9), k, k).Draw(t, "weights")
			if shares, err = share.Proportion(contract, weights); err == nil {
				err = c.Retune(0, shares)
			}
			testkit.Must(t, err)
		}
		c.Advance(forEver)
		n := 0
		for _, e := range trace {
			n += int(e.Count)
		}
		if len(left) != n {
			t.Fatalf("%d of %d messages left", len(left), n)
		}
		slices.Sort(left)
		for i := range left {
			for j := i; j < len(left); j++ {
				// Retunes round tokens down to thousandths, never up.
				if most := float64(contract.Burst) + 1000*left[j].Sub(left[i]).Seconds(); float64(j-i+1) > most+1e-6 {
					t.Fatalf("%d messages left within %v, at most %v may", j-i+1, left[j].Sub(left[i]), most)
				}
			}
		}
	})
}

func TestMovedAndMutedSources(t *testing.T) {
	per := make([]int, 2)
	c := build(t, models(instant, 2), []engine.Topic{{Stream: schedule.Spec{Publishers: 10, Rate: 10, Batch: 1, Process: schedule.Periodic, Seed: 1}.Stream(), Where: make([]int, 10)}}, 1,
		func(d engine.Delivery) { per[d.Broker]++ })
	c.Advance(mono.Time(time.Second))
	if per[0] != 100 || per[1] != 0 {
		t.Fatalf("all at broker 0: %v", per)
	}
	where := slices.Repeat([]int{1}, 10)
	where[3] = engine.Nowhere
	testkit.Must(t, c.Move(0, where))
	c.Advance(mono.Time(2 * time.Second))
	if per[0] != 100 || per[1] != 90 {
		t.Fatalf("9 moved to broker 1, one muted: %v", per)
	}
	if err := c.Move(0, where[1:]); err == nil {
		t.Error("9 of 10 sources were placed")
	}
	if err := c.Move(0, slices.Repeat([]int{2}, 10)); err == nil {
		t.Error("sources were placed at a broker that is not there")
	}
}

// Restarted shares are full, and waiting messages are judged by the new shares.
func TestRestart(t *testing.T) {
	var done []engine.Delivery
	stream := events{{At: 0, Source: 0, Count: 10}}
	c := build(t, []engine.Model{instant}, []engine.Topic{{Stream: &stream, Where: []int{0}, Limited: true, Shares: []tokenbucket.Share{{Rate: 1000, Burst: 2}}}}, 1,
		func(d engine.Delivery) { done = append(done, d) })
	c.Advance(mono.Time(3500 * time.Millisecond)) // 2 at once, 3 at a message per second
	if len(done) != 5 || c.Waiting(0, 0) != 5 {
		t.Fatalf("%d left, %d wait", len(done), c.Waiting(0, 0))
	}
	testkit.Must(t, c.Restart(0, []tokenbucket.Share{{Rate: 1000, Burst: 4}}))
	c.Advance(mono.Time(4 * time.Second))
	if len(done) != 9 || done[8].Eligible != mono.Time(3500*time.Millisecond) {
		t.Fatalf("%d left, the last at %v", len(done), time.Duration(done[len(done)-1].Eligible))
	}
}

func TestNewRefuses(t *testing.T) {
	stream := func() schedule.Stream { return &events{} }
	fine := []engine.Model{instant}
	for want, err := range map[string]error{
		"no brokers":                        build2(nil, nil),
		"servers: 0":                        build2([]engine.Model{{}}, nil),
		"source 0 is at broker 1 of 1":      build2(fine, []engine.Topic{{Stream: stream(), Where: []int{1}}}),
		"1 shares for 1 brokers":            build2(fine, []engine.Topic{{Stream: stream(), Shares: make([]tokenbucket.Share, 1)}}),
		"0 shares for 1 brokers":            build2(fine, []engine.Topic{{Stream: stream(), Limited: true}}),
		"topic 0, broker 0: rate -0.001 is": build2(fine, []engine.Topic{{Stream: stream(), Limited: true, Shares: []tokenbucket.Share{{Rate: -1, Burst: 1}}}}),
		"topic 1: source 0 is at broker -2": build2(fine, []engine.Topic{{Stream: stream()}, {Stream: stream(), Where: []int{-2}}}),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func build2(models []engine.Model, topics []engine.Topic) error {
	_, err := engine.New(models, topics, 1, func(engine.Delivery) {})
	return err
}

func TestDist(t *testing.T) {
	d, err := engine.NewDist([]engine.Point{{0, 10}, {0.5, 20}, {1, 1000}})
	testkit.Must(t, err)
	rng := rand.New(rand.NewPCG(testkit.Seed(t), 0))
	below, sum := 0, 0.0
	const n = 100_000
	for range n {
		v := d.Draw(rng)
		if v < 10 || v > 1000 {
			t.Fatalf("drew %v", v)
		}
		if v < 20 {
			below++
		}
		sum += float64(v)
	}
	// The mean is 0.5 * (10+20)/2 + 0.5 * (20+1000)/2.
	if math.Abs(float64(below)/n-0.5) > 0.01 || math.Abs(sum/n-262) > 5 {
		t.Errorf("%d of %d below the median, mean %v", below, n, sum/n)
	}
	for want, points := range map[string][]engine.Point{
		"no points":          nil,
		"0.1 to 1":           {{0.1, 1}, {1, 2}},
		"does not follow":    {{0, 1}, {0, 2}},
		"less than":          {{0, 2}, {1, 1}},
		"not in 0 to 1":      {{2, 1}},
		"NaN is not":         {{math.NaN(), 1}},
		"-1ns is not in 0 t": {{0, -1}},
	} {
		if _, err := engine.NewDist(points); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want an error with %q", points, err, want)
		}
	}
}

// The paper's full size: 6 brokers, 10,000 publishers, 100,000 msg/s.
func BenchmarkFullSize(b *testing.B) {
	model := engine.Model{Servers: 1, Wake: engine.Constant(8 * time.Microsecond), Message: engine.Constant(10 * time.Microsecond)}
	contract := tokenbucket.Share{Rate: tokenbucket.PerSecond(110_000), Burst: 300}
	messages := 0
	for b.Loop() {
		c := build(b, models(model, 6), []engine.Topic{{Stream: poisson(10_000, 10, 1), Where: dealt(10_000, 6), Limited: true, Shares: even(b, contract, 6)}}, 1,
			func(engine.Delivery) { messages++ })
		c.Advance(mono.Time(time.Second))
	}
	b.ReportMetric(float64(messages)/b.Elapsed().Seconds(), "msg/s")
}
