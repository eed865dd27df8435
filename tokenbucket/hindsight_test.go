package tokenbucket_test

import (
	"cmp"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// happening is a taken message, or a retune.
type happening struct {
	at      mono.Time
	retune  bool
	share   tokenbucket.Share  // share of a retune
	granted tokenbucket.Tokens // tokens granted by the retune
	cut     *big.Rat           // tokens that did not fit: released, or lost by rounding
}

// account is an obvious bucket in exact fractions. It starts without a share.
type account struct {
	rate, room, held *big.Rat
	at               mono.Time
}

func newAccount() *account {
	return &account{rate: new(big.Rat), room: new(big.Rat), held: new(big.Rat)}
}

func (a *account) advance(to mono.Time) {
	a.held = add(a.held, mul(a.rate, sub(rat(int64(to)), rat(int64(a.at)))))
	if a.room.Cmp(a.held) < 0 {
		a.held = a.room
	}
	a.at = to
}

// pay reports whether the account can pay for h.
func (a *account) pay(h happening) bool {
	a.advance(h.at)
	if !h.retune {
		a.held = sub(a.held, rat(1))
		return a.held.Sign() >= 0
	}
	a.rate, a.room = perNano(h.share.Rate), rat(h.share.Burst)
	a.held = sub(add(a.held, big.NewRat(int64(h.granted), 1000)), h.cut)
	return h.cut.Sign() == 0 || a.held.Sign() >= 0
}

// replay runs an account over hs in the order of time. It returns the index of the first happening that the account
// cannot pay for, or -1.
func replay(hs []happening) int {
	a := newAccount()
	for i, h := range hs {
		if !a.pay(h) {
			return i
		}
	}
	return -1
}

// slow follows the definition of Hindsight: it tries every time that may be the first.
type slow struct {
	happened []happening // by time
	latest   mono.Time
}

func (s *slow) with(e mono.Time) []happening {
	i := len(s.happened)
	for i > 0 && e.Before(s.happened[i-1].at) {
		i--
	}
	return slices.Insert(slices.Clone(s.happened), i, happening{at: e})
}

func (s *slow) eligible(at mono.Time) mono.Time {
	at = max(at, s.happened[0].at)
	for at != mono.Never && replay(s.with(at)) >= 0 {
		at = s.step(at)
	}
	return at
}

// step returns the next time after at that is worth trying: the time of the next token, counted from each happening, or
// the time of the next happening.
func (s *slow) step(at mono.Time) mono.Time {
	best := mono.Never
	for _, h := range s.happened {
		if at.Before(h.at) {
			best = min(best, h.at)
		}
	}
	a := newAccount()
	for _, h := range s.happened {
		if at.Before(h.at) {
			break
		}
		a.pay(h)
	}
	if a.rate.Sign() > 0 {
		if full := exact(add(rat(int64(a.at)), quo(sub(rat(1), a.held), a.rate))); at.Before(full) {
			best = min(best, full)
		}
	}
	return best
}

// drawSmall draws shares whose tokens take from a nanosecond to a second.
func drawSmall(t *rapid.T) tokenbucket.Share {
	return tokenbucket.Share{
		Rate:  tokenbucket.Rate(scaled(1000, 1e12).Draw(t, "rate")),
		Burst: rapid.Int64Range(1, 6).Draw(t, "burst"),
	}
}

// world is a Hindsight under test, with all its happenings.
type world struct {
	h   tokenbucket.Hindsight
	s   slow
	now mono.Time
}

func newWorld(t *rapid.T) *world {
	w := &world{now: mono.Time(rapid.Int64Range(-1e6, 1e6).Draw(t, "start"))}
	share := drawSmall(t)
	w.retune(t, share, tokenbucket.Tokens(rapid.Int64Range(0, share.Burst).Draw(t, "initial"))*tokenbucket.Token)
	return w
}

func (w *world) retune(t *rapid.T, share tokenbucket.Share, granted tokenbucket.Tokens) {
	at := w.now
	if len(w.s.happened) > 0 {
		at = max(at, w.s.latest)
	}
	before := w.h.Share()
	released := w.h.Retune(w.now, share, granted)
	if before == share && granted == released {
		return // the same share again changes nothing, not even the remembered retunes
	}
	a := newAccount()
	for _, h := range w.s.happened {
		a.pay(h)
	}
	a.advance(at)
	cut := most(new(big.Rat), sub(add(a.held, big.NewRat(int64(granted), 1000)), rat(share.Burst)))
	if down := new(big.Int).Quo(mul(cut, rat(1000)).Num(), mul(cut, rat(1000)).Denom()); !down.IsInt64() || down.Int64() != int64(released) {
		t.Fatalf("%v to %v, granted %d: released %d, want %v", before, share, granted, released, down)
	}
	w.s.happened = append(w.s.happened, happening{at: at, retune: true, share: share, granted: granted, cut: cut})
	w.s.latest = at
}

// take lets a message of time at through as soon as possible.
func (w *world) take(t *rapid.T, at mono.Time) mono.Time {
	want := w.h.Eligible(at)
	if want < at {
		t.Fatalf("a message of %d is eligible at %d", at, want)
	}
	if want == mono.Never {
		return want
	}
	if e, ok := w.h.Take(at, want-1); ok || e != want {
		t.Fatalf("Eligible(%d) said %d, Take at %d says %d, %v", at, want, want-1, e, ok)
	}
	w.now = max(w.now, want)
	e, ok := w.h.Take(at, w.now)
	if !ok || e != want {
		t.Fatalf("Eligible(%d) said %d, Take at %d says %d, %v", at, want, w.now, e, ok)
	}
	w.s.happened = w.s.with(e)
	w.s.latest = max(w.s.latest, e)
	return e
}

// drawLate draws a stamp: now, or some tokens' time ago.
func (w *world) drawLate(t *rapid.T) mono.Time {
	r := max(w.h.Share().Rate, 1000)
	w.now += mono.Time(min(gap(t, r), 2e9))
	if rapid.IntRange(0, 2).Draw(t, "in order") == 0 {
		return w.now
	}
	return w.now - mono.Time(min(gap(t, r)*3, 2e9))
}

func (w *world) drawRetune(t *rapid.T) {
	share := w.h.Share()
	switch rapid.IntRange(0, 5).Draw(t, "share") {
	case 0:
		share = tokenbucket.Share{}
	case 1: // the same time
	default:
		share = drawSmall(t)
	}
	var granted tokenbucket.Tokens
	if rapid.Bool().Draw(t, "with a grant") {
		granted = tokenbucket.Tokens(rapid.Int64Range(0, 4000).Draw(t, "granted"))
	}
	w.retune(t, share, granted)
}

// The guarantee of Hindsight: for any stamps, judged in any order, the eligible times in order of time never overdraw a
// bucket that earns, is full, and is retuned at the given times.
func hindsightHolds(t *rapid.T) {
	w := newWorld(t)
	retunes := rapid.Bool().Draw(t, "retunes")
	var done []string
	for range rapid.IntRange(2, 60).Draw(t, "steps") {
		if retunes && rapid.IntRange(0, 5).Draw(t, "step") == 0 {
			w.drawRetune(t)
			done = append(done, fmt.Sprintf("retune at %d", w.s.latest))
			continue
		}
		at := w.drawLate(t)
		e := w.take(t, at)
		done = append(done, fmt.Sprintf("%d at %d", at, e))
		if bad := replay(w.s.happened); bad >= 0 {
			t.Fatalf("%v\nafter %v the bucket cannot pay for number %d", w.s.happened, done, bad)
		}
	}
	// The guarantee for every pair of messages under one share.
	if retunes {
		return
	}
	es := w.s.happened[1:]
	for i := range es {
		for j := i; j < len(es); j++ {
			used := big.NewInt(int64(j - i + 1))
			allowed := add(rat(w.h.Share().Burst), mul(perNano(w.h.Share().Rate), rat(int64(es[j].at)-int64(es[i].at))))
			if new(big.Rat).SetInt(used).Cmp(allowed) > 0 {
				t.Fatalf("%d messages from %d to %d under %v", used, es[i].at, es[j].at, w.h.Share())
			}
		}
	}
}

func TestHindsightHolds(t *testing.T) { rapid.Check(t, hindsightHolds) }

func FuzzHindsight(f *testing.F) {
	seeds := rand.NewChaCha8([32]byte{'l', 'a', 't', 'e'})
	for range 16 {
		seed := make([]byte, 8192)
		testkit.Result(seeds.Read(seed)).Must(f)
		f.Add(seed)
	}
	f.Fuzz(rapid.MakeFuzz(hindsightHolds))
}

// Eligible returns the first time that the guarantee permits.
func TestHindsightIsTheFirstTimePossible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		retunes := rapid.IntRange(0, 4).Draw(t, "retunes") // the number of remembered retunes
		for range rapid.IntRange(2, 25).Draw(t, "steps") {
			if retunes > 0 && rapid.IntRange(0, 3).Draw(t, "step") == 0 {
				retunes--
				w.drawRetune(t)
				continue
			}
			if w.s.latest.Sub(w.s.happened[0].at) > tokenbucket.Horizon {
				return
			}
			at := w.drawLate(t)
			want := mono.Never
			if !w.h.Share().IsZero() || at < w.s.latest {
				want = w.s.eligible(at)
			}
			testkit.MustEqual(t, w.h.Eligible(at), want, "after %v a message of %d is eligible at", w.s.happened, at)
			w.take(t, at)
		}
	})
}

