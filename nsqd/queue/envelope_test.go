package queue

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// within checks for every pair of messages i <= j in the order of their times that j-i+1 <= b + r*(t_j - t_i + late), in
// integers.
func within(times []mono.Time, s tokenbucket.Share, late time.Duration) error {
	times = slices.Sorted(slices.Values(times))
	const token = 1_000_000_000_000 // in subtokens: r milli-msg/s are r subtokens per nanosecond
	for i := range times {
		for j := i; j < len(times); j++ {
			n, dt := int64(j-i+1), times[j].Sub(times[i])
			if (n-s.Burst)*token > int64(s.Rate)*int64(dt+late) {
				return fmt.Errorf("%d messages in %v with %v of backdating, the contract is %v msg/s, burst %d",
					n, dt, late, s.Rate.PerSecond(), s.Burst)
			}
		}
	}
	return nil
}

// trial is a topic under a contract, with the bounds of its releases.
type trial struct {
	rt     *rapid.T
	top    *Topic
	now    mono.Time
	fx     Effects
	most   tokenbucket.Share // maximum of all shares so far
	late   time.Duration     // Config.MaxBackdating
	shut   bool              // after the last step, a condition other than tokens prevented releases
	opened mono.Time         // when shut was last true

	names    []string // of channels, each with a consumer of that number
	n        int
	disk     disk
	eligible []mono.Time
	released []mono.Time
}

// step does one step and checks the releases.
func (tr *trial) step(do func()) {
	if tr.shut {
		tr.opened = tr.now
	}
	do()
	for _, r := range tr.fx.Released {
		switch {
		case r.Released != tr.now:
			tr.rt.Fatalf("released at %d, it says %d", tr.now, r.Released)
		case r.Eligible < r.Arrival || r.Eligible > tr.now:
			tr.rt.Fatalf("arrived at %d, eligible at %d, released at %d", r.Arrival, r.Eligible, tr.now)
		case r.Eligible < tr.now.Add(-tr.late):
			tr.rt.Fatalf("eligible at %d, released at %d, more than %v later", r.Eligible, tr.now, tr.late)
		case r.Eligible < tr.opened:
			tr.rt.Fatalf("eligible at %d, and held up until %d", r.Eligible, tr.opened)
		case r.Access < 0 || r.Access > r.Eligible.Sub(r.Arrival):
			tr.rt.Fatalf("access delay %v, arrived at %d, eligible at %d", r.Access, r.Arrival, r.Eligible)
		}
		tr.eligible = append(tr.eligible, r.Eligible)
		tr.released = append(tr.released, tr.now)
	}
	for _, d := range tr.fx.Deliveries {
		if !tr.top.Channel(tr.names[d.Consumer]).MarkSent(d) {
			tr.rt.Fatal("a delivery came to nothing")
		}
	}
	tr.fx.Reset()
	tr.shut = tr.top.paused || len(tr.top.cursors.channels) == 0
	for _, c := range tr.top.cursors.channels {
		tr.shut = tr.shut || !c.open()
	}
	testkit.Must(tr.rt, tr.top.checkInvariants(tr.now))
}

// onTime advances the time with an owner that ticks whenever the head is eligible.
func (tr *trial) onTime(until mono.Time) {
	for {
		tr.step(func() { tr.top.Tick(tr.now, &tr.fx) })
		d := tr.top.ReleaseDeadline()
		if d <= tr.now {
			tr.rt.Fatalf("a deadline at %d, after a tick at %d: its owner would never rest", d, tr.now)
		}
		if d > until {
			break
		}
		tr.now = d
	}
	tr.now = until
}

