package client_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/lease"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func leased(key string, rate tokenbucket.Rate, capacity int64) rule.Rule {
	return rule.Rule{Key: key, Share: tokenbucket.Share{Rate: rate * 1000, Burst: capacity}, Leased: true}
}

// Three clients hold parts, and a fourth asks; through a network that loses, repeats and
// reorders what they say. All together are admitted what the rule allows.
func TestClientsShareARule(t *testing.T) {
	const rate, capacity = 2000, 200
	to := serve(t, leased("key", rate, capacity))
	asks := dial(t, client.Config{Servers: []string{to.String()}})
	var admitted, held atomic.Int64
	var working sync.WaitGroup
	began := clock.Mono()
	done, stop := context.WithCancel(t.Context())
	for i := range 4 {
		c := asks
		if i < 3 {
			c = dial(t, client.Config{Servers: []string{lossy(t, to)}, Attempts: 100})
		}
		working.Go(func() {
			var once sync.Once
			for done.Err() == nil {
				decide := c.Decide
				if c == asks {
					decide = c.Ask
				}
				d := decide(t.Context(), "key", 1)
				if d.Admit {
					admitted.Add(1)
				}
				if d.Admit && d.Leased && !d.Unanswered && c != asks && c.Lease("key").Admit(0).Admit {
					once.Do(func() { held.Add(1) })
				}
			}
		})
	}
	testkit.WaitFor(t, "all hold a part", func() bool { return held.Load() == 3 && admitted.Load() > 3*capacity })
	stop()
	working.Wait()
	if most := capacity + rate*clock.Mono().Sub(began).Seconds(); float64(admitted.Load()) > most {
		t.Errorf("%d were admitted, %.0f allowed", admitted.Load(), most)
	}
}

func TestLease(t *testing.T) {
	to := serve(t, leased("key", 100, 100), leased("much", 1e9, 1e9), rule.Rule{Key: "central", Share: tokenbucket.Share{Rate: 1, Burst: 10}})
	dials := func(t *testing.T) *client.Client {
		return dial(t, client.Config{Servers: []string{to.String()}, Attempts: 10_000, Wait: testkit.Hang})
	}

	t.Run("is taken and given back", func(t *testing.T) {
		c := dials(t)
		if d := c.Decide(t.Context(), "key", 1); !d.Admit || !d.Leased || d.Left != 99 {
			t.Fatalf("%+v", d)
		}
		testkit.WaitFor(t, "a lease", func() bool { return !c.Lease("key").Admit(0).Unanswered })
		if d := c.Lease("key").Admit(1); !d.Admit || d.Left < 40 || d.Left > 60 { // half of it; the other is the owner's
			t.Errorf("%+v", d)
		}
		if d := c.Lease("key").Admit(1000); d.Admit || !d.Unanswered {
			t.Errorf("more than it can hold: %+v", d)
		}
		if d := c.Decide(t.Context(), "key", 1000); d.Admit || d.Unanswered || d.RetryAfter != -1 {
			t.Errorf("more than there is: %+v", d)
		}
		c.Close()
		if d := c.Lease("other").Admit(1); d.Admit || !d.Unanswered {
			t.Errorf("after Close: %+v", d)
		}
		testkit.WaitFor(t, "the rest", func() bool { return dials(t).Peek(t.Context(), "key", 0).Left > 90 })
	})

	t.Run("is not of a rule that is not leased", func(t *testing.T) {
		c := dials(t)
		l := c.Lease("central")
		l.Admit(0)
		testkit.WaitFor(t, "another lease", func() bool { return c.Lease("central") != l })
		for i := range 10 {
			if d := c.Decide(t.Context(), "central", 1); !d.Admit || d.Leased || d.Left != int64(9-i) {
				t.Fatalf("%+v", d)
			}
		}
	})

	t.Run("allocates nothing", func(t *testing.T) {
		c, ctx := dials(t), t.Context()
		l := c.Lease("much")
		testkit.WaitFor(t, "a lease", func() bool { return !l.Admit(1).Unanswered })
		testkit.Equal(t, testing.AllocsPerRun(1000, func() { l.Admit(1) }), 0, "allocations to admit")
		testkit.Equal(t, testing.AllocsPerRun(1000, func() { c.Decide(ctx, "much", 1) }), 0, "allocations to decide")
	})
}

// A process that stands still in the middle of a decision until its lease is over, when others may
// have what it held, admits nothing by it.
func TestAProcessStandsStill(t *testing.T) {
	c := dial(t, client.Config{Servers: []string{serve(t, leased("key", 100, 100)).String()}})
	var still atomic.Bool
	c.SetClock(func() mono.Time {
		now := clock.Mono()
		if still.Load() {
			c.SetClock(func() mono.Time { return now.Add(lease.Length) })
		}
		return now
	})
	l := c.Lease("key")
	testkit.WaitFor(t, "a lease", func() bool { return l.Admit(1).Admit })
	still.Store(true)
	if d := l.Admit(1); d.Admit || !d.Unanswered {
		t.Errorf("%+v", d)
	}
}

func TestNothingIsHeldWithoutAnOwner(t *testing.T) {
	to, stop := stoppable(t, leased("closed", 100, 100), func() rule.Rule {
		r := leased("open", 100, 100)
		r.FailOpen = true
		return r
	}())
	c := dial(t, client.Config{Servers: []string{to.String()}})
	for _, key := range []string{"open", "closed"} {
		testkit.WaitFor(t, "a lease", func() bool { c.Decide(t.Context(), key, 0); return !c.Lease(key).Admit(0).Unanswered })
	}
	stop()
	for key, admit := range map[string]bool{"open": true, "closed": false} {
		testkit.WaitFor(t, "the end of the lease", func() bool { return c.Lease(key).Admit(0).Unanswered }) // its lease is over
		if d := c.Lease(key).Admit(1); d.Admit != admit {
			t.Errorf("%s: %+v", key, d)
		}
		if d := c.Decide(t.Context(), key, 1); d.Admit != admit || !d.Unanswered {
			t.Errorf("%s: %+v", key, d)
		}
	}
}

// What a decision costs by what is held.
func BenchmarkAdmit(b *testing.B) {
	to := serve(b, leased("key", 1e9, 1e9))
	c := testkit.Result(client.New(client.Config{Servers: []string{to.String()}, Attempts: 10_000, Wait: testkit.Hang})).Must(b)
	b.Cleanup(c.Close)
	l := c.Lease("key")
	testkit.WaitFor(b, "a lease", func() bool { return !l.Admit(1).Unanswered })
	b.ReportAllocs()
	for b.Loop() {
		l.Admit(1)
	}
}
