package queue

import (
	"fmt"

	"github.com/srtm-io/srtm/internal/mono"
)

// checkInvariants returns the broken invariants of Topic and Channel.
func (t *Topic) checkInvariants(now mono.Time) error {
	c := t.backlog.counters
	if c.Accepted != c.Released+c.Expired+c.Emptied+c.Lost+uint64(t.backlog.Waiting()) {
		return fmt.Errorf("accepted %d != released %d + expired %d + emptied %d + waiting %d", c.Accepted, c.Released, c.Expired, c.Emptied, t.backlog.Waiting())
	}
	if t.backlog.waiting.Len() > t.log.cfg.Capacity {
		return fmt.Errorf("%d wait, capacity %d", t.backlog.waiting.Len(), t.log.cfg.Capacity)
	}
	for i := 1; t.contract.limited && i < t.backlog.waiting.Len(); i++ {
		if a, b := t.backlog.waiting.At(i-1), t.backlog.waiting.At(i); laterArrival(a, b) {
			return fmt.Errorf("%s of %d waits before %s of %d", a.ID, a.Arrival, b.ID, b.Arrival)
		}
	}
	if t.backlog.waiting.Len() > 0 && t.open() && !t.contract.onHold && !now.Before(t.contract.eligible(t.backlog.waiting.Front().Arrival)) {
		return fmt.Errorf("the head of the backlog is eligible at %d and still waits at %d", t.contract.eligible(t.backlog.waiting.Front().Arrival), now)
	}
	if err := t.checkLog(); err != nil {
		return err
	}
	for _, ch := range t.cursors.channels {
		if err := ch.checkInvariants(); err != nil {
			return fmt.Errorf("channel %s: %w", ch.cursor.name, err)
		}
		if due := ch.Deadline(); due < t.ChannelDeadline() {
			return fmt.Errorf("channel %s is due at %d, the topic at %d", ch.cursor.name, due, t.ChannelDeadline())
		}
	}
	for m, n := range t.held() {
		if m.refs.holders() < n {
			return fmt.Errorf("%s is in %d places and counts %d refs", m.ID, n, m.refs.holders())
		}
	}
	return nil
}

// held returns in how many places each message is.
func (t *Topic) held() map[*Message]int {
	places := map[*Message]int{}
	for i := range t.backlog.waiting.Len() {
		places[t.backlog.waiting.At(i)]++
	}
	for _, c := range t.cursors.channels {
		for m := range c.items.ready.all {
			places[m]++
		}
		for _, it := range c.items.due {
			places[it.msg]++
		}
	}
	for o := t.log.tail.window.next; o < t.log.tail.window.end(); o++ {
		if m := t.log.tail.window.get(o); m != nil {
			places[m]++
		}
	}
	for i := range t.log.read.messages.Len() {
		places[t.log.read.messages.At(i)]++
	}
	return places
}

