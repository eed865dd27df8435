package fair_test

import (
	"math"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/pacing/fair"
)

// publisher sends at its demand, limited by the advised rate.
type publisher struct {
	weight, demand float64 // demand in messages per second
	delay          int     // delay of the advice, in intervals
	excess         float64 // factor of the sent rate to the advised rate; 0: 1
	carry, rate    float64
}

// fluid is a resource and its publishers. In every interval each publisher sends its rate's messages, evenly.
type fluid struct {
	level      *fair.Level
	capacity   float64
	ts         time.Duration
	publishers []*publisher
	advice     []fair.Advice
	now        mono.Time
	queue      float64
	accepted   float64 // in the last interval
}

func newFluid(capacity float64, publishers ...*publisher) *fluid {
	return &fluid{level: fair.New(), capacity: capacity, ts: time.Second, publishers: publishers}
}

func (f *fluid) step() fair.Advice {
	sent := 0.0
	for _, p := range f.publishers {
		p.rate = p.demand
		if i := len(f.advice) - 1 - p.delay; i >= 0 && f.advice[i].Paced {
			p.rate = min(p.demand, max(1, p.excess)*f.advice[i].RateOf(p.weight))
		}
		n := p.rate*f.ts.Seconds() + p.carry
		p.carry = n - math.Floor(n)
		for range int(n) {
			f.level.Message(p.weight, p.rate)
		}
		sent += math.Floor(n)
	}
	room, was := f.capacity*f.ts.Seconds(), f.queue
	f.accepted = min(room, f.queue+sent)
	f.queue += sent - f.accepted
	f.now = f.now.Add(f.ts)
	f.advice = append(f.advice, f.level.Interval(f.now, f.capacity, min(was, f.queue), f.ts))
	return f.advice[len(f.advice)-1]
}

func TestWeightsShareTheCapacity(t *testing.T) {
	var all []*publisher
	for i := range 50 {
		all = append(all, &publisher{weight: []float64{1, 2, 4, 8, 10}[i%5], demand: 60})
	}
	f := newFluid(1000, all...)
	for range 300 {
		f.step()
	}
	want := 1000.0 / 250
	for range 100 {
		if a := f.step(); !a.Paced || a.Rate > 1.01*want || f.accepted < 980 || f.queue > 1000 {
			t.Fatalf("%+v, accepted %v, backlog %v; want a rate of %v", a, f.accepted, f.queue, want)
		}
	}
}

func TestNothingIsAllocatedForAMessage(t *testing.T) {
	l, m := fair.New(), fair.Meter{}
	now := mono.Time(0)
	testkit.Equal(t, testing.AllocsPerRun(1000, func() {
		now += 1e6
		l.Message(2, l.Measure(&m, now))
		l.Interval(now, 1000, 0, time.Second)
	}), 0, "allocations")
}

func TestIntervalsAreLongEnough(t *testing.T) {
	l, m, now := fair.New(), fair.Meter{}, mono.Time(0)
	for range 100 {
		now = now.Add(200 * time.Millisecond)
		l.Message(1, l.Measure(&m, now))
	}
	l.Interval(now, 1000, 0, time.Second)
	for _, c := range []struct {
		capacity  float64
		rtt, want time.Duration
	}{
		{1000, 0, 200 * time.Millisecond},
		{1000, 100 * time.Millisecond, 300 * time.Millisecond},
		{1000, time.Minute, time.Second},
		{100, 0, 500 * time.Millisecond}, // 50 messages
		{10, 0, 5 * time.Second},
		{0.001, 0, 65 * time.Second},
		{0, 0, time.Second},
	} {
		if got := l.Span(c.capacity, c.rtt); (got - c.want).Abs() > time.Millisecond {
			t.Errorf("capacity %v, RTT %v: %v, want %v", c.capacity, c.rtt, got, c.want)
		}
	}
	testkit.Equal(t, fair.New().Span(1e6, 0), 50*time.Millisecond, "no publisher known")
}
