package queue

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
)

// The nearest consumer with credit has its turn. It does not have another turn before every consumer that was as near
// and had credit all the time has had a turn.
func TestTheNearestTakeTurns(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cs, q := Consumers{byID: map[ConsumerID]*consumer{}}, items{}
		turn, credit := map[*consumer]int{}, map[*consumer]int{} // the step of each consumer's last turn, and the step since which the consumer has credit
		end := func(it *item) {
			q.due.remove(it)
			q.inFlight--
			w := it.holder
			w.release(it)
			cs.list(w)
			q.recycle(it)
		}
		one := func() *consumer {
			ids := cs.IDs()
			if len(ids) == 0 {
				return nil
			}
			return cs.byID[rapid.SampledFrom(ids).Draw(rt, "consumer")]
		}
		for i := range rapid.IntRange(1, 300).Draw(rt, "steps") {
			step := rapid.IntRange(0, 9).Draw(rt, "step")
			switch w := one(); {
			case step == 0 || w == nil:
				cs.Add(ConsumerID(i), time.Second, 0, Distance(rapid.IntRange(0, Distances-1).Draw(rt, "distance")))
			case step == 1:
				for _, it := range cs.take(w.id) {
					end(it)
				}
			case step <= 3:
				_ = cs.setReady(w.id, rapid.IntRange(0, 3).Draw(rt, "ready"))
			case step == 4:
				cs.resume(w.id)
			case step == 5 && w.held != nil:
				w.held.sent = rapid.Bool().Draw(rt, "handed")
				end(w.held)
			case step == 6:
				if cs.hasCredit() != slices.ContainsFunc(cs.IDs(), func(id ConsumerID) bool { return cs.byID[id].credit() }) {
					rt.Fatal("whether one has credit is not what it is")
				}
			default:
				got := cs.nearest()
				for id, w := range cs.byID {
					if !w.credit() {
						continue
					}
					if got == nil || w.distance < got.distance {
						rt.Fatalf("not consumer %d, which has credit", id)
					}
					if last, ok := turn[got]; ok && w.distance == got.distance && w != got && credit[w] <= last && turn[w] < last {
						rt.Fatalf("consumer %d has its turn twice, and %d had none", got.id, id)
					}
				}
				if got == nil {
					break
				}
				if !got.credit() {
					rt.Fatalf("consumer %d has no credit", got.id)
				}
				turn[got] = i + 1
				q.deliver(0, q.make(message(i, 0)), got)
				cs.list(got)
			}
			held, err := q.check()
			if err == nil {
				err = cs.check(held)
			}
			if err != nil {
				rt.Fatal(err)
			}
			for _, w := range cs.byID {
				if !w.credit() {
					delete(credit, w)
				} else if _, had := credit[w]; !had {
					credit[w] = i + 1
				}
			}
		}
	})
}

// The rings forget removed consumers, whichever consumers leave last.
func TestRemovedConsumersAreForgotten(t *testing.T) {
	for _, last := range []struct {
		name     string
		distance Distance
		ready    int
	}{{"not listed", Near, 0}, {"far", Far, 1}} {
		cs := Consumers{byID: map[ConsumerID]*consumer{}}
		for id := range ConsumerID(20) {
			distance, ready := Near, 1
			if id >= 10 {
				distance, ready = last.distance, last.ready
			}
			cs.Add(id, time.Second, 0, distance)
			_ = cs.setReady(id, ready)
		}
		for id := range ConsumerID(20) {
			cs.take(id)
			if err := cs.check(nil); err != nil {
				t.Fatalf("%s, after consumer %d: %v", last.name, id, err)
			}
		}
		for d := range cs.credited {
			if n := cs.credited[d].Len(); n != 0 {
				t.Errorf("%s: %d are listed at distance %d, and no consumer is left", last.name, n, d)
			}
		}
	}
}

// Due messages come in the order of their times, and at the same time in the order of delivery.
func TestWhatIsDueComesInOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var q items
		w := &consumer{id: 1}
		var last mono.Time
		for n := range rapid.IntRange(1, 50).Draw(rt, "items") {
			now := mono.Time(rapid.IntRange(0, 5).Draw(rt, "now")) * mono.Time(time.Millisecond)
			last = max(last, now)
			it := q.make(message(n, 0))
			if rapid.Bool().Draw(rt, "deferred") {
				it.due = now.Add(time.Millisecond)
				q.place(now, it)
			} else {
				w.timeout = time.Duration(rapid.IntRange(0, 5).Draw(rt, "timeout")) * time.Millisecond
				q.deliver(now, it, w)
			}
		}
		all := len(q.due)
		for at := mono.Time(0); at <= last.Add(6*time.Millisecond); at = at.Add(time.Millisecond) {
			again := q.takeDue(at)
			all -= len(again)
			for i, it := range again {
				if it.due > at || it.place != -1 || i > 0 && (it.due < again[i-1].due || it.due == again[i-1].due && it.delivery < again[i-1].delivery) {
					rt.Fatalf("%d is taken at %d, due at %d, as number %d", number(it.msg), at, it.due, i)
				}
			}
		}
		if all != 0 || q.deadline() != mono.Never {
			rt.Fatalf("%d are left, the next due at %d", all, q.deadline())
		}
	})
}