// A publisher keeps its contract of 100 msg/s and a burst of 5, and its topic releases nothing for a while.
func TestWhatWasHeldUpLeavesAtTheContractsPace(t *testing.T) {
	const gap = 10 * time.Millisecond
	nothing := func(*bench) {}
	pause := func(b *bench) { b.top.Pause() }
	unpause := func(b *bench) { b.top.Unpause(b.now, &b.fx) }
	forget := func(b *bench) {
		testkit.Must(b.t, b.top.DeleteChannel(b.now, "c", &b.fx))
	}
	create := func(b *bench) { b.channel("c") }
	fill := func(b *bench) {
		for range 1000 {
			b.put(nil)
		}
	}
	empty := func(b *bench) { b.top.EmptyChannel(b.now, b.top.Channel("c"), &b.fx) }
	for _, c := range []struct {
		name       string
		begin, end func(*bench) // of the interruption
		lasts      time.Duration
		late       bool // the owner reads them at the end, all at once
		over       OverLimit
		accepted   int
		atOnce     int // released at the end
	}{
		{"paused", pause, unpause, 5 * time.Second, false, OverLimit{}, 500, 5},
		{"no channel", forget, create, 5 * time.Second, false, OverLimit{}, 500, 5},
		{"full channel", fill, empty, 5 * time.Second, false, OverLimit{}, 500, 5},
		{"paused for a moment", pause, unpause, gap, false, OverLimit{}, 1, 1},
		{"paused, reject", pause, unpause, 5 * time.Second, false, OverLimit{Reject: true}, 5, 5},
		{"paused, reject later", pause, unpause, 5 * time.Second, false, OverLimit{Reject: true, MaxDelay: time.Second}, 105, 5},
		{"no channel, reject", forget, create, 5 * time.Second, false, OverLimit{Reject: true}, 5, 5},
		{"full channel, reject", fill, empty, 5 * time.Second, false, OverLimit{Reject: true}, 5, 5},
		{"a stall as long as backdating", nothing, nothing, backdating, true, OverLimit{}, 25, 25},
		{"a longer stall", nothing, nothing, 400 * time.Millisecond, true, OverLimit{}, 40, 5 + 25},
		{"a longer stall, reject", nothing, nothing, 400 * time.Millisecond, true, OverLimit{Reject: true}, 5 + 25, 5 + 25},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &bench{t: t, top: newTest(1000), now: mono.Time(time.Second)}
			b.channel("c")
			c.begin(b)
			b.top.Limit(c.over)
			b.top.SetShare(b.now, tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 5}, 5*tokenbucket.Token, &b.fx)
			b.fx.Reset()

			accepted := 0
			end := b.now.Add(c.lasts)
			for at := b.now.Add(gap); at <= end; at = at.Add(gap) {
				if b.now = at; c.late {
					b.now = end
				}
				b.n++
				if b.top.Put(b.now, &b.fx, message(b.n, at)) == nil {
					accepted++
				}
			}
			if accepted != c.accepted {
				t.Errorf("%d accepted, want %d", accepted, c.accepted)
			}
			c.end(b)
			b.check()
			if n := len(b.fx.Released); n != c.atOnce {
				t.Errorf("%d of %d released at once, want %d", n, accepted, c.atOnce)
			}
			for _, r := range b.fx.Released {
				if r.Access != 0 && c.accepted == c.atOnce {
					t.Errorf("%+v waited for no token", r)
				}
			}
			for range accepted - c.atOnce { // the rest, each with its own token
				before := len(b.fx.Released)
				b.now = b.top.ReleaseDeadline()
				b.top.Tick(b.now, &b.fx)
				b.check()
				testkit.MustEqual(t, len(b.fx.Released)-before, 1, "released at %v", b.now)
			}
			last, wait := b.fx.Released[len(b.fx.Released)-1], time.Duration(accepted-c.atOnce)*gap
			if last.Released != end.Add(wait) || last.Access != wait {
				t.Errorf("the last left at %d, with an access delay of %v, want %d, %v", last.Released, last.Access, end.Add(wait), wait)
			}
		})
	}
}