// checkLog returns the broken invariants of the cursors.
func (t *Topic) checkLog() error {
	if !t.log.logged() {
		if t.log.tail.window.slots.Len() > 0 || t.backlog.window.slots.Len() > 0 || t.backlog.behind {
			return fmt.Errorf("a topic without a disk has a tail")
		}
		return nil
	}
	if err := checkWindow("tail", &t.log.tail.window); err != nil {
		return err
	}
	if t.log.tail.window.end() > t.log.end || t.log.front > t.log.end {
		return fmt.Errorf("the tail ends at %d, the front is %d, and the end %d", t.log.tail.window.end(), t.log.front, t.log.end)
	}
	held, under := t.held(), 0
	for o := t.log.tail.window.next; o < t.log.tail.window.end(); o++ {
		m := t.log.tail.window.get(o)
		if m == nil {
			continue
		}
		if m.Offset != o || held[m] == 0 {
			return fmt.Errorf("at %d of the tail is the message of %d, in %d places", o, m.Offset, held[m])
		}
		if m.spilled() {
			under++
		}
	}
	if under != t.log.tail.underWay {
		return fmt.Errorf("%d on their way to disk, counted %d", under, t.log.tail.underWay)
	}
	const batch = 3 // the largest batch of the tests
	if n := t.log.tail.underWay; !t.log.cfg.WriteThrough && n > max(t.log.cfg.Overflow, batch)+len(t.cursors.channels) {
		return fmt.Errorf("%d on their way to disk, at most %d", n, t.log.cfg.Overflow)
	}

	r, size, behind := &t.log.read, 0, t.backlog.behind && t.log.read.has(t.backlog.window.end())
	for _, c := range t.cursors.channels {
		behind = behind || c.cursor.behind && r.has(c.cursor.window.end())
	}
	for i := range r.messages.Len() {
		m := r.messages.At(i)
		if size += m.Size(); !r.has(m.Offset) || i > 0 && m.Offset <= r.messages.At(i-1).Offset {
			return fmt.Errorf("%d is cached, of what was read from %d to %d", m.Offset, r.from, r.to)
		}
	}
	if size != r.bytes || r.to > t.log.tail.window.next || t.log.detour.messages.Len() > 0 || r.messages.Len() > 0 && !behind {
		return fmt.Errorf("the cache has %d bytes, counted %d, up to %d of %d, wanted: %v", size, r.bytes, r.to, t.log.tail.window.next, behind)
	}

	l := &t.backlog
	if err := checkWindow("backlog", &l.window); err != nil {
		return err
	}
	n := 0
	for i := range l.window.slots.Len() {
		if m := l.window.slots.At(i); m != nil && m != t.backlog.unread {
			n++
			if o := l.window.next + Offset(i); m.Offset != o {
				return fmt.Errorf("%d waits at %d", m.Offset, o)
			}
		}
	}
	if n != t.backlog.waiting.Len() {
		return fmt.Errorf("%d wait in the window, %d in memory", n, t.backlog.waiting.Len())
	}
	if l.late < 0 || l.late > 0 && !l.behind {
		return fmt.Errorf("the backlog is late by %d, behind %v", l.late, l.behind)
	}
	for _, c := range t.cursors.channels {
		if !c.cursor.tracked {
			continue
		}
		if err := checkWindow(c.cursor.name, &c.cursor.window); err != nil {
			return err
		}
		open := 0
		for i := range c.cursor.window.slots.Len() {
			m, o := c.cursor.window.slots.At(i), c.cursor.window.next+Offset(i)
			it, waits := c.items.index.of(m), l.window.get(o) != nil
			switch {
			case m == nil && waits && o < t.log.front:
				return fmt.Errorf("channel %s will not take %d, which waits", c.cursor.name, o)
			case m == nil:
			case t.backlog.isPending(m):
				if !waits {
					return fmt.Errorf("channel %s waits for %d, which does not come", c.cursor.name, o)
				}
			case t.backlog.isUnread(m):
				if open++; c.cursor.absentAt(o) == nil {
					return fmt.Errorf("channel %s does not read %d", c.cursor.name, o)
				}
			case m.Offset != o || it != nil && it.offset != o:
				return fmt.Errorf("channel %s has %d at %d", c.cursor.name, m.Offset, o)
			default:
				open++
			}
		}
		for o, it := range c.cursor.ahead {
			if o < c.cursor.window.end() {
				return fmt.Errorf("channel %s has reached %d and has it ahead", c.cursor.name, o)
			}
			if it != nil {
				open++
				if it.offset != o {
					return fmt.Errorf("channel %s has %d at %d", c.cursor.name, it.offset, o)
				}
			}
		}
		if n := c.items.ready.Len() + len(c.items.due) + c.cursor.absent.Len(); n != open {
			return fmt.Errorf("channel %s has %d messages and %d in its window", c.cursor.name, n, open)
		}
		if c.cursor.late < 0 || c.cursor.late > 0 && !c.cursor.behind || c.cursor.estimate && c.cursor.late == 0 {
			return fmt.Errorf("channel %s is late by %d, behind %v, estimated %v", c.cursor.name, c.cursor.late, c.cursor.behind, c.cursor.estimate)
		}
	}
	return nil
}

func checkWindow[T comparable](name string, w *window[T]) error {
	var none T
	if w.slots.Len() > 0 && w.slots.Front() == none {
		return fmt.Errorf("%s: the window begins with what is done", name)
	}
	return nil
}

