package lease_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/lease"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// question is a datagram on its way, which an owner of the generation may get, now, later,
// twice or never.
type question struct {
	generation, holder, number int
	held                       wire.Held
	offered                    uint32
}

type answer struct {
	holder, number int
	grant          wire.Grant
}

// node is a holder with a clock of its own. It waits for one answer at a time.
type node struct {
	part   *lease.Part
	id     uint64
	ahead  time.Duration
	number int // of the question it waits for the answer of
	asked  mono.Time
}

// world is a key's owners, one after the other, and its holders.
type world struct {
	now        mono.Time
	contract   tokenbucket.Share
	leased     bool
	quiet      mono.Time
	generation int
	key        *lease.Key         // nil: not divided
	bucket     tokenbucket.Bucket // the owner's, then
	nodes      []*node
	ids        uint64
	questions  []question
	answers    []answer
	// referee is full at the beginning, and has to have what any of them admits.
	referee tokenbucket.Bucket
}

func newWorld(contract tokenbucket.Share, nodes int) *world {
	w := &world{now: mono.Time(time.Hour), contract: contract, leased: true}
	w.bucket, w.referee = tokenbucket.NewFull(contract, w.now), tokenbucket.NewFull(contract, w.now)
	for range nodes {
		w.nodes = append(w.nodes, &node{})
		w.reborn(len(w.nodes)-1, 0)
	}
	return w
}

// reborn has a new process in a holder's place.
func (w *world) reborn(i int, ahead time.Duration) {
	w.ids++
	*w.nodes[i] = node{part: lease.NewPart("key", w.ids), id: w.ids, ahead: ahead, number: w.nodes[i].number + 1}
}

func (w *world) share() tokenbucket.Share {
	if !w.leased || w.now.Before(w.quiet) {
		return tokenbucket.Share{}
	}
	return w.contract
}

// restart has an owner that knows nothing of what the one before granted.
func (w *world) restart() {
	w.generation++
	w.key, w.quiet = nil, w.now.Add(lease.Quiet)
	w.bucket = tokenbucket.New(w.contract, w.quiet)
}

func (w *world) ask(i int) {
	n := w.nodes[i]
	n.number++
	n.asked = w.now.Add(n.ahead)
	held, offered := n.part.Ask(n.asked)
	w.questions = append(w.questions, question{w.generation, i, n.number, held, offered})
}

func (w *world) hear(q question) {
	if q.generation != w.generation || !w.leased {
		return
	}
	if w.key == nil {
		tokens := w.bucket.Retune(w.now, tokenbucket.Share{}, 0)
		w.bucket.Retune(w.now, w.contract, 0)
		w.key = lease.New(w.now, uint64(w.now), "key", w.share(), tokens)
	}
	if g, ok := w.key.Renew(w.now, q.held, q.offered); ok {
		w.answers = append(w.answers, answer{q.holder, q.number, g})
	}
}

func (w *world) take(a answer) {
	n := w.nodes[a.holder]
	if n.number != a.number {
		return
	}
	n.number++
	if n.part.Take(n.asked, w.now.Add(n.ahead), a.grant, lease.Length) {
		w.ask(a.holder)
	}
}

func (w *world) step() {
	if w.key == nil {
		return
	}
	if tokens, whole := w.key.Step(w.now, w.share()); whole {
		w.key = nil
		w.bucket.Retune(w.now, tokenbucket.Share{}, 0)
		w.bucket.Retune(w.now, w.contract, tokens)
	}
}

// admit asks holder i, or the owner where there is no such.
func (w *world) admit(i int, n int64) (ok bool, err error) {
	switch {
	case i < len(w.nodes):
		ok, _, _ = w.nodes[i].part.Admit(n, w.now.Add(w.nodes[i].ahead))
	case w.key != nil:
		ok, _, _ = w.key.Admit(n, w.now, false)
	default:
		ok, _ = w.bucket.Admit(n, w.now)
	}
	if !ok {
		return false, nil
	}
	if good, _ := w.referee.Admit(n, w.now); !good {
		return true, fmt.Errorf("%d admitted %d at %v, above %+v: there were %d thousandths", i, n, time.Duration(w.now)-time.Hour, w.contract, w.referee.Tokens(w.now))
	}
	return true, nil
}