// For any interruption and any lateness of its owner, a topic keeps its contract, both by the times at which messages
// have their tokens and by the times of their releases, with backdating.
func TestBothEnvelopesHold(t *testing.T) {
	messages, late := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		between := func(lo, hi time.Duration) time.Duration { return lo + time.Duration(rng.Int64N(int64(hi-lo)+1)) }
		share := func() tokenbucket.Share {
			return tokenbucket.Share{Rate: tokenbucket.Rate(2_000 + rng.Int64N(5_000_000)), Burst: 1 + rng.Int64N(20)}
		}
		tr := &trial{rt: rt, names: []string{"a", "b"}}
		tr.late = time.Duration(rapid.SampledFrom([]int{0, 1, 20, 250, 1000}).Draw(rt, "backdating")) * time.Millisecond
		overflow := rapid.SampledFrom([]int{0, 5, 1000}).Draw(rt, "overflow")
		tr.top = NewTopic(Config{
			Capacity:      rapid.SampledFrom([]int{1, 10, 1000}).Draw(rt, "capacity"),
			Overflow:      overflow,
			WriteThrough:  overflow > 0 && rapid.Bool().Draw(rt, "through"),
			MaxInFlight:   time.Minute,
			MaxBackdating: tr.late,
			Rand:          rng,
		})
		tr.top.log.SetTight(overflow > 0 && rapid.IntRange(0, 3).Draw(rt, "tight") == 3)
		tr.top.Limit(OverLimit{Reject: rapid.Bool().Draw(rt, "reject"), MaxDelay: between(0, 100*time.Millisecond)})
		tr.now = mono.Time(rng.Int64N(1e18))
		tr.most = share()
		tr.step(func() {
			tr.top.SetShare(tr.now, tr.most, tokenbucket.Tokens(tr.most.Burst)*tokenbucket.Token, &tr.fx)
		})
		stalled := tr.now // since when the owner did nothing
		steps := map[string]func(){
			"run": func() {
				tr.onTime(tr.now.Add(between(0, 30*time.Millisecond)))
				stalled = tr.now
			},
			"tick": func() { tr.step(func() { tr.top.Tick(tr.now, &tr.fx) }) },
			"stall": func() {
				stalled = tr.now
				tr.now = tr.now.Add(time.Duration([]int{1, 10, 100, 249, 251, 400, 3000}[rng.IntN(7)]) * time.Millisecond)
			},
			"publish": func() {
				from := min(stalled, tr.now.Add(-between(0, 2*time.Millisecond))) // when the first arrived
				for range 1 + rng.IntN(60) {
					tr.n++
					m := message(tr.n, tr.now.Add(-between(0, tr.now.Sub(from))))
					tr.step(func() {
						if !tr.top.log.cfg.WriteThrough && tr.top.Put(tr.now, &tr.fx, m) == nil {
							return
						}
						if tr.top.log.cfg.WriteThrough && tr.top.Admit(tr.now, 0, 1, m.Arrival, m.Arrival) == nil {
							tr.top.Disk().Appended(tr.now, tr.disk.append(tr.top.log.End(), m), &tr.fx, m)
						}
						tr.top.Tick(tr.now, &tr.fx) // no release follows from these steps
					})
				}
			},
			"pause":   func() { tr.step(func() { tr.top.Pause() }) },
			"unpause": func() { tr.step(func() { tr.top.Unpause(tr.now, &tr.fx) }) },
			"channel": func() {
				if i := rng.IntN(len(tr.names)); tr.top.Channel(tr.names[i]) == nil {
					tr.step(func() {
						tr.top.CreateChannel(tr.now, tr.names[i], &tr.fx).consumers.Add(ConsumerID(i), time.Minute, 0, Near)
					})
				}
			},
			"no channel": func() {
				for len(tr.top.cursors.channels) > 0 {
					tr.step(func() { _ = tr.top.DeleteChannel(tr.now, tr.top.cursors.channels[0].cursor.name, &tr.fx) })
				}
			},
			"drain": func() {
				for _, c := range slices.Clone(tr.top.cursors.channels) {
					if rng.IntN(2) == 0 {
						tr.step(func() { tr.top.EmptyChannel(tr.now, c, &tr.fx) })
						continue
					}
					id := ConsumerID(slices.Index(tr.names, c.cursor.name))
					tr.step(func() { _ = tr.top.SetReady(tr.now, c, id, rng.IntN(100), &tr.fx) })
					var batch []MessageID
					for _, it := range c.items.due {
						batch = append(batch, it.msg.ID)
					}
					tr.step(func() { tr.top.FinishBatch(tr.now, c, id, batch, &tr.fx, nil) })
				}
			},
			"disk": func() {
				tr.step(func() {
					tr.disk.write(tr.top, tr.now, rng.IntN(100), rng.IntN(4) > 0, &tr.fx)
					tr.top.Tick(tr.now, &tr.fx) // the owner's own tick, if no step came
				})
				tr.step(func() { tr.disk.read(tr.top, tr.now, &tr.fx) })
			},
			"share": func() {
				s := share()
				tr.most.Rate, tr.most.Burst = max(tr.most.Rate, s.Rate), max(tr.most.Burst, s.Burst)
				l := Lease{Base: tokenbucket.Share{Rate: 1000, Burst: 1}, FlexUntil: tr.now.Add(between(0, time.Second)), Until: mono.Never}
				if rng.IntN(2) == 0 {
					l.Until = tr.now.Add(between(0, time.Second))
				}
				tr.step(func() { tr.top.SetLeased(tr.now, s, l, 0, &tr.fx) })
			},
		}
		mix := []string{
			"run", "run", "tick", "stall", "publish", "publish", "publish", "drain", "drain", "drain", "disk", "disk", "disk", "disk",
			"pause", "unpause", "unpause", "unpause", "channel", "channel", "no channel", "share",
		}
		steps["channel"]()
		for range 100 {
			steps[mix[rng.IntN(len(mix))]]()
		}
		if err := within(tr.eligible, tr.most, 0); err != nil {
			rt.Fatalf("eligible: %v", err)
		}
		if err := within(tr.released, tr.most, tr.late); err != nil {
			rt.Fatalf("released: %v", err)
		}
		messages += len(tr.released)
		if within(tr.released, tr.most, 0) != nil {
			late++
		}
	})
	t.Logf("%d messages, %d runs that needed backdating", messages, late)
	if late == 0 {
		t.Error("no run needed backdating")
	}
}