func (c *Channel) checkInvariants() error {
	n := c.counters
	if out := n.Finished + n.Emptied + n.Sampled + n.Dropped + n.Lost + n.Expired + n.GivenUp + n.DeadLettered; n.Messages != out+uint64(c.Depth()) {
		return fmt.Errorf("%d messages != %d out + %d in", n.Messages, out, c.Depth())
	}
	burying := 0
	for _, it := range c.items.due {
		if it.holder == nil && it.delivery != 0 {
			burying++
		}
	}
	if burying != c.burying || burying > maxBurying {
		return fmt.Errorf("the owner has %d dead letters, counted %d", burying, c.burying)
	}
	held, err := c.items.check()
	if err == nil {
		err = c.consumers.check(held)
	}
	if err != nil {
		return err
	}
	credit := false
	for _, w := range c.consumers.byID {
		credit = credit || w.credit()
	}
	if credit && !c.paused && c.items.ready.Len() > 0 {
		return fmt.Errorf("%d messages are ready, a consumer has credit, and nothing is delivered", c.items.ready.Len())
	}
	if o := c.cursor.window.end(); credit && !c.paused && !c.stopped && c.cursor.behind && c.cursor.absent.Len() == 0 && o < c.cursor.log.front && c.cursor.log.hasRead(o) && c.space() > 0 {
		return fmt.Errorf("a consumer has credit, and %d is in memory and not taken", o)
	}
	return nil
}

// check returns how many items each consumer holds, or the broken invariant.
func (s *items) check() (held map[*consumer]int, err error) {
	held = map[*consumer]int{}
	if n := len(s.due) + s.ready.again.Len(); n != s.index.n {
		return nil, fmt.Errorf("%d items, %d in the index", n, s.index.n)
	}
	last := uint64(0)
	for i := range s.ready.again.Len() {
		it := s.ready.again.At(i)
		if s.index.of(it.msg) != it || it.holder != nil || it.place >= 0 {
			return nil, fmt.Errorf("%s is ready, and not in the index, held or due", it.msg.ID)
		}
		if it.behind < last || it.behind > s.ready.left+uint64(s.ready.fresh.Len()) {
			return nil, fmt.Errorf("%s is behind %d of %d messages", it.msg.ID, it.behind, s.ready.left+uint64(s.ready.fresh.Len()))
		}
		last = it.behind
	}
	for i := range s.ready.fresh.Len() {
		if m := s.ready.fresh.At(i); s.index.of(m) != nil {
			return nil, fmt.Errorf("%s is fresh and has an item", m.ID)
		}
	}
	n := 0
	for i, it := range s.due {
		if s.index.of(it.msg) != it {
			return nil, fmt.Errorf("%s is due and not in the index", it.msg.ID)
		}
		if int(it.place) != i {
			return nil, fmt.Errorf("item %d thinks it is at %d", i, it.place)
		}
		if parent := (i - 1) / 2; s.due[parent].due > it.due {
			return nil, fmt.Errorf("heap order broken at %d", i)
		}
		if it.holder == nil {
			if it.sent {
				return nil, fmt.Errorf("%s has no holder and is handed over", it.msg.ID)
			}
			continue
		}
		if it.delivery == 0 {
			return nil, fmt.Errorf("%s is held without a turn", it.msg.ID)
		}
		n++
		held[it.holder]++
		if s.index.get(&it.msg.ID, it.holder.id) == nil {
			return nil, fmt.Errorf("%s is held but not in flight", it.msg.ID)
		}
	}
	if n != s.inFlight {
		return nil, fmt.Errorf("%d are held, %d in flight", n, s.inFlight)
	}
	return held, nil
}

// check returns the broken invariant if each consumer holds so many items.
func (cs *Consumers) check(held map[*consumer]int) error {
	listed := map[*consumer]int{}
	for d := range cs.credited {
		ring := &cs.credited[d]
		for i := range ring.Len() {
			w := ring.At(i)
			listed[w]++
			if w.distance != Distance(d) {
				return fmt.Errorf("consumer %d at distance %d is listed at %d", w.id, w.distance, d)
			}
		}
		if n := ring.Len(); n > 2*(len(cs.byID)+1) {
			return fmt.Errorf("%d are listed of %d consumers", n, len(cs.byID))
		}
	}
	for id, w := range cs.byID {
		n := 0
		for it := w.held; it != nil; it = it.next {
			if n++; it.holder != w || it.next != nil && it.next.prev != it {
				return fmt.Errorf("the list of what consumer %d holds is broken at %d", id, n)
			}
		}
		if n != w.inFlight || n != held[w] {
			return fmt.Errorf("consumer %d counts %d, lists %d, holds %d", id, w.inFlight, n, held[w])
		}
		if want := btoi(w.listed); listed[w] != want {
			return fmt.Errorf("consumer %d is listed %d times, want %d", id, listed[w], want)
		}
		if w.credit() && !w.listed {
			return fmt.Errorf("consumer %d has credit and is not listed", id)
		}
	}
	return nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