// Whatever is lost, late, twice or out of order, whichever process dies or is cut off, and while the
// owner changes: all together admit no more than one bucket of the rule would.
func TestTheRuleHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate, burst := rapid.Int64Range(1, 50).Draw(t, "rate"), rapid.Int64Range(1, 30).Draw(t, "capacity")
		w := newWorld(tokenbucket.Share{Rate: tokenbucket.Rate(rate * 1000), Burst: burst}, rapid.IntRange(1, 4).Draw(t, "holders"))
		pick := func(n int, of string) int { return rapid.IntRange(0, n-1).Draw(t, of) }
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			switch kind := pick(22, "kind"); kind {
			case 0, 1, 2:
				w.now = w.now.Add(time.Duration(rapid.IntRange(0, 600).Draw(t, "ms")) * time.Millisecond)
				w.step()
			case 3, 4, 5, 6:
				w.ask(pick(len(w.nodes), "who asks"))
			case 7, 8, 9, 10, 11:
				if len(w.questions) > 0 {
					i := len(w.questions) - 1 - pick(min(3, len(w.questions)), "question")
					w.hear(w.questions[i]) // and perhaps again
				}
			case 12, 13, 14, 15, 16:
				if len(w.answers) > 0 {
					w.take(w.answers[len(w.answers)-1-pick(min(3, len(w.answers)), "answer")])
				}
			case 17:
				w.reborn(pick(len(w.nodes), "who dies"), time.Duration(pick(1000, "clock"))*time.Second)
			case 18:
				if pick(4, "restart") == 0 {
					w.restart()
				}
			case 19:
				if pick(4, "edit") == 0 {
					w.leased = !w.leased
					w.step()
				}
			default:
				n := rapid.Int64Range(1, 3).Draw(t, "cost")
				for i := range w.nodes {
					w.drain(t, i, n)
				}
				w.drain(t, len(w.nodes), n)
			}
		}
	})
}

func (w *world) drain(t interface{ Fatal(...any) }, i int, n int64) {
	for {
		if ok, err := w.admit(i, n); err != nil {
			t.Fatal(err)
		} else if !ok {
			return
		}
	}
}

// run passes time with each node asking on and on, and returns who admitted how much.
func (w *world) run(t *testing.T, d time.Duration, demand ...int64) (admitted []int64) {
	t.Helper()
	admitted = make([]int64, len(demand))
	for range d / (100 * time.Millisecond) {
		w.now = w.now.Add(100 * time.Millisecond)
		w.step()
		for i := range w.nodes {
			if i < len(demand) && demand[i] > 0 {
				for again := true; again; {
					w.ask(i)
					asked := w.nodes[i].number
					w.hear(w.questions[len(w.questions)-1])
					if len(w.answers) > 0 && w.answers[len(w.answers)-1].number == asked && w.answers[len(w.answers)-1].holder == i {
						n := w.nodes[i]
						n.number++
						again = n.part.Take(n.asked, w.now.Add(n.ahead), w.answers[len(w.answers)-1].grant, lease.Length)
					} else {
						again = false
					}
				}
			}
		}
		w.questions, w.answers = w.questions[:0], w.answers[:0]
		for i, n := range demand {
			for range n {
				ok := testkit.Result(w.admit(i, 1)).Must(t)
				if ok {
					admitted[i]++
				}
			}
		}
	}
	return admitted
}

// Shares go where they are wanted, and the whole to the owner when no holder wants any.
func TestSharesFollowDemand(t *testing.T) {
	w := newWorld(tokenbucket.Share{Rate: 1_000_000, Burst: 300}, 2)
	w.run(t, 20*time.Second, 50, 50, 0)
	got := w.run(t, 10*time.Second, 90, 20, 0) // of 1000/s, 900 and 200 wanted
	if sum := got[0] + got[1]; sum < 9000 || got[0] < 6500 || got[1] < 1400 {
		t.Errorf("admitted %v", got)
	}
	w.run(t, 5*time.Second)
	if w.key != nil {
		t.Error("still divided, though no holder asks")
	}
	if got := w.run(t, 10*time.Second, 0, 0, 100); got[2] < 9900 {
		t.Errorf("the owner alone admitted %v", got)
	}
}

