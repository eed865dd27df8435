package shortage

import (
	"fmt"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var start = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// cluster has brokers with a capacity of 100 msg/s and the given allocations.
func cluster(allocated ...int64) (c Cluster) {
	for i, a := range allocated {
		c.Brokers = append(c.Brokers, placement.Broker{ID: fmt.Sprint("b", i), Mcap: 100, Allocated: a})
		c.Allocated += a
	}
	return c
}

func rcap(b *Book, topic string, rate, has int64) {
	b.Refuse(topic, rate, has, &placement.Infeasible{Bound: "rcap", Need: rate}, start)
}

func TestNeedCountsMissingBrokers(t *testing.T) {
	for name, c := range map[string]struct {
		threshold float64
		cluster   Cluster
		before    func(b *Book)
		want      int
	}{
		"an empty cluster without topics":              {1, Cluster{}, nil, 0},
		"idle brokers":                                 {1, cluster(0, 0), nil, 0},
		"full brokers, and nothing refused":            {1, cluster(100, 100), nil, 0},
		"just at the threshold":                        {.8, cluster(80, 80), nil, 0},
		"above the threshold":                          {.8, cluster(81, 80), nil, 1},
		"far above the threshold":                      {.5, cluster(100, 100), nil, 2},
		"a refused topic that a broker would hold":     {1, cluster(60, 60), func(b *Book) { rcap(b, "t", 100, 0) }, 1},
		"refused topics that need three":               {1, cluster(100, 100), func(b *Book) { rcap(b, "t", 150, 0); rcap(b, "u", 101, 0) }, 3},
		"the same topic again counts once":             {1, cluster(100), func(b *Book) { rcap(b, "t", 100, 0); rcap(b, "t", 100, 0) }, 1},
		"a topic that was to grow":                     {1, cluster(100), func(b *Book) { rcap(b, "t", 150, 100) }, 1},
		"a refused topic that fits by now":             {1, cluster(0, 0), func(b *Book) { rcap(b, "t", 150, 0) }, 0},
		"a refused topic that was placed":              {1, cluster(100), func(b *Book) { rcap(b, "t", 50, 0); b.Placed("t", 50) }, 0},
		"a move does not end the refusal to grow":      {1, cluster(100), func(b *Book) { rcap(b, "t", 50, 10); b.Placed("t", 10) }, 1},
		"a topic that finds no other brokers":          {1, cluster(100), func(b *Book) { rcap(b, "t", 50, 50) }, 0},
		"a refusal for another reason":                 {1, cluster(100), func(b *Book) { b.Refuse("t", 50, 0, &placement.Infeasible{Bound: "burst", Need: 2}, start) }, 0},
		"no broker at all":                             {1, Cluster{}, func(b *Book) { b.Refuse("t", 50, 0, &placement.Infeasible{Bound: "brokers", Need: 1}, start) }, 1},
		"a topic that needs more brokers":              {1, cluster(0, 0), func(b *Book) { b.Refuse("t", 5, 0, &placement.Infeasible{Bound: "brokers", Need: 5}, start) }, 3},
		"a broker beyond its capacity leaves no room":  {1, cluster(150, 90), func(b *Book) { rcap(b, "t", 20, 0) }, 1},
		"topics of a disconnected broker need room":    {1, Cluster{Brokers: cluster(100).Brokers, Allocated: 150}, nil, 1},
		"a topic that misses its SLO on all brokers":   {1, Cluster{Brokers: cluster(10).Brokers, Allocated: 10, Unfitted: 1}, nil, 1},
		"an absurd contract":                           {1, cluster(0), func(b *Book) { rcap(b, "t", 1<<40, 0) }, Most},
		"allocated topics, and no broker takes topics": {1, Cluster{Allocated: 10}, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := New(c.threshold)
			if c.before != nil {
				c.before(b)
			}
			got := b.Need(c.cluster, start)
			testkit.Equal(t, got.Brokers, c.want, "%s", got.Reason())
		})
	}
}

// With the brokers that Need returns, nothing is lacking any more.
func TestTheNeededBrokersSuffice(t *testing.T) {
	for rate := int64(1); rate < 1000; rate += 7 {
		for _, threshold := range []float64{.3, .8, 1} {
			b, c := New(threshold), cluster(30, 70, 100)
			rcap(b, "t", rate, 0)
			n := b.Need(c, start).Brokers
			for range n {
				c.Brokers = append(c.Brokers, placement.Broker{Mcap: 100})
			}
			if left := b.Need(c, start).Brokers; left != 0 {
				t.Fatalf("%d msg/s, threshold %v: with %d brokers more, %d are lacking", rate, threshold, n, left)
			}
			if n > 0 {
				c.Brokers = c.Brokers[:len(c.Brokers)-1]
				testkit.Equal(t, b.Need(c, start).Brokers, 1, "%d msg/s, threshold %v, with one broker less", rate, threshold)
			}
		}
	}
}

func TestRefusalsEnd(t *testing.T) {
	b := New(1)
	rcap(b, "t", 50, 0)
	testkit.Equal(t, b.Need(cluster(100), start.Add(Remembered)).Brokers, 1)
	testkit.Equal(t, b.Need(cluster(100), start.Add(Remembered+1)).Brokers, 0)
	testkit.Equal(t, len(b.refused), 0)
}

func TestRefusalsAreBounded(t *testing.T) {
	b := New(1)
	for i := range 2 * maxRefused {
		rcap(b, fmt.Sprint("t", i), 1, 0)
	}
	testkit.Equal(t, len(b.refused), maxRefused)
	rcap(b, "t0", 500, 0)
	testkit.Equal(t, b.refused["t0"].rate, 500, "a known topic is still counted")
}

func TestAnnounceWaitsForALastingChange(t *testing.T) {
	b, now := New(1), start
	step := func(brokers int, lasts time.Duration, want ...int) {
		t.Helper()
		var got []int
		for end := now.Add(lasts); now.Before(end); now = now.Add(time.Second) {
			if b.Announce(Need{Brokers: brokers}, now) {
				got = append(got, b.Announced())
			}
		}
		testkit.EqualSlices(t, got, want, "announced")
	}
	step(0, Held+time.Second, 0) // a new leader announces also that nothing is lacking
	step(0, time.Hour)
	step(1, Held) // a broker restarts
	step(0, time.Hour)
	step(2, Held+time.Second, 2)
	step(2, time.Hour)
	step(1, Held/2)
	step(3, Held, 3) // the number has differed for long, and the newest counts
	step(0, Held+time.Second, 0)
}

func TestReason(t *testing.T) {
	n := Need{Brokers: 1, Capacity: 100, Allocated: 90, Refused: 2, RefusedRate: 50, Unfitted: 1}
	testkit.Equal(t, n.Reason(), "topics refused for want of capacity: 2 (50 msg/s); topics that miss their SLO on all brokers: 1; 90 of 100 msg/s are allocated")
}
