package police_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/pacing/fair"
	"github.com/srtm-io/srtm/pacing/police"
)

func client(id string) police.Identity { return police.Identity{Kind: "client", ID: id} }

func TestWeightsOfGroupsAndClients(t *testing.T) {
	w := police.Weights{Max: 2, Groups: []police.Group{
		{Key: "hall", Count: 10, Weight: 8}, {Key: "lone", Weight: 4},
	}}
	for _, c := range []struct {
		id   string
		wish uint8
		want float64
	}{
		{"hall.0", 0, 8}, {"hall.9", 255, 8}, {"hall.9", 3, 3}, {"lone", 0, 4}, {"lone", 9, 4},
		{"hall.10", 255, 2}, {"hall.01", 255, 2}, {"hall.-1", 255, 2}, {"hall.", 255, 2}, {"hall", 255, 2},
		{"hall.+1", 0, 1}, {"lone.0", 0, 1}, {"", 1, 1}, {"other", 0, 1}, {"other", 2, 2},
	} {
		table := police.New(w)
		p := table.Enter(client(c.id))
		if c.wish > 0 {
			table.RequestWeight(p, c.wish)
		}
		testkit.Equal(t, p.Weight(), c.want, "weight of %q that wishes for %d", c.id, c.wish)
	}
}

// All connections of an identity are one publisher, and each connection has its part, also after a reconnect.
func TestConnectionsDoNotMultiplyWeights(t *testing.T) {
	table := police.New(police.Weights{Max: 10})
	p := table.Enter(client("a"))
	table.RequestWeight(p, 10)
	table.Advise(fair.Advice{Paced: true, Rate: 6, SumWeights: 20}, 40, time.Second, 0)
	if rate, burst := table.Allowance(p); rate.PerSecond() != 60 || burst != 20 {
		t.Errorf("allowed %v, %v", rate.PerSecond(), burst)
	}
	for range 2 {
		testkit.Equal(t, table.Enter(client("a")), p, "another publisher")
	}
	if rate, burst := table.Allowance(p); rate.PerSecond() != 20 || burst != 6 {
		t.Errorf("each of three is allowed %v, %v", rate.PerSecond(), burst)
	}
	if q := table.Enter(police.Identity{Kind: "auth", ID: "a"}); q == p || q.Weight() != 1 {
		t.Error("a client_id passes for an authenticated identity")
	}
	now := mono.Time(0).Add(time.Minute)
	for range 3 {
		table.Leave(p, now)
	}
	table.Advise(fair.Advice{}, 40, time.Second, now.Add(time.Second))
	testkit.Equal(t, table.Enter(client("a")), p, "forgotten after a second")
	table.Leave(p, now)
	table.Advise(fair.Advice{}, 40, time.Second, now.Add(time.Minute))
	if q := table.Enter(client("a")); q == p {
		t.Error("still known after a minute")
	}
}

func TestIdentitiesAreBounded(t *testing.T) {
	table := police.New(police.Weights{Max: 10})
	for i := range police.MaxPublishers {
		table.Enter(client(fmt.Sprint(i)))
	}
	a, b := table.Enter(client("a")), table.Enter(client("b"))
	table.RequestWeight(a, 10)
	if a != b || a.Weight() != 1 {
		t.Error("there are more publishers than there may be, or the rest has more than weight 1")
	}
	if table.Enter(client("7")) == a {
		t.Error("one that is known is not found")
	}
}

// run offers each publisher's messages evenly and returns the admitted messages of each publisher in the last half.
func run(table *police.Table, publishers []*police.Publisher, offered []float64, gamma, sum float64, seconds int, jitter *rand.Rand) []float64 {
	const step = time.Millisecond
	admitted, carry := make([]float64, len(offered)), make([]float64, len(offered))
	for ms := range seconds * 1000 {
		now := mono.Time(0).Add(time.Duration(ms) * step)
		if ms%500 == 0 {
			table.Advise(fair.Advice{Paced: true, Rate: gamma, SumWeights: sum}, 5, 500*time.Millisecond, now)
		}
		for i, p := range publishers {
			for carry[i] += offered[i] * step.Seconds() * (0.5 + jitter.Float64()); carry[i] >= 1; carry[i]-- {
				if ok, _ := table.Admit(p, 1, now); ok && ms >= seconds*500 {
					admitted[i] += 2 / float64(seconds)
				}
			}
		}
	}
	return admitted
}

func TestLiarsGainNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := police.New(police.Weights{Max: 10})
		gamma := rapid.Float64Range(10, 50).Draw(t, "gamma")
		var publishers []*police.Publisher
		var offered, told []float64
		sum := 0.0
		for i := range rapid.IntRange(1, 5).Draw(t, "publishers") {
			p := table.Enter(client(fmt.Sprint(i)))
			table.RequestWeight(p, rapid.Uint8Range(1, 255).Draw(t, "weight"))
			lie := rapid.SampledFrom([]float64{1, 1, 1.3, 1.5, 10}).Draw(t, "lie")
			publishers, told = append(publishers, p), append(told, gamma*p.Weight())
			offered, sum = append(offered, told[i]*lie), sum+p.Weight()
		}
		jitter := rand.New(rand.NewPCG(1, rapid.Uint64().Draw(t, "seed")))
		for i, got := range run(table, publishers, offered, gamma, sum, 40, jitter) {
			if got > 1.03*told[i] || got < 0.95*told[i] {
				t.Fatalf("publisher %d was advised %v, offered %v and had %v admitted", i, told[i], offered[i], got)
			}
		}
	})
}

// A publisher is not refused before it can have received the advice, and a batch above the burst is admitted if the
// publisher has no debt.
func TestAdmit(t *testing.T) {
	table := police.New(police.Weights{})
	p := table.Enter(client("a"))
	now := mono.Time(0)
	advise := func(a fair.Advice) {
		now = now.Add(time.Second)
		table.Advise(a, 10, time.Second, now)
	}
	paced := fair.Advice{Paced: true, Rate: 10, SumWeights: 1}
	for range 3 {
		advise(paced)
		if ok, _ := table.Admit(p, 1e6, now); !ok {
			t.Fatal("refused before it can have the advice")
		}
	}
	advise(paced)
	if ok, _ := table.Admit(p, 43, now); !ok { // the burst of 10, an interval's 11, and 22 more
		t.Fatal("a batch is refused though nothing is owed")
	}
	if ok, retry := table.Admit(p, 1, now); ok || retry < 2*time.Second || retry > 2200*time.Millisecond {
		t.Errorf("%v, retry after %v; want no, after what 23 messages take at 11 a second", ok, retry)
	}
	if ok, _ := table.Admit(p, 1, now.Add(-time.Hour)); ok {
		t.Error("a stamp of the past brings tokens")
	}
	advise(fair.Advice{})
	if ok, _ := table.Admit(p, 1e6, now); !ok {
		t.Error("refused though open")
	}
}

// A publisher that pauses, or begins with a batch, counts as one publisher.
func TestCountIsOfOnePublisher(t *testing.T) {
	table, level := police.New(police.Weights{}), fair.New()
	p := table.Enter(client("a"))
	now := mono.Time(0)
	interval := func() fair.Advice {
		now = now.Add(time.Second)
		return level.Interval(now, 1000, 0, time.Second)
	}
	interval()
	for range 3 { // three periods with pauses between
		p.Count(level, 5000, now.Add(500*time.Millisecond))
		if a := interval(); a.SumWeights > 1.1 {
			t.Errorf("after a batch %v publishers are seen", a.SumWeights)
		}
		for range 10 {
			for i := range 100 {
				p.Count(level, 1, now.Add(time.Duration(i)*10*time.Millisecond))
			}
			interval()
		}
		if a := interval(); p.Rate() < 90 || p.Rate() > 110 || a.SumWeights > 1.3 {
			t.Errorf("rate %v, %v publishers", p.Rate(), a.SumWeights)
		}
		now = now.Add(time.Hour)
		interval()
	}
}

func TestNothingIsAllocatedForAMessage(t *testing.T) {
	table, level := police.New(police.Weights{}), fair.New()
	p, now := table.Enter(client("a")), mono.Time(0)
	testkit.Equal(t, testing.AllocsPerRun(1000, func() {
		now = now.Add(time.Millisecond)
		table.Advise(fair.Advice{Paced: true, Rate: 1, SumWeights: 1}, 10, time.Second, now)
		table.Admit(p, 1, now)
		p.Count(level, 1, now)
		table.Allowance(p)
	}), 0, "allocations")
}