// For messages in order, Hindsight behaves like Bucket.
func TestInOrderHindsightIsTheBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := mono.Time(rapid.Int64Range(-1e15, 1e15).Draw(t, "start"))
		var b tokenbucket.Bucket
		var h tokenbucket.Hindsight
		retune := func(s tokenbucket.Share, granted tokenbucket.Tokens) {
			testkit.MustEqual(t, h.Retune(now, s, granted), b.Retune(now, s, granted), "released")
		}
		first := drawShare(t)
		retune(first, tokenbucket.Tokens(rapid.Int64Range(0, first.Burst).Draw(t, "initial"))*tokenbucket.Token)
		at := now
		for range rapid.IntRange(1, 60).Draw(t, "messages") {
			at = max(at, now) + mono.Time(min(gap(t, max(b.Share().Rate, 1)), 1e15))
			for {
				want := b.Eligible(at)
				testkit.MustEqual(t, h.Eligible(at), want, "a message of %d is eligible at", at)
				// While the message waits, the share may change.
				if want == mono.Never || rapid.IntRange(0, 4).Draw(t, "retune") == 0 {
					now = max(now, at)
					if want != mono.Never && now < want {
						now += mono.Time(rapid.Int64Range(0, int64(want-now)-1).Draw(t, "meanwhile"))
					} else if want != mono.Never {
						b.Take(at)
						if e, ok := h.Take(at, now); !ok || e != want {
							t.Fatalf("taken at %d, %v, want %d", e, ok, want)
						}
						break
					}
					retune(drawShare(t), tokenbucket.Tokens(scaled(1, 1e13).Draw(t, "granted")))
					continue
				}
				now = max(now, want)
				b.Take(at)
				if e, ok := h.Take(at, now); !ok || e != want {
					t.Fatalf("taken at %d, %v, want %d", e, ok, want)
				}
				break
			}
			testkit.MustEqual(t, h.Tokens(now), b.Tokens(now), "holds")
		}
	})
}

