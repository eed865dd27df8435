package queue

import (
	"fmt"

	"github.com/srtm-io/srtm/kernel/stamp"
)

// checkInvariants returns what is broken of the invariants that Topic and
// Channel state.
func (t *Topic) checkInvariants(now stamp.Mono) error {
	c := t.counters
	if c.Accepted != c.Released+c.Emptied+c.Lost+uint64(t.Waiting()) {
		return fmt.Errorf("accepted %d != released %d + emptied %d + waiting %d", c.Accepted, c.Released, c.Emptied, t.Waiting())
	}
	if t.waiting.len() > t.cfg.Capacity {
		return fmt.Errorf("%d wait, capacity %d", t.waiting.len(), t.cfg.Capacity)
	}
	for i := 1; t.limited && i < t.waiting.len(); i++ {
		if a, b := t.waiting.at(i-1), t.waiting.at(i); laterArrival(a, b) {
			return fmt.Errorf("%s of %d waits before %s of %d", a.ID, a.Arrival.At, b.ID, b.Arrival.At)
		}
	}
	if t.waiting.len() > 0 && t.open() && !now.Before(t.eligible(t.waiting.front())) {
		return fmt.Errorf("the head of the line is eligible at %d and still waits at %d", t.eligible(t.waiting.front()), now)
	}
	if err := t.line.checkInvariants(); err != nil {
		return fmt.Errorf("the topic's line: %w", err)
	}
	for _, ch := range t.channels {
		if err := ch.checkInvariants(); err != nil {
			return fmt.Errorf("channel %s: %w", ch.name, err)
		}
		if due := ch.Deadline(); due < t.ChannelDeadline() {
			return fmt.Errorf("channel %s is due at %d, the topic at %d", ch.name, due, t.ChannelDeadline())
		}
	}
	for m, n := range t.held() {
		if int(m.holders) < n {
			return fmt.Errorf("%s is in %d places and counts %d holders", m.ID, n, m.holders)
		}
	}
	return nil
}

// held returns in how many places each message is.
func (t *Topic) held() map[*Message]int {
	places := map[*Message]int{}
	lines := []*Line{&t.line}
	for i := range t.waiting.len() {
		places[t.waiting.at(i)]++
	}
	for _, c := range t.channels {
		lines = append(lines, &c.line)
		for i := range c.ready.len() {
			places[c.ready.at(i).msg]++
		}
		for _, it := range c.due {
			places[it.msg]++
		}
	}
	for _, l := range lines {
		for i := range l.overflow.len() {
			places[l.overflow.at(i)]++
		}
	}
	return places
}

func (c *Channel) checkInvariants() error {
	if err := c.line.checkInvariants(); err != nil {
		return err
	}
	n := c.counters
	if out := n.Finished + n.Emptied + n.Sampled + n.Dropped + n.Lost; n.Messages != out+uint64(c.Depth()) {
		return fmt.Errorf("%d messages != %d out + %d in", n.Messages, out, c.Depth())
	}
	held := map[*consumer]int{}
	deferred := 0
	for i, it := range c.due {
		if it.place != i {
			return fmt.Errorf("item %d thinks it is at %d", i, it.place)
		}
		if parent := (i - 1) / 2; c.due[parent].due > it.due {
			return fmt.Errorf("heap order broken at %d", i)
		}
		if it.holder == nil {
			if it.turn != 0 || it.handed {
				return fmt.Errorf("%s has no holder, and turn %d, handed %v", it.msg.ID, it.turn, it.handed)
			}
			deferred++
			continue
		}
		if it.turn == 0 {
			return fmt.Errorf("%s is held without a turn", it.msg.ID)
		}
		held[it.holder]++
		if c.inFlight.get(&it.msg.ID) != it {
			return fmt.Errorf("%s is held but not in flight", it.msg.ID)
		}
	}
	if deferred != c.deferred {
		return fmt.Errorf("%d deferred, counted %d", deferred, c.deferred)
	}
	if c.inFlight.n+deferred != len(c.due) {
		return fmt.Errorf("%d in flight + %d deferred != %d due", c.inFlight.n, deferred, len(c.due))
	}
	hungry := map[*consumer]int{}
	for d := range c.hungry {
		ring := &c.hungry[d]
		for i := range ring.n {
			w := ring.buf[(ring.head+i)&(len(ring.buf)-1)]
			hungry[w]++
			if w.distance != Distance(d) {
				return fmt.Errorf("consumer %d at distance %d is listed at %d", w.id, w.distance, d)
			}
		}
	}
	for d := range c.hungry {
		if n := c.hungry[d].len(); n > max(1, 2*(len(c.consumers)+1)) {
			return fmt.Errorf("%d are listed as hungry of %d consumers", n, len(c.consumers))
		}
	}
	for id, w := range c.consumers {
		n := 0
		for it := w.held; it != nil; it = it.next {
			if n++; it.holder != w || it.next != nil && it.next.prev != it {
				return fmt.Errorf("the list of what consumer %d holds is broken at %d", id, n)
			}
		}
		if n != w.inFlight {
			return fmt.Errorf("consumer %d counts %d, lists %d", id, w.inFlight, n)
		}
	}
	credit := false
	for id, w := range c.consumers {
		if w.inFlight != held[w] {
			return fmt.Errorf("consumer %d counts %d, holds %d", id, w.inFlight, held[w])
		}
		if want := btoi(w.hungry); hungry[w] != want {
			return fmt.Errorf("consumer %d is listed %d times, want %d", id, hungry[w], want)
		}
		if w.credit() && !w.hungry {
			return fmt.Errorf("consumer %d has credit and is not hungry", id)
		}
		credit = credit || w.credit()
	}
	if credit && !c.paused && c.ready.len() > 0 {
		return fmt.Errorf("%d messages are ready, a consumer has credit, and nothing is delivered", c.ready.len())
	}
	return nil
}

func (l *Line) checkInvariants() error {
	const batch = 3 // the largest that the tests put
	if n := l.taken + l.overflow.len(); l.stored < 0 || l.taken < 0 || n > max(l.limit, btoi(l.limit > 0)*batch) {
		return fmt.Errorf("stored %d, taken %d, overflow %d, limit %d", l.stored, l.taken, l.overflow.len(), l.limit)
	}
	if !l.through && l.stored+l.taken == 0 && l.overflow.len() > 0 && l.space() > 0 && !*l.tight {
		return fmt.Errorf("%d messages are to be written and %d of %d are in memory", l.overflow.len(), l.memory(), l.capacity)
	}
	return nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