// A holder goes on while the owner is restarted, with what it held before and after.
func TestAHolderOutlivesItsOwner(t *testing.T) {
	w := newWorld(tokenbucket.Share{Rate: 1_000_000, Burst: 300}, 1)
	w.run(t, 20*time.Second, 80, 0)
	w.restart()
	got := w.run(t, 2*time.Second, 80, 0)
	if got[0] < 1500 {
		t.Errorf("admitted %v in the 2 s after a restart", got)
	}
	if got := w.run(t, 10*time.Second, 80, 0); got[0] < 6000 { // halves, until it is seen who wants how much
		t.Errorf("admitted %v then", got)
	}
}

// What a holder has ends where its owner is gone, and goes to others where it is.
func TestALeaseEnds(t *testing.T) {
	w := newWorld(tokenbucket.Share{Rate: 1_000_000, Burst: 300}, 2)
	w.run(t, 5*time.Second, 50, 50, 0)
	w.nodes[0].ahead += lease.Length
	if ok, held, _ := w.nodes[0].part.Admit(1, w.now.Add(w.nodes[0].ahead)); ok || held {
		t.Error("it holds something after its lease")
	}
	if got := w.run(t, 15*time.Second, 0, 110, 0); got[1] < 13_000 {
		t.Errorf("the other admitted %v", got)
	}
}

func TestWhoCannotHold(t *testing.T) {
	k := lease.New(1, 1, "key", tokenbucket.Share{Rate: 1000, Burst: 5}, 0)
	for _, h := range []wire.Held{{}, {Holder: 1, Epoch: 1 << 62}, {Holder: 1, Epoch: 1, Share: tokenbucket.Share{Rate: -1}}} {
		if g, ok := k.Renew(1, h, 0); ok {
			t.Errorf("%+v was granted %+v", h, g)
		}
	}
	for i := range uint64(300) {
		if _, ok := k.Renew(1, wire.Held{Holder: i + 1}, 0); ok != (i < 256) {
			t.Errorf("holder %d: %v", i, ok)
		}
	}
}

// A peer may say anything: nothing breaks, and an honest holder gets its part in the end.
func TestWhateverHoldersSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		contract := tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 1e12).Draw(t, "rate")), Burst: rapid.Int64Range(1, 1e9).Draw(t, "capacity")}
		now := mono.Time(time.Hour)
		k := lease.New(now, uint64(now), "key", contract, 0)
		small := rapid.Int64Range(-2, 40)
		number := rapid.OneOf(small, rapid.Int64(), rapid.Just(int64(contract.Rate)), rapid.Just(contract.Burst))
		epochs := []uint64{0, 1, uint64(now), 1 << 61, 1<<64 - 1}
		for range rapid.IntRange(1, 60).Draw(t, "questions") {
			h := wire.Held{
				Holder: rapid.Uint64Range(0, 4).Draw(t, "holder"), Epoch: rapid.SampledFrom(epochs).Draw(t, "epoch"),
				Share:    tokenbucket.Share{Rate: tokenbucket.Rate(number.Draw(t, "held rate")), Burst: number.Draw(t, "held burst")},
				Released: tokenbucket.Tokens(number.Draw(t, "released")),
			}
			if g, ok := k.Renew(now, h, rapid.Uint32().Draw(t, "offered")); ok {
				epochs = append(epochs, g.Epoch)
			}
			k.Admit(small.Draw(t, "cost")+2, now, false)
			now = now.Add(time.Duration(rapid.IntRange(0, 900).Draw(t, "ms")) * time.Millisecond)
			k.Step(now, []tokenbucket.Share{contract, {}}[rapid.IntRange(0, 5).Draw(t, "none")/5])
		}
		now = now.Add(time.Minute)
		k.Step(now, contract)
		now = now.Add(time.Minute)
		if _, whole := k.Step(now, contract); !whole {
			k.Step(now, contract)
			if _, whole := k.Step(now, contract); !whole {
				t.Fatal("it is not whole again when no holder asks")
			}
		}
	})
}

// What a look at a key costs that ten hold.
func BenchmarkStep(b *testing.B) {
	contract := tokenbucket.Share{Rate: 1_000_000, Burst: 1000}
	now := mono.Time(time.Hour)
	k := lease.New(now, 1, "key", contract, 0)
	held := make([]wire.Held, 10)
	for b.Loop() {
		now = now.Add(200 * time.Millisecond)
		for i := range held {
			held[i].Holder = uint64(i + 1)
			g, _ := k.Renew(now, held[i], 20)
			held[i].Epoch, held[i].Share = g.Epoch, g.Share
		}
		k.Step(now, contract)
	}
}