// Hindsight does not delay a publisher that keeps the contract, in any order in which the messages of all publishers are
// read.
func TestAConformingStreamIsNotDelayedInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := tokenbucket.Share{Rate: tokenbucket.Rate(scaled(1e6, 1e9).Draw(t, "rate")), Burst: rapid.Int64Range(1, 40).Draw(t, "burst")}
		if rapid.Bool().Draw(t, "large") {
			s.Burst = rapid.Int64Range(256, 5000).Draw(t, "burst")
		}
		step := int64(1e12 / s.Rate)
		kept := s
		if s.Burst >= 256 {
			kept.Burst -= 2 * (s.Burst/256 + 1)
		}
		shaper := tokenbucket.NewFull(kept, 0)
		var h tokenbucket.Hindsight
		h.Retune(0, s, tokenbucket.Tokens(s.Burst)*tokenbucket.Token)
		type message struct{ at, read int64 }
		var ms []message
		var now int64
		late := min(rapid.Int64Range(0, 200*step).Draw(t, "lateness"), int64(tokenbucket.Horizon))
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		load := rapid.Float64Range(0.5, 1.2).Draw(t, "load")
		together := int(1 + s.Burst/500)
		for i := range 400 * together {
			if i%together == 0 {
				now += int64(rng.ExpFloat64() * float64(step) / load * float64(together))
			}
			at := int64(shaper.Take(mono.Time(now)))
			ms = append(ms, message{at, at + rng.Int64N(late+1)})
		}
		slices.SortStableFunc(ms, func(a, b message) int { return cmp.Compare(a.read, b.read) })
		for i, m := range ms {
			if e, ok := h.Take(mono.Time(m.at), mono.Time(m.read)); !ok || e != mono.Time(m.at) {
				t.Fatalf("message %d of %d, read at %d, waits until %d under %v", i, m.at, m.read, e, s)
			}
		}
	})
}

