//go:build !race

package broker_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/pacing/sender"
	"github.com/srtm-io/srtm/tokenbucket"
)

// crowd is publishers of one topic of a real broker, in virtual time.
type crowd struct {
	t       *testing.T
	b       *broker.Broker
	topic   *broker.Topic
	now     mono.Time
	clock   atomic.Int64 // now, for the topic's alarms
	all     []*greedy
	backlog int // the longest, since reset
	tick    time.Duration
}

// greedy publishes as many messages as the broker permits, up to its demand.
type greedy struct {
	as                *broker.Publisher
	weight            uint8
	demand            float64 // messages per second
	stock             bool    // does not send PACE, or does not listen
	bucket            sender.Bucket
	credit            float64
	accepted, refused int // since reset
	retry             mono.Time
}

func newCrowd(t *testing.T, mode broker.PaceMode, rate float64, burst int64) *crowd {
	c := &crowd{t: t, now: mono.Time(1e9), tick: time.Millisecond}
	c.clock.Store(int64(c.now))
	var err error
	c.b, err = broker.New(broker.Config{
		Capacity: 10_000_000, MaxMsgTimeout: time.Minute, AutoCreate: true, Pacing: mode, MaxWeight: 10,
		Now: func() mono.Time { return mono.Time(c.clock.Load()) },
	})
	testkit.Must(t, err)
	t.Cleanup(func() { c.b.Close() })
	c.topic = testkit.Result(c.b.CreateTopic("t")).Must(t)
	testkit.Must(t, c.topic.CreateChannel("c"))
	c.topic.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: burst}, false)
	return c
}

func (c *crowd) add(id string, weight uint8, demand float64, stock bool) *greedy {
	g := &greedy{as: c.topic.AddPublisher(id, "", police.Identity{Kind: "client", ID: id}), weight: weight, demand: demand, stock: stock}
	if weight > 0 {
		g.as.Pace(weight)
	}
	c.all = append(c.all, g)
	return g
}

// run advances the clock by d and resets the counts first.
func (c *crowd) run(d time.Duration) {
	c.backlog = 0
	for _, g := range c.all {
		g.accepted, g.refused = 0, 0
	}
	for end := c.now.Add(d); c.now < end; {
		c.now = c.now.Add(c.tick)
		c.clock.Store(int64(c.now))
		for _, g := range c.all {
			g.step(c, c.tick.Seconds())
		}
		c.topic.Tick()
		if c.now%mono.Time(10*time.Millisecond) == 0 { // the check is expensive
			c.backlog = max(c.backlog, c.topic.Stats().Waiting)
		}
	}
}

func (g *greedy) step(c *crowd, seconds float64) {
	for g.credit = min(g.credit+g.demand*seconds, 5); g.credit >= 1; {
		if !g.stock && (c.now < g.retry || g.bucket.Wait(1, c.now) > 0) {
			return
		}
		g.credit--
		err := c.topic.Publish(c.now, 0, broker.Published{Body: []byte("x"), Arrival: stamp.Arrival{At: c.now}, From: g.as})
		var over *queue.OverLimitError
		switch {
		case errors.As(err, &over):
			g.refused++
			g.retry = c.now.Add(over.Delay)
		case err != nil:
			c.t.Fatal(err)
		default:
			g.accepted++
		}
		if ok := g.as.Advice(); ok != nil {
			o := testkit.Result(header.ParseOK(ok)).Must(c.t)
			g.bucket.Advise(sender.Advice{Paced: o.Paced, Overload: o.Overload, Rate: o.Rate, Burst: o.Burst, Interval: o.Interval}, c.now)
		}
	}
}

var figure = []uint8{1, 2, 4, 8, 10} // the weights of the paper

// fair checks that the broker accepted messages of each publisher in proportion to its weight, and that the sum is the
// contract's rate.
func (c *crowd) fair(rate float64, d time.Duration, within float64, weight func(g *greedy) float64) {
	c.t.Helper()
	sum, accepted := 0.0, 0
	for _, g := range c.all {
		sum += weight(g)
		accepted += g.accepted
	}
	if used := float64(accepted) / (rate * d.Seconds()); used < 0.98 || used > 1.01 {
		c.t.Errorf("%.3f of the contract was accepted", used)
	}
	worst := 0.0
	for i, g := range c.all {
		want := rate * weight(g) / sum
		got := float64(g.accepted) / d.Seconds()
		if off := got/want - 1; off > within || off < -within {
			c.t.Errorf("publisher %d of weight %v: %.2f of %.2f messages a second", i, weight(g), got, want)
		} else if max(off, -off) > max(worst, -worst) {
			worst = off
		}
	}
	p := c.topic.Paced(false)
	c.t.Logf("accepted %d, farthest from its part %+.4f, longest backlog %d, %+v", accepted, worst, c.backlog, p)
	if span := p.Span.Seconds(); float64(c.backlog) > 2*span*rate {
		c.t.Errorf("a backlog of %d messages; %v of two intervals", c.backlog, float64(c.backlog)/(2*span*rate))
	}
}

// Fifty greedy publishers exceed the contract of one topic. The broker accepts messages of each in proportion to its
// weight, keeps the backlog short and uses the whole contract.
func TestGreedyPublishersShareTheContractByWeight(t *testing.T) {
	const rate = 2000
	c := newCrowd(t, broker.PaceAdvise, rate, 100)
	for i := range 50 {
		c.add(fmt.Sprint(i), figure[i%5], 160, false)
	}
	c.run(15 * time.Second)
	const d = 20 * time.Second
	c.run(d)
	c.fair(rate, d, 0.05, func(g *greedy) float64 { return float64(g.weight) })
}

// Police limits publishers that ignore pacing to their parts by weight. Publishers that obey lose nothing to publishers
// that do not.
func TestPoliceHoldsThoseThatDoNotListen(t *testing.T) {
	const rate = 2000
	c := newCrowd(t, broker.PacePolice, rate, 100)
	var groups []police.Group
	for _, w := range figure {
		groups = append(groups, police.Group{Key: fmt.Sprint("w", w), Count: 10, Weight: w})
	}
	c.topic.SetPacing("", groups)
	for i := range 50 {
		w := figure[i%5]
		g := c.add(fmt.Sprintf("w%d.%d", w, i/5), 0, 160, true)
		switch i / 5 {
		case 0, 1, 2: // obey
			g.as.Pace(w)
			g.stock = false
		case 3, 4: // lie
			g.as.Pace(255)
		} // the others never send PACE
		g.weight = w
	}
	c.run(15 * time.Second)
	const d = 20 * time.Second
	c.run(d)
	c.fair(rate, d, 0.05, func(g *greedy) float64 { return float64(g.weight) })
	for i, g := range c.all {
		if offered := g.accepted + g.refused; i/5 < 3 && float64(g.refused) > 0.05*float64(offered) {
			t.Errorf("publisher %d, which listens, was refused %d of %d messages", i, g.refused, offered)
		}
	}
}

// Publishers get the part that other publishers do not want. If no publisher wants more than its part, none is paced.
func TestWhatSomeDoNotWantOthersGet(t *testing.T) {
	const rate = 2000
	c := newCrowd(t, broker.PaceAdvise, rate, 100)
	for i := range 40 {
		c.add(fmt.Sprint("slow", i), 1, 10, false) // 400 a second
	}
	c.run(10 * time.Second)
	if p := c.topic.Paced(false); p.Paced {
		t.Errorf("paced at a fifth of the contract: %+v", p)
	}
	a, b := c.add("a", 1, 2000, false), c.add("b", 3, 3000, false)
	c.run(20 * time.Second)
	const d = 20 * time.Second
	c.run(d)
	for i, g := range c.all[:40] {
		if want := 10 * d.Seconds(); float64(g.accepted) < 0.97*want {
			t.Errorf("slow publisher %d: %d of %v messages", i, g.accepted, want)
		}
	}
	ratio, sum := float64(b.accepted)/float64(a.accepted), float64(a.accepted+b.accepted)/d.Seconds()
	if ratio < 2.85 || ratio > 3.15 || sum < 0.97*1600 || sum > 1.02*1600 {
		t.Errorf("the two that want more have %.1f of 1600 messages a second, in the ratio %.3f", sum, ratio)
	}
	t.Logf("%.1f of 1600, ratio %.3f, longest backlog %d: %+v", sum, ratio, c.backlog, c.topic.Paced(false).Advice)
	a.demand, b.demand = 10, 10
	c.run(20 * time.Second)
	if p := c.topic.Paced(false); p.Paced {
		t.Errorf("still paced when no publisher wants more: %+v", p)
	}
}

// The share is moved to and fro: pacing follows.
func TestPacingFollowsTheShare(t *testing.T) {
	c := newCrowd(t, broker.PaceAdvise, 2000, 100)
	for i := range 50 {
		c.add(fmt.Sprint(i), figure[i%5], 160, false)
	}
	const d = 10 * time.Second
	for _, rate := range []float64{2000, 500, 3000} {
		c.topic.SetShare(tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: 100}, 0)
		c.run(20 * time.Second)
		c.run(d)
		c.fair(rate, d, 0.06, func(g *greedy) float64 { return float64(g.weight) })
	}
}

// Two hundred times as many publishers join at once, and later leave and join again. The backlog is a few seconds of the
// contract and soon drains.
func TestManyJoinAtOnce(t *testing.T) {
	const rate, few, many = 5_000, 12, 2_500
	c := newCrowd(t, broker.PaceAdvise, rate, 250)
	c.tick = 25 * time.Millisecond
	for i := range few {
		c.add(fmt.Sprint(i), 1, 1600, false)
	}
	c.run(2 * time.Second)
	for range 2 {
		for i := range many {
			c.add(fmt.Sprint("late", i), 1, 10, false)
		}
		c.run(8 * time.Second)
		if left := c.topic.Stats().Waiting; c.backlog > 4*rate || left > rate/2 {
			t.Errorf("a backlog of %d messages, of which %d are left", c.backlog, left)
		}
		for _, g := range c.all[few:] { // a storm: all new publishers leave and come back
			g.as.Leave()
		}
		c.all = c.all[:few]
	}
}