// Many more messages than remembered, over the end of the horizon.
func TestHindsightForgetsAndStillHolds(t *testing.T) {
	for _, s := range []tokenbucket.Share{
		{Rate: tokenbucket.PerSecond(100_000), Burst: 50},  // 8192 messages before the horizon
		{Rate: tokenbucket.PerSecond(1000), Burst: 7},      // the horizon before
		{Rate: tokenbucket.PerSecond(100_000), Burst: 600}, // points that hold several messages
		{Rate: tokenbucket.PerSecond(10e6), Burst: 5000},
	} {
		rng := rand.New(rand.NewPCG(3, 4))
		var h tokenbucket.Hindsight
		h.Retune(0, s, 0)
		step := 1e9 / s.Rate.PerSecond()
		var es []mono.Time
		waited := 0
		now := 0.0
		for i := range 60_000 {
			if together := int(s.Burst); i%(1+together/2) == 0 { // bursts that use up the bucket
				now += rng.ExpFloat64() * step / 0.95 * float64(1+together/2)
			}
			late := 3e9
			if s.Burst >= 256 && i%3 > 0 {
				late = 20 * float64(s.Burst) * step
			}
			at := mono.Time(now - rng.Float64()*late)
			if i%50 == 0 {
				at = mono.Time(now)
			}
			e, ok := h.Take(at, mono.Never-1)
			if !ok || e < at {
				t.Fatalf("%d, %v", e, ok)
			}
			if e > at {
				waited++
			}
			es = append(es, e)
		}
		slices.Sort(es)
		if waited == 0 {
			t.Error("nothing was older than the horizon")
		}
		if _, err := testkit.Envelope(es, int64(s.Rate), s.Burst); err != nil {
			t.Fatalf("%v: %v", s, err)
		}
	}
}

func TestHindsightAllocatesNothing(t *testing.T) {
	var h tokenbucket.Hindsight
	h.Retune(0, tokenbucket.Share{Rate: tokenbucket.PerSecond(10_000), Burst: 5}, 0)
	at := mono.Time(0)
	for range 3 { // the number of remembered messages
		for range 10_000 {
			at += 110_000
			h.Take(at, at)
		}
	}
	testkit.Equal(t, testing.AllocsPerRun(2000, func() {
		at += 220_000
		h.Eligible(at)
		h.Take(at, at)
		h.Eligible(at - 50_000_000)
		h.Take(at-50_000_000, at)
	}), 0, "allocations per two messages")
}

// BenchmarkHindsight measures a message's cost by its lateness. load is the messages' rate in tokens. If load is over 1,
// each message is judged twice, like the head of a waiting queue.
func BenchmarkHindsight(b *testing.B) {
	for _, load := range []float64{0.9, 1.1} {
		for _, late := range []float64{0, 100e3, 10e6, 100e6} {
			b.Run(fmt.Sprintf("load=%v/late=%gms", load, late/1e6), func(b *testing.B) {
				const rate = 10_000
				rng := rand.New(rand.NewPCG(1, 2))
				type message struct{ at, read mono.Time }
				ms := make([]message, 1<<16)
				now := 0.0
				for i := range ms {
					now += rng.ExpFloat64() * 1e9 / rate / load
					ms[i] = message{mono.Time(now), mono.Time(now + rng.Float64()*late)}
				}
				slices.SortFunc(ms, func(a, b message) int { return cmp.Compare(a.read, b.read) })
				span := mono.Time(now + late)
				var h tokenbucket.Hindsight
				h.Retune(0, tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: 50}, 0)
				b.ReportAllocs()
				i, round := 0, mono.Time(0)
				for b.Loop() {
					at := ms[i].at + round
					sink = h.Eligible(at)
					sink, _ = h.Take(at, mono.Never-1)
					if i++; i == len(ms) {
						i, round = 0, max(round+span, sink)
					}
				}
			})
		}
	}
}
